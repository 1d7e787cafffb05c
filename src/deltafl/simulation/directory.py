"""The files of a run: plain text that others can read, and checkpoints from which a run continues.

::

    DIR.lock                 while a process plays the run
    DIR/config.toml          every setting that was used
    DIR/environment.json     versions and hardware, and the name of the data
    DIR/rounds.jsonl         one line a round: cohort, estimate, evaluation; the same bytes for the same settings
    DIR/timings.jsonl        one line a round: wall clock
    DIR/checkpoint.json      the last checkpoint: its tensors, and the lengths of the two files above at that moment
    DIR/checkpoint-N.safetensors
    DIR/doubtful-N.safetensors    the model of a run with a suspect end (server/watch.py); its last checkpoint is older
    DIR/memory.json          with ``memory_path``: the folder of this run's memory of one update a client

A checkpoint is written beside the last one and becomes valid when ``checkpoint.json`` is renamed. Lines after it belong
to rounds that the next start plays again: they are cut off, so nothing is recorded twice or half.
"""

import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import metadata
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from filelock import FileLock, Timeout
from pydantic import BaseModel

from .. import given
from ..errors import DeltaflError
from ..io import (
    checked,
    plain_json,
    read_json,
    read_json_lines,
    read_tensors,
    read_toml,
    write_atomically,
    write_tensors,
)
from ..round import RoundState
from ..scale.state_file import flatten, note_round, noted_round, settled, unflatten
from ..tasks.own import short_name
from ..types import Params
from .distributed import ALONE, ProcessGroup
from .divergence import DivergedError
from .settings import Settings

LINE_FILES = ("rounds.jsonl", "timings.jsonl")

#: What to do about a damaged file.
CURE = "it is damaged: delete this run's folder, or choose another one, to run it again"


class _Ending(BaseModel):
    kept: int
    why: str


class _Test(BaseModel):
    accuracy: float | None
    loss: float | None


class _Line(BaseModel):
    """What readers look at in the lines of a run, of the right type where it is there."""

    round: int
    cohort: list[int] = []
    counts: list[int] = []
    rejected: list[tuple[int, str]] = []
    test: _Test | None = None
    diverged: _Ending | None = None
    doubt: _Ending | None = None


