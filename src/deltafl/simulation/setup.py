"""From settings to what a run is made of: its task, its engine and its plan, and whether they
fit into memory.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import DeltaflError
from ..estimators.learned_coefficient import LearnedCoefficient
from ..estimators.table import Estimator, find_estimator
from ..estimators.twin import Simulate, Twin
from ..plan import Plan, make_plan
from ..samplers.label import make_sampler, parse_label, uses_aux
from ..scale.memory_budget import free_ram, human, memory_size, require_room
from ..scale.rows import RowFormat
from ..store.files import read_bytes
from ..streams import stream
from ..tasks.base import Task, with_fewer_tests, with_public, with_validation
from ..tasks.own import is_own
from ..tasks.registry import make_task
from ..types import FloatArray, IntArray, Params, Population
from .conditions import Measured, Trace, find_availability, find_speeds
from .engine import BYTES_PER_PARAMETER, Engine
from .settings import OF_SERVER, RunSettings
from .training.route import Computation, Route, kept_route
from .training.serial import LocalWork
from .workers import Workers
from .world import World

T = TypeVar("T")

#: How often the float32 updates of a cohort are in RAM at once, measured.
COPIES_OF_DRAWN = 7
COPIES_OF_CERTAIN = 5
#: The same of the answers to a census.
COPIES_OF_ANSWERS = 5
#: A twin takes this share of the client's steps, each on so many examples. Larger minibatches are
#: better than more steps, for a twin's noise is not its client's (on digits and FashionMNIST).
TWIN_STEPS = 0.5
TWIN_BATCH = 64


def task_of(settings: RunSettings) -> Task:
    """The task of a run; one seed gives one split."""
    if is_own(settings.task):
        task = settings.own_task()
    else:
        # What is not named here has the task's own default.
        own: dict[str, Any] = {}
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
    if settings.public is not None:
        task = with_public(task, settings.public, settings.seed)
    count = settings.test_examples
    if settings.validation is not None:
        task = with_validation(task, settings.validation, settings.seed)
        if count is not None:  # it was meant for the test set, which may be larger
            count = min(count, len(task.dataset.test_x))
    if count is not None:
        task = with_fewer_tests(task, count)
    return task


def engine_of(
    settings: RunSettings, workers: Workers | None = None, route: Route | None = None
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
        computation_of(settings),
        route,
    )


def work_of(settings: RunSettings) -> LocalWork:
    """What every client does in a round."""
    return LocalWork(
        lr=filled_in(settings.local_lr),
        epochs=settings.local_epochs,
        steps=settings.local_steps,
        batch_size=settings.batch_size,
        momentum=settings.local_momentum,
        proximal=settings.proximal,
        step_factor=prod(part.step_factor for part in settings.parts()),
        fixed_order=settings.fixed_order,
    )


def data_of(settings: RunSettings, task: Task) -> dict[str, str]:
    """The data in a run's record: the task's, in their checksum also the tables of its world,
    which are checked.
    """
    World(settings, task.population(settings.weights), work_of(settings).num_steps, num_bytes=0)
    checksum = int(task.data["data_crc32"], 16)
    for part in (find_availability(settings.availability), find_speeds(settings.speeds)):
        if isinstance(part, Trace | Measured):
            checksum = zlib.crc32(read_bytes(Path(part.path), users=True), checksum)
    return task.data | {"data_crc32": f"{checksum:08x}"}


def computation_of(settings: RunSettings) -> Computation:
    """How a run is to be computed."""
    return Computation(settings.device, settings.precision)


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
    name = settings.sampler
    label = parse_label(settings.sampler)
    rule = find_estimator(label.estimator)
    if task is not None:
        rule = _with_twins(rule, task, settings)
    plan = make_plan(
        label._replace(settings={}),  # they are among those of the run
        population,
        min(ceil(settings.over_select * filled_in(settings.sample)), population.num_clients),
        settings.run_facts(population, None if task is None else task.dataset.num_classes),
        estimator=rule,
        seed=settings.seed,
        parts=settings.parts(),
        memory=RowFormat(settings.memory_dtype, None if folder is None else str(folder)),
    )
    size = plan.sampler.output_bias_size
    if task is not None and size > 0:
        shape = tuple(list(task.make_model().parameters())[-1].shape)
        if shape != (size,):
            raise DeltaflError(
                f"{name} looks at the bias of an output layer of {size} classes, but the last "
                "parameters of the model "
                f"of {task.name!r} have shape {shape}; set 'classes', or end the model in a linear "
                "layer with a bias"
            )
    if (
        population.aux_mq is None
        and plan.census is None
        and uses_aux(plan.sampler, label.estimator)
    ):
        raise DeltaflError(
            f"{name} needs auxiliary variables, the clients' shares of labels, and this task has "
            "no labels; choose a "
            "task with classes, or a sampler without them, such as 'innovation'"
        )
    return plan


def _with_twins(rule: Estimator, task: Task, settings: RunSettings) -> Estimator:
    """The estimator ``twin`` with the simulation of a task's clients; others as they are."""
    control = rule.control
    if not (isinstance(control, LearnedCoefficient) and isinstance(control.control, Twin)):
        return rule
    if not task.public_rows:
        raise DeltaflError(
            "twins are trained on public examples and this run has none; set 'public', such as 10"
        )
    simulate = twin_simulation(task, work_of(settings), settings.seed, computation_of(settings))
    twin = replace(control.control, simulate=simulate)
    return rule._replace(control=replace(control, control=twin))


