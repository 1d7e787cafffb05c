"""What a comparison is made from: one ``Run`` for each sampler and seed. Reads no files, knows no task.

Letters: ``r`` evaluations of one run in the order of time, ``m`` clients, ``s`` seeds.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, IntArray

Metric = Literal["accuracy", "loss"]


class Run(NamedTuple):
    """One sampler x one seed, as it went.

    Attributes:
        sampler: The label of the sampler, perhaps with a suffix as in ``fedis@multinomial``.
        seed: The seed; runs of two samplers with the same seed are a pair.
        metric: ``"accuracy"`` (higher is better) or ``"loss"`` (lower is better); the same in all runs of a comparison.
        round_r: int64 (r,), rounds completed when the global model was evaluated, 1-based, strictly increasing.
        accuracy_r: float64 (r,), share in [0, 1]; NaN where the task has none.
        loss_r: float64 (r,), test loss; not finite where the run diverged.
        seconds_r: float64 (r,), wall clock of all rounds up to there, evaluation excluded.
        bytes_r: float64 (r,), bytes down + up of all rounds up to there.
        draws_m: int64 (m,), how often each client was drawn over the whole run.
        diverged: The round in which the run diverged and was ended; None if it was not.
    """

    sampler: str
    seed: int
    metric: Metric
    round_r: IntArray
    accuracy_r: FloatArray
    loss_r: FloatArray
    seconds_r: FloatArray
    bytes_r: FloatArray
    draws_m: IntArray
    diverged: int | None = None

    @property
    def value_r(self) -> FloatArray:
        """The curve of the metric, float64 (r,)."""
        return self.accuracy_r if self.metric == "accuracy" else self.loss_r

    @property
    def num_rounds(self) -> int:
        """Rounds completed at the last evaluation."""
        return int(self.round_r[-1])


def by_sampler(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each sampler in order of seed; samplers in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.sampler, []).append(run)
    return {sampler: sorted(group, key=lambda run: run.seed) for sampler, group in groups.items()}


def find_sampler(name: str, labels: Sequence[str]) -> str | None:
    """The label called ``name``, else the only one that is ``name`` with a suffix (``name@...``), else None."""
    if name in labels:
        return name
    variants = [label for label in labels if label.split("@")[0] == name]
    return variants[0] if len(variants) == 1 else None


def check_runs(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot be compared.

    Raises:
        DeltaflError: If there is no run, a sampler has a seed twice, the metrics or the numbers of clients
            differ, or a run has no evaluation, columns of different length, rounds that do not increase, or no
            value of its metric.
    """
    if not runs:
        raise DeltaflError("there is no run to compare; give at least one finished run")
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if (run.sampler, run.seed) in seen:
            raise DeltaflError(f"two runs of sampler {run.sampler!r} have seed {run.seed}; leave one out")
        seen.add((run.sampler, run.seed))
        _check_run(run)
    metrics = sorted({run.metric for run in runs})
    if len(metrics) > 1:
        raise DeltaflError(f"the runs have different metrics ({', '.join(metrics)}); compare runs of one task")
    num_clients = sorted({len(run.draws_m) for run in runs})
    if len(num_clients) > 1:
        raise DeltaflError(f"the runs have different numbers of clients ({num_clients}); compare runs of one task")


def _check_run(run: Run) -> None:
    who = f"run {run.sampler!r}, seed {run.seed}"
    columns = (run.accuracy_r, run.loss_r, run.seconds_r, run.bytes_r)
    if len(run.round_r) == 0:
        raise DeltaflError(f"{who}: it has no evaluation; let it finish at least one evaluated round")
    if any(column.shape != run.round_r.shape for column in columns):
        raise DeltaflError(f"{who}: its columns differ in length; each needs {len(run.round_r)} entries")
    if run.round_r[0] < 1 or np.any(np.diff(run.round_r) <= 0):
        raise DeltaflError(f"{who}: round_r must increase strictly and start at 1 or later")
    if run.metric == "accuracy" and np.isnan(run.accuracy_r).any():
        raise DeltaflError(f"{who}: accuracy is missing (NaN) in some evaluations; use the metric 'loss'")
