"""Tasks of one's own that are right but unusual: every path trains them as the readable twin, or
leaves them to it.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import deltafl
from batch_tools import CLASSES, SIZES, WORKS, four_layers, task_of, twin_of
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.parallel.workers import one_thread
from deltafl.simulation.training.compatibility import vectorized_incompatibility
from deltafl.simulation.training.route import Route
from deltafl.tasks import Task, check_task, cross_entropy, mlp, next_token_lstm, squared_error


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    with one_thread():
        yield


def assert_equal_to_twins(task: Task, at_once: bool = False) -> None:
    """Trained by the rule, or ``at_once`` where that is possible."""
    route = None
    if at_once and vectorized_incompatibility(task.make_model(), task) is None:
        route = Route("batched")
    made = Engine(task, WORKS["epochs"], 0, kept=route)
    trained = made.train(made.initial_params(), 2, np.arange(task.num_clients))
    for client, update_d in enumerate(trained.update_nd):
        twin = twin_of(made, WORKS["epochs"], client)
        np.testing.assert_allclose(
            update_d, twin.update_d, rtol=0, atol=1e-5 * np.abs(twin.update_d).max()
        )
        assert trained.reports.loss_n[client] == pytest.approx(twin.loss, rel=1e-5)


def tripled(part: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return 3 * output


def hooked(make: Callable[[], nn.Module], place: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model: nn.Module = make()
        model.get_submodule(place).register_forward_hook(tripled)
        return model

    return made


HOOKED = {
    "linear": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "1")),
    "activation": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "2")),
    "whole chain": ("mlp", hooked(lambda: mlp(17, [9], CLASSES), "")),
    "head of a text model": ("lstm", hooked(lambda: next_token_lstm(CLASSES, 3, 6), "head")),
    "convolution": ("four-layer cnn", hooked(four_layers, "0")),
    "whole cnn": ("four-layer cnn", hooked(four_layers, "")),
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_trained_with(name: str, at_once: bool) -> None:
    base, make = HOOKED[name]
    assert_equal_to_twins(task_of(base, make_model=make), at_once)


def test_a_layer_called_in_another_way_is_trained_so() -> None:
    def make() -> nn.Module:
        model: nn.Module = mlp(17, [9], CLASSES)
        layer = model.get_submodule("1")
        layer.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        layer.register_forward_pre_hook(lambda part, inputs: (inputs[0] * part.scale,))
        return model

    assert_equal_to_twins(task_of("mlp", make_model=make))


def flat(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(17, outputs))


def with_targets(y: npt.NDArray[Any], **changes: object) -> Task:
    base = task_of("mlp", metric="loss", **changes)
    return replace(base, dataset=replace(base.dataset, train_y=y, test_y=y[:50], num_classes=0))


NUMBERS = np.random.default_rng(1).normal(size=(sum(SIZES), 2)).astype(np.float32)
LABELS = task_of("mlp").dataset.train_y
IS_LEFT_OUT = np.isin(
    np.arange(len(LABELS)), task_of("mlp").client_rows[1][:3]
)  # of 40: no minibatch is without a label
UNUSUAL = {
    "one number in a column": with_targets(NUMBERS[:, :1], loss=squared_error, make_model=flat(1)),
    "shares of classes": with_targets(
        np.exp(NUMBERS), loss=functional.cross_entropy, make_model=flat(2)
    ),
    "labels left out": with_targets(np.where(IS_LEFT_OUT, -100, LABELS), loss=cross_entropy),
    "labels of whole texts": with_targets(
        np.stack([LABELS] * 2, axis=1),
        loss=cross_entropy,
        make_model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(17, 2 * CLASSES), nn.Unflatten(1, (CLASSES, 2))
        ),
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_targets_of_any_form_are_trained_one_client_after_the_other(name: str) -> None:
    check_task(UNUSUAL[name], name, 0)
    assert Engine(UNUSUAL[name], WORKS["epochs"], 0).route.path == "loop"
    reason = vectorized_incompatibility(UNUSUAL[name].make_model(), UNUSUAL[name])
    # Of other targets the loss of a single example is not known.
    assert (reason is None) == (name == "labels of whole texts")
    assert_equal_to_twins(UNUSUAL[name])
    assert_equal_to_twins(UNUSUAL[name], at_once=True)


def test_several_labels_an_example_are_counted() -> None:
    task = with_targets(
        np.stack([LABELS, LABELS], axis=1), loss=lambda output, y: (output[:, 0] - y[:, 0]).mean()
    )
    task = replace(task, dataset=replace(task.dataset, num_classes=CLASSES))
    check_task(task, "own", 0)
    np.testing.assert_array_equal(task.shares, task_of("mlp").shares)


def test_rows_of_clients_may_be_tuples_or_bytes() -> None:
    task = task_of("mlp")
    first, *others = task.client_rows
    rows: Any = [first.astype(np.uint8), *(tuple(rows.tolist()) for rows in others)]
    tuples = replace(task, client_rows=rows)
    check_task(tuples, "own", 0)
    for own, usual in zip(tuples.population("data"), task.population("data"), strict=True):
        np.testing.assert_array_equal(own, usual)
    one, two = (Engine(each, WORKS["epochs"], 0) for each in (tuples, task))
    update_nd = one.train(one.initial_params(), 0, np.arange(6)).update_nd
    np.testing.assert_array_equal(
        update_nd, two.train(two.initial_params(), 0, np.arange(6)).update_nd
    )


def test_squared_errors_of_two_shapes_are_refused() -> None:
    task = with_targets(NUMBERS[:, 0], loss=squared_error, make_model=flat(1))
    with pytest.raises(
        DeltaflError,
        match=r"outputs of shape \(2, 1\) and targets .* end the model with squeeze\(-1\)",
    ):
        check_task(task, "own", 0)


def test_a_model_that_cannot_be_copied_is_reported() -> None:
    def make() -> nn.Module:
        model: nn.Module = mlp(17, [9], CLASSES)
        model.lock = threading.Lock()  # type: ignore[assignment]
        return model

    with pytest.raises(DeltaflError, match=r"^own: the model cannot be copied, as"):
        check_task(task_of("mlp", make_model=make), "own", 0)


def old_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(17, CLASSES))


def pruned() -> Any:
    # The mask goes by the first weights: the same in every copy.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        smallest: Any = prune.l1_unstructured
        return smallest(nn.Linear(17, CLASSES), "weight", 0.5)


#: Layers whose weight is computed in each pass: a part of a graph.
COMPUTED = {
    "weight_norm of old": old_norm,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(17, CLASSES)),
    "pruned": pruned,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_trained_and_rebuilt(name: str) -> None:
    task = task_of("mlp", make_model=lambda: nn.Sequential(nn.Flatten(), COMPUTED[name]()))
    check_task(task, "own", 0)
    assert_equal_to_twins(replace(task, name="own"))
    model = COMPUTED[name]()
    again = deltafl.unflatten(deltafl.flatten(model) + 1, model)
    np.testing.assert_allclose(deltafl.flatten(again), deltafl.flatten(model) + 1, rtol=1e-6)


class Own(nn.Module):
    """A linear layer, and something beside it."""

    def __init__(self, beside: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(17, CLASSES)
        if beside is moves:
            self.register_buffer("moved", torch.zeros(CLASSES), persistent=False)
        self.seen = 0
        self.last: torch.Tensor | None = None
        self._beside = beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self._beside(self, x.flatten(1)))


def counts(model: Any, x: torch.Tensor) -> Any:
    model.seen += int(model.training)
    return model.layer(x) * (1 + model.seen)


def recalls(model: Any, x: torch.Tensor) -> Any:
    output: torch.Tensor = model.layer(x)
    if model.last is not None:
        output = output + model.last
    model.last = output.detach().mean(dim=0)
    return output


def moves(model: Any, x: torch.Tensor) -> Any:
    model.moved += x.detach().mean()
    return model.layer(x) + model.moved.square() * torch.arange(CLASSES)


def scales_inputs(model: Any, x: torch.Tensor) -> Any:
    return model.layer(x.mul_(1.5))


def drops_always(model: Any, x: torch.Tensor) -> Any:
    return model.layer(functional.dropout(x, 0.5))


def draws_from_numpy(model: Any, x: torch.Tensor) -> Any:
    return model.layer(x) * np.random.uniform(0.5, 2)  # noqa: NPY002


def draws_from_python(model: Any, x: torch.Tensor) -> Any:
    return model.layer(x) * random.uniform(0.5, 2)


#: What a forward pass may do besides.
BESIDE = (
    counts, recalls, moves, scales_inputs, drops_always, draws_from_numpy, draws_from_python
)  # fmt: skip


def bits_of(made: Engine, order: list[int]) -> list[bytes]:
    """Of trained clients, by their number, and of an evaluation after them."""
    start_d = made.initial_params()
    update_m = {one: made.train(start_d, 1, np.array([one])).update_nd for one in order}
    judged = made.evaluate(start_d + update_m[0][0])
    return [*(update_m[one].tobytes() for one in sorted(order)), repr(judged).encode()]


@pytest.mark.parametrize("beside", BESIDE)
def test_clients_and_evaluations_leave_nothing_to_the_next(beside: Any) -> None:
    task = task_of("mlp", make_model=lambda: Own(beside))
    data = task.dataset
    x, test_x = (part.astype(np.float32) / 255 for part in (data.train_x, data.test_x))
    task = replace(task, dataset=replace(data, train_x=x, test_x=test_x))
    check_task(task, "own", 0)
    held = task.dataset.test_x.copy()
    made = Engine(task, WORKS["epochs"], 0)
    first = bits_of(made, [0, 1, 2])
    assert bits_of(made, [2, 0, 1]) == first
    assert bits_of(Engine(task, WORKS["epochs"], 0), [1, 2, 0]) == first
    np.testing.assert_array_equal(task.dataset.test_x, held)


@pytest.mark.parametrize(
    ("in_place", "apart"),
    [
        (lambda o, y: cross_entropy(o, y.fill_(0)), lambda o, y: cross_entropy(o, 0 * y)),
        (lambda o, y: cross_entropy(o.mul_(-2), y), lambda o, y: cross_entropy(-2 * o, y)),
    ],
)
def test_metrics_are_of_what_the_loss_was_given_not_of_what_it_leaves(
    in_place: Any, apart: Any
) -> None:
    judged = []
    for loss in (in_place, apart):
        made = Engine(task_of("mlp", loss=loss, metric="accuracy"), WORKS["epochs"], 0)
        start_d = made.initial_params()
        judged.append((made.evaluate(start_d), made.train(start_d, 0, np.array([0])).update_nd))
    assert repr(judged[0][0]) == repr(judged[1][0])
    np.testing.assert_allclose(judged[0][1], judged[1][1], rtol=1e-5, atol=1e-7)


def test_augmentations_losses_and_models_may_draw_from_any_generator() -> None:
    def noisy(output: torch.Tensor, y: torch.Tensor) -> Any:
        return cross_entropy(output * (1 + random.random()), y)

    def augment(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return x + float(np.random.normal())  # noqa: NPY002

    def make() -> Any:
        model = mlp(17, [9], CLASSES)
        with torch.no_grad():
            next(model.parameters()).mul_(np.random.uniform())  # noqa: NPY002
        return model

    task = task_of("mlp", make_model=make, loss=noisy, augment=augment)
    np.random.seed(1)  # noqa: NPY002
    check_task(task, "own", 0)
    first = bits_of(Engine(task, WORKS["epochs"], 0), [0, 1])
    after = np.random.uniform()  # noqa: NPY002
    assert bits_of(Engine(task, WORKS["epochs"], 0), [1, 0]) == first
    np.random.seed(1)  # noqa: NPY002
    assert np.random.uniform() == after  # noqa: NPY002


def test_a_client_varies_its_inputs_alone_in_any_cohort() -> None:
    """Whatever generator an augmentation draws from, in some calls alone."""

    def augment(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        if rng.random() < 0.5:
            return x
        return x + torch.rand(1) + np.random.uniform() + random.random()  # noqa: NPY002

    task = task_of("mlp", augment=augment)
    made = Engine(task, WORKS["epochs"], 0, kept=Route("batched"))
    start_d = made.initial_params()
    together = made.train(start_d, 1, np.arange(3)).update_nd
    np.testing.assert_allclose(made.train(start_d, 1, np.array([2, 0])).update_nd, together[[2, 0]])


def test_what_draws_from_elsewhere_is_refused_before_anything_is_played() -> None:
    def make() -> Any:
        model = mlp(17, [9], CLASSES)
        with torch.no_grad():
            next(model.parameters()).mul_(np.random.default_rng().uniform())
        return model

    with pytest.raises(DeltaflError, match="one seed gives the losses"):
        check_task(task_of("mlp", make_model=make), "own", 0)


def test_a_model_that_remembers_in_its_class_is_refused() -> None:
    """What one client's training leaves there the next one would find."""

    class Counting(torch.nn.Linear):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                Counting.passes += 1
            return super().forward(x.flatten(1)) / (Counting.passes or 1)

    class Warming(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            return output if self.training else output * (Counting.passes or 1)

    for kind in (Counting, Warming):
        with pytest.raises(DeltaflError, match="remember nothing outside of the model"):
            check_task(task_of("mlp", make_model=partial(kind, 17, CLASSES)), "own", 0)


@pytest.mark.parametrize(
    "draw",
    [np.random.default_rng(0).random, partial(torch.rand, 1, generator=torch.Generator())],
)
@pytest.mark.parametrize("often", [1.0, 0.5])
def test_an_augmentation_that_draws_from_its_own_generator_is_refused(
    draw: Callable[[], Any], often: float
) -> None:
    def augment(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return x + float(draw()) if rng.random() < often else x

    with pytest.raises(DeltaflError, match="let it draw from rng"):
        check_task(task_of("mlp", augment=augment), "own", 0)


@pytest.mark.parametrize("often", [1.0, 0.5])
def test_a_metric_that_draws_from_its_own_generator_is_refused(often: float) -> None:
    rng = np.random.default_rng(0)

    def bootstrap(output: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
        some: Any = slice(None)
        if rng.random() < often:
            some = rng.integers(0, len(y), len(y))
        return float(np.abs(output.max(axis=1) - y)[some].mean())

    with pytest.raises(DeltaflError, match=r"bootstrap is .* and then .* of the same outputs"):
        check_task(task_of("mlp", metric=bootstrap), "own", 0)


#: Generators, and what draws a number from each.
GENERATORS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "torch": (torch.Generator, lambda rng: float(torch.rand(1, generator=rng))),
    "NumPy": (partial(np.random.default_rng, 0), lambda rng: float(rng.random())),
    "older NumPy": (np.random.RandomState, lambda rng: float(rng.rand())),
    "Python": (random.Random, lambda rng: float(rng.random())),
}


class Holds(torch.nn.Module):
    """Has a generator, ``deep`` in something else or not; draws when it is made, or in training."""

    def __init__(self, name: str, deep: bool, in_training: bool) -> None:
        super().__init__()
        make, draw = GENERATORS[name]
        rng = make()
        self.layers = mlp(17, [9], CLASSES)
        self.layers.held = [partial(draw, rng)] if deep else rng
        self.draw = (lambda held: held[0]()) if deep else draw
        self.factor = 1 + draw(rng)
        self.in_training = in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x) * self.factor
        if self.training and self.in_training:
            return output * self.draw(self.layers.held)
        return output


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_model_that_draws_from_its_own_generator_is_refused(name: str, deep: bool) -> None:
    """Of it each client would have a copy, and the same numbers in every round."""
    task = task_of("mlp", make_model=partial(Holds, name, deep, True))
    with pytest.raises(DeltaflError, match="from a generator that it holds"):
        check_task(task, "own", 0)


def test_a_model_may_hold_a_generator_by_which_it_was_made() -> None:
    assert_equal_to_twins(task_of("mlp", make_model=partial(Holds, "NumPy", False, False)))


class Smooth(torch.nn.Module):
    """Its outputs are damped where they are steep, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(17, [9], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return cast(torch.Tensor, self.layers(x))
        x = x.requires_grad_()
        output: torch.Tensor = self.layers(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output / (1 + slope.square().sum(dim=1, keepdim=True))


def test_a_model_may_take_gradients_in_training() -> None:
    task = task_of("mlp", make_model=Smooth)
    check_task(task, "own", 0)
    made = Engine(task, WORKS["epochs"], 0)
    first = bits_of(made, [0, 1, 2])
    assert bits_of(made, [2, 0, 1]) == first
    made.evaluate(made.initial_params())


def test_a_model_that_takes_gradients_in_an_evaluation_is_refused_before_a_run() -> None:
    class Always(Smooth):
        def train(self, mode: bool = True) -> "Always":
            super().train(mode)
            self.training = True
            return self

    with pytest.raises(DeltaflError, match="does not require grad"):
        check_task(task_of("mlp", make_model=Always), "own", 0)


@pytest.mark.parametrize("work", ["epochs", "whole data"])
def test_sparse_gradients_are_gradients(work: str) -> None:
    def made(sparse: bool) -> Task:
        layers = (nn.EmbeddingBag(7, 4, sparse=sparse), nn.Linear(4, CLASSES))
        return task_of("lstm", make_model=lambda: nn.Sequential(*layers))

    trained = []
    for sparse in (False, True):
        engine = Engine(made(sparse), WORKS[work], 0)
        trained.append(engine.train(np.ones(7 * 4 + 5 * CLASSES, np.float32), 0, np.arange(2)))
    np.testing.assert_array_equal(trained[0].update_nd, trained[1].update_nd)
    assert np.any(trained[0].update_nd != 0)


class Beside(nn.Module):
    """Buffers that nobody can write into, and a state that is no array."""

    def __init__(self, layout: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(17, CLASSES)
        self.register_buffer("wide", torch.ones(1).expand(CLASSES))
        if layout:
            self.register_buffer("graph", torch.eye(17).to_sparse(), persistent=layout == "kept")

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(x.flatten(1)) * self.wide)


def test_buffers_of_one_number_and_states_that_are_no_arrays_stay() -> None:
    task = task_of("mlp", make_model=lambda: Beside("left out"))
    check_task(task, "own", 0)
    assert_equal_to_twins(task)
    again = deltafl.unflatten(np.ones(18 * CLASSES), Beside())
    assert deltafl.flatten(again).sum() == 18 * CLASSES
    with pytest.raises(DeltaflError, match=r"'graph' .* \(layout torch.sparse_coo\).* persistent"):
        check_task(task_of("mlp", make_model=lambda: Beside("kept")), "own", 0)


def test_outputs_in_bfloat16_are_judged() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(17, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x.flatten(1)).bfloat16())

    task = task_of("mlp", make_model=Narrow, metric="balanced_accuracy")
    check_task(task, "own", 0)
    made = Engine(task, WORKS["epochs"], 0)
    assert 0 <= made.evaluate(made.initial_params()).others["balanced_accuracy"] <= 1
