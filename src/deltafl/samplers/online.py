"""Samplers that learn their probabilities like a bandit, with every round's replies as feedback.

All reduce sum_i a_i^2 / p_i, the part of the variance that probabilities can change, with the
feedback a_i = w_i norm(u_i) of the clients that replied, weighted by count_i / expected_i: sums are
unbiased for exact designs.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, Self

import numpy as np

from ..designs.table import find_design
from ..moves import Moves
from ..types import (
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Oracle,
    Population,
    Reports,
    Shares,
    Sizes,
    Within,
)
from .base import ZERO, RunFacts, Scored, present_clients, replied

#: Experts of the ensemble that are kept at most; the paper's number for blocks of a million rounds.
MAX_EXPERTS = 12
#: Feedback counts at most so many times its bound, which may come from updates that were nearly 0.
_LARGEST = 1e12
#: The lowest ``mixing``.
_LEAST_MIXING = 1e-12


def feedback(
    weight_m: FloatArray,
    cohort: Cohort,
    reports: Reports,
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Of the clients that replied: indices, a_i^2 = w_i^2 norm(u_i)^2, and count_i / expected_i."""
    ratio_n = cohort.count_n / cohort.expected_n
    here_n = reports.responded_n
    client_n, reports = replied(cohort, reports)
    square_n = weight_m[client_n] ** 2 * reports.squared_norm_n
    return client_n, square_n, ratio_n[here_n]


class BanditState(NamedTuple):
    """The accumulated feedback."""

    weight_m: FloatArray
    total_m: Sizes  # W
    bound: Sizes  # (), G^2, the bound on a_i^2; 0 until known


