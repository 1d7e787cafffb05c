"""Control variates from both phases: every client's first update, from the census, and what the
rounds teach.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..moves import Moves
from ..scale.numerics import inner
from ..scale.rows import Rows, RunningSum, replace_rows
from ..types import (
    NOBODY,
    BoolArray,
    FloatArray,
    IntArray,
    Params,
    Population,
    Replies,
    Sizes,
    Within,
)
from .control_variates import (
    ControlValue,
    ControlVariate,
    LearnsFromResiduals,
    RegressionControl,
    fits_steps,
    pseudoinverse,
)
from .learned_coefficient import LearnedCoefficient, ScaledState
from .two_bits import KEPT, code_length, decode, encode, norms

#: Numbers that are decoded at once.
_AT_ONCE = 2**22


class LastResidualsState(NamedTuple):
    """One code per client, without columns if there are no first updates; the regression of
    those on x; and a sum.
    """

    code_mc: Annotated[Rows, Within("[-1e30, 1e30]")]  #: of Q_i until client i replies, then of e_i
    is_first_m: BoolArray  #: whose code is that of Q_i
    aux_mq: FloatArray
    fitted_qd: FloatArray  #: B_0
    total_d: FloatArray  #: sum_j w_j e_j
    #: how far rounding may have led ``total_d`` from it (``RunningSum``)
    rounding: Sizes = np.zeros(())

    def is_consistent(self) -> bool:
        """Whether no prediction is longer than any step."""
        return fits_steps(self.aux_mq, self.fitted_qd)


@dataclass(frozen=True)
class LastResiduals(LearnsFromResiduals):
    """c_i = e_i, the regression residual of the last known update of client i; 0 where none is
    known.

    At first that is e_i = Q_i - B_0 x_i. Q_i is the update of the initial model that client i sent
    with its answer to the census, in two bits per parameter (``two_bits.py``), and B_0 minimises
    sum_j w_j norm(Q_j - B_0 x_j)^2 over the clients that sent one. Later it is the residual given
    to ``update``, in the same two bits. The server keeps 2.75 bits per parameter and client, and
    decodes what it needs.
    """

    uses_aux = True

    def init(self, population: Population, num_params: int) -> LastResidualsState:
        aux_mq = population.design_mq()
        m = population.num_clients
        moment_qd = np.zeros((aux_mq.shape[1], num_params))
        code_mc = population.code_mc
        if code_mc is None:
            nobody_m = np.zeros(m, bool)
            zero_d = np.zeros(num_params)
            return LastResidualsState(
                np.zeros((m, 0)),
                nobody_m,
                aux_mq,
                moment_qd,
                zero_d,
            )
        if code_mc.shape[1] != code_length(num_params):
            raise DeltaflError(
                f"the census is not of this model of {num_params:,} parameters; take it anew"
            )
        # A client without a first update has a code of zeros.
        sent_m = np.any(code_mc != 0, axis=1)
        # B_0 is the regression of those who sent an update; a factor common to all weights cancels
        # in it.
        weight_m = population.weight_m * sent_m
        for rows in _blocks(m, num_params):
            weighted_mq = weight_m[rows, None] * aux_mq[rows]
            moment_qd += np.einsum(
                "mq,md->qd",
                weighted_mq,
                decode(code_mc[rows], num_params),
            )
        square_qq = np.einsum("m,mp,mq->pq", weight_m, aux_mq, aux_mq)
        fitted_qd = np.einsum("pq,qd->pd", pseudoinverse(square_qq), moment_qd)
        # The first of x is 1, so that row 0 is the sum over clients.
        total_d = moment_qd[0] - np.einsum("q,qd->d", square_qq[0], fitted_qd)
        return LastResidualsState(
            code_mc,
            np.asarray(sent_m),
            aux_mq,
            fitted_qd,
            total_d,
        )

    def value(self, state: LastResidualsState, client_n: IntArray) -> ControlValue:
        if not has_codes(state):
            return ControlValue(state.total_d, state.total_d[None])
        return ControlValue(state.total_d, _residuals(state, client_n))

    def update_knowing(
        self,
        state: LastResidualsState,
        population: Population,
        replies: Replies,
        update_nd: Params,
        value: ControlValue,
    ) -> LastResidualsState:
        client_n = replies.client_n
        if not has_codes(state) or len(client_n) == 0:
            return state
        code_nc = np.array([encode(residual_d) for residual_d in update_nd])
        # What was lost by encoding is lost in the sum too.
        changed_nd = decode(code_nc, len(state.total_d)) - value.control_nd
        is_first_m = state.is_first_m.copy()
        is_first_m[client_n] = False
        before = RunningSum(state.total_d, state.rounding)
        followed = before.plus(population.weight_m[client_n], changed_nd)
        new = state._replace(
            code_mc=replace_rows(state.code_mc, client_n, code_nc),
            is_first_m=is_first_m,
            total_d=followed.total_d,
            rounding=followed.rounding,
        )
        if followed.is_lost:
            return residuals_summed_anew(new, population.weight_m)
        return new

    def resized(self, state: LastResidualsState, moves: Moves) -> LastResidualsState:
        fresh = self.init(moves.population, len(state.total_d))
        num_stay = len(moves.stay_k)
        code_mc = np.asarray(fresh.code_mc)
        # Without codes before, the answers of newcomers have brought the first ones.
        if has_codes(state) == has_codes(fresh):
            code_mc = moves.rows(np.asarray(state.code_mc), code_mc[num_stay:])
        kept = state._replace(
            code_mc=code_mc,
            is_first_m=moves.rows(state.is_first_m, fresh.is_first_m[num_stay:]),
            aux_mq=fresh.aux_mq,
            fitted_qd=fresh.fitted_qd,
        )
        return residuals_summed_anew(kept, moves.population.weight_m)


def has_codes(state: LastResidualsState) -> bool:
    """Whether the census asked for first updates."""
    # By the first row, for rows may be a tuple.
    return len(state.code_mc[0]) > 0


def residuals_summed_anew(
    state: LastResidualsState,
    weight_m: FloatArray,
) -> LastResidualsState:
    """The same, with sum_j w_j e_j summed anew: for new weights, or a lost sum."""
    total_d = np.zeros_like(state.total_d)
    client_m = np.arange(len(weight_m))
    if has_codes(state):
        for rows in _blocks(len(weight_m), len(total_d)):
            residual_nd = _residuals(state, client_m[rows])
            total_d += np.einsum("m,md->d", weight_m[rows], residual_nd)
    return state._replace(total_d=total_d, rounding=np.zeros(()))


def _residuals(state: LastResidualsState, client_n: IntArray) -> FloatArray:
    """e_i of some clients, (n, d)."""
    code_nc = np.zeros((len(client_n), len(state.code_mc[0])))
    # One at a time: rows may be a tuple or a file, which no array of indices can read.
    for place, client in enumerate(client_n):
        code_nc[place] = state.code_mc[client]
    row_nd = decode(code_nc, len(state.total_d))
    # A code of Q_i lacks B_0 x_i; one of e_i is the residual itself.
    first_nq = state.aux_mq[client_n] * state.is_first_m[client_n, None]
    row_nd -= np.einsum("nq,qd->nd", first_nq, state.fitted_qd)
    return row_nd


def _blocks(num_clients: int, num_params: int) -> list[slice]:
    """All clients in turn, as many at once as may be decoded together."""
    step = max(_AT_ONCE // num_params, 1)
    return [slice(first, first + step) for first in range(0, num_clients, step)]


class TwoPhaseState(NamedTuple):
    """The states of both terms."""

    regression: ScaledState
    first: ScaledState


@dataclass(frozen=True)
class TwoPhase(ControlVariate):
    """c_i = beta B x_i + gamma e_i: a regression learned from all clients, and client i's own last
    residual.

    The first term is ``RegressionControl`` with B starting at B_0. The second is ``LastResiduals``:
    e_i is the residual of client i's last update after the first term. beta and gamma are learned
    (``LearnedCoefficient``), gamma from the residuals of the first term. Until there is something
    to learn from, both are the share of the squares of the Q_i that x explains,

        R^2 = sum_j w_j norm(B_0 x_j)^2 / sum_j w_j norm(Q_j)^2,

    as the rest may be noise of a client's training. Without first updates this is
    ``regression-damped``.

    Regression estimators in two phases: Sarndal and Swensson 1987. Unbiased, as all c_i are known
    before the draw; theory, section 11, docs/why/theory/census-first-round.md.
    """

    regression: LearnedCoefficient = field(
        default_factory=lambda: LearnedCoefficient(RegressionControl())
    )
    first: LearnedCoefficient = field(default_factory=lambda: LearnedCoefficient(LastResiduals()))
    uses_aux = uses_first_updates = True

    def init(self, population: Population, num_params: int) -> TwoPhaseState:
        first = self.first.init(population, num_params)
        regression = self.regression.init(population, num_params)
        control = regression.control._replace(slope_qd=first.control.fitted_qd)
        return TwoPhaseState(regression._replace(control=control), first)

    def coefficient(self, state: TwoPhaseState) -> float:
        return _trust(state) * self.regression.coefficient(state.regression)

    def first_mean(self, state: TwoPhaseState) -> FloatArray | None:
        first = state.first.control
        if not has_codes(first):
            return None
        regression_d = self.regression.value(state.regression, NOBODY).total_d
        # Codes are shorter than what they stand for, on average by KEPT.
        # No coefficient has been learned yet, so that both terms count once: they sum to the Q_i.
        return np.asarray((regression_d + first.total_d) / KEPT)

    def value(self, state: TwoPhaseState, client_n: IntArray) -> ControlValue:
        trust = _trust(state)
        value = self.regression.value(state.regression, client_n)
        first = self.first.value(state.first, client_n)
        total_d = trust * (value.total_d + first.total_d)
        return ControlValue(total_d, trust * (value.control_nd + first.control_nd))

    def update(
        self, state: TwoPhaseState, population: Population, replies: Replies, update_nd: Params
    ) -> Any:
        first = state.first
        if has_codes(first.control):
            # The regression from before this reply: afterwards it goes nearly through the replies
            # that it has learned from, and would leave nothing of them.
            guess = self.regression.value(state.regression, replies.client_n)
            left_nd: Any = update_nd - guess.control_nd
            first = self.first.update(first, population, replies, left_nd)
        regression = self.regression.update(
            state.regression,
            population,
            replies,
            update_nd,
        )
        return TwoPhaseState(regression, first)

    def resized(self, state: TwoPhaseState, moves: Moves) -> TwoPhaseState:
        """With the answers of clients who join or answer late.

        Their Q_i are updates of a later model than the initial one that B_0 describes: e_i is what
        the regression, as it is now, leaves of them.
        """
        state = TwoPhaseState(
            regression=self.regression.resized(state.regression, moves),
            first=self.first.resized(state.first, moves),
        )
        first = state.first.control
        sent = self.first.init(moves.population, len(first.total_d)).control
        if not has_codes(sent):
            return state
        code_mc = np.asarray(first.code_mc)
        # A client that has replied since has another code, of its residual, which stays.
        untouched_m = (code_mc == sent.code_mc).all(axis=1) | (code_mc == 0).all(axis=1)
        joins_m = np.arange(len(code_mc)) >= len(moves.stay_k)
        new_k = np.flatnonzero(sent.is_first_m & untouched_m & (joins_m | ~first.is_first_m))
        code_kc = [
            self._left_by_regression(state, client, sent.code_mc[client])
            for client in new_k.tolist()
        ]
        first = first._replace(
            code_mc=replace_rows(first.code_mc, new_k, np.array(code_kc)),
            is_first_m=first.is_first_m & ~joins_m,
        )
        first = residuals_summed_anew(first, moves.population.weight_m)
        return state._replace(first=state.first._replace(control=first))

    def _left_by_regression(
        self, state: TwoPhaseState, client: int, code_c: FloatArray
    ) -> FloatArray:
        guess_d = self.regression.value(
            state.regression,
            np.array([client]),
        ).control_nd[0]
        sent_d = decode(code_c[None], len(guess_d))[0]
        return encode(sent_d - guess_d)


def _trust(state: TwoPhaseState) -> float:
    """The factor of both terms in this round: R^2 as long as no coefficient has been learned."""
    first = state.first.control
    if state.regression.square > 0 or not first.is_first_m.any():
        return 1.0
    weight_m = state.regression.control.weight_m
    fitted_qd = first.fitted_qd
    square_qq = np.einsum(
        "m,mp,mq->pq",
        weight_m * first.is_first_m,
        first.aux_mq,
        first.aux_mq,
    )
    explained = float(
        np.einsum(
            "pd,pq,qd->",
            fitted_qd,
            square_qq,
            fitted_qd,
            optimize=True,
        )
    )
    # Of what is decoded, as B_0 is of that too.
    square = KEPT * float(inner(weight_m, norms(np.asarray(first.code_mc)) ** 2))
    return min(explained / max(square, np.finfo(np.float64).tiny), 1.0)
