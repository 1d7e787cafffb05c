"""The simulator as the oracle of theoretical samplers, and the bytes that a real federation would have moved."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..round import Broadcast
from ..server.screening import measure, screen_replies
from ..types import Cohort, FloatArray, IntArray, Population, Reports
from .engine import Engine, Training, reports_of
from .everyone import Everyone

#: Bytes of m updates up to which a round keeps them in RAM; beyond that they go through a file, a block at a time.
TABLE_BYTES = 256 * 2**20
BYTES_PER_PARAMETER = 4  # float32
BYTES_OF_STATISTICS = 3 * 8  # loss, step variance, number of steps, as float64 or int64


class Traffic(NamedTuple):
    """Bytes that a real federation would have moved in a round."""

    down: int
    up: int


class SimulatedOracle:
    """Knows every client's update and loss of one round, by training them all; at a price in traffic.

    Args:
        engine: Trains the clients.
        population: The clients and their weights.
        round: The round.
        sent: What the clients are sent.
        block: How many clients are trained at a time where the updates of all of them do not stay in RAM.
        folder: Where those go then, in a file without a name; the system's folder for such files if left out.
        table_bytes: Bytes of m updates up to which they stay in RAM. Results do not depend on it.
        squares: Whether mean squared losses are measured.
    """

    def __init__(
        self,
        engine: Engine,
        population: Population,
        round: int,
        sent: Broadcast,
        block: int = 32,
        folder: Path | None = None,
        table_bytes: int | None = None,
        squares: bool = False,
    ) -> None:
        self.engine, self.population, self.round, self.sent = engine, population, round, sent
        self.traffic = Traffic(0, 0)
        self._block, self._folder, self._squares = block, folder, squares
        self._table_bytes = TABLE_BYTES if table_bytes is None else table_bytes
        self._table: Training | None = None
        self._file: Everyone | None = None

    def reports(self) -> Reports:
        """Train all m clients; each downloads the model and sends its statistics and its norm."""
        m = self.population.num_clients
        self._count(m, bytes_of(self.sent), bytes_of_statistics(self._squares) + 8)
        if m * self.engine.num_params * BYTES_PER_PARAMETER > self._table_bytes:
            self._file = Everyone(self._train, self.population, self.engine.num_params, self._block, self._folder)
            return self._file.reports(self.sent.drift_d)
        everyone = Cohort(np.arange(m), np.ones(m, dtype=np.int64), np.ones(m))
        self._table = self._train(everyone.client_n)
        replies = screen_replies(
            everyone,
            self._table.update_nd,
            reports_of(self._table),
            self.engine.num_params,
            self.sent.drift_d,
        )
        return measure(replies.update_nd, replies.reports, self.population.weight_m)

    def losses(self, client_k: IntArray) -> FloatArray:
        """Evaluate the global model at the clients; each downloads it and sends one number."""
        self._count(len(client_k), bytes_of(self.sent), 8)
        return self.engine.losses(self.sent.params_d, client_k)

    def train(self, client_n: IntArray) -> Training:
        """The drawn clients' work, not done twice if the oracle was asked for it before the draw."""
        if self._file is not None:
            return self._file.of(client_n)
        if self._table is None:
            return self._train(client_n)
        everyone = self._table
        return Training(
            update_nd=everyone.update_nd[client_n],
            loss_n=everyone.loss_n[client_n],
            square_loss_n=everyone.square_loss_n[client_n],
            step_variance_n=everyone.step_variance_n[client_n],
            num_steps_n=everyone.num_steps_n[client_n],
        )

    def everyone(self) -> Training | None:
        """The work of all m clients in RAM, for probes; None if nobody asked for it before the draw."""
        return self._table if self._file is None else self._file.of(np.arange(self.population.num_clients))

    def _train(self, client_n: IntArray) -> Training:
        return self.engine.train(self.sent.params_d, self.round, client_n, self.sent.drift_d, self._squares)

    def _count(self, clients: int, bytes_down: int, bytes_up: int) -> None:
        self.traffic = Traffic(self.traffic.down + clients * bytes_down, self.traffic.up + clients * bytes_up)


def bytes_of(sent: Broadcast) -> int:
    """Bytes that one client downloads to train: the model, and the drift if there is one."""
    return sum(BYTES_PER_PARAMETER * len(vector_d) for vector_d in sent if vector_d is not None)


def bytes_of_statistics(squares: bool) -> int:
    """Bytes that a client sends beside its update, with its mean squared loss or without."""
    return BYTES_OF_STATISTICS + (8 if squares else 0)
