"""A folder that comes from anybody: what reads it runs nothing of what it names, what goes on in it
only what the user has named, too.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import deltafl
from deltafl.cli.main import app, run_app
from deltafl.errors import DeltaflError
from deltafl.simulation import export_model
from deltafl.store.own_python import OwnCodeError, allowed, files_named, only, working_in

MINE = """
from dataclasses import dataclass
from functools import partial
import numpy as np
import torch
import deltafl
from deltafl.tasks import Dataset, Task

@dataclass(frozen=True)
class Mine(deltafl.Sampler):
    power: float = 1.0
    unbiased = True
    def init(self, population):
        return population.num_examples_m
    def open(self, state, available_m, n, rng, oracle=None):
        return deltafl.draw_cohort(np.ones(len(state)), n, "pivotal", rng, available_m)
    def update(self, state, cohort, reports):
        return state

def task(seed):
    x = np.random.default_rng(seed).normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    rows = [range(i, 40, 4) for i in range(4)]
    return Task("mine", Dataset("mine", x, y, x, y, 2), rows, partial(torch.nn.Linear, 3, 2),
                torch.nn.functional.cross_entropy)

def half(round):
    return 0.5

def share(output, y):
    return float((output.argmax(1) == y).mean())
"""
#: What each setting may name.
NAMES: dict[str, Any] = {
    "task": "mine.py:task",
    "samplers": ["uniform", "mine.py:Mine(power=2)"],
    "lr_schedule": "mine.py:half",
    "metric": "mine.py:share",
}
PLAYED: dict[str, Any] = {
    "seeds": 1,
    "rounds": 2,
    "sample": 2,
    "processes": 1,
    "progress": False,
    "report": False,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``results`` of own code of every kind, whose file now leaves a mark if it is
    imported.
    """
    folder = tmp_path_factory.mktemp("played")
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    path = [*sys.path]
    with working_in(folder):
        deltafl.compare(out="results", **PLAYED, **NAMES)
    sys.modules.pop("mine")
    sys.path[:] = path
    marking = "import pathlib\npathlib.Path(__file__).with_name('marker').touch()\n"
    (folder / "mine.py").write_text(marking + MINE, encoding="utf-8")
    return folder


