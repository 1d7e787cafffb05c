"""What is compared: one number for each run, and how two methods' numbers are set against each other over seeds."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from deltafl.analysis.statistics import (
    first_reach,
    is_late,
    mean_interval,
    mean_of_best,
    moving_average,
    ratio_of_means,
)
from deltafl.simulation.record import RunRecord
from deltafl.types import FloatArray

Status = Literal["shown", "contradicted", "open", "no interval"]


class Measure(NamedTuple):
    """One number of a run.

    Attributes:
        name: For people, as in "rounds to 70 %".
        form: ``"ratio"``: methods are compared by the ratio of means; ``"difference"``: by the mean difference.
        higher: Whether higher is better.
        value: The number; None where there is none: the threshold was never reached, the run diverged.
        scale: What a difference is multiplied with for people: 100 for shares.
        unit: What stands behind a difference, or before a ratio.
        failed: What a missing number means, as in "never reached 70 %".
        words: What a method is that has the better number, and the worse.
        cut: Whether the number of a run is but a bound: it would be larger if the run had gone on. None for never.
    """

    name: str
    form: Literal["ratio", "difference"]
    higher: bool
    value: Callable[[RunRecord], float | None]
    scale: float = 1.0
    unit: str = ""
    failed: str = "has no finite value"
    words: tuple[str, str] = ("better", "worse")
    cut: Callable[[RunRecord], bool] | None = None


def accuracy(best: int) -> Measure:
    """The mean of the best accuracies within the last 4 % of the rounds (5: acc_top5); the last one if it diverged."""

    def value(record: RunRecord) -> float | None:
        run = record.run()
        if run.diverged is not None:  # the best of the rounds before would hide it
            return _finite(float(run.accuracy_r[-1]))
        return _finite(mean_of_best(run.accuracy_r, run.round_r, True, best))

    return Measure("accuracy", "difference", True, value, 100.0, " points")


def best_within(horizon: int, best: int) -> Measure:
    """The mean of the best accuracies within the first rounds."""

    def value(record: RunRecord) -> float | None:
        run = record.run()
        if run.diverged is not None and run.diverged <= horizon:
            return _finite(float(run.accuracy_r[-1]))
        early_r = np.sort(run.accuracy_r[run.round_r <= horizon])
        return _finite(float(np.mean(early_r[-best:]))) if len(early_r) else None

    return Measure(f"best {best} of {horizon} rounds", "difference", True, value, 100.0, " points")


def rounds_to(threshold: float, metric: str, smoothed: bool = False) -> Measure:
    """The first evaluated round that reaches the threshold, by itself or by the mean of five evaluations."""

    def value(record: RunRecord) -> float | None:
        at = reach(record, threshold, smoothed)
        return None if at is None else float(record.round[at])

    goal = f"{100 * threshold:g} %" if metric == "accuracy" else f"loss {threshold:g}"
    return Measure(f"rounds to {goal}", "ratio", False, value, unit="speed-up ", failed=f"never reached {goal}")


def reach(record: RunRecord, threshold: float, smoothed: bool = False) -> int | None:
    """The index of the evaluation that reaches the threshold first; None if there is none."""
    value_r = record.run().value_r
    higher = record.metric == "accuracy"
    return first_reach(moving_average(value_r) if smoothed else value_r, threshold, higher)


def late_loss(log10: bool) -> Measure:
    """Mean loss, or mean log10 loss, over the last 4 % of the rounds (at least five): one round alone is noisy."""

    def value(record: RunRecord) -> float | None:
        run = record.run()
        if run.diverged is not None:
            return None
        late_r = run.loss_r[is_late(run.round_r)]
        if log10:
            late_r = np.log10(late_r) if (late_r > 0).all() else np.array([math.nan])
        return _finite(float(np.mean(late_r)))

    return Measure("log10 loss" if log10 else "loss", "difference", False, value, failed="diverged")


def late_probe(title: str, column: str, larger: bool) -> Measure:
    """Mean of a probe column over the second half of the rounds, geometric where all numbers are above 0."""

    def value(record: RunRecord) -> float | None:
        return centre(second_half(record, column))

    words = ("larger", "smaller") if larger else ("smaller", "larger")
    return Measure(title, "ratio", larger, value, unit=f"{words[0]} ", words=words)


def second_half(record: RunRecord, column: str) -> FloatArray:
    """The numbers of a probe column in the second half of the run's rounds, without holes."""
    value_r = record.probe(column)
    # The records' probes have their own rounds, for they need not be measured in every round.
    round_r = record.probe("round") if "round" in record.probes else np.arange(len(value_r))
    late_r = value_r[round_r >= (round_r[0] + round_r[-1]) / 2] if len(value_r) else value_r
    return late_r[np.isfinite(late_r)]


