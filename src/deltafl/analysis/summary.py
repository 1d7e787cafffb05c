"""The numbers of a comparison, and ``summary.json``, the file that holds them.

``docs/summary-schema.md`` documents the file with the descriptions of these fields. Numbers that do
not exist (never reached, one seed, diverged) are null; NaN and infinity are never written.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ..errors import DeltaflError, unknown_name
from ..io import checked, plain_json, read_json, write_atomically
from .runs import Fairness, Metric, Run, by_sampler, check_runs, find_label
from .statistics import (
    CONFIDENCE,
    area_under,
    gap_closed,
    mean_and_sd,
    mean_interval,
    mean_of_best,
    ratio_of_means,
    reach,
    rounds_until,
)

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

    round: int = Field(
        description=(
            "rounds completed at the first evaluation that reaches the threshold, that of "
            "a census included"
        )
    )
    seconds: float = Field(description="wall clock up to there in seconds, evaluation excluded")
    clock: Number = Field(
        default=None, description="seconds of the virtual clock up to there; null without a clock"
    )
    bytes: float = Field(description="bytes down + up until there")


class Gain(_Model):
    """A difference to the baseline, over paired seeds."""

    no_difference: ClassVar[float] = 0.0
    value: float = Field(description="mean difference; above 0 is better")
    low: Number = Field(
        description="lower end of the interval of a paired t; null with fewer than 2 pairs"
    )
    high: Number = Field(description="upper end of the interval; null with fewer than 2 pairs")
    num_pairs: int = Field(description="seeds that both ran")


class SamplerFairness(_Model):
    """The numbers of `Fairness` over seeds."""

    mean: MeanSd = Field(description="mean over clients")
    worst_tenth: MeanSd = Field(description="mean of the tenth of the clients with the lowest")
    sd: MeanSd = Field(description="standard deviation over clients")
    gain: Gain | None = Field(
        description="worst tenth against the baseline; null for the baseline and without a pair"
    )


class SeedSummary(_Model):
    """One run."""

    seed: int = Field(description="the seed; runs of two samplers with one seed are a pair")
    num_rounds: int = Field(description="rounds completed at the last evaluation")
    final: Number = Field(description="metric at the last evaluation")
    top5: Number = Field(
        description="mean of the 5 best evaluations (highest accuracy, lowest loss) within the "
        "last 4 % of the rounds, "
        "at least the last 5 rounds; of all evaluations there if they are fewer; `final` of a run "
        "that was ended"
    )
    area: Number = Field(
        default=None,
        description=(
            "mean of the metric over all rounds, the area under its curve; null if the "
            "run "
            "was stopped"
        ),
    )
    fairness: Fairness | None = Field(
        default=None, description="accuracy per client; null if not measured"
    )
    total_seconds: float = Field(
        description="wall clock of the run in seconds, evaluation excluded"
    )
    total_bytes: float = Field(description="bytes down + up of the run")
    total_clock: Number = Field(
        default=None, description="seconds of the virtual clock of the run; null without one"
    )
    diverged: bool = Field(
        description="whether the run diverged and was ended, or its last test loss is not finite"
    )
    stopped: bool = Field(
        default=False, description="whether it ended at the threshold, with rounds left"
    )
    diverged_in: int | None = Field(
        default=None, description="the round in which it was ended so; null if it was not"
    )
    reach: Reach | None = Field(
        description="when the metric reached the threshold; null if never or without one"
    )


class SpeedUp(_Model):
    """How many times fewer rounds than the baseline, over paired seeds."""

    no_difference: ClassVar[float] = 1.0
    ratio: float = Field(
        description="mean rounds of the baseline / mean rounds of this sampler; above 1 is faster"
    )
    low: Number = Field(description="lower end of the interval; null with fewer than 2 pairs")
    high: Number = Field(description="upper end of the interval; null with fewer than 2 pairs")
    num_pairs: int = Field(
        description="seeds with which both reached the threshold: these make the ratio"
    )
    num_left_out: int = Field(
        description="seeds that both ran but one of them never reached it: not in the ratio"
    )
    num_lost: int = Field(
        default=0, description="of these, seeds with which only the baseline reached it"
    )
    num_won: int = Field(
        default=0, description="of these, seeds with which only this sampler reached it"
    )

    @property
    def value(self) -> float:
        """The ratio, under the name that the other differences have."""
        return self.ratio


class GapClosed(_Model):
    """How much of the way from uniform sampling to full participation, by the area under the
    curve of the metric.
    """

    no_difference: ClassVar[float] = 0.0
    value: float = Field(
        description=(
            "(A - A_uniform) / (A_full - A_uniform), A the mean of the metric over all rounds"
        )
    )
    low: Number = Field(
        description="lower end of its interval (Fieller); null where it is unbounded or of one seed"
    )
    high: Number = Field(description="upper end of its interval; null likewise")
    num_seeds: int = Field(description="seeds that all three ran")


class ToThreshold(_Model):
    """What it took to reach the threshold, over seeds. Means are over the seeds that reached it."""

    num_reached: int = Field(description="seeds that reached the threshold")
    num_never: int = Field(description="seeds that never did within their rounds")
    rounds: MeanSd | None = Field(description="rounds; null if no seed reached it")
    seconds: Number = Field(
        description="mean wall clock in seconds, evaluation excluded; null if no seed reached it"
    )
    clock: Number = Field(
        default=None, description="mean seconds of the virtual clock; null without one"
    )
    bytes: Number = Field(description="mean bytes down + up; null if no seed reached it")
    speedup: SpeedUp | None = Field(
        description="against the baseline; null for the baseline itself and without a pair"
    )


class Costs(_Model):
    """What a run costs whom: means over seeds. Transmission takes no time here, and evaluation
    is excluded.
    """

    client_seconds: float = Field(
        description="wall clock of the clients' work in seconds, side by side or not"
    )
    server_seconds: float = Field(
        description="the rest of `total_seconds`: draws, estimates, steps, records"
    )
    bytes_down: float = Field(description="bytes that clients received")
    bytes_up: float = Field(description="bytes that clients sent")
    server_bytes: float = Field(
        description="the server's largest state between two rounds: the model and all memories "
        "that are in RAM; "
        "closing a round takes up to 6 times its updates beside it"
    )


class SamplerSummary(_Model):
    """One sampler over its seeds."""

    sampler: str = Field(description="label, perhaps with a suffix as in `fedis@multinomial`")
    gap_closed: GapClosed | None = Field(
        description=(
            "null if `uniform` or `full` is missing, a loss not finite, a run stopped, or "
            "`full` not better"
        )
    )
    final: MeanSd = Field(description="metric at the last evaluation")
    top5: MeanSd = Field(
        description="`top5` of the runs; for accuracy this is the paper's acc_top5"
    )
    area: MeanSd | None = Field(default=None, description="mean of the metric over all rounds")
    fairness: SamplerFairness | None = Field(
        default=None, description="null if a run did not measure it"
    )
    to_threshold: ToThreshold | None = Field(
        description="by the first evaluation that reaches the threshold; null without a threshold"
    )
    total_seconds: Number = Field(
        description="mean wall clock of a run in seconds, evaluation excluded"
    )
    total_bytes: Number = Field(description="mean bytes down + up of a run")
    total_clock: Number = Field(
        default=None, description="mean seconds of the virtual clock of a run; null without"
    )
    costs: Costs | None = Field(
        default=None, description="null if a run is of a version that did not record them"
    )
    num_diverged: int = Field(description="seeds that diverged: `diverged` of the runs")
    seeds: list[SeedSummary] = Field(description="the runs, by seed")


class Summary(_Model):
    """A comparison of samplers: the file `summary.json`."""

    schema_version: Literal[2] = Field(
        default=2, description="version of this schema; readers refuse another one"
    )
    metric: Metric = Field(
        description="accuracy (share in [0, 1], higher is better) or loss (lower is better)"
    )
    threshold: Number = Field(
        description="value of the metric to be reached, a tie counts; null: no threshold was set"
    )
    baseline: str | None = Field(
        description="label of the sampler that speed-ups compare with; null: no speed-ups"
    )
    confidence: float = Field(
        default=CONFIDENCE, description="level of each interval (one by one, not jointly)"
    )
    samplers: list[SamplerSummary] = Field(description="in the order of the runs given")
    settings: JsonDict = Field(
        default_factory=dict, description="settings of the experiment, as given"
    )
    environment: JsonDict = Field(
        default_factory=dict, description="hardware and versions, as given"
    )


def summarise(
    runs: Sequence[Run],
    threshold: float | None,
    baseline: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Summary:
    """Compare samplers over seeds.

    Args:
        runs: One run for each sampler and seed, all of one task.
        threshold: Value of the metric to be reached: a share in [0, 1] for accuracy, a finite
            number for loss. None (or NaN) if there is none: then nothing that needs one is
            computed.
        baseline: Sampler that speed-ups compare with; by default ``uniform``, else ``fedavg``, else
            none.
        settings: The experiment's settings, kept in the summary as they are.
        environment: Hardware and versions, kept in the summary as they are.

    Returns:
        The summary; samplers are in the order of their first run. Runs that never reach the
        threshold are counted (``num_never``, ``num_left_out``); means to the threshold are over the
        runs that reach it.
    """
    check_runs(runs)
    metric = runs[0].metric
    if threshold is not None and np.isnan(threshold):
        threshold = None
    if threshold is not None and (
        np.isinf(threshold) or (metric == "accuracy" and not 0 <= threshold <= 1)
    ):
        raise DeltaflError(
            f"threshold is {threshold}; write a share in [0, 1] for accuracy, a finite number for "
            "loss"
        )
    groups = by_sampler(runs)
    seeds = {
        label: [_seed_summary(run, threshold) for run in group] for label, group in groups.items()
    }
    reference = _baseline(baseline, list(seeds))
    base = () if reference is None else seeds[reference]
    samplers = [
        SamplerSummary(
            sampler=label,
            gap_closed=_gap_closed(label, groups),
            final=_mean_sd(entry.final for entry in entries),
            top5=_mean_sd(entry.top5 for entry in entries),
            area=_mean_sd(entry.area for entry in entries),
            fairness=_fairness(entries, () if label == reference else base),
            to_threshold=None
            if threshold is None
            else _to_threshold(entries, () if label == reference else base),
            total_seconds=float(np.mean([entry.total_seconds for entry in entries])),
            total_bytes=float(np.mean([entry.total_bytes for entry in entries])),
            total_clock=_mean_of(entry.total_clock for entry in entries),
            costs=_costs(groups[label]),
            num_diverged=sum(entry.diverged for entry in entries),
            seeds=entries,
        )
        for label, entries in seeds.items()
    ]
    facts = {"settings": dict(settings or {}), "environment": dict(environment or {})}
    return Summary(
        metric=metric, threshold=threshold, baseline=reference, samplers=samplers, **facts
    )


def write_summary(summary: Summary, path: Path | str) -> None:
    """Write ``summary`` as JSON; the file is replaced in one step, so a reader never sees half
    of it.
    """
    write_atomically(Path(path), summary.model_dump_json(indent=2) + "\n")


def read_summary(path: Path | str) -> Summary:
    """Read what ``write_summary`` wrote; a file of another schema version is an error."""
    where = f"{path} is not a summary of this version"
    return checked(Summary, read_json(Path(path)), where, "write it again with this version")


def value_of(entry: SamplerSummary, summary: Summary) -> MeanSd:
    """The metric as tables show it: over the best late evaluations for accuracy, at the last one
    for loss.
    """
    return entry.top5 if summary.metric == "accuracy" else entry.final


def ranked(summary: Summary) -> list[SamplerSummary]:
    """The samplers, the best first: by the gap closed where there is one, then by the metric; no
    number is last.
    """
    sign = 1.0 if summary.metric == "accuracy" else -1.0

    def key(entry: SamplerSummary) -> tuple[float, float]:
        gap = entry.gap_closed
        mean = value_of(entry, summary).mean
        return (-np.inf if gap is None else gap.value, -np.inf if mean is None else sign * mean)

    return sorted(summary.samplers, key=key, reverse=True)


def references(summary: Summary) -> set[str | None]:
    """The samplers between which a gap is measured: full participation and uniform sampling."""
    labels = [entry.sampler for entry in summary.samplers]
    return {find_label(name, labels) for name in ("full", "uniform")}


def _baseline(given: str | None, labels: Sequence[str]) -> str | None:
    if given is None:
        return find_label("uniform", labels) or find_label("fedavg", labels)
    found = find_label(given, labels)
    if found is None:
        raise unknown_name("baseline", given, labels)
    return found


def _seed_summary(run: Run, threshold: float | None) -> SeedSummary:
    at = None if threshold is None else reach(run, threshold)
    final = float(run.value_r[-1])
    return SeedSummary(
        seed=run.seed,
        num_rounds=run.num_rounds,
        final=final,
        top5=final
        if run.diverged or run.stopped
        else mean_of_best(run.value_r, run.round_r, run.metric == "accuracy"),
        area=None if run.stopped else area_under(run, run.horizon),
        fairness=run.fairness,
        total_seconds=float(run.seconds_r[-1]),
        total_bytes=float(run.bytes_r[-1]),
        total_clock=None if run.clock_r is None else float(run.clock_r[-1]),
        diverged=run.diverged is not None or not np.isfinite(run.loss_r[-1]),
        stopped=run.stopped,
        diverged_in=run.diverged,
        reach=None if at is None else _reach(run, at),
    )


def _reach(run: Run, at: int) -> Reach:
    return Reach(
        round=rounds_until(run, at),
        seconds=float(run.seconds_r[at]),
        clock=None if run.clock_r is None else float(run.clock_r[at]),
        bytes=float(run.bytes_r[at]),
    )


def _mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that there are; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _costs(runs: Sequence[Run]) -> Costs | None:
    rows = [
        (
            run.client_seconds_r[-1],
            run.seconds_r[-1],
            run.bytes_up_r[-1],
            run.bytes_r[-1],
            run.server_bytes,
        )
        for run in runs
        if run.client_seconds_r is not None
        and run.bytes_up_r is not None
        and run.server_bytes is not None
    ]
    if len(rows) < len(runs):
        return None
    client, total, up, both, state = np.mean(rows, axis=0).tolist()
    return Costs(
        client_seconds=client,
        server_seconds=total - client,
        bytes_down=both - up,
        bytes_up=up,
        server_bytes=state,
    )


def _mean_sd(values: Iterable[float | None]) -> MeanSd:
    """Of a number that was not finite, which is null in a summary, there is no mean."""
    mean, sd = mean_and_sd(np.array([np.nan if value is None else value for value in values]))
    return MeanSd(mean=mean, sd=sd)


def _fairness(runs: Sequence[SeedSummary], base: Sequence[SeedSummary]) -> SamplerFairness | None:
    found = [run.fairness for run in runs if run.fairness is not None]
    if len(found) < len(runs):
        return None
    means = {name: _mean_sd(getattr(it, name) for it in found) for name in Fairness.model_fields}
    both = [(one.fairness, two.fairness) for one, two in pairs(runs, base)]
    return SamplerFairness(
        **means, gain=gain([(a.worst_tenth, b.worst_tenth) for a, b in both if a and b])
    )


def _to_threshold(runs: Sequence[SeedSummary], base: Sequence[SeedSummary]) -> ToThreshold:
    reached = [run.reach for run in runs if run.reach is not None]
    return ToThreshold(
        num_reached=len(reached),
        num_never=len(runs) - len(reached),
        rounds=_mean_sd(reach.round for reach in reached) if reached else None,
        seconds=_mean_of(reach.seconds for reach in reached),
        clock=_mean_of(reach.clock for reach in reached),
        bytes=_mean_of(reach.bytes for reach in reached),
        speedup=speedup(runs, base),
    )


def pairs(
    runs: Sequence[SeedSummary], base: Sequence[SeedSummary]
) -> list[tuple[SeedSummary, SeedSummary]]:
    """The runs of two samplers with the same seed."""
    of_seed = {run.seed: run for run in base}
    return [(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]


def gain(values: Sequence[tuple[float, float]]) -> Gain | None:
    """The mean difference of pairs (of a sampler, of the one it is compared with); None without
    a pair.
    """
    if not values:
        return None
    value, low, high = mean_interval(np.subtract(*np.array(values).T))
    return Gain(value=value, low=low, high=high, num_pairs=len(values))


def speedup(runs: Sequence[SeedSummary], base: Sequence[SeedSummary]) -> SpeedUp | None:
    """How many times fewer rounds than ``base``, over the seeds with which both reached it; None
    without a pair.
    """
    both = [(one.reach, two.reach) for one, two in pairs(runs, base)]
    rounds = [(two.round, one.round) for one, two in both if one is not None and two is not None]
    if not rounds:
        return None
    ratio, low, high = ratio_of_means(*np.array(rounds, dtype=np.float64).T)
    counts = {"num_pairs": len(rounds), "num_left_out": len(both) - len(rounds)}
    counts |= {"num_lost": sum(one is None and two is not None for one, two in both)}
    counts |= {"num_won": sum(one is not None and two is None for one, two in both)}
    return SpeedUp(ratio=ratio, low=low, high=high, **counts)


def _gap_closed(label: str, groups: Mapping[str, Sequence[Run]]) -> GapClosed | None:
    """Over the seeds that all three ran, and the rounds that all were to play."""
    names = [find_label("uniform", list(groups)), label, find_label("full", list(groups))]
    runs = [{run.seed: run for run in groups[name]} for name in names if name is not None]
    seeds = sorted(set.intersection(*map(set, runs)))
    if (
        len(runs) < len(names)
        or not seeds
        or any(of_seed[seed].stopped for of_seed in runs for seed in seeds)
    ):
        return None
    horizon = min(run.horizon for of_seed in runs for run in of_seed.values())
    sign = -1.0 if runs[0][seeds[0]].metric == "accuracy" else 1.0
    found = gap_closed(
        *(
            np.array([sign * area_under(of_seed[seed], horizon) for seed in seeds])
            for of_seed in runs
        )
    )
    return found and GapClosed(
        value=found.mean, low=found.low, high=found.high, num_seeds=len(seeds)
    )
