"""Balanced draws: cohorts spread over what is known of the clients, with exact inclusion
probabilities.

Every client has auxiliary values x_i (q numbers); its *place* is x_i / pi_i, what it adds to the
Horvitz-Thompson estimate of sum_i x_i. Both designs start from pi and move it, pi on average
unchanged in every step, until each client is at 0 (out) or 1 (drawn): that alone makes the
inclusion probabilities exact, whatever the places are.

- ``local_pivotal``: nearest neighbours duel, so that clients with near-equal places are rarely
  drawn together. Grafstrom, Lundstrom and Schelin, Biometrics 2012, method 2 (LPM2), except that
  twins meet first: otherwise a third client could strengthen one of them before, and then both
  might be drawn.
- ``cube``: sum_S x_i / pi_i = sum_i x_i up to the last q + 1 clients. Deville and Tille, Biometrika
  2004, with the fast flight phase of Chauvet and Tille, Computational Statistics 2006.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

#: As in ``types.py``, which is above this file.
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Up to so many clients all distances are computed; more are cut into cells of at most this size.
CELL_SIZE = 256
#: The cube method looks at as many clients at once, or at 2 (q + 1) if that is more.
LEAST_WINDOW = 16
#: More undecided clients than this fly in queues side by side; fewer in one window that rolls on.
SIDE_BY_SIDE = 512
#: A queue has so many clients, or a fortieth of them if that is less, or 2 (q + 1) if that is more.
QUEUE = 100
#: So few clients are left to the window.
FEWEST = 100
#: Places are clipped to this many times the largest value, so that their squares do not overflow.
_FARTHEST = 1e100
#: Two are twins to a third one that is so much further away, in squared distances: alike but for
#: rounding.
_TWINS = 1e-16
#: A column of which less than this share is left after others are taken off is one of their sums.
_RANK_TOLERANCE = 1e-9
#: A client that adds less than this share to every open equation waits for the next queues: others
#: would move far more.
_WEAK = 1e-6
#: A column of less than this share of the widest is a sum of the others but for rounding.
_ROUNDING = 1e-13
#: What has more than this share of the largest is as good a pivot; a share that ratios of small
#: numbers do not take.
_LARGE = 0.3717
#: Clients whose ways to their ends differ by less than this share reach them together.
_TOGETHER = 1e-9


class RandomSource:
    """Where decisions come from: a generator; ``exact.py`` goes through every case instead."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._random = rng.random

    def pick(self, count: int) -> int:
        """One of 0 .. count - 1, each equally likely."""
        return int(self._random() * count)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def chances(self, probability_k: FloatArray) -> BoolArray:
        """``chance`` of each of many."""
        return np.asarray(self._random(len(probability_k)) < probability_k)

    def order(self, count: int) -> IntArray:
        """0 .. count - 1 in random order."""
        return np.argsort(self._random(count), kind="stable")


def local_pivotal(
    expected_m: FloatArray,
    value_mq: FloatArray,
    source: RandomSource,
) -> IntArray:
    """Draw n clients whose places x_i / pi_i lie apart, from pi in [0, 1] of whole sum n and finite
    x_i, (m, q).

    Of k clients at one place whose pi sum to T, floor(T) or ceil(T) are drawn (if all fit one
    cell). O(m (cell q + log m)) time, memory of one cell's distances.
    """
    pi_m = np.clip(expected_m, 0.0, 1.0)
    left_k = np.flatnonzero(undecided(pi_m))
    place_mq = places(pi_m, value_mq)
    if len(left_k) > CELL_SIZE:
        left_k = left_k[
            shuffled(len(left_k), source)
        ]  # ties are cut at random, not by the clients' numbers
    while True:
        # One cell decides everybody. Of several each leaves one client at most, and these meet in
        # the next turn.
        alone = len(left_k) <= CELL_SIZE
        for cell_k in _cells(place_mq, left_k):
            pi_k = pi_m[cell_k]
            far_kk = squared_distances(place_mq[cell_k])
            while duel(pi_k, far_kk, source):
                pass
            pi_m[cell_k] = pi_k
        if alone:
            return np.flatnonzero(
                pi_m > 0.5
            )  # the sum is whole, so the last one is at 0 or 1 up to rounding
        left_k = left_k[undecided(pi_m[left_k])]  # at most one a cell


