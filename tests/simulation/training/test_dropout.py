"""Dropout in a cohort: each client's masks are its own, whoever trains beside it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from batch_tools import CLASSES, DEVICES, SIZES, PlayedCapture, results_of, task_of
from deltafl.simulation.engine import Engine
from deltafl.simulation.training import batched
from deltafl.simulation.training.compatibility import vectorized_incompatibility
from deltafl.simulation.training.dropout import Masks, masked_layers, with_masks
from deltafl.simulation.training.route import Computation, Route, choose_route
from deltafl.simulation.training.serial import LocalWork, minibatches
from deltafl.streams import stream
from deltafl.tasks.base import Task
from deltafl.tasks.losses import cross_entropy

WORK = LocalWork(lr=0.05, epochs=2, batch_size=8, momentum=0.3)
BATCHED = Route("batched")


class Net(nn.Module):
    """Layers of both kinds, called in another order than they were made in."""

    def __init__(self, late: nn.Module | None = None, early: nn.Module | None = None) -> None:
        super().__init__()
        self.late = late or nn.Dropout(0.5)
        self.early = early or nn.Dropout2d(0.25)
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 49, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.early(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2))
        return torch.as_tensor(self.head(self.late(h.flatten(1))))


class Drawn(nn.Module):
    """Draws the mask of a whole padded minibatch, and takes that of its examples."""

    def __init__(self, p: float, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.p = p
        self.shape = shape
        self.width = width
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.empty(self.width, *self.shape).bernoulli_(1 - self.p, generator=self.generator)
        return x * kept[: len(x)] / (1 - self.p)


def net_task() -> Task:
    return task_of(make_model=Net)


def test_masks_are_those_of_the_clients_own_generator() -> None:
    # A model with one such layer: of several each step draws in the order of the model.
    task = task_of(make_model=lambda: Net(early=nn.Identity()))
    engine = Engine(task, WORK, 5, kept=BATCHED)
    params_d = engine.initial_params()
    found = results_of(engine.train(params_d, 2, np.arange(len(SIZES)), squares=True))
    for client, result in enumerate(found):
        drawn = Drawn(0.5, (4 * 49,), 8)
        drawn.generator.manual_seed(int(stream(5, "dropout", 2, client).integers(2**63)))
        model = Net(late=drawn, early=nn.Identity())
        nn.utils.vector_to_parameters(torch.tensor(params_d), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), WORK.lr, WORK.momentum)
        rows = task.client_rows[client]
        batches = minibatches(len(rows), WORK, stream(5, "batches", 2, client))
        losses = []
        for batch in batches:
            x = torch.tensor(task.dataset.train_x[rows[batch]]).float() * task.input_scale
            y = torch.tensor(task.dataset.train_y[rows[batch]])
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        update_d = nn.utils.parameters_to_vector(model.parameters()).detach().numpy() - params_d
        np.testing.assert_allclose(result.update_d, update_d, rtol=0, atol=1e-5)
        assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
        assert result.num_steps == len(batches)


@pytest.mark.parametrize("device", DEVICES)
def test_a_clients_masks_hang_on_seed_round_and_client_alone(device: str) -> None:
    route = Route("batched", device)
    engine = Engine(net_task(), WORK, 0, kept=route)
    params_d = engine.initial_params()
    whole = engine.train(params_d, 3, np.arange(6)).update_nd
    part = engine.train(params_d, 3, np.array([4, 1])).update_nd
    np.testing.assert_allclose(part, whole[[4, 1]], rtol=0, atol=1e-5)
    for other in (
        engine.train(params_d, 4, np.arange(6)).update_nd,
        Engine(net_task(), WORK, 1, kept=route).train(params_d, 3, np.arange(6)).update_nd,
    ):
        assert np.linalg.norm(other - whole) > 0.1 * np.linalg.norm(whole)


def test_masks_reach_steps_that_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "CudaCapture", PlayedCapture)
    replayed = Engine(net_task(), WORK, 0, kept=Route("batched", steps="graph"))
    params_d = replayed.initial_params()
    own = [replayed.train(params_d, round, np.arange(6)).update_nd for round in (1, 2, 1)]
    np.testing.assert_array_equal(own[0], own[2])  # the first round has captured the step
    again = Engine(net_task(), WORK, 0, kept=Route("batched", steps="graph"))
    np.testing.assert_array_equal(again.train(params_d, 2, np.arange(6)).update_nd, own[1])
    # The CPU's own step has its rate as a number, which may round otherwise.
    plain = Engine(net_task(), WORK, 0, kept=BATCHED)
    for round, update_nd in zip((1, 2), own, strict=False):
        twin = plain.train(params_d, round, np.arange(6)).update_nd
        np.testing.assert_allclose(update_nd, twin, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", [DEVICES[1]])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_on_a_gpu_masks_reach_the_graphs(precision: str, device: str) -> None:
    chosen = Engine(net_task(), WORK, 0, how=Computation(device, precision))
    assert (chosen.route.path, chosen.route.steps) == ("batched", "graph")
    eager = Engine(net_task(), WORK, 0, kept=chosen.route._replace(steps="eager"))
    params_d = chosen.initial_params()
    for _ in range(3):
        own, twin = (e.train(params_d, 1, np.arange(6)).update_nd for e in (chosen, eager))
        np.testing.assert_array_equal(own, twin)


def test_models_with_dropout_are_batches_in_bfloat16_and_loops_in_float32_on_a_cpu() -> None:
    task = net_task()
    routes = [
        choose_route(task.make_model(), task, WORK, Computation("cpu", precision))
        for precision in ("bfloat16", "float32")
    ]
    assert [route.path for route in routes] == ["batched", "loop"]


class Twice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.early(x))


class Functional(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.1, self.training))


class Shared(Net):
    """All examples of a minibatch lose the same places."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Identity())
        self.position = nn.Parameter(torch.ones(1, 1, 16, 16))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.drop(self.position))


