"""Cohorts whose pooled labels are balanced, chosen one client after the other: Fed-CBS (Zhang et
al., ICML 2023), and FedEntOpt (Lutz et al. 2024), by their entropy. Biased.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import (
    TINY,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Population,
    Reports,
    Rng,
    Within,
)
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

    def update(
        self,
        state: CbsState,
        cohort: Cohort,
        reports: Reports,
    ) -> CbsState:
        often_n = state.selected_m[cohort.client_n] + 1
        selected_m = with_rows(state.selected_m, cohort.client_n, often_n)
        return CbsState(state.count_mc, selected_m, np.asarray(state.rounds + 1))


def imbalance(count_kc: FloatArray) -> FloatArray:
    """QCID of each row of pooled counts, float64 (k,), from 1e-12 to 1 - 1 / C."""
    share_kc = count_kc / count_kc.sum(axis=1, keepdims=True)
    off_kc = share_kc - 1 / count_kc.shape[1]
    return np.asarray(np.maximum((off_kc**2).sum(axis=1), _LEAST))


class EntropyState(NamedTuple):
    """Which labels each client holds, and when it was selected."""

    count_mc: FloatArray  # examples of each class
    place_m: IntArray  # it was the 1st, 2nd, ... to be selected, when it was last; 0 for never
    total: Annotated[IntArray, Within("[0, 1e15]")]  # (), selections so far

    def is_consistent(self) -> bool:
        """Whether nobody was selected later than the last one."""
        return bool(np.all((self.place_m >= 0) & (self.place_m <= self.total)))


@dataclass(frozen=True)
class FedEntOpt(Unweighted):
    """Adds clients one after the other, such that their pooled labels have the largest entropy.

    With l_i the counts of client i's labels and L their sum over the clients chosen so far, the
    first client is drawn uniformly, and the next is

        argmax over free clients i of H((L + l_i) / sum_c (L + l_i)_c),  H(p) = -sum_c p_c ln p_c.

    The last Q clients selected are in the buffer and not free, Q <= m - n. Ours: Q is a share of m
    (the paper's best Q depends on the skew of the labels); within a cohort, clients with a lower
    index leave the buffer first; if fewer clients are free than needed, those longest in the buffer
    are freed; ties are broken at random. Label shares are in ``Population.aux_mq``. Costs O(n m C)
    time per round.

    Source: Lutz, Steidl, Muller and Samek, arXiv 2411.01240, algorithm 1.

    Attributes:
        buffer: Q / m, in [0, 1].
    """

    buffer: float = 0.5

    uses_aux = uses_labels = True
    row_fields = ("place_m",)
    kept_fields = ("total",)
    fixed_fields = ("count_mc",)
    ranges: ClassVar = {"buffer": "[0, 1]"}

    def init(self, population: Population) -> EntropyState:
        count_mc = label_counts(population)
        return EntropyState(count_mc, np.zeros(len(count_mc), np.int64), ZERO)

    def choose(
        self,
        state: EntropyState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        m = len(state.place_m)
        place_k = state.place_m[present_k]
        held = min(int(self.buffer * m + 1e-9), m - size)
        # If too few are free, those longest in the buffer are.
        newest = max(int(state.total) - held, int(np.sort(place_k)[size - 1]))
        left_k = present_k[place_k <= newest]
        chosen = list[int]()
        pooled_c = np.zeros(state.count_mc.shape[1])
        for _ in range(size):
            pooled_kc = pooled_c + state.count_mc[left_k]
            entropy_k = entropies(pooled_kc)
            # The first client is any of them, and they come in random order.
            if not chosen:
                entropy_k[0] = np.inf
            pick = int(np.argmax(entropy_k))
            chosen.append(int(left_k[pick]))
            pooled_c = pooled_kc[pick]
            left_k = np.delete(left_k, pick)
        return np.array(chosen)

    def update(
        self,
        state: EntropyState,
        cohort: Cohort,
        reports: Reports,
    ) -> EntropyState:
        n = len(cohort.client_n)
        place_m = with_rows(
            state.place_m,
            cohort.client_n,
            state.total + 1 + np.arange(n),
        )
        return EntropyState(state.count_mc, place_m, np.asarray(state.total + n))


def entropies(count_kc: FloatArray) -> FloatArray:
    """Entropy of each row of pooled counts in nats, float64 (k,), from 0 to ln C."""
    share_kc = count_kc / count_kc.sum(axis=1, keepdims=True)
    # 0 ln 0 is 0: with the logarithm of 1.
    log_kc = np.log(np.where(share_kc > 0, share_kc, 1.0))
    return np.asarray(-(share_kc * log_kc).sum(axis=1))
