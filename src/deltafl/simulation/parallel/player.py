"""What plays one run of many, and where its folder is; it goes to other processes."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ...errors import require
from ...store.files import below, remove_empty
from ..callbacks.callback import OnRound
from ..folder.directory import RunDirectory, locked
from ..folder.own_code import Code
from ..folder.record import UNFINISHED, Job, RunStore, record_of, write_record

#: How long a process of a killed sweep may go on writing its run, on a machine without free memory
#: for instance.
ORPHAN_SECONDS = 60.0


class Player(NamedTuple):
    """How a sweep plays a job; goes to its processes."""

    folder: Path
    keep_folders: bool = False
    code: Code | None = None  #: the user's own, where the call began the folder or compared it

    def place(self, job: Job) -> Path:
        """The folder of a job's run."""
        part = "runs" if self.keep_folders else UNFINISHED
        return below(self.folder, part, job.key)

    def is_done(self, job: Job) -> bool:
        """Whether a job is finished."""
        if self.keep_folders:
            return RunDirectory(self.place(job)).is_finished(job.settings.rounds or 0)
        return RunStore(self.folder).get(job) is not None

    def is_left(self, job: Job) -> bool:
        """Whether there is a folder of a job, or its lock."""
        place = self.place(job)
        return place.exists() or Path(f"{place}.lock").exists()

    def clear(self, job: Job) -> None:
        """Delete the folder of a run that is recorded, and what it kept in its memory's folder."""
        directory = RunDirectory(self.place(job))
        with locked(directory.path, ORPHAN_SECONDS):
            directory.memory_folder(job.settings.memory_path)
            directory.delete()
        # Unless other runs of the part are unfinished.
        remove_empty(directory.path.parent)

    def play(self, job: Job, on_round: OnRound) -> None:
        """Play a job in this process, from its last checkpoint if there is one."""
        directory = RunDirectory(self.place(job))
        with locked(directory.path, ORPHAN_SECONDS):
            # By name: it loads torch, which the process that only waits for others does without.
            run = import_module("deltafl.simulation.run")
            task = run.play_job(job, directory, self.folder, on_round, self.code)
            # The record first: a kill between the two leaves a folder, which the next start clears.
            if not self.keep_folders:
                write_record(record_of(job, directory, task), RunStore(self.folder).path(job))
        if not self.keep_folders:
            self.clear(job)


def require_simulator() -> None:
    """Refuse to play, before anything is written, without the packages that it needs."""
    for package in ("torch", "scipy"):
        require(package, "sim")
