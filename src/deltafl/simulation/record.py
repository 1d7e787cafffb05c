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
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from ..analysis.runs import Run
from ..errors import DeltaflError
from ..io import checked, plain_json, read_json, write_atomically
from ..samplers import file_name
from ..types import FloatArray, IntArray
from .directory import CURE, RunDirectory, locked, recorded_settings
from .settings import RunSettings

if TYPE_CHECKING:
    from ..tasks.base import Task
    from .sweep import Job

UNFINISHED = "unfinished"
PACKED = ".jsonl.gz"

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
        """Columns are as long as their rounds, and the settings name the run."""
        probed = len(self.probes.get("round", ()))
        columns = [(self.accuracy, self.loss, self.seconds, self.cpu_seconds, self.bytes), tuple(self.probes.values())]
        for group, length in zip(columns, (len(self.round), probed), strict=True):
            if any(len(column) != length for column in group):
                raise ValueError("its columns are not as long as its rounds")
        if not self.round or not self.draws or not {"sampler", "seed"} <= self.settings.keys():
            raise ValueError("it has no round or no client, or its settings lack sampler or seed")
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


#: Settings that say where and how a run is computed, not what; they are not compared and not recorded.
HOW = {"workers", "data_dir", "checkpoint_every", "memory_path", "device"}


def what_is_run(settings: RunSettings) -> dict[str, Any]:
    """The settings that decide the result, as they are recorded."""
    return settings.model_dump(mode="json", exclude_none=True, exclude=HOW)


def read_run(
    directory: RunDirectory, sampler: str, seed: int, metric: Literal["accuracy", "loss"], num_clients: int
) -> Run:
    """The curves of a recorded run.

    Raises:
        DeltaflError: If its files are damaged.
    """
    lines, timings = directory.lines("rounds.jsonl"), directory.lines("timings.jsonl")
    if len(lines) != len(timings):
        many = f"has {len(lines)} lines, timings.jsonl beside it {len(timings)}"
        raise DeltaflError(f"{directory.path / 'rounds.jsonl'} {many}; {CURE}")
    seconds = np.cumsum([line["seconds"] for line in timings])
    moved = np.cumsum([line.get("bytes_down", 0) + line.get("bytes_up", 0) for line in lines], dtype=np.float64)
    at = [i for i, line in enumerate(lines) if i > 0 and "test" in line]

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = [lines[i]["test"][name] for i in at]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    return Run(
        sampler=sampler,
        seed=seed,
        metric=metric,
        round_r=np.array([lines[i]["round"] for i in at], dtype=np.int64),
        accuracy_r=column("accuracy"),
        loss_r=column("loss"),
        seconds_r=seconds[at],
        bytes_r=moved[at],
        draws_m=_draws(lines, num_clients, directory.path),
        diverged=next((line["round"] for line in lines if "diverged" in line), None),
    )


def _draws(lines: list[dict[str, Any]], num_clients: int, path: Path) -> IntArray:
    """How often each client was drawn over the recorded rounds."""
    draws_m = np.zeros(num_clients, dtype=np.int64)
    try:
        for line in lines:
            np.add.at(draws_m, np.asarray(line.get("cohort", []), dtype=np.int64), line.get("counts", []))
    except (IndexError, ValueError) as error:
        raise DeltaflError(f"{path / 'rounds.jsonl'}, round {line['round']}: {error}; {CURE}") from None
    return draws_m


def record_of(job: "Job", directory: RunDirectory, task: "Task") -> RunRecord:
    """The record of a finished run from its directory.

    Raises:
        DeltaflError: If the directory does not hold every round once, which two processes that wrote there leave.
    """
    from .probes import probe_columns
    from .training.route import noted_route

    _require_every_round_once(directory)
    run = read_run(directory, job.settings.sampler, job.settings.seed, task.metric, task.num_clients)
    lines, timings = directory.lines("rounds.jsonl"), directory.lines("timings.jsonl")
    # By round; the first entry is round 0.
    cpu_seconds = np.cumsum([timing.get("cpu_seconds", np.nan) for timing in timings])
    route = noted_route(directory.path)
    places = {} if route is None or route.hardware == "cpu" else {"device": route.hardware}
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


def _require_every_round_once(directory: RunDirectory) -> None:
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
    """The records of the finished runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: "Job") -> Path:
        """The loose file of a job's record."""
        return self.folder / "runs" / f"{job.key}.json"

    def get(self, job: "Job") -> RunRecord | None:
        """The record of a job; None if it is not finished.

        Raises:
            DeltaflError: If there is a record or an unfinished run of other settings in its place.
        """
        path, packed = self.path(job), self._packed_file(job.part)
        record = read_record(path) if path.exists() else _read_packed(packed).get(path.stem)
        begun = None if record is not None else recorded_settings(self.folder / UNFINISHED / job.key)
        if record is not None:
            require_same(record.settings, job, path)
        elif begun is not None:
            require_same(begun, job, self.folder / UNFINISHED / job.key)
        return record

    def records(self, part: str | None = None) -> list[RunRecord]:
        """All records, or those of one part, in the order of parts and of their files' names."""
        return [record for name in ([part] if part else self.parts()) for _, record in sorted(self._part(name).items())]

    def parts(self) -> list[str]:
        """The parts that have a record, in alphabetical order."""
        runs = self.folder / "runs"
        packed = {path.name.removesuffix(PACKED) for path in runs.glob(f"*{PACKED}")}
        return sorted(packed | {path.parent.name for path in runs.glob("*/*.json")})

    def pack(self, part: str) -> None:
        """Move the loose records of a part into its packed file; the same records give the same bytes."""
        with self.lock():
            loose = list((self.folder / "runs" / part).glob("*.json"))
            if not loose:
                return
            records = [_rounded_record(record) for _, record in sorted(self._part(part).items())]
            lines = (json.dumps(record.model_dump(mode="json"), separators=(",", ":")) for record in records)
            content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
            write_atomically(self._packed_file(part), content)
            for path in loose:
                path.unlink()
            loose[0].parent.rmdir()

    def lock(self) -> AbstractContextManager[None]:
        """Held while one process writes in the folder."""
        return locked(self.folder)

    def _part(self, part: str) -> dict[str, RunRecord]:
        loose = {path.stem: read_record(path) for path in (self.folder / "runs" / part).glob("*.json")}
        return {**_read_packed(self._packed_file(part)), **loose}

    def _packed_file(self, part: str) -> Path:
        return self.folder / "runs" / f"{part}{PACKED}"


def _read_packed(path: Path) -> dict[str, RunRecord]:
    """The records of a packed file by the names of their loose files; none if there is no file."""
    if not path.exists():
        return {}
    status = path.stat()
    return _lines_of(path, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=16)
def _lines_of(path: Path, stamp: tuple[int, int]) -> dict[str, RunRecord]:
    """The content of a packed file; ``stamp`` changes with the file."""
    where, cure = f"{path} does not hold records of runs", "restore it, or delete it to run again"
    try:
        values = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise DeltaflError(f"{path} cannot be read: {error}; restore it, or delete it to run again") from None
    found = [checked(RunRecord, value, where, cure) for value in values]
    return {f"{file_name(record.sampler)}-seed{record.seed}": record for record in found}


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
