"""Comparing samplers on one task, seed by seed, under the same split, initial model and minibatches.

The folder has settings and environment, a run directory for each run, ``summary.json`` (docs/summary-schema.md) and
three pictures.
"""

import json
import logging
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ..analysis.runs import Metric
from ..analysis.summary import Summary
from ..errors import DeltaflError, MissingExtraError, require
from .callback import OnRound, guarded
from .directory import RunDirectory, environment, locked, recorded_settings, write_header
from .processes import result
from .record import read_run
from .settings import CompareSettings, make_settings, require_same_settings
from .sweep import Job, OnProgress, Player, engine_for, play_jobs, side_by_side

#: What a comparison must know of its task: metric, number of clients, and names of its data.
_Facts = tuple[Metric, int, dict[str, str]]


def run_comparison(
    settings: CompareSettings,
    out: Path,
    on_progress: OnProgress,
    processes: int = 1,
    on_round: OnRound = lambda _: None,
) -> Summary:
    """Play the runs that are not finished yet, then write the summary and the pictures.

    Args:
        settings: Resolved settings.
        out: The comparison's directory; runs that are recorded there continue from their checkpoints.
        on_progress: Called about once a second.
        processes: Runs side by side, >= 1; with more than 1, this process does not load torch.
        on_round: Called here for each round of each run; with more processes up to a second later.

    Raises:
        DeltaflError: If another process is playing in the directory, or a run is impossible.
    """
    for package in ("scipy", "torch"):
        require(package, "sim")
    jobs = [Job("", settings.run(sampler, seed)) for seed in range(settings.seeds) for sampler in settings.samplers]
    with locked(out):
        with side_by_side(min(processes, len(jobs))) as pool:
            facts: _Facts
            if pool is None:
                facts = _check(settings, out)
            else:
                checked = pool.submit(_check, settings, out)
                with suppress(ImportError):  # for the end, while the processes start
                    for name in ("scipy.special", "matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.Image"):
                        import_module(name)
                facts = result(checked)
            recorded = recorded_settings(out)
            if recorded is None:
                write_header(out, settings, facts[2])
            else:
                require_same_settings(make_settings(CompareSettings, recorded), settings)
            play_jobs(jobs, Player(out, keep_folders=True), pool, on_progress, guarded(on_round))
        return _summarise(settings, out, facts)


def _check(settings: CompareSettings, out: Path) -> _Facts:
    """Refuse what cannot be played before anything is written."""
    from .setup import check_memory, plan_of, task_of

    engine = engine_for(settings.run(settings.samplers[0], 0), out)
    task = engine.task
    for sampler in settings.samplers:
        run = settings.run(sampler, 0)
        check_memory(run, engine, out)
        plan_of(run, task.population(settings.weights), task)
    for seed in range(1, settings.seeds if settings.clients is None else 1):
        other = task_of(settings.run(settings.samplers[0], seed)).num_clients
        if other != task.num_clients:
            raise DeltaflError(
                f"{task.name} has {task.num_clients} clients with seed 0 and {other} with seed {seed}; "
                f"make as many with every seed, or write seeds = {seed}"
            )
    return task.metric, task.num_clients, task.data


def _summarise(settings: CompareSettings, out: Path, facts: _Facts) -> Summary:
    """Write the summary and the pictures."""
    from ..analysis.plots import draw_plots
    from ..analysis.summary import summarise, write_summary

    metric, num_clients, known = facts
    runs, names = [], []
    for sampler in settings.samplers:
        for seed in range(settings.seeds):
            directory = RunDirectory(out / "runs" / Job("", settings.run(sampler, seed)).key)
            runs.append(read_run(directory, sampler, seed, metric, num_clients))
            names.append(str(directory.environment().get("data", known["data"])))
    data = "; ".join(dict.fromkeys([*names, known["data"]]))
    given = json.loads(settings.model_dump_json(exclude_none=True))
    summary = summarise(runs, settings.threshold, settings=given, environment={**environment(), "data": data})
    write_summary(summary, out / "summary.json")
    try:
        require("matplotlib", "plot")
        draw_plots(runs, summary, out)
    except MissingExtraError as error:
        logging.getLogger("deltafl").info(f"no pictures: {error}")
    return summary
