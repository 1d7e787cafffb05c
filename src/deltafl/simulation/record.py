"""The record of a finished run, and the store that keeps the records of a sweep.

::

    DIR/runs/PART/SAMPLER-seedN.json     the record of one run: settings, curve and draws, about ten kilobytes
    DIR/runs/PART.jsonl.gz               many of them, one a line; a loose record wins over a packed one
    DIR/unfinished/PART/SAMPLER-seedN/   the folder of a run that is not finished (``sweep.py``)

A run's own folder (checkpoints, a line for every round) takes megabytes and is deleted when the run is finished; its
record stays and lets a sweep continue on another machine. Numbers are rounded to the digits that a reader can use.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from filelock import FileLock
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from ..analysis.runs import Run
from ..errors import DeltaflError
from ..io import checked, plain_json, read_json, write_atomically
from ..samplers import file_name
from ..types import FloatArray
from .settings import RunSettings

if TYPE_CHECKING:
    from ..tasks.base import Task
    from .directory import RunDirectory
    from .sweep import Job

UNFINISHED = "unfinished"
PACKED = ".jsonl.gz"
LOCK = ".lock"

#: A column of numbers; null where one does not exist.
Column = Annotated[list[float | None], BeforeValidator(plain_json)]


class RunRecord(BaseModel):
    """One finished run.

    Attributes:
        part: The part of the experiment.
        settings: Every setting (``RunSettings``), sampler and seed included; folders and workers are left out.
        data: The honest name of the data that were read.
        metric: What counts: accuracy or loss.
        environment: Versions and hardware.
        round: Rounds done at each evaluation, increasing.
        accuracy: Test accuracy there; null where the task has none.
        client_accuracy: Mean over clients of their own test accuracy; empty if not measured.
        loss: Test loss there.
        seconds: Wall clock up to there, evaluation excluded.
        cpu_seconds: Processor time of the training process up to there, evaluation excluded: unlike the wall clock it
            does not depend on what else the machine did.
        bytes: Bytes that a federation would have moved up to there.
        draws: How often each client was drawn.
        refused: Replies that were refused and counted as missing.
        diverged: The round in which the run diverged and was ended, its last one; null if it was not.
        diverged_why: Symptom and likely cause, one sentence; empty if it did not diverge.
        probes: What else was measured, column by column, with its own ``round``; empty if nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str
    settings: dict[str, Any]
    data: str
    metric: Literal["accuracy", "loss"]
    environment: dict[str, Any]
    round: list[int]
    accuracy: Column
    client_accuracy: Column = []
    loss: Column
    seconds: Column
    cpu_seconds: Column
    bytes: Column
    draws: list[int]
    refused: int = 0
    diverged: int | None = None
    diverged_why: str = ""
    probes: dict[str, Column] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Columns that belong together are equally long, and rounds rise."""
        columns = {name: getattr(self, name) for name in ("accuracy", "loss", "seconds", "cpu_seconds", "bytes")}
        if self.client_accuracy:
            columns["client_accuracy"] = self.client_accuracy
        lengths = {name: (len(column), len(self.round)) for name, column in columns.items()}
        lengths |= {f"probes.{n}": (len(c), len(self.probes.get("round", []))) for n, c in self.probes.items()}
        for name, (length, needed) in lengths.items():
            if length != needed:
                raise ValueError(f"{name} has {length} entries for {needed} rounds")
        if not self.round or not self.draws:
            raise ValueError("it has no round or no client")
        if any(after <= before for before, after in pairwise(self.round)):
            raise ValueError("its rounds do not rise")
        if not isinstance(self.settings.get("sampler"), str) or not isinstance(self.settings.get("seed"), int):
            raise ValueError("its settings lack sampler or seed")
        return self

    @property
    def sampler(self) -> str:
        """The label of the sampler."""
        return str(self.settings["sampler"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings["seed"])

    def run(self) -> Run:
        """The run as a row of the run table."""
        return Run(
            sampler=self.sampler,
            seed=self.seed,
            metric=self.metric,
            round_r=np.array(self.round, dtype=np.int64),
            accuracy_r=_floats(self.accuracy),
            loss_r=_floats(self.loss),
            seconds_r=_floats(self.seconds),
            bytes_r=_floats(self.bytes),
            draws_m=np.array(self.draws, dtype=np.int64),
            diverged=self.diverged,
            part=self.part,
            cpu_seconds_r=_floats(self.cpu_seconds),
            client_accuracy_r=_floats(self.client_accuracy) if self.client_accuracy else None,
            probes={name: _floats(column) for name, column in self.probes.items()},
            settings=self.settings,
            data=self.data,
            environment=self.environment,
            diverged_why=self.diverged_why,
        )

    def probe(self, name: str) -> FloatArray:
        """A column of ``probes``, NaN where there is no number.

        Raises:
            DeltaflError: If it was not measured.
        """
        if name not in self.probes:
            raise DeltaflError(f"run {self.sampler}, seed {self.seed} has no column {name!r}; it was run without it")
        return _floats(self.probes[name])


#: Settings that say where and how a run is computed, not what; they are not compared and not recorded.
HOW = {"workers", "data_dir", "checkpoint_every", "memory_path", "device"}


def what_is_run(settings: RunSettings) -> dict[str, Any]:
    """The settings that decide the result, as they are recorded."""
    return settings.model_dump(mode="json", exclude_none=True, exclude=HOW)


def record_of(job: "Job", directory: "RunDirectory", task: "Task") -> RunRecord:
    """The record of a finished run from its directory.

    Raises:
        DeltaflError: If the directory does not hold every round once, which two processes that wrote there leave.
    """
    from .directory import read_run
    from .probes import probe_columns
    from .training.routes import hardware_of

    _require_every_round_once(directory)
    run = read_run(directory, job.settings.sampler, job.settings.seed, task.metric, task.num_clients)
    lines, timings = directory.lines("rounds.jsonl"), directory.lines("timings.jsonl")
    # By round; the first entry is round 0.
    cpu_seconds = np.cumsum([timing.get("cpu_seconds", np.nan) for timing in timings])
    places = {"device": hardware} if (hardware := hardware_of(directory.path)) else {}
    tests = [line["test"] for line in lines[1:] if "test" in line]
    by_client = [test.get("client_accuracy") for test in tests]
    return RunRecord(
        part=job.part,
        settings=what_is_run(job.settings),
        data=task.dataset.name,
        metric=task.metric,
        environment=places
        | {key: value for key, value in directory.environment().items() if key not in {"command", *task.data}},
        round=run.round_r.tolist(),
        accuracy=run.accuracy_r.tolist(),
        client_accuracy=by_client if any(value is not None for value in by_client) else [],
        loss=run.loss_r.tolist(),
        seconds=run.seconds_r.tolist(),
        cpu_seconds=cpu_seconds[run.round_r].tolist(),
        bytes=run.bytes_r.tolist(),
        draws=run.draws_m.tolist(),
        refused=sum(len(line.get("rejected", ())) for line in lines),
        diverged=run.diverged,
        diverged_why="" if run.diverged is None else lines[-1]["diverged"]["why"],
        probes=probe_columns(lines),
    )


def _require_every_round_once(directory: "RunDirectory") -> None:
    rounds, timed = ([line["round"] for line in directory.lines(f"{name}.jsonl")] for name in ("rounds", "timings"))
    if not rounds == timed == list(range(len(rounds))):
        raise DeltaflError(
            f"{directory.path} does not hold every round once and in order, so two processes wrote there; "
            "delete it and give the same command again"
        )


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record; the file appears in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = _rounded_record(record).model_dump(mode="json")
    lines = (f'"{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in columns.items())
    write_atomically(path, "{" + ",\n ".join(lines) + "}\n")


def read_record(path: Path) -> RunRecord:
    """Read what ``write_record`` wrote.

    Raises:
        DeltaflError: If the file is missing or is no record.
    """
    return checked(RunRecord, read_json(path), f"{path} is not the record of a run", "delete it to run again")


class RunStore:
    """The records of the finished runs in a folder.

    Several processes can use a store at the same time: records appear in one step, and a record is packed before its
    loose file is deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: "Job") -> Path:
        """The loose file of a job's record."""
        return self.folder / "runs" / f"{job.key}.json"

    def unfinished(self, job: "Job") -> Path:
        """The run directory of a job that is not finished."""
        return self.folder / UNFINISHED / job.key

    def get(self, job: "Job") -> RunRecord | None:
        """The record of a job; None if it is not finished.

        Raises:
            DeltaflError: If there is a record or an unfinished run of other settings in its place.
        """
        from .directory import recorded_settings

        record = self._find(job)
        if record is not None:
            require_same(record.settings, job, self.path(job))
            return record
        place = self.unfinished(job)
        try:
            begun = recorded_settings(place)
        except DeltaflError:
            if (place / "config.toml").exists():
                raise
            return self._find(job)  # another process finished it at this moment
        if begun is not None:
            require_same(begun, job, place)
        return None

    def _find(self, job: "Job") -> RunRecord | None:
        path = self.path(job)
        if path.exists():
            try:
                return read_record(path)
            except DeltaflError:
                if path.exists():  # else another process packed it at this moment
                    raise
        packed = self._packed_file(job.part)
        return _read_packed(packed).get(path.stem) if packed.exists() else None

    def records(self, part: str | None = None) -> list[RunRecord]:
        """All records, or those of one part, in the order of parts and of their files' names."""
        return [record for name in ([part] if part else self.parts()) for _, record in sorted(self._part(name).items())]

    def parts(self) -> list[str]:
        """The parts that have a record, in alphabetical order."""
        runs = self.folder / "runs"
        packed = {path.name.removesuffix(PACKED) for path in runs.glob(f"*{PACKED}")}
        return sorted(packed | {path.parent.name for path in runs.glob("*/*.json")})

    def _part(self, part: str) -> dict[str, RunRecord]:
        packed = self._packed_file(part)
        loose = {path.stem: read_record(path) for path in (self.folder / "runs" / part).glob("*.json")}
        return {**(_read_packed(packed) if packed.exists() else {}), **loose}

    def _packed_file(self, part: str) -> Path:
        return self.folder / "runs" / f"{part}{PACKED}"

    def pack(self, part: str) -> None:
        """Move the loose records of a part into its packed file; the same records give the same bytes."""
        with self.lock():
            loose = list((self.folder / "runs" / part).glob("*.json"))
            if not loose:
                return
            known = sorted(self._part(part).items())
            lines = (
                json.dumps(_rounded_record(record).model_dump(mode="json"), separators=(",", ":"))
                for _, record in known
            )
            content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
            write_atomically(self._packed_file(part), content)
            for path in loose:
                path.unlink()
            with suppress(OSError):  # another process finished a run meanwhile
                loose[0].parent.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while one process writes a file that belongs to the whole folder, such as its page."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / LOCK):
            yield


