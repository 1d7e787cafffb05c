"""Tasks of one's own that are right but unusual: every path trains them as the readable twin, or leaves them to it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from batch_tools import CLASSES, WORKS, four_layers, task_of, twin_of
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.routes import Computation
from deltafl.simulation.workers import one_thread
from deltafl.tasks.base import Task
from deltafl.tasks.fitting import require_fitting
from deltafl.tasks.models import mlp, next_token_lstm


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    with one_thread():
        yield


def assert_equal_to_twins(task: Task, engine: str) -> None:
    made = Engine(task, WORKS["epochs"], 0, how=Computation(engine=engine))
    trained = made.train(made.initial_params(), 2, np.arange(task.num_clients))
    for client, update_d in enumerate(trained.update_nd):
        twin = twin_of(made, WORKS["epochs"], client)
        np.testing.assert_allclose(update_d, twin.update_d, rtol=0, atol=1e-5 * np.abs(twin.update_d).max())
        assert trained.loss_n[client] == pytest.approx(twin.loss, rel=1e-5)


def tripled(part: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return 3 * output


def hooked(make: Callable[[], nn.Module], place: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.get_submodule(place).register_forward_hook(tripled)
        return model

    return made


HOOKED = {
    "linear": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "1")),
    "activation": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "2")),
    "whole chain": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "")),
    "head of a text model": ("lstm", hooked(lambda: next_token_lstm(CLASSES, 3, 6), "head")),
    "convolution": ("four-layer cnn", hooked(four_layers, "0")),
    "whole cnn": ("four-layer cnn", hooked(four_layers, "")),
}


@pytest.mark.parametrize("engine", ["auto", "unfolded"])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_trained_with(name: str, engine: str) -> None:
    base, make = HOOKED[name]
    assert_equal_to_twins(task_of(base, make_model=make), engine)


def test_a_layer_called_in_another_way_is_trained_so() -> None:
    def make() -> nn.Module:
        model = mlp(17, [9], CLASSES)
        layer = model.get_submodule("1")
        layer.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        layer.register_forward_pre_hook(lambda part, inputs: (inputs[0] * part.scale,))
        return model

    assert_equal_to_twins(task_of("mlp", make_model=make), "auto")


def test_a_model_that_cannot_be_copied_is_told() -> None:
    def make() -> nn.Module:
        with pytest.warns(FutureWarning, match="weight_norm"):
            return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(17, CLASSES)))

    with pytest.raises(DeltaflError, match=r"^own: the model cannot be copied .*parametrizations\.weight_norm for"):
        require_fitting(task_of("mlp", make_model=make), "own", 0)
    parametrized = nn.utils.parametrizations.weight_norm
    task = task_of("mlp", make_model=lambda: nn.Sequential(nn.Flatten(), parametrized(nn.Linear(17, CLASSES))))
    require_fitting(task, "own", 0)
    assert_equal_to_twins(replace(task, name="own"), "auto")
