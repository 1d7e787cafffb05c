"""Names that others give reach the terminal, and the names of files, as text, whatever is in them;
no command fails over them after its work.
"""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tools.cli import Done, deltafl_here
from tools.names import NAMES, RAW, is_plain
from tools.terminal import read_terminal

SHORT = ["--samplers", "uniform,full", "--seeds", "1", "--rounds", "1", "--processes", "1"]
#: Colours, and how a progress bar moves.


def write_table(path: Path, name: str = "") -> list[str]:
    """A table in which a feature, the label, the owner, a class and a client have names that begin
    so; returns its options.
    """
    rng = np.random.default_rng(0)
    label = f"{name}y"
    owner = f"{name}client"
    columns = {
        f"{name}a": rng.normal(size=60),
        label: np.where(rng.integers(0, 2, 60) == 1, f"{name}1", "other"),
        owner: np.where(np.arange(60) % 4 == 1, f"{name}1", np.arange(60) % 4),
    }
    pd.DataFrame(columns).to_csv(path, index=False)
    return ["--task", str(path.name), "--label", label, "--column", owner]


def require_told(done: Done, folder: Path) -> None:
    """It worked, or said in a sentence why not, with nothing but text; a path that is printed is
    there.
    """
    assert is_plain(done.stdout + done.stderr)
    assert done.returncode in (0, 2), done.stderr
    if done.returncode == 2:
        assert re.search("^(deltafl|Error): ", done.stderr, re.MULTILINE)
        return
    (written,) = re.findall(r"^Results: (.*)/summary\.json", done.stdout, re.MULTILINE)
    assert (folder / written / "summary.json").is_file()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES[::8])
def test_names_in_a_table(name: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv", name)
    done = deltafl_here("compare", *table, *SHORT, "--out", "out", cwd=tmp_path)
    require_told(done, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES[1::4])
def test_names_of_folders_for_results(name: str, tmp_path: Path) -> None:
    if "\0" in name:
        pytest.skip("no argument of a command holds it")
    done = deltafl_here(
        "compare", "--task", "toy", *SHORT, "--no-report", "--out", name, cwd=tmp_path
    )
    require_told(done, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES[4::8])
def test_names_of_files_of_data(name: str, tmp_path: Path) -> None:
    """The folder that a command makes by itself has the table's name, as far as it can be seen."""
    try:
        table = write_table(tmp_path / f"{name}.csv")
    except (OSError, ValueError):
        pytest.skip("no file can be called so")
    done = deltafl_here("compare", *table, *SHORT, cwd=tmp_path)
    require_told(done, tmp_path)


def test_folders_of_own_code(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\nfrom deltafl.samplers.fixed import Full\n\n\n"
        "@dataclass(frozen=True)\nclass Own(Full):\n    pass\n"
    )
    played = 0
    for place, name in enumerate(NAMES[2::8]):
        try:
            folder = tmp_path / name
            folder.mkdir()
        except (OSError, ValueError):
            continue
        (folder / f"own{place}.py").write_text(code)
        samplers = ["--samplers", f"{name}/own{place}.py:Own,uniform", *SHORT[2:], "--no-report"]
        out = ["--out", f"out{place}"]
        done = deltafl_here("compare", "--task", "toy", *samplers, *out, cwd=tmp_path)
        require_told(done, tmp_path)
        played += done.returncode == 0
    assert played > 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "before",
    [
        "settings",
        "samplers",
        "data check",
        "audit --samplers",
        "audit --designs",
        "audit --samplers uniform --estimators",
        "audit --draws",
        "recommend --sizes unknown --labels --census --memory --reachable --clients",
        "report",
        "export --to x.pt",
        "compare --set",
        "compare --config",
        "compare --metric",
        "run --task",
        "run --resume --out",
        "",
        "run",
    ],
)
def test_every_command_says_in_a_sentence_what_it_does_not_know(
    before: str, tmp_path: Path
) -> None:
    for name in NAMES[len(before) % 4 :: 4]:
        done = deltafl_here(*before.split(), name, cwd=tmp_path)
        assert is_plain(done.stdout + done.stderr)
        # "--help", and no table of a name that is none.
        assert done.returncode in (0, 2), (name, done.stderr)


def in_terminal(*arguments: str, cwd: Path, columns: int) -> str:
    """What a command writes to a terminal, its own colours and moves left out."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "deltafl", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(columns), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = read_terminal(ours)
    process.wait()
    return text


def test_a_terminal_gets_text(tmp_path: Path) -> None:
    out = f"{'long[/x] name ' * 6}[v2]"
    table = write_table(tmp_path / "table.csv", "temp[/C]\x1b]0;pwned\x07\x1b[31m\u202e")
    options = [*SHORT, "--no-report", "--out", out]
    shown = in_terminal("compare", *table, *options, cwd=tmp_path, columns=40)
    assert RAW.search(shown) is None
    # Whole, in one line.
    assert f"\nResults: {out}/summary.json" in shown
    assert (tmp_path / out / "summary.json").is_file()


def test_a_terminal_gets_no_escapes_of_a_header(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", "a\x1b]0;pwned\x07\x1b[2J\u202e")
    shown = in_terminal("run", "--task", "table.csv", cwd=tmp_path, columns=80)
    assert RAW.search(shown) is None
    assert "a\\x1b]0;pwned\\x07\\x1b[2J\\u202e" in shown
