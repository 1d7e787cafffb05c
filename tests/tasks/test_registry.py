"""Tasks by name: defaults, settings, pickling, and tasks that other modules register."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltafl.errors import DeltaflError
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import (
    PARTITIONS,
    Task,
    find_task,
    known_tasks,
    make_task,
    mlp,
    register,
    registry,
)


@pytest.mark.parametrize("name", ["toy", "synthetic", "digits"])
def test_one_seed_one_task_and_it_survives_pickling(name: str) -> None:
    first, again, other = (make_task(name, seed=seed) for seed in (5, 5, 6))
    copy: Task = pickle.loads(pickle.dumps(first))  # noqa: S301
    for task in (again, copy):
        assert task.data == first.data
        np.testing.assert_equal(task.gradient_noise_m, first.gradient_noise_m)
    model = copy.make_model()
    x = torch.from_numpy(copy.dataset.train_x[:2]).float() * copy.input_scale
    loss = copy.loss(model(x), torch.from_numpy(copy.dataset.train_y[:2]))
    assert bool(loss.isfinite())
    assert (other.data == first.data) == (name == "toy")


def test_digits_is_scaled_to_one_and_dealt_to_equal_clients() -> None:
    task = make_task("digits", seed=0)
    assert task.dataset.train_x.max() * task.input_scale == 1.0
    assert {len(rows) for rows in task.client_rows} == {15}
    assert make_task("digits", seed=0, partition="quantity", num_clients=20).num_clients == 20
    deep = make_task("digits", seed=0, make_model=partial(mlp, 64, (32,), 10))
    assert sum(p.numel() for p in deep.make_model().parameters()) == 64 * 32 + 32 + 330


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("digit", {}, "did you mean 'digits'"),
    ("toy", {"num_clients": 4}, "the toy has 3 clients"),
    ("toy", {"partition": "iid"}, "partition is not a setting of the task 'toy'"),
    ("toy", {"nu": 3.0}, "nu is not a setting of the task 'toy'"),
    ("synthetic", {"alpha": 0.1}, "alpha is not a setting of the task 'synthetic'"),
    ("synthetic", {"num_clients": 0}, "synthetic got 0 clients"),
    ("synthetic", {"truth": (0.0, 2.0)}, "A not 0"),
    ("synthetic", {"truth": (1e-320, 0.0)}, "A x - b is nearly always within 0.1 of 0"),
    ("digits", {"nu": 3.0}, "nu is not a setting of the task 'digits'"),
    ("digits", {"partition": "natural"}, "needs a column of owners"),
    ("digits", {"num_clients": 1501}, "got 1501 clients; write a number from 1 to 1500"),
]


@pytest.mark.parametrize(("name", "options", "words"), MISFITS)
def test_settings_that_do_not_fit_the_task_are_refused(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_task(name, seed=0, **options)


@pytest.mark.parametrize("name", sorted(known_tasks()))
def test_the_defaults_are_possible(name: str) -> None:
    spec = known_tasks()[name]
    assert spec.name == name
    assert 1 <= spec.sample_size < spec.num_clients
    assert (spec.local_epochs is None) != (spec.local_steps is None)
    assert spec.partition is None or spec.partition in PARTITIONS
    LocalWork(spec.local_lr, spec.local_epochs, spec.local_steps, spec.batch_size)
    if name in {"toy", "synthetic", "digits"}:
        task = make_task(name, seed=0)
        assert task.num_clients == spec.num_clients
        assert task.metric == spec.metric


def test_importing_the_package_loads_nothing_large() -> None:
    program = (
        "import sys, deltafl.tasks; print(*({'torch', 'sklearn', 'pooch', 'pandas'} & "
        "{*sys.modules}))"
    )
    assert subprocess.check_output([sys.executable, "-c", program]) == b"\n"


REGISTERING = """
from dataclasses import replace
from deltafl.tasks import known_tasks, register

register(replace(known_tasks()["digits"], name="my-digits", num_clients=7))
"""


def test_modules_in_the_environment_register_tasks(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(REGISTERING)
    program = "import sys; sys.path.insert(0, '.'); from deltafl.tasks import *; "
    show = "print(find_task('my-digits').num_clients)"
    for start, modules in (("", "my_tasks"), ("import_tasks('my_tasks'); ", "")):
        command = [sys.executable, "-c", program + start + show]
        environment = {**os.environ, "DELTAFL_TASKS": modules}
        assert subprocess.check_output(command, cwd=tmp_path, env=environment) == b"7\n"


def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tasks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (("no_such_module", "No module"), ("broken_tasks", "ZeroDivisionError")):
        monkeypatch.setenv("DELTAFL_TASKS", name)
        words = f"module '{name}', named in DELTAFL_TASKS or import_tasks, cannot .*{why}"
        with pytest.raises(DeltaflError, match=words):
            find_task("digits")


def test_a_task_that_reads_its_data_has_the_metric_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(known_tasks()))
    register(replace(find_task("digits"), name="judged", metric="f1_macro"))
    task = make_task("judged", seed=0)
    assert [metric.name for metric in task.metrics] == ["f1_macro"]


def test_a_task_that_is_made_keeps_the_arrays_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(known_tasks()))
    own = replace(make_task("toy", seed=0), local=["x"], trainable=["y"])
    register(replace(find_task("toy"), name="personal", make=lambda seed: own))
    assert (make_task("personal", seed=0).local, own.trainable) == (["x"], ["y"])
    assert make_task("personal", seed=0, local=["y"]).local == ["y"]


def test_a_task_reads_its_data_or_makes_them() -> None:
    with pytest.raises(DeltaflError, match="the task 'digits' needs load or make, and not both"):
        register(replace(find_task("digits"), load=None))
