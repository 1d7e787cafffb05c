"""Fed-CBS (Zhang et al., ICML 2023): cohorts of balanced pooled labels. Biased."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..types import TINY, Cohort, Counts, FloatArray, IntArray, Population, Reports, Rng
from .base import ZERO, Unweighted, label_counts, with_rows

_LEAST = 1e-12  # an imbalance below it counts as it, lest probabilities be infinite


class CbsState(NamedTuple):
    """What the server stores about each client."""

    count_mc: FloatArray  # examples of each class
    selected_m: Counts  # how often it was selected
    rounds: Counts  # (), rounds so far


@dataclass(frozen=True)
class FedCBS(Unweighted):
    """Draws clients one after the other, such that their pooled labels are nearly uniform.

    With QCID(M) = sum_c (share of class c in the pooled data of M - 1 / C)^2, the clients of round
    t = 1, 2, ... are drawn by

        P(first is i) proportional to 1 / QCID({i})^beta_1 + exploration sqrt(3 ln t / (2 T_i)),
        P(k-th is i | M) proportional to QCID(M)^beta_(k - 1) / QCID(M and i)^beta_k,

    T_i >= 1 how often client i was selected and beta_k = k, as in the paper's experiments. Label
    shares are in ``Population.aux_mq``; the paper computes with encrypted counts. Costs O(n m C)
    time a round.

    Source: Zhang, Li, Tang, Sun, Chen, Zhang, Chen, Chen and Li, ICML 2023 (arXiv 2209.15245).

    Attributes:
        exploration: lambda >= 0, how strongly clients that were rarely selected are preferred.
    """

    exploration: float = 10.0

    uses_aux = uses_labels = True
    row_fields = ("selected_m",)
    kept_fields = ("rounds",)
    fixed_fields = ("count_mc",)
    ranges: ClassVar = {"exploration": "[0, inf)"}

    def init(self, population: Population) -> CbsState:
        count_mc = label_counts(population)
        return CbsState(count_mc, np.zeros(len(count_mc), np.int64), ZERO)

    def choose(
        self,
        state: CbsState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        left_k = present_k
        chosen = list[int]()
        pooled_c = np.zeros(state.count_mc.shape[1])
        for place in range(1, size + 1):
            pooled_kc = pooled_c + state.count_mc[left_k]
            log_weight_k = -place * np.log(imbalance(pooled_kc))
            if place == 1:
                selected_k = np.maximum(state.selected_m[left_k], 1)
                rare_k = np.sqrt(1.5 * np.log(float(state.rounds) + 1) / selected_k)
                bonus_k = self.exploration * rare_k
                # ln t is 0 in the first round, and so are all bonuses.
                log_bonus_k = np.log(np.maximum(bonus_k, TINY))
                log_weight_k = np.logaddexp(log_weight_k, log_bonus_k)
            # The largest of log weight plus Gumbel noise is a draw by weight.
            pick = int(np.argmax(log_weight_k + rng.gumbel(size=len(left_k))))
            chosen.append(int(left_k[pick]))
            pooled_c = pooled_kc[pick]
            left_k = np.delete(left_k, pick)
        return np.array(chosen)

    def update(self, state: CbsState, cohort: Cohort, reports: Reports) -> CbsState:
        often_n = state.selected_m[cohort.client_n] + 1
        selected_m = with_rows(state.selected_m, cohort.client_n, often_n)
        return CbsState(state.count_mc, selected_m, np.asarray(state.rounds + 1))


def imbalance(count_kc: FloatArray) -> FloatArray:
    """QCID of each row of pooled counts, float64 (k,), from 1e-12 to 1 - 1 / C."""
    share_kc = count_kc / count_kc.sum(axis=1, keepdims=True)
    off_kc = share_kc - 1 / count_kc.shape[1]
    return np.asarray(np.maximum((off_kc**2).sum(axis=1), _LEAST))
