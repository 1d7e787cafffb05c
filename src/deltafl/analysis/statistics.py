"""The numbers of a comparison, as functions of plain arrays.

Letters: ``r`` evaluations of one run, ``s`` seeds. Where ``higher`` is True the metric is better when
higher (accuracy), else when lower (loss).
"""

import math
from typing import NamedTuple

import numpy as np

from ..errors import MissingExtraError
from ..types import BoolArray, FloatArray, IntArray

#: Evaluations in the moving average, and in the mean of the best ones.
WINDOW = 5
#: Every interval of a report has this level.
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean with its interval; ``low`` and ``high`` are None with fewer than two numbers."""

    mean: float
    low: float | None
    high: float | None


class Ratio(NamedTuple):
    """A ratio of means with its interval; ``low`` and ``high`` are None with fewer than two pairs."""

    ratio: float
    low: float | None
    high: float | None


def mean_of_best(value_r: FloatArray, round_r: IntArray, higher: bool, count: int = WINDOW) -> float:
    """Mean of the ``count`` best evaluations within the last 4 % of the rounds (at least the last ``count`` rounds).

    Where fewer rounds were evaluated there, it is the mean of those. For accuracy and 5 this is the paper's
    ``acc_top5``.

    Args:
        value_r: (r,) metric at each evaluation.
        round_r: (r,) rounds completed, increasing; the last entry T is the length of the run.
        higher: Whether higher is better.
        count: How many of the best, >= 1.

    Returns:
        The mean of the best among the evaluations with round > T - max(0.04 T, count); NaN if one of those is NaN.
    """
    late = np.sort(value_r[is_late(round_r, count)])
    if np.isnan(late).any():
        return math.nan
    return float(np.mean(late[-count:] if higher else late[:count]))


def is_late(round_r: IntArray, least: int = WINDOW) -> BoolArray:
    """Which evaluations lie within the last 4 % of the rounds, at least the last ``least`` rounds; bool (r,)."""
    num_rounds = int(round_r[-1])
    num_last = max(least, -(-4 * num_rounds // 100))
    late_r: BoolArray = round_r > num_rounds - num_last
    return late_r


def moving_average(value_r: FloatArray) -> FloatArray:
    """Mean of each evaluation and the 4 before it, (r,); NaN for the first 4, and where one of the five is NaN."""
    average_r = np.full(len(value_r), np.nan)
    if len(value_r) >= WINDOW:
        average_r[WINDOW - 1 :] = np.lib.stride_tricks.sliding_window_view(value_r, WINDOW).mean(axis=1)
    return average_r


def first_reach(value_r: FloatArray, threshold: float, higher: bool) -> int | None:
    """Index of the first evaluation with value >= threshold (or <= if lower is better); None if there is none.

    A tie counts as reached; NaN never does.
    """
    reached_r = value_r >= threshold if higher else value_r <= threshold
    return int(np.argmax(reached_r)) if reached_r.any() else None


def mean_and_sd(value_s: FloatArray) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor S - 1) over seeds; the sd of one seed is NaN, infinity gives NaN."""
    if not np.isfinite(value_s).all() or len(value_s) == 0:
        return math.nan, math.nan
    return float(np.mean(value_s)), float(np.std(value_s, ddof=1)) if len(value_s) > 1 else math.nan


def ratio_of_means(base_s: FloatArray, other_s: FloatArray) -> Ratio:
    """mean(base) / mean(other) over pairs, with the 95 % interval of a paired t on the log scale.

    Linearised, log(mean a / mean b) has the influence values r_s = a_s / mean(a) - b_s / mean(b), whose mean is 0. With
    se = sd(r) / sqrt(S) the interval is exp(log ratio +- t_{S-1} se), t the 0.975 quantile of Student's t.
    Pairing counts: what makes a seed hard for both cancels in r_s.

    Args:
        base_s: (s,) > 0, rounds of the baseline.
        other_s: (s,) > 0, rounds of the other sampler with the same seeds; above 1 means the other is faster.

    Returns:
        The ratio; its interval has no width if all pairs agree exactly.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    num_pairs = len(base_s)
    ratio = float(np.mean(base_s) / np.mean(other_s))
    if num_pairs < 2:
        return Ratio(ratio, None, None)
    influence_s = base_s / np.mean(base_s) - other_s / np.mean(other_s)
    margin = t_quantile(num_pairs - 1) * float(np.std(influence_s, ddof=1)) / math.sqrt(num_pairs)
    return Ratio(ratio, ratio * math.exp(-margin), ratio * math.exp(margin))


def mean_interval(value_s: FloatArray) -> Interval:
    """Mean with the 95 % interval of Student's t: mean +- t_{S-1} sd / sqrt(S).

    Of differences over paired seeds it is the interval of the paired t.

    Args:
        value_s: (s,) finite numbers, at least one.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    mean = float(np.mean(value_s))
    if len(value_s) < 2:
        return Interval(mean, None, None)
    margin = t_quantile(len(value_s) - 1) * float(np.std(value_s, ddof=1)) / math.sqrt(len(value_s))
    return Interval(mean, mean - margin, mean + margin)


def gap_closed(uniform_s: FloatArray, rounds_s: FloatArray, full_s: FloatArray) -> float | None:
    """G = (R_uniform - R) / (R_uniform - R_full) of the mean rounds; 0 is uniform, 1 is full participation.

    Returns:
        G, or None where full participation needs no fewer rounds than uniform sampling.
    """
    uniform, rounds, full = (float(np.mean(x)) for x in (uniform_s, rounds_s, full_s))
    return (uniform - rounds) / (uniform - full) if uniform > full else None


def t_quantile(degrees_of_freedom: int) -> float:
    """Student's t quantile of a two-sided 95 % interval.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise MissingExtraError("scipy", "sim") from error
    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
