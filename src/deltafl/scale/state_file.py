"""States as named arrays, and in files.

A state is nested NamedTuples of arrays: ``flatten`` names the arrays, ``unflatten`` puts them back. Checkpoints,
Flower's saved states and the files of ``save_state`` hold such arrays in the safetensors format. ``load_state`` maps
its file into memory, where what rounds write stays, and reads it once to compare its checksum.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..io import Array, read_json, read_tensors, write_atomically, write_tensors
from ..round import Plan, RoundState, blank_state
from ..types import Population
from .persistent_array import PersistentArray
from .rows import MappedRows
from .tree import SumTree

#: The text that marks a state's file.
_MARK, _VERSION, _SEAL = "deltafl-state", "3", "crc32"
#: The sums of a tree follow its scores under this name.
_INNER = ".inner"


def flatten(state: Any, prefix: str = "state", shared: bool = False) -> Iterator[tuple[str, Array]]:
    """The arrays of nested NamedTuples with their dotted names, in order.

    ``shared``: they share memory with the state, and the sums of trees follow: for files that are written at once.
    """
    if hasattr(state, "_fields") or isinstance(state, MappedRows):
        parts = state.journal() if isinstance(state, MappedRows) else state._asdict()
        for name, part in parts.items():
            yield from flatten(part, f"{prefix}.{name}", shared)
    elif shared and isinstance(state, PersistentArray):
        yield prefix, state.current().array_m
        if isinstance(state, SumTree):
            yield prefix + _INNER, state.current().inner
    else:
        yield prefix, np.asarray(state)


def unflatten(template: Any, arrays: Mapping[str, Array], prefix: str = "state", any_shape: bool = False) -> Any:
    """Put arrays, which belong to the state from now on, into the form of a template, a state of the same settings.

    A field with a default keeps it if there is no array for it. If one is missing, or has another shape, the arrays
    belong to other settings: that is a ``DeltaflError``.
    """
    if hasattr(template, "_fields"):
        parts = {}
        for field, part in zip(template._fields, template, strict=True):
            name = f"{prefix}.{field}"
            if name in arrays or field not in template._field_defaults:
                parts[field] = unflatten(part, arrays, name, any_shape)
        return type(template)(**parts)
    if isinstance(template, MappedRows) and f"{prefix}.written" in arrays:
        return template.restored({name: arrays[f"{prefix}.{name}"] for name in template.journal()})
    array = arrays.get(prefix)
    if array is None or not (any_shape or array.shape == np.shape(template)):
        raise DeltaflError(f"the saved state does not fit these settings ({prefix} differs); start anew elsewhere")
    if isinstance(template, SumTree):
        return SumTree(array, arrays.get(prefix + _INNER))
    if isinstance(template, PersistentArray):
        return PersistentArray(array)
    return int(array) if isinstance(template, int) else array


def bytes_in_ram(state: Any) -> int:
    """Bytes of the arrays of a state; rows that clients share, such as those without an update, count once."""
    arrays = dict[int, int]()

    def look(part: Any) -> None:
        if isinstance(part, MappedRows):
            part = (part.crc_m, *part.changed.values())
        if isinstance(part, PersistentArray):
            part = tuple(array for _, array in flatten(part, shared=True))
        if isinstance(part, tuple):
            for inner in part:
                if type(inner) is np.ndarray:  # a memory has a row per client: no call for each
                    arrays[id(inner)] = inner.nbytes
                else:
                    look(inner)
        else:
            arrays[id(part)] = np.asarray(part).nbytes

    look(state)
    return sum(arrays.values())


def settled(state: Any) -> Any:
    """The state with its changed rows in their files (``rows.py``): for states that a checkpoint holds."""
    if hasattr(state, "_fields"):
        return type(state)(*(settled(part) for part in state))
    return state.settled() if isinstance(state, MappedRows) else state


class Note(NamedTuple):
    """Which round's state the rows in a folder belong to, and of which run."""

    round: int
    owner: str


def note_round(folder: Path, round: int, owner: str) -> None:
    """Note which round's state the rows in a folder belong to, once all of them are there; nothing without a folder."""
    if folder.is_dir():
        write_atomically(folder / "round", json.dumps(Note(round, owner)) + "\n", private=True)


def noted(folder: Path) -> Note | None:
    """The note that was written last; None if none was."""
    if not (folder / "round").is_file():
        return None
    match read_json(folder / "round"):
        case [int(round), str(owner)]:
            return Note(round, owner)
    raise DeltaflError(f"{folder / 'round'} does not say to which round the rows beside it belong; put a copy back")


