"""A memory that the clients keep: client i sends u_i - c_i, and the server keeps one running sum, sum_j w_j c_j.

``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)`` needs of the c_i nothing but their sum and the differences. So the
server can do with one model however many clients there are, and keeps no client's update. The price: both sides
must agree on c_i although replies get lost. The protocol::

    server -> client   the model, the round, and taken_i: the round of client i's last reply that was taken; -1 for none
    client             settles: if taken_i is the round of its last reply, that reply was taken and c_i <- c_i + what it
                       sent; if it is an older one, the reply was lost and c_i stays; -1: c_i <- 0
    client -> server   v_i = u_i - c_i, rounded to float32
    server             D with v_i; for each reply taken: sum <- sum + w_i v_i, taken_i <- this round

c_i changes only when the server says that it took the reply: one lost on its way, late or refused leaves both sides as
they were. A client adds what it *sent*, rounding included, in float64, as the server does: the sum stays
sum_j w_j c_j up to float64 rounding. If the server goes back to an earlier checkpoint, clients go back with it, as far
as they keep older c_i; beyond that the server starts the memory anew (``init``), and every client with it.

``difference-own-remote`` is ``difference-own`` and ``innovation-remote`` is ``innovation``, up to one float32 rounding
of what is sent; bit for bit where u_i - c_i is a float32 number.

Norms that samplers are told are those of what was sent: ``squared_norm_n`` is norm(u_i - c_i)^2, as
``squared_leftover_n`` is for clients seen before.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import BoolArray, FloatArray, IntArray, Params, Population
from .controls import Guess, follow_estimate, weighted_sum


class RemoteControlState(NamedTuple):
    """What the server keeps.

    Attributes:
        total_d: float64 (d,), sum_j w_j c_j.
        common_d: float64 (d,), the guess for clients never seen.
        unseen_m: bool (m,), clients none of whose replies was taken.
        unseen_weight: float64 (), the sum of their weights.
        taken_m: int64 (m,), the round of the last reply that was taken; -1 for none. To be sent with the model.
        rounds: int64 (), rounds closed.
    """

    total_d: FloatArray
    common_d: FloatArray
    unseen_m: BoolArray
    unseen_weight: FloatArray
    taken_m: IntArray
    rounds: IntArray


@dataclass(frozen=True)
class RemoteControl:
    """The server's part: the sum of all c_i, and who was taken when.

    Attributes:
        memory: In [0, 1), how slowly the guess for clients never seen follows the estimates; None for the guess 0.
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
            taken_m=np.full(m, -1, dtype=np.int64),
            rounds=np.zeros((), dtype=np.int64),
        )

    def guess(self, state: RemoteControlState, client_n: IntArray) -> Guess:
        """What is still to be subtracted: nothing of clients that did it themselves, the common guess of the others."""
        control_nd = np.where(state.unseen_m[client_n][:, None], state.common_d, 0.0)
        return Guess(state.total_d + state.unseen_weight * state.common_d, control_nd)

    def update(
        self,
        state: RemoteControlState,
        population: Population,
        client_n: IntArray,
        update_nd: Params,
        coef_n: FloatArray,
    ) -> RemoteControlState:
        """Add the differences of the replies that were taken."""
        guess, num_params = self.guess(state, client_n), len(state.total_d)
        common_d = state.common_d
        if self.memory is not None:
            common_d = follow_estimate(common_d, self.memory, guess, update_nd, coef_n)
        unseen_m, taken_m = state.unseen_m.copy(), state.taken_m.copy()
        unseen_m[client_n], taken_m[client_n] = False, state.rounds
        return RemoteControlState(
            total_d=state.total_d + weighted_sum(population.weight_m[client_n], update_nd, num_params),
            common_d=common_d,
            unseen_m=unseen_m,
            unseen_weight=np.asarray(population.weight_m[unseen_m].sum()),
            taken_m=taken_m,
            rounds=np.asarray(state.rounds + 1),
        )


class ClientMemory:
    """The client's part: keeps c_i, and says what to send.

    Args:
        num_params: d.
        keep: How many c_i it keeps, >= 1, the newest among them: it can follow a server that goes back by
            ``keep`` - 1 of its replies.
    """

    def __init__(self, num_params: int, keep: int = 2) -> None:
        if keep < 1:
            raise DeltaflError(f"keep is {keep}; a client must keep at least its newest c_i: write 1 or more")
        self._keep = keep
        self._versions: list[tuple[int, FloatArray]] = [(-1, np.zeros(num_params))]
        self._pending: tuple[int, Params] | None = None

    @property
    def control_d(self) -> FloatArray:
        """c_i as it is known to be taken, float64 (d,)."""
        return self._versions[-1][1]

    def reply(self, update_d: Params, round: int, taken: int, drift_d: Params | None = None) -> Params:
        """What to send for an update.

        Args:
            update_d: float32 (d,), u_i of this round.
            round: The round, as the server counts (``RemoteControlState.rounds`` before it is closed).
            taken: taken_i, as the server sent it with the model.
            drift_d: What the server sent beside the model (``mime.py``); it takes it off the reply again.

        Returns:
            float32 (d,): u_i - c_i.

        Raises:
            DeltaflError: If the server's last reply of this client is one whose c_i is not kept any more.
        """
        self._settle(taken)
        known_d = np.zeros(len(self.control_d), dtype=np.float32) if drift_d is None else drift_d
        kept_d = self.control_d
        sent_d: Params = (update_d.astype(np.float64) - kept_d).astype(np.float32)
        self._pending = (round, sent_d - known_d)  # in float32, as the server does it
        return sent_d

    def _settle(self, taken: int) -> None:
        """Go on from the c_i that belongs to the reply that the server took last."""
        versions = list(self._versions)
        if self._pending is not None:
            round, sent_d = self._pending
            versions.append((round, self.control_d + sent_d))
        rounds = [round for round, _ in versions]
        if taken == -1:
            versions = [(-1, np.zeros(len(self.control_d)))]
        elif taken in rounds:
            versions = versions[: rounds.index(taken) + 1]
        else:
            raise DeltaflError(
                f"the server last took this client's reply of round {taken}, the client keeps its memory of rounds "
                f"{', '.join(map(str, rounds))} only: start the server's memory anew, or keep more of them"
            )
        self._versions, self._pending = versions[-self._keep :], None
