"""A Hugging Face data set as a task:
``deltafl compare --task examples/own_huggingface.py:make_task --rounds 30``.

``load_dataset`` of the package ``datasets`` gives the same kind of object; here one is made in
memory.
"""

import numpy as np
from datasets import Dataset, DatasetDict

from deltafl import stream
from deltafl.tasks import Task, from_huggingface


def make_data(seed: int) -> DatasetDict:
    """Stands for the data set that you have: 25 people walk or run, each at a speed of their
    own.
    """
    rng = stream(seed, "data")
    person = rng.integers(25, size=1000)
    runs = rng.random(1000) < person / 25  # who is fitter runs more often
    steps = np.where(runs, 160, 110) + rng.normal(0, 12, size=1000)
    columns = {
        "sensor": np.column_stack([steps / 100, rng.normal(size=(1000, 2))]).tolist(),
        "activity": np.where(runs, "run", "walk").tolist(),
        "person": [f"person {k}" for k in person],
    }
    whole = Dataset.from_dict(columns)
    return DatasetDict({"train": whole.select(range(800)), "test": whole.select(range(800, 1000))})


def make_task(seed: int) -> Task:
    return from_huggingface(
        make_data(seed), label="activity", column="person", inputs="sensor", name="walks"
    )
