"""The user's own code in an experiment: a folder is not continued with another version of it."""

import ast
import inspect
import json
import math
import re
import symtable
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..calls import Named
from ..errors import DeltaflError
from ..samplers.label import base_name
from ..store import read_json, read_text, write_atomically
from ..tasks.base import Task
from ..tasks.metrics import Metric, metric_of
from ..tasks.own import split_name


def objects_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that settings carry, by their names: only this process can go on with them."""
    objects = _classes_of(settings)
    task = settings.get("task")
    if isinstance(task, Named):
        objects[str(task)] = task.of
    return objects | _metrics_of(settings)


def _metrics_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: name.of for name in settings.get("metric") or () if isinstance(name, Named)}


def _classes_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {base_name(label): label.of for label in _labels(settings) if isinstance(label, Named)}


def with_objects(recorded: Mapping[str, Any], now: BaseModel) -> dict[str, Any]:
    """Recorded settings, which are text alone, with the objects that the settings ``now`` carry."""
    given = now.model_dump()
    classes = _classes_of(given)

    found = dict(recorded)
    if found.get("task") == given["task"]:
        found["task"] = given["task"]
    if "metric" in found:
        objects = _metrics_of(given)
        found["metric"] = [
            Named(name, objects[name]) if name in objects else _recorded_metric(name)
            for name in found["metric"]
        ]
    if "sampler" in found:
        found["sampler"] = with_object(found["sampler"], classes)
    if "samplers" in found:
        found["samplers"] = [with_object(label, classes) for label in found["samplers"]]
    return found


def _recorded_metric(name: str) -> str:
    """A metric of a record; a function that another process had is unknown, and settings that
    differ are refused.
    """
    if ".py:" in name:
        return name
    try:
        return metric_of(name).name
    except DeltaflError:
        return Named(name, Metric(name, lambda *_: math.nan))


def with_object(label: str, classes: Mapping[str, Any]) -> str:
    """The label with its class, if that is one of ``classes``."""
    kind = classes.get(base_name(label))
    return label if kind is None else Named(label, kind)


def code_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """CRC-32 of the user's own classes and functions that settings name, such as
    ``{"mine.py:ByLoss": "1f2e3d4c"}``.

    It is that of their source and of what it uses of the same file, without comments and layout. A
    name whose source is not found is left out.
    """
    named = [*_labels(settings), settings.get("task", ""), *(settings.get("metric") or ())]
    # Task, sampler and control variate may each be of a file; options and designs are cut off.
    files = chain.from_iterable(re.findall(r"[^@(]*\.py(?::\w+)?", text) for text in named)
    found = {name: _checksum(name) for name in files}
    found |= {name: _checksum(name, known) for name, known in objects_of(settings).items()}
    return {name: checksum for name, checksum in found.items() if checksum is not None}


def require_same_code(folder: Path, settings: BaseModel) -> None:
    """Refuse to go on in a folder with other code of the user's own than it has been played
    with.
    """
    for name in _different(
        code_of(settings.model_dump()),
        _recorded(folder).get("code", {}),
    ):
        raise DeltaflError(
            f"the code of {name}, or what it uses of the same file, is not the one that {folder} "
            "was played with: "
            "undo the change, or choose another --out"
        )


def require_one_code(folders: Sequence[Path]) -> None:
    """Refuse to join folders that were played with different code of one name."""
    for first, second in combinations(folders, 2):
        for name in _different(*(_recorded(folder).get("code", {}) for folder in (first, second))):
            raise DeltaflError(
                f"{first} and {second} were played with different code of {name}; leave one of "
                "them out"
            )


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    # A name that one of them alone has is no difference.
    return [name for name, checksum in one.items() if other.get(name, checksum) != checksum]


def note_code(folder: Path, settings: BaseModel) -> None:
    """Add the code of samplers that are new in a folder to its ``environment.json``."""
    known = _recorded(folder)
    # What was noted first stays: with it the runs were played.
    code = {**code_of(settings.model_dump()), **known.get("code", {})}
    if code != known.get("code", {}):
        write_atomically(
            folder / "environment.json", json.dumps({**known, "code": code}, indent=1) + "\n"
        )


def _recorded(folder: Path) -> dict[str, Any]:
    place = folder / "environment.json"
    return dict(read_json(place)) if place.exists() else {}


def _labels(settings: Mapping[str, Any]) -> list[str]:
    return [*(settings.get("samplers") or [settings.get("sampler", "")])]


def _checksum(name: str, known: Any = None) -> str | None:
    """Of a name in a file, or of an object; None if its source is not found, or is no Python."""
    try:
        text, top = _source(name, known)
        parts = ast.parse(text).body
        tables = [symtable.symtable(ast.unparse(part), name, "exec") for part in parts]
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    known = set[str]()
    names = {top}
    # What is used uses other names of the file, until none is added.
    while known != names:
        known = names
        names = known.union(*(_needed(table) for table in tables if known & _defined(table)))
    used = [part for part, table in zip(parts, tables, strict=True) if names & _defined(table)]
    source = "\n".join(map(ast.unparse, used))
    return f"{zlib.crc32(source.encode()):08x}"


def _defined(table: symtable.SymbolTable) -> set[str]:
    """The names that a statement of a file defines."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}


def _needed(table: symtable.SymbolTable) -> set[str]:
    """The names of the file that a statement, a class or a function uses."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(_needed, table.get_children()))


def _source(name: str, known: Any) -> tuple[str, str]:
    """The text of the file or notebook cell that defines a name or an object, and its name
    there.
    """
    if known is None:
        file, top = split_name(name)
        return read_text(file, users=True), top
    known = known.make_model if isinstance(known, Task) else known
    known = known.function if isinstance(known, Metric) else known
    methods = filter(
        inspect.isfunction,
        vars(known).values() if isinstance(known, type) else (),
    )
    for part in (known, *methods):  # in a notebook a class is found by its methods alone
        with suppress(OSError, TypeError):
            return "".join(inspect.findsource(part)[0]), known.__qualname__.partition(".")[0]
    raise OSError(name)
