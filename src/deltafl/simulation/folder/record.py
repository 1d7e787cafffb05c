"""The record of a finished run, and the store that keeps the records of a sweep.

::

    DIR/runs/PART/SAMPLER-seedN.json     the record of one run: settings, curve and draws, about ten
                                         kilobytes
    DIR/unfinished/PART/SAMPLER-seedN/   the folder of a run that is not finished (``sweep.py``)

A run's own folder takes megabytes and is deleted when the run is finished; its record stays.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    model_validator,
)

from ...analysis.bands import OF_CLIENTS
from ...analysis.runs import PICTURES, Fairness, Run
from ...analysis.statistics import fairness_of
from ...errors import DeltaflError, counted
from ...samplers.label import file_name
from ...store import checked
from ...store.files import below, read_text, write_with_folder
from ...store.values import parsed
from ...tasks.base import Task
from ...tasks.metrics import METRICS, Metric
from ...types import FloatArray, IntArray, Json, Judge, judge_of
from ..settings import FREE_ON_RESUME, RunSettings, differing
from .checkpoint import CURE
from .clients import CLIENTS, Column, NotedClients, finer, noted_clients
from .directory import LINE_FILES, RunDirectory, locked, recorded_settings
from .lines import Count, Round, refused

UNFINISHED = "unfinished"
#: What a record's file has after its last entry; a packed record has none.
_CHECKSUM = ',"crc32":'
_CURVES = (
    *("accuracy", "loss", "seconds", "cpu_seconds", "bytes"),
    # A run may be without them, or its record is older.
    *("client_accuracy", "clock", "client_seconds", "bytes_up", "trainings", "cost"),
)
#: What the last line of a run may have, and no other.
_ENDS = {"stopped", "diverged", "suspect"}
#: Settings that say where and how a run is computed, not what; they are not compared and not
#: recorded.
_HOW = FREE_ON_RESUME | {"memory_path", "device"}

#: Settings that records of earlier versions have and that change no result.
_GONE = {"engine", "probe_every"}

#: The columns of ``Comparison.summary``, and where a ``SamplerSummary`` has them.
OF_SUMMARY = {
    "gap_closed": "gap_closed.value",
    "gap_low": "gap_closed.low",
    "gap_high": "gap_closed.high",
    "client_mean": "fairness.mean.mean",
    "client_sd": "fairness.sd.mean",
    "worst_tenth": "fairness.worst_tenth.mean",
    "worst_tenth_sd": "fairness.worst_tenth.sd",
    "rounds_to_threshold": "to_threshold.rounds.mean",
    "reached": "to_threshold.num_reached",
    "speedup": "to_threshold.speedup.ratio",
    "speedup_low": "to_threshold.speedup.low",
    "speedup_high": "to_threshold.speedup.high",
    "clock_to_threshold": "to_threshold.clock",
    "clock": "total_clock",
    "seconds": "total_seconds",
    "bytes": "total_bytes",
    "diverged": "num_diverged",
}
#: Those of ``Comparison.runs``, after the sampler and the seed.
OF_RUNS = ("round", "accuracy", "loss", "seconds", "bytes", "clock")

#: The same, written with as many digits as are looked at.
Rounded = Annotated[Column, PlainSerializer(lambda column: _rounded(column, 6))]
Probed = Annotated[Column, PlainSerializer(lambda column: _rounded(column, 5))]


class Job(NamedTuple):
    """One run of a sweep. Jobs of one sweep differ in part, sampler or seed."""

    part: str
    settings: RunSettings
    callbacks: tuple[Any, ...] = ()  #: more callbacks of its run (``callback.py``)

    @property
    def key(self) -> str:
        """Its place below ``runs/``, without the suffix."""
        return run_key(self.part, self.settings.sampler, self.settings.seed)


class RunRecord(BaseModel):
    """One finished run: an ``analysis.Run`` as plain lists, which are empty where nothing was
    recorded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str
    settings: Json  #: those that decide the result (``what_is_run``), sampler and seed included
    data: str
    metric: str
    judges: list[Judge] = []  #: how metrics beside accuracy and loss are read
    environment: Json
    round: list[Round]
    accuracy: Rounded
    client_accuracy: Rounded = []
    clock: Rounded = []
    fairness: Fairness | None = None
    loss: Rounded
    seconds: Rounded
    cpu_seconds: Rounded
    bytes: Column
    client_seconds: Rounded = []
    bytes_up: Column = []
    trainings: Column = []
    cost: Column = []
    server_bytes: int | None = None
    draws: list[Count]
    refused: int = 0  #: replies that were refused and counted as missing
    refused_why: str = ""
    diverged: int | None = None
    diverged_why: str = ""
    stopped_why: str = ""
    probes: dict[str, Probed] = {}
    others: dict[str, Rounded] = {}  #: the curves of these metrics

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not {"sampler", "seed"} <= self.settings.keys():
            raise ValueError("its settings must have sampler and seed")
        columns = [*(getattr(self, name) for name in _CURVES), *self.others.values()]
        if any(len(column) not in (0, len(self.round)) for column in columns):
            raise ValueError("its curves must have a number for each round")
        return self

    @property
    def sampler(self) -> str:
        """The label of the sampler."""
        return str(self.settings["sampler"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings["seed"])

    @property
    def key(self) -> str:
        """Its job's ``key``."""
        return run_key(self.part, self.sampler, self.seed)

    def run(self) -> Run:
        """The run as a row of the run table."""
        same: Json = {name: getattr(self, name) for name in Run._fields if hasattr(self, name)}
        for name in _CURVES:
            column = getattr(self, name)
            same[f"{name}_r"] = _floats(column) if column else None
        same |= {
            "round_r": np.array(self.round, np.int64),
            "draws_m": np.array(self.draws, np.int64),
            "probes": {name: _floats(column) for name, column in self.probes.items()},
            "others_r": {name: _floats(column) for name, column in self.others.items()},
        }
        return Run(**same)


def first_judge(lines: Sequence[Json]) -> Judge:
    """The metric that counts, as the first line says."""
    first: Json = lines[0] if lines else {}
    judges = first.get("metrics", [])
    # Where it is one of these alone nothing is written down: their values say which.
    name = "loss" if first.get("test", {}).get("accuracy") is None else "accuracy"
    return judge_of(judges[0].name if judges else name, judges)


def judges_of(directory: RunDirectory) -> list[Judge]:
    """How the metrics of a run are read, as its first line says; of accuracy or loss alone none."""
    return list(next(directory.lines("rounds.jsonl"), {}).get("metrics", ()))


def require_own_columns(metrics: Iterable[Metric]) -> None:
    """Refuse a metric of the user's that is called as something else in tables and records."""
    taken = {"seeds", *OF_SUMMARY, *OF_CLIENTS, *NotedClients.model_fields}
    taken |= {Path(picture).stem for picture in PICTURES}
    # Curves are columns without the name of their axis.
    taken |= {name.removesuffix("_r") for name in Run._fields}
    for metric in metrics:
        if metric.name in taken and metric.name not in METRICS:
            raise DeltaflError(
                f"your metric is called {metric.name!r}, which means something else in tables and "
                "records; give it another name"
            )


def what_is_run(settings: RunSettings) -> Json:
    """The settings that decide the result, as they are recorded."""
    return settings.model_dump(mode="json", exclude_none=True, exclude=_HOW)


def read_run(directory: RunDirectory, settings: RunSettings) -> Run:
    """The curves of a run in its folder; an error if that does not hold every round once, which
    two processes leave.
    """
    directory.require_settings(settings)
    lines, timings = (list(directory.lines(name)) for name in LINE_FILES)
    rounds, timed = ([line["round"] for line in each] for each in (lines, timings))
    # Round 0 is the initial model; curves begin after it.
    evaluated = [line for line in lines[1:] if "test" in line]
    if not evaluated or not rounds == timed == list(range(len(rounds))):
        raise DeltaflError(f"{directory.path} does not hold every round once and in order; {CURE}")
    _require_no_more(directory.path, lines, settings.rounds)
    at_r = np.array([line["round"] for line in evaluated], np.int64)

    def summed(per_round: list[float | None]) -> FloatArray:
        # A round is its place in the list, as the check above has made sure.
        return np.cumsum(_floats(per_round))[at_r]

    def tested(name: str) -> FloatArray:
        return _floats([line["test"].get(name) for line in evaluated])

    judge = first_judge(lines)
    # These two have columns of their own.
    judges = [one for one in lines[0].get("metrics", ()) if one.name not in ("accuracy", "loss")]
    clock_r = _floats([line.get("clock") for line in evaluated])
    client_accuracy_r = tested("client_accuracy")

    def listed(key: str) -> IntArray:
        # Round 0 has no cohort.
        return np.array([entry for line in lines for entry in line.get(key, ())], np.int64)

    drawn_n = listed("cohort")
    count_n = listed("counts")
    asked = [len(line.get("cohort", ())) or line.get("answers", 0) for line in lines]
    cost_r = None
    if settings.client_costs is not None:
        cost_r = summed([line.get("cost", 0) for line in lines])
    m = directory.num_clients()
    directory.whole(CLIENTS)  # an error if it is not
    noted = noted_clients(directory.path)
    num_examples_m = _floats(noted.num_examples) if noted.num_examples else None
    sizes = {len(noted.num_examples) or m, m}
    if len(drawn_n) != len(count_n) or not drawn_n.max(initial=-1) < m or len(sizes) > 1:
        raise DeltaflError(f"{directory.path} has other clients than its checkpoint: {CURE}")
    value_km = np.array([_floats(row) for row in noted.rows.values()]) if noted.rows else None
    spent: Any = {
        f"{name}_r": summed([timing[name] for timing in timings])
        for name in ("seconds", "cpu_seconds", "client_seconds")
    }
    diverged = lines[-1].get("diverged")
    reasons = refused(lines)
    return Run(
        sampler=settings.sampler,
        seed=settings.seed,
        metric=judge.name,
        judges=judges,
        others_r={one.name: tested(one.name) for one in judges},
        settings=what_is_run(settings),
        round_r=at_r,
        accuracy_r=tested("accuracy"),
        loss_r=tested("loss"),
        bytes_r=summed([line.get("bytes_down", 0) + line.get("bytes_up", 0) for line in lines]),
        trainings_r=summed(asked),
        cost_r=cost_r,
        client_names=noted.names,
        client_strata=noted.strata,
        bytes_up_r=summed([line.get("bytes_up", 0) for line in lines]),
        server_bytes=max(timing.get("server_bytes", 0) for timing in timings) or None,
        client_accuracy_r=None if np.isnan(client_accuracy_r).all() else client_accuracy_r,
        clock_r=None if np.isnan(clock_r).all() else clock_r,
        draws_m=np.bincount(drawn_n, count_n, m).astype(np.int64),
        diverged=rounds[-1] if diverged else None,
        diverged_why=diverged["why"] if diverged else "",
        stopped_why=lines[-1].get("stopped", ""),
        refused=reasons.total(),
        refused_why=max(reasons, key=reasons.__getitem__, default=""),
        num_examples_m=num_examples_m,
        value_km=value_km,
        fairness=None if value_km is None else fairness_of(value_km, judge.higher),
        **spent,
    )


def _require_no_more(folder: Path, lines: Sequence[Json], rounds: int | None) -> None:
    """Refuse lines that follow the end of a run: it has not played them."""
    ends = [line["round"] for line in lines if _ENDS & line.keys()]
    end = min([*ends, rounds or len(lines)])
    own = (recorded_settings(folder) or {}).get("rounds", 0)
    if rounds and own > rounds and not ends:
        raise DeltaflError(
            f"{folder} was played on to {counted(own, 'round')} by itself, and the comparison has "
            f"{rounds}: go on with deltafl compare --resume --rounds {own}"
        )
    if lines[-1]["round"] > end:
        raise DeltaflError(
            f"{folder / LINE_FILES[0]} has rounds up to {lines[-1]['round']}, and the run ended "
            f"with round {end}: take the lines after it out, there and in {LINE_FILES[1]}, or "
            f"{CURE}"
        )


def record_of(job: Job, directory: RunDirectory, task: Task) -> RunRecord:
    """The record of a finished run from its directory."""
    from ..training.route import noted_route

    run = read_run(directory, job.settings)
    curves = {name: getattr(run, f"{name}_r") for name in ("round", *_CURVES)}
    route = noted_route(directory.path)
    device = {} if route is None or route.hardware == "cpu" else {"device": route.hardware}
    versions = {
        key: value
        for key, value in directory.environment().items()
        if key not in {"command", "directory", "model", "examples_crc32", *task.data}
    }
    same: Json = {
        name: getattr(run, name) for name in RunRecord.model_fields if name in Run._fields
    }
    same |= {name: curve.tolist() for name, curve in curves.items() if curve is not None}
    same |= {
        "part": job.part,
        "data": task.dataset.name,
        "others": {name: curve_r.tolist() for name, curve_r in run.others_r.items()},
        "environment": device | versions,
        "draws": run.draws_m.tolist(),
        "probes": measured_columns(directory.lines("rounds.jsonl")),
    }
    return RunRecord(**same)


def measured_columns(lines: Iterable[Json]) -> dict[str, list[float | None]]:
    """What a callback put under ``probe`` into the lines of ``rounds.jsonl``, as columns.

    The rounds that have all of its numbers are kept; an entry is the mean over the rounds since the
    one kept before, None where no round has the number. Empty where there are none.
    """
    measured = [(line["round"], line["probe"]) for line in lines if "probe" in line]
    names = dict.fromkeys(name for _, probe in measured for name in probe)
    columns: dict[str, list[float | None]] = {name: [] for name in ("round", *names) if names}
    window: list[Json] = []
    for round, probe in measured:
        window.append(probe)
        if probe.keys() != names.keys():
            continue
        columns["round"].append(round)
        for name in names:
            known = [entry[name] for entry in window if entry.get(name) is not None]
            columns[name].append(sum(known) / len(known) if known else None)
        window = []
    return columns


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record with its checksum; the file appears in one step."""
    line = record_line(record).rstrip()
    write_with_folder(path, f'{line[:-1]}{_CHECKSUM}"{zlib.crc32(line.encode()):08x}"}}\n')


def read_record(path: Path) -> RunRecord:
    """Read what ``write_record`` wrote."""
    cure = "delete it to run again"
    text = read_text(path)
    found = parsed(text, str(path))
    # Older ones have none.
    if isinstance(found, dict) and "crc32" in found:
        line = f"{text.rpartition(_CHECKSUM)[0]}}}"
        if found.pop("crc32") != f"{zlib.crc32(line.encode()):08x}":
            raise DeltaflError(f"{path} is not as it was written, its checksum differs: {cure}")
    return checked(RunRecord, found, f"{path} is not the record of a run", cure)


class RunStore:
    """The records of the finished runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: Job) -> Path:
        """The loose file of a job's record."""
        return below(self.folder, "runs", f"{job.key}.json")

    def get(self, job: Job) -> RunRecord | None:
        """The record of a job; None if it is not finished. A record or run of other settings
        there is an error.
        """
        unfinished = below(self.folder, UNFINISHED, job.key)
        record = self.record(job)
        if record is not None:
            require_same(record.settings, job, self.path(job))
        # A run that is not finished is refused, too, before it is continued.
        elif (begun := recorded_settings(unfinished)) is not None:
            require_same(begun, job, unfinished)
        return record

    def record(self, job: Job) -> RunRecord | None:
        """What is there in a job's place, whatever its settings."""
        path = self.path(job)
        return read_record(path) if path.exists() else None

    def lock(self) -> AbstractContextManager[None]:
        """Held while one process writes in the folder."""
        return locked(self.folder)


