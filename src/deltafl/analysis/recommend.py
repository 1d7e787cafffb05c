"""Which sampler? The benchmark's answer for federations like yours, with its evidence.

``evidence.csv`` beside this file has the gap that each practical, unbiased method closes on each
task of the benchmark. ``python -m reproduction.evidence`` makes it from
``results/benchmark/table.csv``; a test compares the two.
"""

import csv
from collections.abc import Iterable, Sequence
from importlib.resources import files
from statistics import mean
from typing import NamedTuple

from ..errors import DeltaflError, is_in
from ..estimators.table import find_estimator
from ..samplers.label import make_sampler, parse_label, uses_aux


class Evidence(NamedTuple):
    """What one method did on one task of the benchmark, n of m clients selected; 95 % intervals
    over paired seeds.
    """

    task: str
    data: str
    clients: int
    selected: int
    unequal: bool  #: whether clients have unequal numbers of examples
    label: str
    #: share of the gap from uniform sampling (0) to full participation (1), by the area under the
    #: accuracy
    gap: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        interval = f"{self.gap:5.2f} [{self.low:.2f}, {self.high:.2f}]"
        return (
            f"  {self.task:<28}  {self.selected:>3} of {self.clients:<4}  {interval}  "
            f"{self.seeds} seeds"
        )


class Recommendation(NamedTuple):
    """A sampler, as ``make_plan``, ``DeltaStrategy`` and ``deltafl compare`` take it, and why;
    ``str()`` is text.
    """

    label: str
    why: str
    evidence: tuple[Evidence, ...]  #: its rows of the benchmark, tasks like yours alone
    cost: str  #: what the server has to know and keeps
    caveats: tuple[str, ...]  #: where the evidence is thin

    def __str__(self) -> str:
        heading = "Evidence, the share of that gap that it closes, with 95 % intervals:"
        rows = map(str, self.evidence)
        text = [
            f"{self.label}: {self.why}",
            f"Cost: {self.cost}",
            heading,
            *rows,
            *self.caveats,
            self.usage,
        ]
        return "\n".join(text)

    @property
    def usage(self) -> str:
        """How to use it on the command line, in Python and in Flower, one line each."""
        parsed = parse_label(self.label)
        population = "sizes"
        number = ""
        label = f"{self.label}+average=0.5"
        sampler = make_sampler(parsed)
        after = ""
        client = ""
        if sampler.census is not None:
            after = ".with_census(answers)  # docs/census.md"
            client = ", and ClientApp(mods=[delta_mod])"
        elif uses_aux(sampler, parsed.estimator):
            population = "deltafl.Population.from_sizes(sizes, aux=label_shares)"
            number = ", aux=10"  # ten labels
        return (
            f"Command line: deltafl compare --task YOURS.csv --samplers 'full,uniform,{label}'  # "
            "docs/own-data.md\n"
            f'Python: plan = deltafl.make_plan("{label}", {population}, n=10){after}\n'
            f'Flower: strategy = DeltaStrategy("{label}", n=10{number}){client}  # of '
            "deltafl.flower"
        )


def recommend(
    *,
    unequal_sizes: bool | None = None,
    labels: bool = False,
    census: bool = True,
    memory: bool = True,
    reachable: bool = True,
    clients: int | None = None,
    parameters: int | None = None,
) -> Recommendation:
    """Recommend the unbiased method that closed most of the gap on the benchmark's tasks that are
    like your federation.

    Args:
        unequal_sizes: Whether clients have unequal numbers of examples; None if you do not know.
        labels: Whether the server may know each client's shares of labels (or other auxiliary
            variables) beforehand.
        census: Whether every client can do one round's work, and answer once, before the first draw
            (docs/census.md).
        memory: Whether the server has space for one update of each client.
        reachable: Whether every selected client can be expected to reply.
        clients: m, for the cost.
        parameters: d, for the cost.

    Raises:
        DeltaflError: If an argument is none of these.

    Example:
        >>> recommend(labels=True, census=False).label
        'balanced'
    """
    for name, number in {"clients": clients, "parameters": parameters}.items():
        if number is not None and not is_in(number, "[1, inf)"):
            raise DeltaflError(f"{name} is {number!r}; write a whole number >= 1, or leave it out")
    for name, answer in {
        "labels": labels,
        "census": census,
        "memory": memory,
        "reachable": reachable,
    }.items():
        if answer not in (True, False):
            raise DeltaflError(f"{name} is {answer!r}; write True or False")
    rows = [row for row in read_evidence() if unequal_sizes in (None, row.unequal)]
    tasks = {row.task for row in rows}
    complete = [
        x
        for x in dict.fromkeys(r.label for r in rows)
        if {r.task for r in rows if r.label == x} == tasks
    ]
    allowed = [label for label in complete if _fits(label, labels, census, memory, reachable)]
    gaps = {label: _mean_gap(label, rows) for label in allowed}
    best, *others = sorted(allowed, key=lambda label: -gaps[label])
    following = ", ".join(f"{x} {gaps[x]:.2f}" for x in others[:2])
    most = f"the most of the {len(allowed)} unbiased methods that fit. Next: {following}."
    why = (
        f"closes {gaps[best]:.2f} of the gap between uniform sampling (0) and full participation "
        "(1) on the "
        f"{len(tasks)} tasks like yours, "
        f"{most if others else 'and is the only unbiased method that fits.'}"
    )
    evidence = tuple(row for row in rows if row.label == best)
    caveats = (*_ties(best, others, rows), *_caveats(best, evidence, reachable))
    return Recommendation(best, why, evidence, _cost(best, clients, parameters), caveats)


