"""A cohort trained as a batch: equal to the twin for every kind of model, the same bits again, and after a resume."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batch_tools import BATCHED, CLASSES, DEVICES, MODELS, SIZES, WORKS, OwnNet, drift_of, task_of, twin_of
from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.training.batched import rounded_up
from deltafl.simulation.training.forms import UnfoldedConv2d, batched_forward, unfolded
from deltafl.simulation.training.local import LocalWork
from deltafl.simulation.training.routes import Computation
from deltafl.simulation.workers import one_thread
from deltafl.tasks import crop_and_flip
from deltafl.tasks.models import next_token_lstm
from deltafl.tasks.synthetic import make_synthetic_task


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    with one_thread():
        yield


def assert_equal_to_twins(engine: Engine, work: LocalWork) -> Training:
    """Within float32 rounding over some ten steps: 1e-4 of the largest entry, 1e-3 of the variance."""
    clients = np.arange(engine.task.num_clients)
    own = engine.train(engine.initial_params(), 2, clients, drift_of(engine, work), squares=True)
    for client in clients:
        twin = twin_of(engine, work, int(client))
        scale = float(np.abs(twin.update_d).max())
        assert scale > 0
        np.testing.assert_allclose(own.update_nd[client], twin.update_d, rtol=0, atol=1e-4 * scale)
        assert own.loss_n[client] == pytest.approx(twin.loss, rel=1e-5)
        assert own.square_loss_n[client] == pytest.approx(twin.square_loss, rel=1e-5)
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
    again = engine.train(engine.initial_params(), 2, np.arange(len(SIZES)), drift_of(engine, work), squares=True)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_graphs_and_evaluation_is_the_cpus(caplog: pytest.LogCaptureFixture) -> None:
    gpu, cpu = (
        Engine(task_of("four-layer cnn"), WORKS["epochs"], 0, how=Computation(name)) for name in ("cuda", "cpu")
    )
    params_d = gpu.initial_params()
    with caplog.at_level(logging.INFO, logger="deltafl"):
        gpu.train(params_d, 0, np.arange(6))
    assert "without CUDA graphs" not in caplog.text
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
