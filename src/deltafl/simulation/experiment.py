"""One experiment: the rounds of one sampler on one task, recorded and resumable.

The simulator is a host of ``open_round`` and ``close_round`` (see ``round.py``): it trains the cohort, and for the
theoretical samplers it plays the oracle, training everyone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..accumulate import Accumulator
from ..audit import Subject
from ..errors import DeltaflError, require
from ..round import Plan, RoundState, broadcast, close_round, init_round, open_round
from ..tasks.base import Task
from ..types import Cohort, RoundInfo
from .distributed import SharedDirectory, SharedWorkers, refuse_undividable
from .divergence import DivergedError, Watch
from .engine import Engine, Evaluation, Training, reports_of
from .lock import claimed
from .oracle import BYTES_PER_PARAMETER, SimulatedOracle, Traffic, bytes_of, bytes_of_statistics
from .probes import is_probed, probe_everyone, probe_selected
from .ranks import Ranks, shared_out
from .records import CURE, RunDirectory
from .settings import RunSettings
from .setup import check_memory, engine_of, filled_in, method_of, plan_of
from .training.routes import keep_route
from .workers import Workers

_log = logging.getLogger(__name__)

#: Called after every round: rounds done, rounds in all, the last evaluation.
OnRound = Callable[[int, int, Evaluation], None]


def run_experiment(
    settings: RunSettings, engine: Engine, directory: RunDirectory, on_round: OnRound, ranks: Ranks | None = None
) -> RoundState:
    """Play the rounds that are not recorded yet.

    Args:
        settings: Resolved settings.
        engine: ``engine_of(settings, workers)``; runs that differ in their sampler alone share it.
        directory: Where the record is; started already. Rounds after its last checkpoint are played again.
        on_round: Told after every round.
        ranks: The processes that play this run together (``distributed.py``); this one alone if left out.

    Returns:
        The state after the last round. Interrupt it at any moment: the next call goes on from the last checkpoint and
        ends in the same state and the same ``rounds.jsonl``, bit for bit.

    No state becomes a checkpoint while the watch is not calm, not the last one either: a run that ends in doubt says so
    in its last line (``doubt``) and keeps its last good checkpoint, as one that diverges, and its model beside it. The
    next call plays the rounds after that checkpoint again, to the same bits; more rounds would go on from there, too.

    Raises:
        DivergedError: If the model is lost (``divergence.py``): the last line of ``rounds.jsonl`` says so, and the
            checkpoint before it stays. A run that ended so is not played again.
    """
    ended = directory.divergence()
    if ended is not None:
        raise ended
    population = engine.task.population(settings.weights)
    ranks = ranks or Ranks()
    if ranks.first:
        keep_route(engine.route, directory.path)
    plan = plan_of(settings, population, engine.task, directory.memory_folder(settings.memory_path))
    state = directory.load(init_round(plan, engine.initial_params()))
    total = filled_in(settings.rounds)
    if not directory.lines("rounds.jsonl"):
        start = engine.evaluate(state.params_d)
        directory.append({"round": 0, "test": start._asdict()}, {"round": 0, "seconds": 0.0, "cpu_seconds": 0.0})
        state = directory.save(state)
    watch = _watch_of(engine.task, directory.lines("rounds.jsonl"))
    while state.round < total:
        state, test = _play_round(settings, plan, engine, directory, watch, ranks, state)
        due = state.round % settings.checkpoint_every == 0 or state.round == total
        if due and watch.calm:
            state = directory.save(state)
        elif state.round == total:
            directory.keep_doubtful(state)
        on_round(state.round, total, test or Evaluation(nan, nan))
    return state


def _play_round(
    settings: RunSettings,
    plan: Plan,
    engine: Engine,
    directory: RunDirectory,
    watch: Watch,
    ranks: Ranks,
    opened: RoundState,
) -> tuple[RoundState, Evaluation | None]:
    """Play and record one round; the next state, and the model's evaluation if there is one."""
    began, began_cpu = time.perf_counter(), time.process_time()
    sent = broadcast(plan, opened)
    squares = plan.sampler.uses_square_loss
    oracle = SimulatedOracle(engine, plan.population, opened.round, sent, plan.n, directory.scratch, squares=squares)
    cohort = open_round(plan, opened, oracle=oracle)
    if ranks.count > 1 and settings.probe_every is None and plan.rule.control.learns_from_sums:
        place_k = np.array(shared_out(engine.costs(cohort.client_n), ranks.count)[ranks.rank], dtype=np.int64)
        with ranks.apart():
            training = oracle.train(cohort.client_n[place_k])
        accumulator = Accumulator(plan, opened, cohort)
        accumulator.add_rows(training.update_nd, reports_of(training), place_k)
        accumulator.merge(ranks)
        state, info = accumulator.close()
    else:
        training = oracle.train(cohort.client_n)
        state, info = close_round(plan, opened, cohort, training.update_nd, reports_of(training))
    trained, trained_cpu = time.perf_counter(), time.process_time()
    due = state.round % settings.evaluate_every == 0 or state.round == filled_in(settings.rounds)
    test = engine.evaluate(state.params_d) if due or watch.suspects(info) else None
    loss, accuracy = (None, nan) if test is None else (test.loss, test.accuracy)
    symptom = watch.see(info, bool(np.isfinite(state.params_d).all()), loss, accuracy)
    if symptom is not None:
        test = test or engine.evaluate(state.params_d)
    statistics = bytes_of_statistics(squares)
    line = _round_line(state, cohort, info, bytes_of(sent), statistics, oracle.traffic, test)
    if symptom is None:
        line |= _probe(settings, plan, opened, engine, training, oracle.everyone)
    line |= _ending(settings, plan, directory, watch, state.round, symptom)
    directory.append(
        line,
        {
            "round": state.round,
            "seconds": trained - began,
            "cpu_seconds": trained_cpu - began_cpu,
            "evaluation_seconds": time.perf_counter() - trained,
        },
    )
    if symptom is not None:
        raise DivergedError(state.round, **line["diverged"])
    return state, test


