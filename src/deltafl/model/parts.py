"""What a model is made of: which of its arrays are trained, averaged, kept or left alone.

=========  ==================================================  ==========  ====================
kind       which arrays                                        are sent    after a round
=========  ==================================================  ==========  ====================
trained    floating point; frozen and local ones are not       both ways   the server's step
buffer     statistics, such as those of batch normalisation    both ways   the weighted mean
counter    integers and booleans                               both ways   the weighted mean
constant   statistics with entries beyond any mean (-inf)      both ways   as they were
frozen     parameters without a gradient, or outside           never       as they were
           ``trainable``
local      arrays that match ``local``                         never       each client's own
=========  ==================================================  ==========  ====================

Trained arrays make up the flat vector, of which the rounds, the samplers and the estimates speak.
Buffers and counters become sent + sum_i h_i (received_i - sent) with h_i >= 0 and sum 1, which is
biased: running variances must stay >= 0, which no unbiased weighting guarantees.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import Array, Params
from .arrays import LARGEST_ENTRY, Arrays, NamedArrays, as_reals, listed, tensors_of

#: Name patterns of arrays; a known name stands for several.
Patterns = str | Sequence[str]

#: Name patterns of floating-point arrays that are statistics, not parameters: those of batch
#: normalisation. The buffers and parameters of a torch module are known without their names.
BUFFERS = ("*running_mean", "*running_var", "*moving_mean", "*moving_variance")
_VARIANCES = ("*running_var", "*moving_variance")

#: Names for patterns of ``trainable``: the adapters that the library peft adds to a model.
TRAINABLE = {"lora": ("*lora_*", "*modules_to_save.*")}

#: What becomes the weighted mean of the clients'.
MEANS = ("buffer", "counter")
#: What goes from the server to clients and back.
SENT = ("trained", *MEANS, "constant")

#: Bytes of a number that a client may send.
_WIDEST = 8


class Entry(NamedTuple):
    """One array of a model; ``dtype`` as NumPy names it.

    ``same_as`` is the name of an earlier array that is the same tensor (tied weights), or empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    same_as: str = ""


