"""Norms of updates: of each, and of its distance from their mean."""

from itertools import product
from typing import NamedTuple

import numpy as np

from ..scale.numerics import ONE_THREAD, inner
from ..types import FloatArray, Floats, Params, Reports

#: Numbers converted to float64 at a time.
_BLOCK = 2**16


class AboutMean(NamedTuple):
    """Rows without their mean, and the squared norms of what is left of each."""

    mean_b: Floats
    left_kb: Floats
    square_k: FloatArray


def about_mean(row_kb: Floats, weight_k: FloatArray | None) -> AboutMean:
    """A stretch of rows about their plain or weighted mean.

    Not from norms and inner products, whose difference keeps few digits where rows are alike.
    """
    # If nobody has replied there is no mean.
    if len(row_kb) == 0:
        return AboutMean(np.zeros(row_kb.shape[1]), row_kb, np.zeros(0))
    # Of float32, as updates come: another rounding would change what samplers have learned.
    mean_b = np.average(row_kb.astype(np.float32, copy=False), axis=0, weights=weight_k)
    left_kb = row_kb - mean_b
    return AboutMean(mean_b, left_kb, inner(left_kb, left_kb))


def squared_norms(
    update_kd: Params | FloatArray,
    weight_k: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """norm(u_i)^2 and norm(u_i - mean)^2 of updates or their sketches; the mean is plain, or
    weighted.
    """
    squared_norm_k, squared_deviation_k = np.zeros((2, len(update_kd)))
    if len(update_kd) == 0:
        return squared_norm_k, squared_deviation_k
    d = update_kd.shape[1]
    mean_d = np.average(update_kd, axis=0, weights=weight_k)
    rows = max(1, _BLOCK // max(1, min(d, ONE_THREAD)))
    for first, start in product(
        range(0, len(update_kd), rows),
        range(0, d, ONE_THREAD),
    ):
        block = slice(first, first + rows)
        part = slice(start, start + ONE_THREAD)
        wide_bp = update_kd[block, part].astype(float)
        squared_norm_k[block] += inner(wide_bp, wide_bp)
        wide_bp -= mean_d[part]
        squared_deviation_k[block] += inner(wide_bp, wide_bp)
    return squared_norm_k, squared_deviation_k


def measure(
    update_nd: Params | FloatArray,
    reports: Reports,
    weight_n: FloatArray | None = None,
) -> Reports:
    """Fill ``squared_norms`` of the clients that responded into reports; the other rows are
    ignored.
    """
    here = reports.responded_n
    if weight_n is not None:
        weight_n = weight_n[here]
    norm_n, deviation_n = np.zeros((2, len(here)))
    norm_n[here], deviation_n[here] = squared_norms(update_nd[here], weight_n)
    return reports._replace(squared_norm_n=norm_n, squared_deviation_n=deviation_n)
