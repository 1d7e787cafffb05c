"""One run: the rounds of one sampler on one task with one seed, recorded and resumable.

The simulator is a host of ``open_round`` and ``close_round`` (see ``round.py``): it trains the
cohort, and for the theoretical samplers it acts as the oracle, which trains all clients. What
follows each round, evaluation for instance, is a callback (``callback.py``).
"""

import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import compress
from pathlib import Path

import numpy as np

from ..errors import DeltaflError
from ..plan import RoundState
from ..round import close_round, init_round, open_round
from ..store.machine import made_with, warn_of_other
from ..streams import stream
from ..tasks.base import Task
from ..tasks.draws import seeded
from ..types import AnyPath, BoolArray, Cohort, Json, RejectedReply, RoundInfo, is_ours
from .callbacks.callback import Callback, LiveRun, OnRound, PlayedRound, Report, Stopwatch, guarded
from .callbacks.followers import (
    Checkpoints,
    Evaluation,
    Patience,
    Recording,
    Threshold,
    Watching,
    watch_over,
)
from .callbacks.own_rules import OwnCallback, Yours, copies, own_callbacks
from .census import Asked, ask_everyone
from .checking import check_memory, require_clients, require_same_sampler, warn_of_ignored
from .distributed import ALONE, ProcessGroup
from .engine import BYTES_PER_PARAMETER, Engine, Training
from .folder.continuing import continued
from .folder.directory import DivergedError, RunDirectory, StopRun, locked
from .folder.own_code import Code
from .folder.provenance import PACKAGES
from .folder.record import Job, require_own_columns
from .oracle import SimulatedOracle
from .parallel.workers import Workers
from .rest import bytes_sent, local_rows
from .settings import RunSettings
from .setup import data_of, engine_for, engine_of, filled_in, plan_of, population_of
from .training.failures import never_exits
from .training.route import keep_route, kept_route
from .world import World

_NO_TIME = {"seconds": 0.0, "cpu_seconds": 0.0, "client_seconds": 0.0}


@never_exits()
def run_experiment(
    settings: RunSettings,
    engine: Engine,
    directory: RunDirectory,
    on_round: OnRound,
    group: ProcessGroup = ALONE,
    callbacks: Sequence[Callback] = (),
) -> RoundState:
    """Play the rounds that are not recorded yet.

    Interrupt it at any moment: the next call goes on from the last checkpoint and ends in the same
    state and the same ``rounds.jsonl``, bit for bit.

    ``engine`` is ``engine_of(settings)``, shared by runs that differ in their sampler alone;
    ``directory`` is started.

    Raises:
        DivergedError: If the model is lost (``divergence.py``). The last line of ``rounds.jsonl``
            has the reason, the checkpoint before it stays, and the run is not played again.
    """
    _require_model(directory, group)
    followers = (
        Evaluation(),
        Threshold(),
        Patience(),
        Yours(callbacks),
        Watching(),
        Recording(),
        Checkpoints(),
        Report(on_round),
    )
    with seeded(stream(settings.seed, "draw", client=2)):
        run, start, census = _open_run(settings, engine, directory, group)
        for callback in followers:
            callback.begin(run)
    # Of the library's own nothing draws from the global generators.
    of_plan = (run.plan.sampler, run.plan.rule.control, *run.plan.parts)
    may_draw = bool(callbacks) or not all(map(is_ours, of_plan))
    while not run.is_over:
        # By the round, so that it draws the same after a resume.
        rng = stream(settings.seed, "draw", run.state.round, client=1)
        with seeded(rng, every=may_draw):
            # Unless a checkpoint has it already.
            if census is not None and run.state.round < start.round:
                played = census.round(run, start)
            else:
                played = play_round(run)
            _follow(run, played, followers)
    _require_model(directory, group)
    for callback in followers:
        callback.end(run)
    return run.state


def _require_model(directory: RunDirectory, group: ProcessGroup) -> None:
    last = group.from_first(directory.last_line)
    if "diverged" in last:
        raise DivergedError(last["round"], **last["diverged"])


def play_round(run: LiveRun) -> PlayedRound:
    """Open a round, train its cohort, and close it with those that reply in time."""
    timer = Stopwatch()
    opened = run.state
    # Only the first process has the run's folder.
    oracle = SimulatedOracle(
        run.engine,
        run.plan,
        opened,
        run.directory.path if run.group.is_first else None,
    )
    available_m, clock = run.world.available(opened.round, run.clock)
    cohort = open_round(run.plan, opened, available_m, oracle, run.world.costs(clock))
    waited = run.world.wait(opened.round, cohort.client_n, oracle.more_bytes)
    run.clock = clock + waited.seconds
    training, run.state, info = _train_and_close(
        run,
        cohort,
        oracle,
        waited.responded_n,
    )

    timing = timer.read() | {"client_seconds": oracle.client_seconds}
    # What is refused was sent.
    down, up = oracle.traffic(cohort, info.num_responded + len(info.refused))
    line: Json = {"bytes_down": down, "bytes_up": up}
    if available_m is not None:
        line["available"] = int(available_m.sum())
    if run.world.seconds_m is not None:
        line["clock"] = run.clock
    population = run.plan.population
    if population.cost_m is not None:
        # Of who was asked, as trainings are counted: a late or lost reply has cost as much.
        line["cost"] = float(population.costs(cohort).sum())
    return PlayedRound(opened, cohort, info, line, timing, training, oracle)


