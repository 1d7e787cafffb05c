"""PyTorch data sets as tasks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from deltafl import DeltaflError, stream
from deltafl.tasks import binary_cross_entropy, check_task, cross_entropy, from_torch
from deltafl.tasks.base import with_fewer_tests
from deltafl.types import Array

X = torch.arange(120.0).reshape(60, 2)
ROWS = TensorDataset(X, torch.arange(60) % 3)


IID: dict[str, Any] = {"partition": "iid", "clients": 3}


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


@pytest.mark.parametrize("period", [2, 5, 10])
@pytest.mark.parametrize("dealt", [True, False])
def test_of_data_in_any_order_all_classes_are_tested(period: int, dealt: bool) -> None:
    rows = TensorDataset(torch.arange(2000.0)[:, None], torch.arange(2000) % period)
    task = from_torch(rows, **IID) if dealt else from_torch([rows])
    count_c = np.bincount(task.dataset.test_y, minlength=period)
    assert count_c.sum() == 200 and count_c.min() >= 5
    fewer = with_fewer_tests(task, 100, stream(0, "data", round=1)).dataset
    assert {*fewer.test_y} == {*range(period)} and len(np.unique(fewer.test_x)) == 100


@pytest.mark.parametrize(
    ("test", "share", "words"),
    [
        (None, 0, "test_share is 0; it must be between 0 and 1"),
        (None, 0.0, r"test_share is 0\.0; it must"),
        (None, False, "test_share is False; it must"),
        (ROWS, 0.5, r"test_share is 0\.5, and dataset has a test part"),
        (ROWS, 0.0, r"test_share is 0\.0, and dataset has a test part"),
    ],
)
def test_shares_that_say_nothing_are_refused(test: Any, share: Any, words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        from_torch(ROWS, test, **IID, test_share=share)


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


def test_a_list_of_items_is_one_data_set_where_a_partition_deals() -> None:
    listed = from_torch([*Stream()], [*Stream()], **IID)
    np.testing.assert_array_equal(listed.dataset.train_x, X)
    assert listed.num_clients == 3


def test_pictures_keep_their_classes_and_a_random_transform_follows_the_seed() -> None:
    task = from_torch(Pictures(), partition="iid", clients=3)
    assert task.dataset.train_x.shape[1:] == (3, 5, 4) and task.dataset.train_x.dtype == np.uint8
    assert task.dataset.num_classes == 4 and [*task.dataset.class_names] == [*Pictures.classes]

    def drawn(seed: int) -> Any:
        data = Pictures(lambda _: torch.rand(2) + np.random.rand())  # noqa: NPY002
        return from_torch(data, partition="iid", clients=3, seed=seed).dataset.train_x

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert not np.isin(drawn(1), drawn(2)).any()


@pytest.mark.parametrize(
    "shape", [(4, 3, 4), (3, 5, 4), (1, 5, 3), (4, 4, 4), (5, 3), (2, 3, 4, 4)]
)
def test_tensors_keep_their_axes(shape: tuple[int, ...]) -> None:
    x = torch.arange(20 * int(np.prod(shape))).reshape(20, *shape).float()
    rows = TensorDataset(x, torch.arange(20) % 2)
    found = from_torch(rows, rows, partition="iid", clients=2).dataset
    np.testing.assert_array_equal(found.train_x, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.bfloat16(),
        lambda x: x.half(),
        lambda x: x.requires_grad_(),
        torch.nn.Parameter,
        lambda x: x.to_sparse(),
    ],
)
@pytest.mark.filterwarnings("error")
def test_tensors_may_be_of_any_kind(change: Callable[[Any], Any]) -> None:
    items = [(change(torch.tensor([k, 2.0])), k % 2) for k in range(20)]
    found = from_torch(items, items, partition="iid", clients=2).dataset
    np.testing.assert_array_equal(found.train_x, [[k, 2] for k in range(20)])


def test_labels_may_be_arrays_of_one_and_targets_several() -> None:
    y = torch.arange(60)[:, None] % 3
    task = from_torch(TensorDataset(X, y), ROWS, partition="iid", clients=6)
    np.testing.assert_array_equal(task.dataset.train_y, y[:, 0])
    named = [(row, np.array([k % 2])) for k, row in enumerate(X)]
    held = Listed(named)
    assert [*from_torch(held, **IID).dataset.class_names] == ["no", "yes", "perhaps"]
    given: dict[str, Any] = {**IID, "task_type": "regression"}
    wide = from_torch(TensorDataset(X, X), TensorDataset(X, X), **given)
    check_task(wide, "wide", 0)
    scaled = (X - X.mean(0)) / X.std(0, correction=0)
    np.testing.assert_allclose(wide.dataset.train_y, scaled, rtol=1e-5)
    one = from_torch(TensorDataset(X, X[:, :1]), TensorDataset(X, X[:, 0]), **given)
    np.testing.assert_allclose(one.dataset.train_y, scaled[:, 0], rtol=1e-5)


class Folder(TorchDataset[Any]):
    """As ImageFolder of torchvision: classes are numbered by their names, here those of a line."""

    def __init__(self, names: str, labels: Any) -> None:
        self.classes = names.split()
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        return X[row], self.labels[row]


def words_of(task: Any) -> Any:
    data = task.dataset
    return [[data.class_names[k] for k in y] for y in (data.train_y, data.test_y)]


ANIMALS = Folder("cat dog", [0, 1])


@pytest.mark.parametrize(
    ("train", "test", "classes", "words"),
    [
        (ANIMALS, Folder("dog cat", [0, 1]), "cat dog", "dog cat"),
        ({"a": ANIMALS}, {"a": Folder("dog wolf", [0, 1])}, "cat dog wolf", "dog wolf"),
        ({"a": Folder("wolf", [0]), "b": ANIMALS}, ANIMALS, "wolf cat dog", "cat dog"),
        (ANIMALS, [(X[0], "dog"), (X[0], "cat")], "cat dog", "dog cat"),
        ([(X[0], "dog"), (X[0], "cat")], ANIMALS, "cat dog", "cat dog"),
        (ANIMALS, [(X[0], 1)], "cat dog", "dog"),
        (
            Subset(ANIMALS, [1, 0]),
            Subset(Subset(Folder("dog cat", [0, 1]), [1]), [0]),
            "cat dog",
            "cat",
        ),
        (
            Folder("crane dog crane", [2, 0, 1]),
            [(X[0], 2)],
            ["crane", "dog", "crane (2)"],
            ["crane (2)"],
        ),
    ],
)
def test_classes_are_one_by_their_names(train: Any, test: Any, classes: Any, words: Any) -> None:
    by_client = isinstance(train, dict)
    task = from_torch(train, test, **({} if by_client else IID | {"clients": 2}))
    check_task(task, "named", 0)
    assert [*task.dataset.class_names] == (classes.split() if isinstance(classes, str) else classes)
    assert words_of(task)[1] == (words.split() if isinstance(words, str) else words)
    if by_client:
        held = [folder.classes[k] for folder in train.values() for k in folder.labels]
        assert words_of(task)[0] == held


@pytest.mark.parametrize("by_client", [False, True])
def test_subsets_have_the_classes_of_their_rows(by_client: bool) -> None:
    """All are of one folder, so that nothing has to be matched."""
    whole = Folder("ant bee cat dog", [0, 1, 2, 3] * 3)
    few = Subset(whole, [0, 1, 4, 5])
    task = (
        from_torch([few, few], few) if by_client else from_torch(few, few, **IID | {"clients": 2})
    )
    assert task.dataset.num_classes == 2


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (
            ANIMALS,
            [(X[0], 2)],
            r"test part: row 1, .* holds 2; it must be one of 2 names, such as 'cat'",
        ),
        (ANIMALS, [(X[0], "wolf")], "holds 'wolf'; it must be one of 2 names"),
        (ANIMALS, [(X[0], 0.5), (X[0], 1.0)], r"holds 0\.5; it must be one of"),
        ({"a": ANIMALS, "b": Folder("dog", [0]), "c": ROWS}, None, "client 'c': row 1, .* holds 0"),
        ({1: ROWS, "1": ROWS}, None, "train part: the dict of clients holds 1 and the text '1'"),
        ({"a": ROWS, "a ": ROWS}, None, "the text 'a' and the text 'a '"),
        ([[(X[0], True), (X[0], False), (X[0], 1)]], None, "holds True and 1, which may be one"),
        ({}, None, "train part has no data set"),
    ],
)
def test_what_may_be_one_or_two_is_refused(train: Any, test: Any, words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        from_torch(train, test, **(IID if train is ANIMALS else {}))


def test_nobody_holds_a_pooled_test_set_whatever_clients_are_called() -> None:
    for name in ("None", "nobody", "nobody None", ""):
        task = from_torch({name or "x": ROWS, "b": ROWS}, ROWS)
        np.testing.assert_array_equal(task.test_clients, np.full(60, -1))


def test_numbers_to_predict_are_no_classes() -> None:
    task = from_torch(Folder("a b", [0, 1, 0, 1] * 5), **IID, task_type="regression")
    assert (task.metric, task.dataset.num_classes) == ("loss", 0)


@pytest.mark.parametrize("change", [torch.Tensor.byte, lambda x: x[0].byte().numpy(), None])
def test_bytes_beside_other_numbers_are_refused(change: Any) -> None:
    first = X[0] if change is None else change(X[:2])
    other = first.clone().byte() if change is None else torch.rand(np.shape(first))
    words = rf"row 2, .* {'this' if change is None else 'the first'} row alone has bytes"
    with pytest.raises(DeltaflError, match=words):
        from_torch([(first, 0), (other, 1), (first, 0)], **IID)


class Listed(list[Any]):
    """Items, and the names of their classes."""

    classes = ("no", "yes", "perhaps")


class Stream(IterableDataset[Any]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


MASKS = np.random.default_rng(5).integers(0, 3, (60, 2, 4))


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (torch.from_numpy(MASKS), MASKS, 3),
        (torch.from_numpy(MASKS[:, None]), MASKS, 3),
        (MASKS.astype(np.uint8), MASKS, 3),
        ([Image.fromarray(mask.astype(np.uint8)) for mask in MASKS], MASKS, 3),
        (np.where(MASKS > 1, 255, MASKS), np.where(MASKS > 1, 255, MASKS), 2),
        ([mask[0].tolist() for mask in MASKS - (MASKS == 0) * 100], MASKS[:, 0], 3),
        (MASKS[:, 0] > 1, (MASKS[:, 0] > 1).astype(np.float32), 4),
        (torch.from_numpy(MASKS[:, :1] > 1).float(), (MASKS[:, 0] > 1).astype(np.float32), 4),
    ],
)
def test_labels_may_stand_at_every_place_of_an_example(
    labels: Any, expected: Array, classes: int
) -> None:
    """As in a mask or a sentence of words; of 0 and 1 along one axis they are labels, yes or no."""
    task = from_torch([*zip(X, labels, strict=True)], make_model=nn.Flatten, **IID)
    found = np.concatenate([task.dataset.train_y, task.dataset.test_y])
    if found.min() == -100:
        expected = np.where(expected == 0, -100, expected)
    assert found.dtype == (expected.dtype if expected.dtype.kind == "f" else np.int64)
    # The rows of the test set are drawn.
    order = [np.argsort([str(row) for row in rows]) for rows in (found, expected)]
    assert np.array_equal(found[order[0]], expected[order[1]])
    assert task.dataset.num_classes == classes
    is_several = found.dtype.kind == "f"
    assert task.loss is (binary_cross_entropy if is_several else cross_entropy)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("way", ["tensors", "lists"])
def test_whole_numbers_are_tokens_where_the_model_takes_no_others(kind: Any, way: str) -> None:
    x = torch.arange(120).reshape(60, 2).to(kind)
    data: Any = TensorDataset(x, torch.arange(60) % 2)
    if way == "lists":
        data = [(x.tolist(), int(y)) for x, y in data]

    def text() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(120, 4), nn.Linear(4, 2))

    models: dict[Any, bool] = {text: True, partial(nn.Linear, 2, 2): False, None: False}
    for make_model, are_tokens in models.items():
        task = from_torch(data, make_model=make_model, **IID)
        check_task(task, "made up", 0)
        assert task.tokens == are_tokens
        assert task.dataset.train_x.dtype == (np.int64 if are_tokens else np.float32)
        found = np.concatenate([task.dataset.train_x, task.dataset.test_x])
        assert np.array_equal(np.sort(found, axis=0), x.numpy())


def test_one_whole_number_a_row_is_one_column() -> None:
    for kind in (torch.int64, torch.float32):
        task = from_torch(TensorDataset(torch.arange(60).to(kind), torch.arange(60) % 2), **IID)
        assert task.dataset.train_x.shape[1:] == (1,)
        assert task.dataset.train_x.dtype == np.float32


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (partial(nn.Linear, 10, 2), "2x2 and 10x2"),
        (lambda: nn.Sequential(nn.EmbeddingBag(3, 4), nn.Linear(4, 2)), "valid range|index_size"),
        (lambda: nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 2)), "out of range"),
    ],
)
def test_a_model_that_whole_numbers_do_not_fit_is_told_why(make_model: Any, words: str) -> None:
    """By its width, or by the tokens that it knows, and not by the type of the numbers."""
    data = TensorDataset(torch.arange(120).reshape(60, 2), torch.arange(60) % 2)
    task = from_torch(data, make_model=make_model, **IID)
    with pytest.raises(DeltaflError, match=words):
        check_task(task, "made up", 0)


def test_a_model_may_know_more_classes_than_some_masks_have() -> None:
    x = torch.rand(60, 1, 2, 4)
    data = TensorDataset(x, torch.from_numpy(MASKS))
    task = from_torch(data, make_model=partial(nn.Conv2d, 1, 21, 1), **IID)
    assert task.dataset.num_classes == 21
    check_task(task, "made up", 0)
    with pytest.raises(DeltaflError, match="give mask > 0"):
        from_torch(TensorDataset(x, torch.from_numpy((MASKS > 1) * 255)), **IID)


@pytest.mark.parametrize(
    ("label", "words"),
    [([], "row 1, .* must be a class"), ([-100, -100], "of a single class; two are needed")],
)
def test_labels_at_no_place_are_refused(label: list[int], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        from_torch([(x, label) for x in X], **IID)


def test_a_picture_is_learnt_pixel_by_pixel() -> None:
    """Also one of which some pixels never change; standardized as other targets are."""
    y = np.random.default_rng(2).normal(size=(60, 3)).astype(np.float32)
    y[:, 1] = 4.0
    task = from_torch(TensorDataset(X, torch.from_numpy(y)), task_type="regression", **IID)
    found = np.concatenate([task.dataset.train_y, task.dataset.test_y])
    assert not found[:, 1].any()
    np.testing.assert_allclose(found[:, [0, 2]].mean(axis=0), 0, atol=1e-6)
    own = from_torch(
        TensorDataset(X, torch.from_numpy(y)),
        task_type="regression",
        make_model=partial(nn.Linear, 2, 3),
        **IID,
    )
    found = np.concatenate([own.dataset.train_y, own.dataset.test_y])
    assert np.array_equal(np.sort(found, axis=0), np.sort(y, axis=0))
    pixels = np.random.default_rng(2).normal(size=(60, 1, 2, 3)).astype(np.float32)
    whole = [*zip(X, torch.from_numpy(pixels), strict=True)]
    task = from_torch(whole, task_type="regression", **IID)
    assert task.dataset.train_y.shape[1:] == (1, 2, 3)
    found = np.concatenate([task.dataset.train_y, task.dataset.test_y])
    assert np.array_equal(np.sort(found, axis=None), np.sort(pixels, axis=None))
    with pytest.raises(DeltaflError, match="nothing to predict"):
        from_torch(TensorDataset(X, torch.ones(60, 3)), task_type="regression", **IID)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (ROWS, {}, "write partition='iid'"),
        (ROWS, {"partition": "natural"}, "write partition='iid'"),
        (Stream(), IID, r"part is of type Stream; .* list\(iterable\)"),
        (DataLoader(ROWS), IID, "loader.dataset"),
        (ChainDataset([Stream()]), IID, r"type ChainDataset; .* list\(iterable\): TypeError"),
        ([Subset(ROWS, range(9)), Subset(ROWS, [])], {}, "client 1 has no items"),
        ([[(1.0, 2.0, 3.0)]], {}, "client 0: item 0 has 3 parts"),
        ({"a": ROWS, "b": ROWS}, IID, "has a data set for each client, and a partition deals"),
        ([ROWS, ROWS], IID, "item 0 is of type TensorDataset; .* goes without a partition"),
        ([*zip(X, np.eye(60), strict=True)], IID, "of one-hot labels take the place of the 1"),
        (Listed(zip(X, np.eye(60), strict=True)), IID, "of one-hot labels take the place"),
        (TensorDataset(X, torch.zeros(60, 4, 4).long()), IID, "labels are of a single class"),
        (TensorDataset(X, torch.rand(60, 4, 4)), IID, "write a Task of your own"),
        (TensorDataset(X, torch.rand(60, 4)), IID, "labels of 0 and 1"),
        ([(X[0], [0, 2, 1]), (X[1], [0, 2])], IID, r"row 2, .* numbers of shape \(3,\)"),
        (TensorDataset(X + np.nan, X), IID, "row 1, column 'input' holds the number nan"),
        (TensorDataset(X + 1j, X), IID, "row 1, column 'input' holds a tensor of torch.complex64"),
        ([(torch.zeros(2, device="meta"), 0)], IID, "'input' holds a tensor .* on meta"),
        ([(X[0], torch.zeros((), device="meta"))], IID, "the label of item 0 cannot be read"),
        (Pictures(lambda picture: 1 / 0), IID, "item 0 cannot be read.*ZeroDivisionError"),
        (
            Pictures(lambda picture: picture.convert("P")),
            IID,
            r"'input' .* mode P.*convert\('RGB'\)",
        ),
    ],
)
def test_what_cannot_be_used_is_named(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        from_torch(data, **options)


def test_the_mark_of_no_label_is_no_class() -> None:
    label = torch.arange(60) % 3
    label[7] = -100
    with pytest.raises(DeltaflError, match=r"row 8, column 'label' holds -100.*drop the row"):
        from_torch(TensorDataset(X, label), **IID)
    # Beside numbers with gaps it is a number like others.
    assert from_torch(TensorDataset(X, label * 100), **IID).dataset.num_classes == 4
