"""The accumulator that closes a round, whoever hosts it: replies come in, the next state goes out.

::

    round = Accumulator(plan, state, open_round(plan, state))
    round.add_rows(updates, reports)           # all replies: this is ``close_round``
    state, info = round.close()

    round.add_rows(updates, reports, places)   # or, in each of several processes, those it has,
    round.merge(group)                         # and then their sums: group adds up and gathers

Several processes have the same bits afterwards, which are those of one process up to rounding.
"""

import zlib
from collections.abc import Sequence
from itertools import chain
from math import nan, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np

from .errors import DeltaflError
from .estimators.control_variates import ControlValue
from .estimators.sketch import count_sketch
from .estimators.variance import (
    VarianceForm,
    effective_sample_size,
    estimate_variance,
    variance_form,
)
from .plan import Plan, RoundState
from .scale.numerics import inner, weighted_sum
from .server.norms import squared_norms
from .server.part import Step
from .server.screening import Updates, screen_replies
from .types import (
    NO_REPLY,
    BoolArray,
    Cohort,
    FloatArray,
    IntArray,
    Params,
    RejectedReply,
    Replies,
    Reports,
    RoundInfo,
)


class ProcessGroup(Protocol):
    """The processes that close a round together."""

    def add_up(self, vector: FloatArray) -> FloatArray:
        """The sum over all processes, the same bits in all."""

    def gathered(self, item: list[RejectedReply]) -> list[list[RejectedReply]]:
        """The items of all processes, in the same order in all."""


def clients_of(plan: Plan, state: RoundState) -> int:
    """The number of clients; a ``DeltaflError`` if plan and state have different ones."""
    m = plan.population.num_clients
    known = len(state.selected_m)
    if known != m:
        raise DeltaflError(
            f"the state is of {known} clients and the plan of {m}; give its own plan"
        )
    return m


class _Rows(NamedTuple):
    """Usable updates: places in the cohort, u_i, u_i - c_i, and sum_j w_j c_j of all clients."""

    place_k: IntArray
    update_kd: Params
    residual_kd: FloatArray
    total_d: FloatArray


class _Sums(NamedTuple):
    """What the replies add up to."""

    total_d: FloatArray  # sum_j w_j c_j over all clients
    residual_d: FloatArray  # sum_S coef_i (u_i - c_i)
    variance: float
    next_control: Any


