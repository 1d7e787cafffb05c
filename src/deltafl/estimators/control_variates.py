"""Control variates: predictions c_i of the clients' updates, known before the draw, that an
estimator subtracts.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` is unbiased for *any* c, and its variance is that
of the residuals u_i - c_i. To write your own, subclass ``ControlVariate`` and use
``Plan(..., estimator=Mine())``, or the label ``uniform@@my_control.py:Mine(power=2)``.
Section 10 of the theory, docs/why/theory/control.md, explains each of those below.

A control variate is a frozen dataclass of hyper-parameters. It never changes: what it learns is a
state, a NamedTuple of arrays, which each method takes and the learning ones return anew. An older
state stays valid. Of these methods the first three must be written, the others have defaults:

- ``init`` makes the state before the first round, from the clients and the number d of parameters.
- ``value`` gives sum_j w_j c_j over all clients, and c_i of some of them, (n, d). It may use only
  what was known before the draw: that is what makes D unbiased. One row (1, d) stands for c_i that
  are all equal.
- ``update`` learns from the updates u_i of the clients that replied, once D has been computed.
- ``at_model`` runs before ``value``, once the round's model is known: for c_i that are computed
  from the model, as in ``twin.py``.
- ``first_mean`` gives the mean of the updates of the initial model, if a census has brought them:
  the first model then takes a step with it.
- ``with_rows`` takes over how a plan stores one update per client (``Plan.memory``). Write it if
  the state has such rows.
- ``resized`` follows clients who join, leave or change their size (``moves.py``): one line per
  array with a row per client, and every sum with weights is made anew.

- ``coefficient``: beta of this round, for the log.

Those of this package have files of their own. They give ``reader`` and ``learner`` in place of
``value`` and ``update`` (``InStretches``): they read and learn from one stretch of the parameters
after the other, so that rows of a large model stay in the cache.

What the rest of the program asks of a control variate, as class attributes or properties:

- ``remembers``: the state holds one update per client. Its memory is estimated before a run.
- ``uses_aux``: it reads ``Population.aux_mq``, which hosts then ask the clients for.
- ``uses_first_updates``: a census shall bring ``Population.code_mc``, as ``init`` reads it.
- ``learns_from_sums``: one c for all clients, which learns from sum_S coef_i u_i alone, so that
  secure aggregation is enough. Others know clients apart, so that SCAFFOLD can correct local steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError, WithRanges
from ..moves import CannotResizeError, Moves
from ..scale.rows import RowFormat
from ..scale.stretches import float_type
from ..types import FloatArray, Floats, IntArray, Params, Population, Replies, Within
from .value import ControlValue, Reader


class Learner(NamedTuple):
    """``update`` in stretches."""

    #: ``(stretch, updates there, value there)``: learns there, and says what ``state`` asks for
    learn: Callable[[slice, Floats, Any], Any]
    #: the next state, given what ``learn`` has returned for each stretch, in their order
    state: Callable[[list[Any]], Any]


class ControlVariate(WithRanges, ABC):
    """Base class; the top of this file explains its methods and attributes."""

    #: Whether all c_i are equal, and a weighted sum of the updates is enough to learn from.
    learns_from_sums: ClassVar[bool] = False

    # Properties, because a wrapper answers with those of the wrapped one.
    @property
    def knows_clients(self) -> bool:
        """Whether c_i differs between clients."""
        return not self.learns_from_sums

    @property
    def remembers(self) -> bool:
        """Whether the state holds one update per client."""
        return False

    @property
    def uses_aux(self) -> bool:
        """Whether it reads ``Population.aux_mq``."""
        return False

    @property
    def uses_first_updates(self) -> bool:
        """Whether it reads ``Population.code_mc``."""
        return False

    def with_rows(self, rows: RowFormat) -> Self:
        """The same, with any stored updates kept in another format."""
        return self

    @abstractmethod
    def init(self, population: Population, num_params: int) -> Any:
        """The state before the first round."""

    def first_mean(self, state: Any) -> FloatArray | None:
        """The mean of all clients' updates of the initial model, (d,), if they are known."""
        return None

    def at_model(
        self,
        state: Any,
        population: Population,
        params_d: Params,
        round: int,
    ) -> Any:
        """The state once a round's model is known, before its draw."""
        return state

    @abstractmethod
    def value(self, state: Any, client_n: IntArray) -> ControlValue:
        """c_i of some clients, and its weighted sum over all clients."""

    def reader(self, state: Any, client_n: IntArray) -> Reader:
        """``value`` in stretches."""
        value: Any = self.value(state, client_n)
        # It may be a user's, and is cut up before its shape is compared with the model's.
        if not isinstance(value, ControlValue) or [*map(np.ndim, value)] != [1, 2]:
            raise wrong_value(self)
        read: Reader = value.part
        return read

    def coefficient(self, state: Any) -> float:
        """Beta of this round."""
        return 1.0

    @abstractmethod
    def update(
        self,
        state: Any,
        population: Population,
        replies: Replies,
        update_nd: Params,
    ) -> Any:
        """Learn from the updates (n, d) of the clients that replied."""

    def learner(self, state: Any, population: Population, replies: Replies) -> Learner:
        """``update`` in stretches."""

        def all_at_once(update_nbs: list[Params]) -> Any:
            return self.update(state, population, replies, np.concatenate(update_nbs, axis=1))

        return Learner(lambda part, update_nb, value: np.array(update_nb), all_at_once)

    def resized(self, state: Any, moves: Moves) -> Any:
        """The state when clients join, change or leave; by default nobody can."""
        moves.require_none(self)
        # ``sum_j w_j c_j`` that it may keep would be of the weights of before.
        if moves.is_reweighted:
            raise CannotResizeError(
                f"{type(self).__name__} does not say what becomes of its state when the clients' "
                "weights or costs change: define resized, see docs/how-to/add-a-control-variate.md"
            )
        return state


