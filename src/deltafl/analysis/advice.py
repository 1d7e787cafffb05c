"""The answer of a plan: which method, how many clients, at what cost; as text and as tables."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from ..audit.error_by_size import error_by_size
from ..audit.methods import KnownUpdates
from ..errors import DeltaflError, counted
from ..estimators.two_bits import BLOCK, code_length, decode
from ..plan import make_plan
from ..round import init_round
from ..types import ACCURACY, Judge, Population
from .forecast import Curve, Forecast, cost_ratio, goodness
from .methods import only_asks_first
from .prices import Prices
from .statistics import Interval
from .text import csv_text, decimals_of, goal_text

_PLAIN = "uniform"


class ErrorRow(NamedTuple):
    """The relative error of a method's estimate with n clients."""

    method: str
    n: int
    mse: float  #: E norm(D - ubar)^2 / norm(ubar)^2
    exact: bool  #: by a formula, or by all cohorts; else from drawn cohorts

    @property
    def text(self) -> str:
        """The error with three digits, marked where cohorts were drawn."""
        # Where everybody is asked only rounding is left.
        return "0" if self.mse < 1e-12 else f"{self.mse:.3g}{'~' * (not self.exact)}"


class Advice(NamedTuple):
    """What a plan says; ``str()`` is what ``deltafl plan`` prints."""

    goal: float | None
    prices: Prices
    budget: float | None
    errors: Sequence[ErrorRow]
    #: the cheapest of each method that gets to the goal, the cheapest of all first
    forecasts: Sequence[Forecast] = ()
    #: of each n that was tried
    tried: Sequence[Forecast] = ()
    #: how many times the cost of the first ``uniform`` takes at its best, of paired seeds
    ratio: Interval | None = None
    #: what the metric's best value so far will be with the first, by rounds
    course: Sequence[tuple[int, Interval]] = ()
    #: methods that do not get to the goal
    failing: Sequence[str] = ()
    #: the metric of the goal
    judge: Judge = ACCURACY
    #: methods, each with the n that diverged before the goal
    diverged: Sequence[tuple[str, Sequence[int]]] = ()

    @classmethod
    def of(
        cls,
        goal: float,
        prices: Prices,
        budget: float | None,
        curves: Sequence[Curve],
        errors: Mapping[str, Sequence[ErrorRow]],
        judge: Judge,
    ) -> Self:
        """The answer from what is known of each method; curves are of ``goodness``."""
        best = {curve.method: found for curve in curves if (found := curve.best()) is not None}
        ranked = sorted(best.values(), key=lambda found: found.cost.mean)
        by_name = {curve.method: curve for curve in curves}
        rows = [row for rows in errors.values() for row in rows]
        failing = [name for name in by_name if name not in best]
        tried = [curve.at(trial.n) for curve in curves for trial in curve.trials]
        diverged = [(curve.method, curve.diverged) for curve in curves if curve.diverged]
        known = cls(goal, prices, budget, rows, failing=failing, judge=judge, diverged=diverged)
        if not ranked:
            return known
        first = ranked[0]
        curve = by_name[first.method]
        ratio = None
        if _PLAIN in best and first.method != _PLAIN:
            ratio = cost_ratio(by_name[_PLAIN], best[_PLAIN].n, curve, first.n)
        # The round of a census that moves no model comes before these.
        lost = only_asks_first(first.method)
        moves = first.rounds.mean - lost
        # A course at four moments is enough to see where gains end.
        round_r = sorted({max(1, round(part * moves / 4)) for part in range(1, 5)})
        values = curve.accuracy(first.n, np.array(round_r))
        course = [
            (at + lost, _of_metric(judge, value))
            for at, value in zip(round_r, values, strict=True)
            # A metric may have no value before.
            if np.isfinite(value.mean)
        ]
        return known._replace(forecasts=ranked, tried=tried, ratio=ratio, course=course)

    @classmethod
    def of_census(cls, population: Population, methods: Sequence[str]) -> Self:
        """The errors of estimates alone, from the first updates in a census's answers.

        Args:
            population: Of ``plan.with_census(answers)``, whose answers hold updates.
            methods: Labels without memory of these updates, which would seem to know everything.

        Raises:
            DeltaflError: If no answer has an update, or a method remembers them.
        """
        if population.code_mc is None:
            raise DeltaflError(
                "these clients have not sent their first updates: give the population of "
                "make_plan('census', sizes, n=10).with_census(answers)"
            )
        # Codes are padded to whole blocks; what they hold beyond the model is 0.
        blocks = population.code_mc.shape[1] // code_length(1)
        update_md = decode(np.asarray(population.code_mc), blocks * BLOCK)
        known = KnownUpdates(update_md, population.weight_m)
        m = population.num_clients
        sizes = sorted({round(n) for n in np.geomspace(1, m, 8)})
        rows = []
        for method in methods:
            plan = make_plan(method, population, 1)
            if plan.rule.control.uses_first_updates:
                raise DeltaflError(
                    f"{method} remembers the answers, beside which the same updates would have no "
                    "error: plan with a task, or write census@@horvitz-thompson"
                )
            state = init_round(plan, np.zeros(update_md.shape[1]))
            found = error_by_size(plan, state, known, known.update_md, sizes)
            rows += [ErrorRow(method, *row) for row in found]
        return cls(None, Prices.read(None), None, rows)

    def __repr__(self) -> str:
        parts = [self._answer(), self._costs(), self._ended(), self._course(), self._errors()]
        return "\n\n".join(part for part in parts if part)

    def _answer(self) -> str:
        if self.goal is None:
            return (
                "What clients answered to a census tells the variance of an estimate, and not how\n"
                "accuracy rises: for rounds and cost, plan with a task (--task)."
            )
        goal = goal_text(self.judge, self.goal)
        if not self.forecasts:
            return f"No method under consideration comes to {goal} in the pilot; try more --rounds."
        first = self.forecasts[0]
        lines = [
            f"For {goal} at least cost take {first.method}, n = {first.n}:",
            f"about {_number(first.rounds)} rounds, {_number(first.trainings)} trainings, "
            f"{_number(first.megabytes)} MB, cost {_number(first.cost)}.",
        ]
        plain = next((found for found in self.forecasts if found.method == _PLAIN), None)
        if plain is None:
            lines.append(f"{_PLAIN} does not come to {goal} in the pilot.")
        elif self.ratio is not None:
            lines += [
                f"{_PLAIN}, at its best with n = {plain.n}, would need about "
                f"{counted(f'{plain.rounds.mean:.0f}', 'round')}, "
                f"{counted(f'{plain.trainings.mean:.0f}', 'training')}",
                f"and cost {_number(plain.cost)}, {_text(self.ratio, '.2f')} times as much.",
            ]
        # Whoever names no prices is told to ask one client a round, for as long as it takes.
        if first.n <= 2 and not (self.prices.round or self.prices.second):
            lines += [
                "Rounds are free at these prices, which favours few clients and many rounds: give",
                "them a price, as --cost training=1,round=5 does.",
            ]
        if self.budget is not None:
            lines.append(self._beside_budget(self.budget, first.cost))
        return "\n".join(lines)

    def _beside_budget(self, budget: float, cost: Interval) -> str:
        if cost.mean > budget:
            return f"That is more than the budget of {budget:g}: raise it, or lower the goal."
        if cost.high is not None and cost.high > budget:
            return f"That is within the budget of {budget:g}, but its interval is not."
        return f"That is within the budget of {budget:g}."

    def _costs(self) -> str:
        if not self.forecasts:
            return ""
        rows = [
            [
                found.method,
                str(found.n),
                _number(found.rounds),
                f"{found.trainings.mean:.0f}",
                _number(found.cost),
            ]
            for found in self.forecasts
        ]
        headings = ["method at its best n", "n", "rounds [95 %]", "trainings", "cost [95 %]"]
        text = _table(headings, rows)
        if self.failing:
            text += f"\nNot there in the pilot: {', '.join(self.failing)}."
        return text

    def _ended(self) -> str:
        if not self.diverged:
            return ""
        named = [
            f"{method} with n = {', '.join(map(str, sizes))}" for method, sizes in self.diverged
        ]
        goal = goal_text(self.judge, self.goal)
        return f"Diverged before {goal}: {'; '.join(named)}. Lower --local-lr."

    def _course(self) -> str:
        if not self.course:
            return ""
        first = self.forecasts[0]
        unit = "in %"
        values = [f"round {at}: {_share(value)}" for at, value in self.course]
        if not self.judge.share:
            unit = self.judge.heading
            values = [f"round {at}: {_text(value, '.4g')}" for at, value in self.course]
        return f"Best value so far with {first.method}, n = {first.n}, {unit}:\n  " + (
            "\n  ".join(values)
        )

    def _errors(self) -> str:
        sizes = sorted({row.n for row in self.errors})
        # A screen has room for so many; all are in the file.
        shown = [sizes[round(at)] for at in np.linspace(0, len(sizes) - 1, min(5, len(sizes)))]
        cells = {(row.method, row.n): row.text for row in self.errors}
        methods = dict.fromkeys(row.method for row in self.errors)
        rows = [[method, *(cells[method, n] for n in shown)] for method in methods]
        text = "Relative error of a round's estimate with n clients, E |D - ubar|^2 / |ubar|^2:\n"
        text += _table(["n =", *map(str, shown)], rows)
        if any(not row.exact for row in self.errors):
            text += "\n~ from drawn cohorts, without training; the others by an exact formula"
        return text

    def errors_csv(self) -> str:
        """Every relative error, as CSV."""
        return csv_text(ErrorRow._fields, self.errors)

    def forecasts_csv(self) -> str:
        """The forecast of every n that was tried, and of the best n of each method, as CSV."""
        # Of this goal and these prices, whatever is planned in the same folder later.
        about = [self.goal, self.prices.text]
        # The best of a method comes first: who reads the file may rely on it.
        rows = [found.cells() for found in dict.fromkeys((*self.forecasts, *self.tried))]
        headings = [*Forecast.columns(), "goal", "prices"]
        return csv_text(headings, ([*row.values(), *about] for row in rows))


def _of_metric(judge: Judge, found: Interval) -> Interval:
    """A value of the metric, where it is one of ``goodness``."""
    if judge.higher:
        return found
    # What was the lower end is the higher one.
    ends = (None if end is None else goodness(judge, end) for end in (found.high, found.low))
    return Interval(goodness(judge, found.mean), *ends)


def _number(found: Interval) -> str:
    """A number with its interval, whole from 10 on."""
    digits = 0
    if found.mean < 10:
        digits = 1 if found.mean >= 1 else decimals_of(found.mean)
    return _text(found, f".{digits}f")


def _share(found: Interval) -> str:
    # Student's interval of two seeds may be wider than all shares.
    low, high = (None if end is None else 100 * min(max(end, 0.0), 1.0) for end in found[1:])
    return _text(Interval(100 * found.mean, low, high), ".1f")


def _text(found: Interval, form: str) -> str:
    """A number with its interval, if it has one."""
    if found.low is None or found.high is None:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first at the left and the others at the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for first, *others in (headings, *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
