"""The callbacks that judge the model: its evaluation on the test set, and what ends a run: a goal,
or no progress.
"""

from math import inf, nan

import numpy as np

from ...analysis.statistics import first_reach
from ...types import Json
from ..folder.directory import StopRun
from .callback import Callback, LiveRun, PlayedRound


class Evaluation(Callback):
    """Every ``evaluate_every`` rounds, after the last, and where the round looks like a
    divergence.
    """

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        is_due = round.number % run.settings.evaluate_every == 0
        if is_due or round.is_last or run.watch.wants_evaluation(round.info):
            run.evaluate(round)


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
            raise StopRun(f"no better {run.engine.task.metrics[0].name} in {patience} evaluations")

    def _see(self, run: LiveRun, test: Json) -> None:
        metric = run.engine.task.metrics[0]
        value = test[metric.name]
        height = nan if value is None else metric.sign * value  # a record has null for NaN
        self._since += 1
        if height > self._best:
            self._best = height
            self._since = 0


def _tests(run: LiveRun) -> list[Json]:
    """The evaluations of the rounds that were played before, and of the initial model."""
    return [line["test"] for line in run.directory.lines("rounds.jsonl") if "test" in line]


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
