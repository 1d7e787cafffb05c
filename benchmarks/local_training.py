"""How long one FashionMNIST round of local training takes: a textbook loop, the serial twin, the
fast path.

    python benchmarks/local_training.py [--repeats 7] [--out result.json]

One round is that of the paper's table 2: 300 clients (hsu2019, alpha 0.1, 200 examples each), 20 of
them train 5 epochs with minibatches of 32, which is 700 steps of the two-layer CNN. Every variant
has a process of its own, so that none profits from another's malloc settings or caches; repeats are
interleaved, so that a busy machine slows all of them. The textbook loop is what most scripts do:
DataLoader, conv-ReLU-pool, torch.optim.SGD, one thread; once with malloc as it is, and once with
our settings of it, which is the base of the ratios.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork, train_serial
from deltafl.streams import stream
from deltafl.tasks import make_task
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.tasks.losses import cross_entropy
from deltafl.tasks.models import two_layer_cnn
from jobs.work import TextbookNet
from timing import (
    Round,
    Variant,
    client_tensors,
    engine_round,
    machine,
    matrix_product_rate,
    plain_loop,
    ratios_of,
    take_turns,
    versions,
    write_record,
)

COHORT = 20
EPOCHS = 5
WORK = LocalWork(lr=0.01, epochs=EPOCHS)
#: Multiply-adds of one example: forward and gradients of the weights in all layers, of the input in
#: all but the first.
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


@contextmanager
def serial() -> Iterator[Round]:
    task = fashion_task()
    params_d = Engine(task, WORK, seed=0).initial_params()
    model = task.make_model()

    def one_round() -> None:
        for client in range(COHORT):
            x, y = client_tensors(task, client)
            train_serial(model, task.loss, x, y, params_d, WORK, stream(0, "batches", 0, client))

    yield one_round


VARIANTS: dict[str, Variant] = {
    "textbook": partial(plain_loop, False, fashion_task, TextbookNet, WORK, COHORT),
    "textbook, malloc": partial(plain_loop, True, fashion_task, TextbookNet, WORK, COHORT),
    "serial": serial,
    "fast, 1 worker": partial(engine_round, fashion_task, WORK, COHORT),
    "fast, 2 workers": partial(engine_round, fashion_task, WORK, COHORT, 2),
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
    print(
        f"{'':16}{'median s':>9}{'min':>7}{'max':>7}{'CPU s':>7}{'ratio':>7}{'min-max':>14}"
        f"{'peak':>7}{'GiB':>7}"
    )
    rows = {}
    for variant, samples in times.items():
        wall, cpu, memory = (list(column) for column in zip(*samples, strict=True))
        ratios, _ = ratios_of(times["textbook, malloc"], samples)
        share = examples * MULTIPLY_ADDS / rate / statistics.median(wall)
        print(
            f"{variant:16}{statistics.median(wall):9.2f}{min(wall):7.2f}{max(wall):7.2f}{statistics.median(cpu):7.2f}"
            f"{statistics.median(ratios):7.2f}{ratios[0]:8.2f}-{ratios[-1]:.2f}{share:8.0%}{max(memory):7.2f}"
        )
        rows[variant] = {
            "wall_s": wall,
            "cpu_s": cpu,
            "ratios": ratios,
            "peak_share": share,
            "peak_gib": max(memory),
        }
    print(
        "ratio: seconds of 'textbook, malloc' / own, paired by repeat; peak: share of one core's "
        "matrix product rate"
    )
    write_record(options.out, {"data": task.dataset.name, "gmacs_per_s": rate / 1e9}, rows)


if __name__ == "__main__":
    main()
