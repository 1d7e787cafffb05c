"""What is checked before a run or a comparison is played; nothing is written before that."""

from pathlib import Path

import numpy as np

from ..errors import DeltaflError, counted, log
from ..estimators.table import find_estimator
from ..samplers.label import make_sampler, parse_label, split_settings
from ..scale.memory_budget import memory_size, require_room
from ..scale.rows import RowFormat
from ..server.first_round import FirstRound
from ..server.size import Budget
from ..store.room import free_ram, human
from ..tasks.base import Task
from ..tasks.checking.models import has_gradient
from ..types import Json
from .engine import BYTES_PER_PARAMETER, Engine
from .folder.directory import RunDirectory
from .folder.record import require_own_columns
from .schedules import factors_of
from .settings import CompareSettings, RunSettings
from .setup import data_of, engine_for, filled_in, plan_of, population_of, task_of

#: How often the float32 updates of a cohort are in RAM at once, measured.
COPIES_OF_DRAWN = 7
COPIES_OF_CERTAIN = 5
#: The same of the answers to a census.
COPIES_OF_ANSWERS = 5


def check_comparison(
    settings: CompareSettings,
    out: Path,
    before: CompareSettings | None,
) -> Json:
    """Refuse what cannot be played before anything is written; returns the names of the data."""
    first, *others = settings.seeds
    run = settings.run(settings.samplers[0], first)
    engine = engine_for(run, out)
    task = engine.task
    require_own_columns(task.metrics)
    warn_of_ignored(engine)
    data = data_of(run, task)
    if before is not None:
        RunDirectory(out).require_same_data(data)
    for sampler in settings.samplers:
        run = settings.run(sampler, first)
        check_memory(run, engine, out)
        if not settings.finds_n():
            require_clients(run, task)
        plan_of(run, population_of(run, task), task)
        if before is not None and sampler in before.samplers:
            require_same_sampler(before.run(sampler, first), run, task)
    # A number that is set holds for all seeds. Else each seed's task has to be made to know its
    # own.
    if settings.clients is not None:
        return data
    for seed in others:
        clients = task_of(settings.run(settings.samplers[0], seed)).num_clients
        if clients != task.num_clients:
            raise DeltaflError(
                f"{task.name} has {counted(task.num_clients, 'client')} with seed {first} and "
                f"{clients} with seed {seed}; make as many with every seed, or leave this seed out"
            )
    return data


def check_memory(
    settings: RunSettings,
    engine: Engine,
    out: Path | None,
    divided: bool = False,
) -> None:
    """Refuse rounds and memories that do not fit into RAM, or on the disk of ``out``; None where
    nothing is written.

    ``divided``: several processes share a round.
    """
    m = engine.task.num_clients
    label = parse_label(settings.sampler)
    model = engine.num_params * BYTES_PER_PARAMETER
    sample = filled_in(settings.sample)
    selected = sample
    cure = "lower 'sample'"
    if label.name == "full":
        selected = m
        cure = "choose a sampler that selects fewer, such as 'uniform'"
    if any(part.name == FirstRound.name for part in settings.parts()):
        selected = m
        cure = "leave out first_round"
    copies = COPIES_OF_CERTAIN if selected == m else COPIES_OF_DRAWN
    needs = [("a round", selected, copies * selected * model, cure)]
    control = find_estimator(label.estimator).control
    census = make_sampler(label).census
    if census is not None:
        length = census.for_control(control).length(engine.num_params)
        fewer = f"write '{label.name}@@regression-damped', which asks for 129 numbers"
        needs.append(("a census", m, COPIES_OF_ANSWERS * m * length * 8, fewer))
    if settings.memory_path is None:
        own = memory_size(RowFormat(), (m, engine.beside.num_local), selected).ram
        needs.append(("the local arrays", m, own, "set memory_path (a folder on a disk)"))
    ram = free_ram()
    for what, clients, needed, cure in needs:
        # Of several processes none has the whole round.
        if ram is not None and needed > ram and not divided:
            raise DeltaflError(
                f"{what} of {clients:,} clients with {engine.num_params:,} parameters takes about "
                f"{human(needed)} of RAM and {human(ram)} are free: {cure}, or take a smaller model"
            )
    if not control.remembers:
        return
    rows = RowFormat(settings.memory_dtype, settings.memory_path)
    size = memory_size(
        rows,
        (m, engine.num_params),
        sample * settings.checkpoint_every,
    )
    if out is not None:
        disk = ""
        if size.disk:
            disk = f", checkpoints included, and {human(size.disk)} in {rows.folder or out}"
        log.info(
            f"{split_settings(settings.sampler)[0]} remembers one update per client, {m:,} x "
            f"{engine.num_params:,} numbers ({rows.dtype}): at most {human(size.ram)} of RAM{disk}"
        )
    require_room(size, rows, out)


def warn_of_ignored(engine: Engine) -> None:
    """Say which clients may draw a minibatch whose labels the loss all ignores, where its gradient
    is NaN, as of a class of weight 0.
    """
    task = engine.task
    may_draw = [
        client
        for client, rows in enumerate(task.client_rows)
        if np.count_nonzero(~task.learnt_e[np.asarray(rows)]) >= min(engine.work.sizes(len(rows)))
    ]
    if may_draw and not has_gradient(task, np.flatnonzero(~task.learnt_e)):
        log.warning(
            f"a minibatch with nothing but labels that the loss ignores "
            f"({', '.join(map(str, task.ignored))}) has the gradient NaN, and the reply of its "
            f"client does not count: {counted(len(may_draw), 'client')} may draw one, such as "
            f"client {may_draw[0]}; leave such examples out, or let the loss have the gradient 0 "
            "there, as PyTorch's cross-entropy has of -100"
        )


def require_clients(settings: RunSettings, task: Task) -> None:
    """Refuse to select more clients than there are, where only the data say how many that is."""
    # What a method begins with that finds n itself is nobody's choice.
    if not settings.finds_n():
        settings.require_clients(task.num_clients)


def require_same_sampler(before: RunSettings, now: RunSettings, task: Task) -> None:
    """Refuse more rounds for a sampler, a schedule or a budget that depends on how many there
    are.
    """
    begun = factors_of(before.lr_schedule, filled_in(before.rounds))
    if begun != factors_of(now.lr_schedule, filled_in(now.rounds))[: len(begun)]:
        raise DeltaflError(
            f"lr_schedule {now.lr_schedule} depends on the number of rounds, and it began with "
            f"{before.rounds}: to play {now.rounds}, choose another --out"
        )
    population = population_of(now, task)
    begun_plan = plan_of(before, population, task)
    plan = plan_of(now, population, task)
    if begun_plan.part(Budget.name) != plan.part(Budget.name):
        raise DeltaflError(
            f"the budget of {now.sampler} is divided over the rounds, and it began with "
            f"{before.rounds}: to play {now.rounds}, choose another --out"
        )
    if begun_plan.sampler != plan.sampler:
        raise DeltaflError(
            f"the options of {now.sampler} depend on the number of rounds, and it began with "
            f"{before.rounds}: to play {now.rounds}, choose another --out"
        )
