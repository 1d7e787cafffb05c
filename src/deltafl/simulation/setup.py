"""From settings to what a run is made of: its task, its engine and its plan."""

import zlib
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import DeltaflError
from ..estimators.table import find_estimator
from ..plan import Plan, make_plan
from ..samplers.base import label_counts
from ..samplers.label import parse_label, uses_aux
from ..scale.named_arrays import named_arrays
from ..scale.rows import RowFormat
from ..store.files import read_bytes
from ..streams import stream
from ..tasks.base import Task, with_fewer_tests, with_public, with_validation
from ..tasks.checking.whole import check_task
from ..tasks.own import is_own, is_table
from ..tasks.registry import make_task
from ..types import Json, Population, is_ours
from .conditions import costs_of
from .engine import Engine
from .folder.behaviour import behaviour_of
from .parallel.workers import Workers
from .schedules import factors_of
from .settings import OF_SERVER, RunSettings
from .training.route import Computation, Route, kept_route
from .training.serial import LocalWork
from .twins import with_twins
from .world import World, tables_of

T = TypeVar("T")


def task_of(settings: RunSettings) -> Task:
    """The task of a run; one seed gives one split."""
    if is_own(settings.task):
        task = settings.own_task()
    else:
        # What is not named here has the task's own default.
        own: Json = {}
        if settings.partition is not None:
            own["alpha"] = settings.alpha
        if settings.data_dir:
            own["data_dir"] = Path(settings.data_dir)
        if settings.task == "synthetic":
            own |= {"truth": settings.truth, "nu": settings.noise}
        task = make_task(
            settings.task,
            seed=settings.seed,
            num_clients=settings.clients,
            partition=settings.partition,
            column=settings.column,
            **own,
        )
        if settings.metric is not None:
            task = replace(task, metric=settings.own_metrics())
            check_task(task, settings.task, settings.seed)
    # Public examples first: what is held out for validation is held by clients.
    if settings.public is not None:
        task = with_public(task, settings.public, settings.seed)
    count = settings.test_examples
    if settings.validation is not None:
        task = with_validation(task, settings.validation, settings.seed)
        if count is not None:  # it was meant for the test set, which may be larger
            count = min(count, len(task.dataset.test_x))
    if count is not None:
        rng = None
        # Classes may alternate in a user's own, so that evenly spaced examples have one class; of
        # the library's tasks the order is known.
        if is_own(settings.task):
            rng = stream(settings.seed, "data", round=1)
        task = with_fewer_tests(task, count, rng)
    return task


def engine_of(
    settings: RunSettings,
    workers: Workers | None = None,
    route: Route | None = None,
) -> Engine:
    """The engine that trains the clients of a run's task, in this process or in workers.

    ``route`` is how the run was trained before it was interrupted; chosen by the settings if left
    out.
    """
    return Engine(
        task_of(settings),
        work_of(settings),
        settings.seed,
        workers,
        Computation(settings.device, settings.precision),
        route,
        settings.weights,
    )


def population_of(settings: RunSettings, task: Task) -> Population:
    """The task's clients, and what a round of each costs in the mean over time."""
    population = task.population(settings.weights)
    costs = costs_of(settings.client_costs, population, task.client_names)
    if costs is None:
        return population
    return population._replace(cost_m=costs.mean_m())


def work_of(settings: RunSettings) -> LocalWork:
    """What every client does in a round."""
    return LocalWork(
        lr=filled_in(settings.local_lr),
        factors=factors_of(settings.lr_schedule, filled_in(settings.rounds)),
        epochs=settings.local_epochs,
        steps=settings.local_steps,
        batch_size=settings.batch_size,
        momentum=settings.local_momentum,
        proximal=settings.proximal,
        step_factor=prod(part.step_factor for part in settings.parts()),
        fixed_order=settings.fixed_order,
    )


