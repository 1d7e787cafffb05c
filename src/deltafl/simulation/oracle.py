"""The simulator as the oracle of theoretical samplers, and the bytes that a real federation would have moved.

The oracle trains all m clients. Where their updates take more than ``TABLE_BYTES``, they lie in a memory-mapped file
without a name, and a block of clients is trained at a time. A first pass stores the updates and adds up
ubar = sum w_i u_i; a second pass reads them for norm(u_i - ubar)^2, of which norm(u_i)^2 - 2 <u_i, ubar> + norm(ubar)^2
would keep few digits where updates are alike. No client is trained twice.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..round import Broadcast
from ..scale.memory_budget import human
from ..server.screening import ScreenedReplies, measure, screen_replies
from ..types import Cohort, FloatArray, IntArray, Params, Population, Reports
from .engine import Engine, Training, reports_of

#: Bytes of m updates up to which a round keeps them in RAM.
TABLE_BYTES = 256 * 2**20
BYTES_PER_PARAMETER = 4  # float32
BYTES_OF_STATISTICS = 3 * 8  # loss, step variance, number of steps, as float64 or int64


class Traffic(NamedTuple):
    """Bytes that a real federation would have moved in a round."""

    down: int
    up: int


class SimulatedOracle:
    """Knows every client's update and loss of one round by training all clients, and counts the traffic.

    Args:
        engine: Trains the clients.
        population: The clients and their weights.
        round: The round.
        sent: What the clients are sent.
        block: Clients that are trained at a time where updates lie in a file, >= 1.
        folder: Where that file goes; the system's folder for temporary files if omitted.
        squares: Whether to measure mean squared losses.
    """

    def __init__(
        self,
        engine: Engine,
        population: Population,
        round: int,
        sent: Broadcast,
        block: int = 32,
        folder: Path | None = None,
        squares: bool = False,
    ) -> None:
        self.engine, self.population, self.round, self.sent = engine, population, round, sent
        self.traffic = Traffic(0, 0)
        self._block, self._folder, self._squares = block, folder, squares
        self._table: Training | None = None

    def reports(self) -> Reports:
        """Train all m clients; each downloads the model and sends its statistics and its norm.

        Returns:
            The screened reports, with deviations from the mean update of the clients whose replies are usable.

        Raises:
            DeltaflError: If the updates take more than ``TABLE_BYTES``, and the disk has less space than that.
        """
        m, d = self.population.num_clients, self.engine.num_params
        self._count(m, bytes_of(self.sent), bytes_of_statistics(self._squares) + 8)
        in_ram = m * d * BYTES_PER_PARAMETER <= TABLE_BYTES
        update_md = np.empty((m, d), dtype=np.float32) if in_ram else mapped_table(m, d, self._folder)
        block, weight_m = m if in_ram else self._block, self.population.weight_m
        total_d, columns, parts = np.zeros(d), [], []
        for first in range(0, m, block):
            client_k = np.arange(first, min(first + block, m))
            training = self._train(client_k)
            update_md[client_k] = training.update_nd
            columns.append(training[1:])
            replies = self._screened(client_k, training)
            parts.append(measure(replies.update_nd, replies.reports))
            for i in np.flatnonzero(replies.reports.responded_n):
                total_d += weight_m[client_k[i]] * replies.update_nd[i].astype(np.float64)
        self._table = Training(update_md, *(np.concatenate(column) for column in zip(*columns, strict=True)))
        reports = Reports(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        usable_m = reports.responded_n
        # The sum that np.average divides by.
        mean_d = total_d / weight_m[usable_m][:, None].sum(axis=0) if usable_m.any() else total_d
        for client in np.flatnonzero(usable_m):
            update_d = update_md[client] if self.sent.drift_d is None else update_md[client] - self.sent.drift_d
            reports.squared_deviation_n[client] = np.sum((update_d.astype(np.float64) - mean_d) ** 2)
        return reports

    def _screened(self, client_k: IntArray, training: Training) -> ScreenedReplies:
        """The replies as ``close_round`` would screen them."""
        k, d = len(client_k), self.engine.num_params
        cohort = Cohort(client_k, np.ones(k, dtype=np.int64), np.ones(k))
        return screen_replies(cohort, training.update_nd, reports_of(training), d, drift_d=self.sent.drift_d)

    def losses(self, client_k: IntArray) -> FloatArray:
        """Evaluate the global model at the clients; each downloads it and sends one number."""
        self._count(len(client_k), bytes_of(self.sent), 8)
        return self.engine.losses(self.sent.params_d, client_k)

    def train(self, client_n: IntArray) -> Training:
        """The training of the selected clients; not repeated if ``reports`` has trained all."""
        return self._train(client_n) if self._table is None else self._table.of(client_n)

    def everyone(self) -> Training | None:
        """The training of all m clients, for probes; None unless ``reports`` has trained them."""
        return self._table

    def _train(self, client_n: IntArray) -> Training:
        return self.engine.train(self.sent.params_d, self.round, client_n, self.sent.drift_d, self._squares)

    def _count(self, clients: int, bytes_down: int, bytes_up: int) -> None:
        self.traffic = Traffic(self.traffic.down + clients * bytes_down, self.traffic.up + clients * bytes_up)


def mapped_table(m: int, d: int, folder: Path | None = None) -> Params:
    """Zeros, float32 (m, d), in a file that has no name and leaves no trace.

    Raises:
        DeltaflError: If the disk is too full for the file.
    """
    where = Path(tempfile.gettempdir()) if folder is None else folder
    needed, free = m * d * BYTES_PER_PARAMETER, shutil.disk_usage(where).free
    if needed > free:
        raise DeltaflError(
            f"the updates of all {m} clients take {human(needed)} a round and {human(free)} are free in {where}: "
            "free some space there, or choose a sampler that does not use all updates, such as 'pracdelta'"
        )
    with tempfile.TemporaryFile(dir=where) as file:  # the mapping keeps it
        return np.memmap(file, dtype=np.float32, mode="w+", shape=(m, d))


def bytes_of(sent: Broadcast) -> int:
    """Bytes that one client downloads to train: the model, and the drift if there is one."""
    return sum(BYTES_PER_PARAMETER * len(vector_d) for vector_d in sent if vector_d is not None)


def bytes_of_statistics(squares: bool) -> int:
    """Bytes that a client sends beside its update, with or without its mean squared loss."""
    return BYTES_OF_STATISTICS + (8 if squares else 0)
