"""DeltaStrategy in Flower's own engines: simulation, deployment with crashes, TLS with node authentication. Slow."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from deltafl import close_round, init_round, make_plan, open_round
from deltafl.io import read_tensors
from deltafl.simulation.engine import Engine, reports_of
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.registry import make_task
from deltafl.types import Params

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_quickstart"

#: A server for the example app that writes the model of every round.
TRACED = """
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from deltafl.flower import DeltaStrategy

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    trace = Path(config["trace"])
    (trace / "pid").write_text(str(os.getpid()))

    def keep(server_round, arrays):
        flat = np.concatenate([arrays[name].numpy().ravel() for name in ("weight", "bias")])
        np.save(trace / "part.npy", flat)
        (trace / "part.npy").replace(trace / f"round-{server_round}.npy")
        time.sleep(config["pause"])

    strategy = DeltaStrategy(
        config["sampler"], config["n"], seed=config["seed"], state_path=config["state-path"] or None,
        min_nodes=config["min-nodes"], wait_for_nodes=90, registration_timeout=20, identity=config["identity"],
    )
    start = {"weight": Array(np.zeros((10, 64), np.float32)), "bias": Array(np.zeros(10, np.float32))}
    strategy.start(grid, ArrayRecord(start), num_rounds=config["rounds"], timeout=config["timeout"], evaluate_fn=keep)
    (trace / "done").touch()
"""

#: Its client, which fails while there is a file of the name in its config.
FAULTY = """
from pathlib import Path

from flower_quickstart import numpy_client

app = numpy_client.app
train = app._registered_funcs["train.default"]


def train_or_fail(message, context):
    if Path(context.node_config.get("fault", "/nowhere")).exists():
        raise RuntimeError("fails on request")
    return train(message, context)


app._registered_funcs["train.default"] = train_or_fail
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


