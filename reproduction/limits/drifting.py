"""Clients whose updates drift, and the error of one round's estimate of their mean.

u_i(t) = s_i (c_0 e + sqrt(g) v_k(i)(t) + sqrt(1 - g) v_i(t)), with e a unit vector, k(i) one of a few groups, and every
v a stationary Gaussian process with E norm(v)^2 = 1 in many dimensions:

    v(t + 1) = sqrt(1 - delta^2) v(t) + delta z,   E norm(z)^2 = 1,

so that after k rounds a remembered v still explains the share (1 - delta^2)^k of it, and nothing of one v can be told
from another. g is the share that the members of a group have in common. s_i is lognormal with mean square 1 and
coefficient of variation ``spread``; all weights are 1 / m.

The *relative error* of a method is E norm(D - ubar)^2 divided by that of uniform draws on the same updates.
"""

from collections.abc import Callable, Iterator
from math import log, sqrt
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from deltafl.errors import DeltaflError
from deltafl.plans import make_plan
from deltafl.round import Plan, close_round, init_round, open_round
from deltafl.streams import stream
from deltafl.types import FloatArray, Params, Population


class Far(BaseModel):
    """Clients who come back after a thousand rounds or so; for methods whose draws are quick, as the warm-up is long.

    Attributes:
        methods: Some of the experiment's labels, ``uniform`` among them.
        sample: n.
        ratio: m / n.
        drifts: delta.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: tuple[str, ...]
    sample: int = Field(ge=1)
    ratio: int = Field(ge=1)
    drifts: tuple[float, ...]


class LimitsSettings(BaseModel):
    """The settings of the experiment.

    Attributes:
        methods: Labels of samplers; ``uniform`` is what they are divided by.
        dimensions: d.
        common: c_0, the length of what all clients have in common, in units of norm(v_i).
        sample: n.
        ratios: m / n of the first picture.
        drifts: delta of its panels.
        spreads: Coefficients of variation of s_i, for the second picture.
        grouped: Shares g, for the third picture.
        groups: Number of groups.
        clients: m of the second and the third picture.
        far: The fourth picture; None for none.
        rounds: Rounds that are measured, after a warm-up of 3 m / n.
        seeds: Repetitions; intervals are over these.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: tuple[str, ...]
    dimensions: int = Field(ge=2)
    common: float = Field(ge=0)
    sample: int = Field(ge=1)
    ratios: tuple[int, ...]
    drifts: tuple[float, ...]
    spreads: tuple[float, ...]
    grouped: tuple[float, ...]
    groups: int = Field(ge=1)
    clients: int = Field(ge=2)
    far: Far | None = None
    rounds: int = Field(ge=1)
    seeds: int = Field(ge=2)


class Point(NamedTuple):
    """One setting of the clients.

    Attributes:
        picture: Error against m / n (``"age"``), the spread of norms (``"norms"``), what groups share (``"groups"``),
            the drift of clients who are hardly ever asked (``"far"``).
        clients: m.
        sample: n.
        drift: delta.
        spread: Coefficient of variation of the norms.
        grouped: g.
    """

    picture: str
    clients: int
    sample: int
    drift: float
    spread: float
    grouped: float


class Measured(NamedTuple):
    """The relative errors of one method at one point, one a seed."""

    point: Point
    method: str
    error_s: tuple[float, ...]


def points_of(settings: LimitsSettings) -> list[Point]:
    """Memories of growing age; norms of growing spread with slow drift; groups that share more and more; far ones."""
    m, n, slow, far = settings.clients, settings.sample, min(settings.drifts), settings.far
    remote = (
        [] if far is None else [Point("far", far.ratio * far.sample, far.sample, drift, 0, 0) for drift in far.drifts]
    )
    return [
        *(Point("age", ratio * n, n, drift, 0, 0) for drift in settings.drifts for ratio in settings.ratios),
        *(Point("norms", m, n, slow, spread, 0) for spread in settings.spreads),
        *(Point("groups", m, n, max(settings.drifts), 0, grouped) for grouped in settings.grouped),
        *remote,
    ]


