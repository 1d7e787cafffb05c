"""Rounds that nobody answers: bad luck of clients who fail on their own, or one cause that they share.

Response rates (``round.response_rates``) are right for clients that fail on their own. An outage of the server's
network says nothing of any client; counted as a failure of each, it would make the weights of their replies too large
for as long again as it lasted.
"""

import numpy as np

from ..round import RoundState
from ..types import IntArray

#: Less likely than this, silence of a whole cohort is no bad luck.
UNLIKELY = 1e-3


def looks_like_outage(state: RoundState, client_n: IntArray) -> bool:
    """Whether it is unlikely that these clients all failed on their own: prod_i (1 - r_i) < 0.001.

    r_i = (answered_i + 2 r) / (asked_i + 2), with r = (answered + 1) / (asked + 2) over all clients: the mean of a
    beta distribution, so that clients who were seldom asked count as the others. A single client proves nothing.
    Silence that is likely enough stays non-response: what is left out is at most 0.1 % of the estimate where the rates
    are right.

    Args:
        state: Before the round.
        client_n: Who was asked.
    """
    if len(client_n) < 2:
        return False
    responded_m, selected_m = np.asarray(state.responded_m, dtype=float), np.asarray(state.selected_m, dtype=float)
    overall = (responded_m.sum() + 1) / (selected_m.sum() + 2)
    rate_n = (responded_m[client_n] + 2 * overall) / (selected_m[client_n] + 2)
    return bool(np.prod(1 - rate_n) < UNLIKELY)
