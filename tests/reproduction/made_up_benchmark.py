"""Made-up runs of a small benchmark, for tests of what its page says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltafl.simulation import Job, RunRecord, what_is_run, write_record
from reproduction.benchmark.page import reproduce_benchmark
from reproduction.benchmark.parts import Part, parts_of
from reproduction.records import PackedRuns
from reproduction.running import Request
from reproduction.spec import Experiment, parse_experiment

TINY: dict[str, Any] = {
    "task": "digits",
    "clients": 6,
    "sample": 2,
    "horizon": 4,
    "local_epochs": 1,
    "threshold": 0.5,
    "tiers": {
        "all": {
            "methods": ["full", "uniform", "pracdelta", "delta-centred"],
            "rates": [0.1, 0.2],
            "extensions": 1,
        }
    },
    "tuning_seeds": [1000],
    "seeds": 3,
}


VIEW = {"core": ["full", "uniform", "pracdelta", "delta-centred"], "recommended": "delta-centred"}


def tiny(parts: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    content = {
        "title": "Benchmark",
        "claim": "the target.",
        "kind": "benchmark",
        "settings": TINY | changes,
    }
    content |= {"parts": parts or {"digits": {"tier": "all", "title": "digits"}}, "view": VIEW}
    return parse_experiment("benchmark", content)


def part_of(**changes: Any) -> Part:
    return parts_of(tiny(**changes), "smoke")[0]


def record(
    job: Job, accuracy: Sequence[float], diverged: int | None = None, every: int = 1
) -> RunRecord:
    """A run with these accuracies after every round, or after each ``every``-th."""
    number = len(accuracy)
    return RunRecord(
        part=job.part,
        settings=what_is_run(job.settings),
        data="digits",
        metric="accuracy",
        environment={"python": "3"},
        round=[every * (i + 1) for i in range(number)],
        accuracy=list(accuracy),
        loss=[1.0] * number,
        seconds=[0.1] * number,
        cpu_seconds=[0.5 * (i + 1) for i in range(number)],
        bytes=[1e6 * (i + 1) for i in range(number)],
        draws=[1] * 6,
        diverged=diverged,
        diverged_why="" if diverged is None else "the loss exploded",
    )


def curve(rounds: int, reached: float, length: int) -> list[float]:
    """Below the threshold of 0.5 before a round, above it from then on."""
    return [0.6 if i + 1 >= reached else 0.4 * i / length for i in range(rounds)]


#: Rounds to the threshold by method and seed, of 40; 99 is never.
MADE_UP = {
    "full": [5, 6, 5, 7, 6],
    "uniform": [30, 34, 28, 32, 35],
    "pracdelta": [24, 29, 20, 27, 28],
    "delta-centred": [8, 9, 7, 9, 8],
}


def write_runs(
    folder: Path, experiment: Experiment, table: dict[str, list[int]], **own: Any
) -> None:
    """Records of made-up runs: 0.2 is the best rate of all, and the test runs of the table."""
    for part in parts_of(experiment, "smoke", **own):
        for label, reached_s in table.items():
            for rate, at in ((0.1, 39), (0.2, reached_s[0]), (0.4, 38)):
                job = part.tuning_job(label, rate, 1000)
                write_record(
                    record(job, curve(job.settings.rounds or 0, at, 40)),
                    PackedRuns(folder).path(job),
                )
            for seed, at in enumerate(reached_s):
                job = part.test_job(label, 0.2, seed)
                write_record(
                    record(job, curve(job.settings.rounds or 0, at, 40)),
                    PackedRuns(folder).path(job),
                )


def shown(folder: Path, experiment: Experiment) -> str:
    request = Request("benchmark", "smoke", folder, only_page=True)
    return reproduce_benchmark(experiment, request, lambda _: None)


def made_up(**changes: Any) -> Experiment:
    tiers = {"all": {"methods": list(MADE_UP), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    own: dict[str, Any] = {"horizon": 40, "seeds": 5, "tiers": tiers}
    return tiny(**(own | changes))
