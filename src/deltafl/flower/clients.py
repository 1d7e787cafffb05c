"""The clients of a federation: who they are, and how a round's state follows when they join, change or leave."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..estimators.control_variates import OwnControlState, summed_anew
from ..estimators.remote import RemoteControlState, begin_anew
from ..round import Plan, RoundState, init_round
from ..scale.persistent_array import PersistentArray
from ..scale.rows import MappedRows
from ..types import FloatArray

LARGEST_SIZE = 2**40

_PER_CLIENT = re.compile(r"_m[a-z]?$")
#: Arrays that depend on the population alone are computed again. (Values that begin as NaN are learned from replies.)
_FROM_POPULATION = {"weight_m", "score_m", "size_m", "num_examples_m", "aux_mq", "value_mq"}
#: Scores that only increase: a newcomer that started at zero would stay behind for as long as the run is old.
_CUMULATIVE = {"total_m"}


class ClientInfo(NamedTuple):
    """What a client reports about itself when it registers.

    Attributes:
        num_examples: Its number of examples, from 1 to 2^40.
        aux: Its auxiliary variables, such as its shares of labels; empty for none.
    """

    num_examples: int
    aux: tuple[float, ...] = ()


@dataclass(frozen=True)
class ClientRegistry:
    """All clients ever admitted, by a key that outlives connections and restarts.

    A client's index in the population is its position here.
    """

    keys: tuple[str, ...] = ()
    infos: tuple[ClientInfo, ...] = ()

    @cached_property
    def index(self) -> dict[str, int]:
        """Key -> index."""
        return {key: index for index, key in enumerate(self.keys)}

    @property
    def sizes(self) -> list[int]:
        """Numbers of examples."""
        return [info.num_examples for info in self.infos]

    @property
    def aux(self) -> list[tuple[float, ...]]:
        """Auxiliary variables."""
        return [info.aux for info in self.infos]

    def updated(self, infos: Mapping[str, ClientInfo]) -> "ClientRegistry":
        """Append newcomers and replace what others now report; returns ``self`` if nothing changed."""
        changed = {
            key: info for key, info in infos.items() if key not in self.index or self.infos[self.index[key]] != info
        }
        if not changed:
            return self
        # Nodes connect in any order: sort them, partition 10 after partition 9.
        new_keys = sorted((key for key in changed if key not in self.index), key=lambda key: (len(key), key))
        kept = [changed.get(key, info) for key, info in zip(self.keys, self.infos, strict=True)]
        return ClientRegistry((*self.keys, *new_keys), (*kept, *(changed[key] for key in new_keys)))

    def without(self, keys: Collection[str]) -> "ClientRegistry":
        """Drop clients; returns ``self`` if none of them is registered."""
        kept = [index for index, key in enumerate(self.keys) if key not in keys]
        if len(kept) == len(self.keys):
            return self
        return ClientRegistry(tuple(self.keys[i] for i in kept), tuple(self.infos[i] for i in kept))


class CannotResizeError(DeltaflError):
    """The sampler's state cannot be resized: it describes all clients jointly."""


def resize_state(
    plan: Plan, state: RoundState, old_weight_m: FloatArray, kept_k: Sequence[int] | None = None
) -> RoundState:
    """The state for ``plan.population``: the clients kept from ``state`` in their order, then newcomers.

    An array whose name ends in ``_m``, ``_md``, ``_mq`` ... has one row per client. Newcomers start as everybody did,
    with the mean score. Sums over clients are computed again with the new weights; where clients keep their own memory
    and the sum cannot follow the weights, it is reset.

    Args:
        plan: The plan for the new population.
        state: The state for the old one.
        old_weight_m: The weights of the old population.
        kept_k: Indices of the clients to keep; None for all.

    Raises:
        CannotResizeError: If the sampler keeps an array with one row per client under a name without that ending.
    """
    fresh = init_round(plan, state.params_d)
    resized = RoundState(
        *(_resized(old, new, kept_k, field) for old, new, field in zip(state, fresh, RoundState._fields, strict=True))
    )
    _check_shapes(type(plan.sampler).__name__, resized.sampler, fresh.sampler)
    weight_m, control = plan.population.weight_m, resized.control
    if not isinstance(control, RemoteControlState):
        return resized._replace(control=_summed_anew(control, weight_m))
    # The sum does not show which part of it belongs to a forgotten client.
    control = begin_anew(control) if kept_k is not None else _reweighted(control, old_weight_m, weight_m)
    return resized._replace(control=control)


