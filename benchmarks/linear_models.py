"""How long a round of logistic regression takes: our engine beside a plain PyTorch loop.

    python benchmarks/linear_models.py [--repeats 9] [--out result.json]

200 clients with 300 images of 28 x 28 each, 10 of them take 5 steps with minibatches of 32 (784 inputs, 10 classes).
The plain loop is what most scripts do: nn.Module, DataLoader, torch.optim.SGD, one thread; once with malloc as it is,
and once with the settings that our engine makes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltafl.simulation.engine import Engine
from deltafl.simulation.training.fast import keep_freed_memory
from deltafl.simulation.training.serial import LocalWork
from deltafl.streams import stream
from deltafl.tasks.base import Dataset, Task
from deltafl.tasks.models import cross_entropy, softmax_regression
from timing import Round, beside_plain_loops

CLIENTS, EXAMPLES, COHORT, STEPS, BATCH = 200, 300, 10, 5, 32
WORK = LocalWork(lr=0.1, steps=STEPS, batch_size=BATCH)
ROUNDS = 20  # in one turn


def task() -> Task:
    """Random images: no time depends on what is in them."""
    rng = stream(0, "data")
    x = rng.integers(0, 256, (CLIENTS * EXAMPLES, 1, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    rows = np.split(np.arange(len(x)), CLIENTS)
    return Task("logistic", Dataset("random", x, y, x[:100], y[:100], 10), rows, model, cross_entropy)


def model() -> nn.Module:
    return softmax_regression(784, 10)


@contextmanager
def plain(tuned: bool) -> Iterator[Round]:
    if tuned:
        keep_freed_memory()
    data = task()
    sets = [
        TensorDataset(
            torch.from_numpy(data.dataset.train_x[rows]).float() * data.input_scale,
            torch.from_numpy(data.dataset.train_y[rows]),
        )
        for rows in data.client_rows[:COHORT]
    ]
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def one_round() -> None:
        for examples in sets:
            net.load_state_dict(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=WORK.lr)
            loader = iter(DataLoader(examples, batch_size=BATCH, shuffle=True))
            for _ in range(STEPS):
                x, y = next(loader)
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    yield one_round


@contextmanager
def ours() -> Iterator[Round]:
    engine = Engine(task(), WORK, seed=0)
    params_d = engine.initial_params()
    yield lambda: engine.train(params_d, 0, np.arange(COHORT))


if __name__ == "__main__":
    about = {"clients": CLIENTS, "cohort": COHORT, "steps": STEPS, "batch": BATCH, "parameters": 7850}
    beside_plain_loops("Time a round of logistic regression.", plain, ours, ROUNDS, about)
