"""The clients of a federation: who they are, and how a round's state follows when they join,
change or leave.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from ..errors import DeltaflError
from ..estimators.control_variates import (
    OwnControlState,
    RegressionControlState,
    summed_anew,
    with_new_aux,
)
from ..estimators.two_phase import LastResidualsState, TwoPhase, residuals_summed_anew
from ..io import checked
from ..plan import Plan, RoundState
from ..round import init_round
from ..scale.named_arrays import named_arrays
from ..scale.persistent_array import PersistentArray
from ..scale.rows import MappedRows
from ..types import FloatArray

#: What to write where the answer to a registration query is no answer.
CURE = "call deltafl.flower.register, or make a deltafl.nvflare.DeltaClient, in the client's app"
_PER_CLIENT = re.compile(r"_m[a-z]?$")
#: Arrays that depend on the population alone are computed again: these in all states, the others in
#: the library's.
_IN_ALL_STATES = {"weight_m", "size_m", "aux_mq"}
_FROM_POPULATION = _IN_ALL_STATES | {"factor_m", "score_m", "value_mq", "prior_m", "count_mc"}
_FROM_POPULATION |= {"fitted_qd"}  # of ``two_phase.py``
#: A newcomer begins as if it had been known for so many rounds, in which it was away as often as
#: the others.
PRIOR_ROUNDS = 10


class ClientInfo(NamedTuple):
    """What a client reports: its number of examples; auxiliary variables, or its answer to a
    census, () for none.
    """

    num_examples: int
    aux: tuple[float, ...] = ()


class Report(BaseModel):
    """What a client may report of its data."""

    num_examples: Annotated[int, Field(strict=True, ge=1, le=2**40)]
    aux: list[Annotated[float, Field(ge=-1e9, le=1e9)]]


def read_info(num_examples: object, aux: object, num_aux: int) -> ClientInfo:
    """What a client reports, checked: it may be anything."""
    aux = aux if num_aux else []
    if not isinstance(aux, list) or len(aux) != num_aux:
        sent = len(aux) if isinstance(aux, list) else "none"
        wanted = f"{num_aux} auxiliary variables of each client"
        raise DeltaflError(
            f"the server wants {wanted}, and the client sent {sent}; give aux=... to register"
        )
    report = checked(
        Report,
        {"num_examples": num_examples, "aux": aux},
        "the answer to the registration query",
        CURE,
    )
    return ClientInfo(report.num_examples, tuple(report.aux))


class CannotResizeError(DeltaflError):
    """The sampler's state cannot be resized: it describes all clients jointly."""


def resize_state(
    plan: Plan, state: RoundState, old_weight_m: FloatArray, kept_k: Sequence[int] | None = None
) -> RoundState:
    """The state for ``plan.population``: the clients kept from ``state`` in their order, then
    newcomers.

    An array whose name ends in ``_m``, ``_md``, ``_mq`` ... has one row per client. Newcomers start
    as everybody did, with the mean score. Sums over clients are computed again with the new
    weights, or reset where they cannot follow.
    """
    fresh = init_round(plan, state.params_d)
    resized: RoundState = _joined(state, _resized(state, fresh, kept_k, "state"), kept_k)
    for (name, array), (_, expected) in zip(
        named_arrays(resized.sampler, ""), named_arrays(fresh.sampler, ""), strict=True
    ):
        if array.shape != expected.shape:
            raise CannotResizeError(
                f"{type(plan.sampler).__name__} describes all clients jointly ({name[1:]!r} has "
                f"shape {array.shape} "
                f"and {expected.shape} is needed), so that nobody can join or be forgotten: set "
                "min_nodes to the "
                "number of all clients, or choose a new state_path (in your own sampler, let the "
                "names of arrays with "
                "one row per client end in '_m')"
            )
    weight_m = plan.population.weight_m
    control = resized.control
    if isinstance(two_phase := plan.rule.control, TwoPhase):
        control = two_phase.with_answers(
            control, fresh.control, len(old_weight_m if kept_k is None else kept_k)
        )
    return resized._replace(control=_summed_anew(control, weight_m))


