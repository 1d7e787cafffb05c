"""Each client's last update as its prediction."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from ..moves import Moves
from ..scale.numerics import weighted_sum
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
from ..scale.used_again import new_array
from ..types import FloatArray, IntArray, Params, Population, Replies, Sizes
from .control_variates import InStretches, Learner
from .value import ControlValue, Reader


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
