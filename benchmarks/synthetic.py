"""How long it takes to train all clients of the synthetic task once: our engine beside a plain
PyTorch loop.

    python benchmarks/synthetic.py [--repeats 9] [--out result.json]

200 clients with 1000 samples each take one full-batch step of the model y = log((A x - b)^2 / 2),
with noise on their gradients: a round of a theoretical sampler on the task of the paper's figure
11. The plain loop has malloc once as it is, and once with our engine's settings.
"""

from functools import partial

import torch
from torch import nn

from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.synthetic import BAND, SYNTHETIC_START, make_synthetic_task
from timing import beside_plain_loops

CLIENTS = 200
WORK = LocalWork(lr=0.001, steps=1, batch_size=None)


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


if __name__ == "__main__":
    about = {"clients": CLIENTS, "samples_a_client": 1000}
    task = partial(make_synthetic_task, 0, CLIENTS)
    description = "Time the training of all clients of the synthetic task."
    beside_plain_loops(description, task, PlainModel, WORK, CLIENTS, rounds=3, about=about)
