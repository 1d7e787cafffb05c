"""Memory of long arrays that is used again, for the next state takes as much as the last one.

The system zeroes what it gives, and a virtual machine may have to ask its host for it first: that
can take a third of a round of a large model.
"""

from math import prod
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

Block = np.ndarray[Any, np.dtype[np.uint8]]

#: Bytes of a long array. Shorter ones malloc gives again, once it has seen some go.
LONG = 2**25
#: Bytes that are kept, times those of the arrays in use: for the next state, and for what a round
#: needs beside it.
_KEPT = 1.5


def new_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> Any:
    """``numpy.empty``, if it is long in the memory of an array that is gone."""
    size = prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    if size < LONG:
        return np.empty(shape, dtype)
    return _BLOCKS.lend(size).view(dtype).reshape(shape)


def new_like(array: np.ndarray[Any, Any]) -> Any:
    """The same in an array's shape and type."""
    return new_array(array.shape, array.dtype)


class _Lease:
    """What owns a block in NumPy's eyes: it lives as long as the last view does."""

    def __init__(self, block: Block) -> None:
        self.__array_interface__ = block.__array_interface__


class _Blocks:
    """The blocks that arrays use, and those that are kept; when the last array goes, all go.

    By ``id``, and changed by single calls of a dictionary: arrays go at any time, in any thread.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._kept: dict[int, Block] = {}

    def lend(self, size: int) -> Block:
        block = self._taken(size)
        self._used[id(block)] = size
        lease = _Lease(block)
        finalize(lease, self._give_back, block).atexit = False
        return np.asarray(lease)

    def _taken(self, size: int) -> Block:
        for key, block in reversed(list(self._kept.items())):
            # Another thread may have been sooner.
            if block.nbytes == size and self._kept.pop(key, None) is not None:
                return block
        return np.empty(size, np.uint8)

    def _give_back(self, block: Block) -> None:
        del self._used[id(block)]
        self._kept[id(block)] = block
        room = _KEPT * sum(list(self._used.values()))
        # The latest stay: the oldest may be of another model.
        for key, kept in reversed(list(self._kept.items())):
            if kept.nbytes <= room:
                room -= kept.nbytes
            else:
                self._kept.pop(key, None)


_BLOCKS = _Blocks()
