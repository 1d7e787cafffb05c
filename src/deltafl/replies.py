"""Values from clients are untrusted: what is refused here never touches the model or a sampler's memory."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .estimators.sketch import count_sketch
from .types import BoolArray, Cohort, FloatArray, Params, RejectedReply, Reports

#: A finite entry beyond this could still overflow the float32 model once it is weighted, or a score once it is squared.
LARGEST_ENTRY = 1e18
#: A mean of squares is above the square of a mean, but for rounding: of half precision at the most.
_SQUARE_SLACK, _SMALLEST_SQUARE = 0.01, 1e-7
#: Numbers in float64 that are measured at once.
_BLOCK = 2**16

Updates = Sequence[npt.ArrayLike | None] | npt.NDArray[np.floating]


class Replies(NamedTuple):
    """The usable part of what came back.

    Attributes:
        update_nd: float32 (n, d), less what was known of all of them; zero in the rows of clients that did not respond.
        reports: With ``responded_n`` False for missing and refused replies, and norms measured on the server.
        rejected: Who was refused, and why.
    """

    update_nd: Params
    reports: Reports
    rejected: list[RejectedReply]


def screen_replies(
    cohort: Cohort,
    updates: Updates,
    reports: Reports | None,
    num_params: int,
    weight_n: npt.NDArray[np.float64] | None = None,
    known_d: Params | None = None,
    sampler: object = None,
) -> Replies:
    """Check every reply for length, finiteness and range; measure the norms of the good ones.

    Args:
        cohort: Who was asked.
        updates: One update a client of the cohort, in its order; None for a client that did not answer.
        reports: The columns the host filled, or None.
        num_params: d.
        weight_n: Weights of the mean that deviations are measured from, see ``measure``.
        known_d: A part of every update that the server knows already (the drift of ``mime.py``): it is taken off before
            norms are measured. None for nothing.
        sampler: Who learns from the replies; if it has ``needs_loss``, those without a loss are refused.

    Raises:
        DeltaflError: If the host (not a client) is wrong: another number of updates or report rows than clients.
    """
    n = len(cohort.client_n)
    reports = Reports.make(n) if reports is None else reports
    if len(updates) != n or any(len(column) != n for column in reports):
        raise DeltaflError(f"the cohort has {n} clients; updates and reports must have {n} rows in the same order")
    update_nd = np.zeros((n, num_params), dtype=np.float32)
    responded_n = reports.responded_n.copy()
    rejected: list[RejectedReply] = []
    silent_n = ~reports.has_loss_n & bool(getattr(sampler, "needs_loss", False))
    sound_n = _sound(updates, reports, num_params) & ~silent_n
    at_once = np.flatnonzero(responded_n & sound_n)
    if len(at_once):
        update_nd[at_once] = np.asarray(updates)[at_once]
        if known_d is not None:
            update_nd[at_once] -= known_d
    for i in np.flatnonzero(responded_n & ~sound_n).tolist():
        fault = _fault(updates[i], reports, i, num_params)
        if fault is None and silent_n[i]:
            fault = f"the reply says no loss, which {type(sampler).__name__} learns from; report one with every update"
        if fault is None:
            update_nd[i] = np.asarray(updates[i], dtype=np.float32)
            if known_d is not None:
                update_nd[i] -= known_d
        else:
            responded_n[i] = False
            rejected.append(RejectedReply(int(cohort.client_n[i]), fault))
    return Replies(update_nd, measure(update_nd, _neutral(reports, responded_n), weight_n), rejected)


def _sound(updates: Updates, reports: Reports, num_params: int) -> npt.NDArray[np.bool_]:
    """The rows in which all is well, seen at once; none where updates are no table, so that each is looked at."""
    n = len(reports.responded_n)
    if (
        not isinstance(updates, np.ndarray)
        or np.ma.isMaskedArray(updates)
        or updates.dtype.kind != "f"
        or updates.shape != (n, num_params)
    ):
        return np.zeros(n, dtype=np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow_nd = updates.astype(np.float32, copy=False)
    largest_n = np.maximum(
        narrow_nd.max(axis=1, initial=0.0), -narrow_nd.min(axis=1, initial=0.0)
    )  # NaN if there is one
    sound_n: npt.NDArray[np.bool_] = (
        (largest_n <= LARGEST_ENTRY)
        & (~reports.has_loss_n | (np.abs(reports.loss_n) <= LARGEST_ENTRY))
        & _is_square_loss(reports.square_loss_n, reports.loss_n, reports.has_loss_n)
        & (reports.step_variance_n >= 0)
        & (reports.step_variance_n <= LARGEST_ENTRY**2)
        & (reports.num_steps_n >= 1)
    )
    return sound_n


def _is_square_loss(square_n: FloatArray, loss_n: FloatArray, has_loss_n: BoolArray) -> BoolArray:
    """Whether mean squared losses can be those of these mean losses; NaN stands for one that was not said.

    Jensen's inequality bounds them from below. From above 1e72 does: a mean loss of 1e18 leaves single ones room to be
    larger, and the root still fits into every score.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        least_n = np.where(has_loss_n, (1 - _SQUARE_SLACK) * np.square(loss_n) - _SMALLEST_SQUARE, 0.0)
        is_one_n: BoolArray = (square_n >= np.maximum(least_n, 0.0)) & (square_n <= LARGEST_ENTRY**4)
    return np.isnan(square_n) | is_one_n


