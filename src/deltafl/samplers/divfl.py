"""DivFL (Balakrishnan et al., ICLR 2022): a cohort whose updates represent all clients'. Biased."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..types import FloatArray, IntArray, Rng
from .base import NewFirst, NewFirstState


@dataclass(frozen=True)
class DivFL(NewFirst):
    """Greedily selects a cohort S with a small sum over clients k of min over i in S of norm(u_k -
    u_i).

    This is the paper's form without overheads, on distances of last updates. Starting from the
    empty set, it adds the client that makes the sum smallest until there are n. Ours: all clients
    are first selected once, in random order, and enter the sum once they reply; distances are those
    of sketches of u_i - c_i, of ``sketch_size`` numbers, with a relative error of about 1 /
    sqrt(sketch_size). Costs O(m^2 (q + n)) time a round: at most 5,000 clients.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.
    """

    sketch_size: int = 64

    # The matrix of distances has 8 m^2 bytes, and takes O(m^2) time a round.
    most_clients: ClassVar = 5000
    ranges: ClassVar = {"sketch_size": "[1, 128]"}

    def again(
        self, state: NewFirstState, present_k: IntArray, size: int, wanted: int, rng: Rng
    ) -> IntArray:
        seen_k = present_k[state.seen_m[present_k]]
        distance_ck = distances(state.last_mq[seen_k], state.last_mq[state.seen_m])
        return seen_k[greedy(distance_ck, min(wanted, len(seen_k)))]


def distances(candidate_cq: FloatArray, point_kq: FloatArray) -> FloatArray:
    """Euclidean distances, float64 (c, k), without BLAS: its bits depend on the threads."""
    distance_ck = np.empty((len(candidate_cq), len(point_kq)))
    for row_k, candidate_q in zip(distance_ck, candidate_cq, strict=True):
        difference_kq = point_kq - candidate_q
        row_k[:] = np.sqrt(np.einsum("kq,kq->k", difference_kq, difference_kq))
    return distance_ck


def greedy(distance_ck: FloatArray, size: int, cost_c: FloatArray | float = 0.0) -> IntArray:
    """Rows of ``size`` candidates, each the best for the sum over points of the least distance
    and what the candidates cost.

    Example:
        >>> greedy(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 8.0], [9.0, 8.0, 0.0]]), 2).tolist()
        [1, 2]
    """
    # From each point to the nearest of those chosen, of whom there are none yet.
    nearest_k = np.full(distance_ck.shape[1], np.inf)
    free_c = np.ones(len(distance_ck), bool)
    chosen: list[int] = []
    for _ in range(size):
        sum_c = np.minimum(distance_ck, nearest_k).sum(axis=1) + cost_c
        best = int(np.argmin(np.where(free_c, sum_c, np.inf)))
        nearest_k = np.minimum(nearest_k, distance_ck[best])
        free_c[best] = False
        chosen.append(best)
    return np.array(chosen, np.int64)
