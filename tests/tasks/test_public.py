"""The public part: some training examples of each class, which no client holds."""

from dataclasses import replace

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation import RunSettings, make_settings, task_of
from deltafl.tasks import make_task
from deltafl.tasks.base import with_public


def test_so_many_of_each_class_and_no_client_holds_them() -> None:
    task = make_task("digits", seed=3, num_clients=20)
    split = with_public(task, 7, seed=3)
    assert [task.dataset.train_y[rows].tolist() for rows in split.public_rows] == [
        [label] * 7 for label in range(10)
    ]
    public = np.concatenate(split.public_rows)
    held = np.concatenate(split.client_rows)
    np.testing.assert_array_equal(
        np.sort([*public, *held]), np.sort(np.concatenate(task.client_rows))
    )
    for before, after in zip(task.client_rows, split.client_rows, strict=True):
        assert np.isin(after, before).all()
    assert with_public(task, 7, seed=3).data == split.data != with_public(task, 7, seed=4).data


def test_a_class_that_nobody_holds_has_no_public_examples() -> None:
    task = make_task("digits", seed=0, num_clients=10)
    label_e = task.dataset.train_y
    without = replace(task, client_rows=[rows[label_e[rows] != 4] for rows in task.client_rows])
    assert [len(rows) for rows in with_public(without, 2, seed=0).public_rows] == [
        2,
        2,
        2,
        2,
        0,
        2,
        2,
        2,
        2,
        2,
    ]


def test_what_cannot_be_done_is_refused() -> None:
    task = make_task("digits", seed=0, num_clients=10)
    with pytest.raises(
        DeltaflError,
        match=r"public is 500; digits has 1\d\d of class 0 beside one .*: lower 'public'",
    ):
        with_public(task, 500, seed=0)
    with pytest.raises(
        DeltaflError, match="examples of each class, and synthetic has no classes; leave it out"
    ):
        with_public(make_task("synthetic", seed=0), 5, seed=0)


def test_clients_of_one_example_keep_it() -> None:
    task = make_task("digits", seed=0, num_clients=10, partition="iid")
    small = replace(task, client_rows=[*task.client_rows[:9], *task.client_rows[9].reshape(-1, 1)])
    split = with_public(small, 10, seed=0)
    assert [rows.tolist() for rows in split.client_rows[9:]] == [
        rows.tolist() for rows in small.client_rows[9:]
    ]
    assert [len(rows) for rows in split.public_rows] == [10] * 10


def test_it_is_a_setting_of_a_run_beside_a_validation_part() -> None:
    settings = make_settings(RunSettings, {"clients": 20, "public": 5, "validation": 0.2})
    task = task_of(settings)
    assert 50 + len(task.dataset.test_y) + sum(map(len, task.client_rows)) == len(
        task.dataset.train_y
    )
    held = task.dataset.train_x[np.concatenate(task.public_rows)]
    assert not (held[:, None] == task.dataset.test_x[None]).all(axis=(2, 3, 4)).any()
