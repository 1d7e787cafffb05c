"""The tables of a page: Markdown for people, and the same numbers as rows of ``table.csv``."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from deltafl.analysis.statistics import mean_interval, mean_of_best
from deltafl.analysis.table import human_seconds
from deltafl.simulation.record import RunRecord

from ..spec import Reported
from .cells import (
    DASH,
    Cells,
    fixed,
    head,
    markdown,
    numbers_of,
    over_seeds,
    plus_minus,
    plus_minus_short,
    scaled,
    short,
)
from .groups import Group, Row
from .measures import Measure, Statement, compare, reach, rounds_to
from .verdict import number_text, ordered_pairs


def paper_table(group: Group, best: int, value: Measure) -> tuple[str, Cells]:
    """A part in the paper's form: accuracy, rounds and seconds to the threshold, speed-up; the paper's beside it.

    Args:
        group: The part.
        best: k of the accuracy.
        value: The accuracy or the loss of the second column.
    """
    cells = [_paper_cells(group, row, best, value) for row in group.rows]
    has_paper = bool(group.reported)
    heads = ["method", "accuracy, %" if group.metric == "accuracy" else value.name]
    heads += ["paper's accuracy"] if has_paper else []
    heads += ["mean over clients, %"] if any(cell.get("client_accuracy") is not None for cell in cells) else []
    if group.threshold is not None:
        heads += [rounds_to(group.threshold, group.metric).name]
        heads += ["paper's rounds"] if has_paper else []
        heads += ["by 5-evaluation mean", "wall seconds", "CPU seconds"]
        heads += ["paper's seconds"] if any(cell["paper_seconds"] is not None for cell in cells) else []
        heads += ["speed-up [95 %]"]
        heads += ["paper's speed-up"] if has_paper else []
    lines = [_paper_line(group, cell, row, heads, has_paper) for cell, row in zip(cells, group.rows, strict=True)]
    return markdown(heads, lines), cells


def _paper_cells(group: Group, row: Row, best: int, value: Measure) -> dict[str, Any]:
    mean, sd, _ = over_seeds(value, row.records)
    cell: dict[str, Any] = head(group, row) | {"value": value.name, "mean": scaled(mean, value)}
    cell |= {"sd": scaled(sd, value)}
    client_s = np.array([_client_accuracy(record, best) for record in row.records.values()], dtype=np.float64)
    if not np.isnan(client_s).any():
        cell["client_accuracy"] = 100 * float(np.mean(client_s))
    paper = group.reported.get(row.label, Reported())
    cell |= {"paper_accuracy": paper.accuracy, "paper_sd": paper.sd, "paper_rounds": paper.rounds}
    cell["paper_seconds"] = paper.seconds
    if group.threshold is None:
        return cell
    rounds, smoothed = (rounds_to(group.threshold, group.metric, smooth) for smooth in (False, True))
    cell |= {"rounds": over_seeds(rounds, row.records)[0], "never": over_seeds(rounds, row.records)[2]}
    cell |= {"rounds_smoothed": over_seeds(smoothed, row.records)[0]}
    cell |= {"never_smoothed": over_seeds(smoothed, row.records)[2]}
    cell |= {name: _seconds(group.threshold, row.records, name) for name in ("seconds", "cpu_seconds")}
    base = group.row(group.baseline)
    if row.label != base.label:
        speedup = compare(group.title, rounds, (row.name, row.records), (base.name, base.records))
        cell |= {"speedup": speedup.estimate, "low": speedup.low, "high": speedup.high, "pairs": speedup.pairs}
        cell["left_out"] = speedup.only_first + speedup.only_second
        cell["paper_speedup"] = paper_speedup(group, row.label)
    return cell


def paper_speedup(group: Group, label: str) -> float | None:
    """The paper's rounds of the baseline over its rounds of a method; None where it reports none."""
    base, own = (group.reported.get(name, Reported()).rounds for name in (group.baseline, label))
    return base / own if base and own else None


def _paper_line(group: Group, cell: dict[str, Any], row: Row, heads: Sequence[str], has_paper: bool) -> list[str]:
    accuracy = group.metric == "accuracy"
    line = [row.name, plus_minus(cell["mean"], cell["sd"], 2 if accuracy else 3)]
    line += [plus_minus(cell["paper_accuracy"], cell["paper_sd"], 2)] if has_paper else []
    if "mean over clients, %" in heads:
        line.append(fixed(cell.get("client_accuracy"), 2))
    if group.threshold is None:
        return line
    seeds = len(row.records)
    line.append(_rounds(cell["rounds"], cell["never"], seeds))
    line += [fixed(cell["paper_rounds"], 0)] if has_paper else []
    line.append(_rounds(cell["rounds_smoothed"], cell["never_smoothed"], seeds))
    names = ["seconds", "cpu_seconds", *(["paper_seconds"] if "paper's seconds" in heads else [])]
    line += [DASH if cell[name] is None else human_seconds(cell[name]) for name in names]
    line.append("baseline" if row.label == group.baseline else _speedup(cell))
    if has_paper:
        line.append("baseline" if row.label == group.baseline else fixed(cell["paper_speedup"], 2))
    return line


