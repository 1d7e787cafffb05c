"""Coefficients of control variates: D = beta sum_j w_j c_j + sum_S coef_i (u_i - beta c_i).

D is unbiased for every beta that is known before the draw: beta c is a control variate like any other. beta = 1 is the
plain difference estimator, beta = 0 is Horvitz-Thompson. A memory that is stale, or of another scale than the updates,
is worse than none at beta = 1; the right beta is never worse than either.

====================== ============================ ===============================================================
control variate        beta                         source
====================== ============================ ===============================================================
``FixedCoefficient``   fixed                        FedStale (Rodio and Neglia 2024)
``LearnedCoefficient`` learned from earlier rounds  regression (optimal difference) estimator: Montanari 1987;
                                                    control variates with an estimated coefficient: Lavenberg and
                                                    Welch 1981
====================== ============================ ===============================================================
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError
from ..scale.rows import RowFormat
from ..types import Cohort, FloatArray, IntArray, Params, Population, Replies
from .control_variates import ControlValue, ControlVariate

#: Below this share of sum_S mass norm(coef c)^2 what centring leaves is rounding, not spread.
_SPREAD = 1e-9


@dataclass(frozen=True)
class _Scaled(ControlVariate):
    """Another control variate times beta."""

    control: ControlVariate

    @property
    def remembers(self) -> bool:
        """As the inner one."""
        return self.control.remembers

    @property
    def uses_aux(self) -> bool:
        """As the inner one."""
        return self.control.uses_aux

    def with_rows(self, rows: RowFormat) -> Self:
        """With the inner one's rows in another format."""
        return replace(self, control=self.control.with_rows(rows))


