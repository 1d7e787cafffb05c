"""How long it takes to train all clients of the synthetic task once: our engine beside a plain PyTorch loop.

    python benchmarks/synthetic.py [--repeats 9] [--out result.json]

200 clients with 1000 samples each take one full-batch step of the model y = log((A x - b)^2 / 2), with noise on their
gradients: a round of a theoretical sampler on the task of the paper's figure 11. The plain loop is what most scripts
do: nn.Module, DataLoader, torch.optim.SGD, one thread; once with malloc as it is, and once with our engine's settings.
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
from deltafl.tasks.synthetic import BAND, SYNTHETIC_START, make_synthetic_task
from timing import Round, beside_plain_loops

CLIENTS = 200
WORK = LocalWork(lr=0.001, steps=1, batch_size=None)
ROUNDS = 3  # in one turn


class PlainModel(nn.Module):
    """The model as a script would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(SYNTHETIC_START[0]))
        self.b = nn.Parameter(torch.tensor(SYNTHETIC_START[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predictions (B,) of x (B, 1)."""
        distance = (self.a * x[:, 0] - self.b).abs().clamp(min=BAND)
        return torch.log(distance**2 / 2)


@contextmanager
def plain(tuned: bool) -> Iterator[Round]:
    if tuned:
        keep_freed_memory()
    task = make_synthetic_task(0, CLIENTS)
    sets = [
        TensorDataset(torch.from_numpy(task.dataset.train_x[rows]), torch.from_numpy(task.dataset.train_y[rows]))
        for rows in task.client_rows
    ]
    noise_m = np.zeros(CLIENTS) if task.gradient_noise_m is None else task.gradient_noise_m
    model = PlainModel()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def one_round() -> None:
        for examples, noise in zip(sets, noise_m.tolist(), strict=True):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=WORK.lr)
            for x, y in DataLoader(examples, batch_size=1000, shuffle=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad += noise * torch.randn_like(parameter)
                optimizer.step()

    yield one_round


@contextmanager
def ours() -> Iterator[Round]:
    engine = Engine(make_synthetic_task(0, CLIENTS), WORK, seed=0)
    params_d = engine.initial_params()
    yield lambda: engine.train(params_d, 0, np.arange(CLIENTS))


if __name__ == "__main__":
    about = {"clients": CLIENTS, "samples_a_client": 1000}
    beside_plain_loops("Time the training of all clients of the synthetic task.", plain, ours, ROUNDS, about)
