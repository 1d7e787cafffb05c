"""A process of several that play runs together, as torchrun starts it:
``python rank_processes.py END FOLDER``.
"""

import os
import signal
import sys
from pathlib import Path

from deltafl.errors import DeltaflError
from deltafl.simulation import oracle
from deltafl.simulation.callbacks.callback import RoundDone
from deltafl.simulation.distributed import ProcessGroup, joined_processes
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings

Runs = dict[str, dict[str, object]]
TINY = {
    "task": "digits",
    "clients": 12,
    "sample": 5,
    "rounds": 3,
    "batch_size": 16,
    "checkpoint_every": 2,
}
#: Runs by name.
RUNS: Runs = {
    "plain": {"sampler": "pracdelta"},
    "common": {"sampler": "uniform@poisson@difference", "mime": 0.5},
    "own": {"sampler": "uniform@pivotal@difference-own"},
    "losses": {"sampler": "power-of-choice@@fedvarp"},
    "theory": {"sampler": "delta"},  # everybody's updates are gathered
    # Buffers that are averaged, and arrays of each client's own.
    "models": {
        "task": str(Path(__file__).with_name("normed_task.py")),
        "sampler": "innovation",
        "clients": None,
    },
}

#: Runs that are also broken off and resumed.
RESUMED = ("common", "own", "models")


class StopError(BaseException):
    """Stands for whatever ends a run early in all processes."""


def settings_of(given: dict[str, object]) -> RunSettings:
    return make_settings(RunSettings, {**TINY, **given})


def quiet(*_: object) -> None:
    """Takes progress and says nothing."""


def stop_after_one(done: RoundDone) -> None:
    if done.round == 1:
        raise StopError


def play(folder: Path, ranks: ProcessGroup) -> None:
    for name, given in RUNS.items():
        # Only the first process's machine has the folder.
        run_single(
            settings_of(given), folder / name if ranks.is_first else Path("nowhere"), quiet, ranks
        )
    oracle.TABLE_BYTES = 0
    run_single(
        settings_of(RUNS["theory"]),
        folder / "theory-file" if ranks.is_first else Path("nowhere"),
        quiet,
        ranks,
    )
    for name in RESUMED:
        settings = settings_of(RUNS[name])
        where = folder / f"{name}-again"
        try:
            run_single(settings, where, stop_after_one, ranks)
        except StopError:
            run_single(settings, where, quiet, ranks)


def main(end: str, folder: Path) -> None:
    def on_round(done: RoundDone) -> None:
        if done.round == 2 and ranks.rank == 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise DeltaflError("the second process is out of luck")

    try:
        with joined_processes() as ranks:
            if end == "fails":
                play(folder, ranks)
            run_single(settings_of({"sampler": "pracdelta"}), folder / end, on_round, ranks)
    except DeltaflError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
