"""The task: softmax regression on scikit-learn's 1,797 digits, few of the ten at each site;
nothing is downloaded.
"""

from collections.abc import Iterator

import numpy as np
import torch

import deltafl
from deltafl.tasks import make_task


class SoftmaxRegression(torch.nn.Linear):
    """The model, at first zero."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


def site_data(client: int, num_sites: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images (n_i, 64) in [0, 1] of a client of the task ``digits``, and its labels."""
    task = make_task("digits", seed=seed, num_clients=num_sites)
    rows = task.client_rows[client]
    x = task.dataset.train_x[rows].astype(np.float32) * np.float32(task.input_scale)
    return torch.from_numpy(x.reshape(len(rows), -1)), torch.from_numpy(task.dataset.train_y[rows])


def batches(
    count: int, size: int, epochs: int, seed: int, round: int, client: int
) -> Iterator[np.ndarray]:
    """The rows of each local step: every epoch in a new order, as the simulator of deltafl has
    it.
    """
    rng = deltafl.stream(seed, "batches", round, client)
    for _ in range(epochs):
        order = rng.permutation(count)
        yield from (order[start : start + size] for start in range(0, count, size))
