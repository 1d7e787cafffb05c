"""``python -m reproduction.evidence`` makes ``deltafl/analysis/evidence.csv``, the source of
``deltafl recommend``.
"""

import csv
import itertools
from pathlib import Path

from deltafl.analysis.recommendation import SUITED

from .benchmark.parts import parts_of
from .spec import load_experiment
from .text import Cells, csv_text

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "src" / "deltafl" / "analysis" / "evidence.csv"
_UNEQUAL = {"yurochkin2019"}
_IMPRACTICAL = {"oracle", "everyone", "losses"}
_TASK = {"task": "title", "data": "task", "clients": "clients", "selected": "sample"}
_ENDS = {"gap": "", "low": "_low", "high": "_high"}


def evidence_text() -> str:
    """A line for each unbiased, practical method on each judged task: G by area with its interval.

    The task where clients are away is left out: fewer methods were played there, and methods are
    compared on tasks that all of them have. So are tasks on which a method that has been played
    elsewhere, or a seed, is still to be played. Of labels with settings those count that suit some
    model in ``deltafl recommend``.
    """
    experiment = load_experiment("benchmark")
    cells = Cells()
    with (ROOT / "results" / "benchmark" / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    played = {(row["part"], row["method"], int(row["seeds"])) for row in rows}
    # A new row of the table of samplers takes no task from the others.
    compared = {row["method"] for row in rows if "+" not in row["method"]}
    parts = parts_of(experiment, "cpu")
    suited = set(itertools.chain(*SUITED.values()))
    complete = {
        part.name
        for part in parts
        if played.issuperset(
            (part.name, method, part.seeds) for method in part.methods if method in compared
        )
    }
    for row in rows:
        gap = {name: row[f"gap_mean_accuracy{end}"] for name, end in _ENDS.items()}
        part = experiment.parts[row["part"]]
        label, plus, settings = row["method"].partition("+")
        is_judged = (
            "availability" not in part
            and row["part"] in complete
            and row["needs"] not in _IMPRACTICAL
            and plus + settings in suited
        )
        if row["unbiased"] == "True" and all(gap.values()) and is_judged:
            task = {name: part[key] for name, key in _TASK.items()}
            method = {
                "unequal": "yes" if part["partition"] in _UNEQUAL else "no",
                "label": label,
                "settings": plus + settings,
            }
            cells.append({**task, **method, **gap, "seeds": row["seeds"]})
    return csv_text(cells)


if __name__ == "__main__":
    EVIDENCE.write_text(evidence_text(), encoding="utf-8")
