"""Small problems with known gradients, on which rates of convergence are measured. NumPy only.

- ``quadratics``: each client has its own A_i, b_i and size of the Gaussian gradient noise; not
  started at the optimum;
- ``quadratics-from-optimum``: the same without noise, started at the minimum of f: only
  heterogeneity is left;
- ``robust-regression``: bounded, hence not convex; real minibatches.

All weights are w_i = 1 / m, and f = (1 / m) sum_i F_i. Every client works at its own point, one row
of ``x_md``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from deltafl import stream
from deltafl.errors import unknown_name
from deltafl.types import FloatArray, IntArray, Params

EXAMPLES = 100
BATCH = 2  # of a client of the regression, and of one of its minibatches
LEAST_CURVATURE = 0.1  # of the quadratics; the largest is L = 1


@dataclass(frozen=True)
class Problem:
    """The losses F_i of m clients and their gradients."""

    start_d: FloatArray
    smoothness: float  # L
    num_clients: int
    losses: Callable[[FloatArray], FloatArray]  # F_i(x), (m,), at one point
    gradients: Callable[[FloatArray], FloatArray]  # grad F_i(x_i), (m, d)
    randomness: Callable[
        [int, int, int], Any
    ]  # what clients draw, by step, from seed, round and number of steps
    noisy_gradients: Callable[
        [FloatArray, Any], FloatArray
    ]  # the gradients with what was drawn in one step


def local_work(
    problem: Problem, x_d: FloatArray, lr: float, steps_random: Any
) -> tuple[Params, FloatArray]:
    """SGD, x <- x - lr g, of every client from the same model: u_i, float32 (m, d),
    ``Reports.step_variance``, (m,).
    """
    x_md = np.tile(x_d, (problem.num_clients, 1))
    squared_m = np.zeros(problem.num_clients)
    for drawn_m in steps_random:
        step_md = lr * problem.noisy_gradients(x_md, drawn_m)
        x_md -= step_md
        squared_m += np.einsum("md,md->m", step_md, step_md)
    update_md = x_md - x_d
    mean_md = update_md / len(steps_random)
    variance_m = squared_m / len(steps_random) - np.einsum("md,md->m", mean_md, mean_md)
    return update_md.astype(np.float32), np.maximum(variance_m, 0.0)


def make_quadratics(m: int, d: int, noise: float, from_optimum: bool) -> Problem:
    """F_i = 1/2 (x - b_i)' A_i (x - b_i) with random curvatures in [0.1, 1], from the minimum of f
    or 3 away from it.

    Distances and noise differ between clients by lognormal factors (sigma = 1). ``noise`` is the
    root mean square over clients of the standard deviation of a whole gradient.
    """
    rng = stream(0, "data")
    basis_mdd = np.linalg.qr(rng.standard_normal((m, d, d)))[0]
    value_md = np.exp(rng.uniform(np.log(LEAST_CURVATURE), 0.0, size=(m, d)))
    value_md[:, 0] = 1.0
    curvature_mdd = np.einsum("mde,me,mfe->mdf", basis_mdd, value_md, basis_mdd)
    centre_md = rng.standard_normal((m, d)) * rng.lognormal(size=(m, 1))
    size_m = rng.lognormal(size=m)
    noise_m = noise * size_m / np.sqrt(d * np.mean(size_m**2))
    optimum_d = np.linalg.solve(
        curvature_mdd.sum(axis=0), np.einsum("mde,me->d", curvature_mdd, centre_md)
    )
    away_d = rng.standard_normal(d)
    start_d = optimum_d + (0.0 if from_optimum else 3.0) * away_d / np.linalg.norm(away_d)

    def losses(x_d: FloatArray) -> FloatArray:
        away_md = x_d - centre_md
        return np.asarray(0.5 * np.einsum("md,mde,me->m", away_md, curvature_mdd, away_md))

    def gradients(x_md: FloatArray) -> FloatArray:
        return np.asarray((curvature_mdd @ (x_md - centre_md)[:, :, None])[:, :, 0])

    def randomness(seed: int, round: int, steps: int) -> FloatArray:
        return stream(seed, "noise", round).standard_normal((steps, m, d))

    def noisy_gradients(x_md: FloatArray, drawn_md: FloatArray) -> FloatArray:
        return np.asarray(gradients(x_md) + noise_m[:, None] * drawn_md)

    return Problem(start_d, 1.0, m, losses, gradients, randomness, noisy_gradients)


def make_robust_regression(m: int, d: int) -> Problem:
    """F_i = mean_j rho(a_ij' x - y_ij), rho(r) = r^2 / (2 + 2 r^2) (Geman and McClure), |rho''| <=
    1.

    Each client has its own truth about a common one, its own spread of features, and a tenth of
    wild targets. At the start, x = 0, residuals are about 1, where rho turns from convex to
    concave.
    """
    rng = stream(0, "data", client=1)
    feature_mjd = rng.standard_normal((m, EXAMPLES, d)) * rng.lognormal(sigma=0.2, size=(m, 1, 1))
    truth_md = 0.7 * (rng.standard_normal(d) + rng.standard_normal((m, d))) / np.sqrt(d)
    target_mj = np.einsum("mjd,md->mj", feature_mjd, truth_md) + 0.1 * rng.standard_normal(
        (m, EXAMPLES)
    )
    wild_mj = rng.random((m, EXAMPLES)) < 0.1
    target_mj = np.where(wild_mj, target_mj + 5 * rng.standard_normal((m, EXAMPLES)), target_mj)
    second_mdd = np.einsum("mjd,mje->mde", feature_mjd, feature_mjd) / EXAMPLES
    row_m = np.arange(m)[:, None]

    def losses(x_d: FloatArray) -> FloatArray:
        square_mj = (feature_mjd @ x_d - target_mj) ** 2
        return np.asarray(np.mean(square_mj / (2 + 2 * square_mj), axis=1))

    def mean_slope(own_mjd: FloatArray, own_mj: FloatArray, x_md: FloatArray) -> FloatArray:
        """mean_j rho'(a_j' x - y_j) a_j for each client, rho'(r) = r / (1 + r^2)^2."""
        residual_mj = (own_mjd @ x_md[:, :, None])[:, :, 0] - own_mj
        slope_mj = residual_mj / (1 + residual_mj**2) ** 2
        return np.asarray((slope_mj[:, None, :] @ own_mjd)[:, 0, :] / own_mj.shape[1])

    def randomness(seed: int, round: int, steps: int) -> IntArray:
        """Indices of the minibatches, drawn with replacement."""
        return stream(seed, "batches", round).integers(EXAMPLES, size=(steps, m, BATCH))

    def noisy_gradients(x_md: FloatArray, drawn_mb: IntArray) -> FloatArray:
        return mean_slope(feature_mjd[row_m, drawn_mb], target_mj[row_m, drawn_mb], x_md)

    smoothness = float(np.linalg.eigvalsh(second_mdd).max())
    gradients = partial(mean_slope, feature_mjd, target_mj)
    return Problem(np.zeros(d), smoothness, m, losses, gradients, randomness, noisy_gradients)


def make_problem(name: str, clients: int, dimension: int, noise: float) -> Problem:
    match name:
        case "quadratics":
            return make_quadratics(clients, dimension, noise, from_optimum=False)
        case "quadratics-from-optimum":
            return make_quadratics(clients, dimension, noise=0.0, from_optimum=True)
        case "robust-regression":
            return make_robust_regression(clients, dimension)
    raise unknown_name(
        "problem", name, ("quadratics", "quadratics-from-optimum", "robust-regression")
    )
