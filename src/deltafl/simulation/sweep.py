"""Playing many runs: side by side in processes of one thread each, resumable, nothing played twice.

::

    DIR.lock                              held by the process that plays the sweep
    DIR/runs/PART/SAMPLER-seedN.json      the record of a finished run (record.py); a run that has one is skipped
    DIR/unfinished/PART/SAMPLER-seedN/    the folder of a run that is not finished; continues from its checkpoint

With ``keep_folders``, as ``deltafl compare`` has it, there are no records, and the folders stay in ``DIR/runs/``.
"""

import json
import logging
import logging.handlers
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from ..errors import DeltaflError, require
from ..samplers import file_name
from .directory import RunDirectory, locked
from .divergence import DivergedError
from .record import UNFINISHED, RunStore, record_of, write_record
from .settings import RunSettings

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")
_log = logging.getLogger("deltafl")

_POLL_SECONDS = 1.0
_TAIL_BYTES = 65536


class Job(NamedTuple):
    """One run of a sweep. Jobs of one sweep differ in part, sampler or seed."""

    part: str
    settings: RunSettings

    @property
    def key(self) -> str:
        """Its place below ``runs/``, without the suffix."""
        name = f"{file_name(self.settings.sampler)}-seed{self.settings.seed}"
        return f"{self.part}/{name}" if self.part else name


class Progress(NamedTuple):
    """How far a sweep is: rounds played and rounds in all, runs done and in all, and the runs being played."""

    rounds_done: int
    rounds_total: int
    runs_done: int
    runs_total: int
    running: tuple[str, ...]


OnProgress = Callable[[Progress], None]


class _Player(NamedTuple):
    """How a sweep plays a job; goes to its processes."""

    folder: Path
    keep_folders: bool

    def place(self, job: Job) -> Path:
        """The folder of a job's run."""
        return self.folder / ("runs" if self.keep_folders else UNFINISHED) / job.key

    def is_done(self, job: Job) -> bool:
        """Whether a job is finished; a record or a run of other settings in its place is an error."""
        if self.keep_folders:
            return RunDirectory(self.place(job)).is_finished(job.settings.rounds or 0)
        return RunStore(self.folder).get(job) is not None

    def play(self, job: Job, on_round: Callable[..., None] = lambda *_: None) -> None:
        """Play a job in this process, from its last checkpoint if there is one."""
        from .run import begin, run_experiment
        from .setup import check_memory

        directory = RunDirectory(self.place(job))
        engine = engine_for(job.settings, directory.path)
        check_memory(job.settings, engine, self.folder)
        begin(directory, job.settings, engine.task)
        with suppress(DivergedError):  # the last line has the reason
            run_experiment(job.settings, engine, directory, on_round)
        if self.keep_folders:
            return
        write_record(record_of(job, directory, engine.task), RunStore(self.folder).path(job))
        directory.forget_memory()
        shutil.rmtree(directory.path)
        with suppress(OSError):  # other runs of the part are unfinished
            directory.path.parent.rmdir()


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    processes: "int | Processes",
    on_progress: OnProgress,
    *,
    keep_folders: bool = False,
) -> None:
    """Play those of the jobs that are not finished yet, in their order. Results do not depend on the processes.

    Args:
        jobs: What to play; their data are at hand.
        folder: Where the records are and go; locked unless ``processes`` are given, whose owner locks it.
        processes: Runs side by side, >= 1; as many as there are cores is best. With 1 they are played in this process.
        on_progress: Called about once a second.
        keep_folders: Whether the folders of finished runs stay, instead of records.

    Raises:
        DeltaflError: If a record or an unfinished run in the folder has other settings, a run fails, or another process
            plays in the folder.
    """
    for package in ("torch", "scipy"):
        require(package, "sim")
    player = _Player(folder, keep_folders)
    with ExitStack() as stack:
        if not isinstance(processes, Processes):
            stack.enter_context(locked(folder))
        waiting = [job for job in jobs if not player.is_done(job)]
        monitor = _Monitor(jobs, waiting, player, on_progress)
        monitor.report(())
        if waiting:
            if not isinstance(processes, Processes):
                processes = stack.enter_context(Processes(min(processes, len(waiting))))
            _hand_out(waiting, processes, player, monitor)
        with suppress(OSError):  # there is none, or it is not empty
            (folder / UNFINISHED).rmdir()


def run_job(job: Job, folder: Path) -> None:
    """Play one job in this process and write its record."""
    run_jobs([job], folder, 1, lambda _: None)


def require_devices(names: Iterable[str]) -> None:
    """Refuse, before anything is written, devices that are not here.

    Raises:
        DeltaflError: If this machine, or this PyTorch, does not have one.
    """
    from .training.route import find_device

    for name in dict.fromkeys(names):
        find_device(name)


@lru_cache(maxsize=1)
def _engine_of(settings: RunSettings, route: Any) -> "Engine":
    """The last engine of this process is used again by runs that differ in the sampler only."""
    from .setup import engine_of

    return engine_of(settings, route=route)


