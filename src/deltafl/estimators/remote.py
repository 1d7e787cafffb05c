"""A memory that the clients keep: client i sends u_i - c_i, and the server keeps one running sum, sum_j w_j c_j.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` needs of the c_i nothing but their sum and the differences. So the
server can do with one model however many clients there are, and keeps no client's update. The price: both sides
must agree on c_i although replies get lost. The protocol::

    server -> client   the model, and taken_i, which names the c_i that the server counts on; -1 for c_i = 0
    client             settles: if taken_i names c_i + what it sent last, that reply was taken and c_i <- c_i + what it
                       sent; if it names an older c_i, the reply was lost and c_i is that one; -1: c_i <- 0
    client -> server   v_i = u_i - c_i, rounded to float32, and taken_i again: which c_i that is
    server             D with v_i; for each reply taken: sum <- sum + w_i v_i, taken_i <- name(taken_i, v_i)

c_i changes only when the server confirms that it took the reply: one lost on its way, late or refused leaves both sides
as they were. A client adds what it *sent*, rounding included, in float64, as the server does: the sum stays sum_j w_j
c_j up to float64 rounding, and where that has become large beside it (``RunningSum``) all begin anew. A name is a
63-bit digest of all v_i that c_i is the sum of. So two sides that disagree for whatever reason (a lost disk, a reply
changed on its way, another client's memory, a server that went back) notice it before a wrong c_i is used. If the
server goes back to an earlier checkpoint, clients go back with it, as far as they keep older c_i; beyond that the
server starts the memory anew (``begin_anew``), and every client with it. It has to be all of them: a sum does not show
what a single c_i was.

``difference-own-remote`` is ``difference-own`` and ``innovation-remote`` is ``innovation``, up to one float32 rounding
of what is sent; bit for bit where u_i - c_i is a float32 number. The forms with a learned coefficient have no such
twin: beta is learned from the products of u_i with c_i, and the estimate needs u_i - beta c_i = v_i + (1 - beta) c_i.
The server has neither.

Norms that samplers see are those of what was sent: ``squared_norm_n`` is norm(u_i - c_i)^2, as
``squared_residual_n`` is for clients seen before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..scale.rows import RunningSum
from ..types import BoolArray, FloatArray, IntArray, Params, Population, Replies
from .control_variates import ControlValue, ControlVariate, follow_estimate

#: taken_i of c_i = 0.
NOTHING = -1


class RemoteReply(NamedTuple):
    """What a client that keeps its memory sends; ``ClientMemory.reply`` makes it.

    Attributes:
        difference_d: float32 (d,), v_i = u_i - c_i.
        since: taken_i of the c_i that was subtracted; the server refuses a reply that subtracts another than its own.
    """

    difference_d: Params
    since: int


class RemoteControlState(NamedTuple):
    """What the server keeps.

    Attributes:
        total_d: float64 (d,), sum_j w_j c_j.
        common_d: float64 (d,), c of clients that have not replied yet.
        unseen_m: bool (m,), clients none of whose replies was taken.
        unseen_weight: float64 (), the sum of their weights.
        taken_m: int64 (m,), the name of c_i, see the module; -1 for c_i = 0. To be sent with the model.
        rounding: float64 (), how far from it rounding may have led ``total_d`` (``RunningSum``).
    """

    total_d: FloatArray
    common_d: FloatArray
    unseen_m: BoolArray
    unseen_weight: FloatArray
    taken_m: IntArray
    rounding: FloatArray = np.zeros(())


@dataclass(frozen=True)
class RemoteControl(ControlVariate):
    """The server's part: the sum of all c_i, and the name of each.

    Attributes:
        memory: In [0, 1), how slowly c of clients that have not replied yet follows the estimates; None for 0.
    """

    memory: float | None = None

    def init(self, population: Population, num_params: int) -> RemoteControlState:
        """All c_i = 0: clients that are sent -1 begin anew."""
        m = population.num_clients
        return RemoteControlState(
            total_d=np.zeros(num_params),
            common_d=np.zeros(num_params),
            unseen_m=np.ones(m, dtype=np.bool_),
            unseen_weight=np.array(1.0),
            taken_m=np.full(m, NOTHING, dtype=np.int64),
        )

    def value(self, state: RemoteControlState, client_n: IntArray) -> ControlValue:
        """What is still to be subtracted: nothing of clients that did it themselves, the common c of the others."""
        control_nd = np.where(state.unseen_m[client_n][:, None], state.common_d, 0.0)
        return ControlValue(state.total_d + state.unseen_weight * state.common_d, control_nd)

    def update(
        self, state: RemoteControlState, population: Population, replies: Replies, update_nd: Params
    ) -> RemoteControlState:
        """Add the differences of the replies that were taken; all begin anew where rounding has lost the sum."""
        client_n = replies.client_n
        value = self.value(state, client_n)
        common_d = state.common_d
        if self.memory is not None:
            common_d = follow_estimate(common_d, self.memory, value, update_nd, replies.coef_n)
        unseen_m, taken_m = state.unseen_m.copy(), state.taken_m.copy()
        unseen_m[client_n] = False
        for client, difference_d in zip(client_n.tolist(), update_nd, strict=True):
            taken_m[client] = _name(int(taken_m[client]), difference_d)
        followed = RunningSum(state.total_d, state.rounding).plus(population.weight_m[client_n], update_nd)
        new = RemoteControlState(
            total_d=followed.total_d,
            common_d=common_d,
            unseen_m=unseen_m,
            unseen_weight=np.asarray(population.weight_m[unseen_m].sum()),
            taken_m=taken_m,
            rounding=followed.rounding,
        )
        return begin_anew(new) if followed.is_lost else new


def begin_anew(state: RemoteControlState) -> RemoteControlState:
    """All c_i = 0 from now on, as after ``init``: for a client that lost its c_i, weights that changed, a lost sum.

    The common c stays: it is the server's own, and serves all clients now.
    """
    return state._replace(
        total_d=np.zeros_like(state.total_d),
        unseen_m=np.ones_like(state.unseen_m),
        unseen_weight=np.array(1.0),
        taken_m=np.full_like(state.taken_m, NOTHING),
        rounding=np.zeros(()),
    )


def differences(
    control: ControlVariate, state: Any, client_n: IntArray, updates: Sequence[Any] | npt.NDArray[np.floating]
) -> tuple[Sequence[Any] | npt.NDArray[np.floating], dict[int, str]]:
    """What ``close_round`` was given, as plain rows: v_i of clients that keep their memory, u_i where none do.

    Args:
        control: The plan's control.
        state: Its memory.
        client_n: The cohort.
        updates: One reply a client; None for no reply.

    Returns:
        The rows, and client -> why its reply is refused (its row is None), where both sides do not agree on c_i.

    Raises:
        DeltaflError: If the updates are no list, or the host mixes up the two kinds of replies: the estimate would be
            wrong without a sign of it.
    """
    if isinstance(updates, Mapping) or np.isscalar(updates) or not hasattr(updates, "__getitem__"):
        raise DeltaflError(
            f"updates are a {type(updates).__name__}; give a list or an array, in the order of cohort.client_n"
        )
    if not isinstance(control, RemoteControl):
        if not isinstance(updates, np.ndarray) and any(isinstance(reply, RemoteReply) for reply in updates):
            raise DeltaflError(
                "a reply is a difference from what its client keeps, and only '-remote' estimators can use that: send "
                "the update itself, or write 'difference-own-remote' or 'innovation-remote'"
            )
        return updates, {}
    rows: list[Any] = []
    refused: dict[int, str] = {}
    for client, reply in zip(client_n.tolist(), updates, strict=False):
        if reply is not None and not isinstance(reply, RemoteReply):
            raise DeltaflError(
                f"the reply of client {client} is a plain update, and with a '-remote' estimator clients subtract "
                "their own c_i: send what deltafl.ClientMemory.reply returns, or write the estimator without '-remote'"
            )
        agreed = reply is not None and _is_name(reply.since, int(state.taken_m[client]))
        rows.append(reply.difference_d if reply is not None and agreed else None)
        if reply is not None and not agreed:
            refused[client] = "the reply subtracts another c_i than the server counts on: the client lost its memory"
    rows += [None] * (len(updates) - len(rows))
    return rows, refused


def _is_name(since: object, taken: int) -> bool:
    """Whether a client's name of its c_i is the server's; anything but a whole number is none."""
    return isinstance(since, int | np.integer) and int(since) == taken


def _name(before: int, difference_d: Params) -> int:
    """The name of c_i + v_i: 63 bits of a digest of v_i and the name of c_i. Zero has one sign."""
    row_d = np.asarray(difference_d, dtype="<f4") + np.float32(0)
    digest = blake2b(row_d.tobytes(), digest_size=8, key=before.to_bytes(8, "little", signed=True)).digest()
    return int.from_bytes(digest, "little") >> 1


class ClientMemory:
    """The client's part of a ``...-remote`` estimator: keeps c_i, and makes what is sent.

    ::

        memory = ClientMemory(num_params)                        # on each client, once; arrays() and restore() keep it
        taken = int(state.control.taken_m[client])               # on the server, sent to the client with the model
        reply = memory.reply(train(params_d), taken)             # on the client: a RemoteReply, sent back
        state, info = close_round(plan, state, cohort, replies)  # on the server: these replies and nothing else

    Memory: ``keep`` models in float64, and the last reply in float32. A client that lost its memory cannot reply until
    the server begins anew: ``state._replace(control=begin_anew(state.control))``, from ``deltafl.estimators.remote``.

    Args:
        num_params: d.
        keep: How many c_i it keeps, >= 1, the newest among them: it can follow a server that goes back by
            ``keep`` - 1 of its replies.
    """

    def __init__(self, num_params: int, keep: int = 2) -> None:
        if keep < 1:
            raise DeltaflError(f"keep is {keep}; a client must keep at least its newest c_i: write 1 or more")
        self._keep = keep
        self._versions: list[tuple[int, FloatArray]] = [(NOTHING, np.zeros(num_params))]
        self._pending: Params | None = None

    @property
    def control_d(self) -> FloatArray:
        """c_i as it is known to be taken, float64 (d,)."""
        return self._versions[-1][1]

    def follows(self, taken: int) -> bool:
        """Whether it has the c_i that the server counts on; if not, ``reply`` is an error."""
        return taken == NOTHING or taken in [name for name, _ in self._candidates()]

    def reply(self, update_d: Params, taken: int, drift_d: Params | None = None) -> RemoteReply:
        """What to send for an update.

        Args:
            update_d: float32 (d,), u_i of this round.
            taken: taken_i, as the server sent it with the model.
            drift_d: What the server sent beside the model (``mime.py``); it takes it off the reply again.

        Returns:
            float32 (d,), u_i - c_i, and which c_i that is.

        Raises:
            DeltaflError: If the server counts on a c_i that is not kept (any more).
        """
        self._settle(taken)
        difference_d: Params = (update_d.astype(np.float64) - self.control_d).astype(np.float32)
        self.sent_as(difference_d if drift_d is None else difference_d - drift_d)  # in float32, as the server does it
        return RemoteReply(difference_d, taken)

    def sent_as(self, difference_d: Params) -> None:
        """Put right what the server sees of the last reply, float32 (d,): for a way of sending that rounds."""
        self._pending = difference_d

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What it keeps, as named arrays, for ``restore``."""
        kept: dict[str, np.ndarray[Any, Any]] = {
            "taken_k": np.array([name for name, _ in self._versions], dtype=np.int64),
            "control_kd": np.array([control_d for _, control_d in self._versions]),
        }
        return kept if self._pending is None else {**kept, "pending_d": self._pending}

    def restore(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Go on from ``arrays()``; those of a model of another size are left out, as if the memory was lost."""
        if arrays["control_kd"].shape[1:] == self.control_d.shape:
            self._versions = list(zip(arrays["taken_k"].tolist(), arrays["control_kd"], strict=True))
            self._pending = arrays.get("pending_d")

    def _candidates(self) -> list[tuple[int, FloatArray]]:
        """All c_i that it can go on from; the last one if the pending reply was taken."""
        if self._pending is None:
            return self._versions
        name, control_d = self._versions[-1]
        return [*self._versions, (_name(name, self._pending), control_d + self._pending)]

    def _settle(self, taken: int) -> None:
        """Go on from the c_i that the server counts on."""
        candidates = self._candidates()
        names = [name for name, _ in candidates]
        if taken == NOTHING:
            candidates = [(NOTHING, np.zeros(len(self.control_d)))]
        elif taken in names:
            candidates = candidates[: names.index(taken) + 1]
        else:
            raise DeltaflError(
                "the server counts on a c_i that this client does not have: begin the server's memory anew, or let "
                f"clients keep more than the last {self._keep}"
            )
        self._versions, self._pending = candidates[-self._keep :], None
