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
import pandas as pd

from deltafl import Population, close_round, init_round, make_plan, open_round, stream
from deltafl.analysis import Band, Line, Look, Panel, draw_panels, looks, mean_interval
from deltafl.errors import DeltaflError
from deltafl.types import FloatArray, Params

from .page import OwnPage
from .running import Rows
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
        """Its place on the axis of the picture."""
        ratio = self.clients / self.sample
        places = {"age": ratio, "norms": self.spread, "groups": self.grouped, "far": self.drift}
        return places[self.picture]


def points_of(settings: dict[str, Any]) -> list[Point]:
    """Memories of growing age; norms of growing spread with slow drift; groups that share more
    and more; far ones.
    """
    m = settings["clients"]
    n = settings["sample"]
    drifts = settings["drifts"]
    far = settings["far"]
    few = far["sample"]
    return [
        *(Point("age", ratio * n, n, x, 0, 0) for x in drifts for ratio in settings["ratios"]),
        *(Point("norms", m, n, min(drifts), spread, 0) for spread in settings["spreads"]),
        *(Point("groups", m, n, max(drifts), 0, grouped) for grouped in settings["grouped"]),
        *(Point("far", far["ratio"] * few, few, drift, 0, 0) for drift in far["drifts"]),
    ]


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [point._asdict() for point in points_of(settings)]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> Rows:
    """A row for each method, its relative errors by seed."""
    methods = settings["methods"]
    if cell["picture"] == "far":
        methods = settings["far"]["methods"]
    by_seed = [errors_at(settings, methods, Point(**cell), x) for x in range(settings["seeds"])]
    return [
        {**cell, "method": method, "error": [own[method] / own["uniform"] for own in by_seed]}
        for method in methods
    ]


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
                away_d = after.params_d.astype(np.float64) - ubar_d
                error[label] += float(np.sum(away_d**2)) / settings["rounds"]
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


def show(settings: dict[str, Any], rows: Rows, folder: Path) -> OwnPage:
    """A panel and a table for each drift, for unequal norms, for groups, and for clients hardly
    ever selected.
    """
    found = _intervals(rows)
    if {*zip(*(found[name] for name in Point._fields), strict=True)} != {*points_of(settings)}:
        raise DeltaflError(f"{folder} does not have every point; leave out --only-page to run it")
    far = settings["far"]
    m = settings["clients"]
    panels = {
        f"Ageing memories, drift {drift:g}": found[
            (found["picture"] == "age") & (found["drift"] == drift)
        ]
        for drift in settings["drifts"]
    }
    for title, picture in {
        f"Unequal norms, m = {m}": "norms",
        f"{settings['groups']} groups, m = {m}": "groups",
        f"One client in {far['ratio']} selected, n = {far['sample']}": "far",
    }.items():
        panels[title] = found[found["picture"] == picture]
    methods = [method for method in settings["methods"] if method != "uniform"]
    _draw(panels, looks(methods), folder / "limits.png")
    texts = []
    for method in methods:
        own = found[found["method"] == method]
        better = sum(own["high"] < 1)
        worse = sum(own["low"] > 1)
        texts.append(f"`{method}` at {better} of {len(own)} points (larger at {worse})")
    (title, first), *others = panels.items()
    blocks = [
        "![relative errors](limits.png)",
        TEXTS["limits"]["head"].format(**settings),
        f"Smaller error than uniform draws: {', '.join(texts)}.",
        f"### {title}\n\n{cut(_table(first))}",
        *(folded(title, _table(panel)) for title, panel in others),
    ]
    csv_rows = [
        {name: row[name] for name in (*Point._fields, "method")}
        | {"seed": seed, "relative_error": f"{error:.6g}"}
        for row in rows
        for seed, error in enumerate(row["error"])
    ]
    number = f"Smaller error than uniform draws: {texts[0]}."
    return OwnPage(number, "not a claim of the paper", blocks, csv_rows)


def _intervals(rows: Rows) -> pd.DataFrame:
    """A line for each method at a point: its place on the axis, and its relative error with a 95 %
    interval over seeds.
    """
    found = pd.DataFrame(rows)
    found["x"] = [Point(*(row[name] for name in Point._fields)).x for row in rows]
    intervals = [mean_interval(np.array(error_s)) for error_s in found["error"]]
    numbers = pd.DataFrame(intervals, dtype=np.float64)
    # One seed has no interval: its ends are the number.
    return found.join(numbers.ffill(axis=1))


def _table(panel: pd.DataFrame) -> str:
    heads = [_AXES[panel["picture"].iloc[0]], *(f"{x:g}" for x in panel["x"].unique())]
    lines = []
    for method, own in panel.groupby("method", sort=False):
        line = [method]
        for row in own.itertuples():
            interval = ""
            if row.high > row.low:
                interval = ends(row.low, row.high, ".3f")
            line.append(f"{row.mean:.3f}{interval}")
        lines.append(line)
    return markdown(heads, lines)


def _draw(panels: dict[str, pd.DataFrame], look_of: dict[str, Look], path: Path) -> None:
    drawn = []
    for title, panel in panels.items():
        lines = []
        for method, own in panel.groupby("method", sort=False):
            if method in look_of:
                band = Band(*own[["x", "mean", "low", "high"]].to_numpy().T)
                lines.append(Line(method, look_of[method], band))
        axis = _AXES[panel["picture"].iloc[0]]
        drawn.append(Panel(title, lines, axis, "relative error", goal=1.0))
    draw_panels(drawn, 2, TEXTS["limits"]["picture"], path)
