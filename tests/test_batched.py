"""A cohort trained as a batch: equal to the twin for every kind of model, the same bits again, and after a resume."""

import json
import logging
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from deltafl.errors import DeltaflError
from deltafl.settings import RunSettings, make_settings
from deltafl.simulation.batched import rounded_up
from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.experiment import run_single
from deltafl.simulation.forms import UnfoldedConv2d, batched_forward, batched_refusal, batched_size, unfolded
from deltafl.simulation.local import LocalResult, LocalWork, train_serial
from deltafl.simulation.measuring import measure_routes
from deltafl.simulation.routes import Computation, Route, choose_route, keep_route, kept_route
from deltafl.simulation.workers import Workers, one_thread
from deltafl.streams import stream
from deltafl.tasks.augment import crop_and_flip
from deltafl.tasks.base import Dataset, Task
from deltafl.tasks.models import cross_entropy, mlp, next_token_lstm, two_layer_cnn
from deltafl.tasks.modules import ResidualBlock
from deltafl.tasks.synthetic import make_synthetic_task
from deltafl.tasks.toy import make_toy_task

SIZES = (9, 40, 21, 33, 5, 16)
CLASSES = 5
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
BATCHED = [Computation(engine=engine) for engine in ("batched", "unfolded")]


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    with one_thread():
        yield


