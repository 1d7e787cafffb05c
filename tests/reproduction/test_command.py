"""``python -m reproduction`` as a user meets it: list, pages, interruption, mistakes, index."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltafl.errors import DeltaflError
from deltafl.simulation.folder.record import read_record
from reproduction import cli
from reproduction import index as index_module
from reproduction.index import write_index
from reproduction.page import read_verdict
from reproduction.records import PackedRuns
from reproduction.spec import experiment_names

COMMAND = [sys.executable, "-m", "reproduction"]


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_list_names_every_table_and_figure_of_the_paper() -> None:
    figures = (f"figure-{k}" for k in (2, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15))
    assert {"toy", *figures, *(f"table-{k}" for k in range(1, 10))} <= set(experiment_names())
    assert set(experiment_names()) <= {
        line.split(" ")[0] for line in output_of("--list").splitlines()
    }


def test_the_toy_leaves_a_page_a_table_a_picture_and_a_line_of_the_index(tmp_path: Path) -> None:
    output = output_of("toy", "--out", str(tmp_path / "toy"))
    assert "Holds in part and is contradicted in part" in output
    written = {path.name for path in (tmp_path / "toy").iterdir()}
    assert {"README.md", "table.csv", "toy.png", "verdict.json"} <= written
    page = (tmp_path / "toy" / "README.md").read_text()
    assert "0.435" in page
    assert "python -m reproduction toy --scale smoke" in page
    assert str(tmp_path) not in page
    output_of("--index", str(tmp_path))
    assert "[Figures 3 and 5" in (tmp_path / "README.md").read_text()
    again = (tmp_path / "README.md").read_bytes()
    assert write_index(tmp_path).encode() == again


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["toy", "figure-11", "benchmark", "table-8"])
def test_a_page_of_somebody_else_is_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My own\n")
    with pytest.raises(
        DeltaflError, match=r"README\.md has no verdict\.json beside it; move it away"
    ):
        output_of(name, "--out", str(tmp_path))
    assert contents(tmp_path) == {tmp_path / "README.md": b"# My own\n"}


def test_results_of_another_experiment_are_not_overwritten(tmp_path: Path) -> None:
    output_of("toy", "--out", str(tmp_path))
    before = contents(tmp_path)
    with pytest.raises(DeltaflError, match="holds results of toy, not of figure-4"):
        output_of("figure-4", "--out", str(tmp_path), "--only-page")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "which experiment"),
        (("toy", "--device", "gpu"), "device is 'gpu'; write cpu, cuda"),
        (("table-22",), "unknown experiment 'table-22': did you mean 'table-2'"),
        (("toy", "--part", "a"), "toy has no parts and no seeds to choose"),
        (("figure-11", "--part", "nu-99"), "unknown part 'nu-99'"),
        (("figure-3",), "figure-3 is shown by toy; write: python -m reproduction toy"),
        (("figure-11", "--only-page"), "has no finished run yet: leave out --only-page"),
        (("toy", "--only-page"), "has no finished run yet: leave out --only-page"),
        (("figure-11", "--scale", "smoke", "--device", "cuda:99"), "device is 'cuda:99', but"),
        (("benchmark", "--scale", "smoke", "--device", "cuda:99"), "device is 'cuda:99', but"),
        (("--index", "nowhere"), "has no folder with a verdict.json"),
    ],
)
def test_a_mistake_is_answered_in_a_sentence_and_writes_nothing(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeltaflError, match=sentence):
        output_of(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_an_interrupted_sweep_shows_how_to_go_on_keeps_what_it_has_and_ends_in_the_same_records(
    tmp_path: Path,
) -> None:
    arguments = ["figure-11", "--part", "nu-20", "--seeds", "1"]
    words = [*COMMAND, *arguments, "--processes", "2", "--out", str(tmp_path / "a")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("a/runs/*/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command goes on" in errors
    assert "Traceback" not in errors
    kept = [read_record(path) for path in tmp_path.glob("a/runs/*/*.json")]
    assert 1 <= len(kept) < 8
    for out in "ab":
        output_of(*arguments, "--processes", "1", "--out", str(tmp_path / out))
    first, second = (PackedRuns(tmp_path / out).records("nu-20") for out in "ab")
    assert all(record in first for record in kept)
    assert len(first) == 8
    own = {"seconds", "cpu_seconds", "client_seconds"}
    assert [record.model_dump(exclude=own) for record in first] == [
        record.model_dump(exclude=own) for record in second
    ]
    assert read_verdict(tmp_path / "a" / "verdict.json").done == 8


def test_all_goes_through_every_experiment_names_what_cannot_run_and_writes_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-data").mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "no-data"))
    for module in (cli, index_module):
        monkeypatch.setattr(module, "experiment_names", lambda: ("table-7", "toy"))
    output = output_of("all", "--scale", "smoke", "--out", str(tmp_path / "out"))
    places = [
        output.index(text) for text in ("== table-7", "not run: ", "celeba", "== toy", "Index: ")
    ]
    assert places == sorted(places)
    index = (tmp_path / "out" / "README.md").read_text()
    assert "(toy/README.md)" in index
    assert "`table-7`" in index.partition("Without a page: ")[2]
