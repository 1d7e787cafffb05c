"""The accumulator that closes a round, whoever hosts it: replies come in, the next state goes out.

::

    round = Accumulator(plan, state, open_round(plan, state))
    round.add_rows(updates, reports)
    following, info = round.close()

``close_round`` is these lines; a host that wants to see ``round.reports`` writes them itself.
"""

from collections.abc import Sequence
from math import nan, sqrt
from typing import Any, NamedTuple

import numpy as np

from .designs.inclusion import check_cohort
from .errors import DeltaflError, check_types
from .estimators.control_variates import wrong_value
from .estimators.sketch import FOLDED, count_sketch, folded
from .estimators.value import ControlValue, Reader
from .estimators.variance import effective_sample_size, variance_form
from .plan import Plan, RoundState, check_state
from .scale.numerics import inner, largest_entry, sum_of_rows
from .scale.rows import read_rows, together
from .scale.stretches import LARGE, float_type, over_stretches
from .scale.used_again import new_array
from .screening import Updates, screen_replies
from .server.norms import about_mean
from .server.part import Step
from .types import (
    Array,
    BoolArray,
    Cohort,
    FloatArray,
    Floats,
    Params,
    RejectedReply,
    Replies,
    Reports,
    RoundInfo,
)


def check_round(plan: Plan, state: RoundState, cohort: Cohort) -> None:
    """Raise a ``DeltaflError`` unless a cohort can be one of this plan and state."""
    check_state(plan, state)
    check_types("close_round(plan, state, cohort, updates)", cohort=(cohort, Cohort))
    check_cohort(cohort, plan.population.num_clients, "the cohort's")
    # A cohort that a host has made itself has no round.
    if cohort.round not in (None, state.round):
        raise DeltaflError(
            f"the cohort was drawn in round {cohort.round} and the state is that of round "
            f"{state.round}; open the round again, and close it with the state that open_round "
            "was given"
        )


class _Measured(NamedTuple):
    """What is summed over the parameters: norms and sketches of each reply."""

    norm_k: FloatArray
    deviation_k: FloatArray
    residual_k: FloatArray
    sketch_kq: FloatArray
    spread_2k: FloatArray = np.zeros(())  #: ``VarianceForm.sums``


