"""The record of a run: plain files that others can read, and that a run can be continued from.

::

    DIR/config.toml          every setting that was used
    DIR/environment.json     versions and hardware
    DIR/rounds.jsonl         one line a round: cohort, estimate, evaluation; the same bytes for the same settings
    DIR/timings.jsonl        one line a round: wall clock
    DIR/checkpoint.json      the last checkpoint: which tensors, and how long the two files above were then
    DIR/checkpoint-N.safetensors
    DIR/memory.json          with ``memory_path``: the folder of this run's memory of one update a client

A checkpoint is written beside the last one and becomes valid by one rename of ``checkpoint.json``. Lines after it
belong to rounds that the next start plays again: they are cut off, so nothing is ever recorded twice or half.
"""

import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from ..divergence import DivergedError
from ..errors import MissingExtraError
from ..plain_files import plain_json, write_atomically
from ..round import RoundState
from ..settings import Settings, read_toml
from ..state_file import flatten, settled, unflatten

LINE_FILES = ("rounds.jsonl", "timings.jsonl")


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


def write_header(path: Path, settings: Settings) -> None:
    """Write environment and settings; the latter last, for their presence says that something was started here."""
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / "environment.json", json.dumps(environment(), indent=1) + "\n")
    write_atomically(path / "config.toml", tomli_w.dumps(settings.model_dump(exclude_none=True)))


def recorded_settings(path: Path) -> dict[str, Any] | None:
    """The settings recorded in a folder; None if nothing was started there."""
    config = path / "config.toml"
    return read_toml(config) if config.exists() else None


class RunDirectory:
    """Writes and reads the record of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Settings) -> None:
        """Make the folder and write what is known before the first round."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in LINE_FILES:
            (self.path / name).write_bytes(b"")
        for name in ("checkpoint.json", "memory.json"):
            (self.path / name).unlink(missing_ok=True)
        write_header(self.path, settings)

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
        write_atomically(self.path / tensors, _safetensors().save(arrays))
        lengths = {name: (self.path / name).stat().st_size for name in LINE_FILES}
        mark = {"round": state.round, "tensors": tensors, "lengths": lengths}
        write_atomically(self.path / "checkpoint.json", json.dumps(mark, indent=1) + "\n")
        for old in self.path.glob("checkpoint-*.safetensors*"):
            if old.name != tensors:
                old.unlink()
        following: RoundState = settled(state)
        return following

    def memory_folder(self, memory_path: str | None) -> Path | None:
        """The folder of this run alone below ``memory_path``, the same after a resume; None without one."""
        if memory_path is None:
            return None
        note = self.path / "memory.json"
        if not note.exists():
            own = Path(memory_path).absolute() / f"{self.path.name}-{secrets.token_hex(4)}"
            write_atomically(note, json.dumps({"folder": str(own)}) + "\n")
        return Path(json.loads(note.read_text(encoding="utf-8"))["folder"])

    def forget_memory(self) -> None:
        """Delete what the run kept in that folder; it cannot be continued then."""
        note = self.path / "memory.json"
        if note.exists():
            shutil.rmtree(json.loads(note.read_text(encoding="utf-8"))["folder"], ignore_errors=True)

    @property
    def scratch(self) -> Path | None:
        """Where files go that are gone with the round; None for the system's folder for these."""
        return self.path

    @property
    def kept(self) -> int:
        """The round of the last checkpoint."""
        return int(json.loads((self.path / "checkpoint.json").read_text(encoding="utf-8"))["round"])

    def divergence(self) -> DivergedError | None:
        """How the run ended before its last round, if it did: its last line says so."""
        try:
            lines, timings = (self.lines(name) for name in LINE_FILES)
        except (OSError, ValueError):  # not there, or cut off within a line: it goes on from its checkpoint
            return None
        if not lines or "diverged" not in lines[-1] or len(lines) != len(timings):
            return None
        ended = lines[-1]["diverged"]
        return DivergedError(lines[-1]["round"], ended["kept"], ended["why"])

    def load(self, template: RoundState) -> RoundState:
        """The state of the last checkpoint (the template itself if there is none); later lines are cut off."""
        mark_path = self.path / "checkpoint.json"
        mark = json.loads(mark_path.read_text()) if mark_path.exists() else None
        for name in LINE_FILES:
            file = self.path / name
            file.touch()
            os.truncate(file, mark["lengths"][name] if mark else 0)
        if mark is None:
            return template
        arrays = _safetensors().load((self.path / mark["tensors"]).read_bytes())
        state: RoundState = settled(unflatten(template, arrays))
        return state

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of ``rounds.jsonl`` or ``timings.jsonl``."""
        text = (self.path / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def _safetensors() -> Any:
    try:
        import safetensors.numpy as tensors
    except ImportError:
        raise MissingExtraError("safetensors", "sim") from None
    return tensors