def read_evidence() -> list[Evidence]:
    """The rows of ``evidence.csv``."""
    with files(__package__).joinpath("evidence.csv").open(encoding="utf-8") as file:
        kinds = {**Evidence.__annotations__, "unequal": lambda text: text == "yes"}
        return [
            Evidence(**{name: kinds[name](text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def _mean_gap(label: str, rows: Iterable[Evidence]) -> float:
    """The mean over data sets of the mean over their tasks, so that no data set counts by the
    number of its tasks.
    """
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row.label == label:
            gaps.setdefault(row.data, []).append(row.gap)
    return mean(map(mean, gaps.values()))


def _ties(best: str, others: Iterable[str], rows: Iterable[Evidence]) -> Iterable[str]:
    """Which methods are not clearly behind: on no task do their intervals lie below those of the
    best.
    """
    found = {(row.label, row.task): row for row in rows}
    tasks = dict.fromkeys(task for _, task in found)
    ties = [
        x for x in others if all(found[x, task].high >= found[best, task].low for task in tasks)
    ]
    if ties:
        yield (
            f"Not clearly behind: {', '.join(ties[:3])}. Their intervals overlap on each task: "
            "seeds decide."
        )


def _fits(label: str, labels: bool, census: bool, memory: bool, reachable: bool) -> bool:
    parsed = parse_label(label)
    sampler = make_sampler(parsed)
    control = find_estimator(parsed.estimator).control
    asks = sampler.census is not None
    needs_labels = uses_aux(sampler, parsed.estimator)
    has_what_it_needs = (census if asks else labels or not needs_labels) and (
        memory or not control.remembers
    )
    return has_what_it_needs and (reachable or not sampler.accepts_no_mask)


def _cost(label: str, clients: int | None, parameters: int | None) -> str:
    parsed = parse_label(label)
    sampler = make_sampler(parsed)
    known = "sizes alone"
    kept = "fewer than 150 numbers a client"
    control = find_estimator(parsed.estimator).control
    if sampler.census is not None:
        known = f"{sampler.census.size + 1} numbers"
        models = sampler.census.components + 1
        if control.uses_first_updates:
            known = f"{known} and its first update in 2.75 bits a parameter"
            models = 2 * models
            kept = "those, fewer than 20 numbers a client"
        known = f"sizes, and from each client's answer after one round of training {known}"
        kept = f"{kept} and {models} models"
    elif uses_aux(sampler, parsed.estimator):
        known = "q auxiliary variables of each client, such as shares of labels"
        kept = f"q + 1 models and {kept}"
    if control.remembers:
        kept = "one update a client"
        if clients is not None and parameters is not None:
            kept += (
                f", {4e-9 * clients * parameters:.3g} GB as float32 (memory_dtype=bfloat16 "
                "halves it)"
            )
    return f"the server knows {known}, and keeps {kept}."


def _caveats(label: str, evidence: Sequence[Evidence], reachable: bool) -> Iterable[str]:
    yield (
        "The numbers are without +average=0.5, whose model, plan.model(state), is no worse "
        "(docs/backbones.md)."
    )
    if make_sampler(parse_label(label)).census is not None:
        yield (
            "Add +scaffold if the model is linear and clients take ten local steps a round; with a "
            "CNN add +mime=0.7 "
            "and at least double the local rate (docs/backbones.md)."
        )
    data = list(dict.fromkeys(row.data for row in evidence))
    sets = "one data set" if len(data) == 1 else f"{len(data)} data sets"
    yield f"All are simulations, on {sets} ({', '.join(data)}), with rates tuned for each method."
    yield (
        "Where clients may lie, add clip='median' (biased; deltafl run --clip median; "
        "docs/flower-operation.md)."
    )
    num_open = sum(row.low <= 0 for row in evidence)
    if num_open > len(evidence) / 2:
        yield (
            f"Thin: on {num_open} of {len(evidence)} tasks the interval contains 0: perhaps no "
            "better than uniform."
        )
    if not reachable:
        yield (
            "Thin: in these tasks all clients were available; the benchmark has one where they "
            "are away by label."
        )
