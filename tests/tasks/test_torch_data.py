"""PyTorch data sets as tasks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from deltafl import DeltaflError
from deltafl.tasks import check_task, from_torch

X = torch.arange(120.0).reshape(60, 2)
ROWS = TensorDataset(X, torch.arange(60) % 3)


class Pictures(TorchDataset[Any]):
    """As in torchvision: a transform, and the names of the classes, of which one has no picture."""

    classes = ("cat", "dog", "emu", "fox")

    def __init__(self, transform: Callable[[Any], Any] = lambda picture: picture) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(np.full((5, 4, 3), row, np.uint8))), row % 3


def test_a_partition_deals_the_rows_and_others_are_for_the_test() -> None:
    task = from_torch(ROWS, partition="iid", clients=6)
    check_task(task, "dealt", 0)
    assert (task.num_clients, len(task.dataset.train_x), len(task.dataset.test_x)) == (6, 54, 6)
    assert task.client_names == ()
    # What was read is what the data set has, label by label.
    np.testing.assert_array_equal(task.dataset.train_y, task.dataset.train_x[:, 0] // 2 % 3)
    same = from_torch(ROWS, Subset(ROWS, range(10, 20)), partition="iid", clients=6)
    np.testing.assert_array_equal(same.dataset.train_x, X)
    np.testing.assert_array_equal(same.dataset.test_x, X[10:20])


def test_each_client_may_have_a_data_set() -> None:
    held = {"a": Subset(ROWS, range(20)), "b": Subset(ROWS, range(30, 60))}
    task = from_torch(held, {"b": Subset(ROWS, [20, 21])})
    check_task(task, "each", 0)
    assert [*task.client_names] == ["a", "b"]
    for rows, subset in zip(task.client_rows, held.values(), strict=True):
        np.testing.assert_array_equal(task.dataset.train_x[rows], X[subset.indices])
    np.testing.assert_equal(task.test_clients, [1, 1])
    numbered = from_torch([Subset(ROWS, range(k, k + 5)) for k in range(0, 60, 5)])
    assert [*numbered.client_names] == [str(k) for k in range(12)]


def test_pictures_keep_their_classes_and_a_random_transform_follows_the_seed() -> None:
    task = from_torch(Pictures(), partition="iid", clients=3)
    assert task.dataset.train_x.shape[1:] == (3, 5, 4) and task.dataset.train_x.dtype == np.uint8
    assert task.dataset.num_classes == 4 and [*task.dataset.class_names] == [*Pictures.classes]

    def drawn(seed: int) -> Any:
        data = Pictures(lambda _: torch.rand(2) + np.random.rand())  # noqa: NPY002
        return from_torch(data, partition="iid", clients=3, seed=seed).dataset.train_x

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert not np.isin(drawn(1), drawn(2)).any()


class Stream(IterableDataset[Any]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


IID: dict[str, Any] = {"partition": "iid", "clients": 3}


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (ROWS, {}, "write partition='iid'"),
        (Stream(), IID, r"part is of type Stream; .* list\(iterable\)"),
        (DataLoader(ROWS), IID, "loader.dataset"),
        ([Subset(ROWS, range(9)), Subset(ROWS, [])], {}, "client 1 has no items"),
        ([[(1.0, 2.0, 3.0)]], {}, "client 0: item 0 is of type tuple"),
        (Pictures(lambda picture: 1 / 0), IID, "item 0 cannot be read.*ZeroDivisionError"),
        (Pictures(lambda picture: picture.convert("P")), IID, "row 1, column 'input' .* mode P"),
    ],
)
def test_what_cannot_be_used_is_named(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        from_torch(data, **options)
