"""How the counts of two clients vary together, where a formula says it.

Simple random sampling, Poisson draws and draws with replacement have formulas in every textbook.
Systematic draws with unequal expectations are laid out in random order on a circle of whole length
n, and picked at every unit step (Hartley and Rao 1962). Turned so that client i begins at 0, the
clients between i and j are a random set L: of any size with equal chances, and any set of a size
with equal chances. Both are picked if a step meets both, so that with g = sum_L e_l

    E K_i K_j = mean over L of the length that [0, e_i) shares with [e_i + g, e_i + g + e_j) mod 1.

All 2^(m - 2) sets are visited, so that this is for a few clients or strata.
"""

from itertools import combinations
from math import comb

import numpy as np

from ..types import FloatArray
from .table import DESIGNS

#: So many clients that are not certain have 16,384 sets for each of 120 pairs.
MOST_IN_ORDER = 16
#: How far a sum of expectations is from a whole number by rounding.
_ROUNDING = 1e-9


def covariance(design: str, expected_m: FloatArray) -> FloatArray | None:
    """Cov(K), float64 (m, m), of how often a design draws each client; None without a formula."""
    how = DESIGNS[design]
    m = len(expected_m)
    if how.kind == "poisson":
        return np.diag(expected_m * (1 - expected_m))
    if how.kind == "replacement":
        pairs_mm = np.outer(expected_m, expected_m) / expected_m.sum()
        return np.asarray(np.diag(expected_m) - pairs_mm)
    share = float(expected_m.mean())
    # An order that is fixed, or values, would make some pairs more frequent than others.
    in_random_order = how.exact and how.name != "ordered-pivotal"
    if in_random_order and np.allclose(expected_m, share):
        # All pairs are as frequent, and the sum of K never varies.
        centring_mm = np.eye(m) - 1 / m
        # ``max``: a single client has nobody to vary with.
        return np.asarray(share * (1 - share) * m / max(m - 1, 1) * centring_mm)
    if how.name == "systematic":
        return _of_systematic(expected_m)
    return None


def _of_systematic(expected_m: FloatArray) -> FloatArray | None:
    total = float(expected_m.sum())
    open_k = np.flatnonzero((expected_m > 0) & (expected_m < 1))
    if len(open_k) > MOST_IN_ORDER or abs(total - round(total)) > _ROUNDING:
        return None
    # Who is certain, or never drawn, varies with nobody.
    covariance_mm = np.diag(expected_m * (1 - np.minimum(expected_m, 1)))
    for i, j in combinations(open_k.tolist(), 2):
        others = [k for k in open_k.tolist() if k not in (i, j)]
        both = _together(expected_m[i], expected_m[j], expected_m[others])
        covariance_mm[i, j] = both - expected_m[i] * expected_m[j]
        covariance_mm[j, i] = covariance_mm[i, j]
    return covariance_mm


def _together(a: float, b: float, other_k: FloatArray) -> float:
    """How likely systematic draws in random order select both of two clients."""
    gap_s = np.zeros(1)
    size_s = np.zeros(1, np.int64)
    for length in other_k:
        # The sets without this client, and those with it.
        gap_s = np.concatenate([gap_s, gap_s + length])
        size_s = np.concatenate([size_s, size_s + 1])
    k = len(other_k)
    chance_k = 1 / (k + 1) / np.array([comb(k, size) for size in range(k + 1)])
    begin_s = (a + gap_s) % 1.0
    end_s = begin_s + b
    shared_s = np.maximum(np.minimum(a, end_s) - begin_s, 0)
    # What of the second client lies beyond 1 begins anew at 0.
    shared_s += np.clip(end_s - 1, 0, a)
    return float(chance_k[size_s] @ shared_s)
