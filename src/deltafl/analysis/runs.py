"""The run table: one ``Run`` for each sampler and seed; every table, statistic and picture is made
from it.

Letters: ``r`` evaluations of one run in order of time, ``m`` clients, ``s`` seeds.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from ..types import FloatArray, IntArray, Judge, judge_of

_NOTHING: Mapping[str, Any] = MappingProxyType({})
#: What is drawn of runs, beside the pictures of other metrics.
PICTURES = ("accuracy.png", "loss.png", "selections.png")


class Fairness(BaseModel):
    """The metric per client: means over the last evaluations (those of `top5`); the last one of a
    run that was ended.

    It is that on a client's own test examples; where these have no owners, only accuracy is known:
    the mean of the accuracies by class, weighted by the client's shares of labels. All clients
    count the same.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    mean: float
    """mean over clients"""
    worst_tenth: float
    """mean of the tenth of the clients with the worst"""
    sd: float
    """standard deviation over clients (divisor m)"""


class Run(NamedTuple):
    """One sampler with one seed; None where something was not recorded or measured."""

    sampler: str  #: the label
    seed: int
    #: by which the run is judged; the same in all runs of a comparison
    metric: str
    round_r: IntArray  #: rounds completed at each evaluation, 1-based, strictly increasing
    accuracy_r: FloatArray  #: share in [0, 1]; NaN where the task has none
    loss_r: FloatArray  #: test loss; not finite where the run diverged
    seconds_r: FloatArray  #: wall clock of all rounds up to there, evaluation excluded
    bytes_r: FloatArray  #: bytes down + up of all rounds up to there
    draws_m: IntArray  #: how often each client was drawn in the run
    #: the round in which the run diverged and was stopped; None if it did not
    diverged: int | None = None
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
    #: The metric of the clients with each of the k late models (``statistics.is_late``; the last
    #: one of a run that was ended), NaN where a client has none.
    value_km: FloatArray | None = None
    fairness: Fairness | None = None  #: mean, worst tenth and spread of these
    #: seconds of the virtual clock of the run's world; None without a clock
    clock_r: FloatArray | None = None
    client_seconds_r: FloatArray | None = None  #: the part of ``seconds_r`` in which clients worked
    trainings_r: FloatArray | None = None  #: how often clients were asked to train up to there
    #: what these trainings cost, in the unit of ``client_costs``; None without
    cost_r: FloatArray | None = None
    client_names: Sequence[str] = ()  #: the clients' names; none where they are numbers
    client_strata: Sequence[str] = ()  #: their strata; none where there are none
    bytes_up_r: FloatArray | None = None  #: the part of ``bytes_r`` that clients sent
    server_bytes: int | None = None  #: the largest state that the server had between two rounds
    judges: Sequence[Judge] = ()  #: how metrics beside accuracy and loss are read
    others_r: Mapping[str, FloatArray] = _NOTHING  #: the curves of these
    stopped_why: str = ""  #: why a callback ended it
    refused: int = 0  #: replies that were refused and counted as missing
    refused_why: str = ""  #: the most frequent reason

    @property
    def judge(self) -> Judge:
        """How the metric is read."""
        return judge_of(self.metric, self.judges)

    def curve(self, metric: str) -> FloatArray:
        """The curve of a metric, float64 (r,)."""
        return {"accuracy": self.accuracy_r, "loss": self.loss_r, **self.others_r}[metric]

    @property
    def value_r(self) -> FloatArray:
        """The curve of the metric by which the run is judged."""
        return self.curve(self.metric)

    @property
    def num_rounds(self) -> int:
        """Rounds completed at the last evaluation."""
        return int(self.round_r[-1])

    @property
    def horizon(self) -> int:
        """Rounds that were planned; those at the last evaluation if the settings do not say."""
        return int(self.settings.get("rounds") or self.num_rounds)

    @property
    def stopped(self) -> bool:
        """Whether a callback, such as that of the threshold, ended it before all of its rounds were
        played.
        """
        return bool(self.stopped_why) and not self.diverged and self.num_rounds < self.horizon


def by_sampler(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each sampler in order of seed; samplers in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.sampler, []).append(run)
    return {sampler: sorted(group, key=lambda run: run.seed) for sampler, group in groups.items()}
