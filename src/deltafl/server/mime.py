"""FedMIME-style momentum: the server keeps one momentum, and every client applies it unchanged in
every local step.

With beta in [0, 1), S the momentum *of a whole round* in update units (float32 (d,)), and K_i the
client's number of local steps::

    client  x <- x - (1 - beta) lr g_k + beta S / K_i  in each step: u_i = beta S - (1 - beta) lr sum_k g_k
    server  D  = beta S + estimate of sum_i w_i (u_i - beta S)  by the plan's estimator, unbiased if that is
             S <- D

``drift_d`` = beta S is what the server sends beside the model. It is known before the draw, so only
the residuals u_i - beta S are estimated, and the norms that samplers see are theirs. (Estimating
all of u_i would multiply beta S by the random sum of the weights W in every round; where beta^2
E[W^2] > 1 its mean square would grow without bound.)

Before the first round S is 0. A census is a round in which all clients take (1 - beta) times their
usual steps from S = 0, and C is the mean of their updates. Its D is not C but (1 + beta) C, the
length of a second round from rest; C / (1 - beta), that of a round at full speed, led some runs of
a CNN astray.

If all clients take K steps, this is FedCM (Xu et al. 2021, alpha = 1 - beta), and MimeLite with SGD
momentum (Karimireddy et al. 2020) fed with the gradients along the local path in place of those at
the server's model, which take a second pass over the data. If the K_i differ, all clients drift
equally far over their round.
"""

from typing import NamedTuple

import numpy as np

from ..types import FloatArray, Nothing, Params


class MimeState(NamedTuple):
    """The momentum of a round, S, float32 (d,): the last estimate D."""

    momentum_d: Params


def momentum_after(beta: float, delta_d: FloatArray) -> MimeState | Nothing:
    """S = D, or nothing at all if beta is 0."""
    return MimeState(delta_d.astype(np.float32)) if beta > 0 else Nothing()


def drift(beta: float, state: MimeState | Nothing) -> Params | None:
    """What the clients receive: beta S, float32 (d,); None if there is no such momentum."""
    return np.float32(beta) * state.momentum_d if isinstance(state, MimeState) else None
