"""Parts of ideas about what is known of the clients, which did not win, kept so that ``ideas.py`` can show it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deltafl import Centred, Population, Sampler, draw_cohort, with_floor
from deltafl.estimators.control_variates import ControlValue, ControlVariate, RegressionControl, RegressionControlState
from deltafl.samplers.centred import CentredState
from deltafl.types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Params, Replies, Reports


class ResidualState(NamedTuple):
    """The regression, what it left of each client when it was seen last, and the weighted sum of that."""

    regression: RegressionControlState
    residual_md: FloatArray
    total_d: FloatArray


@dataclass(frozen=True)
class ResidualControl(ControlVariate):
    """c_i = B x_i + (u_i - B x_i) when client i was last seen: a memory that moves with the client's labels.

    Attributes:
        regression: Where B comes from.
    """

    regression: RegressionControl = field(default_factory=RegressionControl)

    @property
    def uses_aux(self) -> bool:
        """As the regression."""
        return True

    def init(self, population: Population, num_params: int) -> ResidualState:
        """Nobody was seen."""
        rows = np.zeros((population.num_clients, num_params))
        return ResidualState(self.regression.init(population, num_params), rows, np.zeros(num_params))

    def value(self, state: ResidualState, client_n: IntArray) -> ControlValue:
        """The regression of today and the client's own of its last visit."""
        total_d, control_nd = self.regression.value(state.regression, client_n)
        return ControlValue(total_d + state.total_d, control_nd + state.residual_md[client_n])

    def update(
        self, state: ResidualState, population: Population, replies: Replies, update_nd: Params
    ) -> ResidualState:
        """B follows what both parts leave; then what B leaves is remembered."""
        client_n = replies.client_n
        left_nd = (update_nd - state.residual_md[client_n]).astype(np.float32)
        regression = self.regression.update(state.regression, population, replies, left_nd)
        residual_md = state.residual_md.copy()
        residual_md[client_n] = update_nd - self.regression.value(regression, client_n).control_nd
        return ResidualState(regression, residual_md, population.weight_m @ residual_md)


class KnownAndSeen(NamedTuple):
    """What ``innovation`` remembers, and w_i x_i of what is known."""

    seen: CentredState
    value_mq: FloatArray


@dataclass(frozen=True)
class BalancedInnovation(Sampler):
    """The scores of ``innovation``, with cohorts that are balanced on what is known of the clients.

    Attributes:
        score: Where the scores come from.
        unbiased: As the cube design.
    """

    score: Centred = field(default_factory=lambda: Centred(own_memory=True))
    unbiased: bool = True
    needs_oracle: bool = False

    def init(self, population: Population) -> KnownAndSeen:
        """Nobody was seen."""
        weight_m = population.weight_m
        return KnownAndSeen(self.score.init(population), weight_m[:, None] * population.design_mq())

    def open(
        self,
        state: KnownAndSeen,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw by innovation's scores, balanced."""
        score_m = with_floor(state.seen.weight_m * self.score._residual(state.seen, n), self.score.floor)
        return draw_cohort(score_m, n, "cube", rng, available_m, state.value_mq)

    def update(self, state: KnownAndSeen, cohort: Cohort, reports: Reports) -> KnownAndSeen:
        """The scores learn."""
        return state._replace(seen=self.score.update(state.seen, cohort, reports))
