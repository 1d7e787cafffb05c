"""A model's named arrays and the flat vector that the rounds work on: ``flatten`` and
``unflatten``.

Trained arrays (floating point) make up the flat vector; their difference is the update u_i that the
estimate uses. Buffers (floating point, by name) and counters (integers; booleans never change)
become sent + sum_i h_i (received_i - sent), with h_i >= 0 and sum 1: running variances must stay >=
0, which no unbiased weighting guarantees.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .errors import DeltaflError
from .types import Array, FloatArray, Params

Arrays = dict[str, Array]

#: A finite entry beyond this could still overflow the float32 model once it is weighted, or a score
#: once it is squared.
LARGEST_ENTRY = 1e18

#: Name patterns of floating-point arrays that are statistics, not parameters: those of batch
#: normalisation.
BUFFERS = ("*running_mean", "*running_var", "*moving_mean", "*moving_variance")
_VARIANCES = ("*running_var", "*moving_variance")


class Entry(NamedTuple):
    """One array of the model; ``dtype`` as NumPy names it, ``kind`` is "trained", "buffer" or
    "counter".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


class Layout(NamedTuple):
    """The arrays of a model, in order."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Array],
        buffers: Sequence[str] = BUFFERS,
    ) -> "Layout":
        """Describe a model; floating-point arrays whose names match the patterns ``buffers`` are
        not trained.
        """
        entries = tuple(
            Entry(name, array.shape, str(array.dtype), _kind(name, array, buffers))
            for name, array in arrays.items()
        )
        if not any(entry.kind == "trained" for entry in entries):
            raise DeltaflError(
                "the model has no floating-point array to train; integers and 'buffers' are not "
                "trained"
            )
        return cls(entries)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays that make up the flat vector, in order."""
        return {entry.name: entry.shape for entry in self.entries if entry.kind == "trained"}

    def flatten(self, arrays: Mapping[str, Array]) -> Params:
        """The trained arrays as one float32 vector (d,), each in C order."""
        with np.errstate(over="ignore"):
            return np.concatenate(
                [arrays[name].astype(np.float32).ravel() for name in self.trained]
            )

    def rebuild(self, params_d: Params, rest: Mapping[str, Array]) -> Arrays:
        """The model as named arrays: trained ones from the flat vector, the others from
        ``rest``.
        """
        trained = split(params_d, self.trained)
        arrays = {}
        for entry in self.entries:
            if entry.kind == "trained":
                arrays[entry.name] = _narrowed(trained[entry.name], entry.dtype)
            else:
                arrays[entry.name] = rest[entry.name]
        return arrays

    def rest(self, arrays: Mapping[str, Array]) -> Arrays:
        """The arrays that are not trained."""
        return {entry.name: arrays[entry.name] for entry in self.entries if entry.kind != "trained"}

    def fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with a client's arrays, or None; ``close_round`` checks trained values,
        as updates.
        """
        if set(arrays) != {entry.name for entry in self.entries}:
            return "the reply's arrays have other names than those that were sent"
        for entry in self.entries:
            array = arrays[entry.name]
            if array.shape != entry.shape:
                return f"array {entry.name!r} has shape {array.shape}, expected {entry.shape}"
            # Of any width: a client may compute in another one.
            if array.dtype.kind != np.dtype(entry.dtype).kind:
                return f"array {entry.name!r} has type {array.dtype}, expected {entry.dtype}"
            fault = _value_fault(entry, array)
            if fault is not None:
                return f"{entry.kind} {entry.name!r} has {fault}"
        return None


def flatten(model: Any) -> Params:
    """The parameters of a model as one vector, which is what ``init_round`` and ``close_round``
    work on.

    Batch normalisation's running statistics (known by their names in a state dict), integers and
    booleans are no parameters: they are left out.

    Args:
        model: A torch module, its state dict (or another dict of arrays by name), or a list of
            arrays or tensors, such as ``model.parameters()``; on any device.

    Returns:
        float32 (d,), the arrays in their order, each in C order.

    Raises:
        DeltaflError: If ``model`` is something else, or has no floating-point array.

    Example:
        >>> flatten({"weight": np.ones((2, 2)), "steps": np.array(7), "bias": np.zeros(1)})
        array([1., 1., 1., 1., 0.], dtype=float32)
    """
    arrays = {name: as_array(part) for name, part in _parts(model).items()}
    return Layout.of(arrays).flatten(arrays)


def unflatten(vector: Any, like: Any) -> Any:
    """A copy of a model with the parameters of a vector: the inverse of ``flatten``.

    Args:
        vector: Numbers (d,), such as ``state.params_d``.
        like: A torch module, a state dict or a list, as for ``flatten``. What is no parameter keeps
            its value.

    Returns:
        A copy of ``like``, with its names, order, types and devices.

    Raises:
        DeltaflError: If the vector has not as many entries as ``like`` has parameters.

    Example:
        >>> unflatten([1, 2, 3], like=[np.zeros(2), np.zeros(1)])
        [array([1., 2.]), array([3.])]
    """
    parts = _parts(like)
    arrays = {name: as_array(part) for name, part in parts.items()}
    layout = Layout.of(arrays)
    vector_d = as_array(vector)
    num_params = sum(map(prod, layout.trained.values()))
    if vector_d.shape != (num_params,):
        raise DeltaflError(
            f"the vector has shape {vector_d.shape}, the model has {num_params} parameters; give a "
            "vector that flatten made of such a model"
        )
    rebuilt = layout.rebuild(vector_d.astype(np.float32), layout.rest(arrays))
    new: dict[str, Any] = {}
    for name, part in parts.items():
        # Copies, as what is no parameter would be shared with ``like``.
        new[name] = np.array(rebuilt[name])
        if hasattr(part, "detach"):
            new[name] = part.detach().new_tensor(rebuilt[name])
    if hasattr(like, "state_dict"):
        model = copy.deepcopy(like)
        model.load_state_dict(new)
        return model
    if not isinstance(like, Mapping):
        return list(new.values())
    state: Any = copy.copy(like)
    state.update(new)
    return state


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


def initial_model(params: Any) -> Params:
    """A model that rounds begin with, float32 (d,): a flat array of finite numbers as it is, or
    a flattened model.
    """
    try:
        if is_model(params):
            params_d = flatten(params)
        else:
            params_d = np.array(as_array(params), np.float32)
    except DeltaflError:
        raise
    except (TypeError, ValueError):
        raise DeltaflError(
            "params must be one flat array of numbers; write deltafl.flatten(model)"
        ) from None
    bad = np.count_nonzero(~np.isfinite(params_d))
    if bad > 0 or params_d.ndim != 1:
        raise DeltaflError(
            f"params of shape {params_d.shape}, {bad} not finite; give a flat array of finite "
            "numbers"
        )
    return params_d


def is_model(given: Any) -> bool:
    """Whether this is a module, a dict or a list of arrays (by its first entry) rather than one
    list of numbers.
    """
    if type(given) in (list, tuple) and given:
        return isinstance(given[0], list | tuple) or getattr(given[0], "ndim", 0) > 0
    return isinstance(given, Mapping) or hasattr(given, "state_dict")


def _parts(model: Any) -> dict[str, Any]:
    if hasattr(model, "state_dict"):
        model = model.state_dict()
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, Iterable) or isinstance(model, str) or hasattr(model, "dtype"):
        raise DeltaflError(
            f"the model is a {type(model).__name__}; give a module, its state dict or a list of "
            "arrays"
        )
    return {str(place): part for place, part in enumerate(model)}


def split(flat_d: Params, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """A flat vector as named arrays of these shapes."""
    stops = np.cumsum([prod(shape) for shape in shapes.values()])
    parts = zip(shapes.items(), np.split(flat_d, stops[:-1]), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def _narrowed(array: Array, dtype: str) -> Array:
    """Within the range of float16, say: one infinite entry would spoil every honest reply, and
    none could repair it.
    """
    bound = min(float(np.finfo(dtype).max), float(np.finfo(array.dtype).max))
    return array.clip(-bound, bound).astype(dtype)


def update_of(sent: Mapping[str, Array], received: Mapping[str, Array]) -> Params:
    """Received - sent over the arrays in ``sent``, in that order, float32 (d,); overflowing
    entries become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [
            np.subtract(
                received[name],
                old,
                dtype=np.float64,
            )
            .astype(np.float32)
            .ravel()
            for name, old in sent.items()
        ]
    return np.concatenate(parts)


