"""Controls: guesses c_i of the clients' updates, known before the draw, that the difference estimator subtracts.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` is unbiased for *any* c, and its variance is that of the residuals
u_i - c_i. A control is three functions: its memory before the first round, what it says about a cohort, and what it
learns from the replies (always after D has been computed).
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from ..types import BoolArray, FloatArray, IntArray, Params, Population
from .heard import Heard
from .memory import RowFormat, Rows, read_rows, replace_rows, wide_row
from .running_sum import RunningSum, weighted_sum


class ControlValue(NamedTuple):
    """What a control says: ``total_d`` = sum_j w_j c_j over all clients, and c_i of the cohort, (n, d) or (1, d)."""

    total_d: FloatArray
    control_nd: FloatArray


@runtime_checkable
class Control(Protocol):
    """Where c comes from."""

    def init(self, population: Population, num_params: int) -> Any:
        """The memory before the first round."""
        ...

    def guess(self, state: Any, client_n: IntArray) -> ControlValue:
        """C for the clients of a cohort, and its weighted sum over everyone."""
        ...

    def update(self, state: Any, population: Population, heard: Heard, update_nd: Params) -> Any:
        """Learn from the replies, (n, d)."""
        ...


class NoControlState(NamedTuple):
    """Remembers the number of parameters only."""

    zero_d: FloatArray


@dataclass(frozen=True)
class NoControl:
    """c = 0: the plain estimators."""

    def init(self, population: Population, num_params: int) -> NoControlState:
        """No memory."""
        return NoControlState(np.zeros(num_params))

    def guess(self, state: NoControlState, client_n: IntArray) -> ControlValue:
        """Zero for everyone."""
        return ControlValue(state.zero_d, state.zero_d[None])

    def update(self, state: NoControlState, population: Population, heard: Heard, update_nd: Params) -> NoControlState:
        """Nothing is learnt."""
        return state


class CommonControlState(NamedTuple):
    """One model: the average c of past rounds."""

    control_d: FloatArray


@dataclass(frozen=True)
class CommonControl:
    """One c for everyone: c <- memory c + (1 - memory) (Hajek mean of the round).

    Attributes:
        memory: In [0, 1); how slowly c follows the rounds.
    """

    memory: float = 0.7

    def init(self, population: Population, num_params: int) -> CommonControlState:
        """C = 0."""
        return CommonControlState(np.zeros(num_params))

    def guess(self, state: CommonControlState, client_n: IntArray) -> ControlValue:
        """The same c for everyone; the weights sum to 1, hence so does their sum."""
        return ControlValue(state.control_d, state.control_d[None])

    def update(
        self, state: CommonControlState, population: Population, heard: Heard, update_nd: Params
    ) -> CommonControlState:
        """Move towards the ratio mean of the replies, which no unlucky sum of weights can blow up."""
        total = heard.coef_n.sum()
        if total <= 0:
            return state
        return self.follow(state, weighted_sum(heard.coef_n / total, update_nd, len(state.control_d)))

    def follow(self, state: CommonControlState, mean_d: FloatArray) -> CommonControlState:
        """Move towards the ratio mean of a round, for who has formed it already."""
        return CommonControlState(self.memory * state.control_d + (1 - self.memory) * mean_d)


class OwnControlState(NamedTuple):
    """One update a client, and their weighted sum.

    Attributes:
        control_md: m rows (``memory.py``): a tuple of them, one (m, d) array, as it is after a resume, or a file.
        total_d: float64 (d,), sum_j w_j c_j of the rows as they are stored.
        rounding: float64 (), how far from it rounding may have led ``total_d`` (``running_sum.py``).
    """

    control_md: Rows
    total_d: FloatArray
    rounding: FloatArray = np.zeros(())


@dataclass(frozen=True)
class OwnControl:
    """c_i = the last update of client i, 0 until it was seen. Memory: one model a client that was seen.

    A round replaces the rows of those who replied; the other rows are shared by the state before and the state after,
    so that a round costs n rows and not m, and neither state is changed.

    Attributes:
        rows: How the rows are kept.
    """

    rows: RowFormat = field(default_factory=RowFormat)

    def init(self, population: Population, num_params: int) -> OwnControlState:
        """All c_i = 0."""
        return OwnControlState(self.rows.zeros(population.num_clients, num_params), np.zeros(num_params))

    def guess(self, state: OwnControlState, client_n: IntArray) -> ControlValue:
        """Each client's last update."""
        return ControlValue(state.total_d, read_rows(state.control_md, client_n, len(state.total_d)))

    def update(
        self, state: OwnControlState, population: Population, heard: Heard, update_nd: Params
    ) -> OwnControlState:
        """Remember the replies."""
        client_n = heard.client_n
        rows = replace_rows(state.control_md, client_n, update_nd)
        changes = (wide_row(rows[client]) - wide_row(state.control_md[client]) for client in client_n)
        followed = RunningSum(state.total_d, state.rounding).plus(population.weight_m[client_n], changes)
        new = OwnControlState(rows, *followed)
        return summed_anew(new, population.weight_m) if followed.is_lost else new


