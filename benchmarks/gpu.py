"""Local training on a GPU: cohorts as batches, beside a plain loop on the same GPU and the loop on
the CPU.

    python benchmarks/gpu.py [--device cuda] [--jobs cnn,femnist,resnet18,lstm] [--passes 3]
    [--random] [--out result.json]

Jobs are those of the tasks (their clients, cohort, local work and model): ``cnn`` is
fashion-mnist's two-layer CNN (m = 300, n = 20, 5 epochs, batches of 32), ``femnist`` the four-layer
CNN, ``resnet18`` CIFAR-10's ResNet-18 (without random crops, which would time the CPU that makes
them), ``lstm`` the next character of Shakespeare. Where a data set is not at hand, random data of
its shape take its place, and the record says so.

"batched" launches each kernel of a step, "graph" replays it as a CUDA graph (on a CPU they are the
same); "branches", "groups" and "products" say how a cohort's models run where it is not as usual.

Passes are interleaved. Each variant is made anew in each pass and then trains the cohorts of rounds
1 and on; the first call, in which libraries choose, is timed apart. The CPU has one pass, and of
the larger models fewer clients train there: its speed is that of the local steps it does. The error
of a variant is that of its updates against ``train_serial`` in float32 on the CPU, after one step
(the rounding itself) and after four (which deep models amplify): norm(u - v) / norm(v), the largest
of a few clients. A variant repeats if a round has the same bits twice.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from branches import branched_forward
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.parallel.workers import Workers
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training import batched
from deltafl.simulation.training.devices import device_name, find_device, product_precision
from deltafl.simulation.training.route import Route, captures_steps
from deltafl.simulation.training.serial import LocalWork, minibatches, train_serial
from deltafl.streams import stream
from deltafl.tasks import find_task, make_task
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.tasks.losses import cross_entropy
from deltafl.types import IntArray, Params


class Job(NamedTuple):
    """What is trained: the task whose settings it has, inputs and classes of random data, and how
    much the CPU does.

    Attributes:
        task: The task's name.
        inputs: Shape of one input.
        classes: Number of classes.
        cpu_share: Share of a cohort's clients that the CPU trains.
        alike: Whether clients have equally many random examples.
    """

    task: str
    inputs: tuple[int, ...]
    classes: int
    cpu_share: float = 1.0
    alike: bool = False


JOBS = {
    "cnn": Job("fashion-mnist", (1, 28, 28), 10, alike=True),
    "femnist": Job("femnist", (1, 28, 28), 62, 0.3),
    "resnet18": Job("cifar10", (3, 32, 32), 10, 0.05, alike=True),
    "lstm": Job("shakespeare", (80,), 80),
}
#: Variant: path, steps and precision of ``Route``, and how models run (None: as usual). None is the
#: plain loop, as PyTorch runs it by default (convolutions in TF32) or with float32 enforced.
VARIANTS: dict[str, tuple[str, str, str, str | None] | None] = {
    "plain loop": None,
    "plain loop, float32": None,
    "batched, float32": ("batched", "eager", "float32", None),
    "graph, float32": ("batched", "graph", "float32", None),
    "graph, tf32": ("batched", "graph", "tf32", None),
    "graph, bfloat16": ("batched", "graph", "bfloat16", None),
    "batched, bfloat16": ("batched", "eager", "bfloat16", None),
    "graph, tf32, groups": ("batched", "graph", "tf32", "groups"),
    "graph, bfloat16, products": ("batched", "graph", "bfloat16", "products"),
    "graph, float32, branches": ("batched", "graph", "float32", "branches"),
    "graph, tf32, branches": ("batched", "graph", "tf32", "branches"),
    "graph, bfloat16, branches": ("batched", "graph", "bfloat16", "branches"),
    "loop, float32": ("loop", "eager", "float32", None),
}
Round = Callable[[int], object]


def random_task(job: Job, clients: int, examples: int) -> Task:
    """Random data of a job's shape; unless all are alike, clients hold between half and one and a
    half times as much as the mean.
    """
    rng = stream(0, "data")
    tokens = len(job.inputs) == 1
    sizes = rng.integers(examples // 2, examples + examples // 2 + 1, clients)
    if job.alike:
        sizes[:] = examples
    x = rng.integers(0, job.classes if tokens else 256, (sizes.sum(), *job.inputs), dtype=np.uint8)
    y = rng.integers(0, job.classes, len(x))
    model = find_task(job.task).make_model
    assert model is not None
    data = Dataset(f"random data, not {job.task}", x, y, x[:1000], y[:1000], job.classes)
    rows = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return Task(job.task, data, rows, model, cross_entropy, tokens=tokens)


def task_and_work(job: Job, quick: bool, random: bool) -> tuple[Task, LocalWork, int]:
    """The task, what a client does, and how many are asked."""
    settings = make_settings(RunSettings, {"task": job.task})
    lr = settings.local_lr
    batch = settings.batch_size
    n = settings.sample
    assert lr is not None
    assert n is not None
    work = LocalWork(lr, settings.local_epochs, settings.local_steps, batch)
    if quick:
        return random_task(job, 6, 12), replace(work, epochs=None, steps=2, batch_size=4), 3
    task = random_task(job, settings.clients or 200, 200)
    if not random:
        with suppress(DeltaflError):
            task = make_task(job.task, seed=0)
    return replace(task, augment=None), work, n


def cohort_of(task: Task, n: int, round: int) -> IntArray:
    """The clients of a round, the same for every variant."""
    return stream(0, "draw", round).permutation(task.num_clients)[:n]


def plain_loop(task: Task, work: LocalWork, n: int, device: torch.device, exact: bool) -> Round:
    """What a script without this library does: one client after the other, nn.Module, SGD,
    examples on the device.
    """
    data = task.dataset
    x_all = torch.tensor(data.train_x, device=device)
    y_all = torch.tensor(data.train_y, device=device)
    x_all = x_all.long() if task.tokens else x_all.float() * task.input_scale
    rows_m = [
        torch.tensor(task.client_rows[client], device=device) for client in range(task.num_clients)
    ]
    model = task.make_model().to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def train(client: int, round: int) -> torch.Tensor:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
        x = x_all[rows_m[client]]
        y = y_all[rows_m[client]]
        batches = minibatches(len(x), work, stream(0, "batches", round, client))
        every_row = torch.from_numpy(np.concatenate(batches)).to(device)
        for rows in torch.split(every_row, [len(batch) for batch in batches]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()

    def one_round(round: int) -> list[torch.Tensor]:
        with product_precision(device) if exact else nullcontext():
            return [train(int(client), round) for client in cohort_of(task, n, round)]

    return one_round


def engine_round(engine: Engine, n: int) -> Round:
    params_d = engine.initial_params()
    return lambda round: engine.train(params_d, round, cohort_of(engine.task, n, round))


class Twins:
    """Updates of a few clients after a few steps by ``train_serial`` on the CPU, computed once."""

    def __init__(self, task: Task, work: LocalWork, quick: bool) -> None:
        self.task = task
        self.works = {steps: replace(work, epochs=None, steps=steps) for steps in (1, 4)}
        self.clients = np.arange(2)
        model = Engine(task, work, 0)
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if quick else os.cpu_count() or 1)  # nothing is timed here
        self.updates = {
            steps: self._train(model.initial_params(), own) for steps, own in self.works.items()
        }
        torch.set_num_threads(threads)

    def _train(self, params_d: Params, work: LocalWork) -> list[Params]:
        updates = []
        for client in map(int, self.clients):
            rows = self.task.client_rows[client]
            x = torch.tensor(self.task.dataset.train_x[rows])
            y = torch.tensor(self.task.dataset.train_y[rows])
            x = x.long() if self.task.tokens else x.float() * self.task.input_scale
            rng = stream(0, "batches", 0, client)
            updates.append(
                train_serial(
                    self.task.make_model(), self.task.loss, x, y, params_d, work, rng
                ).update_d
            )
        return updates

    def compare(self, route: Route) -> dict[str, Any]:
        """The largest relative errors after each number of steps, and whether all repeats."""
        found: dict[str, Any] = {"repeats": True}
        for steps, work in self.works.items():
            engine = Engine(self.task, work, 0, kept=route)
            params_d = engine.initial_params()
            update_nd = engine.train(params_d, 0, self.clients).update_nd
            found["repeats"] &= np.array_equal(
                update_nd, engine.train(params_d, 0, self.clients).update_nd
            )
            pairs = zip(update_nd, self.updates[steps], strict=True)
            errors = [
                float(np.linalg.norm(own_d - twin_d) / np.linalg.norm(twin_d))
                for own_d, twin_d in pairs
            ]
            found[f"error_after_{steps}"] = max(errors)
        return found


def seconds_of(one_round: Round, rounds: int, device: torch.device) -> tuple[float, list[float]]:
    """Seconds of a first round, and of the rounds after it."""

    def timed(round: int) -> float:
        began = time.perf_counter()
        one_round(round)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return timed(0), [timed(round) for round in range(1, rounds + 1)]


def steps_of(task: Task, work: LocalWork, n: int, rounds: int) -> list[int]:
    """Local steps of the whole cohort in rounds 1 and on."""
    sizes = [len(task.client_rows[client]) for client in range(task.num_clients)]
    steps_m = [len(minibatches(size, work, stream(0, "batches"))) for size in sizes]
    return [
        sum(steps_m[int(client)] for client in cohort_of(task, n, round))
        for round in range(1, rounds + 1)
    ]


def measure(
    job: Job, variants: list[str], device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What is known of a job after each variant of each pass."""
    task, work, n = task_and_work(job, options.quick, options.random)
    twins = Twins(task, work, options.quick)
    rows: dict[str, dict[str, Any]] = {}
    for turn in range(options.passes):
        for name in (
            variants if turn == 0 else [name for name in variants if not name.startswith("cpu")]
        ):
            row = rows.setdefault(name, {"first_s": [], "steps_per_s": [], "round_s": []})
            try:
                measure_variant(name, row, job.cpu_share, (task, work, twins, n), device, options)
            except (
                RuntimeError,
                DeltaflError,
            ) as error:  # one variant that cannot run should not end the others
                row["failed"] = str(error).split("\n")[0]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if row["steps_per_s"]:
                mean_steps = statistics.mean(steps_of(task, work, n, 5))
                row["rounds_per_s"] = statistics.median(row["steps_per_s"]) / mean_steps
                row["clients_per_s"] = row["rounds_per_s"] * n
            yield {
                "data": task.dataset.name,
                "clients": task.num_clients,
                "cohort": n,
                "work": str(work),
                "variants": rows,
            }


