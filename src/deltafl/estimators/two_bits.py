"""Two bits per parameter: a code for a long vector that is sent once.

Random signs, the same for all clients, and a Hadamard transform spread the content of a block of
256 numbers over all of them, so that they look like draws from a normal distribution (Suresh, Yu,
Kumar and McMahan 2017). Each becomes one of the four levels that are optimal for a normal
distribution and lose 12 % of its square (Max 1960; Lloyd 1982).
"""

from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..scale.numerics import inner, product
from ..scale.stretches import STRETCH, over_stretches
from ..streams import stream
from ..types import FloatArray, Params

BLOCK = 256
_SIDE = 16
#: In root mean squares of a block.
# Max 1960, four levels: mean squared error 0.1175.
_UNIT = 0.0016
# Whole units, so that sums of 256 of them are exact in float32, whatever their order.
_LEVELS = np.array([-944, -283, 283, 944], np.float32)
_BOUNDS = (-0.9816, 0.0, 0.9816)
#: The share of a vector's square that what is decoded has, on average.
KEPT = 0.8825
#: Levels in one number of a code: 52 bits, which a float64 holds exactly.
_EACH = 26
_NUMBERS = -(-BLOCK // _EACH)
_BITS = 2 * _EACH
#: Two numbers have 13 whole bytes.
_BYTES = 2 * _BITS // 8
#: Levels that are unpacked at once.
_AT_ONCE = 2**16
#: The length of a block's code: its root mean square, then its levels.
_LENGTH = 1 + _NUMBERS


#: Codes of clients, a tuple of rows or an array.
Codes = Any


def code_length(num_params: int) -> int:
    """Length of the code of a vector: 11 numbers for each 256, 2.75 bits per parameter."""
    return _LENGTH * -(-num_params // BLOCK)


def encode(vector_nd: npt.NDArray[np.floating]) -> FloatArray:
    """The code of a vector, float64 (code_length(d),), or of each row; not finite in part if the
    vector is not finite.
    """
    *rows, d = vector_nd.shape
    code_nc = np.empty((*rows, code_length(d)))

    def look(part: slice) -> None:
        cut = code_part(part, d)
        code_nc[..., cut] = _encoded(vector_nd[..., part])

    over_stretches(look, d, prod(rows))
    return code_nc


def _encoded(vector_nd: npt.NDArray[np.floating]) -> FloatArray:
    *rows, d = vector_nd.shape
    blocks = -(-d // BLOCK)
    padded_nd: Any = vector_nd
    if d < blocks * BLOCK:
        padded_nd = np.zeros((*rows, blocks * BLOCK))
        padded_nd[..., :d] = vector_nd
    block_nbk = padded_nd.reshape(*rows, blocks, BLOCK) * _signs()
    block_nbk = _rotated(block_nbk, _hadamard() / _SIDE**0.5)
    scale_nb = np.sqrt(inner(block_nbk, block_nbk) / BLOCK)
    # As many bounds as lie below an entry, so high is its level.
    level_nbk = np.zeros(block_nbk.shape, np.uint8)
    for bound in _BOUNDS:
        level_nbk += block_nbk > bound * scale_nb[..., None]
    code_nbl = np.empty((*scale_nb.shape, _LENGTH))
    code_nbl[..., 0] = scale_nb
    code_nbl[..., 1:] = _packed(level_nbk)
    return code_nbl.reshape(*rows, code_length(d))


def decode(code_nc: FloatArray, num_params: int) -> FloatArray:
    """The vectors, float64 (n, d), of codes, which may be any finite numbers, because clients
    send them.
    """
    vector_nd = np.empty((len(code_nc), num_params))

    def look(part: slice) -> None:
        cut = code_part(part, num_params)
        vector_nd[:, part] = decode_part(code_nc[:, cut], part, num_params)

    over_stretches(look, num_params, len(code_nc))
    return vector_nd


def code_part(part: slice, num_params: int) -> slice:
    """Where the codes of the blocks are that a stretch of a vector needs."""
    first, last, _ = part.indices(num_params)
    return slice(code_length(first - first % BLOCK), code_length(last))


def decode_part(code_nc: FloatArray, part: slice, num_params: int) -> FloatArray:
    """A stretch of vectors, float64 (n, b), given its ``code_part`` of their codes."""
    first, last, _ = part.indices(num_params)
    level_nbk, scale_nb1 = levels(code_nc)
    rotated_nbk = _rotated(level_nbk, _hadamard())
    rotated_nbk *= _signs().astype(np.float32)
    vector_nbk = rotated_nbk * (scale_nb1 * _UNIT / _SIDE)
    before = first % BLOCK
    blocks = vector_nbk.shape[1]
    return vector_nbk.reshape(-1, blocks * BLOCK)[:, before : before + last - first]


def sum_decoded(weight_qn: FloatArray, code_nc: Codes, num_params: int) -> FloatArray:
    """sum_i w_i v_i of the vectors v_i of codes, float64 (q, d), for each row of weights.

    In less time and memory than all vectors take: the sum is rotated, not each of them.
    """
    sum_qd = np.empty((len(weight_qn), num_params))
    step = max(_AT_ONCE // STRETCH, 1)

    def look(part: slice) -> None:
        cut = code_part(part, num_params)
        sum_qk: Any = 0.0
        for first in range(0, len(code_nc), step):
            codes = [code_c[cut] for code_c in code_nc[first : first + step]]
            level_nbk, scale_nb1 = levels(np.array(codes))
            scaled_nbk = level_nbk * (scale_nb1 * _UNIT / _SIDE)
            weight_qs = np.ascontiguousarray(weight_qn[:, first : first + step])
            sum_qk = sum_qk + product(weight_qs, scaled_nbk.reshape(len(scaled_nbk), -1))
        sum_qbk = _rotated(sum_qk.reshape(len(sum_qk), -1, BLOCK), _hadamard()) * _signs()
        width = len(sum_qd[0, part])
        sum_qd[:, part] = sum_qbk.reshape(len(sum_qk), -1)[:, :width]

    over_stretches(look, num_params)
    return sum_qd


def levels(code_nc: FloatArray) -> tuple[Params, FloatArray]:
    """The levels in codes, float32 (n, blocks, 256), and the scales of blocks, (n, blocks, 1)."""
    n, length = code_nc.shape
    code_nbl = code_nc.reshape(n, length // _LENGTH, _LENGTH)
    # Clients may send anything: what is no 52-bit number becomes the nearest one.
    number_nbk = np.clip(code_nbl[..., 1:], 0, 2.0**_BITS - 1).astype(np.uint64)
    # No honest root mean square is negative; the sign of a made-up one would turn the block around.
    return _unpacked(number_nbk), np.abs(code_nbl[..., :1])


def _packed(level_nbk: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """52-bit numbers of the levels of blocks, (..., 10): the first level in the lowest bits."""
    # Four levels in the lowest bits of four bytes meet in the highest byte.
    four_nbk = level_nbk.view("<u4") * np.uint32(2**24 + 2**18 + 2**12 + 2**6)
    pair_nbpy = np.zeros((*level_nbk.shape[:-1], _NUMBERS // 2, 16), np.uint8)
    byte_nbk = np.zeros((*level_nbk.shape[:-1], _NUMBERS // 2 * _BYTES), np.uint8)
    byte_nbk[..., : BLOCK // 4] = four_nbk >> np.uint32(24)
    pair_nbpy[..., :_BYTES] = byte_nbk.reshape(*pair_nbpy.shape[:-1], _BYTES)
    low, high = np.moveaxis(pair_nbpy.view("<u8"), -1, 0)
    number_nbp2 = np.stack([low % 2**_BITS, low >> _BITS | high << (64 - _BITS)], axis=-1)
    return number_nbp2.reshape(*level_nbk.shape[:-1], _NUMBERS)


def _unpacked(number_nbk: npt.NDArray[np.uint64]) -> Params:
    """The levels, float32 (..., 256), of the numbers of blocks."""
    even, odd = number_nbk[..., ::2], number_nbk[..., 1::2]
    # Two numbers one behind the other, from the lowest bit on.
    pair_nbp2 = np.stack([even | odd << _BITS, odd >> (64 - _BITS)], axis=-1).astype("<u8")
    bytes_nbp13 = pair_nbp2.view(np.uint8)[..., :_BYTES]
    byte_nbk = bytes_nbp13.reshape(*number_nbk.shape[:-1], _NUMBERS // 2 * _BYTES)
    # A byte holds four levels.
    level_nbk4 = np.take(_table(), byte_nbk[..., : BLOCK // 4], axis=0)
    return level_nbk4.reshape(*number_nbk.shape[:-1], BLOCK)


def coded(update_kd: Params) -> Params:
    """Updates, float32 (k, d), as the server reads them if clients send their codes."""
    return np.asarray(decode(encode(update_kd), update_kd.shape[1]) / KEPT, np.float32)


def read_code(code_c: FloatArray, num_params: int) -> Params:
    """The update, float32 (d,), that a code stands for, as long on average as the one coded."""
    read_d = decode(code_c[None], num_params)[0] / KEPT
    return np.asarray(read_d, np.float32)


def norms(code_nc: Codes) -> FloatArray:
    """The norms, float64 (n,), of vectors before encoding; decoded vectors have at most 1.51
    times that.
    """
    scale_nb = np.array([code_c[::_LENGTH] for code_c in code_nc])
    return np.asarray(np.sqrt(BLOCK * (scale_nb**2).sum(axis=1)))


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
def _table() -> Params:
    """The four levels in each byte, (256, 4)."""
    return np.asarray(_LEVELS[np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3])


@cache
def _hadamard() -> FloatArray:
    """The Hadamard matrix of size 16, of 1 and -1."""
    hadamard = np.ones((1, 1))
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.asarray(hadamard)


def _rotated(block_nbk: npt.NDArray[np.floating], hadamard: FloatArray) -> npt.NDArray[np.floating]:
    """The Hadamard transform of every block, which is its own inverse but for a factor, as two of
    length 16.
    """
    # 256 = 16 x 16: 32 multiplications for each number in place of 256.
    square_brc = block_nbk.reshape(-1, _SIDE, _SIDE)
    hadamard = hadamard.astype(block_nbk.dtype)
    # Block by block: BLAS gives one large product to several threads, which wait for each other.
    return np.asarray((hadamard @ (square_brc @ hadamard)).reshape(block_nbk.shape))