@lru_cache(maxsize=16)
def _lines_of(path: Path, stamp: tuple[int, int]) -> dict[str, RunRecord]:
    """The records of a packed file by the names of their loose files; ``stamp`` changes with the file."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        values = [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise DeltaflError(f"{path} cannot be read: {error}; restore it, or delete it to run again") from None
    where, cure = f"{path} does not hold records of runs", "restore it, or delete it to run again"
    found = [checked(RunRecord, value, where, cure) for value in values]
    return {f"{file_name(record.sampler)}-seed{record.seed}": record for record in found}


def _read_packed(path: Path) -> dict[str, RunRecord]:
    status = path.stat()
    return _lines_of(path, (status.st_mtime_ns, status.st_size))


def require_same(recorded: dict[str, Any], job: "Job", place: Path) -> None:
    """Refuse recorded settings that differ from the job's; a setting that is not recorded had its default.

    Raises:
        DeltaflError: If one differs; it names the setting.
    """
    cure = "delete it to run it again"
    before = what_is_run(checked(RunSettings, recorded, f"{place} has impossible settings", cure))
    now = what_is_run(job.settings)
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise DeltaflError(
                f"{place} was run with {key} = {before.get(key)}, not {now.get(key)}: choose another --out, or {cure}"
            )


def _rounded_record(record: RunRecord) -> RunRecord:
    return record.model_copy(
        update={
            **{name: _rounded(getattr(record, name), 6) for name in ("accuracy", "client_accuracy", "loss")},
            **{name: _rounded(getattr(record, name), 6) for name in ("seconds", "cpu_seconds")},
            "probes": {name: _rounded(column, 5) for name, column in record.probes.items()},
        }
    )


def _floats(column: list[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)


def _rounded(column: list[float | None], digits: int) -> list[float | None]:
    return [None if value is None else float(f"{value:.{digits}g}") for value in column]