def summed_anew(state: OwnControlState, weight_m: FloatArray) -> OwnControlState:
    """The same rows with sum_j w_j c_j formed from them, m d operations: for other weights, or a sum that is lost."""
    total_d = weighted_sum(weight_m, map(wide_row, state.control_md), len(state.total_d))
    return OwnControlState(state.control_md, total_d)


class InnovationControlState(NamedTuple):
    """Everybody's memory, the common guess, and who has no memory yet.

    Attributes:
        own: The last updates.
        common: The guess for the others.
        unseen_m: bool (m,), clients never seen.
        unseen_weight: float64 (), the sum of their weights.
    """

    own: OwnControlState
    common: CommonControlState
    unseen_m: BoolArray
    unseen_weight: FloatArray


@dataclass(frozen=True)
class InnovationControl:
    """c_i = the last update of client i, and one guess c for clients that were never seen.

    c follows the estimates: c <- memory c + (1 - memory) D. (The mean of the replies would serve as well, but a server
    whose clients keep their c_i is not told it, see ``remote.py``.)

    Attributes:
        own: The memory of those who were seen.
        memory: In [0, 1); how slowly c follows the estimates.
    """

    own: OwnControl = OwnControl()
    memory: float = 0.7

    def init(self, population: Population, num_params: int) -> InnovationControlState:
        """Nobody was seen, c = 0."""
        return InnovationControlState(
            own=self.own.init(population, num_params),
            common=CommonControlState(np.zeros(num_params)),
            unseen_m=np.ones(population.num_clients, dtype=np.bool_),
            unseen_weight=np.array(1.0),
        )

    def guess(self, state: InnovationControlState, client_n: IntArray) -> ControlValue:
        """Each client's last update, or the common guess."""
        total_d, control_nd = self.own.guess(state.own, client_n)
        common_d = state.common.control_d
        control_nd[state.unseen_m[client_n]] = common_d
        return ControlValue(total_d + state.unseen_weight * common_d, control_nd)

    def update(
        self, state: InnovationControlState, population: Population, heard: Heard, update_nd: Params
    ) -> InnovationControlState:
        """Remember the replies, and follow the estimate."""
        guess = self.guess(state, heard.client_n)
        common_d = follow_estimate(state.common.control_d, self.memory, guess, update_nd, heard.coef_n)
        unseen_m = state.unseen_m.copy()
        unseen_m[heard.client_n] = False
        return InnovationControlState(
            own=self.own.update(state.own, population, heard, update_nd),
            common=CommonControlState(common_d),
            unseen_m=unseen_m,
            unseen_weight=np.asarray(population.weight_m[unseen_m].sum()),
        )


def residuals(control: Control, state: Any, client_n: IntArray, update_nd: Params) -> tuple[FloatArray, FloatArray]:
    """sum_j w_j c_j, and u_i - c_i of the cohort, float64 (n, d)."""
    total_d, control_nd = control.guess(state, client_n)
    return total_d, np.subtract(update_nd, control_nd, dtype=np.float64)


def follow_estimate(
    common_d: FloatArray, memory: float, guess: ControlValue, update_nd: Params, coef_n: FloatArray
) -> FloatArray:
    """C <- memory c + (1 - memory) D, D the undamped estimate of the round; c stays if no reply counts."""
    if coef_n.sum() <= 0:
        return common_d
    pairs = zip(update_nd, np.broadcast_to(guess.control_nd, update_nd.shape), strict=True)
    left = (update_d - control_d for update_d, control_d in pairs)
    estimate_d = guess.total_d + weighted_sum(coef_n, left, len(common_d))
    return memory * common_d + (1 - memory) * estimate_d


AnyControl = TypeVar("AnyControl", bound=Control)


def with_memory(control: AnyControl, rows: RowFormat) -> AnyControl:
    """The control with its rows (or those of a control within it) kept in another format."""
    changes: dict[str, Any] = {name: with_memory(part, rows) for name, part in _controls_of(control).items()}
    if isinstance(control, OwnControl):
        changes["rows"] = rows
    return replace(control, **changes) if changes else control  # type: ignore[type-var]


def remembers(control: Control) -> bool:
    """Whether a control keeps one update a client."""
    return isinstance(control, OwnControl) or any(map(remembers, _controls_of(control).values()))


def uses_known(control: Control) -> bool:
    """Whether a control goes by ``Population.aux_mq``."""
    return bool(getattr(control, "uses_known", False)) or any(map(uses_known, _controls_of(control).values()))


def _controls_of(control: Control) -> dict[str, Any]:
    """The controls that a control is made of, by field."""
    return {name: part for name, part in vars(control).items() if isinstance(part, Control)}
