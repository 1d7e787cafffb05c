"""The runs of the benchmark: which are needed, playing those that are missing, and what the finished ones are.

The records of tuning runs are not committed: there are thousands of them, and only the round that reached the threshold
and the mean accuracy matter. ``tuning/PART.jsonl.gz`` has one line for each; its first line holds what all share.
"""

import gzip
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from deltafl.analysis import Run, area_under, reach
from deltafl.errors import DeltaflError, require, unknown_name
from deltafl.io import checked, write_atomically
from deltafl.simulation import (
    Job,
    OnProgress,
    RunRecord,
    RunStore,
    require_devices,
    require_same,
    run_jobs,
    what_is_run,
)

from ..spec import Experiment
from .parts import NEVER, Part, Score, Search, parts_of, search

if TYPE_CHECKING:
    from ..reproduce import Request

#: The settings in which the tuning runs of a part differ.
_OWN = ("sampler", "local_lr", "seed", "rounds")
#: Why a part, or a method on a part, is not run; by part and label ("" for the whole part).
Reasons = dict[tuple[str, str], str]


def rounds_to_threshold(run: Run, threshold: float, smoothed: bool = False) -> float | None:
    """The first evaluated round that reaches the threshold, by itself or by the mean of five; None for never.

    A run that diverged never reaches anything, whatever it did before.
    """
    at = None if run.diverged is not None else reach(run, threshold, smoothed)
    return None if at is None else float(run.round_r[at])


class TuningResult(BaseModel):
    """What is kept of a tuning run.

    Attributes:
        sampler, local_lr, seed: Which run it is.
        rounds: The planned rounds.
        reached: The first evaluated round at the threshold; null for never, or if the run diverged.
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
    def key(self) -> tuple[str, float, int, int]:
        """Which run it is."""
        return self.sampler, self.local_lr, self.seed, self.rounds

    @property
    def rounds_counted(self) -> float:
        """Rounds to the threshold; twice those of the run if it never got there, or diverged."""
        return NEVER * self.rounds if self.reached is None else self.reached


class _Shared(BaseModel):
    """The first line of a file: settings of all of its runs, and the rounds over which accuracy is averaged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any]
    horizon: int


def tuning_result(record: RunRecord, part: Part) -> TuningResult:
    """What is kept of a finished tuning run."""
    run = record.run()
    return TuningResult(
        **{name: record.settings[name] for name in _OWN},
        reached=rounds_to_threshold(run, part.threshold),
        mean_accuracy=round(area_under(run, part.tuning_horizon), 6),
        diverged=record.diverged,
        environment=record.environment,
    )


class Store:
    """The finished runs in a folder; each is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, RunRecord] = {}
        self._tuned: dict[str, dict[tuple[str, float, int, int], TuningResult]] = {}

    def get(self, job: Job) -> RunRecord | None:
        """The record of a job, or None if it is not finished.

        Raises:
            DeltaflError: If there is a record of other settings in its place.
        """
        if job.key not in self._records and (record := RunStore(self.folder).get(job)) is not None:
            self._records[job.key] = record
        return self._records.get(job.key)

    def tuned(self, part: Part, job: Job) -> TuningResult | None:
        """The result of a tuning run, from its line or else its record; None if it is not finished.

        Raises:
            DeltaflError: If it was run with other settings.
        """
        lines = self._lines(part)
        key = (job.settings.sampler, job.settings.local_lr or 0.0, job.settings.seed, job.settings.rounds or 0)
        if key not in lines and (record := self.get(job)) is not None:
            lines[key] = tuning_result(record, part)
        return lines.get(key)

    def tuned_by(self, part: Part, label: str, rate: float, seeds: Sequence[int]) -> list[TuningResult]:
        """The results of the finished ones of these tuning runs, in the order of the seeds."""
        found = [self.tuned(part, part.tuning_job(label, rate, seed)) for seed in seeds]
        return [run for run in found if run is not None]

    def _path(self, part: Part) -> Path:
        return self.folder / "tuning" / f"{part.name}.jsonl.gz"

    def _lines(self, part: Part) -> dict[tuple[str, float, int, int], TuningResult]:
        path = self._path(part)
        if part.name not in self._tuned:
            self._tuned[part.name] = {}
            if path.exists():
                self._tuned[part.name] = {line.key: line for line in _read_tuning(path, part)}
        return self._tuned[part.name]

    def keep(self, part: Part, jobs: Sequence[Job]) -> None:
        """Pack the records of finished tuning runs and write the part's lines."""
        for name in dict.fromkeys(job.part for job in jobs):
            RunStore(self.folder).pack(name)
        settings = {name: value for name, value in what_is_run(part.common).items() if name not in _OWN}
        with RunStore(self.folder).lock():
            self._tuned.pop(part.name, None)  # another process may have added lines
            for job in jobs:
                self.tuned(part, job)
            results = sorted(self._lines(part).values(), key=lambda result: result.key)
            lines = [_Shared(settings=settings, horizon=part.tuning_horizon), *results]
            text = "".join(json.dumps(line.model_dump(mode="json")) + "\n" for line in lines)
            self._path(part).parent.mkdir(exist_ok=True)
            write_atomically(self._path(part), gzip.compress(text.encode(), mtime=0))


