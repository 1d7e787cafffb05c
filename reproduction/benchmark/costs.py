"""``python -m reproduction costs``: who is ahead at equal cost, in trainings of clients, in bytes
and in seconds of a clock.

What a run has spent when the mean of five evaluations reaches a level; a run that never does, or
diverges, counts as all that it spent, a lower bound. A row is compared with the recommended one by
the ratio of means over paired seeds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl import analysis
from deltafl.analysis import Interval, Run, mean_interval, ratio_of_means
from deltafl.analysis.plots import ABSCISSAE
from deltafl.samplers import parse_label
from deltafl.simulation import OnProgress
from deltafl.types import FloatArray

from ..measures import reach
from ..page import OwnPage, diverged, hardware, write
from ..running import Request, no_run
from ..spec import TEXTS, Experiment, View, is_ours
from ..text import DASH, Cells, ends, folded, interval_cells, markdown
from .judge import needs
from .page import grid_text, missing, setting_text
from .parts import BASELINE, Part, parts_of
from .runs import Method, Reasons, Result, Store, gather, play
from .tables import MB, name_of

_TEXTS = TEXTS["costs"]


class Cost(NamedTuple):
    """What a run spends: its name on the page, its column, and the numbers of a run up to each
    evaluation.
    """

    name: str
    column: str
    of: Callable[[Run], Any]
    form: str = ".0f"
    abscissa: str = ""  # that of curves; none where a method is not judged by it


def _up(run: Run) -> FloatArray:
    return np.asarray(run.bytes_up_r, np.float64) / MB


COSTS = (
    Cost("rounds", "rounds", lambda run: run.round_r, ".1f"),
    Cost("trainings", "trainings", lambda run: run.trainings_r, abscissa="trainings"),
    Cost("MB down", "mb_down", lambda run: run.bytes_r / MB - _up(run), ".2f"),
    Cost("MB up", "mb_up", _up, ".2f"),
    Cost("MB", "mb", lambda run: run.bytes_r / MB, ".2f", "bytes"),
    Cost("seconds", "seconds", lambda run: run.clock_r, ".0f", "clock"),
)
#: What equal cost means; the other columns say what it is made of.
JUDGED = tuple(cost for cost in COSTS if cost.abscissa)


class Spent(NamedTuple):
    """What the seeds of a method spent to a level."""

    value: dict[int, float]  #: by seed
    never: int  #: runs that did not reach it, and count as all that they spent

    @property
    def mean(self) -> Interval:
        return mean_interval(np.array([*self.value.values()]))

    def text(self, form: str) -> str:
        mean, low, high = self.mean
        return f"{'≥ ' * bool(self.never)}{mean:{form}}{ends(low, high, form)}"


def spent(method: Method, cost: Cost, level: float, smoothed: bool = True) -> Spent:
    value = {}
    never = 0
    for seed, run in method.runs.items():
        at = None
        if run.diverged is None:
            at = reach(run, level, smoothed)
        never += at is None
        value[seed] = float(np.asarray(cost.of(run))[-1 if at is None else at])
    return Spent(value, never)


class Factor(NamedTuple):
    """How much of a cost a method needs, as a share of what the recommended one needs."""

    ratio: Interval
    bound: bool  #: a run of the method never reached the level: the ratio is a lower bound

    def __str__(self) -> str:
        form = ".2f"
        return f"{'≥ ' * self.bound}{self.ratio.mean:{form}}{ends(*self.ratio[1:], form)}"

    @property
    def ahead(self) -> bool:
        return not self.bound and self.ratio.high is not None and self.ratio.high < 1

    @property
    def behind(self) -> bool:
        # A lower bound above 1 is enough.
        return self.ratio.low is not None and self.ratio.low > 1


def factor(
    method: Method, base: Method, cost: Cost, level: float, smoothed: bool = True
) -> Factor | None:
    """None where a run of the recommended method never reaches the level, or no seed is shared."""
    own = spent(method, cost, level, smoothed)
    other = spent(base, cost, level, smoothed)
    seeds = sorted(set(own.value) & set(other.value))
    if other.never or not seeds:
        return None
    ratio = ratio_of_means(*(_of_seeds(found, seeds) for found in (own, other)))
    return Factor(ratio, own.never > 0)


def _of_seeds(found: Spent, seeds: Sequence[int]) -> FloatArray:
    return np.array([found.value[seed] for seed in seeds])


def reproduce_costs(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run what is missing of the parts that the request names, and write the page of everything
    that is finished.
    """
    parts = parts_of(experiment, request.scale, **request.own)
    reasons: Reasons = {}
    if not request.only_page:
        reasons = play(parts, request, on_progress)
    store = Store(request.out)
    results = [result for part in parts if (result := gather(part, store)) is not None]
    if not results:
        raise no_run(request.out, "; ".join(reasons.values()))
    counts = (
        sum(result.done for result in results),
        sum(len(part.methods) * part.seeds for part in parts),
    )
    with store.runs.lock():
        _draw(results, experiment.view, request.out / "curves.png")
        command = replace(request, parts=None).command
        found, by_first = (
            [duel for result in results for duel in duels(result, experiment.view, smoothed)]
            for smoothed in (True, False)
        )
        blocks = _blocks(parts, results, found, by_first, reasons, experiment.view)
        cells = cells_of(results, experiment.view)
        shown = OwnPage(_number(results[0], experiment.view), verdict(found), blocks, cells)
        return write(experiment, shown, request.scale, counts, command, request.out)


