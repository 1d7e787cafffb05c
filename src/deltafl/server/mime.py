"""FedMIME-style momentum: the server keeps one momentum, and every client applies it unchanged in every local step.

With beta in [0, 1), S the momentum *of a whole round* in update units (float32 (d,), 0 before the first round), and
K_i the client's number of local steps::

    client   x <- x - (1 - beta) lr g_k + beta S / K_i    in each step: u_i = beta S - (1 - beta) lr sum_k g_k
    server   D  = beta S + estimate of sum_i w_i (u_i - beta S)    by the plan's estimator, unbiased if that is
             S <- D

``drift_d`` = beta S is what the server sends beside the model. It is known before the draw, so only the residuals
u_i - beta S are estimated, with a control variate of their own, and the norms that samplers see are theirs: those of
the clients' gradients, as without momentum. (Estimating all of u_i would multiply beta S by the random sum of the
weights W in every round; where beta^2 E[W^2] > 1 its mean square would grow without bound.) D stays right for a host
that sends no drift: then beta S is just a control variate.

If all clients take K steps, S / K is lr times the mean direction of the last round's local steps, and this is FedCM (Xu
et al. 2021, "FedCM: Federated learning with client-level momentum", alpha = 1 - beta). It is also MimeLite with SGD
momentum (Karimireddy et al. 2020, "Mime: Mimicking centralized stochastic algorithms in federated learning") but for
one thing: MimeLite feeds its momentum with the clients' full gradients at the *server's* model, which takes a second
pass over the data; here it is fed with the gradients *along the local path*, which are there already. Mime itself also
corrects each local gradient by the difference of two others (SVRG); it is not offered. If the K_i differ, all clients
drift equally far over their round, in steps of different lengths: with a common step, clients with more steps would
count more in S.
"""

from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, Params


class NoMime(NamedTuple):
    """Nothing to remember: beta = 0."""


class MimeState(NamedTuple):
    """The momentum of a round, S, float32 (d,): the last estimate D."""

    momentum_d: Params


def init_mime(beta: float, num_params: int) -> NoMime | MimeState:
    """S = 0, or nothing at all if beta is 0.

    Raises:
        DeltaflError: If beta is not in [0, 1).
    """
    if not 0 <= beta < 1:
        raise DeltaflError(f"mime is {beta}; the momentum sent to the clients must be at least 0 and below 1")
    return MimeState(np.zeros(num_params, dtype=np.float32)) if beta > 0 else NoMime()


def drift(beta: float, state: NoMime | MimeState) -> Params | None:
    """What the clients receive: beta S, float32 (d,); None if there is no such momentum."""
    return np.float32(beta) * state.momentum_d if isinstance(state, MimeState) else None


def remember(state: NoMime | MimeState, delta_d: FloatArray) -> NoMime | MimeState:
    """S <- D."""
    return MimeState(delta_d.astype(np.float32)) if isinstance(state, MimeState) else state
