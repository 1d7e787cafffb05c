"""Server optimizers: how the global model moves along D, the estimate of the full-participation
update.

D already points downhill (it is a mean of x_K - x_0), so every rule *adds*. State in float64,
parameters in float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import DeltaflError, entry, unknown_name
from ..model.arrays import LARGEST_ENTRY
from ..scale.numerics import inner, largest_entry
from ..scale.stretches import over_stretches
from ..scale.used_again import new_like
from ..types import FloatArray, Nothing, Params, Sizes
from .average import AverageState
from .part import PlanOfParts, ServerPart, Step


class ServerOptimizer(ServerPart):
    """The part that moves the model. A subclass defines ``change``, and ``init`` if it remembers
    something.
    """

    name = "server_optimizer"

    def move(self, own: Any, step: Step) -> tuple[Params, Any]:
        """The new model, float32 (d,), and its own next state."""
        change_d, own = self.change(step.delta_d, own)
        params_d = new_like(step.params_d)

        def look(part: slice) -> None:
            # Added in float64: small steps would be lost beside large parameters otherwise.
            # A round that overflows is left out (``accumulate.py``).
            with np.errstate(over="ignore"):
                params_d[part] = step.params_d[part].astype(float) + change_d[part]

        over_stretches(look, len(params_d), alone=True)
        return params_d, own

    def change(self, delta_d: FloatArray, own: Any) -> tuple[FloatArray, Any]:
        """What is added to the model, float64 (d,), and its own next state."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sgd(ServerOptimizer):
    """x <- x + lr D; lr = 1 replaces the model by the (estimated) weighted mean of the local
    ones.
    """

    lr: float = 1.0
    ranges: ClassVar = {"lr": "[0, inf)"}

    def change(
        self,
        delta_d: FloatArray,
        own: Nothing,
    ) -> tuple[FloatArray, Nothing]:
        if self.lr == 1:  # a copy is saved
            return delta_d, own
        return self.lr * delta_d, own


@dataclass(frozen=True)
class FedExP(ServerOptimizer):
    """x <- x + lr eta D, eta = max(1, N / (2 (norm(D)^2 + epsilon))): FedExP (Jhunjhunwala, Wang
    and Joshi, ICLR 2023).

    N = sum_S coef_i norm(u_i)^2, with the coefficients of D: an estimate of sum_i w_i norm(u_i)^2,
    unbiased where D is. For the plain mean of n replies eta is the paper's max(1, sum_S norm(u_i)^2
    / (2 n (norm(D)^2 + epsilon))), of all clients or of a cohort. Updates that are alike give eta =
    1, updates that cancel a longer step. As eta depends on the draw, eta D is biased even where D
    is not. Models swing to and fro: the one to use is the mean of the last two, as in the paper,
    where no ``average`` is set; clients go on from the last.

    Attributes:
        lr: Multiplies eta, >= 0.
        epsilon: > 0, in squared update units; 0.001 and 0.1 in the paper's code; much shorter D get
            eta = 1.
    """

    lr: float = 1.0
    epsilon: float = 1e-3
    needs_single_updates = "fedexp needs the norm of each update"
    ranges: ClassVar = {"lr": "[0, inf)", "epsilon": "(0, inf)"}

    def check(self, plan: PlanOfParts) -> None:
        altering = [part.name for part in plan.parts if part.alters_updates]
        if altering:
            raise DeltaflError(
                "fedexp needs the norm of every client's whole update; leave out "
                f"{' and '.join(altering)}, or choose 'sgd'"
            )

    def init(self, plan: PlanOfParts, params_d: Params) -> AverageState:
        return AverageState(params_d)

    def move(self, own: AverageState, step: Step) -> tuple[Params, AverageState]:
        square = float(inner(step.delta_d, step.delta_d))
        eta = step.mean_square / (2 * (square + self.epsilon))
        # Huge updates that cancel would make the model infinite; no reply may move it further.
        most = LARGEST_ENTRY / max(largest_entry(step.delta_d), 1.0)
        eta = max(1.0, min(eta, most))
        return super().move(own, step._replace(delta_d=eta * step.delta_d))

    def change(
        self,
        delta_d: FloatArray,
        own: AverageState,
    ) -> tuple[FloatArray, AverageState]:
        # ``move`` has multiplied D with eta.
        return self.lr * delta_d, own

    def moved(
        self,
        own: AverageState,
        step: Step,
        params_d: Params,
    ) -> AverageState:
        # ``step.params_d`` is the model before this step.
        return AverageState(np.asarray((params_d + step.params_d) / 2, np.float32))

    def model(self, own: AverageState, params_d: Params) -> Params:
        return own.model_d


