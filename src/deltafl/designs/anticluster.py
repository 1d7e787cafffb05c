"""Anticlustered draws: clients are dealt into groups that are as alike as possible, and one
group is the cohort.
"""

import numpy as np

from ..types import TINY, FloatArray, IntArray
from .balanced import LEAST_WINDOW, RandomSource, cube, places, undecided

#: About m / n groups are made, at least and at most so many.
FEWEST_GROUPS = 8
MOST_GROUPS = 32
#: How often every client may change its group, and how many others it looks at then.
PASSES = 2
CANDIDATES = 512
#: What the squares of the values count for, beside the values: enough to matter, too little to cost
#: balance.
SQUARES = 0.5
#: Squares whose standard deviation is less, in units of the largest, differ by rounding.
_ALIKE = 1e-9
#: What differs from a whole number by less differs by rounding, as do sums of exchanges by less in
#: units of a place.
_ROUNDING = 1e-13


def anticluster(
    expected_m: FloatArray,
    value_mq: FloatArray,
    source: RandomSource,
) -> IntArray:
    """Divide clients into groups whose sums of x_i / pi_i are alike, and draw one group.

    pi has a whole sum n, x is (m, q) and finite.

    G groups of n distinct clients are made, and one of them is drawn, each with probability 1 / G.
    Client i is in G pi_i groups; where that is not whole, in the next lower or higher number, G
    pi_i on average (``cube``). So its inclusion probability is pi_i exactly, however groups are
    made. Clients are dealt in random order; then pairs of them change places while that brings the
    totals of their groups nearer to the mean (Spath 1986; Papenberg and Klau, Psychological Methods
    2021). Squares of the values count, too (k-plus, Papenberg, British Journal of Mathematical and
    Statistical Psychology 2024): groups with the same totals else differ in how extreme their
    clients are.

    Unlike the cube, which gives balance up for its last q + 1 clients, it may have more values than
    the cohort has clients. Some pairs are never drawn together. O(G n q min(G n, ``CANDIDATES``))
    time beside that of the cube.
    """
    pi_m = np.clip(expected_m, 0.0, 1.0)
    open_k = np.flatnonzero(undecided(pi_m))
    pi_k = pi_m[open_k]
    size = round(float(pi_k.sum()))
    drawn_k = open_k[:0]
    if size > 0:
        # As many groups as it takes to hold every client about once, within bounds: few groups
        # leave little to exchange, and every further one costs time.
        groups = min(max(round(len(open_k) / size), FEWEST_GROUPS), MOST_GROUPS)
        place_kq = places(pi_m, value_mq)[open_k]
        copies_k = _whole(groups * pi_k, place_kq, source)
        place_kq = _with_squares(place_kq)
        # Few clients keep their order, so that all draws can be enumerated (``exact.py``).
        order_k = np.arange(len(open_k))
        if len(open_k) > LEAST_WINDOW:
            order_k = source.order(len(open_k))
        # One client's places follow on one another: no group has two.
        client_p = np.repeat(order_k, copies_k[order_k])
        dealt_p = np.arange(len(client_p)) % groups
        group_p = _exchanged(client_p, dealt_p, place_kq[client_p])
        # Picked after the exchanges, so that each group has probability 1 / G however they went.
        is_drawn_p = group_p == source.pick(groups)
        drawn_k = open_k[client_p[is_drawn_p]]
    return np.concatenate([np.flatnonzero(pi_m >= 1), drawn_k])


def _with_squares(place_kq: FloatArray) -> FloatArray:
    """The places about their mean, and their squares, each with ``SQUARES`` of its column's
    standard deviation.
    """
    centred_kq = place_kq - place_kq.mean(axis=0)
    # In units of the largest, whose square is 1: squares of places can overflow or vanish.
    square_kq = (
        centred_kq
        / np.maximum(
            np.abs(centred_kq).max(axis=0),
            TINY,
        )
    ) ** 2
    square_kq -= square_kq.mean(axis=0)
    spread_q = square_kq.std(axis=0)
    factor_q = np.where(
        spread_q > _ALIKE,
        centred_kq.std(axis=0) / np.maximum(spread_q, _ALIKE),
        0.0,
    )
    return np.hstack([centred_kq, SQUARES * factor_q * square_kq])


def _whole(
    expected_k: FloatArray,
    place_kq: FloatArray,
    source: RandomSource,
) -> IntArray:
    """Whole numbers next to these, whose sum is whole, and equal to them on average."""
    # What has rounded to just below a whole number is that number; its rest, then negative, becomes
    # 0.
    lower_k = np.floor(expected_k + _ROUNDING)
    rest_k = expected_k - lower_k
    rest_k[rest_k < _ROUNDING] = 0.0
    copies_k = lower_k.astype(np.int64)
    if rest_k.any():
        # ``cube`` divides by the expectations it is given: the product leaves it the same places.
        copies_k[cube(rest_k, rest_k[:, None] * place_kq, source)] += 1
    return copies_k


def _exchanged(
    client_p: IntArray,
    group_p: IntArray,
    place_pq: FloatArray,
) -> IntArray:
    """The group of each place, after exchanges that lower the sum over groups of norm(total -
    mean total)^2.
    """
    groups = int(group_p.max()) + 1
    count = len(client_p)
    total_gq = np.zeros((groups, place_pq.shape[1]))
    np.add.at(total_gq, group_p, place_pq)
    there_gc = np.zeros((groups, int(client_p.max()) + 1), np.bool_)
    there_gc[group_p, client_p] = True
    square_p = np.einsum("pq,pq->p", place_pq, place_pq)
    along_p = np.einsum(
        "pq,pq->p",
        place_pq,
        total_gq[group_p],
    )  # each place times the total of its group
    for _ in range(PASSES):
        changed = False
        for p, client in enumerate(client_p.tolist()):
            here = group_p[p]
            place_q = place_pq[p]
            # All others up to ``CANDIDATES``; of more only those that follow, or a pass would take
            # quadratic time.
            first = min(p, max(count - CANDIDATES, 0))
            near = slice(first, first + CANDIDATES)
            # Half of what an exchange adds to the sum: norm(c)^2 + c (total here - total there), c
            # the change here.
            cost_k = (
                place_pq[near] @ (total_gq[here] - 2 * place_q)
                + (total_gq @ place_q)[group_p[near]]
            )
            cost_k += square_p[near] - along_p[near] + (square_p[p] - along_p[p])
            taken_k = there_gc[here][client_p[near]] | there_gc[:, client][group_p[near]]
            cost_k[taken_k] = 0.0  # its own group is among them
            best = int(cost_k.argmin())
            if cost_k[best] < -_ROUNDING * square_p[p]:
                other = first + best
                there = group_p[first + best]
                there_gc[here, client] = there_gc[there, client_p[other]] = False
                there_gc[there, client] = there_gc[here, client_p[other]] = True
                group_p[p] = there
                group_p[other] = here
                change_q = place_pq[other] - place_q
                total_gq[here] += change_q
                total_gq[there] -= change_q
                # The products of all other groups' members are as before.
                for group in (here, there):
                    member_k = np.flatnonzero(group_p == group)
                    along_p[member_k] = place_pq[member_k] @ total_gq[group]
                changed = True
        if not changed:
            break
    return group_p
