"""Probes: what only a simulation can measure of a round, every ``probe_every`` rounds beside the run.

A probe trains *all* clients from the round's model (the oracle's work is used where there is one). It costs time, no
traffic and no randomness of the run: every stream of random numbers belongs to its purpose, round and client, so a run
has the same result, bit for bit, with and without probes.

Norms are those of the mean local gradient along a client's path, norm(u_i) / (lr K_i), which is norm(grad F_i) for one
plain step; diversities are zeta_i = norm(u_i - ubar) / (lr K_i). (The DELTA paper does not name the unit of its
figures; sums of the K_i local gradients would be K_i times as large.)
"""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np

from ..audit import estimate_error, least_mse
from ..round import Plan, RoundState, broadcast
from ..server.screening import measure, screen_replies
from ..types import Cohort, FloatArray, IntArray, Oracle, Reports
from .engine import Engine, Training, reports_of

#: Columns of the selected clients, measured in every round of a run with probes.
SELECTED = ("selected_norm_mean", "selected_norm_min")
#: Columns of all clients and of the estimate, measured in the first round and every ``probe_every`` rounds.
EVERYONE = (
    *("norm_max", "norm_min", "norm_mean", "diversity_max", "diversity_min", "diversity_mean"),
    *("full_norm", "error", "bias", "least_error"),
)
#: Cohorts drawn to measure the error of the estimate.
DRAWS = 200
#: Steps towards the largest lower bound of ``least_error``; every step gives a true bound.
_BOUND_STEPS = 30


def is_probed(every: int, round: int) -> bool:
    """Whether all clients are probed in a round, counted from 1: the first and each ``every``-th."""
    return round == 1 or round % every == 0


def probe_selected(training: Training, lr: float) -> dict[str, float]:
    """Mean and least gradient norm of the clients that trained in a round; NaN if none was selected."""
    if not len(training.update_nd):
        return dict.fromkeys(SELECTED, nan)
    norm_n = np.linalg.norm(training.update_nd.astype(np.float64), axis=1) / (lr * training.num_steps_n)
    return {"selected_norm_mean": float(norm_n.mean()), "selected_norm_min": float(norm_n.min())}


def probe_everyone(
    plan: Plan, state: RoundState, engine: Engine, lr: float, everyone: Training | None
) -> dict[str, float]:
    """Norms and diversities of all clients, and how good this round's estimate is in expectation over the draws.

    Args:
        plan: The plan of the run.
        state: The state that the round was opened with.
        engine: Trains the clients.
        lr: Local learning rate.
        everyone: The training of all clients in this round, if an oracle has done it.

    Returns:
        The columns ``EVERYONE``. ``error`` is E norm(D - ubar)^2 / norm(ubar)^2 of the method's estimate D and
        ``bias`` norm(E D - ubar) / norm(ubar), both over ``DRAWS`` cohorts (all of them for few clients);
        ``least_error`` is a lower bound of the error of all unbiased linear schemes that select n clients (see
        ``audit.least_mse``). All are NaN if an update is not finite.
    """
    sent, m = broadcast(plan, state), plan.population.num_clients
    training = everyone or engine.train(sent.params_d, state.round, np.arange(m), sent.drift_d)
    replies = screen_replies(
        Cohort(np.arange(m), np.ones(m, dtype=np.int64), np.ones(m)),
        training.update_nd,
        reports_of(training),
        engine.num_params,
        sent.drift_d,
    )
    if replies.rejected:
        return dict.fromkeys(EVERYONE, nan)
    reports = measure(replies.update_nd, replies.reports, plan.population.weight_m)
    path_m = lr * training.num_steps_n
    norm_m = np.sqrt(reports.squared_norm_n) / path_m
    zeta_m = np.sqrt(reports.squared_deviation_n) / path_m
    oracle = _Remembered(reports, engine, state)
    error = estimate_error(plan, state, oracle, replies.update_nd, DRAWS)
    update_md, weight_m = replies.update_nd.astype(np.float64), plan.population.weight_m
    full = float(np.sum((weight_m @ update_md) ** 2))
    least, _ = least_mse(update_md @ update_md.T, weight_m, plan.n, _BOUND_STEPS)
    return {
        "norm_max": float(norm_m.max()),
        "norm_min": float(norm_m.min()),
        "norm_mean": float(norm_m.mean()),
        "diversity_max": float(zeta_m.max()),
        "diversity_min": float(zeta_m.min()),
        "diversity_mean": float(zeta_m.mean()),
        "full_norm": float(np.sqrt(full)) / float(path_m.mean()),
        "error": error.mse,
        "bias": error.bias,
        "least_error": least / full if full > 0 else nan,
    }


class _Remembered(Oracle):
    """An oracle whose clients were trained already; losses are computed once, when a sampler needs one."""

    def __init__(self, reports: Reports, engine: Engine, state: RoundState) -> None:
        self._reports, self._engine, self._params_d = reports, engine, state.params_d
        self._loss_m: FloatArray | None = None

    def reports(self) -> Reports:
        return self._reports

    def losses(self, client_k: IntArray) -> FloatArray:
        if self._loss_m is None:
            self._loss_m = self._engine.losses(self._params_d, np.arange(len(self._reports.loss_n)))
        chosen_k: FloatArray = self._loss_m[client_k]
        return chosen_k


def probe_columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The probes of a run as columns, short enough to keep.

    Args:
        lines: The lines of ``rounds.jsonl``; those with a ``"probe"`` are used.

    Returns:
        ``round`` (rounds done, one entry for each probe of all clients), the columns ``EVERYONE`` there, and the
        columns ``SELECTED`` averaged over the rounds since the entry before; None where there is no number. Empty
        without probes.
    """
    columns: dict[str, list[float | None]] = {name: [] for name in ("round", *SELECTED, *EVERYONE)}
    window: list[Mapping[str, Any]] = []
    for line in lines:
        if "probe" not in line:
            continue
        probe = line["probe"]
        window.append(probe)
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
