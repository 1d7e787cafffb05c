"""Cohorts that size themselves beside fixed ones: what n="auto" costs and gains.

    python benchmarks/sizes.py --task digits --out results/sizes [--data-dir FOLDER] [--only-page]

Two questions, each with paired seeds that chose nothing:

- **As many rounds and trainings.** A method with ``relative_error=1.0`` plays the task's rounds,
  and so does the fixed n with its mean number of trainings. With ``+budget`` it gets the trainings
  of the task's own n beforehand, with this target and a stricter one, and its rival is that n.
- **As many trainings, rounds for nothing.** Fixed n play until they have spent the trainings of
  the task's own n; ``relative_error=1.0`` is judged by its accuracy at the same numbers.

Appends a line a run to ``runs.jsonl.gz``, from which an interrupted call goes on, and writes
``README.md`` from all tasks in the folder.
"""

import argparse
import gzip
import json
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl.analysis import mean_interval
from deltafl.simulation import RunSettings, environment, make_settings
from deltafl.simulation.folder.record import Job, RunRecord, RunStore
from deltafl.simulation.parallel.sweep import run_jobs
from deltafl.tasks import import_tasks
from deltafl.types import FloatArray

sys.path.append(str(Path(__file__).parents[1]))
AUTO = "relative_error=1.0"
STRICTER = "relative_error=0.7"
_DIRICHLET = {"partition": "hsu2019", "batch_size": 32}


class Case(NamedTuple):
    """A task, and how long it is played."""

    settings: dict[str, Any]
    methods: tuple[str, ...]
    rounds: int
    sample: int  #: the n that a user would have written
    grid: tuple[int, ...]  #: n whose runs have all the trainings; none where that takes too long
    seeds: range


LINEAR = ("uniform", "innovation@local-pivotal", "census+average=0.5+scaffold")
CASES = {
    "digits": Case({"local_lr": 0.8}, LINEAR, 100, 10, (3, 5, 10, 20), range(9100, 9110)),
    "mnist": Case(
        _DIRICHLET
        | {"clients": 300, "alpha": 0.3, "local_epochs": 5, "local_lr": 0.4, "test_examples": 5000},
        LINEAR,
        40,
        20,
        (),
        range(9100, 9110),
    ),
    "fashion-mnist": Case(
        _DIRICHLET
        | {"clients": 100, "alpha": 0.1, "local_epochs": 1, "local_lr": 0.2, "test_examples": 5000},
        ("innovation@local-pivotal", "census+average=0.5+mime=0.7"),
        40,
        10,
        (),
        range(9100, 9110),
    ),
}


class Curve(NamedTuple):
    """One run: trainings so far and accuracy, round by round, from round 0."""

    trainings: FloatArray
    accuracy: FloatArray

    def area(self) -> float:
        """Mean accuracy over the rounds."""
        return float(self.accuracy[1:].mean())

    def last(self) -> float:
        """Mean accuracy of the last ten rounds."""
        return float(self.accuracy[-10:].mean())

    def by_trainings(self, budget: int) -> float:
        """Mean accuracy over twenty numbers of trainings up to a budget."""
        spent = np.linspace(0, budget, 21)[1:]
        place = np.searchsorted(self.trainings, spent, side="right") - 1
        return float(self.accuracy[place].mean())


class NotPlayedError(Exception):
    """A run that a page needs is not there."""


class Player:
    """Plays the runs of a task that are not there yet."""

    def __init__(self, task: str, folder: Path, data_dir: str | None, plays: bool = True) -> None:
        self._task = task
        self.case = CASES[task]
        self._file = folder / "runs.jsonl.gz"
        self._folder = folder
        self._data_dir = data_dir
        self._plays = plays
        self._known = {key_of(row): row for row in rows_of(self._file)}

    def curve(self, label: str, rounds: int, seed: int) -> Curve:
        """One run."""
        key = {"task": self._task, "label": label, "rounds": rounds, "seed": seed}
        if (row := self._known.get(key_of(key))) is not None:
            return Curve(np.array(row["trainings"]), np.array(row["accuracy"]))
        if not self._plays:
            raise NotPlayedError
        given = key | self.case.settings | {"sampler": label, "evaluate_every": 1}
        del given["label"]
        if self._data_dir is not None:
            given["data_dir"] = self._data_dir
        job = Job(f"{self._task}-{rounds}", make_settings(RunSettings, given))
        out = self._folder / "unfinished"
        run_jobs([job], out, 1, lambda done: None)
        record: RunRecord | None = RunStore(out).get(job)
        assert record is not None
        accuracy = np.round(np.array(record.accuracy, float), 5).tolist()
        found = {
            "trainings": np.array(record.trainings, float).astype(int).tolist(),
            "accuracy": accuracy,
        }
        made = {"environment": environment()} if seed == self.case.seeds[0] else {}
        with gzip.open(self._file, "at") as file:
            file.write(json.dumps(key | found | made) + "\n")
        self._known[key_of(key)] = key | found
        return Curve(np.array(found["trainings"]), np.array(accuracy))

    def curves(self, label: str, rounds: int) -> list[Curve]:
        """Those of all seeds."""
        return [self.curve(label, rounds, seed) for seed in self.case.seeds]


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a run is known by."""
    return row["task"], row["label"], row["rounds"], row["seed"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What has been played."""
    if not file.exists():
        return []
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def points(ours: list[float], theirs: list[float]) -> str:
    """A paired difference in points of accuracy, with its 95 % interval."""
    middle, low, high = mean_interval(100 * (np.array(ours) - np.array(theirs)))
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"


