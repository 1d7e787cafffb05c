"""Control variates: predictions c_i of the clients' updates, known before the draw, that an
estimator subtracts.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` is unbiased for *any* c, and its variance is that
of the residuals u_i - c_i. To write your own, subclass ``ControlVariate`` and use
``Plan(..., estimator=Mine())``, or the label ``uniform@@my_control.py:Mine(power=2)``.
Section 10 of the theory, docs/why/theory/control.md, explains each of those below.

A control variate is a frozen dataclass of hyper-parameters. It never changes: what it learns is a
state, a NamedTuple of arrays, which each method takes and the learning ones return anew. An older
state stays valid. Of these methods the first three must be written, the others have defaults:

- ``init`` makes the state before the first round, from the clients and the number d of parameters.
- ``value`` gives sum_j w_j c_j over all clients, and c_i of some of them, (n, d). It may use only
  what was known before the draw: that is what makes D unbiased. One row (1, d) stands for c_i that
  are all equal.
- ``update`` learns from the updates u_i of the clients that replied, once D has been computed.
- ``at_model`` runs before ``value``, once the round's model is known: for c_i that are computed
  from the model, as in ``twin.py``.
- ``first_mean`` gives the mean of the updates of the initial model, if a census has brought them:
  the first model then takes a step with it.
- ``with_rows`` takes over how a plan stores one update per client (``Plan.memory``). Write it if
  the state has such rows.
- ``resized`` follows clients who join, leave or change their size (``moves.py``): one line per
  array with a row per client, and every sum with weights is made anew.

- ``coefficient``: beta of this round, for the log.

Those of this package give ``reader`` and ``learner`` in place of ``value`` and ``update``
(``InStretches``): they read and learn from one stretch of the parameters after the other, so that
rows of a large model stay in the cache.

What the rest of the program asks of a control variate, as class attributes or properties:

- ``remembers``: the state holds one update per client. Its memory is estimated before a run.
- ``uses_aux``: it reads ``Population.aux_mq``, which hosts then ask the clients for.
- ``uses_first_updates``: a census shall bring ``Population.code_mc``, as ``init`` reads it.
- ``learns_from_sums``: one c for all clients, which learns from sum_S coef_i u_i alone, so that
  secure aggregation is enough. Others know clients apart, so that SCAFFOLD can correct local steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError, WithRanges
from ..moves import Moves
from ..scale.numerics import RANK_TOLERANCE, product, weighted_sum
from ..scale.rows import (
    Following,
    RowFormat,
    Rows,
    RunningSum,
    put_rows,
    read_rows,
    row_type,
    row_values,
    stored,
)
from ..types import (
    LARGEST_STEP,
    BoolArray,
    FloatArray,
    Floats,
    IntArray,
    Params,
    Population,
    Replies,
    Shares,
    Sizes,
    Within,
)
from .value import ComposedValue, ControlValue, Reader


class Learner(NamedTuple):
    """``update`` in stretches."""

    #: ``(stretch, updates there, value there)``: learns there, and says what ``state`` asks for
    learn: Callable[[slice, Floats, Any], Any]
    #: the next state, given what ``learn`` has returned for each stretch, in their order
    state: Callable[[list[Any]], Any]


class ControlVariate(WithRanges, ABC):
    """Base class; the top of this file explains its methods and attributes."""

    #: Whether all c_i are equal, and a weighted sum of the updates is enough to learn from.
    learns_from_sums: ClassVar[bool] = False

    # Properties, because a wrapper answers with those of the wrapped one.
    @property
    def knows_clients(self) -> bool:
        """Whether c_i differs between clients."""
        return not self.learns_from_sums

    @property
    def remembers(self) -> bool:
        """Whether the state holds one update per client."""
        return False

    @property
    def uses_aux(self) -> bool:
        """Whether it reads ``Population.aux_mq``."""
        return False

    @property
    def uses_first_updates(self) -> bool:
        """Whether it reads ``Population.code_mc``."""
        return False

    def with_rows(self, rows: RowFormat) -> Self:
        """The same, with any stored updates kept in another format."""
        return self

    @abstractmethod
    def init(self, population: Population, num_params: int) -> Any:
        """The state before the first round."""

    def first_mean(self, state: Any) -> FloatArray | None:
        """The mean of all clients' updates of the initial model, (d,), if they are known."""
        return None

    def at_model(
        self,
        state: Any,
        population: Population,
        params_d: Params,
        round: int,
    ) -> Any:
        """The state once a round's model is known, before its draw."""
        return state

    @abstractmethod
    def value(self, state: Any, client_n: IntArray) -> ControlValue:
        """c_i of some clients, and its weighted sum over all clients."""

    def reader(self, state: Any, client_n: IntArray) -> Reader:
        """``value`` in stretches."""
        value: Any = self.value(state, client_n)
        # It may be a user's, and is cut up before its shape is compared with the model's.
        if not isinstance(value, ControlValue) or [*map(np.ndim, value)] != [1, 2]:
            raise wrong_value(self)
        read: Reader = value.part
        return read

    def coefficient(self, state: Any) -> float:
        """Beta of this round."""
        return 1.0

    @abstractmethod
    def update(
        self,
        state: Any,
        population: Population,
        replies: Replies,
        update_nd: Params,
    ) -> Any:
        """Learn from the updates (n, d) of the clients that replied."""

    def learner(self, state: Any, population: Population, replies: Replies) -> Learner:
        """``update`` in stretches."""

        def all_at_once(update_nbs: list[Params]) -> Any:
            return self.update(state, population, replies, np.concatenate(update_nbs, axis=1))

        return Learner(lambda part, update_nb, value: np.array(update_nb), all_at_once)

    def resized(self, state: Any, moves: Moves) -> Any:
        """The state when clients join, change or leave; by default nobody can join or leave."""
        moves.require_none(self)
        return state


