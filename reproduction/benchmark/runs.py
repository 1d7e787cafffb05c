"""The runs of the benchmark: which are needed, playing those that are missing, and what the
finished ones are.

The records of tuning runs are not committed: there are thousands of them, and only the mean
accuracy over the horizon matters. ``tuning/PART.jsonl.gz`` has one line for each; its first line
holds what all share.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltafl.analysis import Run, area_under
from deltafl.errors import DeltaflError, unknown_name
from deltafl.simulation import (
    Job,
    OnProgress,
    Score,
    Search,
    Trial,
    plan_of,
    require_same,
    run_jobs,
    task_of,
    what_is_run,
)
from deltafl.store import checked

from ..measures import rounds_to_threshold
from ..records import PackedRuns
from ..running import Request, read_rows, require_training, write_rows
from ..spec import Frozen
from .parts import Part

#: The settings in which the tuning runs of a part differ.
_OWN = ("sampler", "local_lr", "seed")
#: Which tuning run of a part it is: the values of ``_OWN``.
Key = tuple[str, float, int]
#: Why a part, or a method on a part, is not run; by part and label ("" for the whole part).
Reasons = dict[tuple[str, str], str]


class TuningResult(Frozen):
    """What is kept of a tuning run."""

    sampler: str
    local_lr: float
    seed: int
    reached: (
        float | None
    )  # the first evaluated round at the threshold; None for never, or if the run diverged
    mean_accuracy: float  # over all rounds, on the examples that tuning judges by
    diverged: int | None
    environment: dict[str, Any]

    @property
    def key(self) -> Key:
        return self.sampler, self.local_lr, self.seed

    @property
    def score(self) -> Score:
        """By mean accuracy; a rate with a run that diverged is worse than one with none, or with
        fewer.
        """
        return Score(float(self.diverged is not None), -self.mean_accuracy)


def tuning_result(run: Run, part: Part) -> TuningResult:
    own = {name: run.settings[name] for name in _OWN} | {
        "diverged": run.diverged,
        "environment": run.environment,
    }
    reached = rounds_to_threshold(run, part.threshold)
    area = area_under(run, part.horizon)
    return TuningResult(**own, reached=reached, mean_accuracy=round(area, 6))


class Store:
    """The finished runs in a folder; the lines of tuning runs are read once."""

    def __init__(self, folder: Path) -> None:
        self.runs = PackedRuns(folder)
        self._folder = folder / "tuning"
        self._tuned: dict[str, dict[Key, TuningResult]] = {}

    def tuned(self, part: Part, job: Job) -> TuningResult | None:
        """The result of a tuning run, from its line or else its record; None if it is not
        finished.
        """
        lines = self._lines(part)
        key = (job.settings.sampler, job.settings.local_lr or 0.0, job.settings.seed)
        if key not in lines and (record := self.runs.get(job)) is not None:
            lines[key] = tuning_result(record.run(), part)
        return lines.get(key)

    def keep(self, part: Part, jobs: Sequence[Job]) -> None:
        """Pack the records of finished tuning runs and write the part's lines."""
        for name in dict.fromkeys(job.part for job in jobs):
            self.runs.pack(name)
        settings = {
            name: value
            for name, value in what_is_run(part.common_tuning).items()
            if name not in _OWN
        }
        with self.runs.lock():
            self._tuned.pop(part.name, None)  # another process may have added lines
            for job in jobs:
                self.tuned(part, job)
            results = sorted(self._lines(part).values(), key=lambda result: result.key)
            self._folder.mkdir(exist_ok=True)
            rows = [result.model_dump(mode="json") for result in results]
            write_rows(self._path(part), {"settings": settings}, rows)

    def _path(self, part: Part) -> Path:
        return self._folder / f"{part.name}.jsonl.gz"

    def _lines(self, part: Part) -> dict[Key, TuningResult]:
        if part.name not in self._tuned:
            self._tuned[part.name] = {
                line.key: line for line in _read_tuning(self._path(part), part)
            }
        return self._tuned[part.name]


def _read_tuning(path: Path, part: Part) -> list[TuningResult]:
    head, rows = read_rows(path)
    if not head:
        return []
    common = what_is_run(part.common_tuning)
    cure = "choose another --out, or delete it to run them again"
    goals = head["settings"].get("threshold"), common.get("threshold")
    if goals[0] != goals[1]:  # it decides what a line has as ``reached``
        raise DeltaflError(f"{path} was run with threshold = {goals[0]}, not {goals[1]}: {cure}")
    require_same(
        head["settings"] | {name: common[name] for name in _OWN},
        Job(part.name, part.common_tuning),
        path,
    )
    return [
        checked(TuningResult, row, f"{path}, line {number},", cure)
        for number, row in enumerate(rows, start=2)
    ]


