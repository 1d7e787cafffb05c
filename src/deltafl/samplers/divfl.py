"""DivFL (Balakrishnan et al., ICLR 2022): a cohort whose updates represent all clients'. Biased."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import Sampler
from .unweighted import filled_up, places


class DivState(NamedTuple):
    """The clients' last updates.

    Attributes:
        sketch_mq: float64 (m, q), their sketches; 0 for clients that never replied.
        selected_m: bool (m,), True once selected.
        seen_m: bool (m,), True once replied.
    """

    sketch_mq: FloatArray
    selected_m: BoolArray
    seen_m: BoolArray


@dataclass(frozen=True)
class DivFL(Sampler):
    """Takes the cohort S that makes sum over clients k of min over i in S of norm(u_k - u_i) small, greedily.

    This is the facility location function of the paper on distances of last updates, in its form without overheads:
    only selected clients send theirs. Starting from the empty set, the client that makes the sum smallest is added
    until there are n. Replies are averaged evenly (``plain-mean``), as in algorithm 1; the authors' code weighs them by
    size.

    Choices of ours: the authors' code collects a gradient of every client before the first round; here all clients are
    selected once first, in random order, and enter the sum once they reply. Ties are broken at random. Distances are
    those of sketches of u_i - c_i (``sketch.py``), with a relative error of about 1 / sqrt(q), so with a control
    variate residuals are compared.

    Costs O(m^2 (q + n)) time and O(m^2) memory a round.

    Attributes:
        sketch_size: Numbers q of a sketch, 1 to 128.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.
    """

    sketch_size: int = 64

    ranges: ClassVar = {"sketch_size": "[1, 128]"}

    def init(self, population: Population) -> DivState:
        """No client has been selected."""
        m = population.num_clients
        return DivState(np.zeros((m, self.sketch_size)), np.zeros(m, dtype=np.bool_), np.zeros(m, dtype=np.bool_))

    def open(
        self, state: DivState, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """Select new clients; fill up with the most diverse of those that replied, then with any."""
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
        """Store the sketches of the clients that replied."""
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
