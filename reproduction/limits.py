"""Limits: clients whose updates drift, and the error of one round's estimate of their mean.

u_i(t) = s_i (c_0 e + sqrt(g) v_k(i)(t) + sqrt(1 - g) v_i(t)), with e a unit vector, k(i) one of a
few groups, and every v a stationary Gaussian process with E norm(v)^2 = 1 in many dimensions:

    v(t + 1) = sqrt(1 - delta^2) v(t) + delta z,   E norm(z)^2 = 1,

so that after k rounds a remembered v still explains the share (1 - delta^2)^k of it, and one v
carries no information about another. g is the share that the members of a group have in common. s_i
is lognormal with mean square 1 and coefficient of variation ``spread``; all weights are 1 / m.

The *relative error* of a method is E norm(D - ubar)^2 divided by that of uniform draws on the same
updates.
"""

from collections.abc import Iterator, Sequence
from math import log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl import Population, close_round, init_round, make_plan, open_round, stream
from deltafl.analysis import Band, Line, Look, Panel, draw_panels, looks, mean_interval
from deltafl.errors import DeltaflError
from deltafl.types import FloatArray, Params

from .page import OwnPage
from .running import Row, Rows
from .spec import TEXTS
from .text import cut, ends, folded, markdown

#: What each picture has on its x-axis; "far" is of clients who are hardly ever selected.
_AXES = {"age": "m / n", "norms": "variation of norms", "groups": "share in common", "far": "drift"}


class Point(NamedTuple):
    """One setting of the clients, and the picture in which it stands: a key of ``_AXES``."""

    picture: str
    clients: int
    sample: int
    drift: float
    spread: float
    grouped: float

    @property
    def x(self) -> float:
        ratio = self.clients / self.sample
        return {"age": ratio, "norms": self.spread, "groups": self.grouped, "far": self.drift}[
            self.picture
        ]


def points_of(settings: dict[str, Any]) -> list[Point]:
    """Memories of growing age; norms of growing spread with slow drift; groups that share more
    and more; far ones.
    """
    m = settings["clients"]
    n = settings["sample"]
    drifts = settings["drifts"]
    far = settings["far"]
    return [
        *(
            Point("age", ratio * n, n, drift, 0, 0)
            for drift in drifts
            for ratio in settings["ratios"]
        ),
        *(Point("norms", m, n, min(drifts), spread, 0) for spread in settings["spreads"]),
        *(Point("groups", m, n, max(drifts), 0, grouped) for grouped in settings["grouped"]),
        *(
            Point("far", far["ratio"] * far["sample"], far["sample"], drift, 0, 0)
            for drift in far["drifts"]
        ),
    ]


def run(settings: dict[str, Any], rows: Rows) -> Iterator[tuple[int, int, Row | None]]:
    points = points_of(settings)
    known = {(_point(row), row["method"]) for row in rows}
    for done, point in enumerate(points, start=1):
        methods = settings["far"]["methods"] if point.picture == "far" else settings["methods"]
        left = [method for method in methods if (point, method) not in known]
        by_seed = [
            errors_at(settings, methods, point, seed)
            for seed in range(settings["seeds"] if left else 0)
        ]
        for method in left:
            error_s = [errors[method] / errors["uniform"] for errors in by_seed]
            yield done, len(points), {**point._asdict(), "method": method, "error": error_s}
        yield done, len(points), None


def _point(row: Row) -> Point:
    return Point(*(row[name] for name in Point._fields))


def errors_at(
    settings: dict[str, Any], methods: Sequence[str], point: Point, seed: int
) -> dict[str, float]:
    population = Population.from_sizes([1] * point.clients)
    origin_d = np.zeros(settings["dimensions"], np.float32)
    labels = dict.fromkeys(["uniform", *methods])
    plans = {label: make_plan(label, population, point.sample, seed=seed) for label in labels}
    states = {label: init_round(plan, origin_d) for label, plan in plans.items()}
    error = dict.fromkeys(plans, 0.0)
    warm_up = 3 * point.clients // point.sample
    for t, update_md in enumerate(updates(settings, point, seed, warm_up + settings["rounds"])):
        ubar_d = update_md.mean(axis=0, dtype=np.float64)
        for label, plan in plans.items():
            cohort = open_round(plan, states[label])
            after, _ = close_round(plan, states[label], cohort, update_md[cohort.client_n])
            if t >= warm_up:
                error[label] += (
                    float(np.sum((after.params_d.astype(np.float64) - ubar_d) ** 2))
                    / settings["rounds"]
                )
            # The model stays at 0, so that the next estimate can be read off it too.
            states[label] = after._replace(params_d=origin_d)
    return error


