"""Power-of-Choice (Cho, Wang and Joshi 2022): select the clients of largest loss. Biased."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Rng
from .base import RunFacts, Sampler, WeightState, unweighted_cohort


@dataclass(frozen=True)
class PowerOfChoice(Sampler):
    """Selects, from d random candidates, the n with the largest loss of the current global model.

    Candidates are drawn one after the other without replacement, in proportion to their weights
    (their section 3).

    Attributes:
        candidates: d, at least n; 2 n if not given, the DELTA paper's choice.
    """

    candidates: int | None = None

    needs_oracle = True

    def for_run(self, facts: RunFacts) -> Self:
        self._wanted(facts.n)
        return self

    def _wanted(self, n: int) -> int:
        wanted = self.candidates
        if wanted is None:
            return 2 * n
        if wanted < n:
            raise DeltaflError(f"candidates is {wanted}; it must be at least the sample size {n}")
        return wanted

    def open(
        self,
        state: WeightState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        # In increasing order, so that equal losses are ordered alike whatever the draw's order was.
        candidate_k = np.sort(
            _candidates(
                state.weight_m,
                available_m,
                self._wanted(n),
                n,
                rng,
            )
        )
        # An unknown loss counts as infinite: the client is looked at.
        loss_k = np.nan_to_num(
            self.require_oracle(oracle).losses(candidate_k),
            nan=np.inf,
        )
        return unweighted_cohort(candidate_k[np.argsort(-loss_k, kind="stable")[:n]])


def _candidates(
    weight_m: FloatArray,
    available_m: BoolArray,
    wanted: int,
    least: int,
    rng: Rng,
) -> IntArray:
    """Successive draws by weight among those present; plain random ones if all weigh the same.

    Clients of weight 0 are candidates only if there would otherwise be fewer than ``least``.
    """
    present = np.flatnonzero(available_m & (weight_m > 0))
    weight_k = weight_m[present]
    chance_k = None
    # Plain draws take other random numbers than draws with equal chances.
    if len(np.unique(weight_k)) > 1:
        chance_k = weight_k / weight_k.sum()
    drawn_k = rng.choice(
        present,
        size=min(wanted, len(present)),
        replace=False,
        p=chance_k,
    )
    if len(drawn_k) >= least:
        return drawn_k
    weightless = np.flatnonzero(available_m & (weight_m <= 0))
    return np.concatenate(
        [
            drawn_k,
            rng.permutation(weightless)[: least - len(drawn_k)],
        ]
    )
