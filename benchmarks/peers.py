"""One job in deltafl, a plain PyTorch loop and the simulators of Flower, pfl and NVFlare.

    python benchmarks/peers.py [--repeats 5] [--rounds 4] [--only Flower] [--home .peers] [--out
    result.json]
    python benchmarks/peers.py --device cuda [--jobs cnn,resnet18,...] [--wheels DIR] ...

The same data and cores for all: FashionMNIST, of which 20 clients with 200 images each train 5
epochs of the two-layer CNN, minibatches of 32: 700 local steps a round. On a GPU there are more
jobs (``KINDS`` in ``jobs/work.py``; ``pfl-cifar10`` has network and local work of pfl's own
benchmark), random data of their shapes, all cores, and no NVFlare; all but deltafl's own rows have
PyTorch's defaults (convolutions in TF32). The peers are installed once, in environments of
their own under ``--home``; the jobs are the scripts in ``jobs/``. Every variant of a repeat is a
fresh set of processes on the same one or two cores; the first round warms up. Measured are wall and
processor seconds a round, the latter of all processes that the job started, and the time to the
first round. All have glibc's malloc tuned by the environment (it keeps freed blocks) but for one
row. ``--wheels`` is for a machine without a network: DIR/pfl and DIR/flower hold all wheels that
the interpreter lacks. A variant that fails, or takes longer than five minutes, is ended and left
out of that repeat; the file is written after every variant.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
import torch

from deltafl.simulation import environment
from deltafl.simulation.training.devices import device_name, find_device
from deltafl.streams import stream
from deltafl.tasks import make_task
from jobs.work import CLASSES, KINDS, TOKENS

JOBS = Path(__file__).parent / "jobs"
#: Of a job at full size, and with --quick: clients, and examples of each.
QUICK = 3, 12
PEERS = {
    "pfl": ["pfl==0.6.0"],
    "flower": ["flwr[simulation]==1.42.0"],
    "nvflare-simulator": ["nvflare==2.9.0"],
}
TORCH = "torch==2.13.0"
CORES = {1: "0", 2: "0,1"}
SECONDS = 300.0  #: that a variant may take; NVFlare's simulator can wait for a client without end
TUNED = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


class Variant(NamedTuple):
    """One way to do the job."""

    name: str
    program: list[str]
    cores: int
    arguments: tuple[str, ...] = ()
    tuned: bool = True
    path: Path | None = None  #: of more Python packages


class Taken(NamedTuple):
    """Seconds: until the first round is over, and of a round after it."""

    first: float
    wall: float
    cpu: float


def variants(home: Path) -> list[Variant]:
    """Everything that is compared; the first one is the base of the ratios."""
    pfl, flower, nvflare = (home / name / "bin" for name in PEERS)
    alone = [
        Variant("plain loop, malloc as it is", [sys.executable, "plain_job.py"], 1, tuned=False)
    ]
    return [Variant("plain loop", [sys.executable, "plain_job.py"], 1), *alone] + [
        variant
        for cores in (1, 2)
        for variant in (
            Variant(
                f"deltafl, {cores} core(s)",
                [sys.executable, "deltafl_job.py"],
                cores,
                (str(cores),),
            ),
            Variant(
                f"Flower, {cores} core(s)",
                [str(flower / "python"), "flower_job.py"],
                cores,
                (str(cores),),
            ),
            Variant(
                f"pfl, {cores} core(s)",
                [str(pfl / "python"), "pfl_job.py"]
                if cores == 1
                else [str(pfl / "torchrun"), "--nproc-per-node", "2", "pfl_job.py"],
                cores,
            ),
            Variant(
                f"NVFlare, {cores} core(s)", [str(nvflare / "python"), "nvflare_job.py"], cores
            ),
        )
    ]


def on_a_gpu(home: Path, apart: bool) -> list[Variant]:
    """Those on a GPU; the peers' packages are beside the interpreter's own, or in environments."""

    def of_peer(title: str, name: str, program: str, *arguments: str) -> Variant:
        if apart:
            return Variant(title, [sys.executable, program], 1, arguments, path=home / name)
        return Variant(title, [str(home / name / "bin" / "python"), program], 1, arguments)

    ours = [sys.executable, "deltafl_job.py"]
    return [
        Variant("plain loop", [sys.executable, "plain_job.py"], 1),
        Variant("deltafl", ours, 1, ("1", "float32")),
        Variant("deltafl, tf32", ours, 1, ("1", "tf32")),
        Variant("deltafl, bfloat16", ours, 1, ("1", "bfloat16")),
        of_peer("pfl", "pfl", "pfl_job.py"),
        of_peer("Flower, 1 at once", "flower", "flower_job.py", "1"),
        of_peer("Flower, 4 at once", "flower", "flower_job.py", "4"),
    ]


def unpack(home: Path, wheels: Path) -> None:
    """Install the wheels of each peer into a folder of its own, without what they depend on."""
    for name in PEERS:
        files = [str(path) for path in sorted((wheels / name).glob("*.whl"))]
        if files and not (home / name).exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            subprocess.run([*pip, "--target", str(home / name), *files], check=True)


def install(home: Path, only: str) -> None:
    """Make the environments of the peers whose names begin like that, if they are not there."""
    for name, packages in PEERS.items():
        folder = home / name
        if not name.startswith(only.lower()) or (folder / "installed").exists():
            continue
        print(f"installing {', '.join(packages)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for group in ([TORCH], packages):
            subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *group], check=True)
        (folder / "installed").touch()


def write_random_job(path: Path, name: str, quick: bool) -> None:
    """Inputs (m, examples, ...), float32 or int64 for tokens, and labels, all random."""
    kind = KINDS[name]
    rng = stream(0, "data")
    shape = QUICK if quick else (kind.clients, kind.examples)
    y = rng.integers(0, CLASSES, shape)
    x = rng.integers(0, TOKENS, (*shape, *kind.inputs))
    if name != "lstm":
        x = (x / np.float32(TOKENS)).astype(np.float32)
    np.savez(path, x=x, y=y, name=name)


def write_job(path: Path) -> None:
    """The clients' images, float32 (20, 200, 1, 28, 28), and labels."""
    task = make_task("fashion-mnist", seed=0)
    rows = task.client_rows[: KINDS["cnn"].clients]
    x = np.stack(
        [
            task.dataset.train_x[own].astype(np.float32) * np.float32(task.input_scale)
            for own in rows
        ]
    )
    y = np.stack([task.dataset.train_y[own].astype(np.int64) for own in rows])
    np.savez(path, x=x, y=y, name="cnn")


