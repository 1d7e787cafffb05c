"""One run: the rounds of one sampler on one task with one seed, recorded and resumable.

The simulator is a host of ``open_round`` and ``close_round`` (see ``round.py``): it trains the
cohort, and for the theoretical samplers it acts as the oracle, which trains all clients.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..accumulate import Accumulator
from ..analysis.statistics import late_after
from ..errors import DeltaflError
from ..estimators.variance import effective_sample_size
from ..io import plain_json
from ..round import Plan, RoundState, close_round, init_round, open_round
from ..samplers.census import output_layer
from ..scale.named_arrays import bytes_in_ram
from ..server.watch import Watch
from ..streams import stream
from ..tasks.base import Task
from ..types import BoolArray, Cohort, FloatArray, Params, RoundInfo
from .callback import OnRound, RoundDone, guarded
from .directory import RunDirectory, locked, recorded_settings
from .distributed import ALONE, ProcessGroup, divided
from .divergence import DivergedError, likely_cause
from .engine import Engine, Evaluation, Training
from .oracle import BYTES_PER_PARAMETER, SimulatedOracle
from .own_code import require_same_code
from .probes import probe_everyone, probe_selected
from .record import note_clients
from .runner import Workers
from .settings import RunSettings, grown, make_settings
from .setup import check_memory, data_of, engine_of, filled_in, plan_of
from .training.route import keep_route, kept_route
from .world import World

_NO_TIME = {"seconds": 0.0, "cpu_seconds": 0.0, "client_seconds": 0.0}


def run_single(
    settings: RunSettings, folder: Path, on_round: OnRound, group: ProcessGroup = ALONE
) -> dict[str, Any]:
    """``deltafl run``: one run in its own folder, started or continued; returns the last line of
    ``rounds.jsonl``.

    Args:
        settings: Resolved settings.
        folder: The run's folder.
        on_round: Called with a ``RoundDone`` after every round that is played; those after the last
            checkpoint are played again, and reported again, when a run goes on.
        group: The processes that share the run.

    Raises:
        DeltaflError: If another process is playing in the folder, or the run is impossible.
    """
    if group.count > 1 and settings.memory_path is not None:
        raise DeltaflError(
            "memory_path is for one process and this run has several; leave it out, or start one"
        )
    group.use(settings.device)
    directory = RunDirectory(folder)
    with ExitStack() as stack:
        group.from_first(lambda: stack.enter_context(locked(folder)))
        workers = stack.enter_context(Workers(settings.workers, group))
        engine = engine_of(settings, workers, kept_route(folder))
        plan_of(
            settings, engine.task.population(settings.weights), engine.task
        )  # refused before anything is written
        check_memory(settings, engine, folder if group.is_first else None, divided=group.count > 1)
        if group.count > 1:
            checksums = {
                data["data_crc32"] for data in group.gathered(data_of(settings, engine.task))
            }
            if len(checksums) > 1:
                what = (
                    "the processes of this run have different data (checksums "
                    f"{', '.join(sorted(checksums))})"
                )
                raise DeltaflError(f"{what}; give every machine the same copy")
        group.from_first(lambda: begin(directory, settings, engine.task))
        run_experiment(settings, engine, directory, guarded(on_round), group)
        return group.from_first(directory.last_line)


def begin(directory: RunDirectory, settings: RunSettings, task: Task) -> None:
    """Start a run's folder, or check that settings and data are those that the run began with.

    More rounds than before, and another threshold, are written down: the run goes on.
    """
    recorded = recorded_settings(directory.path)
    data = data_of(settings, task)
    if recorded is None:
        directory.start(settings, data)
        return
    before = make_settings(RunSettings, recorded)
    grown(before, settings)
    require_same_code(directory.path, settings)
    directory.require_same_data(data)
    directory.require_settings(settings, before.rounds)
    if settings.rounds != before.rounds:
        require_same_sampler(before, settings, task)
    if (settings.rounds, settings.threshold) != (before.rounds, before.threshold):
        directory.save_settings(settings)


def require_same_sampler(before: RunSettings, now: RunSettings, task: Task) -> None:
    """Refuse to go on with more rounds if the options of the sampler depend on how many there
    are.
    """
    population = task.population(now.weights)
    if plan_of(before, population, task).sampler != plan_of(now, population, task).sampler:
        raise DeltaflError(
            f"the options of {now.sampler} depend on the number of rounds, and it began with "
            f"{before.rounds}: to play "
            f"{now.rounds}, choose another --out"
        )


def run_experiment(
    settings: RunSettings,
    engine: Engine,
    directory: RunDirectory,
    on_round: OnRound,
    group: ProcessGroup = ALONE,
) -> RoundState:
    """Play the rounds that are not recorded yet.

    Interrupt it at any moment: the next call goes on from the last checkpoint and ends in the same
    state and the same ``rounds.jsonl``, bit for bit. No state becomes a checkpoint while the model
    looks wrong, not even the last one: such a run has ``doubt`` in its last line and keeps its last
    good checkpoint, and its model beside it.

    ``engine`` is ``engine_of(settings)``, shared by runs that differ in their sampler alone;
    ``directory`` is started.

    Raises:
        DivergedError: If the model is lost (``divergence.py``). The last line of ``rounds.jsonl``
            has the reason, the checkpoint before it stays, and the run is not played again.
    """
    memory = directory.memory_folder(settings.memory_path)
    last = group.from_first(directory.last_line)
    if "diverged" in last:
        raise DivergedError(last["round"], **last["diverged"])
    if group.is_first:
        keep_route(engine.route, directory.path)
    population = engine.task.population(settings.weights)
    world = World(settings, population, engine.work, 2 * engine.num_params * BYTES_PER_PARAMETER)
    population = population._replace(seconds_m=world.seconds_m)
    plan = plan_of(settings, population, engine.task, memory)
    plan, line, timing = _with_census(plan, engine, directory, group)
    if plan.census is not None and world.seconds_m is not None:
        line["clock"] = float(world.seconds_m.max())  # a census waits for everybody
    initial = init_round(plan, engine.initial_params())
    state = directory.load(initial._replace(round=0, params_d=engine.initial_params()), group)
    watch, last = group.from_first(lambda: _watch_of(engine.task, directory.lines("rounds.jsonl")))
    total = filled_in(settings.rounds)
    if watch is None:
        test = engine.evaluate(engine.initial_params())
        first = plain_json({"round": 0, "test": test._asdict(), **({} if initial.round else line)})
        watch, last = _watch_of(engine.task, [first])
        if group.is_first:
            directory.append(first, {"round": 0, **(_NO_TIME if initial.round else timing)})
            state = directory.save(state)
    clock = last.get("clock", 0.0)
    player = _RoundPlayer(
        settings, engine, directory, group, plan, world, cast(Watch, watch), state.round, clock
    )
    if state.round < initial.round:  # the census is the first round
        state, done = player.end_census(
            state._replace(round=1, params_d=initial.params_d), line, timing
        )
        last = done.line
        on_round(done)
    while state.round < total and "stopped" not in last:
        state, done = player.play(state)
        last = done.line
        on_round(done)
    return state


def _with_census(
    plan: Plan, engine: Engine, directory: RunDirectory, group: ProcessGroup
) -> tuple[Plan, dict[str, Any], dict[str, float]]:
    """The plan with the answers of all clients, if its sampler asks for them.

    If they send their updates, it is the first round, else round 0. Also what the lines of this
    round in ``rounds.jsonl`` and ``timings.jsonl`` hold of it.
    """
    if plan.census is None:
        return plan, {}, _NO_TIME
    kept = group.from_first(directory.census)
    began = time.perf_counter()
    began_cpu = time.process_time()
    answer_mk = take_census(plan, engine, engine.initial_params()) if kept is None else kept
    client_seconds = time.perf_counter() - began
    if kept is None and group.is_first:
        directory.save_census(answer_mk)
    plan = plan.with_census(answer_mk)
    m = len(answer_mk)
    answers = int(np.isfinite(answer_mk).all(axis=1).sum())
    line = {
        "answers": answers,
        "bytes_down": m * engine.num_params * BYTES_PER_PARAMETER,
        "bytes_up": answers * 8 * answer_mk.shape[1],
    }
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - began_cpu
    return (
        plan,
        line,
        {"seconds": seconds, "cpu_seconds": cpu_seconds, "client_seconds": client_seconds},
    )


def take_census(plan: Plan, engine: Engine, params_d: Params) -> FloatArray:
    """Every client's answer after its usual local work on a model, float64 (m, size); NaN where
    there is none.
    """
    census = plan.census
    m = plan.population.num_clients
    assert census is not None
    tensors = output_layer([param.shape for param in engine.task.make_model().parameters()])
    answers = []
    for first in range(0, m, plan.n):  # no more updates are in RAM than in any other round
        client_k = np.arange(first, min(first + plan.n, m))
        for client, update_d in zip(
            client_k.tolist(), engine.train(params_d, 0, client_k).update_nd, strict=True
        ):
            answers.append(
                census.answer(update_d, tensors, plan.seed, stream(plan.seed, "census", 0, client))
            )
    return np.array(answers)


def _watch_of(task: Task, lines: Iterable[dict[str, Any]]) -> tuple[Watch | None, dict[str, Any]]:
    """The watch over a run that has these lines, and the last of them; None and nothing without
    any.
    """
    watch: Watch | None = None
    line: dict[str, Any] = {}
    for line in lines:
        test = line.get("test", {"loss": None, "accuracy": None})
        loss = test["loss"]
        accuracy = nan if test["accuracy"] is None else test["accuracy"]
        if watch is None:
            watch = Watch(
                nan if loss is None else loss, task.metric == "accuracy", task.chance, accuracy
            )
            continue
        stored = {
            key: nan if line.get(key) is None else line[key]
            for key in RoundInfo._fields
            if key in line
        }
        watch.see(RoundInfo(**{**stored, "round": line["round"] - 1}), True, loss, accuracy)
    return watch, line


@dataclass
class _RoundPlayer:
    """Plays and records rounds; ``kept`` is the round of the last checkpoint, ``clock`` the
    virtual seconds so far.
    """

    settings: RunSettings
    engine: Engine
    directory: RunDirectory
    group: ProcessGroup
    plan: Plan
    world: World
    watch: Watch
    kept: int
    clock: float

    def play(self, opened: RoundState) -> tuple[RoundState, RoundDone]:
        """One round; the next state, and what callbacks are given."""
        settings = self.settings
        plan = self.plan
        engine = self.engine
        group = self.group
        began = time.perf_counter()
        began_cpu = time.process_time()
        oracle = SimulatedOracle(
            engine, plan, opened, self.directory.path if group.is_first else None
        )
        available_m, clock = self.world.available(opened.round, self.clock)
        cohort = open_round(plan, opened, available_m, oracle)
        waited = self.world.wait(opened.round, cohort.client_n)
        self.clock = clock + waited.seconds
        training, state, info = self._closed(opened, cohort, oracle, waited.responded_n)
        trained = time.perf_counter()
        trained_cpu = time.process_time()
        client_seconds = oracle.client_seconds
        traffic = oracle.traffic(len(cohort.client_n), info.num_responded)
        line: dict[str, Any] = {"bytes_down": traffic.down, "bytes_up": traffic.up}
        if available_m is not None:
            line["available"] = int(available_m.sum())
        seconds = trained - began
        cpu_seconds = trained_cpu - began_cpu
        timing = {"seconds": seconds, "cpu_seconds": cpu_seconds, "client_seconds": client_seconds}

        def probe() -> dict[str, Any]:
            lr = filled_in(settings.local_lr)
            every = settings.probe_every
            if every is None:
                return {}
            found = probe_selected(training, lr)
            if opened.round == 0 or state.round % every == 0:
                found |= probe_everyone(plan, opened, oracle, lr)
            return {"probe": found}

        return self._end(state, info, cohort, line, timing, probe)

    def end_census(
        self, state: RoundState, line: dict[str, Any], timing: dict[str, float]
    ) -> tuple[RoundState, RoundDone]:
        """The same for a census that was the first round: all clients have trained, and the
        model has moved.
        """
        weight_m = self.plan.population.weight_m
        code_mc = np.asarray(self.plan.population.code_mc)
        weight_k = weight_m[code_mc.any(axis=1)]
        step_d = state.params_d - self.engine.initial_params()
        info = RoundInfo(
            round=0,
            num_selected=len(weight_m),
            num_responded=len(weight_k),
            rejected=[],
            estimate_norm=float(np.linalg.norm(step_d.astype(np.float64))),
            variance=nan,
            effective_sample_size=effective_sample_size(weight_k),
            largest_weight=float(weight_k.max(initial=0)),
            sum_of_weights=float(weight_k.sum()),
            mean_over_diversity=nan,
            loss=nan,
        )
        m = len(weight_m)
        everyone = Cohort(np.arange(m), np.ones(m, dtype=np.int64), np.ones(m), "fixed-size")
        self.clock = line.get("clock", self.clock)
        return self._end(state, info, everyone, line, timing, dict)

    def _end(
        self,
        state: RoundState,
        info: RoundInfo,
        cohort: Cohort,
        line: dict[str, Any],
        timing: dict[str, float],
        probe: Callable[[], dict[str, Any]],
    ) -> tuple[RoundState, RoundDone]:
        """Evaluate the model, record the round, and make a checkpoint, where these are due."""
        settings = self.settings
        plan = self.plan
        engine = self.engine
        watch = self.watch
        group = self.group
        trained = time.perf_counter()
        is_last = state.round == filled_in(settings.rounds)
        is_due = is_last or state.round % settings.evaluate_every == 0 or watch.suspects(info)
        test, accuracy_m = engine.evaluate_clients(plan.model(state)) if is_due else (None, None)
        loss, accuracy = (None, nan) if test is None else (test.loss, test.accuracy)
        symptom = watch.see(info, bool(np.isfinite(state.params_d).all()), loss, accuracy)
        if symptom is not None and test is None:
            test, accuracy_m = engine.evaluate_clients(plan.model(state))

        line = {
            "round": state.round,
            "cohort": cohort.client_n.tolist(),
            "counts": cohort.count_n.tolist(),
            **{key: value for key, value in info._asdict().items() if key != "round"},
            **line,
        }
        if self.world.seconds_m is not None:
            line["clock"] = self.clock
        if test is not None:
            line |= {"test": test._asdict(), **self._stopped(test)}
        if symptom is None:
            line |= probe()
        is_last |= "stopped" in line
        reason = symptom or (watch.suspicion if is_last else None)
        if reason is not None:
            why = f"{reason}; likely cause: {likely_cause(watch.infos, settings, plan)}"
            line["doubt" if symptom is None else "diverged"] = {"why": why, "kept": self.kept}
        timing = {
            "round": state.round,
            **timing,
            "server_bytes": bytes_in_ram(state),
            "evaluation_seconds": time.perf_counter() - trained,
        }
        if group.is_first:
            self._record(line, timing, accuracy_m)
        if symptom is not None:
            raise DivergedError(state.round, **line["diverged"])
        line = plain_json(line)
        done = RoundDone(
            sampler=settings.sampler,
            seed=settings.seed,
            round=state.round,
            rounds=filled_in(settings.rounds),
            accuracy=line.get("test", {}).get("accuracy"),
            loss=line.get("test", {}).get("loss"),
            seconds=timing["seconds"],
            bytes=float(line["bytes_down"] + line["bytes_up"]),
            line=line,
        )
        return self._saved(state, is_last), done

    def _record(
        self, line: dict[str, Any], timing: dict[str, Any], accuracy_m: FloatArray | None
    ) -> None:
        """Note the clients' accuracies if the model is one of the last, then write the lines of
        the round.
        """
        round = line["round"]
        late = late_after(filled_in(self.settings.rounds)) + 1
        since = (
            round if {"stopped", "diverged"} & line.keys() else late
        )  # where a run was ended, its last model counts
        if "test" in line and round >= since:
            note_clients(
                self.directory.path, self.plan.population.num_examples_m, round, accuracy_m, since
            )
        self.directory.append(line, timing)

    def _closed(
        self, opened: RoundState, cohort: Cohort, oracle: SimulatedOracle, responded_n: BoolArray
    ) -> tuple[Training, RoundState, RoundInfo]:
        """Train the cohort and close the round with those that replied in time; in several
        processes with a share.
        """
        plan = self.plan
        group = self.group
        if (
            group.count == 1
            or self.settings.probe_every is not None
            or not plan.rule.control.learns_from_sums
        ):
            training = oracle.train(cohort.client_n)
            reports = training.reports._replace(responded_n=responded_n)
            return training, *close_round(plan, opened, cohort, training.update_nd, reports)
        place_k = np.array(
            divided(self.engine.costs(cohort.client_n), group.count)[group.rank], dtype=np.int64
        )
        with self.engine.workers.apart():
            training = oracle.train(cohort.client_n[place_k])
        accumulator = Accumulator(plan, opened, cohort)
        reports = training.reports._replace(responded_n=responded_n[place_k])
        accumulator.add_rows(training.update_nd, reports, place_k)
        accumulator.merge(group)
        state, info = accumulator.close()
        if info.warning is not None and group.is_first:
            logging.getLogger(__name__).warning("%s", info.warning)
        return training, state, info

    def _stopped(self, test: Evaluation) -> dict[str, float]:
        """What goes into the line if the run ends with this evaluation, which reaches the
        threshold.
        """
        if not self.settings.stop_at_threshold:
            return {}
        goal = filled_in(self.settings.threshold)
        reached = (
            test.accuracy >= goal if self.engine.task.metric == "accuracy" else test.loss <= goal
        )
        return {"stopped": goal} if reached else {}

    def _saved(self, state: RoundState, is_last: bool) -> RoundState:
        """The state to go on with, after it has become a checkpoint if one is due."""
        if not (is_last or state.round % self.settings.checkpoint_every == 0):
            return state
        if self.watch.suspicion is None:
            self.kept = state.round
            return self.directory.save(state) if self.group.is_first else state
        if is_last and self.group.is_first:
            self.directory.save_suspect(state)
        return state
