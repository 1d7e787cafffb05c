"""The index of the committed results is what the command writes."""

import shutil
from pathlib import Path

from typer.testing import CliRunner

from deltafl.cli.main import app

RESULTS = Path(__file__).parents[2] / "results"


def test_the_index_is_that_of_the_pages(tmp_path: Path) -> None:
    """After a page was written anew: deltafl reproduce --index results."""
    for folder in filter(Path.is_dir, RESULTS.iterdir()):
        here = tmp_path / folder.name
        here.mkdir()
        if (folder / "runs").is_dir():
            (here / "runs").mkdir()
        for name in ("README.md", "verdict.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, here)
    done = CliRunner().invoke(app, ["reproduce", "--index", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
