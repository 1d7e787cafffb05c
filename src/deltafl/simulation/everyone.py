"""Everybody's updates of one round where they are too many for RAM: a block of clients at a time, the rows in a file.

Two passes. The first trains the clients block by block, writes their rows to a file and adds up ubar = sum w_i u_i; the
second reads the rows again for norm(u_i - ubar)^2, which norm(u_i)^2 - 2 <u_i, ubar> + norm(ubar)^2 would give with few
digits where updates are alike. So RAM holds a block of updates and two models, the disk m updates, and no client is
trained twice. The file has no name: nothing of it is left however the process ends.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import DeltaflError
from ..scale.memory_budget import human
from ..server.screening import measure, screen_replies
from ..types import BoolArray, Cohort, FloatArray, IntArray, Params, Population, Reports
from .engine import Training, reports_of

_ROW = np.dtype(np.float32)


class Everyone:
    """The training of all m clients of one round.

    Args:
        train: Trains some clients from the round's model.
        population: The clients and their weights.
        num_params: d.
        block: How many clients are trained, and held in RAM, at a time, >= 1.
        folder: Where the file goes; the system's folder for temporary files if None.

    Raises:
        DeltaflError: If the disk has no room for the file.
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
                "make room there, or choose a sampler that does not look at all updates, such as 'pracdelta'"
            )
        self._file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115  (it lives as long as this object)
        weakref.finalize(self, self._file.close)
        self._loss_m, self._square_loss_m, self._step_variance_m = np.zeros(m), np.zeros(m), np.zeros(m)
        self._num_steps_m = np.zeros(m, dtype=np.int64)

    def reports(self, known_d: Params | None) -> Reports:
        """Train everyone: their screened reports, with deviations from ubar of those who responded.

        Args:
            known_d: What every update holds that the server knew before, taken off before norms are measured.
        """
        weight_m = self._population.weight_m
        total_d, parts = np.zeros(self._num_params), []
        for client_k in self._blocks():
            training = self._train(client_k)
            self._keep(client_k, training)
            update_kd, reports = self._screened(client_k, training, known_d)
            for i in np.flatnonzero(reports.responded_n):
                total_d += weight_m[client_k[i]] * update_kd[i].astype(np.float64)
            parts.append(reports)
        reports = Reports(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        if not reports.responded_n.any():
            return reports
        # The sum that np.average divides by, so that the bits are those of a table in RAM.
        mean_d = total_d / weight_m[reports.responded_n][:, None].sum(axis=0)
        return reports._replace(squared_deviation_n=self._deviations(mean_d, reports.responded_n, known_d))

    def of(self, client_n: IntArray) -> Training:
        """The work of some clients, read back."""
        return Training(
            update_nd=self._rows(client_n),
            loss_n=self._loss_m[client_n],
            square_loss_n=self._square_loss_m[client_n],
            step_variance_n=self._step_variance_m[client_n],
            num_steps_n=self._num_steps_m[client_n],
        )

    def _blocks(self) -> Iterator[IntArray]:
        m = self._population.num_clients
        return (np.arange(first, min(first + self._block, m)) for first in range(0, m, self._block))

    def _screened(self, client_k: IntArray, training: Training, known_d: Params | None) -> tuple[Params, Reports]:
        """The usable updates of a block and its reports, as ``close_round`` would take them."""
        k = len(client_k)
        cohort = Cohort(client_k, np.ones(k, dtype=np.int64), np.ones(k))
        replies = screen_replies(cohort, training.update_nd, reports_of(training), self._num_params, drift_d=known_d)
        return replies.update_nd, measure(replies.update_nd, replies.reports)

    def _deviations(self, mean_d: FloatArray, responded_m: BoolArray, known_d: Params | None) -> FloatArray:
        squared_deviation_m = np.zeros(len(responded_m))
        for client in np.flatnonzero(responded_m):
            update_d = self._rows(np.array([client]))[0]
            if known_d is not None:
                update_d -= known_d
            squared_deviation_m[client] = np.sum((update_d.astype(np.float64) - mean_d) ** 2)
        return squared_deviation_m

    def _keep(self, client_k: IntArray, training: Training) -> None:
        self._file.seek(int(client_k[0]) * self._num_params * _ROW.itemsize)
        self._file.write(np.ascontiguousarray(training.update_nd, dtype=_ROW).data)
        self._loss_m[client_k], self._square_loss_m[client_k] = training.loss_n, training.square_loss_n
        self._step_variance_m[client_k] = training.step_variance_n
        self._num_steps_m[client_k] = training.num_steps_n

    def _rows(self, client_n: IntArray) -> Params:
        row_nd = np.empty((len(client_n), self._num_params), dtype=_ROW)
        for row_d, client in zip(row_nd, client_n.tolist(), strict=True):
            self._file.seek(client * row_d.nbytes)
            self._file.readinto(row_d.data)
        return row_nd
