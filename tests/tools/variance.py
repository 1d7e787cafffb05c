"""The variance of an estimate whose residuals are at hand, as ``Accumulator`` puts it together."""

import numpy as np

from deltafl.estimators.variance import variance_form
from deltafl.scale.numerics import inner
from deltafl.scale.stretches import over_stretches
from deltafl.types import FloatArray, Floats, Replies


def estimate_variance(
    replies: Replies,
    residual_nd: Floats,
) -> float:
    """Estimate E norm(D - E D)^2 over draws and replies, in squared update units, from the l_i, (n,
    d).

    NaN if one cohort is not enough: fewer than two replies of clients that were not certain, or
    unknown expectations.
    """
    form = variance_form(replies)
    if form is None:
        return float("nan")
    n, d = residual_nd.shape

    def look(part: slice) -> FloatArray:
        part_nb = np.asarray(residual_nd[:, part], np.float64)
        common_b = part_nb.sum(axis=0) / max(n, 1)
        part_nb = part_nb - common_b
        return form.sums(part_nb, inner(part_nb, part_nb), common_b)

    # Of two stages there is a row more.
    return form.total(np.sum(over_stretches(look, d, n), axis=0))
