"""Which models and losses the faster paths can train, and why ``serial.train_serial`` has to train the others."""

import copy
import logging
from typing import TYPE_CHECKING

import torch

from .serial import is_cross_entropy, losses_with

if TYPE_CHECKING:
    from ...tasks.base import Task

_log = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def incompatibility(model: torch.nn.Module, example: torch.Tensor) -> str | None:
    """Why ``fast`` and ``batched`` cannot train this model, or None if they can.

    Args:
        model: The model.
        example: Inputs of at least one example, on the model's device. A pass over them finds models that draw random
            numbers: other paths would draw other numbers.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    params = list(model.parameters())
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:
        return (
            f"the model has buffers ({buffers[0]}), which are not trained or averaged; batch normalization uses its "
            "initial statistics (mean 0, variance 1 if fresh), not the batch's"
        )
    if len(names) != len(params):
        return "the model has shared parameters"
    if any(not param.requires_grad or param.dtype != torch.float32 for param in params):
        return "the model has parameters that are frozen or not float32"
    if _draws(model, example):
        return "the model draws random numbers in training, as random layers (Dropout) do"
    return None


def log_incompatibility(model: torch.nn.Module, example: torch.Tensor) -> str | None:
    """``incompatibility(model, example)``, also logged if there is one."""
    reason = incompatibility(model, example)
    if reason is not None:
        _log.info("local training uses the serial path, which is slower: %s", reason)
    return reason


def loss_incompatibility(model: torch.nn.Module, task: "Task") -> str | None:
    """Why the losses of a task's single examples are not known, or None if they are; the model draws no numbers."""
    if losses_with(task.loss, torch.tensor(task.dataset.train_y)) is None:
        return "the loss of a single example is known for cross_entropy of labels 0, 1, ... and squared_error only"
    with torch.no_grad():
        one_number = is_cross_entropy(task.loss) or model(example_of(task)).shape == (1,)
    return None if one_number else "the squared error of a single example is known for one number per example only"


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
