"""What a host gives at the start, checked: the model as one flat vector, and what is known of the clients."""

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError


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
    """What is known of each client, (m, q) finite numbers; always a copy."""
    known_mq = np.array(known, dtype=np.float64)
    if known_mq.ndim != 2 or len(known_mq) != num_clients:
        raise DeltaflError(
            f"known has shape {known_mq.shape}; it must have one row of numbers for each of {num_clients} clients"
        )
    bad = np.flatnonzero(~np.isfinite(known_mq).all(axis=1))
    if len(bad):
        raise DeltaflError(f"what is known of client {bad[0]} holds a number that is not finite; write 0 in its place")
    return known_mq
