"""Tables as tasks: every value arrives where it belongs, and a bad table is refused with its row
and column.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deltafl import DeltaflError
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks import check_task, from_huggingface, load_own, table_task
from tools.cli import deltafl_here

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADER = ("a", "label", "b", "client")


def write(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def example(sizes: Sequence[int] = (20, 1, 14)) -> list[tuple[object, ...]]:
    """Rows whose features say who they are: a is the row, b the client."""
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    return [
        (row, ("no", "yes")[row % 2], owner, f"house {owner}") for row, owner in enumerate(owners)
    ]


def test_every_row_is_with_its_client_or_in_the_test_set(tmp_path: Path) -> None:
    rows = example()
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    data = task.dataset
    assert [len(held) for held in task.client_rows] == [18, 1, 13]  # 20 - 2, 1 - 0, 14 - round(1.4)
    assert [str(data.train_x.dtype), str(data.train_y.dtype), data.num_classes] == [
        "float32",
        "int64",
        2,
    ]
    for client, held in enumerate(task.client_rows):
        assert set(data.train_x[held, 1]) == {client}
    everything = np.concatenate([data.train_x, data.test_x])
    assert sorted(everything[:, 0]) == list(range(35))
    labels = np.concatenate([data.train_y, data.test_y])
    np.testing.assert_array_equal(labels, everything[:, 0] % 2)  # no < yes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 5))
def test_sizes_of_the_test_set(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
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
    mean = plain.train_x[:, 0].mean(dtype=np.float64)
    deviation = plain.train_x[:, 0].std(dtype=np.float64)
    np.testing.assert_allclose(
        scaled.test_x[:, 0], (plain.test_x[:, 0] - mean) / deviation, rtol=1e-5
    )
    np.testing.assert_allclose(
        [scaled.train_x[:, 0].mean(), scaled.train_x[:, 0].std()], [0, 1], atol=1e-6
    )
    np.testing.assert_array_equal(scaled.train_x[:, 1], 0)


def test_numbers_are_sorted_as_numbers_and_long_ones_stay_apart(tmp_path: Path) -> None:
    clients = [9007199254740993, 10, 9007199254740992, 9]  # two that float64 cannot tell apart
    rows = [(k, (10, 9)[k % 2], 0, clients[k % 4]) for k in range(40)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    assert [{*task.dataset.train_x[held, 0] % 4} for held in task.client_rows] == [
        {3},
        {1},
        {2},
        {0},
    ]
    np.testing.assert_array_equal(
        task.dataset.train_y, 1 - task.dataset.train_x[:, 0] % 2
    )  # 9 < 10


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ([" 7", "7", "10"], ["7", "10"]),
        (["x", "7", "10"], ["10", "7", "x"]),
        (["b ", " b", "None at all"], ["None at all", "b"]),
    ],
)
def test_words_are_stripped_and_sorted(tmp_path: Path, names: list[str], order: list[str]) -> None:
    rows = [(k, names[k % len(names)], 0, names[k % len(names)]) for k in range(60)]
    task = table_task(write(tmp_path / "t.csv", rows), standardize=False)
    assert (task.num_clients, task.dataset.num_classes) == (len(order), len(order))
    for client, held in enumerate(task.client_rows):
        assert {names[int(a) % len(names)].strip() for a in task.dataset.train_x[held, 0]} == {
            order[client]
        }
        assert set(task.dataset.train_y[held]) == {client}


def test_npz_and_parquet_give_the_same_task_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = example()
    columns = {
        name: list(column) for name, column in zip(HEADER, zip(*rows, strict=True), strict=True)
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    x = np.column_stack([columns["a"], columns["b"]])
    np.savez(tmp_path / "t.npz", x=x, label=columns["label"], client=columns["client"])
    usual = table_task(write(tmp_path / "t.csv", rows)).data["data_crc32"]
    assert [
        table_task(tmp_path / f"t.{kind}").data["data_crc32"] for kind in ("npz", "parquet")
    ] == [usual] * 2


def test_bad_values_in_parquet_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {"a": [0, 0, 0, None], "label": [0, 1] * 2, "client": [0] * 4}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match="row 4, column 'a' holds nan; it must be a real number"):
        table_task(tmp_path / "t.parquet")
    for name, words in (
        ("label", "it must be a whole number or a word"),
        ("a", "it must be a real number"),
    ):
        parquet.write_table(
            pyarrow.table({**columns, "a": [0] * 4, name: [[0]] * 4}), tmp_path / "t.parquet"
        )
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
        (
            changed(34, 3, ""),
            "t.csv: row 35, column 'client' holds nan; it must be a whole number or a word",
        ),
        (
            [(1, 2.5, 3, "x"), (1, 2, 3, "x")],
            "t.csv: column 'label' holds fractions such as 2.5: write task_type =",
        ),
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
    def refused(
        words: str, path: Path, label: str = "label", client: str = "client", share: float = 0.1
    ) -> None:
        with pytest.raises(DeltaflError) as caught:
            table_task(path, label, client, test_share=share)
        assert words in str(caught.value), caught.value

    path = write(tmp_path / "t.csv", example())
    refused("t.csv has no column 'lable': did you mean 'label'?", path, label="lable")
    refused("t.csv needs one row and a column of numbers besides", path, client="label")
    refused("test_share is 1; it must be between 0 and 1", path, share=1)
    refused("there is no table", tmp_path / "none.csv")
    refused("give one of .csv, .npz, .parquet", tmp_path / "t.xlsx")
    twice = write(
        tmp_path / "twice.csv", example(), ("a", "label", "label", "client")
    )  # else the label is a feature
    refused("twice.csv: column 'label' is named twice", twice)
    for content in (b"a,label,client\n\xff\xfe,1,2\n", b""):
        path.write_bytes(content)
        refused("t.csv cannot be read as a table", path)
    columns: dict[str, Any] = {"a": np.zeros(3), "label": np.arange(3), "client": np.zeros(3)}
    time = np.array(["2020-01-01", "2021-01-01", "NaT"], dtype="datetime64[s]")
    for name, column, words in (
        (
            "a",
            np.zeros(4),
            "r.npz cannot be read as a table: ValueError: All arrays must be of the same length",
        ),
        ("label", np.zeros((3, 2)), "r.npz has no column 'label': did you mean 'label[1]'"),
        ("client", time[::-1], "r.npz: row 1, column 'client' holds"),
        ("a", np.array([1, 2, 3j]), "r.npz: row 1, column 'a' holds"),
        ("a", np.array([[0, 1], [0, -1e300], [1, 1]]), "r.npz: row 2, column 'a[1]' holds"),
    ):
        np.savez(tmp_path / "r.npz", **{**columns, name: column})
        refused(words, tmp_path / "r.npz")


def test_a_table_from_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "visits.CSV", example((20, 30, 40)), ("a", "outcome", "b", "house"))
    names = ["--set", "label=outcome", "--set", "column=house"]
    more = [
        "--rounds",
        "2",
        "--samplers",
        "uniform",
        "--seeds",
        "1",
        "--processes",
        "1",
        "--out",
        "out",
    ]
    done = deltafl_here("compare", "--task", "visits.CSV", *names, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    assert (settings["task"], settings["label"], settings["column"]) == (
        "visits.CSV",
        "outcome",
        "house",
    )


@pytest.mark.parametrize("name", ["t.tsv", "data/t.xlsx", "t.csv.gz"])
def test_other_files_are_answered_with_which_tables_can_be_read(name: str) -> None:
    with pytest.raises(
        DeltaflError, match=r"unknown task '.*t\..*': tables end in \.csv, \.npz, \.parquet"
    ):
        make_settings(RunSettings, {"task": name})


COLUMNS: dict[str, list[Any]] = {
    "x": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "kind": ["b", "a", "b", "c"],
    "who": [10, 9, 10, 9],
}


class Columns:
    """What ``from_huggingface`` uses of a ``datasets.Dataset``."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = dict[str, Any]()

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_train_and_test_parts_have_the_same_classes_and_clients() -> None:
    test = Columns(x=[[9, 9], [8, 8], [7, 7]], kind=["c", "a", "a"], who=[11, 10, 9])
    data = {"train": Columns(**COLUMNS), "test": test, "spare": Columns()}
    task = from_huggingface(data, label="kind", column="who", inputs="x", name="tiny")
    check_task(task, "tiny", 0)
    assert task.dataset.train_x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert (task.dataset.train_y.tolist(), task.dataset.test_y.tolist()) == (
        [1, 0, 1, 2],
        [2, 0, 0],
    )
    assert [rows.tolist() for rows in task.client_rows] == [[1, 3], [0, 2]]
    np.testing.assert_equal(task.test_clients, [-1, 1, 0])
    assert task.dataset.num_classes == 3


