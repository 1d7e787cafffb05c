"""Runs: the same bits whatever interrupts them, common random numbers, traffic, bad clients, and
callbacks that see all of it.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from deltafl import compare
from deltafl.analysis.statistics import fairness_of
from deltafl.errors import DeltaflError
from deltafl.simulation.callbacks import followers
from deltafl.simulation.callbacks.callback import Callback, LiveRun, PlayedRound
from deltafl.simulation.comparisons.comparing import run_comparison
from deltafl.simulation.engine import Engine
from deltafl.simulation.folder.clients import note_clients, noted_clients
from deltafl.simulation.folder.directory import RunDirectory, refusals
from deltafl.simulation.folder.record import read_run
from deltafl.simulation.run import begin, run_experiment, run_single
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.simulation.setup import engine_of
from deltafl.simulation.view.progress import Progress
from deltafl.tasks import Dataset, Task, cross_entropy
from tools.simulation import TINY, StopError, lines_of, quiet, reseal, stop_after
from tools.simulation import run as run_of


def settings_of(**given: object) -> RunSettings:
    return make_settings(RunSettings, {**TINY, **given})


def run(folder: Path, **given: object) -> dict[str, Any]:
    return run_of(folder, **{**TINY, **given})


def result_of(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """What must be the same to the last bit: the lines of the rounds and the final state."""
    tensors = load_file(folder / "checkpoint.safetensors")
    state = {name: array.tobytes() for name, array in sorted(tensors.items())}
    return (folder / "rounds.jsonl").read_bytes(), state


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "pracdelta", "mime": 0.5},
        {"sampler": "fedis", "mime": 0.5},
        {"sampler": "power-of-choice"},
        {"sampler": "fedavg@pivotal@difference-own"},
    ],
    ids=lambda given: str(given["sampler"]),
)
def test_two_workers_and_two_calls_give_the_same_bits_as_one(
    tmp_path: Path, given: dict[str, object]
) -> None:
    run(tmp_path / "one", **given)
    run(tmp_path / "two", **given, workers=2)
    before = result_of(tmp_path / "one")
    assert before == result_of(tmp_path / "two")
    run(tmp_path / "one", **given)  # finished already: nothing is played or changed
    assert result_of(tmp_path / "one") == before


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_an_interrupted_run_ends_like_an_unbroken_one(tmp_path: Path, rounds: int) -> None:
    settings = settings_of(checkpoint_every=2, server_optimizer="adam", average=0.5)
    run_single(settings, tmp_path / "unbroken", quiet)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "broken", stop_after(rounds))
    run_single(settings, tmp_path / "broken", quiet)
    assert result_of(tmp_path / "broken") == result_of(tmp_path / "unbroken")
    noted = [(tmp_path / name / "clients.json").read_bytes() for name in ("broken", "unbroken")]
    assert noted[0] == noted[1] and json.loads(noted[0])["rounds"] == [2, 3, 4, 5, 6]


def test_a_census_is_a_first_round_or_part_of_round_0(tmp_path: Path) -> None:
    run(tmp_path / "first", sampler="census", speeds="lognormal")
    zero, first, second, *_ = lines_of(tmp_path / "first")
    assert zero.keys() == {"round", "test"}
    assert first["cohort"] == list(range(12)) and first["answers"] == 12
    assert first["sum_of_weights"] == pytest.approx(1)
    assert 0 < first["clock"] < second["clock"]
    run(tmp_path / "zero", sampler="census@@regression-damped")
    zero, first, *_ = lines_of(tmp_path / "zero")
    assert zero["answers"] == 12 and "answers" not in first and len(first["cohort"]) == 4


class Watcher(Callback):
    """Notes what it sees, and adds to every line."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, run: LiveRun) -> None:
        self.seen.append(("begin", run.state.round))

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        assert run.state.round == round.opened.round + 1 == round.number
        assert len(round.training.update_nd) == len(round.cohort.client_n)
        # What the library adds is there, and nothing is written yet.
        assert "test" in round.line and len(lines_of(run.directory.path)) == round.number
        round.line["seen"] = round.number
        self.seen.append(round.is_last)

    def end(self, run: LiveRun) -> None:
        self.seen.append(("end", run.is_over))


