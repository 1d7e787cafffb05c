"""States as named arrays.

A state is nested NamedTuples of arrays: ``named_arrays`` names the arrays, ``from_named_arrays``
puts them back. Checkpoints, Flower's saved states and the files of ``save_state`` hold such arrays
in the safetensors format.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..types import Array
from .persistent_array import PersistentArray
from .rows import MappedRows
from .tree import SumTree


def named_arrays(
    state: Any,
    prefix: str = "state",
    shared: bool = False,
) -> Iterator[tuple[str, Array]]:
    """The arrays of nested NamedTuples with their dotted names, in order.

    ``shared``: they share memory with the state, for files that are written at once.
    """
    if hasattr(state, "_fields") or isinstance(state, MappedRows | Mapping):
        parts = state
        if isinstance(state, MappedRows):
            # The rows since the last save; all others are in the file of the memory.
            parts = state.journal()
        elif not isinstance(state, Mapping):
            parts = state._asdict()
        for name, part in parts.items():
            yield from named_arrays(part, f"{prefix}.{name}", shared)
    elif shared and isinstance(state, PersistentArray):
        yield prefix, state.current().array_m
    else:
        yield prefix, _array(state, prefix)


def _array(held: Any, name: str) -> Array:
    """What a sampler of the user's own keeps may be anything."""
    with suppress(TypeError, ValueError):
        array = np.asarray(held)
        if array.dtype.kind in "biuf":
            return array
    raise DeltaflError(
        f"{name} is a {type(held).__name__}, which is not saved with a state: keep arrays and "
        "numbers, in a NamedTuple or a dict"
    )


def from_named_arrays(template: Any, arrays: Mapping[str, Array], prefix: str = "state") -> Any:
    """Put arrays, which belong to the state from now on, into the form of a template, a state of
    the same settings.

    A field of shape (0,) takes any. If an array is missing, or has another shape, the arrays belong
    to other settings: that is a ``DeltaflError``.
    """
    if hasattr(template, "_fields"):
        parts = from_named_arrays(template._asdict(), arrays, prefix)
        return type(template)(**parts)
    if isinstance(template, Mapping):
        known = {f"{prefix}.{name}" for name in template}
        for name in arrays:
            if name.startswith(f"{prefix}.") and not any(
                name == one or name.startswith(f"{one}.") for one in known
            ):
                raise DeltaflError(
                    f"the saved state has {name}, and a state begins without it; let a dict have "
                    "the same keys from the first round to the last"
                )
        return {
            name: from_named_arrays(part, arrays, f"{prefix}.{name}")
            for name, part in template.items()
        }
    if isinstance(template, MappedRows) and f"{prefix}.written" in arrays:
        return template.restored({name: arrays[f"{prefix}.{name}"] for name in template.journal()})
    array = arrays.get(prefix)
    # Rows that clients share would fill the memory as one array.
    if isinstance(template, tuple) and template:
        shape = (len(template), *template[0].shape)
    else:
        shape = np.shape(template)
    is_whole = not isinstance(template, int) or (array is not None and array.dtype.kind == "i")
    if array is None or not is_whole or shape not in (array.shape, (0,)):
        raise DeltaflError(
            f"the saved state does not fit these settings ({prefix} differs); start anew elsewhere"
        )
    # The sums of a tree are made anew of its scores: those of a file could say anything.
    if isinstance(template, PersistentArray):
        return type(template)(array)
    # Such as ``RoundState.round``, which is no array.
    if isinstance(template, int):
        return int(array)
    if isinstance(template, list):
        return array.tolist()
    return array


def bytes_in_ram(state: Any) -> int:
    """Bytes of the arrays of a state; rows that clients share, such as those without an update,
    count once.
    """
    arrays = dict[int, int]()

    def look(part: Any) -> None:
        # The other rows are in their file.
        if isinstance(part, MappedRows):
            part = (part.crc_m, *part.changed.values())
        if isinstance(part, Mapping):
            part = tuple(part.values())
        if isinstance(part, SumTree):
            part = (part.current().array_m, part.current().inner)
        elif isinstance(part, PersistentArray):
            part = (part.current().array_m,)
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
