"""Making a task by name. The names and their default settings are in ``specs.py``. It imports no PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeltaflError, unknown_name
from ..streams import stream
from ..types import IntArray
from .base import Dataset, Task
from .datasets import load_dataset
from .models import cross_entropy
from .partition import PARTITIONS, make_partition, owners
from .skew import clients_of
from .specs import TASKS, TaskSpec
from .synthetic import make_synthetic_task
from .toy import make_toy_task

if TYPE_CHECKING:
    import torch

__all__ = ["TASKS", "TaskSpec", "make_task"]


def make_task(
    name: str,
    *,
    seed: int,
    num_clients: int | None = None,
    partition: str | None = None,
    alpha: float | None = None,
    data_dir: Path | None = None,
    column: str | None = None,
    shards_per_client: int = 2,
    make_model: "Callable[[], torch.nn.Module] | None" = None,
    truth: tuple[float, float] | None = None,
    nu: float | None = None,
) -> Task:
    """Make a task; what is None has the default of ``TASKS[name]``. One seed gives one task, bit for bit.

    Args:
        name: One of ``TASKS``.
        seed: Fixes the partition and generated data.
        num_clients: m. With partition ``natural`` or ``writer``, None means all owners.
        partition: One of ``partition.PARTITIONS``; not for ``toy`` and ``synthetic``, whose clients are their
            own.
        alpha: Concentration of a Dirichlet partition.
        data_dir: Folder to look for files in first.
        column: Column of owners, for ``natural``.
        shards_per_client: For ``shards``.
        make_model: Another model, such as ``functools.partial(models.mlp, 784, (200,), 10)``.
        truth: (A, b) of ``synthetic``, (8, 2) if None.
        nu: Gradient noise of ``synthetic``, 20 if None.

    Raises:
        DeltaflError: If a name is unknown, a setting is impossible or not for this task, or data are not
            found.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    spec = TASKS[name]
    if name != "synthetic" and (truth is not None or nu is not None):
        raise DeltaflError(f"truth and nu are settings of the task 'synthetic', not of {name!r}: leave them out")
    if spec.partition is None:
        given = {"partition": partition, "alpha": alpha, "column": column, "model": make_model}
        return _make_own(spec, seed, num_clients, given, truth or (8.0, 2.0), 20.0 if nu is None else nu)
    dataset = load_dataset(spec.dataset or name, data_dir)
    how = partition or spec.partition
    if how not in PARTITIONS:
        raise unknown_name("partition", how, PARTITIONS)
    if num_clients is None and not PARTITIONS[how].uses_column:
        num_clients = spec.num_clients
    rows = make_partition(
        how,
        dataset,
        num_clients,
        spec.alpha if alpha is None else alpha,
        stream(seed, "partition"),
        column,
        shards_per_client,
    )
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        make_model=make_model or spec.make_model,
        loss=cross_entropy,
        input_scale=spec.input_scale,
        augment=spec.augment,
        tokens=spec.tokens,
        test_clients=_test_clients(dataset, how, column, rows),
    )


def _test_clients(
    dataset: Dataset, partition: str, column: str | None, client_rows: Sequence[IntArray]
) -> IntArray | None:
    """The client of each test example, where clients are owners and the data set knows those of its test examples."""
    if not PARTITIONS[partition].uses_column:
        return None
    name, owner_e = owners(partition, dataset, column)
    if name not in dataset.test_columns:
        return None
    return clients_of(owner_e, client_rows, dataset.test_columns[name])


def _make_own(
    spec: TaskSpec,
    seed: int,
    num_clients: int | None,
    given: Mapping[str, object],
    truth: tuple[float, float],
    nu: float,
) -> Task:
    """A task whose clients and model are its own."""
    for setting, value in given.items():
        if value is not None:
            raise DeltaflError(f"{setting} is not a setting of the task {spec.name!r}: leave it out")
    if spec.name == "synthetic":
        return make_synthetic_task(seed, spec.num_clients if num_clients is None else num_clients, truth, nu)
    if num_clients not in {None, spec.num_clients}:
        raise DeltaflError(f"the toy has {spec.num_clients} clients, got num_clients = {num_clients}: leave it out")
    return make_toy_task()
