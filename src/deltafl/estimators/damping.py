"""Control coefficients: how far a memory is trusted, D = beta sum_j w_j c_j + sum_S coef_i (u_i - beta c_i).

D is unbiased for every beta that is known before the draw: beta c is a control like any other. beta = 1 is the plain
difference estimator, beta = 0 is Horvitz-Thompson. A memory that is stale, or of another scale than the updates, is
worse than none at beta = 1; the right beta is never worse than either.

================= ============================ ====================================================================
control           beta                         source
================= ============================ ====================================================================
``ScaledControl`` fixed                        FedStale (Rodio and Neglia 2024)
``DampedControl`` learnt from earlier rounds   regression (optimal difference) estimator: Montanari 1987; control
                                               variates with an estimated coefficient: Lavenberg and Welch 1981
================= ============================ ====================================================================
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import Cohort, FloatArray, IntArray, Params, Population
from .controls import Control, ControlValue
from .heard import Heard

#: Below this share of sum_S mass norm(coef c)^2 what centring leaves is rounding, not spread.
_SPREAD = 1e-9


@dataclass(frozen=True)
class ScaledControl:
    """Guesses beta c_i instead of c_i, with beta fixed.

    Attributes:
        control: Where c comes from.
        beta: In [0, 1].
    """

    control: Control
    beta: float

    def __post_init__(self) -> None:
        """Refuse an impossible beta."""
        if not 0 <= self.beta <= 1:
            raise DeltaflError(f"beta is {self.beta}; it must be from 0 (no memory) to 1 (the memory as it is)")

    def init(self, population: Population, num_params: int) -> Any:
        """The memory of the control itself."""
        return self.control.init(population, num_params)

    def guess(self, state: Any, client_n: IntArray) -> ControlValue:
        """Everything times beta."""
        return _scaled(self.control.guess(state, client_n), self.beta)

    def update(self, state: Any, population: Population, heard: Heard, update_nd: Params) -> Any:
        """The control learns as ever."""
        return self.control.update(state, population, heard, update_nd)


class DampedControlState(NamedTuple):
    """The control's own memory, and the two sums whose ratio is beta.

    Attributes:
        control: State of the control itself.
        cross: float64 (), A, exponential sum over rounds of the estimated sum_i g_i <u_i, c_i>.
        square: float64 (), B >= 0, the same of g_i norm(c_i)^2; 0 before anything is known.
    """

    control: Any
    cross: FloatArray
    square: FloatArray


@dataclass(frozen=True)
class DampedControl:
    """Guesses beta c_i, beta = clip(A / B, 0, 1) from earlier rounds; 1 before anything is known.

    Independent draws have V(beta) = sum_i g_i norm(u_i - beta c_i)^2 with g_i = w_i^2 (1 - pi_i) / pi_i, which is least
    at beta = sum_i g_i <u_i, c_i> / sum_i g_i norm(c_i)^2. Sums over everybody are estimated from the cohort by weights
    1 / pi_i, and as coef_i = w_i / pi_i, g_i / pi_i = coef_i^2 (1 - w_i / coef_i): a client that is always asked has no
    say. (Weights w_i coef_i would leave the factor (1 - pi_i) / pi_i out.)

    Designs of fixed size do better than independent draws: what the coef_i (u_i - beta c_i) have in common cancels. So
    for them the products are those of coef_i u_i and coef_i c_i about their means over the cohort, with masses 1 - w_i
    / coef_i (the variance approximation of ``variance.py``; exact for simple random sampling). Otherwise a memory that
    knows only what all updates have in common would look useful where it is not. With replacement each draw counts by
    itself, as coef_i u_i / count_i about their mean, for nobody is certain to be drawn. A draw that leaves a single
    place open has no mean to be about: it counts uncentred, which is V(beta) plus norm(sum_j w_j (u_j - beta c_j))^2.

    Clients that reply with rate q_i < 1 make a second draw, each on its own, in which nothing cancels, with
    V(beta) = sum_S q_i (1 - q_i) norm(coef_i (u_i - beta c_i))^2: its part of A and B is not centred. The first draw's
    part is that of q_i coef_i, what the reply would count if all replied, with masses over q_i.

    A wrong beta costs variance, never bias.

    Attributes:
        control: Where c comes from; its state of a round is undamped.
        memory: In [0, 1), how slowly A and B follow the rounds.
    """

    control: Control
    memory: float = 0.9

    def __post_init__(self) -> None:
        """Refuse an impossible memory."""
        if not 0 <= self.memory < 1:
            raise DeltaflError(f"memory is {self.memory}; it must be from 0 (the last round alone) to below 1")

    def init(self, population: Population, num_params: int) -> DampedControlState:
        """Nothing is known: beta = 1."""
        return DampedControlState(self.control.init(population, num_params), np.zeros(()), np.zeros(()))

    def coefficient(self, state: DampedControlState) -> float:
        """Beta of the next round, in [0, 1]."""
        return float(np.clip(state.cross / state.square, 0.0, 1.0)) if state.square > 0 else 1.0

    def guess(self, state: DampedControlState, client_n: IntArray) -> ControlValue:
        """Everything times beta."""
        return _scaled(self.control.guess(state.control, client_n), self.coefficient(state))

    def update(
        self, state: DampedControlState, population: Population, heard: Heard, update_nd: Params
    ) -> DampedControlState:
        """Regress the replies on what the control said of them, then let the control learn."""
        weight_n = population.weight_m[heard.client_n]
        cross, square = _products(update_nd, self.control.guess(state.control, heard.client_n), weight_n, heard)
        return DampedControlState(
            control=self.control.update(state.control, population, heard, update_nd),
            cross=np.asarray(self.memory * state.cross + cross),
            square=np.asarray(self.memory * state.square + square),
        )


def trust(control: Control, state: Any) -> float:
    """Beta of a control in the next round; 1 if it has none."""
    if isinstance(control, DampedControl):
        return control.coefficient(state)
    return control.beta if isinstance(control, ScaledControl) else 1.0


def _scaled(guess: ControlValue, beta: float) -> ControlValue:
    return guess if beta == 1 else ControlValue(beta * guess.total_d, beta * guess.control_nd)


def _products(update_nd: Params, guess: ControlValue, weight_n: FloatArray, heard: Heard) -> tuple[float, float]:
    """A and B of one round: those of the draw, about the means if what is common cancels, and those of who replied."""
    control_nd = guess.control_nd
    rate_n, sent_n, count_n = heard.response_n, heard.response_n * heard.coef_n, heard.cohort.count_n
    alone_n = (1 - rate_n) / rate_n**2
    if heard.cohort.kind == "replacement":
        mass_n, sent_n, alone_n = count_n / rate_n, sent_n / count_n, alone_n * count_n**2
    else:
        decided_n = np.divide(weight_n, sent_n, out=np.ones(len(sent_n)), where=sent_n > 0)
        mass_n = np.clip(1 - decided_n, 0.0, 1.0) / rate_n
    total = mass_n.sum()
    cross = square = alone_cross = alone_square = 0.0
    mean_y_d, mean_z_d = np.zeros(control_nd.shape[1]), np.zeros(control_nd.shape[1])
    for i, (mass, alone, sent) in enumerate(zip(mass_n, alone_n, sent_n, strict=True)):
        y_d, z_d = sent * update_nd[i].astype(np.float64), sent * control_nd[i if len(control_nd) > 1 else 0]
        product, length = float(y_d @ z_d), float(z_d @ z_d)
        cross, square = cross + mass * product, square + mass * length
        alone_cross, alone_square = alone_cross + alone * product, alone_square + alone * length
        if total > 0:
            mean_y_d += mass / total * y_d
            mean_z_d += mass / total * z_d
    if heard.cohort.kind != "poisson" and _open_places(heard.asked) > 1:
        spread = square - total * float(mean_z_d @ mean_z_d)
        beyond_rounding = spread > _SPREAD * square
        cross = cross - total * float(mean_y_d @ mean_z_d) if beyond_rounding else 0.0
        square = spread if beyond_rounding else 0.0
    return cross + alone_cross, square + alone_square


def _open_places(asked: Cohort) -> int:
    """How many of a cohort were left to chance: its draws, without those that were certain."""
    if asked.kind == "replacement":
        return int(asked.count_n.sum())
    return int(np.count_nonzero(~(asked.expected_n >= 1)))