def places(pi_m: FloatArray, value_mq: FloatArray) -> FloatArray:
    """x_i / pi_i in units of the largest value, float64 (m, q); 0 for clients that are decided."""
    scaled_mq = value_mq / max(
        float(np.abs(value_mq).max(initial=0.0)),
        np.finfo(np.float64).tiny,
    )
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        place_mq = np.clip(scaled_mq / pi_m[:, None], -_FARTHEST, _FARTHEST)
    return np.where(undecided(pi_m)[:, None], place_mq, 0.0)


def undecided(pi_m: FloatArray) -> BoolArray:
    """Who is neither drawn nor out, bool (m,)."""
    return (pi_m > 0) & (pi_m < 1)


def duel(pi_k: FloatArray, far_kk: FloatArray, source: RandomSource) -> bool:
    """Decide at least one of two neighbours, in place; False if there is no pair left.

    With a + b < 1 one is out and the other has a + b; else one is drawn and the other keeps a + b -
    1.
    """
    open_k = np.flatnonzero(undecided(pi_k))
    if len(open_k) < 2:
        return False
    i, j = _neighbours(far_kk, open_k, source)
    a = float(pi_k[i])
    b = float(pi_k[j])
    both = a + b
    most = min(both, 1.0)
    # Both chances leave each pi unchanged on average: a = chance (a + b) where one is out, a =
    # chance + (1 - chance) (a + b - 1) where one is drawn.
    chance = a / both
    if both >= 1:
        chance = (1 - b) / (2 - both)
    pi_k[[i, j]] = both - most
    winner = j
    if source.chance(chance):
        winner = i
    pi_k[winner] = most
    return True


def _neighbours(
    far_kk: FloatArray,
    open_k: IntArray,
    source: RandomSource,
) -> tuple[int, int]:
    """A random one and its nearest; but if that one has a twin, the twins."""
    # Two are neighbours without a decision; ``exact.py`` would follow each needless one.
    if len(open_k) == 2:
        return int(open_k[0]), int(open_k[1])
    i = int(open_k[source.pick(len(open_k))])
    j, far = _nearest(far_kk, i, open_k, source)
    if far_kk[j, open_k].min() < _TWINS * far:
        return j, _nearest(far_kk, j, open_k, source)[0]
    return i, j


def _nearest(
    far_kk: FloatArray,
    i: int,
    open_k: IntArray,
    source: RandomSource,
) -> tuple[int, float]:
    """The nearest open one, ties at random, and how far it is."""
    row_k = far_kk[i, open_k]
    shortest = row_k.min()
    near_k = open_k[row_k == shortest]
    place = 0
    if len(near_k) > 1:
        place = source.pick(len(near_k))
    return int(near_k[place]), float(shortest)


def squared_distances(place_kq: FloatArray) -> FloatArray:
    """norm(place_i - place_j)^2, float64 (k, k), exactly symmetric, exactly 0 for twins,
    infinite to oneself.
    """
    # Not norm(a)^2 + norm(b)^2 - 2 a b, which is faster but leaves rounding between twins. Column
    # by column, as all differences at once would take q times the memory.
    far_kk = np.zeros((len(place_kq), len(place_kq)))
    for column_k in place_kq.T:
        far_kk += (column_k[:, None] - column_k) ** 2
    np.fill_diagonal(far_kk, np.inf)
    return far_kk


