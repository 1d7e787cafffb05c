"""The accumulator that closes a round, whoever hosts it: replies come in, the next state goes out.

::

    round = Accumulator(plan, state, open_round(plan, state))
    round.add_rows(updates, reports)
    following, info = round.close()

``close_round`` is these lines; a host that wants to see ``round.reports`` writes them itself.
"""

from collections.abc import Sequence
from math import nan, sqrt
from typing import Any

import numpy as np

from .errors import DeltaflError
from .estimators.control_variates import ControlValue
from .estimators.sketch import count_sketch
from .estimators.variance import effective_sample_size, estimate_variance
from .plan import Plan, RoundState
from .scale.numerics import inner, weighted_sum
from .server.norms import squared_norms
from .server.part import Step
from .server.screening import Updates, screen_replies
from .types import Cohort, FloatArray, IntArray, Params, Replies, Reports, RoundInfo


def clients_of(plan: Plan, state: RoundState) -> int:
    """The number of clients; a ``DeltaflError`` if plan and state have different ones."""
    m = plan.population.num_clients
    known = len(state.selected_m)
    if known != m:
        raise DeltaflError(
            f"the state is of {known} clients and the plan of {m}; give its own plan"
        )
    return m


class Accumulator:
    """Closes one round: ``cohort`` is what ``open_round`` returned for ``plan`` and ``state``,
    which is not changed.

    Attributes:
        reports: What clients reported and the server measured on their updates; complete once the
            round is closed.
        coef_n: The coefficients of the replies that were used, once the round is closed.
    """

    def __init__(self, plan: Plan, state: RoundState, cohort: Cohort) -> None:
        if cohort.client_n.max(initial=0) >= clients_of(plan, state):
            raise DeltaflError(
                "the cohort has clients that the plan does not know; give what open_round returned"
            )
        # A cohort that a host has made itself has no round.
        if cohort.round not in (None, state.round):
            raise DeltaflError(
                f"the cohort was drawn in round {cohort.round} and the state is that of round "
                f"{state.round}; open the round again, and close it with the state that open_round "
                "was given"
            )
        self.plan = plan
        self.state = state
        self.cohort = cohort
        self._d = len(state.params_d)
        self._intakes = plan.intakes(state, cohort)

    def add_rows(
        self, updates: Updates | Sequence[Params | None], reports: Reports | None = None
    ) -> None:
        """Add the replies of all clients of the cohort, in its order."""
        drifts = self.plan.drifts(self.state, self.cohort.client_n)
        screened = screen_replies(
            self.cohort,
            updates,
            reports,
            self._d,
            drifts,
            self.plan.sampler,
        )
        self._rejected = screened.rejected
        self.reports = screened.reports
        here_n = screened.reports.responded_n
        self._update_kd = screened.update_nd
        if not here_n.all():  # else a copy is saved
            self._update_kd = screened.update_nd[here_n]

    def close(self) -> tuple[RoundState, RoundInfo]:
        """The next state, and diagnostics of the round."""
        plan = self.plan
        state = self.state
        control = plan.rule.control
        here_n = self.reports.responded_n
        replies = plan.collect_replies(state, self.cohort, here_n)
        self.coef_n = replies.coef_n

        value = self._control_value(replies.client_n)
        update_kd = self._update_kd
        # First what a part does to replies, then what is measured: samplers see updates as they
        # count.
        for intake in self._intakes.values():
            update_kd = intake.counted(
                np.flatnonzero(here_n),
                update_kd,
                value.control_nd,
            )
        total_d = value.total_d
        error_kd = np.subtract(update_kd, value.control_nd, dtype=np.float64)
        del value  # it is as large as all updates, twice
        self.reports = self._measured(update_kd, error_kd)
        estimate_d = total_d + weighted_sum(replies.coef_n, error_kd, self._d)
        # Coefficients that sum to 1 cancel what all updates have in common, so that the variance is
        # that of residuals about D (``variance.py``).
        if plan.rule.ratio:
            error_kd -= estimate_d
        variance = estimate_variance(replies, error_kd)
        del error_kd  # what learns needs as much again
        # Only now: c and its coefficient have to be from before the draw, or D is biased.
        known = control.update(state.control, plan.population, replies, update_kd)

        # The sampler learns from these; ``info`` and the host see what was measured.
        scored = self.reports
        for intake in self._intakes.values():
            scored = intake.scored(scored)
        following, step = plan.advance(state, self.cohort, scored, estimate_d, known)
        own = dict(following.parts)
        for name, intake in self._intakes.items():
            own[name] = intake.closed(own[name], replies.client_n, here_n)
        return following._replace(parts=own), self._info(replies, variance, step)

    def _control_value(self, client_k: IntArray) -> ControlValue:
        control = self.plan.rule.control
        value: Any = control.value(self.state.control, client_k)
        usual = [((self._d,), (rows, self._d)) for rows in (1, len(client_k))]
        # A user's own class may return anything, and another shape would be broadcast without a
        # word.
        if not isinstance(value, ControlValue) or tuple(map(np.shape, value)) not in usual:
            raise DeltaflError(
                f"{type(control).__name__}.value must return ControlValue(total_d, "
                f"control_nd), d = {self._d}, with a row for each client it is given"
            )
        return value

    def _measured(self, update_kd: Params, residual_kd: FloatArray) -> Reports:
        """The reports with what the server measures on the updates; 0 where there is none."""
        sampler = self.plan.sampler
        bias_size = sampler.output_bias_size
        if bias_size > self._d:
            raise DeltaflError(
                f"the sampler looks at the last {bias_size} parameters of a model of {self._d}; "
                "lower its number"
            )
        count_k = None
        if sampler.counts_draws:
            count_k = self.cohort.count_n[self.reports.responded_n].astype(float)
        norm_k, deviation_k = squared_norms(update_kd, count_k)
        measured = {
            "squared_norm_n": norm_k,
            "squared_deviation_n": deviation_k,
            "squared_residual_n": inner(residual_kd, residual_kd),
            "output_bias_nk": update_kd[:, self._d - bias_size :],
        }
        if sampler.sketch_size > 0:
            measured["sketch_nq"] = count_sketch(
                residual_kd,
                sampler.sketch_size,
                self.plan.seed,
            )
        here_n = self.reports.responded_n
        columns = {}
        # Silent clients have rows as well: reports are aligned with the cohort.
        for name, column_k in measured.items():
            columns[name] = np.zeros((len(here_n), *column_k.shape[1:]))
            columns[name][here_n] = column_k
        return self.reports._replace(**columns)

    def _info(self, replies: Replies, variance: float, step: Step) -> RoundInfo:
        coef_n = replies.coef_n
        reports = self.reports.part(self.reports.responded_n)
        norm = sqrt(inner(step.delta_d, step.delta_d))
        zeta_n = np.sqrt(reports.squared_deviation_n)
        diversity = nan
        # One reply, or equal ones: the ratio would be infinite.
        if zeta_n.any():
            diversity = float(zeta_n.mean())
        squared_residual = float(coef_n @ reports.squared_residual_n)
        squared_norm = float(coef_n @ reports.squared_norm_n)
        has_loss_n = reports.has_loss_n
        known_n = coef_n[has_loss_n]
        factors = [float(intake.factor_n.min(initial=1.0)) for intake in self._intakes.values()]
        return RoundInfo(
            round=self.state.round,
            num_selected=len(self.cohort.client_n),
            num_responded=len(replies.client_n),
            rejected=sorted(self._rejected),
            estimate_norm=norm,
            variance=variance,
            effective_sample_size=effective_sample_size(coef_n),
            largest_weight=float(coef_n.max(initial=0.0)),
            sum_of_weights=float(coef_n.sum()),
            mean_over_diversity=norm / diversity,
            loss=_ratio(
                float(known_n @ reports.loss_n[has_loss_n]),
                float(known_n.sum()),
            ),
            residual=_ratio(squared_residual, squared_norm),
            control_coefficient=self.plan.rule.control.coefficient(self.state.control),
            clip_factor=min([step.factor, *factors]),
        )


def _ratio(above: float, below: float) -> float:
    """A ratio of sums; NaN where there is nothing to divide by."""
    if below > 0:
        return above / below
    return nan
