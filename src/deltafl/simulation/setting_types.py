"""The types of settings: how a text of the command line, a line of TOML or a Python object is read,
and which values are allowed.
"""

import os.path
import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator

from ..calls import Named
from ..errors import DeltaflError
from ..store.values import LARGEST_FLOAT, LARGEST_WHOLE
from ..tasks.metrics import metric_of

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0, le=LARGEST_FLOAT)]
NotNegative = Annotated[Finite, Field(ge=0, le=LARGEST_FLOAT)]
Share = Annotated[Finite, Field(gt=0, lt=1)]
Memory = Annotated[Finite, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=LARGEST_WHOLE)]
# On the command line these are "8,2" and "uniform,pracdelta".
CommaSeparated = BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)
Numbers = Annotated[tuple[float, float], CommaSeparated]
# pydantic would keep the text alone.
Name = Annotated[str, WrapValidator(lambda v, checked: v if isinstance(v, Named) else checked(v))]
Seed = Annotated[int, Field(ge=0)]


def _named(folder: str) -> str:
    # What a shell makes of a variable that is not set would be the current folder.
    if not folder.strip():
        raise ValueError("write the name of a folder, or leave it out")
    return folder


Folder = Annotated[str, AfterValidator(_named)]
#: Of this machine; one that all machines have keeps its ~, which is each user's own.
FolderHere = Annotated[Folder, AfterValidator(os.path.expanduser)]


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda|cuda:\d+|auto", name):
        raise ValueError("write cpu, cuda, cuda:N or auto")
    return name


Device = Annotated[str, AfterValidator(_device)]


def _metric_names(given: Any) -> Any:
    """A text as several names; objects go with their names."""
    parts = given if isinstance(given, list | tuple) else [given]
    if isinstance(given, str) and not isinstance(given, Named):
        parts = [part for part in given.split(",") if part.strip()]
    names = []
    for part in parts:
        name = part
        if not isinstance(part, str):
            metric = metric_of(part)
            name = Named(metric.name, metric)
        elif not isinstance(part, Named):
            name = part.strip()
        names.append(name)
    return tuple(names)


def as_recorded(metrics: Any) -> tuple[str, ...]:
    """Metrics that a user has typed, by the names that records have; there, another spelling is
    that of a user's own object. What is unknown stays.
    """
    return tuple(map(_as_recorded, _metric_names(metrics)))


def _as_recorded(name: str) -> str:
    if not isinstance(name, Named) and ".py:" not in name:
        with suppress(DeltaflError):
            return metric_of(name).name
    return name


def once(values: Any) -> Any:
    """Refuse what is named twice."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice; name each once")
    return values


def listed(seeds: Any) -> Any:
    """``"3,5,8"`` as a list, and a number of seeds as 0, 1, ..."""
    listed = seeds
    if isinstance(seeds, str) and "," in seeds:
        listed = seeds.split(",")
    if isinstance(listed, list | tuple):
        # A list of one seed ends in a comma.
        return [seed for seed in listed if seed != ""]
    if not (str(seeds).strip().isdecimal() and 0 < int(seeds) <= 10**5):
        raise ValueError("it must be a number of seeds, 1 to 100,000, or a list such as 3,5,8")
    return range(int(seeds))


def _joined(label: Any) -> Any:
    """Several columns as on the command line."""
    if isinstance(label, list | tuple) and all(isinstance(each, str) for each in label):
        return ",".join(label)
    return label


Columns = Annotated[str, BeforeValidator(_joined)]
Metrics = Annotated[
    tuple[Name, ...],
    Field(min_length=1),
    BeforeValidator(_metric_names),
    AfterValidator(once),
]
Seeds = Annotated[
    tuple[Seed, ...], Field(min_length=1), BeforeValidator(listed), AfterValidator(once)
]
#: The learning rates of one sampler; a number alone is the local one.
Rates = Annotated[
    dict[Literal["local_lr", "server_lr"], Positive],
    BeforeValidator(lambda v: {"local_lr": v} if isinstance(v, float | int | str) else v),
]
