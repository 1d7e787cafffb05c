"""A model's named arrays and the flat vector that the rounds work on. Knows no Flower.

Trained arrays (floating point) make up the flat vector; their difference is the update u_i that the estimate uses.
Buffers (floating point, by name) and counters (integers; booleans never change) become sent + sum_i h_i (received_i -
sent), with h_i >= 0 and sum 1: running variances must stay >= 0, which no unbiased weighting guarantees.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..io import Array
from ..server.screening import LARGEST_ENTRY
from ..types import FloatArray, Params

Arrays = dict[str, Array]

#: Name patterns of floating-point arrays that are statistics, not parameters: those of batch normalisation.
BUFFERS = ("*running_mean", "*running_var", "*moving_mean", "*moving_variance")
_VARIANCES = ("*running_var", "*moving_variance")


class Entry(NamedTuple):
    """One array of the model; ``dtype`` as NumPy names it, ``kind`` is "trained", "buffer" or "counter"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


class Layout(NamedTuple):
    """The arrays of a model, in order."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array], buffers: Sequence[str] = BUFFERS) -> "Layout":
        """Describe a model; floating-point arrays whose names match the patterns ``buffers`` are not trained."""
        entries = tuple(
            Entry(name, array.shape, str(array.dtype), _kind(name, array, buffers)) for name, array in arrays.items()
        )
        if not any(entry.kind == "trained" for entry in entries):
            raise DeltaflError("the model has no floating-point array to train; check 'buffers' and the initial arrays")
        return cls(entries)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays that make up the flat vector, in order."""
        return {entry.name: entry.shape for entry in self.entries if entry.kind == "trained"}

    def flatten(self, arrays: Mapping[str, Array]) -> Params:
        """The trained arrays as one float32 vector (d,), each in C order."""
        return np.concatenate([arrays[name].astype(np.float32).ravel() for name in self.trained])

    def rebuild(self, params_d: Params, rest: Mapping[str, Array]) -> Arrays:
        """The model as named arrays: trained ones from the flat vector, the others from ``rest``."""
        trained = split(params_d, self.trained)
        return {
            name: _narrowed(trained[name], dtype) if kind == "trained" else rest[name]
            for name, _, dtype, kind in self.entries
        }

    def rest(self, arrays: Mapping[str, Array]) -> Arrays:
        """The arrays that are not trained."""
        return {entry.name: arrays[entry.name] for entry in self.entries if entry.kind != "trained"}

    def fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with a client's arrays, or None; ``close_round`` checks trained values, as updates."""
        if set(arrays) != {entry.name for entry in self.entries}:
            return "the reply's arrays have other names than those that were sent"
        for entry in self.entries:
            array = arrays[entry.name]
            if array.shape != entry.shape:
                return f"array {entry.name!r} has shape {array.shape}, expected {entry.shape}"
            if array.dtype.kind != ("f" if entry.kind != "counter" else np.dtype(entry.dtype).kind):
                return f"array {entry.name!r} has type {array.dtype}, expected {entry.dtype}"
            fault = None if entry.kind == "trained" else _value_fault(entry, array)
            if fault is not None:
                return f"{entry.kind} {entry.name!r} has {fault}"
        return None


def split(flat_d: Params, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """A flat vector as named arrays of these shapes."""
    stops = np.cumsum([prod(shape) for shape in shapes.values()])
    parts = np.split(flat_d, stops[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _narrowed(array: Array, dtype: str) -> Array:
    """Within the range of float16, say: one infinite entry would spoil every honest reply, and none could repair it."""
    bound = min(float(np.finfo(dtype).max), float(np.finfo(array.dtype).max))
    return array.clip(-bound, bound).astype(dtype)


def update_of(sent: Mapping[str, Array], received: Mapping[str, Array]) -> Params:
    """Received - sent over the arrays in ``sent``, in that order, float32 (d,); overflowing entries become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [
            np.subtract(received[name], old, dtype=np.float64).astype(np.float32).ravel() for name, old in sent.items()
        ]
    return np.concatenate(parts)


def mean_rest(layout: Layout, sent: Arrays, replies: list[Arrays], coef_n: FloatArray) -> Arrays:
    """Buffers and counters after a round: sent + sum_i h_i (received_i - sent), h = coef / sum coef."""
    rest, total = layout.rest(sent), float(coef_n.sum())
    for entry in layout.entries if total > 0 else ():
        if entry.kind != "trained" and entry.dtype != "bool":
            rest[entry.name] = _mean(sent[entry.name], [reply[entry.name] for reply in replies], coef_n / total)
    return rest


def _kind(name: str, array: Array, buffers: Sequence[str]) -> str:
    if array.dtype.kind in "iub":
        return "counter"
    if array.dtype.kind != "f":
        raise DeltaflError(f"array {name!r} has type {array.dtype}; use floats, integers or booleans")
    return "buffer" if any(fnmatchcase(name, pattern) for pattern in buffers) else "trained"


def _value_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with a buffer or a counter, which may come in a wider type than the server keeps it in."""
    if array.dtype.kind == "b" or array.size == 0:
        return None
    if entry.kind == "counter":
        kept = np.iinfo(entry.dtype)
        fits = kept.min <= int(array.min()) <= int(array.max()) <= kept.max
        return None if fits else f"entries outside {kept.min} to {kept.max}, the range of {entry.dtype}"
    largest = min(LARGEST_ENTRY, float(np.finfo(entry.dtype).max))
    if not np.all(np.abs(array) <= largest):
        return f"NaN, or entries of a size above {largest:.3g}"
    is_variance = any(fnmatchcase(entry.name, pattern) for pattern in _VARIANCES)
    return "negative entries, impossible for a variance" if is_variance and not np.all(array >= 0) else None


def _mean(old: Array, replies: list[Array], share_n: FloatArray) -> Array:
    """Old + sum_i h_i (new_i - old); of integers rounded, and between the smallest and the largest reply."""
    is_float = old.dtype.kind == "f"
    wide: Any = np.float64 if is_float else np.longdouble  # float64 does not hold all 64-bit integers
    change: Any = np.zeros(old.shape, dtype=wide)
    for share, new in zip(share_n, replies, strict=True):
        change += share * (new.astype(wide) - old.astype(wide))
    mean = old.astype(wide) + (change if is_float else np.rint(change))
    if not is_float:
        mean = np.clip(mean, np.minimum.reduce(replies), np.maximum.reduce(replies))
    return np.asarray(mean).astype(old.dtype)