def _ending(
    settings: RunSettings, plan: Plan, directory: RunDirectory, watch: Watch, round: int, symptom: str | None
) -> dict[str, Any]:
    """What the last line of a run has that is lost, or over while something looks wrong: why, and what is kept."""
    said = watch.doubt if symptom is None and round == filled_in(settings.rounds) else symptom
    if said is None:
        return {}
    cause = watch.likely_cause(method_of(settings, plan))
    key = "doubt" if symptom is None else "diverged"
    return {key: {"why": f"{said}; likely cause: {cause}", "kept": directory.kept}}


def _watch_of(task: Task, lines: Sequence[dict[str, Any]]) -> Watch:
    """The watch over a run that has these lines already."""
    if "test" not in lines[0]:
        raise DeltaflError(f"the first line of rounds.jsonl has no evaluation; {CURE}")
    first, skill = (nan if lines[0]["test"][key] is None else lines[0]["test"][key] for key in ("loss", "accuracy"))
    watch = Watch(first, task.metric == "accuracy", task.chance, skill)
    for line in lines[1:]:
        known = {key: nan if line.get(key) is None else line[key] for key in RoundInfo._fields if key in line}
        info = RoundInfo(**{**known, "round": line["round"] - 1})
        test = line.get("test", {"loss": None, "accuracy": None})
        watch.see(info, True, test["loss"], nan if test["accuracy"] is None else test["accuracy"])
    return watch


def _probe(
    settings: RunSettings,
    plan: Plan,
    opened: RoundState,
    engine: Engine,
    training: Training,
    everyone: Callable[[], Training | None],
) -> dict[str, Any]:
    """What a line has beside the round itself: ``probe``, if there are probes."""
    if settings.probe_every is None:
        return {}
    lr = filled_in(settings.local_lr)
    probe = probe_selected(training, lr)
    if is_probed(settings.probe_every, opened.round + 1):
        probe |= probe_everyone(plan, opened, engine, lr, everyone())
    return {"probe": probe}


