"""One process plays in a folder: the others are refused, a killed one holds nothing, and nothing is left behind."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltafl.errors import DeltaflError
from tools.cli import deltafl
from tools.simulation import run


@contextmanager
def another_process(folder: Path) -> Iterator[None]:
    """A process that plays in a folder; killed at the end."""
    code = (
        "import sys, time, pathlib; from deltafl.simulation.directory import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            process.kill()


def test_the_folder_of_a_run_that_another_process_plays_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    with another_process(tmp_path / "run"):
        with pytest.raises(DeltaflError, match="another process is playing the run in "):
            run(tmp_path / "run", task="toy", rounds=2)
        assert not (tmp_path / "run").exists()
    assert (tmp_path / "run.lock").exists()
    run(tmp_path / "run", task="toy", rounds=2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_line_refuses_a_folder_in_use(tmp_path: Path) -> None:
    with another_process(tmp_path / "out"):
        done = deltafl("compare", "--task", "toy", "--rounds", "2", "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "deltafl: another process is playing the run in out; wait for it, or choose another --out\n"
