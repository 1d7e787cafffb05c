"""The losses of the tasks, means over a minibatch; and the names of PyTorch's types."""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError
from ..types import Array

# PyTorch is optional and slow to import, so its types have names of ours in all of this package.
Tensor: TypeAlias = Any  #: a ``torch.Tensor``
Module: TypeAlias = Any  #: a ``torch.nn.Module``
MakeModel = Callable[[], Module]
#: ``loss(output, y)``: the mean loss of a minibatch.
Loss = Callable[[Tensor, Tensor], Tensor]

#: Of the outputs on which a loss is tried: 16 MiB.
_TRIED_NUMBERS = 2**22


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


def ignored_labels(loss: Loss, y: Array, num_classes: int) -> tuple[int, ...]:
    """The labels in ``y`` that a loss of classes ignores: whatever the output is there, the loss
    is the same. Of padding the label is -100 by PyTorch's custom, or another ``ignore_index``.

    It is tried, for a loss may be anybody's function. Of tens of thousands of classes only the
    commonest are, and the one that the loss names.
    """
    label_e = y.reshape(-1)
    is_class_e = (label_e >= 0) & (label_e < num_classes)
    others = np.unique(label_e[~is_class_e]).tolist()
    if loss in (cross_entropy, binary_cross_entropy, squared_error):
        return tuple({-100} & {*others})
    count_c = np.bincount(label_e[is_class_e], minlength=num_classes)
    most = max(2, _TRIED_NUMBERS // num_classes)
    classes = np.argsort(-count_c, kind="stable")[:most].tolist()
    named: Any = getattr(loss, "ignore_index", None)
    if named in range(num_classes):
        classes.append(named)
    tried = [*dict.fromkeys([*classes, *others])]
    counts = _counts(loss, tried, num_classes, y.ndim)
    # A loss that nothing moves ignores no label: what is wrong with it is said elsewhere.
    if not any(counts):
        return ()
    return tuple(label for label, does in zip(tried, counts, strict=True) if not does)


def _counts(loss: Loss, labels: list[int], num_classes: int, axes: int) -> list[bool]:
    """Whether a loss depends on the outputs of examples with these labels; yes where it fails."""
    from .draws import seeded
    from .modules import torch

    rng = np.random.default_rng(0)
    places = [1] * (axes - 1)
    # They may be probabilities, too.
    output_kc = rng.uniform(0.2, 0.7, (len(labels), num_classes))
    for output_c, label in zip(output_kc, labels, strict=True):
        # So far from right that no margin is kept, where a loss asks for one.
        if 0 <= label < num_classes:
            output_c[label] = 0.1
    with torch.enable_grad(), seeded(rng), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = torch.tensor(output_kc.reshape(*output_kc.shape, *places), dtype=torch.float32)
        y = torch.tensor(labels).reshape(-1, *places)
        try:
            (gradient,) = torch.autograd.grad(loss(output.requires_grad_(), y), output)
        except OWN_ERRORS:
            return [True] * len(labels)
    return (gradient != 0).flatten(1).any(1).tolist()
