"""One run: the rounds of one sampler on one task with one seed, recorded and resumable.

The simulator is a host of ``open_round`` and ``close_round`` (see ``round.py``): it trains the cohort, and for the
theoretical samplers it acts as the oracle, which trains all clients.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from ..accumulate import Accumulator
from ..errors import DeltaflError
from ..round import Plan, RoundState, broadcast, close_round, init_round, open_round
from ..tasks.base import Task
from ..types import Cohort, RoundInfo
from .directory import CURE, RunDirectory, locked
from .distributed import ProcessGroup, divided, refuse_undividable
from .divergence import DivergedError, Watch, likely_cause
from .engine import Engine, Evaluation, Training, reports_of
from .oracle import BYTES_PER_PARAMETER, SimulatedOracle, Traffic, bytes_of, bytes_of_statistics
from .probes import probe_everyone, probe_selected
from .settings import RunSettings, make_settings, require_same_settings
from .setup import check_memory, engine_of, filled_in, plan_of
from .training.route import keep_route, kept_route
from .workers import Job, Workers

_log = logging.getLogger(__name__)

#: Called after every round: rounds done, rounds in all, the last evaluation.
OnRound = Callable[[int, int, Evaluation], None]


def run_experiment(
    settings: RunSettings, engine: Engine, directory: RunDirectory, on_round: OnRound, group: ProcessGroup | None = None
) -> RoundState:
    """Play the rounds that are not recorded yet.

    Args:
        settings: Resolved settings.
        engine: ``engine_of(settings, workers)``; runs that differ in their sampler alone share it.
        directory: Where the record is; started already. Rounds after its last checkpoint are played again.
        on_round: Called after every round.
        group: The processes that play this run together (``distributed.py``); this one alone if left out.

    Returns:
        The state after the last round. Interrupt it at any moment: the next call goes on from the last checkpoint and
        ends in the same state and the same ``rounds.jsonl``, bit for bit.

    No state becomes a checkpoint while the model looks wrong, not even the last one: such a run has ``doubt`` in its
    last line and keeps its last good checkpoint, and its model beside it. The next call plays the rounds after that
    checkpoint again, to the same bits.

    Raises:
        DivergedError: If the model is lost (``divergence.py``). The last line of ``rounds.jsonl`` has the reason, the
            checkpoint before it stays, and the run is not played again.
    """
    ended = directory.divergence()
    if ended is not None:
        raise ended
    population = engine.task.population(settings.weights)
    group = group or ProcessGroup()
    if group.is_first:
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
        state, test = _play_round(settings, plan, engine, directory, watch, group, state)
        due = state.round % settings.checkpoint_every == 0 or state.round == total
        if due and watch.suspicion is None:
            state = directory.save(state)
        elif state.round == total:
            directory.keep_suspect(state)
        on_round(state.round, total, test or Evaluation(nan, nan))
    return state


def _play_round(
    settings: RunSettings,
    plan: Plan,
    engine: Engine,
    directory: RunDirectory,
    watch: Watch,
    group: ProcessGroup,
    opened: RoundState,
) -> tuple[RoundState, Evaluation | None]:
    """Play and record one round; the next state, and the model's evaluation if there is one."""
    began, began_cpu = time.perf_counter(), time.process_time()
    sent = broadcast(plan, opened)
    squares = plan.sampler.uses_square_loss
    oracle = SimulatedOracle(engine, plan.population, opened.round, sent, plan.n, directory.scratch, squares=squares)
    cohort = open_round(plan, opened, oracle=oracle)
    if group.count > 1 and settings.probe_every is None and plan.rule.control.learns_from_sums:
        place_k = np.array(divided(engine.costs(cohort.client_n), group.count)[group.rank], dtype=np.int64)
        with group.apart():
            training = oracle.train(cohort.client_n[place_k])
        accumulator = Accumulator(plan, opened, cohort)
        accumulator.add_rows(training.update_nd, reports_of(training), place_k)
        accumulator.merge(group)
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
        line |= _probe(settings, plan, opened, oracle, training)
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
    """The reason in the last line of a run that diverged, or whose end is suspect, and the checkpoint that is kept."""
    reason = watch.suspicion if symptom is None and round == filled_in(settings.rounds) else symptom
    if reason is None:
        return {}
    cause = likely_cause(watch.infos, settings, plan)
    key = "doubt" if symptom is None else "diverged"
    return {key: {"why": f"{reason}; likely cause: {cause}", "kept": directory.kept}}


