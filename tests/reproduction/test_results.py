"""Committed tables and the index are what the command makes of the committed records."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproduction.cli import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def run(*arguments: str) -> None:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.exception


def test_the_index_is_that_of_the_pages(tmp_path: Path) -> None:
    """After a page was written again: python -m reproduction --index results."""
    for name in ("README.md", "verdict.json"):
        for path in RESULTS.glob(f"*/{name}"):
            (tmp_path / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / path.parent.name)
    run("--index", str(tmp_path))
    text = (tmp_path / "README.md").read_text()
    assert text == (RESULTS / "README.md").read_text()
    cells = [
        cell for line in text.splitlines() if line.startswith("|") for cell in line.split(" | ")
    ]
    assert max(len(re.sub(r"\]\(.*?\)", "", cell).strip("| ").split()) for cell in cells) <= 25


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["toy", "table-1", "limits", "figure-2", "figure-9", "table-5", "costs"]
)
def test_pages_and_tables_are_those_of_the_records(tmp_path: Path, name: str) -> None:
    """Each kind of page, small ones; ``make results`` does it for all."""
    folder = shutil.copytree(RESULTS / name, tmp_path / name)
    for path in folder.glob("*.*"):
        if path.suffix in (".csv", ".png", ".md"):
            path.unlink()
    run(name, "--scale", "cpu", "--only-page", "--out", str(folder))
    for file in ("README.md", "table.csv"):
        assert (folder / file).read_bytes() == (RESULTS / name / file).read_bytes()


def test_the_repository_stays_small_enough_to_look_through() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    # Modules and pages of the docs do not count, one idea a file is the rule there; nor do packed
    # records, which nobody reads.
    others = [
        name for name in files if not name.endswith((".py", ".gz")) and not name.startswith("docs/")
    ]
    assert len(others) < 250
    for folder in RESULTS.glob("*/"):
        assert len(list(folder.glob("*.png"))) <= 3, f"{folder.name} has more than three pictures"