@dataclass(frozen=True)
class VarianceBandit(Scored):
    """K-Vib (Zeng et al., TMLR 2025) and Vrb (Borsos et al., COLT 2018): the regularised leader.

    W_i = sum over past rounds of a_i^2 count_i / expected_i;  s_i = sqrt(W_i + gamma),  gamma = G^2
    m / (n theta); expected_i = (1 - theta) min(1, c s_i) + theta n / m, sum n (without the cap for
    draws with replacement).

    G^2 is the largest feedback of the first round with a reply; before, all scores are equal. Vrb
    is printed for one draw at a time; n draws count as n of its rounds with the same p.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"poisson"`` is K-Vib, ``"multinomial"`` is Vrb.
        mixing: theta in [1e-12, 1]; None for min(1, (m / (n T))^(1/3)), the choice of both papers.
        horizon: T >= 1, the rounds that theta is chosen for; None for the run's, or 500 outside a
            run.
    """

    design: str = "poisson"
    mixing: float | None = None
    horizon: int | None = None

    ranges: ClassVar = {"mixing": "[1e-12, 1]", "horizon": "[1, inf)"}
    fixed_fields = ("weight_m",)

    def for_run(self, facts: RunFacts) -> Self:
        return replace(self, horizon=self.horizon or facts.rounds)

    def init(self, population: Population) -> BanditState:
        return BanditState(
            population.weight_m,
            np.zeros(population.num_clients),
            np.zeros(()),
        )

    def scores(
        self,
        state: BanditState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        m = len(state.weight_m)
        if available_m is None:
            available_m = np.ones(m, bool)
        present, size = present_clients(available_m, n)
        theta = self.theta(m, n)
        gamma = state.bound * m / (n * theta)
        # Before the first reply both terms are 0. Scores that are all 0 mean equal ones.
        score_k = np.sqrt(state.total_m[present] + gamma)
        leader_k = find_design(self.design).expectation(score_k, size)
        score_m = np.zeros(m)
        score_m[present] = (1 - theta) * leader_k + theta * size / len(present)
        return score_m

    def theta(self, m: int, n: int) -> float:
        """The share of uniform draws, in (0, 1]."""
        if self.mixing is not None:
            return self.mixing
        horizon = self.horizon or RunFacts().rounds
        return min(1.0, float((m / (n * horizon)) ** (1 / 3)))

    def update(
        self,
        state: BanditState,
        cohort: Cohort,
        reports: Reports,
    ) -> BanditState:
        client_n, square_n, ratio_n = feedback(state.weight_m, cohort, reports)
        total_m = state.total_m.copy()
        total_m[client_n] += square_n * ratio_n
        # The first feedback is the scale; later ones would change what gamma means.
        if state.bound == 0:
            state = state._replace(bound=np.asarray(square_n.max(initial=0.0)))
        return state._replace(total_m=total_m)

    def resized(self, state: BanditState, moves: Moves) -> BanditState:
        # Over all rounds: a newcomer that began at 0 would lag behind for as long.
        mean = moves.stayed(state.total_m).mean()
        total_m = moves.rows(state.total_m, mean)
        return BanditState(moves.population.weight_m, total_m, state.bound)


class DescentState(NamedTuple):
    """The ensemble of experts."""

    weight_m: FloatArray
    expert_em: Shares  # the experts' p; experts that are not in use stay as the block began
    weight_e: Shares  # sum 1; 0 for experts that are not in use
    bound: Sizes  # (), the bound on a_i^2 in this block; 0 if unknown
    largest: Sizes  # (), the largest a_i^2 of this block
    # (), index of the block, which has 2^block rounds
    block: Annotated[IntArray, Within("[0, 40]")]
    step: Counts  # (), rounds of the block that are over

    @property
    def mixture(self) -> FloatArray:
        """The probabilities p, float64 (m,)."""
        return np.asarray(np.sum(self.weight_e[:, None] * self.expert_em, axis=0))

    def is_consistent(self) -> bool:
        """Whether all are probabilities, none of them below the least ``mixing``, in a block that
        is not over.
        """
        sums = [self.weight_e.sum(), *self.expert_em.sum(axis=1)]
        least = 0.9 * _LEAST_MIXING / len(self.weight_m)
        is_there = self.step < 2 ** int(self.block)
        return bool(is_there and np.allclose(sums, 1) and self.expert_em.min() >= least)


@dataclass(frozen=True)
class MirrorDescent(Scored):
    """OSMD (Zhao et al., JMLR 2025): mirror descent by an ensemble of step sizes.

    In a block of T = 1, 2, 4, ... rounds, with bound abar on the a_i^2 and n draws a round:

    - experts e = 1 ... E, E = ceil(log2((ln m + 4 (T - 1) ln(m / alpha)) / ln m) / 2) + 1, with
      step sizes eta_e = 2^(e - 1) n^2 alpha^3 / (m^3 abar) sqrt(ln m / (2 T));
    - p = sum_e weight_e p_e, weight_e = (1 + 1 / E) / (e (e + 1)) at first; expected_i = n p_i;
    - loss of an expert: l_e = (1 / n) sum_S (count_i / expected_i) a_i^2 / p_e,i, with mean (1 / n)
      sum a_i^2 / p_e,i;
    - its step: p_e,i <- p_e,i exp(eta_e (1 / n) (count_i / expected_i) a_i^2 / p_e,i^2), projected
      on {p_i >= alpha / m} in the sense of relative entropy (``project``);
    - weight_e <- weight_e exp(-g l_e) / sum, g = (alpha / m) sqrt(8 n / (T abar)).

    A new block starts all experts at the last p. Two departures: abar is the largest feedback of
    the block before (in the first block, of the same round); and g is applied in units where abar =
    1, lest it change with those of updates.

    Attributes:
        design: A name in ``deltafl.DESIGNS``; ``"multinomial"`` is the paper's.
        mixing: alpha in [1e-12, 1]; no p falls below alpha / m. 0.4 in the paper's experiments.
    """

    design: str = "multinomial"
    mixing: float = 0.4

    ranges: ClassVar = {"mixing": "[1e-12, 1]"}
    kept_fields = DescentState._fields[1:]
    fixed_fields = ("weight_m",)

    def init(self, population: Population) -> DescentState:
        m = population.num_clients
        return self._start_block(population.weight_m, np.full(m, 1 / m), 0, 0.0)

    def _start_block(
        self,
        weight_m: FloatArray,
        p_m: FloatArray,
        block: int,
        bound: float,
    ) -> DescentState:
        experts = num_experts(2**block, len(weight_m), self.mixing)
        rank_e = np.arange(1, MAX_EXPERTS + 1)
        first_e = (1 + 1 / experts) / (rank_e * (rank_e + 1))
        weight_e = np.where(rank_e <= experts, first_e, 0.0)
        return DescentState(
            weight_m=weight_m,
            # Rows for experts that this block does not use, too: states of a run have one shape.
            expert_em=np.tile(p_m, (MAX_EXPERTS, 1)),
            # The weights of the formula sum to 1 but for rounding.
            weight_e=weight_e / weight_e.sum(),
            bound=np.asarray(bound),
            largest=np.zeros(()),
            block=np.asarray(block),
            step=ZERO,
        )

    def scores(
        self,
        state: DescentState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        return state.mixture

    def update(
        self,
        state: DescentState,
        cohort: Cohort,
        reports: Reports,
    ) -> DescentState:
        client_n, square_n, ratio_n = feedback(state.weight_m, cohort, reports)
        newest = float(square_n.max(initial=0.0))
        bound = float(state.bound) or newest
        largest = max(float(state.largest), newest)
        if bound > 0 and newest > 0:
            # estimates a_i^2 in units of abar
            share_n = ratio_n * np.minimum(square_n, _LARGEST * bound) / bound
            state = self._learn(state, client_n, share_n, int(cohort.count_n.sum()))
        block = int(state.block)
        step = int(state.step) + 1
        if step == 2**block:
            # A block in which nobody brought feedback hands the bound before it on.
            return self._start_block(
                state.weight_m,
                state.mixture,
                block + 1,
                largest or bound,
            )
        return state._replace(largest=np.asarray(largest), step=np.asarray(step))

    def _learn(
        self,
        state: DescentState,
        client_n: IntArray,
        share_n: FloatArray,
        draws: int,
    ) -> DescentState:
        length = 2 ** int(state.block)
        m = len(state.weight_m)
        least = self.mixing / m
        slowest = np.sqrt(np.log(max(m, 2)) / (2 * length))
        expert_em = state.expert_em.copy()
        # Experts that are not in use keep a weight of exactly exp(-inf) = 0.
        gain_e = np.full(MAX_EXPERTS, -np.inf)
        for e in np.flatnonzero(state.weight_e):
            p_n = state.expert_em[e, client_n]
            loss = float(np.sum(share_n / p_n)) / draws
            gain_e[e] = np.log(state.weight_e[e]) - least * np.sqrt(8 * draws / length) * loss
            # eta_e in units where abar = 1. Here e counts from 0, and ``least`` is alpha / m.
            rate = 2.0**e * draws**2 * least**3 * slowest
            # Sums of logarithms: a product of so many factors would overflow.
            logit_m = np.log(state.expert_em[e])
            logit_m[client_n] += rate * share_n / (draws * p_n**2)
            expert_em[e] = project(np.exp(logit_m - logit_m.max()), least)
        # Losses of thousands would make all weights 0.
        weight_e = np.exp(gain_e - gain_e.max())
        return state._replace(expert_em=expert_em, weight_e=weight_e / weight_e.sum())


def project(score_m: FloatArray, least: float) -> FloatArray:
    """The p nearest in relative entropy to positive scores, of all p_i >= least with sum 1.

    As few as possible of the smallest scores get ``least``; the others share the rest in
    proportion.

    Example:
        >>> project(np.array([6.0, 2.0, 0.0]), 0.2).round(3).tolist()
        [0.6, 0.2, 0.2]
    """
    m = len(score_m)
    # With the k smallest at the floor the others share ``free``; the first k whose next score
    # then lies above the floor is right.
    rising_m = np.sort(score_m)
    rest_m = np.cumsum(rising_m[::-1])[::-1]
    free = 1 - np.arange(m) * least
    is_above_m = rising_m * free > least * rest_m
    k = int(np.argmax(np.append(is_above_m, True)))
    if k == m:  # no client is above the floor: least = 1 / m
        return np.full(m, 1 / m)
    p_m: FloatArray = score_m * (free[k] / rest_m[k])
    p_m[np.argsort(score_m, kind="stable")[:k]] = least
    return p_m


def num_experts(length: int, m: int, alpha: float) -> int:
    """E of a block, from 1 to ``MAX_EXPERTS``."""
    # ``max``: a single client has ln m = 0.
    ratio = 1 + 4 * (length - 1) * np.log(m / alpha) / np.log(max(m, 2))
    return min(1 + int(np.ceil(np.log2(ratio) / 2)), MAX_EXPERTS)
