"""DivFL (Balakrishnan et al., ICLR 2022): a cohort whose updates represent all clients'. Biased."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, IntArray, Population, Reports
from .mifa import NewFirst
from .unweighted import History

#: The matrix of distances has 8 m^2 bytes, and takes O(m^2) time a round.
_MAX_CLIENTS = 5000


@dataclass(frozen=True)
class DivFL(NewFirst):
    """Takes the cohort S that makes sum over clients k of min over i in S of norm(u_k - u_i) small, greedily.

    This is the facility location function of the paper on distances of last updates, in its form without overheads:
    only selected clients send theirs. Starting from the empty set, the client that makes the sum smallest is added
    until there are n. Replies are averaged evenly (``plain-mean``), as in algorithm 1; the authors' code weighs them by
    size.

    Choices of ours: the authors' code collects a gradient of every client before the first round; here all clients are
    selected once first, in random order, and enter the sum once they reply. Ties are broken at random. Distances are
    those of sketches of u_i - c_i (``sketch.py``), with a relative error of about 1 / sqrt(q), so with a control
    variate residuals are compared.

    Costs O(m^2 (q + n)) time and 8 m^2 bytes a round, so more than 5,000 clients are refused; the paper proposes
    stochastic greedy for them.

    Attributes:
        sketch_size: Numbers q of a sketch, 1 to 128.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.
    """

    sketch_size: int = 64

    ranges: ClassVar = {"sketch_size": "[1, 128]"}

    @property
    def value_size(self) -> int:
        """The sketches of the last updates are remembered."""
        return self.sketch_size

    def init(self, population: Population) -> History:
        """No client has been selected."""
        if population.num_clients > _MAX_CLIENTS:
            raise DeltaflError(
                f"divfl compares all pairs of clients, {population.num_clients} are too many; use it with at most "
                f"{_MAX_CLIENTS}, or another sampler"
            )
        return super().init(population)

    def again(self, state: History, seen_k: IntArray, wanted: int, size: int, rng: np.random.Generator) -> IntArray:
        """The clients that represent all that replied best."""
        distance_ck = distances(state.value_mq[seen_k], state.value_mq[state.last_m > 0])
        return seen_k[greedy(distance_ck, wanted)]

    def values(self, state: History, client_n: IntArray, reports: Reports) -> FloatArray:
        """The sketches."""
        return reports.sketch_nq


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
