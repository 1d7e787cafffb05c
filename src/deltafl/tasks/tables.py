"""Your own examples as a task: a table file, a pandas data frame, or a Hugging Face ``datasets``
object.

A table has one row an example: columns of numbers, a label, and the client that holds the row
unless a partition deals the rows. pandas reads it; CSV files have a header, and in NPZ files every
array is a column (N,), or several (N, k). The package ``datasets`` is not imported: whatever has
``column_names`` and ``features``, and gives a column by its name, will do.

Both functions bring inputs, a column of labels and one of owners, and say which rows are for the
test; what follows is the same for both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require, unknown_name
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray
from .base import Dataset, Task
from .frames import Frame, read_frame
from .losses import MakeModel, Module, cross_entropy, squared_error
from .models import one_output, softmax_regression
from .partitions import clients_of_tests, every_tenth, find_partition, make_partition, rows_by_key

#: A ``pandas.Series``.
Column: TypeAlias = Any

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
    table: str | Path | Frame,
    label: str = "label",
    column: str | None = None,
    *,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: str | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    model: Callable[[int, int], Module] = softmax_regression,
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
    owner = _owner_column(name, frame, column, partition)
    # Where a partition deals the rows, a column of clients is no feature either.
    features = frame.drop(columns=[label, owner or OWNER], errors="ignore")
    if label == owner or features.empty:
        raise DeltaflError(
            f"{name} needs one row and a column of numbers besides the label and the client"
        )
    owner_e = _owners(frame, owner)
    target = _target(frame[label], task_type, standardize)
    x = np.column_stack([_numbers(features[each]) for each in features])
    test_e = _random_share(owner_e, test_share, seed)
    if standardize:
        # Test rows say nothing about the scale: a model is judged on rows that it has not seen.
        mean = x[~test_e].mean(axis=0)
        scale = x[~test_e].std(axis=0)
        # A feature that does not vary becomes 0, not 0 / 0.
        x = (x - mean) / np.where(scale > 0, scale, 1.0)
    dataset = _dataset(name, x.astype(np.float32), target, owner, owner_e, test_e)
    task = _task(
        Path(name).stem,
        dataset,
        model,
        partition,
        column,
        clients,
        alpha,
        seed,
    )
    # Accuracy by client is no part of the record of a table, only of a Hugging Face data set.
    return replace(task, test_clients=None)


def from_huggingface(
    data: Any,
    *,
    label: str = "label",
    column: str | None = None,
    inputs: str | None = None,
    name: str = "dataset",
    make_model: MakeModel | None = None,
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
    for where, part in used.items():
        if not hasattr(part, "column_names"):
            raise DeltaflError(
                f"{where} is of type {type(part).__name__}; it must be a datasets.Dataset"
            )
    train = parts["train"]
    owner = _owner_column(
        f"{name}'s train part",
        train.column_names,
        column,
        partition,
    )
    others = [each for each in train.column_names if each not in {label, owner or OWNER}]
    if inputs is None and len(others) != 1:
        raise DeltaflError(
            f"{name} has {', '.join(others) or 'no column'} beside label and client: name the "
            "inputs by from_huggingface(data, inputs='image', ...); for several columns of numbers "
            "make a task of its data frame: table_task(data.to_pandas(), ...)"
        )
    inputs = inputs or others[0]
    keys = [key for key in (label, owner) if key is not None]
    for where, part in used.items():
        for key in (*keys, inputs):
            if key not in part.column_names:
                raise _no_column(where, key, part.column_names)
    # Together, so that both parts number classes and owners alike.
    frame = pd.concat(
        [pd.DataFrame({key: list(part[key]) for key in keys}) for part in used.values()], keys=used
    )
    x = _stacked(
        name,
        inputs,
        [value for part in used.values() for value in part[inputs]],
    )
    if hasattr((train.features or {}).get(label), "names"):  # a ClassLabel
        task_type = task_type or "classification"
        _require_all(
            frame[label],
            (frame[label] != -1).to_numpy(),
            "a class",
            "-1 is an example without one: drop the row",
        )
    target = _target(frame[label], task_type, standardize=True)
    owner_e = _owners(frame, owner)
    if "test" in parts:
        # The frame has the training part first.
        test_e = np.arange(len(frame)) >= len(train[label])
    else:
        test_e = every_tenth(rows_by_key(owner_e), len(frame))
    dataset = _dataset(name, x, target, owner, owner_e, test_e)
    task = _task(
        name,
        dataset,
        softmax_regression,
        partition,
        column,
        clients,
        alpha,
        seed,
    )
    return replace(task, make_model=make_model or task.make_model)


def _task(
    name: str,
    dataset: Dataset,
    model: Callable[[int, int], Module],
    partition: str | None,
    column: str | None,
    clients: int | None,
    alpha: float,
    seed: int,
) -> Task:
    """The task: its clients, and model, loss and metric of its kind."""
    how = partition or "natural"
    # Round 0 of the stream has dealt the test rows.
    rng = stream(seed, "partition", round=1)
    client_rows = make_partition(how, dataset, clients, alpha, rng, column)
    # Linear models flatten pictures.
    in_features = int(np.prod(dataset.train_x.shape[1:]))
    task = Task(
        name=name,
        dataset=dataset,
        client_rows=client_rows,
        make_model=partial(model, in_features, dataset.num_classes),
        loss=cross_entropy,
        test_clients=clients_of_tests(how, dataset, column, client_rows),
    )
    if dataset.num_classes > 0:
        return task
    make_model = partial(one_output, model, in_features)
    return replace(task, make_model=make_model, loss=squared_error, metric="loss")


class Target(NamedTuple):
    """Classes 0, 1, ... and their number, or float32 targets and 0; ``unit``, how targets were
    scaled, follows the name of the data.
    """

    y: npt.NDArray[Any]
    num_classes: int
    unit: str = ""


def _dataset(
    name: str,
    x: npt.NDArray[Any],
    target: Target,
    owner: str | None,
    owner_e: IntArray,
    test_e: BoolArray,
) -> Dataset:
    """The examples, those of ``test_e`` for the test."""
    if not test_e.any():
        raise DeltaflError(
            f"{name}: no client has enough rows for a test set; call table_task with a larger "
            "test_share in a file of your own, or name a column of clients with more rows"
        )
    columns = {owner: owner_e} if owner is not None else {}
    whole = Dataset.whole(name + target.unit, x, target.y, target.num_classes, columns)
    return whole.split(~test_e, test_e)


def _owner_column(
    where: str, columns: Iterable[str], column: str | None, partition: str | None
) -> str | None:
    """The column that says who holds a row; None where a partition deals the rows."""
    dealt = find_partition(partition or "natural")
    if not dealt.uses_column:
        return None
    # Some partitions name their column.
    owner = dealt.column or column or OWNER
    if owner in list(columns):
        return owner
    if column is None and partition is None:
        raise DeltaflError(
            f"{where} has no column {OWNER!r} that says who holds a row: name another one (column, "
            "--column), or let a partition deal the rows (partition and clients, --partition iid "
            f"--clients 20); {_nearest(OWNER, columns)}"
        )
    raise _no_column(where, owner, columns)


def _no_column(
    where: str, name: str, columns: Iterable[str], setting: str = "column"
) -> DeltaflError:
    return DeltaflError(
        f"{where} has no column {name!r}: name another one with {setting} (--{setting}); "
        f"{_nearest(name, columns)}"
    )


def _nearest(name: str, columns: Iterable[str]) -> str:
    """The columns with the nearest names; tables of pictures have hundreds."""
    names = list(columns)
    nearest = ", ".join(get_close_matches(name, names, n=SHOWN, cutoff=0.0))
    return f"of its columns ({len(names)}) the nearest are {nearest}"


def _owners(frame: Frame, owner: str | None) -> IntArray:
    """The number of each row's owner; one owner of all rows if a partition deals them."""
    if owner is None:
        return np.zeros(len(frame), np.int64)
    return codes(frame[owner])[0]