def twin_simulation(task: Task, work: LocalWork, seed: int, how: Computation) -> Simulate:
    """Trains a stand-in for each client of a task on public examples in the shares of the client's
    labels.

    They are the clients of a second task, trained by an engine of their own in one process, with
    the task's local work but for ``TWIN_STEPS`` and ``TWIN_BATCH``, augmentation and gradient
    noise.
    """

    @cache
    def engine() -> Engine:
        rows = [
            stand_in_rows(
                share_c,
                TWIN_BATCH * max(1, round(TWIN_STEPS * work.num_steps(len(own)))),
                task.public_rows,
            )
            for share_c, own in zip(task.label_shares(), task.client_rows, strict=True)
        ]
        stand_ins = replace(task, client_rows=rows, augment=None, gradient_noise_m=None)
        own_seed = int(
            stream(seed, "public", 1).integers(2**31)
        )  # minibatches independent of the clients' own
        return Engine(
            stand_ins, replace(work, epochs=1, steps=None, batch_size=TWIN_BATCH), own_seed, how=how
        )

    def simulate(params_d: Params, population: Population, round: int) -> Params:
        return engine().train(params_d, round, np.arange(population.num_clients)).update_nd

    return simulate


def stand_in_rows(share_c: FloatArray, size: int, public_rows: Sequence[IntArray]) -> IntArray:
    """``size`` public rows in the shares of the classes, up to one example of each; rows repeat
    if need be.
    """
    label_e = np.searchsorted(np.cumsum(share_c) / share_c.sum(), (np.arange(size) + 0.5) / size)
    count_c = np.bincount(label_e, minlength=len(share_c))
    return np.concatenate(
        [np.resize(rows, count) for rows, count in zip(public_rows, count_c, strict=True)]
    )


def check_memory(
    settings: RunSettings, engine: Engine, out: Path | None, divided: bool = False
) -> None:
    """Refuse rounds and memories that do not fit into RAM, or on the disk of ``out``; None where
    nothing is written.

    ``divided``: several processes share a round.
    """
    m = engine.task.num_clients
    label = parse_label(settings.sampler)
    ram = free_ram()
    if divided:  # no process has the whole round
        ram = None
    sample = filled_in(settings.sample)
    selected = sample
    cure = "lower 'sample'"
    if label.name == "full":
        selected = m
        cure = "choose a sampler that selects fewer, such as 'uniform'"
    copies = COPIES_OF_DRAWN
    if selected == m:
        copies = COPIES_OF_CERTAIN
    model = engine.num_params * BYTES_PER_PARAMETER
    needs = [("a round", selected, copies * selected * model, cure)]
    control = find_estimator(label.estimator).control
    census = make_sampler(label).census
    if census is not None:
        cure = f"write '{label.name}@@regression-damped', which asks for 129 numbers"
        length = census.for_control(control).length(engine.num_params)
        needs.append(("a census", m, COPIES_OF_ANSWERS * m * length * 8, cure))
    for what, clients, needed, instead in needs:
        if ram is not None and needed > ram:
            raise DeltaflError(
                f"{what} of {clients:,} clients with {engine.num_params:,} parameters takes about "
                f"{human(needed)} of "
                f"RAM and {human(ram)} are free: {instead}, or take a smaller model"
            )
    if control.remembers:
        rows = RowFormat(settings.memory_dtype, settings.memory_path)
        size = memory_size(rows, (m, engine.num_params), sample * settings.checkpoint_every)
        if out is not None:
            disk = (
                f", checkpoints included, and {human(size.disk)} in {rows.folder or out}"
                if size.disk
                else ""
            )
            numbers = (
                f"{m:,} x {engine.num_params:,} numbers ({rows.dtype}): at most "
                f"{human(size.ram)} of RAM{disk}"
            )
            logging.getLogger("deltafl").info(
                f"{settings.sampler} remembers one update per client, {numbers}"
            )
        require_room(size, rows, out)


def filled_in(value: T | None) -> T:
    """A setting that ``resolve`` has filled in."""
    assert value is not None, "settings must be resolved before they are used"
    return value


def require_same_sampler(before: RunSettings, now: RunSettings, task: Task) -> None:
    """Refuse more rounds for a sampler whose options depend on how many there are."""
    population = task.population(now.weights)
    if plan_of(before, population, task).sampler != plan_of(now, population, task).sampler:
        raise DeltaflError(
            f"the options of {now.sampler} depend on the number of rounds, and it began with "
            f"{before.rounds}: to play {now.rounds}, choose another --out"
        )


@lru_cache(maxsize=1)
def _kept_engine(settings: RunSettings, route: Any) -> Any:
    return engine_of(settings, route=route)


def engine_for(settings: RunSettings, place: Path) -> Any:
    """The ``Engine`` of a run, made once in a process for all samplers; its route is that of an
    unfinished run's folder.
    """
    plain = {name: RunSettings.model_fields[name].default for name in OF_SERVER}
    return _kept_engine(settings.model_copy(update={"sampler": "full", **plain}), kept_route(place))


def forget_engine() -> None:
    """Let the engine go that this process keeps."""
    _kept_engine.cache_clear()
