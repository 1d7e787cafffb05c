"""Samplers that draw by score: a score a client, and a sampling design that turns scores into a cohort."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..designs.table import draw_cohort, draw_from_tree, find_design
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, Oracle
from .base import Sampler, State


@dataclass(frozen=True)
class Scored(Sampler):
    """Draws with expectations proportional to scores. Subclasses define ``scores``.

    Attributes:
        design: A name in ``deltafl.DESIGNS``.
    """

    design: str = "systematic"

    accepts_no_mask: ClassVar[bool] = True

    @property
    def unbiased(self) -> bool:
        """As exact as its design."""
        return find_design(self.design).exact

    @abstractmethod
    def scores(
        self, state: State, available_m: BoolArray | None, n: int, oracle: Oracle | None
    ) -> FloatArray | SumTree:
        """Scores >= 0, float64 (m,); in a sum tree for the design ``ordered-pivotal`` if that is what the state has."""

    def values(self, state: State) -> FloatArray | None:
        """Values (m, q) that the cohort is spread over or balanced on, for designs that use them."""
        return None

    def tree_floor(self) -> float:
        """The share of the cohort that is drawn evenly where the scores are in a tree."""
        return 0.0

    def open(
        self,
        state: State,
        available_m: BoolArray | None,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw n clients by their scores."""
        scores = self.scores(state, available_m, n, oracle)
        if isinstance(scores, SumTree):
            return draw_from_tree(scores, n, self.tree_floor(), rng, available_m)
        return draw_cohort(scores, n, self.design, rng, available_m, self.values(state))
