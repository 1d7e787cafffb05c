"""How good an estimate is, from the one cohort that made it.

``y_i = w_i (u_i - c_i)`` are the leftovers that the estimate adds up with weights 1 / pi_i.

- with replacement: V = sum_draws norm(n y_i / expected_i - D)^2 / (n (n - 1))                  (Hansen-Hurwitz 1943)
- Poisson:          V = sum_S (1 - pi_i) norm(y_i / pi_i)^2
- fixed size:       V = n/(n-1) sum_S (1 - pi_i) norm(y_i / pi_i - B)^2, B the (1 - pi)-weighted mean of y_i / pi_i
                    (Deville 1999 after Hajek 1964). Exact for simple random sampling; close for systematic and pivotal
                    draws in random order; conservative for stratified ones. Balanced draws (local-pivotal, cube)
                    count as fixed size: an over-estimate, as the formula knows nothing of the values they spread over;
                    ordered-pivotal draws too, an over-estimate where neighbours in the order are alike.

NaN where one cohort cannot tell (fewer than two undecided clients, unknown expectations).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import Cohort, FloatArray


class VarianceForm(NamedTuple):
    """V = ratio sum_i mass_i norm(scale_i y_i - B)^2; B is their mass-weighted mean if centred, else 0."""

    ratio: float
    mass_n: FloatArray
    scale_n: FloatArray
    centred: bool


def estimate_variance(cohort: Cohort, leftover_nd: npt.NDArray[np.floating]) -> float:
    """Estimate E norm(D - E D)^2 over draws.

    Args:
        cohort: The clients that replied.
        leftover_nd: (n, d) their y_i = w_i (u_i - c_i).

    Returns:
        The estimated variance, summed over coordinates, >= 0, in squared update units.
    """
    form = variance_form(cohort)
    if form is None:
        return float("nan")
    return form.ratio * _spread(form, leftover_nd) if form.mass_n.any() else 0.0


def variance_form(cohort: Cohort) -> VarianceForm | None:
    """The formula above that fits a cohort; None where it cannot tell."""
    expected_n, count_n = cohort.expected_n, cohort.count_n
    if not np.all(np.isfinite(expected_n)):
        return None
    if cohort.kind == "replacement":
        size = int(count_n.sum())
        if size < 2:
            return None
        return VarianceForm(1 / (size - 1), count_n / size, size / expected_n, centred=True)
    undecided = np.clip(1 - expected_n, 0.0, 1.0)
    if cohort.kind == "poisson":
        return VarianceForm(1.0, undecided, 1 / expected_n, centred=False)
    size = int(np.count_nonzero(undecided))
    if size == 1:
        return None
    return VarianceForm(size / max(size - 1, 1), undecided, 1 / expected_n, centred=True)


def _spread(form: VarianceForm, row_nd: npt.NDArray[np.floating]) -> float:
    """sum_i mass_i norm(scale_i row_i - centre)^2."""
    scaled_nd = form.scale_n[:, None] * row_nd
    if form.centred:
        scaled_nd = scaled_nd - (form.mass_n[:, None] * scaled_nd).sum(axis=0) / form.mass_n.sum()
    return float(np.sum(form.mass_n * np.einsum("nd,nd->n", scaled_nd, scaled_nd)))


def effective_sample_size(coef_n: FloatArray) -> float:
    """(sum c)^2 / sum c^2: how many equally weighted replies the cohort is worth (Kish 1965); 0 without replies."""
    squares = float(np.sum(coef_n**2))
    return float(coef_n.sum()) ** 2 / squares if squares > 0 else 0.0
