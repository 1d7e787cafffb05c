"""The accumulator that closes a round, whoever hosts it: replies come in, the next state goes out.

::

    round = Accumulator(plan, state, open_round(plan, state))

    round.add_rows(updates, reports)                 # all replies together: this is ``close_round``

    for client, update_d, loss in replies_as_they_arrive():
        round.add(client, update_d, loss=loss)   # or one at a time: update_d can be thrown away now

    round.add_rows(updates, reports, places)  # or, in each of several processes, the replies it has,
    round.merge(group)                              # and then their sums: group sums up and gathers

    state, info = round.close()

**One reply at a time**, the estimate has the bits of ``close_round`` if replies come in the
cohort's order and their coefficients do not depend on which others reply, else it differs by
rounding. Where the control variate learns from the sum alone (the plain estimators, ``difference``)
and d > 64, memory is 2 models and not n; norm(u_i - mean)^2 and ``info.variance`` are then measured
on sketches of 64 numbers: unbiased, with a standard deviation of at most 18 %.

**Several processes** have the same bits afterwards, which are those of one process up to rounding.
"""

import zlib
from collections.abc import Sequence
from itertools import chain
from math import nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .estimators.control_variates import ControlValue
from .estimators.remote import RemoteReply, differences
from .estimators.sketch import SKETCH_SIZE, count_sketch
from .estimators.variance import (
    VarianceForm,
    effective_sample_size,
    estimate_variance,
    variance_form,
)
from .samplers.base import with_rows
from .scale.rows import inner, weighted_sum
from .server.clipping import Clipping, KnownNorms, capped
from .server.norms import squared_norms
from .server.screening import ScreenedReplies, Updates, screen_replies
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

if TYPE_CHECKING:
    from .round import Plan, RoundState


class ProcessGroup(Protocol):
    """The processes that close a round together."""

    def add_up(self, vector: FloatArray) -> FloatArray:
        """The sum over all processes, the same bits in all."""

    def gathered(self, item: list[RejectedReply]) -> list[list[RejectedReply]]:
        """The items of all processes, in the same order in all."""


def clients_of(plan: "Plan", state: "RoundState") -> int:
    """The number of clients; a ``DeltaflError`` if it is one in the plan and another in the
    state.
    """
    m = plan.population.num_clients
    known = len(state.selected_m)
    if known != m:
        raise DeltaflError(
            f"the state is of {known} clients and the plan of {m}; give its own plan"
        )
    return m


class _Rows(NamedTuple):
    """Usable updates: their rows in the cohort, u_i, u_i - c_i, and sum_j w_j c_j over all
    clients.
    """

    place_k: IntArray
    update_kd: Params
    residual_kd: FloatArray
    total_d: FloatArray


class _Stream(NamedTuple):
    """What is kept of replies that are added up as they come; the last three are changed in
    place.
    """

    coef_n: FloatArray  # if all clients reply
    residual_d: FloatArray  # sum coef_i (u_i - c_i) so far
    update_nq: FloatArray  # sketches of u_i
    residual_nq: FloatArray  # sketches of u_i - c_i


