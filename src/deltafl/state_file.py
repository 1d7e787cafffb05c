"""States of rounds as named arrays, and as one file that millions of clients are read from as they are needed.

A state is nested NamedTuples of arrays; ``flatten`` names the arrays, ``unflatten`` puts them back. The simulator's
checkpoints and Flower's saved states are made of these. ``save_state`` and ``load_state`` are for servers at scale: the
file is mapped into memory, so that loading costs nothing, a round after it reads the pages it needs, and what it writes
stays in memory. The file is in the safetensors format, which other programs read; its metadata say which clients and
which plan the state belongs to, for with others it would be wrong and not look it.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DeltaflError
from .plan import Plan, RoundState
from .round import init_round
from .scale.persistent_array import PersistentArray, alike
from .scale.rows import MappedRows
from .scale.tree import SumTree
from .types import Population

Array = np.ndarray[Any, Any]
#: safetensors' names of types.
_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _TYPES.items()}
#: The sums of a tree follow its scores under this name.
_INNER = ".inner"
#: Where safetensors keeps texts, and the one that marks a state.
_TEXTS, _MARK = "__metadata__", "deltafl-state"
_VERSION = "1"
#: Arrays with these names have one row a client.
_PER_CLIENT = re.compile(r"_m[a-z]?$")


def flatten(state: Any, prefix: str = "state") -> Iterator[tuple[str, Array]]:
    """The arrays of nested NamedTuples with their dotted names, in order."""
    if hasattr(state, "_fields"):
        for field in state._fields:
            yield from flatten(getattr(state, field), f"{prefix}.{field}")
    elif isinstance(state, MappedRows):
        for name, array in state.journal().items():
            yield f"{prefix}.{name}", array
    else:
        yield prefix, np.asarray(state)


def unflatten(template: Any, arrays: Mapping[str, Array], prefix: str = "state") -> Any:
    """Put arrays back into the shape of a template; a whole number stays one.

    A field with a default, of which there is nothing, keeps it: the state is from before there was the field.

    Raises:
        DeltaflError: If an array is missing or has another shape: the checkpoint belongs to other settings.
    """
    if hasattr(template, "_fields"):
        there = [
            field
            for field in template._fields
            if f"{prefix}.{field}" in arrays or field not in template._field_defaults
        ]
        return type(template)(
            **{field: unflatten(getattr(template, field), arrays, f"{prefix}.{field}") for field in there}
        )
    if isinstance(template, MappedRows) and all(f"{prefix}.{name}" in arrays for name in template.journal()):
        return template.restored({name: arrays[f"{prefix}.{name}"] for name in template.journal()})
    if prefix not in arrays or arrays[prefix].shape != np.shape(template):
        raise DeltaflError(f"the checkpoint does not fit these settings ({prefix} differs); start in a new folder")
    return int(arrays[prefix]) if isinstance(template, int) else alike(template, arrays[prefix])


def settled(state: Any) -> Any:
    """The state with its changed rows in their files (``memory.py``): for states that a checkpoint holds."""
    if hasattr(state, "_fields"):
        return type(state)(*(settled(part) for part in state))
    return state.settled() if isinstance(state, MappedRows) else state


def save_state(path: str | os.PathLike[str], state: RoundState, plan: Plan) -> None:
    """Write a state into one file, which is never seen half written.

    Args:
        path: The file; it may be the one that the state was loaded from.
        state: The state.
        plan: The plan of its rounds; the file says which clients and which plan it belongs to.

    Raises:
        DeltaflError: If the state has rows in a file of their own (``memory.py``; such runs have checkpoints), has
            another number of clients than the plan, or holds an array of a type that the format does not have.
    """
    if len(state.selected_m) != plan.population.num_clients:
        raise DeltaflError(
            f"the state is of {len(state.selected_m)} clients and the plan of {plan.population.num_clients}; save it "
            "with the plan of its rounds"
        )
    # Wide types first: every array begins at a multiple of its width.
    arrays = dict(sorted(_parts(state, "state"), key=lambda part: -part[1].itemsize))
    text = json.dumps({_TEXTS: {_MARK: _VERSION, **owner(plan)}, **_places(arrays)}).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_state(path: str | os.PathLike[str], plan: Plan) -> RoundState:
    """Map a saved state into memory; rounds that follow are bit for bit those that would have followed the saved one.

    The clients' weights, sizes and what else is known of them are read once, to compare them with those of the file.

    Args:
        path: The file.
        plan: The plan that the state was saved with. The cohort's size and ``response_floor`` may be others: no state
            depends on them. Whoever wants to go on with another plan loads with the old one and goes on with the new.

    Raises:
        DeltaflError: If the file is no such file, does not say whose state it holds (files of earlier versions), or
            belongs to other clients or another plan.
    """
    arrays = _mapped(Path(path), owner(plan))
    m, params_d = plan.population.num_clients, arrays.get("state.params_d", np.zeros(0))
    # The form of the state, without m numbers: that of one client.
    aux_mq = plan.population.aux_mq
    one = replace(plan, population=Population.from_sizes([1], known=None if aux_mq is None else aux_mq[:1]), n=1)
    state: RoundState = _filled(init_round(one, np.zeros(params_d.shape)), arrays, "state", m)
    return state


def owner(plan: Plan) -> dict[str, str]:
    """What a state belongs to, as texts: checksums of the clients, and the settings that it hangs on."""
    population = plan.population
    aux_mq = population.aux_mq
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
        "memory": plan.memory.dtype,  # not its folder, which is no part of the state
    }


def written(part: object) -> str:
    """How a sampler or an optimizer is written; only its type where the text would hold an address in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part)) if is_dataclass(part) else type(part).__name__