def test_a_callback_sees_every_round_and_changes_only_the_line(tmp_path: Path) -> None:
    settings = settings_of(sampler="pracdelta", rounds=3, checkpoint_every=2)
    watcher = Watcher()
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "seen", stop_after(2), callbacks=[watcher])
    run_single(settings, tmp_path / "seen", quiet, callbacks=[watcher])
    assert watcher.seen == [("begin", 0), False, False, ("begin", 2), True, ("end", True)]
    run_single(settings, tmp_path / "plain", quiet)
    seen = lines_of(tmp_path / "seen")
    assert [line.pop("seen", None) for line in seen] == [None, 1, 2, 3]
    assert seen == lines_of(tmp_path / "plain")
    assert result_of(tmp_path / "seen")[1] == result_of(tmp_path / "plain")[1]


def test_accuracies_by_client_are_those_of_the_last_models_and_cost_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []
    judge = Engine.judge

    def counting(engine: Engine, params_d: Any, *rest: Any) -> Any:
        evaluated.append(params_d)
        return judge(engine, params_d, *rest)

    monkeypatch.setattr(Engine, "judge", counting)
    settings = settings_of(rounds=7)
    directory = RunDirectory(tmp_path / "run")
    engine = engine_of(settings)
    begin(directory, settings, engine.task)
    state = run_experiment(settings, engine, directory, quiet)
    assert len(evaluated) == 8  # round 0 as well
    played = read_run(directory, settings)
    assert played.value_km is not None and played.value_km.shape == (5, 12)
    last_m = judge(engine, state.params_d).by_client()
    assert last_m is not None
    np.testing.assert_allclose(played.value_km[-1], last_m, atol=5e-5)
    assert played.fairness == fairness_of(played.value_km)
    longer = settings_of(rounds=9)
    begin(directory, longer, engine.task)
    run_experiment(longer, engine, directory, quiet)
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["rounds"] == [5, 6, 7, 8, 9]
    early = tmp_path / "early"
    end = run(early, rounds=40, threshold=0.3, stop_at_threshold=True)
    assert (
        end["stopped"] == "accuracy reached 0.3"
        and end["test"]["accuracy"] >= 0.3
        and end["round"] < 36
    )
    assert json.loads((early / "clients.json").read_text())["rounds"] == [end["round"]]


@pytest.mark.parametrize("every", [1, 3, 100])
def test_accuracies_by_client_are_written_with_checkpoints_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """All before are written again each time, which takes long with many clients and rounds."""
    known = {"rounds": 13, "checkpoint_every": every}
    written: list[int] = []

    def counting(folder: Path, *given: Any) -> None:
        note_clients(folder, *given)
        written.append(max(noted_clients(folder).rows))

    monkeypatch.setattr(followers, "note_clients", counting)
    run(tmp_path / "unbroken", **known)
    due = [round for round in range(9, 13) if round % every == 0]
    assert written == [*due, 13]
    with pytest.raises(StopError):
        run_single(settings_of(**known), tmp_path / "broken", stop_after(11))
    run(tmp_path / "broken", **known)
    noted = [(tmp_path / name / "clients.json").read_bytes() for name in ("broken", "unbroken")]
    assert noted[0] == noted[1] and json.loads(noted[0])["rounds"] == [9, 10, 11, 12, 13]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sampler", ["pracdelta", "innovation", "census"])
def test_killed_at_random_moments_it_still_ends_in_the_same_bits(
    tmp_path: Path, sampler: str
) -> None:
    """kill -9 (and sometimes Ctrl-C) at random moments over the life of one run, its memory of
    updates in a file.
    """
    processes = multiprocessing.get_context("forkserver")
    # A kill then falls into the run, not into imports.
    processes.set_forkserver_preload(["deltafl.simulation.run"])
    moments = random.Random(0)
    given: dict[str, object] = {"clients": 40, "rounds": 60, "checkpoint_every": 3}
    given |= {"sampler": sampler, "memory_path": str(tmp_path)}

    def play(name: str, seconds: float | None = None, by: int = signal.SIGKILL) -> int | None:
        process = processes.Process(target=run, args=(tmp_path / name,), kwargs=given)
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            os.kill(process.pid or 0, by)
        process.join()
        return process.exitcode

    play("first", 0)  # starts the server
    began = time.perf_counter()
    play("unbroken")
    whole = time.perf_counter() - began
    for by in (*[signal.SIGKILL] * 4, signal.SIGINT):
        play("broken", moments.uniform(0.1, 1.0) * whole, by)
    assert play("broken") == 0
    assert result_of(tmp_path / "broken") == result_of(tmp_path / "unbroken")
    assert not list((tmp_path / "broken").glob("*.part"))
    if sampler == "innovation":
        kept, broken = (
            next(tmp_path.glob(f"{name}-*/rows.bin")) for name in ("unbroken", "broken")
        )
        assert kept.read_bytes() == broken.read_bytes()


