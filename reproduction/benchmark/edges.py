"""Chosen rates that are still at an edge of their grid: what the best rate inside it would have cost in tuning.

Where the difference is within chance, the edge was won by chance, and a longer grid would only move it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deltafl.analysis.statistics import Interval, mean_interval
from deltafl.types import FloatArray

from ..pages.cells import DASH, markdown
from .results import Method, Result, Store
from .tuning import rounds_of


class Edge(NamedTuple):
    """A rate at an edge beside the best one inside the grid; None where the grid has no inside.

    Attributes:
        rate, rounds: The chosen rate, and its mean rounds on the tuning seeds.
        inside, inside_rounds: The same of the best rate inside.
        apart: Rounds at the edge less those inside, paired by tuning seed.
    """

    rate: float
    rounds: float
    inside: float | None = None
    inside_rounds: float | None = None
    apart: Interval | None = None

    @property
    def is_better(self) -> bool:
        """Whether the tuning seeds tell the edge from the inside."""
        return self.apart is not None and self.apart.high is not None and self.apart.high < 0


def edge_text(results: Sequence[Result], store: Store) -> str:
    """A table of them, and how to read it; one sentence if there are none."""
    found = [
        (result, method, _edge(result, method, store))
        for result in results
        for method in result.shown
        if method.search.edge
    ]
    if not found:
        return "No chosen rate is at an edge of its grid."
    heads = ["task", "method", "chosen", "rounds", "best inside", "rounds", "difference [95 %]"]
    lines = [[result.part.title, f"`{method.label}`", *_cells(edge)] for result, method, edge in found]
    better = sum(edge.is_better for _, _, edge in found)
    return (
        "Still at an edge of the grid, with the mean rounds on the tuning seeds, and those of the best rate inside; "
        f"the paired interval tells {better} of {len(found)} from it (95 % each by itself):\n\n{markdown(heads, lines)}"
    )


def _edge(result: Result, method: Method, store: Store) -> Edge:
    """The chosen rate of a method, and the best one inside the grid."""
    search = method.search
    rate, ends = search.best or 0.0, (search.rates[0], search.rates[-1])
    chosen_s = _rounds(result, method, rate, store)
    inside = {other: _rounds(result, method, other, store) for other in search.finalists if other not in ends}
    if not inside:
        return Edge(rate, float(np.mean(chosen_s)))
    best = min(inside, key=lambda other: float(np.mean(inside[other])))
    apart = mean_interval(chosen_s - inside[best])
    return Edge(rate, float(np.mean(chosen_s)), best, float(np.mean(inside[best])), apart)


def _rounds(result: Result, method: Method, rate: float, store: Store) -> FloatArray:
    """Rounds to the threshold of each tuning seed."""
    runs = store.tried_by(result.part, method.label, rate, result.part.tuning_seeds)
    return np.array([rounds_of(run) for run in runs], dtype=np.float64)


def _cells(edge: Edge) -> list[str]:
    chosen = [f"{edge.rate:g}", f"{edge.rounds:.1f}"]
    if edge.inside is None or edge.inside_rounds is None or edge.apart is None:
        return [*chosen, DASH, DASH, DASH]
    ends = "" if edge.apart.low is None else f" [{edge.apart.low:.1f}, {edge.apart.high:.1f}]"
    return [*chosen, f"{edge.inside:g}", f"{edge.inside_rounds:.1f}", f"{edge.apart.mean:+.1f}{ends}"]
