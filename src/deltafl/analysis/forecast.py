"""How many rounds, and what cost, a method with n clients needs to a goal: from short paired runs.

Beside noise, sampled rounds go the way of full participation, only slower. So the rounds of a
method with n clients to any accuracy are taken to be those of ``full`` times one factor, its
*stretch*: the geometric mean, over seeds and over the accuracies that its short run has reached, of
its own rounds over those of ``full`` with the same seed. A run that has reached the goal says it
itself. A metric without a natural zero, such as a log loss, counts from its first value.

Over n the rounds follow R(n) = a + b v(n)^p, with v(n) the relative error of the round's estimate,
known for all n without training (``audit.error_by_size``), a, b >= 0 and p in [1/2, 3/2]: with
v = 0 a round is one of full participation. The longer a run is beside its forecast, the more it
counts in the fit. Intervals are 95 %, by the jackknife over paired seeds.

Letters: ``r`` evaluations of one run, ``s`` seeds, ``j`` cohort sizes that were tried, ``k`` what
``used`` has columns for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from ..types import FloatArray, IntArray, Judge
from .methods import only_asks_first
from .prices import Prices, used
from .runs import Run
from .statistics import Interval, mean_interval, t_quantile

#: The share of its best value so far at which a run is compared with ``full``, and that value.
_LEVELS = (0.9, 1.0)
_POWERS = np.linspace(0.5, 1.5, 6)
#: A forecast of more rounds than this times those played is none.
FARTHEST = 8.0
#: How the columns of an interval's numbers end.
_ENDS = ("", "_low", "_high")


def goodness(judge: Judge, value: Any) -> Any:
    """A value of the metric as one of which more is better, and back; of a share, as a share."""
    if judge.share and not judge.higher:
        return 1 - value
    return judge.sign * value


class Course(NamedTuple):
    """What a run has reached and used, round by round from the first one."""

    best_r: FloatArray  #: the best ``goodness`` of the metric so far
    used_rk: FloatArray  #: up to there
    origin: float = 0.0  #: the ``goodness`` from which progress counts
    is_over: bool = False  #: whether the run has ended by itself, as one does that diverges

    @classmethod
    def of(cls, run: Run, rounds: int) -> Self:
        """The first ``rounds`` of a run."""
        value_r = goodness(run.judge, run.value_r[:rounds])
        # A value that is missing is no progress.
        known_r = np.where(np.isfinite(value_r), value_r, -np.inf)
        best_r = np.maximum.accumulate(known_r)
        origin = 0.0
        # Nobody knows the least log loss or the largest error: what comes is measured by what came.
        if not run.judge.share:
            # The first rounds may have no value, as the correlation of a constant has none.
            origin = float(next(filter(np.isfinite, best_r), 0.0))
        is_over = run.diverged is not None and run.diverged <= rounds
        return cls(best_r, used(run)[:rounds], origin, is_over or len(best_r) < rounds)

    def level(self, share: float) -> float:
        """The value at so much of the progress."""
        # At 1 the last value itself: a sum of differences may be above it by a last bit.
        return (1 - share) * self.origin + share * float(self.best_r[-1])

    def reach(self, level: float) -> float:
        """The first round with this value; infinity if there is none."""
        at = int(np.searchsorted(self.best_r, level))
        return math.inf if at == len(self.best_r) else at + 1.0

    def time_to(self, level: float) -> float:
        """The same with fractions of rounds: values rise evenly between two rounds."""
        at = int(np.searchsorted(self.best_r, level))
        if at == len(self.best_r):
            return math.inf
        # Nothing is known of before.
        if at == 0 or math.isinf(self.best_r[at - 1]):
            return at + 1.0
        low, high = self.best_r[at - 1 : at + 1]
        return at + float((level - low) / (high - low))


class Trial(NamedTuple):
    """A method with n clients that was tried, seed by seed."""

    method: str
    n: int
    courses: Sequence[Course]

    def rounds_to(
        self,
        goal: float,
        full: Sequence[Course],
        farthest: float = FARTHEST,
    ) -> FloatArray:
        """Rounds to the goal of each seed, float64 (s,); infinite where no forecast is possible."""
        stretch = self._stretch(full)
        rounds_s = np.empty(len(self.courses))
        for seed, (course, reference) in enumerate(zip(self.courses, full, strict=True)):
            played = len(course.best_r)
            rounds = course.reach(goal)
            if math.isinf(rounds) and not course.is_over:
                # At least one more: it was not there in the last one.
                rounds = max(stretch * reference.reach(goal), played + 1.0)
            # Farther than that, the pace of a short run says nothing.
            rounds_s[seed] = rounds if rounds <= farthest * played else math.inf
        return rounds_s

    def _stretch(self, full: Sequence[Course]) -> float:
        logs = []
        for course, reference in zip(self.courses, full, strict=True):
            for share in _LEVELS:
                level = course.level(share)
                # What ``full`` has after one round, or never, says nothing of its pace.
                if 1 < (time := reference.time_to(level)) < math.inf:
                    logs.append(math.log(course.time_to(level) / time))
        # Of logarithms: between twice and half as many rounds lies a factor of 1.
        return math.exp(float(np.mean(logs))) if logs else math.inf

    @property
    def played(self) -> int:
        """Rounds played by every seed."""
        return min(len(course.best_r) for course in self.courses)

    @property
    def longest(self) -> int:
        """Rounds played by the seed with the most: others may have ended."""
        return max(len(course.best_r) for course in self.courses)

    def diverged(self, goal: float) -> bool:
        """Whether a seed ended before the goal."""
        return any(course.is_over and math.isinf(course.reach(goal)) for course in self.courses)

    def cost(self, rounds: float, prices: Prices) -> float:
        """What so many rounds cost."""
        first_k, later_k = self.use()
        return float(prices.spent((first_k + later_k * max(rounds - 1, 0))[None])[0])

    def use(self) -> tuple[FloatArray, FloatArray]:
        """What the first round uses, and each later one, float64 (k,): means over seeds."""
        first_sk = np.array([course.used_rk[0] for course in self.courses])
        later = []
        for course in self.courses:
            # Of a single round the difference is 0, whatever divides it.
            num_later = max(len(course.best_r) - 1, 1)
            later.append((course.used_rk[-1] - course.used_rk[0]) / num_later)
        return first_sk.mean(axis=0), np.mean(later, axis=0)


class Forecast(NamedTuple):
    """What a method with n clients needs to the goal."""

    method: str
    n: int
    is_tried: bool  #: whether it was played with this n
    rounds: Interval
    trainings: Interval
    megabytes: Interval  #: up and down
    cost: Interval
    #: the mean of what its runs took, which the forecast smooths over n; None unless every seed got
    #: to the goal
    measured_rounds: float | None = None

    @classmethod
    def columns(cls) -> list[str]:
        """The names of ``cells``."""
        unknown = Interval(0.0)
        return [*cls("", 0, False, unknown, unknown, unknown, unknown).cells()]

    def cells(self) -> dict[str, Any]:
        """A cell for each number, by name: ``cost`` with ``cost_low`` and ``cost_high``, which are
        empty where there is no interval.
        """
        cells: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if not isinstance(value, Interval):
                cells[name] = f"{value:.6g}" if isinstance(value, float) else value
                continue
            for end, number in zip(_ENDS, value, strict=True):
                cells[f"{name}{end}"] = "" if number is None else f"{number:.6g}"
        return cells


class Curve:
    """Rounds, use and cost of one method over n, from its trials.

    Args:
        trials: With different n, the same seeds.
        full: Full participation with these seeds.
        goal: In units of ``Course.best_r``.
        error_of: v(n), the relative error of a round's estimate.
        prices: What is paid.
        farthest: See ``FARTHEST``.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        full: Sequence[Course],
        goal: float,
        error_of: Callable[[FloatArray], FloatArray],
        prices: Prices,
        farthest: float = FARTHEST,
    ) -> None:
        self.method = trials[0].method
        self.diverged = [trial.n for trial in trials if trial.diverged(goal)]
        rounds_js = np.array([trial.rounds_to(goal, full, farthest) for trial in trials])
        # Where some seed never gets there, no mean of the others stands for it.
        known_j = np.isfinite(rounds_js).all(axis=1)
        self.trials = [trial for trial, known in zip(trials, known_j, strict=True) if known]
        self._rounds_j: FloatArray = rounds_js[known_j].mean(axis=1)
        self._full = full
        self._goal = goal
        self._error_of = error_of
        self._prices = prices
        self._n_j = np.array([trial.n for trial in self.trials], np.float64)

    @cached_property
    def without(self) -> "list[Curve]":
        """The curves without each seed; none of one seed, or where without one no trial gets to the
        goal.
        """
        seeds = range(len(self._full))
        if len(seeds) < 2:
            return []
        curves = []
        for left_out in seeds:
            kept = [seed for seed in seeds if seed != left_out]
            trials = [
                trial._replace(courses=[trial.courses[seed] for seed in kept])
                for trial in self.trials
            ]
            full = [self._full[seed] for seed in kept]
            # Anew: unfinished runs are forecast by the pace of all seeds that there are.
            curve = Curve(trials, full, self._goal, self._error_of, self._prices, math.inf)
            if not curve.trials:
                return []
            curves.append(curve)
        return curves

    def rounds(self, size_n: IntArray) -> FloatArray:
        """R(n) fitted to the mean rounds of the trials."""
        rounds_j = self._rounds_j
        # One size shows no trend.
        if len(rounds_j) == 1:
            return np.full(len(size_n), rounds_j[0])
        error_j = self._error_of(self._n_j)
        played_j = np.array([trial.played for trial in self.trials])
        weight_j = np.minimum(played_j / rounds_j, 1.0)
        fits = [_nonnegative(error_j**power, rounds_j, weight_j) for power in _POWERS]
        # Of equal fits, as with two sizes, the first.
        best = int(np.argmin([loss for loss, *_ in fits]))
        _, a, b = fits[best]
        error_n = self._error_of(size_n.astype(np.float64))
        return np.asarray(a + b * error_n ** _POWERS[best])

    def use(self, size_n: IntArray, round_n: FloatArray) -> FloatArray:
        """What is used up to these rounds, float64 (n, k): linear in n between the trials."""
        order_j = np.argsort(self._n_j)
        # The first round is apart: a census before it counts in that one alone.
        use_jx = np.array([np.hstack(self.trials[j].use()) for j in order_j])
        columns = [np.interp(size_n, self._n_j[order_j], column_j) for column_j in use_jx.T]
        first_nk, later_nk = np.split(np.stack(columns, axis=1), 2, axis=1)
        return np.asarray(first_nk + later_nk * np.maximum(round_n - 1, 0)[:, None])

    def costs(self, size_n: IntArray) -> FloatArray:
        """The cost to the goal, float64 (n,)."""
        return self._prices.spent(self.use(size_n, self.rounds(size_n)))

    def best(self) -> Forecast | None:
        """The n of least cost, from the least to the largest that was tried; None if no trial gets
        to the goal.
        """
        if not self.trials:
            return None
        size_n = np.arange(int(self._n_j.min()), int(self._n_j.max()) + 1)
        return self.at(int(size_n[np.argmin(self.costs(size_n))]))

    def at(self, n: int) -> Forecast:
        """The forecast for n."""
        # The round of a census that moves no model comes before the first.
        lost = only_asks_first(self.method)
        size_1 = np.array([n])

        def after(curve: Curve, round_1: FloatArray) -> FloatArray:
            use_1k = curve.use(size_1, round_1)
            _, up, down, *_, trainings = use_1k[0]
            cost_1 = self._prices.spent(use_1k)
            return np.array([round_1[0] + lost, trainings, up + down, cost_1[0]])

        found, *without = [after(curve, curve.rounds(size_1)) for curve in (self, *self.without)]
        # No run ends before its first round, however far apart the seeds are.
        least_x = after(self, np.ones(1))
        rounds, trainings, megabytes, cost = map(
            _at_least,
            least_x.tolist(),
            jackknife(found, without),
        )
        measured = None
        for trial in self.trials:
            reached = [course.reach(self._goal) for course in trial.courses]
            if trial.n == n and np.isfinite(reached).all():
                measured = float(np.mean(reached)) + lost
        is_tried = n in self._n_j
        return Forecast(self.method, n, is_tried, rounds, trainings, megabytes, cost, measured)

    def accuracy(self, n: int, round_r: FloatArray) -> list[Interval]:
        """The best value so far after these rounds with n clients, from the nearest n tried; NaN
        where there is none yet.
        """
        # As a ratio: 10 is as near to 5 as to 20.
        nearest = int(np.argmin(np.abs(np.log(self._n_j / n))))
        # As many rounds of the trial as these are worth.
        factor = self._rounds_j[nearest] / float(self.rounds(np.array([n]))[0])
        value_sr = []
        for course in self.trials[nearest].courses:
            played_r = np.arange(1, len(course.best_r) + 1)
            best_r = np.where(np.isfinite(course.best_r), course.best_r, np.nan)
            value_sr.append(np.interp(round_r * factor, played_r, best_r))
        return [mean_interval(value_s) for value_s in np.transpose(value_sr)]


