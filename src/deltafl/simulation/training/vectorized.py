"""The forward pass of n models at once: a chain's own, a module's own, or ``torch.vmap``'s."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .convolution import ConvolutionsAsProducts
from .dense import DenseChain
from .dropout import masked_layers, wearing
from .tensors import has_hooks, trained_parameters

#: The forward pass of n models: parameters with a leading axis of n, inputs (n, B, ...), outputs
#: (n, C, B) or (n, B). Models with dropout take its masks, too.
Forward = Callable[..., Tensor]


def own_form(model: nn.Module) -> Forward | None:
    """A dense chain's vectorized form, or a module's own (``forward_vectorized``); else None, as
    for models with frozen parameters.
    """
    known: Any = model
    if not all(param.requires_grad for param in model.parameters()):
        return None
    if not hasattr(known, "forward_vectorized"):
        return DenseChain.of(model)
    if any(map(has_hooks, model.modules())):
        return None
    own: Forward = known.forward_vectorized
    return own


def vectorized_forward(
    model: nn.Module,
    products: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Forward:
    """The vectorized form of a model, of its trained parameters; with ``products``, convolutions
    are matrix products.

    Attention is written out as products and a softmax, for torch.vmap has no rule for the fused
    kernels of a CPU, and some of a GPU do not repeat their bits. Frozen parameters are the same for
    all clients, in the given type.
    """
    own = own_form(model)
    if own is not None:
        return own
    names = list(trained_parameters(model))
    frozen = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            frozen[name] = param.to(dtype)

    layers = masked_layers(model)

    def one(params: Sequence[Tensor], x: Tensor, masks: Sequence[Tensor]) -> Tensor:
        all_params = frozen | dict(zip(names, params, strict=True))
        with wearing(layers, masks):
            output: Tensor = torch.func.functional_call(model, all_params, (x,))
        return output

    def forward(params: Sequence[Tensor], x: Tensor, *masks: Tensor) -> Tensor:
        plain_attention = sdpa_kernel(SDPBackend.MATH)
        with plain_attention, ConvolutionsAsProducts() if products else nullcontext():
            output: Tensor = torch.vmap(one)(tuple(params), x, masks)
        # Classes before examples, which is the order of torch's losses.
        return output.movedim(1, -1)

    return forward
