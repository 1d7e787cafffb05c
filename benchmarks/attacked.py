"""Federations of real processes in which one of four clients attacks.

    python benchmarks/attacked.py flower-tls
    python benchmarks/attacked.py flower-open
    python benchmarks/attacked.py nvflare

- ``flower-tls``: a SuperLink with TLS and node authentication, and four SuperNodes. One lies in
  each round for which it is drawn, each time in another way; beside it a node without a registered
  key comes anew in every round, and thirty connections send a byte a second.
- ``flower-open``: without both; the liar comes anew in every round, as another client, and stays
  for three.
- ``nvflare``: a server and four sites of NVFlare, with its certificates.

The server's process is killed after round 8 and its job started again. With ``flower-tls`` and
``nvflare`` the model after each round must be, bit for bit, that of a federation without a host in
which the liar is silent. Memory (resident) of the server's processes is that after each round; from
round 11 on it must not grow by half a model a round, and two models for each client that joins.
Ends with 1 if anything is not so.
"""

import argparse
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "benchmarks" / "jobs"
PATHS = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "benchmarks"), str(JOBS)]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
#: What is freed goes back to the system: else the C library keeps pieces of it in every thread.
os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

from attacked_clients import LIAR, SHAPE, SIZES, loss, target, trained  # noqa: E402
from deltafl import DeltaflError  # noqa: E402
from deltafl.federation.clients import ClientInfo  # noqa: E402
from deltafl.federation.federation import Federation  # noqa: E402
from deltafl.federation.replies import read_reply  # noqa: E402
from deltafl.federation.rules import make_rules  # noqa: E402
from deltafl.store.sealed import read_sealed  # noqa: E402

ROUNDS = 30
#: The server dies after it.
KILL = 8
#: From it on memory is judged.
WARM = 11
#: Megabytes a round: a model that is kept in each would be twice as much.
GROWTH = 0.5
#: And for each client that joins: its last update, and a model that its node has not fetched.
JOINED = 2.0
SAMPLER = "innovation@local-pivotal"
SETTINGS: dict[str, Any] = {"n": 3, "seed": 1}

Vector = npt.NDArray[np.float32]
Measure = Callable[[], dict[str, float]]


class Seen(NamedTuple):
    """A round as its files and processes show it."""

    round: int
    params_d: Vector
    num_clients: int
    used_mb: dict[str, float]


class Outcome(NamedTuple):
    """What came of one federation."""

    seen: list[Seen]
    state: Path
    lies: Path
    num_killed: int
    seconds: float


def watch(state: Path, used: Measure, after: Callable[[int], None], seconds: float) -> list[Seen]:
    """Look at the saved state until all rounds are done."""
    end = time.monotonic() + seconds
    seen = list[Seen]()
    done = 0
    while done < ROUNDS:
        if time.monotonic() > end:
            print(f"after {seconds:g} s only {done} rounds are done", flush=True)
            break
        time.sleep(0.05)
        # Not there yet, or under two names while the next one is written.
        with suppress(DeltaflError):
            arrays, header = read_sealed(state / "federation.safetensors", "")
            if header["round"] > done:
                done = header["round"]
                model = arrays["state.params_d"].copy()
                seen.append(Seen(done, model, len(header["clients"]), used()))
                after(done)
    return seen


