"""Replies are untrusted: what is rejected here never reaches the model or a sampler's state."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import LARGEST_ENTRY, as_array
from ..errors import DeltaflError
from ..samplers.base import Sampler
from ..types import (
    NO_REPLY,
    BoolArray,
    Cohort,
    FloatArray,
    IntArray,
    Params,
    RejectedReply,
    Reports,
)

#: How to write the update of a model.
FLAT_UPDATE = "deltafl.flatten(local_model) - state.params_d"

Updates = Sequence[npt.ArrayLike | None] | npt.NDArray[np.floating]


class ScreenedReplies(NamedTuple):
    """The usable part of what came back."""

    update_nd: (
        Params  #: without the drift that clients were sent; zero in rows without a usable reply
    )
    reports: Reports  #: with ``responded_n`` False for missing and rejected replies
    rejected: list[RejectedReply]


def screen_replies(
    cohort: Cohort,
    updates: Updates,
    reports: Reports | None,
    num_params: int,
    drifts: Params | None = None,
    sampler: Sampler | None = None,
) -> ScreenedReplies:
    """Check every reply, one per client of the cohort, for length, finiteness and range; then
    subtract the drifts.

    Drifts are (d,), the same for all, or (n, d). Replies without a loss are rejected if the sampler
    has ``needs_loss``. Wrong numbers of rows are the host's fault.
    """
    n = len(cohort.client_n)
    if isinstance(updates, dict):
        raise DeltaflError(
            "updates are a dict; give a list or an array, in the order of cohort.client_n"
        )
    reports = Reports.make(n) if reports is None else reports
    if len(updates) != n or any(len(column) != n for column in reports):
        raise DeltaflError(
            f"the cohort has {n} clients; updates and reports must have {n} rows in the same order"
        )
    update_nd = np.empty((n, num_params), dtype=np.float32)
    responded_n = reports.responded_n.copy()
    faults = _report_faults(reports, sampler)
    sound_n = responded_n & _sound_rows(updates, n, num_params)
    sound_n[list(faults)] = False
    for i in np.flatnonzero(sound_n).tolist():
        update_nd[i] = updates[i]
    rejected: list[RejectedReply] = []
    for i in np.flatnonzero(responded_n & ~sound_n).tolist():
        fault = _update_fault(updates[i], num_params) or faults.get(i)
        if fault is None:
            update_nd[i] = as_array(updates[i])
        else:
            responded_n[i] = False
            rejected.append(RejectedReply(int(cohort.client_n[i]), fault))
    update_nd[~responded_n] = 0.0
    if drifts is not None:
        update_nd[responded_n] -= drifts if drifts.ndim == 1 else drifts[responded_n]
    return ScreenedReplies(update_nd, _neutral(reports, responded_n), rejected)


def _sound_rows(updates: Updates, n: int, num_params: int) -> BoolArray:
    """Which rows of a plain table are sound; none of anything else, of which each is looked at
    alone.
    """
    if (
        type(updates) is not np.ndarray
        or updates.dtype.kind != "f"
        or updates.shape != (n, num_params)
    ):
        return np.zeros(n, dtype=np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow_nd = updates.astype(np.float32, copy=False)
    largest_n = np.maximum(narrow_nd.max(axis=1, initial=0.0), -narrow_nd.min(axis=1, initial=0.0))
    return np.asarray(largest_n <= LARGEST_ENTRY)  # False for NaN


def _update_fault(update: npt.ArrayLike | None, num_params: int) -> str | None:
    if update is None:
        return NO_REPLY
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            given_d = as_array(update)
            if given_d.dtype.kind == "c" or np.ma.isMaskedArray(update):
                return "update has complex or masked numbers, of which a part would be lost"
            update_d = given_d.astype(np.float32, copy=False)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # the last: whatever a tensor may raise
        return f"update is not one list of numbers: write {FLAT_UPDATE}"
    if update_d.shape != (num_params,):
        hint = "" if update_d.ndim == 1 else f": write {FLAT_UPDATE}"
        return f"update has shape {update_d.shape}, expected ({num_params},){hint}"
    largest = np.abs(update_d).max(initial=0.0)
    if not largest <= LARGEST_ENTRY:
        return f"update has an entry of size {largest:.3g}, expected at most {LARGEST_ENTRY:.0e}"
    return None


def _report_faults(reports: Reports, sampler: Sampler | None) -> dict[int, str]:
    loss_n = reports.loss_n
    square_n = reports.square_loss_n
    has_loss_n = reports.has_loss_n
    with np.errstate(over="ignore", invalid="ignore"):
        # A mean of squares is at least the square of the mean (Jensen), up to rounding, of half
        # precision at worst.
        low_n = np.maximum(0.99 * np.where(has_loss_n, np.square(loss_n), 0.0) - 1e-7, 0.0)
        given_n = np.where(np.isnan(square_n), low_n, square_n)  # NaN: none was reported
    bounds: dict[str, tuple[FloatArray | IntArray, FloatArray | float, float]] = {
        "loss": (np.where(has_loss_n, loss_n, 0.0), -LARGEST_ENTRY, LARGEST_ENTRY),
        "mean squared loss": (given_n, low_n, LARGEST_ENTRY**4),
        "step variance": (reports.step_variance_n, 0, LARGEST_ENTRY**2),
        "number of local steps": (reports.num_steps_n, 1, np.inf),
    }
    faults: dict[int, str] = {}
    for name, (column_n, low, high) in bounds.items():
        least_n = np.broadcast_to(low, len(column_n))
        for i in np.flatnonzero(~((column_n >= least_n) & (column_n <= high))).tolist():
            faults.setdefault(i, f"{name} is {column_n[i]}, expected {least_n[i]:g} to {high:g}")
    if sampler is not None and sampler.needs_loss:
        fault = (
            f"the reply has no loss, which {type(sampler).__name__} learns from; report one "
            "with each update"
        )
        faults = dict.fromkeys(np.flatnonzero(~has_loss_n).tolist(), fault) | faults
    return faults


def _neutral(reports: Reports, responded_n: BoolArray) -> Reports:
    """Reports with neutral values in rows without a reply, and NaN for the loss of a reply that
    has none.
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
