"""Tasks of one's own that are right but unusual: every path trains them as the readable twin, or
leaves them to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional

from batch_tools import CLASSES, SIZES, WORKS, four_layers, task_of, twin_of
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.route import Route, vectorized_incompatibility
from deltafl.simulation.workers import one_thread
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
    assert vectorized_incompatibility(UNUSUAL[name].make_model(), UNUSUAL[name]) is not None
    assert_equal_to_twins(UNUSUAL[name])


def test_several_labels_an_example_are_counted() -> None:
    task = with_targets(
        np.stack([LABELS, LABELS], axis=1), loss=lambda output, y: (output[:, 0] - y[:, 0]).mean()
    )
    task = replace(task, dataset=replace(task.dataset, num_classes=CLASSES))
    check_task(task, "own", 0)
    np.testing.assert_array_equal(task.label_shares(), task_of("mlp").label_shares())


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
        with pytest.warns(FutureWarning, match="weight_norm"):
            return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(17, CLASSES)))

    with pytest.raises(DeltaflError, match=r"^own: the model cannot be copied, as"):
        check_task(task_of("mlp", make_model=make), "own", 0)
    parametrized = nn.utils.parametrizations.weight_norm
    task = task_of(
        "mlp", make_model=lambda: nn.Sequential(nn.Flatten(), parametrized(nn.Linear(17, CLASSES)))
    )
    check_task(task, "own", 0)
    assert_equal_to_twins(replace(task, name="own"))
