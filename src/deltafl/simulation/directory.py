"""The files of a run: plain text that others can read, and checkpoints from which a run continues.

::

    DIR.lock                 while a process plays the run
    DIR/config.toml          every setting that was used
    DIR/environment.json     versions and hardware, and the name of the data
    DIR/rounds.jsonl         one line a round: cohort, estimate, evaluation; the same bytes for the same settings
    DIR/timings.jsonl        one line a round: wall clock
    DIR/checkpoint.json      the last checkpoint: its tensors, and the lengths of the two files above at that moment
    DIR/checkpoint-N.safetensors
    DIR/doubtful-N.safetensors    the model of a run with a suspect end (divergence.py); its last checkpoint is older
    DIR/memory.json          with ``memory_path``: the folder of this run's memory of one update a client

A checkpoint is written beside the last one and becomes valid when ``checkpoint.json`` is renamed. Lines after it belong
to rounds that the next start plays again: they are cut off, so nothing is recorded twice or half.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w
from filelock import FileLock, Timeout
from pydantic import BaseModel

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
from .distributed import ProcessGroup
from .divergence import DivergedError
from .settings import Settings
from .versions import environment

T = TypeVar("T")

LINE_FILES = ("rounds.jsonl", "timings.jsonl")

#: What to do about a damaged file.
CURE = "it is damaged, so run it again in another folder"


class FolderInUseError(DeltaflError):
    """Another process is playing the run in this folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from playing in the folder of a run or a comparison; the lock is the file ``FOLDER.lock``.

    The operating system releases the lock of a process that is killed.

    Raises:
        FolderInUseError: If another process holds it.
    """
    place = folder.resolve()
    is_new = not place.parent.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{place}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderInUseError(
            f"another process is playing the run in {folder}; wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file: it stays and locks nothing
            Path(lock.lock_file).unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # it is in use now
                place.parent.rmdir()


class Ended(BaseModel):
    """Why a run diverged, or has a suspect end, and the round of the checkpoint that stays."""

    why: str
    kept: int


class RoundLine(BaseModel):
    """What readers rely on in a line of ``rounds.jsonl``; it holds more."""

    round: int
    cohort: list[int] = []
    counts: list[int] = []
    bytes_down: int = 0
    bytes_up: int = 0
    rejected: list[tuple[int, str]] = []
    test: dict[str, float | None] | None = None
    probe: dict[str, Any] = {}
    diverged: Ended | None = None
    doubt: Ended | None = None


class TimingLine(BaseModel):
    """A line of ``timings.jsonl``; old ones lack the processor time."""

    round: int
    seconds: float
    cpu_seconds: float | None = None


class Checkpoint(BaseModel):
    """``checkpoint.json``; old ones lack the checksum of the tensors."""

    round: int
    tensors: str
    crc32: int | None = None
    lengths: dict[str, int]


class MemoryNote(BaseModel):
    """``memory.json``."""

    folder: str


def write_header(path: Path, settings: Settings, data: Mapping[str, str] | None = None) -> None:
    """Write environment, with ``Task.data``, and settings.

    These come last, for their presence says that something was started here.
    """
    path.mkdir(parents=True, exist_ok=True)
    known = {**environment(), **(data or {})}
    write_atomically(path / "environment.json", json.dumps(known, indent=1) + "\n")
    write_atomically(path / "config.toml", tomli_w.dumps(settings.model_dump(exclude_none=True)))


def recorded_settings(path: Path) -> dict[str, Any] | None:
    """The settings recorded in a folder; None if nothing was started there."""
    config = path / "config.toml"
    return read_toml(config) if config.exists() else None


class RunDirectory:
    """Writes and reads the files of one run.

    Args:
        path: The folder.
        group: The processes that play the run together: the first one writes, and sends the others what it reads, so
            all must call the same methods in the same order.
    """

    def __init__(self, path: Path, group: ProcessGroup | None = None) -> None:
        self.path = path
        self._group = group or ProcessGroup()

    def start(self, settings: Settings, data: Mapping[str, str] | None = None) -> None:
        """Make the folder and write what is known before the first round; ``data`` is ``Task.data``.

        Raises:
            DeltaflError: If it holds rounds without the settings that they were played with: nothing is erased.
        """
        self._group.from_first(lambda: self._start(settings, data))

    def _start(self, settings: Settings, data: Mapping[str, str] | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (*LINE_FILES, "checkpoint.json"):
            if (self.path / name).exists() and (self.path / name).stat().st_size > 0:
                raise DeltaflError(
                    f"{self.path / name} belongs to another run, whose config.toml is missing; put that back, or "
                    "choose another folder"
                )
        for name in LINE_FILES:
            (self.path / name).write_bytes(b"")
        (self.path / "memory.json").unlink(missing_ok=True)
        write_header(self.path, settings, data)

    def settings(self) -> dict[str, Any] | None:
        """The settings that the run was started with; None if no run was started here."""
        return self._group.from_first(lambda: recorded_settings(self.path))

    def append(self, round_line: Mapping[str, Any], timing_line: Mapping[str, Any]) -> None:
        """Add one round."""
        if not self._group.is_first:
            return
        for name, line in zip(LINE_FILES, (round_line, timing_line), strict=True):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain_json(line), allow_nan=False) + "\n")

    def save(self, state: RoundState) -> RoundState:
        """Write a checkpoint after the rounds appended so far; returns the state to go on with."""
        if self._group.is_first:
            self._write_checkpoint(state)
        return self._settle(state)

    def _write_checkpoint(self, state: RoundState) -> None:
        tensors = f"checkpoint-{state.round}.safetensors"
        checksum = write_tensors(self.path / tensors, dict(flatten(state)))
        lengths = {name: (self.path / name).stat().st_size for name in LINE_FILES}
        mark = {"round": state.round, "tensors": tensors, "crc32": checksum, "lengths": lengths}
        write_atomically(self.path / "checkpoint.json", json.dumps(mark, indent=1) + "\n")
        for old in (*self.path.glob("checkpoint-*.safetensors*"), *self.path.glob("doubtful-*.safetensors")):
            if old.name != tensors:
                old.unlink()

    def _settle(self, state: RoundState) -> RoundState:
        """The state with its rows in their file, and beside them the round: for copies of this folder, see ``load``."""
        following: RoundState = settled(state)
        folder = self._memory()
        if folder is not None:
            note_round(folder, state.round)
        return following

    def _memory(self) -> Path | None:
        """The folder of ``memory_folder``, if the run has one."""
        if not (self.path / "memory.json").exists():
            return None
        return Path(self._read("memory.json", MemoryNote).folder)

    def keep_suspect(self, state: RoundState) -> None:
        """Write the model of a run with a suspect end, beside the last checkpoint, which stays."""
        if not self._group.is_first:
            return
        write_tensors(self.path / f"doubtful-{state.round}.safetensors", {"params_d": np.asarray(state.params_d)})

    def memory_folder(self, memory_path: str | None) -> Path | None:
        """The folder of this run alone below ``memory_path``, the same after a resume; None without one."""
        if memory_path is None:
            return None
        if not (self.path / "memory.json").exists():
            own = Path(memory_path).absolute() / f"{self.path.name}-{secrets.token_hex(4)}"
            write_atomically(self.path / "memory.json", json.dumps({"folder": str(own)}) + "\n")
        return self._memory()

    def forget_memory(self) -> None:
        """Delete what the run kept in that folder; it cannot be continued then."""
        folder = self._memory()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def scratch(self) -> Path | None:
        """Where files go that are deleted with the round; None for the system's temporary folder."""
        return self.path if self._group.is_first else None

    @property
    def kept(self) -> int:
        """The round of the last checkpoint."""
        return self._group.from_first(lambda: self._read("checkpoint.json", Checkpoint).round)

    def is_finished(self, rounds: int) -> bool:
        """Whether the run has played all of its rounds, or has diverged."""
        if not (self.path / "checkpoint.json").exists():
            return False
        last = self._last_line()
        return self.kept >= rounds or "diverged" in last or "doubt" in last

    def divergence(self) -> DivergedError | None:
        """How the run ended before its last round, if it did: its last line says so."""
        last = self._last_line()
        return DivergedError(last["round"], **last["diverged"]) if "diverged" in last else None

    def suspect_end(self) -> str | None:
        """What looked wrong when the run was over, as a sentence without its full stop; None if nothing did."""
        last = self._last_line()
        if "doubt" not in last:
            return None
        why, kept = (last["doubt"][key] for key in ("why", "kept"))
        ended = f"has a suspect end after {last['round']} rounds: {why}"
        return f"{ended}; the last good state, of round {kept}, is kept, and the model as it ended beside it"

    def _last_line(self) -> dict[str, Any]:
        """The last line of ``rounds.jsonl``; empty if there is none, or it was cut off as it was written."""
        try:
            lines, timings = (self.lines(name) for name in LINE_FILES)
        except (OSError, ValueError):  # not there, or cut off within a line: it goes on from its checkpoint
            return {}
        return lines[-1] if lines and len(lines) == len(timings) else {}

    def load(self, template: RoundState) -> RoundState:
        """The state of the last checkpoint (the template itself if there is none); later lines are cut off.

        Raises:
            DeltaflError: If a file is damaged, or the memory in its own folder is of a later round: another copy of
                this folder has gone on with it. Then nothing is cut off.
        """
        arrays = self._group.from_first(self._cut_off_and_read)
        return template if arrays is None else self._settle(unflatten(template, arrays))

    def _cut_off_and_read(self) -> dict[str, Any] | None:
        mark = self._read("checkpoint.json", Checkpoint) if (self.path / "checkpoint.json").exists() else None
        rounds = self.path / "rounds.jsonl"
        if mark is None and rounds.exists() and rounds.read_bytes().count(b"\n") > 1:  # one: killed at its first
            raise DeltaflError(
                f"{self.path / 'checkpoint.json'} is missing, though rounds were played; put it back, or delete "
                f"{self.path} to play them again"
            )
        self._check_memory(0 if mark is None else mark.round)
        arrays = None if mark is None else self._arrays(mark)
        for name in LINE_FILES:
            file = self.path / name
            file.touch()
            os.truncate(file, mark.lengths[name] if mark else 0)
        return arrays

    def _check_memory(self, round: int) -> None:
        """Refuse rows that are newer than the checkpoint of this round."""
        folder = self._memory()
        ahead = None if folder is None else noted_round(folder)
        if ahead is not None and ahead > round:
            raise DeltaflError(
                f"the memory in {folder} is of round {ahead}, and the last checkpoint of {self.path} of round {round}: "
                "a copy of this folder has gone on with it; continue that one, or run this one again in another folder"
            )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of ``rounds.jsonl`` or ``timings.jsonl``.

        Raises:
            DeltaflError: If the file cannot be read or is damaged; the sentence names line and entry.
        """
        return self._group.from_first(lambda: self._lines(name))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        kind: type[BaseModel] = RoundLine if name == "rounds.jsonl" else TimingLine
        lines: list[dict[str, Any]] = read_json_lines(self.path / name)
        for number, line in enumerate(lines, start=1):
            checked(kind, line, f"{self.path / name}, line {number}", CURE)
        return lines

    def environment(self) -> dict[str, Any]:
        """Versions, hardware and data, as they were when the run was started."""
        return self._group.from_first(lambda: self._read("environment.json", dict[str, Any]))

    def _read(self, name: str, kind: type[T]) -> T:
        return checked(kind, read_json(self.path / name), str(self.path / name), CURE)

    def _arrays(self, mark: Checkpoint) -> dict[str, Any]:
        """The tensors of a checkpoint, once all that it speaks of is known to be there."""
        for name in LINE_FILES:
            file, length = self.path / name, mark.lengths.get(name)
            size = file.stat().st_size if file.exists() else 0
            if length is None or size < length:
                raise DeltaflError(f"{file} has {size} bytes, {length} at the last checkpoint; {CURE}")
        tensors = self.path / mark.tensors
        if not tensors.exists():
            raise DeltaflError(f"cannot read {tensors}: it is missing; {CURE}")
        return read_tensors(tensors, CURE, mark.crc32)[0]


def refusals(folder: Path) -> list[tuple[str, int, int, str]]:
    """Replies that were refused in a run, or a comparison's runs: the run's folder, round, client and reason."""
    return [
        (record.parent.name, line["round"], client, reason)
        for record in [*folder.glob("rounds.jsonl"), *sorted(folder.glob("runs/*/rounds.jsonl"))]
        for line in RunDirectory(record.parent).lines("rounds.jsonl")
        for client, reason in line.get("rejected", [])
    ]
