"""Your own examples as a task: a table file or a pandas data frame.

A table has one row an example: columns of numbers, a label or several, and the client that holds
the row unless a partition deals the rows. pandas reads it; files of text have a header, and in NPZ
files every array is a column (N,), or several (N, k).

``table_task`` brings inputs, a column of labels and one of owners, and says which rows are for the
test; what ``task_of`` makes of them is the same for data of other kinds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import NamedTuple, TypedDict, Unpack

import numpy as np

from ...errors import DeltaflError, is_in, printable
from ...model.parts import Patterns
from ...streams import stream
from ...types import Array, BoolArray, IntArray
from ..base import Task
from ..dataset import Dataset, crc32_of
from ..losses import MakeModel, Module, binary_cross_entropy, cross_entropy, squared_error
from ..models import one_output, softmax_regression, within_one_output
from ..partitions import AnyPartition, clients_of_tests, find_partition, make_partition, rows_by_key
from .columns import (
    Coded,
    Target,
    TaskType,
    codes,
    features_of,
    standardized,
    target_of,
    targets_of,
)
from .frames import Frame, read_frame, table_stem

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
            or a data frame of pandas, or what ``to_pandas()`` makes one of, as of polars and Arrow.
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
            ``"dirichlet(min_size=5)"``, a function (docs/how-to/own-partition.md) or a partitioner
            of ``flwr_datasets``; a column ``"client"`` is then left out.
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
    require_names(label=label, column=column, strata=strata)
    dealing = Dealing(partition, column, clients, alpha, seed, strata)
    labels = [label] if isinstance(label, str) else list(label)
    texts = {column or OWNER, *labels, *labels[0].split(","), *([strata] if strata else [])}
    name, frame = read_frame(table, sep, encoding, texts)
    if labels[0] not in frame:
        labels = [each for one in labels for each in one.split(",")]
        require_names(label=labels)
    for each in labels:
        if each not in frame:
            raise no_column(name, each, frame, "label (--label)")
    # Before the features, among which the right column of words would be refused.
    if strata is not None and strata not in frame:
        raise no_column(name, strata, frame, "strata (--strata)")
    owner = dealing.owner(name, frame)
    # Where a partition deals the rows, a column of clients is no feature either.
    features = frame.drop(columns=[*labels, owner or OWNER, strata], errors="ignore")
    require_different(labels, owner)
    if features.empty:
        raise DeltaflError(
            f"{name} needs one row and a column of numbers besides the label and the client"
        )
    owners = owners_of(frame, owner)
    if len(labels) == 1:
        target = target_of(frame[labels[0]], task_type, standardize)
    else:
        target = targets_of(frame[labels], task_type, standardize)
    x = features_of(features)
    # Before a seed has a say.
    examples_crc32 = crc32_of((x, target.y, owners.code))
    test_e = random_share(owners.code, test_share, seed)
    if standardize:
        x = standardized(x, test_e)
    x = x.astype(np.float32)
    examples = Examples(name, frame, x, target, labels[0], owner, owners, test_e)
    task = task_of(table_stem(name), examples, dealing, model)
    if target.num_classes == 0 and target.y.ndim == 1:
        # The names are those of the user's model, which the task's holds in a chain.
        sent = Sent(
            local=within_one_output(sent.get("local", ())),
            trainable=within_one_output(sent.get("trainable", ())),
        )
    return replace(task, dataset=replace(task.dataset, examples_crc32=examples_crc32), **sent)


class Examples(NamedTuple):
    """The rows of a table: what goes into a model, what comes out, who holds each, and whether it
    is for the test; ``label`` is the name of a column.
    """

    name: str
    frame: Frame
    x: Array
    target: Target
    label: str
    owner: str | None  #: the column of the owners; None where a partition deals the rows
    owners: Coded
    test_e: BoolArray


class Dealing(NamedTuple):
    """Who gets the rows, as users say it."""

    partition: AnyPartition | None
    column: str | None
    clients: int | None
    alpha: float
    seed: int
    strata: str | None

    @property
    def how(self) -> AnyPartition:
        """The partition; without one each client has the rows that are its own."""
        return "natural" if self.partition is None else self.partition

    def owner(self, where: str, columns: Iterable[str]) -> str | None:
        """The column that says who holds a row; None where a partition deals the rows."""
        dealt = find_partition(self.how)
        if not dealt.uses_column:
            return None
        # Some partitions name their column.
        owner = dealt.column or self.column or OWNER
        if owner in list(columns):
            return owner
        if self.column is None and self.partition is None:
            raise DeltaflError(
                f"{where} has no column {OWNER!r} that says who holds a row: name another one "
                "(column, --column), or let a partition deal the rows (partition and clients, "
                f"--partition iid --clients 20); {_nearest(OWNER, columns)}"
            )
        raise no_column(where, owner, columns)


def task_of(
    name: str,
    examples: Examples,
    dealing: Dealing,
    model: Callable[[int, int], Module],
) -> Task:
    """The task: its clients, and model, loss and metric of its kind."""
    if not callable(model):
        raise DeltaflError(
            f"model is {shown(model)}; it must be a function or a class, which "
            "model(in_features, outputs) makes the model with"
        )
    how = dealing.how
    column = dealing.column
    dataset = _dataset(examples)
    # Round 0 of the stream has dealt the test rows.
    rng = stream(dealing.seed, "partition", round=1)
    client_rows = make_partition(
        how,
        dataset,
        dealing.clients,
        dealing.alpha,
        rng,
        column,
        examples.label,
    )
    client_names: Sequence[str] = ()
    if find_partition(how).uses_column:
        owner_e = next(iter(dataset.columns.values()))
        client_names = [examples.owners.names[owner_e[rows[0]]] for rows in client_rows]
    # Linear models flatten pictures.
    in_features = int(np.prod(dataset.train_x.shape[1:]))
    # Of whole numbers they are classes at the places of an example.
    is_wide = dataset.train_y.ndim == 2 and dataset.train_y.dtype.kind == "f"
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
    task = Task(
        name=name,
        dataset=dataset,
        client_rows=client_rows,
        make_model=make,
        loss=loss,
        metric=metric,
        test_clients=clients_of_tests(how, dataset, column, client_rows),
        client_names=client_names,
    )
    return replace(task, client_strata=_strata(examples, dealing.strata, task))


def _dataset(examples: Examples) -> Dataset:
    name, _, x, target, _, owner, owners, test_e = examples
    if not test_e.any():
        raise DeltaflError(
            f"{name}: no client has enough rows for a test set; raise test_share (--test-share), "
            "or name a column of clients with more rows"
        )
    columns = {owner: owners.code} if owner is not None else {}
    whole = Dataset.whole(name + target.unit, x, target.y, target.num_classes, columns)
    return replace(whole.split(~test_e, test_e), class_names=target.names)


def _strata(examples: Examples, column: str | None, task: Task) -> Sequence[str]:
    """The stratum of each client, by its training rows; none without a column."""
    if column is None:
        return ()
    every = codes(examples.frame[column])
    code_e = every.code[~examples.test_e]
    found = [np.unique(code_e[np.asarray(rows)]) for rows in task.client_rows]
    for client, code_k in enumerate(found):
        if len(code_k) > 1:
            who = task.client_names[client] if task.client_names else client
            # A column of numbers has hundreds.
            some = [printable(every.names[code], limit=60) for code in code_k[:2]]
            names = " and ".join(map(repr, some))
            raise DeltaflError(
                f"{examples.name}: client {printable(str(who), limit=60)!r} has rows of {names} in "
                f"column {column!r}, {len(code_k)} names in all; a client is of one stratum"
            )
    return [every.names[code_k[0]] for code_k in found]


def require_names(**given: object) -> None:
    """Refuse what is no name of a column; a label may be several."""
    for setting, value in given.items():
        names = value if setting == "label" and isinstance(value, list | tuple) else [value]
        is_name = all(isinstance(each, str | None) for each in names)
        if not names or not is_name or len(set(names)) < len(names):
            raise DeltaflError(
                f"{setting} is {shown(value)}; it must be the name of a column, such as "
                f"{setting}='outcome'; several labels are a list of different names"
            )


def require_different(labels: Sequence[str], owner: str | None) -> None:
    """Refuse a column that is to be predicted and says who holds a row."""
    if owner in labels:
        raise DeltaflError(
            f"label and client are both the column {owner!r}; name another one with label "
            "(--label) or column (--column), or let a partition deal the rows"
        )


def require_text(name: object) -> None:
    """Refuse a name of data that is no text."""
    if not isinstance(name, str):
        raise DeltaflError(f"name is {shown(name)}; it must be a text, such as name='scans'")


def no_column(
    where: str,
    name: str,
    columns: Iterable[str],
    setting: str = "column (--column)",
) -> DeltaflError:
    """What to say where a column is named that is not there."""
    return DeltaflError(
        f"{where} has no column {name!r}: name another one with {setting}; "
        f"{_nearest(name, columns)}"
    )


def _nearest(name: str, columns: Iterable[str]) -> str:
    """The columns with the nearest names; tables of pictures have hundreds."""
    names = list(columns)
    # In quotes, for names may begin with a blank.
    nearest = ", ".join(map(repr, get_close_matches(name, names, n=SHOWN, cutoff=0.0)))
    return f"of its columns ({len(names)}) the nearest are {nearest}"


def owners_of(frame: Frame, owner: str | None) -> Coded:
    """The number of each row's owner; one owner of all rows if a partition deals them."""
    if owner is None:
        return Coded(np.zeros(len(frame), np.int64), ())
    every = codes(frame[owner])
    # A category that no row has is no client.
    found, code = np.unique(every.code, return_inverse=True)
    return Coded(code, [every.names[k] for k in found])


def random_share(owner_e: IntArray, share: float, seed: int) -> BoolArray:
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
