"""Comparisons from Python: objects of a script, callbacks, data frames, pictures, joined
folders.
"""

import importlib.util
import random
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_iris

import deltafl
from deltafl.errors import DeltaflError
from deltafl.samplers import label_of, make_sampler
from deltafl.simulation import RoundDone, export_model, new_folder, refusals, tracker
from deltafl.tasks import make_task, table_task
from deltafl.tasks.draws import seeded
from tools.cli import deltafl_here

SCRIPT = """
from dataclasses import dataclass, replace
from pathlib import Path
import deltafl
from deltafl.tasks import make_task

@dataclass(frozen=True)
class Even(deltafl.Sampler):
    power: float = 1.0
    unbiased = True
    def init(self, population): return population.weight_m
    def open(self, state, available_m, n, rng, oracle=None):
        return deltafl.draw_cohort(state**self.power, n, "pivotal", rng, available_m)
    def update(self, state, cohort, reports): return state

def few(seed):
    return make_task("digits", seed=seed, num_clients=12)

seen = []
options = dict(seeds=2, rounds=3, sample=4, local_epochs=1, out="out", processes=2, report=False, on_round=seen.append)
result = deltafl.compare(few, ["uniform", Even(power=0.5), Even], **options)
print(result)
result.plot("curves.svg")
for sampler, seed in {(done.sampler, done.seed) for done in seen}:
    print(sampler, seed, [done.round for done in seen if (done.sampler, done.seed) == (sampler, seed)])
"""


