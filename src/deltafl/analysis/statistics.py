"""The numbers of a comparison: rounds to a threshold, speed-up, gap closed, area under a curve,
intervals.

Letters: ``r`` evaluations of one run, ``s`` seeds. Where ``higher`` is True higher values are
better (accuracy), else lower ones (a loss). Every interval is 95 %, by itself.
"""

import math
from typing import NamedTuple

import numpy as np

from ..errors import require
from ..types import BoolArray, FloatArray, IntArray
from .runs import Fairness, Run

#: Evaluations in the mean of the best ones.
WINDOW = 5
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, or a ratio of means, with its interval; ``low`` and ``high`` are None where there
    is no interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None


def mean_of_best(
    value_r: FloatArray,
    round_r: IntArray,
    higher: bool,
    count: int = WINDOW,
) -> float:
    """Mean of the ``count`` best evaluations after round T - max(0.04 T, count), T the last one;
    NaN if one is NaN.

    For accuracy and 5 this is the paper's ``acc_top5``. Where fewer rounds were evaluated there, it
    is their mean.
    """
    late = np.sort(value_r[is_late(round_r, count)])
    # NumPy sorts NaN to the end, where the lowest ones would not see it.
    if np.isnan(late).any():
        return math.nan
    best = late[-count:] if higher else late[:count]
    return float(np.mean(best))


def is_late(round_r: IntArray, least: int = WINDOW) -> BoolArray:
    """Which evaluations lie within the last 4 % of the rounds, at least the last ``least``
    rounds; bool (r,).
    """
    late_r: BoolArray = round_r > late_after(int(round_r[-1]), least)
    return late_r