def save_state(path: str | os.PathLike[str], state: RoundState, plan: Plan) -> None:
    """Write a state into one file, which is never seen half written and may be the one it was loaded from.

    It names the clients and the plan that the state belongs to, for with others it would be wrong without a sign. Plans
    of other clients, or with updates in a file of their own (``Plan.memory``), are refused by a ``DeltaflError``.
    """
    if not isinstance(state, RoundState):
        raise DeltaflError(f"state is of type {type(state).__name__}; write save_state(path, state, plan)")
    m = plan.population.num_clients
    if len(state.selected_m) != m:
        raise DeltaflError(f"the state is of {len(state.selected_m)} clients and the plan of {m}; give its own plan")
    if plan.memory.folder is not None:
        raise DeltaflError("this plan keeps rows in a file of their own, which a state file cannot hold")
    write_sealed(Path(path), dict(flatten(state, shared=True)), {_MARK: _VERSION, **owner(plan)})


def load_state(path: str | os.PathLike[str], plan: Plan) -> RoundState:
    """Map a saved state into memory; rounds that follow are bit for bit those that would have followed the saved one.

    ``plan`` is the one it was saved with, but for the cohort's size and ``response_floor``, on which no state depends.
    To go on with another plan, load with the old one and go on with the new. Files of other clients or another plan, or
    that are no such files, are refused by a ``DeltaflError``.
    """
    arrays, texts = read_sealed(Path(path), "put a copy back, or write it anew with save_state")
    if texts.get(_MARK) != _VERSION:
        raise DeltaflError(f"{path} does not say which clients and plan its state belongs to; write it with save_state")
    for name, value in {**dict.fromkeys(_OPTIONAL), **owner(plan)}.items():
        if texts.get(name) != value:
            other = f"a plan with {name} = {texts.get(name)}, and this plan has {value}"
            raise DeltaflError(f"the state in {path} belongs to {other}; load it with the plan it was saved with")
    # The form of the state, that of one client: m numbers need not be made.
    aux_mq, params_d = plan.population.aux_mq, arrays.get("state.params_d", np.zeros(0))
    one = replace(plan, population=Population.from_sizes([1], aux=None if aux_mq is None else aux_mq[:1]), n=1)
    template = blank_state(one, np.zeros(params_d.shape, dtype=np.float32))
    state: RoundState = unflatten(template, arrays, any_shape=True)
    return state


def write_sealed(path: Path, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Write a file for its owner alone, with the CRC-32 of all that it says among its texts."""
    write_tensors(path, arrays, {**texts, _SEAL: _seal(arrays, texts)}, private=True)


def read_sealed(path: Path, cure: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays and texts of such a file; a ``DeltaflError`` that ends in ``cure`` if it is not as it was written."""
    arrays, texts = read_tensors(path, cure)
    checksum = texts.pop(_SEAL, None)
    if checksum != _seal(arrays, texts):
        why = "has no checksum, so that another version wrote it" if checksum is None else "is not as it was written"
        raise DeltaflError(f"{path} {why}; {cure}")
    return arrays, texts


def _seal(arrays: Mapping[str, Array], texts: Mapping[str, str]) -> str:
    checksum = zlib.crc32(json.dumps(texts).encode())
    for name, array in sorted(arrays.items()):
        checksum = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{checksum:08x}"


#: What ``owner`` names only where a plan has it.
_OPTIONAL = ("scaffold", "average", "clip", "dp")


def owner(plan: Plan) -> dict[str, str]:
    """What a state belongs to, as texts: checksums of the clients, and the settings that it depends on."""
    population, aux_mq = plan.population, plan.population.aux_mq
    optional = zip(_OPTIONAL, (plan.scaffold, float(plan.average), plan.clip, plan.dp), strict=True)
    return {
        "clients": str(population.num_clients),
        "weight_m": _checksum(population.weight_m, np.float64),
        "num_examples_m": _checksum(population.num_examples_m, np.int64),
        "aux_mq": "None" if aux_mq is None else _checksum(aux_mq, np.float64),
        "sampler": written(plan.sampler),
        "estimator": plan.rule.name,
        "server_optimizer": written(plan.server_optimizer),
        "seed": str(plan.seed),
        "mime": str(float(plan.mime)),
        "norm_guard": str(None if plan.norm_guard is None else float(plan.norm_guard)),
        **{name: str(value) for name, value in optional if value},
        "memory": plan.memory.dtype,  # not its folder, which is no part of the state
    }


def written(part: object) -> str:
    """How a sampler or an optimizer is written; only its type where the text would hold an address in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part)) if is_dataclass(part) else type(part).__name__


def _checksum(array: Array, dtype: Any) -> str:
    """Shape and CRC-32: against mistakes, not against forgers, and several times as fast as BLAKE2."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return f"{'x'.join(map(str, plain.shape))}:{zlib.crc32(plain.data):08x}"
