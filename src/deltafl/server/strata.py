"""Cohorts by strata: regions, hospital chains, device classes; one name a client.

With H strata of which somebody is available, N_h clients of each, and the mass M_h = sum of the
sampler's scores over stratum h (w_i where it has none, or with ``allocation="weight"``):

- One stage: stratum h has n_h of the n draws, at least ``at_least`` (all, where fewer are there),
  the others in proportion to M_h. The sampler draws inside each stratum as if nobody else were
  there, with its own design: pi_i = E count_i of that draw. With scores w_i norm(u_i) this is
  Neyman's allocation for such draws, as the variance that scores leave inside a stratum is least,
  summed over all, at n_h proportional to M_h.
- Two stages (``stages=R``): R strata are drawn, with pi_h = min(1, c M_h) and sum_h pi_h = R; then
  floor(n / R) clients within each of them: pi_i = pi_h pi_{i|h}. It saves what a visit to a region
  costs, and has a larger variance, which ``info.variance`` estimates if two strata are drawn or
  more (``estimators/variance.py``).

All n_h follow from what is known before the draw, so that both are exact for every sampler that is.
A stratum of which nobody is there has no part in the round; its absence counts as that of its
clients (``Plan.response_rates``).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..designs.strata import allocate, draw_from_each
from ..designs.table import draw_cohort
from ..errors import DeltaflError, counted, printable
from ..types import BoolArray, Cohort, IntArray, Strata
from .part import Drawing, PlanOfParts, ServerPart, require_draws

NEYMAN = "neyman"
BY_WEIGHT = "weight"
ALLOCATIONS = (NEYMAN, BY_WEIGHT)


@dataclass(frozen=True)
class ByStrata(ServerPart):
    """Draw some of each stratum, or some strata and some clients of each."""

    at_least: int = 1
    allocation: str | None = None  #: None for ``NEYMAN`` where the sampler has scores
    stages: int = 0  #: the strata of a round; 0 for all
    name = "at_least"
    needs_draws = True
    fitting = "methods that draw n clients, of a population with strata"
    ranges: ClassVar = {"at_least": "[1, 1e9]", "stages": "[0, 1e9]"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allocation not in (None, *ALLOCATIONS):
            raise DeltaflError(
                f"allocation is {self.allocation!r}; write 'neyman' to divide a cohort by the "
                "sampler's scores, or 'weight'"
            )
        if self.stages and self.at_least > 1:
            raise DeltaflError(
                f"at_least is {self.at_least} of each stratum, and with stages = {self.stages} not "
                "all strata are drawn: leave out one of them"
            )

    def check(self, plan: PlanOfParts) -> None:
        strata = plan.population.strata
        if strata is None:
            raise DeltaflError(
                f"{self._written} needs a stratum for each client: write "
                "Population.from_sizes(sizes, strata=names), with a table --strata COLUMN, or in a "
                "federation strata=['north', 'south']"
            )
        require_draws(plan, self._written)
        if self.allocation == NEYMAN and not plan.sampler.has_scores:
            raise DeltaflError(
                f"{plan.method} has no scores to divide a cohort by: write allocation = 'weight'"
            )
        if getattr(plan.sampler, "design", None) == "poisson":
            cure = "write @systematic"
            if "design" not in vars(plan.sampler):
                cure = f"leave it out, as {plan.method} has no other design"
            raise DeltaflError(
                f"poisson draws a random number of clients, and {self._written} fixes that of each "
                f"stratum: {cure}"
            )

    def check_clients(self, plan: PlanOfParts) -> None:
        strata = _strata(plan)
        count = len(strata.names)
        # Where another part sizes cohorts, ``draw`` sees to it in each round.
        is_fixed = not any(part.sizes_cohorts() for part in plan.parts)
        most_stages = min(count, plan.n) if is_fixed else count
        if self.stages:
            if self.stages > most_stages:
                raise DeltaflError(
                    f"stages is {self.stages}, with {count} strata and cohorts of "
                    f"{counted(plan.n, 'client')}; it must be at most {most_stages}"
                )
            return
        if is_fixed and self.at_least * count > plan.n:
            raise DeltaflError(
                f"at_least is {self.at_least} of each of {count} strata, more than the "
                f"{plan.n} clients of a cohort: ask {self.at_least * count} clients or more, or "
                f"draw strata first, with stages = {most_stages}"
            )
        size_h = np.bincount(strata.code_m)
        fewest = int(size_h.argmin())
        if size_h[fewest] < self.at_least:
            raise DeltaflError(
                f"stratum {printable(strata.names[fewest], limit=60)!r} has {size_h[fewest]} "
                f"clients and at_least is {self.at_least}; lower it, or join strata"
            )

    @property
    def _written(self) -> str:
        """What a user has written to have it."""
        if self.stages:
            return f"stages = {self.stages}"
        if self.allocation is not None and self.at_least == ByStrata.at_least:
            return f"allocation = {self.allocation!r}"
        return f"at_least = {self.at_least}"

    def draw(
        self,
        plan: PlanOfParts,
        drawing: Drawing,
        mask_m: BoolArray | None,
        n: int,
    ) -> Cohort:
        code_m = _strata(plan).code_m
        if mask_m is None:
            mask_m = np.ones(len(code_m), bool)
        present = np.flatnonzero(mask_m)
        code_h = np.unique(code_m[present])
        member_h = [present[code_m[present] == code] for code in code_h]
        size_h = np.array([len(member_k) for member_k in member_h])
        # Without scores the target's own weights say how much a stratum counts.
        mass_m = plan.population.weight_m
        if self.allocation != BY_WEIGHT and drawing.sampler.has_scores:
            mass_m = drawing.scores(mask_m, n)
        mass_h = np.array([mass_m[member_k].sum() for member_k in member_h])

        def draw_some(member_k: IntArray, quota: int) -> Cohort:
            there_m = np.zeros(len(code_m), bool)
            there_m[member_k] = True
            drawn = drawing.open(there_m, quota)
            # Of a sampler of the user's this shows only now.
            if drawn.kind == "poisson":
                raise DeltaflError(
                    f"{plan.method} draws a random number of clients, and "
                    f"{self._written} fixes that of each stratum: leave it out"
                )
            return drawn

        if not self.stages:
            # More than n where something else sizes cohorts, or new strata have joined.
            least = int(np.minimum(size_h, self.at_least).sum())
            n = min(max(n, least), len(present))
            quota_h = allocate(n, size_h, mass_h, self.at_least)
            cohort = draw_from_each(member_h, quota_h, draw_some)
            return cohort._replace(stratum_n=code_h[cohort.stratum_n])
        stages = min(self.stages, len(code_h))
        n = max(n, stages)
        first = draw_cohort(mass_h, stages, "systematic", drawing.rng)
        drawn = first.client_n
        # Before the draw, and for all strata alike: what is drawn first must not decide it.
        quota = n // stages
        quotas = [min(quota, int(size_h[h])) for h in drawn]
        cohort = draw_from_each([member_h[h] for h in drawn], quotas, draw_some)
        return cohort._replace(
            expected_n=first.expected_n[cohort.stratum_n] * cohort.expected_n,
            stratum_n=code_h[drawn[cohort.stratum_n]],
            stage_n=first.expected_n[cohort.stratum_n],
        )


def _strata(plan: PlanOfParts) -> Strata:
    strata = plan.population.strata
    assert strata is not None  # ``check`` has seen to it
    return strata
