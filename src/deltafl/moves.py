"""Clients join, change and leave: how the state of a round follows.

Whoever keeps a state says itself what becomes of it: samplers, control variates and server parts
have a method ``resized(state, moves)``, which is a line for each array with one row per client::

    def resized(self, state, moves):
        return state._replace(
            weight_m=moves.population.weight_m,    # of the clients there are now
            loss_m=moves.rows(state.loss_m, 1.0),  # as it was; 1 for newcomers
        )

``federation/clients.py`` calls them between two rounds.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .errors import DeltaflError
from .scale.persistent_array import PersistentArray
from .types import Array, IntArray, Population


class CannotResizeError(DeltaflError):
    """A state cannot follow: it describes all clients jointly."""


@runtime_checkable
class RowsInFile(Protocol):
    """Rows that move in their own file (``scale/rows.py``)."""

    def __len__(self) -> int: ...

    def kept(self, kept_k: IntArray) -> "RowsInFile":
        """The rows of some clients alone, in this order."""

    def lengthened(self, num_clients: int) -> "RowsInFile":
        """With rows of zeros for clients who join."""


class Moves(NamedTuple):
    """Which clients of before stay, and who there are now."""

    population: Population  #: those who stay, in the order of ``stay_k``, then newcomers
    stay_k: IntArray  #: the indices of before of those who stay
    num_before: int
    is_reweighted: bool = True  #: whether the clients' weights or costs are other ones now

    @property
    def num_newcomers(self) -> int:
        """How many clients join."""
        return self.population.num_clients - len(self.stay_k)

    @property
    def all_stay(self) -> bool:
        """Whether nobody left or has another place; others may have joined behind them."""
        return np.array_equal(self.stay_k, np.arange(self.num_before))

    def stayed(self, old_m: Any) -> Array:
        """The rows of those who stay."""
        return np.asarray(old_m)[self.stay_k]

    def rows(self, old_m: Any, newcomer: Any) -> Any:
        """The rows of those who stay, and of newcomers ``newcomer``, one row or one for each.

        ``old_m`` is an array, a ``PersistentArray``, or what ``RowFormat.zeros`` makes.
        """
        if isinstance(old_m, RowsInFile):
            if not self.all_stay:
                old_m = old_m.kept(self.stay_k)
            return old_m.lengthened(self.population.num_clients)
        if isinstance(old_m, tuple):
            new_d = np.full_like(old_m[0], newcomer)  # one for all newcomers, until they reply
            return (*(old_m[index] for index in self.stay_k), *[new_d] * self.num_newcomers)
        stayed_k = self.stayed(old_m)
        shape = (self.num_newcomers, *stayed_k.shape[1:])
        row_m = np.concatenate([stayed_k, np.full(shape, newcomer, stayed_k.dtype)])
        if isinstance(old_m, PersistentArray):
            # A sum tree stays one.
            return type(old_m)(row_m)
        return row_m

    def require_none(self, owner: object) -> None:
        """Raise a ``CannotResizeError`` if clients join, leave or change places, not if they only
        change.
        """
        if self.num_newcomers > 0 or not self.all_stay:
            raise CannotResizeError(
                f"{type(owner).__name__} describes all clients jointly, so that nobody can join, "
                "be forgotten or take another place: set min_nodes to the number of all clients, "
                "or choose a new state_path (in a class of your own define resized, see "
                "docs/how-to/add-a-method.md)"
            )
