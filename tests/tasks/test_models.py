"""The models: their sizes, and that they are the functions that they claim to be."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.training.compatibility import incompatibility
from deltafl.simulation.training.serial import LocalWork, train_serial
from deltafl.tasks import (
    celeba_cnn,
    cross_entropy,
    femnist_cnn,
    mlp,
    next_token_lstm,
    resnet,
    softmax_regression,
    squared_error,
    two_layer_cnn,
)

Make = Callable[[], torch.nn.Module]
SMALL_CNN = partial(two_layer_cnn, (4, 8), in_channels=3, side=32, classes=5)
MODELS: dict[str, tuple[Make, tuple[int, ...], int, int]] = {
    "femnist_cnn": (femnist_cnn, (1, 28, 28), 62, 137_598),
    "celeba_cnn": (celeba_cnn, (3, 84, 84), 2, 30_498),
    "celeba_cnn, half": (partial(celeba_cnn, 2, 42), (3, 42, 42), 2, 29_154),
    "resnet8": (partial(resnet, 10, (16, 32, 64), 1, 8), (3, 8, 8), 10, 78_042),
    # The usual ResNet-18 with a 3 x 3 stem and 10 classes, whose batch normalization has as many
    # parameters.
    "resnet18": (resnet, (3, 8, 8), 10, 11_173_962),
    "two_layer_cnn": (two_layer_cnn, (1, 28, 28), 10, 18_378),
    "two_layer_cnn, small": (SMALL_CNN, (3, 32, 32), 5, 304 + 808 + 1005),
    "mlp": (partial(mlp, 64, (32, 16), 10), (1, 8, 8), 10, 64 * 32 + 32 + 32 * 16 + 16 + 170),
}
#: Models that learn to tell two kinds of images in so many steps of this length.
LEARNS = {
    "femnist_cnn": (40, 0.05),
    "celeba_cnn": (20, 0.05),
    "celeba_cnn, half": (20, 0.05),
    "resnet8": (10, 0.01),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_literature(name: str) -> None:
    make, shape, classes, num_params = MODELS[name]
    model = make()
    assert sum(p.numel() for p in model.parameters()) == num_params
    assert model(torch.zeros(3, *shape)).shape == (3, classes)
    # The fast path takes it, so no layer keeps statistics that averaging would lose.
    assert incompatibility(model, torch.zeros(1, *shape)) is None


def trained(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, lr: float
) -> torch.Tensor:
    """The outputs after local training."""
    work = LocalWork(lr=lr, steps=steps, batch_size=None)
    start_d = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    result = train_serial(model, cross_entropy, x, y, start_d, work, np.random.default_rng(0))
    end_d = torch.from_numpy(start_d + result.update_d)
    torch.nn.utils.vector_to_parameters(end_d, model.parameters())
    output: torch.Tensor = model(x)
    return output.detach()


@pytest.mark.parametrize("name", LEARNS)
def test_a_client_learns_left_from_top(name: str) -> None:
    make, shape, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    y = torch.arange(8) % 2
    x = 0.2 * torch.rand(8, *shape)
    x[y == 0, :, : shape[1] // 2] += 0.8
    x[y == 1, :, :, : shape[2] // 2] += 0.8
    output = trained(model, x, y, *LEARNS[name])
    assert torch.equal(output.argmax(1), y)
    # Half of what knowing nothing but that there are two classes would cost.
    assert float(cross_entropy(output, y)) < 0.5 * np.log(2)


def test_the_lstm_learns_what_the_first_of_two_tokens_says() -> None:
    torch.manual_seed(0)
    model = next_token_lstm(5, hidden=16)
    x = torch.tensor([[a, b] for a in range(5) for b in range(5)])
    y = (2 * x[:, 0] + 1) % 5
    assert torch.equal(trained(model, x, y, steps=300, lr=1.0).argmax(1), y)


@pytest.mark.parametrize("make", [two_layer_cnn, femnist_cnn])
def test_the_pool_may_stand_before_the_relu(make: Make) -> None:
    torch.manual_seed(0)
    model = make()
    layers = list(model.children())
    pools = [place for place, layer in enumerate(layers) if isinstance(layer, torch.nn.MaxPool2d)]
    for place in pools:
        layers[place : place + 2] = layers[place + 1], layers[place]
    x = torch.randn(5, 1, 28, 28)
    assert torch.equal(model(x), torch.nn.Sequential(*layers)(x))


def test_the_resnet_is_the_published_one_layer_by_layer() -> None:
    torch.manual_seed(0)
    model: Any = resnet(classes=7, groups=8)
    # No pool after the first convolution: 32 x 32 pixels are 4 x 4 before the mean.
    assert model[:-3](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    functional = torch.nn.functional
    (conv1, norm1, _, conv2, norm2) = model[5].inner
    shortcut = model[5].shortcut
    maps = torch.randn(2, 64, 8, 8)
    inner = functional.conv2d(maps, conv1.weight, stride=2, padding=1)
    inner = functional.group_norm(inner, 8, norm1.weight, norm1.bias).clamp(min=0)
    inner = functional.conv2d(inner, conv2.weight, padding=1)
    inner = functional.group_norm(inner, 8, norm2.weight, norm2.bias)
    side = functional.group_norm(functional.conv2d(maps, shortcut[0].weight, stride=2), 8)
    assert torch.allclose(model[5](maps), (inner + side).clamp(min=0), atol=1e-5)


def test_models_refuse_and_losses_are_means() -> None:
    with pytest.raises(DeltaflError, match="which 3 does not divide"):
        resnet(groups=3)
    with pytest.raises(DeltaflError, match="16 x 16"):
        two_layer_cnn(side=12)
    assert float(cross_entropy(torch.zeros(4, 10), torch.arange(4))) == pytest.approx(np.log(10))
    assert float(squared_error(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]))) == 2.5


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "deltafl.tasks.modules")
    with pytest.raises(MissingExtraError, match=r"'torch': pip install 'deltafl\[sim\]'"):
        softmax_regression(2, 2)
