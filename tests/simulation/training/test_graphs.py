"""Steps that are captured have the numbers of steps that are not; what a graph does is played here
by an object that runs nothing when it captures, as CUDA does, and the call itself at every replay.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from batch_tools import (
    DEVICES,
    MODELS,
    SIZES,
    WORKS,
    PlayedCapture,
    assert_near,
    drift_of,
    results_of,
    task_of,
)
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.training import batched
from deltafl.simulation.training.devices import product_precision
from deltafl.simulation.training.graphs import MOST_GRAPHS, WARM_UPS, CapturedStep, Replay
from deltafl.simulation.training.route import Computation, Route, captures_steps
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import crop_and_flip
from deltafl.types import Params

CUDA = DEVICES[1]
GRAPH = Route("batched", steps="graph")


def refuse(call: Callable[[], torch.Tensor]) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_step_is_captured_after_its_warm_up_once_for_each_number_of_models() -> None:
    given: list[tuple[int, float]] = []
    memory = torch.zeros(5)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given.append((x.data_ptr(), float(x.sum())))
        memory[: len(x)] += x * weight
        return memory[: len(x)].double().expand(3, 1, -1).clone()

    capture = PlayedCapture()
    captured = CapturedStep(step, (torch.zeros(5), torch.zeros(5)), capture)
    expected = torch.zeros(5)
    numbers = [5, 3, 5, 5, 3, 3, 5, 3, 5, 1]
    for place, number in enumerate(numbers):
        x = torch.full((number,), float(place))
        weight = torch.arange(1.0, number + 1)
        found = captured(x, weight)
        expected[:number] += x * weight
        torch.testing.assert_close(memory, expected, rtol=0, atol=0)
        torch.testing.assert_close(found[0, 0], expected[:number].double(), rtol=0, atol=0)
    assert [total for _, total in given] == [
        place * number for place, number in enumerate(numbers)
    ]  # each call once, with its own inputs, in the order in which they came
    assert len({pointer for pointer, _ in given}) == 1  # and always from the same memory
    assert capture.numbers == [5, 3]
    assert capture.replays == sum(max(0, numbers.count(number) - WARM_UPS) for number in (5, 3))
    assert captured.captured


def test_what_cannot_be_captured_stays_eager_and_is_not_tried_again() -> None:
    tried = []

    def fail(call: Callable[[], torch.Tensor]) -> Replay:
        tried.append(call)
        return refuse(call)

    total = torch.zeros(1)
    captured = CapturedStep(total.add_, (torch.zeros(1),), fail)
    for _ in range(WARM_UPS + 4):
        captured(torch.ones(1))
    assert float(total) == WARM_UPS + 4
    assert len(tried) == 1
    assert not captured.captured


def test_after_a_capture_that_fails_nothing_is_replayed() -> None:
    """A generator that has been left in a capture lets no older graph run."""
    capture = PlayedCapture()

    def fail_for_one(call: Callable[[], torch.Tensor]) -> Replay:
        assert isinstance(call, partial)
        return (refuse if len(call.args[0]) == 1 else capture)(call)

    total = torch.zeros(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        total[: len(x)] += x
        return total.double().expand(3, 1, -1)

    captured = CapturedStep(step, (torch.zeros(2),), fail_for_one)
    for number in [2, 1] * (WARM_UPS + 3):
        captured(torch.ones(number))
    assert total.tolist() == [2 * (WARM_UPS + 3), WARM_UPS + 3]
    assert capture.replays == 1
    assert not captured.captured


def test_the_number_of_graphs_is_bounded() -> None:
    capture = PlayedCapture()
    most = MOST_GRAPHS + 6
    captured = CapturedStep(lambda x: x.expand(3, 1, -1).double(), (torch.zeros(most),), capture)
    for number in [*range(1, most + 1)] * (WARM_UPS + 2):
        assert captured(torch.ones(number)).sum() == 3 * number
    assert capture.numbers == [*range(1, MOST_GRAPHS + 1)]


def rounds_of(engine: Engine, work: LocalWork) -> list[Training]:
    """Cohorts that grow and shrink, of clients with different numbers of steps; the first four
    are the same.
    """
    params_d = engine.initial_params()
    drift_d = drift_of(engine.num_params, work)
    cohorts: list[tuple[list[int], Params | None]] = [
        *[([1, 4, 2], drift_d)] * 4,
        *[([*range(len(SIZES))], drift_d)] * 2,
        ([3, 0], None),
        ([5, 2, 1, 0], drift_d),
    ]
    return [
        engine.train(params_d, 2, np.array(clients), drift_nd, squares=True)
        for clients, drift_nd in cohorts
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("name", ["two-layer cnn", "lstm"])
def test_captured_steps_have_the_bits_of_eager_ones(
    name: str, work: LocalWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[PlayedCapture] = []

    def play(device: object) -> PlayedCapture:
        captures.append(PlayedCapture())
        return captures[-1]

    work = replace(work, factors=(1.0, 1.0, 0.5))
    task = task_of(name)
    monkeypatch.setattr(batched, "CudaCapture", play)
    own = rounds_of(Engine(task, work, 0, kept=GRAPH), work)
    assert sum(capture.replays for capture in captures) >= 5
    monkeypatch.setattr(batched, "CudaCapture", lambda device: refuse)
    eager = rounds_of(Engine(task, work, 0, kept=GRAPH), work)
    np.testing.assert_equal(own, eager)
    np.testing.assert_equal(own[0], own[3])
    # The CPU's own step has its rate as a number, which may round otherwise.
    plain = rounds_of(Engine(task, work, 0, kept=Route("batched")), work)
    for found, twin in zip(own, plain, strict=True):
        for result, result_of_twin in zip(results_of(found), results_of(twin), strict=True):
            assert_near(result, result_of_twin, 1e-5)


def test_a_rate_that_falls_needs_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = PlayedCapture()
    monkeypatch.setattr(batched, "CudaCapture", lambda device: capture)
    work = LocalWork(0.01, steps=3, batch_size=8, fixed_order=True, factors=(1.0, 0.1, 0.0))
    engine = Engine(task_of(), work, 0, kept=GRAPH)
    params_d = engine.initial_params()
    sizes = [
        np.linalg.norm(engine.train(params_d, round, np.arange(2)).update_nd) for round in range(3)
    ]
    assert capture.numbers == [2]
    assert sizes[1] == pytest.approx(0.1 * sizes[0], rel=0.2)
    assert sizes[2] == 0


def test_augmented_examples_reach_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    work = LocalWork(lr=0.05, steps=WARM_UPS + 3, batch_size=8)
    task = task_of("resnet", augment=crop_and_flip)
    monkeypatch.setattr(batched, "CudaCapture", PlayedCapture)
    own, plain = (
        results_of(engine.train(engine.initial_params(), 0, np.arange(3)))
        for engine in (Engine(task, work, 0, kept=kept) for kept in (GRAPH, Route("batched")))
    )
    for result, twin in zip(own, plain, strict=True):
        assert_near(result, twin, 1e-4)


def test_cpus_and_noise_have_no_graphs() -> None:
    task = task_of()
    model = task.make_model()
    assert not captures_steps(model, task, torch.device("cpu"), "float32")
    noisy = replace(task, gradient_noise_m=np.full(len(SIZES), 0.1))
    assert not captures_steps(model, noisy, torch.device("cuda"), "float32")


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tf32_is_refused_on_a_cpu(device: str) -> None:
    with pytest.raises(DeltaflError, match=r"'tf32', which GPUs alone have.*write 'float32'"):
        Engine(task_of(), WORKS["epochs"], 0, how=Computation(device, "tf32"))


@pytest.mark.parametrize("precision", batched.PASSES)
def test_tf32_holds_for_the_training_alone(precision: str) -> None:
    def now() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = now()
    rough = precision == "tf32"
    with product_precision(torch.device("cuda"), precision):
        assert now() == ("high" if rough else "highest", rough)
        with product_precision(torch.device("cuda")):  # as evaluations have it
            assert now() == ("highest", False)
    assert now() == before


def test_settings_hold_where_a_user_has_forbidden_to_change_them() -> None:
    """``torch.testing`` forbids it, too."""
    backends: Any = torch.backends
    before = backends.cudnn.deterministic
    try:
        backends.disable_global_flags()
        with product_precision(torch.device("cuda")):
            assert backends.cudnn.deterministic and not backends.cudnn.allow_tf32
        assert backends.cudnn.deterministic == before
        assert backends.flags_frozen()
    finally:
        flags: Any = backends.disable_global_flags.__globals__
        flags["__allow_nonbracketed_mutation_flag"] = True


def precisions() -> list[str]:
    """Of products, convolutions and recurrent layers, as torch names them since 2.9."""
    parts: list[Any] = [torch.backends.cuda.matmul]
    parts += [getattr(torch.backends.cudnn, name) for name in ("conv", "rnn")]
    return [part.fp32_precision for part in parts]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 or newer")
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("value", ["tf32", "ieee"])
@pytest.mark.parametrize("name", ["", "cuda.matmul", "cudnn", "cudnn.conv"])
def test_precisions_go_with_the_newer_settings_of_a_user(
    name: str, value: str, precision: str
) -> None:
    """Which torch does not let anybody read by their older names."""
    backends: Any = torch.backends
    try:
        (attrgetter(name)(backends) if name else backends).fp32_precision = value
        before = precisions()
        with product_precision(torch.device("cuda"), precision):
            assert precisions() == [{"float32": "ieee"}.get(precision, precision)] * 3
        assert precisions() == before
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = True
        for part in (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn):
            part.fp32_precision = "none"
        for part in (backends.cudnn.conv, backends.cudnn.rnn):
            part.fp32_precision = "tf32"


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("precision", batched.PASSES)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_graphs_have_the_bits_of_eager_steps(
    name: str, work: LocalWork, precision: str, device: str
) -> None:
    task = task_of(name)
    chosen = Engine(task, work, 0, how=Computation(device, precision))
    assert chosen.route.steps == "graph"
    eager = Engine(task, work, 0, kept=chosen.route._replace(steps="eager"))
    own = rounds_of(chosen, work)
    np.testing.assert_equal(own, rounds_of(eager, work))
    np.testing.assert_equal(own[0], own[3])


@pytest.mark.parametrize("device", [CUDA])
def test_on_a_gpu_a_refused_capture_changes_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for the device ends a capture, and what follows is as if nobody had tried."""
    work = WORKS["everything"]
    task = task_of()
    route = Route("batched", device, steps="eager")
    eager = rounds_of(Engine(task, work, 0, kept=route), work)
    sums = batched._sums

    def waiting(wide_knb: torch.Tensor) -> torch.Tensor:
        wide_knb.sum().item()
        return sums(wide_knb)

    monkeypatch.setattr(batched, "_sums", waiting)
    assert not captures_steps(task.make_model(), task, torch.device(device), "float32")
    assert Engine(task, work, 0, how=Computation(device)).route.steps == "eager"
    refused = rounds_of(Engine(task, work, 0, kept=route._replace(steps="graph")), work)
    np.testing.assert_equal(refused, eager)
    torch.rand(3, device=device)  # the generator still works


@pytest.mark.parametrize("device", [CUDA])
def test_on_a_gpu_tf32_is_near_and_not_equal(device: str) -> None:
    work = LocalWork(lr=0.05, steps=1, batch_size=8)
    exact, rough = (
        Engine(task_of(), work, 0, how=Computation(device, precision))
        for precision in ("float32", "tf32")
    )
    params_d = exact.initial_params()
    update_nd = exact.train(params_d, 0, np.arange(6)).update_nd
    found_nd = rough.train(params_d, 0, np.arange(6)).update_nd
    assert 1e-6 < np.linalg.norm(found_nd - update_nd) / np.linalg.norm(update_nd) < 0.1
    assert rough.evaluate(params_d) == exact.evaluate(params_d)
