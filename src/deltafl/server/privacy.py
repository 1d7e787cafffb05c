"""Differential privacy: every update is clipped to norm C, their weighted sum gets noise, and
epsilon is counted.

    D = sum_S (w_i / pi) u_i min(1, C / norm(u_i)) + N(0, (z B C)^2)   in each coordinate
    B = m max_i w_i / n

DP-FedAvg (McMahan et al. 2018) with unequal weights: each client is selected on its own with the
same probability pi = n / k, k <= m of them connected, so that no update moves the sum by more than
B C. B depends on no draw and no reply, hence neither does the noise, and it is added where nobody
was selected, too. docs/how-to/differential-privacy.md says what is protected, from whom, and why
other samplers are refused.
"""

import secrets
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, ClassVar

import numpy as np

from ..errors import DeltaflError, is_in, require
from ..streams import stream
from ..types import FloatArray, IntArray, Params, is_whole
from .norms import squared_norms
from .part import Intake, PlanOfParts, ServerPart, Step

#: A smaller seed could be found by trying them all.
_LEAST_SEED = 2**32
#: With less noise epsilon is in the hundreds after ten rounds: nothing is protected.
_LEAST_NOISE = 0.1


@dataclass(frozen=True)
class DifferentialPrivacy(ServerPart):
    """Clip each update and add noise, as ``dp=`` of ``make_plan`` and ``DeltaStrategy``, with the
    label ``uniform@poisson``.

    Response rates are 1 with it, since they depend on who was selected: a client that does not
    reply counts as u_i = 0.

    Attributes:
        clip: C > 0, the largest norm of an update, in update units (learning rate included).
        noise_multiplier: z > 0, the noise's standard deviation over the most that one update can
            move the estimate.
        delta: In (0, 1), below 1 / (number of clients).

    Example:
        >>> DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-6).clip
        1.0
    """

    clip: float
    noise_multiplier: float
    delta: float

    name = "dp"
    alters_updates = True
    counts_silence = True
    needs_single_updates = "dp clips each update"
    ranges: ClassVar = {
        "clip": "(0, inf)",
        "noise_multiplier": "(0, inf)",
        "delta": "(0, 1)",
    }

    def check(self, plan: PlanOfParts) -> None:
        """Raise a ``DeltaflError`` unless epsilon holds for the plan's draws and coefficients."""
        reason = self._fault(plan)
        if reason:
            raise DeltaflError(f"dp with {plan.method}: {reason}; write 'uniform@poisson' alone")
        if plan.seed < _LEAST_SEED:
            raise DeltaflError(
                f"seed is {plan.seed}, and dp counts on nobody knowing who was selected: write "
                "seed=secrets.randbits(63), and keep it secret"
            )

    def _fault(self, plan: PlanOfParts) -> str:
        sampler = plan.sampler
        if sampler.learns:
            return "it learns from replies, and its draws would show them without noise"
        if not sampler.draws_equally:
            return "privacy amplification by sampling needs one probability for all clients"
        if sampler.design != "poisson":
            return (
                f"with {sampler.design!r} a client is not selected on its own, as amplification "
                "by sampling needs"
            )
        if plan.rule.name != "horvitz-thompson":
            return (
                f"with {plan.rule.name!r} the most that one update can move the estimate is not "
                "known before the draw"
            )
        if plan.part("clip"):
            return "clip depends on the norms of updates, which would show without noise"
        return ""

    def intake(
        self,
        plan: PlanOfParts,
        own: Any,
        coef_n: FloatArray,
    ) -> "ClippedToC":
        return ClippedToC(len(coef_n), self.clip)

    def direction(
        self,
        plan: PlanOfParts,
        own: Any,
        step: Step,
    ) -> tuple[Step, Any]:
        # Of the largest weight, whoever was selected: the noise must not tell.
        weight_m = plan.population.weight_m
        scale = self.noise_multiplier * self.clip * len(weight_m) * weight_m.max() / plan.n
        # Not from the plan's seed, and different in every call: noise that can be made again could
        # be taken off again.
        noise_d = stream(secrets.randbits(63), "noise").normal(
            scale=scale,
            size=len(step.delta_d),
        )
        return step._replace(delta_d=step.delta_d + noise_d), own

    def epsilon(self, rounds: int, rate: float) -> float:
        """The epsilon that goes with ``delta`` after so many rounds, by the package dp-accounting
        (an upper bound).

        Args:
            rounds: Rounds played, those after which a server was put back among them.
            rate: The largest pi of any round: n over the fewest clients that were connected in one.

        Raises:
            DeltaflError: If ``rounds`` or ``rate`` is no such number.
            MissingExtraError: Without the extra ``deltafl[dp]``.
        """
        if not is_whole(rounds) or rounds < 0:
            raise DeltaflError(f"rounds is {rounds!r:.60}; write a whole number >= 0")
        if not is_in(rate, "(0, inf)"):
            raise DeltaflError(f"rate is {rate!r:.60}; write n over the number of clients")
        if rounds == 0:
            return 0.0
        # Zero-concentrated privacy (Bun and Steinke 2016) without the sampling, which only helps.
        rho = rounds / 2 / self.noise_multiplier / self.noise_multiplier
        loose = rho + 2 * sqrt(-rho * log(self.delta))
        # The package would count for minutes.
        if self.noise_multiplier < _LEAST_NOISE:
            return loose
        require("dp_accounting", "dp")
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant

        # Where fewer than n are connected, everybody is asked.
        event = PoissonSampledDpEvent(
            min(1.0, rate),
            GaussianDpEvent(self.noise_multiplier),
        )
        try:
            return float(PLDAccountant().compose(event, rounds).get_epsilon(self.delta))
        except MemoryError:  # it lists the privacy losses, up to as large ones as epsilon
            return loose


class ClippedToC(Intake):
    """Updates scaled to norm C where they are longer."""

    def __init__(self, n: int, longest: float) -> None:
        super().__init__(n)
        self._most = longest * (1 - 2.0**-20)  # rounding to float32 must not lead beyond C

    def counted(
        self,
        place_k: IntArray,
        update_kd: Params,
        control_kd: FloatArray,
    ) -> Params:
        norm_k = np.sqrt(squared_norms(update_kd))
        factor_k1 = (self._most / np.maximum(norm_k, self._most))[:, None]
        return np.asarray(update_kd * factor_k1, np.float32)
