"""Control variates from both phases: every client's first update, from the census, and what the
rounds teach.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..moves import Moves
from ..scale.numerics import inner, largest, product, sum_of_rows, weighted_sum
from ..scale.rows import LOST, Following, Rows, RunningSum, put_rows
from ..types import (
    NOBODY,
    TINY,
    BoolArray,
    FloatArray,
    IntArray,
    Params,
    Population,
    Replies,
    Shares,
    Sizes,
    Within,
)
from .control_variates import InStretches, Learner, learns_nothing
from .learned_coefficient import LearnedCoefficient, ScaledState
from .regression import RegressionControl, fits_steps, pseudoinverse, slope_type
from .two_bits import (
    KEPT,
    code_length,
    code_part,
    decode,
    decode_part,
    encode,
    encode_part,
    norms,
    sum_decoded,
)
from .value import ComposedValue, ControlValue, Reader

#: When the sum of all residuals is formed anew, by what they are computed in. In float32 a round's
#: rounding is 1e-7, of any sign; the bound, which adds it up, is at 0.4 % after 100s of rounds.
_LOST = {"float64": LOST, "float32": 2.0**-8}


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
    explained: Shares = np.ones(())  #: R^2 of the regression of the Q_i

    def is_consistent(self) -> bool:
        """Whether no prediction is longer than any step."""
        return fits_steps(self.aux_mq, self.fitted_qd)


@dataclass(frozen=True)
class LastResiduals(InStretches):
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
        dtype = slope_type(aux_mq, num_params)
        moment_qd = np.zeros((aux_mq.shape[1], num_params), dtype)
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
        sent_m = np.array([code_c.any() for code_c in code_mc])
        # B_0 is the regression of those who sent an update; a factor common to all weights cancels
        # in it.
        weight_m = population.weight_m * sent_m
        square_qq = np.einsum("m,mp,mq->pq", weight_m, aux_mq, aux_mq)
        moment_qd = sum_decoded((weight_m[:, None] * aux_mq).T, code_mc, num_params)
        fitted_qd = product(pseudoinverse(square_qq), moment_qd).astype(dtype, copy=False)
        # The first of x is 1, so that row 0 is the sum over clients.
        total_d = moment_qd[0] - _predicted(square_qq[0], fitted_qd)
        state = LastResidualsState(code_mc, sent_m, aux_mq, fitted_qd, total_d)
        return state._replace(explained=_explained(state, population.weight_m))

    def reader(self, state: LastResidualsState, client_n: IntArray) -> Reader:
        if not has_codes(state):
            return ControlValue(state.total_d, state.total_d[None]).part
        d = len(state.total_d)
        codes = [state.code_mc[client] for client in client_n.tolist()]
        # A code of Q_i lacks B_0 x_i; one of e_i is the residual itself.
        first_nq = state.aux_mq[client_n] * state.is_first_m[client_n, None]

        def read(part: slice) -> ControlValue:
            cut = code_part(part, d)
            code_nc = np.empty((len(codes), cut.stop - cut.start))
            for row_c, code_c in zip(code_nc, codes, strict=True):
                row_c[:] = code_c[cut]
            residual_nb = decode_part(code_nc, part, d, state.fitted_qd.dtype)
            if first_nq.any():
                residual_nb -= product(first_nq, state.fitted_qd[:, part])
            return ControlValue(state.total_d[part], residual_nb)

        return read

    def learner(
        self,
        state: LastResidualsState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        client_n = replies.client_n
        if not has_codes(state) or len(client_n) == 0:
            return learns_nothing(state)
        d = len(state.total_d)
        codes = [np.empty(code_length(d)) for _ in client_n]
        is_first_m = state.is_first_m.copy()
        is_first_m[client_n] = False
        weight_n = population.weight_m[client_n]
        dtype = state.fitted_qd.dtype
        following = Following(RunningSum(state.total_d, state.rounding), weight_n, dtype)

        def learn(part: slice, update_nb: Params, value: ControlValue) -> FloatArray:
            cut = code_part(part, d)
            encoded = encode_part(update_nb)
            for code_c, stretch_c in zip(codes, encoded.code_nc, strict=True):
                code_c[cut] = stretch_c
            # What was lost by encoding is lost in the sum too.
            added_b = encoded.weighted_sum(weight_n, update_nb.shape[1])
            added_b -= sum_of_rows(weight_n, value.control_nd)
            return following.add_sum(part, added_b, encoded.largest_n + largest(value.control_nd))

        def learned(largest_of: list[FloatArray]) -> LastResidualsState:
            followed = following.sum(largest_of)
            learnt = state._replace(
                code_mc=put_rows(state.code_mc, client_n, codes),
                is_first_m=is_first_m,
                total_d=followed.total_d,
                rounding=followed.rounding,
            )
            if followed.is_lost(_LOST[dtype.name]):
                return residuals_summed_anew(learnt, population.weight_m)
            return learnt

        return Learner(learn, learned)

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
    if has_codes(state):
        first_q = np.einsum("m,mq->q", weight_m * state.is_first_m, state.aux_mq)
        total_d = sum_decoded(weight_m[None], state.code_mc, len(total_d))[0]
        total_d -= _predicted(first_q, state.fitted_qd)
    state = state._replace(total_d=total_d, rounding=np.zeros(()))
    return state._replace(explained=_explained(state, weight_m))


def _predicted(coef_q: FloatArray, slope_qd: FloatArray) -> FloatArray:
    """sum_q coef_q B_q in float64, whatever the slopes: what a running sum loses stays lost."""
    if slope_qd.dtype == np.float64:
        return np.asarray(product(coef_q[None], slope_qd)[0])
    return weighted_sum(coef_q, slope_qd, slope_qd.shape[1])


def _explained(state: LastResidualsState, weight_m: FloatArray) -> FloatArray:
    """R^2, the share of the squares of the Q_i that x explains (``TwoPhase``)."""
    fitted_qd = state.fitted_qd
    square_qq = np.einsum(
        "m,mp,mq->pq",
        weight_m * state.is_first_m,
        state.aux_mq,
        state.aux_mq,
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
    square = KEPT * float(inner(weight_m, norms(state.code_mc) ** 2))
    # Rounding may lead out of it, and no server would go on from such a state.
    return np.array(min(max(explained / max(square, TINY), 0.0), 1.0))


class TwoPhaseState(NamedTuple):
    """The states of both terms."""

    regression: ScaledState
    first: ScaledState


@dataclass(frozen=True)
class TwoPhase(InStretches):
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

    def reader(self, state: TwoPhaseState, client_n: IntArray) -> Reader:
        trust = _trust(state)
        read_regression = self.regression.reader(state.regression, client_n)
        read_first = self.first.reader(state.first, client_n)

        def read(part: slice) -> ControlValue:
            value = read_regression(part)
            first = read_first(part)
            total_b = value.total_d + first.total_d
            control_nb = value.control_nd + first.control_nd
            if trust != 1:
                total_b *= trust
                control_nb *= trust
            return ComposedValue.of(total_b, control_nb, value, first)

        return read

    def learner(
        self,
        state: TwoPhaseState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        regression = self.regression.learner(state.regression, population, replies)
        first = learns_nothing(state.first)
        if has_codes(state.first.control):
            first = self.first.learner(state.first, population, replies)

        def learn(part: slice, update_nb: Params, value: ComposedValue) -> tuple[Any, Any]:
            guess, own = value.held
            # The regression from before this reply: afterwards it goes nearly through the replies
            # that it has learned from, and would leave nothing of them.
            left_nb: Any = update_nb - guess.control_nd
            return regression.learn(part, update_nb, guess), first.learn(part, left_nb, own)

        def learned(sums: list[tuple[Any, Any]]) -> TwoPhaseState:
            of_regression, of_first = map(list, zip(*sums, strict=True))
            return TwoPhaseState(regression.state(of_regression), first.state(of_first))

        return Learner(learn, learned)

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
            code_mc=put_rows(first.code_mc, new_k, code_kc),
            is_first_m=first.is_first_m & ~joins_m,
        )
        first = residuals_summed_anew(first, moves.population.weight_m)
        return state._replace(first=state.first._replace(control=first))

    def _left_by_regression(
        self,
        state: TwoPhaseState,
        client: int,
        code_c: FloatArray,
    ) -> FloatArray:
        # As if it were alone: the regression has a mean of all clients, too, which would read all
        # of them for every newcomer.
        alone = state.regression.control._replace(
            aux_mq=state.regression.control.aux_mq[[client]],
            weight_m=np.ones(1),
        )
        guess_d = self.regression.value(
            state.regression._replace(control=alone),
            np.zeros(1, np.int64),
        ).control_nd[0]
        sent_d = decode(code_c[None], len(guess_d))[0]
        return encode(sent_d - guess_d)


def _trust(state: TwoPhaseState) -> float:
    """The factor of both terms in this round: R^2 as long as no coefficient has been learned."""
    first = state.first.control
    if state.regression.square > 0 or not first.is_first_m.any():
        return 1.0
    return float(first.explained)
