"""Which sampler? The benchmark's answer for federations like yours, with its evidence.

``evidence.csv`` beside this file has the gap that each practical, unbiased method closes on each
task of the benchmark. ``python -m reproduction.evidence`` makes it from
``results/benchmark/table.csv``; a test compares the two.
"""

import csv
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import mean
from typing import Literal, NamedTuple

from ..errors import DeltaflError, is_in
from ..estimators.control_variates import ControlVariate
from ..estimators.table import find_estimator
from ..estimators.two_bits import code_length
from ..samplers.base import Sampler
from ..samplers.label import make_sampler, parse_label, uses_aux
from ..server.first_round import FirstRound
from ..server.scaffold import Scaffold
from ..types import is_whole

#: The settings that suit a model; methods are compared with each of them.
SUITED_ALL = "+average=0.5"
_FIRST = "+first_round=exact"
_STEP = "+server_lr=2.0"
_CORRECTED = "+average=0.5+scaffold"
_MOMENTUM = "+average=0.5+mime=0.7"
SUITED = {
    None: [""],
    "linear": [_CORRECTED, _CORRECTED + _FIRST, _CORRECTED + _STEP, _CORRECTED + _FIRST + _STEP],
    "cnn": [_MOMENTUM, _MOMENTUM + _FIRST],
}
#: As many clients are few: no task of the benchmark has fewer than 100.
_FEW = 30


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
    settings: str  #: what stands after the label, such as ``+average=0.5+scaffold``
    #: share of the gap from uniform sampling (0) to full participation (1), by the area under the
    #: accuracy
    gap: float
    low: float
    high: float
    seeds: int

    @property
    def method(self) -> str:
        """The label with its settings."""
        return self.label + self.settings

    def __str__(self) -> str:
        interval = f"{self.gap:5.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.task:<28} {self.selected:>3} of {self.clients:<4} {interval}"


class Recommendation(NamedTuple):
    """A sampler, and why: ``make_plan``, ``DeltaStrategy`` and ``compare`` take ``label +
    settings``. ``str()`` is text.
    """

    label: str
    settings: str  #: what to write after it
    why: str
    evidence: tuple[Evidence, ...]  #: its rows of the benchmark, tasks like yours alone
    cost: str  #: what the server has to know and keeps
    caveats: tuple[str, ...]  #: where the evidence is thin
    sample: int = 10  #: n, in the lines of ``usage``

    def __repr__(self) -> str:
        tasks = (f"  {row}" for row in self.evidence)
        return "\n".join(
            [
                _wrapped(f"{self.evidence[0].method}: {self.why}"),
                _wrapped(f"Cost: {self.cost}"),
                "",
                "Share of that gap that it closes, by task [95 %]:",
                *tasks,
                "",
                *(_wrapped(f"- {caveat}") for caveat in self.caveats),
                "",
                self.usage,
            ]
        )

    @property
    def usage(self) -> str:
        """How to use it on the command line, in Python and in Flower."""
        label = self.label + self.settings
        sampler, _, uses_labels, _ = _parts(label)
        python = f'deltafl.make_plan("{label}", sizes, n={self.sample})'
        flower = f'DeltaStrategy("{label}", n={self.sample})'
        if sampler.census is not None:
            python += "\n  plan = plan.with_census(answers)  # docs/why/census.md"
            flower += "  # and ClientApp(mods=[delta_mod])"
        elif uses_labels:
            python = (
                "deltafl.make_plan(\n"
                f'      "{label}",\n'
                "      deltafl.Population.from_sizes(sizes, aux=label_shares),\n"
                f"      n={self.sample},\n"
                "  )"
            )
            flower = f'DeltaStrategy("{label}", n={self.sample}, aux=10)  # 10 labels'
        return (
            "Command line:\n"
            f"  deltafl compare --samplers 'full,uniform,{label}' \\\n"
            f"    --task TABLE.csv --label LABEL --column CLIENT --sample {self.sample}\n"
            f"Python:\n  plan = {python}\n"
            f"Flower:\n  strategy = {flower}"
        )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ", break_on_hyphens=False)


class _Method(NamedTuple):
    """What a method is made of, and what it needs."""

    sampler: Sampler
    control: ControlVariate
    uses_labels: bool  #: or other auxiliary variables
    asks_all: bool  #: in the first round


def _parts(method: str) -> _Method:
    parsed = parse_label(method)
    sampler = make_sampler(parsed)
    has_census = sampler.census is not None
    return _Method(
        sampler,
        find_estimator(parsed.estimator).control,
        not has_census and uses_aux(sampler, parsed.estimator),
        has_census or FirstRound.name in parsed.settings,
    )


