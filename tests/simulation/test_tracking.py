"""Trackers write what ``rounds.jsonl`` has, once a round, also after interruptions: the packages
read it back.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import deltafl
from deltafl.cli.main import app
from deltafl.simulation import (
    Callback,
    LiveRun,
    PlayedRound,
    RoundDone,
    RunSettings,
    make_settings,
    run_single,
    tracker,
)
from tools.simulation import TINY, StopError, lines_of

KEY = "census-seed0"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def stored(store: Path) -> dict[str, dict[str, Any]]:
    """Of each run of the only experiment, by its name; and the parameters and the status as
    metrics of a kind.
    """
    from mlflow import MlflowClient

    client = MlflowClient(store.as_uri())
    (experiment,) = [entry for entry in client.search_experiments() if entry.name != "Default"]
    found: dict[str, dict[str, Any]] = {}
    for run in client.search_runs([experiment.experiment_id]):
        own = found[run.info.run_name] = {"status": run.info.status, "params": run.data.params}
        for tag in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, tag)
            own[tag] = [(point.step, point.value) for point in points]
    return found


def play_in_two_parts(name: str, folder: Path) -> None:
    """A run that ends after round 3 of 6; round 3 comes after its last checkpoint and is played
    twice.
    """
    settings = make_settings(RunSettings, {**TINY, "sampler": "census", "checkpoint_every": 2})
    for last in (3, None):
        with suppress(StopError), tracker(name, folder) as track:

            def on_round(done: RoundDone, last: int | None = last) -> None:
                track(done)
                if done.round == last:
                    raise StopError

            run_single(settings, folder, on_round)


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of some tags, by the run's own lines."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines_of(folder)[1:]:
        found = {f"test/{key}": line["test"][key] for key in ("accuracy", "loss")}
        for key in ("variance", "bytes_up", "effective_sample_size", "loss"):
            found[f"round/{key}"] = line[key]
        for tag, value in found.items():
            if value is not None:
                points.setdefault(tag, []).append((line["round"], value))
    return points


def test_an_interrupted_run_is_in_tensorboard_once(tmp_path: Path) -> None:
    play_in_two_parts("tensorboard", tmp_path / "out")
    read = scalars(tmp_path / "out" / "tensorboard" / KEY)
    wanted = expected(tmp_path / "out")
    assert [step for step, _ in wanted["round/bytes_up"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in wanted["round/variance"]] == [2, 3, 4, 5, 6]  # after the census
    for tag, points in wanted.items():
        np.testing.assert_allclose(read[tag], points, rtol=1e-6)
    assert all(value > 0 for _, value in read["round/seconds"])
    assert "round/round" not in read


def test_an_interrupted_run_is_in_mlflow_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    play_in_two_parts("mlflow", tmp_path / "out")
    runs = stored(tmp_path / "out" / "mlruns")
    run = runs["census, seed 0"]
    assert len(runs) == 1
    assert {tag: run[tag] for tag in expected(tmp_path / "out")} == expected(tmp_path / "out")
    assert run["status"] == "FINISHED"
    assert (
        run["params"].items()
        >= {"task": "digits", "sample": "4", "sampler": "census", "seed": "0"}.items()
    )


def test_a_comparison_has_a_run_for_each_sampler_and_seed(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    out = tmp_path / "out"
    os.environ["MLFLOW_TRACKING_URI"] = (tmp_path / "store").as_uri()
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    options: dict[str, Any] = {"seeds": 2, "rounds": 2, "clients": 12, "out": out}
    samplers = ["uniform", "pracdelta"]
    with tracker("mlflow", out) as on_round:
        result = deltafl.compare(
            "digits", samplers, on_round=on_round, processes=1, progress=False, **options
        )
    runs = stored(tmp_path / "store")
    assert set(runs) == {f"{sampler}, seed {seed}" for sampler in samplers for seed in (0, 1)}
    for row in result.runs().itertuples():
        assert (row.round, row.accuracy) in runs[f"{row.sampler}, seed {row.seed}"]["test/accuracy"]
    assert not (out / "mlruns").exists()


def test_a_run_that_stops_is_marked_as_failed(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    line = {"round": 1, "variance": None, "cohort": [1, 2]}
    with pytest.raises(StopError), tracker("mlflow", tmp_path) as on_round:
        on_round(RoundDone("uniform", 0, 1, 5, None, None, 0.1, 8.0, line))
        raise StopError
    run = stored(tmp_path / "mlruns")["uniform, seed 0"]
    assert run.keys() == {"round/seconds", "status", "params"}
    assert run["status"] == "FAILED"


@pytest.mark.parametrize(
    "command", ["compare --samplers uniform --seeds 1 --processes 1", "run --sampler uniform"]
)
def test_the_commands_track(tmp_path: Path, command: str) -> None:
    given = f"{command} --task toy --rounds 2 --track tensorboard --out {tmp_path}/out".split()
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert len(scalars(tmp_path / "out" / "tensorboard" / "uniform-seed0")["round/variance"]) == 2


class Adding(Callback):
    """Adds to each line an entry that no tracker takes as it is called."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        round.line["norm (d/dx)"] = 1.5
        extra: Any = round.line
        extra[7] = 2.5  # a file has it as a text


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_run_that_is_refused_leaves_nothing(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    out = tmp_path / "out"
    with pytest.raises(deltafl.DeltaflError, match="stratum"), tracker(name, out) as on_round:
        deltafl.compare(
            "toy", ["uniform+stages=1"], seeds=1, out=out, processes=1, on_round=on_round
        )
    assert not out.exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tracker_takes_any_name_of_a_number(tmp_path: Path, name: str) -> None:
    metrics = [
        deltafl.Metric(text, lambda output, y: 0.5)
        for text in ("temp[/C]", "..", "a/../b", "/x", "$x$ <b>", "\N{GRINNING FACE}")
    ]
    with tracker(name, tmp_path / "out [/x] %s") as track:
        deltafl.compare(
            "digits",
            samplers="uniform",
            seeds=1,
            rounds=1,
            clients=6,
            sample=2,
            metric=metrics,
            out=tmp_path / "out [/x] %s",
            on_round=track,
            callbacks=[Adding()],
        )
    if name == "mlflow":
        (found,) = stored(tmp_path / "out [/x] %s" / "mlruns").values()
    else:
        found = scalars(tmp_path / "out [/x] %s" / "tensorboard" / "uniform-seed0")
    assert found["test/temp__C_"]
    assert found["test/_"]
    assert found["round/norm__d_dx_"] == [(1, 1.5)]
    assert found["round/7"] == [(1, 2.5)]


def test_an_unknown_tracker_and_a_missing_package_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(deltafl.DeltaflError, match="'tensorbord': did you mean 'tensorboard'"):
        tracker("tensorbord", tmp_path)
    os.environ["MLFLOW_TRACKING_URI"] = "foo://bar"
    with pytest.raises(deltafl.DeltaflError, match=r"MLflow cannot use foo://bar: .*; set MLFLOW"):
        tracker("mlflow", tmp_path)
    code = (
        "import sys; sys.modules['mlflow'] = None; import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'mlflow' else find(name, *rest); "
        "from deltafl.cli.main import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        *["compare", "--task", "toy", "--track", "mlflow", "--out", "out"],
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "'mlflow': pip install 'deltafl[mlflow]'" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
