"""A model whose output is no tensor is refused with a line that makes it one, and the line works."""

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.compatibility import vectorized_incompatibility
from deltafl.simulation.training.route import Route
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import Dataset, Task, check_task, cross_entropy

RNG = np.random.default_rng(6)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 60)
DATA = Dataset("made up", X[:40], Y[:40], X[40:], Y[40:], 3)
ROWS = np.split(np.arange(40), 4)


@dataclass
class Output:
    """As a language model returns it."""

    loss: Any
    logits: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """A dict with attributes, as Hugging Face has it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


Auxiliary = namedtuple("Auxiliary", ["logits", "aux"])

#: What a model makes of its logits.
KINDS: dict[str, Callable[[Tensor, bool], Any]] = {
    "a tensor": lambda z, training: z,
    "a tuple": lambda z, training: (z, torch.zeros(1)),
    "a dict": lambda z, training: {"hidden": z.exp(), "logits": z},
    "of segmentation": lambda z, training: {"aux": 2 * z, "out": z},
    "of other names": lambda z, training: {"ids": None, "scores": z, "more": 2 * z},
    "an object": lambda z, training: Output(None, z),
    "of Hugging Face": lambda z, training: ModelOutput(loss=None, logits=z),
    "in training alone": lambda z, training: Auxiliary(z, 2 * z) if training else z,
}


class Head(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return KINDS[self.kind](self.head(x), self.training)


def task_of(make: Callable[[], nn.Module]) -> Task:
    return Task("made up", DATA, ROWS, make, cross_entropy)


@pytest.mark.parametrize("kind", [*KINDS][1:])
def test_the_line_of_the_refusal_is_all_that_a_model_needs(kind: str) -> None:
    with pytest.raises(DeltaflError, match="it must return one tensor") as caught:
        check_task(task_of(partial(Head, kind)), "made up", 0)
    found = re.search(r"in make_model write (.*)$", str(caught.value))
    assert found is not None

    def make() -> nn.Module:
        model = Head(kind)
        exec(found[1], {"torch": torch, "model": model})
        return model

    task = task_of(make)
    check_task(task, "made up", 0)
    assert vectorized_incompatibility(make().train(), task) is None
    work = LocalWork(lr=0.1, epochs=1, batch_size=4)
    plain = Engine(task_of(partial(Head, "a tensor")), work, 0)
    params_d = plain.initial_params()
    expected = plain.train(params_d, 0, np.arange(4)).update_nd
    for path in ("loop", "batched"):
        engine = Engine(task, work, 0, kept=Route(path))
        assert engine.evaluate(params_d) == plain.evaluate(params_d)
        found_nd = engine.train(params_d, 0, np.arange(4)).update_nd
        np.testing.assert_allclose(found_nd, expected, rtol=1e-4, atol=1e-7)


class Branches(Head):
    """In training also what an auxiliary head says."""

    def __init__(self, kind: str) -> None:
        super().__init__("a tensor")
        self.auxiliary = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        out = self.head(x)
        if not self.training:
            return out
        more = self.auxiliary(x)
        ways = {"wide": torch.cat([out, more], 1), "tuple": (out, more)}
        return {**ways, "by name": {"out": out, "aux": more, "from": "aux"}}[self.kind]


def with_auxiliary(output: Any, y: Tensor) -> Tensor:
    parts = output
    if isinstance(output, Tensor):
        parts = torch.split(output, 3, 1)
    elif isinstance(output, dict):
        parts = output["out"], output["aux"]
    weighted = zip((1, 0.5), parts, strict=False)
    return sum((w * nn.functional.cross_entropy(z, y) for w, z in weighted), torch.zeros(()))


@pytest.mark.parametrize("kind", ["tuple", "by name"])
def test_a_loss_of_your_own_gets_all_that_a_model_returns_in_training(kind: str) -> None:
    with pytest.raises(DeltaflError, match="in training; it must return one tensor, unless"):
        check_task(task_of(partial(Branches, kind)), "made up", 0)
    work = LocalWork(lr=0.1, epochs=1, batch_size=4)
    found = []
    for way in (kind, "wide"):
        task = replace(task_of(partial(Branches, way)), loss=with_auxiliary)
        check_task(task, "made up", 0)
        engine = Engine(task, work, 0)
        params_d = engine.initial_params()
        found.append(engine.train(params_d, 0, np.arange(4)).update_nd)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-7)
    assert found[0].all()
