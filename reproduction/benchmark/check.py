"""Some finished test runs played again: whether the records are still what the code gives.

A record does not say which code made it. One that was made before a method was corrected is noticed here.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from deltafl.errors import DeltaflError
from deltafl.simulation.record import RunRecord
from deltafl.simulation.sweep import Job, OnProgress, run_jobs

from ..spec import Experiment
from .numbers import rounds_to_threshold
from .parts import Part, parts_of
from .results import Store, tests
from .run import chosen_parts

if TYPE_CHECKING:
    from ..request import Request


class Checked(NamedTuple):
    """A run that was played again.

    Attributes:
        key: Which one, as in ``digits/innovation-seed3``.
        differs: What is different, for people; empty if every evaluation and every draw is the same.
    """

    key: str
    differs: str


def check_runs(experiment: Experiment, request: "Request", number: int, on_progress: OnProgress) -> list[Checked]:
    """Play finished test runs of the request's parts again, in another folder, and compare; no record is touched.

    Args:
        experiment: The benchmark.
        request: Parts, folder with the records, processes.
        number: How many, at most; ``choose`` says which.
        on_progress: Told about once a second.

    Raises:
        DeltaflError: If a part is unknown, no run is finished, or its data are not at hand.
    """
    parts = chosen_parts(parts_of(experiment, request.scale, **request.own), request.parts)
    store, of_part = Store(request.out), {part.name: part for part in parts}
    jobs = choose([finished(part, store) for part in parts], number)
    if not jobs:
        raise DeltaflError(f"{request.out} has no finished test run to check; give --out and --scale of one that has")
    with TemporaryDirectory() as folder:
        run_jobs(jobs, Path(folder), request.processes, on_progress)
        again = Store(Path(folder))
        return [Checked(job.key, _difference(of_part[job.part], store.get(job), again.get(job))) for job in jobs]


def finished(part: Part, store: Store) -> list[list[Job]]:
    """The test runs of a part that have a record, by method."""
    by_method: dict[str, list[Job]] = {}
    for job in tests(part, part.methods, store):
        if store.get(job) is not None:
            by_method.setdefault(job.settings.sampler, []).append(job)
    return list(by_method.values())


def choose(by_part: Sequence[Sequence[Sequence[Job]]], number: int) -> list[Job]:
    """So many jobs by a fixed rule: methods as far apart as can be, each with another seed; then the other seeds."""
    methods = [jobs for by_method in by_part for jobs in by_method]
    first = [jobs[i % len(jobs)] for i, jobs in enumerate(methods)]
    if number <= len(first):
        return [first[i * len(first) // number] for i in range(number)]
    longest = max((len(jobs) for jobs in methods), default=0)
    more = [jobs[(i + k) % len(jobs)] for k in range(longest) for i, jobs in enumerate(methods) if k < len(jobs)]
    return more[:number]


def _difference(part: Part, before: RunRecord | None, now: RunRecord | None) -> str:
    if before is None or now is None:
        return "its record went while it was played again"
    texts = []
    if before.round != now.round or before.diverged != now.diverged:
        texts.append(f"{_length(now)}, the record {_length(before)}")
    pairs = list(zip(before.accuracy, now.accuracy, strict=False))
    first = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    if first is not None:
        most = max(abs((new or 0.0) - (old or 0.0)) for old, new in pairs)
        texts.append(f"from round {before.round[first]} on accuracies differ by up to {most:.2g}")
        reached = [rounds_to_threshold(record, part.threshold) for record in (now, before)]
        texts.append("threshold reached in round {}, in the record {}".format(*(_or_never(at) for at in reached)))
    elif before.draws != now.draws:
        texts.append("other clients were drawn")
    if texts and before.environment != now.environment:
        texts.append("the record is of another machine or other versions")
    return "; ".join(texts)


def _length(record: RunRecord) -> str:
    return f"evaluated {len(record.round)} times until round {record.round[-1]}" + (
        "" if record.diverged is None else f" and diverged in {record.diverged}"
    )


def _or_never(at: float | None) -> str:
    return "never" if at is None else f"{at:g}"
