"""The oracle of theoretical samplers, and the bytes that a real federation would have moved.

Updates of all m clients that take more than ``TABLE_BYTES`` lie in a memory-mapped file, and a
block of clients is trained at a time. A second pass measures norm(u_i - ubar)^2, ubar = sum w_i
u_i, of which norm(u_i)^2 - 2 <u_i, ubar> + norm(ubar)^2 would keep few digits where updates are
alike.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..estimators.two_bits import code_length
from ..model.arrays import Arrays
from ..plan import Plan, RoundState
from ..round import broadcast
from ..screening import screen_replies
from ..server.norms import measure
from ..store.files import writing
from ..types import Cohort, FloatArray, IntArray, Params, Reports
from .engine import BYTES_PER_PARAMETER, Engine, Training
from .rest import bytes_sent

#: Bytes of m updates up to which a round keeps them in RAM.
TABLE_BYTES = 256 * 2**20
BYTES_OF_CODE = 8  # of each of its numbers, float64
BYTES_OF_STATISTICS = 3 * 8  # loss, step variance, number of steps, as float64 or int64


class SimulatedOracle:
    """Knows every client's update and loss in one round, and counts the traffic.

    A table of all updates that is too large for RAM goes into ``folder``.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        state: RoundState,
        folder: Path | None = None,
    ) -> None:
        self.client_seconds = 0.0
        self._engine = engine
        self._plan = plan
        self._state = state
        self._folder = folder
        self._sent = broadcast(plan, state)
        self._squares = plan.sampler.uses_square_loss
        # What one client gets in place of the common drift is as long.
        length = sum(len(vector_d) for vector_d in self._sent if vector_d is not None)
        self._beside = bytes_sent(state.rest)
        self._download = BYTES_PER_PARAMETER * length + self._beside
        #: Bytes that each client of the round receives beside the model.
        self.more_bytes = BYTES_PER_PARAMETER * (length - engine.num_params)
        self._statistics = BYTES_OF_STATISTICS + 8 * self._squares
        self._asked_down = 0
        self._asked_up = 0
        self._table: Training | None = None
        self._reports = Reports.make(0)

    def drifts(self, client_n: IntArray) -> Params | None:
        """What moves these clients' models beside their gradients, see ``Plan.drifts``."""
        return self._plan.drifts(self._state, client_n)

    def reports(self) -> Reports:
        """The screened reports of all m clients, which download the model and send statistics."""
        if self._table is None:
            self._count(self._plan.population.num_clients, self._statistics + 8)
            self._table, self._reports, mean_d = self._train_all()
            self._measure_deviations(self._table.update_nd, mean_d)
        return self._reports

    def _train_all(self) -> tuple[Training, Reports, FloatArray]:
        """Everybody's training, screened reports, and the weighted mean of the usable updates."""
        m = self._plan.population.num_clients
        d = self._engine.num_params
        weight_m = self._plan.population.weight_m
        if m * d * BYTES_PER_PARAMETER <= TABLE_BYTES:
            block = m
            update_md = np.empty((m, d), np.float32)
        else:
            block = self._plan.n
            update_md = mapped_table(m, d, self._folder)
        total_d = np.zeros(d)
        # As they were sent, too: ``train`` hands these on, and ``close_round`` screens them itself.
        raw = []
        rest_m: list[Arrays] = []
        screened = []
        for first in range(0, m, block):
            client_k = np.arange(first, min(first + block, m))
            training = self.train(client_k)
            update_md[client_k] = training.update_nd
            raw.append(training.reports)
            rest_m.extend(training.rest_n)
            once_k = np.ones(len(client_k))
            cohort = Cohort(client_k, once_k.astype(np.int64), once_k)
            replies = screen_replies(cohort, training.update_nd, training.reports, d)
            update_kd = replies.update_nd
            drifts = self.drifts(client_k)
            if drifts is not None:
                update_kd -= drifts
            screened.append(measure(update_kd, replies.reports))
            # In the order of clients, so that blocks of any size have the same bits.
            for i in np.flatnonzero(replies.reports.responded_n):
                total_d += weight_m[client_k[i]] * update_kd[i].astype(np.float64)
        reports = _joined(screened)
        if reports.responded_n.any():
            # Summed as np.average does, to the last bit.
            total_d /= weight_m[reports.responded_n][:, None].sum(axis=0)
        return Training(update_md, _joined(raw), rest_m), reports, total_d

    def _measure_deviations(self, update_md: Params, mean_d: FloatArray) -> None:
        """Fill in norm(u_i - ubar)^2 of all clients whose updates are usable."""
        # One by one: all differences would take more memory than the table.
        for client in np.flatnonzero(self._reports.responded_n):
            update_d = update_md[client]
            drifts = self.drifts(np.array([client]))
            if drifts is not None:
                update_d = update_d - drifts.reshape(len(update_d))
            deviation_d = update_d.astype(np.float64) - mean_d
            self._reports.squared_deviation_n[client] = np.sum(deviation_d**2)

    def losses(self, client_k: IntArray) -> FloatArray:
        """Evaluate the global model at the clients; each downloads it and sends one number."""
        self._count(len(client_k), 8)
        with self._timed():
            return self._engine.losses(self._sent.params_d, client_k, self._state.rest)

    def train(self, client_n: IntArray) -> Training:
        """The training of the selected clients; not repeated if ``reports`` has trained all."""
        if self._table is not None:
            return self._table.part(client_n)
        with self._timed():
            return self._engine.train(
                self._sent.params_d,
                self._state.round,
                client_n,
                self.drifts(client_n),
                self._squares,
                self._state.rest,
            )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the wall clock of the clients' work to ``client_seconds``."""
        began = time.perf_counter()
        yield
        self.client_seconds += time.perf_counter() - began

    def _count(self, clients: int, bytes_up: int) -> None:
        self._asked_down += clients * self._download
        self._asked_up += clients * bytes_up

    def traffic(self, cohort: Cohort, num_replies: int) -> tuple[int, int]:
        """Bytes down and up that a real round would move.

        The cohort has the model already if the sampler asked for reports or losses.
        """
        model = BYTES_PER_PARAMETER * self._engine.num_params
        if self._plan.codes(cohort):
            model = BYTES_OF_CODE * code_length(self._engine.num_params)
        reply = model + self._beside + self._statistics
        down = self._asked_down or len(cohort.client_n) * self._download
        return down, self._asked_up + num_replies * reply


def _joined(parts: list[Reports]) -> Reports:
    return Reports(*map(np.concatenate, zip(*parts, strict=True)))


def mapped_table(m: int, d: int, folder: Path | None) -> Params:
    """Zeros, float32 (m, d), in a file that has no name; an error if the disk is too full."""
    where = folder or Path(tempfile.gettempdir())
    with writing(where), tempfile.TemporaryFile(dir=where) as file:  # the mapping keeps it
        if hasattr(os, "posix_fallocate"):
            # Else a disk that fills up would end the process at a later write.
            os.posix_fallocate(file.fileno(), 0, m * d * BYTES_PER_PARAMETER)
        return np.memmap(file, dtype=np.float32, mode="w+", shape=(m, d))
