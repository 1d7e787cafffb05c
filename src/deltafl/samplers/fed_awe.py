"""FedAWE (Xiang et al., NeurIPS 2024): who was away longer counts for more. Biased at first."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import Cohort, FloatArray, IntArray, Population, Reports, Within
from .base import with_rows
from .fed_au import ByIntervals


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

    row_fields: ClassVar = ("rounds_m",)

    def init(self, population: Population) -> AweState:
        return AweState(np.ones(population.num_clients, np.int64))

    def intervals(self, state: AweState) -> FloatArray:
        return state.rounds_m.astype(float)

    def update(self, state: AweState, cohort: Cohort, reports: Reports) -> AweState:
        here = cohort.client_n[reports.responded_n]
        return AweState(with_rows(state.rounds_m + 1, here, 1))
