"""Tables as tasks: every value arrives where it belongs, and a bad table is told by row and column."""

import csv
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafl import DeltaflError, MissingExtraError
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks.base import Task
from deltafl.tasks.own import load_own
from deltafl.tasks.table import codes, table_task
from test_cli import deltafl

HEADER = ("a", "label", "b", "client")


def write(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def rows_of(task: Task, client: int) -> list[list[float]]:
    """What a client holds, sorted."""
    rows: list[list[float]] = sorted(task.dataset.train_x[task.client_rows[client]].tolist())
    return rows


def example(sizes: Sequence[int] = (20, 1, 14)) -> list[tuple[object, ...]]:
    """Rows whose features say who they are: a is the row, b the client."""
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    return [(row, ("no", "yes")[row % 2], owner, f"house {owner}") for row, owner in enumerate(owners)]


def test_every_row_is_with_its_client_or_in_the_test_set(tmp_path: Path) -> None:
    rows = example()
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    data = task.dataset
    assert [len(held) for held in task.client_rows] == [18, 1, 13]  # 20 - 2, 1 - 0, 14 - round(1.4)
    assert [str(data.train_x.dtype), str(data.train_y.dtype), data.num_classes] == ["float32", "int64", 2]
    for client, held in enumerate(task.client_rows):
        assert set(data.train_x[held, 1]) == {client}
    everything = np.concatenate([data.train_x, data.test_x])
    assert sorted(everything[:, 0]) == list(range(35))
    labels = np.concatenate([data.train_y, data.test_y])
    np.testing.assert_array_equal(labels, everything[:, 0] % 2)  # no < yes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 5))
def test_sizes_of_the_test_set(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    path = tmp_path_factory.mktemp("t") / "t.csv"
    write(path, example((5, *sizes)))
    task, again = (table_task(path, seed=seed, standardize=False) for _ in range(2))
    for client, size in enumerate((5, *sizes)):
        share = round(size / 10 + 1e-9)
        assert len(task.client_rows[client]) == size - share
        assert np.count_nonzero(task.dataset.test_x[:, 1] == client) == share
    np.testing.assert_array_equal(task.dataset.train_x, again.dataset.train_x)


def test_another_seed_is_another_test_set(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", example((60, 60)))
    first, second = (table_task(path, seed=seed, standardize=False).dataset.test_x for seed in (0, 1))
    assert first.shape == second.shape
    assert set(first[:, 0]) != set(second[:, 0])


def test_features_are_standardized_by_the_training_rows(tmp_path: Path) -> None:
    rows = [(*row[:2], 5, row[3]) for row in example((40, 30))]  # b is constant
    path = write(tmp_path / "t.csv", rows)
    plain, scaled = (table_task(path, standardize=on).dataset for on in (False, True))
    mean, deviation = plain.train_x[:, 0].mean(dtype=np.float64), plain.train_x[:, 0].std(dtype=np.float64)
    np.testing.assert_allclose(scaled.test_x[:, 0], (plain.test_x[:, 0] - mean) / deviation, rtol=1e-5)
    np.testing.assert_allclose([scaled.train_x[:, 0].mean(), scaled.train_x[:, 0].std()], [0, 1], atol=1e-6)
    np.testing.assert_array_equal(scaled.train_x[:, 1], 0)


def test_numbers_are_sorted_as_numbers_and_long_ones_stay_apart(tmp_path: Path) -> None:
    clients = [9007199254740993, 10, 9007199254740992, 9]  # two that float64 cannot tell apart
    rows = [(k, (10, 9)[k % 2], 0, clients[k % 4]) for k in range(40)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    assert [{int(a) % 4 for a, _ in rows_of(task, client)} for client in range(4)] == [{3}, {1}, {2}, {0}]
    np.testing.assert_array_equal(task.dataset.train_y, 1 - task.dataset.train_x[:, 0] % 2)  # 9 < 10


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["007", "7", "1_0", "10"], ["007", "10", "1_0", "7"]),
        (["007", "9", "10"], ["007", "9", "10"]),  # numbers, and in their order, where no two are the same
        ([" 7", "7", "10"], ["7", "10"]),
        (["x", "7", "007"], ["007", "7", "x"]),
    ],
)
def test_names_that_are_the_same_number_stay_apart(tmp_path: Path, names: list[str], order: list[str]) -> None:
    rows = [(k, names[k % len(names)], 0, names[k % len(names)]) for k in range(60)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    assert (task.num_clients, task.dataset.num_classes) == (len(order), len(order))
    for client, held in enumerate(task.client_rows):
        assert {names[int(a) % len(names)].strip() for a in task.dataset.train_x[held, 0]} == {order[client]}
        assert set(task.dataset.train_y[held]) == {client}


def test_numbers_of_two_kinds_are_the_same_number() -> None:
    code, count = codes("t", "who", np.array([1, 1.0, "1", 2], dtype=object))
    assert (code.tolist(), count) == ([0, 0, 0, 1], 2)


def test_npz_gives_the_same_task_as_csv(tmp_path: Path) -> None:
    rows = example()
    a, label, b, client = (np.array(column) for column in zip(*rows, strict=True))
    np.savez(tmp_path / "t.npz", x=np.column_stack([a, b]), label=label, client=client)
    one, two = table_task(write(tmp_path / "t.csv", rows)), table_task(tmp_path / "t.npz")
    for part in ("train_x", "train_y", "test_x", "test_y"):
        np.testing.assert_array_equal(getattr(one.dataset, part), getattr(two.dataset, part))


def test_parquet_gives_the_same_task_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = example()
    columns = {name: list(column) for name, column in zip(HEADER, zip(*rows, strict=True), strict=True)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    one, two = table_task(write(tmp_path / "t.csv", rows)), table_task(tmp_path / "t.parquet")
    np.testing.assert_array_equal(one.dataset.train_x, two.dataset.train_x)
    np.testing.assert_array_equal(one.dataset.train_y, two.dataset.train_y)
    columns["a"][3] = None
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match="row 4, column 'a' is"):
        table_task(tmp_path / "t.parquet")
    for name, value in (("label", [1, 2]), ("client", [3])):
        lists = {**columns, "a": [0] * 35, name: [*[[0]] * 2, value, *[[0]] * 32]}
        parquet.write_table(pyarrow.table(lists), tmp_path / "t.parquet")
        with pytest.raises(DeltaflError, match=rf"row 1, column '{name}' holds \[0\]; it must be a whole number or"):
            table_task(tmp_path / "t.parquet")
    parquet.write_table(pyarrow.table({**columns, "a": [[1.0]] * 35}), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match=r"row 1, column 'a' holds \[1.0\]; features must be numbers"):
        table_task(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"none")
    with pytest.raises(DeltaflError, match="is not a Parquet file"):
        table_task(tmp_path / "t.parquet")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_needs_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(MissingExtraError, match=r"'pyarrow': pip install pyarrow$"):
        table_task(tmp_path / "t.parquet")


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    def model(in_features: int, classes: int) -> torch.nn.Module:
        return torch.nn.Linear(in_features, classes, bias=False)

    path = write(tmp_path / "t.csv", example())
    assert [p.shape for p in table_task(path, model=model).make_model().parameters()] == [(2, 2)]
    assert [p.shape for p in table_task(path).make_model().parameters()] == [(2, 2), (2,)]


def changed(row: int, column: int, value: object) -> list[tuple[object, ...]]:
    rows = [list(one) for one in example()]
    rows[row][column] = value
    return [tuple(one) for one in rows]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed(4, 0, ""), "t.csv: row 5, column 'a' is missing"),
        (changed(0, 2, "many"), "t.csv: row 1, column 'b' holds 'many'; features must be numbers"),
        (changed(6, 2, "nan"), "t.csv: row 7, column 'b' is not a finite number"),
        (changed(6, 0, "inf"), "t.csv: row 7, column 'a' is not a finite number"),
        (changed(2, 1, " "), "t.csv: row 3, column 'label' is missing"),
        (changed(34, 3, ""), "t.csv: row 35, column 'client' is missing"),
        ([(1, 2.5, 3, "x"), (1, 2, 3, "x")], "t.csv: row 1, column 'label' holds 2.5; it must be a whole number"),
        ([(1, "yes", 3, "x")] * 20, "t.csv: column 'label' holds a single class, yes; two are needed"),
        ([(1, 0, 3, "x"), (1, 0, 3)], "t.csv: row 2 has 3 values, the header 4 names"),
        ([(1, 0, 3, "x"), (1, 1, 3, "y")], "t.csv: every client has a single row, which it keeps"),
        (
            [(1, 0, 3, "x")] * 2 + [(1, 1, 3, "y")] * 3,
            "0.1, for the largest has 3; call table_task with test_share=0.17",
        ),
        (changed(6, 0, "1e300"), "t.csv: row 7, column 'a' holds 1e+300, which float32 cannot hold"),
        (changed(6, 0, "9" * 400), "t.csv: row 7, column 'a' is not a finite number"),
        ([], "t.csv has no rows"),
    ],
)
def test_bad_rows_are_told(tmp_path: Path, rows: list[tuple[object, ...]], words: str) -> None:
    with pytest.raises(DeltaflError) as caught:
        table_task(write(tmp_path / "t.csv", rows))
    assert words in str(caught.value)


