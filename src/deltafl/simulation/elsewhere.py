"""Runs on other machines, by any executor: a job carries what it needs, its files come back.

The executor's workers need this package and a data set that is no file of the job, nothing else: no
common disk and no common folder. On a worker a process of its own plays the run, below a temporary
folder in which paths are those of this machine, so that relative names mean what they mean here.
"""

import os
import pickle
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from .. import __version__
from ..errors import DeltaflError, explained, in_one_line
from ..store.files import below, make_folder, read_bytes, write_atomically
from ..store.own_python import allow, allowed, files_named
from ..tasks.registry import added_tasks, register
from .directory import RunDirectory, locked
from .processes import LostRun, as_sent, one_thread, packed
from .record import Job
from .sweep import ORPHAN_SECONDS, Player
from .world import tables_of

_POLL_SECONDS = 0.1
_PARCEL = "parcel"
_ENDED = "ended"


class Parcel(NamedTuple):
    """A job, and all that its settings name."""

    player: Player
    job: Job
    current: Path  #: the folder that names are relative to
    tasks: list[Any]
    allowed: frozenset[Path] | None
    files: Mapping[Path, bytes]  #: by absolute path, those of an unfinished run included


class Elsewhere(Executor):
    """Plays runs with an executor of the user's, whose futures have ``done`` and ``result``.

    Args:
        executor: A ``concurrent.futures.Executor``, or one of submitit. It stays open.
    """

    def __init__(self, executor: Any) -> None:
        is_class = isinstance(executor, type)
        if is_class or not callable(getattr(executor, "submit", None)):
            raise DeltaflError(
                f"executor is {type(executor).__name__}; it must be a concurrent.futures.Executor, "
                "such as client.get_executor() of Dask, or an executor of submitit"
            )
        self._executor = executor
        self._playing: dict[Future[None], tuple[Any, Player, Job]] = {}
        self._data: dict[int, str] = {}  #: seed -> the checksum of its data, one for all workers
        self._changing = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        with self._changing:
            for theirs, *_ in self._playing.values():
                theirs.cancel()

    def submit(  # type: ignore[override] # runs are all that it plays
        self,
        function: Any,
        player: Player,
        job: Job,
    ) -> Future[None]:
        """Play a job; its files are in its folder here when the future is done."""
        if job.settings.memory_path is not None:
            raise DeltaflError(
                "memory_path is a folder of one machine; leave it out with an executor"
            )
        parcel = packed(_parcel(player, job))
        # Dask takes two calls with the same arguments for one; a lost run is to be played again.
        cure = "; the same call with another executor goes on from the finished runs"
        with explained("the executor takes no runs", cure=cure):
            theirs = self._executor.submit(played, parcel, __version__, secrets.token_hex(8))
        ours = Future[None]()
        with self._changing:
            self._playing[ours] = theirs, player, job
        return ours

    def _watch(self) -> None:
        # Futures of submitit have no callbacks.
        while not self._is_over.wait(_POLL_SECONDS):
            with self._changing:
                playing = dict(self._playing)
            for ours, (theirs, player, job) in playing.items():
                if self._has_ended(ours, theirs, player, job):
                    with self._changing:
                        del self._playing[ours]

    def _has_ended(self, ours: Future[None], theirs: Any, player: Player, job: Job) -> bool:
        """Whether a run is over; then its future here has its end."""
        try:
            if not theirs.done():
                return False
            files = theirs.result()
        # Errors of a run come as values: what is raised is the executor's, a worker that died.
        # Whatever it is: this thread is the only one that looks.
        except BaseException as error:
            ours.set_exception(LostRun(in_one_line(error)))
            return True
        try:
            if isinstance(files, Exception):
                raise files
            if not isinstance(files, Mapping):
                raise DeltaflError(
                    f"the executor returned a {type(files).__name__} in place of a run's files; "
                    "its futures must return what the function that it was given does"
                )
            self._take(files, player.place(job), job.settings.seed)
        except Exception as error:
            ours.set_exception(error)
        else:
            ours.set_result(None)
        return True

    def _take(self, files: Mapping[Path, bytes], place: Path, seed: int) -> None:
        """Put the files of a finished run in the place of its folder here."""
        fresh = RunDirectory(place.with_name(f"{place.name}.new"))
        fresh.delete()
        for name, content in files.items():
            file = below(fresh.path, *name.parts)
            make_folder(file.parent)
            write_atomically(file, content, private=file.suffix == ".safetensors")
        now = fresh.environment()["data_crc32"]
        if now != (known := self._data.setdefault(seed, now)):
            fresh.delete()
            raise DeltaflError(
                f"two workers have different data for seed {seed} (checksums {known} and {now}): "
                "bring the same files to all"
            )
        with locked(place, ORPHAN_SECONDS):
            RunDirectory(place).delete()
            fresh.path.replace(place)


