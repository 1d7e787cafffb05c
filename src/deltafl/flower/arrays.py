"""A model's named arrays and the flat vector that the rounds work on. No Flower here: arrays in, arrays out.

Three kinds of arrays travel in one record, and each has its own way through a round:

========= ====================================== ============================================================
kind      which                                  what the server does with the replies
========= ====================================== ============================================================
trained   floating point, not named as a buffer  its flat difference is the update u_i that the estimate uses
buffer    floating point, named as a buffer      sent + sum_i h_i (received_i - sent), h_i >= 0 with sum 1
counter   integers and truth values              the same, rounded; truth values stay as they are
========= ====================================== ============================================================

Buffers take a convex mean (the estimate's coefficients divided by their sum) because running variances must stay >= 0,
which no unbiased weight can promise; the server optimizer never sees them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..replies import LARGEST_ENTRY
from ..types import FloatArray, Params

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

#: Patterns of the names of floating-point arrays that are statistics, not parameters: those of batch normalisation.
BUFFERS = ("*running_mean", "*running_var", "*moving_mean", "*moving_variance")
#: Those of them that are never negative.
VARIANCES = ("*running_var", "*moving_variance")


class Entry(NamedTuple):
    """One array of the model.

    Attributes:
        name: Its name in the record.
        shape: Its shape.
        dtype: NumPy's name of its type, such as ``"float32"``.
        kind: ``"trained"``, ``"buffer"`` or ``"counter"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


class Layout(NamedTuple):
    """The arrays of a model in order, and which of them are trained."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array], buffers: Sequence[str] = BUFFERS) -> "Layout":
        """Describe a model.

        Args:
            arrays: The initial model.
            buffers: Patterns (``*`` for anything) of names of floating-point arrays that are not trained.

        Raises:
            DeltaflError: If there is nothing to train, or an array holds neither numbers nor truth values, or NaN.
        """
        entries = tuple(
            Entry(name, array.shape, str(array.dtype), _kind(name, array, buffers)) for name, array in arrays.items()
        )
        if not any(entry.kind == "trained" for entry in entries):
            raise DeltaflError("the model has no floating-point array to train; check 'buffers' and the initial arrays")
        for entry in entries:
            if entry.kind != "counter" and not np.all(np.isfinite(arrays[entry.name])):
                raise DeltaflError(f"the initial array {entry.name!r} has NaN or infinite entries")
        return cls(entries)

    @property
    def trained(self) -> list[Entry]:
        """The arrays that make up the flat vector, in order."""
        return [entry for entry in self.entries if entry.kind == "trained"]

    @property
    def num_params(self) -> int:
        """The length d of the flat vector."""
        return sum(prod(entry.shape) for entry in self.trained)

    def flatten(self, arrays: Mapping[str, Array]) -> Params:
        """The trained arrays as one float32 vector (d,), each in C order."""
        return np.concatenate([arrays[entry.name].astype(np.float32).ravel() for entry in self.trained])

    def rebuild(self, params_d: Params, rest: Mapping[str, Array]) -> Arrays:
        """The model as named arrays: trained ones from the flat vector, the others from ``rest``.

        What a narrow type such as float16 cannot hold becomes its largest number: an infinite entry would make every
        honest reply useless, and no reply could repair the model.
        """
        arrays: Arrays = {}
        start = 0
        for entry in self.entries:
            if entry.kind == "trained":
                stop = start + prod(entry.shape)
                part = params_d[start:stop].reshape(entry.shape)
                bound = float(np.finfo(entry.dtype).max)
                if bound < np.finfo(part.dtype).max:
                    part = part.clip(-bound, bound)
                arrays[entry.name] = part.astype(entry.dtype)
                start = stop
            else:
                arrays[entry.name] = rest[entry.name]
        return arrays

    def rest(self, arrays: Mapping[str, Array]) -> Arrays:
        """The arrays that are not trained."""
        return {entry.name: arrays[entry.name] for entry in self.entries if entry.kind != "trained"}

    def fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with a client's arrays, or None; trained values are judged later, as updates."""
        if set(arrays) != {entry.name for entry in self.entries}:
            return "the reply's arrays have other names than those that were sent"
        for entry in self.entries:
            array = arrays[entry.name]
            if array.shape != entry.shape:
                return f"array {entry.name!r} has shape {array.shape}, expected {entry.shape}"
            if array.dtype.kind not in ("f" if entry.kind != "counter" else np.dtype(entry.dtype).kind):
                return f"array {entry.name!r} has type {array.dtype}, expected {entry.dtype}"
            fault = _REST_FAULTS[entry.kind](entry, array)
            if fault is not None:
                return f"{entry.kind} {entry.name!r} has {fault}"
        return None

    def update(self, received: Mapping[str, Array], sent: Mapping[str, Array]) -> Params:
        """u_i = received - sent over the trained arrays, float32 (d,); entries that overflow become infinite."""
        return update_of({entry.name: sent[entry.name] for entry in self.trained}, received)


