"""Tables as tasks: every value arrives where it belongs, and a bad table is told by row and column."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import DeltaflError
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks import check_task, from_huggingface, load_own, table_task
from tools.cli import deltafl

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADER = ("a", "label", "b", "client")


def write(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


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
    task, other = (table_task(path, seed=number, standardize=False) for number in (seed, seed + 1))
    for client, size in enumerate((5, *sizes)):
        share = round(size / 10 + 1e-9)
        assert len(task.client_rows[client]) == size - share
        assert np.count_nonzero(task.dataset.test_x[:, 1] == client) == share
    if max(sizes) > 30:
        again = table_task(path, seed=seed, standardize=False)
        np.testing.assert_array_equal(task.dataset.train_x, again.dataset.train_x)
        assert len({test.dataset.test_x.tobytes() for test in (task, other)}) == 2


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
    assert [{*task.dataset.train_x[held, 0] % 4} for held in task.client_rows] == [{3}, {1}, {2}, {0}]
    np.testing.assert_array_equal(task.dataset.train_y, 1 - task.dataset.train_x[:, 0] % 2)  # 9 < 10


@pytest.mark.parametrize(
    ("names", "order"),
    [([" 7", "7", "10"], ["7", "10"]), (["x", "7", "10"], ["10", "7", "x"]), (["b ", " b", "NA"], ["NA", "b"])],
)
def test_words_are_stripped_and_sorted(tmp_path: Path, names: list[str], order: list[str]) -> None:
    rows = [(k, names[k % len(names)], 0, names[k % len(names)]) for k in range(60)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    assert (task.num_clients, task.dataset.num_classes) == (len(order), len(order))
    for client, held in enumerate(task.client_rows):
        assert {names[int(a) % len(names)].strip() for a in task.dataset.train_x[held, 0]} == {order[client]}
        assert set(task.dataset.train_y[held]) == {client}


def test_npz_and_parquet_give_the_same_task_as_csv(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = example()
    columns = {name: list(column) for name, column in zip(HEADER, zip(*rows, strict=True), strict=True)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    x = np.column_stack([columns["a"], columns["b"]])
    np.savez(tmp_path / "t.npz", x=x, label=columns["label"], client=columns["client"])
    usual = table_task(write(tmp_path / "t.csv", rows)).data["data_crc32"]
    assert [table_task(tmp_path / f"t.{kind}").data["data_crc32"] for kind in ("npz", "parquet")] == [usual] * 2


def test_bad_values_in_parquet_are_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {"a": [0, 0, 0, None], "label": [0, 1] * 2, "client": [0] * 4}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match="row 4, column 'a' holds nan; it must be a real number"):
        table_task(tmp_path / "t.parquet")
    for name, words in (("label", "it must be a whole number or a word"), ("a", "it must be a real number")):
        parquet.write_table(pyarrow.table({**columns, "a": [0] * 4, name: [[0]] * 4}), tmp_path / "t.parquet")
        with pytest.raises(DeltaflError, match=rf"row 1, column '{name}' holds .*; {words}"):
            table_task(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"none")
    with pytest.raises(DeltaflError, match=r"t\.parquet cannot be read as a table: Arrow"):
        table_task(tmp_path / "t.parquet")


def changed(row: int, column: int, value: object) -> list[tuple[object, ...]]:
    rows = example()
    rows[row] = (*rows[row][:column], value, *rows[row][column + 1 :])
    return rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed(4, 0, ""), "t.csv: row 5, column 'a' holds nan; it must be a real number"),
        (changed(0, 2, "many"), "t.csv: row 1, column 'b' holds 'many'"),
        (changed(6, 0, "1e300"), "t.csv: row 7, column 'a' holds"),
        (changed(34, 3, ""), "t.csv: row 35, column 'client' holds nan; it must be a whole number or a word"),
        ([(1, 2.5, 3, "x"), (1, 2, 3, "x")], "t.csv: row 1, column 'label' holds"),
        ([(1, "yes", 3, "x")] * 20, "t.csv: column 'label' holds a single class; two are needed"),
        ([(1, 0, 3), (1, 0, 3)], "t.csv: row 1, column 'client' holds nan"),
        ([(1, 0, 3, "x"), (1, 0, 3, "x", 5)], "t.csv cannot be read as a table: ParserError"),
        ([(1, 0, 3, "x")] * 2 + [(1, 1, 3, "y")] * 3, "test share of 0.1; call table_task with"),
        ([], "t.csv needs one row"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[tuple[object, ...]], words: str) -> None:
    with pytest.raises(DeltaflError) as caught:
        table_task(write(tmp_path / "t.csv", rows))
    assert words in str(caught.value)


def test_bad_columns_and_files_are_named(tmp_path: Path) -> None:
    def refused(words: str, path: Path, label: str = "label", client: str = "client", share: float = 0.1) -> None:
        with pytest.raises(DeltaflError) as caught:
            table_task(path, label, client, test_share=share)
        assert words in str(caught.value), caught.value

    path = write(tmp_path / "t.csv", example())
    refused("unknown column of t.csv 'lable': did you mean 'label'?", path, label="lable")
    refused("three columns or more: a label, a client and a feature", path, client="label")
    refused("test_share is 1; it must be between 0 and 1", path, share=1)
    refused("there is no table", tmp_path / "none.csv")
    refused("give one of .csv, .npz, .parquet", tmp_path / "t.xlsx")
    twice = write(tmp_path / "twice.csv", example(), ("a", "label", "label", "client"))  # else the label is a feature
    refused("twice.csv cannot be read as a table: ValueError: column 'label' is named twice", twice)
    for content in (b"a,label,client\n\xff\xfe,1,2\n", b""):
        path.write_bytes(content)
        refused("t.csv cannot be read as a table", path)
    columns: dict[str, Any] = {"a": np.zeros(3), "label": np.arange(3), "client": np.zeros(3)}
    time = np.array(["2020-01-01", "2021-01-01", "NaT"], dtype="datetime64[s]")
    for name, column, words in (
        ("a", np.zeros(4), "r.npz cannot be read as a table: ValueError: All arrays must be of the same length"),
        ("label", np.zeros((3, 2)), "unknown column of r.npz 'label': did you mean 'label[1]'"),
        ("client", time[::-1], "r.npz: row 1, column 'client' holds"),
        ("a", np.array([1, 2, 3j]), "r.npz: row 1, column 'a' holds"),
        ("a", np.array([[0, 1], [0, -1e300], [1, 1]]), "r.npz: row 2, column 'a[1]' holds"),
    ):
        np.savez(tmp_path / "r.npz", **{**columns, name: column})
        refused(words, tmp_path / "r.npz")


def test_a_table_from_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "visits.CSV", example((20, 30, 40)), ("a", "outcome", "b", "house"))
    names = ["--set", "label=outcome", "--set", "column=house"]
    more = ["--rounds", "2", "--samplers", "uniform", "--seeds", "1", "--out", "out"]
    done = deltafl("compare", "--task", "visits.CSV", *names, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    assert (settings["task"], settings["label"], settings["column"]) == ("visits.CSV", "outcome", "house")


@pytest.mark.parametrize("name", ["t.tsv", "data/t.xlsx", "t.csv.gz"])
def test_other_files_are_answered_with_which_tables_can_be_read(name: str) -> None:
    with pytest.raises(DeltaflError, match=r"unknown task '.*t\..*': tables end in \.csv, \.npz, \.parquet"):
        make_settings(RunSettings, {"task": name})


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
    check_task(task, "tiny", 0)
    assert task.dataset.train_x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert (task.dataset.train_y.tolist(), task.dataset.test_y.tolist()) == ([1, 0, 1, 2], [2, 0, 0])
    assert [rows.tolist() for rows in task.client_rows] == [[1, 3], [0, 2]]
    np.testing.assert_equal(task.test_clients, [-1, 1, 0])
    assert task.dataset.num_classes == 3


def test_without_a_test_part_each_client_gives_some() -> None:
    fromarray = pytest.importorskip("PIL.Image").fromarray  # what the package datasets decodes pictures to
    picture = [fromarray(np.full((4, 5, 3), k, np.uint8)) for k in range(11)]
    data = Columns(x=picture, kind=[k % 2 for k in range(11)], who=["p"] * 6 + ["q"] * 5)
    task = from_huggingface(data, label="kind", column="who", inputs="x")
    assert task.dataset.train_x.shape == (9, 3, 4, 5)
    assert task.dataset.test_x[:, 0, 0, 0].tolist() == [4, 10]
    np.testing.assert_equal(task.test_clients, [0, 1])
    check_task(task, "pictures", 0)


def test_mistakes_are_named() -> None:
    for changed, words in (
        ({"x": [[1, 2], [3], [4, 5], [6, 7]]}, "tiny's train part: column 'x' needs pictures of one"),
        ({"x": [[1, 2], [1, -1e300], [4, 5], [6, 7]]}, "column 'x' needs"),
        ({"x": [np.zeros((2, 2, 2, 2))] * 4}, "column 'x' needs"),
        ({"kind": ["a", None, "b", "a"]}, "tiny's train part: row 2, column 'kind' holds"),
        ({"kind": ["a", ["b"], "b", "a"]}, r"row 2, column 'kind' holds \['b'\]; it must be a whole number or a word"),
    ):
        with pytest.raises(DeltaflError, match=words):
            from_huggingface(Columns(**(COLUMNS | changed)), label="kind", column="who", inputs="x", name="tiny")
    data: Any
    gap = {**COLUMNS, "who": ["a", "b", None, "c"]}
    for data, words in (
        ({"train": Columns(**COLUMNS), "test": [1]}, "unknown column of tiny's test part .list"),
        ({"train": Columns(**COLUMNS), "test": Columns(**gap)}, "^tiny's test part: row 3, column 'who' holds"),
        ({"test": Columns(**COLUMNS)}, "unknown part of the data set 'train'"),
    ):
        with pytest.raises(DeltaflError, match=words):
            from_huggingface(data, label="kind", column="who", inputs="x", name="tiny")


def test_the_example_is_a_real_datasets_object() -> None:
    pytest.importorskip("datasets")
    task = load_own(f"{EXAMPLES / 'own_huggingface.py'}:make_task", 0)
    assert task.num_clients == 25
    assert len(task.dataset.train_x) == 800
    assert task.dataset.test_x.shape == (200, 3)
