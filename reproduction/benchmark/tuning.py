"""Choosing each method's learning rate on seeds that are not reported.

A rate is better with fewer rounds to the threshold, averaged over the tuning seeds; a run that never reaches it, or
diverged, counts as twice its rounds. Ties go to the higher mean accuracy over the rounds.

All methods of a part search the same grid, so that none of them wins by a finer or a longer one. Where the best rate of
any method is at an edge, the grid grows by a factor of 2 on that side, for all of them, as often as the part allows.

Where runs are dear, the first tuning seed tries all rates, and the others only each method's best few, its finalists.
Who was a finalist before the grid grew stays one: its runs are there, and may be the best.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from .tried import Tried

NEVER = 2  # a run that never reaches the threshold counts as so many times its rounds
Edge = Literal["", "low", "high"]


class Score(NamedTuple):
    """How good a rate is; less is better."""

    rounds: float
    minus_accuracy: float


#: The score of a method at a rate; None if its runs are not finished.
ScoreOf = Callable[[str, float], Score | None]


class Screen(NamedTuple):
    """How many rates of a method all tuning seeds play: the best on the first of them.

    Attributes:
        finalists: So many.
        score_of: The score on the first tuning seed.
    """

    finalists: int
    score_of: ScoreOf


class Search(NamedTuple):
    """How far the search for a rate is.

    Attributes:
        rates: The grid as it is now, increasing.
        finalists: Those that all tuning seeds play, increasing; empty while runs of the first seed are missing.
        best: The chosen rate; None while runs of the grid are missing.
        edge: The edge of the grid at which the chosen rate still is; empty if it is inside.
        score: Its score; None while there is none.
    """

    rates: tuple[float, ...]
    finalists: tuple[float, ...]
    best: float | None
    edge: Edge
    score: Score | None


def score(runs: Sequence[Tried]) -> Score:
    """The score of one rate from its runs, one a tuning seed."""
    return Score(float(np.mean([rounds_of(run) for run in runs])), -float(np.mean([run.mean_accuracy for run in runs])))


def rounds_of(run: Tried) -> float:
    """Rounds to the threshold; twice those of the run if it never got there, or diverged."""
    return NEVER * run.rounds if run.reached is None else run.reached


def search(
    rates: Sequence[float],
    extensions: int,
    labels: Sequence[str],
    score_of: ScoreOf,
    screen: Screen | None = None,
) -> dict[str, Search]:
    """Go as far as the finished runs allow.

    Args:
        rates: The first grid, increasing by a factor of 2.
        extensions: How often it may grow on each side.
        labels: The methods that share it.
        score_of: The score from the seeds that decide.
        screen: Which rates of a method are no finalists; None for all being finalists.
    """
    grid, up, down = list(rates), extensions, extensions
    found = {label: Search((), (), None, "", None) for label in labels}
    while True:
        found = {label: _best(grid, label, score_of, screen, found[label].finalists) for label in labels}
        edges = {search.edge for search in found.values()}
        grows_up, grows_down = "high" in edges and up > 0, "low" in edges and down > 0
        if not (grows_up or grows_down):
            return found
        grid = [grid[0] / 2] * grows_down + grid + [2 * grid[-1]] * grows_up
        up, down = up - grows_up, down - grows_down


def _best(
    grid: Sequence[float], label: str, score_of: ScoreOf, screen: Screen | None, former: Sequence[float]
) -> Search:
    """The best rate of one method on a grid; ``former`` are the finalists before it grew."""
    kept = tuple(grid)
    if screen is not None:
        first = _known(grid, label, screen.score_of)
        if len(first) < len(grid):
            return Search(tuple(grid), (), None, "", None)
        kept = tuple(sorted({*former, *sorted(first, key=lambda rate: first[rate])[: screen.finalists]}))
    known = _known(kept, label, score_of)
    if len(known) < len(kept):
        return Search(tuple(grid), kept, None, "", None)
    best = min(kept, key=lambda rate: known[rate])
    edge: Edge = "high" if best == grid[-1] else "low" if best == grid[0] else ""
    return Search(tuple(grid), kept, best, edge, known[best])


def _known(rates: Sequence[float], label: str, score_of: ScoreOf) -> dict[float, Score]:
    return {rate: found for rate in rates if (found := score_of(label, rate)) is not None}
