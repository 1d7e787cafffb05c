"""The run table: one ``Run`` for each sampler and seed; every table, statistic and picture is made
from it.

Letters: ``r`` evaluations of one run in order of time, ``m`` clients, ``s`` seeds.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ..errors import DeltaflError
from ..estimators.table import find_estimator
from ..samplers import SAMPLERS, base_name, make_sampler, parse_label
from ..types import FloatArray, IntArray

Metric = Literal["accuracy", "loss"]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Fairness(BaseModel):
    """Accuracy per client: means over the last evaluations (those of `top5`); the last one of a run
    that was ended.

    A client's accuracy is that on its own test examples; where these have no owners, the mean of
    the accuracies by class, weighted by the client's shares of labels. All clients count the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float = Field(description="mean over clients")
    worst_tenth: float = Field(description="mean of the tenth of the clients with the lowest")
    sd: float = Field(description="standard deviation over clients (divisor m)")


class Run(NamedTuple):
    """One sampler with one seed; None where something was not recorded or measured."""

    sampler: str  #: the label
    seed: int
    #: "accuracy" (higher is better) or "loss" (lower is); the same in all runs of a comparison
    metric: Metric
    round_r: IntArray  #: rounds completed at each evaluation, 1-based, strictly increasing
    accuracy_r: FloatArray  #: share in [0, 1]; NaN where the task has none
    loss_r: FloatArray  #: test loss; not finite where the run diverged
    seconds_r: FloatArray  #: wall clock of all rounds up to there, evaluation excluded
    bytes_r: FloatArray  #: bytes down + up of all rounds up to there
    draws_m: IntArray  #: how often each client was drawn in the run
    diverged: int | None = (
        None  #: the round in which the run diverged and was stopped; None if it did not
    )
    part: str = ""
    cpu_seconds_r: FloatArray | None = None  #: processor time up to there, evaluation excluded
    client_accuracy_r: FloatArray | None = None  #: mean over clients of their own test accuracy
    #: Other measurements, column by column, with their own ``round``; NaN where there is no number.
    probes: Mapping[str, FloatArray] = _NOTHING
    settings: Mapping[str, Any] = _NOTHING
    data: str = ""
    environment: Mapping[str, Any] = _NOTHING
    diverged_why: str = ""  #: symptom and likely cause, one sentence
    num_examples_m: FloatArray | None = None  #: the clients' sizes
    #: Accuracies of the clients with each of the k late models (``statistics.is_late``; the last
    #: one of a run that was ended), NaN where a client has none.
    accuracy_km: FloatArray | None = None
    fairness: Fairness | None = None  #: mean, worst tenth and spread of these
    clock_r: FloatArray | None = (
        None  #: seconds of the virtual clock of the run's world; None without a clock
    )
    client_seconds_r: FloatArray | None = None  #: the part of ``seconds_r`` in which clients worked
    bytes_up_r: FloatArray | None = None  #: the part of ``bytes_r`` that clients sent
    server_bytes: int | None = None  #: the largest state that the server had between two rounds

    @property
    def value_r(self) -> FloatArray:
        """The curve of the metric, float64 (r,)."""
        return self.accuracy_r if self.metric == "accuracy" else self.loss_r

    @property
    def num_rounds(self) -> int:
        """Rounds completed at the last evaluation."""
        return int(self.round_r[-1])

    @property
    def horizon(self) -> int:
        """Rounds that were planned; those at the last evaluation if the settings do not say."""
        return int(self.settings.get("rounds") or self.num_rounds)

    @property
    def rounds_before(self) -> int:
        """Rounds before the recorded ones: 1 for a sampler that begins with a census that moves
        no model.
        """
        return int(only_asks_first(self.sampler))

    @property
    def stopped(self) -> bool:
        """Whether it ended at the threshold, before all of its rounds were played."""
        return (
            bool(self.settings.get("stop_at_threshold"))
            and not self.diverged
            and self.num_rounds < self.horizon
        )

    def probe(self, name: str) -> FloatArray:
        """A column of ``probes``; a ``DeltaflError`` if it was not measured."""
        if name not in self.probes:
            raise DeltaflError(
                f"run {self.sampler}, seed {self.seed} has no column {name!r}; it was run without "
                "it"
            )
        return self.probes[name]


def by_sampler(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each sampler in order of seed; samplers in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.sampler, []).append(run)
    return {sampler: sorted(group, key=lambda run: run.seed) for sampler, group in groups.items()}


@cache
def begins_with_census(label: str) -> bool:
    """Whether the sampler of a label asks every client once before it draws."""
    entry = SAMPLERS.get(base_name(label))
    return entry is not None and entry.needs == "census"


@cache
def only_asks_first(label: str) -> bool:
    """Whether it does so for numbers that do not move the model, so that a round is lost."""
    if not begins_with_census(label):
        return False
    parsed = parse_label(label.partition("+")[0])  # what follows is settings of a run, or a part
    census = make_sampler(parsed).census
    return (
        census is None
        or not census.for_control(find_estimator(parsed.estimator).control).first_update
    )


def find_label(name: str, labels: Sequence[str]) -> str | None:
    """The label called ``name``, else the only one that is a variant of it (``name@...``,
    ``name(...)``), else None.
    """
    if name in labels:
        return name
    variants = [label for label in labels if base_name(label) == name]
    return variants[0] if len(variants) == 1 else None


def check_runs(runs: Sequence[Run]) -> None:
    """Reject runs that cannot be compared, as those of two tasks, or two of one sampler with the
    same seed.
    """
    if not runs:
        raise DeltaflError("there is no run to compare; give at least one finished run")
    seen: set[tuple[str, int]] = set()
    for run in runs:
        who = f"run {run.sampler!r}, seed {run.seed}"
        if (run.sampler, run.seed) in seen:
            raise DeltaflError(
                f"two runs of sampler {run.sampler!r} have seed {run.seed}; leave one out"
            )
        seen.add((run.sampler, run.seed))
        if len(run.round_r) == 0:
            raise DeltaflError(
                f"{who}: it has no evaluation; let it finish at least one evaluated round"
            )
        if run.metric == "accuracy" and np.isnan(run.accuracy_r).any():
            raise DeltaflError(
                f"{who}: accuracy is missing (NaN) in some evaluations; use the metric 'loss'"
            )
    if len({(run.metric, len(run.draws_m)) for run in runs}) > 1:
        raise DeltaflError(
            "the runs have different metrics or numbers of clients; compare runs of one task"
        )
