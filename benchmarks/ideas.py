"""The tables of docs/why/lab-notes.md, from the accuracies of the ideas that were tried.

    python benchmarks/ideas.py

Ideas for samplers and control variates, the losers too, ran on the same clients, initial models and
minibatches. Reported are the mean accuracy over all rounds (which ranks methods with less noise
than the rounds to a threshold), paired with that of FedVARP and with that of the default, and the
rounds to the task's threshold; a run that never reaches it counts as all its rounds, and the mean
is marked with ≥. The script that played them is in commit 962fe455.

Each table of the notes that follows a line which names its file is written again:

    <!-- ideas: FILE.json -->
    <!-- noise: FILE.json 6 20 -->    the rounds that are shown
    <!-- share: FILE.json -->         mean accuracies alone, on the scale from uniform to full
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from deltafl.analysis import mean_interval
from deltafl.analysis.statistics import first_reach, gap_closed
from deltafl.simulation import RunSettings, make_settings
from deltafl.store import checked, read_json, read_text
from deltafl.tasks import import_tasks
from deltafl.types import FloatArray

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
import_tasks("reproduction.data")

_PLACE = re.compile(r"(<!-- (ideas|noise|share): (\S+)((?: \d+)*) -->\n\n)(?:\|.*\n)+")
#: The accuracy after each round, of each seed.
Accuracies = dict[
    str, Annotated[list[Annotated[list[float], Field(min_length=1)]], Field(min_length=1)]
]


class IdeasFile(BaseModel):
    """The settings that were given, and the accuracies by idea."""

    settings: dict[str, Any]
    accuracy: Accuracies

    @property
    def threshold(self) -> float | None:
        """That of the settings, else of their task."""
        return make_settings(RunSettings, {**self.settings, "sampler": "uniform"}).threshold


class NoiseFile(BaseModel):
    """The errors of even draws: by local rate a row for each of ``rounds``."""

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


def share_table(found: Accuracies) -> str:
    """Markdown: mean accuracy over all rounds, the share of the gap between ``uniform`` and
    ``full`` that it closes, and the paired difference to the default.
    """
    area = {name: np.array([100 * np.mean(run) for run in runs]) for name, runs in found.items()}
    default_s = next(area_s for name, area_s in area.items() if "(the default)" in name)
    heads = ["idea", "mean accuracy, %", "share of the gap [95 %]", "points above the default"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, area_s in area.items():
        gap = gap_closed(-area["uniform"], -area_s, -area["full"])
        share = "–"
        if gap is not None and name not in {"uniform", "full"}:
            share = f"{gap.mean:.3f}"
            if gap.low is not None:
                share += f" [{gap.low:.3f}, {gap.high:.3f}]"
        above = "–" if area_s is default_s else _above(area_s, default_s)
        lines.append(f"| {name} | {area_s.mean():.2f} | {share} | {above} |")
    return "\n".join(lines)


def with_tables(notes: str, folder: Path) -> str:
    """The notes with every table made anew from its file in the folder."""

    def made(place: re.Match[str]) -> str:
        path = folder / place[3]
        found = read_json(path)
        cure = "restore it"
        if place[2] == "noise":
            noise = checked(NoiseFile, found, f"{path} is no file of errors", cure)
            return f"{place[1]}{noise_table(noise, [int(number) for number in place[4].split()])}\n"
        ideas = checked(IdeasFile, found, f"{path} is no file of ideas", cure)
        if place[2] == "share":
            return f"{place[1]}{share_table(ideas.accuracy)}\n"
        return f"{place[1]}{table(ideas.accuracy, ideas.threshold)}\n"

    return _PLACE.sub(made, notes)


def write_tables(path: Path) -> None:
    """Write the tables of the notes again, from ``../results/ideas``."""
    folder = path.parents[2] / "results" / "ideas"
    path.write_text(with_tables(read_text(path), folder), encoding="utf-8")


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


if __name__ == "__main__":
    write_tables(ROOT / "docs" / "why" / "lab-notes.md")
