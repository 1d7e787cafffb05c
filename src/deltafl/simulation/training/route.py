"""Device, precision and path of a run's local training: a pure function of model, task, local work and settings.

A run that does not follow the default for CPUs keeps its route in its folder (``engine.json``), for a resume.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field

from ...errors import DeltaflError
from ...io import checked, read_json, write_atomically
from .serial import LocalWork
from .vectorized import dense_cohort_size, vectorized_incompatibility

if TYPE_CHECKING:
    from ...tasks.base import Task

_log = logging.getLogger(__name__)

_NOTE = "engine.json"
_DAMAGED = "it is damaged, so run it again in another folder"
_DEFAULT = "the rule for CPUs"


class Computation(NamedTuple):
    """How the settings want a run to be computed.

    Attributes:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        precision: ``"float32"`` or ``"bfloat16"``.
        engine: ``"auto"``, ``"loop"`` or ``"batched"``.
    """

    device: str = "cpu"
    precision: str = "float32"
    engine: str = "auto"


class Route(NamedTuple):
    """How a run is computed; ``engine.json`` has the same fields.

    Attributes:
        path: ``"loop"`` (one client after the other) or ``"batched"`` (a cohort at once).
        device: ``"cpu"`` or ``"cuda:N"``.
        precision: As in ``Computation``.
        why: The reason, in words.
        hardware: The device with the product name of a GPU.
    """

    path: Annotated[str, Field(pattern="^(loop|batched)$")] = "loop"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    precision: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"
    why: str = _DEFAULT
    hardware: str = "cpu"


def choose_route(
    model: torch.nn.Module, task: "Task", work: LocalWork, how: Computation, num_workers: int = 1
) -> Route:
    """The route of a run.

    Raises:
        DeltaflError: If this machine lacks the device, or model, precision and workers do not go together.
    """
    device = find_device(how.device)
    by_rule = how.engine == "auto" and device.type == "cpu" and how.precision == "float32"
    if num_workers > 1 and not by_rule and (device.type != "cpu" or how.engine != "loop"):
        raise DeltaflError(
            f"workers is {num_workers}, but one process trains the whole cohort with device = {how.device!r}, "
            f"engine = {how.engine!r} and precision = {how.precision!r}; write workers = 1"
        )
    if by_rule:
        dense = dense_cohort_size(model, task, work) > 1
        return Route("batched" if dense else "loop", why="no GPU was found" if how.device == "auto" else _DEFAULT)
    no_batch = "engine is 'loop'" if how.engine == "loop" else vectorized_incompatibility(model, task)
    if how.precision != "float32" and no_batch is not None:
        raise DeltaflError(
            f"precision is {how.precision!r}, which needs the batched path, but {no_batch}; write 'float32'"
        )
    path, hardware = "batched" if no_batch is None else "loop", device_name(device)
    route = Route(path, str(device), how.precision, no_batch or f"engine is {how.engine!r}", hardware)
    _log.info("local training: %s on %s in %s, because %s", path, hardware, route.precision, route.why)
    return route


def hardware_of(folder: Path) -> str | None:
    """The device of the run in this folder; None for a CPU, or if the folder has no note."""
    noted = _noted(folder)
    return None if noted is None or noted.hardware == "cpu" else noted.hardware


def kept_route(folder: Path | None) -> Route | None:
    """The route of the run in this folder; None if the folder has no note.

    Raises:
        DeltaflError: If the note is damaged, or this machine lacks the device.
    """
    noted = None if folder is None else _noted(folder)
    if noted is not None and noted.hardware != (found := device_name(find_device(noted.device))):
        _log.warning("this run started on %s and continues on %s: last bits will differ", noted.hardware, found)
    return noted


def _noted(folder: Path) -> Route | None:
    note = folder / _NOTE
    return checked(Route, read_json(note), str(note), _DAMAGED) if note.exists() else None


def keep_route(route: Route, folder: Path) -> None:
    """Write the note, unless there is one or the route is the default for CPUs."""
    note = folder / _NOTE
    if route.why != _DEFAULT and not note.exists():
        write_atomically(note, json.dumps(route._asdict(), indent=1) + "\n")


def find_device(name: str) -> torch.device:
    """The device named ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA if there is a GPU, else the CPU.

    Raises:
        DeltaflError: If this machine or this PyTorch does not have it.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if count == 0:
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise DeltaflError(f"device is {name!r}, but PyTorch {torch.__version__} {built} here; write 'cpu' or 'auto'")
    index = device.index or 0
    if index >= count:
        raise DeltaflError(f"device is {name!r}, but there are {count} GPUs here; write 'cuda:{count - 1}' or less")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The device for people and records, with the product name of a GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """On a GPU: float32 products without TF32, which cuDNN uses by default, and kernels that repeat their bits."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
