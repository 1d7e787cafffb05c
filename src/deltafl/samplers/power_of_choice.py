"""Power-of-Choice (Cho, Wang and Joshi 2022): ask the clients that suffer most. Biased."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import BoolArray, Cohort, Oracle, Population, Reports
from .unweighted import unweighted_cohort


class NoState(NamedTuple):
    """Nothing to remember."""


@dataclass(frozen=True)
class PowerOfChoice:
    """Of d random candidates take the n with the largest loss of the current global model.

    Which clients those are depends on losses of clients that were not asked, so inclusion probabilities are unknown
    (NaN) and only the plain mean can follow.

    Attributes:
        candidates: d >= n; None for 2 n, the DELTA paper's choice (20 candidates for 10).
    """

    candidates: int | None = None

    unbiased: ClassVar[bool] = False
    needs_oracle: ClassVar[bool] = True

    def init(self, population: Population) -> NoState:
        """No memory."""
        return NoState()

    def open(
        self,
        state: NoState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw candidates, ask for their losses, keep the largest n."""
        if oracle is None:
            raise DeltaflError("power-of-choice needs the losses of its candidates before the draw")
        present = np.flatnonzero(available_m)
        wanted = 2 * n if self.candidates is None else self.candidates
        if wanted < n:
            raise DeltaflError(f"candidates is {wanted}; it must be at least the sample size {n}")
        candidate_k = np.sort(rng.choice(present, size=min(wanted, len(present)), replace=False))
        loss_k = np.nan_to_num(oracle.losses(candidate_k), nan=np.inf)
        return unweighted_cohort(candidate_k[np.argsort(-loss_k, kind="stable")[:n]])

    def update(self, state: NoState, cohort: Cohort, reports: Reports) -> NoState:
        """Nothing to learn."""
        return state
