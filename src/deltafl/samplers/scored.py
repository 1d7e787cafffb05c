"""The two ways a score becomes a sampler, shared by importance sampling (``importance.py``) and DELTA (``delta.py``).

- *theoretical*: the score of every client in this very round, from an oracle that trains everyone (FedIS, FedDELTA);
- *practical*: what sampled clients showed last, by the paper's rule (FedPracIS, FedPracDELTA; section 4):
  for i in S_t, p_i <- R_i / sum_S R_j * (1 - sum_{not S} p_j), from p_i = 1/m. The mass of S is re-divided inside S.

Under the paper's rule R = 0 is absorbing and one noisy R can starve a client, hence the floor; with floor 0 the
practical samplers do not claim to be unbiased.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.inclusion import with_floor
from ..designs.table import ORDERED, draw_cohort, draw_from_tree, find_design
from ..errors import DeltaflError
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports


class WeightState(NamedTuple):
    """The clients' weights, float64 (m,): all that a theoretical sampler remembers."""

    weight_m: FloatArray


class PracticalState(NamedTuple):
    """The draw probabilities p, float64 (m,), sum 1; in a sum tree for the design ``ordered-pivotal``."""

    p_m: FloatArray | SumTree


@dataclass(frozen=True)
class Theoretical(ABC):
    """Draws with scores w_i R_i of all clients, as the oracle reports them for this round.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly.
    """

    design: str = "systematic"
    floor: float = 0.0

    needs_oracle: ClassVar[bool] = True

    @abstractmethod
    def score(self, reports: Reports) -> FloatArray:
        """R_n >= 0 of the reports."""

    @property
    def unbiased(self) -> bool:
        """As exact as its design (a client with score 0 but u_i != 0 would need a floor above 0)."""
        return find_design(self.design).exact

    def init(self, population: Population) -> WeightState:
        """Only the weights."""
        return WeightState(population.weight_m)

    def open(
        self,
        state: WeightState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw by the scores of this round."""
        if oracle is None:
            raise DeltaflError(
                "a theoretical sampler needs every client's update before the draw; only a simulation has it"
            )
        reports = oracle.reports()
        score_m = np.where(reports.responded_n, state.weight_m * self.score(reports), 0.0)
        if self.floor:
            score_m = with_floor(score_m, self.floor, available_m=available_m)
        return draw_cohort(score_m, n, self.design, rng, available_m)

    def update(self, state: WeightState, cohort: Cohort, reports: Reports) -> WeightState:
        """Nothing to learn: the oracle tells anew."""
        return state


@dataclass(frozen=True)
class Practical(ABC):
    """Draws with remembered probabilities, which it re-divides by the scores of those who replied.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        floor: g in [0, 1], the share of the cohort that is drawn evenly; 0 is the paper to the letter.
    """

    design: str = "systematic"
    floor: float = 0.1

    needs_oracle: ClassVar[bool] = False
    accepts_no_mask: ClassVar[bool] = True

    @abstractmethod
    def score(self, reports: Reports) -> FloatArray:
        """R_n >= 0 of the reports."""

    @property
    def unbiased(self) -> bool:
        """As exact as its design, if a floor keeps clients alive: without, one whose R was 0 is lost for ever."""
        return find_design(self.design).exact and self.floor > 0

    def init(self, population: Population) -> PracticalState:
        """p_i = 1 / m at round 0."""
        p_m = np.full(population.num_clients, 1 / population.num_clients)
        return PracticalState(SumTree(p_m) if self.design == ORDERED else p_m)

    def open(
        self,
        state: PracticalState,
        available_m: BoolArray | None,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw with the remembered p, mixed with an equal share."""
        if isinstance(state.p_m, SumTree):
            return draw_from_tree(state.p_m, n, self.floor, rng, available_m)
        score_m = with_floor(state.p_m, self.floor, available_m=available_m)
        return draw_cohort(score_m, n, self.design, rng, available_m)

    def update(self, state: PracticalState, cohort: Cohort, reports: Reports) -> PracticalState:
        """Re-divide the mass of those who replied in proportion to their R; nothing changes if all R are zero."""
        here = reports.responded_n
        client_n, score_n = cohort.client_n[here], self.score(reports)[here]
        if score_n.sum() <= 0:
            return state
        # In a tree the sum is kept up to rounding only; it is divided by when clients are drawn.
        p_n = score_n / score_n.sum() * state.p_m[client_n].sum()
        if isinstance(state.p_m, SumTree):
            return PracticalState(state.p_m.replaced(client_n, p_n))
        p_m = state.p_m.copy()
        p_m[client_n] = p_n
        return PracticalState(p_m / p_m.sum())
