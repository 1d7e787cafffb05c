"""A sampler of your own: clients with a larger last loss are selected more often, and every
estimate stays unbiased.

It is used like those of the library, with its fields as options::

    deltafl compare --samplers "full,uniform,examples/own_sampler.py:ByLoss(power=2)"
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import deltafl


class LossState(NamedTuple):
    """The last loss of each client; 1 until it is seen."""

    loss_m: np.ndarray


@dataclass(frozen=True)
class ByLoss(deltafl.Sampler):
    """Score = (last loss)^power, with a floor that keeps every client alive."""

    power: float = 1.0
    floor: float = 0.2
    unbiased = True
    needs_loss = True  # replies without a loss are rejected

    def init(self, population: deltafl.Population) -> LossState:
        """No client has been seen yet."""
        return LossState(np.ones(population.num_clients))

    def open(
        self,
        state: LossState,
        available_m: np.ndarray,
        n: int,
        rng: np.random.Generator,
        oracle: Any = None,
    ) -> deltafl.Cohort:
        """Draw n clients; with the inclusion probabilities of ``draw_cohort`` the estimate stays
        unbiased.
        """
        score_m = deltafl.with_floor(state.loss_m**self.power, self.floor, available_m=available_m)
        return deltafl.draw_cohort(score_m, n, "pivotal", rng, available_m)

    def update(
        self, state: LossState, cohort: deltafl.Cohort, reports: deltafl.Reports
    ) -> LossState:
        """Keep the losses of the clients that replied."""
        loss_m = state.loss_m.copy()
        loss_m[cohort.client_n[reports.responded_n]] = reports.loss_n[reports.responded_n]
        return LossState(loss_m)

    def resized(self, state: LossState, moves: deltafl.Moves) -> LossState:
        """Newcomers of a federation begin as everybody did."""
        return LossState(moves.rows(state.loss_m, 1.0))


if __name__ == "__main__":
    # Eight clients, each with F_i(x) = (x - b_i)^2 / 2; the optimum of their mean is the mean of b.
    optimum_m = np.array([0.0, 1, 1, 2, 2, 3, 3, 12])
    plan = deltafl.Plan(
        deltafl.Population.from_sizes([1] * 8), ByLoss(), n=3, estimator="difference-own"
    )
    state = deltafl.init_round(plan, np.array([10.0]))
    for _ in range(40):
        cohort = deltafl.open_round(plan, state)
        gap_n = optimum_m[cohort.client_n] - state.params_d[0]
        reports = deltafl.Reports.make(len(gap_n), loss=gap_n**2 / 2)
        state, info = deltafl.close_round(plan, state, cohort, 0.2 * gap_n[:, None], reports)
        print(f"round {info.round:2}  selected {cohort.client_n}  x {state.params_d[0]:.3f}")
    print("optimum", optimum_m.mean())
