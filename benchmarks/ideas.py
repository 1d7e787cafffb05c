"""Ideas for samplers and control variates, the losers too, on one task: what docs/lab-notes.md
reports.

    python benchmarks/ideas.py [--task digits] [--set clients=100 ...] [--rounds 50] [--seeds 10]
    [--out result.json] python benchmarks/ideas.py --group known ...
    python benchmarks/ideas.py --show result.json
    python benchmarks/ideas.py --notes docs/lab-notes.md

Each idea is a label; classes that exist only here are in ``idea_parts.py``. All run on the same
clients, initial models and minibatches. The group ``memory`` knows nothing of the clients but their
sizes, ``known`` their shares of labels as well. Reported are the mean accuracy over all rounds
(which ranks methods with less noise than the rounds to a threshold), paired with that of FedVARP
and with that of the group's default, and the rounds to the task's threshold; a run that never
reaches it counts as all its rounds, and the mean is marked with ≥.

``--notes`` replaces each table of the notes that follows a line which names its file:

    <!-- ideas: FILE.json -->
    <!-- noise: FILE.json 6 20 -->    the rounds that are shown
"""

import argparse
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from deltafl.analysis import mean_interval
from deltafl.analysis.statistics import first_reach, gap_closed
from deltafl.cli.options import assignment
from deltafl.errors import DeltaflError, unknown_name
from deltafl.io import checked, read_json, read_text
from deltafl.simulation import Job, RunSettings, RunStore, environment, make_settings, run_jobs
from deltafl.tasks import import_tasks
from deltafl.types import FloatArray

sys.path.append(str(Path(__file__).parents[1]))
import_tasks("reproduction.data")
_PARTS = f"{Path(__file__).with_name('idea_parts.py')}:"
#: What is tried where nothing but sizes is known; the first ones are what the others are compared
#: with.
MEMORY = {
    "full": "full",
    "uniform": "uniform",
    "fedvarp": "fedvarp",
    "pracdelta": "pracdelta",
    "delta-centred": "delta-centred",
    "spread": "spread",
    "delta-centred, local pivotal": "delta-centred@local-pivotal",
    "delta-centred, cube": "delta-centred@cube",
    "divfl (biased)": "divfl",
    "hics-fl (biased), T = 2": "hics-fl(temperature=2.0, rounds=150)",
    "hics-fl (biased), T = 0.2": "hics-fl(temperature=0.2, rounds=150)",
    "hics-fl (biased), T = 0.05": "hics-fl(temperature=0.05, rounds=150)",
    "delta-centred, beta learnt": "delta-centred@@difference-damped",
    "spread, beta learnt": "spread@@difference-damped",
    "delta-centred, floor 0.05": "delta-centred(floor=0.05)",
    "delta-centred, shrink 0": "delta-centred(shrink=0.0)",
    "delta-centred, forgetting 1": "delta-centred(forgetting=1.0)",
    "spread, forgetting 1": "spread(forgetting=1.0)",
    "spread, sketch of 32": "spread(sketch=32)",
    "a tour of everybody first (biased)": f"{_PARTS}TourFirst@@innovation-damped",
    "the same, then local pivotal": f"{_PARTS}TourFirst@local-pivotal@innovation-damped",
    "innovation (the default)": "innovation",
    "without the coefficient beta": "innovation@@innovation",
    "no ageing, first visits counted like others": "delta-centred@@innovation-damped",
    "no ageing": "innovation(ageing=0.0)",
    "ageing 4": "innovation(ageing=4.0)",
    "explore 2": "innovation(explore=2.0)",
    "explore 4": "innovation(explore=4.0)",
    "explore 16, floor 0.1": "innovation(explore=16.0, floor=0.1)",
    "shrink 0": "innovation(shrink=0.0)",
    "shrink 0.5": "innovation(shrink=0.5)",
    "shrink 1 (no own scores)": "innovation(shrink=1.0)",
    "floor 0.05": "innovation(floor=0.05)",
    "floor 0.1": "innovation(floor=0.1)",
    "floor 0.4": "innovation(floor=0.4)",
    "forgetting 1 (the last visit alone)": "innovation(forgetting=1.0)",
    "forgetting 0.2": "innovation(forgetting=0.2)",
    "unseen clients guessed as zero": "innovation@@difference-own-damped",
    "common c: memory 0.9": f"innovation@@{_PARTS}SlowInnovation",
    "common c: memory 0.3": f"innovation@@{_PARTS}FastInnovation",
    "memory of deviations from c": f"innovation@@{_PARTS}DeviationControl",
    "memory of deviations, 2 % lost a round": f"innovation@@{_PARTS}DeviationControl(decay=0.98)",
    "spread: local pivotal": "innovation@local-pivotal",
    "balanced: cube": "innovation@cube",
    "local pivotal, sketch of 32": "innovation(sketch=32)@local-pivotal",
    "first visits counted like others": f"{_PARTS}OneKindOfVisit@@innovation-damped",
}
#: What is tried where the server knows the clients' shares of labels.
KNOWN = {
    **{
        name: name
        for name in ("full", "uniform", "pracdelta", "fedvarp", "innovation", "fed-cbs", "md-fixed")
    },
    "balanced (the default)": "balanced",
    "balanced, no control": "balanced@@horvitz-thompson",
    "spread over the labels: local pivotal": "balanced@local-pivotal",
    "regression alone, drawn by weight": "md-fixed@@regression-damped",
    "regression alone, drawn evenly": "uniform@@regression-damped",
    "B follows faster: memory 0.2": f"balanced@@{_PARTS}FastRegression",
    "B follows slower: memory 0.8": f"balanced@@{_PARTS}SlowRegression",
    "B without the coefficient beta": "balanced@@regression",
    "and the clients' own memory": f"balanced@@{_PARTS}Residual",
    "the same, with innovation's scores": f"{_PARTS}BalancedInnovation@@{_PARTS}Residual",
    "innovation's memory instead of B": "balanced@@innovation-damped",
}
GROUPS = {"memory": MEMORY, "known": KNOWN}

