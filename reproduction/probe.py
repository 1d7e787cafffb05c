"""The probe: what only a simulation can measure of a round, a callback of the figures' runs.

A probe trains *all* clients from the round's model, unless the oracle has. It costs time, no
traffic and no randomness of the run, which has the same result, bit for bit, with and without. It
is for runs of one process.

Norms are those of the mean local gradient along a client's path, norm(u_i) / (lr K_i); diversities
are zeta_i = norm(u_i - ubar) / (lr K_i). (The DELTA paper does not name the unit of its figures.)
"""

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from deltafl.audit import estimate_error, least_mse
from deltafl.simulation import Callback, LiveRun, PlayedRound

#: Cohorts drawn to measure the error of the estimate.
DRAWS = 200
#: Steps towards the largest lower bound of ``least_error``; every step gives a true bound.
_BOUND_STEPS = 30
#: What is measured of all clients.
EVERYONE = (
    *("norm_max", "norm_min", "norm_mean", "diversity_max", "diversity_min", "diversity_mean"),
    *("full_norm", "error", "bias", "least_error"),
)


@dataclass(frozen=True)
class Probe(Callback):
    """Measures the selected clients in each round, all clients in the first and in every
    ``every``-th.

    The numbers are in the round's line under ``probe``, and in the record of the run
    (``Run.probes``).
    """

    every: int

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        # A census selects nobody.
        if round.oracle is None or "diverged" in round.line:
            return
        lr = run.settings.local_lr
        found = _measure_selected(round.training, lr)
        if round.opened.round == 0 or round.number % self.every == 0:
            found |= measure_everyone(run.plan, round.opened, round.oracle, lr)
        round.line["probe"] = found


def _measure_selected(training: Any, lr: Any) -> dict[str, float]:
    """Mean and least gradient norm of the clients that trained in a round; NaN if none did."""
    if not len(training.update_nd):
        return {"selected_norm_mean": nan, "selected_norm_min": nan}
    norm_n = np.linalg.norm(training.update_nd.astype(np.float64), axis=1)
    norm_n /= lr * training.reports.num_steps_n
    return {"selected_norm_mean": float(norm_n.mean()), "selected_norm_min": float(norm_n.min())}


def measure_everyone(plan: Any, state: Any, oracle: Any, lr: Any) -> dict[str, float]:
    """Norms and diversities of all clients, and how good the estimate of a round is in expectation
    over its draws; NaN if an update is not finite.

    ``error`` is E norm(D - ubar)^2 / norm(ubar)^2 of the method's estimate D and ``bias``
    norm(E D - ubar) / norm(ubar), both over ``DRAWS`` cohorts (all of them for few clients);
    ``least_error`` is ``audit.least_mse``, a lower bound for unbiased linear schemes of n clients.
    """
    reports = oracle.reports()
    if not reports.responded_n.all():
        return dict.fromkeys(EVERYONE, nan)
    client_m = np.arange(plan.population.num_clients)
    update_md = oracle.train(client_m).update_nd
    drifts = oracle.drifts(client_m)
    if drifts is not None:
        update_md = update_md - drifts
    error = estimate_error(plan, state, oracle, update_md, DRAWS)
    weight_m = plan.population.weight_m
    wide_md = update_md.astype(np.float64)
    full = float(np.sum((weight_m @ wide_md) ** 2))
    least_error = nan
    if full > 0:
        least, _ = least_mse(wide_md @ wide_md.T, weight_m, plan.n, _BOUND_STEPS)
        least_error = least / full
    path_m = lr * reports.num_steps_n
    norm_m = np.sqrt(reports.squared_norm_n) / path_m
    zeta_m = np.sqrt(reports.squared_deviation_n) / path_m
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
        "least_error": least_error,
    }
