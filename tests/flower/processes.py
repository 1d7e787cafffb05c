"""Flower's own programs as processes on this machine, and the example app with a server that keeps every model."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_quickstart"

#: A server that writes the model of every round, and clients of which some fail.
TRACED = """
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

FAULTY = """
import os
from pathlib import Path

from flower_quickstart import numpy_client

app = numpy_client.app


def fail_on_request(message, context, call_next):
    if message.metadata.message_type == "train" and Path(context.node_config.get("fault", "/nowhere")).exists():
        raise RuntimeError("asked to fail")
    return call_next(message, context)


for name, function in list(app._registered_funcs.items()):
    app._registered_funcs[name] = lambda m, c, f=function: fail_on_request(m, c, f)
"""


def make_certificate(folder: Path) -> Path:
    """server.crt, which vouches for itself, and server.key in a folder."""
    folder.mkdir()
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 1 -subj /CN=localhost"
    names = ["-keyout", "server.key", "-out", "server.crt", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *options.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder


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
        self.folder = folder
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.tls: Path | None = None
        (folder / "home").mkdir()
        (folder / "trace").mkdir()
        self.app = folder / "app"
        shutil.copytree(EXAMPLE, self.app, ignore=shutil.ignore_patterns("__pycache__"))
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
        self._adapt_app()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)
        if kind is not None:
            for log in sorted(self.folder.glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")

    def _adapt_app(self) -> None:
        package = self.app / "flower_quickstart"
        (package / "traced.py").write_text(TRACED)
        (package / "faulty.py").write_text(FAULTY)
        text = (self.app / "pyproject.toml").read_text()
        text = text.replace("flower_quickstart.server_app:app", "flower_quickstart.traced:app")
        text = text.replace("flower_quickstart.client_app:app", "flower_quickstart.faulty:app")
        text += f'trace = "{self.folder / "trace"}"\nidentity = "auto"\nmin-nodes = 2\npause = 0.0\n'
        (self.app / "pyproject.toml").write_text(text)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self.running[name] = process
        return process

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
        address = f"127.0.0.1:{self.port}"
        command = f"flower-superlink --host 127.0.0.1 --port {self.port} --disable-runtime-dependency-installation"
        security = "--insecure"
        if self.tls is not None:
            names = {"ca-certfile": "server.crt", "certfile": "server.crt", "keyfile": "server.key"}
            security = " ".join(f"--ssl-{option} {self.tls / name}" for option, name in names.items())
        self.start("superlink", *command.split(), *security.split(), *options)
        how = "insecure = true" if self.tls is None else f'root-certificates = "{self.tls / "server.crt"}"'
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\n{how}\n'
        )
        wait_until(self._listens, 60, "the SuperLink")

    def supernode(self, name: str, partition: int, *options: str, partitions: int = 3) -> None:
        config = f'client-id="{name}" partition-id={partition} num-partitions={partitions} '
        config += f'fault="{self.folder / f"fault-{name}"}"'
        security = "--insecure" if self.tls is None else f"--root-certificates {self.tls / 'server.crt'}"
        command = f"flower-supernode --superlink 127.0.0.1:{self.port} --port {free_port()} {security}"
        self.start(name, *command.split(), "--node-config", config, *options)

    def run(self, *options: str, **settings: object) -> str:
        """``flwr run`` with settings of the app; returns what it printed."""
        config = " ".join(
            f"{key.replace('_', '-')}=" + (f'"{value}"' if isinstance(value, str) else str(value))
            for key, value in settings.items()
        )
        return self.flwr("run", str(self.app), "here", "--run-config", config, *options)

    def flwr(self, *arguments: str) -> str:
        where: dict[str, Any] = {"env": self.environment, "cwd": self.folder, "timeout": 120}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            ["flwr", *arguments], capture_output=True, text=True, check=False, **where
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def descendants(self, name: str, word: str) -> list[int]:
        """Ids of the processes that a program has started, at any depth, whose command holds a word."""
        lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        table = [line.split(maxsplit=2) for line in lines.splitlines()]
        found = {self.running[name].pid}
        for _ in range(8):
            found |= {int(pid) for pid, parent, _ in table if int(parent) in found}
        return [int(pid) for pid, _, command in table if int(pid) in found and word in command]

    def model(self, server_round: int) -> np.ndarray:
        model: np.ndarray = np.load(self.folder / "trace" / f"round-{server_round}.npy")
        return model

    def reached(self, server_round: int) -> bool:
        return (self.folder / "trace" / f"round-{server_round}.npy").exists()

    def done(self) -> bool:
        return (self.folder / "trace" / "done").exists()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
