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

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .errors import OWN_ERRORS, DeltaflError, in_one_line, printable, require_no_twins
from .types import Array, Params

Arrays = dict[str, Array]
#: Name patterns of arrays; a known name stands for several.
Patterns = str | Sequence[str]

#: A finite entry beyond this could still overflow the float32 model once it is weighted, or a score
#: once it is squared.
LARGEST_ENTRY = 1e18

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

#: The last part of the name of a module's own state beside its arrays in a state dict.
_EXTRA = "_extra_state"

#: Bytes of a number that a client may send.
_WIDEST = 8
#: Of the names that a message about a reply has room for.
_NAMED = 3


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


class NamedArrays(NamedTuple):
    """The arrays of a model by name, and what only its tensors know of them."""

    arrays: Arrays
    tensors: dict[Any, Any]  #: as they were given
    same_as: dict[str, str]  #: of a tensor's further names the first
    statistics: frozenset[str] = frozenset()  #: buffers of a module
    parameters: frozenset[str] = frozenset()  #: parameters of a module
    without_gradient: frozenset[str] = frozenset()  #: those that are frozen

    @classmethod
    def of(cls, model: Any) -> "NamedArrays":
        """Read a module, a state dict or a list; an array that cannot be read is a
        ``DeltaflError`` with its name.
        """
        # Optimizers have a state dict, too, and a class has no arrays.
        if hasattr(model, "named_buffers") and not isinstance(model, type):
            return cls._of_module(model)
        if isinstance(model, Mapping):
            tensors = _without_extra(model)
            require_no_twins("the model", tensors)
        elif not isinstance(model, Iterable) or isinstance(model, str) or hasattr(model, "dtype"):
            raise DeltaflError(
                f"the model is a {type(model).__name__}; give a module, its state dict or a list "
                "of arrays"
            )
        else:
            tensors = {str(place): part for place, part in enumerate(model)}
        arrays = {str(name): _read(name, tensor) for name, tensor in tensors.items()}
        return cls(arrays, tensors, _ties(tensors))

    @classmethod
    def _of_module(cls, model: Any) -> "NamedArrays":
        tensors = state_of(model)
        arrays = {name: _read(name, tensor) for name, tensor in tensors.items()}
        own = own_tensors(model, tensors)
        known = {id(tensor) for tensor in own.values()}
        params = dict(model.named_parameters())
        _require_whole(
            {name: param for name, param in params.items() if id(param) not in known},
            {name: tensor for name, tensor in tensors.items() if name not in own},
        )
        require_apart(
            {name: param for name, param in params.items() if id(param) in known},
            may_be_tied=True,
        )
        of_params = {id(param) for param in params.values()}
        parameters = frozenset(name for name, tensor in own.items() if id(tensor) in of_params)
        return cls(
            arrays,
            tensors,
            _ties(tensors),
            statistics=frozenset(own) - parameters,
            parameters=parameters,
            without_gradient=frozenset(name for name in parameters if not own[name].requires_grad),
        )


def state_of(model: Any) -> dict[str, Any]:
    """The state dict of a module without what ``get_extra_state`` adds, which is no array: it stays
    as the module has it.
    """
    try:
        # Detached tensors would neither be one where weights are tied, nor know their gradient.
        state = model.state_dict(keep_vars=True)
    except OWN_ERRORS as error:
        raise DeltaflError(
            f"the model's state_dict(keep_vars=True) failed: {in_one_line(error)}; a state_dict of "
            "your own must take PyTorch's options, and hand them on"
        ) from error
    return _without_extra(state)


def _without_extra(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: part for name, part in state.items() if str(name).rpartition(".")[2] != _EXTRA}


