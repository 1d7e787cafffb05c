"""The finished runs of the benchmark: what is there, which rate each method has, what is still to be run."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deltafl.simulation.record import RunRecord, RunStore
from deltafl.simulation.sweep import Job

from .parts import Part
from .tried import Key, Stamp, Tried, key_of, line_of, read_tried, stamp_of, tried_of, write_tried
from .tuning import Score, Screen, Search, score, search

#: Finished runs of one method by seed.
Runs = dict[int, RunRecord]
#: Why a part, or a method on a part, is not run; by part and label ("" for the whole part).
Reasons = dict[tuple[str, str], str]


class Store:
    """The records in a folder; each is read once. Other processes may finish runs there, and pack them, meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, RunRecord] = {}
        self._tried: dict[str, tuple[Stamp, dict[Key, Tried]]] = {}

    def get(self, job: Job) -> RunRecord | None:
        """The record of a job, or None if it is not finished.

        Raises:
            DeltaflError: If there is a record of other settings in its place.
        """
        if job.key not in self._known and (record := RunStore(self.folder).get(job)) is not None:
            self._known[job.key] = record
        return self._known.get(job.key)

    def tried(self, part: Part, job: Job) -> Tried | None:
        """What a tuning run gave, from its line or else its record; None if it is not finished.

        Raises:
            DeltaflError: If it was run with other settings.
        """
        line = self._line(part, job)
        if line is None and (record := self.get(job)) is not None:
            return tried_of(record, part)
        # Who packs writes the line before the record goes: where both were missing, the line may have come since.
        return line or self._line(part, job)

    def tried_by(self, part: Part, label: str, rate: float, seeds: Sequence[int]) -> list[Tried]:
        """What the finished ones of these tuning runs gave, in the order of the seeds."""
        found = [self.tried(part, part.tuning_job(label, rate, seed)) for seed in seeds]
        return [run for run in found if run is not None]

    def _line(self, part: Part, job: Job) -> Tried | None:
        stamp = stamp_of(part, self.folder)
        if part.name not in self._tried or self._tried[part.name][0] != stamp:
            self._tried[part.name] = stamp, read_tried(part, self.folder)
        return line_of(job, self._tried[part.name][1])

    def pack(self, part: Part, jobs: Sequence[Job]) -> None:
        """Keep a line of each of these tuning runs that has a record, instead of the record."""
        found = [(job, record) for job in jobs if (record := self.get(job)) is not None]
        if not found:
            return
        with RunStore(self.folder).lock():
            lines = read_tried(part, self.folder) | {key_of(job): tried_of(record, part) for job, record in found}
            write_tried(part, self.folder, lines.values())
            self._tried[part.name] = stamp_of(part, self.folder), lines
            for job, _ in found:
                path = RunStore(self.folder).path(job)
                path.unlink(missing_ok=True)
                with suppress(OSError):  # it is not empty
                    path.parent.rmdir()
                del self._known[job.key]


def find_rates(part: Part, methods: tuple[str, ...], store: Store) -> dict[str, Search]:
    """How far the search for the methods' learning rates is."""

    def score_of(seeds: Sequence[int], label: str, rate: float) -> Score | None:
        found = store.tried_by(part, label, rate, seeds)
        return score(found) if len(found) == len(seeds) else None

    screen = None if part.finalists is None else Screen(part.finalists, partial(score_of, part.tuning_seeds[:1]))
    return search(part.rates, part.extensions, methods, partial(score_of, part.tuning_seeds), screen)


def tuning(part: Part, methods: tuple[str, ...], store: Store) -> list[Job]:
    """The tuning runs of the grid as it is now, finished ones included, seed by seed."""
    found, first = find_rates(part, methods, store), part.tuning_seeds[0]
    return [
        part.tuning_job(label, rate, seed)
        for seed in part.tuning_seeds
        for label in methods
        for rate in (found[label].rates if seed == first else found[label].finalists)
    ]


def tests(part: Part, methods: tuple[str, ...], store: Store) -> list[Job]:
    """The runs that are reported, of the methods whose rate is chosen; seed by seed, so that a stop is fair to all."""
    rates = {label: found.best for label, found in find_rates(part, methods, store).items()}
    chosen = {label: rate for label, rate in rates.items() if rate is not None}
    return [part.test_job(label, rate, seed) for seed in range(part.seeds) for label, rate in chosen.items()]


class Method(NamedTuple):
    """What is known of one method on one part.

    Attributes:
        label: Its label.
        search: The search for its rate.
        runs: Its finished test runs by seed.
    """

    label: str
    search: Search
    runs: Runs


class Result(NamedTuple):
    """A part with what is finished of it.

    Attributes:
        part: The part.
        methods: All methods, those without a finished test run included.
        num_clients: m.
        num_params: d of the model.
    """

    part: Part
    methods: tuple[Method, ...]
    num_clients: int
    num_params: int

    @property
    def shown(self) -> list[Method]:
        """The methods with a finished test run."""
        return [method for method in self.methods if method.runs]

    @property
    def done(self) -> int:
        """Finished test runs."""
        return sum(len(method.runs) for method in self.methods)

    @property
    def total(self) -> int:
        """Test runs in all."""
        return len(self.methods) * self.part.seeds

    def find(self, label: str) -> Method | None:
        """A method that has a finished test run."""
        return next((method for method in self.shown if method.label == label), None)


def gather(part: Part, store: Store) -> Result | None:
    """A part with its finished runs; None if it has no finished test run."""
    from .server_memory import model_size

    methods = []
    for label, found in find_rates(part, part.methods, store).items():
        rate, runs = found.best, {}
        if rate is not None:
            records = {seed: store.get(part.test_job(label, rate, seed)) for seed in range(part.seeds)}
            runs = {seed: record for seed, record in records.items() if record is not None}
        methods.append(Method(label, found, runs))
    first = next((record for method in methods for record in method.runs.values()), None)
    if first is None:
        return None
    return Result(part, tuple(methods), len(first.draws), model_size(part.common.task))