def find_rates(part: Part, methods: Sequence[str], store: Store) -> dict[str, Search]:
    def score_of(trial: Trial) -> Score | None:
        found = store.tuned(part, part.tuning_job(*trial))
        if found is None:
            return None
        return found.score

    return part.grid.search(methods, score_of)


def tuning_jobs(part: Part, methods: Sequence[str], store: Store) -> list[Job]:
    """The tuning runs of the grid as it is now, finished ones included, seed by seed."""
    return [part.tuning_job(*trial) for trial in part.grid.trials(find_rates(part, methods, store))]


def reported_jobs(part: Part, methods: Sequence[str], store: Store) -> list[Job]:
    """The runs that are reported, of the methods whose rate is chosen; seed by seed, so that a
    stop is fair to all.
    """
    rates = {label: found.best for label, found in find_rates(part, methods, store).items()}
    chosen = {label: rate for label, rate in rates.items() if rate is not None}
    return [
        part.test_job(label, rate, seed)
        for seed in range(part.seeds)
        for label, rate in chosen.items()
    ]


class Method(NamedTuple):
    """One method on one part: its label, the search for its rate, and its finished test runs by
    seed.
    """

    label: str
    search: Search
    runs: dict[int, Run]

    @property
    def diverged(self) -> int:
        return sum(run.diverged is not None for run in self.runs.values())


class Result(NamedTuple):
    """A part with what is finished of it; ``methods`` includes those without a finished test
    run.
    """

    part: Part
    methods: tuple[Method, ...]

    @property
    def shown(self) -> list[Method]:
        return [method for method in self.methods if method.runs]

    @property
    def done(self) -> int:
        return sum(len(method.runs) for method in self.methods)

    @property
    def num_clients(self) -> int:
        return len(next(iter(self.shown[0].runs.values())).draws_m)

    def find(self, label: str) -> Method | None:
        return next((method for method in self.shown if method.label == label), None)


def gather(part: Part, store: Store) -> Result | None:
    """A part with its finished runs; None if it has no finished test run."""
    methods = []
    for label, found in find_rates(part, part.methods, store).items():
        runs = {}
        if found.best is not None:
            for seed in range(part.seeds):
                record = store.runs.get(part.test_job(label, found.best, seed))
                if record is not None:
                    runs[seed] = record.run()
        methods.append(Method(label, found, runs))
    if not any(method.runs for method in methods):
        return None
    return Result(part, tuple(methods))


def play(parts: Sequence[Part], request: Request, on_progress: OnProgress) -> Reasons:
    """Tune and measure on the parts that the request names; skip what is finished, return what
    cannot run here.
    """
    store = Store(request.out)
    reasons = Reasons()
    known = {part.name: part for part in parts}
    for name in request.parts or ():
        if name not in known:
            raise unknown_name("part", name, known)
    named = request.parts
    if named is None:
        named = tuple(part.name for part in parts if not part.needs)
    for part in map(known.__getitem__, named):
        methods = _runnable(part, store, reasons)
        while jobs := [
            job for job in tuning_jobs(part, methods, store) if store.tuned(part, job) is None
        ]:
            run_jobs(jobs, request.out, request.processes, on_progress)
        if methods:
            store.keep(
                part, tuning_jobs(part, methods, store)
            )  # those of an interrupted command included
            reported = reported_jobs(part, methods, store)
            jobs = [job for job in reported if store.runs.get(job) is None]
            run_jobs(jobs, request.out, request.processes, on_progress)
            store.runs.pack(part.name)
    return reasons


def _runnable(part: Part, store: Store, reasons: Reasons) -> tuple[str, ...]:
    """The methods of a part that can run here; why others cannot is added to ``reasons``."""
    # Data are looked for only where something is left to do.
    tuned = all(store.tuned(part, job) for job in tuning_jobs(part, part.methods, store))
    if tuned and all(store.runs.get(job) for job in reported_jobs(part, part.methods, store)):
        return part.methods
    require_training([part.common.device])
    try:
        task = task_of(part.common)
    except DeltaflError as error:
        reasons[part.name, ""] = str(error)
        return ()
    population = task.population(part.common.weights)
    kept = list[str]()
    for label in part.methods:
        try:
            settings = part.tuning_job(label, part.rates[0], part.tuning_seeds[0]).settings
            # Public data are part of the task.
            if settings.public:
                plan_of(settings, population, task_of(settings))
            else:
                plan_of(settings, population, task)
        except DeltaflError as error:
            reasons[part.name, label] = str(error)
        else:
            kept.append(label)
    return tuple(kept)
