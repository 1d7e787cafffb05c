"""What a task's model is and does, in a few numbers: what its code does not say, such as a file of
weights that it reads, or another version of a package, shows in them.
"""

import math
import re

from ...store.values import plain_json
from ...streams import stream
from ...tasks.base import Task, first_examples
from ...tasks.draws import seeded
from ...types import Json
from ..describe import describe
from ..runner import new_model
from ..training import torch


def behaviour_of(task: Task, seed: int) -> Json:
    """A digest of the structure of the model that the seed makes, and on the first two examples its
    loss and the norms of output, gradient and parameters; None for a number that is not finite.
    """
    model = new_model(task.make_model, seed).eval()
    # With the kinds: other local or trainable arrays make another run.
    parts = [(part.name, part.shape, part.kind) for part in task.parts_of(model).entries]
    trained: list[torch.Tensor] = [param for param in model.parameters() if param.requires_grad]
    x, y = first_examples(task)
    with seeded(stream(seed, "model")):
        output = model(x)
        loss = task.loss(output, y)
        if loss.requires_grad:
            # Some models compute gradients here alone, not for ``autograd.grad``; some draw here.
            loss.backward()
    # A parameter that the loss does not depend on has none.
    gradient = [param.grad.to_dense() for param in trained if param.grad is not None]
    # Objects show their addresses.
    shown = re.sub(r"0x[0-9a-f]+", "", repr(model))
    # A run begins with the task's own parameters where it has them.
    if task.initial_params is not None:
        trained = [torch.as_tensor(task.initial_params)]
    known = {
        "structure": describe([shown, parts]),
        "loss": loss.item(),
        "output": _norm(output),
        "gradient": _norm(*gradient),
        "parameters": _norm(*trained),
    }
    return dict(plain_json(known))


def _norm(*tensors: torch.Tensor) -> float:
    # In float64: squares of large float32 numbers overflow.
    norms = [float(tensor.detach().double().norm()) for tensor in tensors]
    return math.hypot(*norms)
