"""The validation part: a share of every client's training examples, which nobody trains on, in
the test set's place.
"""

from dataclasses import replace

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation import RunSettings, make_settings, task_of
from deltafl.tasks import Task, make_task
from deltafl.tasks.base import with_validation


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_share_of_each_client_is_judged_on_and_not_trained_on(name: str) -> None:
    task = make_task(name, seed=3, num_clients=20)
    split = with_validation(task, 0.2, seed=3)
    held = [
        np.setdiff1d(before, after)
        for before, after in zip(task.client_rows, split.client_rows, strict=True)
    ]
    for rows, before, after in zip(held, task.client_rows, split.client_rows, strict=True):
        assert abs(len(rows) - 0.2 * len(before)) < 1
        assert len(rows) + len(after) == len(before)
    row_e = np.sort(np.concatenate(held))
    np.testing.assert_array_equal(split.dataset.test_x, task.dataset.train_x[row_e])
    np.testing.assert_array_equal(split.dataset.test_y, task.dataset.train_y[row_e])
    assert (
        with_validation(task, 0.2, seed=3).data
        == split.data
        != with_validation(task, 0.2, seed=4).data
    )


def test_small_clients_give_their_share_on_average_and_shared_rows_are_given_by_all() -> None:
    whole = make_task("digits", seed=0, num_clients=10)
    pairs: Task = replace(whole, client_rows=np.split(np.arange(1000), 500))
    left = [len(rows) for rows in with_validation(pairs, 0.25, seed=0).client_rows]
    assert set(left) == {1, 2}
    assert abs(left.count(1) - 250) < 4 * np.sqrt(
        500 / 4
    )  # of two examples a client gives one half the time
    owners = np.arange(len(whole.dataset.test_y)) % 10
    shared = replace(whole, client_rows=[np.arange(30), np.arange(10, 40)], test_clients=owners)
    split = with_validation(shared, 0.2, seed=0)
    given = np.setdiff1d(np.arange(40), np.concatenate(split.client_rows))
    assert split.test_clients is not None
    assert len(given) == len(split.dataset.test_y) == len(split.test_clients)
    with pytest.raises(
        DeltaflError, match=r"toy has too few examples a client to hold out 0.2 of them"
    ):
        with_validation(make_task("toy", seed=0), 0.2, seed=0)


def test_it_is_a_setting_of_a_run() -> None:
    settings = make_settings(
        RunSettings, {"clients": 20, "validation": 0.2, "test_examples": 10_000}
    )
    task = task_of(settings)
    assert len(task.dataset.test_y) + sum(map(len, task.client_rows)) == len(task.dataset.train_y)
    assert len(task_of(settings.model_copy(update={"test_examples": 50})).dataset.test_y) == 50
