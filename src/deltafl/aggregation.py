"""A round closed one update at a time: 2 models in memory and some numbers a client, in place of n models.

::

    cohort = open_round(plan, state)
    round = Aggregation(plan, state, cohort)
    for client, update_d, loss in replies_as_they_arrive():
        round.add(client, update_d, loss=loss)          # update_d can be thrown away now
    state, info = round.close()

The model moves as ``close_round`` would move it: with the same bits if the updates come in the cohort's order and an
update's coefficient does not depend on who else replies, and up to rounding in float64 otherwise. Norms of updates and
of residuals u_i - c_i, sketches and tails are measured on each update as it comes.

What needs all updates at once is measured on sketches of 64 numbers instead: norm(u_i - mean)^2, which DELTA's scores
are made of, and ``info.variance``. Both have the right mean; the standard deviation of a squared norm is at most
sqrt(2 / 64) = 18 % of it (``sketch.py``). Scores steer the draw and are no part of the estimate, which stays unbiased.
Updates of at most 64 parameters are kept as they are; so are all where the estimator remembers one a client, for its
memory holds them anyway.
"""

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .estimators.controls import CommonControl, Control, NoControl, remembers, residuals
from .estimators.damping import trust
from .estimators.heard import Heard
from .estimators.sketch import SKETCH_SIZE, count_sketch
from .estimators.table import find_estimator
from .estimators.variance import estimate_variance
from .replies import measure, measure_output_bias, measure_residuals, screen_replies
from .round import Plan, RoundState, advance, broadcast, coefficients, hear
from .round_info import describe
from .types import Cohort, FloatArray, Params, RejectedReply, Reports, RoundInfo


