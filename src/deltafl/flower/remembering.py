"""A memory that clients keep, over messages: what the two sides tell each other, and what the server makes of it.

With a ``...-remote`` estimator (``estimators/remote.py``) the server names, in each train message, the c_i that it
counts on; the client says in its reply which one it subtracted. No Flower here.
"""

from typing import Any

import numpy as np

from ..estimators.remote import NOTHING, RemoteControlState

#: In a train message's config: the name of c_i that the server counts on, taken_i.
TAKEN = "deltafl-taken"
#: In a reply's metrics: the name of the c_i that was subtracted; -1 from a client that lost its memory.
SINCE = "memory-since"


def expected_of(control: Any, client: int) -> int | None:
    """taken_i, to be sent to the client; None if the estimator needs no memory of the clients."""
    return int(control.taken_m[client]) if isinstance(control, RemoteControlState) else None


def memory_fault(since: int | None, expected: int | None) -> str | None:
    """Why a reply cannot be used for want of agreement on c_i, or None.

    Args:
        since: What the reply says that it subtracts; None if it says nothing.
        expected: taken_i; None if the estimator needs no memory of the clients.
    """
    if since == expected:
        return None
    if expected is None:
        return "the reply is a difference from what the client keeps, which this server did not ask for"
    if since is None:
        return "the reply does not say which memory of its own it subtracts; add delta_mod to the ClientApp's mods"
    return "the client does not have the memory that the server counts on"


def lost_memory(since: int | None, expected: int | None) -> bool:
    """Whether the server counts on a c_i that the client says it does not have."""
    return expected not in (None, NOTHING) and since is not None and since != expected


def forgot(before: Any, after: Any) -> bool:
    """Whether clients' memories began anew between two states of a control, though there were any."""
    remote = isinstance(before, RemoteControlState) and isinstance(after, RemoteControlState)
    return remote and bool(np.any(before.taken_m != NOTHING) and np.all(after.taken_m == NOTHING))
