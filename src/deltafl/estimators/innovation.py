"""Each client's last update, moved by what all of them have in common."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from ..moves import Moves
from ..scale.numerics import sum_of_rows
from ..scale.rows import RowFormat
from ..types import BoolArray, FloatArray, IntArray, Params, Population, Replies, Within
from .common import CommonControl, CommonControlState
from .control_variates import InStretches, Learner
from .own import OwnControl, OwnControlState
from .value import ComposedValue, ControlValue, Reader


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
