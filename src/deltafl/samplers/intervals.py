"""Weights by how long clients stay away: FedAU (Wang and Ji, ICLR 2024) and FedAWE (Xiang et al.,
NeurIPS 2024). Biased at first.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import (
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Oracle,
    Population,
    Reports,
    Rng,
    Within,
)
from .base import Scored, State, with_rows


class AUState(NamedTuple):
    """What the server stores about each client."""

    # the mean length of its intervals, omega_i; 1 until the first one ends
    interval_m: Annotated[FloatArray, Within("[1, next]")]
    ended_m: Counts  # intervals that ended
    rounds_m: Counts  # rounds of the interval that is going on


@dataclass(frozen=True)
class ByIntervals(Scored):
    """Draws uniformly from the available clients; a reply weighs w_i times ``intervals``, as if it
    stood for so many rounds.
    """

    design: str = "simple-random"

    unbiased = False
    expects_absence = True

    @abstractmethod
    def intervals(self, state: State) -> FloatArray:
        """How many rounds a reply of each client stands for, (m,), at least 1."""

    def scores(
        self,
        state: State,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        return np.ones(len(self.intervals(state)))

    def open(
        self,
        state: State,
        available_m: BoolArray | None,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        cohort = super().open(state, available_m, n, rng, oracle)
        # The draw's own expectations are not used: intervals count selection and absence together.
        interval_n = self.intervals(state)[cohort.client_n]
        return cohort._replace(expected_n=cohort.count_n / interval_n, kind="unknown")


@dataclass(frozen=True)
class FedAU(ByIntervals):
    """Draws uniformly from the available clients; a reply weighs w_i omega_i, as 1 / omega_i
    estimates its probability.

    omega_i is the mean number of rounds from one reply of client i to its next. Only earlier rounds
    count, so that omega_i is known before the draw.

    Source: Wang and Ji, "A lightweight method for tackling unknown participation statistics in
    federated averaging", ICLR 2024, algorithm 2; its K is 50. In the paper all available clients
    take part; here a cohort is drawn.

    Attributes:
        cutoff: Rounds after which an interval ends; otherwise the weight of an absent client would
            grow without bound.
    """

    cutoff: int = 50

    row_fields = ("interval_m", "ended_m", "rounds_m")
    ranges: ClassVar = {"cutoff": "[1, inf)"}

    def init(self, population: Population) -> AUState:
        m = population.num_clients
        return AUState(np.ones(m), np.zeros(m, np.int64), np.zeros(m, np.int64))

    def intervals(self, state: AUState) -> FloatArray:
        return state.interval_m

    def update(
        self,
        state: AUState,
        cohort: Cohort,
        reports: Reports,
    ) -> AUState:
        # Of all clients: those who were not selected did not take part either.
        rounds_m = state.rounds_m + 1
        ended_m = rounds_m >= self.cutoff
        ended_m[cohort.client_n[reports.responded_n]] = True
        mean_m = (state.ended_m * state.interval_m + rounds_m) / (state.ended_m + 1)
        return AUState(
            np.where(ended_m, mean_m, state.interval_m),
            state.ended_m + ended_m,
            np.where(ended_m, 0, rounds_m),
        )


class AweState(NamedTuple):
    """How long each client has been away."""

    # rounds from its last reply to this round, t - tau_i; tau_i = -1 at first
    rounds_m: Annotated[IntArray, Within("[1, next]")]


@dataclass(frozen=True)
class FedAWE(ByIntervals):
    """Draws uniformly from the available clients; the reply of one that was last heard in round
    tau_i weighs w_i (t - tau_i) in round t.

    This is adaptive innovation echoing: an update counts as often as there were rounds without
    one, so that after T rounds all replies of a client have counted as often as there are rounds
    up to its last one, however it comes and goes. There is no cutoff and no mean: early steps are
    short, and one reply after a long absence counts much.

    In the paper every available client takes part, starts from the model x_i that it had when it
    last did, and

        x_i+ = x_i + eta_g (t - tau_i) u_i,   x_i <- mean of x_j+ over the clients j that took part

    (implicit gossiping; the others keep x_i). Averages are kept by this mixing, so that the mean of
    all m models moves by (eta_g / m) sum_i (t - tau_i) u_i. Here this is the step of the model that
    the server sends, with eta_g = 1, the authors' value. Ours: every client starts from that
    model, as if gossiping had come to its end; weights w_i for 1 / m; a cohort of n is drawn, and
    who was not drawn or did not reply counts as away.

    Source: Xiang, Ioannidis, Yeh, Joe-Wong and Su, NeurIPS 2024 (arXiv 2409.17446), the algorithm
    FedAWE, and the authors' code.
    """

    row_fields = ("rounds_m",)

    def init(self, population: Population) -> AweState:
        return AweState(np.ones(population.num_clients, np.int64))

    def intervals(self, state: AweState) -> FloatArray:
        return state.rounds_m.astype(float)

    def update(
        self,
        state: AweState,
        cohort: Cohort,
        reports: Reports,
    ) -> AweState:
        here = cohort.client_n[reports.responded_n]
        return AweState(with_rows(state.rounds_m + 1, here, 1))
