"""The four samplers of the DELTA paper: importance sampling and DELTA, each theoretical and practical.

============= ============================================ ======================================
name          R_i                                          scores
============= ============================================ ======================================
``fedis``     norm(u_i)                                    theoretical: all clients' of this round
``fedpracis`` norm(u_i)                                    practical: of sampled clients, as last seen
``delta``     sqrt(a1 zeta_i^2 + a2 sigma_i^2)             theoretical, zeta_i = norm(u_i - ubar)
``pracdelta`` the same                                     practical, zeta_i about the cohort's plain mean
============= ============================================ ======================================

sigma_i^2 is the variance of the local steps. With the weights w_i / pi_i that the paper uses, the one-round variance of
DELTA is never below that of importance sampling, and it can exceed that of uniform sampling
(``tests/test_known_numbers.py``).

The practical rule (section 4): for i in S_t, p_i <- R_i / sum_S R_j * (1 - sum_{not S} p_j), from p_i = 1 / m. The mass
of S is re-divided inside S, so R = 0 is absorbing and one noisy R can starve a client; hence the floor. With floor 0
the practical samplers do not claim to be unbiased.

Source: Wang et al. 2023 (DELTA), sections 3.1, 3.3 and 4, corollary 3.7, algorithms 1 and 2.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, NamedTuple, Self

import numpy as np

from ..designs.inclusion import with_floor
from ..designs.table import ORDERED, find_design
from ..errors import DeltaflError
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports
from .base import RunFacts, WeightState, replied
from .scored import Scored


class PracticalState(NamedTuple):
    """The draw probabilities p, float64 (m,), sum 1; in a sum tree for the design ``ordered-pivotal``."""

    p_m: FloatArray | SumTree


def update_norm(reports: Reports) -> FloatArray:
    """R_i = norm(u_i), the optimal score (times w_i) of the Horvitz-Thompson and Hansen-Hurwitz estimators."""
    return np.sqrt(reports.squared_norm_n)


@dataclass(frozen=True)
class FedIS(Scored):
    """Draws with scores w_i R_i of all clients in this round, as an oracle reports them; R_i = norm(u_i).

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly.
    """

    floor: float = 0.0

    needs_oracle: ClassVar[bool] = True
    ranges: ClassVar = {"floor": "[0, 1]"}

    @property
    def skips_zero_updates(self) -> bool:
        """A floor keeps clients with R_i = 0 alive."""
        return self.floor == 0

    def score(self, reports: Reports) -> FloatArray:
        """R_n >= 0 of the reports."""
        return update_norm(reports)

    def init(self, population: Population) -> WeightState:
        """Only the weights."""
        return WeightState(population.weight_m)

    def scores(self, state: WeightState, available_m: BoolArray | None, n: int, oracle: Oracle | None) -> FloatArray:
        """w_i R_i, mixed with an equal share."""
        reports = self.require_oracle(oracle).reports()
        score_m = np.where(reports.responded_n, state.weight_m * self.score(reports), 0.0)
        return with_floor(score_m, self.floor, available_m=available_m) if self.floor else score_m


@dataclass(frozen=True)
class FedPracIS(Scored):
    """Draws with remembered probabilities, which the clients that replied re-divide by R_i = norm(u_i).

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly; 0 is the paper to the letter.
    """

    floor: float = 0.1

    ranges: ClassVar = {"floor": "[0, 1]"}

    def score(self, reports: Reports) -> FloatArray:
        """R_n >= 0 of the reports."""
        return update_norm(reports)

    @property
    def unbiased(self) -> bool:
        """As exact as its design, if a floor keeps clients alive: without one, a client whose R was 0 is lost."""
        return find_design(self.design).exact and self.floor > 0

    def init(self, population: Population) -> PracticalState:
        """p_i = 1 / m."""
        p_m = np.full(population.num_clients, 1 / population.num_clients)
        return PracticalState(SumTree(p_m) if self.design == ORDERED else p_m)

    def scores(
        self, state: PracticalState, available_m: BoolArray | None, n: int, oracle: Oracle | None
    ) -> FloatArray | SumTree:
        """The remembered p, mixed with an equal share."""
        if isinstance(state.p_m, SumTree):
            return state.p_m
        return with_floor(state.p_m, self.floor, available_m=available_m)

    def tree_floor(self) -> float:
        """The floor, which a draw from a tree mixes in itself."""
        return self.floor

    def update(self, state: PracticalState, cohort: Cohort, reports: Reports) -> PracticalState:
        """Re-divide the mass of the clients that replied in proportion to R; nothing changes if all R are zero."""
        client_n, reports = replied(cohort, reports)
        score_n = self.score(reports)
        if score_n.sum() <= 0:
            return state
        # In a tree the sum is kept up to rounding only; it is divided by when clients are drawn.
        p_n = score_n / score_n.sum() * state.p_m[client_n].sum()
        if isinstance(state.p_m, SumTree):
            return PracticalState(state.p_m.replaced(client_n, p_n))
        p_m = state.p_m.copy()
        p_m[client_n] = p_n
        return PracticalState(p_m / p_m.sum())


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


@dataclass(frozen=True)
class _Diversity(Scored):
    """The score of DELTA, R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), and its options.

    Attributes:
        alpha: a1 = a2 >= 0, or the pair (a1, a2): the weights of zeta^2 and sigma^2, not both 0. The paper's default is
            0.5. ``"theory"`` stands for its corollary 3.7, which takes rounds and local steps from the run.
        sigma_scale: ``"step"`` as printed, or ``"update"`` (K sigma^2, the unit of zeta^2).
    """

    alpha: float | tuple[float, float] | str = 0.5
    sigma_scale: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != "theory":
            a1, a2 = self.constants
            if not (min(a1, a2) >= 0 and 0 < a1 + a2 < np.inf):
                raise DeltaflError(f"alpha is {self.alpha}; write a number above 0, a pair (a1, a2), or 'theory'")
        if self.sigma_scale not in {"step", "update"}:
            raise DeltaflError(f"sigma_scale is {self.sigma_scale!r}; write 'step' or 'update'")

    @property
    def constants(self) -> tuple[float, float]:
        """(a1, a2).

        Raises:
            DeltaflError: If they are still to be taken from the run.
        """
        if isinstance(self.alpha, str):
            raise DeltaflError(
                f"alpha is {self.alpha!r}; 'theory' needs the run's rounds and local steps: "
                "write sampler.for_run(RunFacts(...)), or a number"
            )
        return self.alpha if isinstance(self.alpha, tuple) else (self.alpha, self.alpha)

    def for_run(self, facts: RunFacts) -> Self:
        """Replace ``"theory"`` by the constants of corollary 3.7."""
        if self.alpha != "theory":
            return self
        with_replacement = self.design == "multinomial"
        constants = theory_constants(facts.local_steps, facts.rounds, facts.n, facts.m, with_replacement)
        return replace(self, alpha=constants)

    def score(self, reports: Reports) -> FloatArray:
        """R_n of the reports, with sigma_i^2 counted once (``"step"``) or K_i times (``"update"``)."""
        a1, a2 = self.constants
        steps_n = reports.num_steps_n if self.sigma_scale == "update" else 1
        return np.sqrt(a1 * reports.squared_deviation_n + a2 * steps_n * reports.step_variance_n)


@dataclass(frozen=True)
class Delta(_Diversity, FedIS):
    """FedDELTA: score w_i R_i, from all clients of this round, zeta_i about ubar.

    Options: ``design`` and ``floor`` as in ``FedIS``; ``alpha`` and ``sigma_scale``, see ``docs/samplers.md``.
    """


@dataclass(frozen=True)
class PracDelta(_Diversity, FedPracIS):
    """FedPracDELTA: the practical rule on R_i of the sampled clients, zeta_i about their plain mean.

    Options: ``design`` and ``floor`` as in ``FedPracIS``; ``alpha`` and ``sigma_scale``.
    """