QUICK: dict[str, Any] = {
    "seeds": 1,
    "rounds": 1,
    "processes": 1,
    "progress": False,
    "report": False,
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A script without a guard, whose class and function its processes cannot import; its folder
    and what it prints.
    """
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_objects_of_a_script_are_played_in_other_processes(script: tuple[Path, str]) -> None:
    folder, printed = script
    assert (
        sorted(re.findall(r"^(\S+) \d \[1, 2, 3\]$", printed, re.M))
        == ["Even"] * 2 + ["Even(power=0.5)"] * 2 + ["uniform"] * 2
    )
    assert "gap closed" in printed and "Results: out" in printed
    assert (folder / "curves.svg").read_text().startswith("<?xml")


@pytest.mark.drawn
def test_another_process_loads_what_it_does_not_know(script: tuple[Path, str]) -> None:
    result = deltafl.load(script[0] / "out")
    table = result.summary()
    runs = result.runs()
    assert list(table.index) == ["uniform", "Even(power=0.5)", "Even"]
    assert list(runs.columns) == [
        "sampler",
        "seed",
        "round",
        "accuracy",
        "loss",
        "seconds",
        "bytes",
    ]
    assert runs.groupby(["sampler", "seed"])["round"].apply(list).tolist() == [[1, 2, 3]] * 6
    last = runs[(runs["sampler"] == "Even") & (runs["round"] == 3)]["accuracy"]
    assert 0 < last.mean() < 1
    assert "<pre>" in result._repr_html_() and "Even" in result._repr_html_()
    assert len(result.plot().axes) == 1
    with pytest.raises(
        deltafl.DeltaflError, match=r"curves.txt names no kind of picture; end it in .*\.png"
    ):
        result.plot("curves.txt")
    result.report(script[0] / "again.html")
    assert "Even(power=0.5)" in (script[0] / "again.html").read_text(encoding="utf-8")


def test_the_command_line_says_who_goes_on_with_objects(script: tuple[Path, str]) -> None:
    done = deltafl_here("compare", "--resume", "--out", "out", cwd=script[0])
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert (
        "was played from Python with few, Even: go on there with the same call of deltafl.compare"
        in words
    )


def test_a_callback_that_raises_is_named_and_the_runs_go_on(tmp_path: Path) -> None:
    rounds: list[int] = []

    def tracker(done: RoundDone) -> None:
        rounds.append(done.round)
        if rounds == [1, 2]:
            raise OSError("no network")

    options = QUICK | {"rounds": 4, "out": tmp_path, "checkpoint_every": 1, "on_round": tracker}
    with pytest.raises(deltafl.DeltaflError, match="callback tracker failed in round 2 of uniform"):
        deltafl.compare("toy", "uniform", **options)
    assert deltafl.compare("toy", ["uniform"], **options).folder == tmp_path
    assert rounds == [1, 2, 3, 4]


@dataclass(frozen=True)
class Listed(deltafl.Fixed):
    options: Any = 1


@dataclass(frozen=True)
class Abstract(deltafl.Sampler):
    unbiased = True


def test_labels_of_instances_and_classes() -> None:
    labels = {
        deltafl.PracDelta: "pracdelta",
        deltafl.PracDelta(floor=0.2, design="pivotal"): "pracdelta(floor=0.2)@pivotal",
        deltafl.Fixed(by_weight=True, design="multinomial"): "md",
        Listed(options=np.float64(0.5)): "Listed(options=0.5)",
    }
    assert [label_of(sampler) for sampler in labels] == list(labels.values())  # type: ignore[arg-type]
    with pytest.raises(deltafl.DeltaflError, match="has no label"):
        label_of(Listed(options={"a": object()}))
    with pytest.raises(
        deltafl.DeltaflError,
        match=r"a sampler is a label such as 'census', or a class or an instance",
    ):
        label_of(3)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Power(deltafl.Fixed):
    power: float = 1.0


def test_a_class_is_known_where_it_is_given_and_nowhere_else(tmp_path: Path) -> None:
    options = QUICK | {"rounds": 2, "out": tmp_path}
    labels = ["Power", "Power(power=2)+average=0.5"]
    first = deltafl.compare("toy", [Power, labels[1], "uniform@@difference"], **options)
    assert list(first.summary().index) == [*labels, "uniform@@difference"]
    assert list((tmp_path / "runs").glob("Power(power=2)+average=0.5-seed0"))
    # What is recorded is text, and gets its class back from that of the new call.
    second = deltafl.compare("toy", Power(power=3), **options)
    assert list(second.summary().index) == [*first.summary().index, "Power(power=3)"]
    with pytest.raises(deltafl.DeltaflError, match="unknown sampler 'Power'"):
        deltafl.compare("toy", "Power", **options)
    label = label_of(Power(power=2))
    assert type(str(label)) is str
    assert make_sampler(copy(label)) == Power(power=2)


def test_what_other_processes_cannot_import_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was loaded by its path is known to this process alone."""
    path = tmp_path / "loaded.py"
    path.write_text(
        "from deltafl.tasks import make_task\n"
        "def few(seed):\n    return make_task('digits', seed=seed, num_clients=4)\n"
    )
    spec = importlib.util.spec_from_file_location("loaded_by_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_by_path", module)
    spec.loader.exec_module(module)
    given = {**QUICK, "processes": 2, "sample": 2}
    with pytest.raises(DeltaflError, match=r"cannot import .*'loaded_by_path'; put .*PYTHONPATH"):
        deltafl.compare(module.few, ["uniform", "full"], out=tmp_path / "out", **given)
    assert not (tmp_path / "out" / "config.toml").exists()


def test_data_frames_and_tasks_are_given_as_they_are(tmp_path: Path) -> None:
    options = QUICK | {"seeds": [3], "sample": 2}
    frame = load_iris(as_frame=True).frame
    of_table: dict[str, Any] = {"label": "target", "partition": "iid", "clients": 5}
    result = deltafl.compare(frame, deltafl.Full, out=tmp_path / "frame", **of_table, **options)
    assert result.runs()[["sampler", "seed", "round"]].to_numpy().tolist() == [["full", 3, 1]]
    task = make_task("digits", seed=0, num_clients=12)  # the library's name stays the library's
    played = deltafl.compare(task, "full", out=tmp_path / "task", **options)
    assert played.numbers.settings["task"] == "my-digits"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": 3}, "task is int; it must be a name"),
        ({"seeds": 0}, "it must be a number of seeds"),
        ({"seeds": 1.5}, "it must be a number of seeds"),
        ({"samplers": 3}, "a sampler is a label .*; this is 3"),
        ({"samplers": Abstract}, "Abstract does not define open"),
        ({"out": 5}, "is no folder; write its name"),
        ({"processes": "2"}, "processes is '2'; write a whole number"),
        ({"processes": 1.5}, "processes is 1.5; write a whole number"),
        ({"processes": -1}, "processes is -1; write a whole number"),
        ({"out": ""}, "is no folder; write its name"),
        ({"out": __file__}, "is a file; choose another --out"),
        ({"noise": 2.0}, "noise does nothing here: only the task 'synthetic' has it"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    call = QUICK | {"task": "toy", "samplers": "uniform", "out": tmp_path / "out"} | given
    with pytest.raises(deltafl.DeltaflError, match=words):
        deltafl.compare(**call)
    assert not (tmp_path / "out").exists()


def test_numbers_of_numpy_are_seeds(tmp_path: Path) -> None:
    options = QUICK | {"seeds": np.int64(2), "out": tmp_path}
    assert len(deltafl.compare("toy", "uniform", **options).curves) == 2


def test_samplers_that_rates_does_not_name_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = QUICK | {"rates": {"uniform": 0.1}, "out": tmp_path}
    deltafl.compare("toy", "uniform,uniform+average=0.5", **options)
    assert "rates has none for uniform+average=0.5" in caplog.text


@pytest.mark.parametrize("label", ["uniform+server_lr=2.0", "uniform @@ + server_lr=2"])
def test_rates_are_found_in_any_spelling_of_a_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, label: str
) -> None:
    options = QUICK | {"rates": {label: 0.1, "full": 0.3}, "out": tmp_path}
    deltafl.compare("toy", ["uniform+server_lr=2"], **options)
    (run,) = tmp_path.glob("runs/*/config.toml")
    assert tomllib.loads(run.read_text())["local_lr"] == 0.1
    assert "rates has none" not in caplog.text
    assert "rates has some for full, which samplers does not name" in caplog.text


def test_rates_of_one_sampler_in_two_spellings_are_refused(tmp_path: Path) -> None:
    rates = {"uniform+server_lr=2": 0.1, "uniform+server_lr=2.0": 0.2}
    with pytest.raises(
        deltafl.DeltaflError, match=r"rates has uniform\+server_lr=2 in two spellings"
    ):
        deltafl.compare("toy", "uniform+server_lr=2", **QUICK | {"rates": rates, "out": tmp_path})


def test_a_run_notes_sizes_and_accuracies_of_clients_with_tests_of_their_own(
    tmp_path: Path,
) -> None:
    task = make_task("digits", seed=0, num_clients=20)
    task = replace(
        task, test_clients=np.arange(len(task.dataset.test_y)) % 10
    )  # ten clients have none
    result = deltafl.compare(task, "uniform", **QUICK | {"out": tmp_path, "rounds": 2, "sample": 4})
    (run,) = result.curves
    assert (
        run.num_examples_m is not None
        and run.value_km is not None
        and run.client_accuracy_r is not None
    )
    assert run.num_examples_m.tolist() == [len(rows) for rows in task.client_rows]
    assert np.isnan(run.value_km).tolist() == [[False] * 10 + [True] * 10] * 2
    assert np.nanmean(run.value_km, axis=1) == pytest.approx(run.client_accuracy_r, abs=1e-4)
    row = result.summary().loc["uniform"]
    assert run.fairness is not None and row["client_mean"] == run.fairness.mean == pytest.approx(
        run.client_accuracy_r.mean(), abs=1e-4
    )
    assert (row["worst_tenth"], row["client_sd"]) == (run.fairness.worst_tenth, run.fairness.sd)


def test_comparisons_in_threads_are_those_of_one_thread(tmp_path: Path) -> None:
    """They share the model that a process trains, and the generators that models draw from."""

    def table(name: str) -> str:
        given: dict[str, Any] = {"rounds": 4, "clients": 12, "progress": False, "report": False}
        return deltafl.compare(
            "digits", ["uniform", "innovation"], 1, out=tmp_path / name, processes=1, **given
        ).to_csv()

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(table, "abc")]
    assert found == [table("alone")] * 3


