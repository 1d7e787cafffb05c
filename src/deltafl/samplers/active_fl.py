"""Active federated learning (Goetz et al. 2019): clients of large loss more often. Biased."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import Cohort, FloatArray, IntArray, Population, Reports, Rng, Within
from .base import Unweighted, draw_by_logs, mean_for_unseen, replied, with_rows


class ActiveState(NamedTuple):
    """What the server stores about each client."""

    size_m: IntArray  # number of examples
    # v_i; NaN if it never replied
    value_m: Annotated[FloatArray, Within("[-1e100, 1e100]", unknown=True)]


@dataclass(frozen=True)
class ActiveFL(Unweighted):
    """Drops clients of small value, draws most of a cohort by a softmax of values, the rest evenly.

    The value is v_i = sqrt(n_i) (mean loss of client i when last trained), with n_i its number of
    examples; a client never trained gets the mean of the others. Of the K available clients, the
    alpha1 K with the smallest values are dropped; (1 - alpha3) n are drawn one after the other
    without replacement, p_i proportional to exp(alpha2 v_i); the rest of the cohort is drawn
    uniformly from all that are left. alpha1 K is rounded down and alpha3 n to the nearest.

    Source: Goetz, Malik, Bui, Moon, Liu and Kumar 2019 (arXiv 1909.12641), algorithm 1; the
    defaults are its constants.

    Attributes:
        alpha1: Share of the available clients that is dropped, those with the smallest values.
        alpha2: How strongly larger values are preferred among the others; 0 for not at all.
        alpha3: Share of the cohort that is drawn uniformly.
    """

    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1

    needs_loss = True
    row_fields = ("value_m",)
    fixed_fields = ("size_m",)
    ranges: ClassVar = {"alpha1": "[0, 1]", "alpha2": "[0, inf)", "alpha3": "[0, 1]"}

    def init(self, population: Population) -> ActiveState:
        return ActiveState(
            population.num_examples_m,
            np.full(population.num_clients, np.nan),
        )

    def choose(
        self,
        state: ActiveState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        value_k = mean_for_unseen(state.value_m, 0.0)[present_k]
        dropped = int(self.alpha1 * len(present_k) + 1e-9)  # 0.29 * 100 is a little below 29
        log_weight_k = self.alpha2 * value_k
        # Stable: clients come in random order, which breaks ties.
        log_weight_k[np.argsort(value_k, kind="stable")[:dropped]] = -np.inf
        even = int(self.alpha3 * size + 0.5)
        by_value = min(size - even, len(present_k) - dropped)
        first = present_k[draw_by_logs(log_weight_k, by_value, rng)]
        rest = rng.permutation(present_k[~np.isin(present_k, first)])[: size - by_value]
        return np.concatenate([first, rest])

    def update(
        self,
        state: ActiveState,
        cohort: Cohort,
        reports: Reports,
    ) -> ActiveState:
        client_n, reports = replied(cohort, reports)
        value_n = np.sqrt(state.size_m[client_n]) * reports.loss_n
        return state._replace(value_m=with_rows(state.value_m, client_n, value_n))
