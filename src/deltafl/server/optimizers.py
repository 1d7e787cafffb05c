"""Server optimizers: how the global model moves along D, the estimate of the full-participation update.

D already points downhill (it is a mean of x_K - x_0), so every rule *adds*. The adaptive ones follow Reddi et al. 2021,
"Adaptive federated optimization", algorithm 2 (no bias correction, v_{-1} = tau^2).

========= ==================================================================================
sgd       x <- x + eta D                                                        (eta = 1)
momentum  v <- beta v + D;  x <- x + eta v                                      (beta = 0.9)
adagrad   v <- v + D^2;     x <- x + eta D / (sqrt(v) + tau)
adam      v <- b2 v + (1 - b2) D^2;                      x <- x + eta a / (sqrt(v) + tau)
yogi      v <- v - (1 - b2) D^2 sign(v - D^2);           x <- x + eta a / (sqrt(v) + tau)
========= ==================================================================================

with a <- b1 a + (1 - b1) D in the last two. State in float64, parameters in float32.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..types import FloatArray, Params


class ServerOptimizer(Protocol):
    """Moves the parameters; its memory is a NamedTuple of arrays."""

    def init(self, num_params: int) -> Any:
        """The memory before the first round."""
        ...

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        """The new parameters (float32) and memory; the arguments are left as they are."""
        ...


def _check(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise DeltaflError(f"{name} of the server optimizer is {value}; it must be {allowed}")


def _check_rate(lr: float) -> None:
    _check("server_lr", lr, 0 <= lr < np.inf, "a number of at least 0")


def _moved(params_d: Params, step_d: FloatArray) -> Params:
    return (params_d.astype(np.float64) + step_d).astype(np.float32)


class SgdState(NamedTuple):
    """Nothing to remember."""


@dataclass(frozen=True)
class Sgd:
    """x <- x + lr D.

    Attributes:
        lr: Server learning rate eta >= 0; 1 replaces the model by the (estimated) weighted mean of the local ones.
    """

    lr: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate that is none."""
        _check_rate(self.lr)

    def init(self, num_params: int) -> SgdState:
        """No memory."""
        return SgdState()

    def step(self, params_d: Params, delta_d: FloatArray, state: SgdState) -> tuple[Params, SgdState]:
        """One step of length lr."""
        return _moved(params_d, self.lr * delta_d), state


class MomentumState(NamedTuple):
    """The velocity v, float64 (d,)."""

    velocity_d: FloatArray


@dataclass(frozen=True)
class Momentum:
    """*Server momentum*: v <- beta v + D; x <- x + lr v (FedAvgM, Hsu et al. 2019).

    Nothing is damped: on a constant D the steps grow towards lr D / (1 - beta). Not to be confused with *local
    momentum*, inside each client's round (``simulation.local.LocalWork.momentum``), nor with the momentum that the
    server sends to all clients (``round.Plan.mime``).

    Attributes:
        lr: Server learning rate eta > 0.
        beta: In [0, 1); often called gamma.
    """

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        """Refuse a momentum that never forgets."""
        _check_rate(self.lr)
        _check("momentum", self.beta, 0 <= self.beta < 1, "at least 0 and below 1")

    def init(self, num_params: int) -> MomentumState:
        """V = 0."""
        return MomentumState(np.zeros(num_params))

    def step(self, params_d: Params, delta_d: FloatArray, state: MomentumState) -> tuple[Params, MomentumState]:
        """One step along the velocity."""
        velocity_d = self.beta * state.velocity_d + delta_d
        return _moved(params_d, self.lr * velocity_d), MomentumState(velocity_d)


ADAPTIVE_RULES = ("adagrad", "adam", "yogi")


class AdaptiveState(NamedTuple):
    """Running mean a and running square v of D, both float64 (d,)."""

    mean_d: FloatArray
    square_d: FloatArray


@dataclass(frozen=True)
class Adaptive:
    """FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, algorithm 2).

    Attributes:
        rule: ``"adagrad"``, ``"adam"`` or ``"yogi"``.
        lr: Server learning rate eta > 0.
        beta1: Memory of the mean; adagrad uses 0.
        beta2: Memory of the square; adagrad sums instead.
        tau: Degree of adaptivity > 0: added to sqrt(v), and v starts at tau^2.
    """

    rule: str
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse a rule that does not exist."""
        if self.rule not in ADAPTIVE_RULES:
            raise unknown_name("adaptive rule", self.rule, ADAPTIVE_RULES)
        _check_rate(self.lr)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            _check(name, beta, 0 <= beta < 1, "at least 0 and below 1")
        _check("tau", self.tau, 0 < self.tau < np.inf, "a number above 0")

    def init(self, num_params: int) -> AdaptiveState:
        """A = 0, v = tau^2."""
        return AdaptiveState(np.zeros(num_params), np.full(num_params, self.tau**2))

    def step(self, params_d: Params, delta_d: FloatArray, state: AdaptiveState) -> tuple[Params, AdaptiveState]:
        """One step, each coordinate scaled by its own history."""
        beta1 = 0.0 if self.rule == "adagrad" else self.beta1
        mean_d = beta1 * state.mean_d + (1 - beta1) * delta_d
        square_d, new_d = state.square_d, delta_d**2
        if self.rule == "adagrad":
            square_d = square_d + new_d
        elif self.rule == "adam":
            square_d = self.beta2 * square_d + (1 - self.beta2) * new_d
        else:
            square_d = square_d - (1 - self.beta2) * new_d * np.sign(square_d - new_d)
        return _moved(params_d, self.lr * mean_d / (np.sqrt(square_d) + self.tau)), AdaptiveState(mean_d, square_d)


#: beta of ``momentum`` when none is given: the DELTA paper's gamma.
DEFAULT_MOMENTUM = 0.9

#: Name -> learning rate used when none is given (1 for a plain mean; the paper's 0.01 for the adaptive rules).
SERVER_OPTIMIZERS: dict[str, float] = {
    "sgd": 1.0,
    "momentum": 1.0,
    "adagrad": 0.01,
    "adam": 0.01,
    "yogi": 0.01,
}


def make_server_optimizer(name: str, lr: float | None = None, momentum: float | None = None) -> ServerOptimizer:
    """Make a server optimizer by name.

    Args:
        name: A name in ``SERVER_OPTIMIZERS``.
        lr: Server learning rate; None for the default of that name.
        momentum: beta of ``momentum``, in [0, 1); None for 0.9.

    Raises:
        DeltaflError: If the name is unknown, or ``momentum`` is given to another optimizer.
    """
    if name not in SERVER_OPTIMIZERS:
        raise unknown_name("server optimizer", name, SERVER_OPTIMIZERS)
    rate = SERVER_OPTIMIZERS[name] if lr is None else lr
    if name == "momentum":
        return Momentum(rate, DEFAULT_MOMENTUM if momentum is None else momentum)
    if momentum is not None:
        raise DeltaflError(
            f"server momentum is {momentum:g}, but the server optimizer {name!r} has none to set; "
            "choose the server optimizer 'momentum' or leave it out"
        )
    return Sgd(rate) if name == "sgd" else Adaptive(name, rate)
