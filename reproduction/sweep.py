"""Running a sweep: its runs side by side in processes of one thread each, resumable, nothing done twice.

::

    DIR/config.toml                           every setting of every part (configuration.py)
    DIR/runs/PART/SAMPLER-seedN.json          the record of a finished run (record.py); what has one is skipped
    DIR/unfinished/PART/SAMPLER-seedN/        the run directory of one that is not finished; goes on from its checkpoint
    DIR/unfinished/PART/SAMPLER-seedN.lock    held by the process that runs it: several sweeps can share a folder
    DIR/unfinished/files.lock                 held while one of them writes a file of the whole folder
"""

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
from typing import Any, NamedTuple

from deltafl.errors import DeltaflError, require
from deltafl.simulation.divergence import DivergedError
from deltafl.simulation.lock import only_one
from deltafl.simulation.settings import CompareSettings

from .configuration import write_config
from .kept import UNFINISHED, find_record, is_done, record_path, rounds_played
from .record import HOW, RunRecord, record_of, write_record
from .spec import Experiment, Job, Sweep

_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


class Progress(NamedTuple):
    """How far a sweep is: rounds played and rounds in all, runs done and in all, and what runs now."""

    rounds_done: int
    rounds_total: int
    runs_done: int
    runs_total: int
    running: tuple[str, ...]


OnProgress = Callable[[Progress], None]
IsPacked = Callable[[Job, Path], bool]


def make_sweep(experiment: Experiment, scale: str, parts: Sequence[str] | None = None, **own: Any) -> Sweep:
    """The sweep of an experiment at a scale: all of its parts, or the named ones.

    Args:
        experiment: The experiment.
        scale: One of ``spec.SCALES``.
        parts: Names of parts; None for those of the scale.
        own: Settings of the user that win, such as ``data_dir`` and ``seeds``.
    """
    names = experiment.part_names(scale) if parts is None else tuple(parts)
    return Sweep(experiment, scale, {part: experiment.comparison(part, scale, **own) for part in names})


def run_sweep(sweep: Sweep, folder: Path, processes: int, on_progress: OnProgress) -> dict[str, str]:
    """Run what has no record yet.

    Args:
        sweep: What to run.
        folder: Where the records are and go.
        processes: Runs side by side, >= 1; as many as there are cores is best.
        on_progress: Told about once a second.

    Returns:
        The parts whose data are not at hand, with the reason; they are left out.

    Raises:
        DeltaflError: If a record or an unfinished run in the folder has other settings, or no part can be run.
    """
    for package, extra in (("torch", "sim"), ("safetensors", "sim"), ("scipy", "sim")):
        require(package, extra)
    jobs = list(sweep.jobs())
    waiting = [job for job in jobs if not is_done(job, folder)]
    require_devices(job.settings.device for job in waiting)
    not_run = _missing_data(sweep, waiting)
    if len(not_run) == len(sweep.comparisons):
        raise DeltaflError(next(iter(not_run.values()), "there is nothing to run: no part was chosen"))
    folder.mkdir(parents=True, exist_ok=True)
    plain = {part: _plain(settings) for part, settings in sweep.comparisons.items()}
    write_config(sweep.experiment, sweep.scale, plain, folder)
    run_jobs([job for job in jobs if job.part not in not_run], folder, processes, on_progress)
    return not_run


def require_devices(names: Iterable[str]) -> None:
    """Refuse, before anything is written, devices that are not here.

    Raises:
        DeltaflError: If this machine, or this PyTorch, does not have one.
    """
    from deltafl.simulation.training.devices import find_device

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
    waiting = [job for job in jobs if not is_done(job, folder)]
    watch = _Watch(jobs, folder, on_progress)
    watch.tell(())
    if waiting:
        _run_jobs(waiting, folder, min(processes, len(waiting)), watch, is_packed)
    with suppress(OSError):  # there is none, or it is not empty
        (folder / UNFINISHED).rmdir()


def records_of(sweep: Sweep, folder: Path) -> list[RunRecord]:
    """The records that a sweep has so far, in the order of its jobs."""
    return [record for job in sweep.jobs() if (record := find_record(job, folder)) is not None]


def run_job(job: Job, folder: Path, is_packed: IsPacked | None = None) -> bool:
    """Run one job in this process, from its last checkpoint if there is one, and write its record.

    Returns:
        Whether it is finished now; False if another process is running it.
    """
    with only_one(folder / UNFINISHED / f"{job.key}.lock") as ours:
        # Another process may have finished it before we got the lock, and have packed its record since.
        if ours and not is_done(job, folder) and not (is_packed and is_packed(job, folder)):
            _run_alone(job, folder)
    return ours


def _run_alone(job: Job, folder: Path) -> None:
    from deltafl.simulation.experiment import begin, run_experiment
    from deltafl.simulation.records import RunDirectory
    from deltafl.simulation.setup import check_memory, engine_of

    directory = RunDirectory(folder / UNFINISHED / job.key)
    engine = engine_of(job.settings, folder=directory.path)
    check_memory(job.settings, engine, folder)
    begin(directory, job.settings, engine.task)
    with suppress(DivergedError):  # the record says so
        run_experiment(job.settings, engine, directory, lambda *_: None)
    write_record(record_of(job, directory, engine.task), record_path(job, folder))
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
        self._jobs, self._folder, self._on_progress = jobs, folder, on_progress
        self._done, self._left = set[str](), set[str]()
        self._told = 0.0

    def leave(self, job: Job) -> None:
        """Say once that another process is running the job."""
        if job.key not in self._left:
            self._left.add(job.key)
            _log.info("another process is running %s in %s: this one leaves it to that one", job.key, self._folder)

    def tell(self, running: Sequence[str]) -> None:
        """Tell how far it is, at most once in a while."""
        if running and time.monotonic() - self._told < _POLL_SECONDS:
            return
        self._told = time.monotonic()
        rounds = total = 0
        for job in self._jobs:
            planned = job.settings.rounds or 0
            total += planned
            if job.key not in self._done and record_path(job, self._folder).exists():
                self._done.add(job.key)
            rounds += planned if job.key in self._done else rounds_played(self._folder / UNFINISHED / job.key)
        self._on_progress(Progress(rounds, total, len(self._done), len(self._jobs), tuple(running)))


def _missing_data(sweep: Sweep, waiting: Sequence[Job]) -> dict[str, str]:
    """The parts whose task cannot be made here, with the sentence why; of the others, what memories take is told."""
    from deltafl.simulation.setup import task_of, tell_memory

    reasons = {}
    for part in sweep.comparisons:
        if runs := [job.settings for job in waiting if job.part == part]:
            try:
                task = task_of(runs[0])
            except DeltaflError as error:
                reasons[part] = str(error)
            else:
                tell_memory(part, runs, task)
    return reasons


def _plain(settings: CompareSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude_none=True, exclude=HOW)
