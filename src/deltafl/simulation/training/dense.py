"""Dense models of a cohort: forward passes, and gradients that are written out.

In small models autograd takes as long as the products.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tensors import has_hooks

#: Floats in 64 bytes, to which vector instructions are aligned.
ALIGNMENT = 16


class Stretch(NamedTuple):
    """The examples of k steps of the same n clients."""

    x: Tensor  # (k, n, B, ...)
    y: Tensor  # (k, n, B)
    weight_knb: Tensor
    #: of each layer that drops, (k, n, B, ...)
    masks: tuple[Tensor, ...] = ()


class _Dense(NamedTuple):
    """A linear layer of n models."""

    weight: Tensor  # (n, C, F)
    bias: Tensor | None  # (n, C, 1)
    more: int  # zero features that make C F floats a multiple of 64 bytes

    def backward(self, delta: Tensor) -> Tensor:
        """The gradient (n, F, B) of the inputs from that of the outputs, (n, C, B)."""
        if self.weight.shape[2] > 1:
            return torch.bmm(self.weight.transpose(1, 2), delta)
        # Else rounding would depend on the number of clients, on Intel's processors.
        wide = functional.pad(self.weight, (0, self.more))
        return torch.bmm(wide.transpose(1, 2), delta)[:, :1]

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs (n, F, B) with the zero features, and the outputs (n, C, B)."""
        weight = self.weight
        if self.more > 0:
            weight = functional.pad(weight, (0, self.more))
            h = functional.pad(h, (0, 0, 0, self.more))
        if self.bias is None:
            return h, torch.bmm(weight, h)
        return h, torch.baddbmm(self.bias, weight, h)


class DenseChain:
    """Vectorized form of a ``Sequential`` of Flatten, linear layers, ReLU, tanh and sigmoid.

    Attributes:
        num_inputs: Numbers of an example.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.num_inputs = linear[0].in_features

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
        # ``differentiation`` ends at a linear layer, the first one.
        if len(layers) == 0 or type(layers[0]) is not nn.Linear:
            return None
        if any(map(has_hooks, (model, *model))) or any(part._modules for part in model):
            return None
        # Layers with a parametrization have parameters of other names, and any module may have more
        # than its class.
        names = ("weight", "bias")
        known = [
            f"{place}.{name}"
            for place, layer in enumerate(model)
            for name in names
            if type(layer) is nn.Linear and getattr(layer, name) is not None
        ]
        if [name for name, _ in model.named_parameters()] != known:
            return None
        return cls(layers)

    def __call__(
        self,
        params: Sequence[Tensor],
        x: Tensor,
    ) -> Tensor:
        """Outputs (n, C, B) of inputs (n, B, ...)."""
        _, after = _forward(self._bound(params), x.flatten(2).transpose(1, 2))
        return after[-1]

    def differentiation(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        some: Stretch,
    ) -> Callable[[int], Tensor]:
        """``BatchedTrainer._differentiation`` for the cross-entropy; the losses are (n, 1, B)."""
        layers = self._bound(params)
        x_k = some.x.flatten(3).transpose(2, 3).unbind()
        label_k = some.y[:, :, None].unbind()
        weight_k = some.weight_knb[:, :, None].unbind()
        minus_one = torch.full((), -1.0).expand(label_k[0].shape)

        def differentiate(step: int) -> Tensor:
            before, after = _forward(layers, x_k[step])
            log_share = functional.log_softmax(after[-1], dim=1)
            label = label_k[step]
            loss = log_share.gather(1, label).neg_()
            # The gradient of the cross-entropy in its inputs: softmax, less 1 at the label.
            delta = log_share.exp_().scatter_add_(1, label, minus_one)
            delta.mul_(weight_k[step])
            place = len(gradients)
            passed = [*zip(layers, before, after, strict=True)]
            for layer, h, output in reversed(passed):
                if isinstance(layer, _Dense):
                    if layer.bias is not None:
                        place -= 1
                        torch.sum(delta, dim=2, out=gradients[place])
                    place -= 1
                    gradient = torch.bmm(delta, h.transpose(1, 2))
                    gradients[place].copy_(gradient[:, :, : layer.weight.shape[2]])
                    # Nobody asks for the gradient of the examples.
                    if place > 0:
                        delta = layer.backward(delta)
                elif isinstance(layer, nn.ReLU):
                    delta = delta * (output > 0)
                elif isinstance(layer, nn.Tanh):
                    delta = delta * (1 - output * output)
                else:
                    delta = delta * (output * (1 - output))
            return loss

        return differentiate

    def _bound(self, params: Sequence[Tensor]) -> list[nn.Module | _Dense]:
        """The layers with the parameters of n models."""
        remaining = iter(params)
        bound = list[nn.Module | _Dense]()
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                weight = next(remaining)
                # Else rounding would depend on where a client's matrix starts, and with F = 1 on
                # the number of clients.
                aligned = weight[0].numel() % ALIGNMENT == 0 and weight.shape[2] > 1
                bias = None
                if layer.bias is not None:
                    bias = next(remaining)[:, :, None]
                more = 0
                if not aligned:
                    more = -weight.shape[2] % ALIGNMENT
                bound.append(_Dense(weight, bias, more))
            else:
                bound.append(layer)
        return bound


def _forward(layers: Sequence[nn.Module | _Dense], h: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of every layer, (n, features, B), which suits the products."""
    before = []
    after = []
    for layer in layers:
        if isinstance(layer, _Dense):
            # With the zero features, which the gradient's product needs again.
            h, output = layer(h)
        else:
            output = layer(h)
        before.append(h)
        after.append(output)
        h = output
    return before, after
