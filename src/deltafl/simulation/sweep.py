"""Running a sweep: its runs side by side in processes of one thread each, resumable, nothing done twice.

::

    DIR/runs/PART/SAMPLER-seedN.json          the record of a finished run (record.py); what has one is skipped
    DIR/unfinished/PART/SAMPLER-seedN/        the run directory of one that is not finished; goes on from its checkpoint
    DIR/unfinished/PART/SAMPLER-seedN.lock    held by the process that runs it: several sweeps can share a folder
    DIR/.lock                                 held while one of them writes a file of the whole folder
"""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ..errors import DeltaflError
from .divergence import DivergedError
from .record import UNFINISHED, RunStore, record_of, write_record
from .settings import RunSettings

_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_TAIL_BYTES = 65536


class Job(NamedTuple):
    """One run of a sweep."""

    part: str
    settings: RunSettings

    @property
    def key(self) -> str:
        """Its place below ``runs/``, without the suffix."""
        return f"{self.part}/{self.settings.sampler}-seed{self.settings.seed}"


class Progress(NamedTuple):
    """How far a sweep is: rounds played and rounds in all, runs done and in all, and what runs now."""

    rounds_done: int
    rounds_total: int
    runs_done: int
    runs_total: int
    running: tuple[str, ...]


OnProgress = Callable[[Progress], None]
IsPacked = Callable[[Job, Path], bool]


def require_devices(names: Iterable[str]) -> None:
    """Refuse, before anything is written, devices that are not here.

    Raises:
        DeltaflError: If this machine, or this PyTorch, does not have one.
    """
    from .training.devices import find_device

    for name in dict.fromkeys(names):
        find_device(name)


def run_jobs(
    jobs: Sequence[Job], folder: Path, processes: int, on_progress: OnProgress, is_packed: IsPacked | None = None
) -> None:
    """Run those of the jobs that have no record yet, in their order.

    What another process is running in this folder is left to it and waited for, or taken over if that process ends.

    Args:
        jobs: What to run; their data are at hand.
        folder: Where the records are and go.
        processes: Runs side by side, >= 1.
        on_progress: Told about once a second.
        is_packed: Whether a job without a record was finished and its record packed away; sent to the processes.

    Raises:
        DeltaflError: If a record or an unfinished run in the folder has other settings, or a run fails.
    """
    store = RunStore(folder)
    waiting = [job for job in jobs if store.get(job) is None]
    watch = _Watch(jobs, folder, on_progress)
    watch.tell(())
    if waiting:
        _run_jobs(waiting, folder, min(processes, len(waiting)), watch, is_packed)
    with suppress(OSError):  # there is none, or it is not empty
        (folder / UNFINISHED).rmdir()


def run_job(job: Job, folder: Path, is_packed: IsPacked | None = None) -> bool:
    """Run one job in this process, from its last checkpoint if there is one, and write its record.

    Returns:
        Whether it is finished now; False if another process is running it.
    """
    store = RunStore(folder)
    place = store.unfinished(job)
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place.with_name(f"{place.name}.lock"))
    try:
        with lock.acquire(timeout=0):
            # Another process may have finished it before we got the lock, and have packed its record since.
            if store.get(job) is None and not (is_packed and is_packed(job, folder)):
                _run_alone(job, store)
            Path(lock.lock_file).unlink()
    except Timeout:
        return False
    with suppress(OSError):  # other runs of the part are unfinished
        place.parent.rmdir()
    return True


def _run_alone(job: Job, store: RunStore) -> None:
    from .experiment import begin, run_experiment
    from .records import RunDirectory
    from .setup import check_memory, engine_of

    directory = RunDirectory(store.unfinished(job))
    engine = engine_of(job.settings, folder=directory.path)
    check_memory(job.settings, engine, store.folder)
    begin(directory, job.settings, engine.task)
    with suppress(DivergedError):  # the record says so
        run_experiment(job.settings, engine, directory, lambda *_: None)
    write_record(record_of(job, directory, engine.task), store.path(job))
    directory.forget_memory()
    shutil.rmtree(directory.path)


def _run_jobs(jobs: Sequence[Job], folder: Path, processes: int, watch: "_Watch", is_packed: IsPacked | None) -> None:
    """Hand the jobs out in their order; a failed one ends the sweep, and what is finished stays finished."""
    spawn = multiprocessing.get_context("spawn")
    with _ended_with_us(ProcessPoolExecutor(processes, spawn, initializer=_end_with_parent)) as pool:
        waiting, elsewhere, running = list(jobs), list[Job](), dict[Future[bool], Job]()
        while waiting or running or elsewhere:
            if not waiting and not running:
                time.sleep(_POLL_SECONDS)
                waiting, elsewhere = elsewhere, []
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running[pool.submit(run_job, job, folder, is_packed)] = job
            done, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                if not _result(future, job):
                    elsewhere.append(job)
                    watch.leave(job)
            watch.tell([job.key for job in [*running.values(), *elsewhere]])


def _result(future: Future[bool], job: Job) -> bool:
    try:
        return future.result()
    except BrokenProcessPool:
        raise DeltaflError(
            f"the process that ran {job.key} died; if it was killed, memory may have run out: "
            "use fewer processes and give the same command again"
        ) from None


@contextmanager
def _ended_with_us(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """After an error or Ctrl-C the runs under way are ended at once: they go on from their checkpoints another time."""
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    pool.shutdown()


def _end_with_parent() -> None:
    """In a process of the pool: end when the parent is gone, even killed, or two sweeps would write the same run."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=watch, daemon=True).start()


class _Watch:
    """Reads how far runs are from their files, which are written anyway."""

    def __init__(self, jobs: Sequence[Job], folder: Path, on_progress: OnProgress) -> None:
        self._jobs, self._store, self._on_progress = jobs, RunStore(folder), on_progress
        self._done, self._left = set[str](), set[str]()
        self._told = 0.0

    def leave(self, job: Job) -> None:
        """Say once that another process is running the job."""
        if job.key not in self._left:
            self._left.add(job.key)
            _log.info(
                "another process is running %s in %s: this one leaves it to that one", job.key, self._store.folder
            )

    def tell(self, running: Sequence[str]) -> None:
        """Tell how far it is, at most once in a while."""
        if running and time.monotonic() - self._told < _POLL_SECONDS:
            return
        self._told = time.monotonic()
        rounds = total = 0
        for job in self._jobs:
            planned = job.settings.rounds or 0
            total += planned
            if job.key not in self._done and self._store.get(job) is not None:
                self._done.add(job.key)
            rounds += planned if job.key in self._done else rounds_played(self._store.unfinished(job))
        self._on_progress(Progress(rounds, total, len(self._done), len(self._jobs), tuple(running)))


def rounds_played(path: Path) -> int:
    """The last round in an unfinished run's ``timings.jsonl``; 0 if there is none."""
    try:
        with (path / "timings.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = [line for line in file.read().split(b"\n") if line.endswith(b"}")]
        return int(json.loads(lines[-1])["round"]) if lines else 0
    except (OSError, ValueError):  # not there, or a line that is being written
        return 0
