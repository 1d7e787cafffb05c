"""How long one FashionMNIST round of local training takes: a textbook loop, the serial twin, the fast path.

    python benchmarks/local_training.py [--repeats 7] [--out result.json]

One round is that of the paper's table 2: 300 clients (hsu2019, alpha 0.1, 200 examples each), 20 of them train 5 epochs
with minibatches of 32, which is 700 steps of the two-layer CNN. Every variant has a process of its own, so that none
profits from another's malloc settings or caches; repeats are interleaved, so that a busy machine slows all of them.
The textbook loop is what most scripts do: DataLoader, conv-ReLU-pool, torch.optim.SGD, one thread; once with malloc as
it is, and once with our settings of it, which is the base of the ratios.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.runner import Workers
from deltafl.simulation.training.fast import keep_freed_memory
from deltafl.simulation.training.serial import LocalWork, train_serial
from deltafl.streams import stream
from deltafl.tasks import make_task
from deltafl.tasks.base import Dataset, Task
from deltafl.tasks.models import cross_entropy, two_layer_cnn
from jobs.cnn import TextbookNet
from timing import Round, Variant, machine, matrix_product_rate, ratios_of, take_turns, versions, write_record

COHORT = 20
EPOCHS = 5
WORK = LocalWork(lr=0.01, epochs=EPOCHS)
#: Multiply-adds of one example: forward and gradients of the weights in all layers, of the input in all but the first.
MULTIPLY_ADDS = 2 * 24 * 24 * 16 * 25 + 3 * (8 * 8 * 32 * 400 + 512 * 10)


def fashion_task() -> Task:
    """FashionMNIST, or random images of the same shape where it is not at hand."""
    try:
        return make_task("fashion-mnist", seed=0)
    except DeltaflError:
        rng = stream(0, "data")
        x = rng.integers(0, 256, (60_000, 1, 28, 28), dtype=np.uint8)
        y = rng.integers(0, 10, 60_000)
        dataset = Dataset("random images, not FashionMNIST", x, y, x[:1000], y[:1000], 10)
        rows = np.split(np.arange(60_000), 300)
        return Task("random", dataset, rows, two_layer_cnn, cross_entropy)


def client_tensors(task: Task, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's examples in torch's default layout, which is what data sets and loaders return."""
    rows = task.client_rows[client]
    x = torch.from_numpy(task.dataset.train_x[rows]).float() * task.input_scale
    return x.clone(memory_format=torch.contiguous_format), torch.from_numpy(task.dataset.train_y[rows])


@contextmanager
def textbook(tuned: bool, task: Task) -> Iterator[Round]:
    if tuned:
        keep_freed_memory()
    sets = [TensorDataset(*client_tensors(task, client)) for client in range(COHORT)]
    model = TextbookNet()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def one_round() -> None:
        for examples in sets:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=WORK.lr)
            loader = DataLoader(examples, batch_size=32, shuffle=True)
            for _ in range(EPOCHS):
                for x, y in loader:
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()

    yield one_round


@contextmanager
def serial(task: Task) -> Iterator[Round]:
    params_d = Engine(task, WORK, seed=0).initial_params()
    model = task.make_model()

    def one_round() -> None:
        for client in range(COHORT):
            x, y = client_tensors(task, client)
            train_serial(model, task.loss, x, y, params_d, WORK, stream(0, "batches", 0, client))

    yield one_round


@contextmanager
def fast(count: int, task: Task) -> Iterator[Round]:
    with Workers(count) as workers:
        engine = Engine(task, WORK, seed=0, workers=workers)
        params_d = engine.initial_params()
        yield lambda: engine.train(params_d, 0, np.arange(COHORT))


def on_task(variant: Callable[[Task], AbstractContextManager[Round]]) -> AbstractContextManager[Round]:
    return variant(fashion_task())


VARIANTS: dict[str, Variant] = {
    "textbook": partial(on_task, partial(textbook, False)),
    "textbook, malloc": partial(on_task, partial(textbook, True)),
    "serial": partial(on_task, serial),
    "fast, 1 worker": partial(on_task, partial(fast, 1)),
    "fast, 2 workers": partial(on_task, partial(fast, 2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one FashionMNIST round of local training.")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    task = fashion_task()
    examples = EPOCHS * sum(len(rows) for rows in task.client_rows[:COHORT])
    rate = matrix_product_rate()
    times = take_turns(VARIANTS, options.repeats)
    print(f"{task.dataset.name}; {examples} examples; {machine()}; {versions()}")
    print(f"{'':16}{'median s':>9}{'min':>7}{'max':>7}{'CPU s':>7}{'ratio':>7}{'min-max':>14}{'peak':>7}{'GiB':>7}")
    rows = {}
    for variant, samples in times.items():
        wall, cpu, memory = (list(column) for column in zip(*samples, strict=True))
        ratios, _ = ratios_of(times["textbook, malloc"], samples)
        share = examples * MULTIPLY_ADDS / rate / statistics.median(wall)
        print(
            f"{variant:16}{statistics.median(wall):9.2f}{min(wall):7.2f}{max(wall):7.2f}{statistics.median(cpu):7.2f}"
            f"{statistics.median(ratios):7.2f}{ratios[0]:8.2f}-{ratios[-1]:.2f}{share:8.0%}{max(memory):7.2f}"
        )
        rows[variant] = {"wall_s": wall, "cpu_s": cpu, "ratios": ratios, "peak_share": share, "peak_gib": max(memory)}
    print("ratio: seconds of 'textbook, malloc' / own, paired by repeat; peak: share of one core's matrix product rate")
    write_record(options.out, {"data": task.dataset.name, "gmacs_per_s": rate / 1e9}, rows)


if __name__ == "__main__":
    main()
