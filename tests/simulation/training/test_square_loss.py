"""Mean squared losses: where they are known, and samplers that use them; the twin measures them in
every comparison of a path with it.
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

from batch_tools import CLASSES, DEVICES, ROUTES, SIZES, WORKS, engine_of, task_of
from deltafl.simulation import setup
from deltafl.simulation.engine import Engine
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.run import run_experiment
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training.serial import losses_of
from deltafl.tasks.losses import cross_entropy, squared_error
from tools.simulation import lines_of, quiet

EVERYONE = np.arange(len(SIZES))


def test_losses_of_single_examples_are_those_of_minibatches_of_one() -> None:
    rng = torch.Generator().manual_seed(0)
    output = torch.randn((30, CLASSES), generator=rng)
    labels = torch.randint(CLASSES, (30,), generator=rng)
    for loss, out, y in (
        (cross_entropy, output, labels),
        (nn.CrossEntropyLoss(), output, labels),
        (squared_error, output[:, 0], output[:, 1]),
    ):
        losses = losses_of(loss, y)
        assert losses is not None
        one_by_one = [loss(out[i : i + 1], y[i : i + 1]) for i in range(30)]
        torch.testing.assert_close(losses(out, y), torch.stack(one_by_one))


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"weight": torch.ones(CLASSES)}, {"reduction": "sum"}],
)
def test_other_cross_entropies_are_not_taken_for_the_plain_one(options: dict[str, Any]) -> None:
    assert losses_of(nn.CrossEntropyLoss(**options)) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", ROUTES)
def test_nothing_else_depends_on_measuring(route: str, device: str) -> None:
    engine = engine_of(route, WORKS["epochs"], device)
    params_d = engine.initial_params()
    plain, measured = (
        engine.train(params_d, 2, EVERYONE, squares=squares) for squares in (False, True)
    )
    assert np.isnan(plain.reports.square_loss_n).all()
    assert (measured.reports.square_loss_n > measured.reports.loss_n**2).all()
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
    training = engine.train(engine.initial_params(), 2, EVERYONE, squares=True)
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
    engine = setup.engine_of(settings)
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
