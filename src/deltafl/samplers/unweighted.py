"""What biased samplers share: cohorts without selection probabilities, and successive draws."""

import numpy as np

from ..types import BoolArray, Cohort, FloatArray, IntArray
from .base import present_clients


def unweighted_cohort(client_n: IntArray) -> Cohort:
    """A cohort of distinct clients with unknown probabilities (NaN), for estimators that need none."""
    client_n = np.sort(client_n)
    return Cohort(client_n, np.ones(len(client_n), dtype=np.int64), np.full(len(client_n), np.nan))


def places(available_m: BoolArray, n: int, rng: np.random.Generator) -> tuple[IntArray, int]:
    """The available clients in random order, which breaks all later ties, and how many of them are selected.

    Raises:
        DeltaflError: For an impossible n, or when nobody is available.
    """
    present, size = present_clients(available_m, n)
    return rng.permutation(present), size


def filled_up(chosen: IntArray, present_k: IntArray, size: int) -> Cohort:
    """The chosen clients, and the first of the other present ones until there are ``size``; probabilities unknown."""
    rest = present_k[~np.isin(present_k, chosen)][: size - len(chosen)]
    return unweighted_cohort(np.concatenate([chosen, rest]))


def draw_successively(log_weight_k: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Rows of ``size`` draws without replacement, each with p proportional to exp(log weight) among those left.

    The same as drawing with replacement until ``size`` distinct rows are there. Rows of weight 0 (-inf) come last, in
    their order. By exponential clocks: the smallest of E_k / weight_k, in logarithms so that no weight overflows.

    Source: Efraimidis and Spirakis, Information Processing Letters 2006.
    """
    key_k = log_weight_k + rng.gumbel(size=len(log_weight_k))
    return np.argsort(-key_k, kind="stable")[:size]
