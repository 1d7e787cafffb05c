"""Runs the toy and shows it: cohorts.json, table.csv, toy.png, and the page's tables."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltafl.errors import DeltaflError, require
from deltafl.io import checked, read_json, write_atomically

from .enumeration import IDEAL, SCORES, WAYS, Enumerated, enumerate_toy, hand_picked


def run_toy(folder: Path, on_step: Callable[[int, int], None]) -> None:
    """Enumerate every score with every way and write ``cohorts.json``.

    Args:
        folder: Where it goes.
        on_step: Called with (combinations done, all of them).
    """
    rows = []
    for score in SCORES:
        for way in WAYS:
            row = enumerate_toy(score, way)
            rows.append({**row._asdict(), "outcomes": [outcome._asdict() for outcome in row.outcomes]})
            on_step(len(rows), len(SCORES) * len(WAYS))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "cohorts.json", json.dumps(rows, indent=1) + "\n")


def report_toy(folder: Path) -> str:
    """Read ``cohorts.json``, write ``table.csv`` and ``toy.png``, and return the page in Markdown.

    Raises:
        DeltaflError: If the toy was not run.
        MissingExtraError: Without Matplotlib.
    """
    require("matplotlib", "plot")
    from .plot import draw_toy

    rows = _read(folder / "cohorts.json")
    write_atomically(folder / "table.csv", _csv(rows))
    draw_toy(list(rows.values()), folder / "toy.png")
    return (
        "\n\n".join([_table_text(rows), _reading_text(rows), "![Aggregates of two of three](toy.png)", _pairs_text()])
        + "\n"
    )


def summarise_toy(folder: Path) -> tuple[str, str]:
    """What was found, in a line, and the verdict on the paper's ordering: DELTA below IS below uniform.

    Raises:
        DeltaflError: If the toy was not run.
    """
    rows = _read(folder / "cohorts.json")
    claimed = ("DELTA", "IS", "uniform")
    ways = [way for way in WAYS if not WAYS[way].centred]  # the centred ones are not the paper's
    held = [way for way in ways if rows[claimed[0], way].mse < rows[claimed[1], way].mse < rows[claimed[2], way].mse]
    against = [way for way in ways if rows[claimed[1], way].mse < rows[claimed[0], way].mse]

    def told(chosen: list[str]) -> str:
        return ", ".join(
            f"{WAYS[way].title} ({' / '.join(f'{rows[s, way].mse:.3f}' for s in claimed)})" for way in chosen
        )

    text = f"mean squared error of DELTA / IS / uniform: the paper's order under {told(held) or 'none'}"
    text += f"; IS below DELTA under {told(against) or 'none'}"
    if held and against:
        return text, "holds in part and is contradicted in part"
    return text, "is contradicted" if against else "holds" if len(held) == len(ways) else "holds in part"


Rows = dict[tuple[str, str], Enumerated]


def _read(path: Path) -> Rows:
    if not path.exists():
        raise DeltaflError(f"there is no {path.name}; run the experiment first")
    cure = "run the experiment again"
    rows = {(row.score, row.way): row for row in checked(list[Enumerated], read_json(path), str(path), cure)}
    missing = [f"{score} {way}" for score in SCORES for way in WAYS if (score, way) not in rows]
    if missing:
        raise DeltaflError(f"{path} lacks {', '.join(missing)}; {cure}")
    return rows


def _table_text(rows: Rows) -> str:
    lines = [
        "E norm(aggregate - (4, 0))^2 by enumeration of all cohorts; in brackets the bias, norm(E aggregate - (4, 0)), "
        "where it is not 0.",
        "",
        "| | " + " | ".join(way.title for way in WAYS.values()) + " |",
        "|---" * (len(WAYS) + 1) + "|",
    ]
    for score in SCORES:
        cells = [rows[score, way] for way in WAYS]
        marked = [f"{row.mse:.3f}" + (f" ({row.bias:.3f})" if row.bias > 1e-6 else "") for row in cells]
        lines.append(f"| {score} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def _reading_text(rows: Rows) -> str:
    lines = ["The least of each column:", ""]
    for way, how in WAYS.items():
        column = {score: rows[score, way].mse for score in SCORES}
        best, worst = min(column, key=column.__getitem__), max(column, key=column.__getitem__)
        even = max(column.values()) - min(column.values()) < 1e-9
        exact = all(rows[score, way].bias < 1e-6 for score in SCORES)
        kind = "unbiased" if exact else "biased"
        lines.append(f"- {how.title} ({kind}): " + ("all alike." if even else f"{best}; the greatest: {worst}."))
    return "\n".join(lines)


def _pairs_text() -> str:
    gave = {(1, 2): "FedAvg", (2, 3): "FedIS", (1, 3): "DELTA"}
    lines = [
        "The paper's figure takes one unweighted pair for each method, by hand; its methods draw all pairs, and weigh:",
        "",
        "| pair | given to | average | squared distance to (4, 0) |",
        "|---|---|---|---|",
    ]
    for pair, mean_d in hand_picked().items():
        away = float(np.sum((np.array(mean_d) - np.array(IDEAL)) ** 2))
        lines.append(f"| {pair[0]}, {pair[1]} | {gave[pair]} | ({mean_d[0]:g}, {mean_d[1]:g}) | {away:g} |")
    return "\n".join(lines)


def _csv(rows: Rows) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["score", "way", "design", "estimator", "mse", "bias"])
    for (score, way), row in rows.items():
        writer.writerow([score, way, WAYS[way].design, WAYS[way].estimator, f"{row.mse:.6g}", f"{row.bias:.3g}"])
    return buffer.getvalue()