def updates(settings: dict[str, Any], point: Point, seed: int, rounds: int) -> Iterator[Params]:
    """float32 (m, d) for each round."""
    rng = stream(seed, "data", client=point.clients)
    m = point.clients
    d = settings["dimensions"]
    groups = settings["groups"]
    scale_m = np.exp(sqrt(log(1 + point.spread**2)) * rng.standard_normal(m))
    scale_m /= np.sqrt(np.mean(scale_m**2))
    common_d = settings["common"] * np.eye(d)[0]
    group_m = np.arange(m) % groups
    own_md = _noise(rng, m, d)
    shared_kd = _noise(rng, groups, d)
    for _ in range(rounds):
        apart_md = sqrt(point.grouped) * shared_kd[group_m] + sqrt(1 - point.grouped) * own_md
        yield (scale_m[:, None] * (common_d + apart_md)).astype(np.float32)
        own_md = sqrt(1 - point.drift**2) * own_md + point.drift * _noise(rng, m, d)
        shared_kd = sqrt(1 - point.drift**2) * shared_kd + point.drift * _noise(rng, groups, d)


def _noise(rng: np.random.Generator, rows: int, d: int) -> FloatArray:
    return rng.standard_normal((rows, d)) / sqrt(d)


class _Measured(NamedTuple):
    """A method at a point: its relative error with a 95 % interval over seeds."""

    point: Point
    method: str
    mean: float
    low: float
    high: float


def show(settings: dict[str, Any], rows: Rows, folder: Path) -> OwnPage:
    """A panel and a table for each drift, for unequal norms, for groups, and for clients hardly
    ever selected.
    """
    found = [_measured(row) for row in rows]
    if {row.point for row in found} != set(points_of(settings)):
        raise DeltaflError(f"{folder} does not have every point; leave out --only-page to run it")
    methods = [method for method in settings["methods"] if method != "uniform"]
    panels = _panels(settings, found)
    _draw(panels, looks(methods), folder / "limits.png")
    texts = []
    for method in methods:
        own = [row for row in found if row.method == method]
        better = sum(row.high < 1 for row in own)
        worse = sum(row.low > 1 for row in own)
        texts.append(f"`{method}` at {better} of {len(own)} points (larger at {worse})")
    cells = [
        {name: row[name] for name in (*Point._fields, "method")}
        | {"seed": seed, "relative_error": f"{error:.6g}"}
        for row in rows
        for seed, error in enumerate(row["error"])
    ]
    (title, first), *others = panels.items()
    blocks = ["![relative errors](limits.png)", TEXTS["limits"]["head"].format(**settings)]
    blocks += [
        f"Smaller error than uniform draws: {', '.join(texts)}.",
        f"### {title}\n\n{cut(_table(first))}",
    ]
    blocks += [folded(title, _table(panel)) for title, panel in others]
    return OwnPage(
        f"Smaller error than uniform draws: {texts[0]}.", "not a claim of the paper", blocks, cells
    )


def _measured(row: Row) -> _Measured:
    mean, low, high = mean_interval(np.array(row["error"]))
    return _Measured(
        _point(row),
        row["method"],
        mean,
        mean if low is None else low,
        mean if high is None else high,
    )


def _panels(settings: dict[str, Any], found: Sequence[_Measured]) -> dict[str, list[_Measured]]:
    far = settings["far"]
    m = settings["clients"]
    chosen = {f"Ageing memories, drift {drift:g}": ("age", drift) for drift in settings["drifts"]}
    chosen[f"Unequal norms, m = {m}"] = "norms", None
    chosen[f"{settings['groups']} groups, m = {m}"] = "groups", None
    chosen[f"One client in {far['ratio']} selected, n = {far['sample']}"] = "far", None
    return {
        title: [
            row
            for row in found
            if row.point.picture == picture and drift in (None, row.point.drift)
        ]
        for title, (picture, drift) in chosen.items()
    }


def _table(rows: Sequence[_Measured]) -> str:
    heads = [
        _AXES[rows[0].point.picture],
        *(f"{x:g}" for x in dict.fromkeys(row.point.x for row in rows)),
    ]
    lines: dict[str, list[str]] = {}
    for row in rows:
        interval = ends(row.low, row.high, ".3f") if row.high > row.low else ""
        lines.setdefault(row.method, [row.method]).append(f"{row.mean:.3f}{interval}")
    return markdown(heads, lines.values())


def _draw(panels: dict[str, list[_Measured]], look_of: dict[str, Look], path: Path) -> None:
    drawn = []
    for title, rows in panels.items():
        lines = []
        for method, look in look_of.items():
            curve = [
                (row.point.x, row.mean, row.low, row.high) for row in rows if row.method == method
            ]
            if curve:
                lines.append(Line(method, look, Band(*np.array(curve).T)))
        drawn.append(Panel(title, lines, _AXES[rows[0].point.picture], "relative error", goal=1.0))
    draw_panels(drawn, 2, TEXTS["limits"]["picture"], path)
