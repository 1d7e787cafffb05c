"""Count-sketches: a few numbers that represent a long vector and preserve inner products on
average.

A sketch of size q gives every coordinate one of q buckets and a sign, both at random but the same
for all vectors of a run, and adds up each bucket: E s(u).s(v) = u.v with standard deviation of at
most sqrt(2 / q) norm(u) norm(v), and s is linear (Charikar, Chen and Farach-Colton, ICALP 2002).
"""

from functools import lru_cache

import numpy as np

from ..errors import DeltaflError
from ..streams import stream
from ..types import FloatArray, Floats, IntArray

_BLOCK = 2**16  # coordinates whose buckets are in memory at once
_LARGEST = 128  # buckets and signs together fit a byte


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
    first = start
    while first < start + d:
        block, place = divmod(first, _BLOCK)
        code_b = _codes(seed, size, block)[place : place + start + d - first]
        stretch = vector_nd[:, first - start : first - start + len(code_b)]
        block_nq = np.zeros_like(signed_nq)
        for i, part_b in enumerate(stretch):
            # One after the other, in float64 whatever the type of the vectors.
            np.add.at(block_nq[i], code_b, part_b.astype(np.float64, copy=False))
        signed_nq += block_nq
        first += len(code_b)
    return signed_nq[:, :size] - signed_nq[:, size:]


# A round reads a block several times, and a small model's in every round.
@lru_cache(maxsize=8)
def _codes(seed: int, size: int, block: int) -> IntArray:
    """A number for bucket and sign together of each coordinate of a block."""
    # Each block has a stream of its own, so that none needs the numbers of those before it.
    return stream(seed, "sketch", 0, block).integers(0, 2 * size, size=_BLOCK)
