"""The numbers of a comparison, computed, and ``summary.json``, the file that holds them.

``docs/reference/summary-schema.md`` documents the file with the descriptions of the fields in
``numbers.py``. Numbers that do not exist (never reached, one seed, diverged) are null; NaN and
infinity are never written.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import DeltaflError
from ..store import checked, read_json, write_atomically
from ..types import Json
from .methods import find_label, rounds_until
from .numbers import (
    Costs,
    Gain,
    GapClosed,
    MeanSd,
    Reach,
    SamplerFairness,
    SamplerSummary,
    SeedSummary,
    SpeedUp,
    Summary,
    ToThreshold,
    value_of,
)
from .runs import Run, by_sampler
from .statistics import (
    area_under,
    gap_closed,
    mean_and_sd,
    mean_interval,
    mean_of_best,
    ratio_of_means,
    reach,
)


def summarise(
    runs: Sequence[Run],
    threshold: float | None,
    baseline: str | None = None,
    *,
    settings: Json | None = None,
    environment: Json | None = None,
) -> Summary:
    """Compare samplers over seeds.

    Args:
        runs: One run for each sampler and seed, all of one task.
        threshold: Value of the metric to be reached; None if there is none: then nothing that needs
            one is computed.
        baseline: Label that speed-ups compare with; by default ``uniform``, else ``fedavg``, else
            none.
        settings: The experiment's settings, kept in the summary as they are.
        environment: Hardware and versions, kept in the summary as they are.

    Returns:
        The summary; samplers are in the order of their first run. Runs that never reach the
        threshold are counted (``num_never``, ``num_left_out``); means to the threshold are over the
        runs that reach it.
    """
    _require_comparable(runs)
    groups = by_sampler(runs)
    labels = list(groups)
    baseline = baseline or find_label("uniform", labels) or find_label("fedavg", labels)
    seeds = {x: [_seed_summary(run, threshold) for run in group] for x, group in groups.items()}
    samplers = []
    for label, own in seeds.items():
        # The baseline is not compared with itself.
        base: Sequence[SeedSummary] = ()
        if baseline not in (None, label):
            base = seeds[baseline]
        to_threshold = None
        if threshold is not None:
            to_threshold = _to_threshold(own, base)
        entry = SamplerSummary(
            sampler=label,
            gap_closed=_gap_closed(label, groups),
            final=_mean_sd(seed.final for seed in own),
            top5=_mean_sd(seed.top5 for seed in own),
            area=_mean_sd(seed.area for seed in own),
            fairness=_fairness(own, base, groups[label][0].judge.sign),
            to_threshold=to_threshold,
            total_seconds=_mean_of(seed.total_seconds for seed in own),
            total_bytes=_mean_of(seed.total_bytes for seed in own),
            total_clock=_mean_of(seed.total_clock for seed in own),
            costs=_costs(groups[label]),
            num_diverged=sum(seed.diverged for seed in own),
            seeds=own,
        )
        samplers.append(entry)
    return Summary(
        metric=runs[0].metric,
        judges=[*runs[0].judges],
        threshold=threshold,
        baseline=baseline,
        samplers=samplers,
        settings=dict(settings or {}),
        environment=dict(environment or {}),
    )


def write_summary(summary: Summary, path: Path | str) -> None:
    """Write ``summary`` as JSON; the file is replaced in one step, so a reader never sees half
    of it.
    """
    # As before there were other metrics: what has none is written with the same bytes.
    without = set[str]()
    if not summary.judges:
        without.add("judges")
    write_atomically(Path(path), summary.model_dump_json(indent=2, exclude=without) + "\n")


def read_summary(path: Path | str) -> Summary:
    """Read what ``write_summary`` wrote; a file of another schema version is an error."""
    where = f"{path} is not a summary of this version"
    return checked(
        Summary,
        read_json(Path(path)),
        where,
        "write it again with this version",
    )


def ranked(summary: Summary) -> list[SamplerSummary]:
    """The samplers, the best first: by the gap closed where there is one, then by the metric; no
    number is last.
    """

    def key(entry: SamplerSummary) -> tuple[float, float]:
        gap = value = -np.inf
        if entry.gap_closed is not None:
            gap = entry.gap_closed.value
        mean = value_of(entry, summary).mean
        if mean is not None:
            value = summary.judge.sign * mean
        return gap, value

    return sorted(summary.samplers, key=key, reverse=True)


def references(summary: Summary) -> set[str | None]:
    """The samplers between which a gap is measured: full participation and uniform sampling."""
    return {find_label(name, [*summary.by_label]) for name in ("full", "uniform")}


def _require_comparable(runs: Sequence[Run]) -> None:
    if not runs:
        raise DeltaflError("there is no run to compare; give at least one finished run")
    for (sampler, seed), number in Counter((run.sampler, run.seed) for run in runs).items():
        if number > 1:
            raise DeltaflError(f"two runs of sampler {sampler!r} have seed {seed}; leave one out")
    if len({(run.metric, *run.judges, len(run.draws_m)) for run in runs}) > 1:
        raise DeltaflError(
            "the runs have different metrics or numbers of clients; compare runs of one task"
        )


def _seed_summary(run: Run, threshold: float | None) -> SeedSummary:
    final = top5 = float(run.value_r[-1])
    # A run that ended early has no late rounds: its last value stands for them.
    if not (run.diverged or run.stopped):
        top5 = mean_of_best(run.value_r, run.round_r, run.judge.higher)
    area = None
    # A run that ended at the threshold has no rest of its curve.
    if not run.stopped:
        area = area_under(run, run.horizon)
    return SeedSummary(
        seed=run.seed,
        num_rounds=run.num_rounds,
        final=final,
        top5=top5,
        area=area,
        fairness=run.fairness,
        total_seconds=float(run.seconds_r[-1]),
        total_bytes=float(run.bytes_r[-1]),
        total_clock=_clock_at(run, -1),
        diverged=run.diverged is not None or not np.isfinite(run.loss_r[-1]),
        stopped=run.stopped,
        stopped_why=run.stopped_why,
        refused=run.refused,
        refused_why=run.refused_why,
        diverged_in=run.diverged,
        reach=_reach(run, threshold),
    )


def _reach(run: Run, threshold: float | None) -> Reach | None:
    if threshold is None or (at := reach(run, threshold)) is None:
        return None
    return Reach(
        round=rounds_until(run, at),
        seconds=float(run.seconds_r[at]),
        clock=_clock_at(run, at),
        bytes=float(run.bytes_r[at]),
    )


def _clock_at(run: Run, place: int) -> float | None:
    if run.clock_r is None:
        return None
    return float(run.clock_r[place])


def _mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that there are; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return float(np.mean(known))


def _mean_sd(values: Iterable[float | None]) -> MeanSd:
    """Of a number that was not finite, which is null in a summary, there is no mean."""
    mean, sd = mean_and_sd(np.array([*values], np.float64))
    return MeanSd(mean=mean, sd=sd)


def _costs(runs: Sequence[Run]) -> Costs | None:
    rows = []
    for run in runs:
        client_r = run.client_seconds_r
        up_r = run.bytes_up_r
        # Of a version that did not record them; a mean over the other seeds would mislead.
        if client_r is None or up_r is None or run.server_bytes is None:
            return None
        # NaN where it is not known.
        cost = np.nan if run.cost_r is None else run.cost_r[-1]
        rows.append(
            (client_r[-1], run.seconds_r[-1], up_r[-1], run.bytes_r[-1], run.server_bytes, cost)
        )
    client, total, up, both, state, cost = np.mean(rows, axis=0).tolist()
    return Costs(
        client_seconds=client,
        server_seconds=total - client,
        bytes_down=both - up,
        bytes_up=up,
        asked=None if np.isnan(cost) else cost,
        server_bytes=state,
    )


def _fairness(
    runs: Sequence[SeedSummary],
    base: Sequence[SeedSummary],
    sign: float,
) -> SamplerFairness | None:
    found = [run.fairness for run in runs if run.fairness is not None]
    # A mean over some of the seeds would be compared with means over all.
    if len(found) < len(runs):
        return None
    return SamplerFairness(
        mean=_mean_sd(own.mean for own in found),
        worst_tenth=_mean_sd(own.worst_tenth for own in found),
        sd=_mean_sd(own.sd for own in found),
        gain=gain(runs, base, lambda run: run.worst_tenth, sign),
    )


def _to_threshold(
    runs: Sequence[SeedSummary],
    base: Sequence[SeedSummary],
) -> ToThreshold:
    reached = [run.reach for run in runs if run.reach is not None]
    rounds = None
    if reached:
        rounds = _mean_sd(reach.round for reach in reached)
    return ToThreshold(
        num_reached=len(reached),
        num_never=len(runs) - len(reached),
        rounds=rounds,
        seconds=_mean_of(reach.seconds for reach in reached),
        clock=_mean_of(reach.clock for reach in reached),
        bytes=_mean_of(reach.bytes for reach in reached),
        speedup=speedup(runs, base),
    )


def pairs(
    runs: Sequence[SeedSummary],
    base: Sequence[SeedSummary],
) -> list[tuple[SeedSummary, SeedSummary]]:
    """The runs of two samplers with the same seed."""
    of_seed = {run.seed: run for run in base}
    return [(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]


def gain(
    runs: Sequence[SeedSummary],
    base: Sequence[SeedSummary],
    number: Callable[[SeedSummary], float | None],
    sign: float,
) -> Gain | None:
    """How much better than ``base`` a number is, -1 the ``sign`` where lower is better, in the mean
    over the seeds with which both have it; None without a pair.
    """
    both = [(number(one), number(two)) for one, two in pairs(runs, base)]
    known = [sign * (one - two) for one, two in both if one is not None and two is not None]
    if not known:
        return None
    value, low, high = mean_interval(np.array(known))
    return Gain(value=value, low=low, high=high, num_pairs=len(known))


def speedup(
    runs: Sequence[SeedSummary],
    base: Sequence[SeedSummary],
) -> SpeedUp | None:
    """How many times fewer rounds than ``base``, over the seeds with which both reached it; None
    without a pair.
    """
    both = [(one.reach, two.reach) for one, two in pairs(runs, base)]
    rounds = [(two.round, one.round) for one, two in both if one and two]
    if not rounds:
        return None
    # Of means: a mean of ratios would be ruled by the seeds with which the sampler is fastest.
    ratio, low, high = ratio_of_means(*np.array(rounds, np.float64).T)
    return SpeedUp(
        ratio=ratio,
        low=low,
        high=high,
        num_pairs=len(rounds),
        num_left_out=len(both) - len(rounds),
        num_lost=sum(one is None and two is not None for one, two in both),
        num_won=sum(one is not None and two is None for one, two in both),
    )


def _gap_closed(label: str, groups: Mapping[str, Sequence[Run]]) -> GapClosed | None:
    """Over the seeds that all three ran, and the rounds that all were to play."""
    uniform = find_label("uniform", list(groups))
    full = find_label("full", list(groups))
    if uniform is None or full is None:
        return None
    runs = [{run.seed: run for run in groups[name]} for name in (uniform, label, full)]
    seeds = sorted(set.intersection(*map(set, runs)))
    # Without its last rounds a stopped run has no area.
    if not seeds or any(of_seed[seed].stopped for of_seed in runs for seed in seeds):
        return None
    # Areas over different numbers of rounds cannot be subtracted.
    horizon = min(run.horizon for of_seed in runs for run in of_seed.values())
    area_ks = np.array([[area_under(of_seed[seed], horizon) for seed in seeds] for of_seed in runs])
    # A cost is low where the method is good.
    found = gap_closed(*(-groups[label][0].judge.sign * area_ks))
    if found is None:
        return None
    return GapClosed(
        value=found.mean,
        low=found.low,
        high=found.high,
        num_seeds=len(seeds),
    )
