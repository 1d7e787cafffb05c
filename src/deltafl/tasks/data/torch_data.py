"""PyTorch data sets as a task, such as those of torchvision: one for all clients, or one for each.

The items are read once and kept as the columns of one table, which then goes the way of a Hugging
Face data set.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Unpack

from ...errors import DeltaflError, explained, require_no_twins
from ...streams import stream
from ..base import Task
from ..losses import MakeModel
from ..partitions import AnyPartition, find_partition
from .columns import TaskType
from .huggingface import Pieces, from_huggingface, plain
from .tables import OWNER, Sent, require_text


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
            labels are classes or targets, also several targets or labels of 0 and 1 as a tensor, or
            a tensor or picture of whole numbers, a class at each place; where a data set has
            ``classes``, as those of torchvision, labels of all are matched by these names.
        test: A data set, or one for each of these clients, too. Without it the test set is drawn as
            in ``from_huggingface``.
        name: The name of the data in reports.
        make_model: Makes the model, which predicts targets of regression as they are; softmax or
            linear regression if None, for which targets are standardized.
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
    from ..draws import seeded

    require_text(name)
    # A list of items, which a partition deals, is one data set.
    by_client = find_partition("natural" if partition is None else partition).uses_column
    if by_client and _one_each(train, by_client) is None:
        raise DeltaflError(
            "nobody says who holds a row: write partition='iid' and clients=20, or give a list or "
            "dict of data sets, one for each client"
        )
    given = {"train": train} if test is None else {"train": train, "test": test}
    each = {part: _one_each(data, by_client) for part, data in given.items()}
    for part, held in each.items():
        require_no_twins(f"{name}'s {part} part: the dict of clients", held or ())
        if held is not None and not by_client:
            raise DeltaflError(
                f"{name}'s {part} part has a data set for each client, and a partition deals the "
                "rows of one: leave out the partition, or give torch.utils.data.ConcatDataset("
                "[*data.values()])"
            )
    clients_named = [client for held in each.values() for client in held or ()]
    # Longer than the name of any client.
    nobody = "nobody " + max(map(str, clients_named), key=len, default="")
    parts = {}
    with seeded(stream(seed, "data")):
        for part, data in given.items():
            where = f"{name}'s {part} part"
            held = each[part]
            if held is None:
                parts[part] = Pieces({where: _Columns(where, data, nobody)})
                continue
            if not held:
                raise DeltaflError(f"{where} has no data set; give it one for each client")
            parts[part] = Pieces()
            for client, own in held.items():
                whose = f"{where}, client {client!r}"
                parts[part][whose] = _Columns(whose, own, str(client))
    _leave_out_alike([piece for pieces in parts.values() for piece in pieces.values()])
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


def _one_each(data: Any, by_client: bool) -> Mapping[Any, Any] | None:
    """The data set of each client, by its name; None for one of all."""
    if isinstance(data, Mapping):
        return data
    if by_client and isinstance(data, list | tuple):
        return dict(enumerate(data))
    return None


def _leave_out_alike(pieces: Sequence["_Columns"]) -> None:
    """Leave out names of classes that only data sets have of which all are subsets, where all have
    the same: there is nothing to match, and a subset need not have all classes.
    """
    different = {tuple(piece.classes) for piece in pieces}
    if len(different) == 1 and all(piece.is_subset for piece in pieces):
        for piece in pieces:
            piece.features = {}


class _Columns:
    """All items as columns, as a Hugging Face data set gives them."""

    def __init__(self, where: str, data: Any, owner: str) -> None:
        items = list(_items(where, data))
        labels = [label for _, label in items]
        self.columns = {
            "input": [value for value, _ in items],
            "label": labels,
            OWNER: [owner] * len(items),
        }
        self.column_names = list(self.columns)
        self.features = {}
        with explained(f"{where}: the names of its classes cannot be read"):
            self.is_subset, self.classes = _classes(data)
        # A transform may have made other labels than those that the classes are of.
        known = range(len(self.classes))
        if all(isinstance(label, int) and label in known for label in labels):
            self.features = {"label": SimpleNamespace(names=self.classes)}

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]


def _classes(data: Any) -> tuple[bool, Sequence[Any]]:
    """The names of the classes, as torchvision has them; whether they are those of what it is a
    subset of.
    """
    from torch.utils.data import Subset

    is_subset = False
    while isinstance(data, Subset) and not hasattr(data, "classes"):
        data = data.dataset
        is_subset = True
    classes = getattr(data, "classes", ())
    return is_subset, classes if isinstance(classes, list | tuple) else ()


def _items(where: str, data: Any) -> Iterator[tuple[Any, Any]]:
    needed = (
        f"{where} is of type {type(data).__name__}; it must be a data set with a length and "
        "numbered items, such as loader.dataset or list(iterable)"
    )
    # That of a chain of iterable ones has a method, which raises.
    with explained(needed):
        size = len(data)
    if not hasattr(data, "__getitem__"):
        raise DeltaflError(needed)
    if size == 0:
        raise DeltaflError(f"{where} has no items; give it one at least, or leave it out")
    for row in range(size):
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
