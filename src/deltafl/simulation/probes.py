"""Probes: what only a simulation can measure of a round, every ``probe_every`` rounds beside the
run.

A probe trains *all* clients from the round's model, unless the oracle has. It costs time, no
traffic and no randomness of the run, which has the same result, bit for bit, with and without
probes.

Norms are those of the mean local gradient along a client's path, norm(u_i) / (lr K_i); diversities
are zeta_i = norm(u_i - ubar) / (lr K_i). (The DELTA paper does not name the unit of its figures.)
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np

from ..audit import estimate_error, least_mse
from ..round import Plan, RoundState
from .engine import Training
from .oracle import SimulatedOracle

#: Columns of the selected clients, in every round of a run with probes.
SELECTED = ("selected_norm_mean", "selected_norm_min")
#: Columns of all clients and of the estimate, measured in the first round and every ``probe_every``
#: rounds.
EVERYONE = (
    *("norm_max", "norm_min", "norm_mean", "diversity_max", "diversity_min", "diversity_mean"),
    *("full_norm", "error", "bias", "least_error"),
)
#: Cohorts drawn to measure the error of the estimate.
DRAWS = 200
#: Steps towards the largest lower bound of ``least_error``; every step gives a true bound.
_BOUND_STEPS = 30


def probe_selected(training: Training, lr: float) -> dict[str, float]:
    """Mean and least gradient norm of the clients that trained in a round; NaN if none was
    selected.
    """
    if not len(training.update_nd):
        return dict.fromkeys(SELECTED, nan)
    norm_n = np.linalg.norm(training.update_nd.astype(np.float64), axis=1) / (
        lr * training.reports.num_steps_n
    )
    return dict(zip(SELECTED, (float(norm_n.mean()), float(norm_n.min())), strict=True))


def probe_everyone(
    plan: Plan, state: RoundState, oracle: SimulatedOracle, lr: float
) -> dict[str, float]:
    """Norms and diversities of all clients, and how good the estimate of a round is in expectation
    over its draws.

    Returns:
        The columns ``EVERYONE``, NaN if an update is not finite. ``error`` is E norm(D - ubar)^2 /
        norm(ubar)^2 of the method's estimate D and ``bias`` norm(E D - ubar) / norm(ubar), both
        over ``DRAWS`` cohorts (all of them for few clients); ``least_error`` is
        ``audit.least_mse``, a lower bound for unbiased linear schemes of n clients.
    """
    reports = oracle.reports()
    if not reports.responded_n.all():
        return dict.fromkeys(EVERYONE, nan)
    client_m = np.arange(plan.population.num_clients)
    update_md = oracle.train(client_m).update_nd
    drifts = oracle.drifts(client_m)
    if drifts is not None:
        update_md = update_md - drifts
    path_m = lr * reports.num_steps_n
    norm_m = np.sqrt(reports.squared_norm_n) / path_m
    zeta_m = np.sqrt(reports.squared_deviation_n) / path_m
    error = estimate_error(plan, state, oracle, update_md, DRAWS)
    wide_md = update_md.astype(np.float64)
    weight_m = plan.population.weight_m
    full = float(np.sum((weight_m @ wide_md) ** 2))
    least, _ = least_mse(wide_md @ wide_md.T, weight_m, plan.n, _BOUND_STEPS)
    sizes = (norm_m.max(), norm_m.min(), norm_m.mean(), zeta_m.max(), zeta_m.min(), zeta_m.mean())
    full_norm = float(np.sqrt(full)) / float(path_m.mean())
    least_error = least / full if full > 0 else nan
    return dict(
        zip(
            EVERYONE,
            (*map(float, sizes), full_norm, error.mse, error.bias, least_error),
            strict=True,
        )
    )


def probe_columns(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The probes in the lines of ``rounds.jsonl`` as columns, short enough to keep; empty without
    probes.

    ``round`` (rounds done) and the columns ``EVERYONE`` have one entry for each probe of all
    clients, the columns ``SELECTED`` the mean over the rounds since the entry before; None where
    there is no number.
    """
    columns: dict[str, list[float | None]] = {name: [] for name in ("round", *SELECTED, *EVERYONE)}
    window: list[Mapping[str, Any]] = []
    for line in lines:
        probe = line.get("probe", {})
        window += [probe] if probe else []
        if EVERYONE[0] not in probe:
            continue
        columns["round"].append(float(line["round"]))
        for name in SELECTED:
            columns[name].append(_mean([entry[name] for entry in window]))
        for name in EVERYONE:
            columns[name].append(_mean([probe[name]]))
        window = []
    return columns if columns["round"] else {}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return sum(known) / len(known) if known else None
