"""Samplers of this project (``delta-centred``, ``innovation``, ``spread``): they score residuals
u_i - c_i.

The estimator has the control variate c (``control_variates.py``). docs/theory.md, section 10,
derives the scores.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.inclusion import with_floor
from ..designs.table import find_design
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import Scored, per_second, replied, with_rows

_PRIOR_VISITS = 5  # the weight of the prior 1/2, in second visits


class CentredState(NamedTuple):
    """What the server stores about each client."""

    weight_m: FloatArray
    factor_m: FloatArray  # of the scores: w_i, or w_i / sqrt(seconds_i)
    first_m: FloatArray  # norm(u_i - c_i)^2 when it was seen first; NaN until then
    # exponential mean of norm(u_i - c_i)^2 over its other visits; NaN until its second
    square_m: FloatArray
    seen_m: IntArray  # the round in which it was last seen; -1 for never
    rounds: IntArray  # (), rounds closed
    sketch_mq: FloatArray  # exponential mean of the sketches of u_i - c_i; 0 until seen


@dataclass(frozen=True)
class Centred(Scored):
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
        explore: In (0, 1e9], factor of a_i^2 for clients never seen; above 1 because a first visit
            also helps later.
        sketch: Length of a sketch, 0 to 128, where the design spreads cohorts over values.
        per_second: Whether scores are divided by the root of each client's expected seconds
            (``base.per_second``).
    """

    by_norm: bool = True
    own_memory: bool = False
    ageing: float = 1.0
    floor: float = 0.2
    shrink: float = 0.2
    forgetting: float = 0.5
    explore: float = 1.0
    sketch: int = 8
    per_second: bool = False

    ranges: ClassVar = {
        "floor": "[0, 1]",
        "shrink": "[0, 1]",
        "forgetting": "(0, 1]",
        "ageing": "[0, 1e9]",
        "explore": "(0, 1e9]",
        "sketch": "[0, 128]",
    }

    @property
    def unbiased(self) -> bool:
        return find_design(self.design).exact and (
            self.floor > 0 or self.shrink > 0 or not self.by_norm
        )

    @property
    def sketch_size(self) -> int:
        return self.sketch if find_design(self.design).uses_values else 0

    def init(self, population: Population) -> CentredState:
        m = population.num_clients
        return CentredState(
            weight_m=population.weight_m,
            factor_m=per_second(population.weight_m, population, self.per_second),
            first_m=np.full(m, np.nan),
            square_m=np.full(m, np.nan),
            seen_m=np.full(m, -1, dtype=np.int64),
            rounds=np.zeros((), dtype=np.int64),
            sketch_mq=np.zeros((m, self.sketch_size)),
        )

    def scores(
        self, state: CentredState, available_m: BoolArray | None, n: int, oracle: Oracle | None
    ) -> FloatArray:
        return with_floor(
            state.factor_m * self.residual(state, n), self.floor, available_m=available_m
        )

    def values(self, state: CentredState) -> FloatArray | None:
        return state.weight_m[:, None] * state.sketch_mq if self.sketch_size else None

    def residual(
        self, state: CentredState, n: int, prior_m: FloatArray | None = None
    ) -> FloatArray:
        """a_i, (m,); ``prior_m``: factors of the squares of clients not seen yet, of mean 1."""
        m = len(state.weight_m)
        prior_m = np.ones(m) if prior_m is None else prior_m
        seen_m = np.isfinite(state.first_m)
        again_m = np.isfinite(state.square_m)
        if not self.by_norm or not np.any(state.first_m > 0, where=seen_m):
            return np.sqrt(prior_m)
        first_m = np.where(seen_m, state.first_m, 0.0)
        once_m = first_m * self._remaining(state)
        square_m = np.where(again_m, state.square_m, once_m) * self._growth(state, n / m)
        first = first_m[seen_m].mean()
        mean = (
            square_m[seen_m].mean() or first
        )  # 0 if all repeated their updates: shrinkage must not rule them out
        unseen = first if self.own_memory else mean
        unseen_m = self.explore * unseen * prior_m
        expected_m = np.where(seen_m, (1 - self.shrink) * square_m + self.shrink * mean, unseen_m)
        return np.asarray(np.sqrt(expected_m))

    def _remaining(self, state: CentredState) -> float:
        """Mean ratio of later to first squared residuals; near its prior 1/2 as long as there
        are few visits.
        """
        if not self.own_memory:
            return 1.0
        again_m = np.isfinite(state.square_m)
        prior = _PRIOR_VISITS * float(np.nanmean(state.first_m))
        return float(
            (state.square_m[again_m].sum() + prior / 2) / (state.first_m[again_m].sum() + prior)
        )

    def _growth(self, state: CentredState, share: float) -> FloatArray:
        """(1 + ageing age n / m) / (1 + ageing) for clients that were seen, if there are
        memories to age; else 1.
        """
        if not self.own_memory:
            return np.ones(len(state.seen_m))
        age_m = (state.rounds - state.seen_m) * share
        return np.where(state.seen_m < 0, 1.0, (1 + self.ageing * age_m) / (1 + self.ageing))

    def update(self, state: CentredState, cohort: Cohort, reports: Reports) -> CentredState:
        client_n, reports = replied(cohort, reports)
        growth_m = self._growth(state, int(cohort.count_n.sum()) / len(state.weight_m))
        newest_n = reports.squared_residual_n / growth_m[client_n]
        new_n = state.seen_m[client_n] < 0
        later_n = (
            ~new_n if self.own_memory else np.ones_like(new_n)
        )  # without a memory all visits are of one kind
        later = client_n[later_n]
        before_nq = np.where(new_n[:, None], np.nan, state.sketch_mq[client_n])
        return CentredState(
            weight_m=state.weight_m,
            factor_m=state.factor_m,
            first_m=with_rows(state.first_m, client_n[new_n], newest_n[new_n]),
            square_m=with_rows(
                state.square_m, later, self._follow(state.square_m[later], newest_n[later_n])
            ),
            seen_m=with_rows(state.seen_m, client_n, state.rounds),
            rounds=np.asarray(state.rounds + 1),
            sketch_mq=with_rows(
                state.sketch_mq, client_n, self._follow(before_nq, reports.sketch_nq)
            ),
        )

    def _follow(self, before: FloatArray, newest: FloatArray) -> FloatArray:
        return np.where(
            np.isnan(before), newest, (1 - self.forgetting) * before + self.forgetting * newest
        )
