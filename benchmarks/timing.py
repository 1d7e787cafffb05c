"""What the benchmarks share: variants timed in turns, each in a process of its own, the plain loop,
the machine.

A process of its own means that none profits from another's malloc settings or caches; turns mean
that a busy machine slows all of them.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from deltafl.simulation import environment
from deltafl.simulation.engine import Engine
from deltafl.simulation.parallel.workers import Workers
from deltafl.simulation.training.fast import keep_freed_memory
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task

Round = Callable[[], object]
#: Made in the process that it is timed in, hence picklable: a function at the top of a module, or a
#: partial of one.
Variant = Callable[[], AbstractContextManager[Round]]


class Sample(NamedTuple):
    """Of one turn: wall and CPU seconds, and the largest process's peak memory so far in GiB."""

    wall_s: float
    cpu_s: float
    peak_gib: float


def take_turns(
    variants: Mapping[str, Variant], repeats: int, rounds: int = 1
) -> dict[str, list[Sample]]:
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
            wall = time.perf_counter()
            cpu = cpu_seconds()
            for _ in range(rounds):
                one_round()
            pipe.send(Sample(time.perf_counter() - wall, cpu_seconds() - cpu, peak_memory()))


def cpu_seconds() -> float:
    """CPU time so far of this process and its workers, which a busy machine changes less than
    the wall clock.
    """
    total = time.process_time()
    for child in multiprocessing.active_children():
        status = Path(f"/proc/{child.pid}/stat")
        if status.exists():
            user, system = status.read_text().rsplit(")", 1)[1].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def peak_memory() -> float:
    """The peak resident memory in GiB, of this process or of a worker of it, whichever is
    larger.
    """
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for child in multiprocessing.active_children():
        status = Path(f"/proc/{child.pid}/status")
        if status.exists():
            peaks += [
                int(line.split()[1])
                for line in status.read_text().splitlines()
                if line.startswith("VmHWM")
            ]
    return max(peaks) / 1024**2


def matrix_product_rate(size: int = 1024) -> float:
    """Multiply-adds a second of a large float32 matrix product, one thread: what the cores can
    do at best.
    """
    torch.set_num_threads(1)
    a = torch.rand(size, size)
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return size**3 / min(seconds)


def versions() -> dict[str, str]:
    """Of what is timed."""
    return {name: str(environment()[name]) for name in ("torch", "numpy", "python")}


def plain_ticks(axes: Any) -> None:
    """Numbers at the ticks of logarithmic axes: the usual powers of ten are formulas, which our
    style writes as they are, because a dollar in a name is a dollar.
    """
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def machine() -> dict[str, Any]:
    """Hardware, the instruction set that torch uses, and how busy it is."""
    instructions = torch.backends.cpu.get_cpu_capability()
    cpu = environment()["processor"]
    return {
        "cpu": cpu,
        "instructions": instructions,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def ratios_of(base: list[Sample], own: list[Sample]) -> tuple[list[float], list[float]]:
    """How many times longer the base takes, turn by turn, sorted: by the wall clock, and in CPU
    time.
    """
    pairs = list(zip(base, own, strict=True))
    return sorted(b.wall_s / o.wall_s for b, o in pairs), sorted(
        b.cpu_s / o.cpu_s for b, o in pairs
    )


def report(
    samples: Mapping[str, list[Sample]], base: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Print a line a variant, in milliseconds a round, and return what goes into a record, in
    seconds a round.
    """
    print(f"{machine()}; {versions()}")
    print(
        f"{'':28}{'median ms':>10}{'min':>9}{'max':>9}{'CPU ms':>9}{'ratio':>8}"
        f"{'min-max':>16}{'in CPU':>8}"
    )
    rows = {}
    for name, own in samples.items():
        wall, cpu = (
            [1000 * getattr(sample, key) / rounds for sample in own] for key in ("wall_s", "cpu_s")
        )
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


def client_tensors(task: Task, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's examples in torch's default layout, which is what data sets and loaders return."""
    rows = task.client_rows[client]
    x = torch.from_numpy(task.dataset.train_x[rows]).float() * task.input_scale
    return x.clone(memory_format=torch.contiguous_format), torch.from_numpy(
        task.dataset.train_y[rows]
    )


@contextmanager
def plain_loop(
    tuned: bool,
    make_task: Callable[[], Task],
    make_model: Callable[[], torch.nn.Module],
    work: LocalWork,
    clients: int,
) -> Iterator[Round]:
    """What most scripts do: nn.Module, DataLoader, torch.optim.SGD, one thread.

    Args:
        tuned: Whether malloc has the settings that our engine makes.
        make_task: Data and loss; called in the process that is timed.
        make_model: The model as a script would write it.
        work: Local rate, steps and minibatches.
        clients: The first so many clients train.
    """
    if tuned:
        keep_freed_memory()
    task = make_task()
    sets = [TensorDataset(*client_tensors(task, client)) for client in range(clients)]
    model = make_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def one_round() -> None:
        for client, examples in enumerate(sets):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
            loader = DataLoader(examples, work.minibatch_size(len(examples)), shuffle=True)
            for x, y in islice(chain.from_iterable(repeat(loader)), work.num_steps(len(examples))):
                optimizer.zero_grad()
                task.loss(model(x), y).backward()
                if task.gradient_noise_m is not None:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad += float(task.gradient_noise_m[client]) * torch.randn_like(
                            parameter
                        )
                optimizer.step()

    yield one_round


@contextmanager
def engine_round(
    make_task: Callable[[], Task], work: LocalWork, clients: int, num_workers: int = 1
) -> Iterator[Round]:
    """The same local training by our engine."""
    with Workers(num_workers) as workers:
        engine = Engine(make_task(), work, seed=0, workers=workers)
        params_d = engine.initial_params()
        yield lambda: engine.train(params_d, 0, np.arange(clients))


def beside_plain_loops(
    description: str,
    make_task: Callable[[], Task],
    make_model: Callable[[], torch.nn.Module],
    work: LocalWork,
    clients: int,
    rounds: int,
    about: Mapping[str, Any],
) -> None:
    """The whole program of a benchmark: our engine beside a plain loop, with malloc as it is and
    with ours.

    Args:
        description: For ``--help``.
        make_task: As for ``plain_loop``.
        make_model: The same.
        work: The same.
        clients: The same.
        rounds: Rounds in one turn.
        about: What the record says of the job.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=9, help="turns, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    base = "plain loop, tuned malloc"
    variants: dict[str, Variant] = {
        "plain loop": partial(plain_loop, False, make_task, make_model, work, clients),
        base: partial(plain_loop, True, make_task, make_model, work, clients),
        "deltafl, 1 worker": partial(engine_round, make_task, work, clients),
    }
    rows = report(take_turns(variants, options.repeats, rounds), base, rounds)
    write_record(options.out, {**about, "rounds_a_turn": rounds}, rows)


def write_record(path: Path | None, about: Mapping[str, Any], variants: Mapping[str, Any]) -> None:
    """Write a JSON file of a benchmark; nothing without a path."""
    if path is not None:
        record = {"about": {**about, **machine()}, "versions": versions(), "variants": variants}
        path.write_text(json.dumps(record, indent=1) + "\n")