def test_a_block_with_seeds_of_its_own_is_one_threads_at_a_time() -> None:
    def drawn(seed: int) -> tuple[float, ...]:
        with seeded(np.random.default_rng(seed)):
            first = random.random()
            time.sleep(0.05)  # in which another thread would seed its own
            return first, random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002

    before = random.getstate()
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(drawn, range(6))] == [drawn(seed) for seed in range(6)]
    assert random.getstate() == before


@pytest.mark.drawn
def test_a_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = {"out": "~/results", "memory_path": "~/rows"}
    result = deltafl.compare("toy", "innovation", **QUICK | own)
    assert result.folder == tmp_path / "results"
    assert (tmp_path / "rows").is_dir()
    assert deltafl.load("~/results").folder == result.folder
    run = "~/results/runs/innovation-seed0"
    assert refusals(run) == []
    assert export_model(run, "~/model.pt") == QUICK["rounds"]
    assert (tmp_path / "model.pt").is_file()
    assert result.to_csv("~/table.csv") == (tmp_path / "table.csv").read_text()
    # A folder that is not there yet is made, whatever is written.
    assert export_model(run, "~/models/new/model.pt") == QUICK["rounds"]
    assert result.to_csv("~/tables/new/t.csv") == (tmp_path / "tables/new/t.csv").read_text()
    result.report("~/reports/new/r.html")
    assert (tmp_path / "reports/new/r.html").is_file()
    with pytest.raises(deltafl.DeltaflError, match=r"table\.csv: Not a directory; choose a folder"):
        result.to_latex("~/table.csv/t.tex")