@pytest.mark.parametrize(
    "make", [Twice, Functional, Shared, lambda: Net(late=nn.AlphaDropout(0.2))]
)
def test_what_else_draws_stays_a_loop(make: Callable[[], nn.Module]) -> None:
    task = task_of(make_model=make)
    reason = vectorized_incompatibility(task.make_model(), task)
    assert reason is not None
    assert "random" in reason


def test_a_layer_in_evaluation_drops_nothing() -> None:
    model = Net()
    model.late.eval()
    masked = with_masks(model, torch.zeros(1, 1, 16, 16))
    assert [layer.p for layer in masked_layers(masked)] == [0.25]


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_masks_keep_the_mean(p: float) -> None:
    model = Net(late=nn.Dropout(p), early=nn.Dropout2d(p))
    layers = masked_layers(with_masks(model, torch.zeros(1, 1, 16, 16)))
    masks = Masks(layers, [3, 4, 5], 40, torch.device("cpu"))
    late, early = masks.draw(3)
    assert late.shape == (3, 40, 196)
    assert early.shape == (3, 40, 4, 1, 1)  # a channel is kept or dropped as a whole
    share = float(late.double().mean())
    assert abs(share - (1 - p)) <= 4 * (p * (1 - p) / late.numel()) ** 0.5
    again = masks.draw(2)[0]
    assert again.shape[0] == 2
    assert p == 1.0 or not torch.equal(again, late[:2])
    layers[0].mask = late[0]
    kept = layers[0](torch.ones(40, 196))
    assert kept.unique().tolist() == ([0.0] if p == 1.0 else [0.0, pytest.approx(1 / (1 - p))])


def test_a_layer_that_never_drops_needs_no_mask() -> None:
    model = Net(late=nn.Dropout(0.0), early=nn.Identity())
    assert with_masks(model, torch.zeros(1, 1, 16, 16)) is model


def test_masks_are_used_in_bfloat16() -> None:
    engine = Engine(net_task(), WORK, 0, how=Computation(precision="bfloat16"))
    exact = Engine(net_task(), WORK, 0, kept=BATCHED)
    params_d = engine.initial_params()
    found, twin = (e.train(params_d, 3, np.arange(6)).update_nd for e in (engine, exact))
    difference = np.linalg.norm(found - twin) / np.linalg.norm(twin)
    assert 1e-4 < difference < 0.1  # other masks would make it larger


class Attention(nn.Module):
    """Drops weights of its attention itself, without a layer that could take a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.squeeze(1)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        return torch.as_tensor(self.head(mixed.mean(dim=1)))


@pytest.mark.parametrize("device", DEVICES)
def test_attention_drops_for_each_client_what_its_own_generator_says(device: str) -> None:
    """Of clients with the same examples each has its own update, whoever trains beside it."""
    task = task_of(make_model=Attention)
    task = replace(task, client_rows=[task.client_rows[1]] * 4)
    work = LocalWork(lr=0.5, steps=1, batch_size=None)
    engine = Engine(task, work, 0, how=Computation(device))
    params_d = engine.initial_params()
    whole = engine.train(params_d, 3, np.arange(4)).update_nd
    size = np.abs(whole).max()
    for client in range(4):
        alone = engine.train(params_d, 3, np.array([client])).update_nd[0]
        np.testing.assert_allclose(alone, whole[client], rtol=0, atol=1e-5 * size)
        for other in range(client):
            assert np.abs(whole[client] - whole[other]).max() > 1e-2 * size
