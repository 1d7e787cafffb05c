"""A study in one script: your table, your model, your sampler, five seeds, a figure for the
paper.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits

import deltafl
from deltafl.tasks import Task, table_task


def model(features: int, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes)
    )


def digits(seed: int) -> Task:
    """30 clients with few labels each: Dirichlet shares. Your table may also have a column that
    names the client.
    """
    table = load_digits(as_frame=True).frame  # or "my-table.csv"
    return table_task(
        table, "target", seed=seed, partition="dirichlet", alpha=0.1, clients=30, model=model
    )


@dataclass(frozen=True)
class BySize(deltafl.Sampler):
    """Clients with more examples are selected more often; unbiased, since every client can be
    drawn.
    """

    power: float = 1.0
    unbiased = True

    def open(
        self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None
    ) -> deltafl.Cohort:
        return deltafl.draw_cohort(state.weight_m**self.power, n, "pivotal", rng, available_m)


study = deltafl.compare(
    digits, ["full", "uniform", BySize, BySize(power=0.5)], seeds=5, rounds=30, out="study"
)
study.plot("figure.pdf")
print(study)
