"""Playing many runs: side by side in processes of one thread each, resumable, nothing played twice.

A finished run has a record (``record.py``) and is skipped; others continue from the checkpoint in
their folder. With ``keep_folders``, as ``deltafl compare`` has it, there are no records, and the
folders stay in ``DIR/runs/``.
"""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, wait
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import DeltaflError
from ...scale.stretches import cores_allowed
from ...store.files import remove_empty
from ...store.lines import NOTHING, line_of, whole_lines
from ...store.room import cores_of_quota
from ...streams import ONE_AT_A_TIME
from ...types import is_whole
from ..callbacks.callback import OnRound, RoundDone, round_done
from ..folder.checkpoint import CURE, read_checkpoint
from ..folder.directory import locked
from ..folder.lines import RoundLine, TimingLine
from ..folder.own_code import Code
from ..folder.record import UNFINISHED, Job
from ..settings import RunSettings
from ..view.progress import OnProgress, Progress
from .player import Player, require_simulator
from .processes import Processes, result

_POLL_SECONDS = 1.0
#: So many times a run is played again because its process was killed, while no other run ends.
_PATIENCE = 3


def _play(player: Player, job: Job) -> None:
    player.play(job, lambda _: None)  # its rounds are read from its folder


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    processes: int,
    on_progress: OnProgress,
    code: Code | None = None,
) -> None:
    """Play the jobs that are not finished yet, in their order.

    Results do not depend on the processes.

    Args:
        jobs: What to play.
        folder: Where the records are and go.
        processes: Runs side by side, >= 1; as many as there are cores is best. With 1 they are
            played in this process.
        on_progress: Called about once a second.
        code: The user's own; each run finds out for itself if it is left out.

    Raises:
        DeltaflError: If what is in the folder has other settings, a run fails, or another process
            plays there.
    """
    require_simulator()
    with locked(folder), side_by_side(min(processes, len(jobs))) as pool:
        play_jobs(jobs, Player(folder, code=code), pool, on_progress)
        unfinished = folder / UNFINISHED
        for place in (*unfinished.glob("*"), unfinished):
            remove_empty(place)


def count_processes(asked: Any, device: str | None) -> int:
    """How many runs are played side by side: ``asked``, else one per core that this process may
    use; one alone on a GPU, and in a process that may start none, such as those of a pool.
    """
    if asked is not None:
        if not is_whole(asked) or asked < 1:
            raise DeltaflError(
                f"processes is {asked!r:.60}; write a whole number from 1 on, or leave it out"
            )
        return int(asked)
    if device not in (None, "cpu") or multiprocessing.current_process().daemon:
        return 1
    return min(filter(None, (cores_allowed(), cores_of_quota())))


@contextmanager
def side_by_side(count: int) -> Iterator[Executor | None]:
    """Processes that play runs; None for this process alone."""
    if count > 1:
        with Processes(count) as pool:
            yield pool
        return
    setup = import_module("deltafl.simulation.setup")  # as for a run: it loads torch
    with ONE_AT_A_TIME:
        setup.forget_engine()
        try:
            yield None
        finally:
            setup.forget_engine()


