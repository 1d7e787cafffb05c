"""The tables of figures: best accuracies, and what probes measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltafl.analysis.statistics import mean_and_sd

from .cells import DASH, Cells, head, markdown, over_seeds, plus_minus, plus_minus_short, scaled, short
from .groups import Group, Row
from .measures import best_within, centre, late_probe, second_half
from .views import BestView, ProbesView


def best_table(group: Group, view: BestView) -> tuple[str, Cells]:
    """Mean of the best accuracies within each number of rounds, ± sd over seeds."""
    horizons = horizons_of(group, view)
    cells, lines = [], []
    for row in group.rows:
        line = [row.name]
        for horizon in horizons:
            measure = best_within(horizon, view.best)
            mean, sd, _ = over_seeds(measure, row.records)
            mean, sd = scaled(mean, measure), scaled(sd, measure)
            cells.append(head(group, row) | {"rounds": horizon, "best": view.best, "mean": mean, "sd": sd})
            line.append(plus_minus(mean, sd, 2))
        lines.append(line)
    heads = [f"best {view.best} of {horizon} rounds, %" for horizon in horizons]
    return markdown(["method", *heads], lines), cells


def horizons_of(group: Group, view: BestView) -> list[int]:
    """The numbers of rounds that all runs have; the whole length if they have none of them."""
    length = min(record.round[-1] for record in group.records)
    return [horizon for horizon in view.rounds if horizon <= length] or [length]


def probes_table(group: Group, view: ProbesView) -> tuple[str, Cells]:
    """Each probe column's mean over the second half of the rounds, its range there, and the share within bounds."""
    heads = ["method", "what", "mean, second half", "least", "largest"]
    heads += ["the paper's bounds", "measured rounds within"] if view.bounds else []
    lines, cells = [], []
    for row in group.rows:
        for cell in _probe_cells(group, row, view):
            cells.append(cell)
            line = [row.name, cell["value"], plus_minus_short(cell["mean"], cell["sd"])]
            line += [short(cell["least"]), short(cell["largest"])]
            if view.bounds:
                bounds = cell.get("bounds")
                line += [bounds, f"{cell['within']} of {cell['measured']}"] if bounds else [DASH, DASH]
            lines.append(line)
    return markdown(heads, lines, left=2), cells


def _probe_cells(group: Group, row: Row, view: ProbesView) -> Cells:
    cells: Cells = []
    for title, column in view.columns.items():
        mean, sd, _ = over_seeds(late_probe(title, column, True), row.records)
        late = np.concatenate([second_half(record, column) for record in row.records.values()])
        least, largest = (float(late.min()), float(late.max())) if len(late) else (None, None)
        cell = head(group, row) | {"value": title, "mean": mean, "sd": sd, "least": least, "largest": largest}
        if column in view.bounds:
            low, high = view.bounds[column]
            every = np.concatenate([record.probe(column) for record in row.records.values()])
            every = every[np.isfinite(every)]
            cell |= {"bounds": f"{low:g} to {high:g}", "measured": len(every)}
            cell["within"] = int(np.sum((every >= low) & (every <= high)))
        cells.append(cell)
    if view.ratio is not None:
        cells.append(head(group, row) | ratio_cell(row, view))
    return cells


def ratio_cell(row: Row, view: ProbesView) -> dict[str, Any]:
    """The ratio of two columns round by round: geometric mean over the second half, then mean and sd over seeds."""
    high, low = view.ratio or ("", "")
    late_s = []
    for record in row.records.values():
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_r = record.probe(high) / record.probe(low)
        shown = record.model_copy(update={"probes": {**record.probes, "ratio": ratio_r.tolist()}})
        late_s.append(second_half(shown, "ratio"))
    means = [mean for late in late_s if (mean := centre(late)) is not None]
    mean, sd = (None if np.isnan(number) else number for number in mean_and_sd(np.array(means)))
    late = np.concatenate(late_s)
    least, largest = (float(late.min()), float(late.max())) if len(late) else (None, None)
    return {"value": _ratio_title(view), "mean": mean, "sd": sd, "least": least, "largest": largest}


def probe_remarks(group: Group, view: ProbesView, cells: Cells) -> list[str]:
    """What the numbers say of the paper's bounds and of the ratio, a sentence a method."""
    ratio = _ratio_title(view)
    sentences = []
    for cell in cells:
        where = f"{group.title}, {cell['method']}"
        if cell["value"] == ratio and cell["mean"] is not None:
            span = f"between {short(cell['least'])} and {short(cell['largest'])} over the second half of the rounds"
            sentences.append(f"{where}: {ratio} is {plus_minus_short(cell['mean'], cell['sd'])}, {span}.")
        if "bounds" in cell:
            count = f"in {cell['within']} of {cell['measured']} measured rounds"
            sentences.append(f"{where}: {cell['value']} is within the paper's {cell['bounds']} {count}.")
    return sentences


def bounds_verdict(groups: Sequence[Group], cells: Cells) -> str | None:
    """Where the paper's bounds hold in every measured round, and where not, how often; None if it states none."""
    bounded = [cell for cell in cells if "bounds" in cell]
    if not bounded:
        return None
    broken = [cell for cell in bounded if cell["within"] < cell["measured"]]
    if not broken:
        return "the bounds hold"
    titles = {group.part: group.title for group in groups}
    parts = list(dict.fromkeys(cell["part"] for cell in bounded))
    held = [titles[part] for part in parts if all(cell["part"] != part for cell in broken)]
    texts = []
    for part in parts:
        counts = [
            f"{cell['method']}, {cell['value']}: within in {cell['within']} of {cell['measured']} measured rounds"
            for cell in broken
            if cell["part"] == part
        ]
        texts += [f"{titles[part]} ({'; '.join(counts)})"] if counts else []
    start = f"the bounds hold on {' and '.join(held)}, and do not on" if held else "the bounds do not hold on"
    return f"{start} {', nor on '.join(texts)}"


def _ratio_title(view: ProbesView) -> str | None:
    if view.ratio is None:
        return None
    names = {column: title for title, column in view.columns.items()}
    return " / ".join(names.get(column, column) for column in view.ratio)
