"""What a task's model is and does, in a few numbers: what its code does not say, such as a file of
weights that it reads, or another version of a package, shows in them.
"""

import math
import re
from typing import Any

from ..store.values import plain_json
from ..streams import stream
from ..tasks.base import Task
from ..tasks.own import first_examples
from .describe import describe
from .runner import new_model, seeded
from .training import torch


def behaviour_of(task: Task, seed: int) -> dict[str, Any]:
    """A digest of the structure of the model that the seed makes, and on the first two examples its
    loss and the norms of output, gradient and parameters; None for a number that is not finite.
    """
    model = new_model(task.make_model, seed).eval()
    # With the kinds: other local or trainable arrays make another run.
    parts = [(part.name, part.shape, part.kind) for part in task.parts_of(model).entries]
    trained = [param for param in model.parameters() if param.requires_grad]
    x, y = first_examples(task)
    with seeded(stream(seed, "model")):
        output = model(x)
        loss = task.loss(output, y)
    gradient: tuple[torch.Tensor | None, ...] = ()
    if loss.requires_grad:
        gradient = torch.autograd.grad(loss, trained, allow_unused=True)
    start = task.initial_params
    known = {
        # Objects show their addresses.
        "structure": describe([re.sub(r"0x[0-9a-f]+", "", repr(model)), parts]),
        "loss": loss.item(),
        "output": _norm(output),
        "gradient": _norm(*(part for part in gradient if part is not None)),
        "parameters": _norm(*(trained if start is None else [torch.as_tensor(start)])),
    }
    return dict(plain_json(known))


def _norm(*tensors: torch.Tensor) -> float:
    return math.hypot(*(float(tensor.detach().double().norm()) for tensor in tensors))
