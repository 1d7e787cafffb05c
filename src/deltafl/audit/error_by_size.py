"""How good the estimates of a method would be with any number of clients, from fixed updates.

For residuals r_i = u_i - c_i and coefficients w_i K_i / e_i, K_i how often client i is drawn and
e_i its mean, the error is sum_i (w_i / e_i) (K_i - e_i) r_i, and so

    MSE(n) = sum_ij (w_i w_j / e_i e_j) Cov(K_i, K_j) <r_i, r_j>.

``designs/covariance.py`` has Cov(K) where a formula is known. Of few clients it is enumerated. In
strata each has a draw of its own, and Cov(K) is made of theirs: with C_h that of stratum h, and
strata drawn first with Cov(I_h, I_k) = D_hk and means pi_h,

    Cov(K_i, K_j) = [h = k] pi_h C_h,ij + D_hk e_i e_j / (pi_h pi_k),  i in h, j in k.

Elsewhere cohorts are drawn with the sampler's own code, which costs no training
(``estimate_error``).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from ..designs.covariance import covariance
from ..designs.exact import MAX_CLIENTS, support
from ..designs.table import DESIGNS, Chooser, draw_by
from ..estimators.table import find_estimator, horvitz_thompson
from ..plan import Plan, RoundState
from ..server.strata import ByStrata
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


class _Draw(NamedTuple):
    """What a draw is made by."""

    design: str
    expected_m: FloatArray
    value_mq: FloatArray | None

    def covariance(self) -> FloatArray | None:
        """Cov(K) by a formula, or by all cohorts of few clients; None if neither is known."""
        if self.value_mq is None:
            formula_mm = covariance(self.design, self.expected_m)
            if formula_mm is not None:
                return formula_mm
        # Counts of an inexact design do not vary about their expectations.
        if len(self.expected_m) > MAX_CLIENTS or not DESIGNS[self.design].exact:
            return None
        cohorts = support(self.design, self.expected_m, self.value_mq)
        chance_k = np.array(list(cohorts.values()))
        off_km = np.array(list(cohorts), float) - self.expected_m
        return np.asarray((off_km.T * chance_k) @ off_km)


class _Witness(Chooser):
    """Stands in for a generator, and notes what a sampler draws by.

    With ``visits_all`` the first draw is one of strata, and yields all of them: each is then drawn
    from as if it had been selected.
    """

    def __init__(self, visits_all: bool) -> None:
        self.draws: list[_Draw] = []
        self._visits_all = visits_all
        self._rng = stream(0, "audit", 0)

    def choose(
        self,
        design: str,
        expected_m: FloatArray,
        value_mq: FloatArray | None = None,
    ) -> IntArray:
        self.draws.append(_Draw(design, expected_m, value_mq))
        if self._visits_all and len(self.draws) == 1:
            return np.arange(len(expected_m))
        return draw_by(design, expected_m, self._rng, value_mq)


def _by_formula(
    plan: Plan,
    state: RoundState,
    oracle: Oracle,
    update_md: Params,
) -> float | None:
    """The MSE by ``covariance``; None without one, or if coefficients are not w_i K_i / e_i."""
    weight_m = plan.population.weight_m
    rule = find_estimator(plan.estimator)
    if rule.coefficients is not horvitz_thompson:
        return None
    counts = _counts(plan, state, oracle)
    if counts is None:
        return None
    expected_m, covariance_mm = counts
    # In float64: it is differences of nearly equal numbers that count.
    wide_md = update_md.astype(np.float64)
    _, control_md = rule.control.value(state.control, np.arange(len(weight_m)))
    factor_m = weight_m / expected_m
    row_md = factor_m[:, None] * (wide_md - control_md)
    mean_d = weight_m @ wide_md
    # sum_ij C_ij <r_i, r_j> without the (m, m) inner products.
    squared = float(np.sum(row_md * (covariance_mm @ row_md)))
    # Rounding can take an error of 0 below it.
    return max(squared, 0.0) / float(mean_d @ mean_d)


def _counts(plan: Plan, state: RoundState, oracle: Oracle) -> tuple[FloatArray, FloatArray] | None:
    """E K, (m,), and Cov(K), (m, m), of a plan's cohorts; None if a part of it is not known."""
    m = plan.population.num_clients
    by_strata = [part for part in plan.parts if isinstance(part, ByStrata)]
    in_stages = any(part.stages for part in by_strata)
    witness = _Witness(in_stages)
    # A sampler that draws in a way of its own asks for more than a ``Chooser`` has.
    with suppress(AttributeError, TypeError):
        plan.draw(state, np.ones(m, bool), cast(Rng, witness), oracle, plan.n)
    draws = witness.draws
    member_h = [np.arange(m)]
    strata = plan.population.strata
    if by_strata and strata is not None:
        member_h = [np.flatnonzero(strata.code_m == h) for h in np.unique(strata.code_m)]
    # Without stages all strata are sure to be drawn, and nothing varies between them.
    first_h = np.ones(len(member_h))
    between_hh: FloatArray | None = np.zeros((len(member_h), len(member_h)))
    if in_stages and draws:
        first_h = draws[0].expected_m
        between_hh = draws[0].covariance()
        draws = draws[1:]
    # A sampler that draws several times, each time of some clients, draws no cohort by one formula.
    if between_hh is None or [len(d.expected_m) for d in draws] != [len(k) for k in member_h]:
        return None
    expected_m = np.zeros(m)
    covariance_mm = np.zeros((m, m))
    code_m = np.zeros(m, np.int64)
    for h, (draw, member_k) in enumerate(zip(draws, member_h, strict=True)):
        within_kk = draw.covariance()
        if within_kk is None or not np.all(draw.expected_m > 0):
            return None
        expected_m[member_k] = draw.expected_m
        covariance_mm[np.ix_(member_k, member_k)] = first_h[h] * within_kk
        code_m[member_k] = h
    covariance_mm += between_hh[np.ix_(code_m, code_m)] * np.outer(expected_m, expected_m)
    return first_h[code_m] * expected_m, covariance_mm
