"""Your own examples as a task: a table file, or a Hugging Face ``datasets`` object.

A table has one row an example, with columns of numbers, a label and the client that holds it. pandas reads it; CSV
files have a header, and in NPZ files every array is a column (N,), or several of them (N, k). The package ``datasets``
is not imported: whatever has ``column_names`` and gives a column by its name will do.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, in_one_line, require, unknown_name
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray
from .base import Dataset, Task
from .files import read_arrays
from .models import cross_entropy, softmax_regression
from .partitions import clients_of, hold_out_by_owner, rows_by_key

if TYPE_CHECKING:
    import pandas as pd
    import torch

TABLE_SUFFIXES = (".csv", ".npz", ".parquet")

#: Larger features do not fit into float32.
LARGEST = np.finfo(np.float32).max


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
        client: Column of the client that holds the row, likewise.
        seed: Fixes the test set.
        model: ``model(in_features, classes)`` makes the model; a function or a class at the top of a module.
        test_share: Share of the rows in the test set, in (0, 1).
        standardize: Subtract the mean of each feature and divide by its standard deviation, both of the training rows
            of all clients together. A real federation would have to agree on these two numbers a feature first.

    Returns:
        A task with float32 features in the order of the file.

    Raises:
        DeltaflError: If the table cannot be read or used; a row is counted from 1, without the header.
        MissingExtraError: Without pandas; for Parquet without pyarrow.
    """
    path = Path(path)
    if not 0 < test_share < 1:
        raise DeltaflError(f"test_share is {test_share}; it must be between 0 and 1, such as 0.1")
    table = _read(path)
    for name in (label, client):
        if name not in table:
            raise unknown_name(f"column of {path.name}", name, map(str, table.columns))
    features = table.drop(columns=[label, client])
    if label == client or features.empty:
        raise DeltaflError(f"{path.name} needs one row and three columns or more: a label, a client and a feature")
    y, num_classes = codes(table[label])
    owner, _ = codes(table[client])
    if num_classes < 2:
        raise DeltaflError(f"{path.name}: column {label!r} holds a single class; two are needed")
    x = np.column_stack([_numbers(features[name]) for name in features])
    test = _test_rows(owner, seed, test_share)
    if not test.any():
        raise DeltaflError(
            f"{path.name}: no client has enough rows for a test share of {test_share:g}; call table_task with a larger "
            "test_share in a file of your own, or name a column of clients with more rows"
        )
    if standardize:
        scale = x[~test].std(axis=0)
        x = (x - x[~test].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    x = x.astype(np.float32)
    return Task(
        name=path.stem,
        dataset=Dataset(path.name, x[~test], y[~test], x[test], y[test], num_classes),
        client_rows=rows_by_key(owner[~test]),
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
        column: Column of the client that holds the row, likewise. Test rows of others belong to no client.
        inputs: Column of pictures of one size, which become uint8 (N, channels, height, width), or of lists of numbers.
        name: The name of the data in reports.
        make_model: Makes the model; softmax regression if None.

    Raises:
        DeltaflError: If a column is missing or cannot be used.
    """
    require("pandas", "sim")
    import pandas as pd

    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    used = {f"{name}'s {part} part": parts[part] for part in ("train", "test") if part in parts}
    for where, part in used.items():
        names = getattr(part, "column_names", ())
        missing = next((needed for needed in (label, column, inputs) if needed not in names), None)
        if missing is not None:
            raise unknown_name(f"column of {where} ({type(part).__name__})", missing, names)
    x = [_inputs(where, inputs, part[inputs]) for where, part in used.items()]
    keys = [pd.DataFrame({label: list(part[label]), column: list(part[column])}) for part in used.values()]
    both = pd.concat(keys, keys=used)
    (y_e, num_classes), (code_e, _) = codes(both[label]), codes(both[column])
    (y, test_y), (owner, test_owner) = (np.split(each_e, [len(x[0])]) for each_e in (y_e, code_e))
    test_x = x[1] if len(x) == 2 else x[0][:0]
    dataset = Dataset(name, x[0], y, test_x, test_y, num_classes, {column: owner}, {column: test_owner})
    if len(x) == 1:
        dataset = hold_out_by_owner(dataset, column, owner)
    owner_e = dataset.columns[column]
    rows = rows_by_key(owner_e)
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        make_model=make_model or partial(softmax_regression, int(np.prod(x[0].shape[1:])), num_classes),
        loss=cross_entropy,
        test_clients=clients_of(owner_e, rows, dataset.test_columns[column]),
    )


def codes(values: "pd.Series[Any]") -> tuple[IntArray, int]:
    """Whole numbers (texts, too) or words as 0, 1, ... in sorted order; and how many different ones there are."""
    known = ~values.isna().to_numpy()
    if values.dtype.kind == "f":
        _require_all(values, known & (values % 1 == 0), "a whole number or a word")
    elif values.dtype.kind not in "biu":
        is_word = values.map(lambda value: isinstance(value, str | int) and str(value).strip() != "").to_numpy(np.bool_)
        _require_all(values, known & is_word, "a whole number or a word")
        values = values.astype(str).str.strip()
        if values.str.fullmatch(r"[+-]?\d+").all():
            values = values.map(int)
    code, names = values.factorize(sort=True)
    return code.astype(np.int64), len(names)


def _test_rows(owner: IntArray, seed: int, share: float) -> BoolArray:
    test = np.zeros(len(owner), dtype=np.bool_)
    for client, rows in enumerate(rows_by_key(owner)):
        size = min(int(share * len(rows) + 0.5), len(rows) - 1)
        test[stream(seed, "partition", client=client).permutation(rows)[:size]] = True
    return test


def _numbers(values: "pd.Series[Any]") -> FloatArray:
    """A column of features."""
    import pandas as pd

    # Dates and complex numbers as text are no numbers either.
    plain = values if values.dtype.kind in "biuf" else values.astype(str)
    number: FloatArray = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64)
    _require_all(values, np.abs(number) <= LARGEST, "a real number in the range of float32")
    return number


def _require_all(values: "pd.Series[Any]", good_e: Any, needed: str) -> None:
    """Refuse the first value that is not good; the index holds table and row."""
    if not np.all(good_e):
        bad = int(np.argmin(good_e))
        source, row = values.index[bad]
        held = shown(values.tolist()[bad])
        raise DeltaflError(f"{source}: row {row + 1}, column {values.name!r} holds {held}; it must be {needed}")


def _read(path: Path) -> "pd.DataFrame":
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DeltaflError(f"{path.name} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}")
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    require("pandas", "sim")
    import pandas as pd

    arrays = read_arrays(path) if suffix == ".npz" else {}
    if suffix == ".parquet":
        require("pyarrow", "data")
    try:
        if suffix == ".parquet":
            table = pd.read_parquet(path)
        elif suffix == ".csv":
            options: dict[str, Any] = {"encoding": "utf-8-sig", "index_col": False, "keep_default_na": False}
            table = pd.read_csv(path, na_values=[""], **options)
            # pandas renames the second of two equal columns: a label would become a feature.
            header = pd.read_csv(path, header=None, nrows=1, dtype=str, **options).loc[0]
            if header.duplicated().any():
                raise ValueError(f"column {header[header.duplicated()].iloc[0]!r} is named twice")
        else:
            columns: dict[str, npt.NDArray[Any]] = {}
            for name, array in arrays.items():
                names = [name] if array.ndim == 1 else [f"{name}[{k}]" for k in range(int(np.prod(array.shape[1:])))]
                columns |= zip(names, array.reshape(len(array), -1).T, strict=True)
            table = pd.DataFrame(columns)
    except (ValueError, TypeError, OSError, NotImplementedError) as error:  # pyarrow's errors are of these kinds, too
        raise DeltaflError(f"{path.name} cannot be read as a table: {in_one_line(error)}") from error
    return pd.concat([table.reset_index(drop=True)], keys=[path.name])


def _inputs(where: str, column: str, values: Any) -> npt.NDArray[Any]:
    """A column of pictures or lists of numbers as one array."""
    try:
        x = np.stack([np.asarray(value) for value in values])
        good = x.dtype.kind in "iufb" and x.ndim <= 4 and bool((np.abs(x) <= LARGEST).all())
    except ValueError:
        good = False
    if not good:
        raise DeltaflError(f"{where}: column {column!r} needs pictures of one size, or lists of numbers of one length")
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    picture = x[:, np.newaxis] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(picture, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)
