"""A table as a task: one row an example, with columns of numbers, a label and the client that holds it.

CSV files have a header. In NPZ files every array is a column (N,), or several of them (N, k). Parquet needs pyarrow.
"""

import csv
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError, unknown_name
from ..streams import stream
from ..types import BoolArray, IntArray
from .base import Dataset, Task
from .images import read_arrays
from .models import cross_entropy, softmax_regression

if TYPE_CHECKING:
    import torch

Columns = Mapping[str, npt.NDArray[Any]]


def table_task(
    path: str | Path,
    label: str = "label",
    client: str = "client",
    *,
    seed: int = 0,
    model: "Callable[[int, int], torch.nn.Module]" = softmax_regression,
    test_share: float = 0.1,
    standardize: bool = True,
) -> Task:
    """Make a classification task of a table.

    Of a client's n rows the share of the test set is round(test_share n), drawn by ``stream(seed, "partition")``; the
    rest is its own. A client always keeps one row, so that one with a single row is fine.

    Args:
        path: A ``.csv``, ``.npz`` or ``.parquet`` file.
        label: Column of the class: whole numbers or words; sorted, they become 0, 1, ...
        client: Column that says who holds the row: whole numbers or words; sorted, they become client 0, 1, ...
        seed: Fixes the test set.
        model: ``model(in_features, classes)`` makes the model; such as ``models.softmax_regression`` or a class at the
            top of a module.
        test_share: Share of the rows in the test set, in (0, 1).
        standardize: Subtract the mean of each feature and divide by its standard deviation, both of the training rows
            of all clients together. A real federation would have to agree on these two numbers a feature first.

    Returns:
        A task whose clients are those of the table, with float32 features in the order of the file.

    Raises:
        DeltaflError: If the table cannot be read or used; the sentence names row (from 1, the header not counted) and
            column.
        MissingExtraError: For Parquet without pyarrow.
    """
    path = Path(path)
    if not 0 < test_share < 1:
        raise DeltaflError(f"test_share is {test_share}; it must be between 0 and 1, such as 0.1")
    columns = _read(path)
    for name in (label, client):
        if name not in columns:
            raise unknown_name(f"column of {path.name}", name, columns)
    if label == client:
        raise DeltaflError(f"label and client are both {label!r}; they must be two columns")
    y, num_classes = codes(path.name, label, columns[label])
    owner, num_clients = codes(path.name, client, columns[client])
    if num_classes < 2:
        raise DeltaflError(f"{path.name}: column {label!r} holds a single class, {columns[label][0]}; two are needed")
    x = _features(path, {name: values for name, values in columns.items() if name not in {label, client}})
    test = _test_rows(owner, num_clients, seed, test_share)
    if not test.any():
        raise _no_test(path.name, int(np.bincount(owner).max()), test_share)
    if standardize:
        scale = x[~test].std(axis=0)
        x = (x - x[~test].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    x = x.astype(np.float32)
    return Task(
        name=path.stem,
        dataset=Dataset(path.name, x[~test], y[~test], x[test], y[test], num_classes),
        client_rows=_rows_of(owner[~test], num_clients),
        make_model=partial(model, x.shape[1], num_classes),
        loss=cross_entropy,
    )


def _no_test(source: str, largest: int, share: float) -> DeltaflError:
    """Why nothing is in the test set, where the largest client has so many rows."""
    if largest == 1:
        return DeltaflError(
            f"{source}: every client has a single row, which it keeps, so nothing is left for a test set; "
            "name a column of clients that have two rows or more"
        )
    return DeltaflError(
        f"{source}: no client has enough rows for a test share of {share:g}, for the largest has {largest}; "
        f"call table_task with test_share={ceil(50 / largest) / 100:g} in a file of your own"
    )


def _test_rows(owner: IntArray, num_clients: int, seed: int, share: float) -> BoolArray:
    test = np.zeros(len(owner), dtype=np.bool_)
    for client, rows in enumerate(_rows_of(owner, num_clients)):
        size = min(int(share * len(rows) + 0.5), len(rows) - 1)
        test[stream(seed, "partition", client=client).permutation(rows)[:size]] = True
    return test


def _rows_of(owner: IntArray, num_clients: int) -> list[IntArray]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients)))


def _features(path: Path, columns: Columns) -> npt.NDArray[np.float64]:
    """The columns of numbers side by side, float64 (N, features)."""
    if not columns:
        raise DeltaflError(f"{path.name} has no columns beside label and client; one feature at least is needed")
    return np.column_stack([_numbers(path, name, values) for name, values in columns.items()])


