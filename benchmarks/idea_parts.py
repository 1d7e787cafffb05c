"""Controls and samplers of ideas that did not win, kept so that ``ideas.py`` can show it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deltafl import (
    Centred,
    ControlValue,
    ControlVariate,
    Population,
    Sampler,
    draw_cohort,
    with_floor,
)
from deltafl.estimators.control_variates import (
    InnovationControl,
    RegressionControl,
    RegressionControlState,
)
from deltafl.estimators.learned_coefficient import LearnedCoefficient
from deltafl.samplers.centred import CentredState
from deltafl.types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Params, Replies, Reports


class DeviationState(NamedTuple):
    """The clients' deviations from the common c at their last visits, their weighted sum, and c."""

    deviation_md: FloatArray
    total_d: FloatArray
    common_d: FloatArray


@dataclass(frozen=True)
class DeviationControl(ControlVariate):
    """c_i = c now + (u_i - c) when client i was last seen: the part that all have in common is kept
    fresh.

    Attributes:
        memory: How slowly c follows the rounds.
        decay: Factor a round of the deviations, 1 for none.
    """

    memory: float = 0.7
    decay: float = 1.0

    def init(self, population: Population, num_params: int) -> DeviationState:
        """All zero."""
        return DeviationState(
            np.zeros((population.num_clients, num_params)),
            np.zeros(num_params),
            np.zeros(num_params),
        )

    def value(self, state: DeviationState, client_n: IntArray) -> ControlValue:
        """The common part of today and the client's own of its last visit."""
        return ControlValue(
            state.total_d + state.common_d, state.common_d + state.deviation_md[client_n]
        )

    def update(
        self, state: DeviationState, population: Population, replies: Replies, update_nd: Params
    ) -> DeviationState:
        """Follow the round's estimate; what the replies have beside it is their own."""
        client_n = replies.client_n
        coef_n = replies.coef_n
        total_d, control_nd = self.value(state, client_n)
        estimate_d = total_d + coef_n @ (update_nd - control_nd)
        common_d = self.memory * state.common_d + (1 - self.memory) * estimate_d
        deviation_md = self.decay * state.deviation_md
        deviation_md[client_n] = update_nd - common_d
        return DeviationState(deviation_md, population.weight_m @ deviation_md, common_d)


@dataclass(frozen=True)
class OneKindOfVisit(Centred):
    """``innovation`` whose memories age, but whose first visits count like later ones."""

    def _growth(self, state: CentredState, share: float) -> FloatArray:
        return Centred(own_memory=True, ageing=self.ageing)._growth(state, share)


@dataclass(frozen=True)
class TourFirst(Centred):
    """``innovation``, but everybody once, in random order, first. **Biased** in the tour, from
    which it learns, too.
    """

    own_memory: bool = True

    @property
    def unbiased(self) -> bool:
        """A client that was selected in the tour cannot be selected again in it."""
        return False

    def open(
        self,
        state: CentredState,
        available_m: BoolArray | None,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """N of those not selected yet, each as likely as the others, while there are n of them."""
        unseen = np.flatnonzero(state.seen_m < 0)
        if len(unseen) < n:
            return super().open(state, available_m, n, rng, oracle)
        client_n = np.sort(rng.choice(unseen, n, replace=False))
        return Cohort(
            client_n, np.ones(n, dtype=np.int64), np.full(n, n / len(unseen)), "fixed-size"
        )


class ResidualState(NamedTuple):
    """The regression, what it left of each client when it was seen last, and the weighted sum of
    that.
    """

    regression: RegressionControlState
    residual_md: FloatArray
    total_d: FloatArray


@dataclass(frozen=True)
class ResidualControl(ControlVariate):
    """c_i = B x_i + (u_i - B x_i) when client i was last seen: a memory that moves with the
    client's labels.

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
        return ResidualState(
            self.regression.init(population, num_params), rows, np.zeros(num_params)
        )

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
        score_m = with_floor(
            state.seen.weight_m * self.score.residual(state.seen, n), self.score.floor
        )
        return draw_cohort(score_m, n, "cube", rng, available_m, state.value_mq)

    def update(self, state: KnownAndSeen, cohort: Cohort, reports: Reports) -> KnownAndSeen:
        """The scores learn."""
        return state._replace(seen=self.score.update(state.seen, cohort, reports))


@dataclass(frozen=True)
class SlowInnovation(LearnedCoefficient):
    """The common value of ``innovation`` follows slower."""

    control: ControlVariate = field(default_factory=lambda: InnovationControl(memory=0.9))


@dataclass(frozen=True)
class FastInnovation(LearnedCoefficient):
    """The common value of ``innovation`` follows faster."""

    control: ControlVariate = field(default_factory=lambda: InnovationControl(memory=0.3))


@dataclass(frozen=True)
class FastRegression(LearnedCoefficient):
    """B follows faster."""

    control: ControlVariate = field(default_factory=lambda: RegressionControl(memory=0.2))


@dataclass(frozen=True)
class SlowRegression(LearnedCoefficient):
    """B follows slower."""

    control: ControlVariate = field(default_factory=lambda: RegressionControl(memory=0.8))


@dataclass(frozen=True)
class Residual(LearnedCoefficient):
    """The regression and what it left of each client, with a learned coefficient."""

    control: ControlVariate = field(default_factory=ResidualControl)
