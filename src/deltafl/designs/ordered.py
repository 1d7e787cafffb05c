"""The ordered pivotal design, drawn from a sum tree: O(n log m) a cohort, whatever the scores.

The clients duel in the order of their indices (Deville and Tille 1998): of a pair, one is decided,
drawn or not, the other fights on with the rest. Every inclusion probability is exact, and the size
is fixed. Laid end to end, each as long as its pi_i, the clients fill n intervals of length 1 with
one draw each, but for clients who lie across a border: where neighbours are alike, the estimate is
better than with a random order. No order makes it worse than draws with replacement (Chauvet and
Ruiz-Gazen 2017), as systematic draws in a fixed order can be.

Duels among clients of one interval need no client after client: the champion of a stretch is client
i with probability pi_i over the stretch's sum, hence one search in the tree. What is left is one
decision a border, n of them in turn.
"""

from typing import NamedTuple

import numpy as np

from ..scale.tree import Mass, SumTree
from ..types import NOBODY, FloatArray, IntArray, Rng

_LIFT = 2.0**900  # what the sums of very small scores are multiplied by
_SHORT = (
    1 - 1e-12
)  # keeps a place inside an interval off the client on its border, whatever the rounding


class Expectations(NamedTuple):
    """pi_i = min(1, c s_i) of all clients, sum n, without m numbers: for scores s with a floor
    mixed in.
    """

    tree: SumTree  # the scores, 0 for the clients that are certain
    mass: Mass  # pi_i of the others, as slope score_i + base
    size: int  # how many of the others are drawn

    @property
    def certain_c(self) -> IntArray:
        """The clients with pi_i = 1, in increasing order."""
        return self.mass.without_c

    def of(self, client_k: IntArray) -> FloatArray:
        """pi_i of some clients, float64 (k,)."""
        expected_k: FloatArray = self.mass.slope * self.tree[client_k] + self.mass.base
        # The tree has a score of 0 for them, which would leave them the base alone.
        expected_k[np.isin(client_k, self.certain_c)] = 1.0
        return expected_k

    def everyone(self) -> FloatArray:
        """pi_i of all clients, float64 (m,); reads all scores."""
        return self.of(np.arange(len(self.tree)))


def expectations(tree: SumTree, n: int, floor: float = 0.0) -> Expectations:
    """The numbers of ``inclusion_probabilities(with_floor(scores, floor), n)``, in O(n log m).

    Clients within rounding of certainty, 1 - pi_i <= e = max(1e-12, 64 n eps), count as certain.
    The others' pi_i are then lower, by at most e a certain client in all; without a floor that can
    make a pi_i below it 0.
    """
    m = len(tree)
    tree = _readable(tree)
    share = 0.0
    even = 1 / m
    if tree.total > 0:
        share = (1 - floor) / tree.total
        even = floor / m
    almost = 1 - max(1e-12, 64 * n * float(np.finfo(np.float64).eps))
    rest = tree
    certain_c = NOBODY
    while True:
        size = n - len(certain_c)
        others = m - len(certain_c)
        if size >= others:
            certain_c = np.arange(m)
        if size == 0 or size >= others:
            return Expectations(rest, Mass(0.0, 0.0, certain_c), 0)
        if even == 0:  # what is left may be tiny beside those that are certain
            rest = _readable(rest)
            share = 1.0
        total = share * rest.total + even * others
        if total <= 0:  # fewer than n scores are positive: the rest of the cohort is spread evenly
            share = 0.0
            even = 1.0
            total = float(others)
        mass = Mass(size * share / total, size * even / total, certain_c)
        newly = NOBODY
        if mass.slope > 0:
            newly = rest.at_least((almost - mass.base) / mass.slope)
        if len(newly) == 0:
            return Expectations(rest, mass, size)
        certain_c = np.union1d(certain_c, newly)
        rest = rest.replaced(newly, 0)


def _readable(tree: SumTree) -> SumTree:
    """The tree, times a power of 2 where its sum is so small that nothing can be divided by it;
    O(m) then.
    """
    if 0 < tree.total < 1 / _LIFT:
        return SumTree(np.array(tree) * _LIFT)
    return tree


def draw(expected: Expectations, rng: Rng) -> IntArray:
    """Draw a cohort: n distinct client ids, in no particular order; 2 n uniform numbers, O(n log
    m).
    """
    size = expected.size
    if size == 0:
        return expected.certain_c
    tree = expected.tree
    mass = expected.mass
    where_n, coin_n = rng.random((2, size))
    # Who lies across the border between interval i and the next, and how long on either side of it.
    # No border follows the last interval.
    border_n = np.full(size, -1)
    before_n = np.zeros(size)
    after_n = np.zeros(size)
    border_n[:-1], before_n[:-1] = tree.find(np.arange(1.0, size), mass)
    across = expected.of(border_n[:-1])
    # Rounding may put a border behind the client's end.
    after_n[:-1] = np.maximum(across - before_n[:-1], 0.0)
    # The champion of interval i, before it meets the client on the border: who came in from the
    # interval before, or one of those inside.
    came_n = np.concatenate([[0.0], after_n[:-1]])
    # Within the interval, up to where the client on its right border begins.
    place_n = where_n * (1 - before_n) * _SHORT
    inside_n, _ = tree.find(np.arange(size) + place_n, mass)
    left_n = np.concatenate([[-1], border_n[:-1]])
    # Rounding may find a client on a border, who must not be drawn twice: who came in is taken
    # instead.
    stays_n = (place_n < came_n) | (inside_n == left_n) | (inside_n == border_n)
    # Nobody comes into the first interval.
    stays_n[0] = False
    # The champion is drawn with probability (1 - pi) / (1 - after), else the client on the border;
    # the other goes on.
    # No border follows the last interval: its champion is drawn.
    wins_n = np.append(coin_n[:-1] * (1 - after_n[:-1]) < 1 - across, True)
    drawn = expected.certain_c.tolist()
    incoming = -1
    # Lists: the loop is one of Python, which reads single entries of arrays slowly.
    columns = [column_n.tolist() for column_n in (inside_n, stays_n, wins_n, border_n)]
    for inside, stays, wins, border in zip(*columns, strict=True):
        champion = inside
        if stays:
            champion = incoming
        incoming = border
        if not wins:
            incoming = champion
            champion = border
        drawn.append(champion)
    return np.array(drawn, np.int64)


def ordered_pivotal(expected_m: FloatArray, rng: Rng) -> IntArray:
    """The same for expectations in an array, which is put into a tree: O(m)."""
    n = round(float(expected_m.sum()))
    return draw(expectations(SumTree(np.array(expected_m, float)), n), rng)
