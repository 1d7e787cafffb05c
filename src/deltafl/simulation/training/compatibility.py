"""Which models another path than the serial one trains, and why it does not train the others."""

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import OWN_ERRORS, in_one_line
from ...model.arrays import copied, tensors_of
from ...model.parts import ModelParts
from ...tasks.base import Task, first_examples
from ...tasks.draws import places, seeded
from .batched import BatchedTrainer
from .dropout import masked_layers, with_masks
from .fast import FastTrainer
from .serial import LocalJob, LocalWork, is_cross_entropy, losses_of
from .sizes import example_of
from .tensors import is_close, remembers, trained_parameters
from .vectorized import own_form


def incompatibility(
    model: nn.Module,
    examples: Tensor,
    parts: ModelParts | None = None,
) -> str | None:
    """Why only ``serial`` can train a model; None if ``fast`` and ``batched`` can. It is tried on
    examples: on zeros some models stay as they are.
    """
    params = list(model.parameters())
    parts = parts or ModelParts.of(model)
    for entry in parts.entries:
        if entry.kind not in ("trained", "frozen"):
            return f"the model has {entry.kind} arrays ({entry.name})"
    for name, _ in model.named_buffers():
        return f"the model has buffers ({name})"
    if len(list(model.named_parameters(remove_duplicate=False))) != len(params):
        return "the model has shared parameters"
    tensors = tensors_of(model)
    order = {id(tensors[name]): place for place, name in enumerate(parts.trained)}
    places_of = [order[id(param)] for param in params if id(param) in order]
    # The vector goes by the state dict, these paths by the parameters.
    if places_of != sorted(places_of):
        return "the model's state dict has another order than its parameters"
    if any(param.dtype != torch.float32 for param in params):
        return "the model has parameters that are not float32"
    # Of two examples, for some models mix them.
    some = examples if len(examples) > 1 else torch.cat([examples, examples])
    # A trial, after which the generators are where they were.
    with seeded(np.random.default_rng(0)):
        before = places()
        trial = copied(model).train()
        memory = [param.data_ptr() for param in trial.parameters()]
        # With gradients, for some models take one in their pass.
        output = trial(some.clone())
        if not isinstance(output, torch.Tensor):
            return "the model returns more than one tensor in training"
        if places() != before:  # other paths would draw other numbers
            return "the model draws random numbers in training, as random layers (Dropout) do"
        # They would be no part of the vector any more.
        if [param.data_ptr() for param in trial.parameters()] != memory:
            return "a forward pass puts other numbers in the place of parameters"
        if remembers(model, some, training=True):
            return "a forward pass changes the model, beside its parameters"
    return None


def cohort_incompatibility(model: nn.Module, task: Task) -> str | None:
    """Why no form of the model trains a cohort of the task, or None."""
    reason = incompatibility(model, first_examples(task)[0], task.parts_of(model))
    if reason is not None:
        return reason
    if losses_of(task.loss, torch.tensor(task.dataset.train_y.copy())) is None:
        return (
            "the loss of a single example is known for cross_entropy of labels 0, 1, ... and "
            "squared_error only"
        )
    x, _ = first_examples(task)
    with torch.no_grad():
        if is_cross_entropy(task.loss) or model(x).shape == x.shape[:1]:
            return None
    return "the squared error of a single example is known for one number per example only"


def vectorized_incompatibility(
    model: nn.Module,
    task: Task,
    precision: str = "float32",
) -> str | None:
    """Why a cohort of a task cannot be trained as a batch, or None; tried on two clients."""
    if own_form(model) is None:
        model = with_masks(model, example_of(task))
    reason = cohort_incompatibility(model, task)
    if reason is not None:
        return reason
    try:
        # Where torch.vmap has no rule for an operation it only warns, and loops over the clients.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*batching rule")
            is_same = _learns_the_same(model, task)
    except OWN_ERRORS as error:  # some models refuse what vmap gives them
        return f"torch.vmap does not run the model ({in_one_line(error)[:100]})"
    if not is_same:
        return (
            "a batch of clients learns something else than one after the other, as where a model "
            "mixes the examples of a minibatch or has hooks on gradients"
        )
    if precision == "bfloat16" and _writes_parameters(model, first_examples(task)[0]):
        return "a forward pass would write into copies of the parameters, in bfloat16"
    return None


def _writes_parameters(model: nn.Module, examples: Tensor) -> bool:
    """Whether a pass changes parameters in place, as a limit on norms does."""
    trial = copied(model).train()
    # PyTorch counts what is written, be it the same number.
    before = [param._version for param in trial.parameters()]
    with seeded(np.random.default_rng(0)):
        trial(examples.clone())
    return [param._version for param in trial.parameters()] != before


def _learns_the_same(model: nn.Module, task: Task) -> bool:
    """Whether two clients with minibatches of three and two examples have the same updates in a
    batch as one after the other.
    """
    model = copied(model).train()
    for layer in masked_layers(model):
        layer.p = 0.0  # else they would draw other numbers
    x, y = first_examples(task, 5)
    place_n = np.arange(5) % len(x)
    rows = place_n[:3], place_n[3:]
    work = LocalWork(lr=0.1, steps=2, batch_size=3)
    params_d = torch.cat(
        [param.detach().reshape(-1) for param in trained_parameters(model).values()]
    ).numpy()
    jobs = [LocalJob(row_n, np.random.default_rng(0)) for row_n in rows]
    batched = BatchedTrainer(model, task.loss, 3, lambda row_n: (x[row_n], y[row_n]))
    fast = FastTrainer(model, task.loss)
    with seeded(np.random.default_rng(0)):
        together = batched.train(jobs, params_d, work)
        alone = [
            fast.train(x[row_n], y[row_n], params_d, work, np.random.default_rng(0))
            for row_n in rows
        ]
    return all(
        is_close(torch.from_numpy(one.update_d), torch.from_numpy(other.update_d))
        for one, other in zip(together, alone, strict=True)
    )