def _fault(update: npt.ArrayLike | None, reports: Reports, i: int, num_params: int) -> str | None:
    """What is wrong with row i, or None."""
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
    if reports.has_loss_n[i] and not abs(reports.loss_n[i]) <= LARGEST_ENTRY:
        return f"loss is {reports.loss_n[i]}, expected a number of size {LARGEST_ENTRY:.0e} at most"
    square, said = reports.square_loss_n[i], reports.has_loss_n[i]
    if not _is_square_loss(square, reports.loss_n[i], said):
        least = f"{reports.loss_n[i] ** 2:.6g}, the square of the mean loss," if said else "0"
        return f"mean squared loss is {square}, expected {least} to {LARGEST_ENTRY**4:.0e}"
    if not 0 <= reports.step_variance_n[i] <= LARGEST_ENTRY**2:
        return f"step variance is {reports.step_variance_n[i]}, expected 0 to {LARGEST_ENTRY**2:.0e}"
    if reports.num_steps_n[i] < 1:
        return f"number of local steps is {reports.num_steps_n[i]}, expected >= 1"
    return None


def _neutral(reports: Reports, responded_n: npt.NDArray[np.bool_]) -> Reports:
    """Reports in which the rows of missing clients hold neutral values, so that no NaN can leak from them.

    A reply that said no loss has NaN, whatever stood in its place.
    """
    said_n = responded_n & reports.has_loss_n
    return reports._replace(
        responded_n=responded_n,
        loss_n=np.where(said_n, reports.loss_n, np.where(responded_n, np.nan, 0.0)),
        has_loss_n=said_n,
        square_loss_n=np.where(responded_n, reports.square_loss_n, 0.0),
        step_variance_n=np.where(responded_n, reports.step_variance_n, 0.0),
        num_steps_n=np.where(responded_n, reports.num_steps_n, 1),
    )


def measure_residuals(reports: Reports, residual_nd: FloatArray, sketch_size: int, seed: int) -> Reports:
    """Fill norm(u_i - c_i)^2, and sketches of u_i - c_i if there is to be any, of the clients that responded.

    Args:
        reports: Whose columns are replaced.
        residual_nd: (responding clients, d), u_i - c_i in their order.
        sketch_size: Numbers of a sketch; 0 for none.
        seed: Seed of the sketches.
    """
    n, here = len(reports.responded_n), reports.responded_n
    squared_residual_n, sketch_nq = np.zeros(n), np.zeros((n, sketch_size))
    squared_residual_n[here] = [residual_d @ residual_d for residual_d in residual_nd]
    if sketch_size > 0:
        sketch_nq[here] = count_sketch(residual_nd, sketch_size, seed)
    return reports._replace(squared_residual_n=squared_residual_n, sketch_nq=sketch_nq)


def measure_output_bias(reports: Reports, update_nd: Params, output_bias_size: int) -> Reports:
    """Fill the last entries of u_i of the clients that responded.

    Args:
        reports: Whose column is replaced.
        update_nd: (responding clients, d), u_i in their order.
        output_bias_size: How many entries k; 0 for none.

    Raises:
        DeltaflError: If there are fewer than k parameters.
    """
    n, d = len(reports.responded_n), update_nd.shape[1]
    if output_bias_size > d:
        raise DeltaflError(
            f"the sampler looks at the last {output_bias_size} parameters of a model of {d}; lower 'classes'"
        )
    output_bias_nk = np.zeros((n, output_bias_size))
    output_bias_nk[reports.responded_n] = update_nd[:, d - output_bias_size :]
    return reports._replace(output_bias_nk=output_bias_nk)


def measure(
    update_nd: Params | FloatArray, reports: Reports, weight_n: npt.NDArray[np.float64] | None = None
) -> Reports:
    """Fill norm(u_i)^2 and norm(u_i - mean)^2 of the clients that responded.

    Args:
        update_nd: (n, d), updates or their sketches; rows of clients that did not respond are ignored.
        reports: Whose columns are replaced.
        weight_n: Weights of the mean; None for the plain mean, as the paper's practical algorithm prints it.
    """
    here = np.flatnonzero(reports.responded_n)
    squared_norm_n, squared_deviation_n = np.zeros(len(update_nd)), np.zeros(len(update_nd))
    if len(here):
        mean_d = np.average(update_nd[here], axis=0, weights=None if weight_n is None else weight_n[here])
        rows = max(1, _BLOCK // max(1, update_nd.shape[1]))
        for first in range(0, len(here), rows):
            block = here[first : first + rows]
            wide_bd = update_nd[block].astype(np.float64)
            # The same bits as row @ row, whatever the block.
            squared_norm_n[block] = (wide_bd[:, None, :] @ wide_bd[:, :, None])[:, 0, 0]
            squared_deviation_n[block] = np.sum((wide_bd - mean_d) ** 2, axis=1)
    return reports._replace(squared_norm_n=squared_norm_n, squared_deviation_n=squared_deviation_n)
