"""What table 1 claims, and what was measured, method by method: slopes and ratios with 95 % intervals.

A slope is that of log(mean over seeds) against log T by least squares, slope = sum_t c_t log mean_t. Linearised, seed s
moves it by r_s = sum_t c_t value_ts / mean_t, hence the interval slope +- t_{S-1} sd(r) / sqrt(S), t the 0.975 quantile
of Student's t. Ratios have the paired interval of ``analysis.statistics.ratio_of_means``.
"""

from collections.abc import Sequence
from math import inf, isnan, nan, sqrt
from typing import NamedTuple

import numpy as np

from deltafl.analysis.statistics import CONFIDENCE, ratio_of_means
from deltafl.errors import require
from deltafl.samplers import parse_label
from deltafl.types import FloatArray

#: A slope this near to the claimed order counts as the claimed order: T is finite.
TOLERANCE = 0.1
#: A wider interval does not tell the orders -1/2 and -1 apart.
WIDEST = 0.4
BASELINE = "uniform"


class Claim(NamedTuple):
    """What the paper claims of a method.

    Attributes:
        bound: The order of its bound, in GitHub's math.
        order: Exponent of T for large T.
        order_still: The same where f(x_0) = f* and sigma = 0.
    """

    bound: str
    order: float
    order_still: float


_AVG = Claim(r"$(F + \sigma^2 + K \sigma_G^2) / \sqrt{nKT} + M^2 / (KT)$", -0.5, -0.5)
_DIV = Claim(r"$(F + \sigma^2) / \sqrt{nKT} + (\sigma^2 + 4 K \zeta^2) / (KT)$", -0.5, -1.0)
#: By name of the sampler. F = f(x_0) - f*, M^2 = sigma^2 + 4 K sigma_G^2; practical forms have factors U^2 beside.
CLAIMS: dict[str, Claim] = {
    "full": Claim(r"$(F + \sigma^2) / \sqrt{mKT} + (\sigma^2 / K + \sigma_G^2) / T$", -0.5, -1.0),
    "fedavg": _AVG,
    "uniform": _AVG,
    "fedis": _AVG,
    "fedpracis": _AVG,
    "delta": _DIV,
    "pracdelta": _DIV,
    "power-of-choice": Claim(r"$1 / T + \varphi$, a constant", 0.0, 0.0),
}


SLOWER = "slower than claimed"


class Estimate(NamedTuple):
    """A number with its 95 % interval; NaN where it cannot be told."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """A method on a problem.

    Attributes:
        problem: Its name.
        method: The label.
        horizon: The longest T.
        least: Mean over seeds of min_t norm(grad f)^2 at that T.
        mean: Mean over seeds and rounds of norm(grad f)^2 at that T.
        slope_least: Slope of the former over all T.
        slope_mean: Slope of the latter.
        ratio: ``mean`` relative to uniform sampling's.
        claimed: The claimed order, NaN if the paper claims none.
    """

    problem: str
    method: str
    horizon: int
    least: float
    mean: float
    slope_least: Estimate
    slope_mean: Estimate
    ratio: Estimate
    claimed: float


def slope(value_ts: FloatArray, horizon_t: Sequence[int]) -> Estimate:
    """Slope of log(mean over seeds) against log T, with its interval; see the module's text.

    Args:
        value_ts: (t, s), by horizon and seed.
        horizon_t: (t,) the T.

    Returns:
        NaN where a value is 0 or all are alike; no bounds with one seed.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    if not (value_ts > 0).all() or value_ts.min() == value_ts.max():
        return Estimate(nan, nan, nan)
    log_t = np.log(np.asarray(horizon_t, dtype=np.float64))
    centred_t = log_t - log_t.mean()
    weight_t = centred_t / (centred_t @ centred_t)
    mean_t = value_ts.mean(axis=1)
    value, num_seeds = float(weight_t @ np.log(mean_t)), value_ts.shape[1]
    if num_seeds < 2:
        return Estimate(value, -inf, inf)
    require("scipy", "sim")
    from scipy.special import stdtrit

    influence_s = weight_t @ (value_ts / mean_t[:, None])
    quantile = float(stdtrit(num_seeds - 1, (1 + CONFIDENCE) / 2))
    margin = quantile * float(np.std(influence_s, ddof=1)) / sqrt(num_seeds)
    return Estimate(value, value - margin, value + margin)


def ratio(value_s: FloatArray, base_s: FloatArray) -> Estimate:
    """mean(value) / mean(base) over the same seeds, with its interval."""
    found = ratio_of_means(value_s, base_s)
    low, high = (0.0, inf) if found.low is None or found.high is None else (found.low, found.high)
    return Estimate(found.mean, low, high)


def verdict(row: Row) -> str:
    """How the slope of the mean over rounds lies to the claimed order; made from the interval."""
    measured, claimed = row.slope_mean, row.claimed
    if isnan(claimed) or isnan(measured.low):
        return "-"
    if claimed == 0:
        return "as claimed, slower than T^-1/2" if measured.low > -0.5 + TOLERANCE else "not told from T^-1/2"
    if measured.low > claimed + TOLERANCE:
        return SLOWER
    if measured.high < claimed - TOLERANCE:
        return "faster than claimed"
    return "as claimed" if measured.high - measured.low <= WIDEST else "undecided"


def make_row(horizons: Sequence[int], values: dict[tuple[str, str], FloatArray], problem: str, label: str) -> Row:
    """The row of a method on a problem, from (least, mean) by horizon and seed, (2, t, s)."""
    least_ts, mean_ts = values[problem, label]
    base = values.get((problem, BASELINE))
    claim = CLAIMS.get(parse_label(label).name)
    claimed = nan if claim is None else claim.order_still if problem.endswith("from-optimum") else claim.order
    unknown = Estimate(nan, nan, nan)
    return Row(
        problem,
        label,
        horizons[-1],
        float(least_ts[-1].mean()),
        float(mean_ts[-1].mean()),
        slope(least_ts, horizons),
        slope(mean_ts, horizons),
        unknown if base is None or label == BASELINE else ratio(mean_ts[-1], base[1][-1]),
        claimed,
    )
