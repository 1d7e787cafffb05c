"""What first updates bring, and which part of it: ``census`` with parts of its estimator, on tasks
of the benchmark.

    python benchmarks/first_updates.py [PART ...] [--seeds 12] [--out FILE]

For each part (the four of digits if none is named) the gap between uniform sampling and full
participation that is closed by area, with Fieller's interval, on seeds from 2000 and each at the
part's tuned rate in results/benchmark: regression on the components alone, with the first updates
in the first round only, in all rounds, and renewed with each reply (``two-phase``); and the last in
full in round 2, where it trusts them by the share that the components explain.
"""

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltafl import Plan
from deltafl.analysis import area_under, fieller
from deltafl.analysis.statistics import Interval
from deltafl.estimators.control_variates import ControlValue
from deltafl.estimators.two_phase import TwoPhase, TwoPhaseState
from deltafl.simulation import RunSettings, RunStore, run_jobs
from deltafl.simulation.engine import Engine
from deltafl.simulation.run import take_census
from deltafl.simulation.setup import engine_of, plan_of
from deltafl.types import FloatArray, IntArray, Params, Population, Replies

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from reproduction.benchmark.parts import BASELINE, FULL, Part, parts_of  # noqa: E402
from reproduction.spec import load_experiment  # noqa: E402
from timing import machine  # noqa: E402


@dataclass(frozen=True)
class FirstRoundOnly(TwoPhase):
    """Forgets the first updates after the census, but for the regression on x that they begin
    with.
    """

    def value(self, state: TwoPhaseState, client_n: IntArray) -> ControlValue:  # noqa: D102
        return self.regression.value(state.regression, client_n)


@dataclass(frozen=True)
class FullInSecond(TwoPhase):
    """Trusts the first updates in full in the second round."""

    def value(self, state: TwoPhaseState, client_n: IntArray) -> ControlValue:  # noqa: D102
        value = self.regression.value(state.regression, client_n)
        first = self.first.value(state.first, client_n)
        return ControlValue(value.total_d + first.total_d, value.control_nd + first.control_nd)


@dataclass(frozen=True)
class NeverRenewed(TwoPhase):
    """Keeps the first updates as they are."""

    def update(  # noqa: D102
        self, state: TwoPhaseState, population: Population, replies: Replies, update_nd: Params
    ) -> Any:
        following = super().update(state, population, replies, update_nd)
        return following._replace(first=following.first._replace(control=state.first.control))


FORMS = {
    "regression alone": "census@@regression-damped",
    "first updates in the first round": f"census@@{Path(__file__)}:FirstRoundOnly",
    "first updates in all rounds": f"census@@{Path(__file__)}:NeverRenewed",
    "renewed with each reply": "census",
    "the same, in full in round 2": f"census@@{Path(__file__)}:FullInSecond",
}


def chosen(names: list[str]) -> Iterator[tuple[Part, dict[str, float]]]:
    """The named parts, the four of digits if none is, each with the tuned rate of every method."""
    names = names or ["digits", "digits-unequal", "digits-300", "digits-300-unequal"]
    with (ROOT / "results" / "benchmark" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for part in parts_of(load_experiment("benchmark"), "cpu"):
        if part.name in names:
            yield (
                part,
                {row["method"]: float(row["rate"]) for row in rows if row["part"] == part.name},
            )


def prepared(settings: RunSettings) -> tuple[Engine, Plan]:
    """The engine and the plan of a run, after its census if it has one."""
    engine = engine_of(settings)
    plan = plan_of(settings, engine.task.population(settings.weights), engine.task)
    if plan.census is not None:
        plan = plan.with_census(take_census(plan, engine, engine.initial_params()))
    return engine, plan


def write_gaps(out: Path | None, seeds: range, found: dict[str, Interval]) -> None:
    """Write the gaps by name, with their seeds and the machine, if a file is named."""
    if out:
        results = {name: gap._asdict() for name, gap in found.items()}
        content = {"seeds": [*seeds], "results": results, "machine": machine()}
        out.write_text(json.dumps(content, indent=2) + "\n")


def areas(part: Part, label: str, rate: float, seeds: range) -> FloatArray:
    jobs = [part.test_job(label, rate, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        run_jobs(jobs, Path(folder), 2, lambda done: None)
        records = map(RunStore(Path(folder)).get, jobs)
        return np.array(
            [area_under(record.run(), part.horizon) for record in records if record is not None]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What first updates bring to census.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    seeds = range(2000, 2000 + options.seeds)
    found = {}
    for part, rates in chosen(options.parts):
        base_s, full_s = (areas(part, name, rates[name], seeds) for name in (BASELINE, FULL))
        for form, label in FORMS.items():
            own_s = areas(part, label, rates["census"], seeds)
            found[f"{part.name}, {form}"] = gap = fieller(own_s - base_s, full_s - base_s)
            print(
                f"{part.name:20} {form:34} {gap.mean:.2f} [{gap.low:.2f}, {gap.high:.2f}]",
                flush=True,
            )
    write_gaps(options.out, seeds, found)


if __name__ == "__main__":
    main()
