"""Convolutions as matrix products, for cohorts on a GPU.

torch.vmap makes the convolutions of n models one with n groups, for which cuDNN launches several
kernels a client. The product of weights and patches is one kernel for all, which pays in float32;
in bfloat16 the groups are as fast.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ConvolutionsAsProducts(TorchFunctionMode):
    """In this context two-dimensional convolutions without dilation and groups are products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``conv2d`` in place of torch's."""
        if func is functional.conv2d:
            func = conv2d
        return func(*args, **(kwargs or {}))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv2d``: (B, C, H, W) and (O, C, h, w) to (B, O, H', W')."""
    # A single image has no axis of examples.
    is_plain = groups == 1 and set(_pair(dilation)) == {1} and input.dim() == 4
    # What is no plain product stays torch's.
    if not is_plain or isinstance(padding, str):
        return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    channels = len(weight)
    (down, across) = _pair(stride)
    (top, left) = _pair(padding)
    # ``pad`` takes the last axis first.
    padded = functional.pad(input, (left, left, top, top))
    rows = padded.unfold(2, weight.shape[2], down)
    # (B, C, H', W', h, w)
    patches = rows.unfold(3, weight.shape[3], across)
    # (C h w, B H' W'): one product for all examples and places.
    columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
    product = weight.flatten(1) @ columns
    if bias is not None:
        product = product + bias[:, None]
    output = product.view(channels, len(input), *patches.shape[2:4]).transpose(0, 1)
    # In torch's own order, for a model may go on with ``view``; most layers would copy it anyway.
    return output.contiguous()


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]
