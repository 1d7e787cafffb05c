"""The simulator as the oracle of theoretical samplers, and the bytes that a real federation would have moved.

The oracle trains all m clients. Where their updates take more than ``TABLE_BYTES``, ``DiskOracle`` keeps them in a file
and trains a block of clients at a time. A first pass writes the updates and adds up ubar = sum w_i u_i; a second pass
reads them for norm(u_i - ubar)^2, of which norm(u_i)^2 - 2 <u_i, ubar> + norm(ubar)^2 would keep few digits where
updates are alike. No client is trained twice.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..round import Broadcast
from ..scale.memory_budget import human
from ..server.screening import measure, screen_replies
from ..types import BoolArray, Cohort, FloatArray, IntArray, Params, Population, Reports
from .engine import Engine, Training, reports_of

_ROW = np.dtype(np.float32)

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
        block: Clients that ``DiskOracle`` trains at a time.
        folder: Where its file goes; the system's folder for temporary files if omitted.
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
        self._table: Training | DiskOracle | None = None

    def reports(self) -> Reports:
        """Train all m clients; each downloads the model and sends its statistics and its norm."""
        m, d = self.population.num_clients, self.engine.num_params
        self._count(m, bytes_of(self.sent), bytes_of_statistics(self._squares) + 8)
        if m * d * BYTES_PER_PARAMETER > TABLE_BYTES:
            self._table = DiskOracle(self._train, self.population, d, self._block, self._folder)
            return self._table.reports(self.sent.drift_d)
        table = self._table = self._train(np.arange(m))
        everyone = Cohort(np.arange(m), np.ones(m, dtype=np.int64), np.ones(m))
        replies = screen_replies(everyone, table.update_nd, reports_of(table), d, drift_d=self.sent.drift_d)
        return measure(replies.update_nd, replies.reports, self.population.weight_m)

    def losses(self, client_k: IntArray) -> FloatArray:
        """Evaluate the global model at the clients; each downloads it and sends one number."""
        self._count(len(client_k), bytes_of(self.sent), 8)
        return self.engine.losses(self.sent.params_d, client_k)

    def train(self, client_n: IntArray) -> Training:
        """The training of the selected clients; not repeated if ``reports`` has trained all."""
        return self._train(client_n) if self._table is None else self._table.of(client_n)

    def everyone(self) -> Training | None:
        """The training of all m clients in RAM, for probes; None unless ``reports`` has trained them."""
        everyone = np.arange(self.population.num_clients)
        return self._table.of(everyone) if isinstance(self._table, DiskOracle) else self._table

    def _train(self, client_n: IntArray) -> Training:
        return self.engine.train(self.sent.params_d, self.round, client_n, self.sent.drift_d, self._squares)

    def _count(self, clients: int, bytes_down: int, bytes_up: int) -> None:
        self.traffic = Traffic(self.traffic.down + clients * bytes_down, self.traffic.up + clients * bytes_up)


class DiskOracle:
    """The training of all m clients of one round, with their updates in a file that has no name and leaves no trace.

    Args:
        train: Trains some clients from the round's model.
        population: The clients and their weights.
        num_params: d.
        block: Clients that are trained, and held in RAM, at a time, >= 1.
        folder: Where the file goes; the system's folder for temporary files if None.

    Raises:
        DeltaflError: If the disk is too full for the file.
    """

    def __init__(
        self,
        train: Callable[[IntArray], Training],
        population: Population,
        num_params: int,
        block: int,
        folder: Path | None = None,
    ) -> None:
        self._train, self._population, self._num_params, self._block = train, population, num_params, block
        m = population.num_clients
        where = Path(tempfile.gettempdir()) if folder is None else folder
        needed, free = m * num_params * _ROW.itemsize, shutil.disk_usage(where).free
        if needed > free:
            raise DeltaflError(
                f"the updates of all {m} clients take {human(needed)} a round and {human(free)} are free in {where}: "
                "free some space there, or choose a sampler that does not use all updates, such as 'pracdelta'"
            )
        self._file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115  (it lives as long as this object)
        weakref.finalize(self, self._file.close)
        self._statistics: Training | None = None

    def reports(self, drift_d: Params | None) -> Reports:
        """Train all clients: their screened reports, with deviations from the mean update of those that are usable.

        Args:
            drift_d: Part of every update that the server sent itself, subtracted before norms are measured.
        """
        weight_m = self._population.weight_m
        total_d, parts, statistics = np.zeros(self._num_params), [], []
        for client_k in self._blocks():
            training = self._train(client_k)
            self._file.write(np.ascontiguousarray(training.update_nd, dtype=_ROW).data)
            k = len(client_k)
            statistics.append(training._replace(update_nd=np.empty((k, 0), dtype=_ROW)))  # not a view, which keeps all
            cohort = Cohort(client_k, np.ones(k, dtype=np.int64), np.ones(k))
            # As close_round would screen them.
            replies = screen_replies(
                cohort, training.update_nd, reports_of(training), self._num_params, drift_d=drift_d
            )
            reports = measure(replies.update_nd, replies.reports)
            for i in np.flatnonzero(reports.responded_n):
                total_d += weight_m[client_k[i]] * replies.update_nd[i].astype(np.float64)
            parts.append(reports)
        self._statistics = Training(*(np.concatenate(columns) for columns in zip(*statistics, strict=True)))
        reports = Reports(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        if not reports.responded_n.any():
            return reports
        # The sum that np.average divides by, so that the bits are those of a table in RAM.
        mean_d = total_d / weight_m[reports.responded_n][:, None].sum(axis=0)
        return reports._replace(squared_deviation_n=self._deviations(mean_d, reports.responded_n, drift_d))

    def of(self, client_n: IntArray) -> Training:
        """The training of some clients, after ``reports``."""
        assert self._statistics is not None
        return self._statistics.of(client_n)._replace(update_nd=self._rows(client_n))

    def _blocks(self) -> Iterator[IntArray]:
        m = self._population.num_clients
        return (np.arange(first, min(first + self._block, m)) for first in range(0, m, self._block))

    def _deviations(self, mean_d: FloatArray, responded_m: BoolArray, drift_d: Params | None) -> FloatArray:
        squared_deviation_m = np.zeros(len(responded_m))
        for client in np.flatnonzero(responded_m):
            update_d = self._rows(np.array([client]))[0]
            if drift_d is not None:
                update_d -= drift_d
            squared_deviation_m[client] = np.sum((update_d.astype(np.float64) - mean_d) ** 2)
        return squared_deviation_m

    def _rows(self, client_n: IntArray) -> Params:
        row_nd = np.empty((len(client_n), self._num_params), dtype=_ROW)
        for row_d, client in zip(row_nd, client_n.tolist(), strict=True):
            self._file.seek(client * row_d.nbytes)
            self._file.readinto(row_d.data)
        return row_nd


def bytes_of(sent: Broadcast) -> int:
    """Bytes that one client downloads to train: the model, and the drift if there is one."""
    return sum(BYTES_PER_PARAMETER * len(vector_d) for vector_d in sent if vector_d is not None)


def bytes_of_statistics(squares: bool) -> int:
    """Bytes that a client sends beside its update, with or without its mean squared loss."""
    return BYTES_OF_STATISTICS + (8 if squares else 0)
