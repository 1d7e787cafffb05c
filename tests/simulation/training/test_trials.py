"""What a model does beside its arithmetic is found before it is trained, on examples of the task: a
memory, gradients that only ``backward`` has, minibatches that are mixed.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltafl.errors import DeltaflError
from deltafl.model.parts import split
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.compatibility import incompatibility, vectorized_incompatibility
from deltafl.simulation.training.dense import DenseChain
from deltafl.simulation.training.fast import choose_forward
from deltafl.simulation.training.route import Computation, Route
from deltafl.simulation.training.serial import LocalWork, minibatches
from deltafl.simulation.training.sizes import numbers_per_example
from deltafl.streams import stream
from deltafl.tasks import Dataset, Task, check_task, cross_entropy, squared_error

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 6)).astype(np.float32)
Y = np.argmax(X[:, :3], axis=1)
DATA = Dataset("made up", X[:60], Y[:60], X[60:], Y[60:], 3)
ROWS = np.split(np.arange(60), [9, 23, 29, 40])
WORK = LocalWork(lr=0.1, epochs=1, batch_size=4)


def task_of(make: Callable[[], nn.Module], loss: Any = cross_entropy, data: Dataset = DATA) -> Task:
    return Task("made up", data, ROWS, make, loss)


class Base(nn.Module):
    """A linear model, of which others do something more."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


class RunningMean(Base):
    """Its mean stays where it is on examples of zeros."""

    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return super().forward(x - self.mean)


class Teacher(Base):
    """Beside a frozen teacher, which follows once the student has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for mine, its in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.data.lerp_(its.data, 0.5)
        output: Tensor = super().forward(x) + self.teacher(x)
        return output


class Counting(Base):
    """Counts passes with gradients."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.count += 1
        return super().forward(x) * (1 + self.count)


class Slow(RunningMean):
    """Its outputs do not show what it remembers of a few passes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9999 * self.mean + 1e-4 * x.mean().item()
        return Base.forward(self, x - 50 * self.mean)


@pytest.mark.parametrize("make", [RunningMean, Slow, Teacher, Counting])
def test_no_client_finds_what_another_left_in_the_model(make: Callable[[], nn.Module]) -> None:
    task = task_of(make)
    client = np.array([0])
    engine = Engine(task, WORK, 0)
    first = engine.train(engine.initial_params(), 0, client).update_nd
    engine = Engine(task, WORK, 0)
    engine.train(engine.initial_params(), 0, np.array([1]))
    then = engine.train(engine.initial_params(), 0, client).update_nd
    assert np.array_equal(first, then)


class Checkpointed(nn.Module):
    """A reentrant checkpoint has gradients in ``backward`` alone."""

    def __init__(self, kind: bool) -> None:
        super().__init__()
        self.below = nn.Linear(6, 6)
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        def run(z: Tensor) -> Tensor:
            return torch.tanh(self.body(z))

        h = self.below(x)
        hidden = checkpoint(run, h, use_reentrant=True) if self.kind else run(h)
        output: Tensor = self.head(hidden)
        return output


def test_reentrant_checkpoints_are_trained() -> None:
    updates = []
    for kind in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = Engine(task_of(partial(Checkpointed, kind)), WORK, 0)
            updates.append(engine.train(engine.initial_params(), 0, np.arange(2)).update_nd)
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-4, atol=1e-6)


class Centred(Base):
    """Mixes the examples of a minibatch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Damped(Base):
    """A hook on gradients, of which no other form knows."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if output.requires_grad:
            hooked: Any = output
            hooked.register_hook(lambda gradient: 0.5 * gradient)
        return output


class Judging(Base):
    """Another function in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self.training else (10 * output).softmax(-1)


