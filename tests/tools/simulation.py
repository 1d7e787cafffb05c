"""Small simulated runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltafl.simulation.callback import RoundDone
from deltafl.simulation.directory import RunDirectory
from deltafl.simulation.engine import Evaluation
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings

TINY = {"task": "digits", "clients": 12, "sample": 4, "rounds": 6, "local_epochs": 1, "batch_size": 16}


class StopError(BaseException):
    """Stands for whatever ends a run early."""


def quiet(*_: object) -> None:
    """Takes progress and says nothing."""


def stop_after(rounds: int) -> Callable[[RoundDone], None]:
    def on_round(done: RoundDone) -> None:
        if done.round == rounds:
            raise StopError

    return on_round


def run(folder: Path, **given: object) -> Evaluation:
    return run_single(make_settings(RunSettings, given), folder, quiet)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """A line for each round, the first of round 0."""
    return list(RunDirectory(folder).lines("rounds.jsonl"))


def forget_checksums(folder: Path) -> None:
    """Write the checkpoint as earlier versions did, which knew no checksums of lines."""
    file = folder / "checkpoint.json"
    mark = json.loads(file.read_text())
    file.write_text(json.dumps({name: mark[name] for name in ("round", "tensors", "lengths", "crc32")}))
