"""The forward pass of n models at once, and how many clients to train with it.

Chains of dense layers (``DenseChain``) and modules with a method ``forward_vectorized`` have their own vectorized form;
``torch.vmap`` makes it for other modules without state. All forms are functions of parameters with a leading axis of n
clients and of inputs (n, B, ...), and return (n, C, B) or (n, B).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...types import IntArray
from .compatibility import example_of, has_hooks, incompatibility, loss_incompatibility
from .serial import LocalWork

if TYPE_CHECKING:
    from ...tasks.base import Task

#: ``forward(params, x)`` for n clients.
Forward = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]

#: Floats in 64 bytes, to which vector instructions are aligned.
ALIGNMENT = 16

_LANES = 32  # examples: two vectors of 16 floats, the longest stretch that torch's loops process at once
_LARGEST_COHORT = 256
_CACHE_BYTES = 4 * 1024**2  # of the step of a dense cohort: about what stays in a core's caches
_CPU_BYTES = 4 * 1024**3  # of the step of any other cohort
_CALLS_WORTH = 600_000  # products of an example and a parameter that take as long as the calls of one serial step


class DenseChain:
    """Vectorized form of a ``Sequential`` of Flatten, linear layers, ReLU, tanh and sigmoid; make it with ``of``.

    Its gradients are written out: in small models autograd takes as long as the products.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The form of a model, or None if it is no such chain."""
        if type(model) is not nn.Sequential or len(model) == 0:
            return None
        first, *layers = model
        if type(first) is not nn.Flatten or (first.start_dim, first.end_dim) != (1, -1):
            return None
        if not all(type(layer) in (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid) for layer in layers):
            return None
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if any(map(has_hooks, (model, *model))) or any(set(part._parameters) != {"weight", "bias"} for part in linear):
            return None
        return cls(layers)

    def __call__(self, params: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Outputs (n, C, B) of inputs (n, B, ...)."""
        return self._forward(params, x)[1][-1]

    def differentiate(
        self,
        params: Sequence[torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        weight_nb: torch.Tensor,
        gradients: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Write the gradients of sum_b weight_b loss_b of the cross-entropy; returns weight_b loss_b, (n, B).

        Args:
            params: Weights and biases in the order of the layers.
            x: (n, B, ...).
            y: int64 (n, B), labels.
            weight_nb: (n, B).
            gradients: Receive the gradients; of the shapes of the parameters.
        """
        before, after = self._forward(params, x)
        log_share = functional.log_softmax(after[-1], dim=1)
        label = y[:, None]
        weighted_nb = -log_share.gather(1, label)[:, 0] * weight_nb
        delta = log_share.exp_().scatter_add_(1, label, log_share.new_full((), -1.0).expand(label.shape))
        delta *= weight_nb[:, None]
        place = len(gradients)
        for layer, h, output in zip(reversed(self._layers), reversed(before), reversed(after), strict=True):
            if not isinstance(layer, nn.Linear):
                delta = _through(layer, delta, output)
                continue
            if _bias(layer) is not None:
                place -= 1
                torch.sum(delta, dim=2, out=gradients[place])
            place -= 1
            gradients[place].copy_(torch.bmm(delta, h.transpose(1, 2))[:, :, : gradients[place].shape[2]])
            if place > 0:
                delta = torch.bmm(params[place].transpose(1, 2), delta)
        return weighted_nb

    def _forward(
        self, params: Sequence[torch.Tensor], x: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs and outputs of every layer, (n, features, B), the fastest memory order for the products."""
        before, after = [], []
        h = x.flatten(2).transpose(1, 2)
        remaining = iter(params)
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                weight, h = _aligned(next(remaining), h)
                biased = _bias(layer) is not None
                output = torch.baddbmm(next(remaining)[:, :, None], weight, h) if biased else torch.bmm(weight, h)
            else:
                output = layer(h)
            before.append(h)
            after.append(output)
            h = output
        return before, after


def _bias(layer: nn.Linear) -> torch.Tensor | None:
    return layer._parameters["bias"]


def _through(activation: nn.Module, delta: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The gradient in an activation's input, from the gradient ``delta`` in its output ``after``."""
    if isinstance(activation, nn.ReLU):
        return delta * (after > 0)
    if isinstance(activation, nn.Tanh):
        return delta * (1 - after * after)
    return delta * (after * (1 - after))


def _aligned(weight: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (n, C, F) and inputs (n, F, B), with zero features appended where C F floats are no multiple of 64 bytes.

    Otherwise the rounding of the gradient in the weights would depend on where a client's matrix starts. Also with
    F = 1, because torch divides a product with a single column by the number of clients.
    """
    if weight[0].numel() % ALIGNMENT == 0 and weight.shape[2] > 1:
        return weight, h
    more = -weight.shape[2] % ALIGNMENT
    return functional.pad(weight, (0, more)), functional.pad(h, (0, 0, 0, more))


def own_form(model: nn.Module) -> Forward | None:
    """A dense chain's vectorized form, or a module's own (``forward_vectorized``); None for others, and with hooks."""
    own: Forward | None = getattr(model, "forward_vectorized", None)
    if own is not None:
        return None if any(map(has_hooks, model.modules())) else own
    return DenseChain.of(model)


def vectorized_forward(model: nn.Module) -> Forward:
    """The vectorized form of a model for which ``vectorized_incompatibility`` is None."""
    own = own_form(model)
    if own is not None:
        return own
    names = [name for name, _ in model.named_parameters()]

    def one(params: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))
        return output

    many = torch.vmap(one)

    def forward(params: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = many(tuple(params), x)
        return output.movedim(1, -1)

    return forward


def vectorized_incompatibility(model: nn.Module, task: "Task") -> str | None:
    """Why a cohort of a task cannot be trained as a batch, or None if it can; tried on two clients."""
    reason = incompatibility(model, example_of(task)) or loss_incompatibility(model, task)
    if reason is not None:
        return reason
    x = torch.stack([torch.cat([example_of(task)] * 2)] * 2)
    params = [param.detach().expand(2, *param.shape).clone().requires_grad_() for param in model.parameters()]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*batching rule")
            output = vectorized_forward(model)(params, x)
            torch.autograd.grad(output.sum(), params, allow_unused=True)
    except (RuntimeError, UserWarning) as error:
        return f"torch.vmap does not run the model ({' '.join(str(error).split())[:100]})"
    return None


def dense_cohort_size(model: nn.Module, task: "Task", work: LocalWork) -> int:
    """How many clients a CPU trains best at once in float32, with the same bits in any cohort; 1 for one by one.

    A pure function of its arguments: a run takes one path, on any machine and with any number of workers.
    """
    if own_form(model) is None or task.augment is not None or task.tokens:
        return 1
    if incompatibility(model, example_of(task)) is not None or loss_incompatibility(model, task) is not None:
        return 1
    num_params = sum(param.numel() for param in model.parameters())
    width = padded_width(task.client_rows, work.batch_size)
    if _padding(task.client_rows, work.batch_size, width) * num_params > _CALLS_WORTH:
        return 1
    inputs = math.prod(task.dataset.train_x.shape[1:])
    size = _CACHE_BYTES // (4 * (5 * num_params + 2 * width * inputs))
    return max(1, min(size, _LARGEST_COHORT))


def cohort_size(model: nn.Module, task: "Task", width: int, device: torch.device) -> int:
    """How many clients fit into one batch, at most 256: a step takes half of a GPU's memory, by an estimate.

    It depends on the GPU's model, not on its free memory, because the division into batches decides last bits.
    """
    memory = _CPU_BYTES
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory // 2
    num_params = sum(param.numel() for param in model.parameters())
    numbers = numbers_per_example(model, task)
    return max(1, min(_LARGEST_COHORT, memory // (4 * (6 * num_params + 3 * width * numbers))))


def numbers_per_example(model: nn.Module, task: "Task") -> int:
    """How many numbers the layers put out for one example."""
    example = example_of(task)
    counted = [example.numel()]

    def count(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        if isinstance(output, torch.Tensor):
            counted.append(output.numel())

    hooks = [part.register_forward_hook(count) for part in model.modules() if not list(part.children())]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)


def largest_batch(client_rows: Sequence[IntArray], batch_size: int | None) -> int:
    """Examples in the largest minibatch of any client."""
    return max(min(batch_size or len(rows), len(rows)) for rows in client_rows)


def padded_width(client_rows: Sequence[IntArray], batch_size: int | None) -> int:
    """The largest minibatch rounded up to a multiple of 32: vector instructions then cut all clients' rows alike."""
    return -(-largest_batch(client_rows, batch_size) // _LANES) * _LANES


def _padding(client_rows: Sequence[IntArray], batch_size: int | None, width: int) -> float:
    """Padding examples in the mean minibatch."""
    size_m = np.array([len(rows) for rows in client_rows])
    batches_m = np.ceil(size_m / np.minimum(size_m, batch_size or size_m.max()))
    return float(width - size_m.sum() / batches_m.sum())
