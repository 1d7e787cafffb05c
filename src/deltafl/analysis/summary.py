"""From finished runs to the numbers of a comparison, and the file that keeps them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..plain_files import write_atomically
from ..reading import checked, read_json
from ..types import FloatArray
from .curves import Run, by_sampler, check_runs, find_sampler
from .schema import GapClosed, MeanSd, Reach, SamplerSummary, SeedSummary, SpeedUp, Summary, ToThreshold
from .statistics import first_reach, gap_closed, mean_and_sd, mean_of_best, moving_average, ratio_of_means

#: For each sampler, by seed, when the run reached the threshold; None where it never did.
Reaches = dict[str, dict[int, Reach | None]]


def summarise(
    runs: Sequence[Run],
    threshold: float | None,
    baseline: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Summary:
    """Compare samplers over seeds.

    Runs that never reach the threshold are counted (``num_never``, ``num_left_out``) and mark their sampler as
    ``censored``; means to the threshold are over the runs that reach it.

    Args:
        runs: One run for each sampler and seed, all of one task.
        threshold: Value of the metric to be reached: a share in [0, 1] for accuracy, a finite number for loss. None (or
            NaN) if there is none: then nothing that needs one is computed.
        baseline: Sampler that speed-ups compare with; by default ``fedavg``, else ``uniform``, else none.
        settings: The experiment's settings, kept in the summary as they are.
        environment: Hardware and versions, kept in the summary as they are.

    Returns:
        The summary; samplers are in the order of their first run.

    Raises:
        DeltaflError: If the runs cannot be compared, the threshold is out of range or the baseline is not among them.
    """
    check_runs(runs)
    metric = runs[0].metric
    if threshold is not None and np.isnan(threshold):
        threshold = None
    if threshold is not None and (np.isinf(threshold) or (metric == "accuracy" and not 0 <= threshold <= 1)):
        raise DeltaflError(f"threshold is {threshold}; write a share in [0, 1] for accuracy, a finite number for loss")
    seeds = {label: [_seed_summary(run, threshold) for run in group] for label, group in by_sampler(runs).items()}
    reference = _baseline(baseline, list(seeds))
    plain = {label: {entry.seed: entry.reach for entry in entries} for label, entries in seeds.items()}
    smoothed = {label: {entry.seed: entry.reach_smoothed for entry in entries} for label, entries in seeds.items()}
    samplers = [
        _sampler_summary(
            label,
            entries,
            _to_threshold(label, plain, reference) if threshold is not None else None,
            _to_threshold(label, smoothed, reference) if threshold is not None else None,
            metric == "loss",
        )
        for label, entries in seeds.items()
    ]
    return Summary(
        metric=metric,
        threshold=threshold,
        baseline=reference,
        samplers=samplers,
        settings=dict(settings or {}),
        environment=dict(environment or {}),
    )


def write_summary(summary: Summary, path: Path | str) -> None:
    """Write ``summary`` as JSON; the file is replaced in one step, so a reader never sees half of it."""
    write_atomically(Path(path), summary.model_dump_json(indent=2) + "\n")


def read_summary(path: Path | str) -> Summary:
    """Read what ``write_summary`` wrote.

    Raises:
        DeltaflError: If the file does not exist or is not a summary of this schema version.
    """
    where = f"{path} is not a summary of this version"
    return checked(Summary, read_json(Path(path)), where, "write it again with this version")


def _baseline(given: str | None, labels: Sequence[str]) -> str | None:
    if given is None:
        return find_sampler("fedavg", labels) or find_sampler("uniform", labels)
    found = find_sampler(given, labels)
    if found is None:
        raise unknown_name("baseline", given, labels)
    return found


def _seed_summary(run: Run, threshold: float | None) -> SeedSummary:
    higher = run.metric == "accuracy"

    def reach(value_r: FloatArray) -> Reach | None:
        i = first_reach(value_r, threshold, higher) if threshold is not None else None
        if i is None:
            return None
        return Reach(round=int(run.round_r[i]), seconds=float(run.seconds_r[i]), bytes=float(run.bytes_r[i]))

    return SeedSummary(
        seed=run.seed,
        num_rounds=run.num_rounds,
        final=float(run.value_r[-1]),
        top5=float(run.value_r[-1]) if run.diverged else mean_of_best(run.value_r, run.round_r, higher),
        total_seconds=float(run.seconds_r[-1]),
        total_bytes=float(run.bytes_r[-1]),
        diverged=run.diverged is not None or not np.isfinite(run.loss_r[-1]),
        diverged_in=run.diverged,
        reach=reach(run.value_r),
        reach_smoothed=reach(moving_average(run.value_r)),
    )


def _sampler_summary(
    label: str,
    seeds: list[SeedSummary],
    plain: ToThreshold | None,
    smoothed: ToThreshold | None,
    metric_is_loss: bool,
) -> SamplerSummary:
    # null stands for what is not finite, so it must not leave the mean: NaN keeps it there.
    final_s = np.array([np.nan if entry.final is None else entry.final for entry in seeds])
    top5_s = np.array([np.nan if entry.top5 is None else entry.top5 for entry in seeds])
    has_log = metric_is_loss and not bool(np.any(final_s <= 0))
    return SamplerSummary(
        sampler=label,
        censored=plain is not None and plain.num_never > 0,
        final=_mean_sd(final_s),
        top5=_mean_sd(top5_s),
        final_log10_loss=_mean_sd(np.log10(final_s)) if has_log else None,
        to_threshold=plain,
        to_threshold_smoothed=smoothed,
        total_seconds=float(np.mean([entry.total_seconds for entry in seeds])),
        total_bytes=float(np.mean([entry.total_bytes for entry in seeds])),
        num_diverged=sum(entry.diverged for entry in seeds),
        seeds=seeds,
    )


def _mean_sd(value_s: FloatArray) -> MeanSd:
    mean, sd = mean_and_sd(value_s)
    return MeanSd(mean=mean, sd=sd)


def _to_threshold(label: str, reaches: Reaches, baseline: str | None) -> ToThreshold:
    reached = [reach for reach in reaches[label].values() if reach is not None]
    return ToThreshold(
        num_reached=len(reached),
        num_never=len(reaches[label]) - len(reached),
        rounds=_mean_sd(np.array([reach.round for reach in reached], dtype=np.float64)) if reached else None,
        seconds=float(np.mean([reach.seconds for reach in reached])) if reached else None,
        bytes=float(np.mean([reach.bytes for reach in reached])) if reached else None,
        speedup=_speedup(label, reaches, baseline),
        gap_closed=_gap_closed(label, reaches),
    )


def _paired(labels: Sequence[str], reaches: Reaches) -> tuple[FloatArray, int]:
    """Rounds (labels, seeds) for the shared seeds with which all labels reached it; number of the other ones."""
    shared = sorted(set.intersection(*(set(reaches[label]) for label in labels)))
    rows = [[reach.round for label in labels if (reach := reaches[label][seed]) is not None] for seed in shared]
    complete = [row for row in rows if len(row) == len(labels)]
    return np.array(complete, dtype=np.float64).reshape(-1, len(labels)).T, len(rows) - len(complete)


def _speedup(label: str, reaches: Reaches, baseline: str | None) -> SpeedUp | None:
    if baseline is None or label == baseline:
        return None
    (base_s, other_s), left_out = _paired([baseline, label], reaches)
    if len(base_s) == 0:
        return None
    ratio, low, high = ratio_of_means(base_s, other_s)
    return SpeedUp(ratio=ratio, low=low, high=high, num_pairs=len(base_s), num_left_out=left_out)


def _gap_closed(label: str, reaches: Reaches) -> GapClosed | None:
    uniform, full = (find_sampler(name, list(reaches)) for name in ("uniform", "full"))
    if uniform is None or full is None:
        return None
    (uniform_s, rounds_s, full_s), left_out = _paired([uniform, label, full], reaches)
    value = gap_closed(uniform_s, rounds_s, full_s) if len(rounds_s) else None
    return None if value is None else GapClosed(value=value, num_seeds=len(rounds_s), num_left_out=left_out)
