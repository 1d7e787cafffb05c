"""Who can be asked in a round, and how many of them, for samplers that do not leave this to ``draw_cohort``."""

import numpy as np

from ..designs.inclusion import check_anyone, check_cohort_size
from ..types import BoolArray, IntArray


def present_clients(available_m: BoolArray, n: int) -> tuple[IntArray, int]:
    """The indices of the available clients, and the cohort's size: n, or all of them if they are fewer.

    Raises:
        DeltaflError: If n is not in 1..m, or nobody is available.
    """
    check_cohort_size(n, len(available_m))
    present = np.flatnonzero(available_m)
    check_anyone(len(present))
    return present, min(n, len(present))