def data_of(settings: RunSettings, task: Task) -> Json:
    """Data and model in a run's record: the task's data, in their checksum also the tables of its
    world, which are checked, and the behaviour of its model; of a table also the checksum of its
    examples alone, which no seed changes.
    """
    # Made only to read and check its tables.
    World(
        settings,
        population_of(settings, task),
        work_of(settings).num_steps,
        num_bytes=0,
        names=task.client_names,
    )
    checksum = int(task.data["data_crc32"], 16)
    for path in tables_of(settings):
        checksum = zlib.crc32(read_bytes(path, users=True), checksum)
    data: Json = {**task.data, "data_crc32": f"{checksum:08x}"}
    # A function of the user's may make another table of every seed.
    if is_table(settings.task):
        data["examples_crc32"] = task.dataset.examples_crc32
    return {**data, "model": behaviour_of(task, settings.seed)}


def plan_of(
    settings: RunSettings,
    population: Population,
    task: Task | None = None,
    folder: Path | None = None,
) -> Plan:
    """Population, sampler, estimator and server optimizer of a run; a ``DeltaflError`` if they do
    not fit together.

    Args:
        settings: Resolved settings.
        population: The task's clients.
        task: For samplers that look at labels; they take it for one of 10 classes if it is left
            out.
        folder: Where the memory of one update per client goes; RAM if it is left out.
    """
    label = parse_label(settings.sampler)
    rule = find_estimator(label.estimator)
    if task is not None:
        how = Computation(settings.device, settings.precision)
        make_engine = partial(Engine, how=how)
        rule = with_twins(rule, task, settings.seed, work_of(settings), make_engine)
    plan = make_plan(
        label._replace(settings={}),  # they are among those of the run
        population,
        min(
            ceil(settings.over_select * filled_in(settings.sample)),
            population.num_clients,
        ),
        settings.run_facts(
            population,
            None if task is None else task.dataset.num_classes,
        ),
        estimator=rule,
        seed=settings.seed,
        parts=settings.parts(),
        memory=RowFormat(
            settings.memory_dtype,
            None if folder is None else str(folder),
        ),
    )
    # Before anything is written. The seconds themselves are known once there is a world.
    clock = None if settings.speeds is None else np.ones(1)
    plan.sampler.check(population._replace(seconds_m=clock))
    if not is_ours(plan.sampler):
        # A checkpoint needs it.
        [*named_arrays(plan.sampler.init(population), "sampler")]
    elif plan.sampler.uses_labels and population.aux_mq is not None:
        # Its first state is made of them.
        label_counts(population)
    size = plan.sampler.output_bias_size
    if task is not None and size > 0:
        # Modules list their parameters by layer, the bias after the weight.
        shape = [*task.parts_of(task.make_model()).trained.values()][-1]
        if shape != (size,):
            raise DeltaflError(
                f"{settings.sampler} looks at the bias of an output layer of {size} classes, but "
                f"the last parameters of the model of {task.name!r} have shape {shape}; set "
                "'classes', or end the model in a linear layer with a bias"
            )
    if (
        population.aux_mq is None
        and plan.census is None
        and uses_aux(plan.sampler, label.estimator)
    ):
        raise DeltaflError(
            f"{settings.sampler} needs auxiliary variables, the clients' shares of labels, and "
            "this task has no labels; choose a task with classes, or a sampler without them, such "
            "as 'innovation'"
        )
    return plan


def filled_in(value: T | None) -> T:
    """A setting that ``resolve`` has filled in."""
    assert value is not None, "settings must be resolved before they are used"
    return value


# One alone, since an engine holds its task's examples.
@lru_cache(maxsize=1)
def _kept_engine(settings: RunSettings, route: Any) -> Any:
    return engine_of(settings, route=route)


def engine_for(settings: RunSettings, place: Path) -> Any:
    """The ``Engine`` of a run, made once in a process for all samplers; its route is that of an
    unfinished run's folder.
    """
    # Clients train the same whatever the sampler and the server do: such runs share an engine.
    plain = {name: RunSettings.model_fields[name].default for name in OF_SERVER}
    # Without a schedule clients do not train by how many rounds there will be.
    if settings.lr_schedule is None:
        plain["rounds"] = 1
    return _kept_engine(
        settings.model_copy(update={"sampler": "full", **plain}),
        kept_route(place, settings.device),
    )


def forget_engine() -> None:
    """Let the engine go that this process keeps."""
    _kept_engine.cache_clear()
