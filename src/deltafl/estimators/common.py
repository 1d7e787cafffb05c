"""One prediction for all clients, the mean of past rounds."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..scale.numerics import sum_of_rows
from ..scale.stretches import float_type
from ..scale.used_again import new_like
from ..types import FloatArray, Params, Population, Replies
from .control_variates import Learner, OneForAll, learns_nothing
from .value import ControlValue


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
