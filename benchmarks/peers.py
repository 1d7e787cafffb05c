"""The FashionMNIST job in deltafl, a plain PyTorch loop and the simulators of Flower, pfl and
NVFlare.

    python benchmarks/peers.py [--repeats 5] [--rounds 4] [--only Flower] [--home .peers] [--out
    result.json]

The same data and cores for all: 20 clients with 200 images each train 5 epochs of the two-layer
CNN, minibatches of 32: 700 local steps a round. The peers are installed once, in environments of
their own under ``--home``; the jobs are the scripts in ``jobs/``. Every variant of a repeat is a
fresh set of processes on the same one or two cores; the first round warms up. Measured are wall and
processor seconds a round, the latter of all processes that the job started, and the time to the
first round. All have glibc's malloc tuned by the environment (it keeps freed blocks) but for one
row. A variant that fails, or takes longer than five minutes, is ended and left out of that repeat;
the file is written after every repeat.
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
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import numpy as np

from deltafl.simulation import environment
from deltafl.tasks import make_task

JOBS = Path(__file__).parent / "jobs"
CLIENTS = 20
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


def write_job(path: Path) -> None:
    """The clients' images, float32 (20, 200, 1, 28, 28), and labels."""
    task = make_task("fashion-mnist", seed=0)
    rows = task.client_rows[:CLIENTS]
    x = np.stack(
        [
            task.dataset.train_x[own].astype(np.float32) * np.float32(task.input_scale)
            for own in rows
        ]
    )
    np.savez(path, x=x, y=np.stack([task.dataset.train_y[own].astype(np.int64) for own in rows]))


def measure(variant: Variant, job: Path, rounds: int) -> Taken | None:
    """Run one variant in processes of its own; None, with the reason printed, if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [
                "taskset",
                "-c",
                CORES[variant.cores],
                *variant.program,
                str(job),
                str(rounds + 1),
                *variant.arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=JOBS,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(TUNED if variant.tuned else {})},
        )
        assert process.stdout is not None
        marks: list[tuple[float, float]] = []
        limit = Timer(SECONDS, end_all, [process.pid])
        limit.start()
        for line in process.stdout:
            if line.strip() == "round":
                marks.append((time.perf_counter(), sum(seconds_of(process.pid).values())))
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
    given = parser.parse_args()
    install(given.home.absolute(), given.only)
    chosen = variants(given.home.absolute())
    if given.only:
        chosen = [
            v
            for v in chosen
            if v.name == "plain loop" or v.name.startswith(("deltafl", given.only))
        ]
    found: dict[str, list[Taken | None]] = {variant.name: [] for variant in chosen}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        write_job(job)
        for repeat in range(given.repeats):
            for variant in chosen:
                found[variant.name].append(measure(variant, job, given.rounds))
            print(
                f"repeat {repeat + 1} of {given.repeats} done; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            if given.out:
                about = {
                    **environment(),
                    "peers": [TORCH, *chain(*PEERS.values())],
                    "load": os.getloadavg(),
                }
                taken = {
                    name: [run and run._asdict() for run in runs] for name, runs in found.items()
                }
                content = {"about": about, "taken": taken}
                given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(found))


def table(found: dict[str, list[Taken | None]]) -> str:
    """Markdown: medians, and how many times deltafl's seconds each takes with the same cores,
    paired by repeat.
    """
    lines = [
        "| | first round, s | wall s | CPU s | deltafl is faster: wall | CPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        ours = found["deltafl, 2 core(s)" if "2 core" in name else "deltafl, 1 core(s)"]
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