_PLACE = re.compile(r"(<!-- (ideas|noise): (\S+)((?: \d+)*) -->\n\n)(?:\|.*\n)+")
CHANCE = "Every interval is 95 % by itself: about 1 in 20 excludes 0 by chance alone."
#: The accuracy after each round, of each seed.
Accuracies = dict[
    str, Annotated[list[Annotated[list[float], Field(min_length=1)]], Field(min_length=1)]
]


class IdeasFile(BaseModel):
    """What ``--out`` writes.

    Attributes:
        settings: Those that were given.
        seeds: The first seed, and the one after the last.
        environment: Versions and hardware.
        accuracy: By idea.
    """

    settings: dict[str, Any]
    seeds: tuple[int, int]
    environment: dict[str, Any]
    accuracy: Accuracies

    @property
    def common(self) -> RunSettings:
        """The settings of a run of uniform sampling, as they are used: 0.8 is "0.8"."""
        return make_settings(RunSettings, {**self.settings, "sampler": "uniform"})


def read_ideas(path: Path) -> IdeasFile:
    """What ``--out`` wrote.

    Raises:
        DeltaflError: If it is missing or something else.
    """
    return checked(
        IdeasFile, read_json(path), f"{path} is no file of ideas.py", "make it again with --out"
    )


class NoiseFile(BaseModel):
    """What ``noise_floor.py`` writes, as far as it is shown: by local rate a row for each of
    ``rounds``.
    """

    columns: list[str]
    rounds: list[int]
    rates: dict[str, list[list[float]]]


#: Columns of that file, as the notes call them.
_NOISE = {
    "no memory": "no memory",
    "noise": "floor: minibatch noise",
    "seen": "left of seen clients",
    "unseen": "of unseen ones",
    "share seen": "share seen",
}


def noise_table(file: NoiseFile, rounds: list[int]) -> str:
    """Markdown: some rounds at every rate."""
    lines = [
        f"| local rate | round | {' | '.join(_NOISE.values())} |",
        "|---" * (2 + len(_NOISE)) + "|",
    ]
    for rate, rows in file.rates.items():
        for number, row in zip(file.rounds, rows, strict=True):
            if number in rounds:
                cells = dict(zip(file.columns, row, strict=True))
                shown = " | ".join(f"{cells[name]:.2f}" for name in _NOISE)
                lines.append(f"| {rate} | {number} | {shown} |")
    return "\n".join(lines)


