"""A sum tree: m scores with the sums of ever larger blocks, so that drawing and changing n of them
costs O(n log m).

Level 0 are the scores in the clients' order; a node of level l + 1 is the sum of ``WIDTH`` nodes of
level l. A node that is touched is summed anew from its children, in float64: nothing drifts, and
the sums are a function of the scores, bit for bit.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .persistent_array import Array, Buffer, IntArray, PersistentArray

#: As in ``types.py``, which is above this file.
FloatArray = npt.NDArray[np.float64]

#: Children of a node.
WIDTH = 16
#: Nodes that are summed at once while a tree is built.
_CHUNK = 2**14

_NOBODY = np.zeros(0, np.int64)


class Mass(NamedTuple):
    """What each client weighs in a search: slope score_i + base; 0 for ``without_c``, sorted, whose
    scores must be 0.

    The number of clients below a node is known, so that a floor or a scaling takes no numbers of
    its own.
    """

    slope: float
    base: float
    without_c: IntArray = _NOBODY


class TreeBuffer(Buffer):
    """The scores, and the sums of all levels in a row, each level filled up with zeros to whole
    blocks.
    """

    def __init__(self, array_m: Array, inner: FloatArray | None = None) -> None:
        super().__init__(array_m)
        widths = [_blocks(len(array_m))]
        # Up to a level of one node, the total.
        while widths[-1] > 1:
            widths.append(_blocks(widths[-1]))
        ends = [0]
        for width in widths:
            ends.append(ends[-1] + _blocks(width) * WIDTH)
        self.inner = np.zeros(ends[-1]) if inner is None else inner
        self.levels = [array_m]
        for start, end in pairwise(ends):
            self.levels.append(self.inner[start:end])
        if inner is None:
            for level, width in enumerate(widths, start=1):
                for first in range(0, width, _CHUNK):
                    end = min(first + _CHUNK, width)
                    self._add_up(level, np.arange(first, end))

    def copy(self) -> "TreeBuffer":
        """A buffer of its own with the same entries."""
        return TreeBuffer(np.array(self.array_m), np.array(self.inner))

    def write(self, index_k: IntArray, value_k: Array) -> None:
        """Change scores and all sums that they are in."""
        super().write(index_k, value_k)
        node_k = index_k
        for level in range(1, len(self.levels)):
            # Siblings have one parent, which is summed once.
            node_k = np.unique(node_k // WIDTH)
            self._add_up(level, node_k)

    def children(self, level: int, node_k: IntArray) -> tuple[IntArray, Array]:
        """The children of nodes of a level, (k, WIDTH) indices and values one level below; 0
        past the end.
        """
        below = self.levels[level - 1]
        child_kb = node_k[:, None] * WIDTH + np.arange(WIDTH)
        # Places past the end read the last entry instead; on the upper levels, filled up with
        # zeros, there are none.
        value_kb = below.take(child_kb, mode="clip")
        if level == 1:  # the last block may lack some clients
            value_kb[child_kb >= len(below)] = 0
        return child_kb, value_kb

    def _add_up(self, level: int, node_k: IntArray) -> None:
        _, value_kb = self.children(level, node_k)
        self.levels[level][node_k] = value_kb.astype(float).sum(axis=1)


def _blocks(length: int) -> int:
    """Nodes above this many, the last one perhaps with fewer children."""
    return -(-length // WIDTH)


class SumTree(PersistentArray):
    """Finite scores >= 0 of m clients, float32 or float64, as a ``PersistentArray`` with their
    sums.
    """

    def __init__(self, score_m: Array) -> None:
        super().__init__(score_m)
        self._buffer = TreeBuffer(score_m)

    @property
    def total(self) -> float:
        """The sum of all scores."""
        return float(self.current().levels[-1][0])

    def at_least(self, least: float) -> IntArray:
        """The clients with score >= least > 0, in increasing order; O(k log m), k <= total /
        least.
        """
        buffer = self.current()
        node_k = np.zeros(1, np.int64)
        for level in range(len(buffer.levels) - 1, 0, -1):
            child_kb, value_kb = buffer.children(level, node_k)
            # Scores are >= 0: below a smaller sum there is no such client.
            node_k = child_kb[value_kb >= least]
        return node_k

    def find(self, position_k: FloatArray, mass: Mass) -> tuple[IntArray, FloatArray]:
        """Lay the clients end to end, each as long as its mass: who lies at k positions, and how
        far into them?

        Positions are >= 0 and below the sum of the masses, which are not all 0; rounding beyond it
        gives the last client with mass.
        """
        buffer = self.current()
        left_k = np.array(position_k, float)
        row_k = np.arange(len(position_k))
        node_k = np.zeros(len(position_k), np.int64)
        for level in range(len(buffer.levels) - 1, 0, -1):
            child_kb, value_kb = buffer.children(level, node_k)
            end_kb = mass.slope * np.cumsum(value_kb, axis=1, dtype=np.float64)
            if mass.base:
                span = WIDTH ** (level - 1)
                end_kb += mass.base * _heads(child_kb, span, len(self), mass.without_c)
            # Rounding in the level above may put a position past the end of its block.
            last_k = np.nextafter(end_kb[:, -1], 0.0)
            left_k = np.minimum(left_k, last_k)
            # The first child that ends beyond the position.
            place_k = (end_kb <= left_k[:, None]).sum(axis=1)
            start_k = np.where(place_k > 0, end_kb[row_k, place_k - 1], 0.0)
            left_k = left_k - start_k
            node_k = child_kb[row_k, place_k]
        return node_k, left_k


def _heads(child_kb: IntArray, span: int, m: int, without_c: IntArray) -> Any:
    """How many clients with mass there are below each row's children, from the first up to each
    of them.
    """
    start_k1 = child_kb[:, :1] * span
    # The last blocks may have fewer clients below them, or none.
    end_kb = np.minimum((child_kb + 1) * span, m)
    heads_kb = end_kb - start_k1
    if len(without_c) == 0:
        return heads_kb
    before_k1 = np.searchsorted(without_c, start_k1)
    massless_kb = np.searchsorted(without_c, end_kb) - before_k1
    return heads_kb - massless_kb
