"""Makes ``deltafl/analysis/evidence.csv``, which ``deltafl recommend`` answers from, of the benchmark's table.

python -m reproduction.evidence
"""

import csv
from pathlib import Path

from deltafl.analysis import csv_text

from .spec import load_experiment

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "src" / "deltafl" / "analysis" / "evidence.csv"
#: Partitions that make clients of unequal sizes.
_UNEQUAL = {"yurochkin2019", "quantity", "writer"}


def evidence_text() -> str:
    """Practical and unbiased methods, by area: ``gap_mean_accuracy`` of the benchmark's table."""
    parts = load_experiment("benchmark").parts
    with (ROOT / "results" / "benchmark" / "table.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["unbiased"] == "True" and row["gap_mean_accuracy_low"]]
    return csv_text(
        [
            {
                "task": parts[row["part"]]["title"],
                "data": parts[row["part"]]["task"],
                "clients": parts[row["part"]]["clients"],
                "selected": parts[row["part"]]["sample"],
                "unequal": "yes" if parts[row["part"]]["partition"] in _UNEQUAL else "no",
                "label": row["method"],
                "gap": float(row["gap_mean_accuracy"]),
                "low": float(row["gap_mean_accuracy_low"]),
                "high": float(row["gap_mean_accuracy_high"]),
                "seeds": row["seeds"],
            }
            for row in rows
            if row["needs"] not in ("oracle", "everyone", "losses")
        ]
    )


if __name__ == "__main__":
    EVIDENCE.write_text(evidence_text(), encoding="utf-8")