def table(found: Accuracies, threshold: float | None) -> str:
    """Markdown: mean accuracy over the rounds with paired differences, rounds to the threshold, gap
    closed.

    Args:
        found: By idea; the one with ``(the default)`` in its name is what the others are compared
            with, beside FedVARP.
        threshold: What counts as reached; None for nothing.
    """
    area = {name: np.array([100 * np.mean(run) for run in runs]) for name, runs in found.items()}
    rounds = {
        name: np.array([_bounded(run, threshold) for run in runs]) for name, runs in found.items()
    }
    default = next((name for name in found if "(the default)" in name), None)
    heads = [
        "idea",
        "mean accuracy, points above FedVARP",
        "above the default",
        "rounds to the threshold",
        "G",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in found.items():
        compared = "–" if default in (None, name) else _above(area[name], area[default or name])
        never = any(_first(run, threshold) is None for run in runs)
        cells = [name, _above(area[name], area["fedvarp"]), compared]
        cells += [("≥ " if never else "") + f"{np.mean(rounds[name]):.1f}", _gap(name, rounds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(notes: str, folder: Path) -> str:
    """The notes with every table made anew from its file in the folder.

    Raises:
        DeltaflError: If a file is missing, or there is no place for a table.
    """

    def made(place: re.Match[str]) -> str:
        path = folder / place[3]
        if place[2] == "noise":
            noise = checked(
                NoiseFile, read_json(path), f"{path} is no file of noise_floor.py", "make it again"
            )
            return f"{place[1]}{noise_table(noise, [int(number) for number in place[4].split()])}\n"
        file = read_ideas(path)
        return f"{place[1]}{table(file.accuracy, file.common.threshold)}\n"

    text, number = _PLACE.subn(made, notes)
    if not number:
        raise DeltaflError(
            "no table to write: put <!-- ideas: FILE.json -->, an empty line and | where one "
            "belongs"
        )
    return text


def write_tables(path: Path) -> None:
    """Write the tables of the notes again, from ``../results/ideas``."""
    path.write_text(
        with_tables(read_text(path), path.parent.parent / "results" / "ideas"), encoding="utf-8"
    )


def _above(own_s: FloatArray, other_s: FloatArray) -> str:
    mean, _, high = mean_interval(own_s - other_s)
    half = "" if high is None else f" ± {high - mean:.2f}"
    return f"{round(mean, 2) + 0.0:+.2f}{half}"  # + 0.0: no minus before zero


def _first(run: list[float], threshold: float | None) -> int | None:
    """Index of the first round at the threshold; None if none is."""
    return None if threshold is None else first_reach(np.array(run), threshold, higher=True)


def _bounded(run: list[float], threshold: float | None) -> float:
    """The first round at the threshold; all rounds of the run if none is."""
    first = _first(run, threshold)
    return float(len(run) if first is None else first + 1)


def _gap(name: str, rounds: dict[str, FloatArray]) -> str:
    if not {"uniform", "full"} <= set(rounds):
        return "–"
    gap = gap_closed(rounds["uniform"], rounds[name], rounds["full"])
    return "–" if gap is None else f"{gap.mean + 0.0:.2f}"


def play(ideas: dict[str, str], own: dict[str, Any], seeds: range, processes: int) -> Accuracies:
    """The accuracy after each round; of a run that diverged the last one stands for the rounds
    that it missed.
    """
    jobs = {
        (name, seed): Job(
            "ideas", make_settings(RunSettings, {**own, "sampler": label, "seed": seed})
        )
        for seed in seeds
        for name, label in ideas.items()
    }
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run_jobs(
            list(jobs.values()),
            Path(folder),
            processes,
            lambda progress: print(progress, flush=True),
        )
        records = {key: RunStore(Path(folder)).get(job) for key, job in jobs.items()}
    found: Accuracies = {name: [] for name in ideas}
    for (name, _), record in records.items():
        if record is not None:
            accuracy = [round(value or 0.0, 5) for value in record.accuracy]
            found[name].append(
                accuracy + accuracy[-1:] * (int(record.settings["rounds"]) - len(accuracy))
            )
    return found


def main() -> None:
    """Run the ideas for all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--group", choices=GROUPS, default="memory")
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="IDEA",
        help="these, and fedvarp; others keep their rows in --out",
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of deltafl run"
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="runs side by side"
    )
    parser.add_argument("--out", type=Path, help="file for all accuracies, JSON")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="run nothing, print the table of such a file"
    )
    parser.add_argument(
        "--notes",
        type=Path,
        metavar="FILE",
        help="run nothing, write the tables of the notes again",
    )
    given = parser.parse_args()
    try:
        if given.notes:
            write_tables(given.notes)
        elif given.show:
            file = read_ideas(given.show)
            print(f"{table(file.accuracy, file.common.threshold)}\n\n{CHANCE}")
        else:
            run(given)
    except DeltaflError as error:
        parser.exit(2, f"ideas.py: {error}\n")


def run(given: argparse.Namespace) -> None:
    """Play the ideas, print their table and write their file; with ``--only``, other ideas keep
    their rows there.
    """
    if given.seeds < 1:
        raise DeltaflError(f"--seeds is {given.seeds}; write 1 or more")
    group = GROUPS[given.group]
    for name in given.only or ():
        if name not in group:
            raise unknown_name("idea", name, group)
    chosen = (
        {name: group[name] for name in dict.fromkeys(["fedvarp", *given.only])}
        if given.only
        else group
    )
    own = {"task": given.task, "rounds": given.rounds, **dict(map(assignment, given.set))}
    seeds = (given.first_seed, given.first_seed + given.seeds)
    made = IdeasFile(settings=own, seeds=seeds, environment=environment(), accuracy={})
    before = read_ideas(given.out) if given.only and given.out and given.out.exists() else None
    if before and (before.seeds != seeds or before.common != made.common):
        raise DeltaflError(
            f"{given.out} was made with other settings or seeds; choose another --out"
        )
    accuracy = play(chosen, own, range(*seeds), given.processes)
    print(f"{table(accuracy, made.common.threshold)}\n\n{CHANCE}")
    if given.out:
        accuracy = (before.accuracy if before else {}) | accuracy
        given.out.write_text(
            made.model_copy(update={"accuracy": accuracy}).model_dump_json() + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
