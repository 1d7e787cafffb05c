"""The model to use: an average of the last global models, without the noise of single rounds.

With beta in [0, 1), x_t the model after round t and a_1 = x_1::

    a_t = a_(t-1) + (1 - beta) / (1 - beta^t) (x_t - a_(t-1))
        = sum_s beta^(t-s) x_s / sum_s beta^(t-s)

Clients go on from the last model: draws, estimates and every x_t are those without it. It costs the
server one model. Averages of iterates: Polyak and Juditsky 1992; of the global models of federated
learning, the last two: FedExP (Jhunjhunwala, Wang and Joshi, ICLR 2023). The weights, without a
bias towards the first model: Kingma and Ba 2015.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..scale.stretches import over_stretches
from ..scale.used_again import new_like
from ..types import Params
from .part import PlanOfParts, ServerPart, Step


class AverageState(NamedTuple):
    """The average a_t, float32 (d,); the first model before the first round."""

    model_d: Params


@dataclass(frozen=True)
class Average(ServerPart):
    """Evaluate and return a running average of the models, with the memory beta in (0, 1)."""

    average: float
    name = "average"
    ranges: ClassVar = {"average": "[0, 1)"}

    def init(self, plan: PlanOfParts, params_d: Params) -> AverageState:
        return AverageState(params_d)

    def moved(
        self,
        own: AverageState,
        step: Step,
        params_d: Params,
    ) -> AverageState:
        # Over 1 - beta^t, as if there had been nothing before; else zeros would count as models.
        beta = self.average
        share = np.float32((1 - beta) / (1 - beta ** (step.round + 1)))
        model_d = new_like(own.model_d)

        def look(part: slice) -> None:
            # In place: a pass over a new array takes longer than the arithmetic.
            np.subtract(params_d[part], own.model_d[part], out=model_d[part])
            model_d[part] *= share
            model_d[part] += own.model_d[part]

        over_stretches(look, len(model_d), alone=True)
        return AverageState(model_d)

    def model(self, own: AverageState, params_d: Params) -> Params:
        return own.model_d
