"""A budget of trainings over a run, which cohorts are sized by.

With B the budget, S what the rounds so far have cost, r the rounds that are left and c what a
client that was asked has cost in the mean so far, a round draws at most

    n = max(1, floor((B - S) / (r c)))

clients. A training costs 1, so that the budget is kept, or what ``Population.cost_m`` says: then it
is kept but for what the last cohort costs above the mean. What earlier rounds left is shared by
later ones: those in which few were there, or few were enough (``relative_error``). A census, at
mean costs, and a full first round count. n depends on the rounds before it alone, so that
expectations are exact.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError
from ..types import Sizes
from .first_round import FirstRound
from .part import PlanOfParts, ServerPart, Step
from .relative_error import RelativeError, require_own_size


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
        if any(part.name == FirstRound.name for part in plan.parts):
            least += cost_m.sum() - cost_m.min()
        if self.budget < least:
            raise DeltaflError(
                f"budget is {self.budget:g}, and {self.budget_rounds} rounds with one client each "
                f"cost {least:g}, a first one of everyone included: raise it, or play fewer rounds"
            )

    def init(self, plan: PlanOfParts, params_d: Any) -> BudgetState:
        # What a census costs: everyone trains for it.
        cost_m = plan.population.costs()
        if plan.sampler.census is None:
            cost_m = cost_m[:0]
        return BudgetState(np.asarray(cost_m.sum()), np.asarray(float(len(cost_m))))

    def size(self, plan: PlanOfParts, own: BudgetState, round: int, n: int) -> int:
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
        if any(part.name == RelativeError.name for part in plan.parts):
            return min(n, affordable)
        return affordable

    def direction(self, plan: PlanOfParts, own: BudgetState, step: Step) -> tuple[Step, Any]:
        assert step.cohort is not None
        asked = len(step.cohort.client_n)
        cost = plan.population.costs(step.cohort).sum()
        return step, BudgetState(own.spent + cost, own.asked + asked)

    def left_out(self, own: BudgetState, now: BudgetState) -> BudgetState:
        return now  # what was asked for was spent
