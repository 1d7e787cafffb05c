"""A round closed by several processes: each has its share of the updates, and they add up vectors.

One sum over all processes has the estimate, the plain sum of the updates and the statistics of each client; a second,
small one has what needs the first one's means, two numbers a client. (The first is made again if a reply was refused,
for coefficients may depend on who replied.) So no process holds more than its own updates and a few vectors.

The result is the same in all processes, bit for bit, and that of ``close_round`` in one process up to the rounding of
sums: in another order (float64), and with the mean in float64, where one process takes it in float32. Cohorts are the
same unless a draw is decided by the last digits of a score.
"""

import zlib
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .estimators.controls import CommonControl, NoControl
from .estimators.damping import trust
from .estimators.heard import Heard
from .estimators.table import find_estimator
from .estimators.variance import variance_form
from .replies import Replies, Updates, measure_output_bias, measure_residuals, screen_replies
from .round import Plan, RoundState, advance, broadcast, hear
from .round_info import describe
from .types import BoolArray, Cohort, FloatArray, IntArray, RejectedReply, Reports, RoundInfo

#: The digests of states are so long that their squares are added up exactly.
_DIGEST_BITS = 20


class Peers(Protocol):
    """The processes that close a round together."""

    def add_up(self, vector: FloatArray) -> FloatArray:
        """The sum over all processes, the same bits in all."""

    def gathered(self, item: list[RejectedReply]) -> list[list[RejectedReply]]:
        """Everybody's items, in the same order in all."""


def can_share(plan: Plan) -> bool:
    """Whether sums are all that the estimator's control learns from: none, and the common one."""
    return isinstance(find_estimator(plan.estimator).control, NoControl | CommonControl)


def close_shared_round(
    plan: Plan,
    state: RoundState,
    cohort: Cohort,
    places: IntArray,
    updates: Updates,
    reports: Reports,
    peers: Peers,
) -> tuple[RoundState, RoundInfo]:
    """``close_round`` with the updates of some of the cohort's clients; every process calls it with its own.

    Args:
        plan: The plan, the same in all processes.
        state: The state the round was opened with, the same in all processes.
        cohort: What ``open_round`` returned, the same in all processes.
        places: Rows of the cohort whose updates are here; each row is in one process.
        updates: Their updates.
        reports: Their reports.
        peers: The processes.

    Raises:
        DeltaflError: If ``can_share(plan)`` is false, or the processes are not in the same state.
    """
    if not can_share(plan):
        raise DeltaflError(f"the control of {plan.estimator!r} learns from rows; gather them and use close_round")
    share = _Share(plan, state, cohort, places, updates, reports)
    _check_agreement(state, cohort, peers)
    assumed_n = np.ones(len(cohort.client_n), dtype=np.bool_)
    sums = share.added_up(assumed_n, peers)
    if not sums.reports.responded_n.all():
        assumed_n = sums.reports.responded_n
        sums = share.added_up(assumed_n, peers)
    rejected = [] if assumed_n.all() else sorted(chain(*peers.gathered(share.replies.rejected)))
    return share.closed(sums, rejected, peers)


class _Sums(NamedTuple):
    """What the first sum over all processes has.

    Attributes:
        residual_d: sum coef_i (u_i - c_i).
        update_d: sum u_i.
        centre_d: sum mass_i scale_i (u_i - c_i), of the variance estimate.
        reports: All clients' columns.
    """

    residual_d: FloatArray
    update_d: FloatArray
    centre_d: FloatArray
    reports: Reports


