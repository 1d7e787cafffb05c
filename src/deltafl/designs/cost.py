"""The best probabilities where clients differ in what they cost.

For independent draws with E cost = sum_i pi_i c_i <= B, the variance

    sum_i s_i^2 (1 / pi_i - 1),     s_i = w_i norm(u_i)

is smallest at pi_i = min(1, k s_i / sqrt(c_i)), k such that the budget B is spent (Neyman's
allocation with unequal costs; Cochran 1977, section 5.5). The n that goes with it is sum_i pi_i. B
bounds the sum over clients, such as their seconds in total, not that of the slowest.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, is_in
from ..types import FloatArray
from .inclusion import capped, check_scores


def per_cost(score_m: FloatArray, cost_m: FloatArray) -> FloatArray:
    """``score_m / sqrt(cost_m)``: scores that are best for a given total cost."""
    return score_m / np.sqrt(cost_m)


def probabilities_for_budget(
    score_m: npt.ArrayLike,
    cost_m: npt.ArrayLike,
    budget: float,
) -> FloatArray:
    """pi_i = min(1, k s_i / sqrt(c_i)), float64 (m,), with sum_i pi_i c_i = budget.

    Their sum is the n of the budget: round it down to a whole cohort. All are 1 if the budget pays
    for everyone, as are those of the clients with a score above 0 if it pays for them.

    Args:
        score_m: (m,) scores s_i >= 0, best w_i times the norm that is expected of u_i - c_i.
        cost_m: (m,) numbers above 0, in any unit.
        budget: Above 0, the expected cost of a round in that unit.

    Raises:
        DeltaflError: For scores, costs or a budget out of range.

    Example:
        >>> probabilities_for_budget([1, 1, 1], [1, 1, 4], budget=2).tolist()
        [0.5, 0.5, 0.25]
    """
    given: Any = cost_m
    cost_m = np.asarray(given, float)
    score_m = check_scores(np.asarray(score_m, float))
    if cost_m.shape != score_m.shape or not np.all((cost_m > 0) & np.isfinite(cost_m)):
        raise DeltaflError(
            f"cost_m must hold a number above 0 for each of {len(score_m)} clients, and is "
            f"{given!r:.60}"
        )
    if not is_in(budget, "(0, inf)"):
        raise DeltaflError(f"budget is {budget!r:.60}; it must be a number above 0")
    return capped(per_cost(score_m, cost_m), budget, cost_m)
