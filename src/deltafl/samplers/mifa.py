"""The selection of MIFA (Gu et al., NeurIPS 2021): everyone once first. Biased; for the average of latest updates."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, Oracle, Population, Reports
from .base import Sampler
from .unweighted import places, unweighted_cohort


class MifaState(NamedTuple):
    """True once selected, bool (m,)."""

    selected_m: BoolArray


@dataclass(frozen=True)
class NewFirst(Sampler):
    """Selects clients that were never selected, in random order; then, and in places left free, all evenly.

    MIFA does not sample: devices reply when they are available, all of them in its first round. Here that first round
    is spread over ceil(m / n) rounds, in which the average counts a client as zero until it replies: these steps are
    n / m, 2 n / m, ... of a whole one. The selection depends on the past, so there are no exact inclusion
    probabilities; the estimator ``mifa`` (= ``fedvarp``) needs none.

    Source: Gu, Huang, Zhang and Huang, NeurIPS 2021, algorithm 1.
    """

    def init(self, population: Population) -> MifaState:
        """No client has been selected."""
        return MifaState(np.zeros(population.num_clients, dtype=np.bool_))

    def open(
        self, state: MifaState, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """New clients first."""
        present_k, size = places(available_m, n, rng)
        new_first = np.argsort(state.selected_m[present_k], kind="stable")
        return unweighted_cohort(present_k[new_first][:size])

    def update(self, state: MifaState, cohort: Cohort, reports: Reports) -> MifaState:
        """Mark the cohort as selected, whether it replied or not."""
        selected_m = state.selected_m.copy()
        selected_m[cohort.client_n] = True
        return MifaState(selected_m)
