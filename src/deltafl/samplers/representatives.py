"""Clients that stand for all: each client near one of them (facility location)."""

import numpy as np

from ..types import FloatArray, IntArray


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
