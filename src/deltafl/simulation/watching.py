"""The callback that ends a run whose model is lost, see ``server/watch.py``."""

from collections.abc import Iterable
from math import nan
from typing import Any

import numpy as np

from ..server.watch import Watch
from ..tasks.base import Task
from ..types import RoundInfo
from .callback import Callback, LiveRun, PlayedRound
from .divergence import likely_cause
from .evaluation import evaluate


def watch_over(task: Task, lines: Iterable[dict[str, Any]]) -> Watch:
    """The watch over a run that has these lines of ``rounds.jsonl``, the first of round 0."""
    first, *others = lines
    loss, accuracy = _measured(first)
    watch = Watch(nan if loss is None else loss, task.metric == "accuracy", task.chance, accuracy)
    for line in others:
        known = {key: line[key] for key in RoundInfo._fields if key in line}
        numbers = {key: nan if value is None else value for key, value in known.items()}
        info = RoundInfo(**{**numbers, "round": line["round"] - 1})
        watch.see(info, True, *_measured(line))
    return watch


def _measured(line: dict[str, Any]) -> tuple[float | None, float]:
    """The loss of a line, None if the model was not evaluated, and the accuracy, NaN if unknown."""
    test = line.get("test", {"loss": None, "accuracy": None})
    accuracy = test["accuracy"]
    return test["loss"], nan if accuracy is None else accuracy


class Watching(Callback):
    """Notes in the line that the run has diverged, or that its end is suspect, and why."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        finite = bool(np.isfinite(run.state.params_d).all())
        symptom = run.watch.see(round.info, finite, *_measured(round.line))
        if symptom is not None and "test" not in round.line:
            evaluate(run, round)
        reason = symptom
        if symptom is None and round.is_last:
            reason = run.watch.suspicion
        if reason is not None:
            cause = likely_cause(run.watch.infos, run.settings, run.plan)
            word = "doubt" if symptom is None else "diverged"
            round.line[word] = {"why": f"{reason}; likely cause: {cause}", "kept": run.kept}