def engine_for(settings: RunSettings, place: Path) -> "Engine":
    """The engine of a run, made once in a process for all samplers; its route is that of an unfinished run's folder."""
    from .training.route import kept_route

    return _engine_of(settings.model_copy(update={"sampler": "full"}), kept_route(place))


def _hand_out(jobs: Sequence[Job], pool: "Processes", player: _Player, monitor: "_Monitor") -> None:
    """Hand the jobs out in their order; a failed one ends the sweep, and what is finished stays finished."""
    waiting, running = list(jobs), dict[Future[Any], Job]()
    while waiting or running:
        if pool.count == 1:
            job = waiting.pop(0)
            player.play(job, lambda *_, key=job.key: monitor.report((key,)))
            monitor.done.add(job.key)
        while waiting and len(running) < pool.count and pool.count > 1:
            job = waiting.pop(0)
            running[pool.submit(player.play, job)] = job
        done, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in done:
            key = running.pop(future).key
            pool.result(future, key)
            monitor.done.add(key)
        monitor.report([job.key for job in running.values()])


class Processes:
    """Processes that load torch once and play many jobs; their log is shown by this process.

    After an error or Ctrl-C the runs under way are ended at once: they continue from their checkpoints another time.

    Args:
        count: How many, >= 1; 1 is this process itself.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        _engine_of.cache_clear()
        if count == 1:
            return
        for library in ("OMP", "OPENBLAS", "MKL"):  # the processes inherit it: more threads would only wait for cores
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
        # A server that has imported torch, but has not used it, forks processes that are ready at once.
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(["deltafl.simulation.run"])
        messages = context.Queue()
        self._listener = logging.handlers.QueueListener(messages, _Forward())
        self._listener.start()
        self._pool = ProcessPoolExecutor(count, context, initializer=_start_process, initargs=(messages,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _engine_of.cache_clear()
        if self.count == 1:
            return
        if kind is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown()
        self._listener.stop()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a module in one of the processes, and wait for its result."""
        if self.count == 1:
            return function(*arguments)
        result: T = self.result(self.submit(function, *arguments), "the runs")
        return result

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in one of the processes; ``result`` gives what it returned or raised."""
        return self._pool.submit(_attempt, function, *arguments)

    @staticmethod
    def result(future: Future[Any], name: str) -> Any:
        """What a call returned; ``name`` is what was played, for people.

        Raises:
            DeltaflError: If the call raised one, or its process died.
            JobError: If the call raised another error.
        """
        try:
            failure, found = future.result()
        except BrokenProcessPool:
            raise DeltaflError(
                f"the process that played {name} died; if it was killed, memory may have run out: use fewer processes "
                "and give the same command again. In a script of your own, start below: if __name__ == '__main__':"
            ) from None
        if isinstance(failure, DeltaflError):
            raise failure
        if failure is not None:
            from .workers import JobError

            raise JobError(failure)
        return found


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """In a process of the pool: errors come back as values, for tracebacks cannot be sent."""
    from .workers import failure_of

    try:
        return None, function(*arguments)
    except DeltaflError as error:
        return DeltaflError(str(error)), None
    except Exception as error:
        return failure_of(error), None


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)


def _start_process(messages: Any) -> None:
    """In a process of the pool: send its log to the parent, and end with it, even if it is killed."""
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)  # else two sweeps would write the same run

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=end_with_parent, daemon=True).start()
    _log.setLevel(logging.INFO)
    _log.addHandler(logging.handlers.QueueHandler(messages))
    _log.propagate = False


class _Monitor:
    """Reads how far runs are from their files; ``done`` has the keys of finished jobs."""

    def __init__(self, jobs: Sequence[Job], waiting: Sequence[Job], player: _Player, on_progress: OnProgress) -> None:
        self._jobs, self._player, self._on_progress = jobs, player, on_progress
        self.done = {job.key for job in jobs} - {job.key for job in waiting}
        self._last = 0.0

    def report(self, running: Sequence[str]) -> None:
        """Report the progress, at most once in a while."""
        if running and time.monotonic() - self._last < _POLL_SECONDS:
            return
        self._last = time.monotonic()
        rounds = total = 0
        for job in self._jobs:
            planned = job.settings.rounds or 0
            total += planned
            rounds += planned if job.key in self.done else rounds_played(self._player.place(job))
        self._on_progress(Progress(rounds, total, len(self.done), len(self._jobs), tuple(running)))


def rounds_played(path: Path) -> int:
    """The last round in an unfinished run's ``timings.jsonl``; 0 if there is none."""
    try:
        with (path / "timings.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = [line for line in file.read().split(b"\n") if line.endswith(b"}")]
        return int(json.loads(lines[-1])["round"]) if lines else 0
    except (OSError, ValueError):  # not there, or a line that is being written
        return 0
