"""The least mean squared error that unbiased schemes asking n of m clients can reach: what an audit compares with.

- ``least_over_designs``: small m. The minimum over *all* designs of fixed size n with weights w_i / pi_i, found
  numerically over the probabilities of the cohorts.
- ``lower_bound``: any m. For every unbiased linear scheme, with whatever weights, the coefficients A_i have mean w_i
  and Var A_i >= w_i^2 (1 / pi_i - 1). Their covariance C is positive semidefinite, so for each lambda >= 0 with
  G - diag(lambda) positive semidefinite (G the Gram matrix of the updates)

      MSE = tr(C G) >= sum_i lambda_i C_ii >= min_pi sum_i lambda_i w_i^2 (1 / pi_i - 1).

  The best lambda is approached from inside by a log barrier; every lambda tried gives a true bound. It is 0 where the
  updates are linearly dependent: then some scheme may combine them without any error.
"""

from itertools import combinations
from math import comb

import numpy as np

from .errors import MissingExtraError
from .inclusion import inclusion_probabilities
from .types import FloatArray

try:
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.optimize import minimize
except ImportError as error:
    raise MissingExtraError("scipy", "sim") from error

#: Up to this many cohorts all designs are searched.
MAX_COHORTS = 40


def least_mse(gram_mm: FloatArray, weight_m: FloatArray, n: int) -> tuple[float, bool]:
    """The least MSE and whether it is the minimum over designs (True) or a lower bound (False).

    Args:
        gram_mm: (m, m) inner products of the updates.
        weight_m: (m,) weights of the target.
        n: Cohort size.
    """
    m = len(weight_m)
    if n >= m:
        return 0.0, True
    if comb(m, n) <= MAX_COHORTS:
        return least_over_designs(gram_mm, weight_m, n), True
    return lower_bound(gram_mm, weight_m, n), False


def least_over_designs(gram_mm: FloatArray, weight_m: FloatArray, n: int) -> float:
    """Minimum of E norm(sum_S w_i u_i / pi_i - ubar)^2 over all probabilities of the n-subsets; several starts."""
    m = len(weight_m)
    member_sm = np.array([[i in chosen for i in range(m)] for chosen in combinations(range(m), n)], dtype=np.float64)
    rng = np.random.Generator(np.random.PCG64(0))

    def mse(logit_s: FloatArray) -> float:
        q_s = np.exp(logit_s - logit_s.max())
        q_s /= q_s.sum()
        error_sm = member_sm * (weight_m / np.maximum(q_s @ member_sm, 1e-12)) - weight_m
        return float(q_s @ np.einsum("si,ij,sj->s", error_sm, gram_mm, error_sm))

    starts = [np.zeros(len(member_sm)), *rng.normal(size=(7, len(member_sm)))]
    return float(min(minimize(mse, start, method="BFGS").fun for start in starts))


def lower_bound(gram_mm: FloatArray, weight_m: FloatArray, n: int) -> float:
    """A lower bound on the MSE of every unbiased linear scheme that asks n of m clients (see the module's text)."""
    norm_m = np.sqrt(np.diag(gram_mm))
    if norm_m.min() <= 0:
        return 0.0
    correlation = gram_mm / np.outer(norm_m, norm_m)
    start = float(np.linalg.eigvalsh(correlation)[0])
    if start <= 1e-9:
        return 0.0
    theta_m = np.log(0.9 * start * norm_m**2)
    best = _value(theta_m, weight_m, n)
    for barrier in 0.3 ** np.arange(1, 9) * max(best, 1e-300):
        theta_m = minimize(
            _penalised,
            theta_m,
            args=(gram_mm, weight_m, n, barrier),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 60},
        ).x
        if _is_feasible(theta_m, gram_mm):
            best = max(best, _value(theta_m, weight_m, n))
    return best


def _expected(theta_m: FloatArray, weight_m: FloatArray, n: int) -> FloatArray:
    """The pi that minimise sum lambda w^2 / pi: proportional to w sqrt(lambda), capped."""
    return inclusion_probabilities(weight_m * np.exp(theta_m / 2), n)


def _value(theta_m: FloatArray, weight_m: FloatArray, n: int) -> float:
    expected_m = _expected(theta_m, weight_m, n)
    return float(np.sum(np.exp(theta_m) * weight_m**2 * (1 / expected_m - 1)))


def _is_feasible(theta_m: FloatArray, gram_mm: FloatArray) -> bool:
    return bool(np.linalg.eigvalsh(gram_mm - np.diag(np.exp(theta_m)))[0] >= 0)


def _penalised(
    theta_m: FloatArray, gram_mm: FloatArray, weight_m: FloatArray, n: int, barrier: float
) -> tuple[float, FloatArray]:
    """Minus the bound, minus barrier * logdet(G - diag lambda), and the gradient in theta = log lambda."""
    lambda_m = np.exp(theta_m)
    try:
        factor = cho_factor(gram_mm - np.diag(lambda_m), lower=True)
    except LinAlgError:
        return float("inf"), np.zeros(len(theta_m))
    inverse_diagonal = np.diag(cho_solve(factor, np.eye(len(theta_m))))
    slope_m = weight_m**2 * (1 / _expected(theta_m, weight_m, n) - 1)
    logdet = 2 * float(np.sum(np.log(np.diag(factor[0]))))
    objective = -float(lambda_m @ slope_m) - barrier * logdet
    return objective, lambda_m * (barrier * inverse_diagonal - slope_m)
