"""Samplers that learn their probabilities as a bandit: every round's replies are its feedback.

All of them bring down sum_i a_i^2 / p_i, the part of the variance that probabilities can change, with the feedback
a_i = w_i norm(u_i) of the clients that replied (Vrb's paper has losses or gradients of examples). It is weighted by
count_i / expected_i, so that sums of it are unbiased for every exact design. For a client with response rate q_i the
sum is of q_i a_i^2: clients that often fail are selected less often.

===== ======================================================================================= ========================
name  probabilities of the next round                                                         default design
===== ======================================================================================= ========================
vrb   sqrt(accumulated feedback + gamma), mixed with an even share theta                      multinomial, as printed
k-vib the same, capped at 1: the optimum of independent draws                                 poisson, as printed
osmd  mirror descent on sum a_i^2 / p_i over {p_i >= alpha / m}, an ensemble of step sizes    multinomial, as printed
===== ======================================================================================= ========================

Sources: vrb, Borsos, Krause and Levy, COLT 2018; k-vib, Zeng, Xu, Pan, Luo, Wang and Tang, "Enhanced Federated
Optimization: Adaptive Unbiased Client Sampling with Reduced Variance", TMLR 2025; osmd, Zhao, Wang, Liu, Zhang, Zhou,
Chen and Kolar, "Adaptive Client Sampling in Federated Learning via Online Learning with Bandit Feedback", JMLR 2025
(arXiv 2021).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np

from ..designs.table import find_design
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports
from .base import RunFacts, present_clients, replied
from .scored import Scored

#: Experts of the ensemble that are kept at most; the paper's number for blocks of a million rounds.
MAX_EXPERTS = 12
#: Feedback counts at most so many times its bound: a bound from updates that were nearly 0 must not make infinities.
_LARGEST = 1e12


def feedback(weight_m: FloatArray, cohort: Cohort, reports: Reports) -> tuple[IntArray, FloatArray, FloatArray]:
    """Of the clients that replied: their indices, a_i^2 = w_i^2 norm(u_i)^2, and count_i / expected_i."""
    part = cohort.part(reports.responded_n)
    client_n, reports = replied(cohort, reports)
    return client_n, weight_m[client_n] ** 2 * reports.squared_norm_n, part.count_n / part.expected_n


class BanditState(NamedTuple):
    """Weights, accumulated feedback W, both float64 (m,); G^2, the bound on a_i^2, float64 (), 0 until known."""

    weight_m: FloatArray
    total_m: FloatArray
    bound: FloatArray


@dataclass(frozen=True)
class VarianceBandit(Scored):
    """K-Vib and Vrb: follow the regularised leader.

    W_i = sum over past rounds of a_i^2 count_i / expected_i;  s_i = sqrt(W_i + gamma),  gamma = G^2 m / (n theta);
    expected_i = (1 - theta) min(1, c s_i) + theta n / m, sum n (without the cap for draws with replacement).

    theta = min(1, (m / (n T))^(1/3)) is both papers' choice for T rounds of n draws. Vrb is printed for one draw at a
    time; n draws count as n of its rounds with the same p. Its sums of a^2 / p and its gamma are n times ours then, and
    p is the same. The papers assume that the bound G on all feedback is given. Here it is the largest feedback of the
    first round with a reply; before, all scores are equal. (The code of K-Vib takes no root, its paper does.)

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"poisson"`` is K-Vib, ``"multinomial"`` is Vrb.
        mixing: theta in (0, 1]; None for the papers' choice.
        horizon: T >= 1, the rounds that theta is chosen for; None for the run's, or 500 outside a run.
    """

    design: str = "poisson"
    mixing: float | None = None
    horizon: int | None = None

    ranges: ClassVar = {"mixing": "(0, 1]", "horizon": "[1, inf)"}

    def for_run(self, facts: RunFacts) -> Self:
        """The horizon is the run's number of rounds."""
        return self if self.horizon is not None else replace(self, horizon=facts.rounds)

    def init(self, population: Population) -> BanditState:
        """No feedback yet."""
        return BanditState(population.weight_m, np.zeros(population.num_clients), np.zeros(()))

    def scores(self, state: BanditState, available_m: BoolArray | None, n: int, oracle: Oracle | None) -> FloatArray:
        """The leader's expectations, mixed with an even share; designs that cap at 1 keep them as they are."""
        m = len(state.weight_m)
        present, size = present_clients(np.ones(m, dtype=np.bool_) if available_m is None else available_m, n)
        theta = self.theta(m, n)
        score_k = np.sqrt(state.total_m[present] + state.bound * m / (n * theta))
        leader_k = find_design(self.design).expectation(score_k, size)
        score_m = np.zeros(m)
        score_m[present] = (1 - theta) * leader_k + theta * size / len(present)
        return score_m

    def theta(self, m: int, n: int) -> float:
        """The share of even draws, in (0, 1]."""
        if self.mixing is not None:
            return self.mixing
        horizon = RunFacts().rounds if self.horizon is None else self.horizon
        return min(1.0, float((m / (n * horizon)) ** (1 / 3)))

    def update(self, state: BanditState, cohort: Cohort, reports: Reports) -> BanditState:
        """Add the feedback."""
        client_n, square_n, ratio_n = feedback(state.weight_m, cohort, reports)
        total_m = state.total_m.copy()
        total_m[client_n] += square_n * ratio_n
        bound = state.bound if state.bound > 0 else np.asarray(square_n.max(initial=0.0))
        return BanditState(state.weight_m, total_m, bound)