def test_without_a_test_part_each_client_gives_some() -> None:
    fromarray = pytest.importorskip(
        "PIL.Image"
    ).fromarray  # what the package datasets decodes pictures to
    picture = [fromarray(np.full((4, 5, 3), k, np.uint8)) for k in range(11)]
    data = Columns(x=picture, kind=[k % 2 for k in range(11)], who=["p"] * 6 + ["q"] * 5)
    task = from_huggingface(data, label="kind", column="who", inputs="x")
    assert task.dataset.train_x.shape == (9, 3, 4, 5)
    assert task.dataset.test_x[:, 0, 0, 0].tolist() == [4, 10]
    np.testing.assert_equal(task.test_clients, [0, 1])
    check_task(task, "pictures", 0)


def test_mistakes_are_named() -> None:
    for changed, words in (
        (
            {"x": [[1, 2], [3], [4, 5], [6, 7]]},
            "tiny's train part: column 'x' needs pictures of one",
        ),
        ({"x": [[1, 2], [1, -1e300], [4, 5], [6, 7]]}, "column 'x' needs"),
        ({"x": [np.zeros((2, 2, 2, 2))] * 4}, "column 'x' needs"),
        ({"kind": ["a", None, "b", "a"]}, "tiny's train part: row 2, column 'kind' holds"),
        (
            {"kind": ["a", ["b"], "b", "a"]},
            r"row 2, column 'kind' holds \['b'\]; it must be a whole number or a word",
        ),
    ):
        with pytest.raises(DeltaflError, match=words):
            from_huggingface(
                Columns(**(COLUMNS | changed)), label="kind", column="who", inputs="x", name="tiny"
            )
    data: Any
    gap = {**COLUMNS, "who": ["a", "b", None, "c"]}
    for data, words in (
        ({"train": Columns(**COLUMNS), "test": [1]}, "tiny's test part .list.* has no column"),
        (
            {"train": Columns(**COLUMNS), "test": Columns(**gap)},
            "^tiny's test part: row 3, column 'who' holds",
        ),
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


def flowers(size: int = 150) -> pd.DataFrame:
    """A data frame without a client: two numbers, a class and a target; its index is not 0, 1,
    ...
    """
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, size))
    kind = np.where(a > 0.4, "rose", np.where(b > 0, "iris", "lily"))
    frame = pd.DataFrame({"a": a, "b": b, "kind": kind, "price": np.rint(100 * (a + 2 * b))})
    return frame.set_index(np.arange(size) % 7)


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
    assert [same.data["data_crc32"]] == [task.data["data_crc32"]]
    even = table_task(frame, partition="dirichlet", alpha=1e6, **options)
    assert len({tuple(map(len, each.client_rows)) for each in (task, even)}) == 2
    assert {len(rows) for rows in table_task(frame, partition="iid", **options).client_rows} == {
        6,
        7,
    }