class Duel(NamedTuple):
    """A method against the recommended one by one cost, at one level of one part."""

    result: Result
    level: float
    cost: Cost
    label: str
    found: Factor

    @property
    def is_rival(self) -> bool:
        """Of others, and possible for a server."""
        return not is_ours(self.label) and needs(self.label) != "oracle"


def duels(result: Result, view: View, smoothed: bool = True) -> Iterator[Duel]:
    base = _recommended(result, view)
    if base is None:
        return
    for level, cost, method in product(result.part.levels, JUDGED, result.shown):
        found = factor(method, base, cost, level, smoothed)
        if found is not None and method.label != base.label:
            yield Duel(result, level, cost, method.label, found)


def _recommended(result: Result, view: View) -> Method | None:
    return result.find(result.part.recommended or view.recommended or "")


def verdict(found: Sequence[Duel]) -> str:
    """Of the pairs of a level and a cost, on how many a rival is ahead."""
    questions = {_question(duel) for duel in found if duel.is_rival}
    lost = {_question(duel) for duel in found if duel.is_rival and duel.found.ahead}
    if not questions:
        return "is not decided"
    if not lost:
        return "holds"
    if len(lost) == len(questions):
        return "is contradicted"
    return f"is contradicted by {len(lost)} of {len(questions)} pairs of a level and a cost"


def _question(duel: Duel) -> tuple[str, float, str]:
    return duel.result.part.name, duel.level, duel.cost.name