def test_a_home_that_nobody_has_is_a_folder_that_is_not_there() -> None:
    with pytest.raises(deltafl.DeltaflError, match="nobody-here/results"):
        deltafl.load("~nobody-here/results")
    pytest.importorskip("tensorboard")
    assert tracker("tensorboard", "~nobody-here/x").folder == Path("~nobody-here/x")


@pytest.mark.parametrize("folder", [5, "", None])
def test_what_is_no_folder_is_refused(folder: Any) -> None:
    with pytest.raises(deltafl.DeltaflError, match="is no folder; write its name"):
        deltafl.load(folder)


@pytest.mark.thorough
def test_pictures_over_what_is_asked_for(tmp_path: Path) -> None:
    """Trainings by hand: ``full`` has 12 a round, ``uniform`` 4, a census 12 before the first."""
    found = deltafl.compare(
        "digits",
        ["full", "uniform", "census"],
        seeds=2,
        out=tmp_path / "out",
        processes=1,
        progress=False,
        report=False,
        clients=12,
        sample=4,
        rounds=3,
    )
    trainings = {run.sampler: run.trainings_r for run in found.curves}
    np.testing.assert_array_equal(trainings["full"], [12, 24, 36])
    np.testing.assert_array_equal(trainings["uniform"], [4, 8, 12])
    assert trainings["census"] is not None and trainings["census"][-1] >= 12 + 2 * 4
    ends = {"rounds": 3, "trainings": 36, "bytes": None, "seconds": None}
    for x, end in ends.items():
        figure = found.plot(tmp_path / f"{x}.svg", metric="loss", x=x)
        (axes,) = figure.axes
        full = max(line.get_xdata()[-1] for line in axes.get_lines() if len(line.get_xdata()) == 3)
        assert end is None or full == end
        assert (tmp_path / f"{x}.svg").stat().st_size > 1000
    longest = max(float(run.bytes_r[-1]) for run in found.curves)
    (axes,) = found.plot(x="bytes").axes
    assert max(line.get_xdata()[-1] for line in axes.get_lines() if len(line.get_xdata()) == 3) == (
        pytest.approx(longest / 1e6, rel=0.01)
    )
    for given_names, words in (
        ({"x": "byte"}, "did you mean 'bytes'"),
        ({"x": "clock"}, "was not recorded"),
        ({"metric": "auc"}, "unknown metric 'auc'"),
    ):
        with pytest.raises(deltafl.DeltaflError, match=words):
            found.plot(**given_names)
    clients = found.clients()
    assert len(clients) == 3 * 2 * 12
    of_full = clients[clients["sampler"] == "full"]
    assert (of_full["draws"] == 3).all() and of_full["client"].tolist() == [*range(12)] * 2
    assert clients["accuracy"].between(0, 1).all() and (clients["examples"] > 0).all()
    assert found.to_csv(tmp_path / "t.csv") == (tmp_path / "t.csv").read_text()
    assert r"\begin{tabular}" in found.to_latex(tmp_path / "t.tex")


def test_clients_of_a_table_have_their_names(tmp_path: Path) -> None:
    rows = [f"{k % 5},{k % 2},clinic {'abc'[k % 3]}" for k in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["x,label,owner", *rows]))
    found = deltafl.compare(
        tmp_path / "t.csv",
        ["uniform"],
        seeds=1,
        out=tmp_path / "out",
        processes=1,
        progress=False,
        report=False,
        column="owner",
        sample=2,
        rounds=2,
    )
    assert sorted(found.clients()["client"]) == ["clinic a", "clinic b", "clinic c"]
    again = deltafl.load(tmp_path / "out").clients()
    assert again["client"].tolist() == found.clients()["client"].tolist()