def measure_variant(
    name: str,
    row: dict[str, Any],
    cpu_share: float,
    what: tuple[Task, LocalWork, Twins, int],
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    """One pass of one variant; adds its numbers to its row."""
    task, work, twins, n = what
    with ExitStack() as stack:
        where = device
        how = VARIANTS.get(name)
        rounds = options.rounds
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if name.startswith("cpu"):
            where = torch.device("cpu")
            n = max(2, round(n * cpu_share))
            rounds = rounds if cpu_share == 1 else 1
            one_round = engine_round(
                Engine(task, work, 0, stack.enter_context(Workers(int(name.split()[1])))), n
            )
        elif how is None:
            one_round = plain_loop(task, work, n, device, exact="float32" in name)
        else:
            path, launches, precision, way = how
            stack.enter_context(models_run(precision, way))
            model = task.make_model().train()
            captured = launches == "graph" and captures_steps(model, task, device, precision)
            row["captured"] = captured
            route = Route(path, str(device), precision, steps="graph" if captured else "eager")
            engine = Engine(task, work, 0, kept=route)
            if "repeats" not in row:
                row |= twins.compare(route)
            one_round = engine_round(engine, n)
        first, seconds = seconds_of(one_round, rounds, where)
        steps = steps_of(task, work, n, rounds)
    row["trained_clients"] = n
    row["first_s"].append(first)
    row["round_s"] += seconds
    row["steps_per_s"] += [count / second for count, second in zip(steps, seconds, strict=True)]
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 1024**3


def models_run(precision: str, way: str | None) -> AbstractContextManager[Any]:
    """Within it a cohort's models run in this way, whatever is usual."""
    if way is None:
        return nullcontext()
    if way == "branches":
        return patch.object(batched, "vectorized_forward", branched_forward)
    dtype, _ = batched.PASSES[precision]
    return patch.dict(batched.PASSES, {precision: (dtype, way == "products")})


def show(job: str, result: dict[str, Any]) -> None:
    print(
        f"\n{job}: {result['data']}, m = {result['clients']}, n = {result['cohort']}, "
        f"{result['work']}"
    )
    heads = f"{'':26}{'rounds/s':>9}{'clients/s':>10}{'steps/s':>9}{'min-max':>16}{'first s':>9}"
    print(f"{heads}{'error 1':>9}{'error 4':>9} repeats captured")
    for name, row in result["variants"].items():
        speeds = row["steps_per_s"]
        if not speeds:
            print(f"{name:26} failed: {row['failed']}")
            continue
        spread = f"{min(speeds):.0f}-{max(speeds):.0f}"
        errors = "".join(
            f"{row[key]:9.1e}" for key in ("error_after_1", "error_after_4") if key in row
        )
        print(
            f"{name:26}{row['rounds_per_s']:9.3g}{row['clients_per_s']:10.3g}{statistics.median(speeds):9.0f}"
            f"{spread:>16}{max(row['first_s']):9.2f}{errors} {row.get('repeats', '')} "
            f"{row.get('captured', '')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time local training on a device.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--jobs", default=",".join(JOBS), help="some of " + ", ".join(JOBS))
    parser.add_argument(
        "--variants",
        default=";".join(VARIANTS),
        help="some of " + "; ".join(VARIANTS) + "; cpu 1; cpu 2 (workers); not the last two if "
        "left out",
    )
    parser.add_argument("--passes", type=int, default=3, help="interleaved passes, >= 1")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of a pass, >= 1")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny version that says nothing about speed"
    )
    parser.add_argument("--random", action="store_true", help="random data, without a download")
    parser.add_argument("--out", type=Path, help="JSON file to write after each variant")
    options = parser.parse_args()
    device = find_device(options.device)
    variants = [name.strip() for name in options.variants.split(";")]
    torch.set_num_threads(1)
    about = {"device": device_name(device), "cores": os.cpu_count(), "quick": options.quick}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "numpy": np.__version__}
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions |= {"python": platform.python_version(), "cudnn": cudnn}
    print(", ".join(f"{key} {value}" for key, value in (about | versions).items()))
    results = {}
    for job in options.jobs.split(","):
        # What ends the program early, as a machine that is lent for minutes, costs one variant.
        for result in measure(JOBS[job], variants, device, options):
            results[job] = result
            if options.out:
                found = {"about": about, "versions": versions, "jobs": results}
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        show(job, results[job])


if __name__ == "__main__":
    main()
