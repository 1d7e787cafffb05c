"""Ward's hierarchical clustering (Ward 1963), by SciPy, and the angles that samplers give it."""

import numpy as np

from ..errors import require
from ..types import FloatArray, IntArray


def angles(row_kq: FloatArray) -> FloatArray:
    """Angles between rows in radians, float64 (k, k); a right angle between a zero row and any."""
    length_k = np.linalg.norm(row_kq, axis=1)
    unit_kq = row_kq / np.where(length_k > 0, length_k, 1.0)[:, None]
    cosine_kk = np.einsum("iq,jq->ij", unit_kq, unit_kq)  # BLAS's bits depend on the threads
    return np.asarray(np.arccos(np.clip(cosine_kk, -1.0, 1.0)))


def ward_tree(sketch_mq: FloatArray) -> IntArray:
    """The merges of Ward's clustering by angles, int64 (m - 1, 2); zeros are alike."""
    require("scipy", "sim")
    from scipy.cluster.hierarchy import linkage  # the core imports NumPy alone

    if len(sketch_mq) < 2:
        return np.zeros((0, 2), np.int64)
    angle_mm = angles(sketch_mq)
    zero_m = ~sketch_mq.any(axis=1)
    angle_mm[np.ix_(zero_m, zero_m)] = 0.0
    above = np.triu_indices(len(sketch_mq), k=1)
    merge_k2: IntArray = linkage(angle_mm[above], "ward")[:, :2].astype(np.int64)
    return merge_k2


def ward(row_kk: FloatArray, groups: int) -> IntArray:
    """At most ``groups`` groups 0, 1, ... of the rows, as points, by Ward's method; int64 (k,)."""
    require("scipy", "sim")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    if len(row_kk) == 1:
        return np.zeros(1, np.int64)
    label_k = fcluster(linkage(pdist(row_kk), "ward"), groups, criterion="maxclust")
    return np.unique(label_k, return_inverse=True)[1]