def four_layers() -> nn.Module:
    """FEMNIST's CNN with few filters."""
    layers: list[nn.Module] = []
    for before, after in ((1, 3), (3, 4), (4, 4)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def tiny_resnet() -> nn.Module:
    blocks = (ResidualBlock(4, 4, 1, 2), ResidualBlock(4, 8, 2, 2))
    first = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU())
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class OwnNet(nn.Module):
    """No chain of layers: a module of one's own, with an odd convolution and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
        self.head = nn.Linear(4, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.head(torch.tanh(self.conv(x)).mean(dim=(2, 3)))
        return features


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two-layer cnn": (lambda: two_layer_cnn((3, 4), side=16, classes=CLASSES), (1, 16, 16)),
    "four-layer cnn": (four_layers, (1, 16, 16)),
    "resnet": (tiny_resnet, (3, 8, 8)),
    "mlp": (lambda: mlp(17, [9], CLASSES), (17,)),
    "lstm": (lambda: next_token_lstm(CLASSES, 3, 6), (7,)),
    "own": (OwnNet, (1, 9, 9)),
}
WORKS = {
    "epochs": LocalWork(lr=0.05, epochs=2, batch_size=8),
    "whole data": LocalWork(lr=0.05, steps=2, batch_size=None),
    "everything": LocalWork(lr=0.05, epochs=1, batch_size=12, momentum=0.5, proximal=0.1, mime=0.3),
}


def task_of(name: str = "two-layer cnn", **changes: object) -> Task:
    make_model, shape = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, CLASSES if name == "lstm" else 256, (sum(SIZES), *shape), dtype=np.uint8)
    y = rng.integers(0, CLASSES, len(x))
    rows = np.split(rng.permutation(len(x)), np.cumsum(SIZES)[:-1])
    parts: dict[str, object] = {
        "name": name,
        "dataset": Dataset("random", x, y, x[:50], y[:50], CLASSES),
        "client_rows": rows,
        "make_model": make_model,
        "loss": cross_entropy,
        "tokens": name == "lstm",
    }
    return Task(**(parts | changes))  # type: ignore[arg-type]


def drift_of(engine: Engine, work: LocalWork) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    if work.mime == 0:
        return None
    return (0.01 * np.random.default_rng(3).normal(size=engine.num_params)).astype(np.float32)


def twin_of(engine: Engine, work: LocalWork, client: int, round: int = 2) -> LocalResult:
    """The readable twin on the CPU, from the streams that the engine documents."""
    task, rows = engine.task, engine.task.client_rows[client]
    x = torch.tensor(task.dataset.train_x[rows])
    if task.tokens:
        x = x.long()
    elif x.dtype == torch.uint8:
        x = x * task.input_scale
    y = torch.tensor(task.dataset.train_y[rows])
    noise = 0.0 if task.gradient_noise_m is None else float(task.gradient_noise_m[client])
    augment, rng = task.augment, stream(0, "augment", round, client)
    vary = None if augment is None else lambda inputs: augment(inputs, rng)
    return train_serial(
        task.make_model(),
        task.loss,
        x,
        y,
        engine.initial_params(),
        work,
        stream(0, "batches", round, client),
        noise,
        drift_of(engine, work),
        vary,
    )


def assert_equal_to_twins(engine: Engine, work: LocalWork) -> Training:
    """Within float32 rounding over some ten steps: 1e-4 of the largest entry, 1e-3 of the variance."""
    clients = np.arange(engine.task.num_clients)
    own = engine.train(engine.initial_params(), 2, clients, drift_of(engine, work))
    for client in clients:
        twin = twin_of(engine, work, int(client))
        scale = float(np.abs(twin.update_d).max())
        assert scale > 0
        np.testing.assert_allclose(own.update_nd[client], twin.update_d, rtol=0, atol=1e-4 * scale)
        assert own.loss_n[client] == pytest.approx(twin.loss, rel=1e-5)
        assert own.step_variance_n[client] == pytest.approx(twin.step_variance, rel=1e-3, abs=1e-9)
        assert own.num_steps_n[client] == twin.num_steps
    return own


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("how", BATCHED, ids=lambda how: how.engine)
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_the_twin_one_by_one(name: str, how: Computation, work: LocalWork, device: str) -> None:
    engine = Engine(task_of(name), work, 0, how=how._replace(device=device))
    assert engine.route.path == (how.engine if name not in ("mlp", "lstm") else "batched")
    own = assert_equal_to_twins(engine, work)
    again = engine.train(engine.initial_params(), 2, np.arange(len(SIZES)), drift_of(engine, work))
    for one, two in zip(own, again, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_the_twins(device: str) -> None:
    work, how = LocalWork(lr=0.001, steps=5, batch_size=32), Computation(device, engine="batched")
    noisy = make_synthetic_task(0, num_clients=5)
    assert noisy.gradient_noise_m is not None
    assert_equal_to_twins(Engine(noisy, work, 0, how=how), work)
    some_m = np.array([0.0, 0.1, 0.0, 0.2, 0.0, 0.3])
    some = Engine(task_of("two-layer cnn", gradient_noise_m=some_m), WORKS["epochs"], 0, how=how)
    assert_equal_to_twins(some, WORKS["epochs"])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_vary_as_the_twins(device: str) -> None:
    work, task = WORKS["epochs"], task_of("resnet", augment=crop_and_flip)
    varied = assert_equal_to_twins(Engine(task, work, 0, how=Computation(device, engine="batched")), work)
    plain = Engine(replace(task, augment=None), work, 0, how=Computation(device, engine="batched"))
    assert not np.allclose(varied.update_nd, plain.train(plain.initial_params(), 2, np.arange(6)).update_nd)


@pytest.mark.parametrize("device", DEVICES)
def test_rounds_and_cohorts_leave_nothing_behind(device: str) -> None:
    """The memory of a step is used again: a small cohort after a large one, with a drift or without."""
    work = WORKS["everything"]
    engine = Engine(task_of("resnet"), work, 0, how=Computation(device, engine="batched"))
    params_d, drift_d = engine.initial_params(), drift_of(engine, work)
    first = engine.train(params_d, 2, np.array([1, 4]), drift_d)
    engine.train(params_d + np.float32(1), 3, np.arange(6), drift_d)
    plain = engine.train(params_d, 2, np.array([1, 4]))
    again = engine.train(params_d, 2, np.array([1, 4]), drift_d)
    np.testing.assert_array_equal(first.update_nd, again.update_nd)
    assert not np.array_equal(first.update_nd, plain.update_nd)


def test_the_company_matters_by_rounding_at_most() -> None:
    engine = Engine(task_of(), WORKS["epochs"], 0, how=Computation(engine="batched"))
    params_d = engine.initial_params()
    everyone = engine.train(params_d, 2, np.arange(6))
    for company in ([1], [4, 0], [5, 3, 1]):
        part = engine.train(params_d, 2, np.array(company))
        scale = np.abs(part.update_nd).max()
        np.testing.assert_allclose(part.update_nd, everyone.update_nd[company], rtol=0, atol=1e-5 * scale)


def test_a_diverging_client_leaves_the_others_alone() -> None:
    task = task_of()
    x = task.dataset.train_x.astype(np.float32) / 255
    x[task.client_rows[2]] = np.inf
    broken = replace(task, dataset=replace(task.dataset, train_x=x))
    own, whole = (
        engine.train(engine.initial_params(), 2, np.arange(6))
        for engine in (Engine(t, WORKS["epochs"], 0, how=Computation(engine="batched")) for t in (broken, task))
    )
    finite_n = np.isfinite(own.update_nd).all(axis=1)
    assert finite_n.tolist() == [True, True, False, True, True, True]
    np.testing.assert_allclose(own.update_nd[finite_n], whole.update_nd[finite_n], rtol=0, atol=1e-6)


@given(st.integers(1, 5000))
def test_prefixes_have_few_sizes(count: int) -> None:
    size = rounded_up(count)
    assert count <= size == rounded_up(size)
    assert size <= (2 * count - 1 if count < 8 else 1.25 * count)
    assert len({rounded_up(k) for k in range(1, count + 1)}) <= 4 * max(1, count.bit_length() - 2)


def test_unfolded_convolutions_are_the_same_function() -> None:
    torch.manual_seed(0)
    model = OwnNet()
    other, x = unfolded(model), torch.randn(3, 1, 9, 9)
    assert isinstance(other.get_submodule("conv"), UnfoldedConv2d)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(other(x), model(x))
    assert isinstance(model.conv, nn.Conv2d)
    assert not UnfoldedConv2d.takes(nn.Conv2d(4, 4, 3, groups=2))
    assert not UnfoldedConv2d.takes(nn.Conv2d(4, 4, 3, padding="same"))


def test_many_lstms_are_the_function_of_one() -> None:
    torch.manual_seed(0)
    models = [next_token_lstm(CLASSES, 3, 6) for _ in range(4)]
    token = torch.randint(0, CLASSES, (4, 2, 7))
    params = [torch.stack(parts) for parts in zip(*(model.parameters() for model in models), strict=True)]
    together = batched_forward(models[0])(params, token)
    one_by_one = torch.stack([model(x).T for model, x in zip(models, token, strict=True)])
    torch.testing.assert_close(together, one_by_one)


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


@pytest.mark.parametrize(
    ("name", "least", "most"), [("mlp", 5e-4, 0.01), ("two-layer cnn", 0.002, 0.3), ("four-layer cnn", 0.005, 0.3)]
)
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_bfloat16_is_near_and_not_equal(name: str, least: float, most: float, engine: str) -> None:
    """One step is -lr times the gradient. A rounding costs 2^-9; in a max-pool it also makes other winners."""
    work = LocalWork(lr=0.05, steps=1, batch_size=8)
    exact = Engine(task_of(name), work, 0)
    rough = Engine(task_of(name), work, 0, how=Computation(precision="bfloat16", engine=engine))
    params_d = exact.initial_params()
    update_nd = exact.train(params_d, 0, np.arange(6)).update_nd
    found_nd = rough.train(params_d, 0, np.arange(6)).update_nd
    assert found_nd.dtype == np.float32
    assert least < np.linalg.norm(found_nd - update_nd) / np.linalg.norm(update_nd) < most
    assert rough.evaluate(params_d).loss == pytest.approx(exact.evaluate(params_d).loss, rel=1e-6)  # in float32


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_graphs_and_evaluation_is_the_cpus() -> None:
    gpu, cpu = (
        Engine(task_of("four-layer cnn"), WORKS["epochs"], 0, how=Computation(name)) for name in ("cuda", "cpu")
    )
    params_d = gpu.initial_params()
    gpu.train(params_d, 0, np.arange(6))
    assert gpu.route.path == "batched"
    found, expected = gpu.evaluate(params_d), cpu.evaluate(params_d)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(gpu.losses(params_d, np.arange(6)), cpu.losses(params_d, np.arange(6)), rtol=1e-5)


def serial_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(256, CLASSES))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [MODELS["two-layer cnn"][0], serial_net], ids=["fast", "serial"])
def test_the_loop_runs_on_the_device_too(device: str, make: Callable[[], nn.Module]) -> None:
    work = WORKS["everything"]
    task = task_of("two-layer cnn", make_model=make, gradient_noise_m=np.linspace(0, 0.1, 6))
    engine = Engine(task, work, 0, how=Computation(device, engine="loop"))
    assert_equal_to_twins(engine, work)


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