def _follow(run: LiveRun, round: PlayedRound, callbacks: Sequence[Callback]) -> None:
    """Let the callbacks follow a round; its updates are released when this returns."""
    # The order of the entries is part of the record: its bytes are compared.
    round.line = {
        "round": run.state.round,
        "cohort": round.cohort.client_n.tolist(),
        "counts": round.cohort.count_n.tolist(),
        **{key: value for key, value in round.info._asdict().items() if key != "round"},
        **round.line,
    }
    round.is_last = run.state.round == run.rounds
    for callback in callbacks:
        try:
            callback.after_round(run, round)
        except StopRun as stop:
            run.end(round, stop)
    run.is_over = round.is_last


def _train_and_close(
    run: LiveRun,
    cohort: Cohort,
    oracle: SimulatedOracle,
    responded_n: BoolArray,
) -> tuple[Training, RoundState, RoundInfo]:
    """Train the cohort, of which each of several processes has a share, and close the round."""
    # Model and cohort as one number, which processes can compare at no cost.
    digest = zlib.crc32(
        run.state.params_d.tobytes(),
        zlib.crc32(cohort.client_n.tobytes()),
    )
    if len(set(run.group.gathered(digest))) > 1:
        raise DeltaflError(
            "the processes of this run do not have the same model and cohort in round "
            f"{run.state.round}: run the same versions on the same kind of machine everywhere"
        )
    training = oracle.train(cohort.client_n)
    beside = run.engine.beside
    faults = [
        RejectedReply(client, fault)
        for client, rest in zip(cohort.client_n.tolist(), training.rest_n, strict=False)
        if (fault := beside.parts.value_fault(rest)) is not None
    ]
    # Who is too late has trained all the same; it is the reply that does not count.
    used_n = responded_n & ~_among(cohort, faults)
    state, info = close_round(
        run.plan,
        run.state,
        cohort,
        run.plan.as_sent(cohort, training.update_nd),
        training.reports._replace(responded_n=used_n),
    )
    if state.rest:
        used_n = used_n & ~_among(cohort, info.rejected)
        rest = beside.closed(
            state.rest,
            cohort.client_n[used_n],
            [*compress(training.rest_n, used_n)],
            run.plan.collect_replies(run.state, cohort, used_n).coef_n,
            median=run.plan.part("clip") is not None,
        )
        state = state._replace(rest=rest)
    return training, state, info._replace(rejected=sorted([*info.rejected, *faults]))


def _among(cohort: Cohort, faults: Sequence[RejectedReply]) -> BoolArray:
    return np.isin(cohort.client_n, [fault.client for fault in faults])


def _open_run(
    settings: RunSettings,
    engine: Engine,
    directory: RunDirectory,
    group: ProcessGroup,
) -> tuple[LiveRun, RoundState, Asked | None]:
    """The run as its folder has it, its state before the first draw, and its census.

    A folder without rounds gets round 0: the evaluation of the initial model, and a checkpoint.
    """
    if group.is_first:
        keep_route(engine.route, directory.path)
    population = population_of(settings, engine.task)
    # A client downloads the model and sends its update.
    memory = directory.memory_folder(settings.memory_path)
    rest = engine.beside.initial(population.num_clients, local_rows(memory))
    num_bytes = 2 * (engine.num_params * BYTES_PER_PARAMETER + bytes_sent(rest))
    names = engine.task.client_names
    world = World(settings, population, engine.work.num_steps, num_bytes, names)
    population = population._replace(seconds_m=world.seconds_m)
    plan = plan_of(settings, population, engine.task, memory)
    census = ask_everyone(plan, engine, directory, group, world.costs(0.0))
    if census is not None:
        plan = census.plan
    initial_d = engine.initial_params()
    # After a census with first updates, this is the state of round 1.
    start = init_round(plan, initial_d)._replace(rest=rest)
    state = directory.load(plan.sampler, start._replace(round=0, params_d=initial_d), group)

    engine.beside.require_sound(state.rest)

    last = group.from_first(directory.last_line)
    if not last:
        last = {"round": 0, "test": engine.evaluate(initial_d, rest).line()}
        judges = engine.task.judges
        if judges:
            last["metrics"] = [asdict(judge) for judge in judges]
        timing = {"round": 0, **_NO_TIME}
        # Else the census is round 1 and has a line of its own.
        if census is not None and start.round == 0:
            last |= census.line
            timing |= census.timing
        if group.is_first:
            directory.append(last, timing)
            state = directory.save(state)
    run = LiveRun(
        settings=settings,
        engine=engine,
        directory=directory,
        group=group,
        plan=plan,
        world=world,
        state=state,
        # From the lines of the rounds: after a resume it knows what it had seen before.
        watch=group.from_first(
            lambda: watch_over(
                engine.task,
                directory.lines("rounds.jsonl"),
            )
        ),
        kept=state.round,
        clock=last.get("clock", 0.0),
        is_over="stopped" in last or state.round >= filled_in(settings.rounds),
    )
    return run, start, census


