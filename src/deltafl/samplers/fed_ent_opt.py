"""FedEntOpt (Lutz et al. 2024): cohorts whose pooled labels have the largest entropy. Biased."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..types import Cohort, FloatArray, IntArray, Population, Reports, Rng, Within
from .base import ZERO, Unweighted, label_counts, with_rows


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
