"""Ward's hierarchical clustering (Ward 1963), by SciPy, and the distances that samplers give it."""

import numpy as np

from ..errors import require
from ..types import FloatArray, IntArray


def angles(row_kq: FloatArray) -> FloatArray:
    """Angles between rows in radians, float64 (k, k), without BLAS; a right angle between a zero
    row and any.
    """
    length_k = np.linalg.norm(row_kq, axis=1)
    unit_kq = row_kq / np.where(length_k > 0, length_k, 1.0)[:, None]
    return np.asarray(np.arccos(np.clip(np.einsum("iq,jq->ij", unit_kq, unit_kq), -1.0, 1.0)))


def distances(sketch_mq: FloatArray, similarity: str) -> FloatArray:
    """Condensed distances of all pairs (0, 1), (0, 2), ...: angles in [0, pi], or Euclidean
    lengths.
    """
    if similarity == "l2":
        centred_mq = sketch_mq - sketch_mq.mean(axis=0)
        product_mm = np.einsum("iq,jq->ij", centred_mq, centred_mq)
        square_m = np.sum(centred_mq**2, axis=1)
        distance_mm = np.sqrt(np.maximum(square_m[:, None] + square_m - 2 * product_mm, 0.0))
    else:
        distance_mm = angles(sketch_mq)
        zero_m = ~sketch_mq.any(axis=1)
        distance_mm[np.ix_(zero_m, zero_m)] = 0.0
    return np.asarray(distance_mm[np.triu_indices(len(sketch_mq), k=1)])


def ward_tree(sketch_mq: FloatArray, similarity: str) -> IntArray:
    """The merges of Ward's hierarchical clustering, int64 (m - 1, 2)."""
    if len(sketch_mq) < 2:
        return np.zeros((0, 2), dtype=np.int64)
    from scipy.cluster.hierarchy import linkage  # the core imports NumPy alone

    return np.asarray(
        linkage(distances(sketch_mq, similarity), method="ward")[:, :2].astype(np.int64)
    )


def ward(row_kk: FloatArray, groups: int) -> IntArray:
    """At most ``groups`` groups of the rows, as points, by Ward's method; int64 (k,), numbered
    from 0.
    """
    if len(row_kk) == 1:
        return np.zeros(1, dtype=np.int64)
    require("scipy", "sim")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    label_k = fcluster(linkage(pdist(row_kk), "ward"), groups, criterion="maxclust")
    return np.unique(label_k, return_inverse=True)[1].astype(np.int64)
