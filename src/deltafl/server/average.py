"""The model to use: an average of the last global models, without the noise of single rounds.

With beta in [0, 1), x_t the model after round t and a_1 = x_1::

    a_t = a_(t-1) + (1 - beta) / (1 - beta^t) (x_t - a_(t-1))    = sum_s beta^(t-s) x_s / sum_s beta^(t-s)

Clients go on from the last model: draws, estimates and every x_t are those without it. It costs the server one model.
Averages of iterates: Polyak and Juditsky 1992; of the global models of federated learning, the last two: FedExP
(Jhunjhunwala, Wang and Joshi, ICLR 2023). The weights, without a bias towards the first model: Kingma and Ba 2015.
"""

from typing import NamedTuple

import numpy as np

from ..types import Nothing, Params


class AverageState(NamedTuple):
    """The average a_t, float32 (d,); the first model before the first round."""

    model_d: Params


def init_average(beta: float, params_d: Params) -> AverageState | Nothing:
    """The first model, or nothing at all if beta is 0: then the model to use is the last."""
    return AverageState(params_d) if beta > 0 else Nothing()


def average_in(beta: float, state: AverageState | Nothing, params_d: Params, rounds: int) -> AverageState | Nothing:
    """The average with the model after round ``rounds`` >= 1."""
    if isinstance(state, Nothing):
        return state
    share = np.float32((1 - beta) / (1 - beta**rounds))
    return AverageState(state.model_d + share * (params_d - state.model_d))
