"""sum_j w_j c_j over all clients, followed by differences: n d operations a round and not m d.

Replace c_i by c_i', add w_i (c_i' - c_i): exact but for rounding, about 2^-53 of the numbers that pass through. Where
one c_i was enormous for a while, such as 1e18 from a broken client, the others' part of the sum is rounded away; when
that c_i is replaced, what is left is no longer the sum of the others, and the estimate would have that bias for ever.
So a bound of all rounding errors so far goes with the sum, and where it is no longer small beside the sum, the sum has
to be formed anew. In ordinary runs it never is.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..types import FloatArray

#: A sum is lost where rounding may be more than this share of its largest entry.
LOST = 2.0**-20


class RunningSum(NamedTuple):
    """A sum, and what rounding may have done to it.

    Attributes:
        total_d: float64 (d,).
        rounding: float64 (), a bound of the error of every entry, >= 0.
    """

    total_d: FloatArray
    rounding: FloatArray

    @property
    def is_lost(self) -> bool:
        """Whether the error may be more than a millionth of the sum's largest entry."""
        return float(self.rounding) > LOST * largest(self.total_d)

    def plus(self, coef_n: FloatArray, rows: Iterable[np.ndarray[Any, Any]]) -> "RunningSum":
        """With sum_i coef_i row_i added."""
        size = largest(self.total_d)

        def noted() -> Iterator[np.ndarray[Any, Any]]:
            nonlocal size
            for coef, row_d in zip(coef_n, rows, strict=True):
                size += abs(float(coef)) * largest(row_d)
                yield row_d

        total_d = self.total_d + weighted_sum(coef_n, noted(), len(self.total_d))
        operations = len(coef_n) + 2  # a difference and a product for each row, then the sums
        return RunningSum(total_d, np.asarray(self.rounding + operations * np.finfo(np.float64).eps * size))


def weighted_sum(coef_n: FloatArray, rows: Iterable[np.ndarray[Any, Any]], num_params: int) -> FloatArray:
    """sum_i coef_i row_i in float64, one row after the other: the same bits whatever BLAS or thread count."""
    total_d = np.zeros(num_params)
    for coef, row_d in zip(coef_n, rows, strict=True):
        total_d += coef * row_d.astype(np.float64, copy=False)
    return total_d


def largest(value_d: np.ndarray[Any, Any]) -> float:
    """The largest absolute value; 0 if there is none."""
    return max(float(value_d.max(initial=0)), -float(value_d.min(initial=0)))