def play_jobs(
    jobs: Sequence[Job],
    player: Player,
    pool: Executor | None,
    on_progress: OnProgress,
    on_round: OnRound = lambda _: None,
) -> None:
    """Play unfinished jobs in their order; one that fails ends the sweep.

    What is finished stays finished. A job whose process is killed is played again, from its
    checkpoint.

    ``pool`` may be any executor whose processes see the folder. ``on_round`` is called here for
    each round; with a pool up to a second later, a run's rounds in their order, and only where
    folders are kept.
    """
    done = {job.key for job in jobs if player.is_done(job)}
    waiting = [job for job in jobs if job.key not in done]
    for job in jobs:
        # A process that was killed once it had recorded a run has left the run's folder.
        if job.key in done and not player.keep_folders and player.is_left(job):
            player.clear(job)

    def tell(*running: str) -> None:
        played = 0
        for job in jobs:
            if job.key in done:
                played += job.settings.rounds or 0
            else:
                # By its file, as another process may be playing it.
                played += rounds_played(player.place(job))
        total = sum((job.settings.rounds or 0) for job in jobs)
        on_progress(Progress(played, total, len(done), len(jobs), running))

    def finished(job: Job) -> None:
        done.add(job.key)
        tell()

    tell()
    if pool is not None:
        _play_side_by_side(waiting, player, pool, tell, finished, on_round)
        return
    told = time.monotonic()
    for job in waiting:

        def after_round(played: RoundDone, key: str = job.key) -> None:
            nonlocal told
            on_round(played)
            if time.monotonic() - told >= _POLL_SECONDS:
                told = time.monotonic()
                tell(key)

        player.play(job, after_round)
        finished(job)


def _play_side_by_side(
    waiting: Sequence[Job],
    player: Player,
    pool: Executor,
    tell: Callable[..., None],
    finished: Callable[[Job], None],
    on_round: OnRound,
) -> None:
    readers = [
        RoundReader(
            player.place(job),
            job.settings,
            on_round,
        )
        for job in waiting
    ]
    # All at once: how many run side by side is the executor's affair.
    playing = {pool.submit(_play, player, job): job for job in waiting}
    lost = Counter[str]()
    while playing:
        # No ``as_completed``: progress and rounds are told about once a second, too.
        ended = wait(playing, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done
        for reader in readers:
            reader.read()
        for future in ended:
            job = playing.pop(future)
            if isinstance(future.exception(), BrokenExecutor) and lost[job.key] < _PATIENCE:
                # One process was killed, and the executor gave up what all of them did.
                lost[job.key] += 1
                playing[pool.submit(_play, player, job)] = job
                continue
            result(future)
            # Only losses without a run that ended well in between count.
            lost.clear()
            finished(job)
        tell(*(job.key for future, job in playing.items() if future.running()))


class RoundReader:
    """Reads the rounds of a run that another process plays, in the run's folder.

    A run that goes on from a checkpoint cuts off what follows it and writes those rounds again. Up
    to the last one their bytes are the same, so the place stays right that has been read in them.
    The last line may say how the run ended, and says so no more when it goes on: it is read again.
    """

    def __init__(self, folder: Path, settings: RunSettings, on_round: OnRound) -> None:
        self._folder = folder
        self._settings = settings
        self._on_round = on_round
        self._known = rounds_played(folder)
        mark = read_checkpoint(folder)
        # Without a checkpoint it begins anew.
        self._place = 0 if mark is None else mark.files.get("rounds.jsonl", NOTHING).length

    def read(self) -> None:
        """Pass on the rounds that have been written since the last call."""
        lines = whole_lines(self._folder / "rounds.jsonl", self._place)
        timed = self._folder / "timings.jsonl"
        timings = [
            line_of(text, TimingLine, str(timed), CURE) for text in lines and whole_lines(timed)
        ]
        seconds = {timing["round"]: timing["seconds"] for timing in timings}
        for text in lines:
            line = line_of(text, RoundLine, str(self._folder), CURE)
            if line["round"] not in seconds:  # its timing is written next
                return
            if "suspect" not in line:
                self._place += len(text)
            if line["round"] > self._known:
                self._known = line["round"]
                self._on_round(
                    round_done(
                        self._settings,
                        line,
                        seconds[line["round"]],
                    )
                )


def rounds_played(path: Path) -> int:
    """The rounds in an unfinished run's ``timings.jsonl``, whose first line is that of round 0."""
    return max(0, len(whole_lines(path / "timings.jsonl")) - 1)


def require_devices(names: Iterable[str]) -> None:
    """Refuse devices that this machine or this PyTorch does not have."""
    from ..training.devices import find_device

    for name in dict.fromkeys(names):
        find_device(name)
