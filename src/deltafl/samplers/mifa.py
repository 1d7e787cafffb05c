"""The selection of MIFA (Gu et al., NeurIPS 2021): everyone once first. Biased; for the average of latest updates."""

from dataclasses import dataclass

import numpy as np

from ..types import IntArray
from .unweighted import History, Unweighted


@dataclass(frozen=True)
class NewFirst(Unweighted):
    """Selects clients that were never selected, in random order; then, and in places left free, all evenly.

    MIFA does not sample: devices reply when they are available, all of them in its first round. Here that first round
    is spread over ceil(m / n) rounds, in which the average counts a client as zero until it replies: these steps are
    n / m, 2 n / m, ... of a whole one. The selection depends on the past, so there are no exact inclusion
    probabilities; the estimator ``mifa`` (= ``fedvarp``) needs none.

    Source: Gu, Huang, Zhang and Huang, NeurIPS 2021, algorithm 1.
    """

    def choose(self, state: History, present_k: IntArray, size: int, rng: np.random.Generator) -> IntArray:
        """New clients, then some that replied."""
        new = present_k[state.selected_m[present_k] == 0][:size]
        seen_k = present_k[state.last_m[present_k] > 0]
        wanted = min(size - len(new), len(seen_k))
        return np.concatenate([new, self.again(state, seen_k, wanted, size, rng)]) if wanted > 0 else new

    def again(self, state: History, seen_k: IntArray, wanted: int, size: int, rng: np.random.Generator) -> IntArray:
        """At most ``wanted`` of the clients that replied before, in a cohort of ``size``; by default none is ahead."""
        return seen_k[:0]
