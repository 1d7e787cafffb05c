"""Mean squared losses: each path of local training against one example at a time, and samplers
that use them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from batch_tools import CLASSES, DEVICES, SIZES, WORKS, task_of
from deltafl.simulation.directory import RunDirectory
from deltafl.simulation.engine import Engine
from deltafl.simulation.run import run_experiment
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of
from deltafl.simulation.training.route import Route
from deltafl.simulation.training.serial import LocalWork, minibatches
from deltafl.streams import stream
from deltafl.tasks.base import Task
from deltafl.tasks.models import cross_entropy, squared_error
from deltafl.tasks.synthetic import make_synthetic_task
from deltafl.types import Params
from tools.simulation import lines_of, quiet

ROUND = 2


def batch_norm_net() -> nn.Module:
    """Has buffers, so that it takes the serial path; in training it uses them as in evaluation."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(17), nn.Linear(17, CLASSES))


def regression_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 1), nn.Flatten(0))


def regression_task() -> Task:
    task = task_of("two-layer cnn", make_model=regression_net, loss=squared_error)
    data = task.dataset
    targets = (data.train_y.astype(np.float32) / 3, data.test_y.astype(np.float32) / 3)
    return replace(
        task,
        dataset=replace(data, train_y=targets[0], test_y=targets[1], num_classes=0),
        metric="loss",
    )


def synthetic_task() -> Task:
    return replace(make_synthetic_task(0, num_clients=6), gradient_noise_m=None)


#: Task, engine, and the path that this takes.
ROUTES: dict[str, tuple[Callable[[], Task], str, str]] = {
    "dense chain": (partial(task_of, "mlp"), "auto", "batched"),
    "own form": (synthetic_task, "auto", "batched"),
    "fast": (partial(task_of, "two-layer cnn"), "auto", "loop"),
    "fast, squared error": (regression_task, "loop", "loop"),
    "serial": (partial(task_of, "mlp", make_model=batch_norm_net), "auto", "loop"),
    "batched": (partial(task_of, "two-layer cnn"), "batched", "batched"),
    "batched, tokens": (partial(task_of, "lstm"), "batched", "batched"),
    "batched, squared error": (regression_task, "batched", "batched"),
}


def kept_of(path: str, device: str) -> Route | None:
    """The route; None for that which is chosen on a CPU."""
    if (path, device) == ("auto", "cpu"):
        return None
    return Route(path.replace("auto", "loop"), device)


def one_at_a_time(task: Task, work: LocalWork, start_d: Params, client: int) -> float:
    """Plain SGD; before each step every example of the minibatch goes through the model alone,
    in float64.
    """
    model = task.make_model().eval().double()
    current_d = torch.tensor(start_d).double()
    rows = task.client_rows[client]
    x = torch.tensor(task.dataset.train_x[rows])
    y = torch.tensor(task.dataset.train_y[rows])
    x = x.long() if task.tokens else x * task.input_scale if x.dtype == torch.uint8 else x
    x, y = (part.double() if part.is_floating_point() else part for part in (x, y))
    squares: list[float] = []
    for batch in minibatches(len(rows), work, stream(0, "batches", ROUND, client)):
        vector_to_parameters(current_d, model.parameters())
        model.zero_grad()
        losses = [task.loss(model(x[i : i + 1]), y[i : i + 1]) for i in batch.tolist()]
        squares.append(sum(loss.item() ** 2 for loss in losses) / len(batch))
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        current_d = current_d - work.lr * parameters_to_vector(parts)
    return sum(squares) / len(squares)