def _parcel(player: Player, job: Job) -> Parcel:
    settings = job.settings.model_dump()
    place = player.place(job).absolute()
    here = Path.cwd()
    named = {file for code in files_named(settings) for file in code.parent.glob("*.py")}
    table = here / str(job.settings.task)
    if table.suffix and table.is_file():
        named.add(table)
    named.update(here / file for file in tables_of(job.settings))
    return Parcel(
        player._replace(folder=player.folder.absolute()),
        job,
        here,
        # Not the others: they may be of modules that no worker has.
        [spec for name, spec in added_tasks().items() if name == job.settings.task],
        allowed(),
        {
            **{file.absolute(): read_bytes(file, users=True) for file in named},
            **{file: read_bytes(file) for file in _files(place)},
        },
    )


def played(parcel: bytes, version: str, attempt: str) -> Any:
    """On a worker: play a parcel's run in a process of its own.

    Returns the files of its folder by relative path, or the error that it ended with. ``attempt``
    makes calls differ.
    """
    if version != __version__:
        return DeltaflError(f"a worker has deltafl {__version__}, and this machine {version}")
    with TemporaryDirectory(prefix="deltafl-") as name:
        folder = Path(name)
        write_atomically(folder / _PARCEL, parcel, private=True)
        # Not in this process: Dask plays several jobs in threads of one, and a run has a current
        # folder and threads of its own. It ends when its input does, with this process.
        with subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, name],
            stdin=subprocess.PIPE,
            env=one_thread(),
        ) as process:
            process.wait()
        if not (folder / _ENDED).exists():
            raise RuntimeError(f"its process ended with code {process.returncode}")
        return pickle.loads(read_bytes(folder / _ENDED))  # noqa: S301 - of its own process


def _play(folder: Path) -> Any:
    cure = "; install there what it is of, or name it as FILE.py:NAME, whose file is sent along"
    with explained("a worker does not know the task or the sampler", cure=cure):
        parcel: Parcel = pickle.loads(read_bytes(folder / _PARCEL))  # noqa: S301 - of the executor
    there = partial(_within, folder)
    for file, content in parcel.files.items():
        make_folder(there(file).parent)
        write_atomically(there(file), content, private=True)
    make_folder(there(parcel.current))
    os.chdir(there(parcel.current))
    if parcel.allowed is not None:
        allow(frozenset(map(there, parcel.allowed)))
    for spec in parcel.tasks:
        register(spec)
    player = parcel.player._replace(folder=there(parcel.player.folder))
    player.play(parcel.job, lambda _: None)
    place = player.place(parcel.job)
    return {file.relative_to(place): read_bytes(file) for file in _files(place)}


def _files(place: Path) -> Iterator[Path]:
    return (file for file in sorted(place.rglob("*")) if file.is_file())


def _within(folder: Path, path: Path) -> Path:
    """An absolute path as one below a folder."""
    return folder / path.relative_to(path.anchor)


def _end_with_input() -> None:
    # Not by sys.stdin, whose lock this thread would hold as the process ends.
    os.read(0, 1)
    os._exit(1)


def _main(folder: Path) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        found = _play(folder)
    except Exception as error:
        found = as_sent(error)
    # It is there whole or not at all.
    write_atomically(folder / _ENDED, pickle.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
