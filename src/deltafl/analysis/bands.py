"""What pictures show: bands over seeds of curves, of how often clients were selected, and of the
clients' accuracies. Letter: ``q`` percent of clients.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import require
from ..samplers.label import base_name
from ..types import Array, FloatArray, judge_of
from .runs import Run

#: The columns of ``clients_of`` between the seed and the metric.
OF_CLIENTS = ("client", "stratum", "examples", "draws")


class Band(NamedTuple):
    """One method's curve over seeds at the rounds that all its seeds evaluated: (r,) each."""

    round_r: Array
    mean_r: FloatArray
    low_r: FloatArray
    high_r: FloatArray


def band_of(curves: Sequence[tuple[Array, FloatArray]]) -> Band:
    """The band of several curves, each its rounds and its values, at the rounds that all of them
    have.
    """
    shared = curves[0][0]
    # Runs that diverged or were stopped have fewer rounds.
    for round_r, _ in curves[1:]:
        shared = np.intersect1d(shared, round_r)
    value_sr = np.array(
        [value_r[np.isin(round_r, shared)] for round_r, value_r in curves],
        float,
    )
    # A mean over the other seeds would jump at such a round.
    value_sr[:, ~np.isfinite(value_sr).all(axis=0)] = np.nan
    return Band(
        shared,
        value_sr.mean(axis=0),
        value_sr.min(axis=0),
        value_sr.max(axis=0),
    )


def curve_band(runs: Sequence[Run], metric: str) -> Band:
    """Mean and range over seeds of a metric, shares in percent."""
    return band_of([(run.round_r, shown_curve(run, metric)) for run in runs])


def shown_curve(run: Run, metric: str) -> FloatArray:
    """The curve of a metric as pictures show it, shares in percent."""
    return judge_of(metric, run.judges).factor * run.curve(metric)


def selections(groups: Mapping[str, Sequence[Run]]) -> dict[str, Band]:
    """How often clients were selected, sorted within a run; without ``full``, which selects
    everyone, every time.
    """
    bands = {}
    for label, group in groups.items():
        if base_name(label) != "full":
            client_m = np.arange(1, len(group[0].draws_m) + 1)
            # As negative numbers: the most frequent ones come first.
            bands[label] = band_of([(client_m, -np.sort(-1.0 * run.draws_m)) for run in group])
    return bands


def clients_of(runs: Sequence[Run]) -> Any:
    """A pandas table with one row for each run and client; NaN where a number is unknown."""
    require("pandas", "sim")
    import pandas as pd

    parts = []
    for run in runs:
        values: tuple[Any, ...] = (
            [*run.client_names] or range(len(run.draws_m)),
            [*run.client_strata] or None,
            np.nan if run.num_examples_m is None else run.num_examples_m,
            run.draws_m,
        )
        columns = {"sampler": run.sampler, "seed": run.seed}
        columns |= dict(zip(OF_CLIENTS, values, strict=True))
        if not run.client_strata:
            del columns["stratum"]
        columns[run.metric] = np.nan
        if run.value_km is not None:
            # A mean over the late models.
            columns[run.metric] = run.value_km.mean(axis=0)
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def selections_by_size(runs: Sequence[Run]) -> Band | None:
    """How often clients were selected by their size: tenths of the clients of all seeds, with their
    middle 80 %.

    None if sizes were not recorded, or are all the same.
    """
    clients = clients_of(runs)
    size = clients["examples"]
    if size.isna().any() or size.nunique() == 1:
        return None
    # Ties by their order, so that tenths have equal numbers of clients.
    place = size.rank(method="first") - 1
    tenths = clients.groupby(place * 10 // len(clients))
    draws = tenths["draws"]
    return Band(
        tenths["examples"].mean(),
        draws.mean(),
        draws.quantile(0.1),
        draws.quantile(0.9),
    )


def client_values(runs: Sequence[Run]) -> Band | None:
    """The metric of the worst q percent of the clients' best, q = 0 to 100, over seeds; None if it
    was not recorded.
    """
    percent = np.linspace(0, 100, 101)
    curves = []
    for run in runs:
        if run.value_km is None or run.fairness is None:
            return None
        # Of each model, then averaged, as in ``fairness_of``: the spread of one model is meant.
        judge = run.judge
        goodness_km = judge.sign * run.value_km
        curve_kq = judge.sign * np.nanpercentile(goodness_km, percent, axis=1)
        curves.append((percent, judge.factor * curve_kq.mean(axis=1)))
    return band_of(curves)
