"""The toy (figures 3 and 5): three clients, two are asked, the ideal is (4, 0). Every cohort is enumerated, none drawn.

The gradients at (1, 1) are (2, 2), (4, 1) and (6, -3). Each score is combined with each way to draw and to weigh:

=============== ============================================================================================
hh              n draws with replacement, weights w / (n p)                       (Hansen and Hurwitz)
ht              exact inclusion probabilities pi = 2 p, weights w / pi            (Horvitz and Thompson)
successive      one after the other without replacement, weights 1 / (n m p), as if pi were n p; biased
hajek           the same draws, the weights divided by their sum; biased
plain-mean      the same draws, the average of the replies; biased
difference-hh   as hh, on u_i - c with c = (4, 0) put back: the best c there is, which nobody knows before the draw
difference-ht   as ht, likewise
=============== ============================================================================================
"""

from typing import NamedTuple

import numpy as np

from deltafl import KnownUpdates
from deltafl.designs.exact import every_cohort
from deltafl.estimators.control_variates import CommonControlState
from deltafl.round import Plan, RoundState, close_round, init_round
from deltafl.samplers import make_sampler
from deltafl.types import Cohort, FloatArray, Params, Population

#: Everything below is enumerated; the scale of an experiment changes nothing.
GRADIENTS = ((2.0, 2.0), (4.0, 1.0), (6.0, -3.0))
IDEAL = (4.0, 0.0)
SCORES = {"uniform": "uniform", "IS": "fedis", "DELTA": "delta"}


class Way(NamedTuple):
    """A way to draw and to weigh: design, estimator, whether it subtracts the ideal as a control."""

    design: str
    estimator: str
    centred: bool
    title: str


WAYS = {
    "hh": Way("multinomial", "horvitz-thompson", False, "HH, with replacement"),
    "ht": Way("systematic", "horvitz-thompson", False, "HT, exact pi = 2p"),
    "successive": Way("successive", "horvitz-thompson", False, "1/(n m p), successive draws"),
    "hajek": Way("successive", "hajek", False, "Hajek, successive"),
    "plain-mean": Way("successive", "plain-mean", False, "plain mean, successive"),
    "difference-hh": Way("multinomial", "difference", True, "difference from (4, 0), with replacement"),
    "difference-ht": Way("systematic", "difference", True, "difference from (4, 0), exact pi"),
}


class Outcome(NamedTuple):
    """One possible aggregate.

    Attributes:
        clients: Who was drawn, from 1, with repetition.
        probability: Of this cohort.
        aggregate: The estimate of the ideal, two numbers.
    """

    clients: tuple[int, ...]
    probability: float
    aggregate: tuple[float, float]


class Enumerated(NamedTuple):
    """A score with a way to draw and to weigh.

    Attributes:
        score: A key of ``SCORES``.
        way: A key of ``WAYS``.
        mse: E norm(aggregate - ideal)^2.
        bias: norm(E aggregate - ideal).
        outcomes: All cohorts of positive probability.
    """

    score: str
    way: str
    mse: float
    bias: float
    outcomes: tuple[Outcome, ...]


def enumerate_toy(score: str, way: str) -> Enumerated:
    """All cohorts of two with their aggregates, through the sampler's own code and ``close_round``.

    Args:
        score: A key of ``SCORES``.
        way: A key of ``WAYS``.
    """
    population = Population.from_sizes([1] * len(GRADIENTS))
    gradient_md: Params = np.array(GRADIENTS, dtype=np.float32)
    how = WAYS[way]
    sampler = make_sampler(f"{SCORES[score]}@{how.design}")
    plan = Plan(population, sampler, 2, how.estimator, _Keeper())
    state = init_round(plan, np.zeros(2))
    if how.centred:
        state = state._replace(control=CommonControlState(np.array(IDEAL)))
    oracle = KnownUpdates(gradient_md, population.weight_m)
    everyone = np.ones(len(GRADIENTS), dtype=np.bool_)
    found: dict[tuple[int, ...], tuple[float, FloatArray]] = {}
    for probability, cohort in every_cohort(lambda rng: sampler.open(state.sampler, everyone, 2, rng, oracle)):
        clients = tuple(np.repeat(cohort.client_n + 1, cohort.count_n).tolist())
        before = found[clients][0] if clients in found else 0.0
        found[clients] = (before + probability, _aggregate(plan, state, cohort, gradient_md))
    outcomes = [Outcome(key, p, (float(x), float(y))) for key, (p, (x, y)) in sorted(found.items()) if p > 0]
    probability_k = np.array([outcome.probability for outcome in outcomes])
    error_kd = np.array([outcome.aggregate for outcome in outcomes]) - np.array(IDEAL)
    mse = float(probability_k @ (error_kd**2).sum(axis=1))
    return Enumerated(score, way, mse, float(np.linalg.norm(probability_k @ error_kd)), tuple(outcomes))


class _Kept(NamedTuple):
    delta_d: FloatArray


class _Keeper:
    """A server that moves nothing and keeps the estimate in float64."""

    def init(self, num_params: int) -> _Kept:
        return _Kept(np.zeros(num_params))

    def step(self, params_d: Params, delta_d: FloatArray, state: _Kept) -> tuple[Params, _Kept]:
        return params_d, _Kept(delta_d)


def _aggregate(plan: Plan, state: RoundState, cohort: Cohort, gradient_md: Params) -> FloatArray:
    kept: _Kept = close_round(plan, state, cohort, gradient_md[cohort.client_n])[0].optimizer
    return kept.delta_d


def hand_picked() -> dict[tuple[int, int], tuple[float, float]]:
    """The unweighted averages of the pairs of clients (from 1); the paper gives one pair to each method."""
    gradient_md = np.array(GRADIENTS)
    pairs = ((0, 1), (1, 2), (0, 2))
    return {(i + 1, j + 1): tuple(gradient_md[[i, j]].mean(axis=0).tolist()) for i, j in pairs}
