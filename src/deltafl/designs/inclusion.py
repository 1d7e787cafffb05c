"""From scores s_i >= 0, of which only ratios matter, to expectations: how often each client is to
be drawn this round.

- ``draw_probabilities``      p_i = s_i / sum s                    sum 1; for draws with replacement
- ``inclusion_probabilities`` pi_i = min(1, c s_i)  sum n; for draws of distinct clients
- ``probabilities_for_budget`` pi_i = min(1, k s_i / sqrt(c_i)), of a given cost
- ``with_floor``        (1 - g) s_i / sum s + g / m       sum 1; a score that never starves a client

Undefined cases are defined: n > m, NaN or negative scores are errors; all-zero scores mean equal
ones.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OWN_ERRORS, DeltaflError, counted, is_in
from ..types import BoolArray, Cohort, FloatArray, IntArray, is_whole


def check_anyone(num_present: int) -> None:
    """Raise a ``DeltaflError`` if no client is available."""
    if num_present == 0:
        raise DeltaflError("no client is available this round; wait until at least one is")


def check_cohort_size(n: Any, m: int) -> None:
    """Raise a ``DeltaflError`` unless 1 <= n <= m."""
    if not is_whole(n) or not 1 <= n <= m:
        raise DeltaflError(
            f"cannot sample {n!r} of {counted(m, 'client')}; it must be a whole number from 1 to "
            f"{m}"
        )


def mask_of(name: str, given: Any, count: int) -> BoolArray:
    """What a host gives as True or False of each of some clients, bool (count,); a
    ``DeltaflError`` if it is not.
    """
    try:
        mask_k = np.asarray(given)
    except OWN_ERRORS:  # rows of several lengths, for one
        mask_k = np.zeros(())
    if mask_k.shape != (count,) or mask_k.dtype != np.bool_:
        raise DeltaflError(
            f"{name} is {given!r:.60}; it must hold True or False for each of {count} clients"
        )
    return mask_k


def check_cohort(cohort: Any, m: int, whose: str = "the sampler's") -> None:
    """Raise a ``DeltaflError`` unless a sampler, or a host, has made a ``Cohort`` of different
    clients, of m.
    """
    if not isinstance(cohort, Cohort):
        raise DeltaflError(
            f"the sampler returned a {type(cohort).__name__}; return Cohort(client_n, count_n, "
            "expected_n)"
        )
    columns: Any = (
        *cohort[:3],
        cohort.absent,
        cohort.stratum_n,
        cohort.stage_n,
        cohort.cost_n,
    )
    if not all(isinstance(column, np.ndarray) for column in columns):
        kinds = ", ".join(type(column).__name__ for column in columns)
        raise DeltaflError(
            f"{whose} client_n, count_n, expected_n, absent, stratum_n, stage_n and cost_n are of "
            f"the types {kinds}; give NumPy arrays"
        )
    kind: Any = cohort.kind
    if not isinstance(kind, str) or not isinstance(cohort.round, Integral | None):
        raise DeltaflError(
            f"{whose} kind and round are {cohort.kind!r:.60} and {cohort.round!r:.60}; leave them "
            "as they are by default"
        )
    shapes = [column.shape for column in columns[:3]]
    n = len(cohort.client_n) if cohort.client_n.ndim else -1
    if shapes != [(n,)] * 3:
        raise DeltaflError(
            f"{whose} client_n, count_n and expected_n have shapes {shapes}; give NumPy "
            "arrays of the same length"
        )
    # Empty where there is nothing to say.
    for name in ("stratum_n", "stage_n", "cost_n"):
        shape = np.shape(getattr(cohort, name))
        if shape not in ((n,), (0,)):
            raise DeltaflError(
                f"{whose} {name} has shape {shape}; give one entry for each of {n} clients"
            )
    client_n = cohort.client_n
    good = are_clients(client_n, m) and are_clients(cohort.absent, m)
    # Nearly all cohorts are in increasing order; only others pay for a sort.
    if good and not (client_n[1:] > client_n[:-1]).all():
        good = len(np.unique(client_n)) == len(client_n)
    if not good:
        raise DeltaflError(
            f"{whose} client_n is {client_n!r:.60}; it must hold different clients from 0 to "
            f"{m - 1}, "
            "and count_n how often each was drawn"
        )
    # Not ``all(> 0)``, which NaN is not: then nobody knows the expectation.
    good = cohort.count_n.dtype.kind in "iu" and cohort.expected_n.dtype.kind in "iuf"
    if not good or (cohort.count_n < 1).any() or (cohort.expected_n <= 0).any():
        raise DeltaflError(
            f"{whose} count_n is {cohort.count_n!r:.60} and its expected_n "
            f"{cohort.expected_n!r:.60}; a client in the cohort was drawn once or more, and its "
            "expectation is above 0, or NaN where it is not known"
        )


def are_clients(client_k: IntArray, m: int) -> bool:
    """Whether an array is a list of indices of m clients."""
    if client_k.ndim != 1 or client_k.dtype.kind not in "iu":
        return False
    return bool(client_k.min(initial=0) >= 0 and client_k.max(initial=0) < m)


def check_scores(score_m: FloatArray) -> FloatArray:
    """The scores over their largest (all ones if they are all zero); refuses scores that are not
    finite and >= 0.
    """
    score_m = np.asarray(score_m, float)
    if score_m.ndim != 1 or len(score_m) == 0:
        raise DeltaflError(
            f"scores must be a list with one number a client, got shape {score_m.shape}"
        )
    bad = np.flatnonzero(~(np.isfinite(score_m) & (score_m >= 0)))
    if len(bad):
        raise DeltaflError(
            f"the score of client {bad[0]} is {score_m[bad[0]]}; scores must be finite and >= 0"
        )
    top = float(score_m.max())
    if top == 0:
        return np.ones(len(score_m))
    # Over the largest: else sums of huge scores overflow, and products of tiny ones vanish.
    return score_m / top


def draw_probabilities(score_m: FloatArray) -> FloatArray:
    """p_i = s_i / sum_j s_j, float64 (m,); equal where all scores are zero."""
    scaled_m = check_scores(score_m)
    return np.asarray(scaled_m / scaled_m.sum())


def inclusion_probabilities(score_m: FloatArray, n: int) -> FloatArray:
    """pi_i = min(1, c s_i), float64 (m,), with c such that sum pi = n.

    If fewer than n scores are positive, those clients are certain and the rest of the cohort is
    spread evenly. A score that is less than about 1e-311 of the largest is 0 beside it.

    Raises:
        DeltaflError: If n is not in 1..m, or a score is NaN, infinite or negative.

    Example:
        >>> inclusion_probabilities(np.array([8.0, 1.0, 1.0]), 2).tolist()
        [1.0, 0.5, 0.5]
    """
    score_m = check_scores(score_m)
    check_cohort_size(n, len(score_m))
    expected_m = capped(score_m, n)
    zero_m = score_m == 0
    num_zero = int(zero_m.sum())
    left = n - (len(score_m) - num_zero)
    # All with a score are certain: nothing tells the others apart.
    if left > 0:
        expected_m[zero_m] = left / num_zero
    return expected_m


def capped(
    score_m: FloatArray,
    total: float,
    price_m: FloatArray | None = None,
) -> FloatArray:
    """min(1, c s_i), float64 (m,), with c such that their sum, or with prices what they cost, is
    ``total``: whoever would exceed 1 is certain, and the others share what that leaves, until
    nobody does.

    The sum is less where ``total`` is more than all with a score above 0 can take.
    """
    # A sum alone is what scores without prices have always been divided by, to the last bit.
    paid: Callable[..., Any] = np.sum if price_m is None else price_m.dot
    certain_m = np.zeros(len(score_m), bool)
    while True:
        left = total - float(paid(certain_m))
        rest_m = np.where(certain_m, 0.0, score_m)
        if not rest_m.any():
            return certain_m.astype(np.float64)
        # What is left may be tiny beside those that are certain: scale it anew.
        rest_m /= rest_m.max()
        expected_m = np.where(certain_m, 1.0, rest_m * left / paid(rest_m))
        newly_m = (expected_m >= 1.0) & ~certain_m
        if not newly_m.any():
            return expected_m
        certain_m |= newly_m


def probabilities_for_budget(
    score_m: npt.ArrayLike,
    cost_m: npt.ArrayLike,
    budget: float,
) -> FloatArray:
    """pi_i = min(1, k s_i / sqrt(c_i)), float64 (m,), with sum_i pi_i c_i = budget.

    For independent draws with E cost = sum_i pi_i c_i <= B, the variance

        sum_i s_i^2 (1 / pi_i - 1),     s_i = w_i norm(u_i)

    is smallest at these pi_i (Neyman's allocation with unequal costs; Cochran 1977, section 5.5).
    B bounds the sum over clients, such as their seconds in total, not that of the slowest.
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
    return capped(score_m / np.sqrt(cost_m), budget, cost_m)


def with_floor(
    score_m: FloatArray,
    floor: float,
    available_m: BoolArray | None = None,
) -> FloatArray:
    """Mix in a share that does not depend on the score: (1 - g) s / sum s + g / m, float64 (m,),
    sum 1.

    With it pi_i >= min(1, g n / m), so no weight w_i / pi_i exceeds w_i max(1, m / (g n)). m and
    the sum are those of the available clients: large scores of absent ones would leave the floor
    alone to those present.

    Args:
        score_m: (m,) scores >= 0.
        floor: g in [0, 1]; 0 leaves the scores alone.
        available_m: bool (m,), the available clients, at least one; None for all. The others get 0.

    Raises:
        DeltaflError: If the floor is outside [0, 1] or a score is not a finite number >= 0, or
            nobody is available.
    """
    if available_m is not None and not available_m.all():
        check_anyone(int(np.count_nonzero(available_m)))
        present_m = np.zeros(len(score_m))
        present_m[available_m] = with_floor(score_m[available_m], floor)
        return present_m
    if not 0 <= floor <= 1:
        raise DeltaflError(
            f"floor is {floor}; it must be between 0 (scores only) and 1 (no scores)"
        )
    return (1 - floor) * draw_probabilities(score_m) + floor / len(score_m)
