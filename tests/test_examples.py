"""The examples of the README run as they stand, and do what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from deltafl import DeltaflError, Population, close_round, init_round, make_plan, open_round
from tools.cli import deltafl_here

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> list[str]:
    """The lines that an example prints, run in a fresh process that turns warnings into errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_own_loop_learns() -> None:
    lines = run("own_loop.py")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", "\n".join(lines))]
    assert len(losses) == 30
    assert losses[0] > 2
    assert max(losses[-5:]) < 0.02  # the noise has variance 0.01
    model, truth = (
        np.array([float(x) for x in part.split()]) for part in re.findall(r"\[([^]]*)\]", lines[-1])
    )
    np.testing.assert_allclose(model, truth, atol=0.03)


def test_own_sampler_reaches_the_optimum_and_selects_who_suffers() -> None:
    lines = run("own_sampler.py")
    x = [float(found) for found in re.findall(r"x ([-\d.]+)", "\n".join(lines))]
    assert len(x) == 40
    assert abs(x[0] - 3) > 4
    assert x[-1] == pytest.approx(3, abs=0.05)
    asked = [found.split() for found in re.findall(r"selected \[([^]]*)\]", "\n".join(lines))]
    times = np.bincount([int(client) for cohort in asked for client in cohort], minlength=8)
    assert times.sum() == 40 * 3
    assert times[7] == times.max()  # the client far from everyone else has the largest loss
    assert times.min() >= 1


def test_twins_leave_a_part_of_the_updates() -> None:
    left = [float(found) for found in re.findall(r"leave ([\d.]+) of", "\n".join(run("twin.py")))]
    assert len(left) == 30
    assert 0.1 < np.mean(left) < 0.7


def test_own_control_lowers_the_error() -> None:
    plain, controlled = (float(line.rpartition(" ")[2]) for line in run("own_control.py"))
    assert 0.02 < plain < 0.2
    assert controlled < 0.1 * plain


def test_a_control_variate_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    source = (EXAMPLES / "own_control.py").read_text()
    returned = "state.control_md[client_n])"
    made = ("(0, state.control_md)", "(state.weight_m, state.control_md[client_n])")
    for wrong in (
        "return state.control_md[client_n]",
        *(f"return deltafl.ControlValue{parts}" for parts in made),
    ):
        line = next(line for line in source.splitlines() if line.endswith(returned))
        (tmp_path / "wrong.py").write_text(source.replace(line, f"        {wrong}"))
        plan = make_plan(
            f"uniform@@{tmp_path}/wrong.py:LastUpdate", Population.from_sizes([1] * 4), n=2
        )
        state = init_round(plan, np.zeros(3))
        with pytest.raises(DeltaflError, match=r"LastUpdate.value must return ControlValue"):
            close_round(plan, state, open_round(plan, state), np.ones((2, 3)))


def test_masks_cancel_in_the_secure_sum() -> None:
    sent, difference = run("secure_sum.py")
    assert max(int(number) for number in re.findall(r"\d+", sent)) > 2**24  # a mask hides it
    assert float(difference.rpartition(" ")[2]) < 2e-5  # rounding to whole numbers


def test_own_sampler_and_control_enter_a_comparison_by_their_files(tmp_path: Path) -> None:
    label = f"{EXAMPLES / 'own_sampler.py'}:ByLoss(power=2,floor=0.1)"
    control = f"uniform@@{EXAMPLES / 'own_control.py'}:LastUpdate(shrink=0.5)"
    options = ["--samplers", f"uniform,{label},{control}", "--seeds", "1", "--rounds", "3"]
    done = deltafl_here(
        "compare", "--task", "toy", *options, "--processes", "1", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    runs = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    own = {
        "own_sampler.py_ByLoss(floor=0.1,power=2)",
        "uniform@@own_control.py_LastUpdate(shrink=0.5)",
    }
    assert runs == {f"{name}-seed0" for name in {"uniform", *own}}
    wrong = deltafl_here(
        "run", "--task", "toy", "--sampler", label.replace("power", "powr"), cwd=tmp_path
    )
    assert wrong.returncode == 2
    assert "did you mean 'power'" in " ".join(wrong.stderr.split())


@pytest.mark.thorough
def test_a_study_of_ones_own_table_model_and_sampler(tmp_path: Path) -> None:
    """As it stands but for rounds and seeds: a class of the script in other processes, a figure."""
    source = (EXAMPLES / "student.py").read_text()
    assert len(source.splitlines()) <= 40
    (tmp_path / "student.py").write_text(
        source.replace("rounds=30", "rounds=2").replace("seeds=5", "seeds=2")
    )
    words = [sys.executable, "-W", "error", "student.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "BySize(power=0.5)" in done.stdout and "Results: study" in done.stdout
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert len(list((tmp_path / "study" / "runs").iterdir())) == 4 * 2


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of Jupyter
def test_the_notebook_runs(tmp_path: Path) -> None:
    """As it stands but for rounds and seeds."""
    path = EXAMPLES.parent / "docs" / "tutorial" / "first-comparison.ipynb"
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for cell in notebook.cells:
        cell.source = cell.source.replace("seeds=3, rounds=20", "seeds=2, rounds=4")
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    now = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [set(output.get("data", {})) for output in now] == [
        set(output.get("data", {})) for output in shown
    ]
    assert any("gap closed" in str(output) for output in now)


@pytest.mark.thorough
def test_hospitals_are_judged_by_the_auc(tmp_path: Path) -> None:
    """As it stands but for rounds and seeds."""
    source = (EXAMPLES / "hospitals.py").read_text()
    assert len(source.splitlines()) < 25
    (tmp_path / "hospitals.py").write_text(
        source.replace("rounds=20", "rounds=3").replace("seeds=3", "seeds=1")
    )
    words = [sys.executable, "-W", "error", "hospitals.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shares = [float(share) for share in re.findall(r"0\.\d+$", done.stdout, re.MULTILINE)]
    assert sum(shares) == pytest.approx(1) and max(shares) > 0.9
    assert "ROC AUC" in done.stdout and "worst" in done.stdout  # that of hospitals, too


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["text_transformer.py", "batchnorm_resnet.py", "lora.py"])
def test_models_with_more_than_a_vector_learn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    program = EXAMPLES / name
    assert len(program.read_text().splitlines()) < 25
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(program), run_name="__main__")
    accuracy = re.search(r"^full +([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 65
