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
    beside: Measures | None = None


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
    y = view.y[0] if view.y else group.metric
    value = accuracy(view.best_of(group.part)) if y == "accuracy" else late_loss(y == "log10-loss")
    if group.threshold is not None and y == group.metric:
        return [rounds_to(group.threshold, group.metric), value]
    return [value]


def beside_of(group: Group) -> list[Measure]:
    """The measures of the benchmark: mean accuracy over all rounds, and rounds to the threshold
    by the mean of five.
    """
    if group.metric != "accuracy":
        return []
    found = [area(min(run.horizon for run in group.runs))]
    return (
        found
        if group.threshold is None
        else [*found, rounds_to(group.threshold, group.metric, smoothed=True)]
    )


def show_table(groups: Sequence[Group], view: View, folder: Path) -> Shown:
    """A table in the paper's form for each part, with the paper's numbers beside ours, and
    curves.
    """
    tables = []
    cells = Cells()
    measures = {}
    for group in groups:
        measures[group.part] = measures_of(group, view)
        own = [_paper_cell(group, row, view, measures[group.part][-1]) for row in group.rows]
        columns, more = _paper_columns(group, own, measures[group.part][-1])
        rest = [folded("More columns", _table_of([columns[0], *more], own))] if more else []
        tables.append(
            (group.title, "\n\n".join([_table_of(columns, own), _table_note(group, view), *rest]))
        )
        cells += own
    draw_curves(groups, (groups[0].metric,), 2 if len(groups) > 1 else 1, folder / "curves.png")
    return Shown(
        tables,
        cells,
        "curves.png",
        measures,
        beside={group.part: beside_of(group) for group in groups},
    )


def _paper_cell(group: Group, row: Row, view: View, value: Measure) -> dict[str, Any]:
    mean, sd, _ = value.over_seeds(row.runs)
    cell = _head(group, row) | {"value": value.name, "mean": mean, "sd": sd}
    client_rs = [(seed, run, run.client_accuracy_r) for seed, run in row.runs.items()]
    by_client = {
        s: run._replace(accuracy_r=value_r) for s, run, value_r in client_rs if value_r is not None
    }
    client_mean, _, missing = accuracy(view.best_of(group.part)).over_seeds(by_client)
    if len(by_client) - missing == len(row.runs):
        cell["client_accuracy"] = client_mean
    paper = group.reported.get(row.label, Reported())
    cell |= {"paper_accuracy": paper.accuracy, "paper_sd": paper.sd, "paper_rounds": paper.rounds}
    cell["paper_seconds"] = paper.seconds
    for measure in beside_of(group)[:1]:
        cell["area"], cell["area_sd"], _ = measure.over_seeds(row.runs)
        if row.label != group.baseline:
            cell["area_above"] = number_text(_against(group, measure, row)).replace(
                measure.unit, ""
            )
    if group.threshold is None:
        return cell
    for suffix, smoothed in (("", False), ("_smoothed", True)):
        mean, _, never = rounds_to(group.threshold, group.metric, smoothed).over_seeds(row.runs)
        cell |= {f"rounds{suffix}": mean, f"never{suffix}": never}
    reached = [
        (run, at)
        for run in row.runs.values()
        if (at := analysis.reach(run, group.threshold)) is not None
    ]
    cell["seconds"] = _mean([run.seconds_r[at] for run, at in reached])
    cell["cpu_seconds"] = _mean(
        [run.cpu_seconds_r[at] for run, at in reached if run.cpu_seconds_r is not None]
    )
    if row.label != group.baseline:
        speedup = _against(group, rounds_to(group.threshold, group.metric), row)
        cell |= {
            "speedup": speedup.estimate,
            "low": speedup.low,
            "high": speedup.high,
            "pairs": speedup.pairs,
        }
        cell["left_out"] = speedup.only_first + speedup.only_second
        theirs = group.reported.get(group.baseline, Reported()).rounds
        cell["paper_speedup"] = theirs / paper.rounds if theirs and paper.rounds else None
    return cell


def _mean(numbers: Sequence[float]) -> float | None:
    known = [float(number) for number in numbers if np.isfinite(number)]
    return float(np.mean(known)) if known else None


