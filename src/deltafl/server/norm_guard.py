"""The norm guard: an estimate D much longer than those before it is clipped, at the price of a
bias.

D <- D min(1, factor median / norm(D)), with the median of the norms of the last 20 steps, from the
6th step on. A single client with a tiny inclusion probability, or a stale memory, can make one D so
long that the model is lost. The norms remembered are those after clipping: a lasting change of
scale is followed, by ``factor`` about every ten rounds, an outlier is not. **Biased** in rounds
where some cohort's D would be clipped, so it is off by default. No defence against clients that
lie: samplers that learn select them all the more, and the median follows what they send
(docs/why/lab-notes.md); write ``clip="median"`` for that. Clipping by the norms of the past:
Seetharaman et al. 2020 (AutoClip), Andrew et al. 2021.
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, NamedTuple

import numpy as np

from ..scale.numerics import inner
from ..types import KnownSizes, Params
from .part import PlanOfParts, ServerPart, Step

#: Steps that the median is taken over, and the fewest that make one.
WINDOW = 20
FEWEST = 5


class GuardState(NamedTuple):
    """Norms of the last steps, float64 (20,), the newest last; NaN where there was none."""

    norm_k: KnownSizes


@dataclass(frozen=True)
class NormGuard(ServerPart):
    """No estimate is longer than ``norm_guard`` > 1 times the median of those before it."""

    norm_guard: float
    name = "norm_guard"
    biased = True
    ranges: ClassVar = {"norm_guard": "(1, inf)"}

    def init(self, plan: PlanOfParts, params_d: Params) -> GuardState:
        return GuardState(np.full(WINDOW, np.nan))

    def direction(
        self,
        plan: PlanOfParts,
        own: GuardState,
        step: Step,
    ) -> tuple[Step, GuardState]:
        norm = sqrt(inner(step.delta_d, step.delta_d))
        if norm == 0:  # no reply and no memory: 0 has no scale
            return step, own
        most = self._most(own)
        factor = min(1.0, most / norm)
        if factor < 1:
            step = step._replace(delta_d=step.delta_d * factor, factor=step.factor * factor)
        # The clipped norm: an outlier must not raise the next limits.
        return step, GuardState(np.append(own.norm_k[1:], min(norm, most)))

    def _most(self, own: GuardState) -> float:
        known_k = own.norm_k[np.isfinite(own.norm_k)]
        if len(known_k) < FEWEST:
            return np.inf
        return self.norm_guard * float(np.median(known_k))
