"""The models of images: their sizes, and that they are the functions that they claim to be."""

import numpy as np
import pytest
import torch

from deltafl.simulation.fast import refusal
from deltafl.simulation.local import LocalWork, train_serial
from deltafl.tasks.models import cross_entropy, femnist_cnn

MODELS = {
    "femnist_cnn": (femnist_cnn, (1, 28, 28), 62, 137_598),
}


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_literature(name: str) -> None:
    make, shape, classes, num_params = MODELS[name]
    model = make()
    assert count(model) == num_params
    assert model(torch.zeros(3, *shape)).shape == (3, classes)
    # The fast path takes it, so no layer keeps statistics that averaging would lose.
    assert refusal(model) is None


@pytest.mark.parametrize("name", MODELS)
def test_a_client_learns_left_from_top(name: str) -> None:
    make, shape, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    y = torch.arange(8) % 2
    x = 0.2 * torch.rand(8, *shape)
    x[y == 0, :, : shape[1] // 2] += 0.8
    x[y == 1, :, :, : shape[2] // 2] += 0.8
    start_d = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    work = LocalWork(lr=0.05, steps=40, batch_size=None)
    result = train_serial(model, cross_entropy, x, y, start_d, work, np.random.default_rng(0))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(start_d + result.update_d), model.parameters())
    output = model(x).detach()
    assert torch.equal(output.argmax(1), y)
    # Half of what knowing nothing but that there are two classes would cost.
    assert float(cross_entropy(output, y)) < 0.5 * np.log(2)


def test_the_femnist_cnn_is_the_same_function_with_the_relu_before_the_pool() -> None:
    torch.manual_seed(0)
    model = femnist_cnn()
    conv1, pool, relu, conv2, _, _, conv3, _, _, flatten, linear1, _, linear2 = model.children()
    blocks = [layer for conv in (conv1, conv2, conv3) for layer in (conv, relu, pool)]
    other = torch.nn.Sequential(*blocks, flatten, linear1, relu, linear2)
    x = torch.randn(5, 1, 28, 28)
    assert torch.equal(model(x), other(x))
