"""Updates stored on the clients: client i sends u_i - c_i, and the server keeps one running sum,
sum_j w_j c_j.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` needs only the sum of the c_i and the differences,
as long as both sides agree on c_i even when replies get lost. The protocol::

    server -> client  the model, and taken_i, the name of the c_i that the server counts on; -1 for c_i = 0
    client  settles: if taken_i names c_i + what it sent last, that reply was taken and c_i <- c_i + what it
                       sent; if it names an older c_i, the reply was lost and c_i is that one; -1:
                       c_i <- 0
    client -> server   v_i = u_i - c_i, rounded to float32, and taken_i again: which c_i that is
    server     D with v_i; for each reply taken: sum <- sum + w_i v_i, taken_i <- name(taken_i, v_i)

A name is a 63-bit digest of all v_i that c_i is the sum of, so both sides notice any disagreement
before a wrong c_i is used. All clients then begin anew, because the sum does not reveal a single
c_i; the same happens if rounding has ruined the sum. Learned coefficients have no ``-remote`` form,
because beta is learned from products of u_i with c_i. docs/flower-operation.md, "Memory on the
clients", says what can go wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..scale.rows import RunningSum
from ..types import BoolArray, FloatArray, IntArray, Params, Population, Replies
from .control_variates import ControlValue, ControlVariate, follow_estimate, seen

#: taken_i of c_i = 0.
NOTHING = -1


class RemoteReply(NamedTuple):
    """The reply of a client that keeps its own c_i; ``ClientMemory.reply`` makes it."""

    difference_d: Params  #: float32 (d,), v_i = u_i - c_i
    #: taken_i of the c_i that was subtracted; the server rejects a reply that subtracted any other
    #: c_i
    since: int


class RemoteControlState(NamedTuple):
    """What the server keeps."""

    total_d: FloatArray  #: sum_j w_j c_j
    common_d: FloatArray  #: c of clients that have not replied yet
    unseen_m: BoolArray  #: clients none of whose replies was taken
    unseen_weight: FloatArray  #: the sum of their weights
    taken_m: IntArray  #: the name of c_i, int64; -1 for c_i = 0. To be sent with the model
    rounding: FloatArray = np.zeros(
        ()
    )  #: how far rounding may have led ``total_d`` from the sum (``RunningSum``)


def _all_anew(num_clients: int, common_d: FloatArray) -> RemoteControlState:
    unseen_m = np.ones(num_clients, dtype=np.bool_)
    taken_m = np.full(num_clients, NOTHING, dtype=np.int64)
    return RemoteControlState(np.zeros_like(common_d), common_d, unseen_m, np.array(1.0), taken_m)


@dataclass(frozen=True)
class RemoteControl(ControlVariate):
    """The server's part: the sum of all c_i, and the name of each.

    Attributes:
        memory: In [0, 1), how slowly c, for clients that have not replied yet, follows the
            estimates; None for c = 0.
    """

    memory: float | None = None
    ranges: ClassVar = {"memory": "[0, 1)"}

    @property
    def knows_clients(self) -> bool:
        """No: each client has its own c_i."""
        return False

    def init(self, population: Population, num_params: int) -> RemoteControlState:
        """All c_i = 0; clients that get -1 begin anew."""
        return _all_anew(population.num_clients, np.zeros(num_params))

    def value(self, state: RemoteControlState, client_n: IntArray) -> ControlValue:
        """What is still to be subtracted: nothing for clients that did it themselves, the common
        c for the others.
        """
        control_nd = np.where(state.unseen_m[client_n][:, None], state.common_d, 0.0)
        return ControlValue(state.total_d + state.unseen_weight * state.common_d, control_nd)

    def update(
        self, state: RemoteControlState, population: Population, replies: Replies, update_nd: Params
    ) -> RemoteControlState:
        """Add the differences of the accepted replies; all clients begin anew if rounding has
        ruined the sum.
        """
        client_n = replies.client_n
        common_d = state.common_d
        taken_m = state.taken_m.copy()
        if self.memory is not None:
            value = self.value(state, client_n)
            common_d = follow_estimate(common_d, self.memory, value, update_nd, replies.coef_n)
        for client, difference_d in zip(client_n.tolist(), update_nd, strict=True):
            taken_m[client] = _name(int(taken_m[client]), difference_d)
        followed = RunningSum(state.total_d, state.rounding).plus(
            population.weight_m[client_n], update_nd
        )
        unseen_m, unseen_weight = seen(state.unseen_m, population, replies)
        new = RemoteControlState(
            followed.total_d, common_d, unseen_m, unseen_weight, taken_m, followed.rounding
        )
        return begin_anew(new) if followed.is_lost else new


def begin_anew(state: RemoteControlState) -> RemoteControlState:
    """Reset all c_i to 0, as after ``init``: when a client lost its c_i, weights changed, or the
    sum is lost.

    The common c stays on the server, and now serves all clients.
    """
    return _all_anew(len(state.taken_m), state.common_d)


def differences(
    control: ControlVariate,
    state: Any,
    client_n: IntArray,
    updates: Sequence[Any] | npt.NDArray[np.floating],
) -> tuple[Sequence[Any] | npt.NDArray[np.floating], dict[int, str]]:
    """Plain rows, one per client of the cohort: v_i of clients that keep their memory, u_i where
    none do.

    Also the reasons, by client, for rejecting replies whose c_i differs from the server's; their
    rows are None. Raises a ``DeltaflError`` if the updates are not a list, or mix the two kinds of
    replies, which would bias the estimate.
    """
    if isinstance(updates, Mapping) or np.isscalar(updates) or not hasattr(updates, "__getitem__"):
        kind = type(updates).__name__
        raise DeltaflError(
            f"updates are a {kind}; give a list or an array, in the order of cohort.client_n"
        )
    remote = isinstance(control, RemoteControl)
    if not remote and isinstance(updates, np.ndarray):
        return updates, {}
    rows = list(updates)
    refused = dict[int, str]()
    for place, (client, reply) in enumerate(zip(client_n.tolist(), updates, strict=False)):
        if reply is not None and isinstance(reply, RemoteReply) != remote:
            kind = "no RemoteReply" if remote else "a RemoteReply"
            cure = "send what deltafl.ClientMemory.reply returns, with any other the update itself"
            raise DeltaflError(
                f"the reply of client {client} is {kind}; with a '-remote' estimator {cure}"
            )
        if remote and reply is not None:
            taken = int(state.taken_m[client])
            agreed = isinstance(reply.since, int | np.integer) and reply.since == taken
            rows[place] = reply.difference_d if agreed else None
            if not agreed:
                refused[client] = (
                    "the reply subtracts another c_i than the server's: the client lost its memory"
                )
    return rows, refused


def _name(before: int, difference_d: Params) -> int:
    """The name of c_i + v_i: 63 bits of a digest of v_i and the name of c_i. Zero has one sign."""
    row_d = np.asarray(difference_d, dtype="<f4") + np.float32(0)
    digest = blake2b(
        row_d.tobytes(), digest_size=8, key=before.to_bytes(8, "little", signed=True)
    ).digest()
    return int.from_bytes(digest, "little") >> 1


class ClientMemory:
    """The client side of a ``...-remote`` estimator: keeps c_i, and makes the replies.

    ::

        memory = ClientMemory(num_params)     # on each client, once; arrays() and restore() keep it
        taken = int(state.control.taken_m[client])  # on the server, sent to the client with the model
        reply = memory.reply(train(params_d), taken)       # on the client: a RemoteReply, sent back
        state, info = close_round(plan, state, cohort, replies)  # on the server: these replies and
        nothing else

    A client that lost its memory cannot reply until the server begins anew:
    ``state._replace(control=begin_anew(state.control))``, from ``deltafl.estimators.remote``.

    It keeps the last two c_i, in float64, so it can follow a server that goes back by one of its
    replies.

    Args:
        num_params: d.
    """

    def __init__(self, num_params: int) -> None:
        self._versions: list[tuple[int, FloatArray]] = [(NOTHING, np.zeros(num_params))]
        self._pending: Params | None = None

    @property
    def control_d(self) -> FloatArray:
        """c_i as it is known to be taken, float64 (d,)."""
        return self._versions[-1][1]

    def follows(self, taken: int) -> bool:
        """Whether it has the c_i that the server expects; if not, ``reply`` raises an error."""
        return taken == NOTHING or taken in dict(self._candidates())

    def reply(self, update_d: Params, taken: int, drift_d: Params | None = None) -> RemoteReply:
        """What to send for an update: u_i - c_i, float32 (d,), and which c_i that is.

        Args:
            update_d: float32 (d,), u_i of this round.
            taken: taken_i, as the server sent it with the model.
            drift_d: The drift that the server sent with the model (``mime.py``), which it subtracts
                from the reply.

        Raises:
            DeltaflError: If the server expects a c_i that is not kept (any more).
        """
        if not self.follows(taken):
            cure = "begin the server's memory anew"
            raise DeltaflError(f"the server counts on a c_i that this client does not have: {cure}")
        candidates = (
            [(NOTHING, np.zeros_like(self.control_d))] if taken == NOTHING else self._candidates()
        )
        newest = [name for name, _ in candidates].index(taken)
        self._versions = candidates[: newest + 1][-2:]
        difference_d: Params = (update_d.astype(np.float64) - self.control_d).astype(np.float32)
        self.sent_as(
            difference_d if drift_d is None else difference_d - drift_d
        )  # in float32, as the server does it
        return RemoteReply(difference_d, taken)

    def sent_as(self, difference_d: Params) -> None:
        """Correct the last reply to what the server receives, float32 (d,), if sending rounds
        it.
        """
        self._pending = difference_d

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Its state, as named arrays, for ``restore``."""
        kept: dict[str, np.ndarray[Any, Any]] = {
            "taken_k": np.array([name for name, _ in self._versions], dtype=np.int64),
            "control_kd": np.array([control_d for _, control_d in self._versions]),
        }
        return kept if self._pending is None else {**kept, "pending_d": self._pending}

    def restore(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Continue from ``arrays()``; those of a model of another size are ignored, as if the
        memory was lost.
        """
        if arrays["control_kd"].shape[1:] == self.control_d.shape:
            self._versions = list(
                zip(arrays["taken_k"].tolist(), arrays["control_kd"], strict=True)
            )
            self._pending = arrays.get("pending_d")

    def _candidates(self) -> list[tuple[int, FloatArray]]:
        """All c_i that it can continue from; the last one if the pending reply was accepted."""
        if self._pending is None:
            return self._versions
        name, control_d = self._versions[-1]
        return [*self._versions, (_name(name, self._pending), control_d + self._pending)]
