"""What every draw needs: somebody to draw, a possible size, a possible floor."""

from typing import Any

import numpy as np

from ..errors import DeltaflError


def check_anyone(num_present: int) -> None:
    """Raise a ``DeltaflError`` if no client is available."""
    if num_present == 0:
        raise DeltaflError("no client is available this round; wait until at least one is")


def check_cohort_size(n: Any, m: int) -> None:
    """Raise a ``DeltaflError`` unless 1 <= n <= m."""
    if not (isinstance(n, int | np.integer) and not isinstance(n, bool) and 1 <= n <= m):
        raise DeltaflError(
            f"cannot sample {n!r} of {m} clients; the sample must be between 1 and {m}"
        )


def check_floor(floor: float) -> None:
    """Raise a ``DeltaflError`` unless 0 <= g <= 1."""
    if not 0 <= floor <= 1:
        raise DeltaflError(
            f"floor is {floor}; it must be between 0 (scores only) and 1 (no scores)"
        )
