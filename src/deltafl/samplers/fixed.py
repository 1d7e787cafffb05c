"""Samplers whose scores never change: everyone, uniform, by weight; with FedAvg's (McMahan et al. 2017) among them."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.table import ORDERED, draw_cohort, draw_from_tree, find_design
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports


class FixedState(NamedTuple):
    """The scores, float64 (m,); in a sum tree for the design ``ordered-pivotal``."""

    score_m: FloatArray | SumTree


@dataclass(frozen=True)
class Full:
    """Ask every available client: D = sum_i w_i u_i exactly. The sample size is ignored."""

    unbiased: ClassVar[bool] = True
    needs_oracle: ClassVar[bool] = False

    def init(self, population: Population) -> FixedState:
        """Equal scores."""
        return FixedState(np.ones(population.num_clients))

    def open(
        self,
        state: FixedState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Everyone, with certainty."""
        client_n = np.flatnonzero(available_m)
        return Cohort(client_n, np.ones(len(client_n), dtype=np.int64), np.ones(len(client_n)), "fixed-size")

    def update(self, state: FixedState, cohort: Cohort, reports: Reports) -> FixedState:
        """Nothing to learn."""
        return state


@dataclass(frozen=True)
class Fixed:
    """Scores fixed for ever: equal (``uniform``, ``fedavg``) or the clients' weights (``md``, ``md-fixed``).

    Attributes:
        by_weight: Score w_i instead of 1. ``md`` with ``design="multinomial"`` is that of Li et al. 2020 (FedProx).
        design: A name in ``deltafl.DESIGNS``.
    """

    by_weight: bool = False
    design: str = "systematic"

    needs_oracle: ClassVar[bool] = False
    accepts_no_mask: ClassVar[bool] = True

    @property
    def unbiased(self) -> bool:
        """As exact as its design."""
        return find_design(self.design).exact

    def init(self, population: Population) -> FixedState:
        """The scores, once and for all."""
        score_m = population.weight_m.copy() if self.by_weight else np.ones(population.num_clients)
        return FixedState(SumTree(score_m) if self.design == ORDERED else score_m)

    def open(
        self,
        state: FixedState,
        available_m: BoolArray | None,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw n clients by the fixed scores."""
        if isinstance(state.score_m, SumTree):
            return draw_from_tree(state.score_m, n, 0.0, rng, available_m)
        return draw_cohort(state.score_m, n, self.design, rng, available_m)

    def update(self, state: FixedState, cohort: Cohort, reports: Reports) -> FixedState:
        """Nothing to learn."""
        return state
