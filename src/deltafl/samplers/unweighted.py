"""What biased samplers share: a history of the clients, cohorts without selection probabilities, successive draws."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import Sampler, present_clients, replied


class History(NamedTuple):
    """What is remembered of the clients.

    Attributes:
        weight_m: float64 (m,), the weights w_i.
        size_m: int64 (m,), numbers of examples.
        value_mq: float64 (m, q), a client's values when it replied last; NaN until it has.
        selected_m: int64 (m,), how often each was selected.
        last_m: int64 (m,), the round, from 1, in which it replied last; 0 for never.
        rounds: int64 (), rounds so far.
    """

    weight_m: FloatArray
    size_m: IntArray
    value_mq: FloatArray
    selected_m: IntArray
    last_m: IntArray
    rounds: IntArray


@dataclass(frozen=True)
class Unweighted(Sampler):
    """Selects clients in a way whose inclusion probabilities are unknown. Subclasses define ``choose``."""

    @property
    def value_size(self) -> int:
        """How many values q of each client are remembered."""
        return 0

    def values(self, state: History, client_n: IntArray, reports: Reports) -> FloatArray:
        """The new values, float64 (n, q), of the clients that replied; by default they stay."""
        return state.value_mq[client_n]

    @abstractmethod
    def choose(self, state: History, present_k: IntArray, size: int, rng: np.random.Generator) -> IntArray:
        """At most ``size`` of the available clients, which come in random order; the first others fill the cohort."""

    def init(self, population: Population) -> History:
        """No client has been selected."""
        m = population.num_clients
        return History(
            weight_m=population.weight_m,
            size_m=population.num_examples_m,
            value_mq=np.full((m, self.value_size), np.nan),
            selected_m=np.zeros(m, dtype=np.int64),
            last_m=np.zeros(m, dtype=np.int64),
            rounds=np.zeros((), dtype=np.int64),
        )

    def open(
        self, state: History, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """The chosen clients, filled up with others."""
        present, size = present_clients(available_m, n)
        present_k = rng.permutation(present)  # breaks all later ties
        chosen = self.choose(state, present_k, size, rng)
        rest = present_k[~np.isin(present_k, chosen)][: size - len(chosen)]
        return unweighted_cohort(np.concatenate([chosen, rest]))

    def update(self, state: History, cohort: Cohort, reports: Reports) -> History:
        """Count the selections, and store the values of the clients that replied."""
        client_n, reports = replied(cohort, reports)
        value_mq, selected_m, last_m = state.value_mq.copy(), state.selected_m.copy(), state.last_m.copy()
        rounds = np.asarray(state.rounds + 1)
        selected_m[cohort.client_n] += 1
        value_mq[client_n] = self.values(state, client_n, reports)
        last_m[client_n] = rounds
        return History(state.weight_m, state.size_m, value_mq, selected_m, last_m, rounds)


def unweighted_cohort(client_n: IntArray) -> Cohort:
    """A cohort of distinct clients with unknown probabilities (NaN), for estimators that need none."""
    client_n = np.sort(client_n)
    return Cohort(client_n, np.ones(len(client_n), dtype=np.int64), np.full(len(client_n), np.nan))


def draw_successively(log_weight_k: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Rows of ``size`` draws without replacement, each with p proportional to exp(log weight) among those left.

    The same as drawing with replacement until ``size`` distinct rows are there. Rows of weight 0 (-inf) come last, in
    their order. By exponential clocks: the smallest of E_k / weight_k, in logarithms so that no weight overflows.

    Source: Efraimidis and Spirakis, Information Processing Letters 2006.
    """
    key_k = log_weight_k + rng.gumbel(size=len(log_weight_k))
    return np.argsort(-key_k, kind="stable")[:size]
