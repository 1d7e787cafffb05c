"""Made-up runs."""

from typing import Any, Literal

import numpy as np

from deltafl.analysis import Run


def make_run(
    sampler: str,
    seed: int,
    reach: int | None,
    metric: Literal["accuracy", "loss"] = "accuracy",
    num_rounds: int = 10,
    **changes: Any,
) -> Run:
    """A run whose metric steps to its final value in round ``reach``: accuracy .2 to .8, loss 2
    to .1.
    """
    round_r = np.arange(1, num_rounds + 1)
    done_r = round_r >= (reach if reach is not None else num_rounds + 1)
    run = Run(
        sampler=sampler,
        seed=seed,
        metric=metric,
        round_r=round_r,
        accuracy_r=np.where(done_r, 0.8, 0.2)
        if metric == "accuracy"
        else np.full(num_rounds, np.nan),
        loss_r=np.where(done_r, 0.1, 2.0),
        seconds_r=2.0 * round_r.astype(np.float64),
        bytes_r=1000.0 * round_r.astype(np.float64),
        draws_m=np.array([3, 2, 0, 5]),
    )
    return run._replace(**changes)


def runs_of(
    metric: Literal["accuracy", "loss"] = "accuracy", **reaches: list[int | None]
) -> list[Run]:
    """A run for each sampler and seed, by the round in which each reaches its final value."""
    return [
        make_run(sampler, seed, reach, metric)
        for sampler, seeds in reaches.items()
        for seed, reach in enumerate(seeds)
    ]
