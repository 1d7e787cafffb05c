"""One process plays in a folder: the others are refused, a killed one holds nothing, and nothing is left behind."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation.comparison import run_comparison
from deltafl.simulation.experiment import run_single
from deltafl.simulation.lock import NAME, claimed, claimed_new, only_one
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings

TINY = {"task": "toy", "rounds": 2}


def quiet(*_: object) -> None:
    pass


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that plays in a folder; killed at the end."""
    code = (
        "import sys, time, pathlib; from deltafl.simulation.lock import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1])): print('claimed', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_folder_of_a_run_that_another_process_plays_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    settings = make_settings(RunSettings, TINY)
    with another_process(tmp_path / "run"):
        with pytest.raises(DeltaflError, match="another process is playing the run in "):
            run_single(settings, tmp_path / "run", quiet)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]
    run_single(settings, tmp_path / "run", quiet)
    assert not (tmp_path / "run" / NAME).exists()


@pytest.mark.parametrize("place", ["out", "out/runs/uniform-seed0"])
def test_a_comparison_and_each_of_its_runs_are_locked(tmp_path: Path, place: str) -> None:
    settings = make_settings(CompareSettings, {**TINY, "samplers": "uniform", "seeds": 1})
    with another_process(tmp_path / place), pytest.raises(DeltaflError, match="another process is playing"):
        run_comparison(settings, tmp_path / "out", quiet)
    run_comparison(settings, tmp_path / "out", quiet)
    assert not list((tmp_path / "out").rglob(NAME))


@pytest.mark.parametrize("command", ["run", "compare"])
def test_the_command_line_is_refused_before_it_looks_at_the_folder(tmp_path: Path, command: str) -> None:
    with another_process(tmp_path / "out"):
        done = subprocess.run(
            [sys.executable, "-m", "deltafl", command, "--task", "toy", "--resume", "--out", "out"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "deltafl: another process is playing the run in out; wait for it, or choose another --out\n"


def test_new_folders_have_names_of_their_own_and_go_if_nothing_was_written(tmp_path: Path) -> None:
    base = tmp_path / "results" / "run-toy"
    with claimed_new(base) as first, claimed_new(base) as second, claimed_new(base) as third:
        assert [path.name for path in (first, second, third)] == ["run-toy", "run-toy-2", "run-toy-3"]
        (second / "config.toml").touch()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["run-toy-2"]
    assert [path.name for path in second.iterdir()] == ["config.toml"]


def test_a_folder_is_claimed_once_more_by_the_same_process_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "new" / "run"):
        with claimed(folder):
            with claimed(folder / ".." / folder.name):
                pass
            with only_one(folder / NAME) as ours:
                assert not ours
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir())


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> bool:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("deltafl.simulation.lock._lock", refuse)
    with claimed(tmp_path / "run"):
        pass
    assert "on a file system without locks" in caplog.text
