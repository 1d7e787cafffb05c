"""The main job: several samplers on one task, seed by seed, under the same split, initial model and minibatches.

::

    DIR/config.toml  DIR/environment.json
    DIR/runs/SAMPLER-seedN/      one run directory each (see records.py)
    DIR/summary.json             the comparison (schema: docs/summary-schema.md)
    DIR/accuracy.png  DIR/loss.png  DIR/selections.png
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..analysis.plots import draw_plots
from ..analysis.runs import Run
from ..analysis.summary import Summary, summarise, write_summary
from ..errors import DeltaflError, require
from ..types import IntArray
from .divergence import DivergedError
from .engine import Engine, Evaluation
from .experiment import begin, run_experiment
from .lock import claimed
from .records import CURE, RunDirectory, environment, recorded_settings, write_header
from .settings import CompareSettings, RunSettings
from .setup import check_memory, engine_of, plan_of
from .workers import Workers

#: Called after every round of every run: sampler, seed, rounds done, rounds in all, the last evaluation.
OnCompareRound = Callable[[str, int, int, int, Evaluation], None]


def run_comparison(settings: CompareSettings, out: Path, on_round: OnCompareRound) -> Summary:
    """Run what is not finished yet, then write the summary and the pictures.

    Args:
        settings: Resolved settings.
        out: The comparison's directory; runs that are recorded there go on from their checkpoints.
        on_round: Told after every round.

    Raises:
        DeltaflError: If another process is playing in the directory, or a run cannot be.
    """
    for package, extra in (("matplotlib", "plot"), ("scipy", "sim"), ("safetensors", "sim")):
        require(package, extra)
    with claimed(out):
        with Workers(settings.workers) as workers:
            runs, data = _played(settings, out, workers, on_round)
        return _summed_up(settings, out, runs, data)


def _played(settings: CompareSettings, out: Path, workers: Workers, on_round: OnCompareRound) -> tuple[list[Run], str]:
    """All runs, those that are not finished yet played; and the names of the data that they read."""
    runs: list[Run] = []
    names: list[str] = []
    for seed in range(settings.seeds):
        first = out / "runs" / f"{settings.samplers[0]}-seed0"  # all runs take the route of this one
        engine = engine_of(settings.run(settings.samplers[0], seed), workers, first)
        task = engine.task
        if seed == 0:
            for sampler in settings.samplers:
                check_memory(settings.run(sampler, seed), engine, out)
                plan_of(settings.run(sampler, seed), task.population(settings.weights), task)
            if recorded_settings(out) is None:
                write_header(out, settings, task.data)
        elif task.num_clients != len(runs[0].draws_m):
            raise DeltaflError(
                f"{task.name} has {len(runs[0].draws_m)} clients with seed 0 and {task.num_clients} with seed {seed}; "
                f"make as many with every seed, or write seeds = {seed}"
            )
        for sampler in settings.samplers:
            directory = RunDirectory(out / "runs" / f"{sampler}-seed{seed}")
            with claimed(directory.path):
                names += _play(settings.run(sampler, seed), engine, directory, on_round)
            runs.append(read_run(directory, sampler, seed, task.metric, task.num_clients))
    return runs, "; ".join(dict.fromkeys(names))


def _play(settings: RunSettings, engine: Engine, directory: RunDirectory, on_round: OnCompareRound) -> list[str]:
    """Play one run, or what is missing of it; returns the names of the data that it read."""
    data = engine.task.dataset.name
    names = [begin(directory, settings, engine.task)]

    def report(done: int, total: int, test: Evaluation) -> None:
        names.append(data)
        on_round(settings.sampler, settings.seed, done, total, test)

    with suppress(DivergedError):  # the record says so, and with it the summary and the table
        run_experiment(settings, engine, directory, report)
    return names


def _summed_up(settings: CompareSettings, out: Path, runs: list[Run], data: str) -> Summary:
    """Write the summary and the pictures."""
    runs.sort(key=lambda run: settings.samplers.index(run.sampler))
    summary = summarise(
        runs,
        settings.threshold,
        settings=json.loads(settings.model_dump_json(exclude_none=True)),
        environment={**environment(), "data": data},
    )
    write_summary(summary, out / "summary.json")
    draw_plots(runs, summary, out)
    return summary


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
    for line in lines:
        client_n, count_n = line.get("cohort", []), line.get("counts", [])
        if len(client_n) != len(count_n) or not all(0 <= client < num_clients for client in client_n):
            raise DeltaflError(
                f"{path / 'rounds.jsonl'}: round {line['round']} needs one count for each of its clients, "
                f"which go from 0 to {num_clients - 1}; {CURE}"
            )
        np.add.at(draws_m, np.asarray(client_n, dtype=np.int64), count_n)
    return draws_m
