"""Whether a state that comes from a file is one that rounds can have left.

A checksum shows damage; it does not show that the numbers make sense. So a state is judged by what
its classes declare, whichever host loads it: each array has the type and shape that ``init`` of the
same plan gives it; numbers are finite, whole ones at most 2^53; what moves the model is at most
``LARGEST_STEP``. A field that allows more or less says so by its type (``types.Within``), and what
several fields have in common is said by a method of the state, ``is_consistent``.

Of your own classes only what they declare is judged: what their numbers mean is theirs.
"""

from collections.abc import Iterator, Mapping
from inspect import get_annotations
from typing import Any, get_args

import numpy as np

from ..errors import DeltaflError, bounds_of
from ..types import LARGEST_AUX, LARGEST_STEP, Array, Within, is_ours, read_only
from .named_arrays import from_named_arrays
from .persistent_array import PersistentArray
from .rows import MappedRows, row_values

#: Numbers that are looked at, at once.
_AT_ONCE = 2**20


def restored_state(sampler: Any, template: Any, arrays: Mapping[str, Array]) -> Any:
    """The ``RoundState`` that some named arrays are; one that no round leaves is refused.

    ``template`` is that of the same plan before the first round.
    """
    state = from_named_arrays(template, arrays)
    state = state._replace(
        params_d=read_only(state.params_d),
        sampler=sampler.restored(state.sampler, template.sampler),
    )
    for name in ("weights_crc", "method_crc"):
        if getattr(state, name) != getattr(template, name):
            raise not_sound(f"state.{name} is that of another plan")
    for name, fault in _faults(state, template, "state", state.round):
        raise not_sound(f"{name} {fault}")
    return state


def restored_part(
    template: Any,
    arrays: Mapping[str, Array],
    name: str,
    declared: Any = Any,
) -> Any:
    """A part of a saved state, of which ``declared`` is the type, judged as a whole state is."""
    part = from_named_arrays(template, arrays, name)
    for place, fault in _faults(part, template, name, 0, declared):
        raise not_sound(f"{place} {fault}")
    return part


def not_sound(fault: str) -> DeltaflError:
    """The error for a saved state with a fault."""
    return DeltaflError(
        f"the saved state is not as rounds leave it: {fault}; put a copy back, or start anew "
        "elsewhere"
    )


def _faults(
    value: Any,
    before: Any,
    name: str,
    round: int,
    declared: Any = Any,
) -> Iterator[tuple[str, str]]:
    """What is wrong with a part of a state, by name."""
    if isinstance(before, Mapping):
        for key, part in before.items():
            yield from _faults(value[key], part, f"{name}.{key}", round)
    elif hasattr(before, "_fields"):
        kind = type(before)
        hints = get_annotations(kind)
        # What other numbers of a user's class mean, nobody here knows.
        if not is_ours(before):
            hints = {field: hint for field, hint in hints.items() if _limit(hint)}
        inner = value._asdict()
        for field, part in before._asdict().items():
            hint = hints.get(field, Any)
            yield from _faults(inner[field], part, f"{name}.{field}", round, hint)
        if hasattr(kind, "is_consistent") and not value.is_consistent():
            yield name, "has fields that contradict each other"
    elif declared is not Any:
        fault = _type_fault(value, before) or _value_fault(value, name, round, _limit(declared))
        if fault is not None:
            yield name, fault


def _limit(declared: Any) -> Within | None:
    return next((one for one in get_args(declared) if isinstance(one, Within)), None)


def _type_fault(value: Any, before: Any) -> str | None:
    if isinstance(before, int | MappedRows):  # each is restored as what it is
        return None
    # Rows may be a tuple of them, or of none where a model has none.
    one = next(iter(before), np.zeros(0)) if isinstance(before, tuple) else before
    expected = one.dtype
    # Counts take a wider type once they need it.
    wider = isinstance(before, PersistentArray) and value.dtype.kind == expected.kind == "i"
    if value.dtype == expected or wider:
        return None
    return f"has type {value.dtype}, expected {expected}"


def _value_fault(
    value: Any,
    name: str,
    round: int,
    limit: Within | None,
) -> str | None:
    # The letters of a name are its axes: what has one of parameters moves the model.
    largest = LARGEST_STEP if "d" in name.rpartition("_")[2] else LARGEST_AUX
    low = -largest
    high = largest
    unknown = False
    if limit is not None:
        interval = limit.interval.replace("round", str(round)).replace("next", str(round + 1))
        low, high = bounds_of(interval)
        unknown = limit.unknown
    for part in _parts(value):
        if part.dtype.kind in "iu" and limit is None:
            low = -(2.0**53)
            high = 2.0**53
        # A bound that a narrow type cannot hold would be infinite, and infinity within it.
        number = part.astype(np.float64)
        # Negated, as NaN is on neither side of a bound.
        bad = ~((number >= low) & (number <= high))
        if unknown:
            bad &= ~np.isnan(number)
        if bad.any():
            return f"holds {part[bad][0]:g}, expected {low:g} to {high:g}"
    return None


def _parts(value: Any) -> Iterator[Array]:
    """The numbers, some rows at once."""
    # Rows in a file are looked at when they are read.
    if isinstance(value, MappedRows):
        yield from map(row_values, value.changed.values())
        return
    array = np.atleast_1d(value)
    rows = max(1, _AT_ONCE // max(1, array[:1].size))
    for first in range(0, len(array), rows):
        yield row_values(array[first : first + rows])
