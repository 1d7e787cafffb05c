"""Twins in the simulator: who stands in for whom, the same bits after a resume, and the error
they take away.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from deltafl import init_round, stream
from deltafl.audit.methods import estimate_error
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.oracle import SimulatedOracle
from deltafl.simulation.run import run_single
from deltafl.simulation.runner import new_model
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of
from deltafl.simulation.training.serial import LocalWork, train_serial
from deltafl.simulation.twins import TWIN_BATCH, TWIN_STEPS, stand_in_rows, twin_simulation
from tools.simulation import TINY, StopError, lines_of, quiet, stop_after

TWIN = {**TINY, "sampler": "balanced@@twin", "public": 3}


def test_stand_ins_have_the_shares_of_the_client() -> None:
    public = [np.array([10, 11]), np.array([20]), np.zeros(0, dtype=np.int64)]
    assert stand_in_rows(np.array([0.5, 0.5, 0.0]), 6, public).tolist() == [10, 11, 10, 20, 20, 20]
    assert stand_in_rows(np.array([0.0, 1.0, 0.0]), 2, public).tolist() == [20, 20]
    share_c = np.random.default_rng(0).dirichlet(np.ones(5))
    count_c = np.bincount(
        stand_in_rows(share_c, 1000, [np.array([c]) for c in range(5)]), minlength=5
    )
    assert np.abs(count_c - 1000 * share_c).max() <= 1


def test_a_stand_in_trains_as_a_client_does_with_fewer_steps() -> None:
    """Against the serial twin: client 4's rows made here, its minibatches drawn here."""
    settings = make_settings(RunSettings, TWIN)
    engine = engine_of(settings)
    work = LocalWork(lr=0.5, epochs=3, batch_size=4)
    task = engine.task
    params_d = engine.initial_params()
    population = task.population("data")
    twin_md = np.asarray(twin_simulation(task, work, 7, Engine)(params_d, population, 2))
    steps = round(3 * -(-len(task.client_rows[4]) // 4) * TWIN_STEPS)
    rows = stand_in_rows(task.shares[4], TWIN_BATCH * steps, task.public_rows)
    assert set(rows) <= set(np.concatenate(task.public_rows))
    x = torch.tensor(task.dataset.train_x[rows]).float() * task.input_scale
    y = torch.tensor(task.dataset.train_y[rows])
    fewer = LocalWork(lr=0.5, steps=steps, batch_size=TWIN_BATCH)
    model = new_model(task.make_model, 7)
    slow = train_serial(
        model,
        task.loss,
        x,
        y,
        params_d,
        fewer,
        stream(int(stream(7, "public", 1).integers(2**31)), "batches", 2, 4),
    )
    assert np.linalg.norm(slow.update_d) > 0.1
    np.testing.assert_allclose(twin_md[4], slow.update_d, atol=2e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_interrupted_run_ends_like_an_unbroken_one(tmp_path: Path, rounds: int) -> None:
    settings = make_settings(RunSettings, {**TWIN, "checkpoint_every": 2})
    run_single(settings, tmp_path / "unbroken", quiet)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "broken", stop_after(rounds))
    run_single(settings, tmp_path / "broken", quiet)
    assert (tmp_path / "broken" / "rounds.jsonl").read_bytes() == (
        tmp_path / "unbroken" / "rounds.jsonl"
    ).read_bytes()
    assert any(line["residual"] not in (None, 1.0) for line in lines_of(tmp_path / "broken")[1:])


def test_twins_take_away_error_in_the_first_round() -> None:
    """Digits with label skew: no memory and no regression knows anything yet; the bias is
    chance.
    """
    errors = []
    for label in ("balanced", "balanced@@twin"):
        settings = make_settings(RunSettings, {"sampler": label, "public": 10, "local_lr": 1.6})
        engine = engine_of(settings)
        plan = plan_of(settings, engine.task.population("data"), engine.task)
        state = init_round(plan, engine.initial_params())
        update_md = engine.train(state.params_d, 0, np.arange(100)).update_nd
        oracle = SimulatedOracle(engine, plan, state)
        errors.append(estimate_error(plan, state, oracle, update_md, 200))
    assert 0.3 < errors[1].mse / errors[0].mse < 0.6
    assert errors[1].z < 4


def test_without_public_examples_there_are_no_twins() -> None:
    settings = make_settings(RunSettings, {**TINY, "sampler": "balanced@@twin"})
    engine = engine_of(settings)
    with pytest.raises(
        DeltaflError,
        match=r"twins are trained on public examples and this run has none; set 'public'",
    ):
        plan_of(settings, engine.task.population("data"), engine.task)
