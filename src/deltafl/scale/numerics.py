"""Sums, inner products and medians: the same bits whatever BLAS or number of threads."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..types import FloatArray

#: OpenBLAS gives the product of longer vectors to several threads: its bits depend on their number,
#: and on a busy machine they wait for each other.
ONE_THREAD = 10_000
#: Directions in which clients vary by less than this share of the largest count as constant.
RANK_TOLERANCE = 1e-9


def weighted_sum(
    coef_n: FloatArray, rows: Iterable[np.ndarray[Any, Any]], num_params: int
) -> FloatArray:
    """sum_i coef_i row_i in float64, one row after the other: the same bits whatever BLAS or
    thread count.
    """
    total_d = np.zeros(num_params)
    product_d = np.empty(num_params)
    for coef, row_d in zip(coef_n, rows, strict=True):
        # The product in float64, too: one in float32 would be rounded before it is added.
        total_d += np.multiply(row_d, coef, out=product_d, dtype=np.float64)
    return total_d


def inner(left_d: FloatArray, right_d: FloatArray) -> Any:
    """<left, right> along the last axis of float64 arrays: the same bits whatever thread count,
    or number of rows.
    """
    total = np.zeros(left_d.shape[:-1])
    for first in range(0, left_d.shape[-1], ONE_THREAD):
        part = slice(first, first + ONE_THREAD)
        total = total + (left_d[..., None, part] @ right_d[..., part, None])[..., 0, 0]
    return total


def lower_median(value_k: FloatArray) -> float:
    """The lower median of the numbers that are known; NaN if none is."""
    known_k = value_k[~np.isnan(value_k)]
    if len(known_k) == 0:
        return np.nan
    return float(np.quantile(known_k, 0.5, method="lower"))
