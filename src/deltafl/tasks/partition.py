"""Who holds which example: the table of partitions, and the one entry that reads it.

============= ================================================== ========= ================================
name          clients differ in                                  sizes     source
============= ================================================== ========= ================================
iid           nothing                                            equal     -
hsu2019       labels: the mix of client i is Dir(alpha * prior)  equal     Hsu et al. 2019, arXiv:1909.06335
yurochkin2019 labels, sizes: class k is cut by Dir(alpha * 1_m)  unequal   Yurochkin et al. 2019, ICML
shards        labels: a few of them a client                     equal     McMahan et al. 2017, AISTATS
split         labels, sizes: 10 % of the clients own 90 %        two       DELTA, NeurIPS 2023
quantity      sizes: 10 % of the clients own 90 %                two       -
natural       whatever the owners differ in                      as found  a column of the data set
writer        handwriting                                        as found  the column ``writer``
============= ================================================== ========= ================================

What holds for all of them: no example belongs to two clients and no client is empty. Every example belongs to
somebody, but for the N mod m examples that ``hsu2019`` leaves out to keep its clients equal, and for owners
that are not chosen when ``natural`` is asked for fewer clients than there are owners. A client's rows are
sorted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..types import IntArray
from .base import Dataset
from .skew import hsu2019, iid, natural, quantity, shards, split, yurochkin2019

__all__ = [
    "PARTITIONS",
    "Partition",
    "Request",
    "hsu2019",
    "iid",
    "make_partition",
    "natural",
    "quantity",
    "shards",
    "split",
    "yurochkin2019",
]


class Request(NamedTuple):
    """What ``make_partition`` was asked for; a partition reads the part it needs."""

    label_e: IntArray
    owner_e: IntArray
    num_clients: int
    alpha: float
    shards_per_client: int


@dataclass(frozen=True)
class Partition:
    """One row of ``PARTITIONS``.

    Attributes:
        summary: One line for people.
        make: Calls the partition's function with its part of the request.
        uses_alpha: Whether ``alpha`` matters.
        uses_labels: Whether it needs class labels.
        uses_column: Whether it needs a column of owners.
        column: The only column that it goes by; None for any.
    """

    summary: str
    make: Callable[[Request, np.random.Generator], list[IntArray]]
    uses_alpha: bool = False
    uses_labels: bool = False
    uses_column: bool = False
    column: str | None = None


PARTITIONS: dict[str, Partition] = {
    "iid": Partition(
        "examples dealt at random, equal sizes",
        lambda ask, rng: iid(ask.label_e, ask.num_clients, rng),
    ),
    "hsu2019": Partition(
        "labels of a client ~ Dir(alpha * prior), alpha the total concentration; equal sizes",
        lambda ask, rng: hsu2019(ask.label_e, ask.num_clients, ask.alpha, rng),
        uses_alpha=True,
        uses_labels=True,
    ),
    "yurochkin2019": Partition(
        "each label cut over the clients by Dir(alpha * 1); unequal sizes",
        lambda ask, rng: yurochkin2019(ask.label_e, ask.num_clients, ask.alpha, rng),
        uses_alpha=True,
        uses_labels=True,
    ),
    "shards": Partition(
        "sorted by label, cut into equal shards, a few dealt to each client",
        lambda ask, rng: shards(ask.label_e, ask.num_clients, ask.shards_per_client, rng),
        uses_labels=True,
    ),
    "split": Partition(
        "one label a client; one label is cut into many small clients: 10 % own 90 %",
        lambda ask, rng: split(ask.label_e, ask.num_clients, rng),
        uses_labels=True,
    ),
    "quantity": Partition(
        "labels at random; 10 % of the clients own 90 % of the data",
        lambda ask, rng: quantity(ask.label_e, ask.num_clients, rng),
    ),
    "natural": Partition(
        "one client for each owner in a column of the data set",
        lambda ask, rng: natural(ask.owner_e, ask.num_clients, rng),
        uses_column=True,
    ),
    "writer": Partition(
        "one client for each writer: mnist with mnist_writers.npz, unipen62, femnist",
        lambda ask, rng: natural(ask.owner_e, ask.num_clients, rng),
        uses_column=True,
        column="writer",
    ),
}


def make_partition(
    name: str,
    dataset: Dataset,
    num_clients: int | None,
    alpha: float,
    rng: np.random.Generator,
    column: str | None = None,
    shards_per_client: int = 2,
) -> list[IntArray]:
    """Deal a data set's training examples to clients.

    Args:
        name: One of ``PARTITIONS``.
        dataset: The examples.
        num_clients: m; None means all owners and is for ``natural`` and ``writer`` alone.
        alpha: Concentration, for the Dirichlet partitions.
        rng: Source of randomness, usually ``stream(seed, "partition")``.
        column: The column of owners, for ``natural``; needed only if the data set has several.
        shards_per_client: For ``shards``.

    Returns:
        The rows of each client: m arrays int64, sorted, disjoint, none empty.

    Raises:
        DeltaflError: If the name is unknown, the data set lacks labels or the column, or the numbers are
            impossible.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    partition = PARTITIONS[name]
    if partition.uses_labels and dataset.num_classes == 0:
        raise DeltaflError(
            f"partition {name!r} needs class labels, {dataset.name} has none: choose 'iid' or 'quantity'"
        )
    owner_e = owners(name, dataset, column)[1] if partition.uses_column else np.arange(0)
    if num_clients is None:
        if not partition.uses_column:
            raise DeltaflError(f"partition {name!r} needs a number of clients; only 'natural' knows its own")
        num_clients = len(np.unique(owner_e))
    ask = Request(dataset.train_y, owner_e, num_clients, alpha, shards_per_client)
    return partition.make(ask, rng)


def owners(name: str, dataset: Dataset, column: str | None) -> tuple[str, IntArray]:
    """The column of owners that ``natural`` or ``writer`` goes by: its name, and the owners of the training examples.

    Raises:
        DeltaflError: If the data set has no such column, or several and none is named.
    """
    only = PARTITIONS[name].column
    if only is not None:
        if column not in {None, only}:
            raise DeltaflError(f"partition {name!r} goes by the column {only!r}, not {column!r}: leave the column out")
        if only not in dataset.columns:
            cure = ": it needs the file mnist_writers.npz in the folder data_dir or DELTAFL_DATA"
            known = cure if dataset.name.startswith("mnist") else "; choose another one"
            raise DeltaflError(f"partition {name!r} needs a {only} for each example, which {dataset.name} lacks{known}")
        return only, dataset.columns[only]
    if not dataset.columns:
        raise DeltaflError(f"partition 'natural' needs a column of owners, {dataset.name} has none: choose another one")
    if column is None:
        if len(dataset.columns) > 1:
            raise DeltaflError(
                f"{dataset.name} has several columns of owners: give one of {', '.join(dataset.columns)}"
            )
        return next(iter(dataset.columns.items()))
    if column not in dataset.columns:
        raise unknown_name("column", column, dataset.columns)
    return column, dataset.columns[column]
