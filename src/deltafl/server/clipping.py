"""Clipping by the median: bounds what clients that lie can do to the model and to the samplers'
scores.

With ``Plan(clip="median")``, R = 1.5 times the median norm of every client's last update, as it was
sent: one vote a client. Whatever u_i a client sends, it counts as

    u'_i = u_i min(1, R / norm(u_i)),  c_i + (u'_i - c_i) min(1, (3 / n) R / (coef_i norm(u'_i - c_i)))

with c_i the control variate and coef_i the coefficient of one draw if all reply. So no client moves
the estimate by more than 3 R / n for each time it was drawn, however rarely it was selected or has
replied; by R at most where coefficients sum to 1 and the others are silent. R, c_i and coef_i are
known before the draw: the estimate is unbiased for the sum of the clipped updates, and **biased**
for that of the updates. Where no norm is known yet, in the first round, the median is that of its
replies. Medians are lower medians, so that one of two clients cannot raise them; where more than
half of the last updates are 0, R is 0 and the model stays.

Samplers learn from the clipped updates. What a client reports, or what is measured on it, counts at
most 1.5 times the median of the round's replies: sending alternating signs or reporting a large
loss does not get a client selected more.

It bounds the harm of fewer than half of the clients; many small lies in one direction, such as a
backdoor's, pass.
"""

from typing import NamedTuple

import numpy as np

from ..types import FloatArray, IntArray, Nothing, Params, Reports
from .norms import squared_norms

#: R over the median norm; the largest share of a step over the equal share 1 / n; scores over their
#: median.
RADIUS = 1.5
SHARE = 3.0
SCORE = 1.5
#: Columns of reports that scores are made of, and the power of the update's or the loss's scale
#: that they grow with.
_SCORED = {
    "loss_n": 1,
    "num_steps_n": 1,
    "square_loss_n": 2,
    "step_variance_n": 2,
    "squared_norm_n": 2,
    "squared_deviation_n": 2,
    "squared_residual_n": 2,
}


class KnownNorms(NamedTuple):
    """The norm of each client's last update as it was sent, float64 (m,); NaN until there is
    one.
    """

    norm_m: FloatArray


def init_norms(clip: str | None, num_clients: int) -> KnownNorms | Nothing:
    """No norm known; nothing at all without clipping."""
    return Nothing() if clip is None else KnownNorms(np.full(num_clients, np.nan))


def lower_median(value_k: FloatArray) -> float:
    """The lower median of the numbers that are known; NaN if none is."""
    known_k = value_k[~np.isnan(value_k)]
    return float(np.quantile(known_k, 0.5, method="lower")) if len(known_k) else np.nan


class Clipping:
    """The clipping of one round.

    Attributes:
        norm_n: The norms of the cohort's updates as they were sent; NaN without a usable reply.
        radius: R; NaN until a norm is known.
        factor_n: What an update was multiplied with, or its distance from c_i if that is less; 1 if
            it was not clipped.
    """

    def __init__(self, norms: KnownNorms, coef_n: FloatArray, n: int) -> None:
        self.norm_n = np.full(len(coef_n), np.nan)
        self.radius = RADIUS * lower_median(norms.norm_m)
        self.factor_n = np.ones(len(coef_n))
        with np.errstate(divide="ignore"):
            self._reach_n = SHARE / (n * coef_n)

    def note(self, place_k: IntArray, update_kd: Params) -> None:
        """Remember the norms of updates as they were sent."""
        self.norm_n[place_k] = np.sqrt(squared_norms(update_kd)[0])

    def clip(self, place_k: IntArray, update_kd: Params, control_kd: FloatArray) -> Params:
        """The updates as they count."""
        if np.isnan(self.radius):
            self.radius = RADIUS * lower_median(self.norm_n)
        first_k1 = _factor(self.radius, self.norm_n[place_k])
        wide_kd = update_kd * first_k1
        residual_kd = wide_kd - control_kd
        length_k = np.sqrt(squared_norms(residual_kd)[0])
        factor_k1 = _factor(self._reach_n[place_k] * self.radius, length_k)
        self.factor_n[place_k] = np.minimum(first_k1, factor_k1)[:, 0]
        clipped_kd = np.where(factor_k1 < 1, control_kd + factor_k1 * residual_kd, wide_kd)
        return clipped_kd.astype(np.float32)


def _factor(most: FloatArray | float, length_k: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        factor_k = np.where(length_k > most, most / length_k, 1.0)
    return factor_k[:, None]


def capped(reports: Reports) -> Reports:
    """Reports in which no number that scores are made of is far above the median of the replies."""
    here = reports.responded_n
    columns = {}
    for name, power in _SCORED.items():
        column_n = getattr(reports, name)
        middle = lower_median(column_n[here].astype(np.float64))
        most = SCORE ** (power if middle > 0 else -1) * middle  # losses may be negative
        columns[name] = np.where(here & (column_n > most), most, column_n).astype(column_n.dtype)
    return reports._replace(**columns)
