"""A model and its loss take a step on two examples, before an experiment starts.

Every mistake is one sentence.
"""

import pickle
import random
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ...errors import OWN_ERRORS, DeltaflError
from ...model.arrays import NamedArrays, copied, listed, require_apart, tensors_of
from ...model.parts import freeze
from ...streams import stream
from ...types import IntArray
from ..base import TRIED_EXAMPLES, Task, first_examples, model_inputs, spread
from ..losses import Loss, Module, Tensor
from ..metrics import is_of_library
from ..models import is_one_output
from .trying import OTHER_TARGETS, require_that, tried


def check_single(task: Task, original: Module, seed: int) -> None:
    """Check that a copy of a task's model, and its loss, take a step on one example: where
    minibatches have so few, the last of a pass, or of a client that has no more.

    Raises:
        DeltaflError: If they do not, as with normalisation over the minibatch alone.
    """
    from ..draws import seeded

    x, y = first_examples(task, 1)
    with seeded(stream(seed, "model")):
        try:
            check_step(task, original, x, y)
        except DeltaflError as error:
            raise DeltaflError(
                f"{task.name}: some minibatches have one example, by the clients' sizes and "
                f"batch_size, and {error}; write another batch_size, or None, or let the model "
                "take one example"
            ) from error


def has_gradient(task: Task, row_n: IntArray) -> bool:
    """Whether some training examples have a finite gradient; yes where the model, or the loss, does
    not take them.
    """
    from ..draws import seeded
    from ..modules import spare_single_values, torch

    data = task.dataset
    some = row_n[spread(len(row_n), TRIED_EXAMPLES)]
    x = model_inputs(task, torch.tensor(data.train_x[some]))
    with suppress(*OWN_ERRORS), seeded(stream(0, "model")):
        model = copied(task.make_model()).train()
        spare_single_values(model)
        task.loss(model(x), torch.tensor(data.train_y[some])).backward()
        found = [param.grad.to_dense() for param in model.parameters() if param.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in found)
    return True


def made_model(task: Task, x: Tensor) -> Module:
    """A new model, whose copies can be trained in its place."""
    from ..modules import nn

    make: Any = task.make_model
    if isinstance(make, nn.Module):
        raise DeltaflError(
            f"make_model is a {type(make).__name__}; it must be a function that makes one"
        )
    model: Any = tried("make_model failed", make)
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    if not params:
        raise DeltaflError(
            f"make_model made {type(model).__name__}; it must make a torch.nn.Module with "
            "parameters"
        )
    if any(nn.parameter.is_lazy(param) for param in params):
        raise _lazy("the model is lazy", x)
    for name, param in model.named_parameters():
        # PyTorch keeps hooks of modules where it copies them, those of parameters not.
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise DeltaflError(
                f"the parameter {name!r} has a hook, which copies of the model lack; change "
                "gradients in the loss or in forward"
            )
    require_apart(dict(model.named_parameters()))
    return model


def _lazy(what: str, x: Tensor) -> DeltaflError:
    shape = ", ".join(map(str, (2, *x.shape[1:])))
    return DeltaflError(f"{what}; run it once in make_model, such as model(torch.zeros({shape}))")


