"""The share of the gap between uniform sampling and full participation that a method closes, with its interval.

G = (R_uniform - R) / (R_uniform - R_full), of means over the same seeds: a ratio of the means of a_s = U_s - R_s and
b_s = U_s - F_s. Its interval is Fieller's: all theta for which mean(a - theta b) = 0 is not refuted by a paired t,

    (mean a - theta mean b)^2 <= t^2 (v_aa - 2 theta v_ab + theta^2 v_bb),   v = covariance over seeds / S.

It is bounded if and only if the interval of mean b excludes 0. Otherwise, or where uniform sampling needs less than
``LEAST`` more than full participation, there is no gap to close, and G is not given: it would be noise over noise.

Source: Fieller, "Some problems in interval estimation", JRSS B 1954.
"""

import math
from typing import NamedTuple

import numpy as np

from deltafl.analysis.statistics import mean_interval, t_quantile
from deltafl.types import FloatArray

#: A gap below this share of what full participation needs is none.
LEAST = 0.1


class Gap(NamedTuple):
    """G, or why there is none.

    Attributes:
        value: G; None if there is no gap.
        low, high: Its 95 % interval; None with fewer than two seeds or without a gap.
        seeds: Paired seeds.
        bound: ``"≤"`` or ``"≥"`` where runs that never reached the threshold make G but a bound, ``"≥≤"`` where they
            pull both ways; empty otherwise.
    """

    value: float | None
    low: float | None
    high: float | None
    seeds: int
    bound: str = ""


NO_GAP = Gap(None, None, None, 0)


class Room(NamedTuple):
    """The gap itself.

    Attributes:
        relative: How much more uniform sampling needs than full participation, as a share: mean U / mean F - 1.
        exists: Whether there is a gap to close.
        unknown: Why that cannot be said; empty if it can.
    """

    relative: float
    exists: bool
    unknown: str = ""


def room(uniform_s: FloatArray, full_s: FloatArray) -> Room:
    """Whether there is a gap between uniform sampling and full participation, over paired seeds.

    Args:
        uniform_s: (s,) > 0, rounds of uniform sampling.
        full_s: (s,) > 0, rounds of full participation with the same seeds.
    """
    relative = float(np.mean(uniform_s) / np.mean(full_s) - 1)
    low = mean_interval(uniform_s - full_s).low
    return Room(
        relative, bool(relative >= LEAST and (low is None or low >= 0) and np.mean(uniform_s) > np.mean(full_s))
    )


def closed(gained_s: FloatArray, gap_s: FloatArray) -> Gap:
    """The ratio of means mean a / mean b with Fieller's interval.

    Args:
        gained_s: (s,) a_s, what the method gains over uniform sampling.
        gap_s: (s,) b_s, what full participation gains over uniform sampling.

    Returns:
        The ratio; no value if mean b <= 0 or, with two seeds or more, is not told from 0.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    num_seeds = len(gap_s)
    if num_seeds == 0:
        return NO_GAP
    a, b = float(np.mean(gained_s)), float(np.mean(gap_s))
    if b <= 0:
        return Gap(None, None, None, num_seeds)
    if num_seeds == 1:
        return Gap(a / b, None, None, 1)
    factor = t_quantile(num_seeds - 1) ** 2 / num_seeds
    (v_aa, v_ab), (_, v_bb) = factor * np.cov(gained_s, gap_s)
    square = b * b - v_bb
    if square <= 0:
        return Gap(None, None, None, num_seeds)
    middle = (a * b - v_ab) / square
    # Rounding can take the discriminant below 0 where a is a multiple of b.
    half = math.sqrt(max(middle * middle - (a * a - v_aa) / square, 0.0))
    return Gap(a / b, middle - half, middle + half, num_seeds)