def _target(values: Column, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted, of a column of labels."""
    where = f"{values.index[0][0]}: column {values.name!r}"
    if task_type not in (None, *get_args(TaskType)):
        raise DeltaflError(
            f"task_type is {task_type!r}; it must be {' or '.join(map(repr, get_args(TaskType)))}"
        )
    if (task_type or _task_type(where, values)) == "classification":
        y, num_classes = codes(values)
        if num_classes < 2:
            raise DeltaflError(f"{where} holds a single class; two are needed")
        return Target(y, num_classes)
    number = _numbers(values)
    mean = float(number.mean())
    scale = float(number.std())
    # Division by it would give NaN.
    if scale == 0:
        raise DeltaflError(f"{where} holds a single number; there is nothing to predict")
    if not standardize:
        return Target(number.astype(np.float32), 0)
    unit = f", {values.name!r} standardized by mean {mean:.4g} and standard deviation {scale:.4g}"
    return Target(((number - mean) / scale).astype(np.float32), 0, unit)


def _task_type(where: str, values: Column) -> TaskType:
    """What a label is, where that is clear: words and few whole numbers are classes."""
    number = _parsed(values)
    known = number.dropna().to_numpy(np.float64)
    has_words = len(known) < values.notna().sum()
    if has_words or values.dtype.name == "category":
        return "classification"
    is_whole = known % 1 == 0
    if number.nunique() <= MOST_CLASSES and is_whole.all():
        return "classification"
    # ``argmin`` of a mask: the first that is no whole number, or the first of all.
    raise DeltaflError(
        f"{where} holds {number.nunique()} different numbers such as {known[is_whole.argmin()]:g}: "
        "write task_type = regression (--task-type regression) to predict the number; up to "
        f"{MOST_CLASSES} whole numbers, or words, are classes, and more are with task_type = "
        "classification"
    )


def codes(values: Column) -> tuple[IntArray, int]:
    """Whole numbers (texts, too) or words as 0, 1, ... in sorted order; and how many different
    ones there are.
    """
    is_number = values.dtype.kind in "biuf"
    if is_number:
        good_e = values.to_numpy(np.float64, na_value=np.nan) % 1 == 0
    else:
        good_e = np.array(
            [isinstance(value, str | int) and str(value).strip() != "" for value in values]
        )
    _require_all(
        values,
        good_e,
        "a whole number or a word",
        "correct it, or drop the row",
    )
    if not is_number:
        values = values.astype(str).str.strip()
        # As numbers, so that 9 comes before 10. Python's, for ids exceed what float64 can tell
        # apart, and int64.
        if values.str.fullmatch(r"[+-]?\d+").all():
            values = values.map(int)
    code, names = values.factorize(sort=True)
    return code.astype(np.int64), len(names)


def _random_share(owner_e: IntArray, share: float, seed: int) -> BoolArray:
    """Whether a row is for the test: of each owner's so large a share, drawn, but never all."""
    test_e = np.zeros(len(owner_e), np.bool_)
    for owner, rows in enumerate(rows_by_key(owner_e)):
        # Half a row is rounded up; Python's round takes 2.5 to 2.
        size = min(int(share * len(rows) + 0.5), len(rows) - 1)
        test_e[stream(seed, "partition", client=owner).permutation(rows)[:size]] = True
    return test_e


def _numbers(values: Column) -> FloatArray:
    number: FloatArray = _parsed(values).to_numpy(np.float64, na_value=np.nan)
    _require_all(
        values,
        # NaN is not below it either.
        np.abs(number) <= LARGEST,
        "a real number in the range of float32",
        f"encode words first, as pandas.get_dummies(table, columns=[{values.name!r}]) does, or "
        "drop the column",
    )
    return number


def _parsed(values: Column) -> Column:
    """The values as numbers, with NaN for what is none."""
    import pandas as pd

    if values.dtype.kind not in "biuf":
        # As text, for pandas takes dates and complex numbers for numbers.
        values = values.astype(str)
    return pd.to_numeric(values, errors="coerce")


def _require_all(values: Column, good_e: BoolArray, needed: str, cure: str) -> None:
    """Refuse the first value that is not good; the index holds table and row."""
    known_e = values.notna().to_numpy()
    # Missing values first, which have a cure of their own.
    if not known_e.all():
        good_e = known_e
        cure = (
            "a missing value (in CSV files an empty cell, NA, None, null, ...): fill it in, or "
            "drop the row"
        )
    if good_e.all():
        return
    bad = int(good_e.argmin())
    source, row = values.index[bad]
    raise DeltaflError(
        f"{source}: row {row + 1}, column {values.name!r} holds {shown(values.tolist()[bad])}; it "
        f"must be {needed}; {cure}"
    )


def _stacked(name: str, column: str, values: list[Any]) -> npt.NDArray[Any]:
    """Pictures as uint8 (N, channels, height, width), or lists of numbers as float32 (N, k)."""
    # Numbers of a palette's colours are no brightness.
    good = not any(hasattr(value, "mode") and value.mode == "P" for value in values)
    try:
        x = np.stack(values)
        good = good and x.dtype.kind in "iufb" and x.ndim <= 4 and (np.abs(x) <= LARGEST).all()
    except ValueError:  # shapes differ
        good = False
    if not good:
        raise DeltaflError(
            f"{name}: column {column!r} needs pictures of one size and mode, or lists of numbers "
            f"of one length; data.cast_column({column!r}, datasets.Image(mode='RGB')) gives "
            "pictures one mode"
        )
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    if x.ndim == 3:
        # Grey pictures come without an axis of channels.
        x = x[..., np.newaxis]
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
