"""What each kind of sweep shows: its tables, the rows of ``table.csv``, its picture, and what
its verdict compares.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl import analysis
from deltafl.types import FloatArray

from .curves import draw_curves, lines_of, looks_of
from .groups import Group, Row
from .measures import (
    LEAST_SEEDS,
    Measure,
    Statement,
    accuracy,
    area,
    best_within,
    centre,
    late_loss,
    late_probe,
    mean_sd,
    rounds_to,
    second_half,
)
from .spec import TEXTS, Reported, View
from .text import DASH, Cells, ends, folded, formatted, interval_cells, markdown, plus_minus
from .verdict import Measures, between, number_text

#: A column of a Markdown table: its heading, and its text in a row.
Column = tuple[str, Callable[[dict[str, Any]], str]]


class Shown(NamedTuple):
    """Tables with their headings, rows of ``table.csv``, the picture's file, a verdict; what it
    compares, by part.

    ``number`` is what stands beside the verdict where no methods are compared.
    ``beside`` has measures that decide nothing: those by which the benchmark judges.
    """

    tables: list[tuple[str, str]]
    cells: Cells
    picture: str
    measures: Measures
    verdict: str | None = None
    number: str = ""
    beside: Measures = {}  # noqa: RUF012


def _head(group: Group, row: Row) -> dict[str, Any]:
    return {"part": group.part, "sampler": row.label, "method": row.name, "seeds": len(row.runs)}


def _table_of(columns: Sequence[Column], cells: Cells, left: int = 1) -> str:
    lines = [[text(cell) for _, text in columns] for cell in cells]
    return markdown([head for head, _ in columns], lines, left=left)


def _against(group: Group, measure: Measure, row: Row) -> Statement:
    return between(group, measure, row.label, group.baseline)


def measures_of(group: Group, view: View) -> list[Measure]:
    """What the verdict compares: rounds to the threshold if there is one, then the accuracy or
    the loss.
    """
    y = (*view.y, group.metric)[0]
    value = _value_of(y, view.best_of(group.part))
    if group.threshold is not None and y == group.metric:
        return [rounds_to(group.threshold, group.metric), value]
    return [value]


def _value_of(y: str, best: int = 5) -> Measure:
    return accuracy(best) if y == "accuracy" else late_loss(y == "log10-loss")


def beside_of(group: Group) -> list[Measure]:
    """The measures of the benchmark: mean accuracy over all rounds, and rounds to the threshold
    by the mean of five.
    """
    if group.metric != "accuracy":
        return []
    found = [area(min(run.horizon for run in group.runs))]
    if group.threshold is not None:
        found.append(rounds_to(group.threshold, group.metric, smoothed=True))
    return found


def show_table(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    """A table in the paper's form for each part, with the paper's numbers beside ours, and
    curves.
    """
    tables = []
    cells = Cells()
    measures = {}
    for group in groups:
        compared = measures[group.part] = measures_of(group, view)
        own = [_paper_cell(group, row, view, compared[-1]) for row in group.rows]
        columns, more = _paper_columns(group, own, compared[-1])
        blocks = [_table_of(columns, own), _table_note(group, view)]
        if more:
            blocks.append(folded("More columns", _table_of([columns[0], *more], own)))
        tables.append((group.title, "\n\n".join(blocks)))
        cells += own
    draw_curves(groups, (groups[0].metric,), min(2, len(groups)), folder / "curves.png")
    beside = {group.part: beside_of(group) for group in groups}
    return Shown(tables, cells, "curves.png", measures, beside=beside)


def _paper_cell(group: Group, row: Row, view: View, value: Measure) -> dict[str, Any]:
    mean, sd, _ = value.over_seeds(row.runs)
    cell = _head(group, row) | {"value": value.name, "mean": mean, "sd": sd}
    by_client = {
        seed: run._replace(accuracy_r=run.client_accuracy_r)
        for seed, run in row.runs.items()
        if run.client_accuracy_r is not None
    }
    client_mean, _, missing = accuracy(view.best_of(group.part)).over_seeds(by_client)
    if len(by_client) - missing == len(row.runs):
        cell["client_accuracy"] = client_mean
    paper = group.reported.get(row.label, Reported())
    cell |= {f"paper_{name}": number for name, number in paper}
    is_baseline = row.label == group.baseline
    if group.metric == "accuracy":
        measure = beside_of(group)[0]
        cell["area"], cell["area_sd"], _ = measure.over_seeds(row.runs)
        if not is_baseline:
            above = number_text(_against(group, measure, row))
            cell["area_above"] = above.replace(measure.unit, "")
    if group.threshold is None:
        return cell
    crossing = rounds_to(group.threshold, group.metric)
    cell["rounds"], _, cell["never"] = crossing.over_seeds(row.runs)
    smoothed = rounds_to(group.threshold, group.metric, smoothed=True)
    cell["rounds_smoothed"], _, cell["never_smoothed"] = smoothed.over_seeds(row.runs)
    cell |= _seconds(row, group.threshold)
    if not is_baseline:
        speedup = _against(group, crossing, row)
        cell |= {"speedup": speedup.estimate, "low": speedup.low, "high": speedup.high}
        cell |= {"pairs": speedup.pairs, "left_out": speedup.left_out}
        theirs = group.reported.get(group.baseline, Reported()).rounds
        cell["paper_speedup"] = theirs / paper.rounds if theirs and paper.rounds else None
    return cell


def _seconds(row: Row, threshold: float) -> dict[str, float | None]:
    """Means of the seconds to the threshold over the seeds that reached it."""
    wall = []
    cpu = []
    for run in row.runs.values():
        at = analysis.reach(run, threshold)
        if at is not None:
            wall.append(run.seconds_r[at])
            if run.cpu_seconds_r is not None:
                cpu.append(run.cpu_seconds_r[at])
    return {"seconds": mean_sd(np.array(wall))[0], "cpu_seconds": mean_sd(np.array(cpu))[0]}


def _paper_columns(group: Group, cells: Cells, value: Measure) -> tuple[list[Column], list[Column]]:
    """The columns that decide, the speed-up first, and those to unfold."""
    percent = group.metric == "accuracy"
    paper = bool(group.reported)
    goal = group.threshold is not None
    heading, form = ("accuracy, %", ".2f") if percent else (value.name, ".3f")
    by_client = any("client_accuracy" in cell for cell in cells)
    paper_seconds = any(cell["paper_seconds"] is not None for cell in cells)
    rounds = rounds_to(group.threshold or 0, group.metric).name

    def shown(*columns: tuple[bool, str, Callable[[dict[str, Any]], str]]) -> list[Column]:
        return [(head, text) for is_shown, head, text in columns if is_shown]

    first = shown(
        (True, "method", lambda c: c["method"]),
        (goal, "speed-up [95 %]", _speedup_text),
        (goal and paper, "paper's speed-up", _paper_speedup_text),
        (True, heading, lambda c: plus_minus(c["mean"], c["sd"], form)),
        (
            paper,
            "paper's accuracy",
            lambda c: plus_minus(c["paper_accuracy"], c["paper_sd"], ".2f"),
        ),
        (goal, rounds, lambda c: _rounds_text(c, "")),
        (goal and paper, "paper's rounds", lambda c: formatted(c["paper_rounds"], ".0f")),
        (percent, "area above baseline, points [95 %]", lambda c: c.get("area_above", "baseline")),
    )
    more = shown(
        (percent, "mean accuracy (area), %", lambda c: plus_minus(c["area"], c["area_sd"], ".2f")),
        (by_client, "mean over clients, %", lambda c: formatted(c.get("client_accuracy"), ".2f")),
        (goal, "rounds by mean of five", lambda c: _rounds_text(c, "_smoothed")),
        (goal, "wall seconds", lambda c: _seconds_text(c["seconds"])),
        (goal, "CPU seconds", lambda c: _seconds_text(c["cpu_seconds"])),
        (goal and paper_seconds, "paper's seconds", lambda c: _seconds_text(c["paper_seconds"])),
    )
    return first, more


def _rounds_text(cell: dict[str, Any], suffix: str) -> str:
    mean = cell[f"rounds{suffix}"]
    never = cell[f"never{suffix}"]
    seeds = cell["seeds"]
    if mean is None:
        return f"never ({seeds} of {seeds} seeds)"
    return f"{mean:.1f} ({never} of {seeds} never)" if never else f"{mean:.1f}"


def _seconds_text(number: float | None) -> str:
    return DASH if number is None else analysis.human_seconds(number)


def _speedup_text(cell: dict[str, Any]) -> str:
    if "speedup" not in cell:
        return "baseline"
    if cell["speedup"] is None:
        return DASH
    mark = "\\*" if cell["left_out"] else ""
    return f"{cell['speedup']:.2f}{mark}{ends(cell['low'], cell['high'])}"


def _paper_speedup_text(cell: dict[str, Any]) -> str:
    return formatted(cell["paper_speedup"], ".2f") if "speedup" in cell else "baseline"


def _table_note(group: Group, view: View) -> str:
    notes = {
        "accuracy": group.metric == "accuracy",
        "loss": group.metric == "loss",
        "threshold": group.threshold is not None,
        "reported": bool(group.reported),
        "seconds": any(number.seconds is not None for number in group.reported.values()),
    }
    named = {"best": view.best_of(group.part), "baseline": group.row(group.baseline).name}
    return " ".join(TEXTS["pages"][key].format(**named) for key, shown in notes.items() if shown)


def show_curves(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    tables = []
    cells = Cells()
    measures = {}
    for group in groups:
        measures[group.part] = measures_of(group, view)
        others = [_value_of(y) for y in view.y[1:]]
        every = [*measures[group.part], *others, *beside_of(group)]
        heads = ["method"]
        for measure in every:
            unit = ", %" if measure.scale > 1 else ""
            heads += [f"{measure.name}{unit} [95 %]", f"against {group.row(group.baseline).name}"]
        lines = []
        for row in group.rows:
            line = [row.name]
            for measure in every:
                cell, texts = _value_cell(group, row, measure)
                cells.append(cell)
                line += texts
            lines.append(line)
        tables.append((group.title, markdown(heads, lines)))
    heading, table = tables[-1]
    tables[-1] = (heading, f"{table}\n\n{TEXTS['pages']['curves']}")
    draw_curves(groups, view.y, min(3, len(groups)), folder / "curves.png")
    return Shown(tables, cells, "curves.png", measures)


def _value_cell(group: Group, row: Row, measure: Measure) -> tuple[dict[str, Any], list[str]]:
    mean, sd, missing = measure.over_seeds(row.runs)
    number_s = measure.scale * measure.numbers(row.runs)
    low = high = None
    if len(number_s) >= LEAST_SEEDS:
        _, low, high = analysis.mean_interval(number_s)
    cell = _head(group, row) | {"value": measure.name, "mean": mean, "sd": sd}
    cell |= {"low": low, "high": high, "missing": missing}
    text = plus_minus(mean, sd, ".4g", ".2g") + ends(low, high, ".4g")
    if missing:
        text += f" ({missing} of {len(row.runs)} {measure.failed})"
    if row.label == group.baseline:
        return cell, [text, "baseline"]
    against = _against(group, measure, row)
    interval = interval_cells("in_favour", (against.estimate, against.low, against.high))
    cell |= {"form": measure.form, **interval, "pairs": against.pairs}
    return cell, [text, number_text(against)]


def show_best(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    tables = []
    cells = Cells()
    measures = {}
    panels = []
    looks = looks_of(groups)
    best = view.best_of("")
    label = f"mean of the {best} best accuracies, %"
    for group in groups:
        length = min(run.num_rounds for run in group.runs)
        horizons = [horizon for horizon in view.rounds if horizon <= length] or [length]
        own = measures[group.part] = [best_within(horizon, best) for horizon in horizons]
        lines = []
        bands = []
        for row in group.rows:
            line = [row.name]
            for horizon, measure in zip(horizons, own, strict=True):
                mean, sd, _ = measure.over_seeds(row.runs)
                cells.append(
                    _head(group, row) | {"rounds": horizon, "best": best, "mean": mean, "sd": sd}
                )
                line.append(plus_minus(mean, sd, ".2f"))
            lines.append(line)
            value_sh = 100 * np.array(
                [[measure.value(run) for measure in own] for run in row.runs.values()], float
            )
            bands.append(analysis.band_of([(np.array(horizons), value_h) for value_h in value_sh]))
        heads = ["method", *(f"best {best} of {horizon} rounds, %" for horizon in horizons)]
        tables.append((group.title, markdown(heads, lines) + "\n\n± is the sd over seeds."))
        caption = analysis.panel_title(group.title, group.runs)
        panels.append(
            analysis.Panel(caption, lines_of(group.rows, looks, bands), "first rounds", label)
        )
    analysis.draw_panels(panels, min(3, len(groups)), analysis.CAPTION, folder / "best.png")
    return Shown(tables, cells, "best.png", measures)


def show_probes(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    """Each probe column's mean over the second half of the rounds, its range there, the share
    within bounds.
    """
    tables = []
    cells = Cells()
    measures = {}
    columns: list[Column] = [
        ("method", lambda cell: cell["method"]),
        ("what", lambda cell: cell["value"]),
        ("mean, second half", lambda cell: plus_minus(cell["mean"], cell["sd"], ".4g", ".2g")),
        ("least", lambda cell: formatted(cell["least"], ".4g")),
        ("largest", lambda cell: formatted(cell["largest"], ".4g")),
    ]
    if view.bounds:
        columns.append(("the paper's bounds", lambda cell: cell.get("bounds", DASH)))
        columns.append(("measured rounds within", _within_text))
    for group in groups:
        measures[group.part] = [late_probe(title, column) for title, column in view.columns.items()]
        own = [cell for row in group.rows for cell in _probe_cells(group, row, view)]
        tables.append((group.title, _table_of(columns, own, left=2)))
        cells += own
    _draw_probes(groups, view, folder / "probes.png")
    return Shown(tables, cells, "probes.png", measures, *_bounds_verdict(groups, cells))


def _within_text(cell: dict[str, Any]) -> str:
    return f"{cell['within']} of {cell['measured']}" if "within" in cell else DASH


def _probe_cells(group: Group, row: Row, view: View) -> Cells:
    cells: Cells = []
    runs = row.runs.values()
    for title, column in view.columns.items():
        cell = _probe_cell(group, row, title, [second_half(run, column) for run in runs])
        if column in view.bounds:
            low, high = view.bounds[column]
            every = np.concatenate([run.probe(column) for run in runs])
            every = every[np.isfinite(every)]
            within = int(np.sum((every >= low) & (every <= high)))
            cell |= {"bounds": f"{low:g} to {high:g}", "measured": len(every), "within": within}
        cells.append(cell)
    if view.ratio is not None:
        names = {column: title for title, column in view.columns.items()}
        title = " / ".join(names.get(column, column) for column in view.ratio)
        ratios = [_ratio(run, *view.ratio) for run in runs]
        cells.append(_probe_cell(group, row, title, ratios))
    return cells


def _probe_cell(group: Group, row: Row, title: str, late_s: Sequence[FloatArray]) -> dict[str, Any]:
    means = [mean for late in late_s if (mean := centre(late)) is not None]
    mean, sd = mean_sd(np.array(means))
    cell = _head(group, row) | {"value": title, "mean": mean, "sd": sd}
    late = np.concatenate(late_s)
    cell["least"] = float(late.min()) if len(late) else None
    cell["largest"] = float(late.max()) if len(late) else None
    return cell


def _ratio(run: analysis.Run, high: str, low: str) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_r = run.probe(high) / run.probe(low)
    return second_half(run._replace(probes={**run.probes, "ratio": ratio_r}), "ratio")


def _bounds_verdict(groups: Sequence[Group], cells: Cells) -> tuple[str | None, str]:
    """Whether the paper's bounds hold in every measured round, on all data or on some; None if
    it states none.
    """
    shares = []
    broken = []
    for group in groups:
        own = [cell for cell in cells if cell["part"] == group.part and "bounds" in cell]
        inside = sum(cell["within"] for cell in own)
        measured = sum(cell["measured"] for cell in own)
        if own:
            shares.append(f"{inside} of {measured} values of {group.title}")
            broken.append(inside < measured)
    if not shares:
        return None, ""
    number = f"Within the bounds: {', '.join(shares)}."
    if not any(broken):
        return "holds", number
    return "is contradicted" if all(broken) else "holds in part", number


def _draw_probes(groups: Sequence[Group], view: View, path: Path) -> None:
    looks = looks_of(groups)
    panels = []
    for group, (title, column) in product(groups, view.columns.items()):
        curves_s = [
            [(run.probe("round").astype(int), run.probe(column)) for run in row.runs.values()]
            for row in group.rows
        ]
        lines = lines_of(group.rows, looks, [analysis.band_of(curves) for curves in curves_s])
        goal = next((end for end in view.bounds.get(column, ()) if 0 < end < np.inf), None)
        caption = analysis.panel_title(group.title, group.runs)
        panels.append(analysis.Panel(caption, lines, y_label=title, goal=goal))
    note = analysis.CAPTION + " Dashed: the paper's bound." * any(panel.goal for panel in panels)
    analysis.draw_panels(panels, min(2, len(panels)), note, path)


SHOW: dict[str, Callable[[Sequence[Group], View, Path], Shown]] = {
    "table": show_table,
    "curves": show_curves,
    "best-accuracies": show_best,
    "probes": show_probes,
}