def test_samplers_share_split_initial_model_and_minibatches() -> None:
    engines = [engine_of(settings_of(sampler=name)) for name in ("uniform", "fedpracis")]
    params = [engine.initial_params() for engine in engines]
    np.testing.assert_array_equal(params[0], params[1])
    updates = [engine.train(params[0], 3, np.array([1, 7])).update_nd for engine in engines]
    np.testing.assert_array_equal(updates[0], updates[1])


MODEL = 4 * 650  # bytes


@pytest.mark.parametrize(
    ("sampler", "down", "up"),
    [
        ("fedpracis", 4 * MODEL, 4 * (MODEL + 24)),
        ("fedis", 12 * MODEL, 12 * 32 + 4 * (MODEL + 24)),
        ("power-of-choice", 8 * MODEL, 8 * 8 + 4 * (MODEL + 24)),
        ("oort", 4 * MODEL, 4 * (MODEL + 32)),  # with mean squared losses
    ],
)
@pytest.mark.parametrize("mime", [0.0, 0.5])
def test_traffic_is_counted(tmp_path: Path, sampler: str, down: int, up: int, mime: float) -> None:
    """With a drift, clients that train, or may train, download the model and as much again."""
    line = run(tmp_path, sampler=sampler, rounds=1, mime=mime)
    assert (line["bytes_down"], line["bytes_up"]) == (down * (2 if mime else 1), up)


def test_a_client_that_explodes_is_named_and_never_touches_the_model(tmp_path: Path) -> None:
    settings = settings_of(sampler="uniform", sample=12, partition="iid")
    clean = engine_of(settings)
    data = clean.task.dataset
    train_x = data.train_x.astype(np.float32) * clean.task.input_scale
    train_x[clean.task.client_rows[5]] = np.nan
    test_x = data.test_x.astype(np.float32) * clean.task.input_scale
    task = replace(clean.task, dataset=replace(data, train_x=train_x, test_x=test_x))
    directory = RunDirectory(tmp_path)
    directory.start(settings)
    state = run_experiment(settings, Engine(task, clean.work, 0), directory, quiet)
    lines = lines_of(tmp_path)[1:]
    assert all([client for client, _ in line["rejected"]] == [5] for line in lines)
    assert [line["num_responded"] for line in lines] == [11] * 6
    assert np.isfinite(state.params_d).all()
    assert lines[-1]["test"]["accuracy"] > 0.5


def test_evaluation_can_be_rare(tmp_path: Path) -> None:
    run(tmp_path, evaluate_every=4)
    assert [line["round"] for line in lines_of(tmp_path) if "test" in line] == [0, 4, 6]


@pytest.mark.drawn
def test_a_comparison_writes_its_summary_and_pictures_and_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**TINY, "samplers": "full,uniform,pracdelta", "seeds": 2}
    settings = make_settings(CompareSettings, given)

    def stop(progress: Progress) -> None:
        if progress.runs_done == 4 and progress.rounds_done > 4 * 6:
            raise StopError

    monkeypatch.setattr("deltafl.simulation.parallel.sweep._POLL_SECONDS", 0.0)
    with pytest.raises(StopError):
        run_comparison(settings, tmp_path / "out", stop)
    summary = run_comparison(settings, tmp_path / "out", quiet, processes=2).numbers
    assert [entry.sampler for entry in summary.samplers] == ["full", "uniform", "pracdelta"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"summary.json", "accuracy.png", "loss.png", "selections.png", "config.toml"} <= written
    run(tmp_path / "alone", sampler="uniform", seed=1)
    assert result_of(tmp_path / "alone") == result_of(tmp_path / "out" / "runs" / "uniform-seed1")


