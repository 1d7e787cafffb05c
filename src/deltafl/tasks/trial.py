"""Trying a task's model, loss and variation of inputs on two examples and on one, as local training will use them."""

import copy
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import DeltaflError
from ..streams import stream
from .base import Task
from .models import require_torch

if TYPE_CHECKING:
    import torch

#: What somebody's code can end with. ``sys.exit`` in it must not end the program with an exit code of its choice.
OWN_ERRORS = (Exception, SystemExit)


def problem_of_model(task: Task, seed: int) -> str | None:
    """Make the model as the engine will, score two examples and one, and take the gradient of a step on each.

    Minibatches of one example occur: the last of a pass, or a client that has no more. None if all is well.
    """
    torch = require_torch()
    x, y = torch.tensor(task.dataset.train_x[:2]), torch.tensor(task.dataset.train_y[:2])
    if task.tokens:
        x = x.long()
    elif x.dtype == torch.uint8:
        x = x * task.input_scale
    problem = _problem_of_augment(task, x, seed)
    if problem:
        return problem
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "model").integers(2**63)))
        try:
            model = task.make_model()
        except OWN_ERRORS as error:
            return f"make_model failed: {told(error)}"
        problem = _problem_of_parameters(torch, model) or _problem_of_copy(model)
        problem = problem or _problem_of_step(torch, task, model, x, y)
        return problem or _problem_of_one(model, x) or _problem_of_step(torch, task, model, x[:1], y[:1])


def _problem_of_parameters(torch: ModuleType, model: Any) -> str | None:
    if not isinstance(model, torch.nn.Module) or not list(model.parameters()):
        return f"make_model made {type(model).__name__}; it must make a torch.nn.Module with parameters"
    if any(torch.nn.parameter.is_lazy(param) for param in model.parameters()):
        return "the model has lazy modules, whose parameters have no shape yet; write their number of inputs"
    if not any(param.requires_grad for param in model.parameters()):
        return "all parameters of the model are frozen (requires_grad is False); one at least must be trained"
    return None


def _problem_of_copy(model: "torch.nn.Module") -> str | None:
    """Local training begins with a copy."""
    try:
        copy.deepcopy(model)
    except OWN_ERRORS as error:
        return (
            f"the model cannot be copied ({told(error)}); keep nothing in it that is computed from its parameters, and "
            "write torch.nn.utils.parametrizations.weight_norm for torch.nn.utils.weight_norm"
        )
    return None


def _problem_of_step(
    torch: ModuleType, task: Task, model: "torch.nn.Module", x: "torch.Tensor", y: "torch.Tensor"
) -> str | None:
    """Evaluate the model, then train it: some models answer differently there."""
    for training in (False, True):
        model.train(training)
        for part in model.modules():
            if isinstance(part, torch.nn.modules.batchnorm._NormBase):
                part.eval()  # as in local training
        try:
            output = model(x)
        except OWN_ERRORS as error:
            return f"the model does not take inputs of shape {tuple(x.shape)}: {told(error)}"
        mode = "in training" if training else "in evaluation"
        if not isinstance(output, torch.Tensor):
            return f"the model returned {type(output).__name__} {mode}; it must return one tensor"
        shape, needed = tuple(output.shape), (len(x), task.dataset.num_classes)
        if task.metric == "accuracy" and shape != needed:
            return f"the model's output for {len(x)} examples has shape {shape} {mode}; accuracy needs {needed}"
        try:
            with warnings.catch_warnings():  # (B, 1) against (B,) becomes (B, B), and nothing is learnt
                warnings.filterwarnings("error", message="Using a target size")
                loss = task.loss(output, y)
        except OWN_ERRORS as error:
            return f"the loss failed on output {tuple(output.shape)} and y {tuple(y.shape)}: {told(error)}"
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            return f"the loss must be the minibatch's mean, a tensor of shape (), got {_shape(loss)}"
    return _problem_of_gradient(model, loss)


def _problem_of_one(model: "torch.nn.Module", x: "torch.Tensor") -> str | None:
    """A model that ends in ``squeeze()`` drops the axis of the examples where there is a single one."""
    try:
        one, more = (tuple(model(part).shape) for part in (x[:1], x))
    except OWN_ERRORS as error:
        return f"the model does not take inputs of shape {tuple(x[:1].shape)}: {told(error)}"
    if len(one) != len(more):
        return (
            f"the model's output for one example has shape {one}, for {len(x)} it has {more}; keep the first axis, "
            "which is that of the examples: write squeeze(-1) for squeeze()"
        )
    return None


def _problem_of_gradient(model: "torch.nn.Module", loss: "torch.Tensor") -> str | None:
    cure = "compute it from the model's output by torch alone, without detach, item or no_grad"
    if not loss.requires_grad:
        return f"the loss has no gradient; {cure}"
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except OWN_ERRORS as error:
        return f"the gradient of the loss failed: {told(error)}"
    if all(param.grad is None for param in model.parameters()):
        return f"the loss does not depend on the model's parameters; {cure}"
    return None


def _problem_of_augment(task: Task, x: "torch.Tensor", seed: int) -> str | None:
    if task.augment is None:
        return None
    try:
        varied = task.augment(x, stream(seed, "augment"))
    except OWN_ERRORS as error:
        return f"augment failed: {told(error)}"
    if not hasattr(varied, "dtype") or (varied.shape, varied.dtype) != (x.shape, x.dtype):
        return f"augment made {_shape(varied)} of inputs of shape {tuple(x.shape)}; it must keep shape and type"
    return None


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def told(error: BaseException, path: Path | None = None) -> str:
    """An error in one line, with the line of a user's file that it came from."""
    lines = [line for file, line in places_of(error) if file == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def places_of(error: BaseException) -> list[tuple[str, int | None]]:
    """Files and lines that an error came through, where it was raised last."""
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]


def ended_by(error: SystemExit) -> DeltaflError:
    """The sentence for code of a task that ends the program."""
    return DeltaflError(f"the task's own code ended the program by sys.exit({error.code!r}); take that out")