def methods_at(settings: LimitsSettings, point: Point) -> tuple[str, ...]:
    """The methods that are measured at a point."""
    return settings.far.methods if settings.far is not None and point.picture == "far" else settings.methods


def measure(settings: LimitsSettings, on_step: Callable[[int, int], None]) -> list[Measured]:
    """Play all methods at all points."""
    points, found = points_of(settings), []
    for done, point in enumerate(points):
        error_by_seed = [_errors(settings, point, seed) for seed in range(settings.seeds)]
        found += [
            Measured(point, method, tuple(errors[method] / errors["uniform"] for errors in error_by_seed))
            for method in methods_at(settings, point)
        ]
        on_step(done + 1, len(points))
    return found


def _errors(settings: LimitsSettings, point: Point, seed: int) -> dict[str, float]:
    """The mean squared error of each method's estimate, all on the same updates."""
    labels = ["uniform", *(method for method in methods_at(settings, point) if method != "uniform")]
    population = Population.from_sizes(np.ones(point.clients, dtype=np.int64))
    plans = {label: _plan(label, population, point.sample, seed) for label in labels}
    states = {label: init_round(plan, np.zeros(settings.dimensions)) for label, plan in plans.items()}
    error, warm_up = dict.fromkeys(labels, 0.0), 3 * point.clients // point.sample
    for t, update_md in enumerate(_updates(settings, point, seed, warm_up + settings.rounds)):
        ubar_d = update_md.mean(axis=0, dtype=np.float64)
        for label in labels:
            plan, state = plans[label], states[label]
            cohort = open_round(plan, state)
            after, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
            if t >= warm_up:
                error[label] += float(np.sum((after.params_d.astype(np.float64) - ubar_d) ** 2)) / settings.rounds
            # The model stays at 0, so that the next estimate can be read off it too.
            states[label] = after._replace(params_d=np.zeros(settings.dimensions, dtype=np.float32))
    return error


def _plan(label: str, population: Population, n: int, seed: int) -> Plan:
    plan = make_plan(label, population, n, seed=seed)
    if plan.sampler.needs_oracle:
        raise DeltaflError(f"{label!r} needs an oracle; choose practical methods, such as 'innovation'")
    return plan


def _updates(settings: LimitsSettings, point: Point, seed: int, rounds: int) -> Iterator[Params]:
    """float32 (m, d) for each round."""
    rng = stream(seed, "data", client=point.clients)
    m, d = point.clients, settings.dimensions
    scale_m, group_m = _norms(rng, m, point.spread), np.arange(m) % settings.groups
    common_d = np.zeros(d)
    common_d[0] = settings.common
    own_md, shared_kd = _noise(rng, m, d), _noise(rng, settings.groups, d)
    for _ in range(rounds):
        apart_md = sqrt(point.grouped) * shared_kd[group_m] + sqrt(1 - point.grouped) * own_md
        yield (scale_m[:, None] * (common_d + apart_md)).astype(np.float32)
        own_md = sqrt(1 - point.drift**2) * own_md + point.drift * _noise(rng, m, d)
        shared_kd = sqrt(1 - point.drift**2) * shared_kd + point.drift * _noise(rng, settings.groups, d)


def _noise(rng: np.random.Generator, rows: int, d: int) -> FloatArray:
    """Rows of mean square 1."""
    return rng.standard_normal((rows, d)) / sqrt(d)


def _norms(rng: np.random.Generator, m: int, spread: float) -> FloatArray:
    """s_i, lognormal with coefficient of variation ``spread``, scaled to a mean square of 1."""
    variance = log(1 + spread**2)
    scale_m = np.exp(sqrt(variance) * rng.standard_normal(m))
    scaled_m: FloatArray = scale_m / np.sqrt(np.mean(scale_m**2))
    return scaled_m
