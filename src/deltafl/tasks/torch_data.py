"""PyTorch data sets as a task, such as those of torchvision: one for all clients, or one for each.

The items are read once and kept as the columns of one table, which then goes the way of a Hugging
Face data set.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Unpack

from ..errors import DeltaflError, explained
from ..streams import stream
from .base import Task
from .columns import TaskType
from .huggingface import from_huggingface, plain
from .losses import MakeModel
from .partitions import AnyPartition, find_partition
from .tables import OWNER, Sent


def from_torch(
    train: Any,
    test: Any = None,
    *,
    name: str = "dataset",
    make_model: MakeModel | None = None,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: AnyPartition | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    test_share: float | None = None,
    **sent: Unpack[Sent],
) -> Task:
    """Make a task of PyTorch data sets whose items are (input, label).

    Every item is read once, so that a random transform is drawn once, by ``seed``: give those of
    training to ``Task.augment``.

    Args:
        train: A data set whose rows a partition deals, or a list or dict with one for each client,
            by name; with a partition a list is one data set, of items. Inputs are tensors of one
            shape, which keep their axes, arrays or pictures of one size, or as many numbers each;
            labels are classes or targets, also several targets as a tensor.
        test: A data set, or one for each of these clients, too. Without it the test set is drawn as
            in ``from_huggingface``.
        name: The name of the data in reports.
        make_model: Makes the model; softmax or linear regression if None.
        seed: Fixes the partition, and what transforms draw.
        task_type: As in ``table_task``.
        partition: As in ``table_task``; not for one data set a client.
        clients: As in ``table_task``.
        alpha: As in ``table_task``.
        test_share: As in ``table_task``, a tenth if None; for data without a test set alone.
        sent: As in ``table_task``.

    Raises:
        DeltaflError: If an item cannot be read or used.

    Example: ``from_torch(train, test, partition="dirichlet", clients=100, make_model=Net)``
    """
    from .draws import seeded

    # A list of items, which a partition deals, is one data set.
    by_client = find_partition("natural" if partition is None else partition).uses_column
    if partition is None and not _is_one_each(train, by_client):
        raise DeltaflError(
            "nobody says who holds a row: write partition='iid' and clients=20, or give a list or "
            "dict of data sets, one for each client"
        )
    with seeded(stream(seed, "data")):
        parts = {"train": _Columns(f"{name}'s train part", train, by_client)}
        if test is not None:
            parts["test"] = _Columns(f"{name}'s test part", test, by_client)
    return from_huggingface(
        parts,
        inputs="input",
        name=name,
        make_model=make_model,
        seed=seed,
        task_type=task_type,
        partition=partition,
        clients=clients,
        alpha=alpha,
        test_share=test_share,
        **sent,
    )


def _is_one_each(data: Any, by_client: bool) -> bool:
    return isinstance(data, Mapping) or (by_client and isinstance(data, list | tuple))


class _Columns:
    """All items as columns, as a Hugging Face data set gives them."""

    def __init__(self, where: str, data: Any, by_client: bool) -> None:
        owned: Any = [(None, data)]
        if _is_one_each(data, by_client):
            owned = data.items() if isinstance(data, Mapping) else enumerate(data)
        self.columns: dict[str, list[Any]] = {"input": [], "label": [], OWNER: []}
        for owner, part in owned:
            held = where if owner is None else f"{where}, client {owner!r}"
            for value, label in _items(held, part):
                self.columns["input"].append(value)
                self.columns["label"].append(label)
                self.columns[OWNER].append(str(owner))
        self.column_names = list(self.columns)
        self.features = {}
        classes = getattr(data, "classes", None)
        labels = self.columns["label"]
        # A transform may have made other labels than those that the classes are of.
        if isinstance(classes, Sequence) and all(label in range(len(classes)) for label in labels):
            self.features = {"label": SimpleNamespace(names=list(map(str, classes)))}

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]


def _items(where: str, data: Any) -> Iterator[tuple[Any, Any]]:
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DeltaflError(
            f"{where} is of type {type(data).__name__}; it must be a data set with a length and "
            "numbered items, such as loader.dataset or list(iterable)"
        )
    if len(data) == 0:
        raise DeltaflError(f"{where} has no items; give it one at least, or leave it out")
    for row in range(len(data)):
        with explained(f"{where}: item {row} cannot be read"):
            item = data[row]
        is_list = isinstance(item, tuple | list)
        if not is_list or len(item) != 2:
            held = f"has {len(item)} parts" if is_list else f"is of type {type(item).__name__}"
            cure = ""
            if isinstance(data, list | tuple):
                cure = (
                    "; TensorDataset(x, y) makes a data set of two tensors, and a list of data "
                    "sets, one for each client, goes without a partition"
                )
            raise DeltaflError(f"{where}: item {row} {held}; it must be (input, label){cure}")
        with explained(f"{where}: the label of item {row} cannot be read"):
            label = plain(item[1])
        yield item[0], label
