"""What pictures show: bands over seeds of curves, of how often clients were selected, and of the
clients' accuracies. Letter: ``q`` percent of clients.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import require
from ..samplers.label import base_name
from ..types import Array, FloatArray, judge_of
from .runs import Run


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


def selections_by_size(runs: Sequence[Run], groups: int = 10) -> Band | None:
    """How often clients were selected by their size: tenths of the clients of all seeds, with their
    middle 80 %.

    None if sizes were not recorded, or are all the same.
    """
    require("pandas", "sim")
    import pandas as pd

    sizes = [run.num_examples_m for run in runs if run.num_examples_m is not None]
    if len(sizes) < len(runs):
        return None
    draws = [run.draws_m for run in runs]
    clients = pd.DataFrame(
        {
            "size": np.concatenate(sizes),
            "draws": np.concatenate(draws),
        }
    )
    if clients["size"].nunique() == 1:
        return None
    # Ties by their order, so that tenths have equal numbers of clients.
    place = clients["size"].rank(method="first") - 1
    parts = clients.groupby(place * groups // len(clients))
    draws = parts["draws"]
    return Band(
        parts["size"].mean(),
        draws.mean(),
        draws.quantile(0.1),
        draws.quantile(0.9),
    )


def named_clients(runs: Sequence[Run]) -> dict[str, FloatArray]:
    """Of each client that has a name: its examples, how often it was selected, and its metric.
    Means over the seeds that know them; NaN where none does.
    """
    found: dict[str, list[FloatArray]] = {}
    for run in runs:
        unknown_m = np.full(len(run.draws_m), np.nan)
        size_m = unknown_m if run.num_examples_m is None else run.num_examples_m
        number_m3 = np.column_stack([size_m, run.draws_m, run.client_value_m])
        # By name: with another seed a table's clients may have another order.
        for name, number_3 in zip(run.client_names, number_m3, strict=False):
            found.setdefault(name, []).append(number_3)
    return _means_of_known(found)


def strata_of(runs: Sequence[Run]) -> dict[str, FloatArray]:
    """Of each stratum: its clients, how often one of them was selected, and the mean of their
    metric, each counting once. Means over seeds; NaN where it is unknown.
    """
    found: dict[str, list[FloatArray]] = {}
    for run in runs:
        stratum_m = np.array(run.client_strata)
        for name in np.unique(stratum_m):
            in_m = stratum_m == name
            value_k = run.client_value_m[in_m]
            # A client without test rows has no value.
            known_k = value_k[np.isfinite(value_k)]
            mean = np.nan
            if len(known_k):
                mean = known_k.mean()
            number_3 = np.array([in_m.sum(), run.draws_m[in_m].mean(), mean])
            found.setdefault(str(name), []).append(number_3)
    return _means_of_known(found)


def _means_of_known(found: Mapping[str, list[FloatArray]]) -> dict[str, FloatArray]:
    if not found:
        return {}
    # All names at once: means of each would take most of a report's time where there are thousands.
    number_k3 = np.concatenate([*found.values()])
    name_k = np.repeat(np.arange(len(found)), [*map(len, found.values())])
    known_k3 = np.isfinite(number_k3)
    total_k3, count_k3 = np.zeros((2, len(found), 3))
    np.add.at(total_k3, name_k, np.where(known_k3, number_k3, 0.0))
    np.add.at(count_k3, name_k, known_k3)
    # NaN where no seed knows a number.
    mean_k3 = np.full_like(total_k3, np.nan)
    np.divide(total_k3, count_k3, out=mean_k3, where=count_k3 > 0)
    return dict(zip(found, mean_k3, strict=True))


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
