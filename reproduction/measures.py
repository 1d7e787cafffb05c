"""What methods are compared by: one number for each run, and paired comparisons of two methods
over seeds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from deltafl.analysis import Run, mean_and_sd
from deltafl.analysis.methods import rounds_until
from deltafl.analysis.statistics import (
    WINDOW,
    Interval,
    area_under,
    first_reach,
    is_late,
    mean_interval,
    mean_of_best,
    ratio_of_means,
    side_of,
)
from deltafl.errors import DeltaflError
from deltafl.types import FloatArray

Status = Literal["shown", "contradicted", "open", "no interval"]
#: Fewer seeds get no interval: with two, the quantile of Student's t is 12.7, and ± sd says all
#: that there is to say.
LEAST_SEEDS = 3


class Measure(NamedTuple):
    """One number of a run.

    Attributes:
        form: Methods are compared by the ratio of means or by the mean difference.
        value: The number; not finite where there is none: the threshold was never reached, the run
            diverged.
        scale: Factor of a difference when it is shown: 100 for shares.
        unit: What stands after a difference, or before a ratio.
        failed: What a missing number means, as in "never reached 70 %".
        words: What a method with the better number is called, and one with the worse.
        cut: Whether the number of a run is only a bound, larger had the run gone on. None for
            never.
        small: A difference, or a ratio's distance from 1, that decides nothing for a user.
    """

    name: str
    form: Literal["ratio", "difference"]
    higher: bool
    value: Callable[[Run], float]
    scale: float = 1.0
    unit: str = ""
    failed: str = "has no finite value"
    words: tuple[str, str] = ("better", "worse")
    cut: Callable[[Run], bool] | None = None
    small: float = 0.1

    @property
    def even(self) -> float:
        """The estimate of two methods that are alike."""
        return {"ratio": 1.0, "difference": 0.0}[self.form]

    def numbers(self, runs: Mapping[int, Run]) -> FloatArray:
        """The numbers of the seeds that have one, (s,)."""
        numbers = (self.value(run) for run in runs.values())
        return np.array([number for number in numbers if math.isfinite(number)])

    def over_seeds(self, runs: Mapping[int, Run]) -> tuple[float | None, float | None, int]:
        """Mean and sd of the seeds with a number, scaled for people (None without one), and how
        many have none.
        """
        number_s = self.numbers(runs)
        return *mean_sd(self.scale * number_s), len(runs) - len(number_s)


def mean_sd(number_s: FloatArray) -> tuple[float | None, float | None]:
    """Mean and sd, each None where it does not exist."""
    mean, sd = mean_and_sd(number_s)
    return _known(mean), _known(sd)


def _known(number: float) -> float | None:
    if math.isfinite(number):
        return number
    return None


def accuracy(best: int = 5) -> Measure:
    """The mean of the best accuracies within the last 4 % of the rounds (5: acc_top5); the last
    one if it diverged.
    """

    def value(run: Run) -> float:
        # The best of the rounds before would hide that it diverged.
        if run.diverged is not None:
            return float(run.accuracy_r[-1])
        return mean_of_best(run.accuracy_r, run.round_r, True, best)

    return Measure("accuracy", "difference", True, value, 100.0, " points", small=0.01)


def area(horizon: int) -> Measure:
    """The mean accuracy over the first ``horizon`` rounds, the area under the curve; a missing
    accuracy counts as 0.
    """
    return accuracy()._replace(name="mean accuracy", value=lambda run: area_under(run, horizon))


def of_clients(name: Literal["mean", "worst_tenth"]) -> Measure:
    """A number of the clients' accuracies at the end; none in a record from before they were
    measured.
    """

    def value(run: Run) -> float:
        if run.fairness is None:
            return math.nan
        return {"mean": run.fairness.mean, "worst_tenth": run.fairness.worst_tenth}[name]

    title = f"{name.replace('_', ' ')} of the clients"
    return Measure(title, "difference", True, value, 100.0, " points")


def best_within(horizon: int, best: int) -> Measure:
    """The mean of the best accuracies within the first ``horizon`` rounds."""

    def value(run: Run) -> float:
        if run.diverged is not None and run.diverged <= horizon:
            return float(run.accuracy_r[-1])
        early_r = np.sort(run.accuracy_r[run.round_r <= horizon])
        return float(np.mean(early_r[-best:]))

    return accuracy()._replace(name=f"best {best} of {horizon} rounds", value=value)


def moving_average(value_r: FloatArray) -> FloatArray:
    """Mean of each evaluation and the 4 before it, (r,); NaN for the first 4, and where one of
    the five is NaN.
    """
    before_r = np.full(WINDOW - 1, np.nan)
    padded_r = np.append(before_r, value_r)
    window_rk = np.lib.stride_tricks.sliding_window_view(padded_r, WINDOW)
    average_r: FloatArray = window_rk.mean(axis=1)
    return average_r


def reach(run: Run, threshold: float, smoothed: bool = False) -> int | None:
    """Index of the first evaluation of a run that reaches the threshold, by itself or by the
    5-evaluation mean.
    """
    value_r = moving_average(run.value_r) if smoothed else run.value_r
    return first_reach(value_r, threshold, run.judge.higher)


def rounds_to_threshold(run: Run, threshold: float, smoothed: bool = False) -> float | None:
    """Rounds to the threshold, that of a census included; None for never, and for a run that
    diverged at any time.
    """
    if run.diverged is not None:
        return None
    at = reach(run, threshold, smoothed)
    return None if at is None else float(rounds_until(run, at))


def rounds_to(threshold: float, metric: str, smoothed: bool = False) -> Measure:
    """The first evaluated round that reaches the threshold, by itself or by the mean of five
    evaluations.
    """

    def value(run: Run) -> float:
        at = reach(run, threshold, smoothed)
        if at is None:
            return math.nan
        return float(rounds_until(run, at))

    goal = {"accuracy": f"{100 * threshold:g} %", "loss": f"loss {threshold:g}"}[metric]
    name = f"rounds to {goal}{' by mean of five' * smoothed}"
    return Measure(name, "ratio", False, value, unit="speed-up ", failed=f"never reached {goal}")


def late_loss(y: str) -> Measure:
    """Mean ``loss``, or mean ``log10-loss``, over the last 4 % of the rounds (at least five): one
    round alone is noisy.
    """

    def value(run: Run) -> float:
        if run.diverged is not None:
            return math.nan
        late_r = run.loss_r[is_late(run.round_r)]
        if y == "log10-loss":
            with np.errstate(divide="ignore", invalid="ignore"):
                late_r = np.log10(late_r)
        return float(np.mean(late_r))

    return Measure(y.replace("-", " "), "difference", False, value, failed="diverged")


def probed(run: Run, name: str) -> FloatArray:
    """A column of ``Run.probes``; a ``DeltaflError`` if it was not measured."""
    if name not in run.probes:
        raise DeltaflError(
            f"run {run.sampler}, seed {run.seed} has no column {name!r}; it was run without it"
        )
    return run.probes[name]


def late_probe(title: str, column: str) -> Measure:
    """Mean of a probe column over the second half of the rounds, geometric where all numbers are
    above 0.
    """

    def value(run: Run) -> float:
        return centre(second_half(run, column))

    return Measure(title, "ratio", True, value, unit="larger ", words=("larger", "smaller"))


def second_half(run: Run, column: str) -> FloatArray:
    """The numbers of a probe column in the second half of the run's rounds, without holes."""
    value_r = probed(run, column)
    # Probes have their own rounds: they need not be measured in every round.
    round_r = run.probes.get("round", np.arange(len(value_r)))
    first, last = round_r[[0, -1]]
    late_r: FloatArray = value_r[round_r >= (first + last) / 2]
    return late_r[np.isfinite(late_r)]


