"""Coefficients of control variates: D = beta sum_j w_j c_j + sum_S coef_i (u_i - beta c_i).

D is unbiased for every beta known before the draw. beta = 1 is the plain difference estimator, beta
= 0 is Horvitz-Thompson. If stored updates are stale, the optimal beta lies between them and is
never worse than either.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..moves import Moves
from ..scale.numerics import inner, sum_of_rows
from ..scale.rows import RowFormat
from ..types import Cohort, FloatArray, Floats, IntArray, Params, Population, Replies, Sizes
from .control_variates import ControlVariate, InStretches, Learner
from .value import ComposedValue, ControlValue, Reader

#: Below this share of sum_S mass norm(coef c)^2 what centring leaves is rounding, not spread.
_SPREAD = 1e-9
#: The same of products in float32.
_NARROW_SPREAD = 1e-5


class ScaledState(NamedTuple):
    """The inner state, and the two sums whose ratio is a learned beta, float64 ()."""

    control: Any
    cross: FloatArray  #: A, exponential sum over rounds of the estimated sum_i g_i <u_i, c_i>
    square: Sizes  #: B >= 0, the same of g_i norm(c_i)^2; 0 before the first replies


@dataclass(frozen=True)
class _Scaled(InStretches):
    """Another control variate times beta; its state is not multiplied."""

    control: ControlVariate

    @property
    def knows_clients(self) -> bool:
        return self.control.knows_clients

    @property
    def remembers(self) -> bool:
        return self.control.remembers

    @property
    def uses_aux(self) -> bool:
        return self.control.uses_aux

    def with_rows(self, rows: RowFormat) -> Self:
        return replace(self, control=self.control.with_rows(rows))

    def init(self, population: Population, num_params: int) -> ScaledState:
        control = self.control.init(population, num_params)
        return ScaledState(control, np.zeros(()), np.zeros(()))

    def at_model(
        self,
        state: ScaledState,
        population: Population,
        params_d: Params,
        round: int,
    ) -> ScaledState:
        known = self.control.at_model(state.control, population, params_d, round)
        return state._replace(control=known)

    def reader(self, state: ScaledState, client_n: IntArray) -> Reader:
        read_held = self.control.reader(state.control, client_n)
        beta = self.coefficient(state)

        def read(part: slice) -> ControlValue:
            value = read_held(part)
            total_b, control_nb = value
            if beta != 1:
                total_b = beta * total_b
                control_nb = beta * control_nb
            return ComposedValue.of(total_b, control_nb, value)

        return read

    def learner(
        self,
        state: ScaledState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        held = self.control.learner(state.control, population, replies)
        return Learner(
            lambda part, update_nb, value: held.learn(part, update_nb, value.held[0]),
            lambda sums: state._replace(control=held.state(sums)),
        )

    def resized(self, state: ScaledState, moves: Moves) -> ScaledState:
        return state._replace(control=self.control.resized(state.control, moves))


@dataclass(frozen=True)
class FixedCoefficient(_Scaled):
    """Control values beta c_i, beta fixed in [0, 1]: FedStale (Rodio and Neglia 2024)."""

    beta: float = 0.5
    ranges: ClassVar = {"beta": "[0, 1]"}

    def coefficient(self, state: ScaledState) -> float:
        return self.beta


@dataclass(frozen=True)
class LearnedCoefficient(_Scaled):
    """Control values beta c_i, beta = clip(A / B, 0, 1) from earlier rounds, and 1 in the first
    round.

    Independent draws have V(beta) = sum_i g_i norm(u_i - beta c_i)^2 with g_i = w_i^2 (1 - pi_i) /
    pi_i, smallest at beta = sum_i g_i <u_i, c_i> / sum_i g_i norm(c_i)^2 (Montanari 1987; Lavenberg
    and Welch 1981). Both sums are estimated from the cohort, by coef_i^2 (1 - w_i / coef_i). Draws
    of fixed size cancel what all coef_i u_i have in common, so the products are then those of
    coef_i u_i and coef_i c_i about their means over the cohort (with replacement: over the draws),
    unless only one place is open. Replying with a rate q_i < 1 is a second draw, in which nothing
    cancels; its part, weighed by q_i (1 - q_i), is not centred.

    A wrong beta increases the variance but never causes bias.

    Attributes:
        control: The control variate that gives c.
        memory: In [0, 1), how slowly A and B follow the rounds.
    """

    memory: float = 0.9
    ranges: ClassVar = {"memory": "[0, 1)"}

    def coefficient(self, state: ScaledState) -> float:
        if state.square <= 0:
            return 1.0
        # Clipped first: a ratio to almost nothing would overflow.
        return float(np.clip(state.cross, 0.0, state.square) / state.square)

    def learner(
        self,
        state: ScaledState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        held = self.control.learner(state.control, population, replies)
        products = _Products(population.weight_m[replies.client_n], replies)

        def learn(part: slice, update_nb: Params, value: ComposedValue) -> tuple[FloatArray, Any]:
            inner_value = value.held[0]
            seen = products.of(update_nb, inner_value.control_nd)
            return seen, held.learn(part, update_nb, inner_value)

        def learned(seen: list[tuple[FloatArray, Any]]) -> ScaledState:
            product_kns, sums = zip(*seen, strict=True)
            cross, square = products.sums(sum(product_kns))
            return ScaledState(
                control=held.state(list(sums)),
                # Only the ratio counts, so that exponential sums do, which need no first value.
                cross=np.asarray(self.memory * state.cross + cross),
                square=np.asarray(self.memory * state.square + square),
            )

        return Learner(learn, learned)


class _Products:
    """A and B of one round, from the draw and from the responses."""

    def __init__(self, weight_n: FloatArray, replies: Replies) -> None:
        rate_n = replies.response_n
        # w_i / pi_i: what counts for a client if everybody replied.
        sent_n = rate_n * replies.coef_n
        count_n = replies.cohort.count_n
        # Times squares of ``sent_n`` that is (1 - q_i) coef_i^2, as in ``variance.py``.
        alone_n = (1 - rate_n) / rate_n**2
        if replies.cohort.kind == "replacement":
            # A client that was drawn twice is two draws, each with half of its coefficient.
            mass_n = count_n / rate_n
            sent_n = sent_n / count_n
            # Both draws of a client fail together: the division above is taken back.
            alone_n = alone_n * count_n**2
        else:
            # w_i / coef_i is pi_i; a coefficient of 0 says nothing, and its mass is 0.
            decided_n = np.divide(
                weight_n,
                sent_n,
                out=np.ones(len(sent_n)),
                where=sent_n > 0,
            )
            mass_n = np.clip(1 - decided_n, 0.0, 1.0) / rate_n
        self._replies = replies
        self._least_spread = _SPREAD
        self._mass_n = mass_n
        self._alone_n = alone_n
        self._square_n = sent_n**2
        self._share_n = sent_n * mass_n / (mass_n.sum() or 1.0)

    def of(self, update_nb: Params, control_nb: Floats) -> FloatArray:
        """The products of a stretch, (2, n + 1): <y_i, z_i> and <z_i, z_i> of y_i = coef_i u_i
        and z_i = coef_i c_i, then those of their means.
        """
        if control_nb.dtype == np.float32:
            self._least_spread = _NARROW_SPREAD
        mean_y_b = sum_of_rows(self._share_n, update_nb)
        # One row stands for c_i that are all equal.
        mean_z_b = sum_of_rows(self._share_n, np.broadcast_to(control_nb, update_nb.shape))
        cross_n = self._square_n * inner(update_nb, control_nb)
        square_n = self._square_n * inner(control_nb, control_nb)
        cross_k = np.append(cross_n, inner(mean_y_b, mean_z_b))
        square_k = np.append(square_n, inner(mean_z_b, mean_z_b))
        return np.array([cross_k, square_k])

    def sums(self, product_2k: FloatArray) -> tuple[float, float]:
        """A and B, given the products of all stretches."""
        cross_n = product_2k[0, :-1]
        square_n = product_2k[1, :-1]
        sum_22 = np.zeros((2, 2))
        # One reply after the other: the order of a sum decides its last bits.
        for i, masses in enumerate(zip(self._mass_n, self._alone_n, strict=True)):
            sum_22 += np.outer(masses, (cross_n[i], square_n[i]))
        (cross, square), (alone_cross, alone_square) = sum_22.tolist()
        # Draws of fixed size cancel what all replies have in common.
        selected = self._replies.selected
        if selected.kind != "poisson" and _open_places(selected) > 1:
            total = self._mass_n.sum()
            spread = square - total * product_2k[1, -1]
            # All coef_i c_i are alike and cancel in the draw: only the responses tell anything of
            # beta.
            if spread <= self._least_spread * square:
                return alone_cross, alone_square
            cross -= total * product_2k[0, -1]
            square = spread
        return float(cross + alone_cross), float(square + alone_square)


def _open_places(selected: Cohort) -> int:
    """How many places of a cohort were decided by chance: its draws without the certain ones."""
    if selected.kind == "replacement":
        return int(selected.count_n.sum())
    # Not ``< 1``: an unknown expectation, NaN, is no certainty.
    return int(np.count_nonzero(~(selected.expected_n >= 1)))
