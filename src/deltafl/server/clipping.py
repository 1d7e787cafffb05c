"""Clipping by the median: bounds what clients that lie can do to the model and to the samplers'
scores.

With ``clip="median"``, R = 1.25 times the median norm of every client's last update, as it was
sent: one vote a client. Whatever u_i a client sends, it counts as

    u'_i = u_i min(1, R / norm(u_i))
    c_i + (u'_i - c_i) min(1, (1.5 / n) R / (coef_i norm(u'_i - c_i)))

with c_i the control variate and coef_i the coefficient of one draw if all reply. So no client moves
the estimate by more than 1.5 R / n for each time it was drawn, however rarely it was selected or
has replied; by R at most where coefficients sum to 1 and the others are silent. R, c_i and coef_i
are known before the draw: the estimate is unbiased for the sum of the clipped updates, and
**biased** for that of the updates. Where no norm is known yet, in the first round, the median is
that of its replies. Medians are lower medians, so that one of two clients cannot raise them; where
more than half of the last updates are 0, R is 0 and the model stays.

Samplers learn from the clipped updates. What a client reports, or what is measured on it, counts at
most 1.5 times the median of the round's replies: sending alternating signs or reporting a large
loss does not get a client selected more.

It bounds the harm of fewer than half of the clients; many small lies in one direction, such as a
backdoor's, pass.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..moves import Moves
from ..scale.numerics import lower_median
from ..types import FloatArray, IntArray, KnownSizes, Params, Reports
from .norms import squared_norms
from .part import Intake, PlanOfParts, ServerPart

#: R over the median norm; the largest share of a step over the equal share 1 / n; scores over their
#: median.
RADIUS = 1.25
SHARE = 1.5
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

    norm_m: KnownSizes


@dataclass(frozen=True)
class Clip(ServerPart):
    """Clip long updates of hostile clients, by the median of all."""

    clip: str
    name = "clip"
    biased = True
    needs_single_updates = "clip shortens each update"
    longest_answer = RADIUS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip != "median":
            raise DeltaflError(
                f"clip is {self.clip!r}; write clip='median', or None for updates as they were sent"
            )

    def init(self, plan: PlanOfParts, params_d: Params) -> KnownNorms:
        return KnownNorms(np.full(plan.population.num_clients, np.nan))

    def intake(
        self,
        plan: PlanOfParts,
        own: KnownNorms,
        coef_n: FloatArray,
    ) -> "Clipping":
        return Clipping(own, coef_n, plan.n)

    def resized(self, own: KnownNorms, moves: Moves) -> KnownNorms:
        return KnownNorms(moves.rows(own.norm_m, np.nan))


class Clipping(Intake):
    """The clipping of one round.

    Attributes:
        norm_n: The norms of the cohort's updates as they were sent; NaN without a usable reply.
        radius: R; NaN until a norm is known.
        factor_n: What an update was multiplied with, or its distance from c_i if that is less.
    """

    def __init__(
        self,
        norms: KnownNorms,
        coef_n: FloatArray,
        n: int,
    ) -> None:
        super().__init__(len(coef_n))
        self.norm_n = np.full(len(coef_n), np.nan)
        self.radius = RADIUS * lower_median(norms.norm_m)
        # Without R, which in the first round is known only later.
        # A coefficient of 0 moves nothing, however long the update.
        with np.errstate(divide="ignore"):
            self._reach_n = SHARE / (n * coef_n)

    def counted(
        self,
        place_k: IntArray,
        update_kd: Params,
        control_kd: FloatArray,
    ) -> Params:
        self.norm_n[place_k] = np.sqrt(squared_norms(update_kd))
        # In the first round no norm is known but those of its replies.
        if np.isnan(self.radius):
            self.radius = RADIUS * lower_median(self.norm_n)
        first_k1 = _factor(self.radius, self.norm_n[place_k])
        wide_kd = update_kd * first_k1
        residual_kd = wide_kd - control_kd
        length_k = np.sqrt(squared_norms(residual_kd))
        factor_k1 = _factor(self._reach_n[place_k] * self.radius, length_k)
        self.factor_n[place_k] = np.minimum(first_k1, factor_k1)[:, 0]
        # Where nothing is cut it is the update itself, for c + (u - c) would round it.
        clipped_kd = np.where(
            factor_k1 < 1,
            control_kd + factor_k1 * residual_kd,
            wide_kd,
        )
        return clipped_kd.astype(np.float32)

    def scored(self, reports: Reports) -> Reports:
        """Reports in which no number that scores are made of is far above the replies' median."""
        here_n = reports.responded_n
        columns = {}
        for name, power in _SCORED.items():
            column_n = reports._asdict()[name]
            middle = lower_median(column_n[here_n].astype(float))
            most = SCORE**power * middle
            if middle <= 0:  # losses may be negative: their limit is nearer to 0
                most = middle * SCORE**-1
            too_large_n = here_n & (column_n > most)
            columns[name] = np.where(too_large_n, most, column_n).astype(column_n.dtype)
        return reports._replace(**columns)

    def closed(
        self,
        own: KnownNorms,
        client_n: IntArray,
        here_n: Any,
    ) -> KnownNorms:
        # As they were sent: clipped norms would let the median fall for ever.
        norm_m = own.norm_m.copy()
        norm_m[client_n] = self.norm_n[here_n]
        return KnownNorms(norm_m)


def _factor(most: FloatArray | float, length_k: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        factor_k = np.where(length_k > most, most / length_k, 1.0)
    return factor_k[:, None]
