"""States of rounds as named arrays, and as one file that millions of clients are read from as they are needed.

A state is nested NamedTuples of arrays; ``flatten`` names the arrays, ``unflatten`` puts them back. The simulator's
checkpoints and Flower's saved states are made of these. ``save_state`` and ``load_state`` are for servers at scale: the
file is mapped into memory, so that loading costs nothing, a round after it reads the pages it needs, and what it writes
stays in memory. The file is in the safetensors format, which other programs read.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .designs.tree import SumTree
from .errors import DeltaflError
from .estimators.memory import MappedRows
from .round import Plan, RoundState, init_round
from .types import Population
from .versions import Versioned, alike

Array = np.ndarray[Any, Any]
#: safetensors' names of types.
_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "U16": np.uint16,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _TYPES.items()}
#: The sums of a tree follow its scores under this name.
_INNER = ".inner"
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

    Raises:
        DeltaflError: If an array is missing or has another shape: the checkpoint belongs to other settings.
    """
    if hasattr(template, "_fields"):
        return type(template)(
            *(unflatten(getattr(template, field), arrays, f"{prefix}.{field}") for field in template._fields)
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


def save_state(path: Path, state: RoundState) -> None:
    """Write a state into one file, which is never seen half written.

    Args:
        path: The file; it may be the one that the state was loaded from.
        state: The state.

    Raises:
        DeltaflError: If the state has rows in a file of their own (``memory.py``); such runs have checkpoints.
    """
    # Wide types first: every array begins at a multiple of its width.
    arrays = dict(sorted(_parts(state, "state"), key=lambda part: -part[1].itemsize))
    header, end = dict[str, Any](), 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
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


def load_state(path: Path, plan: Plan) -> RoundState:
    """Map a saved state into memory; rounds that follow are bit for bit those that would have followed the saved one.

    Args:
        path: The file.
        plan: The plan of the rounds, with the same clients.

    Raises:
        DeltaflError: If the file is no such file, or belongs to other clients or another plan.
    """
    arrays = _mapped(path)
    m, params_d = plan.population.num_clients, arrays.get("state.params_d", np.zeros(0))
    # The form of the state, without m numbers: that of one client.
    known_mq = plan.population.known_mq
    one = replace(plan, population=Population.from_sizes([1], known=None if known_mq is None else known_mq[:1]), n=1)
    state: RoundState = _filled(init_round(one, np.zeros(params_d.shape)), arrays, "state", m)
    return state


def _parts(state: Any, prefix: str) -> Iterator[tuple[str, Array]]:
    """Names and arrays; those with versions are shared, not copied, and trees come with their sums."""
    if hasattr(state, "_fields"):
        for field in state._fields:
            yield from _parts(getattr(state, field), f"{prefix}.{field}")
    elif isinstance(state, MappedRows):
        raise DeltaflError(
            "this state keeps rows in a file of their own, which a state file cannot hold; see memory.py"
        )
    elif isinstance(state, Versioned):
        yield prefix, state.current().array_m
        if isinstance(state, SumTree):
            yield prefix + _INNER, state.current().inner
    else:
        yield prefix, np.asarray(state)


def _mapped(path: Path) -> dict[str, Array]:
    """The arrays of a file, mapped so that changes stay in memory."""
    try:
        whole = np.asarray(np.memmap(path, np.uint8, mode="c"))
        first = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:first].tobytes())
        return {
            name: whole[first + entry["data_offsets"][0] : first + entry["data_offsets"][1]]
            .view(_TYPES[entry["dtype"]])
            .reshape(entry["shape"])
            for name, entry in header.items()
        }
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
    if isinstance(template, Versioned):
        return Versioned(arrays[prefix])
    if per_client:
        return arrays[prefix]
    return int(arrays[prefix]) if isinstance(template, int) else np.array(arrays[prefix])
