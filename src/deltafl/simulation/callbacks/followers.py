"""The callbacks that every run has, in the order in which they follow a round (``callback.py``)."""

from collections.abc import Iterable
from math import inf, nan
from typing import Any

import numpy as np

from ...analysis.statistics import first_reach, late_after
from ...errors import counted
from ...scale.named_arrays import bytes_in_ram
from ...server.watch import Watch
from ...store import checked
from ...tasks.base import Task
from ...types import FloatArray, Json, RoundInfo
from ..folder.checkpoint import CURE
from ..folder.clients import note_clients
from ..folder.directory import DivergedError, StopRun
from .callback import Callback, LiveRun, PlayedRound
from .divergence import likely_cause


class Evaluation(Callback):
    """Every ``evaluate_every`` rounds, after the last, and where the round looks like a
    divergence.
    """

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        is_due = round.number % run.settings.evaluate_every == 0
        if is_due or round.is_last or run.watch.wants_evaluation(round.info):
            run.evaluate(round)


class Threshold(Callback):
    """With ``stop_at_threshold``, a run that reaches the threshold is over."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        goal = run.settings.threshold
        if goal is None or not run.settings.stop_at_threshold or "test" not in round.line:
            return
        metric = run.engine.task.metrics[0]
        value = np.array([round.line["test"][metric.name]])
        if first_reach(value, goal, metric.higher) is not None:
            raise StopRun(f"{metric.name} reached {goal:g}")


class Patience(Callback):
    """With ``patience``, a run is over after so many evaluations that are not better than the best
    before them.
    """

    def begin(self, run: LiveRun) -> None:
        self._best = -inf
        self._since = 0
        if run.settings.patience is None:
            return
        # From the lines of the rounds: after a resume it knows what it had seen before.
        for test in run.group.from_first(lambda: _tests(run)):
            self._see(run, test)

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        patience = run.settings.patience
        if patience is None or "test" not in round.line:
            return
        self._see(run, round.line["test"])
        if self._since >= patience:
            name = run.engine.task.metrics[0].name
            raise StopRun(f"no better {name} in {counted(patience, 'evaluation')}")

    def _see(self, run: LiveRun, test: Json) -> None:
        metric = run.engine.task.metrics[0]
        value = test[metric.name]
        height = metric.sign * _number(value)
        self._since += 1
        if height > self._best:
            self._best = height
            self._since = 0


def _tests(run: LiveRun) -> list[Json]:
    """The evaluations of the rounds that were played before, and of the initial model."""
    return [line["test"] for line in run.directory.lines("rounds.jsonl") if "test" in line]


def watch_over(task: Task, lines: Iterable[Json]) -> Watch:
    """The watch over a run that has these lines of ``rounds.jsonl``, the first of round 0."""
    first, *others = lines
    loss, accuracy = _measured(first)
    watch = Watch(_number(loss), task.knows_accuracy, task.chance, accuracy)
    for line in others:
        known = {key: _number(line[key]) for key in RoundInfo._fields if key in line}
        known["round"] = line["round"] - 1  # an info counts from 0
        # The model was finite, or the run would have ended there.
        info = checked(RoundInfo, known, f"round {line['round']} of rounds.jsonl", CURE)
        watch.see(info, True, *_measured(line))
    return watch


def _measured(line: Json) -> tuple[float | None, float]:
    """The loss of a line, None if the model was not evaluated, and the accuracy, NaN if unknown."""
    test = line.get("test", {})
    return test.get("loss"), _number(test.get("accuracy"))


class Watching(Callback):
    """Ends a run that has diverged, and notes in the line if its end is suspect, and why."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        finite = bool(np.isfinite(run.state.params_d).all())
        symptom = run.watch.see(round.info, finite, *_measured(round.line))
        if symptom is not None:
            round.line.pop("stopped", None)  # whatever else was reached, the model is lost
            raise DivergedError(round.number, run.kept, self._explained(run, symptom))
        if round.is_last and run.watch.suspect is not None:
            why = self._explained(run, run.watch.suspect)
            round.line["suspect"] = {"why": why, "kept": run.kept}

    def _explained(self, run: LiveRun, what: str) -> str:
        cause = likely_cause(run.watch.infos, run.settings, run.plan)
        return f"{what}; likely cause: {cause}"


class Recording(Callback):
    """Writes the lines of every round, and each client's metric with the last models.

    The metrics are written where a checkpoint is due: all before are written again with them, and
    the rounds after a checkpoint are played again.
    """

    def __init__(self) -> None:
        self._late: dict[int, FloatArray] = {}  #: by round, those that are not written yet

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        if not run.group.is_first:
            return
        task = run.engine.task
        since = late_after(run.rounds) + 1
        if {"stopped", "diverged"} & round.line.keys():
            since = round.number  # the run ends here, so its last model alone counts
            self._late.clear()
        if "test" in round.line and round.number >= since:
            value_m = round.judged.by_client()
            if value_m is not None:
                self._late[round.number] = value_m
        if round.is_last or (self._late and run.keeps(round)):
            note_clients(
                run.directory.path,
                run.plan.population.num_examples_m,
                task.metrics[0].name,
                self._late,
                since,
                task.client_names,
                task.client_strata,
            )
            self._late.clear()
        round.timing["server_bytes"] = bytes_in_ram(run.state)
        round.timing["evaluation_seconds"] = round.closed.read()["seconds"]
        run.directory.append(round.line, {"round": round.number, **round.timing})


class Checkpoints(Callback):
    """Keeps the state every ``checkpoint_every`` rounds and after the last.

    A state never becomes a checkpoint while the model looks wrong, not even the last one: then the
    run keeps its last good checkpoint, and the suspect model beside it; of one that is lost, the
    checkpoint alone.
    """

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        if "diverged" in round.line or not run.keeps(round):
            return
        if run.watch.suspect is None:
            run.kept = round.number
            if run.group.is_first:
                run.state = run.directory.save(run.state, round.is_last)
        elif round.is_last and run.group.is_first:
            run.directory.save_suspect(run.state)


def _number(value: Any) -> Any:
    """What stands in a record, where NaN is null."""
    return nan if value is None else value
