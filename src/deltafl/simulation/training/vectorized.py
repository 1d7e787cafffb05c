"""The forward pass of n models at once.

Chains of dense layers (``DenseChain``) and modules with a method ``forward_vectorized`` have their own vectorized form;
``torch.vmap`` makes it for other modules without state. All forms are functions of parameters with a leading axis of n
clients and of inputs (n, B, ...), and return (n, C, B) or (n, B).
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from .fast import has_hooks

#: ``forward(params, x)`` for n clients.
Forward = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]

#: Floats in 64 bytes, to which vector instructions are aligned.
ALIGNMENT = 16


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
        """Write the gradients of sum_b weight_b loss_b of the cross-entropy; returns weight_b loss_b, (n, B)."""
        before, after = self._forward(params, x)
        log_share = functional.log_softmax(after[-1], dim=1)
        label = y[:, None]
        weighted_nb = -log_share.gather(1, label)[:, 0] * weight_nb
        delta = log_share.exp_().scatter_add_(1, label, log_share.new_full((), -1.0).expand(label.shape))
        delta *= weight_nb[:, None]
        place = len(gradients)
        for layer, h, output in zip(reversed(self._layers), reversed(before), reversed(after), strict=True):
            if isinstance(layer, nn.Linear):
                if layer.bias is not None:
                    place -= 1
                    torch.sum(delta, dim=2, out=gradients[place])
                place -= 1
                gradients[place].copy_(torch.bmm(delta, h.transpose(1, 2))[:, :, : gradients[place].shape[2]])
                if place > 0:
                    delta = torch.bmm(params[place].transpose(1, 2), delta)
            elif isinstance(layer, nn.ReLU):
                delta = delta * (output > 0)
            else:
                slope = 1 - output * output if isinstance(layer, nn.Tanh) else output * (1 - output)
                delta = delta * slope
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
                biased = layer.bias is not None
                output = torch.baddbmm(next(remaining)[:, :, None], weight, h) if biased else torch.bmm(weight, h)
            else:
                output = layer(h)
            before.append(h)
            after.append(output)
            h = output
        return before, after


def _aligned(weight: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (n, C, F) and inputs (n, F, B); zero features make C F floats a multiple of 64 bytes."""
    # Else rounding would depend on where a client's matrix starts, and with F = 1 on the number of clients.
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
    """The vectorized form of a model for which ``route.vectorized_incompatibility`` is None."""
    own = own_form(model)
    if own is not None:
        return own
    names = [name for name, _ in model.named_parameters()]

    def one(params: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))
        return output

    def forward(params: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.vmap(one)(tuple(params), x)
        return output.movedim(1, -1)

    return forward
