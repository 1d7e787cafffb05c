"""Importance sampling: FedIS and FedPracIS (DELTA paper, sections 3.1 and 4, algorithm 2)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..designs import find_design
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports
from .scored import (
    PracticalState,
    WeightState,
    init_practical,
    open_practical,
    open_theoretical,
    update_practical,
)


def update_norm(reports: Reports) -> FloatArray:
    """R_i = norm(u_i), the optimal score (times w_i) of the Horvitz-Thompson and Hansen-Hurwitz estimators."""
    return np.sqrt(reports.squared_norm_n)


@dataclass(frozen=True)
class FedIS:
    """Score w_i norm(u_i), from all clients of this round.

    Attributes:
        design: A name in ``designs.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly.
    """

    design: str = "systematic"
    floor: float = 0.0

    needs_oracle: ClassVar[bool] = True

    @property
    def unbiased(self) -> bool:
        """As exact as its design: a client with score 0 has update 0."""
        return find_design(self.design).exact

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
        """Draw by the norms of this round."""
        return open_theoretical(update_norm, state, available_m, n, rng, oracle, design=self.design, floor=self.floor)

    def update(self, state: WeightState, cohort: Cohort, reports: Reports) -> WeightState:
        """Nothing to learn: the oracle tells anew."""
        return state


@dataclass(frozen=True)
class FedPracIS:
    """The paper's practical rule on norm(u_i) of the sampled clients.

    Attributes:
        design: A name in ``designs.DESIGNS``.
        floor: g in [0, 1]; 0 is the paper to the letter.
    """

    design: str = "systematic"
    floor: float = 0.1

    needs_oracle: ClassVar[bool] = False

    @property
    def unbiased(self) -> bool:
        """As exact as its design, if a floor keeps clients alive: without, one whose update was 0 is lost for ever."""
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
        """Re-divide the cohort's mass by the norms."""
        return update_practical(update_norm, state, cohort, reports)