def measure(variant: Variant, job: Path, rounds: int, device: str = "cpu") -> Taken | None:
    """Run one variant in processes of its own; None, with the reason printed, if it fails."""
    began = time.perf_counter()
    own = {"DEVICE": device, **(TUNED if variant.tuned else {})}
    if device == "cpu":
        own["OMP_NUM_THREADS"] = "1"
    if variant.path is not None:
        above = os.environ.get("PYTHONPATH", "")
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(variant.path), above)))
    pinned = ["taskset", "-c", CORES[variant.cores]] if device == "cpu" else []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [
                *pinned,
                *variant.program,
                str(job),
                str(rounds + 1),
                *variant.arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=JOBS,
            env={**os.environ, **own},
        )
        assert process.stdout is not None
        marks: list[tuple[float, float]] = []
        limit = Timer(SECONDS, end_all, [process.pid])
        limit.start()
        for line in process.stdout:
            if line.strip() == "round":
                marks.append((time.perf_counter(), sum(seconds_of(process.pid).values())))
            elif line.startswith("route"):
                print(f"{variant.name}: {line.strip()}", flush=True)
        process.wait()
        limit.cancel()
        if (
            len(marks) != rounds + 1
        ):  # whatever the exit status: pfl's processes can abort once all rounds are done
            errors.seek(0)
            print(f"{variant.name} failed:\n{errors.read()[-3000:]}", flush=True)
            return None
    (first, first_cpu) = marks[0]
    (last, last_cpu) = marks[-1]
    return Taken(first - began, (last - first) / rounds, (last_cpu - first_cpu) / rounds)