class DescentState(NamedTuple):
    """The ensemble.

    Attributes:
        weight_m: float64 (m,), the clients' weights.
        expert_em: float64 (``MAX_EXPERTS``, m), the experts' p; experts that are not in use stay as the block began.
        weight_e: float64 (``MAX_EXPERTS``,), sum 1; 0 for experts that are not in use.
        bound: float64 (), the bound on a_i^2 in this block; 0 if unknown.
        largest: float64 (), the largest a_i^2 of this block.
        block: int64 (), index of the block, which has 2^block rounds.
        step: int64 (), rounds of the block that are over.
    """

    weight_m: FloatArray
    expert_em: FloatArray
    weight_e: FloatArray
    bound: FloatArray
    largest: FloatArray
    block: IntArray
    step: IntArray


@dataclass(frozen=True)
class MirrorDescent(Scored):
    """OSMD, the adaptive form with the doubling trick: an ensemble of step sizes in blocks of 1, 2, 4, ... rounds.

    In a block of T rounds, with bound abar on the a_i^2 and n draws a round:

    - experts e = 1 ... E, E = ceil(log2((ln m + 4 (T - 1) ln(m / alpha)) / ln m) / 2) + 1, with step sizes
      eta_e = 2^(e - 1) n^2 alpha^3 / (m^3 abar) sqrt(ln m / (2 T));
    - p = sum_e weight_e p_e, weight_e = (1 + 1 / E) / (e (e + 1)) at first; expected_i = n p_i;
    - loss of an expert: l_e = (1 / n) sum_S (count_i / expected_i) a_i^2 / p_e,i, with mean (1 / n) sum a_i^2 / p_e,i;
    - its step: p_e,i <- p_e,i exp(eta_e (1 / n) (count_i / expected_i) a_i^2 / p_e,i^2), projected on
      {p_i >= alpha / m} in the sense of relative entropy (``project``);
    - weight_e <- weight_e exp(-g l_e) / sum, g = (alpha / m) sqrt(8 n / (T abar)).

    n is the number of draws of the round, also for designs of random size. A new block starts all experts at the last p
    of the block before. Two departures: abar is the largest feedback of the block before (in the first block, of
    the same round), where the authors' code trains all clients to know it; and g is applied in units where abar = 1,
    for as printed it would change with the units of the updates.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        mixing: alpha in (0, 1]; no p falls below alpha / m. 0.4 in the paper's experiments.
    """

    design: str = "multinomial"
    mixing: float = 0.4

    ranges: ClassVar = {"mixing": "(0, 1]"}

    def init(self, population: Population) -> DescentState:
        """Equal probabilities, in a block of one round."""
        m = population.num_clients
        return _start_block(population.weight_m, np.full(m, 1 / m), 0, 0.0, self.mixing)

    def scores(self, state: DescentState, available_m: BoolArray | None, n: int, oracle: Oracle | None) -> FloatArray:
        """The mixture of the experts' p."""
        return _mixture(state.weight_e, state.expert_em)

    def update(self, state: DescentState, cohort: Cohort, reports: Reports) -> DescentState:
        """One step of each expert and of its weight; a new block where this one ends."""
        client_n, square_n, ratio_n = feedback(state.weight_m, cohort, reports)
        newest = float(square_n.max(initial=0.0))
        bound = float(state.bound) or newest
        expert_em, weight_e = state.expert_em, state.weight_e
        if bound > 0 and newest > 0:
            share_n = ratio_n * np.minimum(square_n, _LARGEST * bound) / bound  # estimates a_i^2 in units of abar
            expert_em, weight_e = self._learn(state, client_n, share_n, int(cohort.count_n.sum()))
        largest, block, step = max(float(state.largest), newest), int(state.block), int(state.step) + 1
        if step == 2**block:
            return _start_block(state.weight_m, _mixture(weight_e, expert_em), block + 1, largest or bound, self.mixing)
        return DescentState(
            state.weight_m, expert_em, weight_e, state.bound, np.asarray(largest), state.block, np.asarray(step)
        )

    def _learn(
        self, state: DescentState, client_n: IntArray, share_n: FloatArray, draws: int
    ) -> tuple[FloatArray, FloatArray]:
        """The experts and their weights after one round."""
        length, m = 2 ** int(state.block), len(state.weight_m)
        expert_em, loss_e = state.expert_em.copy(), np.zeros(MAX_EXPERTS)
        for e in np.flatnonzero(state.weight_e):
            p_n = state.expert_em[e, client_n]
            loss_e[e] = float(np.sum(share_n / p_n)) / draws
            rate = 2.0**e * draws**2 * (self.mixing / m) ** 3 * np.sqrt(_log(m) / (2 * length))
            logit_m = np.log(state.expert_em[e])
            logit_m[client_n] += rate * share_n / (draws * p_n**2)
            expert_em[e] = project(np.exp(logit_m - logit_m.max()), self.mixing / m)
        used = state.weight_e > 0
        gain_e = np.full(MAX_EXPERTS, -np.inf)
        gain_e[used] = np.log(state.weight_e[used]) - self.mixing / m * np.sqrt(8 * draws / length) * loss_e[used]
        weight_e = np.exp(gain_e - gain_e.max())
        return expert_em, weight_e / weight_e.sum()