def test_a_comparison_names_all_data_that_its_runs_read(tmp_path: Path) -> None:
    given = {"task": "toy", "rounds": 2, "samplers": "uniform", "seeds": 2}
    settings = make_settings(CompareSettings, given)
    assert run_comparison(settings, tmp_path, quiet).numbers.environment["data"] == "toy"
    for seed in (0, 1):
        note = tmp_path / "runs" / f"uniform-seed{seed}" / "environment.json"
        note.write_text(note.read_text().replace('"toy"', '"another toy"'))
        reseal(note.parent)
    shutil.rmtree(tmp_path / "runs" / "uniform-seed1")
    assert (
        run_comparison(settings, tmp_path, quiet).numbers.environment["data"] == "another toy; toy"
    )


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """Of the same name, but with one label changed, or one example with another client."""
    run(tmp_path)
    task = engine_of(settings_of()).task
    train_y = task.dataset.train_y.copy()
    train_y[7] = (train_y[7] + 1) % 10
    relabelled = replace(task, dataset=replace(task.dataset, train_y=train_y))
    first, second, *others = task.client_rows
    moved = replace(task, client_rows=[first[1:], np.append(second, first[0]), *others])
    for other in (relabelled, moved):
        with pytest.raises(DeltaflError, match=r"not those it began with \(checksum [0-9a-f]{8}"):
            begin(RunDirectory(tmp_path), settings_of(), other)


def test_tables_of_the_world_are_data_and_are_read_before_anything_is_written(
    tmp_path: Path,
) -> None:
    speeds = tmp_path / "speeds.csv"
    given = {"speeds": str(speeds), "rounds": 2}
    comparison = make_settings(CompareSettings, TINY | given)
    for play in (
        lambda: run(tmp_path / "run", **given),
        lambda: run_comparison(comparison, tmp_path / "comparison", quiet),
    ):
        with pytest.raises(DeltaflError, match=r"speeds\.csv.* No such file"):
            play()
    assert list(tmp_path.iterdir()) == []
    speeds.write_text("seconds,megabits\n" + "0.5,2\n" * 12)
    run(tmp_path / "run", **given)
    run(tmp_path / "run", **given)
    speeds.write_text(speeds.read_text().replace("0.5,2", "0.5,3", 1))
    with pytest.raises(DeltaflError, match="not those it began with"):
        run(tmp_path / "run", **given)


class Overflows(nn.Module):
    """Of one client alone, whose first pixel says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output + torch.where(x[:, :1] > 5, torch.nan, 0.0)


def test_refused_replies_of_a_comparison_stand_below_its_table(tmp_path: Path) -> None:
    """One of ten clients sends what is no number, in each of four rounds."""

    def task(seed: int) -> Task:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(120, 4)).astype(np.float32)
        y = (x[:, 1] > 0).astype(np.int64)
        x[30:40, 0] = 9
        data = Dataset("one", x[:100], y[:100], x[100:], y[100:], num_classes=2)
        rows = np.split(np.arange(100), 10)
        return Task("one", data, rows, Overflows, cross_entropy)

    given: dict[str, Any] = {"rounds": 4, "sample": 3, "seeds": 2, "processes": 1}
    found = compare(task, ["full", "uniform"], **given, progress=False, out=tmp_path / "out")
    words = " ".join(str(found).split())
    number = sum(
        len(json.loads(line).get("rejected", ()))
        for record in tmp_path.glob("out/runs/uniform-seed*/rounds.jsonl")
        for line in record.read_text().splitlines()
    )
    also = f", uniform {number}" * (number > 0)
    assert f"Replies were refused and count as missing: full 8{also}; most often because " in words
    assert refusals(tmp_path / "out" / "runs" / "full-seed1")[0][:2] == (1, 3)
    # What is refused was sent.
    for line in (tmp_path / "out/runs/full-seed0/rounds.jsonl").read_text().splitlines()[1:]:
        played = json.loads(line)
        assert (played["num_responded"], len(played["rejected"])) == (9, 1)
        assert played["bytes_up"] % 10 == 0 and played["bytes_up"] / 10 > 4 * 10


def test_the_synthetic_task_learns_its_two_numbers(tmp_path: Path) -> None:
    given = {"task": "synthetic", "sampler": "uniform", "rounds": 40}
    end = run_of(tmp_path, **given, noise=0.0, local_lr=0.05)["test"]
    assert end["loss"] < lines_of(tmp_path)[0]["test"]["loss"]
    assert end["accuracy"] is None
