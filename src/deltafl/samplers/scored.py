"""The two ways a score becomes a sampler, shared by importance sampling (``importance.py``) and DELTA (``delta.py``).

- *theoretical*: the score of every client in this very round, from an oracle that trains everyone (FedIS, FedDELTA);
- *practical*: what sampled clients showed last, by the paper's rule (FedPracIS, FedPracDELTA; section 4):
  for i in S_t, p_i <- R_i / sum_S R_j * (1 - sum_{not S} p_j), from p_i = 1/m. The mass of S is re-divided inside S.

Under the paper's rule R = 0 is absorbing and one noisy R can starve a client, hence the floor; with floor 0 the
practical samplers do not claim to be unbiased.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..designs import draw_cohort
from ..errors import DeltaflError
from ..inclusion import with_floor
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports

#: What a client was worth: reports -> R_n >= 0.
Score = Callable[[Reports], FloatArray]


class WeightState(NamedTuple):
    """The clients' weights, float64 (m,): all that a theoretical sampler remembers."""

    weight_m: FloatArray


class PracticalState(NamedTuple):
    """The draw probabilities p, float64 (m,), sum 1."""

    p_m: FloatArray


def open_theoretical(
    score: Score,
    state: WeightState,
    available_m: BoolArray,
    n: int,
    rng: np.random.Generator,
    oracle: Oracle | None,
    *,
    design: str,
    floor: float,
) -> Cohort:
    """Draw with scores w_i R_i of all clients, as the oracle reports them for this round."""
    if oracle is None:
        raise DeltaflError(
            "a theoretical sampler needs every client's update before the draw; only a simulation has it"
        )
    reports = oracle.reports()
    score_m = np.where(reports.responded_n, state.weight_m * score(reports), 0.0)
    return draw_cohort(with_floor(score_m, floor) if floor else score_m, n, design, rng, available_m)


def open_practical(
    state: PracticalState,
    available_m: BoolArray,
    n: int,
    rng: np.random.Generator,
    *,
    design: str,
    floor: float,
) -> Cohort:
    """Draw with the remembered p, mixed with an equal share."""
    return draw_cohort(with_floor(state.p_m, floor), n, design, rng, available_m)


def init_practical(population: Population) -> PracticalState:
    """p_i = 1 / m at round 0."""
    return PracticalState(np.full(population.num_clients, 1 / population.num_clients))


def update_practical(score: Score, state: PracticalState, cohort: Cohort, reports: Reports) -> PracticalState:
    """Re-divide the mass of those who replied in proportion to their R; nothing changes if all R are zero."""
    here = reports.responded_n
    client_n, score_n = cohort.client_n[here], score(reports)[here]
    if score_n.sum() <= 0:
        return state
    p_m = state.p_m.copy()
    p_m[client_n] = score_n / score_n.sum() * state.p_m[client_n].sum()
    return PracticalState(p_m / p_m.sum())
