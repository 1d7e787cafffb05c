"""Replies are untrusted: what is rejected here never reaches the model or a sampler's state."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..samplers.base import Sampler
from ..types import BoolArray, Cohort, FloatArray, Params, RejectedReply, Reports

#: A finite entry beyond this could still overflow the float32 model once it is weighted, or a score once it is squared.
LARGEST_ENTRY = 1e18
#: A mean of squares is at least the square of the mean, up to rounding (of half precision at worst).
_SQUARE_SLACK, _SMALLEST_SQUARE = 0.01, 1e-7
#: Numbers in float64 that are measured at once.
_BLOCK = 2**16

Updates = Sequence[npt.ArrayLike | None] | npt.NDArray[np.floating]


class ScreenedReplies(NamedTuple):
    """The usable part of what came back.

    Attributes:
        update_nd: float32 (n, d), without the drift that all clients were sent; zero in rows without a usable reply.
        reports: With ``responded_n`` False for missing and rejected replies.
        rejected: Which replies were rejected, and why.
    """

    update_nd: Params
    reports: Reports
    rejected: list[RejectedReply]


def screen_replies(
    cohort: Cohort,
    updates: Updates,
    reports: Reports | None,
    num_params: int,
    drift_d: Params | None = None,
    sampler: Sampler | None = None,
) -> ScreenedReplies:
    """Check every reply for length, finiteness and range.

    Args:
        cohort: The selected clients.
        updates: One update a client, in the cohort's order; None for a missing reply.
        reports: The columns the host filled, or None.
        num_params: d.
        drift_d: The drift of ``mime.py``, which is subtracted from every update; None for no drift.
        sampler: If it has ``needs_loss``, replies without a loss are rejected.

    Raises:
        DeltaflError: If the host is at fault: the numbers of updates or report rows differ from the cohort's.
    """
    n = len(cohort.client_n)
    reports = Reports.make(n) if reports is None else reports
    if len(updates) != n or any(len(column) != n for column in reports):
        raise DeltaflError(f"the cohort has {n} clients; updates and reports must have {n} rows in the same order")
    update_nd = np.zeros((n, num_params), dtype=np.float32)
    responded_n = reports.responded_n.copy()
    checks = _report_checks(reports, sampler)
    sound_n = np.logical_and.reduce([holds_n for holds_n, _ in checks])
    fits_n = _fitting_rows(updates, n, num_params)
    at_once = np.flatnonzero(responded_n & sound_n & fits_n)
    if len(at_once):
        update_nd[at_once] = np.asarray(updates)[at_once]
    rejected: list[RejectedReply] = []
    for i in np.flatnonzero(responded_n & ~(sound_n & fits_n)).tolist():
        fault = _update_fault(updates[i], num_params)
        if fault is None:
            fault = next((reason(i) for holds_n, reason in checks if not holds_n[i]), None)
        if fault is None:
            update_nd[i] = np.asarray(updates[i], dtype=np.float32)
        else:
            responded_n[i] = False
            rejected.append(RejectedReply(int(cohort.client_n[i]), fault))
    if drift_d is not None:
        update_nd[responded_n] -= drift_d
    return ScreenedReplies(update_nd, _neutral(reports, responded_n), rejected)


def _fitting_rows(updates: Updates, n: int, num_params: int) -> BoolArray:
    """Which rows of a table are updates; none where updates are no table, so that each one is looked at alone."""
    if (
        not isinstance(updates, np.ndarray)
        or np.ma.isMaskedArray(updates)
        or updates.dtype.kind != "f"
        or updates.shape != (n, num_params)
    ):
        return np.zeros(n, dtype=np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow_nd = updates.astype(np.float32, copy=False)
    largest_n = np.maximum(narrow_nd.max(axis=1, initial=0.0), -narrow_nd.min(axis=1, initial=0.0))
    fits_n: BoolArray = largest_n <= LARGEST_ENTRY  # False for NaN
    return fits_n


def _update_fault(update: npt.ArrayLike | None, num_params: int) -> str | None:
    """What is wrong with an update, or None."""
    if update is None:
        return "no reply"
    if np.ma.isMaskedArray(update):
        return "update is a masked array, whose hidden numbers would count"
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            given_d = np.asarray(update)
            if given_d.dtype.kind == "c":
                return "update has complex numbers"
            update_d = given_d.astype(np.float32, copy=False)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: tensors with a gradient, or on a device
        return "update is not a list of numbers"
    if update_d.shape != (num_params,):
        return f"update has shape {update_d.shape}, expected ({num_params},)"
    largest = np.abs(update_d).max(initial=0.0)  # NaN if there is one
    if not np.isfinite(largest):
        return "update has NaN or infinite entries"
    if largest > LARGEST_ENTRY:
        return f"update has an entry of size {largest:.3g}, expected at most {LARGEST_ENTRY:.0e}"
    return None


def _report_checks(reports: Reports, sampler: Sampler | None) -> list[tuple[BoolArray, Callable[[int], str]]]:
    """Each check of the columns: where it holds, and the reason to reject row i where it does not."""
    loss_n, square_n, has_loss_n = reports.loss_n, reports.square_loss_n, reports.has_loss_n
    variance_n, steps_n = reports.step_variance_n, reports.num_steps_n
    with np.errstate(over="ignore", invalid="ignore"):
        # Jensen's inequality. No upper bound beyond 1e72: single losses may exceed the mean, and the root still fits.
        least_n = np.where(has_loss_n, np.square(loss_n), 0.0)
        low_n = np.maximum((1 - _SQUARE_SLACK) * least_n - _SMALLEST_SQUARE, 0.0)
        square_holds_n = np.isnan(square_n) | ((square_n >= low_n) & (square_n <= LARGEST_ENTRY**4))

    def square_fault(i: int) -> str:
        least = f"{least_n[i]:.6g}, the square of the mean loss," if has_loss_n[i] else "0"
        return f"mean squared loss is {square_n[i]}, expected {least} to {LARGEST_ENTRY**4:.0e}"

    needs_loss = sampler is not None and sampler.needs_loss
    return [
        (
            ~has_loss_n | (np.abs(loss_n) <= LARGEST_ENTRY),
            lambda i: f"loss is {loss_n[i]}, expected a number of size {LARGEST_ENTRY:.0e} at most",
        ),
        (square_holds_n, square_fault),
        (
            (variance_n >= 0) & (variance_n <= LARGEST_ENTRY**2),
            lambda i: f"step variance is {variance_n[i]}, expected 0 to {LARGEST_ENTRY**2:.0e}",
        ),
        (steps_n >= 1, lambda i: f"number of local steps is {steps_n[i]}, expected >= 1"),
        (
            has_loss_n | (not needs_loss),
            lambda i: f"the reply has no loss, which {type(sampler).__name__} learns from; report one with each update",
        ),
    ]


def _neutral(reports: Reports, responded_n: BoolArray) -> Reports:
    """Reports with neutral values in rows without a reply, so that no NaN can leak from them.

    A reply without a loss has NaN, whatever stood in its place.
    """
    has_loss_n = responded_n & reports.has_loss_n
    return reports._replace(
        responded_n=responded_n,
        loss_n=np.where(has_loss_n, reports.loss_n, np.where(responded_n, np.nan, 0.0)),
        has_loss_n=has_loss_n,
        square_loss_n=np.where(responded_n, reports.square_loss_n, 0.0),
        step_variance_n=np.where(responded_n, reports.step_variance_n, 0.0),
        num_steps_n=np.where(responded_n, reports.num_steps_n, 1),
    )


def squared_norms(
    update_kd: Params | FloatArray, weight_k: npt.NDArray[np.float64] | None = None
) -> tuple[FloatArray, FloatArray]:
    """norm(u_i)^2 and norm(u_i - mean)^2, both float64 (k,).

    Args:
        update_kd: (k, d), updates or their sketches.
        weight_k: Weights of the mean; None for the plain mean, as the paper's practical algorithm prints it.
    """
    squared_norm_k, squared_deviation_k = np.zeros(len(update_kd)), np.zeros(len(update_kd))
    if len(update_kd) == 0:
        return squared_norm_k, squared_deviation_k
    mean_d = np.average(update_kd, axis=0, weights=weight_k)
    rows = max(1, _BLOCK // max(1, update_kd.shape[1]))
    for first in range(0, len(update_kd), rows):
        block = slice(first, first + rows)
        wide_bd = update_kd[block].astype(np.float64)
        # The same bits as row @ row, whatever the block.
        squared_norm_k[block] = (wide_bd[:, None, :] @ wide_bd[:, :, None])[:, 0, 0]
        squared_deviation_k[block] = np.sum((wide_bd - mean_d) ** 2, axis=1)
    return squared_norm_k, squared_deviation_k


def measure(
    update_nd: Params | FloatArray, reports: Reports, weight_n: npt.NDArray[np.float64] | None = None
) -> Reports:
    """Fill ``squared_norms`` of the clients that responded into reports; the other rows are ignored."""
    here = reports.responded_n
    norm_n, deviation_n = np.zeros(len(here)), np.zeros(len(here))
    norm_n[here], deviation_n[here] = squared_norms(update_nd[here], None if weight_n is None else weight_n[here])
    return reports._replace(squared_norm_n=norm_n, squared_deviation_n=deviation_n)