def late_after(num_rounds: int, least: int = WINDOW) -> int:
    """The round after which evaluations of a run are late."""
    # Rounded up in whole numbers, without the rounding of 0.04 T.
    return num_rounds - max(least, -(-4 * num_rounds // 100))


def first_reach(value_r: FloatArray, threshold: float, higher: bool) -> int | None:
    """Index of the first evaluation with value >= threshold (or <= if lower is better); None if
    there is none.

    A tie counts as reached; NaN never does.
    """
    reached_r = value_r >= threshold if higher else value_r <= threshold
    if not reached_r.any():
        return None
    return int(np.argmax(reached_r))


def reach(run: Run, threshold: float) -> int | None:
    """Index of the first evaluation of a run that reaches the threshold."""
    return first_reach(run.value_r, threshold, run.judge.higher)


def area_under(run: Run, horizon: int) -> float:
    """Mean of the metric over rounds 1 to ``horizon``: (1 / T) sum_t a_t, the area under the curve.

    Between evaluations and after a divergence the last value counts, before the first evaluation
    the first. A missing share counts as 0, and with another missing number there is no area (NaN).
    """
    known_r = np.where(np.isfinite(run.value_r), run.value_r, run.judge.missing)
    round_t = np.arange(1, horizon + 1)
    # The last evaluation of each round or before it; -1 before the first.
    last_t = np.searchsorted(run.round_r, round_t, side="right") - 1
    known_t = known_r[np.maximum(last_t, 0)]
    return float(np.mean(known_t))


def side_of(low: float, high: float, no_difference: float) -> int:
    """1 if the interval lies above ``no_difference``, -1 if below, 0 if it contains it or has no
    width.
    """
    # Pairs that agree up to rounding have an interval without width, which proves nothing.
    if math.isclose(low, high, rel_tol=1e-9):
        return 0
    if low > no_difference:
        return 1
    if high < no_difference:
        return -1
    return 0


def worst_tenth(value_m: FloatArray, higher: bool = True) -> float:
    """Mean value of the tenth of the clients with the worst, at least one; NaN is left out."""
    known = np.sort(value_m[np.isfinite(value_m)])
    if len(known) == 0:
        return math.nan
    if not higher:
        known = known[::-1]
    tenth = max(1, len(known) // 10)
    return float(np.mean(known[:tenth]))


def fairness_of(value_km: FloatArray, higher: bool = True) -> Fairness | None:
    """Mean, worst tenth and standard deviation (divisor m) over clients, each averaged over the k
    late models.

    It is the spread of one model, not that of a mean of models: with few labels a client the model
    swings from round to round, and what one round takes from a client the next one gives back.
    Clients count the same, whatever their weights; those without a value (NaN) are left out.
    None if all are.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR
    2020, section 4, which reports mean, worst 10 % and variance.
    """
    is_known_m = np.isfinite(value_km).all(axis=0)
    known_km = value_km[:, is_known_m]
    if known_km.size == 0:
        return None
    tail_k = [worst_tenth(row_m, higher) for row_m in known_km]
    sd_k = known_km.std(axis=1)
    return Fairness(
        mean=float(known_km.mean()),
        worst_tenth=float(np.mean(tail_k)),
        sd=float(sd_k.mean()),
    )


def mean_and_sd(value_s: FloatArray) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor S - 1) over seeds; the sd of one seed is NaN,
    infinity gives NaN.
    """
    if not np.isfinite(value_s).all() or len(value_s) == 0:
        return math.nan, math.nan
    mean = float(np.mean(value_s))
    if len(value_s) == 1:
        return mean, math.nan
    return mean, float(np.std(value_s, ddof=1))


def mean_interval(value_s: FloatArray) -> Interval:
    """Mean with the interval of Student's t: mean +- t_{S-1} sd / sqrt(S); of paired
    differences, the paired t.
    """
    mean = float(np.mean(value_s))
    if len(value_s) < 2:
        return Interval(mean)
    margin = _margin(value_s)
    return Interval(mean, mean - margin, mean + margin)


def ratio_of_means(base_s: FloatArray, other_s: FloatArray) -> Interval:
    """The speed-up mean(base) / mean(other) over pairs, with the interval of a paired t on the log
    scale.

    Linearised, log(mean a / mean b) has the influence values r_s = a_s / mean(a) - b_s / mean(b),
    whose mean is 0. With se = sd(r) / sqrt(S) the interval is exp(log ratio +- t_{S-1} se), t the
    0.975 quantile of Student's t. Pairing counts: what makes a seed hard for both cancels in r_s.
    If all pairs agree, the interval has no width.
    """
    base = np.mean(base_s)
    other = np.mean(other_s)
    ratio = float(base / other)
    if len(base_s) < 2:
        return Interval(ratio)
    influence_s = base_s / base - other_s / other
    margin = _margin(influence_s)
    return Interval(ratio, ratio * math.exp(-margin), ratio * math.exp(margin))


def fieller(numerator_s: FloatArray, denominator_s: FloatArray) -> Interval:
    """The ratio of means theta = mean a / mean b over pairs with Fieller's interval.

    The interval holds all theta for which a paired t does not reject mean(a - theta b) = 0:

        (mean a - theta mean b)^2 <= t^2 (v_aa - 2 theta v_ab + theta^2 v_bb),

    with v the covariances over seeds, divided by S. It is bounded if and only if the interval of
    mean b excludes 0; otherwise ``low`` and ``high`` are None, as with fewer than two pairs.

    Source: Fieller, "Some problems in interval estimation", JRSS B 1954.
    """
    num_pairs = len(denominator_s)
    a = float(np.mean(numerator_s))
    b = float(np.mean(denominator_s))
    ratio = a / b
    if num_pairs < 2:
        return Interval(ratio)
    factor = t_quantile(num_pairs - 1) ** 2 / num_pairs
    # With t^2 / S as their factor, so that no t stands in what follows.
    (v_aa, v_ab), (_, v_bb) = factor * np.cov(numerator_s, denominator_s)
    # The ends of the interval solve square theta^2 - 2 (a b - v_ab) theta + a^2 - v_aa = 0.
    square = b * b - v_bb
    if square <= 0:
        return Interval(ratio)
    middle = (a * b - v_ab) / square
    discriminant = middle * middle - (a * a - v_aa) / square
    # Rounding can take it below 0 where a is a multiple of b.
    half = math.sqrt(max(discriminant, 0.0))
    return Interval(ratio, middle - half, middle + half)


def gap_closed(
    uniform_s: FloatArray,
    cost_s: FloatArray,
    full_s: FloatArray,
) -> Interval | None:
    """G = (C_uniform - C) / (C_uniform - C_full) of mean costs over pairs, with Fieller's interval.

    A cost is what should be low: rounds to a threshold, mean loss, minus the mean accuracy. 0 is
    uniform sampling, 1 full participation. None where full participation costs no less than uniform
    sampling, or a cost is missing.
    """
    # NaN is not ahead of anything.
    full_is_ahead = np.mean(full_s) < np.mean(uniform_s)
    if not full_is_ahead or not np.isfinite(cost_s).all():
        return None
    return fieller(uniform_s - cost_s, uniform_s - full_s)


def t_quantile(degrees_of_freedom: int) -> float:
    """Student's t quantile of a two-sided 95 % interval."""
    require("scipy", "sim")
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))


def _margin(value_s: FloatArray) -> float:
    """t_{S-1} sd / sqrt(S)."""
    num_seeds = len(value_s)
    sd = float(np.std(value_s, ddof=1))
    return t_quantile(num_seeds - 1) * sd / math.sqrt(num_seeds)