def _read_tuning(path: Path, part: Part) -> list[TuningResult]:
    cure = "choose another --out, or delete it to run them again"
    try:
        shared_line, *lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise DeltaflError(f"{path} cannot be read: {error}; {cure}") from None
    shared = checked(_Shared, shared_line, f"{path}, line 1,", cure)
    common = what_is_run(part.common)
    require_same(shared.settings | {name: common[name] for name in _OWN}, Job(part.name, part.common), path)
    if shared.horizon != part.tuning_horizon:
        raise DeltaflError(f"{path} has means over {shared.horizon} rounds, not {part.tuning_horizon}: {cure}")
    return [checked(TuningResult, line, f"{path}, line {number},", cure) for number, line in enumerate(lines, start=2)]


def find_rates(part: Part, methods: Sequence[str], store: Store) -> dict[str, Search]:
    """How far the search for the methods' learning rates is."""

    def score_of(seeds: Sequence[int], label: str, rate: float) -> Score | None:
        found = store.tuned_by(part, label, rate, seeds)
        return score(found) if len(found) == len(seeds) else None

    return search(part, methods, partial(score_of, part.tuning_seeds), partial(score_of, part.tuning_seeds[:1]))


def score(runs: Sequence[TuningResult]) -> Score:
    """The score of one rate from its runs, one a tuning seed."""
    return Score(
        float(np.mean([run.rounds_counted for run in runs])), -float(np.mean([run.mean_accuracy for run in runs]))
    )


def tuning_jobs(part: Part, methods: Sequence[str], store: Store) -> list[Job]:
    """The tuning runs of the grid as it is now, finished ones included, seed by seed."""
    found, first = find_rates(part, methods, store), part.tuning_seeds[0]
    return [
        part.tuning_job(label, rate, seed)
        for seed in part.tuning_seeds
        for label in methods
        for rate in (found[label].rates if seed == first else found[label].finalists)
    ]


def reported_jobs(part: Part, methods: Sequence[str], store: Store) -> list[Job]:
    """The runs that are reported, of the methods whose rate is chosen; seed by seed, so that a stop is fair to all."""
    rates = {label: found.best for label, found in find_rates(part, methods, store).items()}
    chosen = {label: rate for label, rate in rates.items() if rate is not None}
    return [part.test_job(label, rate, seed) for seed in range(part.seeds) for label, rate in chosen.items()]


class Method(NamedTuple):
    """One method on one part: its label, the search for its rate, and its finished test runs by seed."""

    label: str
    search: Search
    runs: dict[int, Run]


class Result(NamedTuple):
    """A part with what is finished of it; ``methods`` includes those without a finished test run."""

    part: Part
    methods: tuple[Method, ...]

    @property
    def shown(self) -> list[Method]:
        """The methods with a finished test run."""
        return [method for method in self.methods if method.runs]

    @property
    def done(self) -> int:
        """Finished test runs."""
        return sum(len(method.runs) for method in self.methods)

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return len(next(iter(self.shown[0].runs.values())).draws_m)

    def find(self, label: str) -> Method | None:
        """A method that has a finished test run."""
        return next((method for method in self.shown if method.label == label), None)


def gather(part: Part, store: Store) -> Result | None:
    """A part with its finished runs; None if it has no finished test run."""
    methods = []
    for label, found in find_rates(part, part.methods, store).items():
        runs = {}
        for seed in range(part.seeds) if found.best is not None else ():
            if (record := store.get(part.test_job(label, found.best or 0.0, seed))) is not None:
                runs[seed] = record.run()
        methods.append(Method(label, found, runs))
    return Result(part, tuple(methods)) if any(method.runs for method in methods) else None


