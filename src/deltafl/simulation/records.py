"""The record of a run: plain files that others can read, and that a run can be continued from.

::

    DIR/config.toml          every setting that was used
    DIR/environment.json     versions and hardware, and the name of the data that were read
    DIR/rounds.jsonl         one line a round: cohort, estimate, evaluation; the same bytes for the same settings
    DIR/timings.jsonl        one line a round: wall clock
    DIR/checkpoint.json      the last checkpoint: which tensors, and how long the two files above were then
    DIR/checkpoint-N.safetensors
    DIR/doubtful-N.safetensors    the model of a run that ended in doubt (divergence.py); its last checkpoint is older
    DIR/memory.json          with ``memory_path``: the folder of this run's memory of one update a client
    DIR/playing.lock         while a process plays the run (lock.py)

A checkpoint is written beside the last one and becomes valid by one rename of ``checkpoint.json``. Lines after it
belong to rounds that the next start plays again: they are cut off, so nothing is ever recorded twice or half.
"""

import json
import os
import platform
import secrets
import shutil
import sys
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w
from pydantic import BaseModel

from ..errors import DeltaflError, MissingExtraError
from ..io import (
    checked,
    flatten,
    note_round,
    noted_round,
    plain_json,
    read_json,
    read_json_lines,
    read_toml,
    settled,
    unflatten,
    write_atomically,
)
from ..round import RoundState
from .divergence import DivergedError
from .recorded import Mark, Note, RoundLine, TimingLine
from .settings import Settings

T = TypeVar("T")

LINE_FILES = ("rounds.jsonl", "timings.jsonl")

#: What to do about a damaged file.
CURE = "it is damaged, so run it again in another folder"


def environment() -> dict[str, str | int]:
    """Versions and hardware, as they go into records."""
    names = ("deltafl", "numpy", "torch", "scikit-learn", "scipy")
    versions: dict[str, str | int] = {}
    for name in names:
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


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
    """Writes and reads the record of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Settings, data: Mapping[str, str] | None = None) -> None:
        """Make the folder and write what is known before the first round; ``data`` is ``Task.data``.

        Raises:
            DeltaflError: If it holds rounds without the settings that they were played with: nothing is erased.
        """
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

    @property
    def started(self) -> bool:
        """Whether a run was started here."""
        return recorded_settings(self.path) is not None

    def append(self, round_line: Mapping[str, Any], timing_line: Mapping[str, Any]) -> None:
        """Add one round."""
        for name, line in zip(LINE_FILES, (round_line, timing_line), strict=True):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain_json(line), allow_nan=False) + "\n")

    def save(self, state: RoundState) -> RoundState:
        """Write a checkpoint after the rounds appended so far; returns the state to go on with."""
        tensors = f"checkpoint-{state.round}.safetensors"
        arrays = {name: np.asarray(array, order="C") for name, array in flatten(state)}
        content: bytes = _safetensors().save(arrays)
        write_atomically(self.path / tensors, content)
        lengths = {name: (self.path / name).stat().st_size for name in LINE_FILES}
        mark = {"round": state.round, "tensors": tensors, "crc32": zlib.crc32(content), "lengths": lengths}
        write_atomically(self.path / "checkpoint.json", json.dumps(mark, indent=1) + "\n")
        for old in (*self.path.glob("checkpoint-*.safetensors*"), *self.path.glob("doubtful-*.safetensors")):
            if old.name != tensors:
                old.unlink()
        return self._settle(state)

    def _settle(self, state: RoundState) -> RoundState:
        """The state with its rows in their file, and beside them the round: for copies of this folder, see ``load``."""
        following: RoundState = settled(state)
        folder = self._memory()
        if folder is not None:
            note_round(folder, state.round)
        return following

    def _memory(self) -> Path | None:
        """The folder of ``memory_folder``, if the run has one."""
        return Path(self._read("memory.json", Note).folder) if (self.path / "memory.json").exists() else None

    def keep_doubtful(self, state: RoundState) -> None:
        """Write the model of a run that ends in doubt, beside the last checkpoint, which stays."""
        content = _safetensors().save({"params_d": np.asarray(state.params_d, order="C")})
        write_atomically(self.path / f"doubtful-{state.round}.safetensors", content)

    def memory_folder(self, memory_path: str | None) -> Path | None:
        """The folder of this run alone below ``memory_path``, the same after a resume; None without one."""
        if memory_path is None:
            return None
        note = self.path / "memory.json"
        if not note.exists():
            own = Path(memory_path).absolute() / f"{self.path.name}-{secrets.token_hex(4)}"
            write_atomically(note, json.dumps({"folder": str(own)}) + "\n")
        return Path(self._read("memory.json", Note).folder)

    def forget_memory(self) -> None:
        """Delete what the run kept in that folder; it cannot be continued then."""
        folder = self._memory()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def scratch(self) -> Path | None:
        """Where files go that are gone with the round; None for the system's folder for these."""
        return self.path

    @property
    def kept(self) -> int:
        """The round of the last checkpoint."""
        return self._read("checkpoint.json", Mark).round

    def divergence(self) -> DivergedError | None:
        """How the run ended before its last round, if it did: its last line says so."""
        last = self._last_line()
        return DivergedError(last["round"], **last["diverged"]) if "diverged" in last else None

    def doubt(self) -> str | None:
        """What looked wrong when the run was over, as a sentence without its full stop; None if nothing did."""
        last = self._last_line()
        if "doubt" not in last:
            return None
        why, kept = (last["doubt"][key] for key in ("why", "kept"))
        ended = f"ended in doubt after {last['round']} rounds: {why}"
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
        mark = self._read("checkpoint.json", Mark) if (self.path / "checkpoint.json").exists() else None
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
        if arrays is None:
            return template
        return self._settle(unflatten(template, arrays))

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
        kind: type[BaseModel] = RoundLine if name == "rounds.jsonl" else TimingLine
        lines: list[dict[str, Any]] = read_json_lines(self.path / name)
        for number, line in enumerate(lines, start=1):
            checked(kind, line, f"{self.path / name}, line {number}", CURE)
        return lines

    def environment(self) -> dict[str, Any]:
        """Versions, hardware and data, as they were when the run was started."""
        return self._read("environment.json", dict[str, Any])

    def _read(self, name: str, kind: type[T]) -> T:
        return checked(kind, read_json(self.path / name), str(self.path / name), CURE)

    def _arrays(self, mark: Mark) -> dict[str, Any]:
        """The tensors of a checkpoint, once all that it speaks of is known to be there."""
        for name in LINE_FILES:
            file, length = self.path / name, mark.lengths.get(name)
            size = file.stat().st_size if file.exists() else 0
            if length is None or size < length:
                raise DeltaflError(f"{file} has {size} bytes, {length} at the last checkpoint; {CURE}")
        tensors = self.path / mark.tensors
        load = _safetensors().load
        from safetensors import SafetensorError

        try:
            content = tensors.read_bytes()
            if mark.crc32 not in (None, zlib.crc32(content)):
                raise DeltaflError(f"{tensors} is not as it was written, its checksum differs: {CURE}")
            arrays: dict[str, Any] = load(content)
        except OSError as error:
            raise DeltaflError(f"cannot read {tensors}: {error.strerror}; {CURE}") from None
        except SafetensorError as error:
            raise DeltaflError(f"{tensors} is no checkpoint: {error}; {CURE}") from None
        return arrays


def _safetensors() -> Any:
    try:
        import safetensors.numpy as tensors
    except ImportError:
        raise MissingExtraError("safetensors", "sim") from None
    return tensors
