"""Playing many runs: side by side in processes of one thread each, resumable, nothing played twice.

A finished run has a record (``record.py``) and is skipped; others continue from the checkpoint in
their folder. With ``keep_folders``, as ``deltafl compare`` has it, there are no records, and the
folders stay in ``DIR/runs/``.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import require
from .callback import OnRound, RoundDone
from .directory import RunDirectory, locked
from .processes import Processes, result, send
from .progress import OnProgress, Progress
from .record import UNFINISHED, Job, RunStore

_POLL_SECONDS = 1.0


class Player(NamedTuple):
    """How a sweep plays a job; goes to its processes."""

    folder: Path
    keep_folders: bool = False

    def place(self, job: Job) -> Path:
        """The folder of a job's run."""
        part = "runs" if self.keep_folders else UNFINISHED
        return self.folder / part / job.key

    def is_done(self, job: Job) -> bool:
        """Whether a job is finished."""
        if self.keep_folders:
            return RunDirectory(self.place(job)).is_finished(job.settings.rounds or 0)
        return RunStore(self.folder).get(job) is not None

    def play(self, job: Job, on_round: OnRound) -> None:
        """Play a job in this process, from its last checkpoint if there is one."""
        # By name: it loads torch, which the process that only waits for others does without.
        import_module(f"{__package__}.run").play_job(self, job, on_round)


def _play_and_send(player: Player, job: Job) -> None:
    """In another process: play a job and send its rounds, and then its key."""
    player.play(job, send)
    send(job.key)


def run_jobs(jobs: Sequence[Job], folder: Path, processes: int, on_progress: OnProgress) -> None:
    """Play those of the jobs that are not finished yet, in their order. Results do not depend on
    the processes.

    Args:
        jobs: What to play.
        folder: Where the records are and go.
        processes: Runs side by side, >= 1; as many as there are cores is best. With 1 they are
            played in this process.
        on_progress: Called about once a second.

    Raises:
        DeltaflError: If what is in the folder has other settings, a run fails, or another process
            plays there.
    """
    require_simulator()
    with locked(folder), side_by_side(min(processes, len(jobs))) as pool:
        play_jobs(jobs, Player(folder), pool, on_progress)
        with suppress(OSError):  # there is none, or it is not empty
            (folder / UNFINISHED).rmdir()


def require_simulator() -> None:
    """Refuse to play, before anything is written, without the packages that it needs."""
    for package in ("torch", "scipy"):
        require(package, "sim")


def count_processes(asked: int | None, device: str | None) -> int:
    """How many runs are played side by side: ``asked``, else one per core; one alone on a GPU."""
    if asked:
        return asked
    if device not in (None, "cpu"):
        return 1
    return os.cpu_count() or 1


@contextmanager
def side_by_side(count: int) -> Iterator[Processes | None]:
    """Processes that play runs; None for this process alone."""
    if count > 1:
        with Processes(count) as pool:
            yield pool
        return
    from .setup import forget_engine  # loads torch

    forget_engine()
    try:
        yield None
    finally:
        forget_engine()


def play_jobs(
    jobs: Sequence[Job],
    player: Player,
    pool: Processes | None,
    on_progress: OnProgress,
    on_round: OnRound = lambda _: None,
) -> None:
    """Play unfinished jobs in their order; one that fails ends the sweep, and what is finished
    stays finished.

    ``on_round`` is called here for each round; with a pool up to a second later, a run's rounds in
    their order.
    """
    waiting = [job for job in jobs if not player.is_done(job)]
    report = _Report(player, jobs, waiting, on_progress)
    if pool is not None:
        _play_side_by_side(waiting, player, pool, report, on_round)
        return
    for job in waiting:

        def after_round(round_done: RoundDone, key: str = job.key) -> None:
            on_round(round_done)
            report.running(key)

        player.play(job, after_round)
        report.finished(job.key)


class _Report:
    """Tells ``on_progress`` how far the jobs are."""

    def __init__(
        self,
        player: Player,
        jobs: Sequence[Job],
        waiting: Sequence[Job],
        on_progress: OnProgress,
    ) -> None:
        self._place_of = {job.key: player.place(job) for job in jobs}
        self._rounds_of = {job.key: job.settings.rounds or 0 for job in jobs}
        self._done = self._rounds_of.keys() - {job.key for job in waiting}
        self._on_progress = on_progress
        self._tell()

    def finished(self, key: str) -> None:
        """A job has been played."""
        self._done.add(key)
        self._tell()

    def running(self, *keys: str) -> None:
        """These jobs are being played; told about once a second."""
        if time.monotonic() - self._told >= _POLL_SECONDS:
            self._tell(*keys)

    def _tell(self, *running: str) -> None:
        self._told = time.monotonic()
        played = 0
        for key, rounds in self._rounds_of.items():
            played += rounds if key in self._done else rounds_played(self._place_of[key])
        total = sum(self._rounds_of.values())
        self._on_progress(Progress(played, total, len(self._done), len(self._rounds_of), running))


def _play_side_by_side(
    waiting: list[Job], player: Player, pool: Processes, report: _Report, on_round: OnRound
) -> None:
    running = dict[Future[Any], Job]()
    received = set[str]()

    def receive(keys: Sequence[str] = ()) -> None:
        """Pass on the rounds that have come, and wait for all of those jobs."""
        for sent in pool.received(lambda: received.issuperset(keys)):
            if isinstance(sent, RoundDone):
                on_round(sent)
            else:
                received.add(sent)

    while waiting or running:
        while waiting and len(running) < pool.count:
            job = waiting.pop(0)
            running[pool.submit(_play_and_send, player, job)] = job
        for future in wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            result(future)
            receive([job.key])
            report.finished(job.key)
        receive()
        report.running(*(job.key for job in running.values()))


def rounds_played(path: Path) -> int:
    """The rounds in an unfinished run's ``timings.jsonl``, whose first line is that of round 0."""
    try:
        return max(0, (path / "timings.jsonl").read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def require_devices(names: Iterable[str]) -> None:
    """Refuse, before anything is written, devices that this machine or this PyTorch does not
    have.
    """
    from .training.route import find_device

    for name in dict.fromkeys(names):
        find_device(name)
