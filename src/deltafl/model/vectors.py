"""A model and the flat vector that the rounds work on: ``flatten`` and ``unflatten``; means of what
is not trained.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DeltaflError, explained
from ..types import Array, FloatArray, Params
from .arrays import Arrays, NamedArrays, as_array, as_reals, copied
from .parts import MEANS, ModelParts, Patterns


def flatten(
    model: Any,
    local: Sequence[str] = (),
    trainable: Patterns = (),
) -> Params:
    """The parameters of a model as one vector, which is what ``init_round`` and ``close_round``
    work on.

    Tied weights are in it once. Left out are buffers, such as the running statistics of batch
    normalisation (in a state dict known by their names), integers, booleans, and the frozen
    parameters of a module.

    Args:
        model: A torch module, its state dict (or another dict of arrays by name), or a list of
            arrays or tensors, such as ``model.parameters()``; on any device.
        local: Name patterns of arrays that stay with each client, see ``ModelParts.of``.
        trainable: Name patterns of the only arrays that are trained, or ``"lora"``.

    Returns:
        float32 (d,), the arrays in their order, each in C order.

    Raises:
        DeltaflError: If ``model`` is something else, or has no floating-point array.

    Example:
        >>> flatten({"weight": np.ones((2, 2)), "steps": np.array(7), "bias": np.zeros(1)})
        array([1., 1., 1., 1., 0.], dtype=float32)
    """
    named = NamedArrays.of(model)
    return ModelParts.of(named, local=local, trainable=trainable).flatten(named.arrays)


def unflatten(
    vector: Any,
    like: Any,
    local: Sequence[str] = (),
    trainable: Patterns = (),
) -> Any:
    """A copy of a model with the parameters of a vector: the inverse of ``flatten``.

    Args:
        vector: Numbers (d,), such as ``state.params_d``.
        like: A torch module, a state dict or a list, as for ``flatten``. What is no parameter keeps
            its value.
        local: As for ``flatten``.
        trainable: As for ``flatten``.

    Returns:
        A copy of ``like``, with its names, order, types and devices.

    Raises:
        DeltaflError: If the vector has not as many entries as ``like`` has parameters, or ``like``
            cannot load its own state dict.

    Example:
        >>> unflatten([1, 2, 3], like=[np.zeros(2), np.zeros(1)])
        [array([1., 2.]), array([3.])]
    """
    named = NamedArrays.of(like)
    parts = ModelParts.of(named, local=local, trainable=trainable)
    rebuilt = parts.rebuild(vector, parts.rest(named.arrays))
    new: dict[Any, Any] = {}
    made: dict[str, Any] = {}
    for name, tensor in named.tensors.items():
        text = str(name)
        if text in named.same_as:
            made[text] = made[named.same_as[text]]  # tied weights stay one tensor
        elif hasattr(tensor, "detach"):
            made[text] = tensor.detach().new_tensor(rebuilt[text])
        else:
            # A copy, as what is no parameter would be shared with ``like``.
            made[text] = np.array(rebuilt[text])
        new[name] = made[text]
    if hasattr(like, "state_dict"):
        with explained("the model cannot be copied", cure="; give its state dict"):
            model = copied(like)
        # Not strict: what get_extra_state adds is in the copy.
        model.load_state_dict(new, strict=False)
        loaded, tensors, *_ = NamedArrays.of(model)
        for name, first in named.same_as.items():
            # Several tensors in one memory were copied apart.
            tensors[name].data = tensors[first].data
        for name in parts.trained:
            if not np.array_equal(loaded[name], as_array(new[name]), equal_nan=True):
                raise DeltaflError(
                    f"the model's load_state_dict does not load {name!r}, which its state_dict() "
                    "has; let both have the same names and numbers"
                )
        return model
    if not isinstance(like, Mapping):
        return list(new.values())
    # So it keeps its class and attributes, such as ``_metadata`` of PyTorch's state dicts.
    state: Any = copy.copy(like)
    state.update(new)
    return state


def initial_model(params: Any) -> Params:
    """A model that rounds begin with, float32 (d,): a flat array of finite numbers as it is, or
    a flattened model.
    """
    if is_model(params):
        params_d = flatten(params)
    else:
        given_d = as_reals("the model", params, "deltafl.flatten(model)")
        with np.errstate(over="ignore"):
            params_d = np.array(given_d, np.float32)
    bad = np.count_nonzero(~np.isfinite(params_d))
    if bad > 0 or params_d.ndim != 1 or not len(params_d):
        raise DeltaflError(
            f"params of shape {params_d.shape}, {bad} not finite; give a flat array of finite "
            "numbers, one at least"
        )
    return params_d


def is_model(given: Any) -> bool:
    """Whether this is a module, a dict or a list of arrays (by its first entry) rather than one
    list of numbers.
    """
    if type(given) in (list, tuple) and given:
        return isinstance(given[0], list | tuple) or getattr(given[0], "ndim", 0) > 0
    return isinstance(given, Mapping) or hasattr(given, "state_dict")


def update_of(sent: Mapping[str, Array], received: Mapping[str, Array]) -> Params:
    """Received - sent over the arrays in ``sent``, in that order, float32 (d,); overflowing
    entries become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [
            # In float64: in the arrays' own types, such as float16, the difference would be
            # rounded.
            np.subtract(received[name], old, dtype=np.float64).astype(np.float32).ravel()
            for name, old in sent.items()
        ]
    return np.concatenate(parts)


def mean_rest(
    parts: ModelParts,
    sent: Arrays,
    replies: list[Arrays],
    coef_n: FloatArray,
    median: bool = False,
) -> Arrays:
    """Buffers and counters after a round: sent + sum_i h_i (received_i - sent), h = coef / sum
    coef.

    With ``median`` the lower median of each entry, whatever the coefficients: no client alone moves
    it.
    """
    rest = parts.rest(sent)
    total = float(coef_n.sum())
    # No reply counts: everything stays as it was sent.
    if total <= 0:
        return rest
    for entry in parts.entries:
        if entry.kind not in MEANS or entry.dtype == "bool":
            continue
        old = sent[entry.name]
        if median:
            ordered = np.sort([reply[entry.name] for reply in replies], axis=0)
            # The lower one where there are two, so that one client of two cannot raise it.
            rest[entry.name] = np.asarray(ordered[(len(replies) - 1) // 2], old.dtype)
            continue
        mean = WeightedMean(old)
        for share, reply in zip(coef_n / total, replies, strict=True):
            mean.add(share, reply[entry.name])
        rest[entry.name] = mean.value()
    return rest


class WeightedMean:
    """Old + sum_i h_i (new_i - old), where the h_i >= 0 add up to 1 at most; integers rounded."""

    def __init__(self, old: Array) -> None:
        self._old = old
        self._is_float = old.dtype.kind == "f"
        # float64 does not hold all 64-bit integers.
        self._wide: Any = np.float64 if self._is_float else np.longdouble
        self._change: Any = np.zeros(old.shape, self._wide)
        self._least = self._most = old

    def add(self, share: float, new: Array) -> None:
        """Add an array with its h_i."""
        self._change += share * (new.astype(self._wide) - self._old.astype(self._wide))
        if not self._is_float:
            self._least = np.minimum(self._least, new)
            self._most = np.maximum(self._most, new)

    def value(self) -> Array:
        """The mean, in the type of the old array."""
        mean = self._old.astype(self._wide)
        if self._is_float:
            mean += self._change
        else:
            # Where longdouble is float64, rounding could leave the range of the type.
            mean = np.clip(mean + np.rint(self._change), self._least, self._most)
        return np.asarray(mean).astype(self._old.dtype)
