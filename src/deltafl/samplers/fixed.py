"""Samplers whose scores never change: all clients, uniform (as in FedAvg), by weight."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..designs.table import drawn_once
from ..types import BoolArray, Cohort, Oracle, Population, Rng
from .base import Priced, Sampler, Scores, for_design


class FixedState(NamedTuple):
    """The scores."""

    score_m: Scores


@dataclass(frozen=True)
class Full(Sampler):
    """Selects every available client: D = sum_i w_i u_i exactly. The cohort size is ignored."""

    unbiased = True
    asks_all = True

    def init(self, population: Population) -> FixedState:
        return FixedState(np.ones(population.num_clients))

    def open(
        self,
        state: FixedState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        client_n = np.flatnonzero(available_m)
        return drawn_once(client_n, np.ones(len(client_n)), "fixed-size")


@dataclass(frozen=True)
class Fixed(Priced):
    """Asks all clients equally often, or as ``md`` and ``md-fixed`` in proportion to their w_i.

    ``md``, with the design ``"multinomial"``, is that of Li et al. 2020 (FedProx). ``fedavg``,
    ``fedvarp`` and ``fedstale`` are equal draws with an estimator of their own.
    """

    by_weight: bool = False
    per_second: bool = False
    per_cost: bool = False

    @property
    def draws_equally(self) -> bool:
        return not (self.by_weight or self.per_second or self.per_cost)

    def init(self, population: Population) -> FixedState:
        score_m = np.ones(population.num_clients)
        if self.by_weight:
            # A copy, as a tree owns its array.
            score_m = population.weight_m.copy()
        score_m = self.cheaper_first(score_m, population)
        return FixedState(for_design(score_m, self.design))

    def scores(
        self,
        state: FixedState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> Scores:
        return state.score_m