class Particular(Base):
    """Takes parameters alone for weights, and a batch has other tensors."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.head.weight, nn.Parameter):
            raise TypeError
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "fits"),
    [(Centred, False), (Damped, False), (Particular, False), (Judging, True), (Base, True)],
)
def test_a_batch_is_for_models_that_learn_the_same_in_it(
    make: Callable[[], nn.Module], fits: bool
) -> None:
    task = task_of(make)
    assert (vectorized_incompatibility(make(), task) is None) == fits
    if not fits:
        return
    updates = []
    for path in ("loop", "batched"):
        engine = Engine(task, WORK, 0, kept=Route(path))
        updates.append(engine.train(engine.initial_params(), 0, np.arange(5)).update_nd)
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-4, atol=1e-6)


def test_a_weighted_loss_does_not_hang_on_the_order_of_the_test_set() -> None:
    x = RNG.normal(size=(1260, 6)).astype(np.float32)
    y = (x[:, 0] > 0.8).astype(np.int64)
    weight = torch.tensor([1.0, 20.0])
    loss = nn.CrossEntropyLoss(weight=weight)
    order = 60 + np.argsort(y[60:], kind="stable")
    data = Dataset("sorted", x[:60], y[:60], x[order], y[order], 2)
    engine = Engine(task_of(lambda: nn.Linear(6, 2), loss, data), WORK, 0)
    params_d = engine.initial_params()
    matrix, shift = params_d[:12].reshape(2, 6), params_d[12:]
    output = torch.from_numpy(x[order] @ matrix.T + shift)
    expected = nn.functional.cross_entropy(output, torch.from_numpy(y[order]), weight).item()
    assert engine.evaluate(params_d).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_a_chain_may_begin_with_an_activation(activation: type[nn.Module]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), activation(), nn.Linear(6, 3))

    assert DenseChain.of(make()) is None
    engine = Engine(task_of(make), WORK, 0)
    assert np.abs(engine.train(engine.initial_params(), 0, np.arange(5)).update_nd).max() > 0


def test_a_chain_has_the_parameters_of_its_linear_layers_alone() -> None:
    def chain() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    assert DenseChain.of(chain()) is not None
    for place in ("", "0", "1", "2"):
        model = chain()
        model.get_submodule(place).register_parameter("more", nn.Parameter(torch.zeros(2)))
        assert DenseChain.of(model) is None
    model = chain()
    model[0].add_module("inside", nn.Identity())
    assert DenseChain.of(model) is None


class Strided(nn.Module):
    """Reads the memory of its inputs, whatever their layout."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x.as_strided((len(x), 4), (x.stride(0), 1)))
        return output


class Contiguous(Strided):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return super().forward(x)


class Standardised(Strided):
    def forward(self, x: Tensor) -> Tensor:
        if x.min() >= 0:
            raise ValueError
        return super().forward(x)