def play(parts: Sequence[Part], request: "Request", on_progress: OnProgress) -> Reasons:
    """Tune and measure on the parts that the request names, one after the other; skip what is finished.

    Returns:
        What cannot be run here, and why.

    Raises:
        DeltaflError: If a part is unknown, or the folder holds runs of other settings.
    """
    for package in ("torch", "safetensors", "scipy"):
        require(package, "sim")
    store, reasons = Store(request.out), Reasons()
    for part in _chosen(parts, request.parts):
        methods = runnable(part, store, reasons)
        while jobs := [job for job in tuning_jobs(part, methods, store) if store.tuned(part, job) is None]:
            run_jobs(jobs, request.out, request.processes, on_progress)
            store.keep(part, jobs)
        if methods:
            run_jobs(reported_jobs(part, methods, store), request.out, request.processes, on_progress)
            RunStore(request.out).pack(part.name)
    return reasons


def _chosen(parts: Sequence[Part], names: tuple[str, ...] | None) -> list[Part]:
    known = {part.name: part for part in parts}
    for name in names or ():
        if name not in known:
            raise unknown_name("part", name, known)
    return [part for part in parts if names is None or part.name in names]


def runnable(part: Part, store: Store, reasons: Reasons) -> tuple[str, ...]:
    """The methods of a part that can run here; why others cannot is added to ``reasons``.

    Data are looked for only where something is left to do.
    """
    from deltafl.simulation import plan_of, task_of

    tuned = all(store.tuned(part, job) for job in tuning_jobs(part, part.methods, store))
    if tuned and all(store.get(job) for job in reported_jobs(part, part.methods, store)):
        return part.methods
    require_devices([part.common.device])
    try:
        task = task_of(part.common)
    except DeltaflError as error:
        reasons[part.name, ""] = str(error)
        return ()
    population, kept = task.population(part.common.weights), list[str]()
    for label in part.methods:
        settings = part.tuning_job(label, part.rates[0], part.tuning_seeds[0]).settings
        try:
            plan_of(settings, population, task)
        except DeltaflError as error:
            reasons[part.name, label] = str(error)
        else:
            kept.append(label)
    return tuple(kept)


def check_runs(
    experiment: Experiment, request: "Request", number: int, on_progress: OnProgress
) -> list[tuple[str, str]]:
    """Play finished test runs again in another folder and compare: a record does not say which code made it.

    Args:
        experiment: The benchmark.
        request: Parts, folder with the records, processes.
        number: How many, at most; they are spread evenly over parts, methods and seeds.
        on_progress: Called about once a second.

    Returns:
        For each run its key, as in ``digits/innovation-seed3``, and how it differs from its record; empty if not.

    Raises:
        DeltaflError: If a part is unknown, no run is finished, or its data are not at hand.
    """
    parts, store = _chosen(parts_of(experiment, request.scale, **request.own), request.parts), Store(request.out)
    jobs = [job for part in parts for job in reported_jobs(part, part.methods, store) if store.get(job) is not None]
    if not jobs:
        raise DeltaflError(f"{request.out} has no finished test run to check; give --out and --scale of one that has")
    number = min(number, len(jobs))
    jobs = [jobs[i * len(jobs) // number] for i in range(number)]
    with TemporaryDirectory() as folder:
        run_jobs(jobs, Path(folder), request.processes, on_progress)
        again = Store(Path(folder))
        return [(job.key, _difference(store.get(job), again.get(job))) for job in jobs]


def _difference(before: RunRecord | None, now: RunRecord | None) -> str:
    if before is None or now is None:
        return "its record was deleted while it was played again"
    pairs = zip(before.round, before.accuracy, now.accuracy, strict=False)
    first = next((round for round, old, new in pairs if old != new), None)
    texts = []
    if (before.round, before.diverged) != (now.round, now.diverged):
        texts.append(f"it ends in round {now.round[-1]}, in the record in round {before.round[-1]}")
    if first is not None:
        texts.append(f"accuracies differ from round {first} on")
    elif before.draws != now.draws:
        texts.append("other clients were drawn")
    if texts and before.environment != now.environment:
        texts.append("the record is of another machine or other versions")
    return "; ".join(texts)
