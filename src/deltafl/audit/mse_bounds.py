"""The least mean squared error that unbiased schemes that select n of m clients can reach: what an
audit compares with.

- ``least_over_designs``: small m. The minimum over *all* designs of fixed size n with weights w_i /
  pi_i, found numerically over the probabilities of the cohorts.
- ``lower_bound``: any m. For every unbiased linear scheme, with whatever weights, the coefficients
  A_i have mean w_i and Var A_i >= w_i^2 (1 / pi_i - 1). Their covariance C is positive
  semidefinite, so for each lambda >= 0 with G - diag(lambda) positive semidefinite (G the Gram
  matrix of the updates)

      MSE = tr(C G) >= sum_i lambda_i C_ii >= min_pi sum_i lambda_i w_i^2 (1 / pi_i - 1).

  Every lambda tried gives a true bound; the best one is kept. It is 0 where the updates are
  linearly dependent: then some scheme may combine them without any error.
"""

from itertools import combinations
from math import comb

import numpy as np

from ..designs.inclusion import inclusion_probabilities
from ..errors import require
from ..types import FloatArray

#: No client is drawn less often: beyond this the search would leave clients out, and be biased, for
#: rounding hides it.
_LEAST_INCLUSION = 1e-9
#: Up to this many cohorts all designs are searched.
MAX_COHORTS = 40


def least_mse(
    gram_mm: FloatArray,
    weight_m: FloatArray,
    n: int,
    steps: int = 200,
) -> tuple[float, bool]:
    """The least MSE, and whether it is the minimum over designs (True) or a lower bound (False).

    From the (m, m) inner products of the updates and the weights; any number of steps gives a true
    bound.
    """
    if n >= len(weight_m):
        return 0.0, True
    if comb(len(weight_m), n) <= MAX_COHORTS:
        return least_over_designs(gram_mm, weight_m, n), True
    return lower_bound(gram_mm, weight_m, n, steps), False


def least_over_designs(gram_mm: FloatArray, weight_m: FloatArray, n: int) -> float:
    """Minimum of E norm(sum_S w_i u_i / pi_i - ubar)^2 over all probabilities of the n-subsets,
    by SciPy.
    """
    require("scipy", "sim")
    from scipy.optimize import minimize

    m = len(weight_m)
    member_sm = np.array(
        [[i in chosen for i in range(m)] for chosen in combinations(range(m), n)], np.float64
    )
    # One fixed seed, so that the same updates have the same bound.
    rng = np.random.Generator(np.random.PCG64(0))
    # The MSE where somebody is drawn too rarely; the line search needs numbers.
    too_rare = float(weight_m**2 @ np.diag(gram_mm)) / _LEAST_INCLUSION

    # Of logits: every vector of them is a distribution, so that the search has no constraints.
    def mse(logit_s: FloatArray) -> float:
        q_s = np.exp(logit_s - logit_s.max())
        q_s /= q_s.sum()
        pi_m = q_s @ member_sm
        if (pi_m[weight_m > 0] < _LEAST_INCLUSION).any():
            return too_rare
        error_sm = member_sm * (weight_m / np.maximum(pi_m, _LEAST_INCLUSION)) - weight_m
        return float(q_s @ np.einsum("si,ij,sj->s", error_sm, gram_mm, error_sm))

    starts = [np.zeros(len(member_sm)), *rng.normal(size=(7, len(member_sm)))]
    return float(min(minimize(mse, start, method="BFGS").fun for start in starts))


def lower_bound(
    gram_mm: FloatArray,
    weight_m: FloatArray,
    n: int,
    steps: int = 200,
) -> float:
    """A lower bound on the MSE of every unbiased linear scheme that selects n of m clients (see the
    module's text).

    Any direction exp(theta) becomes a feasible lambda when it is scaled by the least eigenvalue of
    ``exp(-theta/2) G exp(-theta/2)``. The logarithm of the bound has the gradient (share of client
    i in the bound) minus (square of entry i of the eigenvector), which the steps climb; a soft
    minimum stands for tied eigenvalues.
    """
    # The others add no error to anybody's estimate.
    counting = (weight_m > 0) & (np.diag(gram_mm) > 0)
    if n >= counting.sum():
        return 0.0
    gram_mm = gram_mm[np.ix_(counting, counting)]
    weight_m = weight_m[counting]
    norm_m = np.sqrt(np.diag(gram_mm))
    theta_m = 2 * np.log(norm_m)
    best = 0.0
    for step in range(steps):
        scale_m = np.exp(-theta_m / 2)
        value_k, vector_mk = np.linalg.eigh(gram_mm * np.outer(scale_m, scale_m))
        # The updates are dependent: no lambda above 0 is feasible.
        if value_k[0] <= 1e-9 * value_k[-1]:
            return best
        lambda_m = value_k[0] * np.exp(theta_m)
        # Capped pi_i proportional to w_i sqrt(lambda_i): they minimise the sum of the bound.
        pi_m = inclusion_probabilities(weight_m * np.sqrt(lambda_m), n)
        share_m = lambda_m * weight_m**2 * (1 / pi_m - 1)
        best = max(best, float(share_m.sum()))
        # Harder with every step, so that the soft minimum ends at the least eigenvalue.
        softness = 0.3 / (1 + step / 10)
        tie_k = np.exp(-np.log(value_k / value_k[0]) / softness)
        rise_m = share_m / share_m.sum() - vector_mk**2 @ (tie_k / tie_k.sum())
        theta_m = theta_m + 2 / (1 + step / 20) * rise_m
    return best