def _watch_of(task: Task, lines: Sequence[dict[str, Any]]) -> Watch:
    """The watch over a run that has these lines already."""
    if "test" not in lines[0]:
        raise DeltaflError(f"the first line of rounds.jsonl has no evaluation; {CURE}")
    first, skill = (nan if lines[0]["test"][key] is None else lines[0]["test"][key] for key in ("loss", "accuracy"))
    watch = Watch(first, task.metric == "accuracy", task.chance, skill)
    for line in lines[1:]:
        stored = {key: nan if line.get(key) is None else line[key] for key in RoundInfo._fields if key in line}
        info = RoundInfo(**{**stored, "round": line["round"] - 1})
        test = line.get("test", {"loss": None, "accuracy": None})
        watch.see(info, True, test["loss"], nan if test["accuracy"] is None else test["accuracy"])
    return watch


def _probe(
    settings: RunSettings, plan: Plan, opened: RoundState, oracle: SimulatedOracle, training: Training
) -> dict[str, Any]:
    """What a line has beside the round itself: ``probe``, if there are probes."""
    if settings.probe_every is None:
        return {}
    lr = filled_in(settings.local_lr)
    probe = probe_selected(training, lr)
    if opened.round == 0 or (opened.round + 1) % settings.probe_every == 0:
        probe |= probe_everyone(plan, opened, oracle, lr)
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


def run_single(settings: RunSettings, folder: Path, on_round: OnRound, group: ProcessGroup | None = None) -> Evaluation:
    """``deltafl run``: one run in its own folder, started or continued; returns its last evaluation.

    ``group`` are the processes that play it together; this one alone if left out.

    Raises:
        DeltaflError: If another process is playing in the folder, or the run is impossible.
    """
    group = group or ProcessGroup()
    if group.count > 1:
        refuse_undividable(settings)
        group.use(settings.device)
    directory = RunDirectory(folder, group)
    with ExitStack() as stack:
        group.from_first(lambda: stack.enter_context(locked(folder)))
        workers = stack.enter_context(DividedWorkers(settings.workers, group))
        engine = engine_of(settings, workers, kept_route(folder))
        plan_of(settings, engine.task.population(settings.weights), engine.task)
        check_memory(settings, engine, folder, divided=group.count > 1)
        begin(directory, settings, engine.task)
        state = run_experiment(settings, engine, directory, on_round, group)
        return engine.evaluate(state.params_d)


def begin(directory: RunDirectory, settings: RunSettings, task: Task) -> None:
    """Start a run's folder, or check that settings and data are those that the run began with.

    Raises:
        DeltaflError: If a setting, the examples, or who holds them, differ. Another name of the data is a warning.
    """
    recorded = directory.settings()
    if recorded is None:
        directory.start(settings, task.data)
        return
    require_same_settings(make_settings(RunSettings, recorded), settings)
    before: dict[str, str] = {**task.data, **directory.environment()}
    if before["data_crc32"] != task.data["data_crc32"]:
        raise DeltaflError(
            f"the data of {directory.path} are not those it began with (checksum {before['data_crc32']}, now "
            f"{task.data['data_crc32']}): put the old ones back, or run it again in another folder"
        )
    if before["data"] != task.data["data"]:
        _log.warning("this run began on the data %s and goes on with %s", before["data"], task.data["data"])


class DividedWorkers(Workers):
    """Workers of all processes of a run: each process does its share of the jobs, and all get all results.

    Args:
        count: Worker processes of each process of the run.
        group: The processes of the run.
    """

    def __init__(self, count: int, group: ProcessGroup) -> None:
        super().__init__(count)
        self._group = group

    @property
    def width(self) -> int:
        """Jobs that run at the same time."""
        return self.count * (1 if self._group.is_apart else self._group.count)

    def map(self, method: str, model: Any, jobs: Sequence[Job], costs: Sequence[float]) -> list[Any]:
        """``Workers.map``, divided; all processes must call it with the same arguments, unless they are apart."""
        if self._group.is_apart or self._group.count == 1:
            return super().map(method, model, jobs, costs)
        mine = divided(costs, self._group.count)[self._group.rank]
        found = super().map(method, model, [jobs[place] for place in mine], [costs[place] for place in mine])
        results: list[Any] = [None] * len(jobs)
        for share in self._group.gathered(list(zip(mine, found, strict=True))):
            for place, result in share:
                results[place] = result
        return results
