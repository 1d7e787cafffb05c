"""SCAFFOLD against a slow twin of the paper's algorithm 1, and its corrections on all routes of
local training.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Recorder
from deltafl import (
    DeltaflError,
    Plan,
    Population,
    broadcast,
    close_round,
    compare,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.server.table import make_parts
from deltafl.simulation.engine import Engine
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.simulation.setup import task_of, work_of
from deltafl.simulation.training.route import Route
from deltafl.types import FloatArray
from tools.simulation import quiet

M = 6
D = 3
K = 4
LR = 0.1


def problem() -> tuple[FloatArray, FloatArray]:
    """Client i has the loss x^T A_i x / 2 - b_i^T x."""
    rng = np.random.default_rng(5)
    root_mdd = rng.normal(size=(M, D, D))
    return root_mdd @ root_mdd.transpose(0, 2, 1) / D, rng.normal(size=(M, D))


def paper(cohorts: list[list[int]]) -> FloatArray:
    """Algorithm 1, option II, with a global step size of 1: controls are gradients."""
    a_mdd, b_md = problem()
    x = np.zeros(D)
    c = np.zeros(D)
    c_m = np.zeros((M, D))
    for clients in cohorts:
        changes = []
        control_changes = []
        for i in clients:
            y = x.copy()
            for _ in range(K):
                y = y - LR * ((a_mdd[i] @ y - b_md[i]) - c_m[i] + c)
            new = c_m[i] - c + (x - y) / (K * LR)
            changes.append(y - x)
            control_changes.append(new - c_m[i])
            c_m[i] = new
        x = x + np.mean(changes, axis=0)
        c = c + len(clients) / M * np.mean(control_changes, axis=0)
    return np.asarray(x)


def test_rounds_are_the_papers() -> None:
    plan = make_plan("uniform@@difference-own", [7] * M, 2, scaffold=True, seed=3)
    state = init_round(plan, np.zeros(D))
    cohorts = []
    a_mdd, b_md = problem()
    for _ in range(12):
        cohort = open_round(plan, state)
        params_d = state.params_d
        drift_nd = plan.drifts(state, cohort.client_n)
        assert drift_nd is not None
        rows = []
        for i, drift_d in zip(cohort.client_n, drift_nd, strict=True):
            x = params_d.astype(np.float64)
            for _ in range(K):
                x = x - LR * (a_mdd[i] @ x - b_md[i]) + drift_d / K
            rows.append(x - params_d)
        cohorts.append(cohort.client_n.tolist())
        state, _ = close_round(plan, state, cohort, np.array(rows, dtype=np.float32))
    assert len({tuple(clients) for clients in cohorts}) > 4
    np.testing.assert_allclose(state.params_d, paper(cohorts), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.6])
@pytest.mark.parametrize(
    "estimator", ["difference-own", "innovation", "innovation-damped", "fedstale"]
)
def test_corrections_cancel_and_are_taken_off_again(estimator: str, beta: float) -> None:
    """sum_i w_i (c - c_i) = 0, and a client that is moved by its drift alone counts as u_i = 0.

    With a momentum the drift is beta S + (1 - beta) (c - c_i).
    """
    population = Population.from_sizes([3, 9, 4, 8, 1, 7])
    plan = Plan(
        population,
        make_sampler("md-fixed"),
        3,
        estimator,
        parts=make_parts({"server_optimizer": Recorder(), "scaffold": True, "mime": beta}),
    )
    state = init_round(plan, np.zeros(D))
    rng = np.random.default_rng(0)
    for _ in range(8):
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, rng.normal(size=(3, D)) + 1)
    drift_md = plan.drifts(state, np.arange(6))
    assert drift_md is not None
    assert np.abs(drift_md).max() > 0.1
    momentum_d = beta * state.parts["mime"].momentum_d if beta else np.zeros(D)
    assert beta == 0 or np.abs(momentum_d).max() > 0.1
    np.testing.assert_allclose(population.weight_m @ drift_md, momentum_d, atol=1e-6)
    cohort = open_round(plan, state)
    total_d, control_nd = plan.rule.control.value(state.control, cohort.client_n)
    sent_d = broadcast(plan, state).drift_d
    assert sent_d is not None
    np.testing.assert_allclose(sent_d, momentum_d + (1 - beta) * total_d, rtol=1e-5)
    own_nd = sent_d - (1 - beta) * control_nd
    np.testing.assert_allclose(drift_md[cohort.client_n], own_nd, rtol=1e-4, atol=1e-6)
    following, info = close_round(plan, state, cohort, drift_md[cohort.client_n])
    assert info.num_responded == 3
    expected_d = momentum_d + total_d - plan.collect_replies(state, cohort).coef_n @ control_nd
    np.testing.assert_allclose(following.parts["server_optimizer"].delta_d, expected_d, atol=1e-6)


SMALL: dict[str, Any] = {"task": "digits", "clients": 6, "sample": 3, "rounds": 3, "batch_size": 16}


@pytest.mark.parametrize("path", ["loop", "batched"])
def test_each_client_gets_its_own_drift_on_every_route(path: str) -> None:
    """With unequal numbers of steps, rows (n, d) give what (d,) gives one client after the
    other.
    """
    split = {"partition": "yurochkin2019", "alpha": 0.3, "local_epochs": 1, "sampler": "uniform"}
    settings = make_settings(RunSettings, {**SMALL, **split})
    kept = Route(path)
    trainer = Engine(task_of(settings), work_of(settings), settings.seed, kept=kept)
    params_d = trainer.initial_params()
    client_n = np.array([4, 0, 2, 5])
    drift_nd = np.random.default_rng(0).normal(size=(4, trainer.num_params)).astype(np.float32)
    together = trainer.train(params_d, 1, client_n, drift_nd)
    assert len(set(together.reports.num_steps_n.tolist())) > 1
    for i, client in enumerate(client_n):
        alone = trainer.train(params_d, 1, np.array([client]), drift_nd[i])
        np.testing.assert_allclose(together.update_nd[i], alone.update_nd[0], rtol=1e-4, atol=1e-5)
    plain = trainer.train(params_d, 1, client_n)
    assert np.abs(together.update_nd - plain.update_nd).max() > 0.1


def test_workers_have_the_same_bits_and_clients_download_two_models(tmp_path: Path) -> None:
    texts = []
    for workers in (1, 2):
        given = {
            **SMALL,
            "sampler": "uniform@@difference-own",
            "scaffold": True,
            "workers": workers,
        }
        folder = tmp_path / str(workers)
        run_single(make_settings(RunSettings, given), folder, quiet)
        texts.append((folder / "rounds.jsonl").read_bytes())
    assert texts[0] == texts[1]
    lines = [json.loads(line) for line in texts[0].splitlines()]
    assert lines[1]["bytes_down"] == 3 * 2 * 4 * 650
    assert lines[3]["residual"] != 1


@pytest.mark.parametrize(
    "label",
    [
        "uniform",
        "uniform@@difference",
        "uniform@@difference-damped",
    ],
)
def test_it_is_refused_where_nothing_is_known_of_each_client(label: str) -> None:
    with pytest.raises(
        DeltaflError, match="local steps by what the estimator knows of each client; choose one"
    ):
        make_plan(label, [1, 2, 3], 2, scaffold=True)


def test_in_a_comparison_those_of_whom_nothing_is_known_run_as_they_are() -> None:
    given = {
        "task": "digits",
        "samplers": ["full", "census", "uniform", "fedvarp"],
        "scaffold": True,
    }
    settings = make_settings(CompareSettings, given)
    assert [settings.run(label, 0).part_settings()["scaffold"] for label in settings.samplers] == [
        False,
        True,
        False,
        True,
    ]
    with pytest.raises(DeltaflError, match="scaffold does nothing here: only methods that know"):
        compare("digits", ["full", "uniform"], scaffold=True)
