"""Ctrl-C in the first moments of a command: one sentence, exit code 130, and nothing is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deltafl.cli.common import interruptible
from deltafl.cli.main import run_app
from deltafl.simulation.folder.directory import RunDirectory
from tools.cli import deltafl_here

#: Python reads it before anything else: Ctrl-C comes as a module is looked for. A text that is
#: executed there, as dataclasses do, makes Python end by the signal unless it is told otherwise.
AT_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            exec("signal.raise_signal(signal.SIGINT)")

sys.meta_path.insert(0, Interrupts())
"""


def interrupted(module: str, *arguments: str, cwd: Path) -> str:
    """What a command prints as an error that is interrupted where it imports a module."""
    (cwd / "hook").mkdir(exist_ok=True)
    (cwd / "hook" / "sitecustomize.py").write_text(AT_IMPORT)
    paths = [str(cwd / "hook"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "deltafl", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "INTERRUPTED_AT": module},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("module", ["typer", "deltafl.cli.catalogue", "numpy"])
def test_a_command_that_loads_ends_in_one_sentence(module: str, tmp_path: Path) -> None:
    again = "interrupted; give the same command again"
    assert interrupted(module, "samplers", cwd=tmp_path) == again


def test_what_is_asked_for_and_not_noted_yet_is_to_be_given_again(tmp_path: Path) -> None:
    """More rounds, above all: what is recorded would go on to the old number of them."""
    tiny = "--clients 12 --sample 4 --rounds 2 --local-epochs 1 --out out"
    command = ["run", *tiny.split()]
    found = interrupted("torch", *command, cwd=tmp_path)
    assert found == "interrupted; nothing was recorded yet: give the same command again"
    assert deltafl_here(*command, cwd=tmp_path).returncode == 0
    more = ["run", "--resume", "--rounds", "3", "--out", "out"]
    found = interrupted("torch", *more, cwd=tmp_path)
    assert found == "interrupted; give the same command again"
    found = interrupted("torch", "run", "--resume", "--out", "out", cwd=tmp_path)
    assert found == "interrupted; go on with: deltafl run --resume --out out"
    assert deltafl_here(*more, cwd=tmp_path).returncode == 0
    assert RunDirectory(tmp_path / "out").last_line()["round"] == 3


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
@pytest.mark.parametrize("made", [KeyboardInterrupt, typer.Abort, ValueError])
def test_what_libraries_make_of_an_interrupt_is_one(
    capsys: pytest.CaptureFixture[str],
    made: type[BaseException],
    number: int,
    code: int,
) -> None:
    """A question makes an ``Abort`` of it, and pydantic an error of its own."""
    before = signal.getsignal(number)
    working = typer.Typer()

    @working.command()
    def work() -> None:
        with interruptible(lambda: "work again"):
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise made from None

    with pytest.raises(SystemExit) as end:
        run_app(working, [])
    assert end.value.code == code
    assert capsys.readouterr().err.strip() == "interrupted; work again"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [EOFError, ZeroDivisionError])
def test_other_errors_stay_what_they_are(error: type[Exception]) -> None:
    with pytest.raises(error), interruptible(lambda: "never said"):
        raise error
