"""A study in one script: your table, your model, your sampler, five seeds, a figure for the paper."""

from dataclasses import dataclass
from typing import Any

import torch

import deltafl
from deltafl.tasks import Task, table_task


def model(features: int, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))


def digits(seed: int) -> Task:
    """30 clients with few labels each: Dirichlet shares; your table may also name the client of each row."""
    return table_task("digits.csv", "digit", seed=seed, partition="dirichlet", alpha=0.1, clients=30, model=model)


@dataclass(frozen=True)
class BySize(deltafl.Sampler):
    """Clients with more examples are selected more often; unbiased, for every client can be drawn."""

    power: float = 1.0
    unbiased = True

    def init(self, population: deltafl.Population) -> Any:
        return population.num_examples_m

    def open(self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None) -> deltafl.Cohort:
        return deltafl.draw_cohort(state**self.power, n, "pivotal", rng, available_m)

    def update(self, state: Any, cohort: deltafl.Cohort, reports: deltafl.Reports) -> Any:
        return state  # sizes do not change; a sampler that learns returns a new state


study = deltafl.compare(digits, ["full", "uniform", BySize, BySize(power=0.5)], seeds=5, rounds=30, out="study")
study.plot("figure.pdf")
print(study)
