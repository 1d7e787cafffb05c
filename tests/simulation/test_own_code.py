"""A folder is not continued with another version of the user's own code."""

import json
import linecache
from pathlib import Path
from typing import Any

import pytest

import deltafl
from deltafl.calls import Named
from deltafl.simulation.own_code import code_of
from tools.cli import deltafl_here

SAMPLER = '''
"""Own samplers."""
from dataclasses import dataclass
import numpy as np
import deltafl

POWER = 1.0  # of the sizes
OTHER = 2.0

def grown(value_m):
    return value_m**POWER

@dataclass(frozen=True)
class BySize(deltafl.Sampler):
    unbiased = True
    def init(self, population):
        return population.num_examples_m
    def open(self, state, available_m, n, rng, oracle=None):
        other = state
        return deltafl.draw_cohort(grown(other), n, "pivotal", rng, available_m)
    def update(self, state, cohort, reports):
        return state

@dataclass(frozen=True)
class Twice(BySize):
    def open(self, state, available_m, n, rng, oracle=None):
        return deltafl.draw_cohort(OTHER * np.ones(len(state)), n, "pivotal", rng, available_m)
'''
NAME = "mine.py:BySize"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SAMPLER, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("value_m**POWER", "2 * value_m**POWER", True),  # a function that the class calls
        ("POWER = 1.0", "POWER = 0.5", True),  # a constant that this one reads
        ("grown(other), n", "grown(other) + 1, n", True),
        ("OTHER = 2.0", "OTHER = 3.0", False),
        ("other = state", "other  =  state", False),  # "OTHER" is not read
        ("  # of the sizes", "", False),
        ("OTHER * np", "5 * OTHER * np", False),
    ],
)
def test_what_a_class_uses_of_its_file_counts(file: Path, old: str, new: str, counts: bool) -> None:
    settings = {"samplers": (f"{NAME}@pivotal+average=0.5", "uniform"), "task": "digits"}
    before = code_of(settings)
    assert [*before] == [NAME]
    assert old in SAMPLER
    file.write_text(SAMPLER.replace(old, new), encoding="utf-8")
    assert (code_of(settings) != before) == counts


def test_own_controls_and_tasks_count_and_tables_do_not(file: Path) -> None:
    file.write_text(SAMPLER + "def make_task():\n    return 1\n", encoding="utf-8")
    assert [*code_of({"sampler": "uniform@@mine.py:Twice(power=2)", "task": "mine.py"})] == [
        "mine.py:Twice",
        "mine.py",
    ]
    assert code_of({"sampler": "uniform", "task": "mine.csv"}) == {}
    file.write_text("def", encoding="utf-8")
    assert code_of({"sampler": NAME}) == code_of({"sampler": "missing.py:BySize"}) == {}


def test_objects_of_a_notebook_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their module has no file, and the text of a cell is known by the cell's name."""

    def code(text: str, cell: str) -> dict[str, str]:
        text += "\ndef make():\n    return POWER\n"
        monkeypatch.setitem(
            linecache.cache, cell, (len(text), None, text.splitlines(keepends=True), cell)
        )
        names: dict[str, Any] = {"__name__": "a notebook"}
        exec(compile(text, cell, "exec"), names)
        label = Named("BySize@pivotal", names["BySize"])
        return code_of({"samplers": [label, "uniform"], "task": Named("make", names["make"])})

    first = code(SAMPLER, "<cell 1>")
    same = code(f"x = 1\n{SAMPLER}", "<cell 2>")
    assert [*first] == ["BySize", "make"] and first == same
    other = code(SAMPLER.replace("POWER = 1.0", "POWER = 0.5"), "<cell 3>")
    assert [name for name in first if other[name] == first[name]] == []


def test_an_edited_sampler_is_refused_and_others_may_be_added(file: Path, tmp_path: Path) -> None:
    given = [
        "compare",
        "--task",
        "toy",
        "--seeds",
        "1",
        "--rounds",
        "2",
        "--processes",
        "1",
        "--out",
        "out",
    ]
    assert deltafl_here(*given, "--samplers", "uniform", cwd=tmp_path).returncode == 0
    played = deltafl_here(*given, "--samplers", NAME, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert [*json.loads((tmp_path / "out" / "environment.json").read_text())["code"]] == [NAME]
    file.write_text(SAMPLER.replace("OTHER = 2.0", "OTHER = 3.0"), encoding="utf-8")
    assert deltafl_here(*given, "--samplers", "mine.py:Twice", cwd=tmp_path).returncode == 0
    file.write_text(SAMPLER.replace("POWER = 1.0", "POWER = 0.5"), encoding="utf-8")
    assert (
        deltafl_here(*given[:-1], "other", "--samplers", f"{NAME},uniform", cwd=tmp_path).returncode
        == 0
    )
    with pytest.raises(
        deltafl.DeltaflError,
        match=f"out and other were played with different code of {NAME}; leave",
    ):
        deltafl.load("out", "other")
    before = sorted(
        (path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    refused = deltafl_here(*given, "--samplers", NAME, "--seeds", "2", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    words = " ".join(refused.stderr.split())
    assert (
        f"the code of {NAME}, or what it uses of the same file, is not the one that out was "
        "played "
        "with"
    ) in words
    assert before == sorted(
        (path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
