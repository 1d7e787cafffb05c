"""Your own examples as a task: a table file, a pandas data frame, or a Hugging Face ``datasets``
object.

A table has one row an example: columns of numbers, a label or several, and the client that holds
the row unless a partition deals the rows. pandas reads it; files of text have a header, and in NPZ
files every array is a column (N,), or several (N, k). The package ``datasets`` is not imported:
whatever has ``column_names`` and ``features``, and gives a column by its name, will do.

Both functions bring inputs, a column of labels and one of owners, and say which rows are for the
test; what follows is the same for both.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, get_args

import numpy as np

from ..errors import DeltaflError, explained, is_in, printable, require, unknown_name
from ..model_parts import Patterns
from ..streams import stream
from ..types import Array, BoolArray, FloatArray, IntArray
from .base import Dataset, Task
from .frames import Frame, read_frame, table_stem
from .losses import MakeModel, Module, binary_cross_entropy, cross_entropy, squared_error
from .models import one_output, softmax_regression
from .partitions import (
    AnyPartition,
    clients_of_tests,
    every_tenth,
    find_partition,
    make_partition,
    rows_by_key,
)

#: A ``pandas.Series``.
Column: TypeAlias = Any

#: Products of larger numbers do not fit into float32; measurements are smaller, stand-ins for
#: missing ones often larger.
LARGEST = 1e18

TaskType = Literal["classification", "regression"]

#: A label of more different numbers than this may be a class or a target: ``task_type`` has to say
#: which.
MOST_CLASSES = 20

#: Of pictures: red, green, blue and how opaque they are.
_MOST_CHANNELS = 4

#: The column that says who holds a row, unless another one is named.
OWNER = "client"

#: The share of the rows in the test set.
TEST_SHARE = 0.1

#: An error names at most this many columns.
SHOWN = 10


class Sent(TypedDict, total=False):
    """Which arrays of the model are sent, as in ``Task``."""

    local: Patterns
    trainable: Patterns


def table_task(
    table: str | Path | Frame,
    label: str | Sequence[str] = "label",
    column: str | None = None,
    *,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: AnyPartition | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    model: Callable[[int, int], Module] = softmax_regression,
    test_share: float = TEST_SHARE,
    standardize: bool = True,
    sep: str | None = None,
    encoding: str | None = None,
    strata: str | None = None,
    **sent: Unpack[Sent],
) -> Task:
    """Make a task of a table: classification by cross-entropy, or regression by the squared error.

    Of a client's n rows, test_share n are in the test set, drawn by ``stream(seed, "partition")``;
    the others are its own. Where this is no whole number it is rounded at random, so that small
    clients are tested, too, and test_share of all rows are. A client always keeps one row, so that
    one with a single row is fine. Where a partition deals the rows, round(test_share N) of all N
    are in the test set.

    Args:
        table: A file (``.csv``, ``.tsv`` or ``.txt``, also with ``.gz``; ``.npz``; ``.parquet``),
            or a data frame.
        label: Column of the class, which becomes 0, 1, ...: whole numbers and words in sorted
            order, a ``pandas.Categorical`` in its own; or of the target. Several columns of 0 and
            1, as a list or ``"y1,y2"``, are a task of several labels, by binary cross-entropy; of
            other numbers a regression of several targets.
        column: Column of the client that holds the row, likewise; ``"client"`` if there is no
            partition either. Texts stay texts: "7" and "07" are two clients.
        seed: Fixes the test set and the partition.
        task_type: Whether the label is a class or a number to predict. If None, words and up to 20
            different whole numbers are classes, and any other label is an error that asks for it.
        partition: One of ``PARTITIONS``, which deals the rows, such as ``"iid"`` or
            ``"dirichlet(min_size=5)"``, or a partitioner of ``flwr_datasets``; a column
            ``"client"`` is then left out.
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
        sep: What separates the columns of a file of text: one character, ``"tab"`` or ``"space"``;
            a comma in ``.csv``, else a tab, if None.
        encoding: Of a file of text, such as ``"latin-1"``; UTF-8 if None.
        strata: Column of the client's region, hospital chain or the like, one name a client; no
            feature (docs/how-to/strata.md).
        sent: ``local`` and ``trainable``, the name patterns of the model's arrays that stay with
            each client, and of the only ones that are trained, see ``Task``.

    Returns:
        A task with float32 features in the order of the table.

    Raises:
        DeltaflError: If the table cannot be read or used; a row is counted from 1, without the
            header.
        MissingExtraError: Without pandas; for Parquet without pyarrow.

    Example: ``table_task(frame, "species", partition="dirichlet", alpha=0.3, clients=20)``
    """
    _require_names(label=label, column=column, strata=strata)
    labels = [label] if isinstance(label, str) else list(label)
    texts = {column or OWNER, *labels, *labels[0].split(","), *([strata] if strata else [])}
    name, frame = read_frame(table, sep, encoding, texts)
    if labels[0] not in frame:
        labels = [each for one in labels for each in one.split(",")]
    for each in labels:
        if each not in frame:
            raise _no_column(name, each, frame, "label")
    # Before the features, among which the right column of words would be refused.
    if strata is not None and strata not in frame:
        raise _no_column(name, strata, frame, "strata")
    owner = _owner_column(name, frame, column, partition)
    # Where a partition deals the rows, a column of clients is no feature either.
    features = frame.drop(columns=[*labels, owner or OWNER, strata], errors="ignore")
    if owner in labels or features.empty:
        raise DeltaflError(
            f"{name} needs one row and a column of numbers besides the label and the client"
        )
    owners = _owners(frame, owner)
    if len(labels) == 1:
        target = _target(frame[labels[0]], task_type, standardize)
    else:
        target = _targets(frame[labels], task_type, standardize)
    x = _features(features)
    test_e = _random_share(owners.code, test_share, seed)
    if standardize:
        # Test rows say nothing about the scale: a model is judged on rows that it has not seen.
        train = x[~test_e]
        deviation = train.std(axis=0)
        # Of equal numbers the deviation is not always 0, for their mean is rounded; of the smallest
        # that there are it may be, for squares are rounded, too.
        varies = (train.min(axis=0) < train.max(axis=0)) & (deviation > 0)
        x = (x - train.mean(axis=0)) / np.where(varies, deviation, 1.0)
    dataset = _dataset(name, x.astype(np.float32), target, owner, owners.code, test_e)
    dealing = Dealing(partition, column, clients, alpha, seed, labels[0])
    task = _task(table_stem(name), dataset, model, owners, dealing)
    return replace(task, client_strata=_strata(name, frame, strata, ~test_e, task), **sent)


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
    partition: AnyPartition | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    test_share: float | None = None,
    strata: str | None = None,
    **sent: Unpack[Sent],
) -> Task:
    """Make a task of a Hugging Face ``Dataset`` or ``DatasetDict``.

    Args:
        data: A ``DatasetDict`` with ``train`` and ``test``, or one with ``train`` alone, or a
            ``Dataset``. Without a test set it is drawn as in ``table_task``; with a partition the
            5th, 15th, 25th, ... row is for the test, unless ``test_share`` is given.
        label: Column of the class or the target, as in ``table_task``; a ``ClassLabel`` keeps the
            order of its classes.
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
        test_share: As in ``table_task``; for data without a test set.
        strata: As in ``table_task``.
        sent: As in ``table_task``.

    Raises:
        DeltaflError: If a column is missing or cannot be used.

    Example: ``from_huggingface(data, label="label", inputs="image", partition="iid", clients=100)``
    """
    require("pandas", "sim")
    import pandas as pd

    _require_names(label=label, column=column, inputs=inputs, strata=strata)
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
    others = [each for each in train.column_names if each not in {label, owner or OWNER, strata}]
    if inputs is None and len(others) != 1:
        raise DeltaflError(
            f"{name} has {', '.join(others) or 'no column'} beside label and client: name the "
            "inputs by from_huggingface(data, inputs='image', ...); for several columns of numbers "
            "make a task of its data frame: table_task(data.to_pandas(), ...)"
        )
    inputs = inputs or others[0]
    keys = [key for key in (label, owner, strata) if key is not None]
    for where, part in used.items():
        for key in (*keys, inputs):
            if key not in part.column_names:
                raise _no_column(where, key, part.column_names)
    # Together, so that both parts number classes and owners alike.
    frame = pd.concat(
        [
            pd.DataFrame({key: [*map(_plain, _cells(where, part, key))] for key in keys})
            for where, part in used.items()
        ],
        keys=used,
    )
    values = [value for where, part in used.items() for value in _cells(where, part, inputs)]
    x = _stacked(frame, inputs, values, (train.features or {}).get(inputs))
    for key in keys:
        feature: Any = (train.features or {}).get(key)
        if hasattr(feature, "names"):  # a ClassLabel
            _require_all(
                frame[key],
                (frame[key] != -1).to_numpy(),
                "a class",
                "-1 is an example without one: drop the row",
            )
            frame[key] = pd.Categorical.from_codes(frame[key].astype(int), feature.names)
    target = _target(frame[label], task_type, standardize=True)
    owners = _owners(frame, owner)
    if "test" in parts:
        # The frame has the training part first.
        test_e = frame.index.get_level_values(0) != next(iter(used))
    elif owner is None and test_share is None:
        test_e = every_tenth(rows_by_key(owners.code), len(frame))
    else:
        test_e = _random_share(owners.code, test_share or TEST_SHARE, seed)
    dataset = _dataset(name, x, target, owner, owners.code, test_e)
    dealing = Dealing(partition, column, clients, alpha, seed, label)
    task = _task(name, dataset, softmax_regression, owners, dealing)
    return replace(
        task,
        make_model=make_model or task.make_model,
        client_strata=_strata(name, frame, strata, ~test_e, task),
        **sent,
    )


class Coded(NamedTuple):
    """A column of classes or owners as 0, 1, ..., and the names of these."""

    code: IntArray
    names: Sequence[str]


class Dealing(NamedTuple):
    """Who gets the rows, as users say it; ``label`` is the column's name."""

    partition: AnyPartition | None
    column: str | None
    clients: int | None
    alpha: float
    seed: int
    label: str


