"""Device, precision and path of a run's local training.

A pure function of model, task, local work and settings; a run keeps it in its folder
(``engine.json``), for a resume.
"""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import OWN_ERRORS, DeltaflError, in_one_line, log
from ...model.arrays import copied, tensors_of
from ...model.parts import ModelParts
from ...store import checked, read_json, write_atomically
from ...tasks.base import Task, first_examples, spread, spread_examples, varied_targets
from ...tasks.draws import places, seeded
from ...tasks.losses import Loss
from ...types import IntArray
from .batched import BatchedTrainer
from .dropout import masked_layers, with_masks
from .fast import FastTrainer
from .graphs import WARM_UPS
from .serial import LocalJob, LocalWork, is_cross_entropy, losses_of
from .tensors import is_close, remembers, trained_parameters
from .vectorized import own_form

_NOTE = "engine.json"
#: Examples: two vectors of 16 floats, the longest stretch that torch's loops process at once.
_LANES = 32
_LARGEST_COHORT = 256
#: Of the step of a dense cohort: about what stays in a core's caches.
_CACHE_BYTES = 4 * 1024**2
#: Of the step of any other cohort.
_CPU_BYTES = 4 * 1024**3
#: Products of an example and a parameter that take as long as the calls of one serial step.
_CALLS_WORTH = 600_000

