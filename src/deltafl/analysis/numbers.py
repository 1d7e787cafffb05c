"""The numbers of a comparison: the classes of ``summary.json``."""

from typing import Annotated, ClassVar, Literal, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ..store import plain_json
from ..types import Judge, judge_of
from .runs import Fairness
from .statistics import CONFIDENCE

#: A number, or null where it does not exist.
Number = Annotated[float | None, BeforeValidator(plain_json)]
JsonDict = Annotated[dict[str, JsonValue], BeforeValidator(plain_json)]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class MeanSd(_Model):
    """Mean and spread of one number over seeds."""

    mean: Number
    """mean over the seeds; null if one of them is not finite"""
    sd: Number
    """sample standard deviation (divisor S - 1); null with one seed"""


class Reach(_Model):
    """When one run reached the threshold."""

    round: int
    """rounds completed at the first evaluation that reaches the threshold, that of a census
    included
    """
    seconds: float
    """wall clock up to there in seconds, evaluation excluded"""
    clock: Number = None
    """seconds of the virtual clock up to there; null without a clock"""
    bytes: float
    """bytes down + up until there"""


class _OfAllPairs(_Model):
    """A difference from which no seed is left out."""

    # The same names as in ``SpeedUp``: a verdict asks every difference alike.
    no_difference: ClassVar[float] = 0.0
    num_left_out: ClassVar[int] = 0
    num_lost: ClassVar[int] = 0
    num_won: ClassVar[int] = 0


class Gain(_OfAllPairs):
    """A difference to the baseline, over paired seeds."""

    value: float
    """mean difference; above 0 is better"""
    low: Number
    """lower end of the interval of a paired t; null with fewer than 2 pairs"""
    high: Number
    """upper end of the interval; null with fewer than 2 pairs"""
    num_pairs: int
    """seeds that both ran"""


class SamplerFairness(_Model):
    """The numbers of `Fairness` over seeds."""

    mean: MeanSd
    """mean over clients"""
    worst_tenth: MeanSd
    """mean of the tenth of the clients with the worst"""
    sd: MeanSd
    """standard deviation over clients"""
    gain: Gain | None
    """worst tenth against the baseline; null for the baseline and without a pair"""


class SeedSummary(_Model):
    """One run."""

    seed: int
    """the seed; runs of two samplers with one seed are a pair"""
    num_rounds: int
    """rounds completed at the last evaluation"""
    final: Number
    """metric at the last evaluation"""
    top5: Number
    """mean of the 5 best evaluations (such as the lowest losses) within the last 4 % of the
    rounds, at least the last 5 rounds; of all evaluations there if they are fewer; `final` of a
    run that was ended
    """
    area: Number = None
    """mean of the metric over all rounds, the area under its curve; null if the run was stopped"""
    fairness: Fairness | None = None
    """the metric per client; null if not measured"""
    total_seconds: float
    """wall clock of the run in seconds, evaluation excluded"""
    total_bytes: float
    """bytes down + up of the run"""
    total_clock: Number = None
    """seconds of the virtual clock of the run; null without one"""
    diverged: bool
    """whether the run diverged and was ended, or its last test loss is not finite"""
    stopped: bool = False
    """whether the threshold, `patience` or a rule of yours ended it with rounds left"""
    stopped_why: str = ""
    """which of them, in words; empty if none did"""
    refused: int = 0
    """replies that were refused and counted as missing"""
    refused_why: str = ""
    """the most frequent reason; empty if none was, or the run is of an earlier version"""
    diverged_in: int | None = None
    """the round in which it was ended so; null if it was not"""
    reach: Reach | None
    """when the metric reached the threshold; null if never or without one"""

    @property
    def worst_tenth(self) -> float | None:
        """That of the clients, if it was measured."""
        if self.fairness is None:
            return None
        return self.fairness.worst_tenth


class SpeedUp(_Model):
    """How many times fewer rounds than the baseline, over paired seeds."""

    no_difference: ClassVar[float] = 1.0
    ratio: float
    """mean rounds of the baseline / mean rounds of this sampler; above 1 is faster"""
    low: Number
    """lower end of the interval; null with fewer than 2 pairs"""
    high: Number
    """upper end of the interval; null with fewer than 2 pairs"""
    num_pairs: int
    """seeds with which both reached the threshold: these make the ratio"""
    num_left_out: int
    """seeds that both ran but one of them never reached it: not in the ratio"""
    num_lost: int = 0
    """of these, seeds with which only the baseline reached it"""
    num_won: int = 0
    """of these, seeds with which only this sampler reached it"""

    @property
    def value(self) -> float:
        """The ratio, under the name that the other differences have."""
        return self.ratio


class GapClosed(_OfAllPairs):
    """How much of the way from uniform sampling to full participation, by the area under the
    curve of the metric.
    """

    value: float
    """(A - A_uniform) / (A_full - A_uniform), A the mean of the metric over all rounds"""
    low: Number
    """lower end of its interval (Fieller); null where it is unbounded or of one seed"""
    high: Number
    """upper end of its interval; null likewise"""
    num_seeds: int
    """seeds that all three ran"""


