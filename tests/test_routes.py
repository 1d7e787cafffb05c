"""Which way a cohort is trained: by rule, by measurement, kept beside the run; and every refusal."""

import json
import logging
import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from batch_tools import CLASSES, MODELS, WORKS, task_of
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training.forms import batched_refusal, batched_size, unfolded
from deltafl.simulation.training.local import LocalWork
from deltafl.simulation.training.measuring import measure_routes
from deltafl.simulation.training.routes import Computation, Route, choose_route, keep_route, kept_route
from deltafl.simulation.workers import Workers, one_thread
from deltafl.tasks.models import mlp
from deltafl.tasks.synthetic import make_toy_task


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    with one_thread():
        yield


def own_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y).square()


class Looks(nn.Module):
    """What it computes depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(17, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(x if bool((x >= 0).all()) else -x)
        return output


@pytest.mark.parametrize(
    ("model", "changes", "word"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.BatchNorm1d(5)), {}, "buffers"),
        (nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.Dropout(0.5)), {}, "random"),
        (MODELS["mlp"][0](), {"loss": own_loss}, "loss"),
        (Looks(), {}, "vmap"),
    ],
    ids=["batch norm", "dropout", "own loss", "data-dependent"],
)
def test_what_is_no_batch_is_trained_one_by_one(
    model: nn.Module, changes: dict[str, object], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of("mlp", make_model=lambda: model, **changes)
    reason = batched_refusal(model, task)
    assert reason is not None
    assert word in reason
    with caplog.at_level(logging.INFO, logger="deltafl"):
        engine = Engine(task, WORKS["epochs"], 0, how=Computation(engine="batched"))
    assert engine.route.path == "loop"
    assert reason in caplog.text
    assert engine.train(engine.initial_params(), 0, np.arange(1, 3)).num_steps_n.tolist() == [10, 6]


def test_batches_are_as_large_as_memory_allows() -> None:
    cpu, task = torch.device("cpu"), task_of()
    small, large = task.make_model(), mlp(256, [30_000, 3_000], CLASSES)
    assert batched_size(small, task, 32, cpu) == 256
    assert batched_size(large, task, 32, cpu) == 1
    assert batched_size(unfolded(small), task, 5000, cpu) < batched_size(small, task, 5000, cpu)


def test_the_rule_for_cpus_stays_as_it_was() -> None:
    for name, path in (("two-layer cnn", "loop"), ("mlp", "together"), ("lstm", "loop")):
        assert Engine(task_of(name), WORKS["epochs"], 0).route == Route(path)
    assert Engine(make_toy_task(), LocalWork(lr=0.1, steps=2), 0).route.path == "loop"


def test_bfloat16_is_not_for_the_serial_path() -> None:
    task = task_of("mlp", make_model=lambda: nn.Sequential(nn.Linear(17, CLASSES), nn.Dropout(0.5)))
    with pytest.raises(DeltaflError, match="random layers"):
        Engine(task, WORKS["epochs"], 0, how=Computation(precision="bfloat16"))


@pytest.mark.parametrize("winner", ["loop", "together", "batched"])
def test_the_fastest_in_a_trial_is_taken(winner: str, caplog: pytest.LogCaptureFixture) -> None:
    task, work = task_of("mlp"), WORKS["epochs"]

    def measure(routes: list[Route]) -> list[float]:
        return [1.0 if route.path == winner else 2.0 for route in routes]

    with caplog.at_level(logging.INFO, logger="deltafl"):
        route = choose_route(task.make_model(), task, work, Computation(engine="measured"), measure)
    assert route.path == winner
    assert f"{winner} 1 s" in caplog.text


def test_a_trial_trains_by_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    task = task_of()
    routes = [Route(path) for path in ("loop", "batched", "unfolded")]
    model = task.make_model()
    params_d = Engine(task, WORKS["epochs"], 0).initial_params()
    assert measure_routes(routes, task, WORKS["epochs"], 0, model, params_d, 3) == [1.0, 1.0, 1.0]


def settings(rounds: int, **changes: object) -> RunSettings:
    given = {"task": "digits", "clients": 12, "sample": 4, "rounds": rounds, "checkpoint_every": 2, "test_examples": 50}
    return make_settings(RunSettings, {**given, **changes})


@pytest.mark.parametrize("engine", ["batched", "measured"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(done: int, total: int, test: object) -> None:
        if done == 3 and total == 5:
            raise KeyboardInterrupt

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_single(settings(6, engine=engine), whole, lambda *_: None)
    note = json.loads((whole / "engine.json").read_text())
    if engine == "measured":  # the trial of the second run finds the same, whatever this machine does meanwhile
        names = ["loop", "together", "batched"]
        best = [0.0 if name == note["path"] else 1.0 for name in names]
        monkeypatch.setattr("deltafl.simulation.engine.measure_routes", lambda *_: best)
    with pytest.raises(KeyboardInterrupt):
        run_single(settings(5, engine=engine), cut, tell)
    if engine == "measured":
        monkeypatch.setattr("deltafl.simulation.engine.measure_routes", lambda *_: pytest.fail("measured again"))
    run_single(settings(6, engine=engine), cut, lambda *_: None)
    assert (cut / "rounds.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()
    assert json.loads((cut / "engine.json").read_text())["path"] == note["path"]


def test_a_route_is_kept_beside_the_run(tmp_path: Path) -> None:
    assert kept_route(None) is None
    assert kept_route(tmp_path) is None
    keep_route(Route(), tmp_path)
    assert kept_route(tmp_path) is None  # the rule for CPUs needs no note
    route = Route("batched", "cpu", "bfloat16", "measured: batched 1 s")
    keep_route(route, tmp_path)
    keep_route(Route("loop", "cpu", "float32", "later"), tmp_path)
    assert kept_route(tmp_path) == route


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "gpu"}, "device: String should match"),
        ({"path": "nonsense"}, "path: Input should be 'loop', 'together'"),
        ({"precision": "float8"}, "precision: Input should be"),
        ({"hardware": None}, "hardware: Input should be a valid string"),
    ],
)
def test_a_damaged_note_is_told(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    route = Route("batched", "cpu", "float32", "engine = 'batched'")
    keep_route(route, tmp_path)
    note = tmp_path / "engine.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), **changed}))
    with pytest.raises(DeltaflError, match=f"engine.json: {words}.*it is damaged"):
        kept_route(tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "gpu"}, ["device", "'gpu'", "'cuda'", "'auto'"]),
        ({"device": "cuda:x"}, ["device", "'cuda:x'"]),
        ({"device": "cuda", "workers": 2}, ["workers is 2", "workers = 1"]),
        ({"engine": "batched", "workers": 2}, ["workers is 2", "'batched'", "workers = 1"]),
        ({"precision": "tf32"}, ["tf32", "'bfloat16'"]),
        ({"precision": "float16"}, ["precision", "'float32'", "'bfloat16'"]),
        ({"engine": "fast"}, ["engine", "'loop'", "'measured'"]),
    ],
)
def test_mistakes_end_in_one_sentence(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DeltaflError) as error:
        make_settings(RunSettings, {"task": "digits", **given})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match=r"'cuda'.*'auto'"):
        run_single(settings(2, device="cuda"), tmp_path / "refused", lambda *_: None)
    assert not (tmp_path / "refused").exists()
    run_single(settings(2, device="auto"), tmp_path / "auto", lambda *_: None)
    run_single(settings(2), tmp_path / "cpu", lambda *_: None)
    lines = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("auto", "cpu")]
    assert lines[0] == lines[1]
    assert json.loads((tmp_path / "auto" / "engine.json").read_text())["device"] == "cpu"  # a later GPU changes nothing
    with pytest.raises(DeltaflError, match="tf32"):
        Engine(task_of(), WORKS["epochs"], 0, how=Computation("auto", "tf32"))


def test_several_workers_are_refused_where_one_process_trains() -> None:
    with Workers(2) as workers, pytest.raises(DeltaflError, match="workers = 1"):
        Engine(task_of(), WORKS["epochs"], 0, workers, Computation(engine="batched"))


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = "plain loop;loop, float32;batched, float32;batched, bfloat16;cpu 1"
    options = ["--device", "cpu", "--quick", "--jobs", "cnn", "--passes", "1", "--rounds", "1", "--variants", variants]
    out = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu.py", *options, "--out", str(out)])
    runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "gpu.py"), run_name="__main__")
    rows = json.loads(out.read_text())["jobs"]["cnn"]["variants"]
    assert set(rows) == set(variants.split(";"))
    assert all(row["rounds_per_s"] > 0 for row in rows.values())
    assert rows["batched, float32"]["error_after_4"] < 1e-4 < rows["batched, bfloat16"]["error_after_4"] < 0.5
    assert rows["batched, float32"]["repeats"]
