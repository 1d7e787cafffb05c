"""The page of table 1: slopes beside the claimed orders, the counter-example; ``table.csv``, ``rates.png``.

The numbers and the claims are in ``slopes.py``.
"""

import csv
import io
from math import isnan
from pathlib import Path

import numpy as np

from deltafl.errors import DeltaflError, require
from deltafl.io import checked, read_json, write_atomically
from deltafl.samplers import parse_label
from deltafl.types import FloatArray

from .runs import CounterExample, RatesSettings, cells_path, read_cells, require_same_cells
from .slopes import BASELINE, CLAIMS, SLOWER, TOLERANCE, Estimate, Row, make_row, ratio, verdict


def report_rates(settings: RatesSettings, folder: Path) -> str:
    """Read the cells, write ``table.csv`` and ``rates.png``, and return the page in Markdown.

    Raises:
        DeltaflError: If a cell is missing, or the cells are of other settings.
        MissingExtraError: Without Matplotlib.
    """
    require("matplotlib", "plot")
    values, rows, counter = _read(settings, folder)
    write_atomically(folder / "table.csv", _csv(rows))
    from .plot import draw_rates

    draw_rates(settings, values, folder / "rates.png")
    parts = [_setting_text(settings)]
    for problem in settings.problems:
        parts.append(f"### {problem}\n\n{_table([row for row in rows if row.problem == problem])}")
    parts += [
        _summary(rows, values),
        "![Decay of the gradient with T](rates.png)",
        _claims_text(settings),
        _counter_text(counter),
    ]
    return "\n\n".join(parts) + "\n"


def summarise_rates(settings: RatesSettings, folder: Path) -> tuple[str, str]:
    """What was measured, in a line, and the verdict on the claimed orders, both made from the intervals.

    Raises:
        DeltaflError: If a cell is missing.
    """
    _, rows, counter = _read(settings, folder)
    slow = [row for row in rows if verdict(row) == SLOWER]
    held = [row for row in rows if verdict(row).startswith(("as claimed", "faster"))]
    broken = [row for row in counter if row.least > row.bound]
    parts = [f"{len(held)} of {len(rows)} slopes are as claimed or steeper"]
    parts += [
        f"slower than claimed ({row.claimed:g}): {row.method} on {row.problem}, {_number(row.slope_mean)}"
        for row in slow
    ]
    if broken:
        worst = broken[0]
        parts.append(
            f"the counter-example keeps norm(grad f)^2 at {worst.least:g} where theorem 2 claims {worst.bound:.2g}"
        )
    if slow or broken:
        return "; ".join(parts), "holds in part and is contradicted in part" if held else "is contradicted"
    return "; ".join(parts), "holds" if len(held) == len(rows) else "is not decided"


Values = dict[tuple[str, str], FloatArray]


def _read(settings: RatesSettings, folder: Path) -> tuple[Values, list[Row], list[CounterExample]]:
    require_same_cells(settings, folder)
    values = {(p, label): _values(settings, folder, p, label) for p in settings.problems for label in settings.methods}
    rows = [make_row(settings.horizons, values, problem, label) for problem, label in values]
    path = folder / "counter-example.json"
    if not path.exists():
        raise DeltaflError(f"{path} is missing; run the experiment first")
    counter = checked(list[CounterExample], read_json(path), str(path), "run the experiment again")
    return values, rows, counter


def _values(settings: RatesSettings, folder: Path, problem: str, label: str) -> FloatArray:
    """(2, t, s): least and mean, by horizon and seed."""
    cells = read_cells(cells_path(folder, problem, label))
    wanted = [[(horizon, seed) for seed in range(settings.seeds)] for horizon in settings.horizons]
    missing = sum(key not in cells for line in wanted for key in line)
    if missing:
        raise DeltaflError(f"{missing} cells of {label} on {problem} are missing; run the experiment first")
    pick = [[[getattr(cells[key], name) for key in line] for line in wanted] for name in ("least", "mean")]
    return np.array(pick, dtype=np.float64)


def _setting_text(settings: RatesSettings) -> str:
    horizons = ", ".join(str(horizon) for horizon in settings.horizons)
    return (
        f"{settings.clients} clients, {settings.sample} asked a round, K = {settings.local_steps} local steps, "
        f"{settings.dimension} variables, T = {horizons}, {settings.seeds} seeds (draws and gradient noise; the "
        "problems are the same for all). Slopes are exponents of T with 95 % intervals over seeds (Student's t); the "
        f"verdict compares that of the mean over rounds with the claimed order, to within {TOLERANCE}."
    )


