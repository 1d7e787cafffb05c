"""A cohort trained at once equals the serial reference; dense models on a CPU have the same bits
in any cohort.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from batch_tools import (
    CLASSES,
    DEVICES,
    MODELS,
    SIZES,
    WORKS,
    assert_near,
    drift_of,
    noise_of,
    results_of,
    task_of,
    twin_of,
)
from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.training.batched import BatchedTrainer
from deltafl.simulation.training.route import Computation, Route
from deltafl.simulation.training.serial import (
    LocalJob,
    LocalResult,
    LocalWork,
    losses_of,
    train_serial,
)
from deltafl.simulation.training.sizes import padded_width
from deltafl.streams import stream
from deltafl.tasks import crop_and_flip
from deltafl.tasks.losses import cross_entropy, squared_error
from deltafl.tasks.models import mlp
from deltafl.tasks.synthetic import make_synthetic_task
from deltafl.types import Params

BATCHED = Route("batched")


def assert_equal_to_twins(engine: Engine, work: LocalWork) -> Training:
    clients = np.arange(engine.task.num_clients)
    own = engine.train(
        engine.initial_params(), 2, clients, drift_of(engine.num_params, work), squares=True
    )
    for client, result in enumerate(results_of(own)):
        assert_near(result, twin_of(engine, work, client), 1e-4)
    return own


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_the_serial_reference(name: str, work: LocalWork, device: str) -> None:
    engine = Engine(task_of(name), work, 0, kept=BATCHED._replace(device=device))
    own = assert_equal_to_twins(engine, work)
    params_d = engine.initial_params()
    drift_d = drift_of(engine.num_params, work)
    np.testing.assert_equal(
        own, engine.train(params_d, 2, np.arange(len(SIZES)), drift_d, squares=True)
    )
    assert engine.evaluate(params_d)[:3] == pytest.approx(
        Engine(engine.task, work, 0).evaluate(params_d)[:3], nan_ok=True, rel=1e-5
    )


def test_a_batch_of_numbers_equals_the_serial_reference() -> None:
    task = task_of("two-layer cnn", make_model=regression_net, loss=squared_error)
    data = task.dataset
    targets = (data.train_y.astype(np.float32) / 3, data.test_y.astype(np.float32) / 3)
    data = replace(data, train_y=targets[0], test_y=targets[1], num_classes=0)
    task = replace(task, dataset=data, metric="loss")
    work = LocalWork(lr=0.001, epochs=2, batch_size=8)
    assert_equal_to_twins(Engine(task, work, 0, kept=BATCHED), work)


def regression_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 1), nn.Flatten(0))


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_that_of_the_reference(device: str) -> None:
    work = LocalWork(lr=0.001, steps=5, batch_size=32)
    kept = BATCHED._replace(device=device)
    assert_equal_to_twins(Engine(make_synthetic_task(0, num_clients=5), work, 0, kept=kept), work)
    some_m = np.array([0.0, 0.1, 0.0, 0.2, 0.0, 0.3])
    some = Engine(task_of("two-layer cnn", gradient_noise_m=some_m), WORKS["epochs"], 0, kept=kept)
    assert_equal_to_twins(some, WORKS["epochs"])


@pytest.mark.parametrize("device", DEVICES)
def test_augmentation_is_that_of_the_reference(device: str) -> None:
    work = WORKS["epochs"]
    task = task_of("resnet", augment=crop_and_flip)
    kept = BATCHED._replace(device=device)
    varied = assert_equal_to_twins(Engine(task, work, 0, kept=kept), work)
    plain = Engine(replace(task, augment=None), work, 0, kept=kept)
    assert not np.allclose(
        varied.update_nd, plain.train(plain.initial_params(), 2, np.arange(6)).update_nd
    )


@pytest.mark.parametrize("name", ["two-layer cnn", "mlp"])
def test_a_diverging_client_leaves_the_others_alone(name: str) -> None:
    task = task_of(name)
    x = task.dataset.train_x.astype(np.float32) / 255
    x[task.client_rows[2]] = np.inf
    broken = replace(task, dataset=replace(task.dataset, train_x=x))
    own, whole = (
        engine.train(engine.initial_params(), 2, np.arange(6))
        for engine in (Engine(t, WORKS["epochs"], 0, kept=BATCHED) for t in (broken, task))
    )
    finite_n = np.isfinite(own.update_nd).all(axis=1)
    assert finite_n.tolist() == [True, True, False, True, True, True]
    np.testing.assert_allclose(
        own.update_nd[finite_n], whole.update_nd[finite_n], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("mlp", 5e-4, 0.01),
        ("two-layer cnn", 0.002, 0.3),
        ("four-layer cnn", 0.005, 0.3),
        ("frozen", 5e-4, 0.02),
    ],
)
def test_bfloat16_is_near_and_not_equal(name: str, least: float, most: float) -> None:
    """One step is -lr times the gradient. A rounding costs 2^-9; in a max-pool it also makes
    other winners.
    """
    work = LocalWork(lr=0.05, steps=1, batch_size=8)
    exact = Engine(task_of(name), work, 0)
    rough = Engine(task_of(name), work, 0, how=Computation(precision="bfloat16"))
    assert rough.route.path == "batched"
    params_d = exact.initial_params()
    update_nd = exact.train(params_d, 0, np.arange(6)).update_nd
    found_nd = rough.train(params_d, 0, np.arange(6)).update_nd
    assert found_nd.dtype == np.float32
    assert least < np.linalg.norm(found_nd - update_nd) / np.linalg.norm(update_nd) < most
    assert rough.evaluate(params_d).loss == pytest.approx(
        exact.evaluate(params_d).loss, rel=1e-6
    )  # in float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*MODELS, "serial"])
def test_the_loop_runs_on_every_device(device: str, name: str) -> None:
    work = WORKS["everything"]
    noise_m = np.linspace(0, 0.1, 6)
    serial = {
        "make_model": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(256, CLASSES))
    }
    model = {} if name in MODELS else serial
    task = task_of(name if name in MODELS else "two-layer cnn", gradient_noise_m=noise_m, **model)
    assert_equal_to_twins(Engine(task, work, 0, kept=Route("loop", device)), work)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_classes_are_where_the_outputs_are(device: str) -> None:
    task = task_of("mlp", loss=nn.CrossEntropyLoss(torch.arange(1.0, CLASSES + 1)))
    engine = Engine(task, WORKS["epochs"], 0, kept=Route("loop", device))
    assert_equal_to_twins(engine, WORKS["epochs"])
    params_d = engine.initial_params()
    on_cpu = Engine(task, WORKS["epochs"], 0, kept=Route())
    loss = on_cpu.evaluate(params_d).loss
    assert engine.evaluate(params_d).loss == pytest.approx(loss, rel=1e-5)


def tanh_net(features: int, hidden: list[int], classes: int) -> nn.Module:
    last = nn.Linear(6, classes)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(features, 6, bias=False), nn.Tanh(), last, nn.Sigmoid()
    )


DENSE_WORKS = [
    LocalWork(lr=0.1, epochs=1),
    LocalWork(lr=0.1, steps=3, batch_size=None),
    LocalWork(lr=0.1, steps=7, momentum=0.5, proximal=0.1, step_factor=0.7),
    LocalWork(lr=0.05, epochs=1, step_factor=0.7),
]


@given(
    make=st.sampled_from([mlp, tanh_net]),
    features=st.just(1) | st.integers(1, 40),
    classes=st.sampled_from([16, 32]) | st.integers(2, 12),
    hidden=st.lists(st.integers(1, 20), max_size=2),
    work=st.sampled_from(DENSE_WORKS),
    batch=st.integers(1, 70),
    chosen=st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True),
)
@example(make=mlp, features=1, classes=16, hidden=[], work=DENSE_WORKS[0], batch=20, chosen=[3])
@example(make=mlp, features=1, classes=32, hidden=[], work=DENSE_WORKS[0], batch=70, chosen=[5, 2])
@example(make=mlp, features=7, classes=16, hidden=[1], work=DENSE_WORKS[0], batch=33, chosen=[0, 7])
@settings(max_examples=80)
def test_dense_models_equal_the_reference_with_the_same_bits_in_any_cohort(
    make: Callable[[int, list[int], int], nn.Module],
    features: int,
    classes: int,
    hidden: list[int],
    work: LocalWork,
    batch: int,
    chosen: list[int],
) -> None:
    rng = np.random.default_rng(features)
    sizes = rng.integers(1, 90, 12)
    rows = np.split(rng.permutation(sizes.sum()), np.cumsum(sizes)[:-1])
    x = torch.from_numpy(rng.standard_normal((sizes.sum(), features)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, classes, sizes.sum()))
    work = replace(work, batch_size=batch) if work.batch_size else work
    torch.manual_seed(1)
    model = make(features, hidden, classes)
    params_d: Params = parameters_to_vector(model.parameters()).detach().numpy().copy()
    drift_d = drift_of(len(params_d), work)
    trainer = BatchedTrainer(
        model,
        cross_entropy,
        padded_width(rows, work.batch_size),
        lambda own: (x[own], y[own]),
    )

    def job_of(client: int) -> LocalJob:
        rng = stream(0, "batches", 3, client)
        return LocalJob(rows[client], rng, noise_of(rng, 0.1 if client % 2 else 0.0))

    def drift_of_client(client: int) -> Params | None:
        return None if drift_d is None else np.float32(1 + client) * drift_d

    def trained(clients: Sequence[int]) -> list[LocalResult]:
        own_nd = (
            None
            if drift_d is None
            else np.stack([np.float32(1 + client) * drift_d for client in clients])
        )
        return trainer.train([*map(job_of, clients)], params_d, work, own_nd, squares=True)

    everyone = trained(range(12))
    np.testing.assert_equal(trained(chosen), [everyone[client] for client in chosen])
    own = job_of(chosen[0])
    own_d = drift_of_client(chosen[0])
    parts = (x[own.rows], y[own.rows], params_d, work, own.rng, own.noise, own_d)
    assert_near(
        everyone[chosen[0]],
        train_serial(model, cross_entropy, *parts, losses=losses_of(cross_entropy)),
        1e-4,
    )
