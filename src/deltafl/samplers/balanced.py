"""Cohorts that are balanced on auxiliary variables of the clients, known beforehand or made from
a census.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.inclusion import with_floor
from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, Nothing, Oracle, Population, Reports
from .base import per_second
from .census import Census
from .centred import Centred, CentredState

#: An axis whose variance is less than this share of the mean square is one in which clients do not
#: differ.
_NO_SPREAD = 1e-9


class Visits(NamedTuple):
    """What the scores depend on."""

    seen: CentredState
    # factors of the squared residuals that clients not seen yet are taken to have, of mean 1
    prior_m: FloatArray


class BalancedState(NamedTuple):
    """What the draws depend on."""

    factor_m: FloatArray  # of the scores: w_i, or w_i / sqrt(seconds_i)
    # w_i x_i, x_i the centred auxiliary variables on the axes in which clients differ
    value_mq: FloatArray
    visits: Visits | Nothing


@dataclass(frozen=True)
class Balanced(Centred):
    """Draws cohorts whose estimates of the totals of the auxiliary variables x_i are exact.

    The cube design keeps ``sum_S (w_i / pi_i) x_i = sum_j w_j x_j`` up to the last q + 1 clients
    that it decides, so that the part of the updates that is linear in x is estimated without error
    (docs/theory.md, section 10). The design ``"anticluster"`` has no such last clients and balances
    squares of the x_i, too; ``"local-pivotal"`` spreads cohorts over the x_i, and other designs
    ignore them. Without auxiliary variables it equals ``md-fixed@pivotal``.

    Source: this project. Balanced sampling: Deville and Tille 2004.

    Attributes:
        by_norm: Score w_i a_i, with a_i the predicted norm of u_i - c_i, the part that is not
            linear in x; if False, w_i alone. The other options are as in ``Centred``.
    """

    design: str = "cube"
    by_norm: bool = False
    floor: float = 0.0
    sketch: int = 0

    uses_aux: ClassVar[bool] = True

    def init(self, population: Population) -> BalancedState:  # type: ignore[override]
        weight_m = population.weight_m
        aux_mq = population.aux_mq
        if self.census is not None and aux_mq is None:
            raise DeltaflError(
                "this sampler begins with a census: write answers = [plan.census.answer(u) ...] "
                "with the first "
                "update u of every client, then plan = plan.with_census(answers)"
            )
        value_mq = (
            np.zeros((len(weight_m), 0))
            if aux_mq is None
            else weight_m[:, None] * _varying(aux_mq, weight_m)
        )
        visits = (
            Visits(super().init(population), self._prior(population)) if self.by_norm else Nothing()
        )
        return BalancedState(per_second(weight_m, population, self.per_second), value_mq, visits)

    def _prior(self, population: Population) -> FloatArray:
        """Squares of the census's norms over their mean, shrunk towards it like those of later
        visits.
        """
        norm_m = (
            np.full(population.num_clients, np.nan)
            if population.norm_m is None
            else population.norm_m
        )
        if np.isnan(norm_m).all():
            return np.ones(len(norm_m))
        square_m = (norm_m / np.nanmax(norm_m)) ** 2
        mean = np.nanmean(square_m)
        return np.asarray(
            (1 - self.shrink) * np.where(np.isnan(norm_m), mean, square_m) / mean + self.shrink
        )

    def scores(  # type: ignore[override]
        self, state: BalancedState, available_m: BoolArray | None, n: int, oracle: Oracle | None
    ) -> FloatArray:
        if not isinstance(state.visits, Visits):
            return state.factor_m
        residual_m = self.residual(state.visits.seen, n, state.visits.prior_m)
        return with_floor(state.factor_m * residual_m, self.floor, available_m=available_m)

    def values(self, state: BalancedState) -> FloatArray:  # type: ignore[override]
        return state.value_mq

    def update(self, state: BalancedState, cohort: Cohort, reports: Reports) -> BalancedState:  # type: ignore[override]
        if not isinstance(state.visits, Visits):
            return state
        return state._replace(
            visits=state.visits._replace(seen=super().update(state.visits.seen, cohort, reports))
        )


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
    """The rows about their weighted mean, on the axes in which they differ: shares that sum to 1
    have one fewer.

    A column that others determine would cost the cube as much as an independent one. The mean needs
    no balance.
    """
    centred_mq = aux_mq - np.einsum("m,mq->q", weight_m, aux_mq)
    size = np.einsum("m,mq->q", weight_m, aux_mq**2).max(initial=0.0)
    spread_q, axis_qq = np.linalg.eigh(np.einsum("m,mp,mq->pq", weight_m, centred_mq, centred_mq))
    kept_qr = axis_qq[:, spread_q > _NO_SPREAD * size]
    return np.asarray(np.einsum("mq,qr->mr", centred_mq, kept_qr))