def beside_fixed(player: Player) -> Iterator[list[str]]:
    """As many rounds and trainings."""
    case = player.case
    for method in case.methods:
        given = case.rounds * case.sample
        if method.startswith("census"):  # it costs as many trainings as there are clients
            given += (
                make_settings(
                    RunSettings, {"task": player._task, "sampler": method} | case.settings
                ).clients
                or 0
            )
        for setting in (AUTO, f"{AUTO}+budget={given}", f"{STRICTER}+budget={given}"):
            try:
                ours = player.curves(f"{method}+sample={case.sample}+{setting}", case.rounds)
            except NotPlayedError:  # of a page: it has what is there
                continue
            spent = float(np.mean([run.trainings[-1] for run in ours]))
            n = case.sample
            if setting == AUTO:
                begins = float(np.mean([run.trainings[1] for run in ours]))
                census = begins if method.startswith("census") else 0.0
                n = max(2, round((spent - census) / (case.rounds - (census > 0))))
            theirs = player.curves(f"{method}+sample={n}", case.rounds)
            other = float(np.mean([run.trainings[-1] for run in theirs]))
            yield [
                f"`{method}`",
                f"`+{setting}`",
                f"{spent:.0f}",
                f"{n}: {other:.0f}",
                points([run.area() for run in ours], [run.area() for run in theirs]),
                points([run.last() for run in ours], [run.last() for run in theirs]),
            ]


def beside_best(player: Player) -> Iterator[list[str]]:
    """As many trainings, rounds for nothing."""
    case = player.case
    if not case.grid:
        return
    for method in case.methods:
        census = 100 if method.startswith("census") else 0
        budget = case.rounds * case.sample + census
        fixed = {
            n: [
                run.by_trainings(budget)
                for run in player.curves(
                    f"{method}+sample={n}", -(-(budget - census) // n) + (census > 0)
                )
            ]
            for n in case.grid
        }
        ours = [
            run.by_trainings(budget)
            for run in player.curves(f"{method}+sample={case.sample}+{AUTO}", 2 * case.rounds)
        ]
        best = max(fixed, key=lambda n: np.mean(fixed[n]))
        cells = [f"`{method}`", str(best), points(ours, fixed[best])]
        yield [*cells, points(ours, fixed[case.sample]), points(ours, fixed[max(fixed)])]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown."""
    return [
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def page(folder: Path) -> str:
    """All tasks that have been played to the end."""
    played = {row["task"] for row in rows_of(folder / "runs.jsonl.gz")}
    lines = [
        "# Cohorts that size themselves",
        "",
        'What `relative_error=1.0` (`n="auto"`, [how](../../docs/how-to/cohort-size.md)) brings '
        "beside fixed cohorts: accuracy, in points, ours minus that of the fixed n, with 95 % "
        "intervals over paired seeds.",
        "",
    ]
    for task in [name for name in CASES if name in played]:
        player = Player(task, folder, None, plays=False)
        case = player.case
        fixed = [*beside_fixed(player)]
        best = [*beside_best(player)]
        lines += [f"## {task}, {case.rounds} rounds, {len(case.seeds)} seeds", ""]
        lines += ["As many rounds, and as many trainings:", ""]
        heads = ["method", "sized by", "trainings", "fixed n: trainings"]
        lines += table([*heads, "mean accuracy", "last ten rounds"], fixed)
        if best:
            lines += ["As many trainings, whatever the rounds; mean accuracy:", ""]
            heads = ["method", "best fixed n", "beside the best", f"beside {case.sample}"]
            lines += table([*heads, f"beside {max(case.grid)}"], best)
    command = "python benchmarks/sizes.py --task TASK --out results/sizes"
    lines += [f"`{command}` with each task; machine and versions are in `runs.jsonl.gz`.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--task", choices=CASES, default="digits")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--only-page", action="store_true")
    given = parser.parse_args()
    import_tasks("reproduction.data")
    given.out.mkdir(parents=True, exist_ok=True)
    player = Player(given.task, given.out, given.data_dir)
    if not given.only_page:
        deque(chain(beside_fixed(player), beside_best(player)), 0)
    (given.out / "README.md").write_text(page(given.out))


if __name__ == "__main__":
    main()
