"""A control variate of your own: each client's last update, shrunk. Any sampler can use it, and
stays unbiased.

In place of an estimator's name, with its fields as options; an empty design between two ``@`` is
the sampler's own::

    deltafl compare --samplers "uniform,uniform@@examples/own_control.py:LastUpdate(shrink=0.8)"
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import deltafl


class LastUpdateState(NamedTuple):
    """c_i of every client, 0 until it is seen, and the clients' weights."""

    control_md: np.ndarray
    weight_m: np.ndarray


@dataclass(frozen=True)
class LastUpdate(deltafl.ControlVariate):
    """c_i = shrink * the client's last update."""

    shrink: float = 0.8

    def init(self, population: deltafl.Population, num_params: int) -> LastUpdateState:
        """Nothing is known yet."""
        return LastUpdateState(np.zeros((population.num_clients, num_params)), population.weight_m)

    def value(self, state: LastUpdateState, client_n: np.ndarray) -> deltafl.ControlValue:
        """The sum of w_j c_j over all clients, and c_i of some: what the round subtracts, fixed
        before the draw.
        """
        return deltafl.ControlValue(state.weight_m @ state.control_md, state.control_md[client_n])

    def update(
        self,
        state: LastUpdateState,
        population: deltafl.Population,
        replies: deltafl.Replies,
        update_nd: np.ndarray,
    ) -> LastUpdateState:
        """Remember the updates of the clients that replied."""
        control_md = state.control_md.copy()
        control_md[replies.client_n] = self.shrink * update_nd
        return LastUpdateState(control_md, state.weight_m)


if __name__ == "__main__":
    # Eight clients, each with F_i(x) = (x - b_i)^2 / 2: how far is the estimate of 3 clients from
    # the mean of all 8?
    optimum_m = np.array([0.0, 1, 1, 2, 2, 3, 3, 12])
    for estimator in ("horvitz-thompson", LastUpdate()):
        plan = deltafl.make_plan(
            "uniform", deltafl.Population.from_sizes([1] * 8), n=3, estimator=estimator
        )
        state = deltafl.init_round(plan, np.array([10.0]))
        errors = []
        for _ in range(200):
            cohort = deltafl.open_round(plan, state)
            full = 0.2 * (optimum_m - state.params_d).mean()
            update_nd = 0.2 * (optimum_m[cohort.client_n] - state.params_d[0])[:, None]
            before = state.params_d
            state, info = deltafl.close_round(plan, state, cohort, update_nd)
            errors.append((state.params_d - before - full)[0] ** 2)
        print(f"{estimator}: mean squared error {np.mean(errors):.4f}")
