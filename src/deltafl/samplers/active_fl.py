"""Active federated learning (Goetz et al. 2019): select clients of large loss more often. Biased."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..types import FloatArray, IntArray, Reports
from .base import mean_for_unseen
from .unweighted import History, Unweighted, draw_successively


@dataclass(frozen=True)
class ActiveFL(Unweighted):
    """Drops the clients of smallest value, draws most of the cohort by a softmax of the values and the rest evenly.

    The value is v_i = sqrt(n_i) (mean loss of client i when it was last trained), n_i its number of examples. Of the K
    available clients, the alpha1 K with the smallest values get v = -inf; (1 - alpha3) n are drawn one after the other
    without replacement, p_i proportional to exp(alpha2 v_i); alpha3 n are drawn evenly from all that are left.

    Choices where the paper is silent: a client never trained has the mean of the other values; alpha1 K is rounded down
    and alpha3 n to the nearest; the even draw takes over where fewer clients remain than the softmax should draw. The
    paper's loss is that of the model that was sent; ours is the mean over local training, which needs no further pass.
    With few examples a client the paper's constants leave the softmax nearly even: alpha2 v is about 0.1 for 14.

    Attributes:
        alpha1: Share of clients that is dropped, in [0, 1].
        alpha2: Inverse temperature, >= 0.
        alpha3: Share of the cohort that is drawn evenly, in [0, 1].

    Source: Goetz, Malik, Bui, Moon, Liu and Kumar 2019 (arXiv 1909.12641), algorithm 1; the defaults are its constants.
    """

    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1

    needs_loss: ClassVar[bool] = True
    value_size: ClassVar[int] = 1
    ranges: ClassVar = {"alpha1": "[0, 1]", "alpha2": "[0, inf)", "alpha3": "[0, 1]"}

    def choose(self, state: History, present_k: IntArray, size: int, rng: np.random.Generator) -> IntArray:
        """Draw by the values, then evenly."""
        value_k = mean_for_unseen(state.value_mq[:, 0], 0.0)[present_k]
        dropped = int(self.alpha1 * len(present_k) + 1e-9)  # 0.29 * 100 is a little below 29
        log_weight_k = self.alpha2 * value_k
        log_weight_k[np.argsort(value_k, kind="stable")[:dropped]] = -np.inf
        even = int(self.alpha3 * size + 0.5)
        by_value = min(size - even, len(present_k) - dropped)
        first = present_k[draw_successively(log_weight_k, by_value, rng)]
        rest = rng.permutation(present_k[~np.isin(present_k, first)])[: size - by_value]
        return np.concatenate([first, rest])

    def values(self, state: History, client_n: IntArray, reports: Reports) -> FloatArray:
        """sqrt(n_i) times the mean loss."""
        return (np.sqrt(state.size_m[client_n]) * reports.loss_n)[:, None]
