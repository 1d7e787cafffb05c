"""The arrays of a model by name: read from a module, a state dict or a list, checked and copied.

What becomes of each array in a round is in ``parts.py``.
"""

import copy
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError, in_one_line, printable, require_no_twins
from ..types import Array

Arrays = dict[str, Array]

#: A finite entry beyond this could still overflow the float32 model once it is weighted, or a score
#: once it is squared.
LARGEST_ENTRY = 1e18

#: The last part of the name of a module's own state beside its arrays in a state dict.
_EXTRA = "_extra_state"

#: Of the names that a message about a reply has room for.
_NAMED = 3


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
    return {
        name: _undivided(part)
        for name, part in state.items()
        if str(name).rpartition(".")[2] != _EXTRA
    }


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
    if hasattr(_undivided(numbers), "detach"):
        numbers = numbers.detach().to_dense().cpu()
        try:
            numbers = numbers.numpy()
        except TypeError:  # bfloat16, which NumPy does not know
            numbers = numbers.float().numpy()
    return np.asarray(numbers)


def _undivided(tensor: Any) -> Any:
    """A tensor as it is; a DTensor, which alone has this method, is refused."""
    if hasattr(tensor, "full_tensor"):
        raise DeltaflError(
            "each process has only a part of a DTensor, as FSDP2 makes them: give its "
            ".full_tensor(), or in place of a model get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))"
        )
    return tensor


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


def listed(names: Iterable[str]) -> str:
    """Some names for a message; a client chooses its own."""
    every = list(names)
    shown = ", ".join(f"'{printable(name, 60)}'" for name in every[:_NAMED])
    if len(every) > _NAMED:
        return f"{shown} and {len(every) - _NAMED} more"
    return shown


def _read(name: object, tensor: Any) -> Array:
    if np.ma.isMaskedArray(tensor):
        raise DeltaflError(
            f"array {name!r} of the model is a masked array, of which what the mask hides would be "
            "trained; write .filled(0), or another number in its place"
        )
    try:
        array = as_array(tensor)
    except DeltaflError:
        raise
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
    if isinstance(tensor, Mapping | list | tuple):
        raise DeltaflError(
            f"{name!r} of the model is a {type(tensor).__name__}, no array; give one dict or list "
            "of arrays, such as jax.tree.leaves(model)"
        )
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


def copied(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a torch module into whose parameters and buffers one can write; what is in the
    ``memo`` of ``copy.deepcopy``, by its id, is not copied, and all copies are there afterwards.
    """
    memo = {} if memo is None else memo
    # Pruning and weight_norm keep a weight that they compute anew in each pass: a part of a graph,
    # which PyTorch does not copy. What the memo holds deepcopy takes for copied.
    for part in module.modules():
        for value in vars(part).values():
            if getattr(value, "grad_fn", None) is not None:
                memo[id(value)] = value.detach().clone()
    model = copy.deepcopy(module, memo)
    for tensor in [*model.parameters(), *model.buffers()]:
        # TorchScript copies by a step of the graph, which would take the gradient back to the old.
        if not tensor.is_leaf:
            tensor.detach_().requires_grad_()
        # Nothing can be written where entries share memory, as after ``expand``.
        if str(tensor.layout) == "torch.strided" and 0 in tensor.stride():
            tensor.data = tensor.detach().clone()
    return model
