"""FedMIME-style momentum: the server keeps one momentum, and every client applies it unchanged in
every local step.

With beta in [0, 1), S the momentum *of a whole round* in update units (float32 (d,)), and K_i the
client's number of local steps::

    client  x <- x - (1 - beta) lr g_k + beta S / K_i   in each step,
            so that u_i = beta S - (1 - beta) lr sum_k g_k
    server  D = beta S + estimate of sum_i w_i (u_i - beta S), by the plan's estimator
            S <- D

beta S is what the server sends beside the model. It is known before the draw, so only the residuals
u_i - beta S are estimated, and the norms that samplers see are theirs. (Estimating all of u_i would
multiply beta S by the random sum of the weights W in every round; where beta^2 E[W^2] > 1 its mean
square would grow without bound.)

Before the first round S is 0. A census is a round in which all clients take (1 - beta) times their
usual steps from S = 0, and C is the mean of their updates. Its D is not C but (1 + beta) C, the
length of a second round from rest; C / (1 - beta), that of a round at full speed, led some runs of
a CNN astray.

If all clients take K steps, this is FedCM (Xu et al. 2021, alpha = 1 - beta), and MimeLite with SGD
momentum (Karimireddy et al. 2020) fed with the gradients along the local path in place of those at
the server's model, which take a second pass over the data. If the K_i differ, all clients drift
equally far over their round.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..estimators.value import Reader
from ..scale.stretches import over_stretches
from ..scale.used_again import new_like
from ..types import Params
from .part import PlanOfParts, ServerPart, Step


class MimeState(NamedTuple):
    """The momentum of a round, S, float32 (d,): the last estimate D."""

    momentum_d: Params


class ClientMomentum(ServerPart):
    """A momentum that the server keeps and all clients apply. What they move by is known before
    the draw, and no part of what is estimated.
    """

    alters_updates = True

    @abstractmethod
    def sent(
        self,
        own: Any,
        round: int,
        params_d: Params,
        part: slice = slice(None),
    ) -> Params:
        """What moves all clients in a round that begins with ``params_d``, float32 (d,), or a
        stretch of it.
        """

    def drift(
        self,
        plan: PlanOfParts,
        state: Any,
        part: slice,
        read: Reader,
    ) -> Params:
        return self.sent(state.parts[self.name], state.counted, state.params_d, part)

    def direction(
        self,
        plan: PlanOfParts,
        own: Any,
        step: Step,
    ) -> tuple[Step, Any]:
        delta_d = new_like(step.delta_d)

        def look(part: slice) -> None:
            sent_b = self.sent(own, step.round, step.params_d, part)
            np.add(sent_b, step.delta_d[part], out=delta_d[part])

        over_stretches(look, len(delta_d), alone=True)
        return step._replace(delta_d=delta_d), own


@dataclass(frozen=True)
class Mime(ClientMomentum):
    """A momentum with the memory beta in (0, 1) that all clients apply."""

    mime: float
    name = "mime"
    changes_training = True
    ranges: ClassVar = {"mime": "[0, 1)"}

    @property
    def step_factor(self) -> float:
        return 1 - self.mime

    @property
    def first_step(self) -> float:
        return 1 + self.mime

    def init(self, plan: PlanOfParts, params_d: Params) -> MimeState:
        return MimeState(np.zeros(len(params_d), np.float32))

    def sent(
        self,
        own: MimeState,
        round: int,
        params_d: Params,
        part: slice = slice(None),
    ) -> Params:
        return np.float32(self.mime) * own.momentum_d[part]

    def moved(
        self,
        own: MimeState,
        step: Step,
        params_d: Params,
    ) -> MimeState:
        # After clipping and noise: the next round's clients are sent nothing else.
        momentum_d = new_like(own.momentum_d)

        def look(part: slice) -> None:
            momentum_d[part] = step.delta_d[part]

        over_stretches(look, len(momentum_d), alone=True)
        return MimeState(momentum_d)
