"""A model as the rounds have it: one flat vector."""

import numpy as np
import numpy.typing as npt

from .errors import DeltaflError
from .types import Params


def checked_params(params: npt.ArrayLike) -> Params:
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
