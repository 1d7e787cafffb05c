"""Cohorts that represent all clients, each client near one of them (facility location): DivFL
(Balakrishnan et al., ICLR 2022), and LongFed (Li et al. 2024), which also lets alike clients take
turns. Biased.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import (
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Population,
    Reports,
    Rng,
    Within,
)
from .base import NewFirst, NewFirstState

_NOBODY = -1


def distances(candidate_cq: FloatArray, point_kq: FloatArray) -> FloatArray:
    """Euclidean distances, float64 (c, k), without BLAS: its bits depend on the threads."""
    distance_ck = np.empty((len(candidate_cq), len(point_kq)))
    for row_k, candidate_q in zip(distance_ck, candidate_cq, strict=True):
        difference_kq = point_kq - candidate_q
        row_k[:] = np.sqrt(np.einsum("kq,kq->k", difference_kq, difference_kq))
    return distance_ck


def greedy(
    distance_ck: FloatArray,
    size: int,
    cost_c: FloatArray | float = 0.0,
) -> IntArray:
    """Rows of ``size`` candidates, or of all, each the best for the sum over points of the least
    distance and what the candidates cost.

    Example:
        >>> greedy(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 8.0], [9.0, 8.0, 0.0]]), 2).tolist()
        [1, 2]
    """
    # From each point to the nearest of those chosen, of whom there are none yet.
    nearest_k = np.full(distance_ck.shape[1], np.inf)
    free_c = np.ones(len(distance_ck), bool)
    chosen: list[int] = []
    for _ in range(min(size, len(distance_ck))):
        sum_c = np.minimum(distance_ck, nearest_k).sum(axis=1) + cost_c
        best = int(np.argmin(np.where(free_c, sum_c, np.inf)))
        nearest_k = np.minimum(nearest_k, distance_ck[best])
        free_c[best] = False
        chosen.append(best)
    return np.array(chosen, np.int64)


@dataclass(frozen=True)
class DivFL(NewFirst):
    """Greedily selects a cohort S with a small sum over clients k of min over i in S of norm(u_k -
    u_i).

    This is the paper's form without overheads, on distances of last updates. Starting from the
    empty set, it adds the client that makes the sum smallest until there are n. Ours: all clients
    are first selected once, in random order, and enter the sum once they reply; distances are those
    of sketches of u_i - c_i. Costs O(m^2 (q + n)) time a round: at most 5,000 clients.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.

    Attributes:
        sketch_size: q, length of a sketch; distances have a relative error of about 1 / sqrt(q).
    """

    sketch_size: int = 64

    # The matrix of distances has 8 m^2 bytes, and takes O(m^2) time a round.
    most_clients = 5000
    ranges: ClassVar = {"sketch_size": "[1, 128]"}

    def again(
        self,
        state: NewFirstState,
        seen_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        distance_ck = distances(state.last_mq[seen_k], state.last_mq[state.seen_m])
        return seen_k[greedy(distance_ck, wanted)]


class EmulationState(NamedTuple):
    """What ``NewFirstState`` has, and whose turn it is."""

    weight_m: FloatArray
    selected_m: BoolArray
    seen_m: BoolArray
    last_mq: FloatArray
    rounds: Counts
    like_m: IntArray  # the client most like it, -1 for none
    # virtual queue: selections more than those of the client like it
    ahead_m: Annotated[FloatArray, Within("[0, round]")]
    behind_m: Annotated[FloatArray, Within("[0, round]")]  # the same for selections less

    def is_consistent(self) -> bool:
        """Whether ``like_m`` names clients, and only those replied who were selected."""
        is_client_m = (self.like_m >= _NOBODY) & (self.like_m < len(self.like_m))
        return bool(np.all(is_client_m) and np.all(self.seen_m <= self.selected_m))


@dataclass(frozen=True)
class LongFed(NewFirst):
    """Greedily selects a cohort S near to all clients' updates, while clients with similar updates
    take turns.

    The distance from full participation is bounded by D(S), the sum over clients k of the least
    norm(u_k - u_i) over i in S. Individual fairness is that i and r(i), the client most like it,
    are selected as often but for ``tolerance`` delta. With x_i in {0, 1} for "is in S", two virtual
    queues a client say how far that is violated,

        A_i <- max(A_i + x_i - x_r(i) - delta, 0),   B_i <- max(B_i + x_r(i) - x_i - delta, 0),

    and S has, by drift plus penalty (Lyapunov), a small

        V D(S) + sum_i (A_i - B_i) (x_i - x_r(i)).

    The first term is submodular and the second a sum over S: starting from the empty set, the
    client that makes it smallest is added until there are n.

    The paper's abstracts name a small gradient-space error of the cohort, like frequencies for
    clients of like data, Lyapunov optimization and submodular functions. Its equations and
    constants were not at hand: D(S), a client like each and queues of their differences are as in
    a public reimplementation. Ours: the client like i is the one with the nearest update, if not
    farther than ``similar`` times the largest distance; distances in D(S) are divided by the
    largest, so that V is free of units; all defaults (V = 10 was better on digits than 0.1 to 3,
    and as good as 30; seeds 3000 to 3002); all clients are first selected once, in random order,
    and count once they have replied; distances are those of sketches of the last u_i - c_i, of
    ``sketch_size`` numbers. Costs O(m^2 (q + n)) time a round: at most 5,000 clients.

    Source: Li, Miao, Zhao, Zhou, Vicky Zhao, Ji, Zhou and Liu, arXiv 2405.13584 (also known as
    LongFed).

    Attributes:
        penalty: V > 0; large values do without fairness, as ``divfl`` does.
        similar: In [0, 1], how far a client may be to be like another; 0 does without fairness.
        tolerance: delta >= 0, selections a round.
        sketch_size: Numbers of a sketch.
    """

    penalty: float = 10.0
    similar: float = 1.0
    tolerance: float = 0.0
    sketch_size: int = 64

    row_fields = ("selected_m", "seen_m", "last_mq", "ahead_m", "behind_m")
    # As for ``divfl``: the matrix of distances has 8 m^2 bytes.
    most_clients = 5000
    ranges: ClassVar = {
        "penalty": "(0, inf)",
        "similar": "[0, 1]",
        "tolerance": "[0, inf)",
        "sketch_size": "[1, 128]",
    }

    def init(self, population: Population) -> EmulationState:
        m = population.num_clients
        nothing_m = np.zeros(m)
        return EmulationState(
            **super().init(population)._asdict(),
            like_m=np.full(m, _NOBODY),
            ahead_m=nothing_m,
            behind_m=nothing_m,
        )

    def again(
        self,
        state: EmulationState,
        seen_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        last_kq = state.last_mq[state.seen_m]
        distance_kk = distances(last_kq, last_kq)
        # Of all pairs: what V means must not depend on who is there.
        distance_kk /= distance_kk.max(initial=0.0) or 1.0
        row_c = np.searchsorted(np.flatnonzero(state.seen_m), seen_k)
        cost_c = cost(state)[seen_k] / self.penalty
        return seen_k[greedy(distance_kk[row_c], wanted, cost_c)]

    def update(
        self,
        state: EmulationState,
        cohort: Cohort,
        reports: Reports,
    ) -> EmulationState:
        in_cohort_m = np.zeros(len(state.like_m))
        in_cohort_m[cohort.client_n] = 1.0
        more_m = in_cohort_m - in_cohort_m[state.like_m]
        more_m[state.like_m == _NOBODY] = 0.0
        following: EmulationState = super().update(state, cohort, reports)
        return following._replace(
            like_m=most_alike(following.last_mq, following.seen_m, self.similar),
            ahead_m=np.maximum(state.ahead_m + more_m - self.tolerance, 0.0),
            behind_m=np.maximum(state.behind_m - more_m - self.tolerance, 0.0),
        )


def cost(state: EmulationState) -> FloatArray:
    """What the selection of each client adds to the drift, float64 (m,)."""
    owed_m = state.ahead_m - state.behind_m
    has_like_m = state.like_m != _NOBODY
    owed_m[~has_like_m] = 0.0
    # It is also the client like others, whose queues it moves the other way.
    of_others_m = np.bincount(state.like_m[has_like_m], owed_m[has_like_m], len(owed_m))
    return owed_m - of_others_m


def most_alike(
    last_mq: FloatArray,
    seen_m: BoolArray,
    similar: float,
) -> IntArray:
    """The client with the nearest update to each, int64 (m,); -1 for none near enough."""
    like_m = np.full(len(last_mq), _NOBODY)
    seen_k = np.flatnonzero(seen_m)
    if len(seen_k) < 2:
        return like_m
    distance_kk = distances(last_mq[seen_k], last_mq[seen_k])
    largest = distance_kk.max()
    np.fill_diagonal(distance_kk, np.inf)
    near_k = distance_kk.argmin(axis=1)
    alike_k = distance_kk[np.arange(len(seen_k)), near_k] <= similar * largest
    like_m[seen_k[alike_k]] = seen_k[near_k[alike_k]]
    return like_m
