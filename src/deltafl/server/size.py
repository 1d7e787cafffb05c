"""Cohorts that size themselves: as many clients as the estimate needs, or as a budget pays for.

D has the relative error e = sqrt(E norm(D - E D)^2) / norm(E D). With ``relative_error=r`` a round
asks the fewest clients of which e <= r is expected::

    V(n) = s (1 / n - 1 / m)                    the variance with n of m clients
    n    = s / (r^2 g + s / m)                  where V(n) = r^2 g

s and g = norm(E D)^2 are means over the rounds so far with the weight ``MEMORY``: of V of the
cohort (``estimators/variance.py``) over 1 / n - 1 / m, and of norm(D)^2 - V. That is the norm test
of Byrd et al. (2012) and Bollapragada, Byrd and Nocedal (2018, adaptive sampling) for clients in
place of examples. n at most doubles or halves from round to round: one cohort of few says little
about its own variance. Where all were asked, s is that of their replies.

The n of a round depends on the rounds before it alone, so that expectations are exact and D stays
unbiased. Where V overestimates the variance, as of balanced cohorts, more are asked than needed.

With ``budget=B``, what all rounds of a run may cost, S what the rounds so far have cost, r the
rounds that are left and c what a client that was asked has cost in the mean so far, a round draws
at most::

    n = max(1, floor((B - S) / (r c)))

clients. A training costs 1, so that the budget is kept, or what ``Population.cost_m`` says: then it
is kept but for what the last cohort costs above the mean. What earlier rounds left is shared by
later ones: those in which few were there, or few were enough (``relative_error``). A census, at
mean costs, and a full first round count.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError, counted
from ..scale.numerics import inner
from ..types import EVERYONE, FloatArray, Reports, Sizes, Within
from .first_round import FirstRound
from .part import PlanOfParts, ServerPart, Step, require_draws

#: The weight of the past in the means of s and g.
MEMORY = 0.7
#: With one client there is no variance to learn from.
FEWEST = 2
#: What ``n="auto"`` and ``--sample auto`` stand for, if nothing else sizes cohorts.
AUTO = "auto"
USUAL_ERROR = 1.0
NONE = np.zeros(())


class ErrorState(NamedTuple):
    """What is known of the estimates so far; () each."""

    spread: Sizes  # s
    signal: Annotated[FloatArray, Within("[-1e100, 1e100]")]  # g; a cohort's own may be negative
    n: Sizes  # of the next round; 0 for that of the plan


@dataclass(frozen=True)
class RelativeError(ServerPart):
    """Ask as many clients as an estimate with this relative error needs."""

    relative_error: float
    name = "relative_error"
    fitting = "methods with exact probabilities"
    needs_single_updates = "relative_error looks at how far updates are apart"
    ranges: ClassVar = {"relative_error": "(0, 100]"}

    @classmethod
    def fits(cls, sampler: Any, control: Any) -> bool:
        return bool(sampler.unbiased) and not sampler.asks_all

    def check(self, plan: PlanOfParts) -> None:
        require_own_size(plan, self.name)
        if not plan.sampler.unbiased:
            raise DeltaflError(
                f"{plan.method} has no exact probabilities, and without them no "
                "cohort shows its error: leave out relative_error, or choose an unbiased sampler"
            )

    def init(self, plan: PlanOfParts, params_d: Any) -> ErrorState:
        return ErrorState(NONE, NONE, NONE)

    def size(
        self,
        plan: PlanOfParts,
        own: ErrorState,
        round: int,
        n: int,
    ) -> int:
        return int(own.n) or n

    def direction(
        self,
        plan: PlanOfParts,
        own: ErrorState,
        step: Step,
    ) -> tuple[Step, ErrorState]:
        m = plan.population.num_clients
        cohort = step.cohort
        assert cohort is not None
        asked = int(cohort.count_n.sum())
        before = float(own.n or plan.n)
        # One client shows no variance, and would show none for ever.
        if asked < FEWEST:
            return step, own._replace(n=np.asarray(max(before, min(FEWEST, m)), float))
        variance = step.variance
        is_certain = cohort.kind != "replacement" and bool(np.all(cohort.expected_n >= 1))
        if asked >= m or is_certain:
            # Nothing was left to chance: what a draw would leave is read from the replies.
            variance = 0.0
            seen = _apart(step.reports)
        else:
            seen = variance / (1 / asked - 1 / m)
        if not np.isfinite(seen):
            return step, own
        seen_signal = float(inner(step.delta_d, step.delta_d)) - variance
        # Both begin at 0: it is their ratio that n goes by.
        spread = MEMORY * float(own.spread) + (1 - MEMORY) * seen
        signal = MEMORY * float(own.signal) + (1 - MEMORY) * seen_signal
        allowed = self.relative_error**2 * max(signal, 0.0) + spread / m
        # Where clients agree, any of them would do.
        wanted = FEWEST
        if spread > 0:
            wanted = ceil(spread / allowed)
        # Not all at once: s and g of few rounds are rough.
        n = float(np.clip(wanted, ceil(asked / 2), 2 * asked))
        if cohort.kind == EVERYONE:
            # A full first round says nothing of the n that it begins with.
            n = before
        return step, ErrorState(
            np.asarray(spread),
            np.asarray(signal),
            np.clip(n, min(FEWEST, m), m),
        )


def _apart(reports: Reports | None) -> float:
    """S^2 of replies about their mean, or about what was predicted of each if that is less; NaN
    where fewer than two are known.
    """
    if reports is None:
        return np.nan
    known = reports.part(reports.responded_n)
    count = len(known.responded_n)
    if count < FEWEST:
        return np.nan
    least = min(known.squared_deviation_n.sum(), known.squared_residual_n.sum())
    return float(least) / (count - 1)


def require_own_size(plan: PlanOfParts, name: str) -> None:
    """Refuse a plan that has one n for all rounds."""
    require_draws(plan, name)
    if plan.part("dp"):
        raise DeltaflError(
            f"dp measures its noise and epsilon by one n for all rounds: leave out {name}"
        )


class BudgetState(NamedTuple):
    """What the rounds so far have cost, and how many clients were asked in them; ()."""

    spent: Sizes
    asked: Sizes


@dataclass(frozen=True)
class Budget(ServerPart):
    """Size cohorts such that all rounds together cost no more than a budget."""

    budget: float
    budget_rounds: int | None = None  #: None for those of the run
    name = "budget"
    needs_draws = True
    fitting = "methods that draw n clients"
    ranges: ClassVar = {"budget": "(0, inf)", "budget_rounds": "[1, 1e9]"}

    def for_run(self, rounds: int) -> Self:
        return replace(self, budget_rounds=self.budget_rounds or rounds)

    def check(self, plan: PlanOfParts) -> None:
        require_own_size(plan, self.name)
        if self.budget_rounds is None:
            raise DeltaflError(
                f"budget is {self.budget:g}, for how many rounds? Write budget_rounds=100, too"
            )

    def check_clients(self, plan: PlanOfParts) -> None:
        assert self.budget_rounds is not None  # ``check`` has seen to it
        cost_m = plan.population.costs()
        least = self.init(plan, None).spent + self.budget_rounds * cost_m.min()
        if plan.part(FirstRound.name):
            least += cost_m.sum() - cost_m.min()
        if self.budget < least:
            raise DeltaflError(
                f"budget is {self.budget:g}, and {counted(self.budget_rounds, 'round')} with one "
                f"client each cost {least:g}, a first one of everyone included: raise it, or "
                "play fewer rounds"
            )

    def init(self, plan: PlanOfParts, params_d: Any) -> BudgetState:
        # What a census costs: everyone trains for it.
        cost_m = plan.population.costs()
        if plan.sampler.census is None:
            cost_m = cost_m[:0]
        return BudgetState(np.asarray(cost_m.sum()), np.asarray(float(len(cost_m))))

    def size(
        self,
        plan: PlanOfParts,
        own: BudgetState,
        round: int,
        n: int,
    ) -> int:
        assert self.budget_rounds is not None  # ``check`` has seen to it
        cost_m = plan.population.costs()
        if own.asked >= 1:
            # A saved state may hold anything.
            mean = max(float(own.spent / own.asked), cost_m.min())
        else:
            mean = cost_m.mean()
        # Rounds beyond those that were planned take what is left.
        left = max(self.budget_rounds - round, 1)
        # With nobody nothing would be learnt, and earlier rounds may have cost too much.
        affordable = max(1, int((self.budget - own.spent) / (left * mean)))
        if plan.part(RelativeError.name):
            return min(n, affordable)
        return affordable

    def direction(
        self,
        plan: PlanOfParts,
        own: BudgetState,
        step: Step,
    ) -> tuple[Step, Any]:
        assert step.cohort is not None
        asked = len(step.cohort.client_n)
        cost = plan.population.costs(step.cohort).sum()
        return step, BudgetState(own.spent + cost, own.asked + asked)

    def left_out(self, own: BudgetState, now: BudgetState) -> BudgetState:
        return now  # what was asked for was spent
