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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ... import __version__
from ...calls import Named
from ...errors import OWN_ERRORS, DeltaflError, MissingExtraError, explained, in_one_line
from ...store.files import (
    below,
    make_folder,
    read_bytes,
    remove_empty,
    write_atomically,
    write_with_folder,
)
from ...store.own_python import allow, allowed, names_in
from ...tasks.registry import added_tasks, register
from ..folder.directory import RunDirectory, locked
from ..folder.record import Job
from ..world import tables_of
from .player import ORPHAN_SECONDS, Player, require_simulator
from .processes import ONE_THREAD, JobError, LostRun, Packed, Packer, as_sent, unpacked

_POLL_SECONDS = 0.1
_PARCEL = ("parcel", "shared")
_ENDED = "ended"


class Parcel(NamedTuple):
    """A job, and all that its settings name."""

    player: Player
    job: Job
    current: Path  #: the folder that names are relative to
    tasks: list[Any]
    allowed: frozenset[Path] | None
    begun: Mapping[Path, bytes]  #: the files of an unfinished run, by absolute path
    files: Sequence[Named]  #: what the settings name: absolute paths with contents
    links: Mapping[Path, Path]  #: from where the settings name a file to where it is
    absolute: Sequence[Path]  #: what they name by absolute paths, which are those of each machine


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
        self._packer = Packer()
        #: Read once: what is edited from now on must not make runs differ.
        self._content = cache(partial(read_bytes, users=True))
        self._playing: dict[Future[None], tuple[Any, Player, Job]] = {}
        self._data: dict[int, str] = {}  #: seed -> the checksum of its data, one for all workers
        self._changing = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        with self._changing:
            for theirs, *_ in self._playing.values():
                # It need not have that, and may not reach its scheduler: why this ends says more.
                with suppress(Exception):
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
        parcel = self._packer.packed(self._parcel(player, job))
        # Dask takes two calls with the same arguments for one; a lost run is to be played again.
        cure = "; the same call with another executor goes on from the finished runs"
        with explained("the executor takes no runs", cure=cure):
            theirs = self._executor.submit(played, parcel, __version__, secrets.token_hex(8))
        for name in ("done", "result"):
            if not callable(getattr(theirs, name, None)):
                raise DeltaflError(
                    f"submit of the executor returned a {type(theirs).__name__}, which has no "
                    f"{name}; it must return a future, such as a concurrent.futures.Future"
                )
        ours = Future[None]()
        with self._changing:
            self._playing[ours] = theirs, player, job
        return ours

    def expect(self, data: Mapping[int, str]) -> None:
        """Refuse runs with other data than these, by seed and checksum."""
        self._data.update(data)

    def _parcel(self, player: Player, job: Job) -> Parcel:
        settings = job.settings.model_dump()
        place = player.place(job).absolute()
        here = Path.cwd()
        codes = {here / name: (here / name).resolve() for name in names_in(settings)}
        # An editor may have links to nothing beside them.
        named = {
            file
            for code in codes.values()
            for file in code.parent.glob("*.py")
            if file.is_file() and os.access(file, os.R_OK)
        }
        data = tables_of(job.settings)
        table = Path(str(job.settings.task))
        if table.suffix and (here / table).is_file():
            data.append(table)
        named.update(here / file for file in data)
        absolute = {file for file in (*data, *map(Path, names_in(settings))) if file.is_absolute()}
        data_dir = job.settings.data_dir
        if data_dir is not None and not data_dir.startswith("~"):
            job = job._replace(
                settings=job.settings.model_copy(update={"data_dir": str(here / data_dir)})
            )
        return Parcel(
            player._replace(folder=player.folder.absolute()),
            job,
            here,
            # Not the others: they may be of modules that no worker has.
            [spec for name, spec in added_tasks().items() if name == job.settings.task],
            allowed(),
            {file: read_bytes(file) for file in _files(place)},
            [Named(str(file.absolute()), self._content(file)) for file in sorted(named)],
            {name: code for name, code in codes.items() if code in named and name != code},
            [file for file in sorted(absolute) if file.is_file()],
        )

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
            write_with_folder(file, content, private=file.suffix == ".safetensors")
        now = fresh.environment()["data_crc32"]
        if now != (known := self._data.setdefault(seed, now)):
            fresh.delete()
            raise DeltaflError(
                f"a worker has other data for seed {seed} than this machine or another worker "
                f"(checksums {now} and {known}): bring the same files to all"
            )
        with locked(place, ORPHAN_SECONDS):
            RunDirectory(place).delete()
            _move_rest(place, fresh.path)
            fresh.path.replace(place)