def _task(
    name: str,
    dataset: Dataset,
    model: Callable[[int, int], Module],
    owners: Coded,
    dealing: Dealing,
) -> Task:
    """The task: its clients, and model, loss and metric of its kind."""
    if not callable(model):
        raise DeltaflError(
            f"model is {shown(model)}; it must be a function or a class, which "
            "model(in_features, outputs) makes the model with"
        )
    how = "natural" if dealing.partition is None else dealing.partition
    column = dealing.column
    # Round 0 of the stream has dealt the test rows.
    rng = stream(dealing.seed, "partition", round=1)
    client_rows = make_partition(
        how,
        dataset,
        dealing.clients,
        dealing.alpha,
        rng,
        column,
        dealing.label,
    )
    client_names: Sequence[str] = ()
    if find_partition(how).uses_column:
        owner_e = next(iter(dataset.columns.values()))
        client_names = [owners.names[owner_e[rows[0]]] for rows in client_rows]
    # Linear models flatten pictures.
    in_features = int(np.prod(dataset.train_x.shape[1:]))
    is_wide = dataset.train_y.ndim == 2
    make: MakeModel = partial(one_output, model, in_features)
    loss = squared_error
    metric = "loss"
    if is_wide or dataset.num_classes > 0:
        outputs = dataset.train_y.shape[1] if is_wide else dataset.num_classes
        make = partial(model, in_features, outputs)
    if dataset.num_classes > 0:
        loss = cross_entropy
        metric = "accuracy"
        if is_wide:
            loss = binary_cross_entropy
            # All labels of an example are seldom right together.
            metric = "f1_macro"
    return Task(
        name=name,
        dataset=dataset,
        client_rows=client_rows,
        make_model=make,
        loss=loss,
        metric=metric,
        test_clients=clients_of_tests(how, dataset, column, client_rows),
        client_names=client_names,
    )


