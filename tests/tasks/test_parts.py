"""Parts of the training examples that nobody trains on: a public part, and one for validation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deltafl.errors import DeltaflError
from deltafl.simulation import RunSettings, make_settings, task_of
from deltafl.tasks import make_task
from deltafl.tasks.base import with_public, with_validation


def test_so_many_of_each_class_are_public_and_no_client_holds_them() -> None:
    task = make_task("digits", seed=3, num_clients=20)
    split = with_public(task, 7, seed=3)
    labels = [task.dataset.train_y[rows].tolist() for rows in split.public_rows]
    assert labels == [[label] * 7 for label in range(10)]
    parts = np.sort(np.concatenate([*split.public_rows, *split.client_rows]))
    np.testing.assert_array_equal(parts, np.sort(np.concatenate(task.client_rows)))
    for before, after in zip(task.client_rows, split.client_rows, strict=True):
        assert np.isin(after, before).all()
    assert with_public(task, 7, seed=3).data == split.data != with_public(task, 7, seed=4).data


def test_a_class_that_nobody_holds_has_no_public_examples() -> None:
    task = make_task("digits", seed=0, num_clients=10)
    label_e = task.dataset.train_y
    without = replace(task, client_rows=[rows[label_e[rows] != 4] for rows in task.client_rows])
    sizes = [len(rows) for rows in with_public(without, 2, seed=0).public_rows]
    assert sizes == [0 if label == 4 else 2 for label in range(10)]


@pytest.mark.parametrize("form", [tuple, list, torch.tensor, np.uint64])
def test_rows_and_labels_may_come_in_any_form(form: Callable[[Any], Any]) -> None:
    """Float labels as the binary cross-entropy takes them, of which one counts nowhere."""
    whole = make_task("digits", seed=0, num_clients=10)
    y = (whole.dataset.train_y > 4).astype(np.int64)
    y[whole.client_rows[0][0]] = -1
    task = replace(whole, dataset=replace(whole.dataset, train_y=y, num_classes=2))
    other = replace(
        whole,
        dataset=replace(task.dataset, train_y=y.astype(np.float32)),
        client_rows=[form(whole.client_rows[0][:1]), *map(form, whole.client_rows[1:])],
    )
    task = replace(task, client_rows=[whole.client_rows[0][:1], *whole.client_rows[1:]])
    for one, two in (
        (with_public(task, 7, seed=3), with_public(other, 7, seed=3)),
        (with_validation(task, 0.2, seed=3), with_validation(other, 0.2, seed=3)),
    ):
        np.testing.assert_equal(one.client_rows, two.client_rows)
        np.testing.assert_equal(one.public_rows, two.public_rows)


@pytest.mark.parametrize("kind", ["one logit", "ignored"])
def test_labels_need_not_be_whole_numbers_from_0_on(kind: str) -> None:
    task = make_task("digits", seed=0, num_clients=10)
    data = task.dataset
    label_e = (data.train_y % 2).astype(np.float32)
    classes = 2
    if kind == "ignored":
        # As a loss with ignore_index has it: such examples are of no class.
        label_e = np.where(data.train_y < 3, -100, data.train_y)
        classes = 10
    other = replace(task, dataset=replace(data, train_y=label_e, num_classes=classes))
    public = with_public(other, 4, seed=0).public_rows
    held = [label for label in range(classes) if label in label_e]
    assert [label_e[rows].tolist() for rows in public if len(rows)] == [[k] * 4 for k in held]


def test_clients_of_one_example_keep_it() -> None:
    task = make_task("digits", seed=0, num_clients=10, partition="iid")
    small = replace(task, client_rows=[*task.client_rows[:9], *task.client_rows[9].reshape(-1, 1)])
    split = with_public(small, 10, seed=0)
    np.testing.assert_equal(split.client_rows[9:], small.client_rows[9:])
    assert [len(rows) for rows in split.public_rows] == [10] * 10


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_share_of_each_client_is_judged_on_and_not_trained_on(name: str) -> None:
    task = make_task(name, seed=3, num_clients=20)
    split = with_validation(task, 0.2, seed=3)
    held = []
    for before, after in zip(task.client_rows, split.client_rows, strict=True):
        held.append(np.setdiff1d(before, after))
        assert abs(len(held[-1]) - 0.2 * len(before)) < 1
        assert len(held[-1]) + len(after) == len(before)
    row_e = np.sort(np.concatenate(held))
    np.testing.assert_array_equal(split.dataset.test_x, task.dataset.train_x[row_e])
    np.testing.assert_array_equal(split.dataset.test_y, task.dataset.train_y[row_e])
    again, other = (with_validation(task, 0.2, seed).data for seed in (3, 4))
    assert again == split.data != other


def test_small_clients_give_their_share_on_average_and_shared_rows_are_given_by_all() -> None:
    whole = make_task("digits", seed=0, num_clients=10)
    pairs = replace(whole, client_rows=np.split(np.arange(1000), 500))
    left = [len(rows) for rows in with_validation(pairs, 0.25, seed=0).client_rows]
    assert set(left) == {1, 2}
    # Of two examples a client gives one half the time.
    assert abs(left.count(1) - 250) < 4 * np.sqrt(500 / 4)
    owners = np.arange(len(whole.dataset.test_y)) % 10
    shared = replace(whole, client_rows=[np.arange(30), np.arange(10, 40)], test_clients=owners)
    split = with_validation(shared, 0.2, seed=0)
    given = np.setdiff1d(np.arange(40), np.concatenate(split.client_rows))
    assert split.test_clients is not None
    assert len(given) == len(split.dataset.test_y) == len(split.test_clients)


def test_what_cannot_be_done_is_refused() -> None:
    digits = make_task("digits", seed=0, num_clients=10)
    words = r"public is 500; digits has 1\d\d of class 0 beside one .*: lower 'public'"
    with pytest.raises(DeltaflError, match=words):
        with_public(digits, 500, seed=0)
    with pytest.raises(DeltaflError, match="synthetic has no classes; leave it out"):
        with_public(make_task("synthetic", seed=0), 5, seed=0)
    with pytest.raises(DeltaflError, match=r"toy has too few examples a client to hold out 0\.2"):
        with_validation(make_task("toy", seed=0), 0.2, seed=0)


def test_both_are_settings_of_a_run() -> None:
    settings = make_settings(
        RunSettings, {"clients": 20, "public": 5, "validation": 0.2, "test_examples": 10_000}
    )
    task = task_of(settings)
    data = task.dataset
    assert 50 + len(data.test_y) + sum(map(len, task.client_rows)) == len(data.train_y)
    public = data.train_x[np.concatenate(task.public_rows)]
    assert not (public[:, None] == data.test_x[None]).all(axis=(2, 3, 4)).any()
    assert len(task_of(settings.model_copy(update={"test_examples": 50})).dataset.test_y) == 50