def _number(estimate: Estimate) -> str:
    if isnan(estimate.value):
        return "-"
    form = ".2f" if abs(estimate.value) >= 0.01 else ".1e"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def _table(rows: list[Row]) -> str:
    horizon = rows[0].horizon
    lines = [
        f"| method | slope of min over t | slope of mean over t | claimed | verdict | min, T = {horizon} | mean, T = "
        f"{horizon} | mean relative to {BASELINE} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        claimed = "-" if isnan(row.claimed) else f"{row.claimed:g}"
        least = "0 (x_0)" if isnan(row.slope_least.value) else f"{row.least:.2e}"
        lines.append(
            f"| {row.method} | {_number(row.slope_least)} | {_number(row.slope_mean)} | {claimed} | {verdict(row)} | "
            f"{least} | {row.mean:.2e} | {_number(row.ratio)} |"
        )
    return "\n".join(lines)


def _summary(rows: list[Row], values: Values) -> str:
    """What the intervals say, problem by problem."""
    lines = ["### What the intervals say", ""]
    for problem in dict.fromkeys(row.problem for row in rows):
        here = [row for row in rows if row.problem == problem]
        slow = [row.method for row in here if verdict(row) == SLOWER]
        better = [row.method for row in here if row.ratio.high < 1]
        worse = [row.method for row in here if row.ratio.low > 1]
        even = [row.method for row in here if row.ratio.low <= 1 <= row.ratio.high]
        lines.append(
            f"- {problem}: slower than claimed: {_names(slow)}. Mean gradient at T = {here[0].horizon} below "
            f"{BASELINE}'s: {_names(better)}; above: {_names(worse)}; not told apart: {_names(even)}."
        )
        lines += _duel(problem, values)
    return "\n".join(lines)


def _duel(problem: str, values: Values) -> list[str]:
    """Whether DELTA's mean gradient at the longest T is below that of IS in the same form, by their paired ratio."""
    lines = []
    for delta, rival in (("delta@multinomial", "fedis@multinomial"), ("delta", "fedis"), ("pracdelta", "fedpracis")):
        if (problem, delta) in values and (problem, rival) in values:
            ours, theirs = (values[problem, label][1][-1] for label in (delta, rival))
            found = ratio(ours, theirs)
            word = "below" if found.high < 1 else "above" if found.low > 1 else "not told apart from"
            text = f"×{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
            lines.append(f"  - {delta} is {word} {rival}: {text} of it, over the same {len(ours)} seeds.")
    return lines


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _claims_text(settings: RatesSettings) -> str:
    lines = [
        "### The claimed bounds",
        "",
        "| method | bound on the squared gradient norm, up to constants |",
        "|---|---|",
    ]
    for name in dict.fromkeys(parse_label(label).name for label in settings.methods):
        if name in CLAIMS:
            lines.append(f"| {name} | {CLAIMS[name].bound} |")
    return "\n".join(lines)


def _counter_text(rows: list[CounterExample]) -> str:
    lines = [
        "### The counter-example to theorem 2",
        "",
        "Two clients with F = (x - 1)^2 / 2 and (x + 1)^2 / 2, n = 1, K = 1, no noise, from x = 1, eta eta_L = 1: all "
        "conditions of the printed theorem hold (L = 1, A = 1, c = 1/4).",
        "",
        "| method | T | eta_L | min_t norm(grad f(x_t))^2, measured | printed bound |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        holds = "" if row.least <= row.bound else " (broken)"
        lines.append(f"| {row.method} | {row.rounds} | {row.local_lr:.2e} | {row.least:g} | {row.bound:.2e}{holds} |")
    return "\n".join(lines)


def _csv(rows: list[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    intervals = ("slope_least", "slope_mean", "ratio")
    plain = [name for name in Row._fields if name not in intervals]
    writer.writerow([*plain, *(f"{name}{end}" for name in intervals for end in ("", "_low", "_high")), "verdict"])
    for row in rows:
        numbers = [number for name in intervals for number in getattr(row, name)]
        cells = [
            f"{cell:.6g}" if isinstance(cell, float) else cell for cell in [*(getattr(row, n) for n in plain), *numbers]
        ]
        writer.writerow(["" if cell == "nan" else cell for cell in [*cells, verdict(row)]])
    return buffer.getvalue()
