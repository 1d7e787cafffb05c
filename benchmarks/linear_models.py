"""How long a round of logistic regression takes: our engine beside a plain PyTorch loop.

    python benchmarks/linear_models.py [--repeats 9] [--out result.json]

200 clients with 300 images of 28 x 28 each, 10 of them take 5 steps with minibatches of 32 (784
inputs, 10 classes). The plain loop has malloc once as it is, and once with the settings that our
engine makes.
"""

from functools import partial

import numpy as np
from torch import nn

from deltafl.simulation.training.serial import LocalWork
from deltafl.streams import stream
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.tasks.losses import cross_entropy
from deltafl.tasks.models import softmax_regression
from timing import beside_plain_loops

CLIENTS = 200
EXAMPLES = 300
COHORT = 10
STEPS = 5
BATCH = 32
WORK = LocalWork(lr=0.1, steps=STEPS, batch_size=BATCH)


def make_task() -> Task:
    """Random images: no time depends on what is in them."""
    rng = stream(0, "data")
    x = rng.integers(0, 256, (CLIENTS * EXAMPLES, 1, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    rows = np.split(np.arange(len(x)), CLIENTS)
    model = partial(softmax_regression, 784, 10)
    return Task(
        "logistic", Dataset("random", x, y, x[:100], y[:100], 10), rows, model, cross_entropy
    )


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


if __name__ == "__main__":
    about = {
        "clients": CLIENTS,
        "cohort": COHORT,
        "steps": STEPS,
        "batch": BATCH,
        "parameters": 7850,
    }
    description = "Time a round of logistic regression."
    beside_plain_loops(description, make_task, plain_model, WORK, COHORT, rounds=20, about=about)
