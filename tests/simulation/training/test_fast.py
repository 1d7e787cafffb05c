"""One client: the serial reference against gradients by hand, the fast path against the
reference.
"""

import copy
import ctypes.util
import functools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from batch_tools import assert_near, drift_of, noise_of
from deltafl.model.vectors import flatten
from deltafl.simulation.training.compatibility import incompatibility
from deltafl.simulation.training.fast import FastTrainer, choose_forward
from deltafl.simulation.training.serial import (
    LocalResult,
    LocalWork,
    losses_of,
    minibatches,
    train_serial,
)
from deltafl.streams import stream
from deltafl.types import FloatArray, IntArray, Params

NUM_CLASSES = 3
LOSSES = losses_of(cross_entropy)


class ViewNet(nn.Module):
    """Flattens feature maps with ``view``, which the channels-last layout does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.linear = nn.Linear(4 * 10 * 10, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.conv(x))
        return torch.as_tensor(self.linear(features.view(len(x), -1)))


def softmax_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, NUM_CLASSES))


def cnn() -> nn.Module:
    first = [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(
        *first, nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, NUM_CLASSES)
    )


def odd_cnn() -> nn.Module:
    """Pads, strides and overlapping pools: all that the tiled layout must agree about with the
    twin.
    """
    pool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
    first = nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.ReLU(), pool
    second = nn.Conv2d(5, 6, 3, padding="same"), nn.ReLU(), nn.Conv2d(6, 7, 2, 2, dilation=2)
    head = nn.Flatten(), nn.Linear(63, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES)
    return nn.Sequential(*first, *second, *head)


def group_norm_cnn() -> nn.Module:
    first = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(100, NUM_CLASSES))


def half_frozen() -> nn.Module:
    """The first convolution and the last bias stay as they are."""
    model = cnn()
    for name in ("0.weight", "0.bias", "6.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


def examples(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.random((n, 1, 12, 12), dtype=np.float32))
    return x, torch.from_numpy(rng.integers(0, NUM_CLASSES, n))


def flat_parts(n: int) -> torch.Tensor:
    """Images whose large flat parts have equal maxima, as the black borders of MNIST."""
    few = np.random.default_rng(0).integers(0, 2, (n, 1, 3, 3))
    return torch.from_numpy(np.kron(few, np.ones((1, 1, 4, 4))).astype(np.float32))


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make()
    params_d = flatten(model)
    return model, params_d


WORKS = {
    "epochs, short last batch": LocalWork(lr=0.05, epochs=3, batch_size=8),
    "steps across passes": LocalWork(lr=0.05, steps=7, batch_size=8),
    "whole data": LocalWork(lr=0.05, steps=4, batch_size=None),
    "batch above data": LocalWork(lr=0.05, epochs=2, batch_size=64),
    "both": LocalWork(lr=0.05, epochs=2, batch_size=8, momentum=0.5, proximal=0.1),
    "one step": LocalWork(lr=0.05, steps=1, batch_size=8),
    "mime": LocalWork(lr=0.05, epochs=2, batch_size=8, step_factor=0.1),
    "everything": LocalWork(
        lr=0.05, epochs=2, batch_size=8, momentum=0.5, proximal=0.1, step_factor=0.5
    ),
}


@pytest.fixture(params=["AVX2", "AVX512"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layouts of CPUs with this instruction set, on any CPU."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return str(request.param)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("make", [softmax_net, cnn, odd_cnn, group_norm_cnn, ViewNet, half_frozen])
def test_fast_equals_the_reference(make: Callable[[], nn.Module], work: LocalWork) -> None:
    plain, y = examples(21)
    model, params_d = seeded(make)
    fast = FastTrainer(model, cross_entropy).train
    serial = functools.partial(train_serial, model, cross_entropy)

    def trained(
        train: Callable[..., LocalResult], x: torch.Tensor, deviation: float
    ) -> LocalResult:
        rng = stream(0, "batches")
        drift_d = drift_of(len(params_d), work)
        return train(x, y, params_d, work, rng, noise_of(rng, deviation), drift_d, losses=LOSSES)

    for x, deviation in ((plain, 0.0), (plain, 0.1), (flat_parts(21), 0.0)):
        assert_near(trained(fast, x, deviation), trained(serial, x, deviation))


def softmax_by_hand(
    x: FloatArray,
    y: IntArray,
    start: FloatArray,
    work: LocalWork,
    rng: np.random.Generator,
    drift: FloatArray,
) -> tuple[FloatArray, float, float, float]:
    """Softmax regression in float64 with the gradient written out; keeps all gradients for the
    variance.

    With mime as it is printed: x <- x - lr ((1 - beta) direction + beta v), v = -drift / (beta lr
    K).
    """
    current = start.copy()
    velocity = np.zeros_like(start)
    gradients = []
    losses = []
    batches = minibatches(len(x), work, rng)
    server_momentum = -drift / (max(1 - work.step_factor, 1e-9) * work.lr * len(batches))
    for rows in batches:
        weight = current[:-NUM_CLASSES].reshape(NUM_CLASSES, -1)
        bias = current[-NUM_CLASSES:]
        logits = x[rows] @ weight.T + bias
        share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(-np.log(share[np.arange(len(rows)), y[rows]]))
        error = (share - np.eye(NUM_CLASSES)[y[rows]]) / len(rows)
        gradients.append(np.concatenate([(error.T @ x[rows]).ravel(), error.sum(0)]))
        velocity = work.momentum * velocity + gradients[-1] + work.proximal * (current - start)
        current = current - work.lr * (
            work.step_factor * velocity + (1 - work.step_factor) * server_momentum
        )
    variance = (work.step_factor * work.lr) ** 2 * np.array(gradients).var(axis=0).sum()
    loss = np.mean([loss_b.mean() for loss_b in losses])
    square = np.mean([(loss_b**2).mean() for loss_b in losses])
    return current - start, float(loss), float(square), float(variance)


@pytest.mark.parametrize("name", ["epochs, short last batch", "both", "mime", "everything"])
def test_the_reference_equals_gradients_written_by_hand(name: str) -> None:
    x, y = examples(21)
    model, params_d = seeded(softmax_net)
    work = WORKS[name]
    drift_d = drift_of(len(params_d), WORKS[name])
    given = x, y, params_d, work, stream(0, "batches"), None, drift_d
    result = train_serial(model, cross_entropy, *given, losses=LOSSES)
    wide_x = x.numpy().reshape(21, -1).astype(np.float64)
    wide_d = params_d.astype(np.float64)
    wide_drift_d = np.zeros(len(params_d)) if drift_d is None else drift_d.astype(np.float64)
    hand = softmax_by_hand(wide_x, y.numpy(), wide_d, work, stream(0, "batches"), wide_drift_d)
    update, loss, square, variance = hand
    np.testing.assert_allclose(result.update_d, update, rtol=0, atol=1e-5 * np.abs(update).max())
    assert result.update_d.dtype == np.float32
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.square_loss == pytest.approx(square, rel=1e-5)
    assert result.step_variance == pytest.approx(variance, rel=1e-4)


def test_without_momentum_the_noise_adds_its_variance_to_a_step() -> None:
    """With one gradient for all steps (whole data, tiny lr) E step_variance = lr^2 nu^2 d (1 -
    1/K).
    """
    x, y = examples(20)
    model, params_d = seeded(softmax_net)
    work = LocalWork(lr=1e-4, steps=200, batch_size=None)
    nu = 5.0
    d = len(params_d)
    rng = stream(0, "batches")
    result = FastTrainer(model, cross_entropy).train(x, y, params_d, work, rng, noise_of(rng, nu))
    expected = work.lr**2 * nu**2 * d * (1 - 1 / 200)
    # The sum of d (K - 1) squared normals has relative standard deviation sqrt(2 / (d (K - 1))) =
    # 0.5 %.
    assert result.step_variance == pytest.approx(expected, rel=0.025)


@pytest.mark.parametrize("make", [softmax_net, cnn])
def test_a_client_does_not_depend_on_the_one_before_and_changes_nothing(
    make: Callable[[], nn.Module],
) -> None:
    model, params_d = seeded(make)
    before = copy.deepcopy(model.state_dict())
    kept_d = params_d.copy()
    trainer = FastTrainer(model, cross_entropy)
    work = WORKS["both"]
    alone = trainer.train(*examples(21), params_d, work, stream(0, "batches"))
    trainer.train(*examples(13, seed=5), params_d + np.float32(1), work, stream(0, "batches", 3))
    np.testing.assert_equal(
        alone, trainer.train(*examples(21), params_d, work, stream(0, "batches"))
    )
    one = train_serial(
        model, cross_entropy, *examples(9), params_d, WORKS["one step"], stream(0, "batches")
    )
    assert one.step_variance == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    np.testing.assert_array_equal(params_d, kept_d)


@pytest.mark.parametrize("fast", [True, False])
def test_training_that_diverges_raises_nothing(fast: bool) -> None:
    model, params_d = seeded(cnn)
    train: Callable[..., LocalResult] = functools.partial(train_serial, model, cross_entropy)
    if fast:
        train = FastTrainer(model, cross_entropy).train
    work = LocalWork(lr=1e38, steps=30, batch_size=4)
    result = train(*examples(12), params_d, work, stream(0, "batches"))
    assert np.isnan(result.update_d).any()
    assert np.isnan(result.step_variance)
    assert result.num_steps == 30


def tied() -> nn.Module:
    one = nn.Linear(4, 4)
    two = nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(one, two)


def frozen() -> nn.Module:
    model = softmax_net()
    next(model.parameters()).requires_grad_(False)
    return model


class Recurrent(nn.LSTM):
    """Of an LSTM's outputs the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        output: torch.Tensor = super().forward(x)[0]
        return output