class MomentumState(NamedTuple):
    """The velocity v, float64 (d,)."""

    velocity_d: FloatArray


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """*Server momentum*: v <- beta v + D; x <- x + lr v (FedAvgM, Hsu et al. 2019); beta in [0, 1).

    Nothing is damped: on a constant D the steps grow towards lr D / (1 - beta). Other momenta:
    docs/how-to/momentum.md.
    """

    lr: float = 1.0
    beta: float = 0.9
    ranges: ClassVar = {"lr": "[0, inf)", "beta": "[0, 1)"}

    def init(self, plan: PlanOfParts, params_d: Params) -> MomentumState:
        return MomentumState(np.zeros(len(params_d)))

    def change(
        self,
        delta_d: FloatArray,
        own: MomentumState,
    ) -> tuple[FloatArray, MomentumState]:
        velocity_d = self.beta * own.velocity_d + delta_d
        return self.lr * velocity_d, MomentumState(velocity_d)


class AdaptiveState(NamedTuple):
    """Running mean a and running square v of D, both float64 (d,)."""

    mean_d: FloatArray
    square_d: Sizes


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, algorithm 2: no bias correction).

    x <- x + lr a / (sqrt(v) + tau) with a <- beta1 a + (1 - beta1) D, v_0 = tau^2, tau > 0, both
    betas in [0, 1), and

    - rule ``"adagrad"``, with beta1 = 0: v <- v + D^2
    - rule ``"adam"``: v <- beta2 v + (1 - beta2) D^2
    - rule ``"yogi"``: v <- v - (1 - beta2) D^2 sign(v - D^2)
    """

    rule: str
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    ranges: ClassVar = {
        "lr": "[0, inf)",
        "beta1": "[0, 1)",
        "beta2": "[0, 1)",
        "tau": "(0, inf)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("adagrad", "adam", "yogi"):
            raise unknown_name("adaptive rule", self.rule, ("adagrad", "adam", "yogi"))

    def init(self, plan: PlanOfParts, params_d: Params) -> AdaptiveState:
        d = len(params_d)
        return AdaptiveState(np.zeros(d), np.full(d, self.tau**2))

    def change(
        self,
        delta_d: FloatArray,
        own: AdaptiveState,
    ) -> tuple[FloatArray, AdaptiveState]:
        square_d = own.square_d
        new_d = delta_d**2
        beta1 = self.beta1
        if self.rule == "adagrad":
            # The paper's Adagrad has no momentum.
            beta1 = 0.0
            square_d = square_d + new_d
        elif self.rule == "adam":
            square_d = self.beta2 * square_d + (1 - self.beta2) * new_d
        else:
            # Yogi's v falls by no more than this, where Adam's forgets by a factor.
            square_d = square_d - (1 - self.beta2) * new_d * np.sign(square_d - new_d)
        mean_d = beta1 * own.mean_d + (1 - beta1) * delta_d
        return self.lr * mean_d / (np.sqrt(square_d) + self.tau), AdaptiveState(mean_d, square_d)


#: Name -> learning rate used when none is given (1 for a plain mean; the paper's 0.01 for the
#: adaptive rules).
SERVER_OPTIMIZERS = {
    "sgd": 1.0,
    "fedexp": 1.0,
    "momentum": 1.0,
    "adagrad": 0.01,
    "adam": 0.01,
    "yogi": 0.01,
}


_PLAIN = {"sgd": Sgd, "fedexp": FedExP, "momentum": Momentum}


def make_server_optimizer(
    name: str,
    lr: float | None = None,
    momentum: float | None = None,
) -> ServerOptimizer:
    """The server optimizer of a name in ``SERVER_OPTIMIZERS``, with its own rate and beta where
    these are None.

    Raises:
        DeltaflError: If the name is unknown, a number is out of range, or ``momentum`` is given to
            another optimizer.
    """
    usual = entry("server optimizer", name, SERVER_OPTIMIZERS)
    if lr is None:
        lr = usual
    if momentum is None:
        kind = _PLAIN.get(name, partial(Adaptive, name))
        return kind(lr)
    if name != "momentum":
        raise DeltaflError(
            f"server momentum is {momentum:g}, and {name!r} has none to set; choose the server "
            "optimizer 'momentum' or leave it out"
        )
    return Momentum(lr, momentum)
