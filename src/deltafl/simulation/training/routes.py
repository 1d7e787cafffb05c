"""Which of the ways to train takes a run's clients, on which device; chosen by rule, or by a short measurement.

A rule is a pure function of model, task, local work and settings, so that a run can be repeated. A measurement is not:
its choice is kept in the run's folder (``engine.json``), and a resume takes it from there.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field

from ...errors import DeltaflError
from ...io import checked, read_json, write_atomically
from .devices import device_name, find_device
from .forms import batched_refusal, has_unfolded
from .local import LocalWork
from .refusal import example_of, refusal
from .together import group_size

if TYPE_CHECKING:
    from ...tasks.base import Task

_log = logging.getLogger(__name__)

_NOTE = "engine.json"
_DAMAGED = "it is damaged, so run it again in another folder"


class Computation(NamedTuple):
    """What the settings say about how a run is computed.

    Attributes:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        precision: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        engine: ``"auto"``, ``"loop"``, ``"batched"``, ``"unfolded"`` or ``"measured"``.
    """

    device: str = "cpu"
    precision: str = "float32"
    engine: str = "auto"


class Route(NamedTuple):
    """The way that was chosen.

    Attributes:
        path: ``"loop"`` (one client after the other), ``"together"`` (``together.py``), ``"batched"`` (``batched.py``)
            or ``"unfolded"``, which is batched with products for convolutions.
        device: ``"cpu"`` or ``"cuda:N"``.
        precision: As in ``Computation``.
        why: The reason, for people.
    """

    path: str = "loop"
    device: str = "cpu"
    precision: str = "float32"
    why: str = "the rule for CPUs"


#: Measures routes: seconds of a short training by each.
Measure = Callable[[list[Route]], list[float]]


def choose_route(
    model: torch.nn.Module, task: "Task", work: LocalWork, how: Computation, measure: Measure, count: int = 1
) -> Route:
    """The route of a run.

    Args:
        model: The task's model.
        task: Data, clients and loss.
        work: What each client does.
        how: The settings.
        measure: Used if ``how.engine`` is ``"measured"``.
        count: Worker processes.

    Raises:
        DeltaflError: If the device is not there, or what is asked for cannot be.
    """
    device = find_device(how.device)
    _check(model, task, how, device, count)
    if how.engine == "auto" and device.type == "cpu":
        together = how.precision == "float32" and group_size(model, task, work) > 1
        why = "no GPU was found" if how.device == "auto" else Route().why
        return Route("together" if together else "loop", str(device), how.precision, why)
    route = _asked(model, task, work, how, device, measure)
    _log.info("local training: %s on %s in %s, for %s", route.path, device_name(device), route.precision, route.why)
    return route


def _asked(
    model: torch.nn.Module, task: "Task", work: LocalWork, how: Computation, device: torch.device, measure: Measure
) -> Route:
    def route(path: str, why: str) -> Route:
        return Route(path, str(device), how.precision, why)

    if how.engine == "loop":
        return route("loop", "engine = 'loop'")
    no_batch = batched_refusal(model, task)
    if how.engine != "measured":
        if no_batch is not None:
            return route("loop", no_batch)
        unfolds = how.engine == "unfolded" and has_unfolded(model)
        return route("unfolded" if unfolds else "batched", f"engine = {how.engine!r}")
    paths = ["loop"]
    if device.type == "cpu" and how.precision == "float32" and group_size(model, task, work) > 1:
        paths.append("together")
    if no_batch is None:
        paths += ["batched", "unfolded"] if has_unfolded(model) else ["batched"]
    routes = [route(path, "engine = 'measured'") for path in paths]
    if len(routes) == 1:
        return route("loop", str(no_batch))
    seconds = measure(routes)
    best = min(range(len(routes)), key=seconds.__getitem__)
    told = ", ".join(f"{path} {second:.3g} s" for path, second in zip(paths, seconds, strict=True))
    return route(paths[best], f"measured: {told}")


def _check(model: torch.nn.Module, task: "Task", how: Computation, device: torch.device, count: int) -> None:
    if how.precision == "tf32" and device.type == "cpu":
        raise DeltaflError("precision is 'tf32', which CPUs do not have; write 'float32' or 'bfloat16'")
    reason = None if how.precision != "bfloat16" else refusal(model, example_of(task))
    if reason is not None:
        raise DeltaflError(f"precision is 'bfloat16', but {reason}; write 'float32'")
    if count > 1 and (device.type != "cpu" or how.engine not in ("auto", "loop")):
        raise DeltaflError(
            f"workers is {count}, but one process trains the whole cohort with device = {how.device!r} and "
            f"engine = {how.engine!r}; write workers = 1"
        )


class _Noted(BaseModel):
    """``engine.json``: a route, and what the device was called."""

    path: Literal["loop", "together", "batched", "unfolded"]
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
    precision: Literal["float32", "tf32", "bfloat16"]
    why: str
    hardware: str


def hardware_of(folder: Path) -> str | None:
    """The device that a run in this folder trained on, if it is not a CPU and there is a note of it."""
    noted = _noted(folder)
    return None if noted is None or noted.hardware == "cpu" else noted.hardware


def kept_route(folder: Path | None) -> Route | None:
    """The route that a run in this folder took; None if there is no note of one.

    Raises:
        DeltaflError: If the note is damaged, or the device is not there.
    """
    noted = None if folder is None else _noted(folder)
    if noted is None:
        return None
    found = device_name(find_device(noted.device))
    if found != noted.hardware:
        _log.warning("this run began on %s and goes on with %s: last bits will differ", noted.hardware, found)
    return Route(noted.path, noted.device, noted.precision, noted.why)


def _noted(folder: Path) -> _Noted | None:
    note = folder / _NOTE
    return checked(_Noted, read_json(note), str(note), _DAMAGED) if note.exists() else None


def keep_route(route: Route, folder: Path) -> None:
    """Note a route that was not taken by the rule for CPUs alone; one that is there already stays."""
    note = folder / _NOTE
    if (route.why != Route().why or route.precision != "float32") and not note.exists():
        hardware = device_name(find_device(route.device))
        write_atomically(note, json.dumps({**route._asdict(), "hardware": hardware}, indent=1) + "\n")
