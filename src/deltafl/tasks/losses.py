"""The losses of the tasks, means over a minibatch; and the names of PyTorch's types."""

from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import DeltaflError

# PyTorch is optional and slow to import, so its types have names of ours in all of this package.
Tensor: TypeAlias = Any  #: a ``torch.Tensor``
Module: TypeAlias = Any  #: a ``torch.nn.Module``
MakeModel = Callable[[], Module]
#: ``loss(output, y)``: the mean loss of a minibatch.
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, C) and labels (B,)."""
    from .modules import nn

    return nn.functional.cross_entropy(output, y)


def binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits: one (B,) or (B, 1) for labels (B,) 0 or 1, or
    (B, labels) for targets of this shape.
    """
    from .modules import nn

    logit = output.reshape(y.shape)
    return nn.functional.binary_cross_entropy_with_logits(logit, y.to(logit.dtype))


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of predictions and targets of the same shape, such as (B,).

    Raises:
        DeltaflError: If their shapes differ, for (B, 1) against (B,) would become (B, B).
    """
    if output.shape != y.shape:
        raise DeltaflError(
            f"squared_error got outputs of shape {tuple(output.shape)} and targets of shape "
            f"{tuple(y.shape)}, which must be the same: end the model with squeeze(-1), or give "
            "targets of the outputs' shape"
        )
    return (output - y).square().mean()