def check_step(task: Task, original: Module, x: Tensor, y: Tensor) -> None:
    """Evaluate a copy of the model, then train it, for some models differ there."""
    from ..modules import spare_single_values, torch

    memo: dict[int, Any] = {}
    model = copied(original, memo)
    spare_single_values(model)
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    # Wherever the model holds them.
    generators = [one for one in memo.values() if isinstance(one, kinds)]
    before = [*map(pickle.dumps, generators)]
    # Of the original: NumPy's view of an array would keep a forward pass from resizing it.
    shapes = _shapes(original)
    params = dict(model.named_parameters())
    for mode, training in (("in evaluation", False), ("in training", True)):
        model.train(training)
        # As in a run: nobody takes gradients in an evaluation.
        with torch.set_grad_enabled(training):
            output = tried(
                f"the model does not take inputs of shape {tuple(x.shape)}",
                lambda: _forward(task, model, x),
            )
        shape = _shape_of_output(task, output, y, mode)
        with warnings.catch_warnings():  # (B, 1) against (B,) becomes (B, B), and nothing is learnt
            warnings.filterwarnings("error", message="Using a target size")
            what = f"the loss failed on output {shape} and y {tuple(y.shape)}"
            loss: Any = tried(what, partial(task.loss, output, y))
        is_scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0
        require_that(
            is_scalar,
            "the loss",
            loss,
            "the minibatch's mean, a tensor of shape ()",
        )
    for name, param in model.named_parameters():
        if param.requires_grad and param is not params.get(name, param):
            raise DeltaflError(
                f"forward puts a new parameter in the place of {name!r}, and an optimizer would go "
                "on with the old one; write into that, under torch.no_grad(): "
                f"self.{name.rpartition('.')[2]}.copy_(...)"
            )
    # Without it ``backward`` would raise; what follows says better what is wrong.
    if loss.requires_grad:
        tried("the gradient of the loss failed", loss.backward)
    if [*map(pickle.dumps, generators)] != before:
        raise DeltaflError(
            "the model draws from a generator that it holds, and each client would draw the same "
            "numbers from its copy in every round; draw from torch, numpy.random or random, which "
            "are seeded"
        )
    lost = [name for name, param in original.named_parameters() if param.grad is not None]
    if lost:
        raise DeltaflError(
            f"forward reaches {lost[0]!r} past the model, by a lambda or a function that knows "
            "the module from outside, and a copy of the model would not train it; use it in a "
            "method of the model, or of a submodule that has it"
        )
    after = _shapes(model)
    for name in shapes:
        if after.get(name) != shapes[name]:
            raise DeltaflError(
                f"the array {name!r} of the model has shape {shapes[name]} before a step and "
                f"{after.get(name)} after it, and no mean of clients' models has both; give it its "
                "largest shape, run the model once in make_model, or register it with "
                "persistent=False"
            )
    for name in after:
        # Each client would begin with a new one, and nobody would keep it.
        if name not in shapes:
            raise _lazy(f"the model is lazy: it makes the array {name!r} in a step", x)
    if all(param.grad is None for param in model.parameters()):
        raise DeltaflError(
            "the loss has no gradient by the model's parameters; compute it from the model's "
            "output by torch alone, without detach, item or no_grad, and leave a parameter of the "
            "model trainable"
        )


def _forward(task: Task, model: Module, x: Tensor) -> Any:
    """What a model returns, or the user's own in a chain, where the rest takes a tensor alone."""
    from ..modules import torch

    if not is_one_output(task.make_model):
        return model(x)
    own, *rest = model
    output = own(x)
    for part in rest:
        if isinstance(output, torch.Tensor):
            output = part(output)
    return output


def _shape_of_output(task: Task, output: Any, y: Tensor, mode: str) -> tuple[int, ...]:
    """The shape of an output, () of more than one tensor. In training a model may return more, as
    of auxiliary heads, in one tensor or in several: only the loss reads it.
    """
    from ..modules import torch

    is_training = mode == "in training"
    if not isinstance(output, torch.Tensor):
        is_taken = _takes(task.loss, output, y)
        if is_training and is_taken:
            return ()
        raise _no_tensor(output, mode, is_taken)
    if is_one_output(task.make_model) and len(output) != len(y):
        raise DeltaflError(
            f"the model returned {len(output)} numbers {mode} for {len(y)} examples, each with one "
            "to predict; let it return one for each"
        )
    if task.knows_accuracy and not is_training:
        _require_classes(task, tuple(output.shape), y)
    return tuple(output.shape)


def _takes(loss: Loss, output: object, y: Tensor) -> bool:
    """Whether a loss takes an output that is no tensor, as one of the user's own may."""
    with suppress(Exception):
        loss(output, y)
        return True
    return False


def _no_tensor(output: object, mode: str, is_taken: bool) -> DeltaflError:
    """The error for an output that is no tensor, with the line that makes it one."""
    picked = _picked(output)
    if is_taken:
        picked = f"output if model.training else {picked}"
    # Such as a model that has outputs of auxiliary heads in training alone.
    elif mode == "in training":
        picked = f"output if isinstance(output, torch.Tensor) else {picked}"
    return DeltaflError(
        f"the model returned {type(output).__name__} {mode}; it must return one tensor, unless in "
        "training a loss of your own takes more: in make_model write model.register_forward_hook("
        f"lambda model, inputs, output: {picked})"
    )


