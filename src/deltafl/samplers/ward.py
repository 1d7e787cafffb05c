"""Ward's hierarchical clustering (Ward 1963), by SciPy, and the angles that samplers give it.

It compares all pairs: 8 m^2 bytes, and O(m^2) time. Angles are no distances of points, so that
clusters have no centres to keep in place of the pairs.
"""

import numpy as np

from ..errors import require
from ..types import BoolArray, FloatArray, IntArray

#: Samplers that cluster all clients have so many at most, which takes 3.2 GB.
MOST_CLIENTS = 20_000


def angles(row_kq: FloatArray) -> FloatArray:
    """Angles between rows in radians, float64 (k, k); a right angle between a zero row and any."""
    unit_kq = _units(row_kq)
    # einsum, for the bits of BLAS depend on the threads.
    return _angle(np.einsum("iq,jq->ij", unit_kq, unit_kq))


def _units(row_kq: FloatArray) -> FloatArray:
    length_k = np.linalg.norm(row_kq, axis=1)
    # A row of zeros stays one: its cosine with any other is 0.
    divisor_k = np.where(length_k > 0, length_k, 1.0)
    unit_kq: FloatArray = row_kq / divisor_k[:, None]
    return unit_kq


def _angle(cosine: FloatArray) -> FloatArray:
    # Rounding can take a cosine past 1, where arccos is NaN.
    return np.arccos(np.clip(cosine, -1.0, 1.0))


def ward_tree(sketch_mq: FloatArray) -> IntArray:
    """The merges of Ward's clustering by angles, int64 (m - 1, 2); zeros are alike."""
    require("scipy", "sim")
    from scipy.cluster.hierarchy import linkage  # the core imports NumPy alone

    if len(sketch_mq) < 2:
        return np.zeros((0, 2), np.int64)
    # The other columns are heights and sizes.
    merge_k2: IntArray = linkage(_pairs(sketch_mq), "ward")[:, :2].astype(np.int64)
    return merge_k2


def _pairs(sketch_mq: FloatArray) -> FloatArray:
    """The angles of rows i < j one after the other, as SciPy takes them, (m (m - 1) / 2,)."""
    m = len(sketch_mq)
    unit_mq = _units(sketch_mq)
    zero_m: BoolArray = ~np.any(sketch_mq, axis=1)
    angle_p = np.empty(m * (m - 1) // 2)
    begin = 0
    for i in range(m - 1):
        end = begin + m - 1 - i
        # BLAS's bits depend on the threads.
        cosine_j = np.einsum("q,jq->j", unit_mq[i], unit_mq[i + 1 :])
        angle_j = _angle(cosine_j)
        # Clients that nobody has seen are alike, not at a right angle.
        if zero_m[i]:
            angle_j[zero_m[i + 1 :]] = 0.0
        angle_p[begin:end] = angle_j
        begin = end
    return angle_p


def ward(row_kk: FloatArray, groups: int) -> IntArray:
    """At most ``groups`` groups 0, 1, ... of the rows, as points, by Ward's method; int64 (k,)."""
    require("scipy", "sim")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    # SciPy links no single row.
    if len(row_kk) == 1:
        return np.zeros(1, np.int64)
    tree = linkage(pdist(row_kk), "ward")
    label_k = fcluster(tree, groups, criterion="maxclust")
    return np.unique(label_k, return_inverse=True)[1]
