"""Scores from sketches that clients send, for servers that must not look at single updates.

``norm(u_i - c)^2`` is estimated by ``norm(s(u_i) - s(c))^2`` with the count-sketch s of 64 numbers, which is linear:
its mean is right and its standard deviation at most sqrt(2 / 64) = 18 % of it. The sketch of an update shows 64 random
sums of it, no more; but it is the client's word: a client can make itself more wanted by lying, where norms measured on
the server cannot be invented.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..estimators.sketch import count_sketch
from ..estimators.table import find_estimator
from ..replies import measure
from ..round import Plan, RoundState
from ..streams import stream
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports, Sampler


def sketch_seed(seed: int) -> int:
    """The seed that clients are told: it fixes the sketches, and says nothing about the draws."""
    return int(stream(seed, "sketch", round=1).integers(2**62))


@dataclass(frozen=True)
class BySketch:
    """A sampler that learns from sketches instead of from norms measured on the server: of one round.

    Attributes:
        inner: The sampler.
        sketch_nq: float64 (n, q), the sketches of u_i of the whole cohort; rows of those who did not reply are ignored.
        control_nq: float64 (n, q), the sketches of their controls c_i.
    """

    inner: Sampler
    sketch_nq: FloatArray
    control_nq: FloatArray

    @property
    def unbiased(self) -> bool:
        """As the inner one."""
        return self.inner.unbiased

    @property
    def needs_oracle(self) -> bool:
        """As the inner one."""
        return self.inner.needs_oracle

    @property
    def sketch_size(self) -> int:
        """None are made on the server."""
        return 0

    def init(self, population: Population) -> Any:
        """As the inner one."""
        return self.inner.init(population)

    def open(
        self, state: Any, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """As the inner one."""
        return self.inner.open(state, available_m, n, rng, oracle)

    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        """Learn from norms of sketches."""
        residual_n = np.sum((self.sketch_nq - self.control_nq) ** 2, axis=1)
        measured = measure(self.sketch_nq, reports)
        return self.inner.update(
            state, cohort, measured._replace(squared_residual_n=np.where(reports.responded_n, residual_n, 0.0))
        )


def by_sketch(plan: Plan, state: RoundState, cohort: Cohort, sketch_nq: FloatArray) -> BySketch:
    """The plan's sampler, for closing one round with the sketches that came."""
    control_nd = find_estimator(plan.estimator).control.guess(state.control, cohort.client_n).control_nd
    control_nq = count_sketch(control_nd, sketch_nq.shape[1], sketch_seed(plan.seed))
    return BySketch(plan.sampler, sketch_nq, np.broadcast_to(control_nq, sketch_nq.shape))