def _paper_columns(group: Group, cells: Cells, value: Measure) -> tuple[list[Column], list[Column]]:
    """The columns that decide, the speed-up first, and those to unfold."""
    percent = group.metric == "accuracy"
    paper = bool(group.reported)
    goal = group.threshold is not None
    head, form = ("accuracy, %", ".2f") if percent else (value.name, ".3f")
    by_client = any("client_accuracy" in cell for cell in cells)
    paper_seconds = any(cell["paper_seconds"] is not None for cell in cells)

    def shown(*columns: tuple[bool, str, Callable[[dict[str, Any]], str]]) -> list[Column]:
        return [(head, text) for is_shown, head, text in columns if is_shown]

    first = shown(
        (True, "method", lambda c: c["method"]),
        (goal, "speed-up [95 %]", _speedup_text),
        (goal and paper, "paper's speed-up", _paper_speedup_text),
        (True, head, lambda c: plus_minus(c["mean"], c["sd"], form)),
        (
            paper,
            "paper's accuracy",
            lambda c: plus_minus(c["paper_accuracy"], c["paper_sd"], ".2f"),
        ),
        (goal, rounds_to(group.threshold or 0, group.metric).name, lambda c: _rounds_text(c, "")),
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
    return f"{mean:.1f}" + (f" ({never} of {seeds} never)" if never else "")


def _seconds_text(number: float | None) -> str:
    return DASH if number is None else analysis.human_seconds(number)


def _speedup_text(cell: dict[str, Any]) -> str:
    if cell.get("speedup") is None:
        return DASH if "speedup" in cell else "baseline"
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
        others = [
            accuracy() if y == "accuracy" else late_loss(y == "log10-loss") for y in view.y[1:]
        ]
        every = [*measures[group.part], *others, *beside_of(group)]
        heads = ["method"]
        lines = []
        for measure in every:
            unit = ", %" if measure.scale > 1 else ""
            heads += [f"{measure.name}{unit} [95 %]", f"against {group.row(group.baseline).name}"]
        for row in group.rows:
            found = [_value_cell(group, row, measure) for measure in every]
            cells += [cell for cell, _ in found]
            lines.append([row.name, *(text for _, texts in found for text in texts)])
        tables.append((group.title, markdown(heads, lines)))
    tables[-1] = (tables[-1][0], f"{tables[-1][1]}\n\n{TEXTS['pages']['curves']}")
    draw_curves(groups, view.y, min(3, len(groups)), folder / "curves.png")
    return Shown(tables, cells, "curves.png", measures)


def _value_cell(group: Group, row: Row, measure: Measure) -> tuple[dict[str, Any], list[str]]:
    mean, sd, missing = measure.over_seeds(row.runs)
    number_s = measure.numbers(row.runs)
    interval = (
        analysis.mean_interval(number_s)[1:] if len(number_s) >= LEAST_SEEDS else (None, None)
    )
    low, high = (None if end is None else measure.scale * end for end in interval)
    cell = _head(group, row) | {"value": measure.name, "mean": mean, "sd": sd}
    cell |= {"low": low, "high": high, "missing": missing}
    text = plus_minus(mean, sd, ".4g", ".2g") + ends(low, high, ".4g")
    text += f" ({missing} of {len(row.runs)} {measure.failed})" if missing else ""
    if row.label == group.baseline:
        return cell, [text, "baseline"]
    against = _against(group, measure, row)
    cell |= {
        "form": measure.form,
        **interval_cells("in_favour", (against.estimate, against.low, against.high)),
    }
    cell["pairs"] = against.pairs
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
            found = [measure.over_seeds(row.runs)[:2] for measure in own]
            for horizon, (mean, sd) in zip(horizons, found, strict=True):
                cells.append(
                    _head(group, row) | {"rounds": horizon, "best": best, "mean": mean, "sd": sd}
                )
            lines.append([row.name, *(plus_minus(mean, sd, ".2f") for mean, sd in found)])
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
        within = "{within} of {measured}".format_map
        columns.append(("the paper's bounds", lambda cell: cell.get("bounds", DASH)))
        columns.append(
            ("measured rounds within", lambda cell: within(cell) if "within" in cell else DASH)
        )
    for group in groups:
        measures[group.part] = [
            late_probe(title, column, True) for title, column in view.columns.items()
        ]
        own = [cell for row in group.rows for cell in _probe_cells(group, row, view)]
        tables.append((group.title, _table_of(columns, own, left=2)))
        cells += own
    _draw_probes(groups, view, folder / "probes.png")
    return Shown(tables, cells, "probes.png", measures, *_bounds_verdict(groups, cells))


def _probe_cells(group: Group, row: Row, view: View) -> Cells:
    cells: Cells = []
    for title, column in view.columns.items():
        cell = _probe_cell(
            group, row, title, [second_half(run, column) for run in row.runs.values()]
        )
        if column in view.bounds:
            low, high = view.bounds[column]
            every = np.concatenate([run.probe(column) for run in row.runs.values()])
            every = every[np.isfinite(every)]
            cell |= {"bounds": f"{low:g} to {high:g}", "measured": len(every)}
            cell["within"] = int(np.sum((every >= low) & (every <= high)))
        cells.append(cell)
    if view.ratio is not None:
        names = {column: title for title, column in view.columns.items()}
        title = " / ".join(names.get(column, column) for column in view.ratio)
        cells.append(
            _probe_cell(group, row, title, [_ratio(run, *view.ratio) for run in row.runs.values()])
        )
    return cells


def _probe_cell(group: Group, row: Row, title: str, late_s: Sequence[FloatArray]) -> dict[str, Any]:
    means = [mean for late in late_s if (mean := centre(late)) is not None]
    mean, sd = mean_sd(np.array(means))
    late = np.concatenate(late_s)
    least, largest = (float(late.min()), float(late.max())) if len(late) else (None, None)
    return _head(group, row) | {
        "value": title,
        "mean": mean,
        "sd": sd,
        "least": least,
        "largest": largest,
    }


def _ratio(run: analysis.Run, high: str, low: str) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_r = run.probe(high) / run.probe(low)
    return second_half(run._replace(probes={**run.probes, "ratio": ratio_r}), "ratio")


def _bounds_verdict(groups: Sequence[Group], cells: Cells) -> tuple[str | None, str]:
    """Whether the paper's bounds hold in every measured round, on all data or on some; None if
    it states none.
    """
    bounded = [cell for cell in cells if "bounds" in cell]
    if not bounded:
        return None, ""
    broken = {cell["part"] for cell in bounded if cell["within"] < cell["measured"]}
    shares = []
    for group in groups:
        own = [cell for cell in bounded if cell["part"] == group.part]
        inside, measured = (sum(cell[name] for cell in own) for name in ("within", "measured"))
        shares.append(f"{inside} of {measured} values of {group.title}")
    number = f"Within the bounds: {', '.join(shares)}."
    return "holds" if not broken else "holds in part" if len(broken) < len(
        groups
    ) else "is contradicted", number


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
