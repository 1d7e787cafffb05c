"""Choosing each method's learning rate on seeds that are not reported.

A rate is better with fewer rounds to the threshold, averaged over the tuning seeds; a run that never reaches it, or
diverged, counts as twice its rounds. Ties go to the higher mean accuracy over the rounds.

All methods of a part search the same grid, so that none of them wins by a finer or a longer one. Where the best rate of
any method is at an edge, the grid grows by a factor of 2 on that side, for all of them, as often as the part allows.
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


class Search(NamedTuple):
    """How far the search for a rate is.

    Attributes:
        rates: The grid as it is now, increasing.
        best: The chosen rate; None while runs of the grid are missing.
        edge: The edge of the grid at which the chosen rate still is; empty if it is inside.
        score: Its score; None while there is none.
    """

    rates: tuple[float, ...]
    best: float | None
    edge: Edge
    score: Score | None


def score(runs: Sequence[Tried]) -> Score:
    """The score of one rate from its runs, one for each tuning seed."""
    rounds = [NEVER * run.rounds if run.reached is None else run.reached for run in runs]
    return Score(float(np.mean(rounds)), -float(np.mean([run.mean_accuracy for run in runs])))


def search(
    rates: Sequence[float],
    extensions: int,
    labels: Sequence[str],
    score_of: Callable[[str, float], Score | None],
) -> dict[str, Search]:
    """Go as far as the finished runs allow.

    Args:
        rates: The first grid, increasing by a factor of 2.
        extensions: How often it may grow on each side.
        labels: The methods that share it.
        score_of: The score of a method at a rate; None if its runs are not finished.
    """
    grid, up, down = list(rates), extensions, extensions
    while True:
        found = {label: _best(grid, label, score_of) for label in labels}
        edges = {search.edge for search in found.values()}
        grows_up, grows_down = "high" in edges and up > 0, "low" in edges and down > 0
        if not (grows_up or grows_down):
            return found
        grid = [grid[0] / 2] * grows_down + grid + [2 * grid[-1]] * grows_up
        up, down = up - grows_up, down - grows_down


def _best(grid: Sequence[float], label: str, score_of: Callable[[str, float], Score | None]) -> Search:
    """The best rate of one method on a grid."""
    known = {rate: found for rate in grid if (found := score_of(label, rate)) is not None}
    if len(known) < len(grid):
        return Search(tuple(grid), None, "", None)
    best = min(grid, key=lambda rate: known[rate])
    edge: Edge = "high" if best == grid[-1] else "low" if best == grid[0] else ""
    return Search(tuple(grid), best, edge, known[best])
