"""Generalized heavy-ball momentum (GHBM, Zaccone et al. 2025): a client momentum over tau rounds.

With beta in [0, 1), x_t the model before round t, and K_i the client's number of local steps::

    S_t     = (x_t - x_(t - tau)) / tau, the mean of the last tau steps; 0 in the first tau rounds
    client  x <- x - lr g_k + beta S_t / K_i   in each step: u_i = beta S_t - lr sum_k g_k
    server  x_(t+1) = x_t + beta S_t + estimate of sum_i w_i (u_i - beta S_t)

The means over tau rounds have heard about tau n clients, where the classical momentum, tau = 1,
leans towards the last cohort. The paper's tau is m / n, after which everybody has been heard if
clients take turns (``client-reshuffling``); its experiments with a tenth of the clients a round
have tau = 10 and beta = 0.9, and a larger tau loses little.

Gradient steps have their full length, unlike with ``mime``: on a constant direction steps grow to
1 / (1 - beta) times their own. With tau = 1, this is FedCM at a local rate 1 / (1 - beta) times as
large, but for the model's step in place of D, which differ where the optimizer is not SGD with rate
1. As in ``mime.py``, beta S_t is not estimated, which is ours; where weights sum to 1, as the
paper's do, nothing changes by it.

Clients keep nothing and download a second model; the server keeps tau models. Left out: LocalGHBM
and FedHBM, whose clients keep an old model of their own instead.

Source: Zaccone, Karimireddy, Masone and Ciccone, TMLR 2025 (arXiv 2311.18578). Formulas, the first
rounds and beta are those of the authors' program (github.com/RickZack/GHBM), tau that of their
page; we did not have the text of the paper.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import Params
from .mime import ClientMomentum
from .part import PlanOfParts, Step


class GhbmState(NamedTuple):
    """The models before the last tau rounds, float32 (tau, d): that before round t in row t mod
    tau.
    """

    past_td: Params


@dataclass(frozen=True)
class Ghbm(ClientMomentum):
    """A momentum beta in (0, 1) of the mean of the last tau >= 1 steps, which all clients apply."""

    ghbm: float
    ghbm_tau: int = 10
    name = "ghbm"
    ranges: ClassVar = {"ghbm": "[0, 1)", "ghbm_tau": "[1, 10000]"}

    def check(self, plan: PlanOfParts) -> None:
        if any(part.name != self.name and isinstance(part, ClientMomentum) for part in plan.parts):
            raise DeltaflError("ghbm and mime are two momenta of the clients; leave one out")

    def init(self, plan: PlanOfParts, params_d: Params) -> GhbmState:
        return GhbmState(np.tile(params_d, (self.ghbm_tau, 1)))

    def sent(
        self,
        own: GhbmState,
        round: int,
        params_d: Params,
        part: slice = slice(None),
    ) -> Params:
        if round < self.ghbm_tau:
            return np.zeros_like(params_d[part])
        # The oldest model, which the one before this round is about to replace.
        past_b: Params = own.past_td[round % self.ghbm_tau, part]
        return np.float32(self.ghbm / self.ghbm_tau) * (params_d[part] - past_b)

    def moved(
        self,
        own: GhbmState,
        step: Step,
        params_d: Params,
    ) -> GhbmState:
        past_td = own.past_td.copy()
        past_td[step.round % self.ghbm_tau] = step.params_d
        return GhbmState(past_td)
