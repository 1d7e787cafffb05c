"""Count-sketches: a few numbers that represent a long vector and preserve inner products on
average.

A sketch of size q gives every coordinate one of q buckets and a sign, both at random but the same
for all vectors of a run, and adds up each bucket: E s(u).s(v) = u.v with standard deviation of at
most sqrt(2 / q) norm(u) norm(v), and s is linear (Charikar, Chen and Farach-Colton, ICALP 2002).
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..errors import DeltaflError
from ..streams import stream
from ..types import FloatArray, Floats, IntArray, Params

_BLOCK = 2**16  # coordinates whose buckets are in memory at once
_LARGEST = 128  # buckets and signs together fit a byte
#: Coordinates that are folded into one, and how far they are apart: NumPy is slow at short rows.
FOLDED = 8
_APART = 128


def count_sketch(
    vector_nd: Floats,
    size: int,
    seed: int,
    start: int = 0,
) -> FloatArray:
    """Sketches, float64 (n, size), of n vectors, in O(n d) time and O(block) memory beside them.

    Args:
        vector_nd: (n, d), any float type.
        size: q, from 1 to 128; another is a ``DeltaflError``.
        seed: Fixes buckets and signs: the seed of the run, the same on server and clients.
        start: Which coordinate is the first of these: sketches of stretches add up.
    """
    if not 1 <= size <= _LARGEST:
        raise DeltaflError(f"a sketch cannot have {size} numbers; choose 1 to {_LARGEST}")
    n, d = vector_nd.shape
    signed_nq = np.zeros((n, 2 * size))
    for block, within, part in _blocks(start, d):
        code_b = _codes(seed, size, block)[within]
        block_nq = np.zeros_like(signed_nq)
        for i, part_b in enumerate(vector_nd[:, part]):
            # One after the other, in float64 whatever the type of the vectors.
            np.add.at(block_nq[i], code_b, part_b.astype(np.float64, copy=False))
        signed_nq += block_nq
    return signed_nq[:, :size] - signed_nq[:, size:]


def folded(vector_nd: Floats, seed: int, start: int = 0) -> Floats:
    """An eighth as many numbers, (n, d / 8), with E f(u).f(v) = u.v; ``start``, where stretches
    begin, is a multiple of 1024.

    The standard deviation is at most sqrt(2) norm(u) norm(v), if all the content is in the same
    eight coordinates, and sqrt(2 / k) of the norms if it is spread over k such groups.
    """
    n, d = vector_nd.shape
    square = (FOLDED, _APART)
    padding = -d % (FOLDED * _APART)
    # Only the end of a vector is no multiple of 1024.
    if padding:
        vector_nd = np.pad(vector_nd, ((0, 0), (0, padding)))
    folded_nk = np.empty((n, (d + padding) // FOLDED), vector_nd.dtype)
    for block, within, part in _blocks(start, d + padding):
        sign_b = _signs(seed, block)[within]
        np.einsum(
            "ngsb,gsb->ngb",
            vector_nd[:, part].reshape(n, -1, *square),
            sign_b.astype(vector_nd.dtype, copy=False).reshape(-1, *square),
            out=folded_nk[:, part.start // FOLDED : part.stop // FOLDED].reshape(n, -1, _APART),
        )
    return folded_nk


def _blocks(start: int, length: int) -> Iterator[tuple[int, slice, slice]]:
    """The blocks of a stretch that begins at ``start``: their numbers, and the place of what they
    share with it, in the block and in the stretch.
    """
    first = start
    while first < start + length:
        block, place = divmod(first, _BLOCK)
        size = min(_BLOCK - place, start + length - first)
        yield block, slice(place, place + size), slice(first - start, first - start + size)
        first += size


# A round reads a block several times, and a small model's in every round.
@lru_cache(maxsize=8)
def _signs(seed: int, block: int) -> Params:
    """1 or -1 for each coordinate of a block."""
    bits = np.frombuffer(stream(seed, "sketch", 1, block).bytes(_BLOCK // 8), np.uint8)
    return 1 - 2 * np.unpackbits(bits).astype(np.float32)


@lru_cache(maxsize=8)
def _codes(seed: int, size: int, block: int) -> IntArray:
    """A number for bucket and sign together of each coordinate of a block."""
    # Each block has a stream of its own, so that none needs the numbers of those before it.
    return stream(seed, "sketch", 0, block).integers(0, 2 * size, size=_BLOCK)