class ModelParts(NamedTuple):
    """The arrays of a model, in order."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(
        cls,
        model: Any,
        buffers: Sequence[str] = (),
        local: Patterns = (),
        trainable: Patterns = (),
    ) -> "ModelParts":
        """Describe a model.

        Args:
            model: A torch module, a state dict (or another dict of arrays by name), a list of
                arrays or tensors, or ``NamedArrays``.
            buffers: Name patterns of floating-point arrays that are averaged, not trained, beside
                the buffers of a module; of a dict, those of batch normalisation (``BUFFERS``).
            local: Name patterns of arrays that stay with each client: a personal head, or
                ``["*.bn*"]`` for FedBN. Of tied weights one name stands for all.
            trainable: Name patterns of the only arrays that are trained, averaged and sent, or
                ``"lora"`` for those of peft; empty for all. The others are frozen.

        Raises:
            DeltaflError: If nothing is trained, a pattern matches nothing, or an array is of a type
                that has no numbers.
        """
        named = model if isinstance(model, NamedArrays) else NamedArrays.of(model)
        wanted = patterns_of(trainable)
        own = patterns_of(local)
        for option, patterns in (("local", own), ("trainable", wanted), ("buffers", buffers)):
            for pattern in patterns:
                # No model has to have anything that matches the library's own patterns.
                is_ours = pattern in (*TRAINABLE["lora"], *BUFFERS)
                if not is_ours and not _match(named.arrays, [pattern]):
                    raise DeltaflError(
                        f"{option} has {pattern!r}, which no array of the model matches; its names "
                        f"are {listed(named.arrays)}"
                    )
        names_of: dict[str, list[str]] = {}
        for name in named.arrays:
            names_of.setdefault(named.same_as.get(name, name), []).append(name)
        # Of a tensor, whatever its names: one of them stands for all.
        kinds = {}
        for first, names in names_of.items():
            kind = _kind(names, named, buffers)
            if kind == "trained" and not named.without_gradient.isdisjoint(names):
                kind = "frozen"
            if wanted and not _match(names, wanted):
                kind = "frozen"
            # Last, as it wins: a local array is each client's own, with a gradient or without.
            if _match(names, own):
                kind = "local"
            kinds[first] = kind
        entries = []
        for name, array in named.arrays.items():
            tied = named.same_as.get(name, "")
            kind = kinds[tied or name]
            entries.append(Entry(name, array.shape, str(array.dtype), kind, tied))
        parts = cls(tuple(entries))
        if not parts.trained:
            raise DeltaflError(
                "the model has no floating-point array to train, for integers, buffers, frozen and "
                "local arrays are not trained; leave a parameter of the model trainable"
            )
        return parts

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays that make up the flat vector, in order."""
        return {
            entry.name: entry.shape
            for entry in self.entries
            if entry.kind == "trained" and not entry.same_as
        }

    @property
    def num_params(self) -> int:
        """The length d of the flat vector."""
        return sum(map(prod, self.trained.values()))

    def names(self, *kinds: str) -> list[str]:
        """The names of the arrays of these kinds, in order."""
        return [entry.name for entry in self.entries if entry.kind in kinds]

    def require_no_means(self, cure: str = "") -> None:
        """Refuse buffers and counters, with dp: nothing hides a client in their mean."""
        for name in self.names(*MEANS):
            raise DeltaflError(
                f"dp: the mean of {name!r} would get no noise; use layers without buffers, such as "
                f"GroupNorm for BatchNorm{cure}"
            )

    def flatten(self, arrays: Mapping[str, Array]) -> Params:
        """The trained arrays as one float32 vector (d,), each in C order."""
        # What overflows float32 is infinite, and refused as an update.
        with np.errstate(over="ignore"):
            parts = [arrays[name].astype(np.float32).ravel() for name in self.trained]
        return np.concatenate(parts)

    def named(self, vector: Any) -> Arrays:
        """A flat vector (d,) as named arrays; a ``DeltaflError`` if it has another length."""
        vector_d = as_reals("the vector", vector, "what deltafl.flatten made")
        if vector_d.shape != (self.num_params,):
            raise DeltaflError(
                f"the vector has shape {vector_d.shape}, the model has {self.num_params} "
                "parameters; give a vector that flatten made of such a model"
            )
        return split(vector_d.astype(np.float32), self.trained)

    def rebuild(self, params_d: Params, rest: Mapping[str, Array]) -> Arrays:
        """The model as named arrays: trained ones from the flat vector, others from ``rest``, as
        far as it has them.
        """
        trained = self.named(params_d)
        arrays: Arrays = {}
        for entry in self.entries:
            name = entry.name
            # Tied arrays stay one array.
            if entry.same_as in arrays:
                arrays[name] = arrays[entry.same_as]
            elif entry.kind == "trained":
                arrays[name] = _narrowed(trained[name], entry.dtype)
            elif name in rest:
                arrays[name] = rest[name]
        return arrays

    def rest(self, arrays: Mapping[str, Array]) -> Arrays:
        """The arrays that are not trained, as far as ``arrays`` has them."""
        return {
            entry.name: arrays[entry.name]
            for entry in self.entries
            if entry.kind != "trained" and entry.name in arrays
        }

    def sent(self, arrays: Mapping[str, Array]) -> Arrays:
        """The arrays that go to the clients, and come back, as far as ``arrays`` has them."""
        return {name: arrays[name] for name in self.names(*SENT) if name in arrays}

    def value_fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with a client's arrays, or None: their shapes, their types, and the values
        of buffers and counters.
        """
        for entry in self.entries:
            name = entry.name
            if name not in arrays:
                continue
            array = arrays[name]
            # Whatever was read: an archive is no array, and of a subclass, such as one with a
            # mask, a part would be lost.
            if type(array) is not np.ndarray:
                return f"array {name!r} is a {type(array).__name__}, expected a plain array"
            if array.shape != entry.shape:
                return f"array {name!r} has shape {array.shape}, expected {entry.shape}"
            # Of any width up to 64 bits: a client may compute in another one.
            if array.dtype.kind != np.dtype(entry.dtype).kind or array.dtype.itemsize > _WIDEST:
                return f"array {name!r} has type {array.dtype}, expected {entry.dtype}"
            fault = _value_fault(entry, array)
            if fault is not None:
                return f"{entry.kind} {name!r} has {fault}"
        return None

    def fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with a client's arrays, or None; ``close_round`` checks trained values,
        as updates.

        Frozen and local arrays, which a client may send without being asked, are ignored.
        """
        needed = [entry for entry in self.entries if entry.kind in SENT]
        missing = [entry.name for entry in needed if entry.name not in arrays]
        known = {entry.name for entry in self.entries}
        extra = [name for name in arrays if name not in known]
        if missing and extra:
            return f"the reply lacks {listed(missing)}, and has {listed(extra)}, which nobody sent"
        if missing:
            return f"the reply lacks {listed(missing)}"
        if extra:
            return f"the reply has {listed(extra)}, which nobody sent"
        fault = self.value_fault(self.sent(arrays))
        if fault is not None:
            return fault
        for entry in needed:
            # The vector has the tensor once: the other copy would be dropped without a word.
            if entry.same_as and not np.array_equal(arrays[entry.name], arrays[entry.same_as]):
                return f"{entry.same_as!r} and {entry.name!r} are one tensor, and differ"
        return None


def freeze(model: Any, parts: "ModelParts") -> dict[int, Any]:
    """Take the gradient from the parameters that are frozen by name alone; all that is frozen, by
    its id.
    """
    tensors = tensors_of(model)
    frozen = {id(tensors[name]): tensors[name] for name in parts.names("frozen")}
    for param in model.parameters():
        if id(param) in frozen:
            param.requires_grad_(False)
    return frozen


