"""What each kind of experiment shows: its tables, its picture, and what its verdict compares."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .cells import Cells
from .figures import draw_bars, draw_curves, draw_probes
from .groups import Group
from .measures import Measure, accuracy, best_within, compare, late_loss, late_probe, rounds_to
from .tables import paper_speedup, paper_table, values_table
from .tables_of_figures import best_table, bounds_verdict, horizons_of, probe_remarks, probes_table
from .views import BestView, CurvesView, ProbesView, View


class Shown(NamedTuple):
    """What a kind shows: its tables, the numbers in them, its picture, and what its verdict compares, by part."""

    tables: list[tuple[str, str]]
    cells: Cells
    picture: str
    measures: dict[str, list[Measure]]
    remarks: list[str]
    verdict: str | None = None


def _show_table(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    tables, cells, measures = [], Cells(), {}
    for group in groups:
        measures[group.part] = _measures(group, view, [])
        table, own = paper_table(group, view.best_of(group.part), measures[group.part][-1])
        tables.append((group.title, table + "\n\n" + _table_note(group, view)))
        cells += own
    y = "accuracy" if groups[0].metric == "accuracy" else "loss"
    columns = 2 if len(groups) > 1 else 1
    draw_curves(groups, CurvesView(y=(y,), columns=columns), folder / "curves.png")
    remarks = [text for group in groups for text in _beside_paper(group, measures[group.part])]
    return Shown(tables, cells, "curves.png", measures, remarks)


def _table_note(group: Group, view: View) -> str:
    seeds = sorted({len(row.records) for row in group.rows})
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    best = view.best_of(group.part)
    value = (
        f"Accuracy: mean of the {best} best evaluations in the last 4 % of the rounds"
        if group.metric == "accuracy"
        else "Loss: mean over the last 4 % of the rounds"
    )
    text = f"{value}; ± is the sd over seeds ({number})."
    if group.threshold is None:
        return text
    text += (
        " Rounds and seconds are means over the seeds that reached the threshold. Seconds are without evaluation: by "
        "the clock, on the hardware below and beside other runs there, and of the processor, which these do not slow; "
        f"the speed-up is over {group.name(group.baseline)} and paired seeds, in rounds"
        ", \\* without seeds in which one of the two never reached it."
    )
    if group.reported:
        text += (
            " The paper's accuracies and rounds are for orientation: with another model, split or data they are not "
            "comparable. What is compared is the speed-up, a ratio within one table."
        )
    if any(number.seconds is not None for number in group.reported.values()):
        text += " The paper's seconds are those of one RTX 3090."
    return text


def _beside_paper(group: Group, measures: Sequence[Measure]) -> list[str]:
    """Whether the paper's speed-ups lie within our intervals."""
    measure = next((m for m in measures if m.form == "ratio"), None)
    base = group.row(group.baseline)
    words: dict[str, list[str]] = {"within": [], "below": [], "above": []}
    for row in group.rows:
        paper = paper_speedup(group, row.label)
        if measure is None or paper is None or row is base:
            continue
        ours = compare(group.title, measure, (row.name, row.records), (base.name, base.records))
        if ours.low is None or ours.high is None:
            continue
        word = "within" if ours.low <= paper <= ours.high else "below" if paper < ours.low else "above"
        words[word].append(f"{row.name} ({paper:.2f})")
    parts = [f"{word} our interval for {', '.join(names)}" for word, names in words.items() if names]
    return [f"{group.title}: the paper's speed-up over {base.name} lies {'; '.join(parts)}."] if parts else []


def _show_curves(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    assert isinstance(view, CurvesView)  # by VIEWS
    tables, cells, measures = [], Cells(), {}
    for group in groups:
        measures[group.part] = _measures(group, view, [view.y[0]])
        others = [late_loss(y == "log10-loss") if y != "accuracy" else accuracy(5) for y in view.y[1:]]
        table, own = values_table(group, [*measures[group.part], *others])
        tables.append((group.title, table))
        cells += own
    draw_curves(groups, view, folder / "curves.png")
    if tables:
        tables[-1] = (tables[-1][0], f"{tables[-1][1]}\n\n{_VALUES_NOTE}")
    return Shown(tables, cells, "curves.png", measures, [])


_VALUES_NOTE = (
    "Mean ± sd over seeds, with the 95 % interval of the mean; accuracy is the mean of the best evaluations in the "
    "last 4 % of the rounds, a loss the mean over them. Against the baseline: over paired seeds."
)


def _measures(group: Group, view: View, ys: Sequence[str]) -> list[Measure]:
    """What a verdict compares: rounds to the threshold if there is one, then the accuracy or the loss."""
    y = ys[0] if ys else group.metric
    value = accuracy(view.best_of(group.part)) if y == "accuracy" else late_loss(y == "log10-loss")
    fits = group.threshold is not None and y == group.metric
    return [rounds_to(group.threshold, group.metric), value] if fits and group.threshold is not None else [value]


def _show_best(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    assert isinstance(view, BestView)  # by VIEWS
    tables, cells, measures = [], Cells(), {}
    for group in groups:
        measures[group.part] = [best_within(horizon, view.best) for horizon in horizons_of(group, view)]
        table, own = best_table(group, view)
        tables.append((group.title, table + "\n\n± is the standard deviation over seeds."))
        cells += own
    draw_bars(groups, view, folder / "best.png")
    return Shown(tables, cells, "best.png", measures, [])


def _show_probes(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    assert isinstance(view, ProbesView)  # by VIEWS
    tables, cells, measures, remarks = [], Cells(), {}, []
    for group in groups:
        measures[group.part] = [late_probe(title, column, view.larger) for title, column in view.columns.items()]
        table, own = probes_table(group, view)
        tables.append((group.title, table))
        cells += own
        remarks += probe_remarks(group, view, own)
    draw_probes(groups, view, folder / "probes.png")
    return Shown(tables, cells, "probes.png", measures, remarks, bounds_verdict(groups, cells))


SHOW: dict[str, Callable[[Sequence[Group], Any, Path], Shown]] = {
    "table": _show_table,
    "thresholds": _show_table,
    "curves": _show_curves,
    "best-accuracies": _show_best,
    "probes": _show_probes,
}
