"""Optimal client sampling (Chen, Horvath and Richtarik, TMLR 2022), for secure aggregation.

The variance sum_i (1 / p_i - 1) s_i^2 of independent draws, s_i = w_i norm(u_i), is least at p_i =
min(1, c s_i), the capped probabilities of ``inclusion.py``: **ocs is fedis@poisson**. ``aocs``
needs sums over the clients alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..designs.inclusion import draw_probabilities
from ..designs.table import draw_by, drawn_once
from ..types import BoolArray, Cohort, FloatArray, Oracle, Rng
from .base import Sampler, WeightState, present_clients


def rescaled_probabilities(
    score_m: FloatArray,
    n: int,
    rescalings: int,
) -> FloatArray:
    """Algorithm 2: p = min(1, n s / sum s), then what capping removed goes to the others, j times.

    With I the number of clients below 1 and P the sum of their p_i: C = (n - m + I) / P, p_i <-
    min(1, C p_i), until C <= 1. The sum of p is n after enough rescalings and below n before, as in
    the paper.

    Example:
        >>> rescaled_probabilities(np.array([8.0, 1.0, 1.0]), 2, 1).tolist()
        [1.0, 0.5, 0.5]
    """
    expected_m = np.minimum(1.0, n * draw_probabilities(score_m))
    for _ in range(rescalings):
        below_m = expected_m < 1
        mass = float(expected_m[below_m].sum())
        if mass <= 0:  # all clients with a score are certain
            break
        factor = (n - len(expected_m) + np.count_nonzero(below_m)) / mass
        if factor <= 1:
            break
        expected_m[below_m] = np.minimum(1.0, factor * expected_m[below_m])
    return expected_m


@dataclass(frozen=True)
class ApproximateOCS(Sampler):
    """Independent draws with the probabilities of algorithm 2, and weights by exactly these.

    Attributes:
        rescalings: j_max >= 0 of the paper; each costs an exchange of two numbers a client.
    """

    rescalings: int = 4

    unbiased = True
    needs_oracle = True
    design: ClassVar[str] = "poisson"  # and no option

    ranges: ClassVar = {"rescalings": "[0, inf)"}

    def open(
        self,
        state: WeightState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        present, size = present_clients(available_m, n)
        reports = self.require_oracle(oracle).reports()
        norm_m = np.sqrt(reports.squared_norm_n)
        score_m = np.where(reports.responded_n, state.weight_m * norm_m, 0.0)
        expected_k = rescaled_probabilities(score_m[present], size, self.rescalings)
        # The sum may be below n, hence no ``draw_cohort``, which would raise it.
        drawn = draw_by("poisson", expected_k, rng)
        return drawn_once(present[drawn], expected_k[drawn], "poisson")