def project(score_m: FloatArray, least: float) -> FloatArray:
    """The p nearest in relative entropy to positive scores, among those with p_i >= least and sum 1.

    The smallest scores get ``least``, the others share what is left in proportion: with the scores in increasing order,
    the first k that get ``least`` are the fewest for which s_(k+1) (1 - k least) / sum_{j > k} s_(j) > least.

    Args:
        score_m: (m,) >= 0, not all zero.
        least: in [0, 1 / m].

    Example:
        >>> project(np.array([6.0, 2.0, 0.0]), 0.2).round(3).tolist()
        [0.6, 0.2, 0.2]
    """
    m = len(score_m)
    rising_m = np.sort(score_m)
    rest_m = np.cumsum(rising_m[::-1])[::-1]
    free = 1 - np.arange(m) * least
    k = int(np.argmax(np.append(rising_m * free > least * rest_m, True)))
    if k == m:  # no client is above the floor: least = 1 / m
        return np.full(m, 1 / m)
    p_m: FloatArray = score_m * (free[k] / rest_m[k])
    p_m[np.argsort(score_m, kind="stable")[:k]] = least
    return p_m


def _mixture(weight_e: FloatArray, expert_em: FloatArray) -> FloatArray:
    """The experts' weighted mean, float64 (m,)."""
    p_m: FloatArray = np.sum(weight_e[:, None] * expert_em, axis=0)
    return p_m


def num_experts(length: int, m: int, alpha: float) -> int:
    """E of a block, from 1 to ``MAX_EXPERTS``."""
    number = 1 + int(np.ceil(np.log2(1 + 4 * (length - 1) * np.log(m / alpha) / _log(m)) / 2))
    return min(number, MAX_EXPERTS)


def _log(m: int) -> float:
    """The logarithm of m, that of 2 for a single client."""
    return float(np.log(max(m, 2)))


def _start_block(weight_m: FloatArray, p_m: FloatArray, block: int, bound: float, alpha: float) -> DescentState:
    """All experts at p, the smallest step has the largest weight."""
    experts = num_experts(2**block, len(weight_m), alpha)
    rank_e = np.arange(1, MAX_EXPERTS + 1)
    weight_e = np.where(rank_e <= experts, (1 + 1 / experts) / (rank_e * (rank_e + 1)), 0.0)
    return DescentState(
        weight_m,
        np.tile(p_m, (MAX_EXPERTS, 1)),
        weight_e / weight_e.sum(),
        np.asarray(bound),
        np.zeros(()),
        np.asarray(block),
        np.zeros((), dtype=np.int64),
    )
