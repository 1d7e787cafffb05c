"""What a host gives, checked: the model as one flat vector, what is known of the clients, and what they said."""

from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError

#: What is known of a client is squared and summed.
LARGEST_KNOWN = 1e100


def checked_params(params: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """A model as one flat float32 vector (d,), from any 1-d array of finite numbers; always a copy."""
    try:
        params_d = np.array(params, dtype=np.float32)
    except (TypeError, ValueError):
        raise DeltaflError("params must be one flat array of numbers; write numpy.concatenate of the layers") from None
    if params_d.ndim != 1:
        raise DeltaflError(f"params must be one flat array of numbers, got shape {params_d.shape}; use .ravel()")
    if not np.all(np.isfinite(params_d)):
        raise DeltaflError("params has NaN or infinite entries; begin with a model of finite numbers")
    return params_d


def checked_known(known: npt.ArrayLike, num_clients: int) -> npt.NDArray[np.float64]:
    """What is known of each client, (m, q) numbers of size 1e100 at most; always a copy."""
    try:
        aux_mq = np.array(known, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise DeltaflError("known must hold one row of numbers for each client, all of one length") from None
    if aux_mq.ndim != 2 or len(aux_mq) != num_clients:
        raise DeltaflError(
            f"known has shape {aux_mq.shape}; it must have one row of numbers for each of {num_clients} clients"
        )
    bad = np.flatnonzero(~(np.abs(aux_mq) <= LARGEST_KNOWN).all(axis=1))
    if len(bad):
        raise DeltaflError(
            f"what is known of client {bad[0]} holds a number that is not finite, or beyond {LARGEST_KNOWN:.0e}; "
            "write 0 in its place, or smaller units"
        )
    return aux_mq


def checked_column(name: str, given: Any, n: int, default: float | None, bad: float = nan) -> npt.NDArray[np.float64]:
    """One number a client, float64 (n,), of a report.

    Args:
        name: What it is, for messages.
        given: (n,) what the clients said; None for nothing.
        n: The number of clients.
        default: What stands for all of it if nothing is given; None for NaN.
        bad: What stands for an entry that is no number, such as text; the reply is refused by it. None becomes NaN.

    Raises:
        DeltaflError: If there is not one entry a client.
    """
    if given is None:
        return np.full(n, nan if default is None else default)
    try:
        values = np.asarray(given)
    except ValueError:  # rows of several lengths
        raise DeltaflError(f"reports: {name} must have one number for each of {n} clients") from None
    if values.shape != (n,):
        raise DeltaflError(f"reports: {name} has shape {values.shape}, the cohort needs ({n},)")
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    return np.array([nan if entry is None else _number(entry, bad) for entry in values], dtype=np.float64)


def was_said(given: Any, n: int) -> npt.NDArray[np.bool_]:
    """Which clients said a number, bool (n,): all whose entry is not None; nobody if nothing is given."""
    if given is None:
        return np.zeros(n, dtype=np.bool_)
    if isinstance(given, np.ndarray) and given.dtype != object:
        return np.ones(n, dtype=np.bool_)
    return np.array([entry is not None for entry in given], dtype=np.bool_)


def _number(entry: object, bad: float) -> float:
    try:
        return float(entry)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return bad
