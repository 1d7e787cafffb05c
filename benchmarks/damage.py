"""Damage a file of a run's folder at a random place; the next start or reader must refuse it, or
not be misled.

A bit is flipped, the file is cut, or it is another run's; or, in a sealed file, an entry of an
array or of the header is forged under a checksum that is right. A forged state may lead to other
results, but they are finite.
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
from time import perf_counter
from typing import Any

import numpy as np

from deltafl import (
    DeltaflError,
    Population,
    close_round,
    init_round,
    load_state,
    make_plan,
    open_round,
    save_state,
)
from deltafl.scale.rows import RowFormat
from deltafl.simulation.folder.checkpoint import FILE as CHECKPOINT
from deltafl.simulation.folder.directory import DivergedError, RunDirectory, recorded_settings
from deltafl.simulation.folder.record import read_run
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.store.sealed import read_sealed, write_sealed

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
    elif how == "blocks":
        size = 4096
        first, second = (int(rng.integers(max(1, len(content) - size))) for _ in range(2))
        one = bytes(content[first : first + size])
        content[first : first + size] = content[second : second + size]
        content[second : second + size] = one[: len(content) - second]
    elif how == "cut":
        del content[rng.integers(max(1, len(content))) :]
    else:
        content = bytearray(other)
    file.write_bytes(content)


#: What stands in the place of an entry of a header.
FORGED: tuple[Any, ...] = (
    None,
    -1,
    0,
    10**6,
    2**63 - 1,
    1e300,
    float("nan"),
    "",
    "x",
    "../../x",
    [],
    {},
    [1, 2],
)
VALUES = (0, -1, 1, 10**6, 2**63 - 1, -(2**63), float("nan"), float("inf"), 1e300, 5e-324)


def forge(file: Path, rng: np.random.Generator) -> None:
    """Change an entry of a sealed file, with a seal that is right."""
    arrays, header = read_sealed(file, "")
    keys = list(header)
    if keys and rng.random() < 0.3:
        header[keys[rng.integers(len(keys))]] = FORGED[rng.integers(len(FORGED))]
    else:
        name = list(arrays)[rng.integers(len(arrays))]
        arrays[name] = forged(arrays[name].copy(), rng)
    write_sealed(file, arrays, header)


def forged(array: Any, rng: np.random.Generator) -> Any:
    """An array with another value, order, shape or type."""
    value: Any = VALUES[rng.integers(len(VALUES))]
    how = rng.integers(6)
    if how == 0 and array.ndim:
        return array[rng.permutation(len(array))]
    if how == 1 and array.ndim:
        return array[: len(array) - 1]
    if how == 2:
        kind = ("f8", "f4", "i8", "u1", "?")[rng.integers(5)]
        with np.errstate(all="ignore"):
            return array.astype(kind)
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        value = min(max(np.nan_to_num(value), info.min), info.max)
        value = info.max if value >= 2**63 else int(value)
    with np.errstate(all="ignore"):
        if how == 3 or not array.size:
            return np.full_like(array, value)
        array.flat[rng.integers(array.size)] = value
    return array


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

    def is_finite(self) -> bool:
        """Whether the model of the run is."""
        _, arrays = RunDirectory(self.run).saved() or (0, {})
        return bool(np.isfinite(arrays["state.params_d"]).all())

    def damaged(self, kind: str, rng: np.random.Generator) -> tuple[str, str]:
        """Damage one file at a random place; its name, and what came of it."""
        shutil.rmtree(self.root / "work", ignore_errors=True)
        shutil.copytree(self.root / f"{kind}-0", self.root / "work")
        files = sorted(path for path in (self.root / "work").rglob("*") if path.is_file())
        file = files[rng.integers(len(files))]
        how = ("flip", "flip", "cut", "swap", "forge", "forge")[rng.integers(6)]
        others = [path for path in (self.root / f"{kind}-1").rglob("*") if path.name == file.name]
        if how == "forge":
            file = self.root / "work" / "run" / CHECKPOINT
            forge(file, rng)
        else:
            damage(file, how, others[0].read_bytes() if others else b"", rng)
        name = f"{kind} {file.name} {how}"
        try:
            if self.found() == self.expected[kind]:
                return name, "the same"
            if how == "forge" and self.is_finite():
                return name, "finite"
            return name, "WRONG"
        except DeltaflError as error:
            return name, "refused" if "\n" not in str(error) else "TRACEBACK"
        except Exception as error:
            return name, f"TRACEBACK {type(error).__name__}: {error}"


class Million:
    """The state of many clients in one file, and their updates in another."""

    def __init__(self, root: Path, clients: int) -> None:
        population = Population.from_sizes(1 + np.arange(clients) % 7)
        self.plan = make_plan("pracdelta@ordered-pivotal", population, 50)
        rows = RowFormat(folder=str(root / "memory-00000000"))
        self.rows_plan = make_plan("uniform@poisson@difference-own", population, 50, memory=rows)
        self.state = root / "state.safetensors"
        save_state(
            self.state, self.play(self.plan, init_round(self.plan, np.zeros(8)), 2), self.plan
        )
        self.directory = RunDirectory(root / "run")
        self.directory.path.mkdir()
        for name in ("rounds.jsonl", "timings.jsonl"):
            (self.directory.path / name).touch()
        state = self.play(self.rows_plan, init_round(self.rows_plan, np.zeros(8)), 2)
        self.directory.save(state)
        self.rows = root / "memory-00000000" / "rows.bin"
        self.files = [self.state, self.directory.path / CHECKPOINT, self.rows]
        self.expected = {file: self.found(file) for file in self.files}

    def play(self, plan: Any, state: Any, rounds: int) -> Any:
        """The state after more rounds, which are the same each time."""
        for _ in range(rounds):
            cohort = open_round(plan, state)
            updates = np.random.default_rng(state.round).normal(size=(len(cohort.client_n), 8))
            state, _ = close_round(plan, state, cohort, updates.astype(np.float32))
        if not np.isfinite(state.params_d).all():
            raise ArithmeticError("the model is not finite")
        return state

    def found(self, file: Path) -> bytes:
        """The model two rounds after a file was loaded; of updates also those of 1,000 clients."""
        if file == self.state:
            after = self.play(self.plan, load_state(file, self.plan), 2)
            return bytes(after.params_d.tobytes() + np.asarray(after.sampler.p_m).tobytes())
        start = init_round(self.rows_plan, np.zeros(8))
        state = self.directory.load(self.rows_plan.sampler, start)
        everyone = state.control.control_md
        seen = np.flatnonzero(np.asarray(state.responded_m)).tolist() + list(range(1000))
        kept = b"".join(everyone[client].tobytes() for client in seen)
        return bytes(kept + self.play(self.rows_plan, state, 2).params_d.tobytes())

    def damaged(self, rng: np.random.Generator) -> tuple[str, str, float]:
        """Damage one file at a random place; its name, what came of it, and in what time."""
        file = self.files[rng.integers(len(self.files))]
        good = file.read_bytes()
        how = ("flip", "cut", "blocks", "forge")[rng.integers(4)]
        if how == "forge" and file != self.rows:
            forge(file, rng)
        else:
            how = "blocks" if how == "forge" else how
            damage(file, how, b"", rng)
        began = perf_counter()
        try:
            same = self.found(file) == self.expected[file]
            outcome = "the same" if same else "finite" if how == "forge" else "WRONG"
        except DeltaflError as error:
            outcome = "refused" if "\n" not in str(error) else "TRACEBACK"
        except Exception as error:
            outcome = f"TRACEBACK {type(error).__name__}: {error}"
        seconds = perf_counter() - began
        file.write_bytes(good)
        return f"a million {file.name} {how}", outcome, seconds


def count_million(
    places: int, seed: int, root: Path, clients: int = 10**6
) -> tuple[Counter[str], list[str], float]:
    """As ``count``, with the longest time that a damaged file took."""
    million = Million(root, clients)
    rng = np.random.default_rng(seed)
    found = [million.damaged(rng) for _ in range(places)]
    wrong = [
        f"{name}: {outcome}" for name, outcome, _ in found if outcome[:5] in ("WRONG", "TRACE")
    ]
    outcomes = Counter(outcome.split(":")[0] for _, outcome, _ in found)
    return outcomes, wrong, max(seconds for *_, seconds in found)


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
    parser.add_argument("--million", action="store_true", help="of a million clients' state")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.million:
            places, seed = options.places, options.seed
            outcomes, wrong, seconds = count_million(places, seed, Path(folder))
            print(f"{seconds:.1f} s at most")
        else:
            outcomes, wrong = count(options.places, options.seed, Path(folder))
    print(*(f"{number} {outcome}" for outcome, number in outcomes.most_common()), sep=", ")
    print(*wrong, sep="\n")


if __name__ == "__main__":
    main()
