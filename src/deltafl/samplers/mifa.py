"""The selection of MIFA (Gu et al., NeurIPS 2021): all clients once first. Biased; for the
average of last updates.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, IntArray, Population, Reports
from .base import Rng, State, Unweighted, with_rows


class MifaState(NamedTuple):
    """Whether each client was ever selected, bool (m,)."""

    selected_m: BoolArray


@dataclass(frozen=True)
class NewFirst(Unweighted):
    """Selects clients never selected before, in random order; fills other places uniformly from all
    clients.

    MIFA's first round, in which all devices reply, is spread here over ceil(m / n) rounds. Since
    the average counts a client as zero until it replies, these steps are n / m, 2 n / m, ... of a
    full one. Source: Gu et al. 2021, algorithm 1.
    """

    def init(self, population: Population) -> State:
        return MifaState(np.zeros(population.num_clients, dtype=np.bool_))

    def choose(self, state: State, present_k: IntArray, size: int, rng: Rng) -> IntArray:
        new: IntArray = present_k[~state.selected_m[present_k]][:size]
        if len(new) == size:
            return new
        return np.concatenate([new, self.again(state, present_k, size, size - len(new), rng)])

    def again(
        self, state: State, present_k: IntArray, size: int, wanted: int, rng: Rng
    ) -> IntArray:
        """At most ``wanted`` of the clients that replied before, in a cohort of ``size``; by
        default none is ahead.
        """
        return present_k[:0]

    def update(self, state: State, cohort: Cohort, reports: Reports) -> State:
        return state._replace(selected_m=with_rows(state.selected_m, cohort.client_n, True))
