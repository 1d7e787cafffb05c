"""The callback that ends a run whose model is lost, see ``server/watch.py``."""

from collections.abc import Iterable
from math import nan
from typing import Any

import numpy as np

from ...server.watch import Watch
from ...store import checked
from ...tasks.base import Task
from ...types import Json, RoundInfo
from ..folder.checkpoint import CURE
from ..folder.directory import DivergedError
from .callback import Callback, LiveRun, PlayedRound
from .divergence import likely_cause


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


def _number(value: Any) -> Any:
    """What stands in a record, where NaN is null."""
    return nan if value is None else value


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