class Accumulator:
    """Closes one round: ``cohort`` is what ``open_round`` returned for ``plan`` and ``state``,
    which is not changed.

    Attributes:
        reports: What clients reported and the server measured on their updates; complete once the
            round is closed.
    """

    def __init__(self, plan: Plan, state: RoundState, cohort: Cohort) -> None:
        if cohort.client_n.max(initial=0) >= clients_of(plan, state):
            raise DeltaflError(
                "the cohort has clients that the plan does not know; give what open_round returned"
            )
        if cohort.round not in (None, state.round):
            raise DeltaflError(
                f"the cohort was drawn in round {cohort.round} and the state is that of round "
                f"{state.round}; open the round again, and close it with the state that open_round "
                "was given"
            )
        self.plan = plan
        self.state = state
        self.cohort = cohort
        self._n = len(cohort.client_n)
        self._d = len(state.params_d)
        self._rule = plan.rule
        self._control = plan.rule.control
        self._intakes = plan.intakes(state, cohort)
        self.reports = Reports._make(map(np.zeros_like, Reports.make(self._n)))._replace(
            sketch_nq=np.zeros((self._n, plan.sampler.sketch_size)),
            output_bias_nk=np.zeros((self._n, plan.sampler.output_bias_size)),
        )
        self._missing_n = np.ones(self._n, dtype=np.bool_)
        self._rejected = dict[int, str]()
        self._place_k = np.zeros(0, dtype=np.int64)
        self._update_kd = np.zeros((0, self._d), dtype=np.float32)
        #: sum_S coef_i (u_i - c_i) and the estimate's variance, once they are merged.
        self._merged: tuple[FloatArray, float] | None = None
        self._closed = False

    def add_rows(
        self,
        updates: Updates | Sequence[Params | None],
        reports: Reports | None = None,
        places: IntArray | None = None,
    ) -> None:
        """Add the replies, once: of all clients, or of some places of the cohort."""
        self._require_open()
        place_k = np.arange(self._n) if places is None else np.asarray(places, dtype=np.int64)
        if len(set(place_k.tolist()) & set(range(self._n))) < len(place_k):
            raise DeltaflError(
                f"places is {places!r:.60}; give places in the cohort, 0 to {self._n - 1}, once "
                "each"
            )
        if not self._missing_n.all():
            raise DeltaflError("replies have been added already; add them all at once")
        # As the coefficients: in the cohort's order, which fixes the bits of sums.
        order_k = np.argsort(place_k, kind="stable")
        clients = self.cohort.part(place_k)
        drifts = self.plan.drifts(self.state, clients.client_n)
        screened = screen_replies(clients, updates, reports, self._d, drifts, self.plan.sampler)
        self._missing_n[place_k] = False
        self._rejected = dict(screened.rejected)
        # Only the first columns come from clients; the others are measured.
        for column, given in zip(self.reports[:6], screened.reports[:6], strict=True):
            column[place_k] = given
        here_k = order_k[screened.reports.responded_n[order_k]]
        self._place_k = place_k[here_k]
        self._update_kd = screened.update_nd
        if not np.array_equal(here_k, np.arange(len(place_k))):  # else a copy is saved
            self._update_kd = screened.update_nd[here_k]
        for intake in self._intakes.values():
            self._update_kd = intake.received(self._place_k, self._update_kd)

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the processes of a group were given; each calls it once, after its
        ``add_rows``.

        Plan, state and cohort are the same in all; each row of the cohort is in one. One sum over
        all processes has the estimate, the plain sum of the updates and the columns of the reports;
        a second, small one the squared distances from the first one's means. The control variate
        must have ``learns_from_sums``.
        """
        if not self._control.learns_from_sums:
            raise DeltaflError(
                f"the control variate of {self._rule.name!r} learns from rows; gather them and use "
                "close_round"
            )
        for intake in self._intakes.values():
            intake.merge(group)
        rows = self._rows()
        self._measure(rows)
        here_n = self._agree(group)
        replies = self.plan.collect_replies(self.state, self.cohort, here_n)
        form = variance_form(replies)
        if form is None:
            zero_n = np.zeros(len(replies.client_n))
            form = VarianceForm(nan, zero_n, zero_n, zero_n, centred=False)
        coef_n, mass_n, scale_n = np.zeros((3, self._n))
        coef_n[here_n] = replies.coef_n
        mass_n[here_n] = form.mass_n
        scale_n[here_n] = form.scale_n

        residual_d, update_d, centre_d = self._added_up(group, rows, coef_n, mass_n * scale_n)
        error_kd = rows.residual_kd
        mass = mass_n.sum()
        if self._rule.ratio:  # such an estimator has no control variate: its estimate is this sum
            error_kd = error_kd - residual_d
            centre_d = centre_d - mass_n @ scale_n * residual_d
        if form.centred and mass > 0:
            centre_d = centre_d / mass
        else:
            centre_d = np.zeros(self._d)
        count_n = here_n if self._share() is None else self.cohort.count_n[here_n]
        mean_d = update_d / max(int(count_n.sum()), 1)
        place_k = rows.place_k
        square_4n = np.zeros((4, self._n))  # the last: what was taken away from each update
        wide_kd = rows.update_kd.astype(np.float64)
        scaled = zip(scale_n[place_k], error_kd, strict=True)
        square_4n[0, place_k] = [np.sum((update_d - mean_d) ** 2) for update_d in wide_kd]
        square_4n[1, place_k] = [np.sum((scale * row_d - centre_d) ** 2) for scale, row_d in scaled]
        square_4n[2, place_k] = inner(error_kd, error_kd)
        square_4n[3] = 1 - self._factors()
        added_4n = group.add_up(square_4n.ravel()).reshape(4, self._n)
        deviation_n, squared_n, squared_error_n, lost_n = added_4n
        for intake in self._intakes.values():
            intake.factor_n = 1 - lost_n
        self.reports.squared_deviation_n[:] = deviation_n
        variance = form.total(squared_n[here_n], squared_error_n[here_n])
        self._merged = residual_d, variance

    def _added_up(
        self, group: ProcessGroup, rows: _Rows, coef_n: FloatArray, centre_n: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The three sums over all rows, and all columns of the reports; in one message."""
        place_k = rows.place_k
        share_n = self._share()
        if share_n is None:
            update_d = rows.update_kd.sum(axis=0, dtype=np.float64)
        else:
            update_d = share_n[place_k] @ rows.update_kd
        residual_d = coef_n[place_k] @ rows.residual_kd
        centre_d = centre_n[place_k] @ rows.residual_kd
        columns = self.reports._asdict()
        if not self.plan.sampler.uses_square_loss:
            # A column that nobody reads changes neither what is added up nor its rounding.
            del columns["square_loss_n"]
        sent = [residual_d, update_d, centre_d, *(column.ravel() for column in columns.values())]
        total = group.add_up(np.concatenate(sent))
        first = 3 * self._d
        sum_3d = total[:first].reshape(3, self._d)
        for name, column in columns.items():
            part = total[first : first + column.size]
            columns[name] = part.reshape(column.shape).astype(column.dtype)
            first += column.size
        self.reports = self.reports._replace(**columns)
        return sum_3d[0], sum_3d[1], sum_3d[2]

    def _agree(self, group: ProcessGroup) -> BoolArray:
        """Learn which clients of the whole cohort replied, and which replies were rejected in
        other processes.
        """
        model = zlib.crc32(self.state.params_d.tobytes())
        digest = zlib.crc32(self.cohort.client_n.tobytes(), model) % 2**20
        responded_n = self.reports.responded_n.astype(np.float64)
        sent = np.array([1.0, digest, digest**2, *responded_n])
        count, total, squares, *replied = group.add_up(sent)
        if count * squares != total**2:  # all are equal; 20 bits, so that these sums are exact
            raise DeltaflError(
                "the processes of this run do not have the same model and cohort in round "
                f"{self.state.round}: run the same versions on the same kind of machine everywhere"
            )
        self._missing_n[:] = False
        here_n = np.array(replied, dtype=np.bool_)
        if not here_n.all():
            own = [RejectedReply(client, reason) for client, reason in self._rejected.items()]
            self._rejected = dict(chain(*group.gathered(own)))
        return here_n

    def close(self) -> tuple[RoundState, RoundInfo]:
        """The next state, and diagnostics of the round. Clients that were not added count as not
        having replied.
        """
        self._require_open()
        self._closed = True
        plan = self.plan
        here_n = self.reports.responded_n
        replies = plan.collect_replies(self.state, self.cohort, here_n)
        sums = self._sums(replies)
        steps_n = np.where(here_n, self.reports.num_steps_n, 1)
        self.reports = self.reports._replace(num_steps_n=steps_n)
        scored = self.reports
        for intake in self._intakes.values():
            scored = intake.scored(scored)
        estimate_d = sums.total_d + sums.residual_d
        following, step = plan.advance(
            self.state, self.cohort, scored, estimate_d, sums.next_control
        )
        own = dict(following.parts)
        for name, intake in self._intakes.items():
            own[name] = intake.closed(own[name], replies.client_n, here_n)
        info = self._info(replies, sums.variance, step)
        return following._replace(parts=own), info

    def _sums(self, replies: Replies) -> _Sums:
        """The estimate and its variance, and what the control variate learns."""
        control = self._control
        known = self.state.control
        if self._merged is not None:
            total_d = control.value(known, replies.client_n[:0]).total_d
            residual_d, variance = self._merged
            return _Sums(
                total_d, residual_d, variance, control.update_from_sum(known, replies, residual_d)
            )
        rows = self._rows()
        self._measure(rows)
        error_kd = rows.residual_kd
        residual_d = weighted_sum(replies.coef_n, error_kd, self._d)
        if self._rule.ratio:
            # In place: it is as large as all updates, twice.
            error_kd -= rows.total_d + residual_d
        variance = estimate_variance(replies, error_kd)
        total_d = rows.total_d
        update_kd = rows.update_kd
        del rows, error_kd
        following = control.update(known, self.plan.population, replies, update_kd)
        return _Sums(total_d, residual_d, variance, following)

    def _factors(self) -> FloatArray:
        """What each selected client's update was multiplied with, float64 (n,)."""
        factor_n = np.ones(self._n)
        for intake in self._intakes.values():
            factor_n = np.minimum(factor_n, intake.factor_n)
        return factor_n

    def _info(self, replies: Replies, variance: float, step: Step) -> RoundInfo:
        coef_n = replies.coef_n
        reports = self.reports.part(self.reports.responded_n)
        missing = self.cohort.client_n[self._missing_n].tolist()
        faults = self._rejected | dict.fromkeys(missing, NO_REPLY)
        norm = sqrt(inner(step.delta_d, step.delta_d))
        zeta_n = np.sqrt(reports.squared_deviation_n)
        diversity = float(zeta_n.mean()) if zeta_n.any() else nan
        squared_residual = float(coef_n @ reports.squared_residual_n)
        squared_norm = float(coef_n @ reports.squared_norm_n)
        return RoundInfo(
            round=self.state.round,
            num_selected=self._n,
            num_responded=len(replies.client_n),
            rejected=[RejectedReply(client, faults[client]) for client in sorted(faults)],
            estimate_norm=norm,
            variance=variance,
            effective_sample_size=effective_sample_size(coef_n),
            largest_weight=float(coef_n.max(initial=0.0)),
            sum_of_weights=float(coef_n.sum()),
            mean_over_diversity=norm / diversity,
            loss=_mean_loss(coef_n, reports),
            residual=_ratio(squared_residual, squared_norm),
            control_coefficient=self._control.coefficient(self.state.control),
            clip_factor=min(step.factor, float(self._factors().min(initial=1.0))),
        )

    def _require_open(self) -> None:
        if self._closed:
            raise DeltaflError(
                "this round is closed; open the next one and make another Accumulator"
            )

    def _rows(self) -> _Rows:
        place_k = self._place_k
        update_kd = self._update_kd
        value: Any = self._control.value(self.state.control, self.cohort.client_n[place_k])
        shapes = tuple(map(np.shape, value)) if isinstance(value, ControlValue) else ()
        if shapes not in {((self._d,), (rows, self._d)) for rows in (1, len(place_k))}:
            raise DeltaflError(
                f"{type(self._control).__name__}.value must return ControlValue(total_d, "
                f"control_nd), d = {self._d}, with a row for each client it is given"
            )
        for intake in self._intakes.values():
            update_kd = intake.counted(place_k, update_kd, value.control_nd)
        residual_kd = np.subtract(update_kd, value.control_nd, dtype=np.float64)
        return _Rows(place_k, update_kd, residual_kd, value.total_d)

    def _share(self, which: Any = slice(None)) -> FloatArray | None:
        """How often each client counts in the mean that zeta is about; None for once."""
        if not self.plan.sampler.counts_draws:
            return None
        return np.asarray(self.cohort.count_n[which], dtype=np.float64)

    def _measure(self, rows: _Rows) -> None:
        """Note in the reports what the server measures on each of these updates."""
        reports = self.reports
        place_k = rows.place_k
        sketch_size = self.plan.sampler.sketch_size
        bias_size = self.plan.sampler.output_bias_size
        if bias_size > self._d:
            raise DeltaflError(
                f"the sampler looks at the last {bias_size} parameters of a model of {self._d}; "
                "lower its number"
            )
        norm_k, deviation_k = squared_norms(rows.update_kd, self._share(place_k))
        reports.squared_norm_n[place_k] = norm_k
        reports.squared_deviation_n[place_k] = deviation_k
        reports.squared_residual_n[place_k] = inner(rows.residual_kd, rows.residual_kd)
        if sketch_size > 0:
            reports.sketch_nq[place_k] = count_sketch(rows.residual_kd, sketch_size, self.plan.seed)
        reports.output_bias_nk[place_k] = rows.update_kd[:, self._d - bias_size :]


def _mean_loss(coef_n: FloatArray, reports: Reports) -> float:
    """The mean of the losses that were reported, weighted by the coefficients; NaN without one."""
    has_loss_n = reports.has_loss_n
    coef_k = coef_n[has_loss_n]
    return _ratio(float(coef_k @ reports.loss_n[has_loss_n]), float(coef_k.sum()))


def _ratio(above: float, below: float) -> float:
    """A ratio of sums; NaN where there is nothing to divide by."""
    return above / below if below > 0 else nan