@pytest.fixture
def others(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it that is the working directory; nothing may have run in the end."""
    place = tmp_path / "others"
    shutil.copytree(played, place)
    monkeypatch.chdir(place)
    yield place
    assert not list(tmp_path.rglob("marker")), "the folder's code has run"


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        run_app(app, [*words])
    return int(end.value.code or 0)


@pytest.mark.drawn
@pytest.mark.usefixtures("others")
def test_a_comparison_of_own_code_is_read_without_it(tmp_path: Path) -> None:
    found = deltafl.load("results")
    assert found.summary().index.tolist() == NAMES["samplers"]
    shown = [found.runs(), found.clients(), found.to_csv(), found.to_latex(), found._repr_html_()]
    assert all(len(part) for part in (*shown, repr(found)))
    found.plot(tmp_path / "curve.png")
    found.report(tmp_path / "report.html")
    found.write(tmp_path / "written")
    assert "mine.py:Mine" in (tmp_path / "report.html").read_text()
    assert command("report", "results", "results/runs/uniform-seed0", "--out", "o") == 0
    assert Path("o/summary.json").exists()


READERS: dict[str, Callable[[Path], Any]] = {
    "export": lambda _: command("export", "results/runs/uniform-seed0", "--to", "m.pt"),
    "export_model": lambda _: export_model(Path("results/runs/uniform-seed0"), Path("m.pt")),
    "resume": lambda _: command("compare", "--resume", "--out", "results"),
    "grow": lambda _: command("compare", "--seeds", "2", "--out", "results"),
    "another command": lambda _: command("run", "--resume", "--out", "results"),
    "resume of a run": lambda _: command(
        *("run", "--resume", "--rounds", "4", "--out", "results/runs/uniform-seed0")
    ),
    "another file named": lambda _: command(
        *("compare", "--resume", "--out", "results", "--samplers", "other/mine.py:Mine")
    ),
    "compare": lambda _: deltafl.compare("toy", out="results", **PLAYED),
    "from elsewhere": lambda there: deltafl_from(
        there.parent, "compare", "--resume", "--out", "others/results"
    ),
    **{
        word: lambda _, word=word: command(word)  # type: ignore[misc]
        for word in ("info", "tasks", "samplers", "settings")
    },
}


def deltafl_from(folder: Path, *words: str) -> int:
    with working_in(folder):
        return command(*words)


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_a_folder_names(others: Path, reader: str) -> None:
    try:
        code = READERS[reader](others)
    except DeltaflError as error:
        code = "would run as you" in str(error)
    assert code in (0, 2, True)


#: Other ways to name a file, in whatever setting; and settings that name none.
PLANTED = (
    *(f'task = "{name}"' for name in ("mine.py", "../others/mine.py:task", "{here}/mine.py")),
    *(f'sampler = "{name}"' for name in ("mine.py:Mine", "uniform@@mine.py:Mine", "mine.py:A.b")),
    'sampler = "uniform+average=0.5@mine.py:Mine"',
    'sampler = "uniform@mine.py:Mine"',
    *(f'{name} = "mine.py:half"' for name in ("lr_schedule", "column", "label", "encoding")),
    *(f'{name} = "mine.py:half"' for name in ("availability", "speeds", "partition", "data_dir")),
    'metric = ["mine.py:share"]',
    'metric = ["accuracy", "mine.py:share"]',
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("kind", ["run", "compare"])
def test_no_setting_of_a_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, planted: str
) -> None:
    """One that was never played, so that nothing else of it is looked at before."""
    here = tmp_path / "others"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("mine.py").write_text("import pathlib; pathlib.Path('marker').touch()" + MINE)
    line = planted.replace("{here}", str(here))
    text = f"{line}\nrounds = 2\nsample = 2\nlocal_epochs = 1\n"
    if kind == "compare":
        text = text.replace('sampler = "', 'samplers = ["').replace('"\nrounds', '"]\nrounds')
        text += "seeds = [0]\n"
        if "samplers" not in text:
            text += 'samplers = ["uniform"]\n[rates."mine.py:Mine"]\nlocal_lr = 1.0\n'
    elif "sampler" not in text:
        text += 'sampler = "uniform"\n'
    for folder in ("out", "out/runs/uniform-seed0"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.toml").write_text(text)
        Path(folder, "environment.json").write_text('{"directory": ".."}')
    words = ["--out", "out"]
    for given in (
        ["report", "out", "--out", "o"],
        ["export", "out", "--to", "m.pt"],
        ["run", "--resume", *words],
        ["compare", "--resume", "--processes", "1", *words],
        ["compare", "--seeds", "2", "--processes", "1", *words],
        ["tune", "--resume", "--processes", "1", *words],
        ["compare", "--resume", "--task", "toy", "--samplers", "uniform", *words],
    ):
        assert command(*given) in (0, 2, 3)
    for read in (deltafl.load, lambda out: deltafl.compare("toy", out=out, **PLAYED)):
        with suppress(DeltaflError):
            read("out")
    assert not list(tmp_path.rglob("marker"))


@pytest.mark.parametrize(
    "given",
    [("--trust-code",), ("--samplers", "uniform,mine.py:Mine(power=2)", "--task", "mine.py:task")],
)
def test_what_the_user_names_or_trusts_goes_on(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    shutil.copytree(played, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    more = ("compare", "--resume", "--processes", "1", "--rounds", "3", "--out", "results")
    Path("mine.py").write_text(MINE, encoding="utf-8")
    assert command(*more) == 2
    assert command(*more, *given) == 0
    assert allowed() is None
    sys.modules.pop("mine")
    run = "results/runs/uniform-seed0"
    assert command("export", run, "--to", "m.pt") == 2
    assert command("export", run, "--to", "m.pt", "--trust-code") == 0


@pytest.mark.thorough
def test_a_module_beside_a_folder_is_not_found(others: Path) -> None:
    """Not by the processes that play either, which Python would let look where they are."""
    for name in ("numpy", "torch", "pandas", "pydantic", "sitecustomize", "filelock"):
        Path(f"{name}.py").write_text("import pathlib; pathlib.Path('marker').touch()")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    words = (
        "compare",
        "--task",
        "toy",
        "--samplers",
        "uniform",
        "--seeds",
        "2",
        "--rounds",
        "1",
        "--processes",
        "2",
    )
    done = subprocess.run(
        [sys.executable, "-m", "deltafl", *words, "--no-report"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_only_narrows_and_ends() -> None:
    one, two = Path("one.py").resolve(), Path("two.py").resolve()
    with only(frozenset({one, two})):
        with only(frozenset({two})), only(None):
            assert allowed() == frozenset({two})
            with only(frozenset({one})):
                assert allowed() == frozenset()
        assert allowed() == frozenset({one, two})
    assert allowed() is None
    assert issubclass(OwnCodeError, DeltaflError)


@pytest.mark.parametrize(
    "given",
    ["{}", "{}:Mine", "uniform@@{}:C(a=1)+average=0.5", "a+lr_schedule={}:f", ["a", "{}:f"]],
)
@pytest.mark.parametrize("file", ["mine.py", "../mine.py", "/x/mine.py", "a+b/mine.py", "c (1).py"])
def test_files_are_found_in_what_the_user_writes(given: str | list[str], file: str) -> None:
    text = given.format(file) if isinstance(given, str) else [each.format(file) for each in given]
    assert Path(file).resolve() in files_named({"key": text})
    assert Path(file).resolve() in files_named({"rates": {str(text): 1}}) or isinstance(text, list)


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_is_found_from_elsewhere_by_a_relative_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """Its table lies where it began, and its own name is relative to where the command is given."""
    begin = tmp_path / "begin"
    begin.mkdir()
    rows = [f"{i % 7},{i % 5},{i % 2},c{i % 4}" for i in range(80)]
    (begin / "t.csv").write_text("\n".join(["a,b,label,client", *rows]))
    given = ("--task", "t.csv", "--column", "client", "--sample", "2", "--rounds", "2", "--quiet")
    monkeypatch.chdir(begin)
    assert command("run", *given, "--out", "one") == 0
    assert command("compare", *given, "--samplers", "uniform", "--seeds", "1", "--out", "two") == 0
    monkeypatch.chdir(tmp_path)
    names = ["begin/one", "begin/two"]
    if link:
        names = ["first", "second"]
        for name, place in zip(names, ("one", "two"), strict=True):
            Path(name).symlink_to(begin / place)
    assert command("run", "--resume", "--out", names[0], "--rounds", "3", "--quiet") == 0
    assert command("compare", "--resume", "--out", names[1], "--seeds", "2", "--quiet") == 0
    assert len((begin / "one" / "rounds.jsonl").read_text().splitlines()) == 4
    assert len([*(begin / "two" / "runs").iterdir()]) == 2
    assert {path.name for path in begin.iterdir()} == {"t.csv", "one", "two"}
