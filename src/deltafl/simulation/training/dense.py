"""Chains of linear layers and activations for several clients at once: forward, and gradients without autograd.

Parameters have a leading axis of n clients, (n, C, F) and (n, C); inputs are (n, B, ...), outputs (n, C, B). For models
this small autograd's own work takes as long as the products; the gradients of a chain with cross-entropy are few lines.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from .refusal import has_hooks, is_plain

#: Floats in 64 bytes: the stretch that vector instructions start at.
ALIGNMENT = 16


class DenseChain:
    """A ``Sequential`` of Flatten, linear layers, ReLU, tanh and sigmoid. Make it with ``of``."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The chain of a model, or None if it is none."""
        if type(model) is not nn.Sequential or len(model) == 0:
            return None
        first, *layers = model
        if type(first) is not nn.Flatten or (first.start_dim, first.end_dim) != (1, -1):
            return None
        if not all(type(layer) in (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid) for layer in layers):
            return None
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if any(map(has_hooks, (model, *model))) or not all(map(is_plain, linear)):
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
        """Write the gradients of sum_b weight_b loss_b, loss the cross-entropy; returns weight_b loss_b, (n, B).

        Args:
            params: Weights and biases in the order of the layers.
            x: (n, B, ...).
            y: int64 (n, B), labels.
            weight_nb: (n, B).
            gradients: Where the gradients go, of the shapes of the parameters.
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
        """What goes into every layer, and what comes out, (n, features, B): the fastest order of all products."""
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
    """The gradient in an activation's input, from the one in its output."""
    if isinstance(activation, nn.ReLU):
        return delta * (after > 0)
    if isinstance(activation, nn.Tanh):
        return delta * (1 - after * after)
    return delta * (after * (1 - after))


def _aligned(weight: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (n, C, F) and inputs (n, F, B), with features of 0 appended where C F is no multiple of 64 bytes.

    The gradient in the weights is a product of its own, whose rounding depends on where a client's matrix begins. With
    F = 1 features are appended too: torch cuts a product with a single column by the number of clients.
    """
    if weight[0].numel() % ALIGNMENT == 0 and weight.shape[2] > 1:
        return weight, h
    more = -weight.shape[2] % ALIGNMENT
    return functional.pad(weight, (0, more)), functional.pad(h, (0, 0, 0, more))