def _joined(old: RoundState, resized: RoundState, kept_k: Sequence[int] | None) -> RoundState:
    """Note when newcomers joined, and give them ``PRIOR_ROUNDS`` rounds of the others' mean
    availability.
    """
    which = np.arange(len(old.selected_m)) if kept_k is None else np.asarray(kept_k, dtype=np.int64)
    joined_k = old.joined_m[which] if len(old.joined_m) else np.zeros(len(which), np.int64)
    missed_k = np.asarray(old.missed_m)[which]
    newcomers = len(resized.selected_m) - len(which)
    if newcomers == 0 and len(old.joined_m) == 0:
        return resized
    prior = min(PRIOR_ROUNDS, old.round)
    away = round(prior * float(np.mean(missed_k / np.maximum(old.round - joined_k, 1))))
    return resized._replace(
        joined_m=np.append(joined_k, np.full(newcomers, old.round - prior)),
        missed_m=PersistentArray(
            np.append(missed_k, np.full(newcomers, away)).astype(missed_k.dtype)
        ),
    )


def _resized(old: Any, fresh: Any, kept_k: Sequence[int] | None, name: str) -> Any:
    if hasattr(fresh, "_fields"):
        own = not type(fresh).__module__.startswith(
            "deltafl."
        )  # what such a state calls score_m may be learned
        names = (
            f"own.{field}" if own and field not in _IN_ALL_STATES else field
            for field in fresh._fields
        )
        parts = zip(old, fresh, names, strict=True)
        resized = type(fresh)(*(_resized(part, new, kept_k, field) for part, new, field in parts))
        if isinstance(old, RegressionControlState):
            return with_new_aux(
                resized, old.aux_mq if kept_k is None else old.aux_mq[np.asarray(kept_k, dtype=int)]
            )
        return resized
    if isinstance(fresh, dict):
        return {key: _resized(old[key], part, kept_k, key) for key, part in fresh.items()}
    if name in _FROM_POPULATION:
        return fresh
    if name == "joined_m" or not _PER_CLIENT.search(name):  # ``_joined`` sees to it
        return old
    if isinstance(fresh, tuple):
        rows = old if kept_k is None else tuple(old[index] for index in kept_k)
        return (*rows, *fresh[len(rows) :])
    if isinstance(old, MappedRows):
        return (old if kept_k is None else old.kept(np.asarray(kept_k, dtype=np.int64))).resized(
            len(fresh)
        )
    if np.shape(old)[1:] != np.shape(fresh)[1:]:  # codes, of which there were none yet
        return fresh
    rows = old if kept_k is None else np.asarray(old)[np.asarray(kept_k, dtype=np.int64)]
    newcomers = fresh[len(rows) :]
    if name == "p_m":  # draw probabilities: each newcomer gets the mean
        if kept_k is not None:
            rows = rows / rows.sum() if rows.sum() > 0 else np.full(len(rows), 1 / len(rows))
        rows = rows * (len(rows) / len(fresh))
    elif (
        name == "total_m"
    ):  # over all rounds: a newcomer that started at 0 would lag behind for as long
        newcomers = np.full(len(newcomers), np.mean(rows)).astype(fresh.dtype)
    resized = np.concatenate([rows, newcomers])
    return type(fresh)(resized) if isinstance(fresh, PersistentArray) else resized


def _summed_anew(control: Any, weight_m: FloatArray) -> Any:
    """Compute every weighted sum over clients again, wherever it is in a control variate's
    state.
    """
    if isinstance(control, OwnControlState):
        return summed_anew(control, weight_m)
    if isinstance(control, LastResidualsState):
        return residuals_summed_anew(control, weight_m)
    if not hasattr(control, "_fields"):
        return control
    summed = type(control)(*(_summed_anew(part, weight_m) for part in control))
    if "unseen_weight" in control._fields:
        return summed._replace(unseen_weight=np.array(weight_m[summed.unseen_m].sum()))
    return summed
