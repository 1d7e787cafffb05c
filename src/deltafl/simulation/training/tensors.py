"""The tensors of a module by what becomes of them in local training, see ``model/parts.py``."""

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from ...model.arrays import Arrays, as_array, copied, tensors_of
from ...model.parts import MEANS, ModelParts, freeze
from ...tasks.modules import keep_frozen_statistics, numbers_in, spare_single_values, take_step
from ..describe import UnknownError, describe

#: What clients bring back beside the flat vector.
BROUGHT_BACK = (*MEANS, "local")
#: Of the largest number: what is further apart has not been rounded, but computed in another way.
_ROUNDING = 1e-3
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(part: nn.Module) -> bool:
    """Whether calling a module does more than its class, which another form would leave out."""
    return any(getattr(part, name) for name in _HOOKS) or "forward" in vars(part)


def remembers(model: nn.Module, examples: torch.Tensor, training: bool) -> bool:
    """Whether passes leave something in the model, such as a count or a last state in an attribute,
    which the next client or evaluation would find there.
    """
    trial = copied(model).train(training)
    trained = list(trained_parameters(trial).values())
    start = [param.detach().clone() for param in trained]
    before = _held(trial)
    # Some states show after a step alone: a teacher's, or what a pass with gradients leaves.
    for _ in range(2):
        with torch.set_grad_enabled(training):
            output = trial(examples.clone())
        # In it no output cancels another's.
        loss = numbers_in(output).square().mean()
        if loss.requires_grad:
            torch.autograd.backward(loss)
            take_step(trial)
    for param, first in zip(trained, start, strict=True):
        param.data.copy_(first)
    return _held(trial) != before


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if one.shape != other.shape:
        return False
    size = 0.0
    if other.numel() > 0:
        size = float(other.detach().abs().nan_to_num().max())
    return torch.allclose(one, other, rtol=0, atol=_ROUNDING * size, equal_nan=True)


def _held(model: nn.Module) -> list[tuple[str, str]]:
    """What a module and its parts hold themselves: no copy has what their classes hold."""
    found = []
    for part in model.modules():
        for name, value in vars(part).items():
            # Such as weak references to weights, which an LSTM has.
            with suppress(UnknownError):
                if name != "_modules":
                    found.append((name, describe(value)))
    return found


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with a gradient, by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class ModelTensors:
    """A module whose parameters come from a flat vector, and the rest from arrays.

    Attributes:
        model: The module.
        own: The local parameters with a gradient, which a client trains beside the vector.
    """

    def __init__(self, model: nn.Module, parts: ModelParts) -> None:
        self.model = model
        self._parts = parts
        tensors = tensors_of(model)
        # Tied weights are one tensor, or several in the same memory.
        same: dict[str, dict[int, Tensor]] = {name: {} for name in parts.trained}
        for entry in parts.entries:
            if entry.kind == "trained":
                tensor = tensors[entry.name]
                of_piece = same[entry.same_as or entry.name]
                of_piece[id(tensor)] = tensor
        self._trained = [list(of_tensor.values()) for of_tensor in same.values()]
        self._sizes = [of_tensor[0].numel() for of_tensor in self._trained]
        self._pieces: Sequence[Tensor] = ()
        self._rest = {
            entry.name: entry.dtype for entry in parts.entries if entry.kind in BROUGHT_BACK
        }
        local = {id(tensors[name]): tensors[name] for name in parts.names("local")}
        self.own = [tensor for tensor in local.values() if tensor.requires_grad]
        self._frozen = freeze(model, parts)

    def copied(self, share: bool = True) -> "ModelTensors":
        """A copy to train; to ``share`` frozen parameters is for models whose passes leave them
        alone.
        """
        shared = {
            key: tensor
            for key, tensor in self._frozen.items()
            # A forward pass may write into a buffer, whoever calls it frozen.
            if share and isinstance(tensor, nn.Parameter)
        }
        model = copied(self.model, shared).train()
        spare_single_values(model)
        tensors = ModelTensors(model, self._parts)
        keep_frozen_statistics(model, tensors._frozen)
        return tensors

    def load(self, vector_d: Tensor) -> None:
        """Let the trained tensors be parts of a flat vector."""
        self._pieces = torch.split(vector_d, self._sizes)
        for of_tensor, piece_d in zip(self._trained, self._pieces, strict=True):
            for tensor in of_tensor:
                # A view, no copy: the model is loaded before every step.
                tensor.data = piece_d.view_as(tensor)

    def take_back(self) -> None:
        """Put into the vector what a pass has put in the place of its parts, as a limit on norms
        does by ``weight.data = torch.renorm(...)``; after the pass back, which needs the old ones.
        """
        for of_tensor, piece_d in zip(self._trained, self._pieces, strict=True):
            for tensor in of_tensor:
                take_back(tensor, piece_d)

    def load_rest(self, rest: Arrays) -> None:
        """Copy buffers, counters and local arrays."""
        if not rest:
            return
        tensors = tensors_of(self.model)
        with torch.no_grad():
            for name, array in rest.items():
                tensors[name].copy_(torch.tensor(array))

    def rest(self) -> Arrays:
        """Copies of the buffers, counters and local arrays."""
        if not self._rest:
            return {}
        # Looked up anew, as a forward pass may put other tensors in their place.
        tensors = tensors_of(self.model)
        return {name: np.array(as_array(tensors[name]), type) for name, type in self._rest.items()}

    def gradient(self) -> Tensor:
        """The gradient in the flat vector, 0 in unused parameters."""
        # Tied weights that are several tensors have a part of the gradient each.
        return torch.cat(
            [reduce(torch.add, map(take_gradient, of_tensor)) for of_tensor in self._trained]
        )


def take_gradient(tensor: Tensor) -> Tensor:
    """The gradient as a vector, of which the tensor keeps nothing; 0 where nothing used it."""
    gradient = tensor.grad
    tensor.grad = None
    if gradient is None:
        return torch.zeros_like(tensor).reshape(-1)
    # Of an Embedding it may be sparse.
    return gradient.to_dense().reshape(-1)


def take_back(tensor: Tensor, piece_d: Tensor) -> None:
    """Let a tensor be a part of a vector again, with the numbers that a pass has put elsewhere."""
    if tensor.data_ptr() != piece_d.data_ptr():
        piece_d.copy_(tensor.data.reshape(-1))
        tensor.data = piece_d.view_as(tensor)
