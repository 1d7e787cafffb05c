"""Replies are untrusted: what is rejected here never reaches the model or a sampler's state."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .model.arrays import LARGEST_ENTRY, as_reals
from .samplers.base import Sampler
from .samplers.label import method_of
from .scale.numerics import largest_entry
from .types import NO_REPLY, Array, BoolArray, Cohort, Floats, Params, RejectedReply, Reports

#: How to write the update of a model.
FLAT_UPDATE = "deltafl.flatten(local_model) - state.params_d"

Updates = Sequence[npt.ArrayLike | None] | Floats


class ScreenedReplies(NamedTuple):
    """The usable part of what came back."""

    #: the usable updates (d,), not copied
    updates: list[Params]
    reports: Reports  #: with ``responded_n`` False for missing and rejected replies
    rejected: list[RejectedReply]
    num_params: int

    @property
    def update_nd(self) -> Params:
        """A copy of them; zero in rows without a usable reply."""
        here_n = self.reports.responded_n
        update_nd = np.zeros((len(here_n), self.num_params), np.float32)
        for place, update_d in zip(np.flatnonzero(here_n), self.updates, strict=True):
            update_nd[place] = update_d
        return update_nd


def screen_replies(
    cohort: Cohort,
    updates: Updates,
    reports: Reports | None,
    num_params: int,
    sampler: Sampler | None = None,
) -> ScreenedReplies:
    """Check every reply, one per client of the cohort, for length, finiteness and range.

    Replies without a loss are rejected if the sampler has ``needs_loss``. Wrong numbers of rows are
    the host's fault.
    """
    n = len(cohort.client_n)
    rows = _rows(updates)
    if reports is None:
        reports = Reports.make(n)
    if not isinstance(reports, Reports):
        raise DeltaflError(
            f"reports are a {type(reports).__name__}; write Reports.make({n}, loss=losses)"
        )
    if len(rows) != n or any(len(column) != n for column in reports):
        raise DeltaflError(
            f"the cohort has {n} clients; updates and reports must have {n} rows in the same order"
        )
    usable = []
    responded_n = reports.responded_n.copy()
    faults = _report_faults(reports, sampler)
    rejected = []
    for i in np.flatnonzero(responded_n).tolist():
        reason = faults.get(i)
        try:
            update_d = _read(rows[i], num_params)
        except DeltaflError as fault:
            reason = str(fault)
        if reason is None:
            usable.append(update_d)
            continue
        responded_n[i] = False
        rejected.append(RejectedReply(int(cohort.client_n[i]), reason))
    return ScreenedReplies(usable, _neutral(reports, responded_n), rejected, num_params)


def _rows(updates: Any) -> list[Any]:
    """The updates in their order; of those in a dict nobody knows which is whose."""
    # A table of pandas is a list of its columns, and looks up what it is asked for by name.
    if hasattr(updates, "to_numpy"):
        updates = updates.to_numpy()
    if isinstance(updates, Mapping) or not np.iterable(updates):
        raise DeltaflError(
            f"updates are a {type(updates).__name__}; give a list or an array, in the order of "
            "cohort.client_n"
        )
    return list(updates)


def _read(update: npt.ArrayLike | None, num_params: int) -> Array:
    """An update as numbers; a ``DeltaflError`` says what is wrong with it."""
    if update is None:
        raise DeltaflError(NO_REPLY)
    given_d = as_reals("update", update, FLAT_UPDATE, (num_params,))
    with np.errstate(over="ignore", invalid="ignore"):
        update_d = given_d.astype(np.float32, copy=False)
    size = largest_entry(update_d)
    # Not ``size > ...``, which NaN is not.
    if not size <= LARGEST_ENTRY:
        raise DeltaflError(
            f"update has an entry of size {size:.3g}, expected at most {LARGEST_ENTRY:.0e}"
        )
    return update_d


def _report_faults(reports: Reports, sampler: Sampler | None) -> dict[int, str]:
    loss_n = reports.loss_n
    square_n = reports.square_loss_n
    has_loss_n = reports.has_loss_n
    with np.errstate(over="ignore", invalid="ignore"):
        # A mean of squares is at least the square of the mean (Jensen), up to rounding, of half
        # precision at worst.
        low_n = np.maximum(
            0.99 * np.where(has_loss_n, np.square(loss_n), 0.0) - 1e-7,
            0.0,
        )
        given_n = np.where(np.isnan(square_n), low_n, square_n)  # NaN: none was reported
    # The first fault in the order of the columns is named: it is written last.
    bounds: dict[str, tuple[Any, Any, float]] = {
        "number of local steps": (reports.num_steps_n, 1, np.inf),
        "step variance": (reports.step_variance_n, 0, LARGEST_ENTRY**2),
        "mean squared loss": (given_n, low_n, LARGEST_ENTRY**4),
        "loss": (np.where(has_loss_n, loss_n, 0.0), -LARGEST_ENTRY, LARGEST_ENTRY),
    }
    faults: dict[int, str] = {}
    if sampler is not None and sampler.needs_loss:
        fault = (
            f"the reply has no loss, which {method_of(sampler)} learns from; report one "
            "with each update"
        )
        faults = dict.fromkeys(np.flatnonzero(~has_loss_n).tolist(), fault)
    for name, (column_n, low, high) in bounds.items():
        # Negated, as NaN is on neither side of a bound.
        least_n = np.broadcast_to(low, len(column_n))
        for i in np.flatnonzero(~((column_n >= least_n) & (column_n <= high))).tolist():
            faults[i] = f"{name} is {column_n[i]}, expected {least_n[i]:g} to {high:g}"
    return faults


def _neutral(reports: Reports, responded_n: BoolArray) -> Reports:
    """Reports with neutral values in rows without a reply, and NaN for the loss of a reply that
    has none.
    """
    has_loss_n = responded_n & reports.has_loss_n
    neutral = {"square_loss_n": 0.0, "step_variance_n": 0.0, "num_steps_n": 1}
    columns = reports._asdict()
    for name, value in neutral.items():
        columns[name] = np.where(responded_n, columns[name], value)
    columns["loss_n"] = np.where(
        has_loss_n,
        reports.loss_n,
        np.where(responded_n, np.nan, 0.0),
    )
    return Reports(**columns | {"responded_n": responded_n, "has_loss_n": has_loss_n})
