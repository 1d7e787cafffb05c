"""What the benchmarks share: variants timed in turns, each in a process of its own, and what the machine is.

A process of its own means that none profits from another's malloc settings or caches; turns mean that a busy machine
slows all of them.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Round = Callable[[], object]
#: Made in the process that it is timed in, hence picklable: a function at the top of a module, or a partial of one.
Variant = Callable[[], AbstractContextManager[Round]]


class Sample(NamedTuple):
    """Of one turn: wall and CPU seconds, and the largest process's peak memory so far in GiB."""

    wall_s: float
    cpu_s: float
    peak_gib: float


def take_turns(variants: Mapping[str, Variant], repeats: int, rounds: int = 1) -> dict[str, list[Sample]]:
    """Time ``rounds`` rounds of each variant, one variant after the other, ``repeats`` times."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection[Any, Any]] = {}
    processes = []
    for name, variant in variants.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(variant, rounds, theirs)))
        processes[-1].start()
        theirs.close()
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for pipe in pipes.values():
        pipe.recv()  # warm
    for _ in range(repeats):
        for name, pipe in pipes.items():
            pipe.send(True)
            samples[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    return samples


def _serve(variant: Variant, rounds: int, pipe: "Connection[Any, Any]") -> None:
    """Warm up, then run rounds whenever asked and answer with a sample."""
    torch.set_num_threads(1)
    with variant() as one_round:
        one_round()
        pipe.send(None)
        while pipe.recv():
            wall, cpu = time.perf_counter(), cpu_seconds()
            for _ in range(rounds):
                one_round()
            pipe.send(Sample(time.perf_counter() - wall, cpu_seconds() - cpu, peak_memory()))


def cpu_seconds() -> float:
    """CPU time so far of this process and its workers, which a busy machine changes less than the wall clock."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        status = Path(f"/proc/{child.pid}/stat")
        if status.exists():
            user, system = status.read_text().rsplit(")", 1)[1].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def peak_memory() -> float:
    """The peak resident memory in GiB, of this process or of a worker of it, whichever is larger."""
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for child in multiprocessing.active_children():
        status = Path(f"/proc/{child.pid}/status")
        if status.exists():
            peaks += [int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return max(peaks) / 1024**2


def matrix_product_rate(size: int = 1024) -> float:
    """Multiply-adds a second of a large float32 matrix product, one thread: what the cores can do at best."""
    torch.set_num_threads(1)
    a, seconds = torch.rand(size, size), []
    for _ in range(15):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return size**3 / min(seconds)


def cpu_model() -> str:
    """What ``/proc/cpuinfo`` calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def versions() -> dict[str, str]:
    """Of what is timed."""
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """Hardware, the instruction set that torch uses, and how busy it is."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu_model(), "instructions": instructions, "cores": os.cpu_count(), "load": os.getloadavg()}


def ratios_of(base: list[Sample], own: list[Sample]) -> tuple[list[float], list[float]]:
    """How many times longer the base takes, turn by turn, sorted: by the wall clock, and in CPU time."""
    pairs = list(zip(base, own, strict=True))
    return sorted(b.wall_s / o.wall_s for b, o in pairs), sorted(b.cpu_s / o.cpu_s for b, o in pairs)


def report(samples: Mapping[str, list[Sample]], base: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Print a line a variant, in milliseconds a round, and return what goes into a record, in seconds a round."""
    print(f"{cpu_model()}, {os.cpu_count()} cores; load {os.getloadavg()}; {versions()}")
    print(f"{'':28}{'median ms':>10}{'min':>9}{'max':>9}{'CPU ms':>9}{'ratio':>8}{'min-max':>16}{'in CPU':>8}")
    rows = {}
    for name, own in samples.items():
        wall, cpu = ([1000 * getattr(sample, key) / rounds for sample in own] for key in ("wall_s", "cpu_s"))
        ratios, cpu_ratios = ratios_of(samples[base], own)
        print(
            f"{name:28}{statistics.median(wall):10.2f}{min(wall):9.2f}{max(wall):9.2f}{statistics.median(cpu):9.2f}"
            f"{statistics.median(ratios):8.2f}{ratios[0]:9.2f}-{ratios[-1]:.2f}{statistics.median(cpu_ratios):8.2f}"
        )
        rows[name] = {
            "wall_s": [sample.wall_s / rounds for sample in own],
            "cpu_s": [sample.cpu_s / rounds for sample in own],
            "ratios": ratios,
            "cpu_ratios": cpu_ratios,
            "peak_gib": max(sample.peak_gib for sample in own),
        }
    print(f"ratio: seconds of {base!r} / own, paired by turn")
    return rows


def beside_plain_loops(
    description: str,
    plain: Callable[[bool], AbstractContextManager[Round]],
    ours: Variant,
    rounds: int,
    about: Mapping[str, Any],
) -> None:
    """The whole program of a benchmark: our engine beside a plain loop, with malloc as it is and with ours.

    Args:
        description: For ``--help``.
        plain: The plain loop, given whether malloc is to be tuned; a function at the top of a module.
        ours: The engine.
        rounds: Rounds in one turn.
        about: What the record says of the job.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=9, help="turns, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    base = "plain loop, tuned malloc"
    variants: dict[str, Variant] = {
        "plain loop": partial(plain, False),
        base: partial(plain, True),
        "deltafl, 1 worker": ours,
    }
    rows = report(take_turns(variants, options.repeats, rounds), base, rounds)
    write_record(options.out, {**about, "rounds_a_turn": rounds}, rows)


def write_record(path: Path | None, about: Mapping[str, Any], variants: Mapping[str, Any]) -> None:
    """Write a JSON file of a benchmark; nothing without a path."""
    if path is not None:
        record = {"about": {**about, **machine()}, "versions": versions(), "variants": variants}
        path.write_text(json.dumps(record, indent=1) + "\n")