def run_single(
    settings: RunSettings,
    folder: AnyPath,
    on_round: OnRound,
    group: ProcessGroup = ALONE,
    callbacks: Sequence[OwnCallback] = (),
) -> Json:
    """``deltafl run``: one run in its own folder, started or continued; returns the last line of
    ``rounds.jsonl``.

    Args:
        settings: Resolved settings.
        folder: The run's folder.
        on_round: Called with a ``RoundDone`` after every round that is played; those after the last
            checkpoint are played again, and reported again, when a run goes on.
        group: The processes that share the run.
        callbacks: Callbacks of your own (``callback.py``), which see the run itself, and rules that
            end it (``own_rules.py``).

    Raises:
        DeltaflError: If another process is playing in the folder, or the run is impossible.
    """
    yours = own_callbacks(callbacks)
    if group.count > 1 and settings.memory_path is not None:
        raise DeltaflError(
            "memory_path is for one process and this run has several; leave it out, or start one"
        )
    group.use(settings.device)
    directory = RunDirectory(folder)
    place = directory.path
    with ExitStack() as stack:
        group.from_first(lambda: stack.enter_context(locked(place)))
        workers = stack.enter_context(Workers(settings.workers, group))
        engine = engine_of(settings, workers, kept_route(place, settings.device))
        # What cannot be played is refused before anything is written.
        require_own_columns(engine.task.metrics)
        require_clients(settings, engine.task)
        warn_of_ignored(engine)
        plan_of(settings, population_of(settings, engine.task), engine.task)
        check_memory(
            settings,
            engine,
            place if group.is_first else None,
            divided=group.count > 1,
        )
        _require_same_data_everywhere(settings, engine.task, group)
        group.from_first(lambda: begin(directory, settings, engine.task))
        run_experiment(
            settings,
            engine,
            directory,
            guarded(on_round),
            group,
            yours,
        )
        return group.from_first(directory.last_line)


def _require_same_data_everywhere(
    settings: RunSettings,
    task: Task,
    group: ProcessGroup,
) -> None:
    if group.count == 1:
        return
    checksums = {data["data_crc32"] for data in group.gathered(data_of(settings, task))}
    if len(checksums) > 1:
        raise DeltaflError(
            f"the processes of this run have different data (checksums "
            f"{', '.join(sorted(checksums))}); give every machine the same copy"
        )


def begin(
    directory: RunDirectory,
    settings: RunSettings,
    task: Task,
    code: Code | None = None,
) -> None:
    """Start a run's folder, or check that settings and data are those that the run began with, and
    the user's own code, which may be known from the call that plays the run.

    More rounds than before, and another threshold, are written down: the run goes on.
    """
    settings, before, code = continued(settings, directory.path, known=code)
    data = data_of(settings, task)
    if before is None:
        directory.start(settings, data, code)
        return
    # Both before anything is written.
    directory.require_same_data(data)
    directory.require_settings(settings, before.rounds)
    warn_of_other(directory.environment(), made_with(*PACKAGES), str(directory.path))
    if settings.rounds != before.rounds:
        require_same_sampler(before, settings, task)
    if (settings.rounds, settings.threshold) != (before.rounds, before.threshold):
        directory.save_settings(settings)


def play_job(
    job: Job,
    directory: RunDirectory,
    sweep: Path,
    on_round: OnRound,
    code: Code | None,
) -> Task:
    """Play a job in this process, from its last checkpoint if there is one: a run of a sweep whose
    folder is ``sweep``. Its task.
    """
    engine = engine_for(job.settings, directory.path)
    check_memory(job.settings, engine, sweep)
    if code is not None:
        code.require_same_files(sweep)
    task: Task = engine.task
    begin(directory, job.settings, task, code)
    with suppress(DivergedError):  # the last line has the reason
        run_experiment(job.settings, engine, directory, on_round, callbacks=copies(job.callbacks))
    return task