def _strata(
    name: str,
    frame: Frame,
    column: str | None,
    train_e: BoolArray,
    task: Task,
) -> Sequence[str]:
    """The stratum of each client, by its training rows; none without a column."""
    if column is None:
        return ()
    every = codes(frame[column])
    code_e = every.code[train_e]
    found = [np.unique(code_e[np.asarray(rows)]) for rows in task.client_rows]
    for client, code_k in enumerate(found):
        if len(code_k) > 1:
            who = task.client_names[client] if task.client_names else client
            names = " and ".join(repr(printable(every.names[code], limit=60)) for code in code_k)
            raise DeltaflError(
                f"{name}: client {printable(str(who), limit=60)!r} has rows of {names} in column "
                f"{column!r}; a client is of one stratum"
            )
    return [every.names[code_k[0]] for code_k in found]


class Target(NamedTuple):
    """Classes 0, 1, ... or labels (N, labels) and their number, or float32 targets and 0; ``unit``,
    how targets were scaled, follows the name of the data.
    """

    y: Array
    num_classes: int
    unit: str = ""
    names: Sequence[str] = ()


def _dataset(
    name: str,
    x: Array,
    target: Target,
    owner: str | None,
    owner_e: IntArray,
    test_e: BoolArray,
) -> Dataset:
    """The examples, those of ``test_e`` for the test."""
    if not test_e.any():
        raise DeltaflError(
            f"{name}: no client has enough rows for a test set; raise test_share (--test-share), "
            "or name a column of clients with more rows"
        )
    columns = {owner: owner_e} if owner is not None else {}
    whole = Dataset.whole(name + target.unit, x, target.y, target.num_classes, columns)
    return replace(whole.split(~test_e, test_e), class_names=target.names)


