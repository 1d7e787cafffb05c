"""Chosen rates that are still at an edge of their grid: what the best rate inside it would have cost in tuning.

Where the difference is within chance, the edge was won by chance, and a longer grid would only move it.
"""

from collections.abc import Sequence

import numpy as np

from ...report.statistics import mean_interval
from ...types import FloatArray
from ..pages.cells import markdown
from .results import Method, Result, Store
from .tuning import rounds_of


def edge_text(results: Sequence[Result], store: Store) -> str:
    """A table of them, and how to read it; one sentence if there are none."""
    lines = [
        [result.part.title, f"`{method.label}`", *_compared(result, method, store)]
        for result in results
        for method in result.shown
        if method.search.edge
    ]
    if not lines:
        return "No chosen rate is at an edge of its grid."
    heads = ["task", "method", "chosen", "rounds", "best inside", "rounds", "difference [95 %]"]
    told = "Still at an edge of the grid, with the mean rounds on the tuning seeds, and those of the best rate inside"
    return f"{told} (paired intervals, 95 % each by itself):\n\n{markdown(heads, lines)}"


def _compared(result: Result, method: Method, store: Store) -> list[str]:
    """The chosen rate and the best one inside the grid, with their rounds on the tuning seeds."""
    search = method.search
    inside = [rate for rate in search.finalists if rate not in (search.rates[0], search.rates[-1])]
    chosen_s = _rounds(result, method, search.best or 0.0, store)
    if not inside:
        return [f"{search.best:g}", f"{np.mean(chosen_s):.1f}", "–", "–", "–"]
    round_rs = {rate: _rounds(result, method, rate, store) for rate in inside}
    best = min(inside, key=lambda rate: float(np.mean(round_rs[rate])))
    apart = mean_interval(chosen_s - round_rs[best])
    ends = "" if apart.low is None else f" [{apart.low:.1f}, {apart.high:.1f}]"
    return [
        f"{search.best:g}",
        f"{np.mean(chosen_s):.1f}",
        f"{best:g}",
        f"{np.mean(round_rs[best]):.1f}",
        f"{apart.mean:+.1f}{ends}",
    ]


def _rounds(result: Result, method: Method, rate: float, store: Store) -> FloatArray:
    """Rounds to the threshold of each tuning seed."""
    part = result.part
    found = [store.tried(part, part.tuning_job(method.label, rate, seed)) for seed in part.tuning_seeds]
    return np.array([rounds_of(run) for run in found if run is not None], dtype=np.float64)
