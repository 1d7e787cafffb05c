"""Two bits per parameter: a code for a long vector that is sent once.

Random signs, the same for all clients, and a Hadamard transform spread the content of a block of
256 numbers over all of them, so that they look like draws from a normal distribution (Suresh, Yu,
Kumar and McMahan 2017). Each becomes one of the four levels that are optimal for a normal
distribution and lose 12 % of its square (Max 1960; Lloyd 1982).
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..scale.numerics import inner, product
from ..scale.stretches import STRETCH, float_type, over_stretches
from ..streams import stream
from ..types import FloatArray, Floats, Params

BLOCK = 256
_SIDE = 16
#: In root mean squares of a block.
# Max 1960, four levels: mean squared error 0.1175.
_UNIT = 0.0016
# Whole units, so that sums of 256 of them are exact in float32, whatever their order.
_LEVELS = np.array([-944, -283, 283, 944], np.float32)
_BOUNDS = (-0.9816, 0.0, 0.9816)
#: The norm of what is decoded is at most so many times that of what was encoded.
_LONGEST = 1.5104
#: The share of a vector's square that what is decoded has, on average.
KEPT = 0.8825
#: Levels in one number of a code: 52 bits, which a float64 holds exactly.
_EACH = 26
_NUMBERS = -(-BLOCK // _EACH)
_BITS = 2 * _EACH
#: The largest such number.
_LARGEST = 2.0**_BITS - 1
#: Two numbers have 13 whole bytes.
_BYTES = 2 * _BITS // 8
#: Bytes of a block where numbers are packed: five pairs, to whole numbers of 64 bits.
_ROW = 72
#: Levels that are unpacked at once.
_AT_ONCE = 2**16
#: The length of a block's code: its root mean square, then its levels.
_LENGTH = 1 + _NUMBERS


#: Codes of clients, a tuple of rows or an array.
Codes = Any
Levels = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def code_length(num_params: int) -> int:
    """Length of the code of a vector: 11 numbers for each 256, 2.75 bits per parameter."""
    return _LENGTH * -(-num_params // BLOCK)


def encode(vector_nd: Floats) -> FloatArray:
    """The code of a vector, float64 (code_length(d),), or of each row; not finite in part if the
    vector is not finite.
    """
    *rows, d = vector_nd.shape
    code_nc = np.empty((*rows, code_length(d)))

    def look(part: slice) -> None:
        cut = code_part(part, d)
        part_nb = vector_nd[..., part].astype(float_type(d), copy=False)
        code_nc[..., cut] = encode_part(part_nb).code_nc

    over_stretches(look, d, prod(rows), alone=True)
    return code_nc


class Encoded(NamedTuple):
    """The root mean squares of blocks, (..., blocks), and their levels, 0 to 3, four in a byte,
    uint8 (..., blocks, 64).
    """

    scale_nb: FloatArray
    byte_nbk: Levels

    @property
    def code_nc(self) -> FloatArray:
        """The codes."""
        *rows, blocks = self.scale_nb.shape
        code_nbl = np.empty((*rows, blocks, _LENGTH))
        code_nbl[..., 0] = self.scale_nb
        code_nbl[..., 1:] = _packed(self.byte_nbk)
        return code_nbl.reshape(*rows, blocks * _LENGTH)

    @property
    def largest_n(self) -> FloatArray:
        """A bound of the entries of what is decoded: no entry is larger than a block's norm."""
        return np.asarray(self.scale_nb.max(axis=-1, initial=0) * _LONGEST * BLOCK**0.5)

    def weighted_sum(self, weight_n: FloatArray, num_params: int) -> FloatArray:
        """sum_i w_i v_i of what is decoded, (num_params,): rotated once, not each of them."""
        dtype = self.scale_nb.dtype
        scaled_nb = weight_n[:, None] * self.scale_nb
        weight_bn = (scaled_nb.T * _UNIT / _SIDE).astype(dtype)
        level_nbk4 = np.take(_table().astype(dtype), self.byte_nbk, axis=0)
        level_bnk = level_nbk4.reshape(*self.scale_nb.shape, BLOCK).swapaxes(0, 1)
        # One row of weights by the levels, in each block.
        sum_b1k = weight_bn[:, None] @ level_bnk
        sum_bk = _rotated(sum_b1k[:, 0]) * _signs().astype(dtype)
        # The last block was filled up.
        return np.asarray(sum_bk.reshape(-1)[:num_params])