def _speedup(cell: dict[str, Any]) -> str:
    if cell["speedup"] is None:
        return DASH
    mark = "\\*" if cell["left_out"] else ""
    ends = "" if cell["low"] is None else f" [{cell['low']:.2f}, {cell['high']:.2f}]"
    return f"{cell['speedup']:.2f}{mark}{ends}"


def values_table(group: Group, measures: Sequence[Measure]) -> tuple[str, Cells]:
    """Each measure of each method: mean ± sd over seeds with a 95 % interval, and against the baseline."""
    heads, lines, cells = ["method"], [], []
    for measure in measures:
        heads += [f"{measure.name}{', %' if measure.scale > 1 else ''} [95 %]", f"against {group.name(group.baseline)}"]
    base = group.row(group.baseline)
    for row in group.rows:
        line = [row.name]
        for measure in measures:
            cell = _value_cell(group, row, base, measure)
            cells.append(cell)
            never = f" ({cell['missing']} of {len(row.records)} {measure.failed})" if cell["missing"] else ""
            ends = "" if cell["low"] is None else f" [{short(cell['low'])}, {short(cell['high'])}]"
            line.append(f"{plus_minus_short(cell['mean'], cell['sd'])}{ends}{never}")
            against = compare(group.title, measure, (row.name, row.records), (base.name, base.records))
            line.append("baseline" if row is base else number_text(against))
        lines.append(line)
    return markdown(heads, lines), cells


def _value_cell(group: Group, row: Row, base: Row, measure: Measure) -> dict[str, Any]:
    mean, sd, missing = over_seeds(measure, row.records)
    number_s = numbers_of(measure, row.records)
    low, high = mean_interval(number_s)[1:] if len(number_s) else (None, None)
    cell = head(group, row) | {"value": measure.name, "mean": scaled(mean, measure), "sd": scaled(sd, measure)}
    cell |= {"low": scaled(low, measure), "high": scaled(high, measure), "missing": missing}
    if row is not base:
        against = compare(group.title, measure, (row.name, row.records), (base.name, base.records))
        cell |= {"form": measure.form, "in_favour": against.estimate}
        cell |= {"in_favour_low": against.low, "in_favour_high": against.high, "pairs": against.pairs}
    return cell


def pairs_table(groups: Sequence[Group], measures: dict[str, list[Measure]]) -> str:
    """All statements of the verdict; empty if there is none."""
    several = len(groups) > 1
    lines = []
    for group in groups:
        for s in ordered_pairs(group, measures[group.part]):
            line = [f"{s.first} before {s.second}", s.measure.name, number_text(s), str(s.pairs), _status(s)]
            lines.append([group.title, *line] if several else line)
    heads = ["the paper's order", "measure", "the first has [95 %]", "paired seeds", "so it is"]
    return markdown(["part", *heads] if several else heads, lines, left=len(heads) + 1) if lines else ""


def _status(statement: Statement) -> str:
    if statement.only_first or statement.only_second:
        return f"{statement.status} ({statement.only_first + statement.only_second} seeds left out)"
    return statement.status


def _client_accuracy(record: RunRecord, best: int) -> float | None:
    column = [np.nan if value is None else value for value in record.client_accuracy]
    if len(column) != len(record.round):
        return None
    if record.diverged is not None:
        return column[-1] if np.isfinite(column[-1]) else None
    mean = mean_of_best(np.array(column), record.run().round_r, True, best)
    return None if np.isnan(mean) else mean


def _seconds(threshold: float, records: dict[int, RunRecord], clock: Literal["seconds", "cpu_seconds"]) -> float | None:
    found = [(record, reach(record, threshold)) for record in records.values()]
    seconds = [getattr(record, clock)[at] for record, at in found if at is not None]
    known = [number for number in seconds if number is not None]
    return float(np.mean(known)) if known else None


def _rounds(mean: float | None, never: int, seeds: int) -> str:
    if mean is None:
        return f"never ({seeds} of {seeds} seeds)"
    return f"{mean:.1f}" + (f" ({never} of {seeds} never)" if never else "")
