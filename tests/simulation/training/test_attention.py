"""Attention in a cohort: fused kernels, for which torch.vmap has no rule, are written out."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deltafl.simulation.engine import Engine
from deltafl.simulation.training.compatibility import vectorized_incompatibility
from deltafl.simulation.training.route import Computation, Route
from deltafl.simulation.training.serial import LocalWork
from deltafl.simulation.training.sizes import attention_numbers
from deltafl.tasks import Dataset, Task, cross_entropy, mlp

TOKENS = 11
LENGTH = 6
WIDTH = 8
HEADS = 2
RNG = np.random.default_rng(2)
X = RNG.integers(0, TOKENS, (90, LENGTH + 1))
WORK = LocalWork(lr=0.3, epochs=1, batch_size=7)


class Block(nn.Module):
    """Of a small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 3 * WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.enter(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.as_tensor(self.leave(mixed.transpose(1, 2).flatten(2)))


class Attends(nn.Module):
    """Which token follows: after the whole text, or at each of its ``places``."""

    def __init__(self, middle: Callable[[], nn.Module], places: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.middle = middle()
        self.head = nn.Linear(WIDTH, TOKENS)
        self.places = places

    def forward(self, token: Tensor) -> Tensor:
        x = self.embedding(token)
        if isinstance(self.middle, nn.MultiheadAttention):
            x = self.middle(x, x, x, need_weights=False)[0]
        else:
            x = self.middle(x)
        logits: Tensor = self.head(x)
        return logits.transpose(1, 2) if self.places else logits[:, -1]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MIDDLES = {
    "a GPT by hand": lambda: nn.Sequential(Block(), Block()),
    "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    "TransformerEncoder": encoder,
}


def task_of(name: str, places: bool) -> Task:
    y = X[:, 1:] if places else X[:, -1]
    data = Dataset("texts", X[:60, :-1], y[:60], X[60:, :-1], y[60:], TOKENS)
    rows = np.split(np.arange(60), [9, 23, 29, 40])
    make = partial(Attends, MIDDLES[name], places)
    return Task("texts", data, rows, make, cross_entropy, tokens=True)


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("name", MIDDLES)
def test_attention_is_trained_at_once_as_one_after_the_other(name: str, places: bool) -> None:
    task = task_of(name, places)
    assert vectorized_incompatibility(task.make_model(), task) is None
    found = []
    for path in ("loop", "batched"):
        engine = Engine(task, WORK, 0, kept=Route(path))
        found.append(engine.train(engine.initial_params(), 0, np.arange(5), squares=True))
    loop, batched = found
    size = np.abs(loop.update_nd).max()
    np.testing.assert_allclose(batched.update_nd, loop.update_nd, rtol=0, atol=1e-5 * size)
    for one, other in zip(loop.reports, batched.reports, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4)
    assert np.isfinite(loop.reports.square_loss_n).all()


def test_a_cpu_trains_attention_one_after_the_other_unless_in_bfloat16() -> None:
    """As before: bits of a batch depend on the cohort."""
    task = task_of("a GPT by hand", True)
    assert Engine(task, WORK, 0).route == Route()
    assert Engine(task, WORK, 0, how=Computation(precision="bfloat16")).route.path == "batched"


@pytest.mark.parametrize("name", MIDDLES)
def test_the_numbers_of_attention_are_counted(name: str) -> None:
    task = task_of(name, True)
    layers = 1 if name == "MultiheadAttention" else 2
    numbers = layers * 2 * HEADS * LENGTH * LENGTH
    assert attention_numbers(task.make_model(), task) == numbers


def test_other_models_have_none() -> None:
    x = X.astype(np.float32)
    data = Dataset("d", x, X[:, 0], x, X[:, 0], TOKENS)
    make = partial(mlp, LENGTH + 1, [4], TOKENS)
    task = Task("d", data, [np.arange(90)], make, cross_entropy)
    assert attention_numbers(make(), task) == 0