def patterns_of(names: Any) -> tuple[str, ...]:
    """The name patterns of ``local`` or ``trainable``: a known name stands for several."""
    if isinstance(names, str):
        return TRAINABLE.get(names, (names,))
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise DeltaflError(
            f"local and trainable are patterns of the names of arrays, such as ['head.*'], or "
            f"empty, and one of them is {names!r}"
        )
    return tuple(names)


def split(flat_d: Params, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """A flat vector as named arrays of these shapes."""
    stops = np.cumsum([prod(shape) for shape in shapes.values()])
    parts = zip(shapes.items(), np.split(flat_d, stops[:-1]), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def parts_of_copies(arrays: Mapping[str, Array], tied: bool | None, **options: Any) -> ModelParts:
    """``ModelParts.of`` arrays that came as copies, in a message: those with the same numbers may
    be one tensor.

    A language model's embedding and its output layer often are; the layers of a torch
    ``TransformerEncoder`` only begin as copies of one. Nothing but the user can tell.

    Args:
        arrays: The arrays, by name.
        tied: Whether such arrays are one tensor; None if nothing was said.
        options: Of ``ModelParts.of``.

    Raises:
        DeltaflError: If nothing was said, and there are such arrays that would be trained, sent or
            kept otherwise as one tensor.
    """
    named = NamedArrays.of(arrays)
    apart = ModelParts.of(named, **options)
    for entry in apart.entries:
        if entry.kind in SENT and named.arrays[entry.name].itemsize > _WIDEST:
            raise DeltaflError(
                f"array {entry.name!r} of the model has type {entry.dtype}, which not every client "
                "can send; give it as float64, or float32"
            )
    same_as = dict(named.same_as)
    first: dict[tuple[object, ...], str] = {}
    for entry in apart.entries:
        array = named.arrays[entry.name]
        is_parameter = entry.kind in ("trained", "frozen", "local") and array.dtype.kind == "f"
        # Arrays of one number are equal in any model: biases, scales.
        varies = array.size > 1 and bool(np.any(array != array.flat[0]))
        if is_parameter and varies and not entry.same_as:
            key = entry.shape, entry.dtype, array.tobytes()
            if first.setdefault(key, entry.name) != entry.name:
                same_as[entry.name] = first[key]
    if tied is False:
        return apart
    found = ModelParts.of(named._replace(same_as=same_as), **options)
    if tied is None:
        for new, old in zip(found.entries, apart.entries, strict=True):
            if new.kind != old.kind or (new.kind == "trained" and new.same_as != old.same_as):
                copies = [name for name, other in same_as.items() if new.name in (name, other)]
                raise DeltaflError(
                    f"the arrays {same_as[copies[0]]!r} and {copies[0]!r} hold the same numbers; "
                    "write tied=True if they are one tensor, such as an embedding that is the "
                    "output layer too, or tied=False if they only begin equal"
                )
        return apart
    return found


def _kind(
    names: Sequence[str],
    named: NamedArrays,
    buffers: Sequence[str],
) -> str:
    """The kind of a tensor with these names, as far as it is not the user's choice."""
    array = named.arrays[names[0]]
    if array.dtype.kind in "iub":
        return "counter"
    is_statistic = named.statistics.issuperset(names) or _match(names, buffers)
    # A module's parameter may be called like a statistic.
    if named.parameters.isdisjoint(names):
        is_statistic = is_statistic or _match(names, BUFFERS)
    if not is_statistic:
        return "trained"
    # No mean moves such an entry, and none would accept it: the mask of an attention, say.
    if not np.all(np.abs(array.astype(np.float64)) <= LARGEST_ENTRY):
        return "constant"
    return "buffer"


def _match(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether one of the names fits a pattern, or is one: a name may have brackets."""
    return any(
        name == pattern or fnmatchcase(name, pattern) for name in names for pattern in patterns
    )


def _value_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with the values of a buffer or a counter, in the type that the server keeps."""
    if entry.kind not in MEANS or array.dtype.kind == "b" or array.size == 0:
        return None
    if entry.kind == "counter":
        kept = np.iinfo(entry.dtype)
        # As Python's integers, which have no range: uint64 and int64 have no common type.
        if int(array.min()) < kept.min or int(array.max()) > kept.max:
            return f"entries outside {kept.min} to {kept.max}, the range of {entry.dtype}"
        return None
    largest = min(LARGEST_ENTRY, float(np.finfo(entry.dtype).max))
    # Not ``any(> largest)``, which NaN is not.
    if not np.all(np.abs(array) <= largest):
        return f"NaN, or entries of a size above {largest:.3g}"
    if _match([entry.name], _VARIANCES) and np.any(array < 0):
        return "negative entries, impossible for a variance"
    return None


def _narrowed(array: Array, dtype: str) -> Array:
    """Within the range of float16, say: one infinite entry would spoil every honest reply, and
    none could repair it.
    """
    bound = min(float(np.finfo(dtype).max), float(np.finfo(array.dtype).max))
    # Of an array without axes the bounded one is a scalar.
    return np.asarray(array.clip(-bound, bound), dtype)
