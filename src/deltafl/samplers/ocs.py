"""Optimal client sampling (Chen, Horvath and Richtarik, TMLR 2022), and its approximation for
secure aggregation.

The variance sum_i (1 / p_i - 1) s_i^2 of independent draws, s_i = w_i norm(u_i), is least at p_i =
min(1, c s_i), the capped probabilities of ``inclusion.py``: **ocs is fedis@poisson**. ``aocs``
needs sums over the clients alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..designs.inclusion import draw_probabilities
from ..designs.table import Chooser, find_design
from ..types import BoolArray, Cohort, FloatArray, Oracle
from .base import Rng, Sampler, WeightState, present_clients
from .delta import update_norm


def rescaled_probabilities(score_m: FloatArray, n: int, rescalings: int) -> FloatArray:
    """Algorithm 2: p = min(1, n s / sum s), then redistribute what capping removed among the
    others, j_max times.

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
    """Independent draws with the probabilities of algorithm 2, weighed by exactly these
    probabilities.
    """

    rescalings: int = (
        4  # j_max >= 0, the paper's; each costs one more exchange of two numbers a client
    )

    unbiased: ClassVar[bool] = True
    needs_oracle: ClassVar[bool] = True

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
        score_m = np.where(reports.responded_n, state.weight_m * update_norm(reports), 0.0)
        expected_k = rescaled_probabilities(score_m[present], size, self.rescalings)
        how = find_design("poisson")
        # The sum may be below n, hence no ``draw_cohort``, which would raise it.
        drawn = (
            rng.choose("poisson", expected_k)
            if isinstance(rng, Chooser)
            else how.draw(expected_k, rng)
        )
        return Cohort(
            present[drawn], np.ones(len(drawn), dtype=np.int64), expected_k[drawn], how.kind
        )