def encode_part(vector_nd: Floats) -> Encoded:
    """The codes of a stretch of vectors that begins with a block."""
    *rows, d = vector_nd.shape
    blocks = -(-d // BLOCK)
    padded_nd: Any = vector_nd
    # Zeros fill the last block up: its norm stays the same.
    if d < blocks * BLOCK:
        padded_nd = np.zeros((*rows, blocks * BLOCK), vector_nd.dtype)
        padded_nd[..., :d] = vector_nd
    block_nbk = padded_nd.reshape(*rows, blocks, BLOCK)
    # A rotation changes no norm. This one does not overflow, as squares of float32 might.
    scale_nb = np.sqrt(inner(block_nbk, block_nbk) / BLOCK).astype(vector_nd.dtype)
    sign_d = np.tile(_signs().astype(np.float32), blocks)
    signed_nbk = np.multiply(padded_nd.reshape(*rows, -1), sign_d, dtype=np.float32)
    unit_nbk = _rotated(signed_nbk.reshape(block_nbk.shape))
    # The transform over 16 keeps norms, so that entries are in root mean squares. A block of zeros
    # has none to divide by.
    share_nb = np.divide(
        1 / _SIDE,
        scale_nb,
        out=np.zeros_like(scale_nb),
        where=scale_nb > 0,
    )
    unit_nbk *= share_nb.astype(np.float32)[..., None]
    # As many bounds as lie below an entry, so high is its level.
    level_nbk = np.zeros(unit_nbk.shape, np.uint8)
    for bound in _BOUNDS:
        level_nbk += (unit_nbk > np.float32(bound)).view(np.uint8)
    # Four levels in the lowest bits of four bytes meet in the highest byte.
    gather = np.uint32(2**24 + 2**18 + 2**12 + 2**6)
    four_nbk = level_nbk.view("<u4") * gather
    return Encoded(scale_nb, (four_nbk >> np.uint32(24)).astype(np.uint8))


def decode(code_nc: FloatArray, num_params: int) -> FloatArray:
    """The vectors, float64 (n, d), of codes, which may be any finite numbers, because clients
    send them.
    """
    vector_nd = np.empty((len(code_nc), num_params))

    def look(part: slice) -> None:
        cut = code_part(part, num_params)
        vector_nd[:, part] = decode_part(code_nc[:, cut], part, num_params)

    over_stretches(look, num_params, len(code_nc), alone=True)
    return vector_nd


def code_part(part: slice, num_params: int) -> slice:
    """Where the codes of the blocks are that a stretch of a vector needs."""
    first, last, _ = part.indices(num_params)
    return slice(code_length(first - first % BLOCK), code_length(last))


def decode_part(
    code_nc: FloatArray,
    part: slice,
    num_params: int,
    dtype: npt.DTypeLike = np.float64,
) -> FloatArray:
    """A stretch of vectors, (n, b), given its ``code_part`` of their codes.

    In float64 what a client made up as a scale does not overflow.
    """
    first, last, _ = part.indices(num_params)
    level_nbk, scale_nb1 = levels(code_nc)
    n, blocks, _ = level_nbk.shape
    rotated_nk = _rotated(level_nbk).reshape(n, blocks * BLOCK)
    # Along whole rows: NumPy is slow at many short ones.
    rotated_nk *= np.tile(_signs().astype(np.float32), blocks)
    vector_nbk = rotated_nk.reshape(level_nbk.shape).astype(dtype, copy=False)
    vector_nbk *= (scale_nb1 * (_UNIT / _SIDE)).astype(dtype)
    vector_nd: FloatArray = vector_nbk.reshape(n, blocks * BLOCK)
    before = first % BLOCK
    return vector_nd[:, before : before + last - first]


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
        block_qbk = sum_qk.reshape(len(sum_qk), -1, BLOCK)
        sum_qbk = _rotated(block_qbk) * _signs()
        width = len(sum_qd[0, part])
        sum_qd[:, part] = sum_qbk.reshape(len(sum_qk), -1)[:, :width]

    over_stretches(look, num_params)
    return sum_qd


def levels(code_nc: FloatArray) -> tuple[Params, FloatArray]:
    """The levels in codes, float32 (n, blocks, 256), and the scales of blocks, (n, blocks, 1)."""
    n, length = code_nc.shape
    blocks = length // _LENGTH
    # Blocks last: passes over ten numbers each would take NumPy longer than the arithmetic.
    code_lx = np.ascontiguousarray(code_nc.reshape(n * blocks, _LENGTH).T)
    # Clients may send anything: what is no 52-bit number becomes the nearest one.
    number_kx = np.clip(code_lx[1:], 0, _LARGEST).astype(np.uint64)
    # A byte holds four levels.
    level_xk4 = np.take(_table(), _unpacked(number_kx), axis=0)
    # No honest root mean square is negative; the sign of a made-up one would turn the block around.
    scale_x = np.abs(code_lx[0])
    return level_xk4.reshape(n, blocks, BLOCK), scale_x.reshape(n, blocks, 1)


def tame(code_nc: FloatArray) -> None:
    """Replace, in place, numbers that no levels have by those as which they are read."""
    number_nbl = code_nc.reshape(len(code_nc), -1, _LENGTH)[..., 1:]
    np.clip(number_nbl, 0, _LARGEST, out=number_nbl)


def _packed(byte_nbk: Levels) -> Words:
    """52-bit numbers of the levels of blocks, (..., 10): the first level in the lowest bits."""
    byte_xk = np.zeros((byte_nbk.size // (BLOCK // 4), _ROW), np.uint8)
    byte_xk[:, : BLOCK // 4] = byte_nbk.reshape(len(byte_xk), -1)
    number_kx = np.empty((_NUMBERS, len(byte_xk)), np.uint64)
    for pair in range(0, _NUMBERS, 2):
        low_x, high_x = _both(byte_xk, pair)
        number_kx[pair] = low_x % 2**_BITS
        number_kx[pair + 1] = high_x >> (64 - _BITS)
    return number_kx.T.reshape(*byte_nbk.shape[:-1], _NUMBERS)


def _unpacked(number_kx: Words) -> Levels:
    """The bytes (x, 64) of the numbers (10, x) of blocks, four levels each."""
    byte_xk = np.zeros((number_kx.shape[1], _ROW), np.uint8)
    for pair in range(0, _NUMBERS, 2):
        low_x, high_x = _both(byte_xk, pair)
        odd_x = number_kx[pair + 1]
        # The higher one first: its lowest bits are not its own.
        high_x[:] = odd_x << (64 - _BITS)
        low_x[:] = number_kx[pair] | odd_x << _BITS
    return byte_xk[:, : BLOCK // 4]


def _both(byte_xk: Levels, pair: int) -> list[Words]:
    """The first and the last eight of the 13 bytes that two numbers of each block share, as
    numbers in place.
    """
    first = pair // 2 * _BYTES
    starts = (first, first + _BYTES - 8)
    return [byte_xk[:, start : start + 8].view("<u8")[:, 0] for start in starts]


def coded(update_kd: Params) -> Params:
    """Updates, float32 (k, d), as the server reads them if clients send their codes."""
    return read_codes(encode(update_kd), update_kd.shape[1])


def read_codes(code_kc: FloatArray, num_params: int) -> Params:
    """The updates, float32 (k, d), that codes stand for, as long on average as those coded."""
    return np.asarray(decode(code_kc, num_params) / KEPT, np.float32)


def norms(code_nc: Codes) -> FloatArray:
    """The norms, float64 (n,), of vectors before encoding; decoded vectors have at most 1.51
    times that.
    """
    scale_nb = np.array([code_c[::_LENGTH] for code_c in code_nc])
    mean_square_n = (scale_nb**2).sum(axis=1)
    return np.asarray(np.sqrt(BLOCK * mean_square_n))


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
    byte_b1 = np.arange(256)[:, None]
    # The first level is in the lowest bits, see ``_packed``.
    level_b4 = byte_b1 >> np.array([0, 2, 4, 6]) & 3
    return np.asarray(_LEVELS[level_b4])


@cache
def _hadamard() -> FloatArray:
    """The Hadamard matrix of size 16, of 1 and -1."""
    hadamard = np.ones((1, 1))
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return hadamard


def _rotated(block_nbk: Floats) -> Any:
    """The Hadamard transform of every block, which is its own inverse but for a factor of 256, as
    two of length 16.
    """
    # 256 = 16 x 16: 32 multiplications for each number in place of 256.
    square_brc = block_nbk.reshape(-1, _SIDE, _SIDE)
    hadamard = _hadamard().astype(block_nbk.dtype)
    # Block by block: BLAS gives one large product to several threads, which wait for each other.
    along_rows_brc = square_brc @ hadamard
    return (hadamard @ along_rows_brc).reshape(block_nbk.shape)