def own_tensors(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of a module by the names of its state dict, which may be others
    than its own: those of a wrapped module, or what a hook makes of them.
    """
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    known = {id(tensor) for tensor in own.values()}
    found = {}
    for name, tensor in state.items():
        if id(tensor) in known:
            found[name] = tensor
        # Some state dicts hold copies.
        elif name in own:
            found[name] = own[name]
    return found


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


def tensors_of(model: Any) -> dict[str, Any]:
    """The parameters and buffers of a module by the names of its state dict."""
    state = state_of(model)
    tensors = own_tensors(model, state)
    for name in state:
        if name not in tensors:
            raise DeltaflError(
                f"the model's state dict has {name!r}, which is none of its parameters and "
                "buffers; let it have these tensors themselves, or copies by their own names"
            )
    return tensors


def _require_whole(left_out: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse parameters with a gradient that the state dict has in no form; ``others`` are its
    tensors that are none of the module's own.
    """
    trained = {name: param for name, param in left_out.items() if param.requires_grad}
    parts = {_place(tensor): tensor for tensor in others.values() if trained}
    # The state dict of a wrapped module may have detached tensors.
    missing = {name: param for name, param in trained.items() if _place(param) not in parts}
    for param in trained.values():
        parts.pop(_place(param), None)
    # Wrappers that keep many parameters in one, as FSDP does, have its parts there, or copies.
    num_parts = sum(tensor.numel() for tensor in parts.values())
    if sum(param.numel() for param in missing.values()) > num_parts:
        raise DeltaflError(
            f"the model trains {next(iter(missing))!r}, which its state dict leaves out, so that "
            "it would be neither sent nor kept; write requires_grad_(False), or let state_dict() "
            "have it"
        )


def require_apart(params: Mapping[str, Any], may_be_tied: bool = False) -> None:
    """Refuse parameters with a gradient that share memory with others: a step would move both, and
    copies would not share it. Two that are the same view of it may be taken for one tensor.
    """
    # Sorted by address, so that of many parameters in one buffer only neighbours are compared.
    held = []
    for name, param in params.items():
        if str(param.layout) == "torch.strided" and not param.is_meta and param.numel() > 0:
            cells = _cells(param)
            start = param.data_ptr()
            reach = sum((n - 1) * step for n, step in zip(cells.shape, cells.strides, strict=True))
            held.append((start, start + reach, name, param, cells))
    held.sort(key=lambda each: each[0])
    before: list[tuple[int, str, Any, Array]] = []
    for start, last, name, param, cells in held:
        before = [each for each in before if each[0] >= start]
        for _, other, first, first_cells in before:
            is_moved = param.requires_grad or first.requires_grad
            are_tied = may_be_tied and _place(param) == _place(first)
            # They may well be parts of one buffer that do not overlap.
            if is_moved and not are_tied and np.shares_memory(cells, first_cells):
                raise DeltaflError(
                    f"the parameters {other!r} and {name!r} share memory, which copies of them "
                    f"would not; assign the parameter itself, model.{name} = model.{other}, to tie "
                    "them, or a .clone() to keep them apart"
                )
        before.append((last, name, param, cells))


def _cells(tensor: Any) -> Array:
    """An array at the addresses of a tensor, which is not to be read: it may be on a GPU."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(size * step for step in tensor.stride()),
        "typestr": f"|V{size}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def as_array(numbers: Any) -> Array:
    """Numbers as a NumPy array, from any device; PyTorch is recognised by its methods, not
    imported.
    """
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().to_dense().cpu()
        try:
            numbers = numbers.numpy()
        except TypeError:  # bfloat16, which NumPy does not know
            numbers = numbers.float().numpy()
    return np.asarray(numbers)


def as_reals(
    name: str,
    numbers: Any,
    cure: str,
    shape: tuple[int, ...] | None = None,
) -> Array:
    """Real numbers as a NumPy array, from any device; what is none, or has another shape, is a
    ``DeltaflError``.
    """
    no_numbers = f"{name} is not one list of numbers: write {cure}"

    def require_shape(found: tuple[int, ...]) -> None:
        if shape is not None and found != shape:
            of_model = "" if len(found) == 1 else f": write {cure}"
            raise DeltaflError(f"{name} has shape {found}, expected {shape}{of_model}")

    try:
        # Before it is read: a sparse tensor, or a view of one number, may have any size.
        require_shape(tuple(np.shape(numbers)))
        array = as_array(numbers)
    except DeltaflError:
        raise
    except OWN_ERRORS:  # whatever the things that somebody has sent may raise
        raise DeltaflError(no_numbers) from None
    # What an object says of itself need not be so.
    require_shape(array.shape)
    if array.dtype.kind == "c" or np.ma.isMaskedArray(numbers):
        raise DeltaflError(f"{name} has complex or masked numbers, of which a part would be lost")
    if array.dtype.kind not in "biuf":  # texts, dates and objects become numbers, too
        raise DeltaflError(no_numbers)
    return array


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


def listed(names: Iterable[str]) -> str:
    """Some names for a message; a client chooses its own."""
    every = list(names)
    shown = ", ".join(f"'{printable(name, 60)}'" for name in every[:_NAMED])
    if len(every) > _NAMED:
        return f"{shown} and {len(every) - _NAMED} more"
    return shown


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


def _read(name: object, tensor: Any) -> Array:
    if np.ma.isMaskedArray(tensor):
        raise DeltaflError(
            f"array {name!r} of the model is a masked array, of which what the mask hides would be "
            "trained; write .filled(0), or another number in its place"
        )
    try:
        array = as_array(tensor)
    except Exception as error:  # each kind of tensor without numbers raises an error of its own
        why = f"{type(tensor).__name__}, {type(error).__name__}"
    else:
        layout = str(getattr(tensor, "layout", "torch.strided"))
        why = f"type {array.dtype}"
        # Of a sparse tensor there is no memory to write a mean into.
        if layout != "torch.strided":
            why = f"layout {layout}"
        elif array.dtype.kind in "fiub":
            return array
    raise DeltaflError(
        f"array {name!r} of the model has no numbers to train on ({why}); use floats, integers or "
        "booleans, and register_buffer(..., persistent=False) for what stays as it is. Run a lazy "
        "module once, move a meta one to a device with values, and quantise after training"
    )


def _ties(tensors: Mapping[Any, Any]) -> dict[str, str]:
    """Names of the same memory: for each further one the first."""
    first: dict[tuple[object, ...], str] = {}
    same_as = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "data_ptr"):
            where = _place(tensor)
        elif isinstance(tensor, np.ndarray):
            address = tensor.__array_interface__["data"][0]
            where = address, tensor.shape, tensor.strides, tensor.dtype, ""
        else:
            continue
        # Empty arrays may all have one address.
        if 0 not in tensor.shape and first.setdefault(where, str(name)) != str(name):
            same_as[str(name)] = first[where]
    return same_as


def _place(tensor: Any) -> tuple[object, ...]:
    """What tensors that are one have in common: other views of the same memory are other arrays."""
    shape = tuple(tensor.shape)
    return tensor.data_ptr(), shape, tensor.stride(), tensor.dtype, str(tensor.device)


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


def copied(module: Any, shared: Mapping[int, Any] | None = None) -> Any:
    """A copy of a torch module into whose parameters and buffers one can write; what is ``shared``,
    by its id, is not copied.
    """
    # Pruning and weight_norm keep a weight that they compute anew in each pass: a part of a graph,
    # which PyTorch does not copy. What the memo holds deepcopy takes for copied.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if getattr(value, "grad_fn", None) is not None
    }
    model = copy.deepcopy(module, {**(shared or {}), **computed})
    for tensor in [*model.parameters(), *model.buffers()]:
        # TorchScript copies by a step of the graph, which would take the gradient back to the old.
        if not tensor.is_leaf:
            tensor.detach_().requires_grad_()
        # Nothing can be written where entries share memory, as after ``expand``.
        if str(tensor.layout) == "torch.strided" and 0 in tensor.stride():
            tensor.data = tensor.detach().clone()
    return model