def end_all(root: int) -> None:
    """End a process and all its descendants."""
    for pid in seconds_of(root):
        with suppress(OSError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


def seconds_of(root: int) -> dict[int, float]:
    """Processor seconds so far of a process and all its descendants, those that have ended
    included.
    """
    parent = {}
    seconds = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has just ended
                continue
            parent[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {root}
    while True:
        more = {pid for pid, above in parent.items() if above in family} - family
        if not more:
            return {pid: seconds.get(pid, 0.0) for pid in family}
        family |= more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--only",
        choices=("Flower", "pfl", "NVFlare"),
        default="",
        help="this one alone beside the plain loop",
    )
    parser.add_argument(
        "--home", type=Path, default=Path(".peers"), help="folder of the peers' environments"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", help="on a GPU, some of " + ", ".join(KINDS) + "; else all")
    parser.add_argument("--wheels", type=Path, help="folder of the peers' wheels")
    parser.add_argument(
        "--quick", action="store_true", help="the rows of a GPU at a tiny size, on a CPU, too"
    )
    given = parser.parse_args()
    home = given.home.absolute()
    if given.wheels is None:
        install(home, given.only)
    else:
        unpack(home, given.wheels)
    names: list[str | None] = [None]
    chosen = variants(home)
    if given.device == "cuda" or given.quick:
        names = [*(given.jobs or ",".join(KINDS)).split(",")]
        chosen = on_a_gpu(home, given.wheels is not None)
    if given.only:
        chosen = [
            v
            for v in chosen
            if v.name == "plain loop" or v.name.startswith(("deltafl", given.only))
        ]
    content: dict[str, Any] = {}
    for name in names:
        print(f"\n{name or 'FashionMNIST'}", flush=True)
        found: dict[str, list[Taken | None]] = {variant.name: [] for variant in chosen}
        for title, run in repeats(chosen, name, given):
            found[title].append(run)
            runs = {title: [r and r._asdict() for r in own] for title, own in found.items()}
            content["about"] = {
                **environment(),
                "peers": [TORCH, *chain(*PEERS.values())],
                "load": os.getloadavg(),
                "device": device_name(find_device(given.device)),
                "torch": torch.__version__,
            }
            if name is None:
                content["taken"] = runs
            else:
                content.setdefault("jobs", {})[name] = runs
            if given.out:
                given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(table(found))


def repeats(
    chosen: list[Variant], name: str | None, given: argparse.Namespace
) -> Iterator[tuple[str, Taken | None]]:
    """Each variant and its seconds, repeat by repeat: of random data, or of FashionMNIST."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        if name is None:
            write_job(job)
        else:
            write_random_job(job, name, given.quick)
        for repeat in range(given.repeats):
            for variant in chosen:
                yield variant.name, measure(variant, job, given.rounds, given.device)
            print(
                f"repeat {repeat + 1} of {given.repeats} done; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def table(found: dict[str, list[Taken | None]]) -> str:
    """Markdown: medians, and how many times deltafl's seconds each takes with the same cores,
    paired by repeat.
    """
    lines = [
        "| | first round, s | wall s | CPU s | deltafl is faster: wall | CPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        base = "deltafl"
        if base not in found:
            base = "deltafl, 2 core(s)" if "2 core" in name else "deltafl, 1 core(s)"
        ours = found[base]
        pairs = [(own, base) for own, base in zip(runs, ours, strict=True) if own and base]
        if not pairs:
            continue
        medians = [
            statistics.median(column) for column in zip(*(own for own, _ in pairs), strict=True)
        ]
        wall = [own.wall / base.wall for own, base in pairs]
        cpu = [own.cpu / base.cpu for own, base in pairs]
        columns = [*(f"{value:.2f}" for value in medians), spread(wall), spread(cpu)]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Median (least to largest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
