"""Device, precision and path of a run's local training.

A pure function of model, task, local work and settings; a run keeps it in its folder
(``engine.json``), for a resume.
"""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn

from ...errors import OWN_ERRORS, DeltaflError, in_one_line, log
from ...model.arrays import copied
from ...store import checked, read_json, write_atomically
from ...tasks.base import Task, first_examples
from .batched import BatchedTrainer
from .compatibility import cohort_incompatibility, incompatibility, vectorized_incompatibility
from .devices import device_name, find_device, product_precision
from .dropout import with_masks
from .graphs import WARM_UPS
from .passes import Passes, passes_of
from .serial import LocalJob, LocalWork
from .sizes import (
    LARGEST_COHORT,
    cohort_size,
    example_of,
    largest_batch,
    padded_width,
)
from .tensors import trained_parameters
from .vectorized import own_form

_NOTE = "engine.json"
#: Of the step of a dense cohort: about what stays in a core's caches.
_CACHE_BYTES = 4 * 1024**2
#: Products of an example and a parameter that take as long as the calls of one serial step.
_CALLS_WORTH = 600_000

#: Numbers of the inputs in one pass of an evaluation of dense models on a CPU.
_EVALUATION_NUMBERS = 2**18


class Computation(NamedTuple):
    """How the settings want a run to be computed."""

    device: str = "cpu"
    precision: str = "float32"


class Route(NamedTuple):
    """How a run is computed: one client after the other (a loop), or a cohort at once."""

    path: Annotated[str, Field(pattern="^(loop|batched)$")] = "loop"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    precision: Annotated[str, Field(pattern="^(float32|tf32|bfloat16)$")] = "float32"
    hardware: str = "cpu"  # the device with the product name of a GPU
    #: whether a cohort's kernels are launched one by one or as CUDA graphs; the bits are the same
    steps: Annotated[str, Field(pattern="^(eager|graph)$")] = "eager"


def choose_route(
    model: nn.Module,
    task: Task,
    work: LocalWork,
    how: Computation,
) -> Route:
    """The route of a run; an error if device, model and precision do not go together."""
    device = find_device(how.device)
    if device.type == "cpu" and how.precision == "tf32":
        raise DeltaflError(
            "precision is 'tf32', which GPUs alone have, but clients train on a CPU; write "
            "'float32'"
        )
    if device.type == "cpu" and how.precision == "float32":
        # On a CPU a cohort at once pays for dense models alone.
        if dense_cohort_size(model, task, work) > 1:
            return Route("batched")
        return Route("loop")
    path = "batched"
    steps = "eager"
    no_batch = vectorized_incompatibility(model, task, how.precision)
    if no_batch is None:
        try:
            if captures_steps(model, task, device, how.precision):
                steps = "graph"
        # Some layers, as LSTM cells, call other operations on a GPU than on a CPU, and some models
        # make tensors of float32.
        except OWN_ERRORS as error:
            no_batch = (
                f"a batch does not run on {device} in {how.precision} ({in_one_line(error)[:100]})"
            )
    if no_batch is not None:
        if how.precision == "bfloat16":
            raise DeltaflError(
                f"precision is {how.precision!r}, which needs the batched path, but {no_batch}; "
                "write 'float32'"
            )
        path = "loop"
        log.info(
            "local training goes from client to client, which is slower: %s",
            no_batch,
        )
    return Route(path, str(device), how.precision, device_name(device), steps)


def captures_steps(
    model: nn.Module,
    task: Task,
    device: torch.device,
    precision: str,
) -> bool:
    """Whether a cohort's steps can be CUDA graphs; tried on one client, also on a CPU, which has
    none, for some models do not run in bfloat16.
    """
    # Noise is drawn on the CPU.
    if task.gradient_noise_m is not None:
        return False
    example = example_of(task)
    x = example.to(device)
    y = torch.tensor(task.dataset.train_y[:1].copy(), device=device)
    params_d = np.zeros(sum(map(torch.numel, trained_parameters(model).values())), np.float32)
    masked = with_masks(model, example)
    trainer = BatchedTrainer(
        copied(masked).to(device),
        task.loss,
        1,
        lambda _: (x, y),
        device,
        precision,
        graphs=device.type != "cpu",
    )
    job = LocalJob(np.zeros(1, np.int64), np.random.default_rng(0))
    with product_precision(device, precision):
        trainer.train([job], params_d, LocalWork(lr=0.1, steps=WARM_UPS + 1))
    return trainer.captured