class Checkpoint(NamedTuple):
    """``checkpoint.json``; old ones lack the checksum of the tensors."""

    round: int
    tensors: str
    lengths: dict[str, int]
    crc32: int | None = None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from playing in a folder; the system releases the lock of a process that is killed."""
    place = folder.resolve()
    is_new = not place.parent.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{place}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        cure = "wait for it, or choose another --out"
        raise DeltaflError(f"another process is playing the run in {folder}; {cure}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file: it stays and locks nothing
            Path(lock.lock_file).unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # it is in use now
                place.parent.rmdir()


def environment() -> dict[str, str | int]:
    """Versions and hardware, as they go into records."""
    versions: dict[str, str | int] = {}
    for name in ("deltafl", "numpy", "torch", "scikit-learn", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "command": " ".join(["deltafl" if "deltafl" in sys.argv[0] else Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def new_folder(command: str, task: str) -> Path:
    """A folder of its own below ``runs`` for results that were given no place."""
    name = f"{command}-{short_name(task)}-{datetime.now():%Y%m%d-%H%M%S}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())


def write_header(path: Path, settings: Settings, data: Mapping[str, str] | None = None) -> None:
    """Write environment, with ``Task.data``, and then the settings, which say that something was started here."""
    path.mkdir(parents=True, exist_ok=True)
    objects = given.names_in(settings.model_dump())
    known = {**environment(), **({"objects": objects} if objects else {}), **(data or {})}
    write_atomically(path / "environment.json", json.dumps(known, indent=1) + "\n")
    write_settings(path, settings)


def write_settings(path: Path, settings: Settings) -> None:
    """Write the settings of what is played in a folder."""
    write_atomically(path / "config.toml", tomli_w.dumps(settings.model_dump(exclude_none=True)))


def recorded_settings(path: Path) -> dict[str, Any] | None:
    """The settings recorded in a folder; None if nothing was started there."""
    config = path / "config.toml"
    return read_toml(config) if config.exists() else None


class RunDirectory:
    """Writes and reads the files of one run in a folder. A damaged file is a ``DeltaflError`` with its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Settings, data: Mapping[str, str] | None = None) -> None:
        """Write what is known before the first round, unless the folder holds rounds: nothing is erased."""
        cure = "whose config.toml is missing; put that back, or choose another folder"
        for name in (*LINE_FILES, "checkpoint.json"):
            if self._size(name) > 0:
                raise DeltaflError(f"{self.path / name} belongs to another run, {cure}")
        self.path.mkdir(parents=True, exist_ok=True)
        for name in LINE_FILES:
            (self.path / name).touch()
        (self.path / "memory.json").unlink(missing_ok=True)
        write_header(self.path, settings, data)

    def environment(self) -> dict[str, Any]:
        """Versions, hardware and data, as they were when the run was started."""
        found: dict[str, Any] = read_json(self.path / "environment.json")
        return found

    def append(self, round_line: Mapping[str, Any], timing_line: Mapping[str, Any]) -> None:
        """Add one round."""
        for name, line in zip(LINE_FILES, (round_line, timing_line), strict=True):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain_json(line), allow_nan=False) + "\n")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of ``rounds.jsonl`` or ``timings.jsonl``."""
        lines = read_json_lines(self.path / name)
        checked(list[_Line], lines, str(self.path / name), CURE)
        return lines

    def last_line(self) -> dict[str, Any]:
        """The last line of ``rounds.jsonl``; empty if there is none, or it was cut off as it was written."""
        try:
            lines, timings = (self.lines(name) for name in LINE_FILES)
        except (OSError, ValueError):  # not there, or cut off within a line: it goes on from its checkpoint
            return {}
        return lines[-1] if lines and len(lines) == len(timings) else {}

    def ending(self) -> str | None:
        """How the run ended, if it diverged or looked wrong when it was over, as a sentence without its full stop."""
        last = self.last_line()
        if "diverged" in last:
            return str(DivergedError(last["round"], **last["diverged"]))
        if "doubt" not in last:
            return None
        ended = f"has a suspect end after {last['round']} rounds: {last['doubt']['why']}; the last good state"
        return f"{ended}, of round {last['doubt']['kept']}, is kept, and the model as it ended beside it"

    def is_finished(self, rounds: int) -> bool:
        """Whether the run has played all of its rounds, or has ended before: it diverged, or reached its threshold."""
        mark, last = self._mark(), self.last_line()
        if mark is None or mark.round >= rounds or "diverged" in last:
            return mark is not None
        is_over = "stopped" in last or last.get("round", 0) >= rounds
        return is_over and ("doubt" in last or mark.round == last["round"])

    def num_clients(self) -> int:
        """The number of clients, by the last checkpoint; 0 if there is none."""
        mark = self._mark()
        return len(read_tensors(self.path / mark.tensors, CURE)[0]["state.selected_m"]) if mark else 0

    def require_same_data(self, now: Mapping[str, str]) -> None:
        """Refuse other data than those that the folder records; old records know none."""
        after = now["data_crc32"]
        before = self.environment().get("data_crc32", after)
        if before != after:
            raise DeltaflError(
                f"the data of {self.path} are not those it began with (checksum {before}, now {after}): put the old "
                "ones back, or run it again in another folder"
            )

    def save(self, state: RoundState) -> RoundState:
        """Write a checkpoint after the rounds appended so far; returns the state to go on with."""
        tensors = f"checkpoint-{state.round}.safetensors"
        checksum = write_tensors(self.path / tensors, dict(flatten(state)))
        mark = Checkpoint(state.round, tensors, {name: self._size(name) for name in LINE_FILES}, checksum)
        write_atomically(self.path / "checkpoint.json", json.dumps(mark._asdict(), indent=1) + "\n")
        for old in (*self.path.glob("checkpoint-*.safetensors*"), *self.path.glob("doubtful-*.safetensors")):
            if old.name != tensors:
                old.unlink()
        return self._settled(state)

    def save_suspect(self, state: RoundState) -> None:
        """Write the model of a run with a suspect end, beside the last checkpoint, which stays."""
        write_tensors(self.path / f"doubtful-{state.round}.safetensors", {"params_d": np.asarray(state.params_d)})

    def model(self) -> tuple[int, Params] | None:
        """Round and model of the last checkpoint, which is only read; None if there is none."""
        mark = self._mark()
        return mark and (mark.round, read_tensors(self.path / mark.tensors, CURE, mark.crc32)[0]["state.params_d"])

    def load(self, template: RoundState, group: ProcessGroup = ALONE) -> RoundState:
        """The state of the last checkpoint (the template itself if there is none); later lines are cut off.

        After an error nothing is cut off.
        """
        arrays = group.from_first(self._cut_off_and_read)
        return template if arrays is None else self._settled(unflatten(template, arrays))

    def _cut_off_and_read(self) -> dict[str, Any] | None:
        mark, arrays = self._mark(), None
        folder = self._memory()
        ahead = (folder and noted_round(folder)) or 0
        if ahead > (mark.round if mark else 0):
            raise DeltaflError(
                f"the memory in {folder} is of round {ahead}, later than the last checkpoint of {self.path}: a copy of "
                "this folder has gone on with it; continue that one, or run this one again in another folder"
            )
        lengths = mark.lengths if mark else dict.fromkeys(LINE_FILES, 0)
        for name in LINE_FILES:
            if self._size(name) < lengths[name]:
                raise DeltaflError(f"{self.path / name} is shorter than at the last checkpoint; {CURE}")
        if mark is not None:
            arrays = read_tensors(self.path / mark.tensors, CURE, mark.crc32)[0]
        for name in LINE_FILES:
            (self.path / name).touch()
            os.truncate(self.path / name, lengths[name])
        return arrays

    def memory_folder(self, memory_path: str | None) -> Path | None:
        """The folder of this run alone below ``memory_path``, the same after a resume; None without one."""
        if memory_path is None:
            return None
        if not (self.path / "memory.json").exists():
            own = Path(memory_path).absolute() / f"{self.path.name}-{secrets.token_hex(4)}"
            write_atomically(self.path / "memory.json", json.dumps({"folder": str(own)}) + "\n")
        return self._memory()

    def delete(self) -> None:
        """Delete the run, and what it kept in its memory's folder."""
        folder = self._memory()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.path)

    def _settled(self, state: RoundState) -> RoundState:
        """The state with its rows in their file, and beside them the round: for copies of this folder, see ``load``."""
        following: RoundState = settled(state)
        folder = self._memory()
        if folder is not None:
            note_round(folder, state.round)
        return following

    def _memory(self) -> Path | None:
        """The folder of ``memory_folder``, if the run has one."""
        note = self.path / "memory.json"
        return Path(checked(dict[str, str], read_json(note), str(note), CURE)["folder"]) if note.exists() else None

    def _mark(self) -> Checkpoint | None:
        mark = self.path / "checkpoint.json"
        return checked(Checkpoint, read_json(mark), str(mark), CURE) if mark.exists() else None

    def _size(self, name: str) -> int:
        file = self.path / name
        return file.stat().st_size if file.exists() else 0


def refusals(folder: Path) -> list[tuple[str, int, int, str, bool]]:
    """Replies refused in a run, or a comparison's runs: its folder, round, client, reason, and whether all were."""
    return [
        (record.parent.name, line["round"], client, reason, not line.get("num_responded"))
        for record in [*folder.glob("rounds.jsonl"), *sorted(folder.glob("runs/*/rounds.jsonl"))]
        for line in RunDirectory(record.parent).lines("rounds.jsonl")
        for client, reason in line.get("rejected", [])
    ]