class FunctionalDropout(nn.Linear):
    """Draws by a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Limited(nn.Linear):
    """Each pass puts rows of limited norm in the place of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x.flatten(1))


class LimitedLater(nn.Module):
    """Each pass puts limited numbers in the place of weights that it has used."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(144, 8)
        self.two = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.two(torch.tanh(self.one(x.flatten(1))))
        for param in self.parameters():
            param.data = param.data.clamp(-0.05, 0.05)
        return output


@pytest.mark.parametrize(
    ("make", "shape", "word"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
            (1, 1, 4, 4),
            "running_mean",
        ),
        (lambda: Recurrent(3, 3, num_layers=2, dropout=0.1), (1, 2, 3), "random"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), (1, 3), "random"),
        (lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.RReLU()), (1, 3), "random"),
        (lambda: FunctionalDropout(3, 3), (1, 3), "random"),
        (lambda: Limited(3, 3), (1, 3), "in the place of parameters"),
        (tied, (1, 4), "shared"),
        (frozen, (1, 144), "None"),
        (lambda: softmax_net().double(), (1, 144), "float32"),
        (ViewNet, (1, 1, 12, 12), "None"),
        (lambda: Recurrent(3, 3), (1, 2, 3), "None"),
    ],
)
def test_what_the_fast_path_cannot_train(
    make: Callable[[], nn.Module], shape: tuple[int, ...], word: str
) -> None:
    model = make().eval()
    before = torch.get_rng_state()
    assert word in str(incompatibility(model, torch.zeros(shape)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training


def test_frozen_parameters_do_not_move() -> None:
    model, params_d = seeded(frozen)
    work = WORKS["both"]
    rng = stream(0, "batches")
    update_d = train_serial(model, cross_entropy, *examples(9), params_d, work, rng).update_d
    assert len(update_d) == len(params_d) < sum(p.numel() for p in model.parameters())
    assert update_d.any()


@pytest.mark.parametrize("make", [lambda: Limited(144, 10), LimitedLater])
def test_what_a_pass_puts_in_the_place_of_weights_is_trained(make: Callable[[], nn.Module]) -> None:
    model, params_d = seeded(make)
    expected = copy.deepcopy(model).train()
    x, y = examples(9)
    optimizer = torch.optim.SGD(expected.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss: torch.Tensor = cross_entropy(expected(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
    work = LocalWork(lr=0.5, steps=3)
    rng = stream(0, "batches")
    update_d = train_serial(model, cross_entropy, x, y, params_d, work, rng).update_d
    np.testing.assert_allclose(params_d + update_d, flatten(expected), rtol=1e-5, atol=1e-6)


class Moved(nn.Linear):
    """Each pass keeps its weight elsewhere, as an LSTM may do on a GPU alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(input.flatten(1))


