"""Clients who join, and clients who are forgotten: a round's state for another population.

Those who were there keep what is remembered of them; newcomers begin as everybody began, with the mean score. The rules
follow the library's names: an array whose name ends in ``_m`` (or ``_md``, ``_mq``) has one row a client.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..estimators.controls import OwnControlState, summed_anew
from ..estimators.memory import MappedRows
from ..estimators.remote import RemoteControlState, begin_anew
from ..round import Plan, RoundState, init_round
from ..scale.persistent_array import alike
from ..types import FloatArray, IntArray

_PER_CLIENT = re.compile(r"_m[a-z]?$")
#: Arrays that follow from the population alone: they are made anew.
_FROM_POPULATION = {"weight_m", "score_m", "size_m", "num_examples_m", "aux_mq", "value_mq", "count_mc"}
#: Scores that only grow: one that began at nothing would stay behind for as long as the run is old.
_GROWING = {"total_m"}


class CannotGrowError(DeltaflError):
    """A sampler's memory is about all clients at once."""


def grow_state(plan: Plan, state: RoundState, weight_m: FloatArray, kept_k: Sequence[int] | None = None) -> RoundState:
    """The state for ``plan.population``, whose first clients are those of ``state``, in the same order.

    p_m, the draw probabilities of the practical samplers, are scaled so that each newcomer gets the mean. Sums over
    clients that a control keeps are formed again with the new weights; where clients keep their memory themselves, and
    its sum cannot follow the weights, it begins anew.

    Args:
        plan: The plan for the new population.
        state: The state of the old one.
        weight_m: Its weights.
        kept_k: The places of those who stay; None for all. The others are forgotten.

    Raises:
        CannotGrowError: If a sampler keeps an array per client under another name than ``..._m``.
    """
    state = state if kept_k is None else _kept(state, np.asarray(kept_k, dtype=np.int64))
    fresh = init_round(plan, state.params_d)
    sampler, control = _grown(state.sampler, fresh.sampler), _grown(state.control, fresh.control)
    _check_shapes(type(plan.sampler).__name__, sampler, fresh.sampler)
    if isinstance(control, RemoteControlState):
        # Its sum does not tell what was those clients' part of it who are forgotten.
        forgets = kept_k is not None
        control = begin_anew(control) if forgets else _reweighed(control, weight_m, plan.population.weight_m)
    else:
        control = _resummed(control, plan.population.weight_m)
    return state._replace(
        sampler=sampler,
        control=control,
        selected_m=_rows(state.selected_m, fresh.selected_m),
        responded_m=_rows(state.responded_m, fresh.responded_m),
    )


def _grown(old: Any, fresh: Any, name: str = "") -> Any:
    if hasattr(fresh, "_fields"):
        return type(fresh)(*(_grown(getattr(old, field), getattr(fresh, field), field) for field in fresh._fields))
    if name in _FROM_POPULATION:
        return fresh
    if name == "p_m":
        return alike(fresh, np.concatenate([old * (len(old) / len(fresh)), fresh[len(old) :]]))
    if name in _GROWING:
        return alike(fresh, np.concatenate([old, np.full(len(fresh) - len(old), np.mean(old))]))
    return _rows(old, fresh) if _PER_CLIENT.search(name) else old


def _kept(old: Any, kept_k: IntArray, name: str = "") -> Any:
    """The rows of those who stay, wherever there is one a client."""
    if hasattr(old, "_fields"):
        return type(old)(*(_kept(getattr(old, field), kept_k, field) for field in old._fields))
    if not _PER_CLIENT.search(name):
        return old
    if isinstance(old, tuple):
        return tuple(old[place] for place in kept_k.tolist())
    if isinstance(old, MappedRows):
        return old.kept(kept_k)
    rows = np.asarray(old)[kept_k]
    if name == "p_m":
        rows = rows / rows.sum() if rows.sum() > 0 else np.full(len(rows), 1 / len(rows))
    return alike(old, rows)


def _rows(old: Any, fresh: Any) -> Any:
    """The old rows, then what newcomers begin with."""
    if isinstance(fresh, tuple):
        return (*old, *fresh[len(old) :])
    if isinstance(old, MappedRows):
        return old.resized(len(fresh))
    return alike(fresh, np.concatenate([old, fresh[len(old) :]]))


def _reweighed(control: RemoteControlState, old_weight_m: FloatArray, weight_m: FloatArray) -> RemoteControlState:
    """The sum of what clients keep, with the new weights: by one factor if there is one, else all begin anew."""
    known_m = weight_m[: len(old_weight_m)]
    factor = known_m.sum() / old_weight_m.sum()
    if not np.allclose(known_m, factor * old_weight_m, rtol=1e-12, atol=0):
        return begin_anew(control)
    unseen_weight = np.array(weight_m[control.unseen_m].sum())
    return control._replace(
        total_d=factor * control.total_d, unseen_weight=unseen_weight, rounding=factor * control.rounding
    )


def _resummed(control: Any, weight_m: FloatArray) -> Any:
    """Weighted sums over clients, with the new weights, wherever they are in a control's memory."""
    if isinstance(control, OwnControlState):
        return summed_anew(control, weight_m)
    if not hasattr(control, "_fields"):
        return control
    resummed = type(control)(*(_resummed(part, weight_m) for part in control))
    if "unseen_weight" in control._fields:
        return resummed._replace(unseen_weight=np.array(weight_m[resummed.unseen_m].sum()))
    return resummed


def _check_shapes(sampler: str, grown: Any, fresh: Any, name: str = "state") -> None:
    if hasattr(fresh, "_fields"):
        for field in fresh._fields:
            _check_shapes(sampler, getattr(grown, field), getattr(fresh, field), field)
    elif np.shape(grown) != np.shape(fresh):
        raise CannotGrowError(
            f"{sampler} remembers {name!r} with shape {np.shape(grown)}, where {np.shape(fresh)} is needed once "
            "clients have joined; set min_nodes to the number of all clients (in a sampler of your own, give arrays "
            "with one row a client names that end in '_m')"
        )