def centre(value_r: FloatArray) -> float | None:
    """The geometric mean of positive numbers, the arithmetic mean of others; None of no number."""
    if len(value_r) == 0:
        return None
    return _finite(float(np.exp(np.mean(np.log(value_r))) if (value_r > 0).all() else np.mean(value_r)))


class Statement(NamedTuple):
    """That the first is better than the second, and what the paired seeds say to it.

    Attributes:
        where: Title of the part.
        measure: What is compared.
        first, second: The labels' names; the first is said to be better.
        estimate: Ratio (above 1) or difference (above 0) in favour of the first; None without a pair.
        low, high: Its 95 % interval; None with fewer than two pairs.
        pairs: Seeds with a number of both.
        only_first, only_second: Seeds that both ran where only one of them has a number.
        status: ``shown``: the interval excludes no difference in the stated direction; ``contradicted``: in the other;
            ``open``: it contains no difference; ``no interval``: fewer than two pairs.
    """

    where: str
    measure: Measure
    first: str
    second: str
    estimate: float | None
    low: float | None
    high: float | None
    pairs: int
    only_first: int
    only_second: int
    status: Status


def compare(
    where: str,
    measure: Measure,
    first: tuple[str, dict[int, RunRecord]],
    second: tuple[str, dict[int, RunRecord]],
) -> Statement:
    """Set two methods against each other over the seeds that both ran.

    A method without a number (threshold never reached, diverged) in a seed where the other has one is not called
    better, whatever the interval of the remaining pairs says: those pairs flatter it. All pairs alike make an interval
    without width, which proves nothing: open.
    """
    shared = sorted(set(first[1]) & set(second[1]))
    both = [(measure.value(first[1][seed]), measure.value(second[1][seed])) for seed in shared]
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    only_first = sum(a is not None and b is None for a, b in both)
    only_second = sum(a is None and b is not None for a, b in both)
    estimate = low = high = None
    status: Status = "no interval"
    if pairs:
        estimate, low, high = _interval(measure, np.array(pairs, dtype=np.float64))
    if low is not None and high is not None:
        status = _status(low, high, 1.0 if measure.form == "ratio" else 0.0)
        if (status == "shown" and only_second) or (status == "contradicted" and only_first):
            status = "open"
    return Statement(
        where, measure, first[0], second[0], estimate, low, high, len(pairs), only_first, only_second, status
    )


def _interval(measure: Measure, pair_s2: FloatArray) -> tuple[float, float | None, float | None]:
    better_s, worse_s = (pair_s2[:, 0], pair_s2[:, 1]) if measure.higher else (pair_s2[:, 1], pair_s2[:, 0])
    if measure.form == "ratio":
        ratio = ratio_of_means(better_s, worse_s)
        return ratio.mean, ratio.low, ratio.high
    difference = mean_interval(better_s - worse_s)
    return difference.mean, difference.low, difference.high


def _status(low: float, high: float, no_difference: float) -> Status:
    # Pairs that agree up to rounding have an interval without width, which proves nothing.
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12) or low <= no_difference <= high:
        return "open"
    return "shown" if low > no_difference else "contradicted"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
