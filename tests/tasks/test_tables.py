"""Tables as tasks: every value arrives where it belongs, and a bad table is refused with its row
and column.
"""

import bz2
import csv
import gzip
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from deltafl import DeltaflError, compare
from deltafl.calls import Named
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks import (
    Task,
    check_task,
    from_huggingface,
    from_torch,
    load_own,
    make_task,
    table_task,
)
from tools.cli import deltafl_here

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADER = ("a", "label", "b", "client")
Rows = Sequence[Sequence[object]]


def write(path: Path, rows: Rows, header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def example(sizes: Sequence[int] = (20, 1, 14)) -> list[tuple[object, ...]]:
    """Rows whose features say who they are: a is the row, b the client."""
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    return [
        (row, ("no", "yes")[row % 2], owner, f"house {owner}") for row, owner in enumerate(owners)
    ]


def flowers(size: int = 150) -> pd.DataFrame:
    """A data frame without a client: two numbers, a class and a target; its index is not 0, 1,
    ...
    """
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, size))
    kind = np.where(a > 0.4, "rose", np.where(b > 0, "iris", "lily"))
    frame = pd.DataFrame({"a": a, "b": b, "kind": kind, "price": np.rint(100 * (a + 2 * b))})
    return frame.set_index(np.arange(size) % 7)