def _checksum(array: Array, dtype: Any) -> str:
    """Shape and CRC-32: against mistakes, not against forgers, and several times as fast as BLAKE2."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return f"{'x'.join(map(str, plain.shape))}:{zlib.crc32(plain.data):08x}"


def _refuse_others(path: Path, texts: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise a ``DeltaflError`` that names the first thing in which the file's owner is not the plan."""
    if texts.get(_MARK) != _VERSION:
        raise DeltaflError(
            f"{path} does not say which clients and plan its state belongs to, as files of other programs and of other "
            "versions of deltafl do not; save the state anew with save_state(path, state, plan)"
        )
    for name, value in now.items():
        if texts.get(name) != value:
            raise DeltaflError(
                f"the state in {path} belongs to a plan with {name} = {texts.get(name)}, and this plan has {value}; "
                "load it with the plan it was saved with"
            )


def _places(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Type, shape and place in the file of each array."""
    header, end = dict[str, Any](), 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise DeltaflError(
                f"{name} has type {array.dtype}, which a state file does not hold; use one of "
                f"{', '.join(np.dtype(dtype).name for dtype in _TYPES.values())}"
            )
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    return header


def _parts(state: Any, prefix: str) -> Iterator[tuple[str, Array]]:
    """Names and arrays; those with versions are shared, not copied, and trees come with their sums."""
    if hasattr(state, "_fields"):
        for field in state._fields:
            yield from _parts(getattr(state, field), f"{prefix}.{field}")
    elif isinstance(state, MappedRows):
        raise DeltaflError(
            "this state keeps rows in a file of their own, which a state file cannot hold; see memory.py"
        )
    elif isinstance(state, PersistentArray):
        yield prefix, state.current().array_m
        if isinstance(state, SumTree):
            yield prefix + _INNER, state.current().inner
    else:
        yield prefix, np.asarray(state)


def _mapped(path: Path, now: Mapping[str, str]) -> dict[str, Array]:
    """The arrays of a file that belongs to the plan, mapped so that changes stay in memory."""
    try:
        whole = np.asarray(np.memmap(path, np.uint8, mode="c"))
        first = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:first].tobytes())
        _refuse_others(path, header.pop(_TEXTS, {}), now)
        return {
            name: whole[first + entry["data_offsets"][0] : first + entry["data_offsets"][1]]
            .view(_TYPES[entry["dtype"]])
            .reshape(entry["shape"])
            for name, entry in header.items()
        }
    except DeltaflError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeltaflError(f"{path} is no state file, or not all of it is there; write it anew") from error


def _filled(template: Any, arrays: Mapping[str, Array], prefix: str, m: int) -> Any:
    """The arrays in the form of the state of a single client; those with one row a client must have m rows."""
    if hasattr(template, "_fields"):
        return type(template)(
            *(_filled(getattr(template, field), arrays, f"{prefix}.{field}", m) for field in template._fields)
        )
    per_client = _PER_CLIENT.search(prefix) is not None
    fits = prefix in arrays and arrays[prefix].ndim == np.ndim(template)
    if not fits or (per_client and len(arrays[prefix]) != m):
        raise DeltaflError(f"the state file does not fit this plan ({prefix} differs); load it with the plan it had")
    if isinstance(template, SumTree):
        return SumTree(arrays[prefix], arrays.get(prefix + _INNER))
    if isinstance(template, PersistentArray):
        return PersistentArray(arrays[prefix])
    if per_client:
        return arrays[prefix]
    return int(arrays[prefix]) if isinstance(template, int) else np.array(arrays[prefix])
