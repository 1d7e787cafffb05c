"""Which models and losses the faster paths can train, and why ``serial.train_serial`` has to train the others."""

import copy
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from .serial import is_cross_entropy, losses_of

if TYPE_CHECKING:
    from ...tasks.base import Task

_log = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def incompatibility(model: torch.nn.Module, example: torch.Tensor | None = None) -> str | None:
    """Why ``fast`` and ``batched`` cannot train this model, or None if they can.

    Args:
        model: The model.
        example: Inputs of at least one example, on the model's device. A pass over them finds models that draw random
            numbers outside of layers, as ``functional.dropout`` does; other paths would draw other numbers.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    params = list(model.parameters())
    buffers = [name for name, _ in model.named_buffers()]
    random = [type(part).__name__ for part in model.modules() if _is_random(part)]
    if buffers:
        reason = f"the model has buffers ({buffers[0]}), which are not trained or averaged"
        if any(_has_statistics(part) for part in model.modules()):
            reason += "; batch normalization uses its initial statistics (mean 0, variance 1 if fresh), not the batch's"
        return reason
    if random:
        return f"the model has random layers ({random[0]})"
    if len(names) != len(params):
        return "the model has shared parameters"
    if any(not param.requires_grad or param.dtype != torch.float32 for param in params):
        return "the model has parameters that are frozen or not float32"
    if example is not None and _draws(model, example):
        return "the model draws random numbers in training, such as functional.dropout"
    return None


def log_incompatibility(model: torch.nn.Module, example: torch.Tensor | None = None) -> str | None:
    """``incompatibility(model, example)``, also logged if there is one."""
    reason = incompatibility(model, example)
    if reason is not None:
        _log.info("local training uses the serial path, which is slower: %s", reason)
    return reason


def loss_incompatibility(model: torch.nn.Module, task: "Task") -> str | None:
    """Why ``serial.losses_of`` does not give the losses of a task's single examples, or None if it does.

    Both losses also take targets for which it does not: class probabilities, several numbers, ignored labels (-100).
    """
    y = task.dataset.train_y
    if losses_of(task.loss) is None:
        return "the loss of a single example is known for cross_entropy and squared_error only"
    if is_cross_entropy(task.loss):
        known = y.ndim == 1 and y.dtype == np.int64 and y.min() >= 0
        return None if known else "the cross-entropy of a single example is known for labels 0, 1, ... only"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        known = y.ndim == 1 and model(example_of(task)).shape == (1,)
    return None if known else "the squared error of a single example is known for one number per example only"


def example_of(task: "Task") -> torch.Tensor:
    """The inputs of one example of a task in the model's format, all 0."""
    return torch.zeros(1, *task.dataset.train_x.shape[1:], dtype=torch.int64 if task.tokens else torch.float32)


def has_hooks(part: torch.nn.Module) -> bool:
    """Whether calling a module does more than its class does, which a vectorized form would leave out."""
    return any(getattr(part, name) for name in _HOOKS) or "forward" in vars(part)


def _draws(model: torch.nn.Module, example: torch.Tensor) -> bool:
    """Whether a pass in training mode advances torch's generator, which is restored."""
    devices = [example.device] if example.device.type == "cuda" else []

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

    training = copy.deepcopy(model).train()
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        before = states()
        training(example)
        after = states()
    return not all(map(torch.equal, before, after))


def _has_statistics(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.running_mean is not None


def _is_random(part: torch.nn.Module) -> bool:
    if isinstance(part, torch.nn.RNNBase):
        return part.dropout > 0
    return isinstance(part, torch.nn.RReLU | torch.nn.modules.dropout._DropoutNd)
