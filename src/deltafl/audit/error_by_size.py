"""How good the estimates of a method would be with any number of clients, from fixed updates.

For residuals r_i = u_i - c_i and coefficients w_i K_i / e_i, K_i how often client i is drawn and
e_i its mean, the error is sum_i (w_i / e_i) (K_i - e_i) r_i, and so

    MSE(n) = sum_ij (w_i w_j / e_i e_j) Cov(K_i, K_j) <r_i, r_j>.

``covariance`` has Cov(K) where a formula is known: Poisson draws, draws with replacement, and equal
expectations of clients in random order, where it is that of simple random sampling. Elsewhere
cohorts are drawn with the sampler's own code, which costs no training (``estimate_error``).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from ..designs.table import DESIGNS, Chooser, draw_by
from ..estimators.table import find_estimator, horvitz_thompson
from ..plan import Plan, RoundState
from ..streams import stream
from ..types import FloatArray, IntArray, Oracle, Params, Rng
from .methods import estimate_error


class ErrorOfSize(NamedTuple):
    """The mean squared error of a round's estimate with n clients."""

    n: int
    mse: float  #: E norm(D - ubar)^2 / norm(ubar)^2
    exact: bool  #: by a formula or by all cohorts; otherwise ``draws`` cohorts were drawn


def error_by_size(
    plan: Plan,
    state: RoundState,
    oracle: Oracle,
    update_md: Params,
    sizes: Iterable[int],
    draws: int = 50,
) -> Iterator[ErrorOfSize]:
    """The error of a plan's estimate in a state with other numbers of clients n.

    What sampler and control variate remember stays that of ``state``.

    Args:
        plan: The method.
        state: The round's state.
        oracle: Of the round, for theoretical samplers.
        update_md: Every client's update from the model of ``state``, (m, d).
        sizes: The n, 1 to m.
        draws: Cohorts drawn where there is neither a formula nor an enumeration.
    """
    for n in sizes:
        # The memory stays: it is this round's estimate that is judged.
        sized = replace(plan, n=n)
        mse = _by_formula(sized, state, oracle, update_md)
        if mse is not None:
            yield ErrorOfSize(n, mse, exact=True)
        else:
            error = estimate_error(sized, state, oracle, update_md, draws)
            yield ErrorOfSize(n, error.mse, error.exact)


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
    if not (in_random_order and np.allclose(expected_m, share)):
        return None
    # All pairs are as frequent, and the sum of K never varies.
    centring_mm = np.eye(m) - 1 / m
    return np.asarray(share * (1 - share) * m / max(m - 1, 1) * centring_mm)


class _Witness(Chooser):
    """Stands in for a generator, and notes what a sampler draws by."""

    def __init__(self) -> None:
        self.draws = 0
        self.design = ""
        self.expected_m: FloatArray = np.zeros(0)
        self._rng = stream(0, "audit", 0)

    def choose(
        self, design: str, expected_m: FloatArray, value_mq: FloatArray | None = None
    ) -> IntArray:
        self.draws += 1
        # Draws by values have no formula.
        if value_mq is None:
            self.design = design
            self.expected_m = expected_m
        return draw_by(design, expected_m, self._rng, value_mq)


def _by_formula(plan: Plan, state: RoundState, oracle: Oracle, update_md: Params) -> float | None:
    """The MSE by ``covariance``; None without one, or if coefficients are not w_i K_i / e_i."""
    weight_m = plan.population.weight_m
    rule = find_estimator(plan.estimator)
    if rule.coefficients is not horvitz_thompson:
        return None
    witness = _Witness()
    everyone = np.ones(len(weight_m), bool)
    # A sampler that draws in a way of its own asks for more than a ``Chooser`` has.
    with suppress(AttributeError, TypeError):
        plan.draw(state, everyone, cast(Rng, witness), oracle, plan.n)
    # Of several draws in a round, each of some clients, none is the cohort.
    if witness.draws != 1 or not witness.design or not np.all(witness.expected_m > 0):
        return None
    covariance_mm = covariance(witness.design, witness.expected_m)
    if covariance_mm is None:
        return None
    # In float64: it is differences of nearly equal numbers that count.
    wide_md = update_md.astype(np.float64)
    _, control_md = rule.control.value(state.control, np.arange(len(weight_m)))
    factor_m = weight_m / witness.expected_m
    row_md = factor_m[:, None] * (wide_md - control_md)
    mean_d = weight_m @ wide_md
    # sum_ij C_ij <r_i, r_j> without the (m, m) inner products.
    squared = float(np.sum(row_md * (covariance_mm @ row_md)))
    return max(squared, 0.0) / float(mean_d @ mean_d)
