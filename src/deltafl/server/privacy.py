"""Differential privacy: every update is clipped to norm C, their weighted sum gets noise, and
epsilon is counted.

    D = sum_S (w_i / pi) u_i min(1, C / norm(u_i)) + N(0, (z B C)^2)  in each coordinate,  B = m max_i w_i / n

DP-FedAvg (McMahan et al. 2018) with unequal weights: each client is selected on its own with the
same probability pi = n / k, k <= m of them connected, so that no update moves the sum by more than
B C. B depends on no draw and no reply, hence neither does the noise, and it is added where nobody
was selected, too. docs/privacy.md says what is protected, from whom, and why other samplers are
refused.
"""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..errors import DeltaflError, WithRanges, require
from ..estimators.control_variates import NoControl
from ..estimators.table import horvitz_thompson
from ..samplers.base import Sampler
from ..samplers.fixed import Fixed
from ..streams import stream
from ..types import FloatArray, Params
from .norms import squared_norms
from .optimizers import FedExP

if TYPE_CHECKING:
    from ..round import Plan

#: A smaller seed could be found by trying them all.
_LEAST_SEED = 2**32


@dataclass(frozen=True)
class DifferentialPrivacy(WithRanges):
    """Clip each update and add noise, as ``dp=`` of ``Plan`` and ``DeltaStrategy``, with the label
    ``uniform@poisson``.

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

    ranges: ClassVar = {"clip": "(0, inf)", "noise_multiplier": "(0, inf)", "delta": "(0, 1)"}

    def check(self, plan: "Plan") -> None:
        """Raise a ``DeltaflError`` with the reason unless epsilon holds for the plan's draws and
        coefficients.
        """
        sampler = plan.sampler
        rule = plan.rule
        reason = ""
        if type(sampler).update is not Sampler.update:
            reason = "it learns from replies, and its draws would show them without noise"
        elif type(sampler) is not Fixed or sampler.by_weight or sampler.per_second:
            reason = "privacy amplification by sampling needs one probability for all clients"
        elif sampler.design != "poisson":
            reason = (
                f"with {sampler.design!r} a client is not selected on its own, as "
                "amplification by sampling needs"
            )
        elif rule.coefficients is not horvitz_thompson or not isinstance(rule.control, NoControl):
            reason = (
                f"with {rule.name!r} the most that one update can move the estimate is not "
                "known before the draw"
            )
        elif plan.clip is not None:
            reason = (
                "clip depends on the norms of updates, which would show without noise; leave "
                "clip out"
            )
        if reason:
            raise DeltaflError(
                f"dp with {type(sampler).__name__}: {reason}; write 'uniform@poisson' alone"
            )
        if plan.seed < _LEAST_SEED:
            why = "dp counts on nobody knowing who was selected"
            raise DeltaflError(
                f"seed is {plan.seed}, and {why}: write seed=secrets.randbits(63), and keep it "
                "secret"
            )

    def clipped(self, update_nd: Params) -> Params:
        """The updates, (n, d), scaled to norm C where they are longer."""
        most = self.clip * (1 - 2.0**-20)  # rounding to float32 must not lead beyond C
        norm_n = np.sqrt(squared_norms(update_nd)[0])
        return np.asarray(update_nd * (most / np.maximum(norm_n, most))[:, None], dtype=np.float32)

    def noise(self, plan: "Plan", num_params: int) -> FloatArray:
        """Fresh noise for D, float64 (d,), different in every call: noise that can be reproduced
        hides nothing.
        """
        weight_m = plan.population.weight_m
        scale = self.noise_multiplier * self.clip * len(weight_m) * weight_m.max() / plan.n
        return stream(secrets.randbits(63), "noise").normal(scale=scale, size=num_params)

    def epsilon(self, rounds: int, rate: float) -> float:
        """The epsilon that goes with ``delta`` after so many rounds, by the package dp-accounting
        (an upper bound).

        Args:
            rounds: Rounds played, those after which a server was put back among them.
            rate: The largest pi of any round: n over the fewest clients that were connected in one.

        Raises:
            MissingExtraError: Without the extra ``deltafl[dp]``.
        """
        require("dp_accounting", "dp")
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant

        event = PoissonSampledDpEvent(min(1.0, rate), GaussianDpEvent(self.noise_multiplier))
        return float(PLDAccountant().compose(event, rounds).get_epsilon(self.delta))


def needs_single_updates(plan: "Plan") -> str | None:
    """What needs the updates one by one, as a clause; None if their weighted sum, of secure
    aggregation, is enough.
    """
    name = type(plan.sampler).__name__
    rule = plan.rule
    if plan.sampler.needs_oracle:
        return f"{name} needs every client's update before the draw"
    if type(plan.sampler).update is not Sampler.update:
        return f"{name} learns from each reply"
    if not rule.control.learns_from_sums:
        return f"the estimator {rule.name!r} learns from each update"
    if isinstance(plan.server_optimizer, FedExP):
        return "fedexp needs the norm of each update"
    return None if plan.clip is None and plan.dp is None else "clip and dp clip each update"