def _require_names(**given: object) -> None:
    """Refuse what is no name of a column; a label may be several."""
    for setting, value in given.items():
        names = value if setting == "label" and isinstance(value, list | tuple) else [value]
        is_name = all(isinstance(each, str | None) for each in names)
        if not names or not is_name or len(set(names)) < len(names):
            raise DeltaflError(
                f"{setting} is {shown(value)}; it must be the name of a column, such as "
                f"{setting}='outcome'; several labels are a list of different names"
            )


def _owner_column(
    where: str,
    columns: Iterable[str],
    column: str | None,
    partition: AnyPartition | None,
) -> str | None:
    """The column that says who holds a row; None where a partition deals the rows."""
    dealt = find_partition("natural" if partition is None else partition)
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
    where: str,
    name: str,
    columns: Iterable[str],
    setting: str = "column",
) -> DeltaflError:
    return DeltaflError(
        f"{where} has no column {name!r}: name another one with {setting} (--{setting}); "
        f"{_nearest(name, columns)}"
    )


def _nearest(name: str, columns: Iterable[str]) -> str:
    """The columns with the nearest names; tables of pictures have hundreds."""
    names = list(columns)
    # In quotes, for names may begin with a blank.
    nearest = ", ".join(map(repr, get_close_matches(name, names, n=SHOWN, cutoff=0.0)))
    return f"of its columns ({len(names)}) the nearest are {nearest}"


def _owners(frame: Frame, owner: str | None) -> Coded:
    """The number of each row's owner; one owner of all rows if a partition deals them."""
    if owner is None:
        return Coded(np.zeros(len(frame), np.int64), ())
    every = codes(frame[owner])
    # A category that no row has is no client.
    found, code = np.unique(every.code, return_inverse=True)
    return Coded(code, [every.names[k] for k in found])


