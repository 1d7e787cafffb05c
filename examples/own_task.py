"""Your own data and model: ``deltafl compare --task examples/own_task.py:make_task --rounds 30``.

Thirty sensors each saw one stretch of a sine; together they should learn the whole of it.
"""

import numpy as np
import torch

from deltafl import stream
from deltafl.tasks import Dataset, Task


class Net(torch.nn.Module):
    """One hidden layer; output (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction for each x, from inputs (B, 1)."""
        return self.layers(x).squeeze(-1)  # type: ignore[no-any-return]


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, y)


def make_task(seed: int) -> Task:
    rng = stream(seed, "data")
    owner = np.repeat(np.arange(30), np.arange(20, 80, 2))  # sizes 20, 22, ..., 78
    x = ((owner + rng.random(len(owner))) / 15 - 1).astype(
        np.float32
    )  # client i sees one 30th of (-1, 1)
    y = (np.sin(3 * x) + rng.normal(scale=0.1, size=len(x))).astype(np.float32)
    grid = np.linspace(-1, 1, 200, dtype=np.float32)
    data = Dataset("sine", x[:, None], y, grid[:, None], np.sin(3 * grid), num_classes=0)
    rows = [np.flatnonzero(owner == client) for client in range(30)]
    return Task("sine", data, rows, make_model=Net, loss=loss, metric="loss")