def test_the_column_of_clients_is_no_feature_and_of_many_owners_some_are_drawn() -> None:
    frame = flowers().assign(client=np.arange(150) % 30)
    dealt = table_task(frame, "kind", partition="iid", clients=20)
    assert dealt.dataset.train_x.shape[1] == 3  # a, b and price
    assert table_task(frame, "kind").num_clients == 30
    assert table_task(frame, "kind", clients=5).num_clients == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            (
                "frame has no column 'client' that says who holds a row: .*--column.*--partition "
                "iid "
                "--clients 20.*kind"
            ),
        ),
        (
            {"label": "kinds"},
            r"data frame has no column 'kinds': did you mean 'kind'\? \(its columns are kind, ",
        ),
        (
            {"partition": "iid"},
            "partition 'iid' needs the number of clients: write clients=20, or --clients 20",
        ),
        (
            {"partition": "iid", "column": "a", "clients": 2},
            "deals the rows, and column 'a' says who holds them",
        ),
        ({"partition": "irid", "clients": 2}, "unknown partition 'irid': did you mean 'iid'"),
        ({"partition": "writer"}, "data frame has no column 'writer'"),
        (
            {"label": "price", "partition": "iid", "clients": 2},
            "'price' holds 1.. different whole numbers: write task_",
        ),
        (
            {"label": "a", "partition": "iid", "clients": 2},
            "'a' holds fractions such as .*: write task_type = regress",
        ),
        (
            {"partition": "shards", "clients": 5, "label": "b", "task_type": "regression"},
            "row 1, column 'kind' holds '",
        ),
    ],
)
def test_what_a_table_without_clients_is_refused_for(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        table_task(flowers(), **{"label": "kind", **options})


def test_columns_of_an_error_are_ten_and_the_nearest_first() -> None:
    frame = flowers().assign(**{f"x{number}": 0 for number in range(40)})
    with pytest.raises(
        DeltaflError, match=r"\(its columns are kind, ([\w]+, ){8}\w+ and 34 more\)"
    ):
        table_task(frame, "kindd")


def test_regression_predicts_a_standardized_target() -> None:
    frame = flowers().drop(columns="kind")
    options: dict[str, Any] = {
        "label": "price",
        "partition": "quantity",
        "clients": 10,
        "task_type": "regression",
    }
    task = table_task(frame, **options)
    check_task(task, "frame", 0)
    data = task.dataset
    assert (task.metric, data.num_classes, str(data.train_y.dtype)) == ("loss", 0, "float32")
    y = np.concatenate([data.train_y, data.test_y])
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-6)
    mean = frame["price"].mean()
    deviation = frame["price"].std(ddof=0)
    assert data.name == (
        f"data frame, 'price' standardized by mean {mean:.4g} and standard deviation "
        f"{deviation:.4g}"
    )
    plain = table_task(frame, **options, standardize=False).dataset
    np.testing.assert_allclose(plain.train_y, data.train_y * deviation + mean, rtol=1e-4, atol=1e-3)
    with pytest.raises(DeltaflError, match="'price' holds a single number"):
        table_task(frame.assign(price=3), **options)


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
    options: dict[str, Any] = {"partition": "iid", "clients": 3}
    if asks:
        with pytest.raises(
            DeltaflError, match=r"write task_type = regression \(--task-type regression\)"
        ):
            table_task(frame, **options)
        return
    assert table_task(frame, **options).dataset.num_classes == len(label)


