"""DeltaStrategy in Flower's own engines: simulation, deployment with crashes, TLS with node
authentication. Slow.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from deltafl import close_round, init_round, make_plan, open_round
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.store.sealed import read_sealed
from deltafl.tasks.registry import make_task
from deltafl.types import FloatArray

from .processes import Processes

pytestmark = pytest.mark.slow


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    for name in reversed(list(processes.running)):
        processes.stop(name)
    for log in sorted(tmp_path.glob("*.log")):  # pytest shows them if the test failed
        sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")


def header_of(state: Path) -> dict[str, Any]:
    """The description in a saved state."""
    return read_sealed(state / "federation.safetensors", "")[1]


def answers_in(state: Path) -> FloatArray:
    """The answers to the census in a saved state, a row each."""
    answer_mk: FloatArray = read_sealed(state / "federation.safetensors", "")[0]["aux_mk"]
    return answer_mk


@pytest.mark.parametrize(
    "label",
    ["pracdelta", "census+scaffold", "census+mime=0.7"],
)
def test_the_simulation_engine_gives_the_models_of_the_simulator(
    label: str, flower: Processes, tmp_path: Path
) -> None:
    flower.superlink("--simulation")
    resources = "num-supernodes=20 client-resources-num-cpus=1 init-args-num-cpus=1"
    settings = {"sampler": label, "n": 5, "rounds": 5, "min_nodes": 20}
    flower.run("--federation-config", resources, state_path=tmp_path / "state", **settings)
    flower.wait_for("done", 240)
    # The project's own simulator: the example's task, work and seed.
    task = make_task("digits", seed=0, num_clients=20)
    plan = make_plan(label, task.population("data"), 5)
    engine = Engine(
        task, LocalWork(lr=0.05, epochs=2, batch_size=10, step_factor=plan.step_factor), seed=0
    )
    if plan.census is not None:
        known = dict(
            zip(
                header_of(tmp_path / "state")["clients"],
                answers_in(tmp_path / "state"),
                strict=True,
            )
        )
        answers = np.array([known[f"partition:{client}"] for client in range(20)])
        first = engine.train(np.zeros(engine.num_params, np.float32), 0, np.arange(20)).update_nd
        expected = [plan.census.answer(update_d, (640, 10)) for update_d in first]
        np.testing.assert_allclose(answers[:, :129], np.array(expected)[:, :129], atol=1e-4)
        plan = plan.with_census(answers)
    state = init_round(plan, np.zeros(engine.num_params))
    if plan.census is not None:
        assert flower.model(1) == pytest.approx(state.params_d, rel=1e-4, abs=1e-6)
    for server_round in range(state.round, 5):
        cohort = open_round(plan, state)
        drift_nd = plan.drifts(state, cohort.client_n)
        training = engine.train(state.params_d, server_round, cohort.client_n, drift_nd)
        last_d = state.params_d
        state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
        assert flower.model(server_round + 1) == pytest.approx(
            state.params_d, rel=1e-4, abs=1e-6
        ), server_round
    assert np.linalg.norm(state.params_d - last_d) > 0.01


@pytest.mark.parametrize("label", ["innovation@local-pivotal", "census"])
def test_a_deployment_outlives_its_crashes(label: str, flower: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    flower.superlink()
    for partition, name in enumerate("abc"):
        flower.supernode(name, partition)
    settings = {
        "n": 2,
        "rounds": 6,
        "timeout": 45.0,
        "state_path": state,
        "pause": 1.0,
        "min_nodes": 2,
    }
    settings["sampler"] = label
    flower.run(**settings)
    flower.wait_for("round-1.npy", 150)
    (tmp_path / "fault-a").touch()  # this client raises
    flower.wait_for("round-2.npy", 90)
    (tmp_path / "fault-a").unlink()
    flower.stop("b", signal.SIGKILL)
    flower.wait_for("round-3.npy", 90)
    os.kill(int((flower.trace / "pid").read_text()), signal.SIGKILL)
    assert 3 <= header_of(state)["round"] < 6
    kept = flower.model(3).copy()
    flower.supernode("b", 1)
    flower.run(**settings)
    flower.wait_for("done", 300)
    assert header_of(state)["round"] == 6
    assert sorted(header_of(state)["clients"]) == ["client:a", "client:b", "client:c"]
    assert answers_in(state).shape == (3, 162 if label == "census" else 0)
    assert np.array_equal(flower.model(3), kept)  # nothing was played twice
    assert not np.array_equal(flower.model(6), kept)
    tensors = read_sealed(state / "federation.safetensors", "")[0]
    drawn = 2 * (
        6 - (label == "census")
    )  # two a round, over both lives of the server; a census draws nobody
    assert tensors["state.selected_m"].sum() == drawn
    assert drawn / 2 <= tensors["state.responded_m"].sum() < drawn


def test_tls_and_node_authentication(flower: Processes, tmp_path: Path) -> None:
    flower.certified()
    flower.superlink("--enable-supernode-auth")
    keys = {name: flower.key(name) for name in "ab"}
    for partition, name in enumerate(keys):
        flower.supernode(name, partition, *keys[name])
    settings = {
        "sampler": "innovation@local-pivotal",  # which draws in every round
        "n": 2,
        "timeout": 30.0,
        "identity": "public-key",
        "state_path": tmp_path / "state",
        "pause": 1.0,
    }
    flower.run(rounds=8, **settings)
    for number in (1, 2):  # twice a node is killed and replaced, by one with its key
        flower.wait_for(f"round-{2 * number}.npy", 120)
        flower.stop("b", signal.SIGKILL)
        time.sleep(2)
        flower.supernode("b", 1, *keys["b"])
    flower.wait_for("done", 300)
    assert [key[:4] for key in header_of(tmp_path / "state")["clients"]] == ["key:"] * 2
    tensors = read_sealed(tmp_path / "state" / "federation.safetensors", "")[0]
    assert tensors["state.selected_m"].tolist() == [8, 8]
    assert tensors["state.responded_m"].sum() >= 10
