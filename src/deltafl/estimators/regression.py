"""Predictions by a regression on what is known of all clients."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..moves import Moves
from ..scale.numerics import RANK_TOLERANCE, product
from ..scale.stretches import float_type
from ..scale.used_again import new_like
from ..types import LARGEST_STEP, FloatArray, IntArray, Params, Population, Replies, Shares
from .control_variates import InStretches, Learner, learns_nothing
from .value import ControlValue, Reader

#: Columns of x are too long for float32 from this norm on: their slopes shall have room below.
_LARGEST = 1e12
#: And too much alike if, of length 1, they have a direction whose square is less than this.
_NEARLY_ALIKE = 1e-4


class RegressionControlState(NamedTuple):
    """The auxiliary variables x_i (the first is 1), the weights w_i, and the coefficients B."""

    aux_mq: FloatArray
    weight_m: Shares
    slope_qd: FloatArray

    def is_consistent(self) -> bool:
        """Whether no prediction is longer than any step."""
        return fits_steps(self.aux_mq, self.slope_qd) and abs(self.weight_m.sum() - 1) < 1e-6


def fits_steps(aux_mq: FloatArray, slope_qd: FloatArray) -> bool:
    """Whether B x_i has no entry beyond ``LARGEST_STEP`` for any client."""
    most_q = np.abs(aux_mq).max(axis=0)
    return bool(np.all(np.einsum("q,qd->d", most_q, np.abs(slope_qd)) <= LARGEST_STEP))


@dataclass(frozen=True)
class RegressionControl(InStretches):
    """c_i = B x_i, x_i = (1, auxiliary variables); B moves towards the regression of the replies on
    their x.

    This is the generalised regression estimator (Cassel, Sarndal and Wretman 1976), unbiased
    because B is from earlier rounds. It also predicts updates of clients that have not replied yet,
    and costs q models. With shares s_i = coef_i / sum_S coef_j and G = sum_j w_j x_j x_j^T over all
    clients,

        A = (1 - memory) sum_S s_i x_i x_i^T + memory G
        B <- B + (1 - memory) A^+ sum_S s_i x_i (u_i - B x_i)^T,

    which minimises (1 - memory) sum_S s_i norm(u_i - B x_i)^2 + memory sum_j w_j norm((B -
    B_before) x_j)^2, for any scales of the columns, even if they are collinear. Without auxiliary
    variables it is ``CommonControl``.
    """

    memory: float = 0.5  #: how slowly B follows the rounds
    ranges: ClassVar = {"memory": "(0, 1)"}
    uses_aux = True

    def init(self, population: Population, num_params: int) -> RegressionControlState:
        aux_mq = population.design_mq()
        slope_qd = np.zeros((aux_mq.shape[1], num_params), slope_type(aux_mq, num_params))
        return RegressionControlState(aux_mq, population.weight_m, slope_qd)

    def reader(self, state: RegressionControlState, client_n: IntArray) -> Reader:
        mean_q = np.einsum("m,mq->q", state.weight_m, state.aux_mq)
        # One product: that of all clients is a row more.
        aux_kq = np.vstack([mean_q, state.aux_mq[client_n]])

        def read(part: slice) -> ControlValue:
            value_kb = product(aux_kq, state.slope_qd[:, part])
            return ControlValue(value_kb[0], value_kb[1:])

        return read

    def learner(
        self,
        state: RegressionControlState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        total = replies.coef_n.sum()
        if total <= 0:
            return learns_nothing(state)
        aux_nq = state.aux_mq[replies.client_n]
        share_n = replies.coef_n / total
        here_qq = np.einsum("n,np,nq->pq", share_n, aux_nq, aux_nq)
        all_qq = np.einsum("m,mp,mq->pq", state.weight_m, state.aux_mq, state.aux_mq)
        gain = 1 - self.memory
        inverse_qq = pseudoinverse(gain * here_qq + self.memory * all_qq)
        # The small product first, so that d enters one product only.
        gain_qn = gain * np.einsum("pq,nq,n->pn", inverse_qq, aux_nq, share_n)
        slope_qd = new_like(state.slope_qd)

        def learn(part: slice, update_nb: Params, value: ControlValue) -> None:
            change_qb = product(gain_qn, update_nb - value.control_nd)
            np.add(state.slope_qd[:, part], change_qb, out=slope_qd[:, part])

        return Learner(learn, lambda _: state._replace(slope_qd=slope_qd))

    def resized(
        self,
        state: RegressionControlState,
        moves: Moves,
    ) -> RegressionControlState:
        """With slopes whose predictions are nearest to those of before, of the clients who stay.

        A newcomer's answer to a census turns the components of all clients; slopes on the old ones
        would predict nonsense.
        """
        aux_mq = moves.population.design_mq()
        weight_m = moves.population.weight_m
        dtype = slope_type(aux_mq, state.slope_qd.shape[1])
        slope_qd = state.slope_qd.astype(dtype, copy=False)
        resized = RegressionControlState(aux_mq, weight_m, slope_qd)
        before_kq = moves.stayed(state.aux_mq)
        aux_kq = aux_mq[: len(before_kq)]
        # Where x has not changed, neither do the slopes, not even in their last bits.
        if np.array_equal(aux_kq, before_kq):
            return resized
        weight_k = weight_m[: len(before_kq)]
        square_qq = np.einsum("m,mp,mq->pq", weight_k, aux_kq, aux_kq)
        moment_qq = np.einsum("m,mp,mq->pq", weight_k, aux_kq, before_kq)
        # Least squares: old x as a linear map of new x, which the slopes then follow.
        turn_qq = pseudoinverse(square_qq) @ moment_qq
        turned_qd = np.einsum("pq,qd->pd", turn_qq, state.slope_qd)
        return resized._replace(slope_qd=turned_qd.astype(dtype, copy=False))


def slope_type(aux_mq: FloatArray, num_params: int) -> type[np.floating[Any]]:
    """The type of slopes, and so of predictions: of a large model float64 where float32 does not
    hold x, or rounds away how clients differ, as in a column of years.

    There predictions would no longer have the mean that is said of them, which is a bias.
    """
    size_q = np.sqrt((aux_mq**2).sum(axis=0))
    if float_type(num_params) is np.float64 or size_q.max() > _LARGEST:
        return np.float64
    unit_mq = aux_mq / np.where(size_q > 0, size_q, 1.0)
    share_q = np.linalg.eigvalsh(np.einsum("mp,mq->pq", unit_mq, unit_mq))
    # Columns that say what others do have no slopes of their own.
    counted_q = share_q[share_q > RANK_TOLERANCE * share_q[-1]]
    if counted_q[0] < _NEARLY_ALIKE:
        return np.float64
    return np.float32


def pseudoinverse(square_qq: FloatArray) -> FloatArray:
    """The pseudoinverse of sum_j x_j x_j^T, for columns of x in any units."""
    size_q = np.sqrt(np.diag(square_qq))
    # A column of less than 1e-12 of the largest is rounding, and counts as 0.
    seen_q = size_q > 1e-12 * size_q.max(initial=0.0)
    known_q = np.where(seen_q, size_q, 1.0)
    # To sizes of 1/32 to 32 by powers of 1024, so that those within keep their bits.
    scale_q = np.exp2(-10 * np.round(np.log2(known_q) / 10)) * seen_q
    scaled_qq = scale_q[:, None] * square_qq * scale_q
    inverse_qq = np.linalg.pinv(scaled_qq, rcond=RANK_TOLERANCE, hermitian=True)
    return np.asarray(scale_q[:, None] * inverse_qq * scale_q)
