"""DELTA: FedDELTA and FedPracDELTA (DELTA paper, sections 3.3 and 4, corollary 3.7, algorithm 1).

R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), zeta_i = norm(u_i - mean) and sigma_i^2 the variance of the local steps.
What was measured (``algorithms.md``, section 4, and this project's tests): with the weights w_i / pi_i that the paper
uses, the one-round variance of DELTA is never below that of importance sampling, and it can exceed uniform sampling's.
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from ..designs import find_design
from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports
from .scored import (
    PracticalState,
    WeightState,
    init_practical,
    open_practical,
    open_theoretical,
    update_practical,
)


def theory_constants(local_steps: int, rounds: int, n: int, m: int, with_replacement: bool) -> tuple[float, float]:
    """(a1, a2) of corollary 3.7 with the paper's rates, in which the unknown smoothness L cancels.

    With eta_L = 1 / (sqrt(T) K L) and eta = sqrt(K n): a1 = 20 K / sqrt(T), a2 = 5 / sqrt(T) + sqrt(K / n); without
    replacement the drift parts (all of a1, the first term of a2) are multiplied by m / n.

    Args:
        local_steps: K >= 1.
        rounds: T >= 1.
        n: Cohort size.
        m: Clients.
        with_replacement: Whether the design may draw a client repeatedly.
    """
    drift = 1.0 if with_replacement else m / n
    return drift * 20 * local_steps / sqrt(rounds), drift * 5 / sqrt(rounds) + sqrt(local_steps / n)


def diversity(reports: Reports, a1: float, a2: float, sigma_scale: str) -> FloatArray:
    """R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), sigma_i^2 counted once (``"step"``) or K_i times (``"update"``)."""
    steps_n = reports.num_steps_n if sigma_scale == "update" else 1
    return np.sqrt(a1 * reports.squared_deviation_n + a2 * steps_n * reports.step_variance_n)


@dataclass(frozen=True)
class _Constants:
    """What FedDELTA and FedPracDELTA have in common.

    Attributes:
        design: A name in ``designs.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly.
        a1: Weight of zeta^2, >= 0.
        a2: Weight of sigma^2, >= 0. The paper's default alpha = 0.5 sets both to 0.5.
        sigma_scale: ``"step"`` as printed, or ``"update"`` (K sigma^2, the unit of zeta^2).
    """

    design: str = "systematic"
    floor: float = 0.0
    a1: float = 0.5
    a2: float = 0.5
    sigma_scale: str = "step"

    def __post_init__(self) -> None:
        """Refuse impossible constants."""
        if min(self.a1, self.a2) < 0 or self.a1 + self.a2 <= 0:
            raise DeltaflError(f"a1 and a2 are {self.a1} and {self.a2}; both must be >= 0 and one above 0")
        if self.sigma_scale not in {"step", "update"}:
            raise DeltaflError(f"sigma_scale is {self.sigma_scale!r}; write 'step' or 'update'")

    @property
    def unbiased(self) -> bool:
        """As exact as its design (a client with zeta = sigma = 0 but u_i != 0 would need a floor above 0)."""
        return find_design(self.design).exact

    def score(self, reports: Reports) -> FloatArray:
        """R_n of the reports."""
        return diversity(reports, self.a1, self.a2, self.sigma_scale)


@dataclass(frozen=True)
class Delta(_Constants):
    """Score w_i R_i, from all clients of this round, zeta_i about ubar."""

    needs_oracle: ClassVar[bool] = True

    def init(self, population: Population) -> WeightState:
        """Only the weights."""
        return WeightState(population.weight_m)

    def open(
        self,
        state: WeightState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw by the diversity of this round."""
        return open_theoretical(self.score, state, available_m, n, rng, oracle, design=self.design, floor=self.floor)

    def update(self, state: WeightState, cohort: Cohort, reports: Reports) -> WeightState:
        """Nothing to learn: the oracle tells anew."""
        return state


@dataclass(frozen=True)
class PracDelta(_Constants):
    """The paper's practical rule on R_i of the sampled clients, zeta_i about their plain mean."""

    floor: float = 0.1

    needs_oracle: ClassVar[bool] = False

    @property
    def unbiased(self) -> bool:
        """As exact as its design, if a floor keeps clients alive: without, one whose R was 0 is lost for ever."""
        return find_design(self.design).exact and self.floor > 0

    def init(self, population: Population) -> PracticalState:
        """p_i = 1 / m."""
        return init_practical(population)

    def open(
        self,
        state: PracticalState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw by the remembered p."""
        return open_practical(state, available_m, n, rng, design=self.design, floor=self.floor)

    def update(self, state: PracticalState, cohort: Cohort, reports: Reports) -> PracticalState:
        """Re-divide the cohort's mass by the diversities."""
        return update_practical(self.score, state, cohort, reports)
