"""``python -m reproduction.speeds`` makes ``files/speeds-100.csv`` and ``files/speeds-300.csv``.

They are the speeds of the clients in the experiment ``costs``: one trace for all methods and seeds.
"""

from pathlib import Path

import numpy as np

from .text import csv_text

_FILES = Path(__file__).parent / "files"
CLIENTS = (100, 300)
SEED = 63


def speeds_text(clients: int) -> str:
    """Seconds of a local step (median 0.1) and megabits a second (median 10), log-normal with a
    standard deviation of 1 of both logarithms, which are independent.
    """
    rng = np.random.default_rng([SEED, clients])
    step_m, send_m = rng.standard_normal((2, clients))
    rows = zip(0.1 * np.exp(step_m), 10 * np.exp(send_m), strict=True)
    return csv_text(
        [
            {"seconds": float(f"{seconds:.4g}"), "megabits": float(f"{megabits:.4g}")}
            for seconds, megabits in rows
        ]
    )


def path_of(clients: int) -> Path:
    return _FILES / f"speeds-{clients}.csv"


if __name__ == "__main__":
    for clients in CLIENTS:
        path_of(clients).write_text(speeds_text(clients), encoding="utf-8")
