"""MIFA's way of asking (Gu et al., NeurIPS 2021): everyone once first. Biased, with the average of latest updates."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, Oracle, Population, Reports
from .base import Sampler
from .unweighted import places, unweighted_cohort


class AskedState(NamedTuple):
    """Who was asked, bool (m,)."""

    selected_m: BoolArray


@dataclass(frozen=True)
class NewFirst(Sampler):
    """Asks clients that were never asked, in random order; then, and in places left free, everyone alike.

    MIFA leaves to the devices who replies (arbitrary unavailability) and asks that all reply in its first round. Under
    sampling that first round is spread over ceil(m / n) rounds here, in which the average counts a client as zero until
    it replies: their steps are shorter, n / m, 2 n / m, ... of a whole one, where MIFA would wait for everyone and take
    one whole step. Which clients are asked depends on the past, so the probabilities are not exact expectations of a
    design: it is to be followed by the estimator ``mifa`` (= ``fedvarp``), which needs none.

    Source: Gu, Huang, Zhang and Huang, NeurIPS 2021, algorithm 1.
    """

    def init(self, population: Population) -> AskedState:
        """Nobody was asked."""
        return AskedState(np.zeros(population.num_clients, dtype=np.bool_))

    def open(
        self, state: AskedState, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """The new ones first."""
        present_k, size = places(available_m, n, rng)
        new_first = np.argsort(state.selected_m[present_k], kind="stable")
        return unweighted_cohort(present_k[new_first][:size])

    def update(self, state: AskedState, cohort: Cohort, reports: Reports) -> AskedState:
        """Remember who was asked, whether they replied or not."""
        selected_m = state.selected_m.copy()
        selected_m[cohort.client_n] = True
        return AskedState(selected_m)
