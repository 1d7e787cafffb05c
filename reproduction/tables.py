"""What each kind of sweep shows: its tables, the rows of ``table.csv``, its picture, and what
its verdict compares.
"""

from collections.abc import Callable, Iterator, Sequence
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
    probed,
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
    beside: Measures
    verdict: str | None
    number: str


class Kind(NamedTuple):
    """How the sweeps of a kind are shown: the measures of a group, its table with its rows of
    ``table.csv``, and the picture of all groups.
    """

    measures: Callable[[Group, View], list[Measure]]
    table: Callable[[Group, View, list[Measure]], tuple[str, Cells]]
    draw: Callable[[Sequence[Group], View, Path], None]
    picture: str
    note: str = ""  # a text of the pages below the last table
    is_judged_beside: bool = False


def show(kind: str, groups: Sequence[Group], view: View, folder: Path) -> Shown:
    how = KINDS[kind]
    measures = {group.part: how.measures(group, view) for group in groups}
    tables = []
    cells = Cells()
    for group in groups:
        table, own = how.table(group, view, measures[group.part])
        tables.append((group.title, table))
        cells += own
    if how.note:
        heading, table = tables[-1]
        tables[-1] = heading, f"{table}\n\n{TEXTS['pages'][how.note]}"
    how.draw(groups, view, folder / how.picture)
    beside: Measures = {}
    if how.is_judged_beside:
        beside = {group.part: beside_of(group) for group in groups}
    return Shown(tables, cells, how.picture, measures, beside, *_bounds_verdict(groups, cells))


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
    if y == "accuracy":
        return accuracy(best)
    return late_loss(y)


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


def _paper_table(group: Group, view: View, measures: list[Measure]) -> tuple[str, Cells]:
    """A table in the paper's form, with the paper's numbers beside ours."""
    cells = [_paper_cell(group, row, view, measures[-1]) for row in group.rows]
    columns, more = _paper_columns(group, cells, measures[-1])
    blocks = [_table_of(columns, cells), _table_note(group, view)]
    if more:
        blocks.append(folded("More columns", _table_of([columns[0], *more], cells)))
    return "\n\n".join(blocks), cells


def _draw_metric(groups: Sequence[Group], view: View, path: Path) -> None:
    draw_curves(groups, (groups[0].metric,), min(2, len(groups)), path)


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
        measure, *_ = beside_of(group)
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
        cell["paper_speedup"] = None
        if theirs and paper.rounds:
            cell["paper_speedup"] = theirs / paper.rounds
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
    heading = value.name
    form = ".3f"
    if percent:
        heading = "accuracy, %"
        form = ".2f"
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
    if never:
        return f"{mean:.1f} ({never} of {seeds} never)"
    return f"{mean:.1f}"


def _seconds_text(number: float | None) -> str:
    if number is None:
        return DASH
    return analysis.human_amount(number)


def _speedup_text(cell: dict[str, Any]) -> str:
    if "speedup" not in cell:
        return "baseline"
    if cell["speedup"] is None:
        return DASH
    mark = "\\*" * bool(cell["left_out"])
    return f"{cell['speedup']:.2f}{mark}{ends(cell['low'], cell['high'])}"


def _paper_speedup_text(cell: dict[str, Any]) -> str:
    if "speedup" not in cell:
        return "baseline"
    return formatted(cell["paper_speedup"], ".2f")


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


def _curves_table(group: Group, view: View, measures: list[Measure]) -> tuple[str, Cells]:
    every = [*measures, *(_value_of(y) for y in view.y[1:]), *beside_of(group)]
    heads = ["method"]
    for measure in every:
        heads.append(f"{measure.name}{', %' * (measure.scale > 1)} [95 %]")
        heads.append(f"against {group.row(group.baseline).name}")
    cells = Cells()
    lines = []
    for row in group.rows:
        line = [row.name]
        for measure in every:
            cell, texts = _value_cell(group, row, measure)
            cells.append(cell)
            line += texts
        lines.append(line)
    return markdown(heads, lines), cells


def _draw_curves(groups: Sequence[Group], view: View, path: Path) -> None:
    draw_curves(groups, view.y, min(3, len(groups)), path)


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


def _horizons(group: Group, view: View) -> list[int]:
    """Up to which rounds the best accuracies are shown, where runs are that long."""
    length = min(run.num_rounds for run in group.runs)
    return [horizon for horizon in view.rounds if horizon <= length] or [length]


def _best_measures(group: Group, view: View) -> list[Measure]:
    return [best_within(horizon, view.best_of("")) for horizon in _horizons(group, view)]


