"""Control variates from both phases: the first update of every client, from the census, and what the rounds teach."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import BoolArray, FloatArray, IntArray, Params, Population, Replies
from .control_variates import RANK_TOLERANCE, ControlValue, ControlVariate, RegressionControl
from .learned_coefficient import LearnedCoefficient, LearnedCoefficientState
from .two_bits import code_length, decode

#: Numbers that are decoded at once.
_AT_ONCE = 2**22


class FirstUpdatesState(NamedTuple):
    """The codes of the first updates Q_i, without columns if there are none; and their regression on x."""

    code_mc: FloatArray
    aux_mq: FloatArray
    fitted_qd: FloatArray  # B_0
    remainder_d: FloatArray  # sum_j w_j e_j


@dataclass(frozen=True)
class FirstUpdates(ControlVariate):
    """c_i = e_i = Q_i - B_0 x_i: what no regression on x says of client i's first update; 0 where Q_i is not known.

    Q_i is the update of the initial model that client i sent with its answer to the census, in two bits a parameter
    (``two_bits.py``), and B_0 minimises sum_j w_j norm(Q_j - B_0 x_j)^2 over the clients that sent one. They stay as
    they are. The server keeps 2.75 bits a parameter and client, and decodes what it needs.
    """

    uses_aux = True

    def init(self, population: Population, num_params: int) -> FirstUpdatesState:
        aux_mq, m = population.design_mq(), population.num_clients
        code_mc = np.zeros((m, 0)) if population.code_mc is None else population.code_mc
        zero_qd, zero_d = np.zeros((aux_mq.shape[1], num_params)), np.zeros(num_params)
        if code_mc.shape[1] not in (0, code_length(num_params)):
            raise DeltaflError(f"the census is not of this model of {num_params:,} parameters; take it anew")
        state = FirstUpdatesState(code_mc, aux_mq, zero_qd, zero_d)
        if code_mc.shape[1] == 0:
            return state
        weight_m = population.weight_m * _sent(code_mc)
        moment_qd = np.zeros_like(zero_qd)
        step = max(_AT_ONCE // num_params, 1)
        for first in range(0, m, step):
            rows = slice(first, first + step)
            moment_qd += (weight_m[rows, None] * aux_mq[rows]).T @ decode(code_mc[rows], num_params)
        square_qq = np.einsum("m,mp,mq->pq", weight_m, aux_mq, aux_mq)
        fitted_qd = np.linalg.pinv(square_qq, rcond=RANK_TOLERANCE, hermitian=True) @ moment_qd
        return state._replace(fitted_qd=fitted_qd, remainder_d=moment_qd[0] - square_qq[0] @ fitted_qd)

    def value(self, state: FirstUpdatesState, client_n: IntArray) -> ControlValue:
        if state.code_mc.shape[1] == 0:
            return ControlValue(state.remainder_d, state.remainder_d[None])
        code_nc = state.code_mc[client_n]
        row_nd = decode(code_nc, len(state.remainder_d))
        row_nd -= (state.aux_mq[client_n] * _sent(code_nc)[:, None]) @ state.fitted_qd
        return ControlValue(state.remainder_d, row_nd)

    def update(self, state: FirstUpdatesState, *_: object) -> FirstUpdatesState:
        return state


def _sent(code_nc: FloatArray) -> BoolArray:
    """Who sent a first update."""
    return np.asarray(np.any(code_nc != 0, axis=1), dtype=np.bool_)


class TwoPhaseState(NamedTuple):
    """The states of both terms, and how many rounds were closed."""

    regression: LearnedCoefficientState
    first: LearnedCoefficientState
    rounds: IntArray


@dataclass(frozen=True)
class TwoPhase(ControlVariate):
    """c_i = beta B x_i + gamma e_i: what earlier rounds teach of all clients, and the census of this one.

    The first term is ``RegressionControl`` whose B begins as B_0, the second ``FirstUpdates``; beta and gamma are
    learned (``LearnedCoefficient``), gamma from what the first term leaves. Both are 1 in the first round, so that c_i
    = Q_i: its cohort, whose updates are known but for the code, corrects the sum of all first updates and teaches
    nothing. With no first updates this is ``regression-damped``.

    Regression estimators in two phases: Sarndal and Swensson 1987. Unbiased, as all c_i are known before the draw;
    docs/theory.md, section 11.
    """

    regression: LearnedCoefficient = field(default_factory=lambda: LearnedCoefficient(RegressionControl()))
    first: LearnedCoefficient = field(default_factory=lambda: LearnedCoefficient(FirstUpdates()))
    uses_aux = uses_first_updates = True

    def init(self, population: Population, num_params: int) -> TwoPhaseState:
        first, regression = self.first.init(population, num_params), self.regression.init(population, num_params)
        control = regression.control._replace(slope_qd=first.control.fitted_qd)
        return TwoPhaseState(regression._replace(control=control), first, np.zeros((), dtype=np.int64))

    def coefficient(self, state: TwoPhaseState) -> float:
        return self.regression.coefficient(state.regression)

    def value(self, state: TwoPhaseState, client_n: IntArray) -> ControlValue:
        value, first = self.regression.value(state.regression, client_n), self.first.value(state.first, client_n)
        return ControlValue(value.total_d + first.total_d, value.control_nd + first.control_nd)

    def update(self, state: TwoPhaseState, population: Population, replies: Replies, update_nd: Params) -> Any:
        following = state._replace(rounds=state.rounds + 1)
        sent = state.first.control.code_mc.shape[1] > 0
        if sent and state.rounds == 0:
            return following
        if sent:
            left_nd: Any = update_nd - self.regression.value(state.regression, replies.client_n).control_nd
            following = following._replace(first=self.first.update(state.first, population, replies, left_nd))
        learnt = self.regression.update(state.regression, population, replies, update_nd)
        return following._replace(regression=learnt)
