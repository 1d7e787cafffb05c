"""The shape of ``summary.json``: pydantic models whose field descriptions are its documentation.

``docs/summary-schema.md`` is the output of ``schema_markdown``; a test fails if it is out of date. Numbers that do not
exist (never reached, one seed, diverged) are null; NaN and infinity are never written.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ..plain_files import plain_json
from .curves import Metric
from .statistics import CONFIDENCE

SCHEMA_VERSION = 1


#: A number, or null where it does not exist.
Number = Annotated[float | None, BeforeValidator(plain_json)]
JsonDict = Annotated[dict[str, JsonValue], BeforeValidator(plain_json)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MeanSd(_Model):
    """Mean and spread of one number over seeds."""

    mean: Number = Field(description="mean over the seeds; null if one of them is not finite")
    sd: Number = Field(description="sample standard deviation (divisor S - 1); null with one seed")


class Reach(_Model):
    """When one run reached the threshold."""

    round: int = Field(description="rounds completed at the first evaluation that reaches the threshold")
    seconds: float = Field(description="wall clock up to there in seconds, evaluation excluded")
    bytes: float = Field(description="bytes down + up until there")


class SeedSummary(_Model):
    """One run."""

    seed: int = Field(description="the seed; runs of two samplers with one seed are a pair")
    num_rounds: int = Field(description="rounds completed at the last evaluation")
    final: Number = Field(description="metric at the last evaluation")
    top5: Number = Field(
        description="mean of the 5 best evaluations (highest accuracy, lowest loss) within the last 4 % of the rounds, "
        "at least the last 5 rounds; of all evaluations there if they are fewer; `final` of a run that was ended"
    )
    total_seconds: float = Field(description="wall clock of the run in seconds, evaluation excluded")
    total_bytes: float = Field(description="bytes down + up of the run")
    diverged: bool = Field(description="whether the run diverged and was ended, or its last test loss is not finite")
    diverged_in: int | None = Field(default=None, description="the round in which it was ended so; null if it was not")
    reach: Reach | None = Field(description="when the metric reached the threshold; null if never or without one")
    reach_smoothed: Reach | None = Field(
        description="when the mean of the last 5 evaluations reached it; null if never, or with fewer than 5"
    )


class SpeedUp(_Model):
    """How many times fewer rounds than the baseline, over paired seeds."""

    ratio: float = Field(description="mean rounds of the baseline / mean rounds of this sampler; above 1 is faster")
    low: Number = Field(description="lower end of the interval; null with fewer than 2 pairs")
    high: Number = Field(description="upper end of the interval; null with fewer than 2 pairs")
    num_pairs: int = Field(description="seeds with which both reached the threshold: these make the ratio")
    num_left_out: int = Field(description="seeds that both ran but one of them never reached it: not in the ratio")

    @property
    def verdict(self) -> Literal["faster", "slower", "open"]:
        """``"faster"`` or ``"slower"`` if the interval excludes 1 and has a width, else ``"open"``."""
        if self.low is None or self.high is None or self.low == self.high or self.low <= 1 <= self.high:
            return "open"
        return "faster" if self.low > 1 else "slower"


class GapClosed(_Model):
    """How much of the way from uniform sampling to full participation, in rounds."""

    value: float = Field(description="(R_uniform - R) / (R_uniform - R_full), R mean rounds; 0 is uniform, 1 is full")
    num_seeds: int = Field(description="seeds with which all three reached the threshold: these make the value")
    num_left_out: int = Field(description="seeds that all three ran but one of them never reached it: not in the value")


class ToThreshold(_Model):
    """What it took to reach the threshold, over seeds. Means are over the seeds that reached it."""

    num_reached: int = Field(description="seeds that reached the threshold")
    num_never: int = Field(description="seeds that never did within their rounds")
    rounds: MeanSd | None = Field(description="rounds; null if no seed reached it")
    seconds: Number = Field(description="mean wall clock in seconds, evaluation excluded; null if no seed reached it")
    bytes: Number = Field(description="mean bytes down + up; null if no seed reached it")
    speedup: SpeedUp | None = Field(description="against the baseline; null for the baseline itself and without a pair")
    gap_closed: GapClosed | None = Field(
        description="null if `uniform` or `full` is missing or never reached it, or `full` was not the faster one"
    )


class SamplerSummary(_Model):
    """One sampler over its seeds."""

    sampler: str = Field(description="label, perhaps with a suffix as in `fedis@multinomial`")
    censored: bool = Field(description="whether at least one seed never reached the threshold")
    final: MeanSd = Field(description="metric at the last evaluation")
    top5: MeanSd = Field(description="`top5` of the runs; for accuracy this is the paper's acc_top5")
    final_log10_loss: MeanSd | None = Field(
        description="log10 of the test loss at the last evaluation; null for the metric accuracy or a loss <= 0"
    )
    to_threshold: ToThreshold | None = Field(
        description="by the first evaluation that reaches the threshold; null without a threshold"
    )
    to_threshold_smoothed: ToThreshold | None = Field(
        description="by the moving average over 5 evaluations, which one lucky evaluation cannot fool; null likewise"
    )
    total_seconds: Number = Field(description="mean wall clock of a run in seconds, evaluation excluded")
    total_bytes: Number = Field(description="mean bytes down + up of a run")
    num_diverged: int = Field(description="seeds that diverged: `diverged` of the runs")
    seeds: list[SeedSummary] = Field(description="the runs, by seed")


class Summary(_Model):
    """A comparison of samplers: the file `summary.json`."""

    schema_version: Literal[1] = Field(default=1, description="version of this schema; readers refuse another one")
    metric: Metric = Field(description="accuracy (share in [0, 1], higher is better) or loss (lower is better)")
    threshold: Number = Field(description="value of the metric to be reached, a tie counts; null: no threshold was set")
    baseline: str | None = Field(description="label of the sampler that speed-ups compare with; null: no speed-ups")
    confidence: float = Field(default=CONFIDENCE, description="level of each interval (one by one, not jointly)")
    samplers: list[SamplerSummary] = Field(description="in the order of the runs given")
    settings: JsonDict = Field(default_factory=dict, description="settings of the experiment, as given")
    environment: JsonDict = Field(default_factory=dict, description="hardware and versions, as given")


#: In the order of the documentation.
MODELS: tuple[type[_Model], ...] = (
    Summary,
    SamplerSummary,
    MeanSd,
    ToThreshold,
    SpeedUp,
    GapClosed,
    SeedSummary,
    Reach,
)


def schema_markdown() -> str:
    """The documentation of ``summary.json`` in Markdown, made from the models."""
    intro = (
        "# The file summary.json\n\n"
        "Written by `deltafl.analysis.write_summary`, read by `deltafl.analysis.read_summary`. This page is made from\n"
        "the models in `deltafl.analysis.schema`. Numbers that do not exist are `null`; NaN and infinity are never\n"
        "written.\n"
        "The interval of a speed-up is that of a paired t on the log of the ratio of means, linearised: with\n"
        "a_s, b_s the rounds of the baseline and the sampler, r_s = a_s / mean(a) - b_s / mean(b) and\n"
        "se = sd(r) / sqrt(S), it is exp(log ratio +- t se), t the 0.975 quantile of\n"
        "Student's t with S - 1 degrees of freedom.\n"
    )
    return "\n".join([intro, *(_section(model) for model in MODELS)])


def _section(model: type[_Model]) -> str:
    schema = model.model_json_schema(mode="serialization")
    rows = [
        f"| `{name}` | {_type_name(field)} | {field.get('description', '')} |"
        for name, field in schema["properties"].items()
    ]
    head = f"## {model.__name__}\n\n{model.__doc__}\n\n| field | type | meaning |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _type_name(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_name(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f'`"{word}"`' for word in field["enum"])
    if field["type"] == "array":
        return f"list of {_type_name(field['items'])}"
    return str(field["type"])