def megabytes(processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total / 1e6


def commands(of: Any = psutil.process_iter) -> Iterator[tuple[psutil.Process, str]]:
    """Processes and their command lines; those that have just ended are left out."""
    for process in of():
        with suppress(psutil.Error):
            yield process, " ".join(process.cmdline())


def kill(processes: list[psutil.Process]) -> list[int]:
    """By kill -9; the ids of those that it met."""
    met = list[int]()
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
            met.append(process.pid)
    return met


# Flower.


@contextmanager
def dripping(port: int, count: int = 30) -> Iterator[None]:
    """Connections that send a byte a second, of an endless address or of an endless body."""
    beginnings = (b"GET /", b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
    over = threading.Event()

    def drip(number: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        while not over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as plain:
                wire = context.wrap_socket(plain)
                wire.sendall(beginnings[number % 2])
                while not over.wait(1):
                    wire.sendall(b"x")
            over.wait(1)

    threads = [threading.Thread(target=drip, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    yield
    over.set()


def flower(folder: Path, secure: bool) -> Outcome:
    from flower.processes import Processes

    text = "import attacked_flower\n\napp = attacked_flower.{}_app\n"
    nodes = Processes(folder, text.format("server"), text.format("client"))
    state = folder / "state"
    lies = folder / "lies.txt"
    # The node that comes anew: one without a registered key, or the liar.
    guests = [] if secure else [f"node-{LIAR}"]
    settings = {
        "sampler": SAMPLER,
        **SETTINGS,
        "rounds": ROUNDS,
        "state_path": state,
        "min_nodes": len(SIZES) if secure else len(SIZES) - 1,
        "identity": "public-key" if secure else "config",
        "timeout": 45.0 if secure else 20.0,
    }

    def server() -> list[psutil.Process]:
        root = psutil.Process(nodes.running["superlink"].pid)
        return [root, *root.children(recursive=True)]

    def app() -> list[psutil.Process]:
        return [process for process, line in commands(server) if "flwr-serverapp" in line]

    def used() -> dict[str, float]:
        of_app = app()
        of_link = [process for process in server() if process not in of_app]
        return {"SuperLink": megabytes(of_link), "ServerApp": megabytes(of_app)}

    def after(number: int) -> None:
        if number == KILL:
            killed.extend(kill(app()))
            nodes.run(**settings)
        # It is asked who it is in one round, and for an update in the next.
        if len(guests) > (0 if secure else 2):
            nodes.stop(guests.pop(0))
        guest = f"guest-{number}"
        key = nodes.key(guest, register=False) if secure else ()
        nodes.supernode(guest, LIAR, *key, lies=lies)
        guests.append(guest)

    killed = list[int]()
    begun = time.monotonic()
    try:
        if secure:
            nodes.certified()
        nodes.superlink(*["--enable-supernode-auth"] * secure)
        for number in range(len(SIZES)):
            name = f"node-{number}"
            more = {"lies": lies} if number == LIAR else {}
            nodes.supernode(name, number, *(nodes.key(name) if secure else ()), **more)
        nodes.run(**settings)
        with ExitStack() as stack:
            if secure:
                stack.enter_context(dripping(nodes.port))
            seen = watch(state, used, after, 3600)
    finally:
        for name in reversed(list(nodes.running)):
            nodes.stop(name)
    return Outcome(seen, state, lies, len(killed), time.monotonic() - begun)


# NVFlare.


def nvflare(folder: Path) -> Outcome:
    os.environ |= {
        "HOME": str(folder / "home"),
        "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    (folder / "home").mkdir()
    np.save(folder / "start.npy", np.zeros(SHAPE, np.float32))
    from nvflare.app_common.np.np_model_persistor import NPModelPersistor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner
    from nvflare.recipe.poc_env import PocEnv

    from deltafl.nvflare import DeltaFedAvg

    state = folder / "state"
    lies = folder / "lies.txt"
    seconds = 20.0

    def make() -> Any:
        job = FedJob("attacked", min_clients=len(SIZES))
        controller = DeltaFedAvg(
            SAMPLER,
            num_rounds=ROUNDS,
            state_path=str(state),
            min_clients=len(SIZES),
            timeout=seconds,
            registration_timeout=60,
            **SETTINGS,
        )
        job.to_server(controller)
        # In the job itself a model of a megabyte would end NVFlare's connections.
        start = NPModelPersistor(source_ckpt_file_full_name=str(folder / "start.npy"))
        job.to_server(start, id="persistor")
        arguments = f"--lies {lies} --seconds {seconds}"
        script = ScriptRunner(
            str(JOBS / "attacked_site.py"), arguments, framework=FrameworkType.NUMPY
        )
        job.to_clients(script)
        return job

    def ours(what: str) -> list[psutil.Process]:
        return [
            process for process, line in commands() if what in line and str(folder / "poc") in line
        ]

    def used() -> dict[str, float]:
        return {
            "server": megabytes(ours("server.server_train")),
            "job": megabytes(ours("server.runner_process")),
        }

    environment = PocEnv(num_clients=len(SIZES), extra={"login_timeout": 120})

    def after(number: int) -> None:
        if number == KILL:
            killed.extend(kill(ours("server.runner_process")))
            environment._get_session_manager().submit_job(make())

    killed = list[int]()
    begun = time.monotonic()
    try:
        environment.deploy(make())
        seen = watch(state, used, after, 3600)
    finally:
        environment.stop()
        kill(ours(""))
    return Outcome(seen, state, lies, len(killed), time.monotonic() - begun)


# What must be so.


def median_slope(x_n: npt.NDArray[Any], y_n: npt.NDArray[Any]) -> float:
    """The median over all pairs: a round that holds an array of 64 MB for a moment is no growth."""
    first, second = np.triu_indices(len(x_n), 1)
    return float(np.median((y_n[second] - y_n[first]) / (x_n[second] - x_n[first])))


def silent(clients: Mapping[str, int]) -> list[Vector]:
    """The models of a federation of these clients in which the liar never replies."""
    federation = Federation(make_rules(SAMPLER, **SETTINGS), {"x": np.zeros(SHAPE, np.float32)})
    federation.admit({key: ClientInfo(size) for key, size in clients.items()})
    number_of = {key: SIZES.index(size) for key, size in clients.items()}
    models = []
    for _ in range(ROUNDS):
        cohort = federation.open(federation.keys)
        x = federation.arrays()["x"]
        replies = {}
        for key in federation.keys_of(cohort):
            number = number_of[key]
            if number != LIAR:
                arrays = {"x": lambda number=number, x=x: trained(x, number)}
                replies[key] = read_reply(arrays, {"loss": loss(x, number)}, {})
        federation.close(cohort, replies)
        models.append(federation.params_d.copy())
    return models


def judge(name: str, found: Outcome) -> list[str]:
    """Print what was measured; what is not as it must be."""
    seen = found.seen
    arrays, header = read_sealed(found.state / "federation.safetensors", "")
    wrong = list[str]()

    def show(what: str, value: object, right: bool = True) -> None:
        print(f"{name:12} {what:30} {value}{'' if right else '   WRONG'}", flush=True)
        if not right:
            wrong.append(what)

    show("rounds", f"{header['round']} of {ROUNDS}", header["round"] == ROUNDS)
    show("minutes", f"{found.seconds / 60:.1f}")
    show("processes killed", f"{found.num_killed}, after round {KILL}", found.num_killed > 0)
    lies = Counter(found.lies.read_text().split("\n")[:-1])
    show("lies", ", ".join(f"{kind} {count}" for kind, count in lies.items()), len(lies) > 8)
    sizes = np.array([*header["clients"].values()])
    selected_m, responded_m = arrays["state.selected_m"], arrays["state.responded_m"]
    of_liar = sizes == SIZES[LIAR]
    counts = f"drawn {selected_m[of_liar].sum()} times, used {responded_m[of_liar].sum()}"
    show("replies of the liar", counts, not responded_m[of_liar].any())
    counts = f"drawn {selected_m[~of_liar].sum()} times, used {responded_m[~of_liar].sum()}"
    show("replies of the others", counts, responded_m[~of_liar].all())
    finite = all(np.isfinite(each.params_d).all() for each in seen)
    show("model finite", finite, finite)
    honest = np.mean([target(number) for number in range(LIAR)], 0).ravel()
    away = float(np.linalg.norm(seen[-1].params_d - honest) / np.linalg.norm(honest))
    show("distance from the others' mean", f"{away:.3f}, at first 1", away < 0.7)
    if name == "flower-open":
        show("clients known", len(sizes), len(SIZES) < len(sizes) <= len(SIZES) + ROUNDS)
    else:
        show("clients known", len(sizes), len(sizes) == len(SIZES))
        expected = silent(header["clients"])
        same = sum(np.array_equal(each.params_d, expected[each.round - 1]) for each in seen)
        text = f"{same} of {len(seen)} models seen"
        show("bits where the liar is silent", text, same == len(seen) > ROUNDS // 2)
    warm = [each for each in seen if each.round >= WARM]
    joined = (warm[-1].num_clients - warm[0].num_clients) / (ROUNDS - WARM)
    for role in seen[-1].used_mb:
        used = np.array([each.used_mb[role] for each in warm])
        slope = median_slope(np.array([each.round for each in warm]), used)
        some = " ".join(f"{mb:.0f}" for mb in used[:: max(1, len(used) // 6)])
        text = f"{some} MB; {slope:+.2f} a round"
        flat = slope < GROWTH + JOINED * joined
        show(f"{role}, rounds {WARM} to {ROUNDS}", text, flat and used[-1] > 0)
    return wrong


HOSTS: dict[str, Callable[[Path], Outcome]] = {
    "flower-tls": lambda folder: flower(folder, secure=True),
    "flower-open": lambda folder: flower(folder, secure=False),
    "nvflare": nvflare,
}


def main(names: list[str], keep: Path | None) -> None:
    wrong = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="attacked-") as made:
            folder = Path(made) if keep is None else keep / name
            folder.mkdir(parents=True, exist_ok=True)
            wrong += judge(name, HOSTS[name](folder))
    if wrong:
        sys.exit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    # Stopping it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__)
    # Without a name the parser looks for an empty list among them.
    parser.add_argument("hosts", nargs="*", choices=[*HOSTS, []])
    parser.add_argument("--keep", type=Path, help="a folder for what the processes write")
    given = parser.parse_args()
    main(given.hosts or [*HOSTS], given.keep)