Difference = SpeedUp | GapClosed | Gain


class ToThreshold(_Model):
    """What it took to reach the threshold, over seeds. Means are over the seeds that reached it."""

    num_reached: int
    """seeds that reached the threshold"""
    num_never: int
    """seeds that never did within their rounds"""
    rounds: MeanSd | None
    """rounds; null if no seed reached it"""
    seconds: Number
    """mean wall clock in seconds, evaluation excluded; null if no seed reached it"""
    clock: Number = None
    """mean seconds of the virtual clock; null without one"""
    bytes: Number
    """mean bytes down + up; null if no seed reached it"""
    speedup: SpeedUp | None
    """against the baseline; null for the baseline itself and without a pair"""

    @property
    def num_seeds(self) -> int:
        """All seeds, whether they reached it or not."""
        return self.num_reached + self.num_never


class Costs(_Model):
    """What a run costs whom: means over seeds. Transmission takes no time here, and evaluation
    is excluded.
    """

    client_seconds: float
    """wall clock of the clients' work in seconds, side by side or not"""
    server_seconds: float
    """the rest of `total_seconds`: draws, estimates, steps, records"""
    bytes_down: float
    """bytes that clients received"""
    bytes_up: float
    """bytes that clients sent"""
    asked: Number = None
    """what the clients that were asked cost, in the unit of `client_costs`; null without"""
    server_bytes: float
    """the server's largest state between two rounds: the model and all memories that are in RAM;
    closing a round takes up to 6 times its updates beside it
    """


class SamplerSummary(_Model):
    """One sampler over its seeds."""

    sampler: str
    """label, perhaps with a suffix as in `fedis@multinomial`"""
    gap_closed: GapClosed | None
    """null if `uniform` or `full` is missing, a loss not finite, a run stopped, or `full` not
    better
    """
    final: MeanSd
    """metric at the last evaluation"""
    top5: MeanSd
    """`top5` of the runs; for accuracy this is the paper's acc_top5"""
    area: MeanSd
    """mean of the metric over all rounds"""
    fairness: SamplerFairness | None = None
    """null if a run did not measure it"""
    to_threshold: ToThreshold | None
    """by the first evaluation that reaches the threshold; null without a threshold"""
    total_seconds: Number
    """mean wall clock of a run in seconds, evaluation excluded"""
    total_bytes: Number
    """mean bytes down + up of a run"""
    total_clock: Number = None
    """mean seconds of the virtual clock of a run; null without"""
    costs: Costs | None = None
    """null if a run is of a version that did not record them"""
    num_diverged: int
    """seeds that diverged: `diverged` of the runs"""
    seeds: list[SeedSummary]
    """the runs, by seed"""

    @property
    def speedup(self) -> SpeedUp | None:
        """Against the baseline, if there is one and both reached the threshold."""
        if self.to_threshold is None:
            return None
        return self.to_threshold.speedup


class Summary(_Model):
    """A comparison of samplers: the file `summary.json`."""

    schema_version: Literal[2] = 2
    """version of this schema; readers refuse another one"""
    metric: str
    """by which samplers are judged, such as accuracy (share in [0, 1]) or loss (lower is better)"""
    judges: list[Judge] = Field(default_factory=list)
    """how other metrics are read: name, whether higher is better, whether it is a share; left out
    where there are none
    """
    threshold: Number
    """value of the metric to be reached, a tie counts; null: no threshold was set"""
    baseline: str | None
    """label of the sampler that speed-ups compare with; null: no speed-ups"""
    confidence: float = CONFIDENCE
    """level of each interval (one by one, not jointly)"""
    samplers: list[SamplerSummary]
    """in the order of the runs given"""
    settings: JsonDict = Field(default_factory=dict)
    """settings of the experiment, as given"""
    environment: JsonDict = Field(default_factory=dict)
    """hardware and versions, as given"""

    @property
    def judge(self) -> Judge:
        """How the metric is read."""
        return judge_of(self.metric, self.judges)

    @property
    def by_label(self) -> dict[str, SamplerSummary]:
        """The samplers by their labels."""
        return {entry.sampler: entry for entry in self.samplers}

    @property
    def has_one_seed(self) -> bool:
        """Whether every sampler has a single run, so that there is no interval."""
        return all(len(entry.seeds) == 1 for entry in self.samplers)


@overload
def value_of(entry: SamplerSummary, summary: Summary) -> MeanSd: ...


@overload
def value_of(entry: SeedSummary, summary: Summary) -> float | None: ...


def value_of(entry: SamplerSummary | SeedSummary, summary: Summary) -> MeanSd | float | None:
    """The metric of a sampler or of one of its runs as tables show it: over the best late
    evaluations for shares, at the last one for others.
    """
    return entry.top5 if summary.judge.share else entry.final