def _numbers(path: Path, name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if values.dtype.kind == "V":
        raise _structured(path.name, name)
    if values.dtype.kind == "c":
        raise DeltaflError(f"{path.name}: column {name!r} holds complex numbers; write two columns of real ones")
    if values.dtype.kind in "mM" and np.isnat(values).any():
        raise _missing(path.name, name, int(np.argwhere(np.isnat(values))[0][0]))
    try:
        number = values.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        row = next(row for row, value in enumerate(values) if not _is_number(value))
        if _is_missing(values[row]):
            raise _missing(path.name, name, row) from None
        raise DeltaflError(
            f"{_cell(path.name, name, row)} holds {shown(_plain(values[row]))}; features must be numbers"
        ) from None
    bad = ~np.isfinite(number)
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        if bad.ndim == 1 and _is_missing(values[row]):
            raise _missing(path.name, name, row)
        raise DeltaflError(f"{_cell(path.name, name, row)} is not a finite number; fill it in or leave the row out")
    large = np.abs(number) > np.finfo(np.float32).max
    if large.any():
        place = tuple(np.argwhere(large)[0])
        raise DeltaflError(
            f"{_cell(path.name, name, int(place[0]))} holds {number[place]:g}, which float32 cannot hold (3.4e38 at "
            "most); write the column in another unit"
        )
    return number


def codes(source: str, name: str, values: npt.NDArray[Any]) -> tuple[IntArray, int]:
    """Whole numbers or words as 0, 1, ... in sorted order; and how many different ones there are."""
    if values.dtype.kind == "V":
        raise _structured(source, name)
    if values.ndim != 1:
        raise DeltaflError(f"{source}: {name!r} has shape {values.shape}; label and client need one value a row")
    row = next((row for row, value in enumerate(values) if _is_missing(value)), None)
    if row is not None:
        raise _missing(source, name, row)
    row = next((row for row, value in enumerate(values) if not _is_one(value)), None)
    if row is not None:
        raise DeltaflError(
            f"{_cell(source, name, row)} holds {shown(_plain(values[row]))}; it must be a whole number or a word"
        )
    if values.dtype.kind not in "iub":
        number = [_whole(value) for value in values]
        if None not in number and _tells_apart(number, values):  # so that 10 comes after 9, in text too
            values = np.array(number)
        elif None in number and all(_is_number(value) for value in values):
            row = number.index(None)
            raise DeltaflError(f"{_cell(source, name, row)} holds {values[row]}; it must be a whole number or a word")
        else:
            values = values.astype(np.str_)
    different, code = np.unique(values, return_inverse=True)
    return code.astype(np.int64), len(different)


def _whole(value: Any) -> int | None:
    """The value as a whole number, exact beyond 2^53 too (numbers of users can be long); None if it is not one."""
    try:
        return int(value) if isinstance(value, str) or int(value) == value else None
    except (TypeError, ValueError, OverflowError):
        return None


def _tells_apart(number: list[int | None], values: npt.NDArray[Any]) -> bool:
    """Whether no two texts are the same number, as 007 and 7 or 1_0 and 10 are: such are words, of different owners."""
    written = (value.strip() if isinstance(value, str) else str(one) for one, value in zip(number, values, strict=True))
    return len(set(number)) == len(set(written))


def _is_one(value: object) -> bool:
    """Whether a value is a single one, and real: cells of Parquet files can hold lists, arrays complex numbers."""
    return not isinstance(value, list | tuple | dict | set | np.ndarray | complex | np.complexfloating)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return _is_one(value)


def _is_missing(value: object) -> bool:
    """Nothing, blank, NaN or, for a time, NaT: the last two are no value that equals itself."""
    if value is None or isinstance(value, str):
        return value is None or not value.strip()
    return _is_one(value) and bool(value != value)  # noqa: PLR0124


def _cell(source: str, column: str, row: int) -> str:
    return f"{source}: row {row + 1}, column {column!r}"


def _structured(source: str, column: str) -> DeltaflError:
    return DeltaflError(
        f"{source}: column {column!r} holds records or raw bytes; write a column of its own for each of their values"
    )


def _missing(source: str, column: str, row: int) -> DeltaflError:
    return DeltaflError(f"{_cell(source, column, row)} is missing; fill it in or leave the row out")


def _read(path: Path) -> Columns:
    """The columns by name, each (N,) or (N, k), N >= 1."""
    if path.suffix.lower() not in READERS:
        raise DeltaflError(f"{path.name} is no table that can be read; give one of {', '.join(READERS)}")
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    columns = READERS[path.suffix.lower()](path)
    sizes = {name: len(values) if values.ndim else 0 for name, values in columns.items()}
    if not sizes or min(sizes.values()) == 0:
        raise DeltaflError(f"{path.name} has no rows; a table needs one example or more")
    odd = next((name for name in sizes if sizes[name] != next(iter(sizes.values()))), None)
    if odd is not None:
        first = next(iter(sizes))
        raise DeltaflError(f"{path.name}: {first!r} has {sizes[first]} rows but {odd!r} has {sizes[odd]}")
    return columns


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DeltaflError(f"{path.name} is not a CSV file in UTF-8: {error}") from None
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DeltaflError(f"{path.name}: the column {twice!r} is there twice; name each once")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise DeltaflError(f"{path.name}: row {number} has {len(row)} values, the header {len(header)} names")
    return {name: np.array([row[k] for row in rows], dtype=object) for k, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "data")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        table = parquet.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (ValueError, OSError, KeyError, NotImplementedError) as error:  # pyarrow's errors are of these kinds
        raise DeltaflError(f"{path.name} is not a Parquet file that can be read: {error}") from None


READERS: dict[str, Callable[[Path], Columns]] = {".csv": _read_csv, ".npz": read_arrays, ".parquet": _read_parquet}
TABLE_SUFFIXES = frozenset(READERS)
