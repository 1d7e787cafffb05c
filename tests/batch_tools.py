"""What the tests of batched training share: small models of every kind, their task, and the twin
of a client.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.training.graphs import Replay
from deltafl.simulation.training.route import Route
from deltafl.simulation.training.serial import (
    LocalResult,
    LocalWork,
    Noise,
    losses_of,
    train_serial,
)
from deltafl.streams import stream
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.tasks.losses import cross_entropy
from deltafl.tasks.models import mlp, next_token_lstm, two_layer_cnn
from deltafl.tasks.modules import ResidualBlock
from deltafl.types import Params

SIZES = (9, 40, 21, 33, 5, 16)
CLASSES = 5
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


class PlayedCapture:
    """In place of ``CudaCapture``; remembers how many models each capture was for."""

    def __init__(self, device: object = None) -> None:
        self.numbers: list[int] = []
        self.replays = 0

    def __call__(self, call: Callable[[], torch.Tensor]) -> Replay:
        assert isinstance(call, partial)
        number = len(call.args[0])
        self.numbers.append(number)
        result = torch.full((3, 1, number), 77.0, dtype=torch.float64)

        def replay() -> None:
            self.replays += 1
            result.copy_(call())

        return replay, result


def results_of(training: Training) -> list[LocalResult]:
    update_nd, reports, _ = training
    columns = (reports.loss_n, reports.square_loss_n, reports.step_variance_n, reports.num_steps_n)
    return [LocalResult(*row) for row in zip(update_nd, *columns, strict=True)]


def four_layers() -> nn.Module:
    """FEMNIST's CNN with few filters."""
    layers: list[nn.Module] = []
    for before, after in ((1, 3), (3, 4), (4, 4)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def tiny_resnet() -> nn.Module:
    blocks = (ResidualBlock(4, 4, 1, 2), ResidualBlock(4, 8, 2, 2))
    first = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU())
    return nn.Sequential(
        *first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


class OwnNet(nn.Module):
    """No chain of layers: a module of one's own, with an odd convolution and a layer that is not
    used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
        self.head = nn.Linear(4, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.head(torch.tanh(self.conv(x)).mean(dim=(2, 3)))
        return features


def frozen_layers() -> nn.Module:
    """A dense chain of which the middle alone is trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Sequential = mlp(17, [9, 8], CLASSES)
    for layer in (model[1], model[-1]):
        layer.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two-layer cnn": (lambda: two_layer_cnn((3, 4), side=16, classes=CLASSES), (1, 16, 16)),
    "four-layer cnn": (four_layers, (1, 16, 16)),
    "resnet": (tiny_resnet, (3, 8, 8)),
    "mlp": (lambda: mlp(17, [9], CLASSES), (17,)),
    "lstm": (lambda: next_token_lstm(CLASSES, 3, 6), (7,)),
    "own": (OwnNet, (1, 9, 9)),
    "frozen": (frozen_layers, (17,)),
}
WORKS = {
    "epochs": LocalWork(lr=0.05, epochs=2, batch_size=8),
    "whole data": LocalWork(lr=0.05, steps=2, batch_size=None),
    "everything": LocalWork(
        lr=0.05, epochs=1, batch_size=12, momentum=0.5, proximal=0.1, step_factor=0.7
    ),
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


def dropping(rate: float) -> nn.Module:
    """A model that the faster paths do not take."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(rate), nn.Linear(17, CLASSES))


#: One of each path: the model, what differs in its task, and the route.
ROUTES: dict[str, tuple[str, dict[str, object], Route]] = {
    "serial": ("mlp", {"make_model": partial(dropping, 0.0)}, Route("loop")),
    "fast": ("two-layer cnn", {}, Route("loop")),
    "batched, dense": ("mlp", {}, Route("batched")),
    "batched": ("two-layer cnn", {}, Route("batched")),
    "batched, tokens": ("lstm", {}, Route("batched")),
}


def engine_of(route: str, work: LocalWork, device: str = "cpu", **changes: object) -> Engine:
    name, own, kept = ROUTES[route]
    task = task_of(name, **(own | changes))
    return Engine(task, work, 0, kept=kept._replace(device=device))


def drift_of(num_params: int, work: LocalWork) -> Params | None:
    """What a server would send beside the model: noise of about the size of an update."""
    if work.step_factor == 1:
        return None
    return (0.01 * np.random.default_rng(3).normal(size=num_params)).astype(np.float32)


def noise_of(rng: np.random.Generator, deviation: float) -> Noise | None:
    """Normal noise of a standard deviation, None for 0."""
    return (
        (lambda d: (deviation * rng.standard_normal(d)).astype(np.float32))
        if deviation > 0
        else None
    )


def assert_near(result: LocalResult, twin: LocalResult, tolerance: float = 1e-5) -> None:
    """Equal within float32 rounding over some tens of steps."""
    scale = float(np.abs(twin.update_d).max())
    assert scale > 0
    np.testing.assert_allclose(result.update_d, twin.update_d, rtol=0, atol=tolerance * scale)
    assert result[1:5] == pytest.approx(twin[1:5], rel=10 * tolerance, abs=1e-9, nan_ok=True)


def twin_of(engine: Engine, work: LocalWork, client: int, round: int = 2) -> LocalResult:
    """The readable twin on the CPU, from the streams that the engine documents."""
    task = engine.task
    rows = engine.task.client_rows[client]
    x = torch.tensor(task.dataset.train_x[rows])
    if task.tokens:
        x = x.long()
    elif x.dtype == torch.uint8:
        x = x * task.input_scale
    y = torch.tensor(task.dataset.train_y[rows])
    batches = stream(0, "batches", 0 if work.fixed_order else round, client)
    noise_rng = stream(0, "noise", round, client) if work.fixed_order else batches
    noise = noise_of(
        noise_rng, 0.0 if task.gradient_noise_m is None else float(task.gradient_noise_m[client])
    )
    augment = task.augment
    rng = stream(0, "augment", round, client)
    vary = None if augment is None else lambda inputs: augment(inputs, rng)
    drift_d = drift_of(engine.num_params, work)
    model = task.make_model()
    start_d = engine.initial_params()
    how = work, batches, noise, drift_d, vary, losses_of(task.loss, y)
    return train_serial(model, task.loss, x, y, start_d, *how)
