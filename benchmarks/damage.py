"""Damage a file of a run's folder at a random place; the next start or reader must refuse it, or
not be misled.

A bit is flipped, the file is cut, or it is another run's.
``python benchmarks/damage.py --places 400`` prints how often a folder was refused in a sentence,
gave the same results, gave others without a word, or ended in a traceback. The folder is that of an
unfinished run (it goes on), of a finished one or of one that diverged (they are read).
"""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from deltafl import DeltaflError
from deltafl.simulation.directory import DivergedError, RunDirectory, recorded_settings
from deltafl.simulation.record import read_run
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings

GIVEN = {
    "task": "digits",
    "clients": 12,
    "sample": 4,
    "rounds": 6,
    "local_epochs": 1,
    "batch_size": 16,
}
KINDS = {"unfinished": {}, "finished": {}, "diverged": {"local_lr": 1e9}}


def damage(file: Path, how: str, other: bytes, rng: np.random.Generator) -> None:
    """Flip a bit of a file, overwrite eight bytes, cut it, or put another content in its place."""
    content = bytearray(file.read_bytes())
    if how == "flip" and content:
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    elif how == "overwrite":
        first = int(rng.integers(len(content)))
        content[first : first + 8] = rng.bytes(min(8, len(content) - first))
    elif how == "cut":
        del content[rng.integers(max(1, len(content))) :]
    else:
        content = bytearray(other)
    file.write_bytes(content)


class StopError(BaseException):
    """Stands for whatever ends a run early."""


def stop(done: Any) -> None:
    """End an unfinished run after a round that no checkpoint holds."""
    if done.round == 5:
        raise StopError


def quiet(_: Any) -> None:
    """Say nothing."""


class Folders:
    """Two runs of each kind, which differ in their seed, and copies of them to damage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "work" / "run"
        self.expected: dict[str, Any] = {}
        for kind, more in KINDS.items():
            for seed in (0, 1):
                given = {
                    **GIVEN,
                    **more,
                    "sampler": "innovation",
                    "checkpoint_every": 2,
                    "seed": seed,
                }
                self._play(
                    {**given, "memory_path": str(root / "work" / "memory")},
                    stop if kind == "unfinished" else quiet,
                )
                shutil.copytree(root / "work", root / f"{kind}-{seed}")
                if seed == 0:
                    self.expected[kind] = self.found()
                shutil.rmtree(root / "work")

    def _play(self, given: dict[str, Any], on_round: Callable[[Any], None]) -> None:
        with suppress(StopError, DivergedError):
            run_single(make_settings(RunSettings, given), self.run, on_round)

    def found(self) -> list[Any]:
        """What the run in the folder comes to: its rounds, its model, its curves and where it
        was played.
        """
        settings = make_settings(RunSettings, recorded_settings(self.run) or {})
        directory = RunDirectory(self.run)
        if not directory.is_finished(settings.rounds or 0):
            self._play(settings.model_dump(exclude_none=True), quiet)
        run = read_run(directory, settings)
        curves = [
            np.asarray(column).tobytes()
            for column in (run.round_r, run.accuracy_r, run.loss_r, run.bytes_r)
        ]
        _, arrays = directory.saved() or (0, {})
        where = {key: value for key, value in directory.environment().items() if key != "command"}
        lines = (self.run / "rounds.jsonl").read_bytes()
        return [
            lines,
            [arrays[name].tobytes() for name in sorted(arrays)],
            curves,
            run.draws_m.tobytes(),
            directory.ending(),
            where,
        ]

    def damaged(self, kind: str, rng: np.random.Generator) -> tuple[str, str]:
        """Damage one file at a random place; its name, and what came of it."""
        shutil.rmtree(self.root / "work", ignore_errors=True)
        shutil.copytree(self.root / f"{kind}-0", self.root / "work")
        files = sorted(path for path in (self.root / "work").rglob("*") if path.is_file())
        file = files[rng.integers(len(files))]
        how = ("flip", "flip", "flip", "cut", "swap")[rng.integers(5)]
        others = [path for path in (self.root / f"{kind}-1").rglob("*") if path.name == file.name]
        damage(file, how, others[0].read_bytes() if others else b"", rng)
        name = f"{kind} {file.name} {how}"
        try:
            return name, "the same" if self.found() == self.expected[kind] else "WRONG"
        except DeltaflError as error:
            return name, "refused" if "\n" not in str(error) else "TRACEBACK"
        except Exception as error:
            return name, f"TRACEBACK {type(error).__name__}: {error}"


def count(places: int, seed: int, root: Path) -> tuple[Counter[str], list[str]]:
    """How often each came of so many damaged folders, and what was wrong."""
    folders = Folders(root)
    rng = np.random.default_rng(seed)
    outcomes = Counter[str]()
    wrong = []
    for place in range(places):
        name, outcome = folders.damaged(list(KINDS)[place % len(KINDS)], rng)
        outcomes[outcome.split()[0] if outcome.isupper() else outcome] += 1
        wrong += [f"{name}: {outcome}"] if outcome[:5] in ("WRONG", "TRACE") else []
    return outcomes, wrong


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, wrong = count(options.places, options.seed, Path(folder))
    print(*(f"{number} {outcome}" for outcome, number in outcomes.most_common()), sep=", ")
    print(*wrong, sep="\n")


if __name__ == "__main__":
    main()