def _best_table(group: Group, view: View, measures: list[Measure]) -> tuple[str, Cells]:
    best = view.best_of("")
    heads = ["method"]
    lines = {row.label: [row.name] for row in group.rows}
    cells = Cells()
    horizons = _horizons(group, view)
    heads += [f"best {best} of {horizon} rounds, %" for horizon in horizons]
    for row, (horizon, measure) in product(group.rows, zip(horizons, measures, strict=True)):
        mean, sd, _ = measure.over_seeds(row.runs)
        cells.append(_head(group, row) | {"rounds": horizon, "best": best, "mean": mean, "sd": sd})
        lines[row.label].append(plus_minus(mean, sd, ".2f"))
    return f"{markdown(heads, lines.values())}\n\n± is the sd over seeds.", cells


def _draw_best(groups: Sequence[Group], view: View, path: Path) -> None:
    looks = looks_of(groups)
    label = f"mean of the {view.best_of('')} best accuracies, %"
    panels = []
    for group in groups:
        horizon_h = np.array(_horizons(group, view))
        bands = []
        for row in group.rows:
            curves = []
            for run in row.runs.values():
                values = [measure.value(run) for measure in _best_measures(group, view)]
                curves.append((horizon_h, 100 * np.array(values)))
            bands.append(analysis.band_of(curves))
        caption = analysis.panel_title(group.title, group.runs)
        lines = lines_of(group.rows, looks, bands)
        panels.append(analysis.Panel(caption, lines, "first rounds", label))
    analysis.draw_panels(panels, min(3, len(groups)), analysis.CAPTION, path)


def _probe_measures(group: Group, view: View) -> list[Measure]:
    return [late_probe(title, column) for title, column in view.columns.items()]


def _probe_table(group: Group, view: View, measures: list[Measure]) -> tuple[str, Cells]:
    """Each probe column's mean over the second half of the rounds, its range there, the share
    within bounds.
    """
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
    cells = [cell for row in group.rows for cell in _probe_cells(group, row, view)]
    return _table_of(columns, cells, left=2), cells


def _within_text(cell: dict[str, Any]) -> str:
    if "within" not in cell:
        return DASH
    return f"{cell['within']} of {cell['measured']}"


def _probe_cells(group: Group, row: Row, view: View) -> Iterator[dict[str, Any]]:
    runs = row.runs.values()
    for title, column in view.columns.items():
        cell = _probe_cell(group, row, title, [second_half(run, column) for run in runs])
        if column in view.bounds:
            low, high = view.bounds[column]
            every = np.concatenate([probed(run, column) for run in runs])
            every = every[np.isfinite(every)]
            within = int(np.sum((every >= low) & (every <= high)))
            cell |= {"bounds": f"{low:g} to {high:g}", "measured": len(every), "within": within}
        yield cell
    if view.ratio is not None:
        names = {column: title for title, column in view.columns.items()}
        title = " / ".join(names.get(column, column) for column in view.ratio)
        yield _probe_cell(group, row, title, [_ratio(run, *view.ratio) for run in runs])


def _probe_cell(group: Group, row: Row, title: str, late_s: Sequence[FloatArray]) -> dict[str, Any]:
    centre_s = np.array([centre(late) for late in late_s])
    mean, sd = mean_sd(centre_s[np.isfinite(centre_s)])
    cell = _head(group, row) | {"value": title, "mean": mean, "sd": sd}
    late = np.concatenate(late_s)
    cell |= {"least": None, "largest": None}
    if len(late):
        cell |= {"least": float(late.min()), "largest": float(late.max())}
    return cell


def _ratio(run: analysis.Run, high: str, low: str) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_r = probed(run, high) / probed(run, low)
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
    if all(broken):
        return "is contradicted", number
    return "holds in part", number


def _draw_probes(groups: Sequence[Group], view: View, path: Path) -> None:
    looks = looks_of(groups)
    panels = []
    for group, (title, column) in product(groups, view.columns.items()):
        curves_s = [
            [(probed(run, "round").astype(int), probed(run, column)) for run in row.runs.values()]
            for row in group.rows
        ]
        lines = lines_of(group.rows, looks, [analysis.band_of(curves) for curves in curves_s])
        goal = next((end for end in view.bounds.get(column, ()) if 0 < end < np.inf), None)
        caption = analysis.panel_title(group.title, group.runs)
        panels.append(analysis.Panel(caption, lines, y_label=title, goal=goal))
    note = analysis.CAPTION + " Dashed: the paper's bound." * any(panel.goal for panel in panels)
    analysis.draw_panels(panels, min(2, len(panels)), note, path)


KINDS = {
    "table": Kind(measures_of, _paper_table, _draw_metric, "curves.png", is_judged_beside=True),
    "curves": Kind(measures_of, _curves_table, _draw_curves, "curves.png", note="curves"),
    "best-accuracies": Kind(_best_measures, _best_table, _draw_best, "best.png"),
    "probes": Kind(_probe_measures, _probe_table, _draw_probes, "probes.png"),
}
