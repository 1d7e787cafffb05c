"""Which sampler? The benchmark's answer for federations like yours, with its evidence.

``evidence.csv`` beside this file has the gap that each practical, unbiased method closes on each task of the benchmark.
``python -m reproduction.evidence`` makes it from ``results/benchmark/table.csv``; a test compares the two.
"""

import csv
from collections.abc import Iterable, Sequence
from importlib.resources import files
from statistics import mean
from typing import NamedTuple

from ..errors import DeltaflError
from ..estimators.table import find_estimator
from ..samplers import make_sampler, parse_label, uses_aux


class Evidence(NamedTuple):
    """What one method did on one task of the benchmark.

    Attributes:
        task: Title of the task.
        data: Its data set.
        clients: m.
        selected: n.
        unequal: Whether clients have unequal numbers of examples.
        label: The method.
        gap: Share of the gap between uniform sampling and full participation that it closes, by the area under the
            accuracy curve: 0 is uniform sampling, 1 full participation.
        low, high: Its 95 % interval over seeds.
        seeds: Paired seeds.
    """

    task: str
    data: str
    clients: int
    selected: int
    unequal: bool
    label: str
    gap: float
    low: float
    high: float
    seeds: int


class Recommendation(NamedTuple):
    """A sampler, and why. ``str()`` and ``print`` give the whole text.

    Attributes:
        label: The method, as ``make_plan``, ``DeltaStrategy`` and ``deltafl run --sampler`` take it.
        why: One sentence.
        evidence: Its rows of the benchmark, tasks like yours alone.
        cost: What the server keeps and what it has to know.
        caveats: Where the evidence is thin.
    """

    label: str
    why: str
    evidence: tuple[Evidence, ...]
    cost: str
    caveats: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(row.task) for row in self.evidence)
        rows = (
            f"  {row.task:<{width}}  {row.selected:>3} of {row.clients:<4}  {row.gap:5.2f} "
            f"[{row.low:.2f}, {row.high:.2f}]  {row.seeds} seeds"
            for row in self.evidence
        )
        return "\n".join(
            [
                f"{self.label}: {self.why}",
                f"Cost: {self.cost}",
                "Evidence, the share of the gap from uniform sampling (0) to full participation (1) that it closes:",
                *rows,
                *self.caveats,
            ]
        )


def recommend(
    *,
    unequal_sizes: bool | None = None,
    labels: bool = False,
    memory: bool = True,
    reachable: bool = True,
    clients: int | None = None,
    parameters: int | None = None,
) -> Recommendation:
    """The unbiased method that closed most of the gap on those tasks of the benchmark that are like your federation.

    Args:
        unequal_sizes: Whether clients have unequal numbers of examples; None if you do not know.
        labels: Whether the server may know each client's shares of labels (or other auxiliary variables) beforehand.
        memory: Whether the server has space for one update of each client.
        reachable: Whether every selected client can be expected to be available.
        clients: m, for the cost.
        parameters: d, for the cost.

    Raises:
        DeltaflError: If ``clients`` or ``parameters`` is below 1.

    Example:
        >>> recommend(labels=True).label
        'balanced'
    """
    for name, number in (("clients", clients), ("parameters", parameters)):
        if number is not None and number < 1:
            raise DeltaflError(f"{name} is {number}; write a whole number >= 1, or leave it out")
    rows = [row for row in read_evidence() if unequal_sizes in (None, row.unequal)]
    allowed = [label for label in _on_every_task(rows) if _fits(label, labels, memory, reachable)]
    ranked = sorted(allowed, key=lambda label: -_mean_gap(label, rows))
    best = ranked[0]
    evidence = tuple(row for row in rows if row.label == best)
    others = ", ".join(f"{label} {_mean_gap(label, rows):.2f}" for label in ranked[1:3])
    why = (
        f"closes {_mean_gap(best, rows):.2f} of the gap (mean over data sets, {len(evidence)} tasks like yours), the "
        f"most of the {len(allowed)} unbiased methods that fit. Next: {others}."
    )
    return Recommendation(best, why, evidence, _cost(best, clients, parameters), tuple(_caveats(evidence, reachable)))


def read_evidence() -> list[Evidence]:
    """The rows of ``evidence.csv``."""
    with files(__package__).joinpath("evidence.csv").open(encoding="utf-8") as file:
        return [
            Evidence(
                row["task"],
                row["data"],
                int(row["clients"]),
                int(row["selected"]),
                row["unequal"] == "yes",
                row["label"],
                float(row["gap"]),
                float(row["low"]),
                float(row["high"]),
                int(row["seeds"]),
            )
            for row in csv.DictReader(file)
        ]


def _on_every_task(rows: Sequence[Evidence]) -> list[str]:
    """The methods that were measured on all of the tasks."""
    tasks = {row.task for row in rows}
    labels = dict.fromkeys(row.label for row in rows)
    return [label for label in labels if {row.task for row in rows if row.label == label} == tasks]


def _mean_gap(label: str, rows: Iterable[Evidence]) -> float:
    """The mean over data sets of the mean over their tasks, so that no data set counts by the number of its tasks."""
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row.label == label:
            gaps.setdefault(row.data, []).append(row.gap)
    return mean(mean(of_data) for of_data in gaps.values())


def _fits(label: str, labels: bool, memory: bool, reachable: bool) -> bool:
    parsed = parse_label(label)
    sampler, control = make_sampler(parsed), find_estimator(parsed.estimator).control
    return (
        (labels or not uses_aux(sampler, parsed.estimator))
        and (memory or not control.remembers)
        and (reachable or not sampler.accepts_no_mask)
    )


def _cost(label: str, clients: int | None, parameters: int | None) -> str:
    parsed = parse_label(label)
    known = "each client's auxiliary variables" if uses_aux(make_sampler(parsed), parsed.estimator) else "sizes alone"
    if not find_estimator(parsed.estimator).control.remembers:
        return f"the server knows {known}, and keeps fewer than 100 numbers a client."
    size = "one update a client"
    if clients is not None and parameters is not None:
        size += f", {4e-9 * clients * parameters:.3g} GB as float32 (memory_dtype=bfloat16 halves it)"
    return f"the server knows {known}, and keeps {size}."


def _caveats(evidence: Sequence[Evidence], reachable: bool) -> Iterable[str]:
    data = list(dict.fromkeys(row.data for row in evidence))
    yield f"All are simulations, with {len(data)} data sets ({', '.join(data)}) and rates tuned for each method."
    open_ = [row.task for row in evidence if row.low <= 0]
    if len(open_) > len(evidence) / 2:
        yield f"Thin: on {len(open_)} of {len(evidence)} tasks the interval contains 0: perhaps no better than uniform."
    if not reachable:
        yield "Thin: in these tasks all clients were available."
