"""Norms of updates: of each, and of its distance from their mean."""

from itertools import product
from typing import NamedTuple

import numpy as np

from ..scale.numerics import ONE_THREAD, inner
from ..types import FloatArray, Floats, Reports

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


def squared_norms(update_kd: Floats, mean_d: Floats | None = None) -> FloatArray:
    """norm(u_i)^2 of updates, or norm(u_i - mean)^2."""
    square_k = np.zeros(len(update_kd))
    d = update_kd.shape[1]
    rows = max(1, _BLOCK // max(1, min(d, ONE_THREAD)))
    for first, start in product(
        range(0, len(update_kd), rows),
        range(0, d, ONE_THREAD),
    ):
        block = slice(first, first + rows)
        part = slice(start, start + ONE_THREAD)
        wide_bp = update_kd[block, part].astype(float)
        if mean_d is not None:
            wide_bp -= mean_d[part]
        square_k[block] += inner(wide_bp, wide_bp)
    return square_k


def measure(
    update_nd: Floats,
    reports: Reports,
    weight_n: FloatArray | None = None,
) -> Reports:
    """Fill the squared norms of the clients that responded into reports, and those about their
    mean, plain or weighted; the other rows are ignored.
    """
    here = reports.responded_n
    norm_n, deviation_n = np.zeros((2, len(here)))
    if here.any():
        update_kd = update_nd[here]
        if weight_n is not None:
            weight_n = weight_n[here]
        mean_d = np.average(update_kd, axis=0, weights=weight_n)
        norm_n[here] = squared_norms(update_kd)
        deviation_n[here] = squared_norms(update_kd, mean_d)
    return reports._replace(squared_norm_n=norm_n, squared_deviation_n=deviation_n)
