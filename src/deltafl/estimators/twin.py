"""Twins: control variates that the server computes from the current model, by simulating each
client on other data.

A stored update is some rounds old; a twin predicts what a similar client would send now. Twins
cover clients that were never selected, and need no communication. Simulation errors increase the
variance but never cause bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, log
from ..moves import Moves
from ..scale.rows import RowFormat
from ..types import IntArray, Params, Population, Replies
from .control_variates import ControlVariate, InStretches, Learner, NoControl
from .own import OwnControlState, summed_anew
from .value import ComposedValue, ControlValue, Reader

#: Longest twin, in medians of all. Where local work is near divergence, a single one would be most
#: of the variance.
LONGEST = 2.0

#: ``simulate(params_d, population, round)``: the updates (m, d) that stand-ins of the clients make
#: from this model.
Simulate = Callable[[Params, Population, int], npt.ArrayLike]


class TwinState(NamedTuple):
    """The simulated updates of this round, and the state of the control variate of their
    residuals.
    """

    twin: OwnControlState
    residual: Any


def _no_simulation(params_d: Params, population: Population, round: int) -> Params:
    raise DeltaflError(
        "a twin needs a simulation of the clients: write estimator=Twin(simulate), a function "
        "(params_d, population, round) -> (m, d)"
    )


@dataclass(frozen=True)
class Twin(InStretches):
    """c_i = g_i + r_i: g_i is a simulation of client i's local work on the round's model, r_i
    predicts u_i - g_i.

    ``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` is the difference estimator (Cassel, Sarndal
    and Wretman 1976), unbiased for any simulation, since c is known before the draw.
    ``LearnedCoefficient(Twin(simulate))`` damps a simulation that is noisy or wrong. If a simulated
    update is not finite, all g_i are 0 in that round and the log says why; one longer than twice
    the median is clipped. Keeps one update per client.

    Attributes:
        simulate: ``simulate(params_d, population, round)``: float32 (m, d), or a ``DeltaflError``;
            label shares are in ``population.aux_mq``. The same arguments must give the same bits.
            Called once per round.
        residual: Learns r_i from u_i - g_i; r_i = 0 if left out.
    """

    simulate: Simulate = field(default=_no_simulation, repr=False, compare=False)
    residual: ControlVariate = field(default_factory=NoControl)
    remembers = True

    @property
    def uses_aux(self) -> bool:
        return self.residual.uses_aux

    def with_rows(self, rows: RowFormat) -> Self:
        return replace(self, residual=self.residual.with_rows(rows))

    def init(self, population: Population, num_params: int) -> TwinState:
        zero_md = np.zeros((population.num_clients, num_params), np.float32)
        residual = self.residual.init(population, num_params)
        return TwinState(OwnControlState(zero_md, np.zeros(num_params)), residual)

    def at_model(
        self,
        state: TwinState,
        population: Population,
        params_d: Params,
        round: int,
    ) -> TwinState:
        shape = (population.num_clients, len(params_d))
        simulated = self.simulate(params_d, population, round)
        try:
            # What overflows float32 is not finite, and is answered for below.
            with np.errstate(over="ignore"):
                twin_md = np.array(simulated, np.float32)
        except (TypeError, ValueError):
            raise DeltaflError(
                f"simulate must return numbers, one update for each client, {shape}"
            ) from None
        if twin_md.shape != shape:
            raise DeltaflError(
                f"simulate returned shape {twin_md.shape}; return one update for each client, "
                f"{shape}"
            )
        fault_k = np.flatnonzero(~np.isfinite(twin_md).all(axis=1))
        if len(fault_k):
            log.warning(
                "round %d: the simulation of client %d is not finite, so that this round has no "
                "twins; lower its learning rate",
                round + 1,
                fault_k[0],
            )
            twin_md = np.zeros(shape, np.float32)
        norm_m = np.linalg.norm(twin_md, axis=1)
        # If more than half of the twins are 0, so is the limit, and no twin is left.
        limit = LONGEST * np.median(norm_m)
        long_m = norm_m > limit
        twin_md[long_m] *= (limit / norm_m[long_m])[:, None]
        # All rows are new in each round, so that there is no running sum to follow.
        twin = summed_anew(
            OwnControlState(twin_md, np.zeros(shape[1])),
            population.weight_m,
        )
        return TwinState(
            twin,
            self.residual.at_model(state.residual, population, params_d, round),
        )

    def reader(self, state: TwinState, client_n: IntArray) -> Reader:
        read_residual = self.residual.reader(state.residual, client_n)
        twin_nd = np.asarray(state.twin.control_md)[client_n]

        def read(part: slice) -> ControlValue:
            residual = read_residual(part)
            return ComposedValue.of(
                state.twin.total_d[part] + residual.total_d,
                twin_nd[:, part] + residual.control_nd,
                residual,
            )

        return read

    def learner(
        self,
        state: TwinState,
        population: Population,
        replies: Replies,
    ) -> Learner:
        residual = self.residual.learner(state.residual, population, replies)
        twin_nd = np.asarray(state.twin.control_md)[replies.client_n]
        return Learner(
            lambda part, update_nb, value: residual.learn(
                part,
                update_nb - twin_nd[:, part],
                value.held[0],
            ),
            lambda sums: state._replace(residual=residual.state(sums)),
        )

    def resized(self, state: TwinState, moves: Moves) -> TwinState:
        # The twins of before are of no use: ``at_model``, which follows, simulates all clients.
        return state._replace(residual=self.residual.resized(state.residual, moves))