def centre(value_r: FloatArray) -> float:
    """The geometric mean of positive numbers, the arithmetic mean of others; NaN of no number."""
    if len(value_r) == 0:
        return math.nan
    if (value_r > 0).all():
        return float(np.exp(np.mean(np.log(value_r))))
    return float(np.mean(value_r))


class Statement(NamedTuple):
    """The statement that the first method is better than the second, and what paired seeds show.

    Attributes:
        where: Title of the part.
        estimate: Ratio (above 1) or difference (above 0) in favour of the first; None without a
            pair.
        low, high: Its 95 % interval; None with fewer than three pairs.
        pairs: Seeds with a number of both.
        only_first, only_second: Seeds that both ran where only one of them has a number.
        status: ``shown``: the interval excludes no difference in the stated direction;
            ``contradicted``: in the other; ``open``: it contains no difference; ``no interval``:
            fewer than three pairs.
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

    @property
    def left_out(self) -> int:
        """Seeds that both ran but only one has a number of."""
        return self.only_first + self.only_second

    @property
    def is_small(self) -> bool:
        """Whether the whole interval is of differences that are small."""
        if self.low is None or self.high is None:
            return False
        even = self.measure.even
        return max(even - self.low, self.high - even) <= self.measure.small


def compare(
    where: str,
    measure: Measure,
    first: tuple[str, Mapping[int, Run]],
    second: tuple[str, Mapping[int, Run]],
) -> Statement:
    """Compare two methods, each a name with its runs by seed, over the seeds that both ran.

    A method without a number (threshold never reached, diverged) in a seed where the other has one
    is not called better, whatever the interval of the remaining pairs is: those pairs flatter it.
    All pairs alike make an interval without width, which proves nothing: open.
    """
    shared = sorted(set(first[1]) & set(second[1]))
    one_s, two_s = (
        np.array([measure.value(runs[x]) for x in shared]) for _, runs in (first, second)
    )
    has_one_s = np.isfinite(one_s)
    has_two_s = np.isfinite(two_s)
    has_both_s = has_one_s & has_two_s
    only_first = int(np.sum(has_one_s & ~has_two_s))
    only_second = int(np.sum(has_two_s & ~has_one_s))
    found: tuple[float | None, ...] = (None, None, None)
    status: Status = "no interval"
    if has_both_s.any():
        found = _interval(measure, one_s[has_both_s], two_s[has_both_s])
    estimate, low, high = found
    if low is not None and high is not None:
        status = ("open", "shown", "contradicted")[side_of(low, high, measure.even)]
        if (status == "shown" and only_second) or (status == "contradicted" and only_first):
            status = "open"
    return Statement(
        where,
        measure,
        first[0],
        second[0],
        estimate,
        low,
        high,
        int(np.sum(has_both_s)),
        only_first,
        only_second,
        status,
    )


def _interval(measure: Measure, better_s: FloatArray, worse_s: FloatArray) -> Interval:
    if not measure.higher:
        better_s, worse_s = worse_s, better_s
    found = mean_interval(better_s - worse_s)
    if measure.form == "ratio":
        found = ratio_of_means(better_s, worse_s)
    if len(better_s) < LEAST_SEEDS:
        return Interval(found.mean, None, None)
    return found
