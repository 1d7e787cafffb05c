"""States in files: ``save_state`` writes one, ``load_state`` reads it."""

import re
import zlib
from dataclasses import fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DeltaflError, check_types
from .plan import Plan, RoundState, check_state
from .round import blank_state
from .scale.named_arrays import named_arrays
from .scale.sound import restored_state
from .store.machine import made_with, warn_of_other
from .store.sealed import read_sealed, write_sealed
from .types import AnyPath, Array


def save_state(path: AnyPath, state: RoundState, plan: Plan) -> None:
    """Write a state into one file, which is never seen half written and may be the one it was
    loaded from.

    It names the clients and the plan that the state belongs to, for with others it would be wrong
    without a sign. Plans of other clients, or with updates in a file of their own
    (``Plan.memory``), are refused by a ``DeltaflError``.
    """
    call = "save_state(path, state, plan)"
    check_types(call, path=(path, str, PathLike), state=(state, RoundState), plan=(plan, Plan))
    if plan.memory.folder is not None:
        raise DeltaflError(
            "this plan keeps rows in a file of their own, which a state file cannot hold"
        )
    check_state(plan, state)
    arrays = dict(named_arrays(state, shared=True))
    header = {**owner(plan), "method": plan.method, "made_with": made_with()}
    write_sealed(Path(path), arrays, header, users=True)


def load_state(path: AnyPath, plan: Plan) -> RoundState:
    """Read a saved state; rounds that follow are bit for bit those that would have followed the
    saved one.

    It is a snapshot: what happens to the file later changes nothing. One above 1 GiB is mapped
    into memory instead; do not write over its file in place (``cp``), but put a new file in its
    place (``mv``, ``save_state``), for as long as the state is used.

    ``plan`` is the one it was saved with, but for the cohort's size and ``response_floor``, on
    which no state depends. To go on with other clients or weights, load with the old plan and write
    ``resize_state(new, state, kept)``; with another method, begin with
    ``init_round(new, state.params_d)``. Files of other clients or another plan, or that are no such
    files, are refused by a ``DeltaflError``.
    """
    check_types("load_state(path, plan)", path=(path, str, PathLike), plan=(plan, Plan))
    cure = "put a copy back, or write it anew with save_state"
    arrays, saved = read_sealed(Path(path), cure, mapped=True, users=True)
    made = saved.pop("made_with", None)
    saved.pop("method", None)
    own = owner(plan)
    # Files from before costs were noted: the state has a checksum of them.
    saved = {"cost_m": own["cost_m"], **saved}
    # Also what the file alone has, such as a part of the user's own.
    for name in {**own, **saved}:
        if saved.get(name) != own.get(name):
            raise DeltaflError(
                f"the state in {path} belongs to a plan with {name} = {saved.get(name)}, and this "
                f"plan has {own.get(name)}; load it with the plan it was saved with"
            )
    warn_of_other(made, made_with(), str(path))
    params_d = arrays.get("state.params_d", np.zeros(0))
    # That it has one axis is looked at with everything else.
    template = blank_state(plan, np.zeros(params_d.size, np.float32))
    state: RoundState = restored_state(plan.sampler, template, arrays)
    return state


def owner(plan: Plan) -> dict[str, str]:
    """What a state belongs to, as texts: checksums of the clients, and the settings that it
    depends on.
    """
    population = plan.population
    return {
        "clients": str(population.num_clients),
        "weight_m": _checksum(population.weight_m, np.float64),
        "num_examples_m": _checksum(population.num_examples_m, np.int64),
        "aux_mq": _checksum(population.aux_mq, np.float64),
        "cost_m": _checksum(population.cost_m, np.float64),
        "sampler": written(plan.sampler),
        "estimator": _without_addresses(plan.rule.name),
        **plan.part_texts,
        "seed": str(plan.seed),
        # Not its folder, which is no part of the state.
        "memory": plan.memory.dtype,
    }


def written(part: object) -> str:
    """How a sampler or an optimizer is written; only its type where the text would hold an
    address in memory.
    """
    if not is_dataclass(part):
        return type(part).__name__
    own = vars(part)
    options = [f"{field.name}={own[field.name]!r}" for field in fields(part) if field.repr]
    return _without_addresses(f"{type(part).__qualname__}({', '.join(options)})")


def _without_addresses(text: str) -> str:
    """A text without the addresses of functions and objects, which differ from process to
    process.
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _checksum(array: Array | None, dtype: Any) -> str:
    """Shape and CRC-32: against mistakes, not against forgers, and several times as fast as
    BLAKE2.
    """
    if array is None:
        return "None"
    plain = np.ascontiguousarray(array, dtype)
    return f"{'x'.join(map(str, plain.shape))}:{zlib.crc32(plain.data):08x}"
