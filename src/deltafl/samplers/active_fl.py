"""Active federated learning (Goetz et al. 2019): select clients of large loss more often. Biased."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import Sampler
from .unweighted import draw_successively, places, unweighted_cohort


class ActiveState(NamedTuple):
    """Sizes, int64 (m,), and values v, float64 (m,), NaN for clients that were never trained."""

    size_m: IntArray
    value_m: FloatArray


@dataclass(frozen=True)
class ActiveFL(Sampler):
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

    ranges: ClassVar = {"alpha1": "[0, 1]", "alpha2": "[0, inf)", "alpha3": "[0, 1]"}

    def init(self, population: Population) -> ActiveState:
        """No client has been trained."""
        return ActiveState(population.num_examples_m, np.full(population.num_clients, np.nan))

    def open(
        self, state: ActiveState, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """Draw by the values, then evenly."""
        present_k, size = places(available_m, n, rng)
        value_k = _known(state.value_m)[present_k]
        dropped = int(self.alpha1 * len(present_k) + 1e-9)  # 0.29 * 100 is a little below 29
        value_k[np.argsort(value_k, kind="stable")[:dropped]] = -np.inf
        even = int(self.alpha3 * size + 0.5)
        by_value = min(size - even, len(present_k) - dropped)
        # A temperature of 0 times -inf would be NaN: the dropped ones stay dropped.
        weight_k = np.where(np.isfinite(value_k), self.alpha2 * np.where(np.isfinite(value_k), value_k, 0.0), -np.inf)
        first = present_k[draw_successively(weight_k, by_value, rng)]
        rest = rng.permutation(present_k[~np.isin(present_k, first)])[: size - by_value]
        return unweighted_cohort(np.concatenate([first, rest]))

    def update(self, state: ActiveState, cohort: Cohort, reports: Reports) -> ActiveState:
        """Store the values of the clients that replied."""
        here = reports.responded_n
        client_n = cohort.client_n[here]
        value_m = state.value_m.copy()
        value_m[client_n] = np.sqrt(state.size_m[client_n]) * reports.loss_n[here]
        return ActiveState(state.size_m, value_m)


def _known(value_m: FloatArray) -> FloatArray:
    """The values, with their mean for clients never trained."""
    known_m = np.isfinite(value_m)
    return np.where(known_m, value_m, value_m[known_m].mean() if known_m.any() else 0.0)
