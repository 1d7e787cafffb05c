"""DeltaStrategy in Flower's own engines: simulation, deployment with crashes, TLS with node authentication. Slow."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from deltafl import Plan, Population, Reports, close_round, init_round, make_sampler, open_round
from deltafl.io import read_tensors
from deltafl.samplers import parse_label
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.registry import make_task

from .processes import Processes, make_certificate, wait_until

pytestmark = pytest.mark.slow


def simulated(label: str, clients: int, n: int, rounds: int) -> list[np.ndarray]:
    """The models of the project's own simulator: the example's task, work and seed."""
    task = make_task("digits", seed=0, num_clients=clients)
    engine = Engine(task, LocalWork(lr=0.05, epochs=2, batch_size=10), seed=0)
    population: Population = task.population("data")
    plan = Plan(population, make_sampler(label), n, parse_label(label).estimator)
    state = init_round(plan, np.zeros(engine.num_params))
    models = [state.params_d]
    for server_round in range(rounds):
        cohort = open_round(plan, state)
        training = engine.train(state.params_d, server_round, cohort.client_n)
        reports = Reports.make(
            len(cohort.client_n),
            loss=training.loss_n,
            step_variance=training.step_variance_n,
            num_steps=training.num_steps_n,
        )
        state, _ = close_round(plan, state, cohort, training.update_nd, reports)
        models.append(state.params_d)
    return models


def header_of(state: Path) -> dict[str, Any]:
    """What a saved state says of itself."""
    header: dict[str, Any] = json.loads(read_tensors(state / "federation.safetensors", "")[1]["deltafl-federation"])
    return header


@pytest.mark.parametrize("label", ["pracdelta", "innovation", "innovation@systematic@innovation-remote"])
def test_the_simulation_engine_gives_the_models_of_the_simulator(label: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as flower:
        flower.superlink("--simulation")
        flower.run(
            "--federation-config",
            "num-supernodes=20 client-resources-num-cpus=1 init-args-num-cpus=1",
            sampler=label,
            n=5,
            rounds=5,
            min_nodes=20,
        )
        wait_until(flower.done, 240, "five rounds of the simulation engine")
        models = simulated(label.removesuffix("-remote"), 20, 5, 5)  # clients that keep their memory change no model
        for server_round, model_d in enumerate(models):
            assert flower.model(server_round) == pytest.approx(model_d, rel=1e-4, abs=1e-6), server_round
        assert np.linalg.norm(models[5] - models[4]) > 0.01


def test_a_deployment_outlives_its_crashes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Processes(tmp_path) as flower:
        flower.superlink()
        for partition, name in enumerate("abc"):
            flower.supernode(name, partition)
        settings = {"n": 2, "rounds": 6, "timeout": 45.0, "state_path": str(state), "pause": 1.0, "min_nodes": 2}
        flower.run(**settings)
        wait_until(lambda: flower.reached(1), 150, "the first round")
        (tmp_path / "fault-a").touch()
        wait_until(lambda: flower.reached(2), 90, "a round with a client that raises")
        (tmp_path / "fault-a").unlink()
        flower.stop("b", signal.SIGKILL)
        wait_until(lambda: flower.reached(3), 90, "a round with a killed node")
        servers = flower.descendants("superlink", "flwr-serverapp")
        assert servers
        for server in servers:
            os.kill(server, signal.SIGKILL)
        assert 3 <= header_of(state)["round"] < 6
        kept = flower.model(3).copy()
        flower.supernode("b", 1)
        flower.run(**settings)
        wait_until(flower.done, 300, "the rest of the rounds")
        assert header_of(state)["round"] == 6
        assert sorted(client["key"] for client in header_of(state)["clients"]) == ["client:a", "client:b", "client:c"]
        assert np.array_equal(flower.model(3), kept)  # nothing was played twice
        assert not np.array_equal(flower.model(6), kept)
        tensors = read_tensors(state / "federation.safetensors", "")[0]
        assert tensors["state.selected_m"].sum() == 12  # two a round, over both lives of the server
        assert 6 <= tensors["state.responded_m"].sum() < 12


def test_tls_and_node_authentication(tmp_path: Path) -> None:
    with Processes(tmp_path) as flower:
        flower.tls = make_certificate(tmp_path / "tls")
        flower.superlink("--enable-supernode-auth")
        for partition, name in enumerate("ab"):
            key = tmp_path / "tls" / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)], check=True)
            flower.flwr("supernode", "register", f"{key}.pub", "here")
            flower.supernode(name, partition, "--auth-supernode-private-key", str(key), partitions=2)
        flower.run(n=2, rounds=2, timeout=20.0, identity="public-key", state_path=str(tmp_path / "state"))
        wait_until(flower.done, 120, "two rounds over TLS")
        keys = [client["key"] for client in header_of(tmp_path / "state")["clients"]]
        assert [key[:4] for key in keys] == ["key:"] * 2