def test_bad_columns_and_files_are_told(tmp_path: Path) -> None:
    def refused(words: str, path: Path, label: str = "label", client: str = "client", share: float = 0.1) -> None:
        with pytest.raises(DeltaflError) as caught:
            table_task(path, label, client, test_share=share)
        assert words in str(caught.value), caught.value

    path = write(tmp_path / "t.csv", example())
    refused("unknown column of t.csv 'lable': did you mean 'label'?", path, label="lable")
    refused("unknown column of t.csv 'hospital': choose one of a, b, client, label", path, client="hospital")
    refused("label and client are both 'label'", path, client="label")
    refused("test_share is 1; it must be between 0 and 1", path, share=1)
    refused("there is no table", tmp_path / "none.csv")
    refused("give one of .csv, .npz, .parquet", tmp_path / "t.xlsx")
    refused("has no columns beside", write(tmp_path / "u.csv", [(0, 1), (1, 1)], ("label", "client")))
    refused("the column 'a' is there twice", write(tmp_path / "v.csv", example(), ("a", "label", "a", "client")))
    (tmp_path / "w.csv").write_bytes(b"a,label,client\n\xff\xfe,1,2\n")
    refused("w.csv is not a CSV file in UTF-8", tmp_path / "w.csv")
    (tmp_path / "empty.csv").write_bytes(b"")
    refused("empty.csv has no rows", tmp_path / "empty.csv")
    (tmp_path / "x.npz").write_bytes(b"nothing of the kind")
    refused("x.npz is not an NPZ file", tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", a=np.zeros(3), label=np.arange(4), client=np.zeros(4))
    refused("y.npz: 'a' has 3 rows but 'label' has 4", tmp_path / "y.npz")
    np.savez(tmp_path / "z.npz", a=np.array([0, 1, np.nan]), label=np.arange(3), client=np.zeros(3))
    refused("z.npz: row 3, column 'a' is missing", tmp_path / "z.npz")
    np.savez(tmp_path / "p.npz", a=np.zeros(3), label=np.zeros((3, 2)), client=np.zeros(3))
    refused("'label' has shape (3, 2)", tmp_path / "p.npz")
    np.save(tmp_path / "q.npy", np.zeros(3))
    (tmp_path / "q.npy").rename(tmp_path / "q.npz")
    refused("q.npz is not an NPZ file of plain arrays: it is a single array", tmp_path / "q.npz")
    time = np.array(["2020-01-01", "2021-01-01", "NaT"], dtype="datetime64[s]")
    for name, column, words in (
        ("a", time, "row 3, column 'a' is missing"),
        ("a", np.column_stack([time[::-1], time]), "row 1, column 'a' is missing"),
        ("label", time, "row 3, column 'label' is missing"),
        ("client", time, "row 3, column 'client' is missing"),
        ("a", np.array([1, 2, 3j]), "column 'a' holds complex numbers; write two columns"),
        ("a", np.zeros(3, dtype=[("b", "f4")]), "column 'a' holds records or raw bytes; write a column of its own"),
        ("client", np.zeros(3, "V4"), "column 'client' holds records or raw bytes"),
        ("label", np.zeros(3, dtype=[("b", "i4"), ("c", "i4")]), "column 'label' holds records or raw bytes"),
        ("label", np.array([1, 2, 3j]), "row 1, column 'label' holds (1+0j); it must be a whole number"),
        ("a", np.array([[0, 1], [0, -1e300], [1, 1]]), "row 2, column 'a' holds -1e+300, which float32 cannot hold"),
    ):
        plain: dict[str, Any] = {"a": np.zeros(3), "label": np.arange(3), "client": np.zeros(3)}
        np.savez(tmp_path / "r.npz", **{**plain, name: column})
        refused(f"r.npz: {words}", tmp_path / "r.npz")


def test_a_table_from_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "visits.csv", example((20, 30, 40)), ("a", "outcome", "b", "house"))
    names = ["--set", "label=outcome", "--set", "column=house"]
    more = ["--rounds", "2", "--samplers", "uniform", "--seeds", "1", "--out", "out"]
    done = deltafl("compare", "--task", "visits.csv", *names, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    assert (settings["task"], settings["label"], settings["column"]) == ("visits.csv", "outcome", "house")
    done = deltafl("compare", "--task", "visits.csv", *more[:-1], "other", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown column of visits.csv 'label'" in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["t.csv", "t.CSV"])
def test_a_table_is_a_task_by_its_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, example())
    np.testing.assert_array_equal(load_own(str(path), 3).dataset.test_x, table_task(path, seed=3).dataset.test_x)


@pytest.mark.parametrize("name", ["t.tsv", "data/t.xlsx", "t.csv.gz"])
def test_other_files_are_told_which_tables_can_be_read(name: str) -> None:
    with pytest.raises(DeltaflError, match=r"unknown task '.*t\..*': tables end in \.csv, \.npz, \.parquet"):
        make_settings(RunSettings, {"task": name})
