"""A start from a pretrained model: round 0 evaluates it, whatever the seed and the way it is given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltafl as dl
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import Task, make_task
from tools.simulation import lines_of


def inputs(task: Task, stored: np.ndarray[Any, Any]) -> torch.Tensor:
    scale = task.input_scale if stored.dtype == np.uint8 else 1.0
    return torch.tensor(stored) * scale


def pretrained_task(way: str, path: Path) -> tuple[Task, torch.nn.Module]:
    """A task that starts from a model that one pass over all data has trained."""
    task = make_task("digits", seed=0, num_clients=8)
    torch.manual_seed(3)
    model = task.make_model()
    x = inputs(task, task.dataset.train_x)
    loss = task.loss(model(x), torch.tensor(task.dataset.train_y))
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.sub_(0.5 * param.grad)
    if way == "initial_params":
        return replace(task, initial_params=dl.flatten(model)), model
    torch.save(model.state_dict(), path)

    def make_model() -> torch.nn.Module:
        loaded: torch.nn.Module = task.make_model()
        loaded.load_state_dict(torch.load(path))
        return loaded

    return replace(task, make_model=make_model), model


@pytest.mark.parametrize("way", ["initial_params", "make_model"])
def test_round_0_evaluates_the_pretrained_model(way: str, tmp_path: Path) -> None:
    task, model = pretrained_task(way, tmp_path / "model.pt")
    with torch.no_grad():
        output = model(inputs(task, task.dataset.test_x))
    y = torch.tensor(task.dataset.test_y)
    expected = float((output.argmax(dim=1) == y).float().mean()), float(task.loss(output, y))
    engine = Engine(task, LocalWork(0.1, epochs=1), seed=5)
    np.testing.assert_array_equal(engine.initial_params(), dl.flatten(model))
    dl.compare(
        replace(task, name="mine"),
        ["uniform"],
        seeds=2,
        out=tmp_path / "out",
        processes=1,
        progress=False,
        report=False,
        rounds=1,
    )
    for seed in (0, 1):
        first = lines_of(tmp_path / "out" / "runs" / f"uniform-seed{seed}")[0]
        assert (first["round"], first["test"]["accuracy"]) == (0, pytest.approx(expected[0]))
        assert first["test"]["loss"] == pytest.approx(expected[1], rel=1e-5)
