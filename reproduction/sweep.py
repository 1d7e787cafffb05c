"""The sweep of an experiment: which runs it needs, and running those that are missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltafl.errors import DeltaflError, require
from deltafl.simulation.record import HOW, RunRecord, RunStore
from deltafl.simulation.settings import CompareSettings
from deltafl.simulation.sweep import Job, OnProgress, require_devices, run_jobs

from .configuration import write_config
from .spec import Experiment, Sweep


def make_sweep(experiment: Experiment, scale: str, parts: Sequence[str] | None = None, **own: Any) -> Sweep:
    """The sweep of an experiment at a scale: all of its parts, or the named ones.

    Args:
        experiment: The experiment.
        scale: One of ``spec.SCALES``.
        parts: Names of parts; None for those of the scale.
        own: Settings of the user that win, such as ``data_dir`` and ``seeds``.
    """
    names = experiment.part_names(scale) if parts is None else tuple(parts)
    return Sweep(experiment, scale, {part: experiment.comparison(part, scale, **own) for part in names})


def run_sweep(sweep: Sweep, folder: Path, processes: int, on_progress: OnProgress) -> dict[str, str]:
    """Run what has no record yet.

    Args:
        sweep: What to run.
        folder: Where the records are and go.
        processes: Runs side by side, >= 1; as many as there are cores is best.
        on_progress: Told about once a second.

    Returns:
        The parts whose data are not at hand, with the reason; they are left out.

    Raises:
        DeltaflError: If a record or an unfinished run in the folder has other settings, or no part can be run.
    """
    for package, extra in (("torch", "sim"), ("safetensors", "sim"), ("scipy", "sim")):
        require(package, extra)
    jobs = list(sweep.jobs())
    waiting = [job for job in jobs if not RunStore(folder).get(job)]
    require_devices(job.settings.device for job in waiting)
    not_run = _missing_data(sweep, waiting)
    if len(not_run) == len(sweep.comparisons):
        raise DeltaflError(next(iter(not_run.values()), "there is nothing to run: no part was chosen"))
    folder.mkdir(parents=True, exist_ok=True)
    plain = {part: _plain(settings) for part, settings in sweep.comparisons.items()}
    write_config(sweep.experiment, sweep.scale, plain, folder)
    run_jobs([job for job in jobs if job.part not in not_run], folder, processes, on_progress)
    return not_run


def records_of(sweep: Sweep, folder: Path) -> list[RunRecord]:
    """The records that a sweep has so far, in the order of its jobs."""
    return [record for job in sweep.jobs() if (record := RunStore(folder).get(job)) is not None]


def _missing_data(sweep: Sweep, waiting: Sequence[Job]) -> dict[str, str]:
    """The parts whose task cannot be made here, with the sentence why; of the others, what memories take is told."""
    from deltafl.simulation.setup import task_of, tell_memory

    reasons = {}
    for part in sweep.comparisons:
        if runs := [job.settings for job in waiting if job.part == part]:
            try:
                task = task_of(runs[0])
            except DeltaflError as error:
                reasons[part] = str(error)
            else:
                tell_memory(part, runs, task)
    return reasons


def _plain(settings: CompareSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude_none=True, exclude=HOW)
