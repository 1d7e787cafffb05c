"""DivFL (Balakrishnan et al., ICLR 2022): a cohort whose updates stand for everybody's. Biased."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import Sampler
from .unweighted import filled_up, places


class DivState(NamedTuple):
    """What is known of the clients' updates.

    Attributes:
        sketch_mq: float64 (m, q), sketches of the last known updates; 0 for clients that never replied.
        selected_m: bool (m,), who was asked.
        seen_m: bool (m,), who replied.
    """

    sketch_mq: FloatArray
    selected_m: BoolArray
    seen_m: BoolArray


@dataclass(frozen=True)
class DivFL(Sampler):
    """Takes the cohort S that makes sum over clients k of min over i in S of norm(u_k - u_i) small, greedily.

    This is the facility location function of the paper on distances of last known updates, its form without overheads:
    only clients that were asked send theirs. Starting from the empty set, the client whose joining makes the sum
    smallest is added until there are n. Replies count alike (``plain-mean``), as in algorithm 1; the authors' code
    weighs them by size.

    Our reading: the authors' code asks everybody for a gradient before the first round; here everyone is asked once
    first, in random order, and a client enters the sum once it replied. Ties are broken at random.
    Distances are those of sketches of u_i - c_i (see ``sketch.py``; each has a relative error of some 1 / sqrt(q)); so
    with an estimator that has controls, residuals are compared instead of updates.

    Costs O(m^2 (q + n)) time and O(m^2) memory a round.

    Attributes:
        sketch_size: Numbers q of a sketch, 1 to 128.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.
    """

    sketch_size: int = 64

    def __post_init__(self) -> None:
        """Refuse impossible sizes."""
        if not 1 <= self.sketch_size <= 128:
            raise DeltaflError(f"divfl's sketch_size is {self.sketch_size}; a sketch has from 1 to 128 numbers")

    def init(self, population: Population) -> DivState:
        """Nothing is known."""
        m = population.num_clients
        return DivState(np.zeros((m, self.sketch_size)), np.zeros(m, dtype=np.bool_), np.zeros(m, dtype=np.bool_))

    def open(
        self, state: DivState, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """Ask the new ones; fill up with the most diverse of those who replied, then with anyone."""
        present_k, size = places(available_m, n, rng)
        new = present_k[~state.selected_m[present_k]][:size]
        able = present_k[state.seen_m[present_k]]
        wanted = min(size - len(new), len(able))
        diverse = able[:0]
        if wanted > 0:  # while new clients fill the cohort, no distances are needed
            distance_ck = distances(state.sketch_mq[able], state.sketch_mq[state.seen_m])
            diverse = able[greedy(distance_ck, wanted)]
        return filled_up(np.concatenate([new, diverse]), present_k, size)

    def update(self, state: DivState, cohort: Cohort, reports: Reports) -> DivState:
        """Remember the sketches of those who replied."""
        here = reports.responded_n
        sketch_mq, selected_m, seen_m = state.sketch_mq.copy(), state.selected_m.copy(), state.seen_m.copy()
        selected_m[cohort.client_n] = True
        seen_m[cohort.client_n[here]] = True
        sketch_mq[cohort.client_n[here]] = reports.sketch_nq[here]
        return DivState(sketch_mq, selected_m, seen_m)


def distances(candidate_cq: FloatArray, point_kq: FloatArray) -> FloatArray:
    """Euclidean distances, float64 (c, k), without BLAS: the same bits whatever the number of threads."""
    distance_ck = np.empty((len(candidate_cq), len(point_kq)))
    for row_k, candidate_q in zip(distance_ck, candidate_cq, strict=True):
        difference_kq = point_kq - candidate_q
        row_k[:] = np.sqrt(np.einsum("kq,kq->k", difference_kq, difference_kq))
    return distance_ck


def greedy(distance_ck: FloatArray, size: int) -> IntArray:
    """Rows of ``size`` candidates, each chosen to make the sum over points of the least distance smallest.

    Example:
        >>> greedy(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 8.0], [9.0, 8.0, 0.0]]), 2).tolist()
        [1, 2]
    """
    nearest_k = np.full(distance_ck.shape[1], np.inf)
    free_c = np.ones(len(distance_ck), dtype=np.bool_)
    chosen: list[int] = []
    for _ in range(size):
        sum_c = np.minimum(distance_ck, nearest_k).sum(axis=1)
        best = int(np.argmin(np.where(free_c, sum_c, np.inf)))
        nearest_k = np.minimum(nearest_k, distance_ck[best])
        free_c[best] = False
        chosen.append(best)
    return np.array(chosen, dtype=np.int64)
