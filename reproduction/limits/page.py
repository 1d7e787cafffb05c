"""Runs the limits and shows them: errors.csv, limits.png, and the page's tables."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel

from deltafl.analysis.plots import DPI, GREY, WIDTH, Look, looks, small_png, styled
from deltafl.analysis.statistics import mean_interval
from deltafl.errors import DeltaflError
from deltafl.io import checked, read_json, write_atomically

from .drifting import LimitsSettings, Measured, Point, measure

#: What each picture has on its x-axis.
_AXES = {
    "age": "clients for each one asked, m / n",
    "norms": "coefficient of variation of the norms",
    "groups": "share that groups have in common",
    "far": "drift a round",
}


def run_limits(settings: LimitsSettings, folder: Path, on_step: Callable[[int, int], None]) -> None:
    """Measure, and write ``limits.json`` and ``errors.csv``."""
    found = measure(settings, on_step)
    rows = [{**row.point._asdict(), "method": row.method, "error": list(row.error_s)} for row in found]
    content = {"settings": settings.model_dump(mode="json"), "rows": rows}
    write_atomically(folder / "limits.json", json.dumps(content, indent=1) + "\n")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*Point._fields, "method", "seed", "relative_error"])
    for row in found:
        writer.writerows([*row.point, row.method, seed, f"{error:.6g}"] for seed, error in enumerate(row.error_s))
    write_atomically(folder / "errors.csv", buffer.getvalue())


def report_limits(settings: LimitsSettings, folder: Path) -> str:
    """Draw the pictures and write the tables.

    Raises:
        DeltaflError: If the experiment was not run, or with other settings.
    """
    found = _read(settings, folder / "limits.json")
    panels = list(_panels(settings, found))
    _draw(settings, panels, folder / "limits.png")
    blocks = [
        "Relative error: E norm(D - ubar)^2 of a method divided by that of uniform draws on the same updates; 1 is the "
        f"dashed line. n = {settings.sample} where nothing else is said, d = {settings.dimensions}, means over "
        f"{settings.seeds} seeds of {settings.rounds} rounds after a warm-up of 3 m / n; brackets: 95 % intervals of "
        "the mean.",
        "![relative errors](limits.png)",
    ]
    for title, x_label, rows in panels:
        x_values = list(dict.fromkeys(_x(row.point) for row in rows))
        lines = [f"### {title}", "", f"| {x_label} | " + " | ".join(f"{x:g}" for x in x_values) + " |"]
        lines.append("|---" * (len(x_values) + 1) + "|")
        for method in dict.fromkeys(row.method for row in rows):
            cells = [_cell(row.error_s) for row in rows if row.method == method]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def summarise_limits(settings: LimitsSettings, folder: Path) -> tuple[str, str]:
    """Where each method is better and where it is worse than uniform draws, by its intervals."""
    found = _read(settings, folder / "limits.json")
    told = []
    for method in settings.methods:
        if method == "uniform":
            continue
        intervals = [_interval(row.error_s) for row in found if row.method == method]
        better = sum(high < 1 for _, high in intervals)
        worse = sum(low > 1 for low, _ in intervals)
        told.append(
            f"{method} has a smaller error than uniform at {better} of {len(intervals)} points, a larger at {worse}"
        )
    return "; ".join(told), "not a claim of the paper"


Panel = tuple[str, str, list[Measured]]


def _panels(settings: LimitsSettings, found: Sequence[Measured]) -> Iterator[Panel]:
    for drift in settings.drifts:
        rows = [row for row in found if row.point.picture == "age" and row.point.drift == drift]
        yield f"Memories of growing age, drift {drift:g} a round", _AXES["age"], _with_ratio(rows, settings.sample)
    m = settings.clients
    for picture, title in (("norms", f"Unequal norms, m = {m}"), ("groups", f"{settings.groups} groups, m = {m}")):
        rows = [row for row in found if row.point.picture == picture]
        yield title, _AXES[picture], rows
    if settings.far is not None:
        rows = [row for row in found if row.point.picture == "far"]
        yield f"One client in {settings.far.ratio} asked, n = {settings.far.sample}", _AXES["far"], rows


def _with_ratio(rows: list[Measured], n: int) -> list[Measured]:
    """The rows with m / n in the place of m."""
    return [row._replace(point=row.point._replace(clients=row.point.clients // n)) for row in rows]


def _x(point: Point) -> float:
    return {"age": float(point.clients), "norms": point.spread, "groups": point.grouped, "far": point.drift}[
        point.picture
    ]


def _interval(error_s: Sequence[float]) -> tuple[float, float]:
    mean, low, high = mean_interval(np.array(error_s))
    return (mean, mean) if low is None or high is None else (low, high)


def _cell(error_s: Sequence[float]) -> str:
    low, high = _interval(error_s)
    return f"{(low + high) / 2:.3f} [{low:.3f}, {high:.3f}]" if high > low else f"{low:.3f}"


class _Row(BaseModel):
    """A line of the file."""

    picture: str
    clients: int
    sample: int
    drift: float
    spread: float
    grouped: float
    method: str
    error: tuple[float, ...]


class _File(BaseModel):
    """The file: what it was measured with, and the lines."""

    settings: dict[str, Any]
    rows: list[_Row]


def _read(settings: LimitsSettings, path: Path) -> list[Measured]:
    if not path.exists():
        raise DeltaflError(f"there is no {path.name}; run the experiment first")
    content, again = read_json(path), "leave out --only-page to run it again"
    if isinstance(content, list):  # as versions before this one wrote it
        raise DeltaflError(f"{path} does not say with what settings it was measured; {again}")
    file = checked(_File, content, str(path), again)
    ours = settings.model_dump(mode="json")
    changed = sorted(name for name in ours | file.settings if ours.get(name) != file.settings.get(name))
    if changed:
        raise DeltaflError(
            f"{path} was measured with another {', '.join(changed)}; give the --scale that it was run with, or {again}"
        )
    return [
        Measured(Point(*(getattr(row, name) for name in Point._fields)), row.method, row.error) for row in file.rows
    ]


def _draw(settings: LimitsSettings, panels: Sequence[Panel], path: Path) -> None:
    chosen = looks([method for method in settings.methods if method != "uniform"])
    with styled():
        lines = -(-len(panels) // 2)
        figure = Figure(figsize=(WIDTH, 2.7 * lines + 0.5), dpi=DPI, facecolor="white", layout="constrained")
        grid = np.atleast_1d(figure.subplots(lines, 2, squeeze=False).ravel())
        for axes, (title, x_label, rows) in zip(grid, panels, strict=False):
            axes.set_title(title)
            axes.set_xlabel(x_label)
            axes.set_ylabel("error relative to uniform")
            axes.axhline(1, color=GREY, linestyle=(0, (3, 2)), linewidth=0.8)
            for method, look in chosen.items():
                if own := [row for row in rows if row.method == method]:
                    _curve(axes, own, look)
            if rows[0].point.picture in ("age", "far"):
                axes.set_xscale("log")
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.legend(
            *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
        )
        drawn = small_png(figure)
    write_atomically(path, drawn)


def _curve(axes: Axes, rows: Sequence[Measured], look: Look) -> None:
    x = [_x(row.point) for row in rows]
    low, high = np.array([_interval(row.error_s) for row in rows]).T
    axes.plot(x, (low + high) / 2, color=look.colour, linestyle=look.dash, linewidth=1.4, label=rows[0].method)
    axes.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