def _target(values: Column, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted, of a column of labels."""
    where = f"{values.index[0][0]}: column {values.name!r}"
    if task_type not in (None, *get_args(TaskType)):
        raise DeltaflError(
            f"task_type is {task_type!r}; it must be {' or '.join(map(repr, get_args(TaskType)))}"
        )
    if (task_type or _task_type(where, values)) == "classification":
        y, names = codes(values)
        if y.min() == y.max():
            raise DeltaflError(f"{where} holds a single class; two are needed")
        return Target(y, len(names), names=names)
    number = _numbers(values)
    scale = float(number.std())
    # Division by the deviation would give NaN.
    if number.min() == number.max() or scale == 0:
        raise DeltaflError(f"{where} holds a single number; there is nothing to predict")
    if not standardize:
        return Target(number.astype(np.float32), 0)
    mean = float(number.mean())
    name = printable(repr(values.name), limit=60)
    unit = f", {name} standardized by mean {mean:.4g} and standard deviation {scale:.4g}"
    return Target(((number - mean) / scale).astype(np.float32), 0, unit)


def _targets(frame: Frame, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted, of several columns: labels of 0 and 1, or numbers."""
    y = np.column_stack([_numbers(frame[name]) for name in frame])
    names = list(frame)
    if task_type != "regression":
        is_label = np.isin(y, (0, 1)).all(axis=0)
        if not is_label.all():
            raise DeltaflError(
                f"{frame.index[0][0]}: column {names[is_label.argmin()]!r} holds other numbers "
                "than 0 and 1; several labels are 0 or 1 each, as pandas.get_dummies makes them; "
                "for several numbers to predict write task_type = regression (--task-type "
                "regression)"
            )
        return Target(y.astype(np.float32), len(names), names=names)
    each = [_target(frame[name], task_type, standardize) for name in frame]
    unit = "".join(one.unit for one in each)
    return Target(np.stack([one.y for one in each], axis=1), 0, unit)


def _task_type(where: str, values: Column) -> TaskType:
    """What a label is, where that is clear: words and few whole numbers are classes."""
    number = _parsed(values)
    known = number.dropna().to_numpy(np.float64)
    has_words = len(known) < values.notna().sum()
    if values.dtype.name == "category":
        return "classification"
    if has_words:
        words = values.dropna().astype(str).str.strip()
        # Else each date or price would become a class.
        if words.str.fullmatch(f"{_DATE}|{_PUNCTUATED}|[\\d.]+", flags=re.ASCII).all():
            _numbers(values)
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


def codes(values: Column) -> Coded:
    """Whole numbers, or words, as 0, 1, ... in sorted order; categories in their own, also those
    that no row has.

    Texts stay as they are but for blanks around them: "7", "07" and "+7" are three.
    """
    if values.dtype.name == "category":
        _require_all(values, values.notna().to_numpy(), "a category", "")
        names = [str(x) for x in values.cat.categories]
        _require_no_twins(values, [name for name in names if names.count(name) > 1])
        return Coded(values.cat.codes.to_numpy(np.int64), names)
    is_number = values.dtype.kind in "biuf"
    if is_number:
        number_e = values.to_numpy(np.float64, na_value=np.nan)
        good_e = number_e == np.trunc(number_e)
    else:
        is_text_e = np.array([isinstance(value, str) for value in values])
        good_e = np.array([isinstance(value, str | int) for value in values])
        words = values.astype(str).str.strip()
        good_e &= (words != "").to_numpy()
    _require_all(
        values,
        good_e,
        "a whole number or a word",
        "correct it (astype(str) makes words of dates; of one-hot labels take the place of the 1), "
        "or drop the row",
    )
    if values.dtype.kind == "f":
        largest = 2 / np.finfo(f"f{values.dtype.itemsize}").eps
        needed = f"at most {largest:.0f}, for of larger floating-point numbers some are missing"
        cure = "read the column as whole numbers or as text"
        _require_all(values, np.abs(number_e) <= largest, needed, cure)
    if is_number:
        code, numbers = values.factorize(sort=True)
        kind = bool if values.dtype.kind == "b" else int
        return Coded(code.astype(np.int64), [str(kind(number)) for number in numbers])
    _require_no_twins(values, sorted({*words[is_text_e]} & {*words[~is_text_e]}))
    code, different = words.factorize()
    names = different.tolist()
    order = sorted(range(len(names)), key=names.__getitem__)
    # As numbers, so that 9 comes before 10, and exactly, for ids exceed what float64 tells apart.
    if all(_PLAIN.fullmatch(name) for name in names):
        order.sort(key=lambda k: Decimal(names[k]))
    return Coded(np.argsort(order)[code].astype(np.int64), [names[k] for k in order])


def _require_no_twins(values: Column, words: Sequence[str]) -> None:
    """Refuse numbers and texts that are written alike, of which nobody knows whether they are
    one.
    """
    if words:
        raise DeltaflError(
            f"{values.index[0][0]}: column {values.name!r} holds the number {words[0]} and the "
            f"text {words[0]!r}: make all of them texts, as astype(str) does, or write them "
            "differently"
        )


#: A number as text, not larger than ids are.
_PLAIN = re.compile(r"[+-]?\d{1,100}(\.\d{1,100})?", re.ASCII)


def _random_share(owner_e: IntArray, share: float, seed: int) -> BoolArray:
    """Whether a row is for the test: of each owner's so large a share, drawn, but never all.

    An owner gives ``share`` of its rows in the mean, rounded down or up, and all of them together
    this share to the next row.
    """
    if not is_in(share, "(0, 1)"):
        raise DeltaflError(f"test_share is {share!r}; it must be between 0 and 1, such as 0.1")
    owned = rows_by_key(owner_e)
    rows_o = np.array([len(rows) for rows in owned])
    mean_o = np.minimum(share * rows_o, rows_o - 1)
    rng = stream(seed, "partition", client=len(owned))
    order = rng.permutation(len(owned))
    total_o = np.cumsum(mean_o[order])
    # Of a single owner the nearest number; of small tables one row at least, also where the sum is
    # rounded down.
    start = max(rng.random(), 1 - total_o[-1] + 1e-9) if len(owned) > 1 else 0.5
    upto_o = np.floor(total_o + start).astype(np.int64)
    size_o = np.empty_like(rows_o)
    size_o[order] = np.diff(upto_o, prepend=0)
    test_e = np.zeros(len(owner_e), np.bool_)
    for owner in np.flatnonzero(size_o):
        rows = stream(seed, "partition", client=int(owner)).permutation(owned[owner])
        test_e[rows[: min(size_o[owner], len(rows) - 1)]] = True
    return test_e


def _features(frame: Frame) -> FloatArray:
    """The columns as numbers, float64 (N, k)."""
    if all(kind.kind in "biuf" for kind in frame.dtypes):
        # Of ten thousand columns at once; in this order, for bits of means depend on it.
        x: FloatArray = np.ascontiguousarray(frame.to_numpy(np.float64, na_value=np.nan))
        if (np.abs(x) <= LARGEST).all():
            return x
    return np.column_stack([_numbers(frame[name]) for name in frame])


_DATE = r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?"
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE_IN_WORDS = rf"\d{{4}}-\d{{2}}|(\d{{1,4}}\W*)?{_MONTH}\W*\d{{1,4}}(\W.*)?"
#: Between thousands, or before decimals; blanks that do not break a line are among them.
_MARK = "[,'\u2019 \u00a0\u202f]"
_PUNCTUATED = rf"[+-]?\d[\d.]*{_MARK}(\d|\.|{_MARK})*|[+-]?\d+(\.\d{{3}}){{2,}}"
#: What a cell that is no usable number looks like, and the cure.
_CURES = {
    r"[+-]?inf(inity)?": "replace infinity by a number, or drop the row",
    r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?": "divide the column or take its logarithm; if the "
    "number stands for a missing value, fill that in or drop the row",
    rf"{_DATE}|{_DATE_IN_WORDS}": "make dates numbers of days, as "
    "(pandas.to_datetime(table[{name!r}]) - pandas.Timestamp('2000-01-01')).dt.days does, or drop "
    "the column",
    r"-?\d+ days?.*|\d{1,3}:\d\d(:\d\d(\.\d+)?)?": "make times numbers of seconds, as "
    "pandas.to_timedelta(table[{name!r}].astype(str)).dt.total_seconds() does for hh:mm:ss, or "
    "drop the column",
    r"[<>~\u2264\u2265]=?\s*[\d.,]+": "write a number for a limit, such as half of it, or drop the "
    "column",
    _PUNCTUATED: "leave out separators of thousands and write a decimal point: give the data frame "
    "that pandas.read_csv(file, decimal=',', thousands='.') reads",
    r"\W+|n\.?/?a\.?|unknown|missing": "if it stands for a missing value, fill that in or drop the "
    "row",
    r"\[.*\]|\(.*,.*\)": "an example has one number there: make a column of each, and of one-hot "
    "labels one of the places of the 1",
    r"[$€£]\s*[\d.,]+|[\d.,]+\s*[%€$£°]\w*": "leave out the unit, as "
    "table[{name!r}].str.strip('$€£%°C ').astype(float) does",
    r".*": "encode words first, as pandas.get_dummies(table, columns=[{name!r}]) does, or drop the "
    "column",
}


def _numbers(values: Column) -> FloatArray:
    number: FloatArray = _parsed(values).to_numpy(np.float64, na_value=np.nan)
    good_e = np.abs(number) <= LARGEST
    if not good_e.all():
        cell = str(values.iloc[int(good_e.argmin())]).strip()
        cure = next(
            cure
            for form, cure in _CURES.items()
            if re.fullmatch(form, cell, re.IGNORECASE | re.DOTALL)
        )
        needed = f"a number between {-LARGEST:g} and {LARGEST:g}"
        _require_all(values, good_e, needed, cure.format(name=values.name))
    return number


def _parsed(values: Column) -> Column:
    """The values as numbers, with NaN for what is none."""
    import pandas as pd

    if values.dtype.kind not in "biuf":
        # As text, for pandas takes dates and complex numbers for numbers.
        values = values.astype(str).str.strip().replace({"True": "1", "False": "0"})
    return pd.to_numeric(values, errors="coerce")


def _require_all(values: Column, good_e: BoolArray, needed: str, cure: str) -> None:
    """Refuse the first value that is not good; the index holds table and row."""
    known_e = values.notna().to_numpy()
    # Missing values first, which have a cure of their own.
    if not known_e.all():
        good_e = known_e
        cure = (
            "a missing value (in CSV files an empty cell, NA, None, null, ...): fill it in, drop "
            "the row, or, where such a word is meant, write another one"
        )
    if good_e.all():
        return
    bad = int(good_e.argmin())
    source, row = values.index[bad]
    raise DeltaflError(
        f"{source}: row {row + 1}, column {values.name!r} holds {shown(values.tolist()[bad])}; it "
        f"must be {needed}; {cure}"
    )


def _cells(where: str, part: Any, column: str) -> Sequence[Any]:
    """A column of a data set, whose cells are decoded, and transformed, as they are read."""
    with explained(f"{where}: the column {column!r} cannot be read"):
        return [*part[column]]


def _plain(cell: Any) -> Any:
    """A label or an owner, which in a format of PyTorch or NumPy is an array of its own."""
    return cell.tolist() if hasattr(cell, "tolist") else cell


def _stacked(frame: Frame, column: str, values: Sequence[Any], feature: Any) -> Array:
    """Pictures as uint8 (N, channels, height, width), or lists of numbers as float32 (N, k)."""
    parts: list[Array] = []
    for (source, row), value in zip(frame.index, values, strict=True):
        try:
            part = np.asarray(value)
        except ValueError:  # lists of different lengths
            part = np.array(None)
        held = shown(value)
        good = part.dtype.kind in "iufb" and part.ndim <= 3 and (np.abs(part) <= LARGEST).all()
        if hasattr(value, "mode"):
            held = f"a picture of mode {value.mode}"
            # Numbers of a palette's colours are no brightness.
            good = good and value.mode != "P"
        if good and parts and part.shape != parts[0].shape:
            held = f"numbers of shape {part.shape}, and the first row has shape {parts[0].shape}"
            good = False
        if not good:
            raise DeltaflError(
                f"{source}: row {row + 1}, column {column!r} holds {held}; it must be pictures of "
                f"one size and mode, as data.cast_column({column!r}, datasets.Image(mode='RGB')) "
                f"gives them, or numbers up to {LARGEST:g}, as many in each row"
            )
        parts.append(part)
    if not parts:
        raise DeltaflError(f"column {column!r} has no rows; give it one for each example")
    x = np.stack(parts)
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    if x.ndim == 3:
        # Grey pictures come without an axis of channels.
        x = x[..., np.newaxis]
    # Pixels of an Array2D or Array3D come as lists, and only their column knows that they are.
    is_pixel = x.dtype == np.uint8 or (hasattr(feature, "dtype") and feature.dtype == "uint8")
    x = x.astype(np.uint8 if is_pixel else np.float32)
    _, first, _, last = x.shape
    # Pictures have their channels last, tensors first: the shorter axis, if that is clear.
    if last <= _MOST_CHANNELS or last <= first:
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)