class _Share:
    """One process's part of a round."""

    def __init__(
        self, plan: Plan, state: RoundState, cohort: Cohort, places: IntArray, updates: Updates, reports: Reports
    ) -> None:
        self.plan, self.state, self.cohort = plan, state, cohort
        drift_d = broadcast(plan, state).drift_d
        mine = cohort.part(places)
        self.replies: Replies = screen_replies(
            mine, updates, reports, len(state.params_d), known_d=drift_d, sampler=plan.sampler
        )
        here = np.flatnonzero(self.replies.reports.responded_n)
        self.place_k = places[here]
        self.update_kd = self.replies.update_nd[here]
        self.control = find_estimator(plan.estimator).control
        self.total_d, self.control_1d = self.control.guess(state.control, mine.client_n)
        self.residual_kd = self.update_kd.astype(np.float64) - self.control_1d
        measured = measure_residuals(
            self.replies.reports, self.residual_kd, getattr(plan.sampler, "sketch_size", 0), plan.seed
        )
        measured = measure_output_bias(measured, self.update_kd, getattr(plan.sampler, "output_bias_size", 0))
        self.columns = Reports._make(column[here] for column in measured)
        # A column that nobody reads stays here: what is added up, and its rounding, do not depend on it.
        unread = set() if getattr(plan.sampler, "uses_square_loss", False) else {"square_loss_n"}
        self.told = [name for name in Reports._fields if name not in unread]

    def added_up(self, assumed_n: BoolArray, peers: Peers) -> _Sums:
        """The first sum, with coefficients for the case that the clients of ``assumed_n`` replied."""
        n, d = len(assumed_n), len(self.state.params_d)
        heard = hear(self.plan, self.state, self.cohort, assumed_n)
        coef_n, centre_n, form = np.zeros(n), np.zeros(n), variance_form(heard)
        coef_n[assumed_n] = heard.coef_n
        if form is not None:
            centre_n[assumed_n] = form.mass_n * form.scale_n
        vectors = [
            coef_n[self.place_k] @ self.residual_kd,
            self.update_kd.sum(axis=0, dtype=np.float64),
            centre_n[self.place_k] @ self.residual_kd,
        ]
        own = [getattr(self.columns, name) for name in self.told]
        spread = [self._spread(column, n) for column in own]
        total = peers.add_up(np.concatenate([*vectors, *(column.ravel() for column in spread)]))
        cuts = np.cumsum([d, d, d, *(column.size for column in spread)])[:-1]
        residual_d, update_d, centre_d, *flat = np.split(total, cuts)
        columns = {
            name: part.reshape(like.shape).astype(column.dtype)
            for name, part, like, column in zip(self.told, flat, spread, own, strict=True)
        }
        return _Sums(residual_d, update_d, centre_d, _neutral(Reports.make(n)._replace(**columns)))

    def closed(self, sums: _Sums, rejected: list[RejectedReply], peers: Peers) -> tuple[RoundState, RoundInfo]:
        """The next state and the description, from the sums."""
        plan, state, reports = self.plan, self.state, sums.reports
        here = reports.responded_n
        heard = hear(plan, state, self.cohort, here)
        reports, variance = self._measured(sums, heard, peers)
        control, total = state.control, heard.coef_n.sum()
        if isinstance(self.control, CommonControl) and total > 0:
            control = self.control.follow(control, sums.residual_d / total + self.control_1d[0])
        following, delta_d, clip_factor = advance(
            plan, state, self.cohort, reports, self.total_d + sums.residual_d, control
        )
        info = describe(state.round, heard, reports, variance, delta_d)
        beta = trust(self.control, state.control)
        return following, info._replace(rejected=rejected, clip_factor=clip_factor, control_coefficient=beta)

    def _measured(self, sums: _Sums, heard: Heard, peers: Peers) -> tuple[Reports, float]:
        """The second sum: deviations from the mean of the updates, and the variance of the estimate."""
        n, here, form = len(self.cohort.client_n), sums.reports.responded_n, variance_form(heard)
        mean_d = sums.update_d / max(int(here.sum()), 1)
        deviation_k = np.array([np.sum((row_d.astype(np.float64) - mean_d) ** 2) for row_d in self.update_kd])
        if form is None:
            total_n = peers.add_up(self._spread(deviation_k, n))
            return sums.reports._replace(squared_deviation_n=total_n), float("nan")
        scale_n = np.zeros(n)
        scale_n[here] = form.scale_n
        error_kd, centre_d = self.residual_kd, sums.centre_d
        if find_estimator(self.plan.estimator).ratio:
            error_kd = self.residual_kd - sums.residual_d
            centre_d = sums.centre_d - form.mass_n @ form.scale_n * sums.residual_d
        total = form.mass_n.sum()
        centre_d = centre_d / total if form.centred and total > 0 else np.zeros(len(mean_d))
        scaled = zip(scale_n[self.place_k], error_kd, strict=True)
        squares = [
            deviation_k,
            np.array([np.sum((scale * row_d - centre_d) ** 2) for scale, row_d in scaled]),
            np.array([row_d @ row_d for row_d in error_kd]),
        ]
        total_3n = peers.add_up(np.concatenate([self._spread(column_k, n) for column_k in squares]))
        deviation_n, squared_n, squared_error_n = total_3n.reshape(3, n)
        variance = form.total(squared_n[here], squared_error_n[here])
        return sums.reports._replace(squared_deviation_n=deviation_n), variance

    def _spread(self, column_k: npt.NDArray[Any], n: int) -> FloatArray:
        """A column of this process's clients in the rows of the whole cohort, zero elsewhere."""
        column_n = np.zeros((n, *column_k.shape[1:]))
        column_n[self.place_k] = column_k
        return column_n


def _neutral(reports: Reports) -> Reports:
    """A client that did not respond has one local step in the reports, as ``replies.py`` has it."""
    return reports._replace(num_steps_n=np.where(reports.responded_n, reports.num_steps_n, 1))


def _check_agreement(state: RoundState, cohort: Cohort, peers: Peers) -> None:
    """Refuse processes that are not in the same state, by digests x: all are equal if count sum x^2 = (sum x)^2.

    Raises:
        DeltaflError: If they differ: other hardware, other versions.
    """
    digest = zlib.crc32(cohort.client_n.tobytes(), zlib.crc32(state.params_d.tobytes())) % 2**_DIGEST_BITS
    count, total, squares = peers.add_up(np.array([1.0, digest, digest**2]))
    if count * squares != total**2:
        raise DeltaflError(
            f"the processes of this run do not have the same model and cohort in round {state.round}: run the same "
            "versions on the same kind of machine everywhere"
        )