@pytest.mark.parametrize("in_memory", [False, True])
def test_runs_of_other_tables_are_not_joined_whatever_their_seeds(
    tmp_path: Path, in_memory: bool
) -> None:
    def played(slope: int, seed: int) -> Path:
        rows = [[k % 5 + slope, k % 2, k % 3] for k in range(90)]
        table: Any = pd.DataFrame(rows, columns=["x", "label", "client"])
        if not in_memory:
            table.to_csv(tmp_path / "t.csv", index=False)
            table = tmp_path / "t.csv"
        out = tmp_path / f"{slope}-{seed}"
        given: dict[str, Any] = {"processes": 1, "progress": False, "report": False}
        deltafl.compare(table, ["uniform"], seeds=[seed], out=out, sample=2, rounds=1, **given)
        return out

    first, second = played(0, 0), played(0, 1)
    assert len(deltafl.load(first, second).curves) == 2
    with pytest.raises(DeltaflError, match="has other examples than"):
        deltafl.load(first, played(1, 1))


def test_a_function_may_make_another_table_of_every_seed(tmp_path: Path) -> None:
    def of_seed(seed: int) -> Any:
        rows = [[k % 5 + seed, k % 2, k % 3] for k in range(90)]
        return table_task(pd.DataFrame(rows, columns=["x", "label", "client"]), seed=seed)

    given: dict[str, Any] = {"processes": 1, "progress": False, "report": False}
    found = deltafl.compare(
        of_seed, ["uniform"], seeds=2, out=tmp_path / "out", sample=2, rounds=1, **given
    )
    assert len(found.curves) == 2


@pytest.mark.parametrize(
    ("sampler", "rates"),
    [("uniform", None), ("innovation", None), ("census", None), ("uniform", {"uniform": 0.3})],
)
def test_methods_are_called_the_same_only_where_their_runs_are(
    sampler: str,
    rates: dict[str, float] | None,
) -> None:
    """Where all clients are asked."""
    task = table_task(load_iris(as_frame=True).frame, "target", partition="iid", clients=3)
    result = deltafl.compare(task, ["full", sampler], sample=3, rounds=3, seeds=1, rates=rates)
    one, two = (run.loss_r for run in result.curves)
    says_so = "no sampler can differ" in " ".join(str(result).split())
    assert says_so == np.allclose(one, two, rtol=1e-5)


def test_the_commonest_class_is_of_the_test_rows_of_all_seeds(tmp_path: Path) -> None:
    table = tmp_path / "iris.csv"
    load_iris(as_frame=True).frame.to_csv(table, index=False)
    seeds = [3, 5, 8]
    result = deltafl.compare(
        str(table),
        ["uniform"],
        label="target",
        partition="iid",
        clients=5,
        rounds=1,
        seeds=seeds,
    )
    shares = []
    for seed in seeds:
        test_y = table_task(table, "target", seed=seed, partition="iid", clients=5).dataset.test_y
        shares.append(np.bincount(test_y).max() / len(test_y))
    assert np.ptp(shares) > 0
    known = float(str(result.numbers.environment["majority"]))
    assert known == pytest.approx(np.mean(shares), abs=1e-3)


@pytest.mark.parametrize(("deadline", "is_told"), [(1e-9, True), (1e9, False)])
def test_a_comparison_without_a_single_reply_says_so(
    deadline: float, is_told: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"seeds": 1, "rounds": 2, "speeds": "lognormal"}
    settings["deadline"] = deadline
    found = deltafl.compare("toy", ["uniform", "full"], out=tmp_path, processes=1, **settings)
    text = " ".join(str(found).split())
    assert ("No reply ever came" in text and "uniform, full; look at deadline" in text) == is_told


def test_what_begins_in_the_same_second_has_folders_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the jobs of a queue's array do; a folder that stays empty goes when its process ends."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: new_folder("compare", "toy"), range(40))]
    assert len(set(found)) == 40 and all(folder.is_dir() for folder in found)
    code = "from deltafl.simulation import new_folder; print(new_folder('run', 'toy').is_dir())"
    place = tmp_path / "other"
    place.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, check=True)
    assert done.stdout.split() == [b"True"] and not any(place.iterdir())
