"""What came back from a client: untrusted, so every part is checked before it is used. Knows no Flower.

With a ``...-remote`` estimator the server names, in each train message, the control variate c_i that it counts on; the
client states in its reply which one it subtracted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..estimators.remote import NOTHING, RemoteControlState
from ..server.screening import LARGEST_ENTRY
from ..types import Reports
from .arrays import Arrays, Layout


class ClientReply(NamedTuple):
    """A client's reply to a train message.

    Attributes:
        arrays: Its model after training; None if there is none.
        fault: Why the reply cannot be used, if that is already known; it then counts as non-response.
        loss: Mean training loss; None if not reported.
        square_loss: Mean squared loss of single examples; None if not reported.
        step_variance: Variance of one local step, see ``types.Reports``.
        num_steps: Local steps.
        sketch: The update's sketch, if the client sent one.
        since: From a client that keeps its own memory: the name of the c_i that it subtracted.
    """

    arrays: Arrays | None
    fault: str | None = None
    loss: float | None = None
    square_loss: float | None = None
    step_variance: float = 0.0
    num_steps: float = 1
    sketch: Sequence[float] | None = None
    since: int | None = None


def fault_in(reply: ClientReply, layout: Layout, sketch_size: int, expected: int | None) -> str | None:
    """Why a reply cannot be used, or None; the core checks its numbers and its update.

    Args:
        reply: The reply.
        layout: The model's arrays.
        sketch_size: Length of the sketch that the client was asked for; 0 for none.
        expected: The c_i that the client was asked to subtract, see ``expected_memory``.
    """
    if lost_memory(reply.since, expected):
        return "the client does not have the memory that the server counts on"
    if reply.fault is not None or reply.arrays is None:
        return reply.fault or "the reply has no arrays"
    if expected is not None and reply.since is None:
        return "the reply does not name the memory that it subtracts; add delta_mod to the ClientApp's mods"
    return layout.fault(reply.arrays) or _sketch_fault(reply.sketch, sketch_size)


def reports_of(replies: Sequence[ClientReply | None], updates: Sequence[object | None]) -> Reports:
    """The columns of ``Reports``; replies without a usable update leave their row neutral."""
    neutral = ClientReply(None)
    used = [reply if reply and update is not None else neutral for reply, update in zip(replies, updates, strict=True)]
    return Reports.make(
        len(used),
        responded=[update is not None for update in updates],
        loss=[reply.loss for reply in used],
        square_loss=[reply.square_loss for reply in used],
        step_variance=[reply.step_variance for reply in used],
        num_steps=[reply.num_steps for reply in used],
    )


def expected_memory(control: Any, client: int) -> int | None:
    """The name of the c_i that the server counts on; None if clients keep no memory of their own."""
    return int(control.taken_m[client]) if isinstance(control, RemoteControlState) else None


def lost_memory(since: int | None, expected: int | None) -> bool:
    """Whether the client says that it no longer has the c_i that the server counts on."""
    return expected not in (None, NOTHING) and since is not None and since != expected


def memories_were_reset(before: Any, after: Any) -> bool:
    """Whether the clients' memories were reset between two states of a control variate, and there were any."""
    remote = isinstance(before, RemoteControlState) and isinstance(after, RemoteControlState)
    return remote and bool(np.any(before.taken_m != NOTHING) and np.all(after.taken_m == NOTHING))


def _sketch_fault(sketch: Sequence[float] | None, size: int) -> str | None:
    if size == 0:
        return None
    if sketch is None:
        return "the reply has no sketch of the update; add delta_mod to the ClientApp's mods"
    sketch_q = np.asarray(sketch, dtype=np.float64)
    if sketch_q.shape != (size,) or not np.all(np.abs(sketch_q) <= LARGEST_ENTRY):
        return f"the sketch must be {size} finite numbers"
    return None