def played(parcel: Packed, version: str, attempt: str) -> Any:
    """On a worker: play a parcel's run in a process of its own.

    Returns the files of its folder by relative path, or the error that it ended with. ``attempt``
    makes calls differ.
    """
    if version != __version__:
        return DeltaflError(f"a worker has deltafl {__version__}, and this machine {version}")
    with TemporaryDirectory(prefix="deltafl-") as name:
        folder = Path(name)
        for file, part in zip(_PARCEL, parcel, strict=True):
            write_atomically(folder / file, part, private=True)
        # Not in this process: Dask plays several jobs in threads of one, and a run has a current
        # folder and threads of its own. It ends when its input does, with this process.
        with subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, name],
            stdin=subprocess.PIPE,
            env={**ONE_THREAD, **os.environ},
        ) as process:
            process.wait()
        if not (folder / _ENDED).exists():
            raise RuntimeError(f"its process ended with code {process.returncode}")
        return pickle.loads(read_bytes(folder / _ENDED))  # noqa: S301 - of its own process


def _play(folder: Path) -> Any:
    try:
        require_simulator()
    except MissingExtraError as error:
        raise DeltaflError(f"on a worker {error}") from None
    cure = "; install there what it is of, or name it as FILE.py:NAME, whose file is sent along"
    with explained("a worker does not know the task or the sampler", cure=cure):
        content, shared = (read_bytes(folder / file) for file in _PARCEL)
        parcel: Parcel = unpacked((content, shared))
    for file in parcel.absolute:
        if not file.is_file():
            raise DeltaflError(
                f"a worker has no {file}, and an absolute path is one of each machine: put the "
                "file there, or name it by a relative path, by which it is sent along"
            )
    there = partial(_within, folder)
    files = {Path(name): name.of for name in parcel.files}
    for file, content in {**files, **parcel.begun}.items():
        write_with_folder(there(file), content, private=True)
    make_folder(there(parcel.current))
    os.chdir(there(parcel.current))
    for link, file in parcel.links.items():
        make_folder(there(link).parent)
        # A name may lead there without a link, as ``folder/../mine.py`` does.
        if not there(link).exists():
            there(link).symlink_to(there(file))
    if parcel.allowed is not None:
        allow(frozenset(map(there, parcel.allowed)))
    for spec in parcel.tasks:
        register(spec)
    player = parcel.player._replace(folder=there(parcel.player.folder))
    player.play(parcel.job, lambda _: None)
    place = player.place(parcel.job)
    return {file.relative_to(place): read_bytes(file) for file in _files(place)}


def _move_rest(old: Path, new: Path) -> None:
    """Keep what others have put into a run's folder, such as notes or an exported model."""
    for file in [*_files(old)]:
        kept = new / file.relative_to(old)
        make_folder(kept.parent)
        # A worker had it, too, but not what was written into it since.
        file.replace(kept)
    for folder in sorted([old, *old.rglob("*")], reverse=True):
        remove_empty(folder)  # unless it holds what is no file


def _files(place: Path) -> Iterator[Path]:
    return (file for file in sorted(place.rglob("*")) if file.is_file())


def _within(folder: Path, path: Path) -> Path:
    """An absolute path as one below a folder."""
    return folder / path.relative_to(path.anchor)


def _outside(folder: Path, name: str) -> str:
    """The path on the user's machine of a file below the folder; others as they are."""
    path = Path(name)
    if path.is_relative_to(folder):
        return str(Path(path.anchor, path.relative_to(folder)))
    return name


def _end_with_input() -> None:
    # Not by sys.stdin, whose lock this thread would hold as the process ends.
    os.read(0, 1)
    os._exit(1)


def _main(folder: Path) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        found = _play(folder)
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of a terminal; the user's own has it from there, too.
        os._exit(1)
    except OWN_ERRORS as error:
        found = as_sent(error)
        if isinstance(found, JobError):
            # By them it is told whether the user's own code has failed.
            places = [(_outside(folder, file), line) for file, line in found.failure.places]
            found = JobError(found.failure._replace(places=places))
    # It is there whole or not at all.
    write_atomically(folder / _ENDED, pickle.dumps(found))


if __name__ == "__main__":
    # Without links, as modules know their files.
    _main(Path(sys.argv[1]).resolve())
