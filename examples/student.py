"""A study in one script: your table, model and sampler, five seeds, a figure for the paper."""

from dataclasses import dataclass
from typing import Any

from sklearn.datasets import load_digits
from torch import nn

import deltafl
from deltafl.tasks import Task, table_task


def model(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))


def digits(seed: int) -> Task:
    """30 clients with few labels each; your table may also have a column that names the client."""
    table = load_digits(as_frame=True).frame  # or "my-table.csv"
    split: Any = {"partition": "dirichlet", "alpha": 0.1, "clients": 30}
    return table_task(table, "target", seed=seed, model=model, **split)


@dataclass(frozen=True)
class BySize(deltafl.Sampler):
    """Clients with more examples are selected more often; unbiased, as all can be drawn."""

    power: float = 1.0
    unbiased = True

    def open(self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None) -> Any:
        return deltafl.draw_cohort(state.weight_m**self.power, n, "pivotal", rng, available_m)


samplers: list[Any] = ["full", "uniform", BySize, BySize(power=0.5)]
study = deltafl.compare(digits, samplers, seeds=5, rounds=30, out="study")
study.plot("figure.pdf")
print(study)