def _picked(output: Any) -> str:
    """How a tensor is picked from an output, best its logits; ``out`` as torchvision has it."""
    from ..modules import torch

    names = [*output] if isinstance(output, Mapping) else [*getattr(output, "__dict__", {})]
    for name in ("logits", "out", *names):
        if isinstance(output, Mapping) and isinstance(output.get(name), torch.Tensor):
            return f"output[{name!r}]"
        if isinstance(getattr(output, str(name), None), torch.Tensor):
            return f"output.{name}"
    return "output[0]"


def _require_classes(task: Task, shape: tuple[int, ...], y: Tensor) -> None:
    """Refuse outputs of a shape of which the accuracy is not known."""
    size = len(y)
    classes = task.dataset.num_classes
    needed: list[tuple[int, ...]] = [(size, classes)]
    cure = ""
    if y.ndim > 1 and not y.is_floating_point():
        needed = [(size, classes, *y.shape[1:])]
        cure = (
            ", as y of int64 has a class at each place of a sequence; write y.reshape(-1) for "
            "one class an example, y.astype(np.float32) for several labels"
        )
    elif classes == 2 and y.ndim == 1:
        needed += [(size, 1), (size,)]
    if shape in needed:
        return
    who = task.metrics[0].name
    if not is_of_library(who):
        who = "accuracy, which is taken wherever num_classes is above 0,"
        cure += f"; {OTHER_TARGETS}"
    raise DeltaflError(
        f"the model's output for {size} examples has shape {shape} in evaluation; "
        f"{who} needs {' or '.join(map(str, needed))}{cure}"
    )


def check_state(task: Task, original: Module, x: Tensor, y: Tensor) -> None:
    """Refuse a model that needs arrays which training changes and clients do not bring back, such
    as a moving average in frozen parameters: each round would begin with the first ones.
    """
    from ..modules import torch

    params = dict(original.named_parameters())
    lost = [
        entry.name
        for entry in task.parts_of(original).entries
        # A frozen buffer is so by the user's choice.
        if entry.kind == "constant"
        or (entry.kind == "frozen" and entry.name in params)
        or (entry.kind == "counter" and entry.dtype == "bool")
    ]
    if not lost:
        return
    trained = copied(original)
    before = tensors_of(original)
    try:
        _train_twice(task, trained, x, y)
        # Looked up now, as a forward pass may put other tensors in their place.
        after = tensors_of(trained)
        moved = [name for name in lost if not torch.equal(before[name], after[name])]
        if not moved:
            return
        other = copied(original)
        tensors = tensors_of(other)
        with torch.no_grad():
            for name in moved:
                tensors[name].copy_(after[name])
        who = _who_needs(original, other, x)
    except OWN_ERRORS:  # a step has been tried, and what else may fail is no matter of state
        return
    if who is not None:
        raise DeltaflError(
            f"training changes {listed(moved)} of the model, which clients do not bring back, and "
            f"{who} need it: make it a buffer that begins with finite numbers, uint8 where it is "
            "bool, by register_buffer or a pass in make_model, and clients' values are averaged"
        )


def _who_needs(model: Module, other: Module, x: Tensor) -> str | None:
    """Which use shows that two models differ; None if none does, or if one already differs from
    itself.
    """
    from ..draws import seeded
    from ..modules import numbers_in, spare_single_values, torch

    for use, training in (("evaluations", False), ("later rounds", True)):
        found = []
        for each in (model, model, other):
            tried = copied(each).train(training)
            spare_single_values(tried)
            with seeded(stream(0, "dropout")), torch.set_grad_enabled(training):
                found.append(numbers_in(tried(x.clone())).detach())
        first, again, then = found
        rounding = 1e-7 * float(first.abs().max())
        is_same = torch.allclose(then, first, rtol=0, atol=rounding)
        if torch.equal(first, again) and torch.isfinite(then).all() and not is_same:
            return use
    return None


def _train_twice(task: Task, model: Module, x: Tensor, y: Tensor) -> None:
    """Two steps, as a client takes them: what follows the parameters moves in the second."""
    from ..modules import keep_frozen_statistics, spare_single_values, take_step

    frozen = freeze(model, task.parts_of(model))
    spare_single_values(model.train())
    keep_frozen_statistics(model, frozen)
    for _ in range(2):
        task.loss(model(x.clone()), y.clone()).backward()
        take_step(model)


def _shapes(model: Module) -> dict[str, tuple[int, ...]]:
    named = NamedArrays.of(model)
    return {name: array.shape for name, array in named.arrays.items()}
