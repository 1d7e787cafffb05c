"""Runs that only helped to choose a rate: of each a line is kept, in ``runs/PART-tuning.jsonl``, instead of a record.

There are thousands of them, and what is asked of one is when it reached the threshold, and its mean accuracy. The first
line of the file says what all have in common: the settings, and the rounds over which accuracy is averaged.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from deltafl.errors import DeltaflError
from deltafl.io import checked, read_json_lines, write_atomically
from deltafl.simulation.record import RunRecord, require_same, what_is_run
from deltafl.simulation.sweep import Job

from .numbers import mean_accuracy, rounds_to_threshold
from .parts import Part

#: The settings in which the runs of a file differ.
_OWN = ("sampler", "local_lr", "seed", "rounds")
#: Sampler, rate and seed of a run.
Key = tuple[str, float, int]
#: What tells one version of a file from the next; None without a file.
Stamp = tuple[int, int, int] | None


class Tried(BaseModel):
    """What is kept of a run.

    Attributes:
        sampler, local_lr, seed: Which run it is.
        rounds: The rounds that it was to play.
        reached: The first evaluated round at the threshold; null for never, or if it diverged.
        mean_accuracy: Over the rounds that the file's first line names.
        diverged: The round in which it diverged; null if it did not.
        environment: Versions and hardware.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampler: str
    local_lr: float
    seed: int
    rounds: int
    reached: float | None
    mean_accuracy: float
    diverged: int | None
    environment: dict[str, Any]

    @property
    def key(self) -> Key:
        """Which run it is."""
        return self.sampler, self.local_lr, self.seed


class _Shared(BaseModel):
    """The first line of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any]
    horizon: int


def key_of(job: Job) -> Key:
    """Which run a job is, within its part."""
    return job.settings.sampler, job.settings.local_lr or 0.0, job.settings.seed


def tried_of(record: RunRecord, part: Part) -> Tried:
    """What is kept of a finished run."""
    return Tried(
        **{name: record.settings[name] for name in _OWN},
        reached=rounds_to_threshold(record, part.threshold),
        mean_accuracy=round(mean_accuracy(record, part.tuning_horizon), 6),
        diverged=record.diverged,
        environment=record.environment,
    )


def tried_path(part: Part, folder: Path) -> Path:
    """Where the lines of a part are."""
    return folder / "runs" / f"{part.name}-tuning.jsonl"


def read_tried(part: Part, folder: Path) -> dict[Key, Tried]:
    """The runs of a part that are kept as lines.

    Raises:
        DeltaflError: If the file is damaged, or its runs had other settings.
    """
    path = tried_path(part, folder)
    if not path.exists():
        return {}
    cure = "choose another --out, or delete it to run them again"
    lines = read_json_lines(path)
    if not lines:
        raise DeltaflError(f"{path} is empty; {cure}")
    shared = checked(_Shared, lines[0], f"{path}, line 1,", cure)
    common = what_is_run(part.common)
    require_same(shared.settings | {name: common[name] for name in _OWN}, Job(part.name, part.common), path)
    if shared.horizon != part.tuning_horizon:
        raise DeltaflError(f"{path} has means over {shared.horizon} rounds, not {part.tuning_horizon}: {cure}")
    found = [checked(Tried, line, f"{path}, line {number},", cure) for number, line in enumerate(lines[1:], start=2)]
    return {tried.key: tried for tried in found}


def stamp_of(part: Part, folder: Path) -> Stamp:
    """Which version of the lines is there: another process may have written another since they were read."""
    try:
        found = tried_path(part, folder).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def line_of(job: Job, lines: dict[Key, Tried]) -> Tried | None:
    """The line of a run; None if there is none, or one of another number of rounds."""
    line = lines.get(key_of(job))
    return line if line is not None and line.rounds == job.settings.rounds else None


def write_tried(part: Part, folder: Path, every: Iterable[Tried]) -> None:
    """Write the file anew, in one order whatever the order of the runs."""
    settings = {name: value for name, value in what_is_run(part.common).items() if name not in _OWN}
    lines = [_Shared(settings=settings, horizon=part.tuning_horizon), *sorted(every, key=lambda tried: tried.key)]
    text = "".join(json.dumps(line.model_dump(mode="json")) + "\n" for line in lines)
    write_atomically(tried_path(part, folder), text)
