"""Lloyd's algorithm for clusters (k-means), from given centres."""

from collections.abc import Callable

import numpy as np

from ..types import FloatArray, IntArray


def lloyd(
    value: FloatArray,
    centre: FloatArray,
    nearest: Callable[[FloatArray], IntArray],
) -> IntArray:
    """Lloyd's algorithm: the clusters 0, 1, ... of values, (m,) or (m, q), from these centres.

    ``nearest`` has the index of each value's nearest centre. Clusters that become empty are left
    out.
    """
    # It ends after a few steps; rounding must not make it run for ever.
    for _ in range(100):
        label_m = nearest(centre)
        moved = np.array([value[label_m == c].mean(axis=0) for c in np.unique(label_m)])
        if np.array_equal(moved, centre):
            break
        centre = moved
    return np.unique(label_m, return_inverse=True)[1]