def run_key(part: str, sampler: str, seed: int) -> str:
    """The place of a run below ``runs/``, without the suffix."""
    name = f"{file_name(sampler)}-seed{seed}"
    return f"{part}/{name}" if part else name


def require_same(recorded: Json, job: Job, place: Path) -> None:
    """Refuse recorded settings that differ from the job's; a setting that is not recorded had
    its default.
    """
    cure = "delete it to run it again"
    known = {key: value for key, value in recorded.items() if key not in _GONE}
    before = checked(RunSettings, known, f"{place} has impossible settings", cure)
    for key, old, new in differing(before, job.settings):
        if key not in _HOW:
            raise DeltaflError(
                f"{place} was run with {key} = {old}, not {new}: choose another --out, or {cure}"
            )


def record_line(record: RunRecord) -> str:
    """A record as one line of JSON, its numbers rounded to what is looked at."""
    fields = record.model_dump(mode="json")
    fields["fairness"] = record.fairness and {
        name: finer(record.metric, number, round(number, 4)) for name, number in record.fairness
    }
    if not record.judges:
        del fields["judges"], fields["others"]
    if not record.cost:
        del fields["cost"]
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _rounded(column: list[float | None], digits: int) -> list[float | None]:
    return [None if value is None else float(f"{value:.{digits}g}") for value in column]


def _floats(column: Sequence[float | None]) -> FloatArray:
    # NumPy makes NaN of None.
    return np.array(column, np.float64)