class Aggregation:
    """The closing of one round, update by update.

    Args:
        plan: The plan.
        state: The state the round was opened with; it is not changed.
        cohort: What ``open_round`` returned.

    Raises:
        DeltaflError: If the estimator's control learns from all updates together, and keeps none: ``close_round`` is
            for these.
    """

    def __init__(self, plan: Plan, state: RoundState, cohort: Cohort) -> None:
        self.plan, self.state, self.cohort = plan, state, cohort
        n, d = len(cohort.client_n), len(state.params_d)
        self._control, self._drift_d = _streaming_control(plan.estimator), broadcast(plan, state).drift_d
        self._keeps_rows = remembers(self._control)
        self._row_nd = np.zeros((n if self._keeps_rows else 0, d), dtype=np.float32)
        self._coef_n = coefficients(plan, state, cohort)
        self._place = {client: i for i, client in enumerate(cohort.client_n.tolist())}
        self._waiting, self._rejected = set(self._place), dict[int, str]()
        self._sum_d = np.zeros(d)
        said = Reports.make(n, responded=np.zeros(n), loss=np.zeros(n), square_loss=np.zeros(n))
        self._reports = said._replace(
            has_loss_n=np.zeros(n, dtype=np.bool_),
            sketch_nq=np.zeros((n, getattr(plan.sampler, "sketch_size", 0))),
            output_bias_nk=np.zeros((n, getattr(plan.sampler, "output_bias_size", 0))),
        )
        kept = min(d, SKETCH_SIZE)
        self._update_nq = np.zeros((n, kept), dtype=np.float32 if d <= SKETCH_SIZE else np.float64)
        self._residual_nq = np.zeros((n, kept))
        self._closed = False

    def add(
        self,
        client: int,
        update: npt.ArrayLike | None,
        *,
        loss: float | None = None,
        square_loss: float | None = None,
        step_variance: float = 0.0,
        num_steps: int = 1,
    ) -> RejectedReply | None:
        """Take one reply in; the columns are those of ``types.Reports``.

        Args:
            client: Index of a client of the cohort, in any order, once each.
            update: (d,), u_i = x_K - x_0; None for a client that gave up.
            loss: Mean training loss; None if the client said none.
            square_loss: Mean of the squared losses of single examples; None if the client said none.
            step_variance: Variance of one local step.
            num_steps: Local steps.

        Returns:
            None; or why the reply was refused, which then counts as non-response.

        Raises:
            DeltaflError: If the client is not of this cohort or replied before, or the round is closed.
        """
        i = self._free_place(client)
        plan, only = self.plan, self.cohort.part([i])
        said = Reports.make(
            1, loss=[loss], square_loss=[square_loss], step_variance=[step_variance], num_steps=[num_steps]
        )
        replies = screen_replies(only, [update], said, len(self._sum_d), known_d=self._drift_d, sampler=plan.sampler)
        if replies.rejected:
            self._rejected[client] = replies.rejected[0].reason
            return replies.rejected[0]
        update_1d = replies.update_nd
        _, residual_1d = residuals(self._control, self.state.control, only.client_n, update_1d)
        self._sum_d += self._coef_n[i] * residual_1d[0]
        row = measure_residuals(replies.reports, residual_1d, self._reports.sketch_nq.shape[1], plan.seed)
        row = measure_output_bias(row, update_1d, self._reports.output_bias_nk.shape[1])
        for column, entry in zip(self._reports, row, strict=True):
            column[i] = entry[0]
        self._update_nq[i], self._residual_nq[i] = self._short(update_1d)[0], self._short(residual_1d)[0]
        if self._keeps_rows:
            self._row_nd[i] = update_1d[0]
        return None

    def close(self) -> tuple[RoundState, RoundInfo]:
        """The next state, and what a person wants to see; clients that were not added did not reply.

        Raises:
            DeltaflError: If the round is closed already.
        """
        self._refuse_if_closed()
        self._closed = True
        plan, state, here = self.plan, self.state, self._reports.responded_n
        heard = hear(plan, state, self.cohort, here)
        coef_n, ratio = heard.coef_n, self._ratio(heard)
        total_d, control_nd = self._control.guess(state.control, heard.client_n[:0])
        delta_d = total_d + (self._sum_d if ratio == 1.0 else ratio * self._sum_d)
        measured = measure(self._update_nq, self._reports)
        reports = measured._replace(squared_norm_n=self._reports.squared_norm_n)
        control = state.control
        if self._keeps_rows:
            control = self._control.update(control, plan.population, heard, self._row_nd[here])
        elif isinstance(self._control, CommonControl) and coef_n.sum() > 0:
            control = self._control.follow(control, ratio * self._sum_d / coef_n.sum() + control_nd[0])
        error_nq = self._residual_nq[here]
        if find_estimator(plan.estimator).ratio:
            error_nq = error_nq - self._short(delta_d[None])
        variance = estimate_variance(heard, error_nq)
        following, delta_d, clip_factor = advance(plan, state, self.cohort, reports, delta_d, control)
        info = describe(state.round, heard, reports, variance, delta_d)
        beta = trust(self._control, state.control)
        faults = sorted((self._rejected | dict.fromkeys(self._waiting, "no reply")).items())
        rejected = [RejectedReply(client, fault) for client, fault in faults]
        return following, info._replace(rejected=rejected, clip_factor=clip_factor, control_coefficient=beta)

    def _free_place(self, client: int) -> int:
        self._refuse_if_closed()
        if client not in self._place:
            raise DeltaflError(
                f"client {client} is not of this round's cohort; add replies of {len(self._place)} clients"
            )
        if client not in self._waiting:
            raise DeltaflError(f"client {client} has replied already; add each reply once")
        self._waiting.remove(client)
        return self._place[client]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DeltaflError("this round is closed; open the next one and make another Aggregation")

    def _short(self, row_1d: Params | FloatArray) -> Params | FloatArray:
        """A row as it is if it is short, else its sketch."""
        return row_1d if len(self._sum_d) <= SKETCH_SIZE else count_sketch(row_1d, SKETCH_SIZE, self.plan.seed)

    def _ratio(self, heard: Heard) -> float:
        """The coefficients of those who replied over those that their updates were added with: one number for all."""
        coef_n, added_n = heard.coef_n, self._coef_n[self._reports.responded_n]
        if np.array_equal(coef_n, added_n):
            return 1.0
        ratio = float(coef_n.sum() / added_n.sum())
        if not np.allclose(coef_n, ratio * added_n, rtol=1e-9, atol=0.0):
            raise DeltaflError(
                f"the coefficients of {self.plan.estimator!r} depend on who else replied in another way than by a "
                "common factor; close this round with close_round"
            )
        return ratio


def _streaming_control(estimator: str) -> Control:
    """The control of an estimator, if it can learn without seeing all updates, or keeps them in any case.

    Raises:
        DeltaflError: If it cannot.
    """
    control = find_estimator(estimator).control
    if not (isinstance(control, NoControl | CommonControl) or remembers(control)):
        raise DeltaflError(
            f"the control of {estimator!r} learns from all updates of a round together; use close_round, or an "
            "estimator such as 'horvitz-thompson', 'difference' or 'innovation'"
        )
    return control
