"""The norm guard: an estimate D much longer than those before it is clipped, at the price of a
bias.

D <- D min(1, norm_guard median / norm(D)), with the median of the norms of the last 20 steps, from
the 6th step on. A single client with a tiny inclusion probability, or a stale memory, can make one
D so long that the model is lost. The norms remembered are those after clipping: a lasting change of
scale is followed, by the factor ``norm_guard`` about every ten rounds, an outlier is not.
**Biased** in rounds where some cohort's D would be clipped, so it is off by default. No defence
against clients that lie: samplers that learn select them all the more, and the median follows what
they send (``results/hostile``); write ``clip="median"`` for that. Clipping by the norms of the
past: Seetharaman et al. 2020 (AutoClip), Andrew et al. 2021.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np

from ..scale.rows import inner
from ..types import FloatArray, Nothing

#: Steps that the median is taken over, and the fewest that make one.
WINDOW = 20
FEWEST = 5


class GuardState(NamedTuple):
    """Norms of the last steps, float64 (20,), the newest last; NaN where there was none."""

    norm_k: FloatArray


def init_guard(norm_guard: float | None) -> GuardState | Nothing:
    """No norms, or nothing at all without a guard."""
    return Nothing() if norm_guard is None else GuardState(np.full(WINDOW, np.nan))


def shorten(
    norm_guard: float | None, state: GuardState | Nothing, delta_d: FloatArray
) -> tuple[FloatArray, float, GuardState | Nothing]:
    """D as it is used, the factor in (0, 1] it was multiplied with, and the norms with this one."""
    norm = sqrt(inner(delta_d, delta_d)) if isinstance(state, GuardState) else 0.0
    if (
        norm_guard is None or isinstance(state, Nothing) or norm == 0
    ):  # no reply, no memory: 0 has no scale
        return delta_d, 1.0, state
    known_k = state.norm_k[np.isfinite(state.norm_k)]
    most = norm_guard * float(np.median(known_k)) if len(known_k) >= FEWEST else np.inf
    factor = min(1.0, most / norm)
    return (
        delta_d * factor if factor < 1 else delta_d,
        factor,
        GuardState(np.append(state.norm_k[1:], min(norm, most))),
    )