def test_the_fast_path_follows_weights_that_a_pass_moves() -> None:
    model, params_d = seeded(lambda: Moved(144, 10))
    args = (*examples(9), params_d, WORKS["both"])
    slow = train_serial(model, cross_entropy, *args, stream(0, "batches"))
    fast = FastTrainer(model, cross_entropy).train(*args, stream(0, "batches"))
    np.testing.assert_allclose(fast.update_d, slow.update_d, rtol=1e-4, atol=1e-6)


def feature_layout(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model's first convolution puts out when the model is run in the layout chosen for
    it.
    """
    seen: list[torch.Tensor] = []
    forward = choose_forward(model, x)
    first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    with first.register_forward_hook(lambda part, inputs, output: seen.append(output)):
        forward(x)
    return seen[0]


def test_layouts_are_chosen_by_structure_and_cpu(capability: str) -> None:
    x, _ = examples(4)
    for model in (cnn(), odd_cnn()):
        layout = feature_layout(model, x)
        assert layout.is_mkldnn == (capability == "AVX512")
        assert layout.is_mkldnn or layout.stride(1) == 1
    assert feature_layout(group_norm_cnn(), x).stride(1) == 1
    assert feature_layout(ViewNet(), x).is_contiguous()


STRIDED = """
import torch
from torch import nn
from deltafl.simulation.training.fast import choose_forward
torch.set_num_threads(1)
for channels in (1, 3, 4, 6):
    model = nn.Sequential(nn.Conv2d(channels, 8, 1, stride=2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 3))
    for size in (2, 8, 5) * 10:
        x = torch.randn(size, channels, 8, 8)
        torch.autograd.grad(choose_forward(model, x)(x).sum(), list(model.parameters()))
        junk = [torch.randn(k) for k in range(60)]
print(torch.backends.cpu.get_cpu_capability())
"""


def test_a_convolution_that_corrupts_memory_without_avx512_is_kept_out_of_channels_last() -> None:
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MALLOC_CHECK_": "3"}
    # It finds what the heap would hide until later.
    if checker := ctypes.util.find_library("c_malloc_debug"):
        limits["LD_PRELOAD"] = checker
    program = [sys.executable, "-c", STRIDED]
    done = subprocess.run(
        program, capture_output=True, text=True, env=os.environ | limits, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AVX512" not in done.stdout


def norm_first(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.GroupNorm(2, channels), nn.Conv2d(channels, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def behind_frozen_layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 6, 1).requires_grad_(False), nn.ReLU(), *norm_first(6))


class CalledNorm(nn.Module):
    """Calls its norm by a function, or by name, of the examples or behind a convolution."""

    def __init__(self, call: Callable[..., Tensor], is_first: bool = True) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(64, 3)
        self.call = call
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.conv(self.call(self.norm, x))
        else:
            x = self.call(self.norm, self.conv(x))
        return torch.as_tensor(self.head(x.flatten(1)))


CALLS: list[Callable[..., Tensor]] = [
    lambda norm, x: norm(input=x),
    lambda norm, x: functional.group_norm(x, 2, norm.weight, norm.bias),
    lambda norm, x: functional.group_norm(input=x, num_groups=2, weight=norm.weight),
    lambda norm, x: torch.group_norm(x, 2, norm.weight, norm.bias),
]


@pytest.mark.parametrize("call", CALLS)
def test_norms_of_examples_are_found_however_they_are_called(call: Callable[..., Tensor]) -> None:
    x = torch.zeros(3, 4, 6, 6)
    assert choose_forward(model := CalledNorm(call), x) is model
    assert choose_forward(model := CalledNorm(call, is_first=False), x) is not model


@pytest.mark.parametrize("make", [norm_first, behind_frozen_layers])
def test_a_norm_of_what_has_no_gradient_is_kept_out_of_channels_last(
    make: Callable[[], nn.Module],
) -> None:
    """There torch writes where it must not."""
    model = make()
    assert choose_forward(model, torch.zeros(3, 4, 6, 6)) is model


@given(st.integers(1, 50), st.integers(1, 60) | st.none(), st.integers(1, 4))
def test_each_pass_visits_every_example_once(
    num_examples: int, batch_size: int | None, epochs: int
) -> None:
    work = LocalWork(lr=0.1, epochs=epochs, batch_size=batch_size)
    batches = minibatches(num_examples, work, stream(0, "batches"))
    rows = np.concatenate(batches).reshape(epochs, num_examples)
    np.testing.assert_array_equal(
        np.sort(rows, axis=1), np.tile(np.arange(num_examples), (epochs, 1))
    )
    assert max(len(batch) for batch in batches) == min(batch_size or num_examples, num_examples)


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 30))
def test_steps_are_the_first_of_as_many_passes_as_needed(n: int, size: int, steps: int) -> None:
    batches = minibatches(n, LocalWork(lr=0.1, steps=steps, batch_size=size), stream(0, "batches"))
    longer = minibatches(n, LocalWork(lr=0.1, epochs=steps, batch_size=size), stream(0, "batches"))
    assert len(batches) == steps
    assert all(np.array_equal(a, b) for a, b in zip(batches, longer, strict=False))