def wrong_value(control: ControlVariate, width: str = "") -> DeltaflError:
    """The error for what a class of a user's returned."""
    return DeltaflError(
        f"{type(control).__name__}.value must return ControlValue(total_d, control_nd){width}, "
        "with a row for each client it is given"
    )


class InStretches(ControlVariate):
    """Base class of those that define ``reader`` and ``learner`` in place of ``value`` and
    ``update``.
    """

    @abstractmethod
    def reader(self, state: Any, client_n: IntArray) -> Reader:
        """``value`` in stretches."""

    @abstractmethod
    def learner(self, state: Any, population: Population, replies: Replies) -> Learner:
        """``update`` in stretches."""

    def value(self, state: Any, client_n: IntArray) -> ControlValue:
        return self.reader(state, client_n)(slice(None))

    def update(
        self,
        state: Any,
        population: Population,
        replies: Replies,
        update_nd: Params,
    ) -> Any:
        learner = self.learner(state, population, replies)
        value = self.value(state, replies.client_n)
        return learner.state([learner.learn(slice(None), update_nd, value)])


def learns_nothing(state: Any) -> Learner:
    """Leaves the state as it is."""
    return Learner(lambda *_: None, lambda _: state)


class NoControlState(NamedTuple):
    """Holds the number of parameters only."""

    zero_d: Annotated[FloatArray, Within("[0, 0]")]


@dataclass(frozen=True)
class NoControl(InStretches):
    """c = 0: the plain estimators."""

    learns_from_sums = True

    def init(self, population: Population, num_params: int) -> NoControlState:
        return NoControlState(np.zeros(num_params))

    def reader(self, state: NoControlState, client_n: IntArray) -> Reader:
        return ControlValue(state.zero_d, state.zero_d[None]).part

    def learner(self, state: NoControlState, *_: object) -> Learner:
        return learns_nothing(state)

    def resized(self, state: NoControlState, moves: Moves) -> NoControlState:
        return state


class CommonControlState(NamedTuple):
    """One model: the average c of past rounds."""

    control_d: FloatArray


