"""Your own examples as a task: a table file, or a Hugging Face ``datasets`` object.

A table has one row an example, with columns of numbers, a label and the client that holds it. CSV files have a header.
In NPZ files every array is a column (N,), or several of them (N, k). Parquet needs pyarrow. The package ``datasets`` is
not imported: whatever has ``column_names`` and gives a column by its name will do.
"""

import csv
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require, unknown_name
from ..streams import stream
from ..types import BoolArray, IntArray
from .base import Dataset, Task
from .files import read_arrays
from .models import cross_entropy, softmax_regression
from .partitions import clients_of, hold_out_by_owner, natural

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

    Of a client's n rows, round(test_share n) are in the test set, drawn by ``stream(seed, "partition")``; the others
    are its own. A client always keeps one row, so that one with a single row is fine.

    Args:
        path: A ``.csv``, ``.npz`` or ``.parquet`` file.
        label: Column of the class: whole numbers or words; sorted, they become 0, 1, ...
        client: Column of the client that holds the row: whole numbers or words; sorted, they become client 0, 1, ...
        seed: Fixes the test set.
        model: ``model(in_features, classes)`` makes the model; such as ``softmax_regression`` or a class at the top of
            a module.
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
    features = {name: values for name, values in columns.items() if name not in {label, client}}
    if not features:
        raise DeltaflError(f"{path.name} has no columns beside label and client; one feature at least is needed")
    x = np.column_stack([_numbers(path.name, name, values) for name, values in features.items()])
    test = _test_rows(owner, num_clients, seed, test_share)
    if not test.any():
        raise DeltaflError(
            f"{path.name}: no client has enough rows for a test share of {test_share:g}, the largest has "
            f"{np.bincount(owner).max()}; call table_task with a larger test_share in a file of your own, or name a "
            "column of clients with more rows"
        )
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


def from_huggingface(
    data: Any,
    *,
    label: str,
    column: str,
    inputs: str,
    name: str = "dataset",
    make_model: "Callable[[], torch.nn.Module] | None" = None,
) -> Task:
    """Make a classification task of a Hugging Face ``Dataset`` or ``DatasetDict``.

    Args:
        data: A ``DatasetDict`` with ``train`` and ``test``, or one with ``train`` alone, or a ``Dataset``. Without a
            test set the 5th, 15th, 25th, ... row of each client is for the test.
        label: Column of the class: whole numbers or words; sorted, they become 0, 1, ...
        column: Column of the client that holds the row: whole numbers or words; sorted, they become client 0, 1, ...
        inputs: Column of pictures of one size, or of lists of numbers of one length.
        name: The name of the data in reports.
        make_model: Makes the model; such as a class at the top of a module. Softmax regression if None.

    Returns:
        A task with one client for each value of ``column``. Pictures become uint8 (N, channels, height, width), numbers
        float32. Test rows of somebody who has no training rows belong to no client.

    Raises:
        DeltaflError: If a column is missing or cannot be used; the sentence names column and row (from 1).
    """
    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    used = {f"{name}'s {part} part": parts[part] for part in ("train", "test") if part in parts}
    for where, part in used.items():
        _require_columns(where, part, (label, column, inputs))
    x = [_inputs(where, inputs, part[inputs]) for where, part in used.items()]
    y, num_classes = _joint_codes(used, label)
    owner, _ = _joint_codes(used, column)
    if len(used) == 2:
        columns, test_columns = {column: owner[0]}, {column: owner[1]}
        dataset = Dataset(name, x[0], y[0], x[1], y[1], num_classes, columns=columns, test_columns=test_columns)
    else:
        dataset = hold_out_by_owner(Dataset(name, x[0], y[0], x[0][:0], y[0][:0], num_classes), column, owner[0])
    owner_e = dataset.columns[column]
    rows = natural(owner_e, len(np.unique(owner_e)), np.random.default_rng(0))  # all owners: nothing is drawn
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        make_model=make_model or partial(softmax_regression, int(np.prod(x[0].shape[1:])), num_classes),
        loss=cross_entropy,
        test_clients=clients_of(owner_e, rows, dataset.test_columns[column]),
    )


def codes(source: str, name: str, values: npt.NDArray[Any]) -> tuple[IntArray, int]:
    """Whole numbers or words as 0, 1, ... in sorted order; and how many different ones there are.

    If all values are whole numbers, written as text or not, they are sorted as numbers; ``007`` and ``7`` stay apart.
    """
    if values.ndim != 1:
        raise DeltaflError(f"{source}: {name!r} has shape {values.shape}; label and client need one value a row")
    word_k = []
    for row, value in enumerate(values.tolist()):
        plain = _plain(value)
        if _is_missing(plain):
            raise _missing(source, name, row)
        if not isinstance(plain, str | int | float):
            raise _odd_value(source, name, row, plain)
        is_whole = isinstance(plain, int) or (isinstance(plain, float) and plain.is_integer())
        word_k.append(str(int(plain)) if is_whole else str(plain).strip())
    number = {word: _number(word) for word in set(word_k)}
    if all(value is not None for value in number.values()):
        odd = next((row for row, word in enumerate(word_k) if not isinstance(number[word], int)), None)
        if odd is not None:
            raise _odd_value(source, name, odd, values[odd])
        different = sorted(number, key=lambda word: (number[word], word))
    else:
        different = sorted(number)
    code = {word: index for index, word in enumerate(different)}
    return np.array([code[word] for word in word_k], dtype=np.int64), len(different)


