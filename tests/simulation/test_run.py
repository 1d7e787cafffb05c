"""Experiments: the same bits whatever interrupts them, common random numbers, traffic, bad clients."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from deltafl.errors import DeltaflError
from deltafl.simulation.compare import run_comparison
from deltafl.simulation.directory import RunDirectory, refusals
from deltafl.simulation.engine import Engine, Evaluation
from deltafl.simulation.run import begin, run_experiment, run_single
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.simulation.setup import engine_of, subject_of
from deltafl.simulation.sweep import Progress
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task

TINY = {"task": "digits", "clients": 12, "sample": 4, "rounds": 6, "local_epochs": 1, "batch_size": 16}


def quiet(*_: object) -> None:
    """Takes progress and says nothing."""


def result_of(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """What must be the same to the last bit: the lines of the rounds and the final state."""
    mark = json.loads((folder / "checkpoint.json").read_text())
    tensors = load_file(folder / mark["tensors"])
    return (folder / "rounds.jsonl").read_bytes(), {name: array.tobytes() for name, array in sorted(tensors.items())}


def run(folder: Path, **given: object) -> Evaluation:
    return run_single(make_settings(RunSettings, {**TINY, **given}), folder, quiet)


@pytest.mark.parametrize(
    "sampler", ["pracdelta", "fedis", "power-of-choice", "cluster-is", "fedavg@pivotal@difference-own"]
)
def test_two_workers_and_two_calls_give_the_same_bits_as_one(tmp_path: Path, sampler: str) -> None:
    run(tmp_path / "one", sampler=sampler)
    run(tmp_path / "two", sampler=sampler, workers=2)
    assert result_of(tmp_path / "one") == result_of(tmp_path / "two")
    before = result_of(tmp_path / "one")
    run(tmp_path / "one", sampler=sampler)  # finished already: nothing is played or changed
    assert result_of(tmp_path / "one") == before


class StopError(Exception):
    """Stands for whatever ends a run early."""


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_an_interrupted_run_ends_like_an_unbroken_one(tmp_path: Path, stop_after: int) -> None:
    settings = make_settings(RunSettings, {**TINY, "checkpoint_every": 2, "server_optimizer": "adam"})

    def stop(done: int, total: int, test: Evaluation) -> None:
        if done == stop_after:
            raise StopError

    run_single(settings, tmp_path / "unbroken", quiet)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "broken", stop)
    run_single(settings, tmp_path / "broken", quiet)
    assert result_of(tmp_path / "broken") == result_of(tmp_path / "unbroken")


def test_killed_at_random_moments_it_still_ends_in_the_same_bits(tmp_path: Path) -> None:
    """kill -9 (and sometimes Ctrl-C) at random moments over the life of one run."""
    processes = multiprocessing.get_context("forkserver")
    given, moments = {"clients": 40, "rounds": 120, "checkpoint_every": 3}, random.Random(0)

    def play(name: str, seconds: float | None = None, by: int = signal.SIGKILL) -> int | None:
        process = processes.Process(target=run, args=(tmp_path / name,), kwargs=given)
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            os.kill(process.pid or 0, by)
        process.join()
        return process.exitcode

    play("first")  # starts the server
    began = time.perf_counter()
    play("unbroken")
    whole = time.perf_counter() - began
    for kill in range(12):
        play("broken", moments.uniform(0.1, 1.0) * whole, signal.SIGINT if kill % 5 == 4 else signal.SIGKILL)
    assert play("broken") == 0
    assert result_of(tmp_path / "broken") == result_of(tmp_path / "unbroken")
    assert not list((tmp_path / "broken").glob("*.part"))


def test_samplers_share_split_initial_model_and_minibatches() -> None:
    engines = [engine_of(make_settings(RunSettings, {**TINY, "sampler": name})) for name in ("uniform", "fedpracis")]
    params = [engine.initial_params() for engine in engines]
    np.testing.assert_array_equal(params[0], params[1])
    updates = [engine.train(params[0], 3, np.array([1, 7])).update_nd for engine in engines]
    np.testing.assert_array_equal(updates[0], updates[1])


def test_traffic_is_counted(tmp_path: Path) -> None:
    model = 4 * 650
    run(tmp_path / "practical", sampler="fedpracis", rounds=1)
    run(tmp_path / "theoretical", sampler="fedis", rounds=1)
    run(tmp_path / "choice", sampler="power-of-choice", rounds=1)
    lines = {path.name: RunDirectory(path).lines("rounds.jsonl")[1] for path in tmp_path.iterdir()}
    moved = {name: (line["bytes_down"], line["bytes_up"]) for name, line in lines.items()}
    assert moved["practical"] == (4 * model, 4 * (model + 24))
    assert moved["theoretical"] == (12 * model, 12 * 32 + 4 * (model + 24))
    assert moved["choice"] == (8 * model, 8 * 8 + 4 * (model + 24))


def test_a_client_that_explodes_is_named_and_never_touches_the_model(tmp_path: Path) -> None:
    settings = make_settings(RunSettings, {**TINY, "sampler": "uniform", "sample": 12, "partition": "iid"})
    healthy = engine_of(settings).task
    poisoned = poison(healthy, client=5)
    work = LocalWork(lr=0.1, epochs=1, batch_size=16)
    directory = RunDirectory(tmp_path / "run")
    directory.start(settings)
    state = run_experiment(settings, Engine(poisoned, work, 0), directory, quiet)
    lines = directory.lines("rounds.jsonl")[1:]
    assert all([client for client, _ in line["rejected"]] == [5] for line in lines)
    assert [line["num_responded"] for line in lines] == [11] * 6
    assert np.isfinite(state.params_d).all()
    assert lines[-1]["test"]["accuracy"] > 0.5


def poison(task: Task, client: int) -> Task:
    """The same task with float inputs, those of one client NaN."""
    train_x = task.dataset.train_x.astype(np.float32) * task.input_scale
    train_x[task.client_rows[client]] = np.nan
    test_x = task.dataset.test_x.astype(np.float32) * task.input_scale
    return replace(task, dataset=replace(task.dataset, train_x=train_x, test_x=test_x))


def test_evaluation_can_be_rare(tmp_path: Path) -> None:
    run(tmp_path / "run", evaluate_every=4)
    lines = RunDirectory(tmp_path / "run").lines("rounds.jsonl")
    assert [line["round"] for line in lines if "test" in line] == [0, 4, 6]


def test_a_comparison_writes_its_summary_and_pictures_and_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(CompareSettings, {**TINY, "samplers": "full,uniform,pracdelta", "seeds": 2})

    def stop(progress: Progress) -> None:
        if progress.runs_done == 4 and progress.rounds_done > 4 * 6:
            raise StopError

    monkeypatch.setattr("deltafl.simulation.sweep._POLL_SECONDS", 0.0)
    with pytest.raises(StopError):
        run_comparison(settings, tmp_path / "out", stop)
    summary = run_comparison(settings, tmp_path / "out", quiet, processes=2)
    assert [entry.sampler for entry in summary.samplers] == ["full", "uniform", "pracdelta"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"summary.json", "accuracy.png", "loss.png", "selections.png", "config.toml"} <= written
    run(tmp_path / "alone", sampler="uniform", seed=1)
    assert result_of(tmp_path / "alone") == result_of(tmp_path / "out" / "runs" / "uniform-seed1")


def test_a_comparison_names_all_data_that_its_runs_read(tmp_path: Path) -> None:
    settings = make_settings(CompareSettings, {"task": "toy", "rounds": 2, "samplers": "uniform", "seeds": 2})
    summary = run_comparison(settings, tmp_path, quiet)
    assert summary.environment["data"] == "toy"
    for seed in (0, 1):
        note = tmp_path / "runs" / f"uniform-seed{seed}" / "environment.json"
        note.write_text(note.read_text().replace('"toy"', '"another toy"'))
    shutil.rmtree(tmp_path / "runs" / "uniform-seed1")
    assert run_comparison(settings, tmp_path, quiet).environment["data"] == "another toy; toy"


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """Of the same name, but with one label changed, or one example with another client."""
    folder = tmp_path / "run"
    run(folder)
    directory = RunDirectory(folder)
    settings = make_settings(RunSettings, TINY)
    task = engine_of(settings).task
    train_y = task.dataset.train_y.copy()
    train_y[7] = (train_y[7] + 1) % 10
    relabelled = replace(task, dataset=replace(task.dataset, train_y=train_y))
    first, second, *others = task.client_rows
    moved = replace(task, client_rows=[first[1:], np.append(second, first[0]), *others])
    for other in (relabelled, moved):
        with pytest.raises(
            DeltaflError, match=r"run are not those it began with \(checksum [0-9a-f]{8}, now [0-9a-f]{8}"
        ):
            begin(directory, settings, other)


def test_refusals_are_those_of_the_run_or_the_comparison_alone(tmp_path: Path) -> None:
    line = json.dumps({"round": 1, "rejected": [[7, "no reply"]]}) + "\n"
    places = {".": line, "runs/uniform-seed0": line, "elsewhere": "nonsense", "runs/uniform-seed0/deeper": "nonsense"}
    for place, content in places.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "rounds.jsonl").write_text(content)
    assert [run for run, *_ in refusals(tmp_path)] == [tmp_path.name, "uniform-seed0"]


def test_the_toys_subject_is_the_papers_example() -> None:
    subject = subject_of(make_settings(RunSettings, {"task": "toy"}))
    update_md = subject.known.update_md
    gradients = -update_md / update_md[0, 0] * -2.0
    np.testing.assert_allclose(np.abs(gradients), [[2, 2], [4, 1], [6, 3]], rtol=1e-5)
    assert subject.n == 2


def test_the_synthetic_task_learns_its_two_numbers(tmp_path: Path) -> None:
    given = {"task": "synthetic", "sampler": "uniform", "rounds": 40, "noise": 0.0, "local_lr": 0.05}
    settings = make_settings(RunSettings, given)
    first = engine_of(settings)
    start = first.evaluate(first.initial_params())
    end = run_single(settings, tmp_path / "run", quiet)
    assert end.loss < start.loss
    assert np.isnan(end.accuracy)


def test_global_torch_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(tmp_path / "run", rounds=1)
    assert torch.equal(before, torch.get_rng_state())
