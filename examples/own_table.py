"""Your own table as a task: ``deltafl compare --task examples/own_table.py:make_task --rounds 30``.

A table with columns called label and client needs no Python at all:
``deltafl compare --task visits.csv``.
"""

import csv
import tempfile
from pathlib import Path

import torch

from deltafl import stream
from deltafl.tasks import Task, table_task


def model(in_features: int, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(in_features, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes)
    )


def write_visits(path: Path) -> None:
    """Stands for the table that you have: 900 visits to 30 hospitals whose patients differ in
    age.
    """
    rng = stream(0, "data")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "pressure", "outcome", "hospital"])
        for hospital in rng.integers(30, size=900):
            age = rng.normal(40 + hospital, 10)
            pressure = rng.normal(130, 15)
            stays = age + pressure / 2 + rng.normal(0, 5) > 118
            writer.writerow(
                [
                    round(age),
                    round(pressure),
                    "stays" if stays else "leaves",
                    f"hospital {hospital}",
                ]
            )


def make_task(seed: int) -> Task:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "visits.csv"
        write_visits(path)
        return table_task(path, label="outcome", column="hospital", seed=seed, model=model)
