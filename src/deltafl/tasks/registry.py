"""Tasks by name: the default settings of an experiment, and the function that reads or makes the
data.

A module of your own adds tasks with ``register``. ``import_tasks("my_tasks")``, or
``DELTAFL_TASKS=my_tasks`` in the environment, imports it in this process and in those that it
starts.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from ..errors import DeltaflError, entry, explained
from ..model.parts import Patterns
from ..streams import stream
from .base import Augment, Task
from .data.images import load_cifar10, load_digits, load_idx
from .data.leaf import load_celeba, load_femnist, load_shakespeare
from .dataset import Dataset
from .losses import MakeModel, cross_entropy
from .metrics import AnyMetric
from .models import (
    celeba_cnn,
    crop_and_flip,
    femnist_cnn,
    next_token_lstm,
    resnet,
    softmax_regression,
    two_layer_cnn,
)
from .partitions import AnyPartition, clients_of_tests, find_partition, make_partition
from .synthetic import make_log_model, make_quadratic_model, make_synthetic_task, make_toy_task

#: Modules whose import registers tasks, comma separated.
MODULES_VARIABLE = "DELTAFL_TASKS"

#: What ``make_task`` lets one choose where a task's data are read, and dealt to clients.
OF_DATA = {"num_clients", "partition", "alpha", "column", "make_model"}


@dataclass(frozen=True)
class TaskSpec:
    """A task's name, its default settings, and how its data are read or made.

    Attributes:
        name: The name on the command line.
        num_clients: Population m.
        sample_size: Clients selected a round, n.
        local_lr: Local learning rate.
        make_model: Makes the model; can be pickled.
        summary: One line for ``deltafl tasks``.
        needs: Packages, ``"files"`` that ``deltafl data fetch`` downloads, ``"archive"`` for files
            that you bring.
        rounds: Communication rounds T.
        local_epochs: Passes over the client's data, or None if ``local_steps`` is set.
        local_steps: Minibatch steps, or None if ``local_epochs`` is set.
        batch_size: Examples a minibatch; None for all.
        load: ``load(data_dir)`` reads a data set of classes, learnt by cross-entropy; None if
            ``make`` makes the whole task.
        make: ``make(seed=..., num_clients=..., ...)`` makes a task that has its own clients; None
            if ``load`` is set.
        partition: Who holds what; None where the clients belong to the task.
        alpha: Concentration of a Dirichlet partition.
        threshold: Value of the metric that a comparison counts the rounds to; None where there is
            no customary one.
        all_owners: Whether the clients are all owners in the user's files; ``num_clients`` is then
            an example.
        has_classes: Whether the clients' shares of labels are known.

    ``metric``, ``input_scale``, ``augment``, ``tokens`` and ``trainable`` are those of the
    ``Task``.
    """

    name: str
    num_clients: int
    sample_size: int
    local_lr: float
    make_model: MakeModel
    summary: str = ""
    needs: tuple[str, ...] = ("torch",)
    rounds: int = 500
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = 32
    load: Callable[[Path | None], Dataset] | None = None
    make: Callable[..., Task] | None = None
    partition: str | None = None
    alpha: float = 0.5
    metric: AnyMetric = "accuracy"
    has_classes: bool = True
    threshold: float | None = None
    input_scale: float = 1 / 255
    augment: Augment | None = None
    all_owners: bool = False
    tokens: bool = False
    trainable: Patterns = ()


_TASKS: dict[str, TaskSpec] = {}
#: What ``import_tasks`` was given.
_MODULES: list[str] = []


def register(spec: TaskSpec) -> None:
    """Add a task; a task of the same name is replaced."""
    if (spec.load is None) == (spec.make is None):
        raise DeltaflError(f"the task {spec.name!r} needs load or make, and not both")
    _TASKS[spec.name] = spec


def import_tasks(module: str) -> None:
    """Import a module that registers tasks when a task is first looked for, here and in
    processes for simulations.
    """
    if module not in _MODULES:
        _MODULES.append(module)


def task_modules() -> list[str]:
    """The modules that register tasks: those of ``DELTAFL_TASKS``, then those of
    ``import_tasks``.
    """
    named = [name.strip() for name in os.environ.get(MODULES_VARIABLE, "").split(",")]
    return [name for name in dict.fromkeys([*named, *_MODULES]) if name]


def added_tasks() -> dict[str, TaskSpec]:
    """The tasks that were registered in addition to those of this package."""
    # By identity: a task that took the place of one of the library's was added, too.
    return {name: spec for name, spec in _TASKS.items() if _LIBRARY.get(name) is not spec}


def known_tasks() -> dict[str, TaskSpec]:
    """All tasks by name: those of this package, then those of ``task_modules``."""
    for module in task_modules():
        # Python imports a module once, so that asking again costs nothing.
        who = f"the module {module!r}, named in {MODULES_VARIABLE} or import_tasks"
        with explained(f"{who}, cannot be imported"):
            importlib.import_module(module)
    return dict(_TASKS)


def find_task(name: str) -> TaskSpec:
    """The task of this name."""
    return entry("task", name, known_tasks())


def make_task(
    name: str,
    *,
    seed: int,
    num_clients: int | None = None,
    partition: AnyPartition | None = None,
    alpha: float | None = None,
    data_dir: Path | None = None,
    column: str | None = None,
    make_model: MakeModel | None = None,
    truth: tuple[float, float] | None = None,
    nu: float | None = None,
    local: Patterns = (),
    trainable: Patterns = (),
) -> Task:
    """Make a task; what is None has the default of the task. One seed gives one task, bit for bit.

    Args:
        name: One of ``known_tasks()``.
        seed: Fixes the partition and generated data.
        num_clients: m. With partition ``natural`` or ``writer``, None means all owners.
        partition: One of ``PARTITIONS``; not for ``toy`` and ``synthetic``, which have their own
            clients.
        alpha: Concentration of a Dirichlet partition.
        data_dir: Folder to look for files in first.
        column: Column of owners, for ``natural``.
        make_model: Another model, such as ``functools.partial(mlp, 784, (200,), 10)``.
        truth: (A, b) of ``synthetic``, (8, 2) if None.
        nu: Gradient noise of ``synthetic``, 20 if None.
        local: Name patterns of the model's arrays that stay with each client, see ``Task``.
        trainable: Name patterns of the only arrays that are trained, see ``Task``; those of the
            task if empty.

    Raises:
        DeltaflError: If a name is unknown, a setting is impossible or not for this task, or data
            are not found.
    """
    spec = find_task(name)
    options: dict[str, Any] = {"num_clients": num_clients, "truth": truth, "nu": nu}
    options |= {
        "partition": partition,
        "alpha": alpha,
        "column": column,
        "make_model": make_model,
    }
    given = {option: value for option, value in options.items() if value is not None}
    taken = OF_DATA
    if spec.make is not None:
        taken = set(signature(spec.make).parameters)
    for option in given:
        if option not in taken:
            raise DeltaflError(f"{option} is not a setting of the task {name!r}: leave it out")
    trainable = trainable or spec.trainable
    if spec.make is not None:
        task = spec.make(seed=seed, **given)
        # It may name arrays itself.
        return replace(task, local=local or task.local, trainable=trainable or task.trainable)
    assert spec.load is not None, "register checks it"
    dataset = spec.load(data_dir)
    how: AnyPartition = spec.partition or "iid"
    if partition is not None:
        how = partition
    # Partitions by a column take all owners that there are.
    if num_clients is None and not find_partition(how).knows_clients:
        num_clients = spec.num_clients
    if alpha is None:
        alpha = spec.alpha
    rows = make_partition(
        how,
        dataset,
        num_clients,
        alpha,
        stream(seed, "partition"),
        column,
    )
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        make_model=make_model or spec.make_model,
        loss=cross_entropy,
        metric=spec.metric,
        input_scale=spec.input_scale,
        augment=spec.augment,
        tokens=spec.tokens,
        test_clients=clients_of_tests(how, dataset, column, rows),
        local=local,
        trainable=trainable,
    )


# Clients, selected clients and local learning rate follow the name; LEAF's tasks have as many
# clients as its scripts choose with --sf 0.05, and select 20 % of the writers and the celebrities.
_toy = partial(TaskSpec, local_steps=1, batch_size=None, metric="loss", has_classes=False)
_files = partial(TaskSpec, needs=("torch", "files"))
_leaf = partial(
    TaskSpec,
    needs=("torch", "archive"),
    partition="natural",
    all_owners=True,
)
_fashion = _files(
    *("fashion-mnist", 300, 20, 0.01, two_layer_cnn),
    summary="28 x 28 images of clothes",
    load=partial(load_idx, "fashion-mnist"),
    local_epochs=5,
    partition="hsu2019",
    alpha=0.1,
    threshold=0.70,
)
for _spec in (
    _toy(
        *("toy", 3, 2, 0.05, make_quadratic_model),
        summary="three quadratics in two variables, from the point (1, 1)",
        make=make_toy_task,
        rounds=50,
        threshold=1.18,
    ),
    _toy(
        *("synthetic", 20, 10, 0.001, make_log_model),
        summary=(
            "y = log((A x - b)^2 / 2) learnt from clients whose gradients are "
            "noisy in different degrees"
        ),
        make=make_synthetic_task,
        rounds=2000,
        threshold=2.0,
    ),
    TaskSpec(
        *("digits", 100, 10, 0.8, partial(softmax_regression, 64, 10)),
        summary="8 x 8 images of digits inside scikit-learn, nothing to download",
        needs=("torch", "scikit-learn"),
        load=load_digits,
        rounds=40,
        local_epochs=5,
        batch_size=5,
        partition="hsu2019",
        alpha=0.1,
        threshold=0.85,
        input_scale=1 / 16,
    ),
    _files(
        *("mnist", 200, 10, 0.01, partial(softmax_regression, 784, 10)),
        summary="28 x 28 images of digits",
        load=partial(load_idx, "mnist"),
        local_steps=5,
        partition="shards",
        threshold=0.875,  # measured with 4 seeds: fedavg needs 229 rounds (214 to 240)
    ),
    _fashion,
    replace(
        _fashion,
        name="split-fashion-mnist",
        summary="28 x 28 images of clothes, one kind a client: 9 clients with 6000, 100 with 60",
        num_clients=109,
        sample_size=10,
        partition="split",
        alpha=0.5,
    ),
    _leaf(
        *("femnist", 177, 35, 0.1, femnist_cnn),
        summary=(
            "FEMNIST, 28 x 28 images of digits and letters, 62 classes, by writer; LEAF's JSON"
        ),
        load=load_femnist,
        local_epochs=1,
        threshold=0.70,
    ),
    replace(
        _fashion,
        name="cifar10",
        summary="CIFAR-10, 32 x 32 in colour, cropped and flipped at random in local training",
        load=load_cifar10,
        make_model=resnet,
        alpha=0.5,
        threshold=0.54,
        augment=crop_and_flip,
    ),
    _leaf(
        *("celeba", 467, 93, 0.1, celeba_cnn),
        summary=(
            "CelebA, 84 x 84 faces, smiling or not, by celebrity; LEAF's JSON with img_align_celeba"
        ),
        needs=("torch", "pillow", "archive"),
        load=load_celeba,
        local_epochs=1,
        threshold=0.85,
    ),
    _leaf(
        *("shakespeare", 135, 10, 1.0, partial(next_token_lstm, 80)),
        summary="Shakespeare, the next character after 80, by role; LEAF's JSON",
        load=load_shakespeare,
        local_steps=20,
        threshold=0.40,
        tokens=True,
    ),
):
    register(_spec)
_LIBRARY = dict(_TASKS)
