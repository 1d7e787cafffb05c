"""Your own examples as a task: a table file, a pandas data frame, or a Hugging Face ``datasets``
object.

A table has one row an example: columns of numbers, a label, and the client that holds it unless a
partition deals the rows. pandas reads it; CSV files have a header, and in NPZ files every array is
a column (N,), or several (N, k). The package ``datasets`` is not imported: whatever has
``column_names`` and gives a column by its name will do.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require, unknown_name
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray
from .base import Dataset, Task
from .frames import read_frame
from .models import cross_entropy, one_output, softmax_regression, squared_error
from .partitions import clients_of, find_partition, hold_out_by_owner, make_partition, rows_by_key

if TYPE_CHECKING:
    import pandas as pd
    import torch

#: Larger features do not fit into float32.
LARGEST = np.finfo(np.float32).max

TaskType = Literal["classification", "regression"]

#: A label of more different numbers than this may be a class or a target: ``task_type`` has to say
#: which.
MOST_CLASSES = 20

#: The column that says who holds a row, unless another one is named.
OWNER = "client"

#: An error names at most this many columns.
SHOWN = 10


def table_task(
    table: "str | Path | pd.DataFrame",
    label: str = "label",
    column: str | None = None,
    *,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: str | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    model: "Callable[[int, int], torch.nn.Module]" = softmax_regression,
    test_share: float = 0.1,
    standardize: bool = True,
) -> Task:
    """Make a task of a table: classification by cross-entropy, or regression by the squared error.

    Of a client's n rows, round(test_share n) are in the test set, drawn by
    ``stream(seed, "partition")``; the others are its own. A client always keeps one row, so that
    one with a single row is fine. Where a partition deals the rows, round(test_share N) of all N
    are in the test set.

    Args:
        table: A ``.csv``, ``.npz`` or ``.parquet`` file, or a data frame.
        label: Column of the class, whole numbers or words that become 0, 1, ... in sorted order; or
            of the target.
        column: Column of the client that holds the row, likewise; ``"client"`` if there is no
            partition either.
        seed: Fixes the test set and the partition.
        task_type: Whether the label is a class or a number to predict. If None, words and up to 20
            different whole numbers are classes, and any other label is an error that asks for it.
        partition: One of ``PARTITIONS``, which deals the rows; a column ``"client"`` is then left
            out.
        clients: The number of clients of a partition. Of more owners in a column, so many are
            drawn.
        alpha: Concentration of a Dirichlet partition.
        model: ``model(in_features, outputs)`` makes the model; a function or a class at the top of
            a module.
        test_share: Share of the rows in the test set, in (0, 1).
        standardize: Subtract the mean of each feature and divide by its standard deviation, both of
            the training rows of all clients together. A real federation would have to agree on
            these two numbers a feature first. A target of regression is standardized by all rows,
            so that the loss of its mean is about 1.

    Returns:
        A task with float32 features in the order of the table.

    Raises:
        DeltaflError: If the table cannot be read or used; a row is counted from 1, without the
            header.
        MissingExtraError: Without pandas; for Parquet without pyarrow.

    Example: ``table_task(frame, "species", partition="dirichlet", alpha=0.3, clients=20)``
    """
    if not 0 < test_share < 1:
        raise DeltaflError(f"test_share is {test_share}; it must be between 0 and 1, such as 0.1")
    name, frame = read_frame(table)
    if label not in frame:
        raise _no_column(name, label, frame, "label")
    how, owner = _who(name, frame, column, partition, clients)
    features = frame.drop(columns=[label, owner or OWNER], errors="ignore")
    if label == owner or features.empty:
        raise DeltaflError(
            f"{name} needs one row and a column of numbers besides the label and the client"
        )
    owner_e = codes(frame[owner])[0] if owner else np.zeros(len(frame), np.int64)
    y, num_classes, unit = _targets(frame[label], task_type, standardize)
    columns_of_x = []
    for each in features:
        cure = (
            f"; encode words first, as pandas.get_dummies(table, columns=[{each!r}]) does, or drop "
            "the column"
        )
        columns_of_x.append(_numbers(features[each], cure))
    x = np.column_stack(columns_of_x)
    test = _test_rows(owner_e, seed, test_share)
    if not test.any():
        raise DeltaflError(
            f"{name}: no client has enough rows for a test share of {test_share:g}; call "
            "table_task with a larger "
            "test_share in a file of your own, or name a column of clients with more rows"
        )
    if standardize:
        scale = x[~test].std(axis=0)
        x = (x - x[~test].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    x = x.astype(np.float32)
    columns = {owner: owner_e[~test]} if owner else {}
    dataset = Dataset(name + unit, x[~test], y[~test], x[test], y[test], num_classes, columns)
    return Task(
        name=Path(name).stem,
        dataset=dataset,
        client_rows=make_partition(
            how, dataset, clients, alpha, stream(seed, "partition", round=1), owner
        ),
        **_learning(num_classes, model, x.shape[1]),
    )


def from_huggingface(
    data: Any,
    *,
    label: str = "label",
    column: str | None = None,
    inputs: str | None = None,
    name: str = "dataset",
    make_model: "Callable[[], torch.nn.Module] | None" = None,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: str | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
) -> Task:
    """Make a task of a Hugging Face ``Dataset`` or ``DatasetDict``.

    Args:
        data: A ``DatasetDict`` with ``train`` and ``test``, or one with ``train`` alone, or a
            ``Dataset``. Without a test set the 5th, 15th, 25th, ... row of each client is for the
            test, of all rows with a partition.
        label: Column of the class or the target, as in ``table_task``; a ``ClassLabel`` is a class.
        column: Column of the client that holds the row. Test rows of others belong to no client.
        inputs: Column of pictures of one size, which become uint8 (N, channels, height, width), or
            of lists of numbers; the only other column if None.
        name: The name of the data in reports.
        make_model: Makes the model; softmax or linear regression if None.
        seed: Fixes the partition.
        task_type: As in ``table_task``.
        partition: As in ``table_task``.
        clients: As in ``table_task``.
        alpha: As in ``table_task``.

    Raises:
        DeltaflError: If a column is missing or cannot be used.

    Example: ``from_huggingface(data, label="label", inputs="image", partition="iid", clients=100)``
    """
    require("pandas", "sim")
    import pandas as pd

    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    used = {f"{name}'s {part} part": parts[part] for part in ("train", "test") if part in parts}
    names = list(getattr(parts["train"], "column_names", ()))
    how, owner = _who(f"{name}'s train part", names, column, partition, clients)
    others = [each for each in names if each not in {label, owner or OWNER}]
    if inputs is None and len(others) != 1:
        raise DeltaflError(
            f"{name}: inputs must name one of its columns; {_listed('inputs', others)}: write "
            f"from_huggingface(data, inputs={others[0] if others else 'image'!r}, ...); for "
            "several columns of numbers "
            "make a task of its data frame: table_task(data.to_pandas(), ...)"
        )
    inputs = inputs or others[0]
    for where, part in used.items():
        columns = getattr(part, "column_names", ())
        missing = next((key for key in (label, owner, inputs) if key and key not in columns), None)
        if missing is not None:
            raise _no_column(f"{where} ({type(part).__name__})", missing, columns)
    x = [_inputs(where, inputs, part[inputs]) for where, part in used.items()]
    keys = [
        pd.DataFrame({key: list(part[key]) for key in (label, owner) if key})
        for part in used.values()
    ]
    both = pd.concat(keys, keys=used)
    if hasattr((getattr(parts["train"], "features", None) or {}).get(label), "names"):
        task_type = task_type or "classification"
        _require_all(
            both[label],
            (both[label] != -1).to_numpy(),
            "a class; -1 is an example without one: drop the row",
        )
    y_e, num_classes, unit = _targets(both[label], task_type, standardize=True)
    code_e = codes(both[owner])[0] if owner else np.zeros(len(both), np.int64)
    (y, test_y), (owner_e, test_owner_e) = (
        np.split(each_e, [len(x[0])]) for each_e in (y_e, code_e)
    )
    test_x = x[1] if len(x) == 2 else x[0][:0]
    by = owner or "row"
    dataset = Dataset(
        name + unit, x[0], y, test_x, test_y, num_classes, {by: owner_e}, {by: test_owner_e}
    )
    if len(x) == 1:
        dataset = hold_out_by_owner(dataset, by, owner_e)
    rows = make_partition(how, dataset, clients, alpha, stream(seed, "partition", round=1), owner)
    learning = _learning(num_classes, softmax_regression, int(np.prod(x[0].shape[1:])))
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        **(learning if make_model is None else learning | {"make_model": make_model}),
        test_clients=clients_of(dataset.columns[by], rows, dataset.test_columns[by])
        if owner
        else None,
    )


def _who(
    where: str,
    columns: Iterable[str],
    column: str | None,
    partition: str | None,
    clients: int | None,
) -> tuple[str, str | None]:
    """The partition, and the column of owners if it uses one."""
    how = partition or "natural"
    names = list(columns)
    dealt = find_partition(how)
    if not dealt.uses_column:
        if column is not None:
            raise DeltaflError(
                f"partition {how!r} deals the rows, and column {column!r} says who holds them: "
                "leave one of them out"
            )
        if clients is None:
            raise DeltaflError(
                f"partition {how!r} needs the number of clients: write clients=20, or --clients 20"
            )
        return how, None
    owner = dealt.column or column or OWNER
    if column not in {None, owner}:
        raise DeltaflError(
            f"partition {how!r} uses the column {owner!r}, not {column!r}: leave one of them out"
        )
    if column is None and partition is None and owner not in names:
        raise DeltaflError(
            f"{where} has no column {OWNER!r} that says who holds a row: name another one (column, "
            "--column), or let "
            "a partition deal the rows (partition and clients, --partition iid --clients 20); "
            f"{_listed(OWNER, names)}"
        )
    if owner not in names:
        raise _no_column(where, owner, names)
    return how, owner


def _no_column(
    where: str, name: str, columns: Iterable[str], setting: str = "column"
) -> DeltaflError:
    """The error for a column that is not there; the others are listed, the nearest first."""
    names = list(columns)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]!r}?" if near else f"name one with {setting} (--{setting})"
    return DeltaflError(f"{where} has no column {name!r}: {meant} ({_listed(name, names)})")


def _listed(name: str, columns: list[str]) -> str:
    """The columns, those with the nearest names first."""
    more = f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else ""
    return (
        "its columns are "
        f"{', '.join(get_close_matches(name, columns, n=SHOWN, cutoff=0.0)) or 'none'}{more}"
    )


def _targets(
    values: "pd.Series[Any]", task_type: TaskType | None, standardize: bool
) -> tuple[npt.NDArray[Any], int, str]:
    """Classes 0, 1, ... and their number, or float32 targets and 0; and what to add to the name
    of the data.
    """
    source = values.index[0][0]
    if task_type not in (None, *get_args(TaskType)):
        raise DeltaflError(
            f"task_type is {task_type!r}; it must be {' or '.join(map(repr, get_args(TaskType)))}"
        )
    if (task_type or _task_type(values)) == "classification":
        y, num_classes = codes(values)
        if num_classes < 2:
            raise DeltaflError(
                f"{source}: column {values.name!r} holds a single class; two are needed"
            )
        return y, num_classes, ""
    target = _numbers(values)
    mean = float(target.mean())
    scale = float(target.std())
    if scale == 0:
        raise DeltaflError(
            f"{source}: column {values.name!r} holds a single number; there is nothing to predict"
        )
    if not standardize:
        return target.astype(np.float32), 0, ""
    unit = f", {values.name!r} standardized by mean {mean:.4g} and standard deviation {scale:.4g}"
    return ((target - mean) / scale).astype(np.float32), 0, unit


def _task_type(values: "pd.Series[Any]") -> TaskType:
    """What a label is, where that is clear: words and few whole numbers are classes."""
    import pandas as pd

    number = pd.to_numeric(_plain(values), errors="coerce")
    if isinstance(values.dtype, pd.CategoricalDtype) or (number.isna() & values.notna()).any():
        return "classification"
    known = number.dropna().to_numpy(np.float64)
    count = number.nunique()
    fractions = known[known % 1 != 0]
    if count <= MOST_CLASSES and len(fractions) == 0:
        return "classification"
    held = (
        f"fractions such as {fractions[0]:g}"
        if len(fractions)
        else f"{count} different whole numbers"
    )
    raise DeltaflError(
        f"{values.index[0][0]}: column {values.name!r} holds {held}: write task_type = regression "
        "(--task-type "
        f"regression) to predict the number; up to {MOST_CLASSES} whole numbers, or words, are "
        "classes, and more are "
        "with task_type = classification"
    )


def _learning(
    num_classes: int, model: "Callable[[int, int], torch.nn.Module]", in_features: int
) -> dict[str, Any]:
    """Model, loss and metric of a task."""
    if num_classes > 0:
        return {"make_model": partial(model, in_features, num_classes), "loss": cross_entropy}
    return {
        "make_model": partial(one_output, model, in_features),
        "loss": squared_error,
        "metric": "loss",
    }


def codes(values: "pd.Series[Any]") -> tuple[IntArray, int]:
    """Whole numbers (texts, too) or words as 0, 1, ... in sorted order; and how many different
    ones there are.
    """
    good_e = ~values.isna().to_numpy()
    if values.dtype.kind == "f":
        good_e &= values.to_numpy(np.float64, na_value=np.nan) % 1 == 0
    elif values.dtype.kind not in "biu":
        good_e &= values.map(
            lambda value: isinstance(value, str | int) and str(value).strip() != ""
        ).to_numpy(np.bool_)
    _require_all(values, good_e, "a whole number or a word")
    if values.dtype.kind not in "biuf":
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


def _numbers(values: "pd.Series[Any]", cure: str = "") -> FloatArray:
    import pandas as pd

    number: FloatArray = pd.to_numeric(_plain(values), errors="coerce").to_numpy(
        np.float64, na_value=np.nan
    )
    _require_all(values, values.notna().to_numpy(), "a real number")
    _require_all(values, np.abs(number) <= LARGEST, "a real number in the range of float32", cure)
    return number


def _plain(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """Numbers as they are, all others as text: dates and complex numbers are no numbers."""
    return values if values.dtype.kind in "biuf" else values.astype(str)


def _require_all(values: "pd.Series[Any]", good_e: Any, needed: str, cure: str = "") -> None:
    """Refuse the first value that is not good; the index holds table and row."""
    if not np.all(good_e):
        bad = int(np.argmin(good_e))
        source, row = values.index[bad]
        held = shown(values.tolist()[bad])
        if values.isna().iloc[bad]:
            cure = (
                "; a missing value (in CSV files an empty cell, NA, None, null, ...): fill it "
                "in, or drop the row"
            )
        raise DeltaflError(
            f"{source}: row {row + 1}, column {values.name!r} holds {held}; it must be "
            f"{needed}{cure}"
        )


def _inputs(where: str, column: str, values: Any) -> npt.NDArray[Any]:
    """A column of pictures or lists of numbers as one array."""
    try:
        x = np.stack([_array(value) for value in values])
        good = x.dtype.kind in "iufb" and x.ndim <= 4 and bool((np.abs(x) <= LARGEST).all())
    except ValueError:
        good = False
    if not good:
        raise DeltaflError(
            f"{where}: column {column!r} needs pictures of one size and mode, or lists of numbers "
            "of one length; "
            f"data.cast_column({column!r}, datasets.Image(mode='RGB')) gives pictures one mode"
        )
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    picture = x[:, np.newaxis] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(picture, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)


def _array(value: Any) -> npt.NDArray[Any]:
    if getattr(value, "mode", None) == "P":
        raise ValueError("the picture has numbers of colours in a palette")
    return np.asarray(value)