def cost_ratio(plain: Curve, n_plain: int, best: Curve, n: int) -> Interval:
    """How many times the cost of ``best`` with n clients ``plain`` takes, of paired seeds."""

    def ratio(of_plain: Curve, of_best: Curve) -> FloatArray:
        return of_plain.costs(np.array([n_plain])) / of_best.costs(np.array([n]))

    # Where one of them has no curves without a seed, there are no pairs.
    return jackknife(ratio(plain, best), [*map(ratio, plain.without, best.without)])[0]


def jackknife(found_x: FloatArray, without: Sequence[FloatArray]) -> list[Interval]:
    """Numbers > 0 made of all seeds, and ``without`` each of them, with intervals on the log scale,
    exp(log x +- t_{S-1} se), where se^2 = (S - 1) / S sum_s (log x without s - their mean)^2; none
    where one of them is 0 or not finite.
    """
    count = len(without)
    if count == 0:
        return [Interval(float(number)) for number in found_x]
    with np.errstate(divide="ignore", invalid="ignore"):
        # ``var`` divides by S already.
        se_x = np.sqrt((count - 1) * np.log(without).var(axis=0))
    factor_x = np.exp(t_quantile(count - 1) * se_x)
    found = []
    for number, factor in zip(found_x.tolist(), factor_x.tolist(), strict=True):
        if math.isfinite(factor):
            found.append(Interval(number, number / factor, number * factor))
        else:
            found.append(Interval(number))
    return found