def _number(result: Result, view: View) -> str:
    base = _recommended(result, view)
    level = result.part.levels[len(result.part.levels) // 2]
    if base is None:
        return DASH
    texts = [f"{spent(base, cost, level).text(cost.form)} {cost.name}" for cost in JUDGED]
    return f"{result.part.title}: `{base.label}` reaches {100 * level:g} % with {texts[0]}."


def _blocks(
    parts: Sequence[Part],
    results: Sequence[Result],
    found: Sequence[Duel],
    by_first: Sequence[Duel],
    reasons: Reasons,
    view: View,
) -> list[str]:
    blocks = [
        "## Verdict",
        f"**The claim {verdict(found)}.** By the first evaluation at the level instead of the mean "
        f"of five it {verdict(by_first)}. {_TEXTS['ahead']}",
        f"By the mean of five {_more_clients(found)} By the first evaluation "
        f"{_more_clients(by_first)}",
        _ahead(found),
        folded("By the first evaluation at the level", _ahead(by_first)),
        "![Accuracy over trainings, megabytes and seconds](curves.png)",
        _TEXTS["read"],
    ]
    every = []
    for result in results:
        rounds = folded("What a round costs", _a_round(result))
        blocks += [f"## {result.part.title}", _sent(result, view), rounds]
        for level in result.part.levels:
            blocks.append(f"### To reach {100 * level:g} %\n\n{_table(result, level, view)}")
        runs = [
            (f"`{method.label}`", run) for method in result.shown for run in method.runs.values()
        ]
        blocks.append(diverged("Runs that diverged and were ended there:", runs))
        every += [run for _, run in runs]
    grids = "; ".join(map(grid_text, results))
    ran = "\n".join(map(setting_text, results))
    return [
        *blocks,
        "## Appendix",
        folded("Learning rates", TEXTS["benchmark"]["rates"].format(grids=grids)),
        folded("What was run", f"{ran}\n\n{missing(parts, results, reasons)}"),
        folded("Hardware and versions", hardware(every)),
        _TEXTS["files"],
    ]


def _ahead(found: Sequence[Duel]) -> str:
    """For each level and cost who is ahead, others and variants of ours, and who is level."""
    lines = []
    for question in dict.fromkeys(map(_question, found)):
        own = [duel for duel in found if _question(duel) == question]
        ahead = sorted(
            (duel for duel in own if duel.found.ahead), key=lambda duel: duel.found.ratio.mean
        )
        open_ = [duel for duel in own if not (duel.found.ahead or duel.found.behind)]
        head = own[0]
        lines.append(
            [
                f"{head.result.part.title}, {100 * head.level:g} %",
                head.cost.name,
                _names(duel for duel in ahead if duel.is_rival),
                _names(duel for duel in ahead if not duel.is_rival),
                _names(duel for duel in open_ if duel.is_rival),
            ]
        )
    heads = ["level", "cost", "others ahead", "other forms of ours ahead", "others, not decided"]
    return markdown(heads, lines, left=len(heads))


def _names(found: Iterable[Duel]) -> str:
    return "; ".join(f"{name_of(duel.label)} {duel.found}" for duel in found) or DASH


def _more_clients(found: Sequence[Duel]) -> str:
    """Whether a rival that asks more clients a round is ahead."""
    ahead = [
        f"{name_of(duel.label)} at {100 * duel.level:g} % of {duel.result.part.title} by "
        f"{duel.cost.name}"
        for duel in found
        if duel.is_rival and duel.found.ahead and _asks_more(duel)
    ]
    if not ahead:
        return "no rival with more clients a round is ahead."
    return f"with more clients a round these are ahead: {', '.join(ahead)}."


def _asks_more(duel: Duel) -> bool:
    settings = parse_label(duel.label).settings
    usual = duel.result.part.common.sample or 1
    return needs(duel.label) == "everyone" or settings.get("sample", usual) > usual


def _sent(result: Result, view: View) -> str:
    """The bytes of all rounds of the recommended method, without corrected steps, and of uniform
    draws.
    """
    base = _recommended(result, view)
    label = base.label if base else BASELINE
    labels = dict.fromkeys((label, label.replace("+scaffold", ""), BASELINE))
    texts = []
    for method in filter(None, map(result.find, labels)):
        runs = [*method.runs.values()]
        down, up = (_mean(runs, cost, -1) for cost in COSTS[2:4])
        texts.append(f"`{method.label}` {down:.2f} MB down and {up:.2f} MB up")
    first = ""
    if base is not None:
        first = f" The first round of `{base.label}` is {result.num_clients} trainings."
    return f"In all {result.part.horizon} rounds: {', '.join(texts)}.{first}"


def _table(result: Result, level: float, view: View) -> str:
    """What each method spends to a level; the cheapest in trainings first."""
    base = _recommended(result, view)
    heads = ["method", *(cost.name for cost in COSTS if cost.name != "MB")]
    heads += [f"{cost.name}, ratio" for cost in JUDGED]
    lines = []
    trainings = JUDGED[0]

    def place(method: Method) -> tuple[bool, float]:
        found = spent(method, trainings, level)
        return found.never > 0, found.mean.mean

    for method in sorted(result.shown, key=place):
        line = [name_of(method.label)]
        line += [spent(method, cost, level).text(cost.form) for cost in COSTS if cost.name != "MB"]
        for cost in JUDGED:
            ratio = None
            if base is not None and method is not base:
                ratio = factor(method, base, cost, level)
            line.append(str(ratio) if ratio else DASH)
        lines.append(line)
    return markdown(heads, lines)


def _a_round(result: Result) -> str:
    """What the first round and a later one cost, from the records."""
    heads = ["method", "n", "rate", "first round: trainings", "MB down", "MB up", "seconds"]
    heads += ["a later round: MB down", "MB up", "seconds", "all rounds: MB down", "MB up"]
    lines = []
    down, up, seconds = (COSTS[k] for k in (2, 3, 5))
    for method in result.shown:
        runs = [run for run in method.runs.values() if run.diverged is None] or [
            *method.runs.values()
        ]
        first = [_mean(runs, cost, 0) for cost in (COSTS[1], down, up, seconds)]
        last = [_mean(runs, cost, -1) for cost in (down, up, seconds)]
        later = [
            (end - start) / max(runs[0].num_rounds - 1, 1)
            for end, start in zip(last, first[1:], strict=True)
        ]
        line = [name_of(method.label), str(runs[0].settings.get("sample"))]
        line += [f"{method.search.best:g}{'*' * bool(method.search.edge)}", f"{first[0]:.0f}"]
        line += [f"{value:.4g}" for value in (*first[1:], *later, *last[:2])]
        lines.append(line)
    return markdown(heads, lines)


def _mean(runs: Sequence[Run], cost: Cost, at: int) -> float:
    return float(np.mean([np.asarray(cost.of(run))[at] for run in runs]))


def cells_of(results: Sequence[Result], view: View) -> Cells:
    """Every method, level and cost, by the mean of five and by the first evaluation."""
    cells = []
    for result in results:
        base = _recommended(result, view)
        for level, method in product(result.part.levels, result.shown):
            for rule in ("mean of five", "first"):
                smoothed = rule == "mean of five"
                cell: dict[str, Any] = {"part": result.part.name, "level": level}
                cell |= {"method": method.label, "rule": rule, "seeds": len(method.runs)}
                cell |= {"rate": method.search.best}
                cell |= {"never": spent(method, COSTS[0], level, smoothed).never}
                for cost in COSTS:
                    found = spent(method, cost, level, smoothed)
                    cell |= interval_cells(cost.column, found.mean)
                for cost in JUDGED:
                    ratio = factor(method, base, cost, level, smoothed) if base else None
                    if ratio is not None and method is not base:
                        cell |= interval_cells(f"{cost.column}_ratio", ratio.ratio)
                cells.append(cell)
    return cells


def _draw(results: Sequence[Result], view: View, path: Path) -> None:
    look_of = analysis.looks(view.core)
    panels = []
    for result, cost in product(results, JUDGED):
        abscissa = ABSCISSAE[cost.abscissa]
        lines = []
        for label in view.core:
            method = result.find(label)
            if method is None:
                continue
            runs = list(method.runs.values())
            band = analysis.curve_band(runs, "accuracy")._replace(round_r=abscissa.mean(runs))
            lines.append(analysis.Line(label, look_of[label], band))
        caption = ""
        if cost is JUDGED[0]:
            caption = result.part.title
        panels.append(analysis.Panel(caption, lines, abscissa.label, "test accuracy, %"))
    analysis.draw_panels(panels, len(JUDGED), analysis.CAPTION, path, log_x=True)