def _cells(place_mq: FloatArray, client_k: IntArray) -> Iterator[IntArray]:
    """Cut clients at the median of the coordinate in which they are widest, until no cell is
    larger than allowed.
    """
    pile = [client_k]
    while pile:
        cell_k = pile.pop()
        if len(cell_k) <= CELL_SIZE:
            yield cell_k
            continue
        place_kq = place_mq[cell_k]
        half = len(cell_k) // 2
        order = np.argpartition(place_kq[:, np.ptp(place_kq, axis=0).argmax()], half)
        pile += [cell_k[order[half:]], cell_k[order[:half]]]


def shuffled(count: int, source: RandomSource) -> IntArray:
    """0 .. count - 1 in random order (Fisher and Yates)."""
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = source.pick(last + 1)
        order[last], order[other] = order[other], order[last]
    return np.asarray(order, np.int64)


def cube(
    expected_m: FloatArray,
    value_mq: FloatArray,
    source: RandomSource,
) -> IntArray:
    """Draw n clients such that sum_S x_i / pi_i is nearly sum_i x_i, from pi of whole sum n and
    finite x_i, (m, q).

    Flight, over a window that rolls on in random order: among more than q + 1 undecided clients
    there are directions that change neither the sum of pi nor that of pi times place; go along one,
    forwards or backwards, until a client is decided. Landing: with q + 1 clients or fewer left,
    balance is given up along one principal axis of the places after the other, the narrowest first;
    the size is kept to the end. In each coordinate the total is off by at most (q + 1) / 2 times
    the range of the places. O(m q^2) time, O(m q) memory.

    More than ``SIDE_BY_SIDE`` clients are dealt to queues that fly side by side, and those left
    undecided are dealt again: the same steps, for 10^5 clients and q = 10 about thirty times as
    fast.
    """
    pi_m = np.clip(expected_m, 0.0, 1.0)
    open_k = np.flatnonzero(undecided(pi_m))
    pi_k = pi_m[open_k]
    balance_kc = _balance(places(pi_m, value_mq)[open_k])
    # More than it takes: one decomposition serves for many steps.
    width = max(2 * balance_kc.shape[1], LEAST_WINDOW)
    queue_k = np.arange(len(open_k))
    side_by_side = len(open_k) > max(SIDE_BY_SIDE, width)
    # Clients that fit one window keep their order: the flight looks at all of them together, and
    # their draws can be enumerated (``exact.py``).
    if side_by_side:
        queue_k = source.order(len(open_k))
    elif len(open_k) > width:
        queue_k = shuffled(len(open_k), source)
    # Whom a direction leaves alone has no end.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        while side_by_side and len(queue_k) > max(FEWEST, width):
            length = max(2 * balance_kc.shape[1], min(len(queue_k) // 40, QUEUE))
            # Who is beyond the last full queue waits for the next deal.
            dealt_gw = queue_k[: len(queue_k) // length * length].reshape(-1, length)
            pi_k[dealt_gw] = _flights(pi_k[dealt_gw], balance_kc[dealt_gw], source)
            queue_k = queue_k[undecided(pi_k[queue_k])]
        window = queue_k[:width]
        entered = width
        while len(window) > 1:
            direction_rw = _free_directions(balance_kc[window])
            pi_k[window] = _flight(pi_k[window], direction_rw, source)
            window = window[undecided(pi_k[window])]
            entering = queue_k[entered : entered + width - len(window)]
            window = np.concatenate([window, entering])
            entered = entered + len(entering)
    pi_m[open_k] = pi_k
    # One client may be undecided still. The sum of pi is whole, so it is at 0 or 1 up to rounding.
    return np.flatnonzero(pi_m > 0.5)


def _balance(place_kq: FloatArray) -> FloatArray:
    """What must stay in balance, (k, 1 + q): the size, then the places along their principal
    axes, widest first.
    """
    # By the largest place: squares of very large or small ones would leave the range of float64.
    largest = float(np.abs(place_kq).max(initial=0.0))
    scaled_kq = place_kq / max(largest, np.finfo(np.float64).tiny)
    centred_kq = scaled_kq - scaled_kq.sum(axis=0) / max(len(scaled_kq), 1)
    # Where clients run out, ``_free_directions`` keeps only the first columns: the size, then the
    # axes that matter most.
    # Not by the matrix library, whose bits depend on the number of its threads.
    _, axis_qq = np.linalg.eigh(np.einsum("kp,kq->pq", centred_kq, centred_kq))
    # ``eigh`` has the narrowest axis first.
    along_kq = np.einsum("kp,pq->kq", centred_kq, axis_qq[:, ::-1])
    return np.column_stack([np.ones(len(place_kq)), along_kq])


def _free_directions(balance_wc: FloatArray) -> FloatArray:
    """Directions u, (r, w) with r >= 1: sum_w u_w balance_w = 0 in all columns, or in as many first
    ones as can be.

    By elimination. Nothing here depends on the last bits of the places, which differ between
    machines: dependent columns are found by a tolerance, pivots are the first that are large
    enough, and the sign of a column has no effect.
    """
    units, columns = balance_wc.shape
    scale_c = np.abs(balance_wc).max(axis=0)
    # By the column's own size, so that values in small units count as well, and by the widest,
    # beside which a column can be nothing but rounding.
    least_c = np.maximum(_RANK_TOLERANCE * scale_c, _ROUNDING * scale_c.max()).tolist()
    # Few units are determined by the first columns, unless some of these depend on others.
    rest_cw, solved, pivots = _eliminated(balance_wc.T[:units].copy(), least_c)
    if len(pivots) < units - 1 and units < columns:
        rest_cw, solved, pivots = _eliminated(balance_wc.T.copy(), least_c)
    free_w = np.ones(units, bool)
    free_w[pivots] = False
    # Each free unit moves by 1, the pivots by what keeps all columns at 0.
    direction_rw = np.zeros((units - len(pivots), units))
    direction_rw[:, free_w] = np.eye(units - len(pivots))
    direction_rw[:, pivots] = -rest_cw[solved][:, free_w].T
    return direction_rw


def _eliminated(
    rest_cw: FloatArray,
    least_c: list[float],
) -> tuple[FloatArray, list[int], list[int]]:
    """The columns, solved in place for one unit each; which could be, above their ``least``, and
    for which units.
    """
    solved: list[int] = []
    pivots: list[int] = []
    for column, column_w in enumerate(rest_cw):
        # One unit has to stay free, or there is no direction.
        if len(pivots) == rest_cw.shape[1] - 1:
            break
        pivot, size = _first_large(column_w.tolist())
        # A sum of columns before it, which keep it in balance.
        if size <= least_c[column]:
            continue
        row_w = column_w / column_w[pivot]
        rest_cw -= rest_cw[:, pivot, None] * row_w
        rest_cw[column] = row_w
        solved.append(column)
        pivots.append(pivot)
    return rest_cw, solved, pivots


def _flights(
    pi_gw: FloatArray,
    balance_gwc: FloatArray,
    source: RandomSource,
) -> FloatArray:
    """Where g queues of w clients end, all but about c of them decided; each queue takes in one
    client a step.

    Every equation, sum_w u_w balance_w = 0 in one column, is solved for one client, its holder, or
    open. A client that comes in holds an open equation that it does not fulfil; if there is none,
    it and the holders have a direction, and one of them is decided. So every client is met once, in
    place of the many directions of ``_flight``.
    """
    num_queues, width, columns = balance_gwc.shape
    scale_gc = np.abs(balance_gwc).max(axis=1)
    # Divided by infinity, a column of rounding alone is 0 and holds nobody.
    scale_gc[scale_gc <= _ROUNDING * scale_gc.max(axis=1, keepdims=True)] = np.inf
    # Queues come last and in one piece of memory: every step below works on all of them at once.
    balance_wcg = np.ascontiguousarray((balance_gwc / scale_gc[:, None]).transpose(1, 2, 0))
    pi_wg = np.ascontiguousarray(pi_gw.T)
    g = np.arange(num_queues)
    # Combines columns to what a client adds.
    solve_ccg = np.repeat(np.eye(columns)[:, :, None], num_queues, axis=2)
    largest_cg = np.ones((columns, num_queues))
    is_open_cg = np.ones((columns, num_queues), bool)
    # The last row is the client that comes in.
    holder_hg = np.zeros((columns + 1, num_queues), np.int64)
    step_hg = np.ones((columns + 1, num_queues))
    way_2hg = np.full((2, columns + 1, num_queues), 0.5)  # to 0 and to 1
    for client in range(width):
        added_cg = np.einsum("cdg,dg->cg", solve_ccg, balance_wcg[client])
        way_2hg[:, -1] = (pi_wg[client], 1 - pi_wg[client])
        holder_hg[-1] = client
        # How much of each open equation the client does not fulfil, beside the numbers it is made
        # of.
        share_cg = np.abs(added_cg) / largest_cg * is_open_cg
        # A client that fulfils all of them has a direction, together with the holders.
        moves_g = share_cg.max(axis=0) <= _RANK_TOLERANCE
        least_g = np.where(moves_g, _WEAK, _RANK_TOLERANCE)
        if moves_g.any():
            np.multiply(added_cg, ~is_open_cg, out=step_hg[:-1])
            np.negative(step_hg[:-1], out=step_hg[:-1])
            # Steps to either end, backwards and forwards, as in ``_flight``.
            reach_2hg = way_2hg / step_hg
            reach_2hg = np.maximum(reach_2hg, -reach_2hg[::-1])
            behind_g, ahead_g = reach_2hg.min(axis=1)
            forwards_g = moves_g.copy()
            # The nearer end is the more likely one, so that pi stays what it is on average.
            chance_g = behind_g / (ahead_g + behind_g)
            forwards_g[moves_g] = source.chances(chance_g[moves_g])
            length_g = np.where(forwards_g, ahead_g, behind_g) * moves_g
            end_hg = np.where(forwards_g, reach_2hg[1], reach_2hg[0])
            decided_hg = end_hg <= length_g * (1 + _TOGETHER)
            way_2hg[0] += np.where(forwards_g, length_g, -length_g) * step_hg
            np.subtract(1, way_2hg[0], out=way_2hg[1])
            decided_hg |= way_2hg.min(axis=0) <= 0  # another one got there by rounding
            pi_wg[client] = way_2hg[0, -1]
            row, at = decided_hg.nonzero()
            pi_wg[holder_hg[row, at], at] = (step_hg[row, at] > 0) == forwards_g[at]
            # An open place has step 0: 0.5 / 0 is infinite, as it should be, where 0 / 0 would be
            # NaN.
            way_2hg[:, row, at] = 0.5
            # A newcomer that was decided at once holds no equation.
            least_g[decided_hg[-1]] = np.inf
            held = row < columns
            row = row[held]
            at = at[held]
            is_open_cg[row, at] = True
            largest_cg[row, at] = np.abs(solve_ccg[row, :, at]).max(axis=1, initial=0.0)
            share_cg[row, at] = np.abs(added_cg[row, at]) / largest_cg[row, at]
        best_g = share_cg.argmax(axis=0)
        at = (share_cg[best_g, g] > least_g).nonzero()[0]
        best = best_g[at]
        held_cg = np.zeros((columns, num_queues))
        row_kc = solve_ccg[best, :, at] / added_cg[best, at][:, None]
        held_cg[:, at] = row_kc.T
        # A step of elimination in every queue: no other equation sees this client from now on.
        solve_ccg -= added_cg[:, None] * held_cg
        solve_ccg[best, :, at] = row_kc
        holder_hg[best, at] = client
        is_open_cg[best, at] = False
        way_2hg[:, best, at] = way_2hg[:, -1, at]
        if is_open_cg.any():
            # A bound on the largest entries, which costs less than to look at all of them again.
            largest_cg += np.abs(added_cg) * np.abs(held_cg).max(axis=0)
    # The holders are undecided still: they are where the last step has left them.
    row, at = (~is_open_cg).nonzero()
    pi_wg[holder_hg[row, at], at] = way_2hg[0, row, at]
    return pi_wg.T


def _first_large(part_k: list[float]) -> tuple[int, float]:
    """The first that is not much less than the largest, whatever the last bits of several alike;
    the largest size.
    """
    size_k = list(map(abs, part_k))
    largest = max(size_k)
    least = _LARGE * largest
    for place, size in enumerate(size_k):
        if size > least:
            return place, largest
    return 0, largest


def _flight(
    pi_w: FloatArray,
    direction_rw: FloatArray,
    source: RandomSource,
) -> FloatArray:
    """Go along the directions one after the other; each loses what would move the clients decided
    before.

    A line is followed to one of its two ends in the unit cube, such that the mean of where we end
    is where we are.
    """
    way_2w = np.array([pi_w, 1 - pi_w])
    end = dict[int, float]()  # to 0 and to 1, and where the decided ones ended
    widest = float(np.abs(direction_rw).max())  # no entry is larger
    while len(direction_rw) > 0:
        step_w = direction_rw[0]
        # Steps until each client is at its end, backwards and forwards; one that stays where it is
        # never gets there.
        reach_2w = way_2w / step_w
        reach_2w = np.maximum(reach_2w, -reach_2w[::-1])
        behind, ahead = np.minimum.reduce(reach_2w, axis=1).tolist()
        forwards = source.chance(behind / (ahead + behind))
        step = ahead
        if not forwards:
            step = -behind
        moved_w = way_2w[0] + step * step_w
        # Rounding must not leave those undecided that get there together.
        decided = (reach_2w[int(forwards)] <= abs(step) * (1 + _TOGETHER)).nonzero()[0].tolist()
        for client in decided:
            moved_w[client] = (step_w[client] > 0) == forwards
        way_2w[0] = moved_w
        way_2w[1] = 1 - moved_w
        if np.count_nonzero(way_2w) < way_2w.size - len(
            decided
        ):  # another one got there by rounding
            decided = (way_2w == 0).any(axis=0).nonzero()[0].tolist()
        for client in decided:
            end[client] = float(moved_w[client])
            direction_rw, widest = _without(direction_rw, client, widest)
        for client in decided:  # from now on nothing moves them
            direction_rw[:, client] = 0.0
            way_2w[:, client] = 0.5
    way_2w[0, list(end)] = list(end.values())
    return np.asarray(way_2w[0])


def _without(
    direction_rw: FloatArray,
    client: int,
    widest: float,
) -> tuple[FloatArray, float]:
    """The directions in the span of the given ones that leave one client where it is: one fewer, in
    their place.

    No entry of what is given is larger than ``widest``; the second result is such a bound for what
    is returned.
    """
    if len(direction_rw) == 0:
        return direction_rw, widest
    pivot, size = _first_large(direction_rw[:, client].tolist())
    # ``widest`` is a bound that only grows. It spares most looks at all entries, but does not
    # decide that a client stays where it is.
    if size <= _RANK_TOLERANCE * widest and size <= _RANK_TOLERANCE * np.abs(direction_rw).max():
        return direction_rw, widest
    lost_w = direction_rw[pivot].copy()
    # The first takes the place of the lost one, so that the rest is a slice and no copy.
    direction_rw[pivot] = direction_rw[0]
    rest_rw = direction_rw[1:]
    rest_rw -= (rest_rw[:, client] / lost_w[client])[:, None] * lost_w
    # The pivot has more than ``_LARGE`` of its column's largest, so that less than ``widest /
    # _LARGE`` is taken off an entry.
    return rest_rw, widest * (1 + 1 / _LARGE)