class Columns:
    """What ``from_huggingface`` uses of a ``datasets.Dataset``."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = dict[str, Any]()

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_every_row_is_with_its_client_or_in_the_test_set(tmp_path: Path) -> None:
    task = table_task(write(tmp_path / "t.csv", example()), standardize=False)
    data = task.dataset
    sizes = [len(held) for held in task.client_rows]
    assert sizes[:2] == [18, 1] and sizes[2] in {12, 13}  # 20 - 2, 1 - 0, 14 - 1.4
    assert [str(data.train_x.dtype), str(data.train_y.dtype)] == ["float32", "int64"]
    assert data.num_classes == 2
    for client, held in enumerate(task.client_rows):
        assert set(data.train_x[held, 1]) == {client}
    everything = np.concatenate([data.train_x, data.test_x])
    assert sorted(everything[:, 0]) == list(range(35))
    labels = np.concatenate([data.train_y, data.test_y])
    np.testing.assert_array_equal(labels, everything[:, 0] % 2)  # no < yes
    assert task.test_clients is not None
    np.testing.assert_array_equal(task.test_clients, data.test_x[:, 1])
    least = table_task(tmp_path / "t.csv", test_share=0.99)
    assert [len(held) for held in least.client_rows] == [1, 1, 1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 5))
def test_sizes_of_the_test_set(sizes: list[int], seed: int) -> None:
    frame = pd.DataFrame(example((5, *sizes)), columns=HEADER)
    task, again, other = (
        table_task(frame, seed=number, standardize=False) for number in (seed, seed, seed + 1)
    )
    total = sum(min(size / 10, size - 1) for size in (5, *sizes))
    assert max(1, int(total)) <= len(task.dataset.test_x) <= total + 1
    for client, size in enumerate((5, *sizes)):
        given = size - len(task.client_rows[client])
        assert given in {size // 10, -(-size // 10)} and given < size
        assert np.count_nonzero(task.dataset.test_x[:, 1] == client) == given
    assert again.data == task.data
    assert max(sizes) < 30 or other.data != task.data


@pytest.mark.parametrize("share", [0.1, 0.35])
def test_small_clients_give_test_rows_as_often_as_large_ones(share: float) -> None:
    sizes = np.repeat([1, 2, 3, 14], [20, 50, 40, 10])
    frame = pd.DataFrame({"a": np.repeat(np.arange(120), sizes), "label": np.arange(380) % 2})
    given_of = []
    for seed in range(60):
        task = table_task(
            frame.assign(client=frame["a"]), seed=seed, test_share=share, standardize=False
        )
        given_of.append(sizes - [len(rows) for rows in task.client_rows])
        assert abs(len(task.dataset.test_x) - share * 360) < 1
    mean = np.mean(given_of, axis=0)
    assert (mean[sizes == 1] == 0).all()
    for size in (2, 3, 14):
        # Of 60 x 10 clients or more; a deviation of at most a half each.
        assert mean[sizes == size].mean() == pytest.approx(share * size, abs=4 * 0.5 / 600**0.5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.05])
def test_of_small_tables_one_row_is_tested_whatever_the_seed(share: float) -> None:
    # Sums of a hundredth are rounded, some of them down.
    frame = pd.DataFrame({"a": range(24), "client": np.repeat(range(6), 4), "label": [0, 1] * 12})
    tested = {len(table_task(frame, seed=k, test_share=share).dataset.test_x) for k in range(300)}
    assert 1 in tested <= {1, 2}


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, np.nan, np.inf, "0.2", None])
@pytest.mark.parametrize("dealt", [{}, {"partition": "iid", "clients": 3}])
def test_what_is_no_share_is_refused(share: Any, dealt: dict[str, Any]) -> None:
    frame = pd.DataFrame({"a": range(24), "client": np.repeat(range(6), 4), "label": [0, 1] * 12})
    with pytest.raises(DeltaflError, match=r"test_share is .*; it must be between 0 and 1"):
        table_task(frame, test_share=share, **dealt)


def test_bits_of_dealt_tables_are_those_of_before() -> None:
    task = table_task(flowers(), "kind", partition="dirichlet", clients=20, alpha=0.3, seed=3)
    assert task.data["data_crc32"] == "f01bd9c0"


def test_features_are_standardized_by_the_training_rows() -> None:
    frame = pd.DataFrame(example((40, 30)), columns=HEADER).assign(b=5)  # b is constant
    plain, scaled = (table_task(frame, standardize=on).dataset for on in (False, True))
    mean = plain.train_x[:, 0].mean(dtype=np.float64)
    deviation = plain.train_x[:, 0].std(dtype=np.float64)
    for before, after in ((plain.train_x, scaled.train_x), (plain.test_x, scaled.test_x)):
        np.testing.assert_allclose(after[:, 0], (before[:, 0] - mean) / deviation, atol=1e-5)
        np.testing.assert_array_equal(after[:, 1], 0)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        # Two that float64 cannot tell apart, and numbers sorted as such.
        (
            [9007199254740993, 10, 9007199254740992, 9],
            ["9", "10", "9007199254740992", "9007199254740993"],
        ),
        ([" 7", "7", "10"], ["7", "10"]),
        (["x", "7", "10"], ["10", "7", "x"]),
        (["b ", " b", "None at all"], ["None at all", "b"]),
        (["1", "01", "001", "+1", "-1", "2"], ["-1", "+1", "001", "01", "1", "2"]),
        ([f"{10**20 + 1}", f"{10**20}"], [f"{10**20}", f"{10**20 + 1}"]),
        (["1e3", "1000"], ["1000", "1e3"]),
    ],
)
def test_words_and_numbers_are_stripped_and_sorted(
    tmp_path: Path, names: list[Any], order: list[str]
) -> None:
    rows = [(k, names[k % len(names)], 0, names[k % len(names)]) for k in range(60)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    texts = pd.DataFrame(rows, columns=HEADER).astype({"label": str, "client": str})
    same = table_task(texts, standardize=False)
    assert same.data["data_crc32"] == task.data["data_crc32"]
    assert (task.num_clients, task.dataset.num_classes) == (len(order), len(order))
    for client, held in enumerate(task.client_rows):
        found = {str(names[int(a) % len(names)]).strip() for a in task.dataset.train_x[held, 0]}
        assert found == {order[client]}
        assert set(task.dataset.train_y[held]) == {client}
    assert [*task.client_names] == [*task.dataset.class_names] == order


@pytest.mark.parametrize("how", ["frame", "csv", "tsv.gz", "parquet", "npz"])
def test_texts_that_differ_by_zeros_and_signs_stay_apart(how: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "a": np.arange(40.0),
            "client": [["1", "01", "001", "+1"][k % 4] for k in range(40)],
            "label": [["1", "01", "2"][k % 3] for k in range(40)],
        }
    )
    table: Any = tmp_path / f"t.{how}"
    if how == "frame":
        table = frame
    elif how == "parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(table)
    elif how == "npz":
        np.savez(
            table,
            **{name: frame[name].to_numpy() for name in ("a",)},
            **{name: frame[name].to_numpy(str) for name in ("client", "label")},
        )
    else:
        frame.to_csv(table, index=False, sep="\t" if how == "tsv.gz" else ",")
    task = table_task(table)
    assert [*task.client_names] == ["+1", "001", "01", "1"]
    assert [*task.dataset.class_names] == ["01", "1", "2"]


def test_numbers_of_a_text_stay_as_they_are_written(tmp_path: Path) -> None:
    names = ["1.0", "1", "10", "1.50", "1.5", "1e0"]
    for owners, order in (
        (names[:5], ["1", "1.0", "1.5", "1.50", "10"]),
        (names, sorted(names)),
    ):
        rows = [(k, k % 2, 0, owners[k % len(owners)]) for k in range(60)]
        task = table_task(write(tmp_path / "t.csv", rows))
        assert [*task.client_names] == order


@pytest.mark.parametrize("column", ["client", "label"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pd.Series([1, "1", 2] * 20, dtype=object), "1 and the text '1'"),
        (pd.Series([2, 7, " 7"] * 20, dtype=object), "7 and the text '7'"),
        (pd.Series([True, 0, 1] * 20, dtype=object), "True and 1"),
        (pd.Series([0, True, False] * 20, dtype=object), "0 and False"),
        (pd.Series(["True", "no", True] * 20, dtype=object), "the text 'True' and True"),
        (pd.Categorical([1, "1", 2] * 20), "1 and the text '1'"),
        (pd.Series([1.0, 2.0**53 + 2, 3] * 20), "at most 9007199254740992.*whole numbers or as"),
        (pd.Series([1.0, 2.0**24 + 2, 3] * 20, dtype=np.float32), "at most 16777216"),
        (pd.Series([1.0, np.inf, 3] * 20), "replace infinity by a number|at most"),
    ],
    ids=["mixed", "blank", "one", "zero", "true", "category", "float64", "float32", "infinity"],
)
def test_what_may_be_one_or_two_is_refused(column: str, values: Any, words: str) -> None:
    frame = pd.DataFrame({"a": range(60), "client": range(60), "label": range(60)})
    with pytest.raises(DeltaflError, match=words):
        table_task(frame.assign(**{column: values}), task_type="classification", test_share=0.5)


def test_digits_of_other_scripts_are_words() -> None:
    digits = ["\u0661", "1", "\uff11"] * 20  # an Arabic one, and a wide one
    task = table_task(pd.DataFrame({"a": range(60), "client": digits, "label": digits}))
    assert [*task.client_names] == [*task.dataset.class_names] == sorted(digits[:3])


def test_numbers_whose_squares_are_nothing_are_one_number() -> None:
    frame = pd.DataFrame({"a": np.arange(60) * 1e-320, "b": range(60), "label": [0, 1] * 30})
    data = table_task(frame, partition="iid", clients=3).dataset
    assert np.isfinite(data.train_x).all() and np.isfinite(data.test_x).all()
    with pytest.raises(DeltaflError, match="holds a single number"):
        table_task(frame, "a", task_type="regression", partition="iid", clients=3)


def test_a_declared_order_stays() -> None:
    sizes = pd.Categorical(["mid", "low", "high"] * 20, categories=["low", "mid", "high", "huge"])
    frame = pd.DataFrame({"a": np.arange(60), "label": sizes, "client": sizes})
    task = table_task(frame, standardize=False)
    assert [*task.dataset.class_names] == ["low", "mid", "high", "huge"]
    assert task.dataset.num_classes == 4  # a model may know classes that nobody has here
    assert [*task.client_names] == ["low", "mid", "high"]
    rows = task.dataset.train_x[:, 0].astype(int)
    np.testing.assert_array_equal(task.dataset.train_y, np.array([1, 0, 2])[rows % 3])
    bins = pd.cut(np.arange(60), 3)
    assert table_task(frame.assign(label=bins), standardize=False).dataset.num_classes == 3
    codes = Columns(x=[[k] for k in range(30)], kind=[2 * (k % 2) for k in range(30)])
    codes.features = {"kind": SimpleNamespace(names=["rose", "iris", "lily"])}
    named = from_huggingface(codes, label="kind", partition="iid", clients=3).dataset
    assert (named.num_classes, [*named.class_names]) == (3, ["rose", "iris", "lily"])
    assert set(named.train_y) == {0, 2}


LABELS = pd.DataFrame({"a": np.arange(30), "y1": np.arange(30) % 2, "y2": np.arange(30) % 3 == 0})


@pytest.mark.parametrize("label", [["y1", "y2"], ("y1", "y2"), "y1,y2"])
def test_several_labels_are_one_task(label: Any, tmp_path: Path) -> None:
    LABELS.to_csv(tmp_path / "t.csv", index=False)
    for table in (LABELS, tmp_path / "t.csv"):
        task = table_task(table, label, partition="iid", clients=3, standardize=False)
        check_task(task, "labels", 0)
        data = task.dataset
        assert (data.num_classes, str(data.train_y.dtype)) == (2, "float32")
        assert data.train_x.shape[1] == 1
        rows = data.train_x[:, 0].astype(int)
        np.testing.assert_array_equal(data.train_y, np.stack([rows % 2, rows % 3 == 0], axis=1))
        assert [*data.class_names] == ["y1", "y2"]
    numbers = LABELS.assign(y2=np.arange(30) / 7)
    many = table_task(numbers, label, partition="iid", clients=3, task_type="regression")
    check_task(many, "numbers", 0)
    assert (many.dataset.train_y.shape[1], many.dataset.num_classes, many.metric) == (2, 0, "loss")
    with pytest.raises(DeltaflError, match="column 'y2' holds other numbers than 0 and 1"):
        table_task(numbers, label, partition="iid", clients=3)
    with pytest.raises(DeltaflError, match="needs one class a row"):
        table_task(LABELS, label, partition="dirichlet", clients=3)


@pytest.mark.parametrize("label", ["y1,y1", "y1,y2,y1", ["y1,y2", "y2"]])
def test_a_label_is_named_once(label: Any) -> None:
    with pytest.raises(DeltaflError, match=r"several labels are a list of different names"):
        table_task(LABELS, label, partition="iid", clients=3)


@pytest.mark.parametrize("label", [5, {"y1": 1}, [], [1], ["y1", "y1"], None, {"y1"}, b"y1"])
def test_what_is_no_name_of_a_column_is_refused(label: Any) -> None:
    for options in ({"label": label}, {"label": "y1", "column": label or 7}):
        if options.get("column", "y1") and label is not None:
            with pytest.raises(DeltaflError, match=r"(label|column) is .*; it must be the name of"):
                table_task(LABELS, **options)
    with pytest.raises(DeltaflError, match=r"the name of a column|has no column"):
        from_huggingface(Columns(**COLUMNS), label=label)


def test_npz_and_parquet_give_the_same_task_as_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame(example(), columns=HEADER)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "T.CSV", index=False)
    x = frame[["a", "b"]].to_numpy()
    label, client = (frame[name].to_numpy(str) for name in ("label", "client"))
    np.savez(tmp_path / "t.npz", x=x, label=label, client=client)
    files = ("T.CSV", "t.npz", "t.parquet")
    crcs = {table_task(tmp_path / file).data["data_crc32"] for file in files}
    assert crcs == {table_task(frame).data["data_crc32"]}


def with_value(row: int, column: int, value: object) -> Rows:
    rows = example()
    rows[row] = (*rows[row][:column], value, *rows[row][column + 1 :])
    return rows


BAD_ROWS: list[tuple[Rows, str]] = [
    (with_value(4, 0, ""), "t.csv: row 5, column 'a' holds nan; it must be a number"),
    (with_value(0, 2, "many"), "t.csv: row 1, column 'b' holds 'many'"),
    (with_value(6, 0, "1e300"), "t.csv: row 7, column 'a' holds"),
    (
        with_value(34, 3, ""),
        "row 35, column 'client' holds nan; it must be a whole number or a word",
    ),
    ([(1, 2.5, 3, "x"), (1, 2, 3, "x")], "column 'label' holds 2 different numbers such as 2.5"),
    ([(1, "yes", 3, "x")] * 20, "t.csv: column 'label' holds a single class; two are needed"),
    ([(1, 0, 3), (1, 0, 3)], "t.csv: row 1, column 'client' holds nan"),
    ([(1, 0, 3, "x"), (1, 0, 3, "x", 5)], "t.csv cannot be read as a table: ParserError"),
    ([(1, 0, 3, "x"), (1, 1, 3, "y")], "no client has enough rows for a test set; raise test_sh"),
    ([], "t.csv has no rows; give it one for each example"),
    (with_value(3, 0, "inf"), "row 4, column 'a' holds inf; .*replace infinity"),
    (with_value(3, 0, "-Infinity"), "replace infinity"),
    (with_value(3, 0, "1e38"), "row 4, column 'a' holds 1e+38; .*divide the column"),
    (with_value(3, 0, "1" * 40), "divide the column"),
    (with_value(3, 0, "2021-03-04"), "row 4, column 'a' holds '2021-03-04'; .*numbers of days"),
    (with_value(3, 0, "4.3.2021 10:00"), "numbers of days"),
    (with_value(3, 0, "1,5"), "holds '1,5'; .*decimal=',', thousands='.'"),
    (with_value(3, 0, "1,234,567.5"), "thousands"),
    (with_value(3, 0, "1.234.567"), "thousands"),
    (with_value(3, 0, "12 345"), "thousands"),
    (with_value(3, 0, "?"), "holds '?'; .*a missing value, fill that in"),
    (with_value(3, 0, "unknown"), "a missing value, fill that in"),
    (with_value(3, 0, "12 %"), "leave out the unit"),
    (with_value(3, 0, "12:30"), "numbers of seconds"),
    (with_value(3, 0, "3 Feb 2020"), "numbers of days"),
    (with_value(3, 0, "Feb 3, 2020"), "numbers of days"),
    (with_value(3, 0, "2020-02"), "numbers of days"),
    (with_value(3, 0, "<5"), "a number for a limit"),
    (with_value(3, 0, "\u0665"), "pandas.get_dummies"),
    (with_value(3, 3, "NA"), "a missing value .*where such a word is meant"),
    (with_value(3, 0, "red"), "holds 'red'; .*pandas.get_dummies"),
    ([(k, f"{k},5", 0, "x") for k in range(40)], "column 'label' holds '0,5'; .*decimal=','"),
    ([(k, f"2020-01-{k % 28 + 1:02}", 0, "x") for k in range(40)], "column 'label' holds '2020"),
]


@pytest.mark.parametrize(("rows", "words"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, rows: Rows, words: str) -> None:
    with pytest.raises(DeltaflError) as caught:
        table_task(write(tmp_path / "t.csv", rows))
    for part in words.split(".*"):
        assert part in str(caught.value)


BAD_TEXTS: list[tuple[str, bytes | None, str]] = [
    ("none.csv", None, "there is no table"),
    ("t.xlsx", b"", r"give one of \.csv, \.tsv, .*\.csv\.gz, .*\.npz, \.parquet"),
    ("t.csv", b"a,label,label,client\n1,2,3,4\n", "column 'label' is named twice"),
    ("t.csv", "a,label,client\n1,né,2\n".encode("latin-1"), "in UTF-8: write --encoding latin-1"),
    ("t.tsv", "a\tlabel\tclient\n1\tné\t2\n".encode("utf-16"), "write --encoding utf-16"),
    ("t.csv", b"", "t.csv is empty; give it a header and a row"),
    ("t.csv.gz", b"", r"t\.csv\.gz is empty"),
    ("t.tsv", b"\n\n", "t.tsv is empty"),
    ("t.csv", b"a,label,client\n", "t.csv has no rows; give it one for each example"),
    ("t.csv.gz", b"\x1f\x8bnone", r"t\.csv\.gz cannot be read as a table"),
    ("t.tsv", b"a,label,client\n1,x,u\n", r"one column, 'a,label,client': .* --sep ','"),
    (
        "t.csv",
        b",a,label,client\n0,1,x,u\n",
        r"column 1 has no name; .*index=False\), else name it",
    ),
    (
        "t.csv",
        b"a;label;client\n1;x;u\n",
        "one column, 'a;label;client': .* --sep ';'",
    ),
    ("t.csv", b"a label client\n1 x u\n", "has one column, .* --sep ' '"),
    # A spreadsheet where numbers have a comma: its rows fall into cells of no fixed number.
    ("t.csv", b"a;label\n1;x\n1,5;y\n1,5;2,5\n", "one column, 'a;label': .* --sep ';'"),
    ("t.csv", b"# of 2020\na,label,client\n1,x,u\n", "has one column, .*begin with a line of"),
    # Of this pandas below 3 makes cells without text.
    ("t.csv", "a,label,client\n1,x,u\n".encode("utf-16-le"), "encoding utf-16|has no name"),
    ("t.csv", bz2.compress(b"a,label,client\n1,x,u\n"), "is no text, but packed or of another"),
    ("t.csv", lzma.compress(b"a,label,client\n1,x,u\n"), "is no text, but packed or of another"),
    ("t.tsv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff", "is no text, but packed or of another"),
    ("t.npz", b"none", "t.npz is not an NPZ archive of plain arrays"),
    ("t.parquet", b"none", r"t\.parquet cannot be read as a table: Arrow"),
]


@pytest.mark.parametrize("owner", ["c{},9", "c{},", "1,5,c{},9"])
@pytest.mark.parametrize("rows", ["all", "first"])
def test_no_cell_is_left_out(owner: str, rows: str, tmp_path: Path) -> None:
    lines = [f"{k},{k % 2},{owner.format(k % 3)}" for k in range(40)]
    if rows == "first":
        lines[1:] = [f"{k},{k % 2},c{k % 3}" for k in range(1, 40)]
    (tmp_path / "t.csv").write_text("\n".join(["a,label,client", *lines]))
    if owner.endswith(","):  # spreadsheets do so
        assert table_task(tmp_path / "t.csv").num_clients == 3
        return
    with pytest.raises(DeltaflError, match="give each row as many cells as the header has, and"):
        table_task(tmp_path / "t.csv")


@pytest.mark.parametrize("end", ["csv", "tsv", "txt", "csv.gz", "tsv.gz", "TXT.GZ"])
@pytest.mark.parametrize(("sep", "encoding"), [(None, None), (";", "latin-1"), ("tab", "utf-16")])
def test_tables_of_text(end: str, sep: str | None, encoding: str | None, tmp_path: Path) -> None:
    frame = pd.DataFrame(example(), columns=HEADER).assign(client=np.arange(35) % 3)
    frame["client"] = frame["client"].map({0: "Kö", 1: "Århus", 2: "é"})
    usual = "," if end.startswith("csv") else "\t"
    mark = {None: usual, "tab": "\t"}.get(sep, sep)
    text = frame.to_csv(index=False, sep=mark).encode(encoding or "utf-8")
    # Whatever the name, a file is unpacked by its first bytes.
    (tmp_path / f"t.{end}").write_bytes(gzip.compress(text) if end.lower()[-1] == "z" else text)
    options: dict[str, Any] = {
        key: value for key, value in (("sep", sep), ("encoding", encoding)) if value
    }
    task = table_task(tmp_path / f"t.{end}", **options)
    assert task.data["data_crc32"] == table_task(frame).data["data_crc32"]
    assert task.name == "t"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encoding": "latin-one"}, "encoding is 'latin-one', which Python does not know"),
        ({"sep": "::"}, "sep is '::'; it must be one character"),
    ],
)
def test_how_a_text_is_read_is_checked(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path / "t.csv", example())
    with pytest.raises(DeltaflError, match=words):
        table_task(tmp_path / "t.csv", **options)
    with pytest.raises(DeltaflError, match="sep and encoding are of tables of text"):
        table_task(LABELS, "y1", sep=";")
    with pytest.raises(DeltaflError, match=r"this one is t\.npz: leave them out"):
        table_task(tmp_path / "t.npz", "y1", encoding="latin-1")


def test_ten_thousand_columns_and_columns_without_a_difference() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 10**4))).assign(
        label=np.arange(40) % 2, same=0.1, truth=True
    )
    data = table_task(frame, partition="iid", clients=4).dataset
    assert data.train_x.shape == (36, 10**4 + 2)
    # The mean of many 0.1 is not 0.1.
    np.testing.assert_allclose(data.train_x[:, -2:], 0, atol=1e-12)
    assert np.abs(data.test_x).max() < 100


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pd.date_range("2020-01-01", periods=40), "numbers of days"),
        (pd.to_timedelta(np.arange(40), "D"), r"dt.total_seconds\(\)"),
        (pd.Series(np.arange(40)).map("{} kg".format), "get_dummies"),
        (np.arange(40) + 1j, r"numpy.imag\(table\['a'\]\)"),
    ],
)
def test_columns_of_a_frame_that_are_no_numbers(column: Any, words: str) -> None:
    frame = pd.DataFrame({"a": column, "label": np.arange(40) % 2})
    with pytest.raises(DeltaflError, match=words):
        table_task(frame, partition="iid", clients=4)


@pytest.mark.parametrize(
    "dates",
    [
        pd.date_range("2020-01-01", periods=40),
        pd.date_range("2020-01-01", periods=40, tz="Africa/Nairobi"),
        pd.period_range("2020-01-01", periods=40, freq="D"),
    ],
)
def test_the_cure_for_dates_makes_days_of_them(dates: Any) -> None:
    table = pd.DataFrame({"when": dates, "label": np.arange(40) % 2})
    with pytest.raises(DeltaflError) as refused:
        table_task(table, partition="iid", clients=4)
    found = re.search(r"as (\(.*\.dt\.days) does", str(refused.value))
    assert found is not None
    days = eval(found[1], {"pandas": pd, "table": table})
    np.testing.assert_array_equal(days.diff()[1:], 1)


@pytest.mark.parametrize(("file", "content", "words"), BAD_TEXTS)
def test_bad_files_are_named(tmp_path: Path, file: str, content: bytes | None, words: str) -> None:
    if file.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DeltaflError, match=words):
        table_task(tmp_path / file)


TIME = np.array(["NaT", "2021-01-01", "2020-01-01"], dtype="datetime64[s]")


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        ("a", np.zeros(4), "cannot be read as a table: ValueError: All arrays must be of the same"),
        ("label", np.zeros((3, 2)), r"r.npz has no column 'label': .* 'label\[1\]'"),
        ("client", TIME, "r.npz: row 1, column 'client' holds"),
        ("a", np.array([1, 2, 3j]), "r.npz: row 1, column 'a' holds"),
        ("a", np.array([[0, 1], [0, -1e300], [1, 1]]), r"r.npz: row 2, column 'a\[1\]' holds"),
    ],
)
def test_bad_arrays_are_named(tmp_path: Path, name: str, column: Any, words: str) -> None:
    columns: dict[str, Any] = {"a": np.zeros(3), "label": np.arange(3), "client": np.zeros(3)}
    np.savez(tmp_path / "r.npz", **{**columns, name: column})
    with pytest.raises(DeltaflError, match=words):
        table_task(tmp_path / "r.npz")


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "frame has no column 'client' that says .*--column.*--partition iid --clients 20.*kind"),
    ({"label": "kinds"}, r"data frame has no column 'kinds': .* the nearest are 'kind', "),
    ({"column": "kind"}, "label and client are both the column .kind."),
    (
        {"test_share": 1, "partition": "iid", "clients": 3},
        "test_share is 1; it must be between 0 and 1",
    ),
    ({"partition": "iid"}, "'iid' got None clients; .*clients=20, or --clients 20"),
    ({"partition": "iid", "column": "a", "clients": 2}, "column 'a' says who holds them"),
    ({"partition": "irid", "clients": 2}, "unknown partition 'irid': did you mean 'iid'"),
    ({"partition": "writer"}, "data frame has no column 'writer'"),
    ({"label": "price", "partition": "iid", "clients": 2}, "1.. different numbers.*: write task_"),
    ({"label": "a", "partition": "iid", "clients": 2}, "150 different.*write task_type = regress"),
    (
        {"partition": "shards", "clients": 5, "label": "b", "task_type": "regression"},
        "'kind' holds '",
    ),
    ({"partition": "iid", "clients": 2.5}, r"'iid' got 2\.5 clients; write a number from 1 to"),
    ({"partition": "iid", "clients": 2, "model": None}, "model is None; it must be a function"),
    ({"partition": "iid", "clients": 2, "seed": 1.5}, "must be whole numbers >= 0, got 1.5"),
    ({"partition": "iid", "clients": 2, "seed": None}, "must be whole numbers >= 0, got None"),
    ({"partition": "dirichlet", "clients": 2, "alpha": "1"}, "alpha is '1'; write a number"),
    ({"partition": "iid", "clients": 3, "task_type": "classify"}, "it must be 'classification' or"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_what_a_table_without_clients_is_refused_for(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        table_task(flowers(), **{"label": "kind", **options})


@pytest.mark.parametrize("table", [{"a": [1]}, np.zeros((3, 3)), None])
def test_what_is_no_table_is_refused(table: Any) -> None:
    with pytest.raises(DeltaflError, match=r"the table is of type .*; give a file, a pandas data"):
        table_task(table)


@pytest.mark.parametrize("name", ["t.json", "data/t.xlsx", "t.csv.bz2"])
def test_other_files_are_answered_with_which_tables_can_be_read(name: str) -> None:
    with pytest.raises(DeltaflError, match=r"unknown task '.*t\..*': tables end in \.csv, \.tsv, "):
        make_settings(RunSettings, {"task": name})


def test_a_partition_deals_the_rows_of_a_data_frame_or_a_file(tmp_path: Path) -> None:
    frame = flowers()
    before = frame.copy()
    options: dict[str, Any] = {"label": "kind", "clients": 20, "seed": 3}
    task = table_task(frame, partition="dirichlet", alpha=0.3, **options)
    check_task(task, "frame", 3)
    pd.testing.assert_frame_equal(frame, before)
    assert (task.num_clients, len(task.dataset.train_x), len(task.dataset.test_x)) == (20, 135, 15)
    assert sorted(np.concatenate(task.client_rows)) == list(range(135))
    frame.to_csv(tmp_path / "f.csv", index=False)
    same = table_task(tmp_path / "f.csv", partition="yurochkin2019", alpha=0.3, **options)
    assert same.data["data_crc32"] == task.data["data_crc32"]
    even = table_task(frame, partition="dirichlet", alpha=1e6, **options)
    assert [*map(len, even.client_rows)] != [*map(len, task.client_rows)]
    equal = table_task(frame, partition="iid", **options)
    assert {*map(len, equal.client_rows)} == {6, 7}


def test_frames_of_other_libraries_are_read_by_their_own_conversion() -> None:
    """Arrow's has columns and their names, as a Hugging Face data set has; a polars frame needs
    Arrow for it.
    """
    options: dict[str, Any] = {"label": "kind", "partition": "iid", "clients": 20}
    same = load_own(Named("frame", pyarrow.Table.from_pandas(flowers())), 3, **options)
    of_pandas = load_own(Named("frame", flowers()), 3, **options)
    assert same.data == of_pandas.data

    class WithoutArrow:
        columns = ("kind",)

        def to_pandas(self) -> Any:
            raise ModuleNotFoundError("pyarrow is required")

    with pytest.raises(DeltaflError, match="ModuleNotFoundError: pyarrow is required"):
        load_own(Named("frame", WithoutArrow()), 3, **options)


def test_the_column_of_clients_is_no_feature_and_of_many_owners_some_are_drawn() -> None:
    frame = flowers().assign(client=np.arange(150) % 30)
    dealt = table_task(frame, "kind", partition="iid", clients=20)
    assert dealt.dataset.train_x.shape[1] == 3  # a, b and price
    assert table_task(frame, "kind").num_clients == 30
    assert table_task(frame, "kind", clients=5).num_clients == 5


def test_regression_predicts_a_standardized_target() -> None:
    frame = flowers().drop(columns="kind")
    options: dict[str, Any] = {"label": "price", "partition": "quantity", "clients": 10}
    options["task_type"] = "regression"
    task = table_task(frame, **options)
    check_task(task, "frame", 0)
    data = task.dataset
    assert (task.metric, data.num_classes, str(data.train_y.dtype)) == ("loss", 0, "float32")
    y = np.concatenate([data.train_y, data.test_y])
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-6)
    mean = frame["price"].mean()
    deviation = frame["price"].std(ddof=0)
    assert f"'price' standardized by mean {mean:.4g} and standard deviation {deviation:.4g}" in (
        data.name
    )
    plain = table_task(frame, **options, standardize=False).dataset
    np.testing.assert_allclose(plain.train_y, data.train_y * deviation + mean, rtol=1e-4, atol=1e-3)
    with pytest.raises(DeltaflError, match="'price' holds a single number"):
        table_task(frame.assign(price=3), **options)
    # Also where another one is there to be predicted: a column that somebody named is no pixel.
    with pytest.raises(DeltaflError, match="'price' holds a single number"):
        table_task(frame.assign(price=3), **options | {"label": ["a", "price"]})


@pytest.mark.parametrize(
    ("label", "asks"),
    [
        (range(20), False),
        (range(21), True),
        (["7", "8.5"], True),
        ([f"word {k}" for k in range(40)], False),
        (pd.Categorical(range(40)), False),
        ([True, False], False),
    ],
)
def test_which_labels_are_classes(label: Any, asks: bool) -> None:
    values = pd.Series(label).take(np.arange(120) % len(label)).reset_index(drop=True)
    frame = pd.DataFrame({"a": np.arange(120), "label": values})
    if asks:
        with pytest.raises(DeltaflError, match=r"write task_type = regression \(--task-type"):
            table_task(frame, partition="iid", clients=3)
        return
    task = table_task(frame, partition="iid", clients=3)
    assert task.dataset.num_classes == len(label)


@pytest.mark.parametrize("kind", [float, str, object])
@pytest.mark.parametrize(
    ("bad", "words"),
    [("0.5", "number or a word; write task_type = regr"), ("inf", "replace infinity")],
)
@pytest.mark.parametrize("task_type", ["classification", None])
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_no_classes_are_refused_as_text_too(
    kind: type, bad: str, words: str, task_type: Any
) -> None:
    values = pd.Series([1.0, 2.0, float(bad)] * 10).astype(kind)
    frame = pd.DataFrame({"a": range(30), "label": values})
    if task_type is None and bad != "inf":
        words = "predict the number; up to"
    with pytest.raises(DeltaflError, match=words):
        table_task(frame, task_type=task_type, partition="iid", clients=3)
    worded = frame.assign(label=values.astype(str).replace("1.0", "word"))
    assert (
        table_task(
            worded, partition="iid", clients=3, task_type="classification"
        ).dataset.num_classes
        == 3
    )


def test_words_for_missing_values_are_missing_in_a_file_and_words_in_a_frame(
    tmp_path: Path,
) -> None:
    rows = [(k, ("yes", "None")[k % 2], k, k % 3) for k in range(40)]
    with pytest.raises(
        DeltaflError, match=r"row 2, column 'label' holds nan; .* a missing value \("
    ):
        table_task(write(tmp_path / "t.csv", rows))
    assert table_task(pd.DataFrame(rows, columns=HEADER)).dataset.num_classes == 2


@pytest.mark.parametrize("column", ["a", "label", "client"])
@pytest.mark.parametrize(
    "kind", ["object", "Int64", "Float64", "int64[pyarrow]", "double[pyarrow]", "boolean"]
)
def test_missing_values_are_refused(column: str, kind: str) -> None:
    even = np.arange(40) % 2
    frame = pd.DataFrame({"a": even, "label": even, "client": np.arange(40) // 2 % 2})
    if kind == "boolean":
        frame = frame.astype({column: bool})
    frame = frame.astype({column: kind})
    assert table_task(frame).num_clients == 2
    frame.loc[6, column] = None if kind == "object" else pd.NA
    with pytest.raises(DeltaflError, match=rf"row 7, column '{column}' holds .*; a missing value"):
        table_task(frame)


@pytest.mark.parametrize("column", ["a", "label", "client"])
@pytest.mark.parametrize("kind", ["Sparse[float]", "Sparse[int]", "float16", "Float32"])
def test_a_column_may_be_of_any_type_of_numbers(column: str, kind: str) -> None:
    frame = pd.DataFrame({"a": np.arange(40), "label": [0, 1] * 20, "client": [0, 1, 2, 3] * 10})
    task = table_task(frame)
    other = table_task(frame.astype({column: kind}))
    assert other.data == task.data
    assert other.client_names == task.client_names == ["0", "1", "2", "3"]


def test_numbers_left_as_objects_are_numbers() -> None:
    frame = pd.DataFrame({"a": [True, False, None, True] * 10, "label": [0, 1] * 20}).dropna()
    label = pd.Series(list(map(np.int64, frame["label"])), frame.index, dtype=object)
    task = table_task(frame.assign(label=label), partition="iid", clients=3)
    assert task.dataset.train_x.shape == (27, 1)


COMPARE = ("--samplers", "uniform", "--seeds", "1", "--processes", "1", "--out", "out")


def test_a_table_from_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "visits.CSV", example((20, 30, 40)), ("a", "outcome", "b", "house"))
    task = ("--task", "visits.CSV", "--set", "label=outcome", "--set", "column=house")
    done = deltafl_here("compare", *task, *COMPARE, "--rounds", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    found = [settings[name] for name in ("task", "label", "column")]
    assert found == ["visits.CSV", "outcome", "house"]


def test_a_regression_from_the_command_line(tmp_path: Path) -> None:
    flowers().drop(columns="kind").to_csv(tmp_path / "f.csv", index=False)
    task = ("--task", "f.csv", "--label", "price", "--partition", "iid", "--clients", "15")
    command = ("compare", *task, *COMPARE, "--rounds", "30", "--local-lr", "0.1")
    refused = deltafl_here(*command, cwd=tmp_path)
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "--task-type regression" in refused.stderr
    done = deltafl_here(*command, "--task-type", "regression", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "runs" / "uniform-seed0" / "rounds.jsonl").read_text().splitlines()
    losses = [json.loads(line)["test"]["loss"] for line in lines]
    assert losses[-1] < 0.05 < losses[0]


HF: dict[str, Any] = {"label": "kind", "column": "who", "inputs": "x", "name": "tiny"}
COLUMNS: dict[str, list[Any]] = {
    "x": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "kind": ["b", "a", "b", "c"],
    "who": [10, 9, 10, 9],
}


def test_train_and_test_parts_have_the_same_classes_and_clients() -> None:
    test = Columns(x=[[9, 9], [8, 8], [7, 7]], kind=["c", "a", "a"], who=[11, 10, 9])
    task = from_huggingface({"train": Columns(**COLUMNS), "test": test, "spare": Columns()}, **HF)
    check_task(task, "tiny", 0)
    data = task.dataset
    assert data.train_x.tolist() == COLUMNS["x"]
    assert data.test_x.tolist() == test["x"]
    assert [data.train_y.tolist(), data.test_y.tolist()] == [[1, 0, 1, 2], [2, 0, 0]]
    assert data.num_classes == 3
    assert [rows.tolist() for rows in task.client_rows] == [[1, 3], [0, 2]]
    np.testing.assert_equal(task.test_clients, [-1, 1, 0])


def test_without_a_test_part_each_client_gives_some() -> None:
    # What the package datasets decodes pictures to.
    picture = [Image.fromarray(np.full((4, 5, 3), k, np.uint8)) for k in range(11)]
    data = Columns(x=picture, kind=[k % 2 for k in range(11)], who=["p"] * 6 + ["q"] * 5)
    task = from_huggingface(data, **HF, test_share=0.4)
    assert 4 <= len(task.dataset.test_x) <= 5
    assert task.dataset.train_x.shape == (11 - len(task.dataset.test_x), 3, 4, 5)
    held = task.dataset.test_x[:, 0, 0, 0]
    np.testing.assert_equal(task.test_clients, (held > 5).astype(int))
    assert [*task.client_names] == ["p", "q"]
    small = Columns(x=[[k] for k in range(60)], kind=[k % 2 for k in range(60)])
    small.columns["who"] = [k // 3 for k in range(60)]
    small.column_names.append("who")
    assert len(from_huggingface(small, **HF).dataset.test_x) in {5, 6, 7}
    check_task(task, "pictures", 0)


def test_a_partition_deals_a_hugging_face_data_set() -> None:
    data = Columns(x=[[k, 1] for k in range(60)], kind=[k % 3 for k in range(60)])
    options: dict[str, Any] = {"label": "kind", "clients": 6, "seed": 1}
    task = from_huggingface(data, partition="dirichlet", **options)
    check_task(task, "dealt", 1)
    assert (task.num_clients, len(task.dataset.train_x), len(task.dataset.test_x)) == (6, 54, 6)
    assert task.test_clients is None
    target = from_huggingface(data, partition="iid", task_type="regression", **options)
    check_task(target, "regression", 0)
    assert target.metric == "loss"


def test_the_axis_of_channels_is_found_and_cells_may_be_tensors() -> None:
    first = np.arange(3 * 6 * 5, dtype=np.uint8).reshape(3, 6, 5)
    expected = np.stack([first] * 4)
    for picture in (first, torch.tensor(first), first.transpose(1, 2, 0)):
        data = Columns(**COLUMNS | {"x": [picture] * 4, "kind": [*torch.tensor([2, 0, 2, 0])]})
        found = from_huggingface({"train": data, "test": data}, **HF).dataset
        np.testing.assert_array_equal(found.train_x, expected)
        assert (str(found.train_x.dtype), found.train_y.tolist()) == ("uint8", [1, 0, 1, 0])
    # Pixels that come as lists are known by their column, which pixels from 0 to 1 are not.
    for kind in ("uint8", "float32"):
        data = Columns(**COLUMNS | {"x": [first.tolist()] * 4})
        data.features = {"x": SimpleNamespace(dtype=kind)}
        found = from_huggingface({"train": data, "test": data}, **HF).dataset
        assert (str(found.train_x.dtype), found.train_x.shape) == (kind, (4, 3, 6, 5))
    shares = Columns(**COLUMNS | {"x": [(first / 256).tolist()] * 4})
    data.features = {"x": SimpleNamespace(dtype="uint8")}
    with pytest.raises(DeltaflError, match=r"test part: row 1, .* the first row alone has bytes"):
        from_huggingface({"train": data, "test": shares}, **HF)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 5, 3), (3, 6, 5)),
        ((6, 5, 2), (2, 6, 5)),
        ((2, 5, 3), (3, 2, 5)),
        ((3, 6, 5), (3, 6, 5)),
        ((1, 6, 4), (1, 6, 4)),
        ((3, 4, 4), (3, 4, 4)),
        ((3, 5, 3), (3, 5, 3)),
        # Feature maps, of which the size says nothing.
        ((8, 5, 7), (8, 5, 7)),
        ((8, 8, 5), (8, 8, 5)),
        ((6, 5), (1, 6, 5)),
        ((3, 5), (1, 3, 5)),
    ],
)
def test_channels_are_first_unless_the_last_axis_alone_may_be_theirs(
    shape: tuple[int, ...], expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    data = Columns(**COLUMNS | {"x": [array] * 4})
    with caplog.at_level("INFO", "deltafl"):
        x = from_huggingface({"train": data, "test": data}, **HF).dataset.train_x
    assert x.shape[1:] == expected
    is_moved = len(shape) == 3 and shape != expected
    np.testing.assert_array_equal(
        x[0], array.transpose(2, 0, 1) if is_moved else array.reshape(expected)
    )
    assert ("first axis" in caplog.text) == (len(shape) == 3 and not is_moved)


def test_pictures_have_their_channels_last_whatever_their_size() -> None:
    data = Columns(**COLUMNS | {"x": [Image.new("RGB", (5, 3))] * 4})
    x = from_huggingface({"train": data, "test": data}, **HF).dataset.train_x
    assert x.shape == (4, 3, 3, 5)


def test_a_name_that_is_no_text_is_refused() -> None:
    data = Columns(**COLUMNS)
    with pytest.raises(DeltaflError, match="name is 3; it must be a text"):
        from_huggingface({"train": data, "test": data}, **HF | {"name": 3})
    with pytest.raises(DeltaflError, match="name is 3; it must be a text"):
        from_torch([], name=3)  # type: ignore[arg-type]


def test_one_column_is_not_both_label_and_client() -> None:
    table = pd.DataFrame({"x": np.arange(20.0), "who": np.arange(20) % 2})
    for how in ({"column": "who"}, {"partition": "natural", "column": "who"}):
        with pytest.raises(DeltaflError, match="label and client are both the column 'who'"):
            table_task(table, "who", **how)  # type: ignore[arg-type]
    data = Columns(x=[[k] for k in range(20)], who=[k % 2 for k in range(20)])
    with pytest.raises(DeltaflError, match="label and client are both the column 'who'"):
        from_huggingface(data, label="who", column="who")
    assert table_task(table, "who", partition="iid", clients=2).num_clients == 2


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
def test_whole_numbers_of_numpy_are_names_beside_words(kind: type[Any]) -> None:
    who = pd.Series(["north" if k % 3 == 0 else kind(k % 3) for k in range(60)], dtype=object)
    table = pd.DataFrame({"x": np.arange(60.0), "client": who, "label": np.arange(60) % 2})
    assert table_task(table).client_names == ["1", "2", "north"]


def pictures(*modes: str) -> list[Any]:
    return [Image.new(modes[k % len(modes)], (4, 4)) for k in range(4)]


CLASS_LABEL = Columns(**COLUMNS | {"kind": [0, 1, -1, 1]})
CLASS_LABEL.features = {"kind": SimpleNamespace(names=["cat", "dog"])}
NAMED = Columns(**COLUMNS | {"kind": [0, 1, 0, 1]})
NAMED.features = CLASS_LABEL.features
SPARE = Columns(**COLUMNS, z=[1, 2, 3, 4])
BAD_DATA: list[tuple[Any, dict[str, Any], str]] = [
    (
        {"x": [[1, 2], [3], [4, 5], [6, 7]]},
        {},
        r"'x' holds numbers of shape \(1,\).* tokenizer that",
    ),
    ({"x": ["so", "be", "it", "so"]}, {}, "row 1, column 'x' holds 'so'; .* tokenizer that pads"),
    ({"x": [[1, 2], [1, -1e300], [4, 5], [6, 7]]}, {}, "part: row 2, column 'x' holds"),
    ({"x": [[1, 2], [3, 4], [4, np.nan], [6, 7]]}, {}, "row 3, column 'x' holds .*nan"),
    ({"x": [[1, 2], [[3], [4, 5]], [6, 7], [6, 7]]}, {}, "row 2, column 'x' holds"),
    ({"x": [np.zeros((2, 2, 2, 2))] * 4}, {}, "row 1, column 'x' holds"),
    ({"kind": [[0, 1]] * 4}, {}, "of one-hot labels take the place of the 1"),
    (
        {"kind": [[5, 1], [4, 5], [3, 4, 6], [1, 2]]},
        {"task_type": "regression"},
        r"row 3, .* must be numbers of shape \(2,\)",
    ),
    ({"kind": [4, [5, 1], [3, 4], [1, 2]]}, {"task_type": "regression"}, "make a column of each"),
    ({"x": pictures("RGB", "L")}, {}, r"data.cast_column\('x', datasets.Image\(mode='RGB'\)\)"),
    ({"x": pictures("P")}, {}, r"data.cast_column\('x', datasets.Image\(mode='RGB'\)\)"),
    ({"kind": ["a", None, "b", "a"]}, {}, "tiny's train part: row 2, column 'kind' holds"),
    (
        {"kind": ["a", ["b", 1], "b", "a"]},
        {},
        r"row 2, column 'kind' holds \['b', 1\]; it must be a whole",
    ),
    (CLASS_LABEL, {}, "row 3, column 'kind' holds -1; .* an example without one: drop the row"),
    (
        {"train": NAMED, "test": Columns(**COLUMNS | {"kind": [0, 0.5, 1, 1]})},
        {},
        r"test part: row 2, column 'kind' holds 0\.5; it must be one of 2 names",
    ),
    ({"train": NAMED, "test": Columns(**COLUMNS)}, {}, "test part: row 1, column 'kind' holds 'b'"),
    ({}, {"inputs": "kind"}, "inputs are 'kind', and that is the label"),
    ({}, {"inputs": "y"}, "no column 'y': name another one with inputs;"),
    ({}, {"label": "y"}, "no column 'y': name another one with label;"),
    ({}, {"inputs": "who"}, "inputs are 'who'"),
    (SPARE, {"inputs": None}, r"tiny has x, z beside label and client: .*to_pandas\(\)"),
    ({}, {"column": None}, "train part has no column 'client' that says who holds a row"),
    ({}, {"inputs": "y"}, "tiny's train part has no column 'y'"),
    ({"train": Columns(**COLUMNS), "test": [1]}, {}, "tiny's test part is of type list"),
    (
        {"train": Columns(**COLUMNS), "test": Columns(**COLUMNS | {"who": ["a", "b", None, "c"]})},
        {},
        "^tiny's test part: row 3, column 'who' holds",
    ),
    ({key: [] for key in COLUMNS}, {}, "tiny's train part has no rows"),
    (
        {"train": Columns(**{key: [] for key in COLUMNS}), "test": Columns(**COLUMNS)},
        {},
        "tiny's train part has no rows",
    ),
    ({"test": Columns(**COLUMNS)}, {}, "unknown part of the data set 'train'"),
]


@pytest.mark.parametrize(("data", "options", "words"), BAD_DATA)
def test_mistakes_are_named(data: Any, options: dict[str, Any], words: str) -> None:
    if isinstance(data, dict) and not {"train", "test"} & data.keys():
        data = Columns(**(COLUMNS | data))
    with pytest.raises(DeltaflError, match=words):
        from_huggingface(data, **(HF | options))


def test_the_example_is_a_real_datasets_object() -> None:
    pytest.importorskip("datasets")
    task = load_own(f"{EXAMPLES / 'own_huggingface.py'}:make_task", 0)
    assert task.num_clients == 25
    assert len(task.dataset.train_x) == 800
    assert task.dataset.test_x.shape == (200, 3)


MAJORITY = pd.DataFrame(
    {"a": np.arange(300.0) % 17, "client": np.arange(300) % 3, "label": np.arange(300) % 7 == 0}
)


@pytest.mark.parametrize(
    ("options", "same", "above"),
    [
        ([], False, True),
        (["--sample", "3"], True, True),
        (["--threshold", "0.99"], False, False),
        (["--sample", "3", "--threshold", "0.99"], True, False),
    ],
)
def test_a_comparison_that_says_little_says_so(
    options: list[str], same: bool, above: bool, tmp_path: Path
) -> None:
    MAJORITY.to_csv(tmp_path / "t.csv", index=False)
    words = ["--samplers", "uniform,full", "--seeds", "2", "--rounds", "2", "--processes", "1"]
    done = deltafl_here("compare", "--task", "t.csv", *words, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    warned = " ".join(done.stderr.split())
    told = " ".join(done.stdout.split())
    for text in (warned, told):
        assert ("asks all clients in each round" in text) == same
        assert ("a model that always answers it reaches the threshold" in text) == above
    assert "always the commonest class: " in told
    assert not (same and re.search("more seeds|add seeds", told, re.IGNORECASE))


def test_how_a_table_is_read_from_the_command_line(tmp_path: Path) -> None:
    frame = MAJORITY.assign(label=np.where(MAJORITY["label"], "malade", "en santé"))
    frame.to_csv(tmp_path / "t.txt", index=False, sep=";", encoding="latin-1")
    words = ("--task", "t.txt", "--sep", ";", "--encoding", "latin-1", "--test-share", "0.4")
    done = deltafl_here("compare", *words, *COMPARE, "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    assert [settings[key] for key in ("sep", "encoding", "test_share")] == [";", "latin-1", 0.4]
    resumed = deltafl_here("compare", *words, *COMPARE, "--rounds", "2", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    refused = deltafl_here("compare", "--task", "digits", "--sep", ";", cwd=tmp_path)
    assert (refused.returncode, "sep is a setting of tables" in refused.stderr) == (2, True)


def test_a_partitioner_goes_wherever_a_partition_does(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    frame = MAJORITY.rename(columns={"label": "ill"})
    thirds = Thirds("ill")
    task = table_task(frame, "ill", partition=thirds)
    assert task.num_clients == 3
    data = Columns(x=[[k, 1] for k in range(60)], kind=[k % 3 for k in range(60)])
    dealt = from_huggingface(data, label="kind", partition=Thirds("kind"))
    assert [len(rows) for rows in dealt.client_rows] == [18, 18, 18]
    options: dict[str, Any] = {"samplers": "uniform", "seeds": 2, "rounds": 1, "processes": 1}
    options |= {"progress": False, "report": False, "sample": 2}
    found = compare(frame, label="ill", partition=thirds, out=tmp_path / "a", **options)
    assert found.numbers.settings["partition"] == "Thirds"
    again = compare("digits", partition=Thirds("label"), out=tmp_path / "b", **options)
    assert all(len(run.draws_m) == 3 for run in (*found.curves, *again.curves))


class Thirds:
    """A partitioner as those of ``flwr_datasets`` are."""

    num_partitions = 3

    def __init__(self, label: str) -> None:
        self.label = label
        self.dataset: Any = None

    def load_partition(self, partition_id: int) -> Any:
        order = np.argsort(self.dataset[self.label], kind="stable")
        return self.dataset.select(np.array_split(order, 3)[partition_id])


def test_a_model_of_a_table_has_local_and_frozen_arrays() -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "z": np.ones(20), "y": np.arange(20) % 2})
    parts: dict[str, Any] = {"local": ["1.bias"], "trainable": ["1.weight"]}
    task = table_task(frame, "y", partition="iid", clients=4, **parts)
    kinds = {entry.name: entry.kind for entry in task.parts_of(task.make_model()).entries}
    assert set(kinds.values()) == {"trained", "local"}
    check_task(task, "table", seed=0)
    other = make_task("digits", seed=0, **parts)
    assert list(other.parts_of(other.make_model()).trained) == ["1.weight"]


def chain(in_features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_features, 3), nn.ReLU(), nn.Linear(3, outputs))


@pytest.mark.parametrize("task_type", ["regression", "classification"])
def test_patterns_name_the_arrays_of_the_model_that_was_given(task_type: Any) -> None:
    """Whatever the task puts behind it; by "0.*" a chain around it would be trained as a whole."""
    frame = pd.DataFrame({"x": np.arange(20.0), "z": np.ones(20), "y": np.arange(20) % 2})
    given: dict[str, Any] = {"task_type": task_type, "partition": "iid", "clients": 4}
    parts: dict[str, Any] = {"local": ["0.weight"], "trainable": "0.*"}
    task = table_task(frame, "y", model=chain, **parts, **given)
    kinds = [entry.kind for entry in task.parts_of(task.make_model()).entries]
    assert kinds == ["local", "trained", "frozen", "frozen"]
    check_task(task, "table", seed=0)


def three(in_features: int, outputs: int) -> nn.Module:
    return nn.Linear(in_features, 3 * outputs)


def double(in_features: int, outputs: int) -> nn.Module:
    return nn.Linear(in_features, outputs).double()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"local": "3.*"}, r"local has '3\.\*', .* are '0\.weight', '0\.bias', '2\.weight'"),
        ({"trainable": ["0.x"]}, r"trainable has '0\.x', .* are '0\.weight', "),
        ({"model": double}, "the array 'weight' of the model is torch.float64"),
        ({"model": three}, "6 numbers in evaluation for 2 examples"),
    ],
)
def test_errors_name_the_arrays_of_the_model_that_was_given(
    parts: dict[str, Any], said: str
) -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20) / 3})
    given: dict[str, Any] = {"model": chain, "partition": "iid", "clients": 4, **parts}
    with pytest.raises(DeltaflError, match=said):
        check_task(table_task(frame, "y", task_type="regression", **given), "table", seed=0)


class Several(nn.Linear):
    """It returns a tuple."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_a_model_of_one_number_that_returns_no_tensor_is_named() -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20) / 3})
    task = table_task(frame, "y", task_type="regression", partition="iid", clients=4, model=Several)
    with pytest.raises(DeltaflError, match=r"returned tuple in evaluation.*output\[0\]"):
        check_task(task, "table", seed=0)