def test_missing_values_are_refused_and_words_of_a_data_frame_stay_words(tmp_path: Path) -> None:
    rows = [(k, ("yes", "None")[k % 2], k, k % 3) for k in range(40)]
    with pytest.raises(
        DeltaflError,
        match=r"row 2, column 'label' holds nan; .* a missing value \(in CSV files .*None",
    ):
        table_task(write(tmp_path / "t.csv", rows))
    frame = pd.DataFrame(rows, columns=HEADER)
    assert table_task(frame).dataset.num_classes == 2
    with pytest.raises(DeltaflError, match=r"row 2, column 'label' holds nan; .* a missing value"):
        table_task(frame.assign(label=frame["label"].where(frame["label"] == "yes", None)))


@pytest.mark.parametrize("column", ["a", "label", "client"])
@pytest.mark.parametrize(
    "kind", ["Int64", "Float64", "int64[pyarrow]", "double[pyarrow]", "boolean"]
)
def test_missing_values_of_nullable_columns_are_refused(column: str, kind: str) -> None:
    frame = pd.DataFrame(
        {"a": np.arange(40) % 2, "label": np.arange(40) % 2, "client": np.arange(40) // 2 % 2}
    )
    frame = frame.astype({column: bool} if kind == "boolean" else {}).astype({column: kind})
    assert table_task(frame).num_clients == 2
    frame.loc[6, column] = pd.NA
    with pytest.raises(
        DeltaflError, match=rf"row 7, column '{column}' holds <NA>; .* a missing value"
    ):
        table_task(frame)


def test_a_missing_value_among_objects_is_named_and_the_others_keep_their_type() -> None:
    frame = pd.DataFrame(
        {"a": [True, False, None, True] * 10, "label": [0, 1] * 20, "client": [0, 1] * 20}
    )
    with pytest.raises(
        DeltaflError, match=r"row 3, column 'a' holds .*; it must be a real number; a missing value"
    ):
        table_task(frame)
    some = frame.dropna()
    numbers = some.assign(
        label=pd.Series(list(map(np.int64, some["label"])), some.index, dtype=object)
    )
    assert table_task(numbers, partition="iid", clients=3).dataset.train_x.shape == (27, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            ",a,label,client\n0,1,x,u\n",
            r"t.csv: column 1 has no name; .* to_csv\(..., index=False\), else name it",
        ),
        (
            "a;label;client\n1;x;u\n",
            "t.csv has one column, 'a;label;client': separate columns by commas",
        ),
    ],
)
def test_an_index_and_other_separators_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DeltaflError, match=f"^{words}"):
        table_task(tmp_path / "t.csv")


