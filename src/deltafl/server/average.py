"""The model to use: an average of the last global models, without the noise of single rounds.

With beta in [0, 1), x_t the model after round t and a_1 = x_1::

    a_t = a_(t-1) + (1 - beta) / (1 - beta^t) (x_t - a_(t-1))  = sum_s beta^(t-s) x_s / sum_s beta^(t-s)

``FedExP`` without a beta has a_t = (x_t + x_(t-1)) / 2, the mean of the last two, as its paper has
it.

Clients go on from the last model: draws, estimates and every x_t are those without it. It costs the
server one model. Averages of iterates: Polyak and Juditsky 1992; of the global models of federated
learning, the last two: FedExP (Jhunjhunwala, Wang and Joshi, ICLR 2023). The weights, without a
bias towards the first model: Kingma and Ba 2015.
"""

from typing import NamedTuple

import numpy as np

from ..types import Nothing, Params


class AverageState(NamedTuple):
    """The average a_t, float32 (d,); the first model before the first round."""

    model_d: Params


def init_average(averages: bool, params_d: Params) -> AverageState | Nothing:
    """The first model, or nothing at all: then the model to use is the last."""
    return AverageState(params_d) if averages else Nothing()


def average_in(
    beta: float, state: AverageState | Nothing, last_d: Params, params_d: Params, rounds: int
) -> AverageState | Nothing:
    """The average with ``params_d``, the model after round ``rounds`` >= 1, which followed
    ``last_d``.
    """
    if isinstance(state, Nothing):
        return state
    if beta == 0:
        return AverageState(np.asarray((params_d + last_d) / 2, dtype=np.float32))
    share = np.float32((1 - beta) / (1 - beta**rounds))
    return AverageState(state.model_d + share * (params_d - state.model_d))