def _check(answers: Mapping[str, object], counts: Mapping[str, object]) -> None:
    for name, answer in answers.items():
        # "no" would count as yes.
        if not isinstance(answer, bool):
            raise DeltaflError(f"{name} is {answer!r}; write True, or False")
    for name, number in counts.items():
        if number is not None and not (is_whole(number) and is_in(number, "[1, inf)")):
            raise DeltaflError(f"{name} is {number!r}; write a whole number >= 1, or leave it out")


def recommend(
    *,
    unequal_sizes: bool | None = None,
    labels: bool = False,
    census: bool = True,
    memory: bool = True,
    reachable: bool = True,
    clients: int | None = None,
    parameters: int | None = None,
    model: Literal["linear", "cnn"] | None = None,
) -> Recommendation:
    """Recommend the unbiased method that closed most of the gap on the benchmark's tasks that are
    like your federation; of those level with it there, the one that did so on all tasks.

    Args:
        unequal_sizes: Whether clients have unequal numbers of examples; None if you do not know.
        labels: Whether the server may know each client's shares of labels (or other auxiliary
            variables) beforehand.
        census: Whether every client can do one round's work, and answer once, before the first draw
            (docs/why/census.md, docs/how-to/first-round.md).
        memory: Whether the server has space for one update of each client.
        reachable: Whether every selected client can be expected to reply. No method needs that:
            without it the evidence is thinner.
        clients: m, for the cost, and because some methods compare all pairs of clients.
        parameters: d, for the cost.
        model: ``"linear"`` or ``"cnn"``: methods are then compared with the settings that suit
            such a model. By default they are compared without settings.

    Raises:
        DeltaflError: If an argument is none of these.

    Example:
        >>> recommend(labels=True, census=False).label
        'balanced'
        >>> recommend(model="linear").settings
        '+average=0.5+scaffold+server_lr=2.0'
    """
    allowed = {"labels": labels, "census": census, "memory": memory}
    _check({**allowed, "reachable": reachable}, {"clients": clients, "parameters": parameters})
    if model not in SUITED:
        raise DeltaflError(f"model is {model!r}; write 'linear' or 'cnn', or leave it out")
    fitting = []
    has_others = False
    for row in read_evidence():
        most = _parts(row.label).sampler.most_clients
        # Who does not say how many clients there are may have few.
        few_enough = most is None or (clients or 1) <= most
        if not few_enough or not _fits(row.method, allowed.values()):
            continue
        if row.settings in SUITED[model]:
            fitting.append(row)
        else:
            has_others = True
    if not fitting:
        raise DeltaflError(
            "no method that fits was measured with the settings for such a model; leave out model"
        )
    like = "like yours"
    alike = [row for row in fitting if unequal_sizes in (None, row.unequal)]
    if not alike:
        alike = fitting
        like = "of the benchmark, whose clients' sizes are not like yours"
    rows = _by_method(alike)
    gaps = _gaps(rows)
    leader, *others = sorted(gaps, key=lambda label: -gaps[label])
    level = [leader, *_level(leader, others, rows)]
    # Where tasks like yours cannot tell methods apart, all tasks decide.
    everywhere = _by_method(fitting)
    overall = _gaps(everywhere)
    best = max(level, key=lambda label: (overall.get(label, -math.inf), gaps[label]))
    others = [label for label in (leader, *others) if label != best]
    count = len(rows[best])
    tasks = f"{count} tasks" if count > 1 else "task"
    why = (
        f"closes {gaps[best]:.2f} of the gap between uniform sampling (0) and full participation "
        f"(1) on the {tasks} {like}"
    )
    if not others:
        why += ". No other unbiased method that fits was measured."
    elif best == leader:
        following = ", ".join(f"{label} {gaps[label]:.2f}" for label in others[:2])
        why += f", the most of the {len(gaps)} unbiased methods that fit. Next: {following}."
    else:
        why += (
            f". Of the {len(gaps)} unbiased methods that fit, {leader} leads there with "
            f"{gaps[leader]:.2f}, but the intervals overlap. Of those level with it this one "
            f"closes the most, {overall[best]:.2f}, on all {len(everywhere[best])} tasks of the "
            "benchmark."
        )
    evidence = tuple(rows[best].values())
    sample = 10
    if few := (clients or _FEW + 1) <= _FEW:
        # A third of them: with more than there are, nothing would be sampled.
        sample = max(1, (clients or 1) // 3)
    level = _level(best, others, rows)
    advice = [] if model else _without_settings(best, has_others)
    caveats = tuple(_caveats(evidence, level, reachable, few, advice))
    return Recommendation(
        evidence[0].label,
        evidence[0].settings or SUITED_ALL,
        why,
        evidence,
        _cost(best, clients, parameters),
        caveats,
        sample,
    )


def _by_method(rows: Iterable[Evidence]) -> dict[str, dict[str, Evidence]]:
    """The rows of each method by task."""
    found: dict[str, dict[str, Evidence]] = {}
    for row in rows:
        found.setdefault(row.method, {})[row.task] = row
    return found


def read_evidence() -> list[Evidence]:
    """The rows of ``evidence.csv``."""
    with files(__package__).joinpath("evidence.csv").open(encoding="utf-8") as file:
        # Annotations are types here, which turn a cell's text into a value.
        kinds = {**Evidence.__annotations__, "unequal": lambda text: text == "yes"}
        return [
            Evidence(**{name: kinds[name](text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def _gaps(rows: Mapping[str, Mapping[str, Evidence]]) -> dict[str, float]:
    """The mean gap of each method that was tried on as many tasks as any; methods are compared on
    tasks that all of them have.
    """
    num_tasks = max(map(len, rows.values()))
    means = {}
    for label, by_task in rows.items():
        if len(by_task) == num_tasks:
            gaps: dict[str, list[float]] = {}
            for row in by_task.values():
                gaps.setdefault(row.data, []).append(row.gap)
            # Of means, so that no data set counts by the number of its tasks.
            means[label] = mean(map(mean, gaps.values()))
    return means


def _level(
    best: str,
    others: Iterable[str],
    rows: Mapping[str, Mapping[str, Evidence]],
) -> list[str]:
    """Which others are not clearly behind: on no task do their intervals lie below those of the
    best.
    """
    low = {task: row.low for task, row in rows[best].items()}
    return [x for x in others if all(row.high >= low[task] for task, row in rows[x].items())]


def _fits(method: str, allowed: Iterable[bool]) -> bool:
    """Whether labels, a census and memory are there, as far as it needs them; absence is weighed
    for every method alike.
    """
    _, control, uses_labels, asks_all = _parts(method)
    needs = (uses_labels, asks_all, control.remembers)
    return all(has or not need for has, need in zip(allowed, needs, strict=True))


def _cost(method: str, clients: int | None, parameters: int | None) -> str:
    sampler, control, uses_labels, asks_all = _parts(method)
    known = "sizes alone"
    kept = "fewer than 150 numbers a client"
    if sampler.census is not None:
        known = f"{sampler.census.size + 1} numbers"
        models = sampler.census.components + 1
        if control.uses_first_updates:
            known += " and its first update in 2.75 bits a parameter"
            models *= 2
            size = ""
            if clients is not None and parameters is not None:
                # Eight bytes a number.
                numbers = sampler.census.size + 1 + code_length(parameters)
                size = f" ({8e-9 * clients * numbers:.3g} GB)"
            kept = f"those{size}, fewer than 20 numbers a client"
        known = f"sizes, and from each client's answer after one round of training {known}"
        kept += f" and {models} models"
    elif uses_labels:
        known = "q auxiliary variables of each client, such as shares of labels"
        kept = f"q + 1 models and {kept}"
    if asks_all and sampler.census is None:
        known = known.removesuffix(" alone") + ", and each client's update of the first round"
    if control.remembers:
        kept = "one update a client"
        if clients is not None and parameters is not None:
            # Four bytes a number.
            gigabytes = f"{4e-9 * clients * parameters:.3g} GB"
            kept += f", {gigabytes} as float32 (memory_dtype=bfloat16 halves it)"
    return f"the server knows {known}, and keeps {kept}."


def _without_settings(method: str, has_numbers: bool) -> Iterable[str]:
    """What to add to a method that was compared without settings, as far as it takes it."""
    yield (
        "The numbers are without +average=0.5, whose model, plan.model(state), is no worse "
        "(docs/how-to/average.md)."
    )
    _, control, _, asks_all = _parts(method)
    momentum = "a CNN add +mime=0.7 and at least double the local rate"
    advice = f"With {momentum}"
    if Scaffold.fits(None, control):
        # After a first round of all clients alone was the longer step measured.
        step = f"{_STEP} and halve the local rate" if asks_all else ""
        advice = f"With a linear model add +scaffold{step}; with {momentum}"
    advice += " (docs/how-to/backbones.md)."
    yield advice + " --model has numbers." * has_numbers


def _caveats(
    evidence: Sequence[Evidence],
    alike: Sequence[str],
    reachable: bool,
    few: bool,
    advice: Iterable[str],
) -> Iterable[str]:
    if alike:
        yield (
            f"Not clearly behind: {', '.join(alike[:3])}. Their intervals overlap on each task: "
            "seeds decide."
        )
    if few:
        yield (
            "With so few clients asking all may cost little: see first how far uniform ends "
            "behind full (deltafl compare --samplers full,uniform)."
        )
    yield from advice
    if _STEP in evidence[0].settings:
        yield (
            "A server step of 2 goes with half the local rate that is best without it "
            "(docs/how-to/rates.md)."
        )
    data = ", ".join(dict.fromkeys(row.data for row in evidence))
    yield f"All are simulations, on data of {data}, with rates tuned for each method."
    yield (
        "Where clients may lie, add clip='median' (biased; deltafl run --clip median; "
        "docs/how-to/flower-security.md)."
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
