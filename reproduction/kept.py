"""What a folder has of a job: the record of a finished run, or the directory of one that is not (see ``sweep.py``)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from deltafl.errors import DeltaflError
from deltafl.reading import checked
from deltafl.simulation.settings import RunSettings

from .record import RunRecord, read_record, what_is_run
from .spec import Job

UNFINISHED = "unfinished"
_TAIL_BYTES = 65536
T = TypeVar("T")


def is_done(job: Job, folder: Path) -> bool:
    """Whether the job has a record in the folder, and with these settings.

    Raises:
        DeltaflError: If there is a record or an unfinished run of other settings in its place.
    """
    return find_record(job, folder) is not None


def find_record(job: Job, folder: Path) -> RunRecord | None:
    """The record of a job, or None if it has none.

    Raises:
        DeltaflError: If there is a record or an unfinished run of other settings in its place.
    """
    from deltafl.simulation.records import recorded_settings

    path, unfinished = record_path(job, folder), folder / UNFINISHED / job.key
    record = _unless_gone(path, read_record) if path.exists() else None
    if record is not None:
        require_same(record.settings, job, path)
        return record
    begun = _unless_gone(unfinished, recorded_settings)
    if begun is not None:
        require_same(begun, job, unfinished)
    return None


def _unless_gone(path: Path, read: Callable[[Path], T | None]) -> T | None:
    """What is there; None if another sweep on the folder takes it away at this moment."""
    try:
        return read(path)
    except DeltaflError:
        return read(path) if path.exists() else None


def record_path(job: Job, folder: Path) -> Path:
    """Where a finished run's record goes."""
    return folder / "runs" / f"{job.key}.json"


def files_lock(folder: Path) -> Path:
    """The lock of what sweeps on one folder write: its configuration, table and page (``simulation/lock.py``)."""
    return folder / UNFINISHED / "files.lock"


def rounds_played(path: Path) -> int:
    """The last round in an unfinished run's ``timings.jsonl``; 0 if there is none."""
    try:
        with (path / "timings.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = [line for line in file.read().split(b"\n") if line.endswith(b"}")]
        return int(json.loads(lines[-1])["round"]) if lines else 0
    except (OSError, ValueError):  # not there, or a line that is being written
        return 0


def require_same(recorded: dict[str, Any], job: Job, place: Path) -> None:
    """Refuse a record of other settings than the job's. One that this package did not have yet had its default."""
    cure = "delete it to run it again"
    before = what_is_run(checked(RunSettings, recorded, f"{place} has impossible settings", cure))
    now = what_is_run(job.settings)
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise DeltaflError(
                f"{place} was run with {key} = {before.get(key)}, not {now.get(key)}: choose another --out, or {cure}"
            )
