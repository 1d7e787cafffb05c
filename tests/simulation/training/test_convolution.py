"""Convolutions as products against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from batch_tools import MODELS
from deltafl.simulation.training.convolution import conv2d
from deltafl.simulation.training.vectorized import vectorized_forward


def gradients_of(forward: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output for double copies of the inputs, and the derivatives of its squared norm by
    them.
    """
    own = [value.double().requires_grad_() for value in inputs]
    output = forward(*own)
    return [
        output,
        *torch.autograd.grad(output.square().sum(), own, allow_unused=True, materialize_grads=True),
    ]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (1, 3), "padding": (2, 0)},
        {"padding": "valid"},
        {"dilation": (1, 2)},
        {"groups": 2},
    ],
    ids=str,
)
def test_a_product_is_the_convolution(how: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    channels = 4 // how.get("groups", 1)
    shapes = (5, 4, 9, 8), (6, channels, 3, 2), (6,)
    inputs = [torch.randn(shape, generator=rng) for shape in shapes]
    for given in (inputs, inputs[:2]):
        expected = gradients_of(lambda *own: functional.conv2d(*own, **how), given)
        torch.testing.assert_close(gradients_of(lambda *own: conv2d(*own, **how), given), expected)


@pytest.mark.parametrize("name", ["two-layer cnn", "four-layer cnn", "resnet", "own"])
def test_cohorts_are_the_same_with_products(name: str) -> None:
    make_model, shape = MODELS[name]
    rng = torch.Generator().manual_seed(0)
    model = make_model().double()
    params = [torch.randn((3, *param.shape), generator=rng) for param in model.parameters()]
    x = torch.randn((3, 7, *shape), generator=rng)
    found = [
        gradients_of(
            lambda x, *own, products=products: vectorized_forward(model, products)(own, x),
            [x, *params],
        )
        for products in (False, True)
    ]
    torch.testing.assert_close(found[1], found[0])


def test_products_call_no_convolution() -> None:
    make_model, shape = MODELS["resnet"]
    model = make_model()
    params = [param.detach().expand(2, *param.shape) for param in model.parameters()]
    forward = vectorized_forward(model, products=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(params, torch.zeros(2, 1, *shape))
    assert not [event for event in profile.events() if "conv" in event.name]


class Forward(nn.Module):
    """A convolution in a user's words."""

    def __init__(self, how: Callable[["Forward", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


@pytest.mark.parametrize(
    "how",
    {
        "view": lambda own, x: torch.relu(own.conv(x)).view(len(x), -1),
        "names": lambda own, x: functional.conv2d(
            input=x, weight=own.conv.weight, bias=own.conv.bias, stride=[2, 1]
        ).flatten(1),
        "images": lambda own, x: torch.stack([own.conv(x[i]).flatten() for i in range(len(x))]),
    }.values(),
    ids=["view", "names", "images"],
)
def test_a_product_is_called_and_used_as_the_convolution(how: Any) -> None:
    model = Forward(how)
    params = [param.detach().expand(2, *param.shape) for param in model.parameters()]
    x = torch.rand((2, 5, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    found, expected = (vectorized_forward(model, products)(params, x) for products in (True, False))
    torch.testing.assert_close(found, expected)