# --- strata


def with_regions(regions: list[str], **more: Any) -> Task:
    """Three clients with four rows each."""
    frame = pd.DataFrame(
        {
            "x": np.arange(12.0),
            "label": np.arange(12) % 2,
            "client": np.repeat(["b", "a", "c"], 4),
            "region": regions,
        }
    )
    return table_task(frame, strata="region", **more)


def test_a_column_names_the_stratum_of_each_client() -> None:
    task = with_regions(["07"] * 4 + ["7"] * 4 + ["07"] * 4, test_share=0.5)
    assert dict(zip(task.client_names, task.client_strata, strict=True)) == {
        "a": "7",
        "b": "07",
        "c": "07",
    }
    # The column is no feature.
    assert task.dataset.train_x.shape[1] == 1
    strata = task.population("data").strata
    assert strata is not None
    assert strata.names == ("07", "7")


@pytest.mark.parametrize(
    ("regions", "more", "said"),
    [
        (["n"] * 6 + ["s"] * 6, {}, "client 'a' has rows of 'n' and 's' in column 'region'"),
        ([*"abcdefghijkl"], {}, "'a' has rows of 'e' and 'f' in column 'region', 3 names in all"),
        (["n"] * 11 + [""], {}, "row 12"),
        (["n"] * 12, {"strata": "county"}, "no column 'county': name another one with strata"),
        (["n"] * 12, {"strata": 3}, "strata is 3"),
    ],
)
def test_bad_strata_are_one_sentence(regions: list[str], more: Any, said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        if more:
            frame = pd.DataFrame({"x": range(12), "label": [0, 1] * 6, "client": [1, 2, 3] * 4})
            table_task(frame, **more)
        else:
            with_regions(regions, test_share=0.3)


@pytest.mark.drawn
def test_what_strata_got_is_in_the_report_and_among_the_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=240), "client": np.arange(240) % 12})
    frame["label"] = (frame["x"] > 0).astype(int)
    frame["region"] = np.array(["north", "north", "south"])[frame["client"] % 3]
    found = compare(
        frame, "uniform", strata="region", at_least=1, sample=3, rounds=4, seeds=2, processes=1,
        out=tmp_path / "out", test_share=0.3,
    )  # fmt: skip
    clients = found.clients()
    assert set(clients["stratum"]) == {"north", "south"}
    group = clients.groupby("stratum")
    # In four rounds with one at least of each.
    per_seed = clients.groupby(["seed", "stratum"])["draws"].sum()
    assert per_seed.min() >= 4
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    table = page.partition("<h2>Strata</h2>")[2].partition("</table>")[0]
    for name in ("north", "south"):
        assert f"{100 * group['accuracy'].mean()[name]:.1f}" in table
        assert f"({group['draws'].mean()[name]:,.1f})" in table


def test_the_settings_of_a_table_need_no_torch(tmp_path: Path) -> None:
    """Importing it takes seconds, and the processes that train do so themselves."""
    program = (
        "import sys; from deltafl.simulation.settings import CompareSettings, make_settings; "
        "given = {'task': 'own.csv', 'label': 'y', 'partition': 'iid', 'clients': 4}; "
        "print(make_settings(CompareSettings, given).sample, 'torch' in sys.modules)"
    )
    rows = "".join(f"{k},{k % 2}\n" for k in range(20))
    (tmp_path / "own.csv").write_text(f"a,y\n{rows}")
    said = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, text=True)
    assert said == "2 False\n"