@pytest.mark.parametrize(
    "work", [WORKS["epochs"], WORKS["whole data"]], ids=["epochs", "whole data"]
)
@pytest.mark.parametrize("name", ROUTES)
def test_each_path_measures_the_losses_of_single_examples(name: str, work: LocalWork) -> None:
    make, engine_name, path = ROUTES[name]
    task = make()
    work = replace(work, lr=0.001) if task.metric == "loss" else work
    engine = Engine(task, work, 0, kept=kept_of(engine_name, "cpu"))
    assert engine.route.path == path
    start_d = 2 * engine.initial_params()  # far enough from 0 for losses that differ
    training = engine.train(start_d, ROUND, np.arange(6), squares=True)
    for client in range(6):
        expected = one_at_a_time(task, work, start_d, client)
        assert training.reports.square_loss_n[client] == pytest.approx(expected, rel=1e-5)
    spread_n = training.reports.square_loss_n - training.reports.loss_n**2
    assert (
        spread_n > 1e-3 * training.reports.square_loss_n
    ).all()  # so that squares of means would fail


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROUTES)
def test_nothing_else_depends_on_measuring(name: str, device: str) -> None:
    make, engine_name, _ = ROUTES[name]
    engine = Engine(make(), WORKS["epochs"], 0, kept=kept_of(engine_name, device))
    params_d = engine.initial_params()
    everyone = np.arange(6)
    plain, measured = (
        engine.train(params_d, ROUND, everyone, squares=squares) for squares in (False, True)
    )
    assert np.isnan(plain.reports.square_loss_n).all()
    assert np.isfinite(measured.reports.square_loss_n).all()
    np.testing.assert_array_equal(plain.update_nd, measured.update_nd)
    unmeasured = measured.reports._replace(square_loss_n=plain.reports.square_loss_n)
    np.testing.assert_equal(plain.reports, unmeasured)


def own_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y, label_smoothing=0.1)


LABELS = np.random.default_rng(0).integers(0, CLASSES, sum(SIZES))
SHARES = np.eye(CLASSES, dtype=np.float32)[LABELS]
#: Loss and targets.
UNKNOWN: dict[str, tuple[Callable[..., torch.Tensor], npt.NDArray[Any]]] = {
    "own loss": (own_loss, LABELS),
    "shares of classes": (cross_entropy, SHARES),
    "labels left out": (cross_entropy, np.where(np.arange(len(LABELS)) % 40 > 0, LABELS, -100)),
    "several targets": (squared_error, SHARES),
}


@pytest.mark.parametrize("layers", [[], [nn.BatchNorm1d(17)]], ids=["fast", "serial"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_losses_without_known_single_losses_are_not_squared(
    name: str, layers: list[nn.Module]
) -> None:
    """Also those of clients whose own labels are all there, where other clients' are not:
    utilities are compared.
    """
    loss, y = UNKNOWN[name]
    net = partial(nn.Sequential, *layers, nn.Linear(17, CLASSES))
    task = task_of("mlp", make_model=net, loss=loss, metric="loss")
    data = replace(task.dataset, train_y=y, test_y=y[:50], num_classes=0)
    engine = Engine(replace(task, dataset=data), WORKS["epochs"], 0)
    assert engine.route.path == "loop"
    training = engine.train(engine.initial_params(), ROUND, np.arange(6), squares=True)
    assert np.isnan(training.reports.square_loss_n).all()
    assert np.isfinite(training.reports.loss_n).all()


@pytest.mark.parametrize("task", ["digits", "toy"])
def test_a_run_measures_squares_where_its_sampler_uses_them(task: str, tmp_path: Path) -> None:
    """Oort's utilities are n_i sqrt(mean loss^2); the toy's loss is its model's output, so n_i
    |mean loss|.
    """
    given = {"task": task, "sampler": "oort", "rounds": 1} | (
        {"local_epochs": 1} if task == "digits" else {}
    )
    settings = make_settings(RunSettings, given)
    directory = RunDirectory(tmp_path)
    engine = engine_of(settings)
    directory.start(settings)
    state = run_experiment(settings, engine, directory, quiet)
    line = lines_of(tmp_path)[1]
    training = engine.train(engine.initial_params(), 0, np.array(line["cohort"]), squares=True)
    size_n = np.array([len(engine.task.client_rows[client]) for client in line["cohort"]])
    measured_n = (
        np.sqrt(training.reports.square_loss_n)
        if task == "digits"
        else np.abs(training.reports.loss_n)
    )
    np.testing.assert_array_equal(state.sampler.utility_m[line["cohort"]], size_n * measured_n)