def _trained_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with trained values that came in a wider type than the model's, or None."""
    if array.dtype == entry.dtype:
        return None
    with np.errstate(over="ignore"):
        kept = array.astype(entry.dtype)
    if np.any(np.isinf(kept) & np.isfinite(array)):
        return f"entries that {entry.dtype} cannot hold"
    return None


def _buffer_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with a client's buffer, in the type in which the server would keep it, or None."""
    with np.errstate(over="ignore"):
        kept = array.astype(entry.dtype)
    if not np.all(np.isfinite(kept)):
        return "NaN or infinite entries"
    if not np.all(np.abs(kept) <= LARGEST_ENTRY):
        return f"entries above {LARGEST_ENTRY:.0e}"
    if any(fnmatchcase(entry.name, pattern) for pattern in VARIANCES) and not np.all(kept >= 0):
        return "negative entries, which no variance has"
    return None


def _counter_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with a client's integers, which may come in a wider type, or None."""
    if array.dtype.kind == "b" or array.size == 0:
        return None
    kept = np.iinfo(entry.dtype)
    if not kept.min <= int(array.min()) <= int(array.max()) <= kept.max:
        return f"entries outside {kept.min} to {kept.max}, which are those of {entry.dtype}"
    return None


_REST_FAULTS: dict[str, Callable[[Entry, Array], str | None]] = {
    "trained": _trained_fault,
    "buffer": _buffer_fault,
    "counter": _counter_fault,
}


def update_of(sent: Mapping[str, Array], received: Mapping[str, Array]) -> Params:
    """Received - sent over the arrays that were sent, in their order, float32 (d,); what overflows becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [
            np.subtract(received[name], old, dtype=np.float64).astype(np.float32).ravel() for name, old in sent.items()
        ]
    return np.concatenate(parts)


def _kind(name: str, array: Array, buffers: Sequence[str]) -> str:
    if array.dtype.kind in "iub":
        return "counter"
    if array.dtype.kind != "f":
        raise DeltaflError(f"array {name!r} has type {array.dtype}; use floats, integers or truth values")
    return "buffer" if any(fnmatchcase(name, pattern) for pattern in buffers) else "trained"


def mean_rest(layout: Layout, sent: Arrays, received: Iterable[Mapping[str, Array]], coef_n: FloatArray) -> Arrays:
    """Buffers and counters after a round: sent + sum_i h_i (received_i - sent), h = coef / sum coef.

    Args:
        layout: The model.
        sent: What the clients were sent; it is what remains if nobody replied.
        received: The used replies.
        coef_n: float64 (n,), >= 0, what each of them counts in the estimate.
    """
    total = float(coef_n.sum())
    if total <= 0:
        return layout.rest(sent)
    replies = list(received)
    rest: Arrays = {}
    for entry in layout.entries:
        if entry.kind == "trained":
            continue
        old = sent[entry.name]
        rest[entry.name] = old
        if old.dtype.kind == "b":
            continue
        here = [reply[entry.name] for reply in replies]
        mean = _mean_counter if entry.kind == "counter" else _mean_buffer
        rest[entry.name] = mean(old, here, coef_n / total)
    return rest


def _mean_buffer(old: Array, replies: list[Array], share_n: FloatArray) -> Array:
    """Old + sum_i h_i (reply_i - old) of floats."""
    change = np.zeros(old.shape)
    for share, new in zip(share_n, replies, strict=True):
        change += share * (new.astype(np.float64) - old.astype(np.float64))
    return np.asarray(old.astype(np.float64) + change).astype(old.dtype)


def _mean_counter(old: Array, replies: list[Array], share_n: FloatArray) -> Array:
    """The same of integers, rounded, and between the smallest and the largest of them.

    Large ones that nobody changed stay what they are. Distances are taken modulo 2^64 from the smaller to the larger
    one, in uint64: that is exact for any two integers of 64 bits, where int64 would overflow.
    """
    kept = [reply.astype(old.dtype) for reply in replies]
    low, high = np.minimum.reduce(kept), np.maximum.reduce(kept)
    change = np.zeros(old.shape)
    for share, new in zip(share_n, kept, strict=True):
        distance = np.where(new >= old, _distance(old, new), _distance(new, old)).astype(np.float64)
        change += share * np.where(new >= old, distance, -distance)
    # The largest float64 that uint64 can hold: one that is rounded up to 2^64 cannot be cast.
    step = np.minimum(np.rint(np.abs(change)), 2.0**64 - 2048).astype(np.uint64)
    # Not beyond the farthest reply on that side, so that nothing wraps; then between all replies, whatever was rounded.
    up = old.astype(np.uint64) + np.minimum(step, _distance(old, np.maximum(old, high)))
    down = old.astype(np.uint64) - np.minimum(step, _distance(np.minimum(old, low), old))
    return np.asarray(np.clip(np.where(change >= 0, up, down).astype(old.dtype), low, high))


def _distance(low: Array, high: Array) -> Array:
    """High - low >= 0 of integers, uint64."""
    with np.errstate(over="ignore"):
        return np.asarray(high.astype(np.uint64) - low.astype(np.uint64))
