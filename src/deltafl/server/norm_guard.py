"""The norm guard: an estimate D much longer than those before it is clipped, at the price of a bias.

::

    D <- D min(1, norm_guard median / norm(D)),    median: of the norms of the last 20 steps, from the 6th step on

A single client with a tiny inclusion probability, or a memory that has gone stale, can make one D so long that the
model is lost. The guard bounds that damage. The norms remembered are those of the steps taken, that is after
clipping: a lasting change of scale is followed, by the factor ``norm_guard`` about every ten rounds, an outlier is
not. **Biased**: E[D] is no longer ubar in rounds where some cohort's D would be clipped, so it is off by default, and
``RoundInfo.clip_factor`` shows where it acted. Clipping by the norms of the past: Seetharaman et al.
2020 (AutoClip, a percentile of them), Andrew et al. 2021 (a quantile, with differential privacy).
"""

from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray

#: Steps that the median is taken over, and the fewest that make one.
WINDOW, FEWEST = 20, 5


class NoGuard(NamedTuple):
    """Nothing to remember: no guard."""


class GuardState(NamedTuple):
    """Norms of the last steps, float64 (20,), the newest last; NaN where there was none."""

    norm_k: FloatArray


def init_guard(norm_guard: float | None) -> NoGuard | GuardState:
    """No norms, or nothing at all without a guard.

    Raises:
        DeltaflError: If the factor is not above 1: the median itself would be clipped.
    """
    if norm_guard is None:
        return NoGuard()
    if not (np.isfinite(norm_guard) and norm_guard > 1):
        raise DeltaflError(f"norm_guard is {norm_guard}; write a factor above 1, such as 3, or None for no guard")
    return GuardState(np.full(WINDOW, np.nan))


def shorten(
    norm_guard: float | None, state: NoGuard | GuardState, delta_d: FloatArray
) -> tuple[FloatArray, float, NoGuard | GuardState]:
    """Clip an estimate that is too long.

    Args:
        norm_guard: The factor; None for no guard.
        state: Norms of the steps before.
        delta_d: float64 (d,), the estimate D.

    Returns:
        D as it is used, the factor in (0, 1] it was multiplied with, and the norms with this one. An estimate of 0 (no
        reply, no memory) is not remembered: it has no scale.
    """
    if norm_guard is None or isinstance(state, NoGuard):
        return delta_d, 1.0, state
    norm = float(np.linalg.norm(delta_d))
    if norm == 0:
        return delta_d, 1.0, state
    known_k = state.norm_k[np.isfinite(state.norm_k)]
    most = norm_guard * float(np.median(known_k)) if len(known_k) >= FEWEST else np.inf
    if norm > most:
        delta_d, factor, norm = delta_d * (most / norm), most / norm, most
    else:
        factor = 1.0
    return delta_d, factor, GuardState(np.append(state.norm_k[1:], norm))
