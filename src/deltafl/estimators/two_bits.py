"""Two bits per parameter: a code for a long vector that is sent once.

Random signs, the same for all clients, and a Hadamard transform spread the content of a block of
256 numbers over all of them, so that they look like draws from a normal distribution (Suresh, Yu,
Kumar and McMahan 2017). Each becomes one of the four levels that are optimal for a normal
distribution and lose 12 % of its square (Max 1960; Lloyd 1982).
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from ..streams import stream
from ..types import FloatArray, Params

BLOCK = 256
_SIDE = 16
#: In root mean squares of a block.
# Max 1960, four levels: mean squared error 0.1175.
_LEVELS = np.array([-1.5104, -0.4528, 0.4528, 1.5104])
_BOUNDS = np.array([-0.9816, 0.0, 0.9816])
#: The share of a vector's square that what is decoded has, on average.
KEPT = 0.8825
#: Levels in one number of a code: 52 bits, which a float64 holds exactly.
_EACH = 26
_NUMBERS = -(-BLOCK // _EACH)
_SHIFTS = 2 * np.arange(_EACH)
#: The length of a block's code: its root mean square, then its levels.
_LENGTH = 1 + _NUMBERS


def code_length(num_params: int) -> int:
    """Length of the code of a vector: 11 numbers for each 256, 2.75 bits per parameter."""
    return _LENGTH * -(-num_params // BLOCK)


def encode(vector_d: npt.NDArray[np.floating]) -> FloatArray:
    """The code of a vector, float64 (code_length(d),); not finite in part if the vector is not
    finite.
    """
    d = len(vector_d)
    block_bk = np.zeros((-(-d // BLOCK), BLOCK))
    block_bk.ravel()[:d] = vector_d
    block_bk = _rotated(block_bk * _signs())
    scale_b = np.sqrt(np.mean(block_bk**2, axis=1))
    level_bk = np.zeros((len(block_bk), _NUMBERS * _EACH), np.int64)
    # As many bounds as lie below an entry, so high is its level.
    level_bk[:, :BLOCK] = sum(block_bk > bound * scale_b[:, None] for bound in _BOUNDS)
    packed_bn = (level_bk.reshape(-1, _NUMBERS, _EACH) << _SHIFTS).sum(axis=2)
    return np.column_stack([scale_b, packed_bn]).ravel()


def decode(code_nc: FloatArray, num_params: int) -> FloatArray:
    """The vectors, float64 (n, d), of codes, which may be any finite numbers, because clients
    send them.
    """
    n = len(code_nc)
    blocks = code_nc.shape[1] // _LENGTH
    code_nbl = code_nc.reshape(n, blocks, _LENGTH)
    # Clients may send anything: what is no 52-bit number becomes the nearest one.
    packed_nbn = np.clip(code_nbl[:, :, 1:], 0, 2.0**52 - 1).astype(np.int64)
    level_nbk = (packed_nbn[..., None] >> _SHIFTS) & 3
    level_nbk = level_nbk.reshape(n, blocks, _NUMBERS * _EACH)
    # The last number of a block has room for more levels than the block has entries.
    block_nbk = _LEVELS[level_nbk[:, :, :BLOCK]]
    # No honest root mean square is negative; the sign of a made-up one would turn the block around.
    scale_nb1 = np.abs(code_nbl[:, :, :1])
    block_nbk *= scale_nb1
    vector_nbk = _rotated(block_nbk.reshape(-1, BLOCK)) * _signs()
    return np.asarray(vector_nbk.reshape(n, BLOCK * blocks)[:, :num_params])


def coded(update_kd: Params) -> Params:
    """Updates, float32 (k, d), as the server reads them if clients send their codes."""
    read = [read_code(encode(update_d), len(update_d)) for update_d in update_kd]
    return np.array(read, np.float32).reshape(update_kd.shape)


def read_code(code_c: FloatArray, num_params: int) -> Params:
    """The update, float32 (d,), that a code stands for, as long on average as the one coded."""
    read_d = decode(code_c[None], num_params)[0] / KEPT
    return np.asarray(read_d, np.float32)


def norms(code_nc: FloatArray) -> FloatArray:
    """The norms, float64 (n,), of vectors before encoding; decoded vectors have at most 1.51
    times that.
    """
    return np.asarray(np.sqrt(BLOCK * (code_nc[:, ::_LENGTH] ** 2).sum(axis=1)))


def scaled(code_nc: FloatArray, factor_n: FloatArray) -> FloatArray:
    """The codes of the vectors times factors >= 0."""
    code_nc = code_nc.copy()
    code_nc[:, ::_LENGTH] *= factor_n[:, None]
    return code_nc


@cache
def _signs() -> FloatArray:
    # A fixed seed: server and clients need to agree on nothing.
    return stream(0, "code").choice([-1.0, 1.0], size=BLOCK)


@cache
def _hadamard() -> FloatArray:
    """The orthonormal Hadamard matrix of size 16."""
    hadamard = np.ones((1, 1)) / np.sqrt(_SIDE)
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.asarray(hadamard)


def _rotated(block_bk: FloatArray) -> FloatArray:
    """The orthonormal Hadamard transform of every row, which is its own inverse, as two of
    length 16.
    """
    hadamard = _hadamard()
    # 256 = 16 x 16: 32 multiplications for each number in place of 256.
    square_brc = (block_bk.reshape(-1, _SIDE) @ hadamard).reshape(-1, _SIDE, _SIDE)
    square_bcr = np.ascontiguousarray(square_brc.swapaxes(1, 2))
    turned_bcr = (square_bcr.reshape(-1, _SIDE) @ hadamard).reshape(-1, _SIDE, _SIDE)
    return np.asarray(turned_bcr.swapaxes(1, 2).reshape(block_bk.shape))