class Processes:
    """Starts Flower's programs with a home of their own and stops exactly those."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trace, self.app = folder, folder / "trace", folder / "app"
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.tls: Path | None = None
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        (folder / "home").mkdir()
        self.trace.mkdir()
        shutil.copytree(EXAMPLE, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        for name, code in (("server_app", TRACED), ("client_app", FAULTY)):
            (self.app / "flower_quickstart" / f"{name}.py").write_text(code)
        with (self.app / "pyproject.toml").open("a") as config:
            config.write(f'trace = "{self.trace}"\nidentity = "auto"\nmin-nodes = 2\npause = 0.0\n')

    def start(self, name: str, *command: str) -> None:
        """Start a program in a session of its own; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, name: str, by: int = signal.SIGTERM) -> None:
        """Stop a program and what it has started."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=15)

    def superlink(self, *options: str) -> None:
        """Start the SuperLink and wait until it listens."""
        command = f"flower-superlink --host 127.0.0.1 --port {self.port} --disable-runtime-dependency-installation"
        security, how = "--insecure", "insecure = true"
        if self.tls is not None:
            names = {"ca-certfile": "server.crt", "certfile": "server.crt", "keyfile": "server.key"}
            security = " ".join(f"--ssl-{option} {self.tls / name}" for option, name in names.items())
            how = f'root-certificates = "{self.tls / "server.crt"}"'
        self.start("superlink", *command.split(), *security.split(), *options)
        connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        (self.folder / "home" / "config.toml").write_text(connection)

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(listens, 60, "the SuperLink")

    def supernode(self, name: str, partition: int, *options: str) -> None:
        config = f'client-id="{name}" partition-id={partition} num-partitions=3 fault="{self.folder / f"fault-{name}"}"'
        security = "--insecure" if self.tls is None else f"--root-certificates {self.tls / 'server.crt'}"
        command = f"flower-supernode --superlink 127.0.0.1:{self.port} --port {free_port()} {security}"
        self.start(name, *command.split(), "--node-config", config, *options)

    def run(self, *options: str, **settings: object) -> None:
        """``flwr run`` with settings of the app."""
        toml = {key.replace("_", "-"): f'"{v}"' if isinstance(v, str | Path) else v for key, v in settings.items()}
        config = " ".join(f"{key}={value}" for key, value in toml.items())
        self.flwr("run", str(self.app), "here", "--run-config", config, *options)

    def flwr(self, *arguments: str) -> None:
        subprocess.run(["flwr", *arguments], env=self.environment, cwd=self.folder, timeout=120, check=True)

    def model(self, server_round: int) -> Params:
        model: Params = np.load(self.trace / f"round-{server_round}.npy")
        return model

    def wait_for(self, name: str, seconds: float) -> None:
        """Until the server has written this file."""
        wait_until((self.trace / name).exists, seconds, name)


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
    header: dict[str, Any] = json.loads(read_tensors(state / "federation.safetensors", "")[1]["deltafl-federation"])
    return header


@pytest.mark.parametrize("label", ["pracdelta", "innovation", "innovation@systematic@innovation-remote", "census"])
def test_the_simulation_engine_gives_the_models_of_the_simulator(label: str, flower: Processes, tmp_path: Path) -> None:
    flower.superlink("--simulation")
    resources = "num-supernodes=20 client-resources-num-cpus=1 init-args-num-cpus=1"
    flower.run(
        "--federation-config", resources, sampler=label, n=5, rounds=5, min_nodes=20, state_path=tmp_path / "state"
    )
    flower.wait_for("done", 240)
    # The project's own simulator: the example's task, work and seed.
    task = make_task("digits", seed=0, num_clients=20)
    engine = Engine(task, LocalWork(lr=0.05, epochs=2, batch_size=10), seed=0)
    # Clients that keep their memory change no model.
    plan = make_plan(label.removesuffix("-remote"), task.population("data"), 5)
    if plan.sampler.census is not None:
        known = {client["key"]: client["aux"] for client in header_of(tmp_path / "state")["clients"]}
        answers = [known[f"partition:{client}"] for client in range(20)]
        first = engine.train(np.zeros(engine.num_params, np.float32), 0, np.arange(20)).update_nd
        expected = [plan.sampler.census.answer(update_d, (640, 10)) for update_d in first]
        np.testing.assert_allclose(answers, expected, atol=1e-4)
        plan = plan.with_census(answers)
    state = init_round(plan, np.zeros(engine.num_params))
    for server_round in range(5):
        cohort = open_round(plan, state)
        training = engine.train(state.params_d, server_round, cohort.client_n)
        last_d = state.params_d
        state, _ = close_round(plan, state, cohort, training.update_nd, reports_of(training))
        assert flower.model(server_round + 1) == pytest.approx(state.params_d, rel=1e-4, abs=1e-6), server_round
    assert np.linalg.norm(state.params_d - last_d) > 0.01


@pytest.mark.parametrize("label", ["innovation@local-pivotal", "census"])
def test_a_deployment_outlives_its_crashes(label: str, flower: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    flower.superlink()
    for partition, name in enumerate("abc"):
        flower.supernode(name, partition)
    settings = {"n": 2, "rounds": 6, "timeout": 45.0, "state_path": state, "pause": 1.0, "min_nodes": 2}
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
    assert sorted(client["key"] for client in header_of(state)["clients"]) == ["client:a", "client:b", "client:c"]
    sizes = [len(client["aux"]) for client in header_of(state)["clients"]]
    assert sizes == [128 if label == "census" else 0] * 3
    assert np.array_equal(flower.model(3), kept)  # nothing was played twice
    assert not np.array_equal(flower.model(6), kept)
    tensors = read_tensors(state / "federation.safetensors", "")[0]
    assert tensors["state.selected_m"].sum() == 12  # two a round, over both lives of the server
    assert 6 <= tensors["state.responded_m"].sum() < 12


def test_tls_and_node_authentication(flower: Processes, tmp_path: Path) -> None:
    flower.tls = tmp_path / "tls"
    flower.tls.mkdir()
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 1 -subj /CN=localhost"
    names = "-keyout server.key -out server.crt -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(["openssl", "req", *options.split(), *names.split()], cwd=flower.tls, check=True)
    flower.superlink("--enable-supernode-auth")
    for partition, name in enumerate("ab"):
        key = flower.tls / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)], check=True)
        flower.flwr("supernode", "register", f"{key}.pub", "here")
        flower.supernode(name, partition, "--auth-supernode-private-key", str(key))
    settings = {"n": 2, "timeout": 30.0, "identity": "public-key", "state_path": tmp_path / "state", "pause": 1.0}
    flower.run(rounds=8, **settings)
    for number in (1, 2):  # twice a node is killed and replaced, by one with its key
        flower.wait_for(f"round-{2 * number}.npy", 120)
        flower.stop("b", signal.SIGKILL)
        time.sleep(2)
        flower.supernode("b", 1, "--auth-supernode-private-key", str(flower.tls / "b"))
    flower.wait_for("done", 300)
    assert [client["key"][:4] for client in header_of(tmp_path / "state")["clients"]] == ["key:"] * 2
    tensors = read_tensors(tmp_path / "state" / "federation.safetensors", "")[0]
    assert tensors["state.selected_m"].tolist() == [8, 8]
    assert tensors["state.responded_m"].sum() >= 10