class Accumulator:
    """Closes one round: ``cohort`` is what ``open_round`` returned for ``plan`` and ``state``,
    which is not changed.

    Attributes:
        reports: What clients reported and the server measured on their updates; complete once the
            round is closed.
    """

    def __init__(self, plan: "Plan", state: "RoundState", cohort: Cohort) -> None:
        self.plan = plan
        self.state = state
        self.cohort = cohort
        if cohort.client_n.max(initial=0) >= clients_of(plan, state):
            raise DeltaflError(
                "the cohort has clients that the plan does not know; give what open_round returned"
            )
        if cohort.round not in (None, state.round):
            drawn = (
                f"the cohort was drawn in round {cohort.round} and the state is that of round "
                f"{state.round}"
            )
            raise DeltaflError(
                f"{drawn}; open the round again, and close it with the state that open_round was "
                "given"
            )
        self._n = len(cohort.client_n)
        self._d = len(state.params_d)
        self._rule = plan.rule
        self._control = plan.rule.control
        self.reports = Reports._make(map(np.zeros_like, Reports.make(self._n)))._replace(
            sketch_nq=np.zeros((self._n, plan.sampler.sketch_size)),
            output_bias_nk=np.zeros((self._n, plan.sampler.output_bias_size)),
        )
        self._clipping: Clipping | None = None
        if plan.clip is not None:
            coef_n = plan.collect_replies(state, cohort).coef_n / cohort.count_n
            self._clipping = Clipping(state.norms, coef_n, plan.n)
        self._missing_n = np.ones(self._n, dtype=np.bool_)
        self._rejected = dict[int, str]()
        #: Updates that are kept, and their places in the cohort.
        self._place_k = np.zeros(0, dtype=np.int64)
        self._update_kd = np.zeros((0, self._d), dtype=np.float32)
        self._stream: _Stream | None = None
        #: Once they are merged: float64 (d,), sum coef_i (u_i - c_i), and the variance of the
        #: estimate.
        self._merged: tuple[FloatArray, float] | None = None
        self._closed = False

    def add(
        self, client: int, update: npt.ArrayLike | RemoteReply | None, **columns: float | None
    ) -> RejectedReply | None:
        """Add the reply of one client of the cohort, in any order, once each; returns why it is
        rejected, or None.

        ``update`` is u_i = x_K - x_0, (d,), or with a ``-remote`` estimator what
        ``ClientMemory.reply`` returned; ``columns`` what was reported: ``loss``, ``square_loss``,
        ``step_variance``, ``num_steps``, see ``Reports``.
        """
        place_1 = np.flatnonzero(self.cohort.client_n == client)
        if len(place_1) == 0:
            raise DeltaflError(
                f"client {client} is not of this round's cohort; add replies of its clients alone"
            )
        reports = Reports.make(1, **{name: [value] for name, value in columns.items()})
        screened = self._screen(place_1, [update], reports)
        self._take(place_1, screened)
        return RejectedReply(client, self._rejected[client]) if screened.rejected else None

    def add_rows(
        self,
        updates: Updates | Sequence[Params | RemoteReply | None],
        reports: Reports | None = None,
        places: IntArray | None = None,
    ) -> None:
        """Add many replies at once, as ``close_round`` does: of all clients, or of some places
        of the cohort.
        """
        place_k = np.arange(self._n) if places is None else np.asarray(places, dtype=np.int64)
        if len(set(place_k.tolist()) & set(range(self._n))) < len(place_k):
            raise DeltaflError(
                f"places is {places!r:.60}; give places in the cohort, 0 to {self._n - 1}, once "
                "each"
            )
        screened = self._screen(place_k, updates, reports)
        if self._stream is None and len(self._place_k) == 0:
            self._place_k = place_k
            self._update_kd = screened.update_nd
        else:
            self._take(place_k, screened)

    def _take(self, place_k: IntArray, screened: ScreenedReplies) -> None:
        """Add replies to the sums if no update is needed any more, else keep them in a table of
        the whole cohort.
        """
        here_k = screened.reports.responded_n
        place_k = place_k[here_k]
        update_kd = screened.update_nd[here_k]
        known = self._clipping is None or not np.isnan(self._clipping.radius)
        if (
            self._control.learns_from_sums
            and self._d > SKETCH_SIZE
            and known
            and len(self._place_k) == 0
        ):
            for k in range(len(place_k)):
                self._add_to_stream(self._rows_of(place_k[k : k + 1], update_kd[k : k + 1]))
            return
        if len(self._place_k) < self._n:
            before_k = self._place_k
            before_kd = self._update_kd
            self._place_k = np.arange(self._n)
            self._update_kd = np.zeros((self._n, self._d), dtype=np.float32)
            self._update_kd[before_k] = before_kd
        self._update_kd[place_k] = update_kd

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the processes of a group were given; each calls it once, after its
        ``add_rows``.

        Plan, state and cohort are the same in all; each row of the cohort is in one. One sum over
        all processes has the estimate, the plain sum of the updates and the columns of the reports;
        a second, small one the squared distances from the first one's means. The control variate
        must have ``learns_from_sums``.
        """
        if not self._control.learns_from_sums:
            name = self._rule.name
            raise DeltaflError(
                f"the control variate of {name!r} learns from rows; gather them and use close_round"
            )
        if self._stream is not None:
            raise DeltaflError(
                "merge needs the updates, which add does not keep; give them to add_rows"
            )
        if self._clipping is not None:
            sent_2n = np.array(
                [np.nan_to_num(self._clipping.norm_n), ~np.isnan(self._clipping.norm_n)]
            )
            norm_n, known_n = group.add_up(sent_2n.ravel()).reshape(2, self._n)
            self._clipping.norm_n = np.where(known_n > 0, norm_n, nan)
        if self.plan.dp is not None:
            raise DeltaflError(
                "dp makes other noise in each process; gather the updates and use close_round"
            )
        rows = self._rows()
        self._measure(rows)
        n = self._n
        d = self._d
        place_k = rows.place_k
        share_n = self._share()
        here = self._agree(group)
        replies = self.plan.collect_replies(self.state, self.cohort, here)
        zero_n = np.zeros(len(replies.client_n))
        form = variance_form(replies) or VarianceForm(nan, zero_n, zero_n, zero_n, centred=False)
        coef_n, mass_n, scale_n = np.zeros((3, n))
        coef_n[here] = replies.coef_n
        mass_n[here] = form.mass_n
        scale_n[here] = form.scale_n

        # A column that nobody reads stays here: it changes neither what is added up nor its
        # rounding.
        unread = set() if self.plan.sampler.uses_square_loss else {"square_loss_n"}
        columns = {
            name: column for name, column in self.reports._asdict().items() if name not in unread
        }
        vectors = [
            coef_n[place_k] @ rows.residual_kd,
            rows.update_kd.sum(axis=0, dtype=np.float64)
            if share_n is None
            else share_n[place_k] @ rows.update_kd,
            (mass_n * scale_n)[place_k] @ rows.residual_kd,
        ]
        total = group.add_up(
            np.concatenate([*vectors, *(column.ravel() for column in columns.values())])
        )
        residual_d, update_d, centre_d = total[: 3 * d].reshape(3, d)
        first = 3 * d
        for name, column in columns.items():
            columns[name] = (
                total[first : first + column.size].reshape(column.shape).astype(column.dtype)
            )
            first += column.size
        self.reports = self.reports._replace(**columns)

        error_kd = rows.residual_kd
        mass = mass_n.sum()
        if self._rule.ratio:  # such an estimator has no control variate: its estimate is this sum
            error_kd = error_kd - residual_d
            centre_d = centre_d - mass_n @ scale_n * residual_d
        centre_d = centre_d / mass if form.centred and mass > 0 else np.zeros(d)
        mean_d = update_d / max(int((here if share_n is None else share_n[here]).sum()), 1)
        square_4n = np.zeros((4, n))  # the last: what clipping took away
        scaled = zip(scale_n[place_k], error_kd, strict=True)
        square_4n[0, place_k] = [
            np.sum((update_d - mean_d) ** 2) for update_d in rows.update_kd.astype(np.float64)
        ]
        square_4n[1, place_k] = [
            np.sum((scale * error_d - centre_d) ** 2) for scale, error_d in scaled
        ]
        square_4n[2, place_k] = inner(error_kd, error_kd)
        if self._clipping is not None:
            square_4n[3] = 1 - self._clipping.factor_n
        deviation_n, squared_n, squared_error_n, lost_n = group.add_up(square_4n.ravel()).reshape(
            4, n
        )
        if self._clipping is not None:
            self._clipping.factor_n = 1 - lost_n
        self.reports.squared_deviation_n[:] = deviation_n
        self._merged = residual_d, form.total(squared_n[here], squared_error_n[here])

    def _agree(self, group: ProcessGroup) -> BoolArray:
        """Learn which clients of the whole cohort replied, and which replies were rejected in
        other processes.
        """
        state = self.state
        responded_n = self.reports.responded_n.astype(np.float64)
        digest = (
            zlib.crc32(self.cohort.client_n.tobytes(), zlib.crc32(state.params_d.tobytes())) % 2**20
        )
        count, total, squares, *replied = group.add_up(
            np.array([1.0, digest, digest**2, *responded_n])
        )
        if count * squares != total**2:  # all are equal; 20 bits, so that these sums are exact
            what = "the same model and cohort"
            cure = "run the same versions on the same kind of machine everywhere"
            raise DeltaflError(
                f"the processes of this run do not have {what} in round {state.round}: {cure}"
            )
        self._missing_n[:] = False
        here = np.array(replied, dtype=np.bool_)
        if not here.all():
            own = [RejectedReply(client, reason) for client, reason in self._rejected.items()]
            self._rejected = dict(chain(*group.gathered(own)))
        return here

    def close(self) -> tuple["RoundState", RoundInfo]:
        """The next state, and diagnostics of the round. Clients that were not added count as not
        having replied.
        """
        self._require_open()
        self._closed = True
        plan = self.plan
        state = self.state
        control = self._control
        here = self.reports.responded_n
        replies = plan.collect_replies(state, self.cohort, here)
        if self._merged is None and self._stream is None:
            if np.any(np.diff(self._place_k) < 0):  # as the coefficients: in the cohort's order
                order = np.argsort(self._place_k)
                self._place_k = self._place_k[order]
                self._update_kd = self._update_kd[order]
            rows = self._rows()
            self._measure(rows)
            total_d = rows.total_d
            update_kd = rows.update_kd
            error_kd = rows.residual_kd
            residual_d = weighted_sum(replies.coef_n, error_kd, self._d)
            if self._rule.ratio:
                error_kd -= total_d + residual_d  # in place: it is as large as all updates, twice
            variance = estimate_variance(replies, error_kd)
            del rows, error_kd
            next_control = control.update(state.control, plan.population, replies, update_kd)
        else:
            total_d = control.value(state.control, replies.client_n[:0]).total_d
            residual_d, variance = self._merged or self._totals_of_stream(replies, total_d)
            next_control = control.update_from_sum(state.control, replies, residual_d)
        reports = self.reports = self.reports._replace(
            num_steps_n=np.where(here, self.reports.num_steps_n, 1)
        )
        scored = reports if self._clipping is None else capped(reports)
        estimate_d = total_d + residual_d
        following, delta_d, clip_factor = plan.advance(
            state, self.cohort, scored, estimate_d, next_control
        )
        if self._clipping is not None:
            norm_m = with_rows(state.norms.norm_m, replies.client_n, self._clipping.norm_n[here])
            following = following._replace(norms=KnownNorms(norm_m))
            clip_factor = min(clip_factor, float(self._clipping.factor_n.min(initial=1.0)))
        return following, self._info(replies, variance, delta_d, clip_factor)

    def _info(
        self, replies: Replies, variance: float, delta_d: FloatArray, clip_factor: float
    ) -> RoundInfo:
        reports = self.reports
        coef_n = replies.coef_n
        here = self.reports.responded_n
        faults = self._rejected | dict.fromkeys(
            self.cohort.client_n[self._missing_n].tolist(), NO_REPLY
        )
        norm = sqrt(inner(delta_d, delta_d))
        zeta_n = np.sqrt(reports.squared_deviation_n[here])
        residual = coef_n @ reports.squared_residual_n[here]
        squared_norm = coef_n @ reports.squared_norm_n[here]
        has_loss_n = reports.has_loss_n[here]
        loss_coef_k = coef_n[has_loss_n]
        loss_total = float(loss_coef_k.sum())
        return RoundInfo(
            round=self.state.round,
            num_selected=len(here),
            num_responded=len(replies.client_n),
            rejected=[RejectedReply(client, faults[client]) for client in sorted(faults)],
            estimate_norm=norm,
            variance=variance,
            effective_sample_size=effective_sample_size(coef_n),
            largest_weight=float(coef_n.max(initial=0.0)),
            sum_of_weights=float(coef_n.sum()),
            mean_over_diversity=norm / float(zeta_n.mean()) if zeta_n.any() else nan,
            loss=float(loss_coef_k @ reports.loss_n[here][has_loss_n]) / loss_total
            if loss_total > 0
            else nan,
            residual=float(residual / squared_norm) if squared_norm > 0 else nan,
            control_coefficient=self._control.coefficient(self.state.control),
            clip_factor=clip_factor,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise DeltaflError(
                "this round is closed; open the next one and make another Accumulator"
            )

    def _screen(
        self, place_k: IntArray, updates: Updates | Sequence[Any], reports: Reports | None
    ) -> ScreenedReplies:
        self._require_open()
        clients = self.cohort.part(place_k)
        if not self._missing_n[place_k].all():
            client = clients.client_n[~self._missing_n[place_k]][0]
            raise DeltaflError(f"client {client} has replied already; add each reply once")
        rows, refused = differences(self._control, self.state.control, clients.client_n, updates)
        drifts = self.plan.drifts(self.state, clients.client_n)
        screened = screen_replies(clients, rows, reports, self._d, drifts, self.plan.sampler)
        self._missing_n[place_k] = False
        self._rejected |= {
            client: refused.get(client, reason) for client, reason in screened.rejected
        }
        for column, given in zip(self.reports[:6], screened.reports[:6], strict=True):
            column[place_k] = given
        if self._clipping is not None:
            here_k = screened.reports.responded_n
            self._clipping.note(place_k[here_k], screened.update_nd[here_k])
        if self.plan.dp is not None:
            screened = screened._replace(update_nd=self.plan.dp.clipped(screened.update_nd))
        return screened

    def _rows(self) -> _Rows:
        here_k = self.reports.responded_n[self._place_k]
        if here_k.all():
            return self._rows_of(self._place_k, self._update_kd)
        return self._rows_of(self._place_k[here_k], self._update_kd[here_k])

    def _rows_of(self, place_k: IntArray, update_kd: Params) -> _Rows:
        value: Any = self._control.value(self.state.control, self.cohort.client_n[place_k])
        shapes = tuple(map(np.shape, value)) if isinstance(value, ControlValue) else ()
        if shapes not in {((self._d,), (rows, self._d)) for rows in (1, len(place_k))}:
            what = (
                f"must return ControlValue(total_d, control_nd), d = {self._d}, with a row for "
                "each client it is given"
            )
            raise DeltaflError(f"{type(self._control).__name__}.value {what}")
        if self._clipping is not None:
            update_kd = self._clipping.clip(place_k, update_kd, value.control_nd)
        residual_kd = np.subtract(update_kd, value.control_nd, dtype=np.float64)
        return _Rows(place_k, update_kd, residual_kd, value.total_d)

    def _share(self, which: Any = slice(None)) -> FloatArray | None:
        """How often each client counts in the mean that zeta is about; None for once."""
        return (
            self.cohort.count_n[which].astype(np.float64)
            if self.plan.sampler.counts_draws
            else None
        )

    def _measure(self, rows: _Rows) -> None:
        """Note in the reports what the server measures on each of these updates."""
        reports = self.reports
        place_k = rows.place_k
        sketch_size = reports.sketch_nq.shape[1]
        bias_size = reports.output_bias_nk.shape[1]
        if bias_size > self._d:
            what = f"the last {bias_size} parameters of a model of {self._d}"
            raise DeltaflError(f"the sampler looks at {what}; lower its number")
        norm_k, deviation_k = squared_norms(rows.update_kd, self._share(place_k))
        reports.squared_norm_n[place_k] = norm_k
        reports.squared_deviation_n[place_k] = deviation_k
        reports.squared_residual_n[place_k] = inner(rows.residual_kd, rows.residual_kd)
        if sketch_size > 0:
            reports.sketch_nq[place_k] = count_sketch(rows.residual_kd, sketch_size, self.plan.seed)
        reports.output_bias_nk[place_k] = rows.update_kd[:, self._d - bias_size :]

    def _add_to_stream(self, row: _Rows) -> None:
        if self._stream is None:
            coef_n = self.plan.collect_replies(self.state, self.cohort).coef_n
            self._stream = _Stream(coef_n, np.zeros(self._d), *np.zeros((2, self._n, SKETCH_SIZE)))
        stream = self._stream
        self._measure(row)
        stream.residual_d[:] += stream.coef_n[row.place_k[0]] * row.residual_kd[0]
        stream.update_nq[row.place_k] = count_sketch(row.update_kd, SKETCH_SIZE, self.plan.seed)
        stream.residual_nq[row.place_k] = count_sketch(row.residual_kd, SKETCH_SIZE, self.plan.seed)

    def _totals_of_stream(self, replies: Replies, total_d: FloatArray) -> tuple[FloatArray, float]:
        """The totals where updates were added up as they came: deviations and variance by their
        sketches.
        """
        stream = self._stream
        here = self.reports.responded_n
        assert stream is not None
        added_n = stream.coef_n[here]
        # Coefficients of the clients that replied over those their updates were added with: one
        # factor for all.
        ratio = 1.0
        if not np.array_equal(replies.coef_n, added_n):
            ratio = float(replies.coef_n.sum() / added_n.sum())
            if not np.allclose(replies.coef_n, ratio * added_n, rtol=1e-9, atol=0.0):
                what = "depend on which other clients reply in another way than by a common factor"
                raise DeltaflError(
                    f"the coefficients of {self._rule.name!r} {what}; close this round with "
                    "close_round"
                )
        residual_d = ratio * stream.residual_d
        _, self.reports.squared_deviation_n[here] = squared_norms(
            stream.update_nq[here], self._share(here)
        )
        error_kq = stream.residual_nq[here]
        if self._rule.ratio:
            error_kq -= count_sketch((total_d + residual_d)[None], SKETCH_SIZE, self.plan.seed)
        return residual_d, estimate_variance(replies, error_kq)
