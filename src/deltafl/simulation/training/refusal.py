"""Which models the fast paths take, and why they refuse the others, which ``local.train_serial`` trains."""

import copy
import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...tasks.base import Task

_log = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refusal(model: torch.nn.Module, example: torch.Tensor | None = None) -> str | None:
    """Why the fast path does not take this model, or None if it does.

    Args:
        model: The model.
        example: Inputs of one example or more, on the model's device: with them models are found that draw random
            numbers in other ways than by layers, as ``functional.dropout`` does. The paths run a model at different
            times, and in layouts of their own, so they would draw other numbers.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    params = list(model.parameters())
    buffers = [name for name, _ in model.named_buffers()]
    random = [type(part).__name__ for part in model.modules() if _is_random(part)]
    if buffers:
        reason = f"the model has buffers ({buffers[0]}); they stay as they were made and are not averaged"
        if any(_has_statistics(part) for part in model.modules()):
            reason += ", so batch normalisation does not look at batches: it uses these (mean 0, variance 1 if fresh)"
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


def tell_refusal(model: torch.nn.Module, example: torch.Tensor | None = None) -> str | None:
    """``refusal(model, example)``, also put into the log if there is one."""
    reason = refusal(model, example)
    if reason is not None:
        _log.info("local training uses the serial path, which is slower: %s", reason)
    return reason


def example_of(task: "Task") -> torch.Tensor:
    """Inputs of one example of a task, as the model gets them, all 0."""
    return torch.zeros(1, *task.dataset.train_x.shape[1:], dtype=torch.int64 if task.tokens else torch.float32)


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether a linear layer or convolution is its formula alone: no hooks, and no parameters but weight and bias."""
    return not has_hooks(layer) and set(layer._parameters) == {"weight", "bias"}


def has_hooks(part: torch.nn.Module) -> bool:
    """Whether more happens when a module is called than its class says; a form of it made anew would leave that out."""
    return any(getattr(part, name) for name in _HOOKS) or "forward" in vars(part)


def _draws(model: torch.nn.Module, example: torch.Tensor) -> bool:
    """Whether a pass in training moves torch's generator; model and generator are left as they were."""
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
