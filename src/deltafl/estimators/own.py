"""What past rounds brought as predictions: each client's last update, the mean of all, or both."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from ..moves import Moves
from ..scale.numerics import sum_of_rows, weighted_sum
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
from ..scale.stretches import float_type
from ..scale.used_again import new_array, new_like
from ..types import (
    BoolArray,
    FloatArray,
    IntArray,
    Params,
    Population,
    Replies,
    Sizes,
    Within,
)
from .control_variates import InStretches, Learner, OneForAll, learns_nothing
from .value import ComposedValue, ControlValue, Reader


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
        dtype = float_type(len(state.total_d))

        def read(part: slice) -> ControlValue:
            total_b = state.total_d[part]
            return ControlValue(total_b, read_rows(rows, part, len(total_b), dtype))

        return read

    def learner(
        self,
        state: OwnControlState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        client_n = replies.client_n
        dtype = row_type(state.control_md)
        new = [new_array(len(state.total_d), dtype) for _ in client_n]
        following = Following(
            RunningSum(state.total_d, state.rounding),
            population.weight_m[client_n],
        )

        def learn(part: slice, update_nb: Params, value: ControlValue) -> FloatArray:
            for new_d, update_b in zip(new, update_nb, strict=True):
                new_d[part] = stored(update_b, dtype)
            # Of the rows as stored: in bfloat16 they are not the updates that came.
            # In float64 whatever the model's size: what the sum loses stays lost.
            changed_nb = read_rows(new, part, update_nb.shape[1], np.float64)
            changed_nb -= value.control_nd
            return following.add(part, changed_nb)

        def learned(largest_of: list[FloatArray]) -> OwnControlState:
            followed = following.sum(largest_of)
            learnt = OwnControlState(put_rows(state.control_md, client_n, new), *followed)
            # A huge c_i that has been replaced would leave its rounding errors in the sum for
            # ever, which is a bias (theory, section 10, docs/why/theory/control.md).
            if followed.is_lost():
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


class CommonControlState(NamedTuple):
    """One model: the average c of past rounds."""

    control_d: FloatArray


@dataclass(frozen=True)
class CommonControl(OneForAll):
    """One c for all clients: c <- memory c + (1 - memory) (Hajek mean of the round), memory in
    [0, 1).
    """

    memory: float = 0.7
    ranges: ClassVar = {"memory": "[0, 1)"}

    def init(self, population: Population, num_params: int) -> CommonControlState:
        return CommonControlState(np.zeros(num_params, float_type(num_params)))

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
        control_d = new_like(state.control_d)

        def learn(part: slice, update_nb: Params, value: ControlValue) -> None:
            before_b = state.control_d[part]
            # The ratio mean, which an extreme sum of coefficients cannot inflate.
            mean_b = sum_of_rows(replies.coef_n / total, update_nb)
            control_d[part] = self.memory * before_b + (1 - self.memory) * mean_b

        return Learner(learn, lambda _: CommonControlState(control_d))


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

    own: OwnControl = field(
        default_factory=OwnControl
    )  #: the stored updates of the clients that have replied
    memory: float = 0.7  #: how slowly c follows the estimates
    ranges: ClassVar = {"memory": "[0, 1)"}
    remembers = True

    def with_rows(self, rows: RowFormat) -> Self:
        return replace(self, own=self.own.with_rows(rows))

    def init(self, population: Population, num_params: int) -> InnovationControlState:
        return InnovationControlState(
            own=self.own.init(population, num_params),
            common=CommonControl().init(population, num_params),
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
                estimate_b = value.total_d + sum_of_rows(coef_n, residual_nb)
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
