"""Flower's programs as processes, of which a test stops exactly its own; they play the example
app, traced.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltafl.types import Params

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

    def __init__(self, folder: Path, server_app: str = TRACED, client_app: str = FAULTY) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.app = folder / "app"
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
        for name, code in (("server_app", server_app), ("client_app", client_app)):
            (self.app / "flower_quickstart" / f"{name}.py").write_text(code)
        with (self.app / "pyproject.toml").open("a") as config:
            config.write(f'trace = "{self.trace}"\nidentity = "auto"\nmin-nodes = 2\npause = 0.0\n')

    def start(self, name: str, *command: str) -> None:
        """Start a program in a session of its own; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
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

    def certified(self) -> None:
        """Make a certificate of the SuperLink, which is used from now on."""
        self.tls = self.folder / "tls"
        self.tls.mkdir()
        options = (
            "-x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 1 "
            "-subj /CN=localhost -keyout server.key -out server.crt "
            "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        )
        command = ["openssl", "req", *options.split()]
        subprocess.run(command, cwd=self.tls, check=True, capture_output=True)

    def key(self, name: str, register: bool = True) -> list[str]:
        """Make the key of a node, and the options by which the node uses it."""
        file = self.folder / f"key-{name}"
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(file)]
        subprocess.run(command, check=True)
        if register:
            self.flwr("supernode", "register", f"{file}.pub", "here")
        return ["--auth-supernode-private-key", str(file)]

    def superlink(self, *options: str) -> None:
        """Start the SuperLink and wait until it listens."""
        command = (
            f"flower-superlink --host 127.0.0.1 --port {self.port} "
            "--disable-runtime-dependency-installation"
        )
        security = "--insecure"
        how = "insecure = true"
        if self.tls is not None:
            names = {"ca-certfile": "server.crt", "certfile": "server.crt", "keyfile": "server.key"}
            security = " ".join(
                f"--ssl-{option} {self.tls / name}" for option, name in names.items()
            )
            how = f'root-certificates = "{self.tls / "server.crt"}"'
        self.start("superlink", *command.split(), *security.split(), *options)
        connection = (
            '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = '
            f'"127.0.0.1:{self.port}"\n{how}\n'
        )
        (self.folder / "home" / "config.toml").write_text(connection)

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(listens, 60, "the SuperLink")

    def supernode(self, name: str, partition: int, *options: str, **more: object) -> None:
        config = (
            f'client-id="{name}" partition-id={partition} num-partitions=3 '
            f'fault="{self.folder / f"fault-{name}"}"'
        )
        config += "".join(f' {key}="{value}"' for key, value in more.items())
        security = (
            "--insecure" if self.tls is None else f"--root-certificates {self.tls / 'server.crt'}"
        )
        command = (
            f"flower-supernode --superlink 127.0.0.1:{self.port} --port {free_port()} {security}"
        )
        self.start(name, *command.split(), "--node-config", config, *options)

    def run(self, *options: str, **settings: object) -> None:
        """``flwr run`` with settings of the app."""
        config = " ".join(
            f"{key.replace('_', '-')}={json.dumps(v, default=str)}" for key, v in settings.items()
        )
        self.flwr("run", str(self.app), "here", "--run-config", config, *options)

    def flwr(self, *arguments: str) -> None:
        subprocess.run(
            ["flwr", *arguments], env=self.environment, cwd=self.folder, timeout=120, check=True
        )

    def model(self, server_round: int) -> Params:
        model: Params = np.load(self.trace / f"round-{server_round}.npy")
        return model

    def wait_for(self, name: str, seconds: float) -> None:
        """Until the server has written this file."""
        wait_until((self.trace / name).exists, seconds, name)