@pytest.mark.parametrize("table", [{"a": [1]}, np.zeros((3, 3)), None])
def test_what_is_no_table_is_refused(table: Any) -> None:
    with pytest.raises(
        DeltaflError, match=r"the table is of type .*; give a file or a pandas data frame"
    ):
        table_task(table)


def test_only_the_two_task_types_are_taken() -> None:
    frame = pd.DataFrame({"a": range(40), "label": [0, 1] * 20})
    with pytest.raises(
        DeltaflError, match="task_type is 'classify'; it must be 'classification' or 'regression'"
    ):
        table_task(frame, partition="iid", clients=3, task_type=cast(Any, "classify"))


def test_examples_without_a_class_are_refused() -> None:
    data = Columns(x=[[k] for k in range(40)], label=[0, 1, 1, -1] * 10)
    assert (
        from_huggingface(data, partition="iid", clients=3).dataset.num_classes == 3
    )  # -1 may be a number
    data.features = {"label": SimpleNamespace(names=["cat", "dog"])}
    with pytest.raises(
        DeltaflError,
        match=r"row 4, column 'label' holds -1; .* an example without one: drop the row",
    ):
        from_huggingface(data, partition="iid", clients=3)


@pytest.mark.parametrize("modes", [("RGB", "L"), ("P", "P")])
def test_pictures_of_several_modes_and_with_a_palette_are_refused(modes: tuple[str, str]) -> None:
    pictures = [Image.new(modes[k % 2], (4, 4)) for k in range(40)]
    data = Columns(image=pictures, label=[0, 1] * 20)
    with pytest.raises(
        DeltaflError, match=r"data.cast_column\('image', datasets.Image\(mode='RGB'\)\)"
    ):
        from_huggingface(data, partition="iid", clients=3)


def test_a_regression_from_the_command_line(tmp_path: Path) -> None:
    flowers().drop(columns="kind").to_csv(tmp_path / "f.csv", index=False)
    names = [
        "--task",
        "f.csv",
        "--label",
        "price",
        "--partition",
        "iid",
        "--clients",
        "15",
        "--rounds",
        "30",
    ]
    more = [
        "--samplers",
        "uniform",
        "--seeds",
        "1",
        "--local-lr",
        "0.1",
        "--processes",
        "1",
        "--out",
        "out",
    ]
    refused = deltafl_here("compare", *names, *more, cwd=tmp_path)
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "--task-type regression" in refused.stderr
    done = deltafl_here("compare", *names, *more, "--task-type", "regression", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "runs" / "uniform-seed0" / "rounds.jsonl").read_text().splitlines()
    losses = [json.loads(line)["test"]["loss"] for line in lines]
    assert losses[-1] < 0.05 < losses[0]
    both = deltafl_here(
        "compare", *names, "--column", "a", "--task-type", "regression", cwd=tmp_path
    )
    assert (both.returncode, "leave one of them out" in both.stderr) == (2, True)


def test_a_partition_deals_a_hugging_face_data_set() -> None:
    data = Columns(x=[[k, 1] for k in range(60)], kind=[k % 3 for k in range(60)])
    task = from_huggingface(data, label="kind", partition="dirichlet", clients=6, seed=1)
    check_task(task, "dealt", 1)
    assert (task.num_clients, len(task.dataset.train_x), len(task.dataset.test_x)) == (6, 54, 6)
    assert task.test_clients is None
    target = from_huggingface(
        data, label="kind", partition="iid", clients=6, task_type="regression"
    )
    check_task(target, "regression", 0)
    many = Columns(x=[1], z=[2], kind=[1])
    with pytest.raises(
        DeltaflError, match=r"inputs must name one of its columns; its columns are .*to_pandas\(\)"
    ):
        from_huggingface(many, label="kind", partition="iid", clients=1)
    with pytest.raises(DeltaflError, match="has no column 'client' that says who holds a row"):
        from_huggingface(data, label="kind")