def mean_rest(
    layout: Layout, sent: Arrays, replies: list[Arrays], coef_n: FloatArray, median: bool = False
) -> Arrays:
    """Buffers and counters after a round: sent + sum_i h_i (received_i - sent), h = coef / sum
    coef.

    With ``median`` the lower median of each entry, whatever the coefficients: no client alone moves
    it.
    """
    rest = layout.rest(sent)
    total = float(coef_n.sum())
    if total <= 0:
        return rest
    for entry in layout.entries:
        if entry.kind == "trained" or entry.dtype == "bool":
            continue
        old = sent[entry.name]
        new = [reply[entry.name] for reply in replies]
        if median:
            rest[entry.name] = _lower_median(old, new)
        else:
            rest[entry.name] = _mean(old, new, coef_n / total)
    return rest


def _kind(name: str, array: Array, buffers: Sequence[str]) -> str:
    if array.dtype.kind in "iub":
        return "counter"
    if array.dtype.kind != "f":
        raise DeltaflError(
            f"array {name!r} has type {array.dtype}; use floats, integers or booleans"
        )
    if _matches(str(name), buffers):
        return "buffer"
    return "trained"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _value_fault(entry: Entry, array: Array) -> str | None:
    """What is wrong with the values of a buffer or a counter, in the type that the server keeps."""
    if entry.kind == "trained" or array.dtype.kind == "b" or array.size == 0:
        return None
    if entry.kind == "counter":
        kept = np.iinfo(entry.dtype)
        if int(array.min()) < kept.min or int(array.max()) > kept.max:
            return f"entries outside {kept.min} to {kept.max}, the range of {entry.dtype}"
        return None
    largest = min(LARGEST_ENTRY, float(np.finfo(entry.dtype).max))
    # Not ``any(> largest)``, which NaN is not.
    if not np.all(np.abs(array) <= largest):
        return f"NaN, or entries of a size above {largest:.3g}"
    if _matches(entry.name, _VARIANCES) and np.any(array < 0):
        return "negative entries, impossible for a variance"
    return None


def _lower_median(old: Array, replies: list[Array]) -> Array:
    return np.asarray(
        np.sort(np.stack(replies), axis=0)[(len(replies) - 1) // 2],
        old.dtype,
    )


def _mean(old: Array, replies: list[Array], share_n: FloatArray) -> Array:
    """Old + sum_i h_i (new_i - old); of integers rounded, and between the smallest and the
    largest reply.
    """
    is_float = old.dtype.kind == "f"
    wide: Any = np.float64
    if not is_float:
        # float64 does not hold all 64-bit integers.
        wide = np.longdouble
    old_wide = old.astype(wide)
    change: Any = np.zeros(old.shape, wide)
    for share, new in zip(share_n, replies, strict=True):
        change += share * (new.astype(wide) - old_wide)
    if is_float:
        return np.asarray(old_wide + change).astype(old.dtype)
    mean = old_wide + np.rint(change)
    # Where longdouble is float64, rounding could leave the range of the type.
    mean = np.clip(mean, np.minimum.reduce(replies), np.maximum.reduce(replies))
    return np.asarray(mean).astype(old.dtype)