class Form(NamedTuple):
    """How a route is followed with one task; see ``form_of``."""

    path: str  #: of ``Route``, and "fast" where a loop can be
    group_size: int  #: clients that are best trained at once
    width: int  #: examples to which minibatches are padded
    passes: Passes  #: in which examples are judged


def form_of(model: nn.Module, task: Task, work: LocalWork, route: Route) -> Form:
    """The one table of how a task is trained.

    =======  ======  =================================  =========================  ================
    path     device  which models                       clients at once            minibatches
    =======  ======  =================================  =========================  ================
    serial   any     all                                1                          as they are
    fast     any     ``incompatibility`` is None        1                          as they are
    batched  CPU     dense chains (own_form)            what fits into its caches  ``padded_width``
    batched  any     ``vectorized_incompatibility``     what fits into memory      the largest
                     is None
    =======  ======  =================================  =========================  ================
    """
    device = torch.device(route.device)
    width = largest_batch(task.client_rows, work.batch_size)
    passes = passes_of(model, task, device)
    form = Form("serial", 1, width, passes)
    if route.path == "loop":
        reason = incompatibility(model, first_examples(task)[0], task.parts_of(model))
        if reason is None:
            return form._replace(path="fast")
        log.info("local training uses the serial path, which is slower: %s", reason)
        return form
    if device.type == "cpu":
        dense_size = dense_cohort_size(model, task, work)
        if dense_size > 1:
            width = padded_width(task.client_rows, work.batch_size)
            size = max(passes.size, _EVALUATION_NUMBERS // example_of(task).numel())
            return Form("batched", dense_size, width, passes._replace(size=size))
    return Form("batched", cohort_size(model, task, width, device), width, passes)


def noted_route(folder: Path) -> Route | None:
    """The route of the run in this folder; None if the folder has no note."""
    note = folder / _NOTE
    if not note.exists():
        return None
    cure = "it is damaged, so run it again in another folder"
    return checked(Route, read_json(note), str(note), cure)


def kept_route(folder: Path, device: str = "cpu") -> Route | None:
    """The route to continue by, with the run's setting of its device; an error without the noted
    device, a warning on another machine.
    """
    noted = noted_route(folder)
    if noted is None:
        return None
    name = noted.device
    # The note is that of one process, and others have GPUs of their own.
    if name != "cpu" and device in ("cuda", "auto"):
        name = "cuda"
    here = find_device(name)
    found = device_name(here)
    # Of a machine with several equal GPUs any will do.
    if noted.hardware.partition(" ")[2] != found.partition(" ")[2]:
        log.warning(
            "this run started on %s and continues on %s: last bits will differ",
            noted.hardware,
            found,
        )
    return noted._replace(device=str(here))


def keep_route(route: Route, folder: Path) -> None:
    """Write the note, unless there is one."""
    note = folder / _NOTE
    if not note.exists():
        write_atomically(note, json.dumps(route._asdict(), indent=1) + "\n")


def dense_cohort_size(model: nn.Module, task: Task, work: LocalWork) -> int:
    """How many clients a CPU trains best at once in float32, with the same bits in any cohort."""
    if (
        own_form(model) is None
        or task.augment is not None
        or task.tokens
        or cohort_incompatibility(model, task)
    ):
        return 1
    num_params = sum(param.numel() for param in model.parameters())
    width = padded_width(task.client_rows, work.batch_size)
    size_m = np.array([len(rows) for rows in task.client_rows])
    batches_m = np.ceil(size_m / np.minimum(size_m, work.batch_size or size_m.max()))
    padding = float(width - size_m.sum() / batches_m.sum())  # examples in the mean minibatch
    if padding * num_params > _CALLS_WORTH:
        return 1
    inputs = example_of(task).numel()
    # The five vectors of ``Descent``, and inputs; 4 bytes each.
    size = _CACHE_BYTES // (4 * (5 * num_params + 2 * width * inputs))
    return max(1, min(size, LARGEST_COHORT))
