"""Cohorts that are balanced on auxiliary variables of the clients, such as their shares of each label."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..types import BoolArray, FloatArray, Oracle, Population
from .base import Scored

#: An axis whose variance is less than this share of the mean square is one in which clients do not differ.
_NO_SPREAD = 1e-9


class BalancedState(NamedTuple):
    """What the draws go by; it never changes."""

    weight_m: FloatArray
    value_mq: FloatArray  # w_i x_i, x_i the centred auxiliary variables on the axes in which clients differ


@dataclass(frozen=True)
class Balanced(Scored):
    """Draws by weight, such that the cohort's estimate of the totals of the auxiliary variables x_i is right.

    The cube design keeps ``sum_S (w_i / pi_i) x_i = sum_j w_j x_j`` up to the last q + 1 clients that it has to decide,
    so that the part of the updates that is linear in x is estimated without error (docs/theory.md, section 10). The
    design ``"local-pivotal"`` spreads cohorts over the x_i, and others ignore them. Without any, as
    ``md-fixed@pivotal``.

    Source: this project. Balanced sampling: Deville and Tille 2004.
    """

    design: str = "cube"

    uses_aux: ClassVar[bool] = True

    def init(self, population: Population) -> BalancedState:
        weight_m, aux_mq = population.weight_m, population.aux_mq
        if aux_mq is None:
            return BalancedState(weight_m, np.zeros((len(weight_m), 0)))
        return BalancedState(weight_m, weight_m[:, None] * _varying(aux_mq, weight_m))

    def scores(self, state: BalancedState, available_m: BoolArray | None, n: int, oracle: Oracle | None) -> FloatArray:
        return state.weight_m

    def values(self, state: BalancedState) -> FloatArray:
        return state.value_mq


def _varying(aux_mq: FloatArray, weight_m: FloatArray) -> FloatArray:
    """The rows about their weighted mean, on the axes in which they differ: shares that sum to 1 have one fewer.

    A column that others determine would cost the cube as much as an independent one. The mean needs no balance.
    """
    centred_mq = aux_mq - np.einsum("m,mq->q", weight_m, aux_mq)
    size = np.einsum("m,mq->q", weight_m, aux_mq**2).max(initial=0.0)
    spread_q, axis_qq = np.linalg.eigh(np.einsum("m,mp,mq->pq", weight_m, centred_mq, centred_mq))
    kept_qr = axis_qq[:, spread_q > _NO_SPREAD * size]
    return np.asarray(np.einsum("mq,qr->mr", centred_mq, kept_qr))