def _at_least(least: float, interval: Interval) -> Interval:
    ends = [None if end is None else max(end, least) for end in (interval.low, interval.high)]
    return Interval(max(interval.mean, least), *ends)


def _nonnegative(
    x_j: FloatArray,
    y_j: FloatArray,
    weight_j: FloatArray,
) -> tuple[float, float, float]:
    """The least sum of weight ((a + b x) / y - 1)^2 over a, b >= 0, with a and b."""
    # Least squares weigh a row by the square of what multiplies it.
    want_j = np.sqrt(weight_j)
    row_j2 = np.stack([1 / y_j, x_j / y_j], axis=1) * want_j[:, None]
    tried = []
    # The least is inside, or at an edge, where one of them is 0.
    for columns in ([0, 1], [0], [1]):
        found = np.zeros(2)
        found[columns] = np.linalg.lstsq(row_j2[:, columns], want_j, rcond=None)[0]
        if found.min() >= 0:
            off_j = row_j2 @ found - want_j
            a, b = found.tolist()
            tried.append((float(np.sum(off_j**2)), a, b))
    return min(tried)


def between_sizes(error_by_n: Mapping[int, float]) -> Callable[[FloatArray], FloatArray]:
    """v(n) between the n for which it is known: n v(n) is linear in log n, as it varies little."""
    known_j = np.array(sorted(error_by_n), np.float64)
    scaled_j = np.array([n * error_by_n[int(n)] for n in known_j])
    return lambda size_n: np.interp(np.log(size_n), np.log(known_j), scaled_j) / size_n
