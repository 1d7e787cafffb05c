"""The notes say what their files hold: tables as the command makes them, numbers of the tuning
runs and the timings.
"""

import gzip
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "why"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("ideas")


def test_the_tables_of_the_notes_are_those_of_their_files(tables: Any, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results" / "ideas", tmp_path / "results" / "ideas")
    notes = tmp_path / "docs" / "why" / "lab-notes.md"
    notes.parent.mkdir(parents=True)
    shutil.copy(DOCS / notes.name, notes)
    tables.write_tables(notes)
    assert notes.read_text() == (DOCS / "lab-notes.md").read_text()


def test_differences_are_paired_with_the_default_too_and_runs_that_never_reach_are_marked(
    tables: Any,
) -> None:
    found = {
        "fedvarp": [[0.1, 0.5, 0.9], [0.3, 0.7, 0.9]],
        "ours (the default)": [[0.5, 0.6, 0.9], [0.5, 0.9, 0.9]],
        "ours, changed": [[0.4, 0.5, 0.6], [0.4, 0.8, 0.8]],
        "uniform": [[0.1, 0.1, 0.9], [0.1, 0.1, 0.9]],
        "full": [[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]],
    }
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.table(found, 0.75).splitlines()
    ]
    assert rows[0][2:4] == ["above the default", "rounds to the threshold"]
    assert rows[2] == ["fedvarp", "+0.00 ± 0.00", "-15.00 ± 21.18", "3.0", "0.00"]
    assert rows[3][1:] == ["+15.00 ± 21.18", "–", "2.5", "0.25"]
    assert rows[4][2:] == [
        "-13.33 ± 42.35",
        "≥ 2.5",
        "0.25",
    ]  # the first of its two runs counts as three rounds
    assert (
        tables.table({"fedvarp": [[0.1]]}, None).splitlines()[-1]
        == "| fedvarp | +0.00 | – | ≥ 1.0 | – |"
    )


def test_shares_are_those_of_the_gap_between_uniform_and_full_in_mean_accuracy(tables: Any) -> None:
    found = {
        "uniform": [[0.1, 0.3], [0.3, 0.3]],
        "full": [[0.8, 0.8], [0.7, 0.9]],
        "ours (the default)": [[0.5, 0.7], [0.6, 0.6]],
        "ours, changed": [[0.6, 0.8], [0.7, 0.7]],
    }
    _, _, uniform, full, ours, changed = tables.share_table(found).splitlines()
    assert uniform.startswith("| uniform | 25.00 | – | -35.00 ±")
    assert full.startswith("| full | 80.00 | – | +20.00 ±")
    # 35 and 45 of 55 points
    assert ours.startswith("| ours (the default) | 60.00 | 0.636")
    assert ours.endswith("| – |")
    assert changed.startswith("| ours, changed | 70.00 | 0.818")
    assert changed.endswith("| +10.00 ± 0.00 |")


#: m / n and drift with the same product of age and drift squared, two and two.
PAIRS = [(1000, 0.03), (10, 0.3), (1000, 0.1), (100, 0.3)]


def test_other_numbers_of_the_documents() -> None:
    theory = (DOCS / "theory" / "limits.md").read_text()
    _, *lines = gzip.decompress(
        (ROOT / "results" / "limits" / "runs.jsonl.gz").read_bytes()
    ).splitlines()
    rows = [json.loads(line) for line in lines]
    at = {
        (
            row["clients"] // row["sample"],
            row["drift"],
            row["method"],
        ): f"{np.mean(row['error']):.2f}"
        for row in rows
        if row["picture"] in ("age", "far")
    }
    ours, varp = (
        [at[ratio, drift, method] for ratio, drift in PAIRS] for method in ("innovation", "fedvarp")
    )
    assert varp[0] == varp[1]
    assert f"(`innovation` {ours[0]} and {ours[1]}, `fedvarp` {varp[0]} both)" in theory
    assert (
        f"those of one in 100 at 0.3 ({ours[2]} and {ours[3]}; {varp[2]} and {varp[3]})" in theory
    )
    assert f"variance of uniform draws at $\\delta = 0.3$ ({at[1000, 0.3, 'fedvarp']})" in theory