class Accumulator:
    """Closes one round: ``cohort`` is what ``open_round`` returned for ``plan`` and ``state``,
    which is not changed.

    Attributes:
        reports: What clients reported and the server measured on their updates; complete once the
            round is closed.
        coef_n: The coefficients of the replies that were used, once the round is closed.
    """

    def __init__(self, plan: Plan, state: RoundState, cohort: Cohort) -> None:
        check_round(plan, state, cohort)
        self.plan = plan
        self.state = state
        self.cohort = cohort
        self._d = len(state.params_d)
        self._intakes = plan.intakes(state, cohort)
        self._sends_drifts = bool(plan.drifting)

    def add_rows(
        self,
        updates: Updates | Sequence[Params | None],
        reports: Reports | None = None,
    ) -> None:
        """Add the replies of all clients of the cohort, in its order. They are read again when the
        round is closed.
        """
        screened = screen_replies(self.cohort, updates, reports, self._d, self.plan.sampler)
        self._updates: Sequence[Params] | Params = together(screened.updates)
        self._rejected = screened.rejected
        self.reports = screened.reports

    def close(self) -> tuple[RoundState, RoundInfo]:
        """The next state, and diagnostics of the round."""
        plan = self.plan
        state = self.state
        here_n = self._replied()
        replies = plan.collect_replies(state, self.cohort, here_n)
        self.coef_n = replies.coef_n

        control = plan.rule.control
        read = control.reader(state.control, replies.client_n)
        if self._intakes:
            read = self._taken_in(read)
        # c and its coefficient are from before the draw, or D would be biased: ``state`` is.
        learner = control.learner(state.control, plan.population, replies)
        estimate_d = new_array(self._d)
        form = variance_form(replies)
        count_k = None
        if plan.sampler.counts_draws:
            count_k = replies.cohort.count_n.astype(float)

        def measured(part: slice, update_kb: Floats, value: ControlValue) -> _Measured:
            """A stretch of the estimate, and what is summed over the parameters."""
            error_kb = update_kb
            control_nb = value.control_nd
            # A pass less for methods without a control variate.
            if len(control_nb) > 1 or control_nb.any():
                error_kb = update_kb - control_nb
            estimate_b = sum_of_rows(replies.coef_n, error_kb)
            estimate_b += value.total_d
            estimate_d[part] = estimate_b
            about = about_mean(update_kb, count_k)
            residual_k = inner(error_kb, error_kb)
            norm_k = residual_k
            if error_kb is not update_kb:
                norm_k = inner(update_kb, update_kb)
            sketch_kq = self._sketched(part, error_kb)
            seen = _Measured(norm_k, about.square_k, residual_k, sketch_kq)
            if form is None:
                return seen
            left_kb = error_kb
            square_k = residual_k
            common_b = np.zeros(1)
            # Residuals about one c are as far from their mean as the updates are.
            if len(control_nb) == 1:
                left_kb = about.left_kb
                square_k = about.square_k
                common_b = about.mean_b - control_nb[0]
            # Coefficients that sum to 1 cancel what all updates have in common, so that the
            # variance is that of residuals about D (``variance.py``).
            if plan.rule.ratio:
                common_b = common_b - estimate_b
            return seen._replace(spread_2k=form.sums(left_kb, square_k, common_b))

        def look(part: slice) -> tuple[_Measured, Any]:
            """All that is done with a stretch of the parameters."""
            value = self._checked(read(part), estimate_d[part].shape)
            update_kb = self._counted(part, value)
            seen = measured(part, update_kb, value)
            return seen, learner.learn(part, update_kb, value)

        seen, learnt = zip(*over_stretches(look, self._d, len(replies.client_n)), strict=True)
        sums: Any = _Measured(*map(sum, zip(*seen, strict=True)))  # type: ignore[arg-type]
        variance = nan
        if form is not None:
            variance = form.total(sums.spread_2k)
        self.reports = self._reported(sums, read)
        known = learner.state(list(learnt))
        del self._updates

        # The sampler learns from these; ``info`` and the host see what was measured.
        scored = self.reports
        for intake in self._intakes.values():
            scored = intake.scored(scored)
        following, step = plan.advance(state, replies, scored, estimate_d, variance, known)
        # Without a reply only what the state remembers moves the model.
        if len(replies.client_n) and not _all_finite(following.params_d, step.delta_d):
            return self._left_out(replies)
        return self._with_intakes(following, replies), self._info(replies, variance, step)

    def _with_intakes(self, following: RoundState, replies: Replies) -> RoundState:
        own = dict(following.parts)
        here_n = self.reports.responded_n
        for name, intake in self._intakes.items():
            own[name] = intake.closed(own[name], replies.client_n, here_n)
        return following._replace(parts=own)

    def _replied(self) -> BoolArray:
        # Once the round is closed they are forgotten.
        if not hasattr(self, "_updates"):
            raise DeltaflError("there are no replies to close the round with; call add_rows before")
        return self.reports.responded_n

    def _left_out(self, replies: Replies) -> tuple[RoundState, RoundInfo]:
        """The round as if nobody had replied, for no single reply is to blame."""
        reason = "with these replies the model would have an entry that is not finite"
        refused = [RejectedReply(int(client), reason) for client in replies.client_n]
        again = Accumulator(self.plan, self.state, self.cohort)
        again.add_rows([None] * len(self.cohort.client_n))
        again._rejected = self._rejected + refused
        following, info = again.close()
        self.reports = again.reports
        self.coef_n = again.coef_n
        return following, info

    def _taken_in(self, read: Reader) -> Reader:
        """What parts do to replies, before anything is measured: samplers see updates as they
        count. They look at whole rows.
        """
        value = self._checked(read(slice(None)), (self._d,))
        update_kd = self._counted(slice(None), value).astype(np.float32)
        for intake in self._intakes.values():
            update_kd = intake.counted(
                np.flatnonzero(self.reports.responded_n),
                update_kd,
                value.control_nd,
            )
        self._updates = update_kd
        self._sends_drifts = False
        return value.part

    def _counted(self, part: slice, value: ControlValue) -> Any:
        """A stretch of the updates, (k, b), without the drifts that clients were sent."""
        dtype = float_type(self._d)
        update_kb = read_rows(self._updates, part, len(value.total_d), dtype)
        # Clients added the drift in their local steps; what is left is what they learned.
        if self._sends_drifts:
            drift_kb = self.plan.drift(self.state, part, lambda _: value)
            # In float32, as whole updates come: the least rounding may turn a level of a code.
            less_kb = update_kb.astype(np.float32, copy=False) - drift_kb
            update_kb = less_kb.astype(update_kb.dtype, copy=False)
        return update_kb

    def _checked(self, value: Any, shape: tuple[int, ...]) -> ControlValue:
        # A user's own class may return anything, and another shape would be broadcast without a
        # word.
        usual = [(shape, (rows, *shape)) for rows in (1, len(self._updates))]
        if not isinstance(value, ControlValue) or tuple(map(np.shape, value)) not in usual:
            raise wrong_value(self.plan.rule.control, f", d = {self._d}")
        return value

    def _sketched(self, part: slice, error_kb: Floats) -> FloatArray:
        """Sketches of a stretch of the residuals, if the sampler asks for them."""
        size = self.plan.sampler.sketch_size
        if size == 0:
            return np.zeros((len(error_kb), 0))
        seed = self.plan.seed
        first = part.start or 0
        if self._d >= LARGE:
            error_kb = folded(error_kb, seed, first)
            first //= FOLDED
        return count_sketch(error_kb, size, seed, first)

    def _reported(self, sums: _Measured, read: Reader) -> Reports:
        """The reports with what the server measures on the updates; 0 where there is none."""
        last = slice(self._d - self.plan.sampler.output_bias_size, None)
        columns_k: dict[str, Array] = {
            "squared_norm_n": sums.norm_k,
            "squared_deviation_n": sums.deviation_k,
            "squared_residual_n": sums.residual_k,
            "sketch_nq": sums.sketch_kq,
            "output_bias_nk": self._counted(last, read(last)),
        }
        here_n = self.reports.responded_n
        columns: dict[str, Any] = {}
        # Silent clients have rows as well: reports are aligned with the cohort.
        for name, column_k in columns_k.items():
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
        squared_residual = float(inner(coef_n, reports.squared_residual_n))
        squared_norm = float(inner(coef_n, reports.squared_norm_n))
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
                float(inner(known_n, reports.loss_n[has_loss_n])),
                float(known_n.sum()),
            ),
            residual=_ratio(squared_residual, squared_norm),
            control_coefficient=self.plan.rule.control.coefficient(self.state.control),
            clip_factor=min([step.factor, *factors]),
        )


def _all_finite(*vectors: FloatArray | Params) -> bool:
    """Whether float32, which models and memories are kept in, holds these vectors."""
    most = float(np.finfo(np.float32).max)
    return all(largest_entry(vector_d) <= most for vector_d in vectors)


def _ratio(above: float, below: float) -> float:
    """A ratio of sums; NaN where there is nothing to divide by."""
    if below > 0:
        return above / below
    return nan
