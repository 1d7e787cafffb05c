"""A control that guesses updates from what is known of the clients: c_i = B x_i, B learnt from earlier rounds.

x_i = (1, known_i), see ``Population.aux_mq``: q numbers for each client, such as the shares of its labels. It guesses
the update of a client never seen as well as that of any other, and costs q models however many clients there are.

Source: the generalised regression estimator of survey sampling (Cassel, Sarndal and Wretman 1976; Sarndal, Swensson and
Wretman 1992), with B from the rounds before instead of from the cohort itself, so that it is unbiased.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, IntArray, Params, Population
from .controls import ControlValue
from .heard import Heard

#: Directions of x in which clients differ less than this share of the largest are taken for none.
_RANK_TOLERANCE = 1e-9


class RegressionControlState(NamedTuple):
    """What is known of the clients, and what was learnt.

    Attributes:
        aux_mq: float64 (m, q), x_i, the first column ones.
        weight_m: float64 (m,), the weights w_i.
        slope_qd: float64 (q, d), B.
    """

    aux_mq: FloatArray
    weight_m: FloatArray
    slope_qd: FloatArray


@dataclass(frozen=True)
class RegressionControl:
    """c_i = B x_i; after each round B moves towards the regression of the replies on their x.

    With shares s_i = coef_i / sum_S coef_j of the cohort and G = sum_j w_j x_j x_j^T of everybody,

        A = (1 - memory) sum_S s_i x_i x_i^T + memory G,    B <- B + (1 - memory) A^+ sum_S s_i x_i (u_i - B x_i)^T,

    which minimises (1 - memory) sum_S s_i norm(u_i - B x_i)^2 + memory sum_j w_j norm((B - B_before) x_j)^2. It is the
    same whatever the scales of the columns and whether they depend on each other (shares that sum to 1 do, with the
    column of ones); with nothing known it is ``CommonControl``.

    Attributes:
        memory: In (0, 1); how slowly B follows the rounds.
    """

    memory: float = 0.5

    uses_known: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse an impossible memory."""
        if not 0 < self.memory < 1:
            raise DeltaflError(f"memory is {self.memory}; it must be above 0 (the last round alone) and below 1")

    def init(self, population: Population, num_params: int) -> RegressionControlState:
        """B = 0."""
        aux_mq = population.design_mq()
        return RegressionControlState(aux_mq, population.weight_m, np.zeros((aux_mq.shape[1], num_params)))

    def guess(self, state: RegressionControlState, client_n: IntArray) -> ControlValue:
        """B x_i of the cohort; over everyone it is B times the weighted mean of x."""
        mean_q = np.einsum("m,mq->q", state.weight_m, state.aux_mq)
        total_d = np.einsum("q,qd->d", mean_q, state.slope_qd)
        return ControlValue(total_d, np.einsum("nq,qd->nd", state.aux_mq[client_n], state.slope_qd))

    def update(
        self, state: RegressionControlState, population: Population, heard: Heard, update_nd: Params
    ) -> RegressionControlState:
        """Move towards the regression of the replies."""
        total = heard.coef_n.sum()
        if total <= 0:
            return state
        aux_nq, share_n = state.aux_mq[heard.client_n], heard.coef_n / total
        here_qq = np.einsum("n,np,nq->pq", share_n, aux_nq, aux_nq)
        everyone_qq = np.einsum("m,mp,mq->pq", state.weight_m, state.aux_mq, state.aux_mq)
        inverse_qq = np.linalg.pinv(
            (1 - self.memory) * here_qq + self.memory * everyone_qq, rcond=_RANK_TOLERANCE, hermitian=True
        )
        gain_qn = (1 - self.memory) * np.einsum("pq,nq,n->pn", inverse_qq, aux_nq, share_n)
        residual_nd = np.einsum("nq,qd->nd", aux_nq, state.slope_qd)
        np.subtract(update_nd, residual_nd, out=residual_nd)
        return state._replace(slope_qd=state.slope_qd + np.einsum("qn,nd->qd", gain_qn, residual_nd))
