"""Small simulated runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltafl.simulation.callbacks.callback import RoundDone
from deltafl.simulation.folder.checkpoint import change_checkpoint, read_checkpoint
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.folder.record import Job
from deltafl.simulation.parallel.sweep import run_jobs
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.store.lines import seal_of

TINY = {
    "task": "digits",
    "clients": 12,
    "sample": 4,
    "rounds": 6,
    "local_epochs": 1,
    "batch_size": 16,
}


class StopError(BaseException):
    """Stands for whatever ends a run early."""


def quiet(*_: object) -> None:
    """Takes progress and says nothing."""


def stop_after(rounds: int) -> Callable[[RoundDone], None]:
    def on_round(done: RoundDone) -> None:
        if done.round == rounds:
            raise StopError

    return on_round


def run(folder: Path, **given: object) -> dict[str, Any]:
    """The last line of a run that is started or continued."""
    return run_single(make_settings(RunSettings, given), folder, quiet)


def run_job(job: Job, folder: Path) -> None:
    """Play one job in this process and write its record."""
    run_jobs([job], folder, 1, quiet)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """A line for each round, the first of round 0."""
    return list(RunDirectory(folder).lines("rounds.jsonl"))


def reseal(folder: Path) -> None:
    """Give the checkpoint the checksums of the files as they are now."""
    mark = read_checkpoint(folder)
    assert mark is not None
    changes = {
        part: {name: seal_of(folder / name) for name in known}
        for part, known in (("files", mark.files), ("ended", mark.ended))
    }
    change_checkpoint(folder, **changes)