@dataclass(frozen=True)
class FixedCoefficient(_Scaled):
    """Control values beta c_i, beta fixed.

    Attributes:
        control: Where c comes from.
        beta: In [0, 1].
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        """Refuse an impossible beta."""
        if not 0 <= self.beta <= 1:
            raise DeltaflError(f"beta is {self.beta}; it must be from 0 (no memory) to 1 (the memory as it is)")

    def coefficient(self, state: Any) -> float:
        """Beta."""
        return self.beta

    def init(self, population: Population, num_params: int) -> Any:
        """The state of the inner control variate."""
        return self.control.init(population, num_params)

    def value(self, state: Any, client_n: IntArray) -> ControlValue:
        """Everything times beta."""
        return _times(self.control.value(state, client_n), self.beta)

    def update(self, state: Any, population: Population, replies: Replies, update_nd: Params) -> Any:
        """The inner control variate learns."""
        return self.control.update(state, population, replies, update_nd)


class LearnedCoefficientState(NamedTuple):
    """The inner state, and the two sums whose ratio is beta.

    Attributes:
        control: State of the inner control variate.
        cross: float64 (), A, exponential sum over rounds of the estimated sum_i g_i <u_i, c_i>.
        square: float64 (), B >= 0, the same of g_i norm(c_i)^2; 0 before the first replies.
    """

    control: Any
    cross: FloatArray
    square: FloatArray


@dataclass(frozen=True)
class LearnedCoefficient(_Scaled):
    """Control values beta c_i, beta = clip(A / B, 0, 1) from earlier rounds; 1 before the first of them.

    Independent draws have V(beta) = sum_i g_i norm(u_i - beta c_i)^2 with g_i = w_i^2 (1 - pi_i) / pi_i, which is least
    at beta = sum_i g_i <u_i, c_i> / sum_i g_i norm(c_i)^2. Sums over everybody are estimated from the cohort by weights
    1 / pi_i, and as coef_i = w_i / pi_i, g_i / pi_i = coef_i^2 (1 - w_i / coef_i): a client that is certain to
    be drawn does not count. (Weights w_i coef_i would leave the factor (1 - pi_i) / pi_i out.)

    Designs of fixed size do better than independent draws: what all coef_i (u_i - beta c_i) have in common cancels. So
    for them the products are those of coef_i u_i and coef_i c_i about their means over the cohort, with masses 1 - w_i
    / coef_i (the variance approximation of ``variance.py``; exact for simple random sampling). Otherwise a memory that
    knows only what all updates have in common would look useful where it is not. With replacement each draw counts by
    itself, as coef_i u_i / count_i about their mean, for nobody is certain to be drawn. A draw that leaves a single
    place open has no mean to be about: it counts uncentred, which is V(beta) plus norm(sum_j w_j (u_j - beta c_j))^2.

    Clients that reply with rate q_i < 1 make a second draw, each on its own, in which nothing cancels, with
    V(beta) = sum_S q_i (1 - q_i) norm(coef_i (u_i - beta c_i))^2: its part of A and B is not centred. The first draw's
    part is that of q_i coef_i, what the reply would count if all replied, with masses over q_i.

    A wrong beta costs variance, never bias.

    Attributes:
        control: Where c comes from; its state of a round is not yet multiplied by beta.
        memory: In [0, 1), how slowly A and B follow the rounds.
    """

    memory: float = 0.9

    def __post_init__(self) -> None:
        """Refuse an impossible memory."""
        if not 0 <= self.memory < 1:
            raise DeltaflError(f"memory is {self.memory}; it must be from 0 (the last round alone) to below 1")

    def init(self, population: Population, num_params: int) -> LearnedCoefficientState:
        """Beta = 1."""
        return LearnedCoefficientState(self.control.init(population, num_params), np.zeros(()), np.zeros(()))

    def coefficient(self, state: LearnedCoefficientState) -> float:
        """Beta of the next round, in [0, 1]."""
        return float(np.clip(state.cross / state.square, 0.0, 1.0)) if state.square > 0 else 1.0

    def value(self, state: LearnedCoefficientState, client_n: IntArray) -> ControlValue:
        """Everything times beta."""
        return _times(self.control.value(state.control, client_n), self.coefficient(state))

    def update(
        self, state: LearnedCoefficientState, population: Population, replies: Replies, update_nd: Params
    ) -> LearnedCoefficientState:
        """Regress the replies on their control values, then let the inner control variate learn."""
        weight_n = population.weight_m[replies.client_n]
        cross, square = _products(update_nd, self.control.value(state.control, replies.client_n), weight_n, replies)
        return LearnedCoefficientState(
            control=self.control.update(state.control, population, replies, update_nd),
            cross=np.asarray(self.memory * state.cross + cross),
            square=np.asarray(self.memory * state.square + square),
        )


def _times(value: ControlValue, beta: float) -> ControlValue:
    return value if beta == 1 else ControlValue(beta * value.total_d, beta * value.control_nd)


def _products(update_nd: Params, value: ControlValue, weight_n: FloatArray, replies: Replies) -> tuple[float, float]:
    """A and B of one round: those of the draw, about the means if what is common cancels, and those of who replied."""
    control_nd = value.control_nd
    rate_n, sent_n, count_n = replies.response_n, replies.response_n * replies.coef_n, replies.cohort.count_n
    alone_n = (1 - rate_n) / rate_n**2
    if replies.cohort.kind == "replacement":
        mass_n, sent_n, alone_n = count_n / rate_n, sent_n / count_n, alone_n * count_n**2
    else:
        decided_n = np.divide(weight_n, sent_n, out=np.ones(len(sent_n)), where=sent_n > 0)
        mass_n = np.clip(1 - decided_n, 0.0, 1.0) / rate_n
    total = mass_n.sum()
    cross = square = alone_cross = alone_square = 0.0
    mean_y_d, mean_z_d = np.zeros(control_nd.shape[1]), np.zeros(control_nd.shape[1])
    for i, (mass, alone, sent) in enumerate(zip(mass_n, alone_n, sent_n, strict=True)):
        y_d, z_d = sent * update_nd[i].astype(np.float64), sent * control_nd[i if len(control_nd) > 1 else 0]
        product, length = float(y_d @ z_d), float(z_d @ z_d)
        cross, square = cross + mass * product, square + mass * length
        alone_cross, alone_square = alone_cross + alone * product, alone_square + alone * length
        if total > 0:
            mean_y_d += mass / total * y_d
            mean_z_d += mass / total * z_d
    if replies.cohort.kind != "poisson" and _open_places(replies.selected) > 1:
        spread = square - total * float(mean_z_d @ mean_z_d)
        beyond_rounding = spread > _SPREAD * square
        cross = cross - total * float(mean_y_d @ mean_z_d) if beyond_rounding else 0.0
        square = spread if beyond_rounding else 0.0
    return cross + alone_cross, square + alone_square


def _open_places(selected: Cohort) -> int:
    """How many of a cohort were left to chance: its draws, without those that were certain."""
    if selected.kind == "replacement":
        return int(selected.count_n.sum())
    return int(np.count_nonzero(~(selected.expected_n >= 1)))