@pytest.mark.parametrize("make", [Strided, Contiguous, Standardised])
def test_a_layout_that_changes_the_result_is_not_chosen(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.from_numpy(RNG.normal(size=(3, 2, 4, 4)).astype(np.float32))
    assert torch.equal(choose_forward(model, x)(x), model(x))


def chain(norm: bool, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A chain whose state dict is not that of its own parameters and buffers."""
    middle = nn.BatchNorm1d(6) if norm else nn.ReLU()
    model: Any = nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    model._register_state_dict_hook(lambda module, state, prefix, local: change(state))
    return model


def swapped(state: dict[str, Any]) -> dict[str, Any]:
    """Names that other parameters of the same shape have."""
    other = {"0.weight": "x", "1.weight": "1.bias", "1.bias": "1.weight"}
    return {other.get(name, name): part for name, part in state.items()}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        swapped,
        lambda state: {f"inside.{name}": part for name, part in state.items()},
        lambda state: {name: part.clone() for name, part in state.items()},
    ],
)
def test_a_module_is_trained_whatever_the_names_of_its_state_dict(
    norm: bool, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    trained = []
    for each in (dict[str, Any], change):
        engine = Engine(task_of(partial(chain, norm, each)), WORK, 0)
        start_d = engine.initial_params()
        trained.append(engine.train(start_d, 0, np.arange(2)))
    plain, other = trained
    assert np.array_equal(plain.update_nd, other.update_nd)
    assert np.any(plain.update_nd != 0)


def test_a_state_dict_in_another_order_is_trained_one_after_the_other() -> None:
    def turned(state: dict[str, Any]) -> dict[str, Any]:
        return dict(reversed(state.items()))

    trained = []
    for each in (dict[str, Any], turned):
        task = task_of(partial(chain, False, each))
        engine = Engine(task, WORK, 0)
        made = engine.train(engine.initial_params(), 0, np.arange(2)).update_nd[0]
        names = engine.parts.trained
        trained.append(split(made, names))
    reason = incompatibility(chain(False, turned), torch.ones(2, 6))
    assert reason is not None and "another order" in reason
    assert [*trained[0]] == [*trained[1]][::-1]
    for name, part in trained[0].items():
        np.testing.assert_allclose(part, trained[1][name], rtol=1e-4, atol=1e-7)


def test_a_state_dict_of_strange_arrays_is_refused() -> None:
    def strange(state: dict[str, Any]) -> dict[str, Any]:
        return {f"x{name}": part.clone() for name, part in state.items()}

    with pytest.raises(DeltaflError, match=r"'x0.weight', which is none of its parameters"):
        Engine(task_of(partial(chain, False, strange)), WORK, 0)


def normed() -> nn.Sequential:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("count", [500, 501, 1001])
def test_no_example_is_judged_alone_where_the_minibatch_has_the_statistics(count: int) -> None:
    """Of 501 as 500 and 1 the last one had none."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    task = Task("made up", Dataset("d", x, y, x, y, 3), [np.arange(count)], normed, cross_entropy)
    engine = Engine(task, LocalWork(lr=0.1, epochs=1, batch_size=None), 0)
    params_d = engine.initial_params()
    model = normed()
    nn.utils.vector_to_parameters(torch.tensor(params_d), model.parameters())
    size = 500 if count == 500 else 499
    parts = zip(torch.split(torch.tensor(x), size), torch.split(torch.tensor(y), size), strict=True)
    with torch.no_grad():
        sums = [nn.functional.cross_entropy(model(a), b).item() * len(b) for a, b in parts]
    assert engine.evaluate(params_d).loss == pytest.approx(sum(sums) / count)
    assert engine.losses(params_d, np.arange(1))[0] == pytest.approx(sum(sums) / count)


@pytest.mark.parametrize("size", [2, 7, None])
def test_statistics_of_the_minibatch_alone_are_for_minibatches_of_two_or_more(
    size: int | None,
) -> None:
    """Of 9, 14, 6, 11 and 20 examples the last of a pass have at least two in sevens."""
    work = LocalWork(lr=0.1, epochs=1, batch_size=size)
    task = task_of(normed)
    check_task(task, "made up", 0)
    if size == 2:
        with pytest.raises(DeltaflError, match=r"have one example.*more than 1 value per channel"):
            Engine(task, work, 0)
        # Minibatches of nine end before the last one.
        Engine(task, LocalWork(lr=0.1, steps=3, batch_size=2), 0)
        return
    engine = Engine(task, work, 0)
    start_d = engine.initial_params()
    update_nd = engine.train(start_d, 0, np.arange(5)).update_nd
    for client, row_n in enumerate(ROWS):
        model = normed()
        nn.utils.vector_to_parameters(torch.tensor(start_d), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for place_b in minibatches(len(row_n), work, stream(0, "batches", 0, client)):
            rows = row_n[place_b]
            optimizer.zero_grad()
            output = model(torch.tensor(X[rows]))
            loss = nn.functional.cross_entropy(output, torch.tensor(Y[rows]))
            torch.autograd.backward(loss)
            optimizer.step()
        end_d = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        np.testing.assert_allclose(update_nd[client], end_d - start_d, rtol=0, atol=1e-6)
    nn.utils.vector_to_parameters(torch.tensor(start_d), model.parameters())
    output = model.eval()(torch.tensor(DATA.test_x)).argmax(1).numpy()
    assert engine.evaluate(start_d).accuracy == (output == DATA.test_y).mean()


def test_other_trials_do_not_ask_such_a_model_for_one_example() -> None:
    """A GPU, and bfloat16, ask for more than the usual path."""
    assert numbers_per_example(normed(), task_of(normed)) >= 8 + 8 + 8 + 3
    data = Dataset("numbers", X[:60], X[:60, 0], X[60:], X[60:, 0], 0)
    make: Any = lambda: nn.Sequential(normed()[:3], nn.Linear(8, 1), nn.Flatten(0))  # noqa: E731
    task = Task("numbers", data, ROWS, make, squared_error, metric="loss")
    work = LocalWork(lr=0.1, epochs=1, batch_size=7)
    with pytest.raises(DeltaflError, match="mixes the examples of a minibatch"):
        Engine(task, work, 0, how=Computation(precision="bfloat16"))
