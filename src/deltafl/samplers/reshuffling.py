"""Client reshuffling (Malinovsky et al. 2023): passes over all clients, in random order. Biased."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, IntArray, Population, Reports, Rng
from .base import Unweighted, with_rows


class PassState(NamedTuple):
    """Who has been selected in this pass, bool (m,)."""

    had_m: BoolArray


@dataclass(frozen=True)
class ClientReshuffling(Unweighted):
    """Selects every client once in a pass of m / n rounds, in an order that is new in each pass.

    With S_1, ..., S_R a random partition of the clients into R = m / n cohorts, new in each pass
    (the paper's meta epoch), round r of it is a round of FedAvg with the cohort S_r: x moves by the
    weighted mean of its updates.

    **Biased given the past**: with L clients left in the pass, pi_i is n / L for each of them and 0
    for all others, so that no weights make a round unbiased; over a pass every client counts once.

    The partition is drawn round by round, uniformly from those left, which has the same
    distribution. Ours: where fewer than n of those left are available, others fill the cohort,
    drawn uniformly, and have then had their turn in the next pass, which begins; a client that was
    away for a whole pass misses it. Whoever never replies has had its turn. Left out: step sizes
    of the server other than 1.

    Source: Malinovsky, Horvath, Burlachenko and Richtarik, arXiv 2302.03662. We had its abstract,
    not its text: each client takes part once in every R rounds. That the partition is uniform and
    new in each pass is how we read it.
    """

    row_fields = ("had_m",)

    def init(self, population: Population) -> PassState:
        return PassState(np.zeros(population.num_clients, bool))

    def choose(
        self,
        state: PassState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        left: IntArray = present_k[~state.had_m[present_k]][:size]
        return left

    def update(
        self,
        state: PassState,
        cohort: Cohort,
        reports: Reports,
    ) -> PassState:
        again_n = cohort.client_n[state.had_m[cohort.client_n]]
        # Nobody available was left, or none of them would have been selected.
        if len(again_n):
            return PassState(with_rows(np.zeros_like(state.had_m), again_n, True))
        return PassState(with_rows(state.had_m, cohort.client_n, True))