def wrong_value(control: ControlVariate, width: str = "") -> DeltaflError:
    """The error for what a class of a user's returned."""
    return DeltaflError(
        f"{type(control).__name__}.value must return ControlValue(total_d, control_nd){width}, "
        "with a row for each client it is given"
    )


class InStretches(ControlVariate):
    """Base class of those that define ``reader`` and ``learner`` in place of ``value`` and
    ``update``.
    """

    @abstractmethod
    def reader(self, state: Any, client_n: IntArray) -> Reader:
        """``value`` in stretches."""

    @abstractmethod
    def learner(self, state: Any, population: Population, replies: Replies) -> Learner:
        """``update`` in stretches."""

    def value(self, state: Any, client_n: IntArray) -> ControlValue:
        return self.reader(state, client_n)(slice(None))

    def update(
        self,
        state: Any,
        population: Population,
        replies: Replies,
        update_nd: Params,
    ) -> Any:
        learner = self.learner(state, population, replies)
        value = self.value(state, replies.client_n)
        row_nd = update_nd.astype(float_type(update_nd.shape[1]), copy=False)
        return learner.state([learner.learn(slice(None), row_nd, value)])


def learns_nothing(state: Any) -> Learner:
    """Leaves the state as it is."""
    return Learner(lambda *_: None, lambda _: state)


class OneForAll(InStretches):
    """Base class of those with one c for all clients, which is all that they remember."""

    learns_from_sums = True

    def reader(self, state: Any, client_n: IntArray) -> Reader:
        (common_d,) = state
        # The weights sum to 1, so that the weighted sum of equal c is c.
        return ControlValue(common_d, common_d[None]).part

    def resized(self, state: Any, moves: Moves) -> Any:
        return state


class NoControlState(NamedTuple):
    """Holds the number of parameters only."""

    zero_d: Annotated[FloatArray, Within("[0, 0]")]


@dataclass(frozen=True)
class NoControl(OneForAll):
    """c = 0: the plain estimators."""

    def init(self, population: Population, num_params: int) -> NoControlState:
        return NoControlState(np.zeros(num_params, float_type(num_params)))

    def learner(self, state: NoControlState, *_: object) -> Learner:
        return learns_nothing(state)