def _round_line(
    state: RoundState,
    cohort: Cohort,
    info: RoundInfo,
    download: int,
    statistics: int,
    extra: Traffic,
    test: Evaluation | None,
) -> dict[str, Any]:
    """One line of ``rounds.jsonl``; ``round`` counts rounds done, ``statistics`` bytes beside an update."""
    model = len(state.params_d) * BYTES_PER_PARAMETER
    line = {
        "round": state.round,
        "cohort": cohort.client_n.tolist(),
        "counts": cohort.count_n.tolist(),
        **{key: value for key, value in info._asdict().items() if key != "round"},
        "bytes_down": len(cohort.client_n) * (0 if extra.down else download) + extra.down,
        "bytes_up": info.num_responded * (model + statistics) + extra.up,
    }
    return line if test is None else {**line, "test": test._asdict()}


def run_single(settings: RunSettings, folder: Path, on_round: OnRound, ranks: Ranks | None = None) -> Evaluation:
    """``deltafl run``: one experiment in its own folder, started or continued; returns its last evaluation.

    ``ranks`` are the processes that play it together; this one alone if left out.

    Raises:
        DeltaflError: If another process is playing in the folder, or the run cannot be.
    """
    require("safetensors", "sim")
    ranks = ranks or Ranks()
    if ranks.count > 1:
        refuse_undividable(settings)
        ranks.use(settings.device)
    directory = RunDirectory(folder) if ranks.count == 1 else SharedDirectory(folder, ranks)
    with ExitStack() as stack:
        ranks.from_first(lambda: stack.enter_context(claimed(folder)))
        pool = Workers(settings.workers) if ranks.count == 1 else SharedWorkers(settings.workers, ranks)
        workers = stack.enter_context(pool)
        engine = engine_of(settings, workers, folder)
        plan_of(settings, engine.task.population(settings.weights), engine.task)
        check_memory(settings, engine, folder, divided=ranks.count > 1)
        begin(directory, settings, engine.task)
        state = run_experiment(settings, engine, directory, on_round, ranks)
        return engine.evaluate(state.params_d)


def begin(directory: RunDirectory, settings: RunSettings, task: Task) -> str:
    """Start a run's folder, or compare the data with those that the run began with; returns the name of those.

    Raises:
        DeltaflError: If examples, or who holds them, are not the same. Another name alone is a warning.
    """
    if not directory.started:
        directory.start(settings, task.data)
        return task.data["data"]
    known: dict[str, str] = {**task.data, **directory.environment()}
    if known["data_crc32"] != task.data["data_crc32"]:
        raise DeltaflError(
            f"the data of {directory.path} are not those it began with (checksum {known['data_crc32']}, now "
            f"{task.data['data_crc32']}): put the old ones back, or run it again in another folder"
        )
    if known["data"] != task.data["data"]:
        _log.warning("this run began on the data %s and goes on with %s", known["data"], task.data["data"])
    return known["data"]


class Refusal(NamedTuple):
    """A reply that was not used: in which run's folder and round, whose, and why."""

    run: str
    round: int
    client: int
    reason: str


def refusals(folder: Path) -> list[Refusal]:
    """All refused replies recorded in the folder of a run, or of a comparison's runs."""
    return [
        Refusal(record.parent.name, line["round"], client, reason)
        for record in [*folder.glob("rounds.jsonl"), *sorted(folder.glob("runs/*/rounds.jsonl"))]
        for line in RunDirectory(record.parent).lines("rounds.jsonl")
        for client, reason in line.get("rejected", [])
    ]


def subject_of(settings: RunSettings) -> Subject:
    """One round of a task for the audit: every client trained once from the initial model."""
    engine = engine_of(settings)
    population = engine.task.population(settings.weights)
    params_d, everyone = engine.initial_params(), np.arange(population.num_clients)
    training = engine.train(params_d, 0, everyone)
    return Subject(
        population=population,
        update_md=training.update_nd,
        loss_m=engine.losses(params_d, everyone),
        step_variance_m=training.step_variance_n,
        num_steps_m=training.num_steps_n,
        n=plan_of(settings, population).n,
        num_classes=engine.task.dataset.num_classes,
    )
