"""Server optimizers: how the global model moves along D, the estimate of the full-participation
update.

D already points downhill (it is a mean of x_K - x_0), so every rule *adds*. State in float64,
parameters in float32.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ..errors import DeltaflError, WithRanges, unknown_name
from ..scale.rows import inner
from ..types import FloatArray, Nothing, Params


class ServerOptimizer(Protocol):
    """Moves the parameters; its memory is a NamedTuple of arrays."""

    def init(self, num_params: int) -> Any:
        """The memory before the first round."""

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        """The new parameters (float32) and memory; the arguments are left as they are."""


class _Rule(WithRanges):
    """What the rules share: the step by ``_change``, in float64."""

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        change_d, state = self._change(delta_d, state)
        return (params_d.astype(np.float64) + change_d).astype(np.float32), state

    def _change(self, delta_d: FloatArray, state: Any) -> tuple[FloatArray, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Sgd(_Rule):
    """x <- x + lr D; lr = 1 replaces the model by the (estimated) weighted mean of the local
    ones.
    """

    lr: float = 1.0
    ranges: ClassVar = {"lr": "[0, inf)"}

    def init(self, num_params: int) -> Nothing:
        return Nothing()

    def _change(self, delta_d: FloatArray, state: Nothing) -> tuple[FloatArray, Nothing]:
        return self.lr * delta_d, state


@dataclass(frozen=True)
class FedExP(Sgd):
    """x <- x + lr eta D, eta = max(1, N / (2 (norm(D)^2 + epsilon))): FedExP (Jhunjhunwala, Wang
    and Joshi, ICLR 2023).

    N = sum_S coef_i norm(u_i)^2, with the coefficients of D: an estimate of sum_i w_i norm(u_i)^2,
    unbiased where D is. For the plain mean of n replies eta is the paper's max(1, sum_S norm(u_i)^2
    / (2 n (norm(D)^2 + epsilon))), of all clients or of a cohort. Updates that are alike give eta =
    1, updates that cancel a longer step. As eta depends on the draw, eta D is biased even where D
    is not. Models swing to and fro: the one to use is the mean of the last two, as in the paper
    (``Plan.model``, ``average.py``); clients go on from the last.

    Attributes:
        lr: Multiplies eta, >= 0.
        epsilon: > 0, in squared update units; 0.001 and 0.1 in the paper's code; much shorter D get
            eta = 1.
    """

    epsilon: float = 1e-3
    ranges: ClassVar = {"lr": "[0, inf)", "epsilon": "(0, inf)"}

    def extrapolate(
        self, params_d: Params, delta_d: FloatArray, mean_square: float, state: Any
    ) -> tuple[Params, Any]:
        """The step with N, which D does not show; ``step`` alone is that of eta = 1."""
        eta = max(1.0, mean_square / (2 * (float(inner(delta_d, delta_d)) + self.epsilon)))
        return self.step(params_d, eta * delta_d, state)


class MomentumState(NamedTuple):
    """The velocity v, float64 (d,)."""

    velocity_d: FloatArray


@dataclass(frozen=True)
class Momentum(_Rule):
    """*Server momentum*: v <- beta v + D; x <- x + lr v (FedAvgM, Hsu et al. 2019); beta in [0, 1).

    Nothing is damped: on a constant D the steps grow towards lr D / (1 - beta). Other momenta:
    docs/backbones.md.
    """

    lr: float = 1.0
    beta: float = 0.9
    ranges: ClassVar = {"lr": "[0, inf)", "beta": "[0, 1)"}

    def init(self, num_params: int) -> MomentumState:
        return MomentumState(np.zeros(num_params))

    def _change(
        self, delta_d: FloatArray, state: MomentumState
    ) -> tuple[FloatArray, MomentumState]:
        velocity_d = self.beta * state.velocity_d + delta_d
        return self.lr * velocity_d, MomentumState(velocity_d)


class AdaptiveState(NamedTuple):
    """Running mean a and running square v of D, both float64 (d,)."""

    mean_d: FloatArray
    square_d: FloatArray


@dataclass(frozen=True)
class Adaptive(_Rule):
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
    ranges: ClassVar = {"lr": "[0, inf)", "beta1": "[0, 1)", "beta2": "[0, 1)", "tau": "(0, inf)"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("adagrad", "adam", "yogi"):
            raise unknown_name("adaptive rule", self.rule, ("adagrad", "adam", "yogi"))

    def init(self, num_params: int) -> AdaptiveState:
        return AdaptiveState(np.zeros(num_params), np.full(num_params, self.tau**2))

    def _change(
        self, delta_d: FloatArray, state: AdaptiveState
    ) -> tuple[FloatArray, AdaptiveState]:
        beta1 = 0.0 if self.rule == "adagrad" else self.beta1
        mean_d = beta1 * state.mean_d + (1 - beta1) * delta_d
        square_d = state.square_d
        new_d = delta_d**2
        if self.rule == "adagrad":
            square_d = square_d + new_d
        elif self.rule == "adam":
            square_d = self.beta2 * square_d + (1 - self.beta2) * new_d
        else:
            square_d = square_d - (1 - self.beta2) * new_d * np.sign(square_d - new_d)
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


def make_server_optimizer(
    name: str, lr: float | None = None, momentum: float | None = None
) -> ServerOptimizer:
    """The server optimizer of a name in ``SERVER_OPTIMIZERS``, with its own rate and beta where
    these are None.

    Raises:
        DeltaflError: If the name is unknown, a number is out of range, or ``momentum`` is given to
            another optimizer.
    """
    if name not in SERVER_OPTIMIZERS:
        raise unknown_name("server optimizer", name, SERVER_OPTIMIZERS)
    rate = SERVER_OPTIMIZERS[name] if lr is None else lr
    if name == "momentum":
        return Momentum(rate, Momentum.beta if momentum is None else momentum)
    if momentum is not None:
        cure = "choose the server optimizer 'momentum' or leave it out"
        raise DeltaflError(f"server momentum is {momentum:g}, and {name!r} has none to set; {cure}")
    plain = {"sgd": Sgd, "fedexp": FedExP}
    return plain[name](rate) if name in plain else Adaptive(name, rate)
