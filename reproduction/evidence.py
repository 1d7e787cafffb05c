"""``python -m reproduction.evidence`` makes ``deltafl/analysis/evidence.csv``, the source of ``deltafl recommend``."""

import csv
from pathlib import Path

from .benchmark.parts import parts_of
from .spec import load_experiment
from .text import Cells, csv_text

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "src" / "deltafl" / "analysis" / "evidence.csv"
_UNEQUAL, _IMPRACTICAL = {"yurochkin2019"}, {"oracle", "everyone", "losses"}
_TASK = {"task": "title", "data": "task", "clients": "clients", "selected": "sample"}
_ENDS = {"gap": "", "low": "_low", "high": "_high"}


def evidence_text() -> str:
    """A line for each unbiased, practical method on each judged task: G by area with its interval.

    The task where clients are away is left out: fewer methods were played there, and methods are compared on tasks that
    all of them have. So are tasks whose seeds are not complete.
    """
    experiment, cells = load_experiment("benchmark"), Cells()
    parts, seeds = experiment.parts, {part.name: part.seeds for part in parts_of(experiment, "cpu")}
    with (ROOT / "results" / "benchmark" / "table.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gap = {name: row[f"gap_mean_accuracy{end}"] for name, end in _ENDS.items()}
            own = "+" in row["method"] or row["needs"] in _IMPRACTICAL  # with settings of its own, or not for a server
            part = parts[row["part"]]
            is_judged = "availability" not in part and int(row["seeds"]) == seeds[row["part"]]
            if row["unbiased"] == "True" and all(gap.values()) and not own and is_judged:
                task = {name: part[key] for name, key in _TASK.items()}
                method = {"unequal": "yes" if part["partition"] in _UNEQUAL else "no", "label": row["method"]}
                cells.append({**task, **method, **gap, "seeds": row["seeds"]})
    return csv_text(cells)


if __name__ == "__main__":
    EVIDENCE.write_text(evidence_text(), encoding="utf-8")
