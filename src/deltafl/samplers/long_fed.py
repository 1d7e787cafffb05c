"""Emulating full participation (Li et al. 2024): cohorts that represent all, and alike clients
selected alike. Biased.
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
from .base import NewFirst
from .representatives import distances, greedy

_NOBODY = -1


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
        present_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        candidate_c = present_k[state.seen_m[present_k]]
        last_kq = state.last_mq[state.seen_m]
        distance_kk = distances(last_kq, last_kq)
        # Of all pairs: what V means must not depend on who is there.
        distance_kk /= distance_kk.max(initial=0.0) or 1.0
        row_c = np.searchsorted(np.flatnonzero(state.seen_m), candidate_c)
        cost_c = cost(state)[candidate_c] / self.penalty
        return candidate_c[greedy(distance_kk[row_c], min(wanted, len(row_c)), cost_c)]

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
    return np.asarray(owed_m - of_others_m)


def most_alike(last_mq: FloatArray, seen_m: BoolArray, similar: float) -> IntArray:
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