#: Examples in one pass of an evaluation, and numbers in them for dense models on a CPU: fixed, so
#: that sums do not depend on the number of workers.
_EVALUATION_BATCH = 500
_EVALUATION_NUMBERS = 2**18
#: Numbers in the outputs on which a loss is tried.
_TRIED_NUMBERS = 2**22
#: Numbers of all layers in one pass of an evaluation on a GPU, or of a loss that is no mean: 2 GiB.
_DEVICE_NUMBERS = 2**29
#: Numbers that a model answers in any pass of an evaluation.
_OUTPUT_NUMBERS = 2**29


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
    evaluation_batch: int  #: examples in one pass of an evaluation
    is_mean: bool = True  #: whether a loss is the mean of those of passes, or of all outputs
    ignored: tuple[int, ...] = ()  #: labels that take no part in that mean

    def weight(self, y: Tensor) -> int:
        """What the loss of a pass counts in the mean: its examples, or its labels that count."""
        if not self.ignored:
            return len(y)
        return int((~torch.isin(y, y.new_tensor(self.ignored))).sum())


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
    tested = _EVALUATION_BATCH
    outputs = _outputs_per_example(model, task)
    ignored = _left_out(model, task, _TRIED_NUMBERS // outputs)
    # A GPU idles between small passes; a loss of all outputs has them from one, while it is small.
    if device.type != "cpu" or ignored is None:
        tested = max(tested, _DEVICE_NUMBERS // numbers_per_example(model, task))
    # Of a language model one text has an output for each word and place.
    tested = max(1, min(tested, _OUTPUT_NUMBERS // outputs))
    tested = _without_single(tested, model, task)
    form = Form("serial", 1, width, tested, ignored is not None, ignored or ())
    if route.path == "loop":
        reason = incompatibility(model, first_examples(task)[0], task.parts_of(model))
        if reason is None:
            return form._replace(path="fast")
        log.info("local training uses the serial path, which is slower: %s", reason)
        return form
    if device.type == "cpu":
        dense_size = dense_cohort_size(model, task, work)
        if dense_size > 1:
            return form._replace(
                path="batched",
                group_size=dense_size,
                width=padded_width(task.client_rows, work.batch_size),
                evaluation_batch=max(tested, _EVALUATION_NUMBERS // example_of(task).numel()),
            )
    size = cohort_size(model, task, width, device)
    return form._replace(path="batched", group_size=size)


def _without_single(tested: int, model: nn.Module, task: Task) -> int:
    """The number of examples that are evaluated at once, or the next lower one that leaves no last
    example alone, where the model does not take it: such as one that normalises by the batch.
    """
    sizes = {len(task.dataset.test_x), *map(len, task.client_rows)}
    if all(size % tested != 1 for size in sizes):
        return tested
    with torch.no_grad(), seeded(np.random.default_rng(0)):
        try:
            copied(model).eval()(first_examples(task, 1)[0])
        except OWN_ERRORS:
            for fewer in range(tested, 1, -1):
                if all(size % fewer != 1 for size in sizes - {1}):
                    return fewer
    return tested


def _left_out(model: nn.Module, task: Task, most: int) -> tuple[int, ...] | None:
    """The labels without a part in the loss, where it is a mean over all others, or over examples:
    then parts of a test set may be judged apart. None if it is no such mean, as with weights of
    classes.

    It is tried on the model's outputs and on random ones, for a new model may answer the same to
    all, as one whose head begins at 0; on at most ``most`` examples.
    """
    # All of them: a single label that is ignored takes part in no mean.
    targets = (task.dataset.train_y, task.dataset.test_y)
    if all(losses_of(task.loss, torch.tensor(y.copy())) is not None for y in targets):
        return ()
    x, y = spread_examples(task)
    some = spread(len(x), max(2, most))
    x, y = x[some], y[some]
    tried = []
    try:
        with torch.no_grad(), seeded(np.random.default_rng(0)):
            output = copied(model).eval()(x)
            tried.append((output, y))
            varied = varied_targets(task, most)
            shape = (len(varied), *output.shape[1:])
            # They may be probabilities, and no numbers below 0.
            for made_up in (torch.empty(shape).uniform_(0.2, 0.7), torch.randn(shape)):
                tried.append((made_up.to(output.dtype), varied))
            # Some losses are means over texts, each of which is a mean over its words.
            for ignored in {(): None, task.ignored: None}:
                if all(_is_mean_of(task.loss, *one, ignored) for one in tried):
                    return ignored
    except OWN_ERRORS:  # a client's training will say what is wrong
        return ()
    return None


def _is_mean_of(loss: Loss, output: Tensor, y: Tensor, ignored: tuple[int, ...]) -> bool:
    """Whether the loss of these outputs is the mean of the loss of each, by the number of its
    labels that are not ignored; yes where it has no value.
    """

    def of(part: slice | Tensor) -> float:
        # Copies: a loss may change in place what it gets.
        return float(loss(output[part].clone(), y[part].clone()))

    whole = of(slice(None))
    counted_e = ~torch.isin(y, y.new_tensor(ignored)).reshape(len(y), -1)
    weight_e = counted_e.sum(dim=1).numpy()
    # One by one: in parts with equal shares of the classes their weights would not show.
    try:
        each = np.array([of(slice(row, row + 1)) for row in np.flatnonzero(weight_e)])
    except OWN_ERRORS:  # such as one of pairs
        return False
    if not np.isfinite(whole):
        return True
    if not np.isfinite(each).all():
        return False
    # Where gains and losses cancel each other, digits are lost.
    lost = 1e-6 * np.abs(each).mean()
    mean = np.average(each, weights=weight_e[weight_e > 0])
    return bool(np.isclose(mean, whole, rtol=1e-4, atol=lost))


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


def find_device(name: str) -> torch.device:
    """The device named ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA if there is a GPU.

    ``cuda`` is the GPU that this process has taken (``torch.cuda.set_device``), else the first.
    """
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    known = re.fullmatch(r"auto|cuda(:(?P<number>[0-9]{1,3}))?", name)
    number = count
    if known is not None and known["number"]:
        number = int(known["number"])
    elif known is not None and count > 0:
        number = 0
        # ``current_device`` would start CUDA in a process that only looks.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            number = torch.cuda.current_device()
    if number >= count:
        raise DeltaflError(
            f"device is {name!r}, but PyTorch {torch.__version__} finds {count} GPUs; write 'auto'"
        )
    return torch.device("cuda", number)


def device_name(device: torch.device) -> str:
    """The device for people and records, with the product name of a GPU."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


@contextmanager
def product_precision(device: torch.device, precision: str = "float32") -> Iterator[None]:
    """On a GPU: TF32, cuDNN's default, only if it is asked for, and kernels that repeat their
    bits.
    """
    if device.type != "cuda":
        yield
        return
    rough = precision == "tf32"
    backends: Any = torch.backends
    # As torch's own contexts do, for ``disable_global_flags`` forbids everybody else to set them.
    allowed = backends.__allow_nonbracketed_mutation()
    with allowed, _settings_restored() as operations, warnings.catch_warnings():
        torch.set_float32_matmul_precision("high" if rough else "highest")
        cudnn: Any = torch.backends.cudnn
        cudnn.allow_tf32 = rough
        # Without this some would still follow ``torch.backends.fp32_precision``.
        for operation in operations:
            operation.fp32_precision = "tf32" if rough else "ieee"
        cudnn.enabled = True
        cudnn.benchmark = False
        cudnn.deterministic = True
        # Parameters are parts of one vector, and cuDNN wants those of an LSTM in its own order: it
        # copies them.
        warnings.filterwarnings(
            "ignore",
            "RNN module weights are not part of single contiguous chunk",
        )
        yield


@contextmanager
def _settings_restored() -> Iterator[list[Any]]:
    """Afterwards torch's settings of products and convolutions are the user's; gives the operations
    that have a precision of their own, since torch 2.9.

    With these, torch raises an error where an older setting that disagrees is read.
    """
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    operations: list[Any] = []
    if hasattr(torch.backends, "fp32_precision"):
        operations = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul]
    names = [(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")]
    names += [(operation, "fp32_precision") for operation in operations]
    before = []
    products = None
    for part, name in names:
        with suppress(RuntimeError):
            before.append((part, name, getattr(part, name)))
    with suppress(RuntimeError):
        products = torch.get_float32_matmul_precision()
    try:
        yield operations[:3]
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        for part, name, value in before:
            setattr(part, name, value)


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


def _cohort_incompatibility(model: nn.Module, task: Task) -> str | None:
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
    reason = _cohort_incompatibility(model, task)
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


def dense_cohort_size(model: nn.Module, task: Task, work: LocalWork) -> int:
    """How many clients a CPU trains best at once in float32, with the same bits in any cohort."""
    if (
        own_form(model) is None
        or task.augment is not None
        or task.tokens
        or _cohort_incompatibility(model, task)
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
    return max(1, min(size, _LARGEST_COHORT))


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
        min(_LARGEST_COHORT, memory // (4 * (6 * num_params + 3 * width * numbers))),
    )


def _outputs_per_example(model: nn.Module, task: Task) -> int:
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