def _resized(old: Any, fresh: Any, kept_k: Sequence[int] | None, name: str) -> Any:
    if hasattr(fresh, "_fields"):
        parts = zip(old, fresh, fresh._fields, strict=True)
        return type(fresh)(*(_resized(part, new, kept_k, field) for part, new, field in parts))
    if name in _FROM_POPULATION and not np.isnan(np.asarray(fresh)).any():
        return fresh
    if not _PER_CLIENT.search(name):
        return old
    if isinstance(fresh, tuple):
        rows = old if kept_k is None else tuple(old[index] for index in kept_k)
        return (*rows, *fresh[len(rows) :])
    if isinstance(old, MappedRows):
        return (old if kept_k is None else old.kept(np.asarray(kept_k, dtype=np.int64))).resized(len(fresh))
    rows = old if kept_k is None else np.asarray(old)[np.asarray(kept_k, dtype=np.int64)]
    newcomers = fresh[len(rows) :]
    if name == "p_m":  # draw probabilities: each newcomer gets the mean
        if kept_k is not None:
            rows = rows / rows.sum() if rows.sum() > 0 else np.full(len(rows), 1 / len(rows))
        rows = rows * (len(rows) / len(fresh))
    elif name in _CUMULATIVE:
        newcomers = np.full(len(newcomers), np.mean(rows))
    resized = np.concatenate([rows, newcomers])
    return type(fresh)(resized) if isinstance(fresh, PersistentArray) else resized


def _reweighted(control: RemoteControlState, old_weight_m: FloatArray, weight_m: FloatArray) -> RemoteControlState:
    """Scale the sum of the clients' memories if all old weights changed by one factor; otherwise reset it."""
    same_m = weight_m[: len(old_weight_m)]
    factor = same_m.sum() / old_weight_m.sum()
    if not np.allclose(same_m, factor * old_weight_m, rtol=1e-12, atol=0):
        return begin_anew(control)
    unseen_weight = np.array(weight_m[control.unseen_m].sum())
    return control._replace(
        total_d=factor * control.total_d, unseen_weight=unseen_weight, rounding=factor * control.rounding
    )


def _summed_anew(control: Any, weight_m: FloatArray) -> Any:
    """Compute every weighted sum over clients again, wherever it is in a control variate's state."""
    if isinstance(control, OwnControlState):
        return summed_anew(control, weight_m)
    if not hasattr(control, "_fields"):
        return control
    summed = type(control)(*(_summed_anew(part, weight_m) for part in control))
    if "unseen_weight" in control._fields:
        return summed._replace(unseen_weight=np.array(weight_m[summed.unseen_m].sum()))
    return summed


def _check_shapes(sampler: str, resized: Any, fresh: Any, name: str = "state") -> None:
    if hasattr(fresh, "_fields"):
        for field, part, new in zip(fresh._fields, resized, fresh, strict=True):
            _check_shapes(sampler, part, new, field)
    elif np.shape(resized) != np.shape(fresh):
        raise CannotResizeError(
            f"{sampler} describes all clients jointly ({name!r} has shape {np.shape(resized)} and {np.shape(fresh)} is "
            "needed), so that nobody can join or be forgotten: set min_nodes to the number of all clients, or choose a "
            "new state_path (in your own sampler, let the names of arrays with one row per client end in '_m')"
        )
