"""A Hugging Face data set as a task, and the partition by writer."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.streams import stream
from deltafl.tasks.base import Dataset
from deltafl.tasks.fitting import require_fitting
from deltafl.tasks.huggingface import from_huggingface
from deltafl.tasks.own import load_own
from deltafl.tasks.partition import make_partition

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_huggingface.py"
COLUMNS: dict[str, list[Any]] = {
    "x": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "kind": ["b", "a", "b", "c"],
    "who": [10, 9, 10, 9],
}


class Columns:
    """What ``from_huggingface`` uses of a ``datasets.Dataset``."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_train_and_test_parts_have_the_same_classes_and_clients() -> None:
    test = Columns(x=[[9, 9], [8, 8], [7, 7]], kind=["c", "a", "a"], who=[11, 10, 9])
    data = {"train": Columns(**COLUMNS), "test": test, "spare": Columns()}
    task = from_huggingface(data, label="kind", column="who", inputs="x", name="tiny")
    require_fitting(task, "tiny", 0)
    assert task.dataset.train_x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert (task.dataset.train_y.tolist(), task.dataset.test_y.tolist()) == ([1, 0, 1, 2], [2, 0, 0])
    assert [rows.tolist() for rows in task.client_rows] == [[1, 3], [0, 2]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [-1, 1, 0]
    assert task.dataset.num_classes == 3


def test_without_a_test_part_each_client_gives_some() -> None:
    picture = [np.full((4, 5, 3), k, np.uint8) for k in range(11)]
    data = Columns(x=picture, kind=[k % 2 for k in range(11)], who=["p"] * 6 + ["q"] * 5)
    task = from_huggingface(data, label="kind", column="who", inputs="x")
    assert task.dataset.train_x.shape == (9, 3, 4, 5)
    assert task.dataset.test_x[:, 0, 0, 0].tolist() == [4, 10]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [0, 1]


def test_mistakes_are_named() -> None:
    def make(**changed: list[Any]) -> object:
        return from_huggingface(Columns(**(COLUMNS | changed)), label="kind", column="who", inputs="x", name="tiny")

    for changed, words in (
        ({"x": [[1, 2], [3], [4, 5], [6, 7]]}, r"tiny's train part: row 2, column 'x' has shape \(1,\)"),
        ({"x": [[1, 2], ["a", "b"], [4, 5], [6, 7]]}, "row 2, column 'x' has shape"),
        ({"x": [[1, 2], [1, float("nan")], [4, 5], [6, 7]]}, "row 2, column 'x' holds a value that is not a finite"),
        ({"kind": ["a", None, "b", "a"]}, "tiny's train part: row 2, column 'kind' is missing"),
        ({"who": [1, 2, None, 3]}, "tiny's train part: row 3, column 'who' is missing"),
        ({"who": [1, 2, 2.5, 3]}, "row 3, column 'who' holds 2.5"),
        ({"x": []}, "train part has no rows"),
        ({"x": [[1, 2], None, [4, 5], [6, 7]]}, r"row 2, column 'x' has shape \(\) \(object\)"),
        ({"x": [[[1], [2, 3]], [1, 2], [4, 5], [6, 7]]}, r"row 1, column 'x' has shape \(\) \(object\)"),
        ({"x": [np.zeros((2, 2, 2, 2))] * 4}, r"row 1, column 'x' has shape \(2, 2, 2, 2\); pictures have height"),
        ({"x": [[1, 2], [1, -1e300], [4, 5], [6, 7]]}, "row 2, column 'x' holds a value that float32 cannot hold"),
        ({"x": [[1, 2], [1, 2j], [4, 5], [6, 7]]}, r"row 2, column 'x' has shape \(2,\) \(complex128\)"),
        ({"kind": ["a", ["b"], "b", "a"]}, r"row 2, column 'kind' holds \['b'\]; it must be a whole number or a word"),
        ({"who": [1, 2, np.datetime64("NaT"), 3]}, "row 3, column 'who' is missing"),
    ):
        with pytest.raises(DeltaflError, match=words):
            make(**changed)
    with pytest.raises(DeltaflError, match="unknown column of tiny's train part 'whom': did you mean 'who'"):
        from_huggingface(Columns(**COLUMNS), label="kind", column="whom", inputs="x", name="tiny")
    for data, words in (
        ([1, 2], "tiny's train part is list; it must be a datasets.Dataset"),
        (None, "tiny's train part is NoneType; it must be"),
        ({"train": Columns(**COLUMNS), "test": [1]}, "tiny's test part is list"),
    ):
        with pytest.raises(DeltaflError, match=words):
            from_huggingface(data, label="kind", column="who", inputs="x", name="tiny")
    with pytest.raises(DeltaflError, match="unknown part of the data set 'train'"):
        from_huggingface({"test": Columns(**COLUMNS)}, label="kind", column="who", inputs="x")


@pytest.mark.parametrize("column", ["kind", "who"])
def test_a_gap_in_the_test_part_is_told_by_its_row_there(column: str) -> None:
    test = {**COLUMNS, column: ["a", "b", None, "c"]}
    data = {"train": Columns(**COLUMNS), "test": Columns(**test)}
    with pytest.raises(DeltaflError, match=f"^tiny's test part: row 3, column '{column}' is missing"):
        from_huggingface(data, label="kind", column="who", inputs="x", name="tiny")


def test_the_example_is_a_real_datasets_object() -> None:
    pytest.importorskip("datasets")
    task = load_own(f"{EXAMPLE}:make_task", 0)
    assert task.num_clients == 25
    assert len(task.dataset.train_x) == 800
    assert task.dataset.test_x.shape == (200, 3)
    module = importlib.import_module("own_huggingface")
    train = module.make_data(0)["train"]
    first = sorted({int(who.split()[1]) for who in train["person"]}, key=str)[0]
    rows = [row for row, who in enumerate(train["person"]) if who == f"person {first}"]
    assert task.client_rows[0].tolist() == rows


def test_partition_writer_is_natural_with_that_column_or_says_which_file_is_needed() -> None:
    y = np.arange(6) % 2
    x = np.zeros((6, 1), np.float32)
    writers = {"writer": np.array([5, 3, 5, 3, 4, 4]), "site": np.zeros(6, np.int64)}
    data = Dataset("made", x, y, x, y, 2, columns=writers)
    found = make_partition("writer", data, None, 1.0, stream(0, "partition"))
    assert [rows.tolist() for rows in found] == [[1, 3], [4, 5], [0, 2]]
    with pytest.raises(DeltaflError, match="goes by the column 'writer', not 'site'"):
        make_partition("writer", data, None, 1.0, stream(0, "partition"), column="site")
    with pytest.raises(DeltaflError, match=r"which mnist lacks: it needs the file mnist_writers\.npz"):
        make_partition("writer", Dataset("mnist", x, y, x, y, 2), None, 1.0, stream(0, "partition"))
