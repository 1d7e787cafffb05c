"""How much a model's step holds for an example, and how many clients fit into one batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import OWN_ERRORS
from ...model.arrays import copied
from ...tasks.base import Task, first_examples
from ...tasks.draws import seeded
from ...types import IntArray
from .tensors import trained_parameters

#: Examples: two vectors of 16 floats, the longest stretch that torch's loops process at once.
_LANES = 32
LARGEST_COHORT = 256
#: Of the step of a cohort on a CPU, unless its models are dense.
_CPU_BYTES = 4 * 1024**3


def cohort_size(
    model: nn.Module,
    task: Task,
    width: int,
    device: torch.device,
) -> int:
    """How many clients fit into one batch: a step takes half of a GPU's memory, free or not."""
    memory = _CPU_BYTES
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory // 2
    num_params = sum(param.numel() for param in trained_parameters(model).values())
    numbers = numbers_per_example(model, task) + attention_numbers(model, task)
    return max(
        1,
        min(LARGEST_COHORT, memory // (4 * (6 * num_params + 3 * width * numbers))),
    )


def outputs_per_example(model: nn.Module, task: Task) -> int:
    """How many numbers a model answers to one example."""
    with torch.no_grad(), seeded(np.random.default_rng(0)):
        # Two, for some models do not take one alone.
        output: Tensor = copied(model).eval()(first_examples(task)[0])
    return max(1, output[0].numel())


def numbers_per_example(model: nn.Module, task: Task) -> int:
    """How many numbers the layers put out for one example, and cut for ``convolution.conv2d``."""
    counted = [example_of(task).numel()]

    def count(
        part: nn.Module,
        inputs: tuple[Tensor, ...],
        output: object,
    ) -> None:
        if isinstance(output, Tensor) and not list(part.children()):
            counted.append(output.numel())
            if isinstance(part, nn.Conv2d):
                counted.append(output[0, 0].numel() * part.weight[0].numel())

    # Batch normalization refuses to train with one example.
    trial = copied(model).eval()
    with register_module_forward_hook(count), torch.no_grad():
        try:
            trial(example_of(task))
        except OWN_ERRORS:  # such as one that takes none alone, without running statistics
            trial(first_examples(task)[0])
    return sum(counted)


class _Attention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers of attention that is written out: its products, and their softmax."""

    numbers: int = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation."""
        output = func(*args, **(kwargs or {}))
        if func.name() == "aten::_safe_softmax":
            self.numbers += 2 * output.numel()
        return output


def attention_numbers(model: nn.Module, task: Task) -> int:
    """How many numbers attention adds for one example where a cohort is trained at once."""
    # With gradients, for without them some layers take a shorter way.
    counted = _Attention()  # type: ignore[no-untyped-call]
    with counted, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        copied(model).eval()(example_of(task))
    return int(counted.numbers)


def example_of(task: Task) -> Tensor:
    """The inputs of one example of a task in the model's format; not zeros, which are padding for
    some models.
    """
    example: Tensor = first_examples(task, 1)[0]
    return example


def largest_batch(client_rows: Sequence[IntArray], batch_size: int | None) -> int:
    """Examples in the largest minibatch of any client."""
    return max(min(batch_size or len(rows), len(rows)) for rows in client_rows)


def padded_width(client_rows: Sequence[IntArray], batch_size: int | None) -> int:
    """The largest minibatch rounded up: vector instructions then cut all clients' rows alike."""
    return -(-largest_batch(client_rows, batch_size) // _LANES) * _LANES