def _number(word: str) -> float | int | None:
    """A word as a whole number, exact beyond 2^53 (numbers of users can be long), else as a float; None if neither."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return None


def _is_missing(value: object) -> bool:
    if isinstance(value, float):
        return isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _test_rows(owner: IntArray, num_clients: int, seed: int, share: float) -> BoolArray:
    test = np.zeros(len(owner), dtype=np.bool_)
    for client, rows in enumerate(_rows_of(owner, num_clients)):
        size = min(int(share * len(rows) + 0.5), len(rows) - 1)
        test[stream(seed, "partition", client=client).permutation(rows)[:size]] = True
    return test


def _rows_of(owner: IntArray, num_clients: int) -> list[IntArray]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients)))


def _numbers(source: str, name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """A column of features, (N,) or (N, k)."""
    if values.dtype.kind not in "biufOUS":
        raise DeltaflError(f"{source}: column {name!r} holds {values.dtype}; features must be real numbers")
    try:
        number: npt.NDArray[np.float64] = values.astype(np.float64)
        row_nk = number.reshape(len(number), -1)
        good_n = (np.abs(row_nk) <= np.finfo(np.float32).max).all(axis=1)  # false for NaN as well
    except (TypeError, ValueError, OverflowError):
        good_n = np.array([_is_number(value) for value in values.tolist()])
    if good_n.all():
        return number
    row = int(np.argmin(good_n))
    value = _plain(values[row])
    if _is_missing(value):
        raise _missing(source, name, row)
    raise DeltaflError(
        f"{_cell(source, name, row)} holds {shown(value)}; features must be real numbers in the range of float32"
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _cell(source: str, column: str, row: int) -> str:
    return f"{source}: row {row + 1}, column {column!r}"


def _missing(source: str, column: str, row: int) -> DeltaflError:
    return DeltaflError(f"{_cell(source, column, row)} is missing; fill it in or leave the row out")


def _odd_value(source: str, column: str, row: int, value: object) -> DeltaflError:
    return DeltaflError(f"{_cell(source, column, row)} holds {shown(value)}; it must be a whole number or a word")


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
    first = next(iter(sizes))
    odd = next((name for name in sizes if sizes[name] != sizes[first]), None)
    if odd is not None:
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
    require("pyarrow", "data")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        table = parquet.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (ValueError, OSError, KeyError, NotImplementedError) as error:  # pyarrow's errors are of these kinds
        raise DeltaflError(f"{path.name} is not a Parquet file that can be read: {error}") from error


READERS: dict[str, Callable[[Path], Columns]] = {".csv": _read_csv, ".npz": read_arrays, ".parquet": _read_parquet}
TABLE_SUFFIXES = frozenset(READERS)


def _require_columns(where: str, part: Any, needed: Sequence[str]) -> None:
    names = getattr(part, "column_names", None)
    if not isinstance(names, list) or not hasattr(part, "__getitem__"):
        raise DeltaflError(
            f"{where} is {type(part).__name__}; it must be a datasets.Dataset, alone or in a DatasetDict with train"
        )
    for column in needed:
        if column not in names:
            raise unknown_name(f"column of {where}", column, names)


def _joint_codes(parts: Mapping[str, Any], column: str) -> tuple[list[IntArray], int]:
    """The column of all parts as 0, 1, ..., and how many different values there are."""
    values = []
    for where, part in parts.items():
        one = np.empty(len(part[column]), dtype=object)
        one[:] = list(part[column])
        codes(where, column, one)  # alone first, so that a mistake is located in its part
        values.append(one)
    code, count = codes(next(iter(parts)), column, np.concatenate(values))
    return np.split(code, np.cumsum([len(one) for one in values])[:-1]), count


def _inputs(where: str, column: str, values: Any) -> npt.NDArray[Any]:
    """A column of pictures or lists of numbers as one array."""
    rows = [_array(value) for value in values]
    if not rows:
        raise DeltaflError(f"{where} has no rows; a data set needs one example or more")
    for row, found in enumerate(rows):
        if found.dtype.kind not in "iufb" or found.shape != rows[0].shape or found.ndim > 3:
            raise DeltaflError(
                f"{_cell(where, column, row)} has shape {found.shape} ({found.dtype}); rows need numbers of one shape, "
                "with height, width and channels at most"
            )
        if not (np.abs(found) <= np.finfo(np.float32).max).all():
            raise DeltaflError(f"{_cell(where, column, row)} holds a number that is not finite in float32")
    x = np.stack(rows)
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    picture = x[:, np.newaxis] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(picture, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)


def _array(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths in one cell
        return np.array(None)