@dataclass(frozen=True)
class CommonControl(InStretches):
    """One c for all clients: c <- memory c + (1 - memory) (Hajek mean of the round), memory in
    [0, 1).
    """

    memory: float = 0.7
    ranges: ClassVar = {"memory": "[0, 1)"}
    learns_from_sums = True

    def init(self, population: Population, num_params: int) -> CommonControlState:
        return CommonControlState(np.zeros(num_params))

    def reader(self, state: CommonControlState, client_n: IntArray) -> Reader:
        # The weights sum to 1, so that the weighted sum of equal c is c.
        return ControlValue(state.control_d, state.control_d[None]).part

    def learner(
        self,
        state: CommonControlState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        total = replies.coef_n.sum()
        # No reply counts, so there is no mean to move to.
        if total <= 0:
            return learns_nothing(state)
        control_d = np.empty_like(state.control_d)

        def learn(part: slice, update_nb: Params, value: ControlValue) -> None:
            before_b = state.control_d[part]
            # The ratio mean, which an extreme sum of coefficients cannot inflate.
            mean_b = weighted_sum(replies.coef_n / total, update_nb, len(before_b))
            control_d[part] = self.memory * before_b + (1 - self.memory) * mean_b

        return Learner(learn, lambda _: CommonControlState(control_d))

    def resized(self, state: CommonControlState, moves: Moves) -> CommonControlState:
        return state


class OwnControlState(NamedTuple):
    """One update per client, and their weighted sum."""

    #: m rows: a tuple of them, one (m, d) array, as it is after a resume, or a file
    control_md: Rows
    #: sum_j w_j c_j of the rows as they are stored
    total_d: FloatArray
    #: how far rounding may have led ``total_d`` from it (``RunningSum``)
    rounding: Sizes = np.zeros(())


@dataclass(frozen=True)
class OwnControl(InStretches):
    """c_i = the last update of client i, 0 until there is one. Keeps one model per client that has
    replied.

    A round costs n rows, not m: the states before and after it share the rows of clients that did
    not reply.
    """

    #: how they are stored; a plan sets it to its ``memory``
    rows: RowFormat = field(default_factory=RowFormat)
    remembers = True

    def with_rows(self, rows: RowFormat) -> Self:
        return replace(self, rows=rows)

    def init(self, population: Population, num_params: int) -> OwnControlState:
        rows = self.rows.zeros(population.num_clients, num_params)
        return OwnControlState(rows, np.zeros(num_params))

    def reader(self, state: OwnControlState, client_n: IntArray) -> Reader:
        rows = [state.control_md[client] for client in client_n.tolist()]

        def read(part: slice) -> ControlValue:
            total_b = state.total_d[part]
            return ControlValue(total_b, read_rows(rows, part, len(total_b)))

        return read

    def learner(
        self,
        state: OwnControlState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        client_n = replies.client_n
        dtype = row_type(state.control_md)
        new = [np.empty(len(state.total_d), dtype) for _ in client_n]
        following = Following(
            RunningSum(state.total_d, state.rounding),
            population.weight_m[client_n],
        )

        def learn(part: slice, update_nb: Params, value: ControlValue) -> FloatArray:
            for new_d, update_b in zip(new, update_nb, strict=True):
                new_d[part] = stored(update_b, dtype)
            # Of the rows as stored: in bfloat16 they are not the updates that came.
            changed_nb = read_rows(new, part, update_nb.shape[1])
            changed_nb -= value.control_nd
            return following.add(part, changed_nb)

        def learned(largest_of: list[FloatArray]) -> OwnControlState:
            followed = following.sum(largest_of)
            learnt = OwnControlState(put_rows(state.control_md, client_n, new), *followed)
            # A huge c_i that has been replaced would leave its rounding errors in the sum for
            # ever, which is a bias (theory, section 10, docs/why/theory/control.md).
            if followed.is_lost:
                return summed_anew(learnt, population.weight_m)
            return learnt

        return Learner(learn, learned)

    def resized(self, state: OwnControlState, moves: Moves) -> OwnControlState:
        rows = state.control_md
        # One array after a resume; as a tuple, the new state shares its rows.
        if isinstance(rows, np.ndarray):
            rows = tuple(rows)
        kept = state._replace(control_md=moves.rows(rows, 0))
        return summed_anew(kept, moves.population.weight_m)


def summed_anew(state: OwnControlState, weight_m: FloatArray) -> OwnControlState:
    """The same rows, with sum_j w_j c_j recomputed in m d operations: for new weights, or a lost
    sum.
    """
    total_d = weighted_sum(
        weight_m,
        map(row_values, state.control_md),
        len(state.total_d),
    )
    return OwnControlState(state.control_md, total_d)


class InnovationControlState(NamedTuple):
    """The last updates, and c of the clients that have not replied yet, with the sum of their
    weights.
    """

    own: OwnControlState
    common: CommonControlState
    unseen_m: BoolArray
    unseen_weight: Annotated[FloatArray, Within("[0, 1.000001]")]


@dataclass(frozen=True)
class InnovationControl(InStretches):
    """c_i = the last update of client i; one c for clients that have not replied: c <- memory c
    + (1 - memory) D.
    """

    own: OwnControl = OwnControl()  #: the stored updates of the clients that have replied
    memory: float = 0.7  #: how slowly c follows the estimates
    ranges: ClassVar = {"memory": "[0, 1)"}
    remembers = True

    def with_rows(self, rows: RowFormat) -> Self:
        return replace(self, own=self.own.with_rows(rows))

    def init(self, population: Population, num_params: int) -> InnovationControlState:
        return InnovationControlState(
            own=self.own.init(population, num_params),
            common=CommonControlState(np.zeros(num_params)),
            unseen_m=np.ones(population.num_clients, bool),
            # The weights of all clients sum to 1.
            unseen_weight=np.array(1.0),
        )

    def reader(self, state: InnovationControlState, client_n: IntArray) -> Reader:
        read_own = self.own.reader(state.own, client_n)
        unseen_n = state.unseen_m[client_n]

        def read(part: slice) -> ControlValue:
            own = read_own(part)
            total_b, control_nb = own
            common_b = state.common.control_d[part]
            # Nobody has written into the rows of unseen clients: they are 0 in the sum of all.
            if unseen_n.any():
                control_nb = control_nb.copy()
                control_nb[unseen_n] = common_b
            return ComposedValue.of(total_b + state.unseen_weight * common_b, control_nb, own)

        return read

    def learner(
        self,
        state: InnovationControlState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        own = self.own.learner(state.own, population, replies)
        coef_n = replies.coef_n
        common_d = state.common.control_d.copy()
        unseen_m = state.unseen_m.copy()
        unseen_m[replies.client_n] = False

        def learn(part: slice, update_nb: Params, value: ComposedValue) -> Any:
            if coef_n.sum() > 0:  # else no reply counts
                residual_nb = update_nb - value.control_nd
                # D with beta = 1.
                estimate_b = value.total_d + weighted_sum(coef_n, residual_nb, len(value.total_d))
                common_d[part] = self.memory * common_d[part] + (1 - self.memory) * estimate_b
            return own.learn(part, update_nb, value.held[0])

        def learned(sums: list[Any]) -> InnovationControlState:
            return InnovationControlState(
                own=own.state(sums),
                common=CommonControlState(common_d),
                unseen_m=unseen_m,
                # Summed anew, not lowered by those who replied: it ends at exactly 0.
                unseen_weight=np.array(population.weight_m[unseen_m].sum()),
            )

        return Learner(learn, learned)

    def resized(
        self,
        state: InnovationControlState,
        moves: Moves,
    ) -> InnovationControlState:
        unseen_m = moves.rows(state.unseen_m, True)
        return state._replace(
            own=self.own.resized(state.own, moves),
            unseen_m=unseen_m,
            unseen_weight=np.array(moves.population.weight_m[unseen_m].sum()),
        )


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
        slope_qd = np.zeros((aux_mq.shape[1], num_params))
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
        slope_qd = np.empty_like(state.slope_qd)

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
        resized = RegressionControlState(aux_mq, weight_m, state.slope_qd)
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
        return resized._replace(slope_qd=np.einsum("pq,qd->pd", turn_qq, state.slope_qd))


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
