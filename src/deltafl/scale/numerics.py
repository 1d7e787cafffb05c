"""Sums, inner products and medians: the same bits whatever BLAS or number of threads."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .persistent_array import Array
from .stretches import stretches

#: As in ``types.py``, which is above this file.
FloatArray = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating]

#: OpenBLAS gives the product of longer vectors to several threads: its bits depend on their number,
#: and on a busy machine they wait for each other.
ONE_THREAD = 10_000
#: The same of the multiplications in a product of matrices.
_ONE_THREAD_PRODUCT = 2**18
#: Rows that are summed in float32; a sum of many would lose digits.
_FEW_ROWS = 256
#: A sum of so little may have lost digits of its products, of which float32 holds the smallest with
#: few digits, or as 0.
_LEAST_PRODUCT = 1e-32
#: Directions in which clients vary by less than this share of the largest count as constant.
RANK_TOLERANCE = 1e-9


def weighted_sum(
    coef_n: FloatArray,
    rows: Iterable[np.ndarray[Any, Any]],
    num_params: int,
) -> FloatArray:
    """sum_i coef_i row_i in float64, one row after the other: the same bits whatever BLAS or
    thread count.
    """
    # In memory order: the same sums, in less time.
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous and num_params > 1:
        total_d: FloatArray = np.einsum("n,nd->d", coef_n, rows, dtype=np.float64)
        return total_d
    total_d = np.zeros(num_params)
    product_d = np.empty(num_params)
    for coef, row_d in zip(coef_n, rows, strict=True):
        # The product in float64, too: one in float32 would be rounded before it is added.
        total_d += np.multiply(row_d, coef, out=product_d, dtype=np.float64)
    return total_d


def sum_of_rows(coef_n: FloatArray, row_nb: Floats) -> Any:
    """The same of a stretch of rows, (b,), in float32 if they are, and few."""
    if row_nb.dtype != np.float32 or len(row_nb) > _FEW_ROWS:
        return weighted_sum(coef_n, row_nb, row_nb.shape[1])
    return np.einsum("n,nb->b", coef_n.astype(np.float32), row_nb)


def product(left_nq: FloatArray, right_qb: Floats) -> Any:
    """The matrix product, in float32 if the right side is: the same bits whatever thread count."""
    dtype = np.result_type(np.float32, right_qb)
    product_nb = np.empty((len(left_nq), right_qb.shape[1]), dtype)
    left_nq = left_nq.astype(dtype, copy=False)
    # As many columns as one thread multiplies; each of them takes the whole left side.
    step = max(_ONE_THREAD_PRODUCT // max(left_nq.size, 1), 1)
    for first in range(0, right_qb.shape[1], step):
        part = slice(first, first + step)
        np.matmul(left_nq, right_qb[:, part], out=product_nb[:, part])
    return product_nb


def largest(row_nb: np.ndarray[Any, Any]) -> Array:
    """The largest absolute value of each row; 0 if there is none, NaN if one is."""
    # From both ends: the absolute values would be a copy of all rows.
    high_n = row_nb.max(axis=-1, initial=0)
    low_n = row_nb.min(axis=-1, initial=0)
    return np.asarray(np.maximum(high_n, -low_n))


def largest_entry(vector_d: np.ndarray[Any, Any]) -> float:
    """The same of one long vector."""
    parts = stretches(len(vector_d), 1, alone=True)
    return float(np.max([largest(vector_d[None, part]) for part in parts]))


def inner(left_d: Floats, right_d: Floats) -> Any:
    """<left, right> along the last axis, float64: the same bits whatever thread count, or number
    of rows.
    """
    total = np.zeros(left_d.shape[:-1])
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, left_d.shape[-1], ONE_THREAD):
            part = slice(first, first + ONE_THREAD)
            # Row by row: one product of many rows would add up in another order.
            part_11 = left_d[..., None, part] @ right_d[..., part, None]
            total = total + part_11[..., 0, 0]
    if left_d.dtype == right_d.dtype == np.float32:
        return _of_any_size(np.asarray(total), left_d, right_d)[()]
    return total


def _of_any_size(total: FloatArray, left_d: Floats, right_d: Floats) -> FloatArray:
    """The products of float32 vectors, in float64 where float32 does not hold theirs: squares of
    entries from 1e17 on, or below 1e-17.
    """
    size = np.abs(total)
    # NaN is not.
    within = (size >= _LEAST_PRODUCT) & (size < np.inf)
    if np.count_nonzero(within) == within.size:
        return total
    # Each by itself: no other row may change its bits.
    for place in map(tuple, np.argwhere(~within)):
        left_b, right_b = (
            np.broadcast_to(side_d, (*total.shape, side_d.shape[-1]))[place]
            for side_d in (left_d, right_d)
        )
        # Most have no product but 0, as rows do of clients of whom nothing is known.
        if left_b.any() and right_b.any():
            total[place] = inner(left_b.astype(np.float64), right_b.astype(np.float64))
    return total


def lower_median(value_k: FloatArray) -> float:
    """The lower median of the numbers that are known; NaN if none is."""
    known_k = value_k[~np.isnan(value_k)]
    if len(known_k) == 0:
        return np.nan
    return float(np.quantile(known_k, 0.5, method="lower"))
