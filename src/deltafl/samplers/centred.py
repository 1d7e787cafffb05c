"""The samplers of this project: they score residuals u_i - c_i, c the estimator's control variate.

``Centred`` is ``delta-centred``, ``innovation`` and ``spread``; ``Balanced`` and
``BalancedByCensus`` are ``balanced`` and ``census``. Section 10 of the theory,
docs/why/theory/scores.md, derives the scores.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from ..designs.inclusion import with_floor
from ..designs.table import find_design
from ..errors import DeltaflError
from ..types import (
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    KnownSizes,
    Oracle,
    Population,
    Reports,
    Sizes,
    Within,
)
from .base import ZERO, Priced, replied, with_rows
from .census import Census

_PRIOR_VISITS = 5  # the weight of the prior 1/2, in second visits
#: On an axis of less variance, as a share of the mean square, clients do not differ.
_NO_SPREAD = 1e-9


class CentredState(NamedTuple):
    """What the server stores about each client."""

    weight_m: FloatArray
    factor_m: FloatArray  # of the scores: w_i, or w_i / sqrt(seconds_i)
    # squared residuals expected of clients not seen yet, in their mean, such as a census's claims
    prior_m: Sizes
    first_m: KnownSizes  # norm(u_i - c_i)^2 when it was seen first; NaN until then
    # exponential mean of norm(u_i - c_i)^2 over its other visits; NaN until its second
    square_m: KnownSizes
    # the round in which it was last seen; -1 for never
    seen_m: Annotated[IntArray, Within("[-1, round]")]
    rounds: Counts  # (), rounds closed
    # what cohorts are spread over: exponential mean of the sketches of u_i - c_i, 0 until seen; or
    # auxiliary variables x_i, which stay
    about_mq: FloatArray

    def is_consistent(self) -> bool:
        """Whether all fields say the same of who was seen."""
        seen_m = self.seen_m >= 0
        again_m = ~np.isnan(self.square_m)
        once_m = ~np.isnan(self.first_m)
        no_later = bool(np.all(self.seen_m < np.maximum(self.rounds, 1)))
        return no_later and np.array_equal(seen_m, once_m) and not np.any(again_m & ~once_m)


@dataclass(frozen=True)
class Centred(Priced):
    """Draws by the predicted norm of each client's residual, from its earlier visits.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; those that spread cohorts over values get the
            sketches.
        by_norm: Score w_i a_i; if False, w_i alone.
        own_memory: Whether the control variate is each client's own last update. Residuals of first
            visits, when no update is stored yet, are then predicted separately from later ones.
        ageing: In [0, 1e9], how a^2 grows with the age of the stored update: by (1 + ageing age n /
            m) / (1 + ageing), which is 1 at the mean time between two visits; 0 for no growth.
        floor: g in [0, 1], the share of the cohort that is drawn uniformly.
        shrink: In [0, 1], how far each a_i^2 is shrunk towards the mean of all. **Biased** if it
            and ``floor`` are 0.
        forgetting: In (0, 1], the share of the newest value in the exponential means.
        sketch: Length of a sketch, 0 to 128, where the design spreads cohorts over values.
        per_second: Whether scores are divided by the root of each client's expected seconds
            (``probabilities_for_budget``).
        per_cost: Whether they are divided by the root of its ``Population.cost_m``.
    """

    by_norm: bool = True
    own_memory: bool = False
    ageing: float = 1.0
    floor: float = 0.2
    shrink: float = 0.2
    forgetting: float = 0.5
    sketch: int = 8
    per_second: bool = False
    per_cost: bool = False

    ranges: ClassVar = {
        "floor": "[0, 1]",
        "shrink": "[0, 1]",
        "forgetting": "(0, 1]",
        "ageing": "[0, 1e9]",
        "sketch": "[0, 128]",
    }
    row_fields = ("first_m", "square_m", "seen_m", "about_mq")
    kept_fields = ("rounds",)
    fixed_fields = ("weight_m", "factor_m", "prior_m")

    @property
    def unbiased(self) -> bool:
        # Shrinkage keeps a client whose residual was 0 above 0.
        reaches_all = self.floor > 0 or self.shrink > 0 or not self.by_norm
        return reaches_all and find_design(self.design).exact

    @property
    def sketch_size(self) -> int:
        # Other designs would not look at the sketches.
        return self.sketch * find_design(self.design).uses_values

    def init(self, population: Population) -> CentredState:
        m = population.num_clients
        return CentredState(
            weight_m=population.weight_m,
            factor_m=self.cheaper_first(population.weight_m, population),
            prior_m=np.ones(m),
            first_m=np.full(m, np.nan),
            square_m=np.full(m, np.nan),
            seen_m=np.full(m, -1, np.int64),
            rounds=ZERO,
            about_mq=np.zeros((m, self.sketch_size)),
        )

    def scores(
        self,
        state: CentredState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        return with_floor(
            state.factor_m * self.residual(state, n),
            self.floor,
            available_m,
        )

    def values(self, state: CentredState) -> FloatArray:
        # The draw divides by pi_i: its places are the y_i of section 10 of the theory.
        return state.weight_m[:, None] * state.about_mq

    def residual(self, state: CentredState, n: int) -> FloatArray:
        """The predicted norms a_i of u_i - c_i, float64 (m,)."""
        # No residual above 0 has been seen, so that nothing tells clients apart.
        if not self.by_norm or not np.any(state.first_m > 0):
            return np.sqrt(state.prior_m)
        seen_m = np.isfinite(state.first_m)
        again_m = np.isfinite(state.square_m)
        square_m = np.where(
            again_m,
            state.square_m,
            state.first_m * self._remaining(state),
        )
        square_m *= self._growth(state, n / len(seen_m))
        first = state.first_m[seen_m].mean()
        # 0 if all repeated their updates: shrinkage must not rule them out
        mean = square_m[seen_m].mean() or first
        unseen = mean
        if self.own_memory:  # an unseen client has no memory yet
            unseen = first
        shrunk_m = (1 - self.shrink) * square_m + self.shrink * mean
        return np.asarray(np.sqrt(np.where(seen_m, shrunk_m, unseen * state.prior_m)))

    def _remaining(self, state: CentredState) -> float:
        """Mean ratio of later to first squared residuals; near 1/2 after few visits."""
        if not self.own_memory:
            return 1.0
        again_m = np.isfinite(state.square_m)
        # As if so many clients had come twice, and left half of their first squares the second
        # time.
        prior = _PRIOR_VISITS * float(np.nanmean(state.first_m))
        later = state.square_m[again_m].sum() + prior / 2
        return float(later / (state.first_m[again_m].sum() + prior))

    def _growth(self, state: CentredState, share: float) -> FloatArray:
        """(1 + ageing age n / m) / (1 + ageing) for clients with a memory that ages; else 1."""
        if not self.own_memory:
            return np.ones(len(state.seen_m))
        age_m = (state.rounds - state.seen_m) * share
        return np.where(
            state.seen_m < 0,
            1.0,
            (1 + self.ageing * age_m) / (1 + self.ageing),
        )

    def update(
        self,
        state: CentredState,
        cohort: Cohort,
        reports: Reports,
    ) -> CentredState:
        client_n, reports = replied(cohort, reports)
        growth_m = self._growth(state, int(cohort.count_n.sum()) / len(state.weight_m))
        # As if after a mean time of absence, so that visits after short and long ones can be
        # averaged.
        newest_n = reports.squared_residual_n / growth_m[client_n]
        new_n = state.seen_m[client_n] < 0
        # Without a memory all visits are of one kind.
        later_n = ~new_n | (not self.own_memory)
        later = client_n[later_n]
        square_n = self._follow(state.square_m[later], newest_n[later_n])
        if self.sketch_size:
            # NaN is "nothing before": ``_follow`` then takes the newest alone.
            before_nq = np.where(new_n[:, None], np.nan, state.about_mq[client_n])
            about_nq = self._follow(before_nq, reports.sketch_nq)
            state = state._replace(about_mq=with_rows(state.about_mq, client_n, about_nq))
        return state._replace(
            first_m=with_rows(state.first_m, client_n[new_n], newest_n[new_n]),
            square_m=with_rows(state.square_m, later, square_n),
            seen_m=with_rows(state.seen_m, client_n, state.rounds),
            rounds=np.asarray(state.rounds + 1),
        )

    def _follow(self, before: FloatArray, newest: FloatArray) -> FloatArray:
        mean = (1 - self.forgetting) * before + self.forgetting * newest
        return np.where(np.isnan(before), newest, mean)


@dataclass(frozen=True)
class Balanced(Centred):
    """Draws cohorts whose estimates of the totals of the auxiliary variables x_i are exact.

    The cube design keeps ``sum_S (w_i / pi_i) x_i = sum_j w_j x_j`` up to the last q + 1 clients
    that it decides, so that the part of the updates that is linear in x is estimated without error
    (theory, section 10, docs/why/theory/auxiliary.md). The design ``"anticluster"`` has no such
    last clients and balances squares of the x_i, too; ``"local-pivotal"`` spreads cohorts over the
    x_i, and other designs ignore them. Without auxiliary variables it equals
    ``md-fixed@pivotal``.

    Source: this project. Balanced sampling: Deville and Tille 2004.

    Attributes:
        by_norm: Score w_i a_i, with a_i the predicted norm of u_i - c_i, the part that is not
            linear in x; if False, w_i alone.
    """

    design: str = "cube"
    by_norm: bool = False
    floor: float = 0.0

    uses_aux = True
    sketch_size = 0
    # Not ``about_mq``: a newcomer's answer changes the variables of all.
    row_fields = ("prior_m", "first_m", "square_m", "seen_m")
    fixed_fields = ("weight_m", "factor_m", "about_mq")

    def init(self, population: Population) -> CentredState:
        state = super().init(population)
        if population.norm_m is not None:
            state = state._replace(prior_m=self._prior(population.norm_m))
        if population.aux_mq is not None:
            return state._replace(about_mq=_varying(population.aux_mq, population.weight_m))
        if self.census is not None:
            raise DeltaflError(
                "this sampler begins with a census: write answers = [plan.census.answer(u) ...] "
                "with the first update u of every client, then plan = plan.with_census(answers)"
            )
        return state

    def update(
        self,
        state: CentredState,
        cohort: Cohort,
        reports: Reports,
    ) -> CentredState:
        # A claim that no reply confirms is believed half as much each time.
        silent_n = cohort.client_n[~reports.responded_n]
        prior_m = with_rows(state.prior_m, silent_n, (1 + state.prior_m[silent_n]) / 2)
        return super().update(state._replace(prior_m=prior_m), cohort, reports)

    def _prior(self, norm_m: FloatArray) -> FloatArray:
        """Squares of the census's norms over their mean, shrunk to it as those of later visits."""
        if np.isnan(norm_m).all():
            return np.ones(len(norm_m))
        # Only ratios matter; in units of the largest no square overflows.
        square_m = (norm_m / np.nanmax(norm_m)) ** 2
        mean = np.nanmean(square_m)
        known_m = np.where(np.isnan(norm_m), mean, square_m)
        return (1 - self.shrink) * known_m / mean + self.shrink

    def scores(
        self,
        state: CentredState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        # Balance alone: the scores are the weights, without the floor.
        if not self.by_norm:
            return state.factor_m
        return super().scores(state, available_m, n, oracle)


@dataclass(frozen=True)
class BalancedByCensus(Balanced):
    """Cohorts that represent all clients in what each of them answered once, in the first round.

    The cohort is one of several groups that are as alike as possible (``anticluster.py``). Clients
    that the answers explain badly are drawn more often. The census (``census.py``) is a round in
    which all clients train; it asks for no labels. The regression of updates on the x_i also
    predicts clients never seen (``two_phase.py``).

    Squared scores are shrunk half of the way to their mean (``shrink``), so no floor is needed.

    Attributes:
        components: Number of auxiliary variables made of the answers.
        size: Length of the sketch in an answer.
        noise: Standard deviation of the noise that a client adds to each of them.
    """

    design: str = "anticluster"
    by_norm: bool = True
    shrink: float = 0.5
    components: int = 10
    size: int = 128
    noise: float = 0.0

    ranges: ClassVar = Centred.ranges | Census.ranges

    @property
    def census(self) -> Census:
        return Census(self.components, self.size, self.noise)


def _varying(aux_mq: FloatArray, weight_m: FloatArray) -> FloatArray:
    """The rows about their weighted mean, on the axes in which they differ.

    A column that others determine, such as the last of shares that sum to 1, would cost the cube as
    much as an independent one. The mean needs no balance.
    """
    centred_mq = aux_mq - np.einsum("m,mq->q", weight_m, aux_mq)
    # Before centring: a column that is constant but for rounding has no spread that is worth
    # comparing with.
    size = np.einsum("m,mq->q", weight_m, aux_mq**2).max(initial=0.0)
    spread_q, axis_qq = np.linalg.eigh(
        np.einsum(
            "m,mp,mq->pq",
            weight_m,
            centred_mq,
            centred_mq,
        )
    )
    kept_qr = axis_qq[:, spread_q > _NO_SPREAD * size]
    return np.asarray(np.einsum("mq,qr->mr", centred_mq, kept_qr))
