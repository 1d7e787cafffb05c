"""The user's own code in an experiment: a folder is not continued with another version of it."""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from ...calls import Named
from ...errors import DeltaflError
from ...samplers.label import base_name, split_settings
from ...store import read_toml, write_atomically
from ...store.files import reading
from ...store.own_python import imported, load_named, split_name
from ...tasks.base import Task
from ...tasks.metrics import Metric, is_of_library
from ...tasks.registry import added_tasks
from ...types import Json
from ..describe import UnknownError, describe
from .provenance import noted

#: Settings that are folders, whatever they are called.
_FOLDERS = {"data_dir", "memory_path"}
#: Settings whose objects are called by their own names.
_PLAIN = {"task", "sampler", "samplers"}
#: Settings that may name files of the user's own.
_NAMING = {*_PLAIN, "lr_schedule", "metric", "partition"}
_FILE = re.compile(r"[^@(]*\.py(?::\w+)?(?=$|[@(+])")
#: Fields of a task that its data's checksum covers, or that say nothing of what is played.
_DATA = {"name", "dataset", "client_rows"}
#: How a description begins: versions of Python compile the same code differently.
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}:"
_UNKNOWN = "unknown: "
#: Of the numbers of a model: machines round differently, and another model differs by far more.
TOLERANCE = 1e-3


def objects_of(settings: Json) -> Json:
    """The objects that settings carry, by their names: only this process can go on with them."""
    return {
        base_name(text) if key in _PLAIN else f"{key}={text}": text.of
        for key, text in _texts(settings)
        if isinstance(text, Named)
    }


def require_objects(folder: Path, recorded: Json, now: BaseModel) -> None:
    """Refuse names where a folder was begun with objects: nobody can make these of their names."""
    began = _environment(folder).get("objects", [])
    given = now.model_dump()
    for key, text in recorded.items():
        name = text if key == "task" else f"{key}={text}"
        if name in began and not isinstance(given.get(key), Named):
            raise DeltaflError(
                f"{folder} was played from Python with {key} = {text}, an object, and not with "
                f"{given.get(key)}: give the object, or choose another --out"
            )


def with_objects(recorded: Json, now: BaseModel) -> Json:
    """Recorded settings, which are text alone, with the objects that the settings ``now`` carry."""
    given = now.model_dump()
    classes = {name: part for name, part in objects_of(given).items() if isinstance(part, type)}

    found = dict(recorded)
    for key, text in found.items():
        if isinstance(given.get(key), Named) and given[key] == text:
            found[key] = given[key]
    if "metric" in found:
        objects = {name: name.of for name in given["metric"] or () if isinstance(name, Named)}
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
    if ".py:" in name or is_of_library(name):
        return name
    return Named(name, Metric(name, lambda *_: 0.0))


def with_object(label: str, classes: Json) -> str:
    """The label with its class, if that is one of ``classes``."""
    kind = classes.get(base_name(label))
    return label if kind is None else Named(label, kind)


def code_of(settings: Json) -> dict[str, str]:
    """A description of each class, function and task of the user's own that settings name or
    carry, such as ``{"mine.py:ByLoss": "3.12:1f2e3d4c5b6a7988"}``.

    Data are left out: they have a checksum of their own.
    """
    return {name: _described(part) for name, part in _own(settings)}


class Code(NamedTuple):
    """The user's own code as a call finds it, before it plays anything.

    Played code may change what it uses, a list of its own for instance: its digest is taken once.
    """

    digests: Mapping[str, str]  #: of ``code_of``
    files: Mapping[Path, str]  #: of ``imported``

    @classmethod
    def of(cls, settings: BaseModel) -> "Code":
        """The code that settings name or carry."""
        digests = code_of(settings.model_dump())
        return cls(digests, imported())

    def and_of(self, settings: BaseModel) -> "Code":
        """With what more settings name; what is known stays."""
        more = Code.of(settings)
        return Code({**more.digests, **self.digests}, {**more.files, **self.files})

    def part(self, settings: BaseModel) -> dict[str, str]:
        """The digests of what these settings name or carry."""
        names = (name for name, _ in _own(settings.model_dump()))
        return {name: self.digests[name] for name in names if name in self.digests}

    def require_same_files(self, folder: Path) -> None:
        """Refuse a file that another process, this one, has imported in another version."""
        for file, digest in imported().items():
            if self.files.get(file, digest) != digest:
                raise DeltaflError(
                    f"{file.name} has changed since {folder} was begun: undo the change, or choose "
                    "another --out"
                )


def _own(settings: Json) -> Iterator[tuple[str, Any]]:
    for name, part in objects_of(settings).items():
        if isinstance(part, Task):
            yield name, {f.name: vars(part)[f.name] for f in fields(part) if f.name not in _DATA}
        elif callable(part):
            yield name, part
    for key, text in _texts(settings):
        for name in _files(key, text):
            yield name, load_named(name, "FILE.py:NAME")
    registered = added_tasks().get(settings.get("task", ""))
    if registered is not None:
        yield registered.name, registered


def _texts(settings: Json) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if key not in _FOLDERS:
            texts = value if isinstance(value, list | tuple) else [value]
            yield from ((key, text) for text in texts if isinstance(text, str))


def _files(key: str, text: str) -> list[str]:
    """The names ``FILE.py:NAME`` in a setting; a label may have several."""
    if key not in _NAMING:
        return []
    if key not in ("sampler", "samplers"):
        return _FILE.findall(text)
    method, own = split_settings(text)
    return _FILE.findall("@".join([method, *map(str, own.values())]))


def _described(part: Any) -> str:
    try:
        return _PYTHON + describe(part)
    except UnknownError as error:
        return f"{_UNKNOWN}{error}"


def require_same_code(
    folder: Path,
    code: Code,
    before: BaseModel,
    is_one_call: bool = False,
) -> None:
    """Refuse to go on in a folder with other code of the user's own than it began with, with the
    settings ``before``; also with code that cannot be compared, unless ``is_one_call``.
    """
    known = _code(folder)
    cure = "or choose another --out"
    for name, now in code.part(before).items():
        then = known.get(name)
        is_unknown = now.startswith(_UNKNOWN)
        if then == now and (is_one_call or not is_unknown):
            continue
        if is_unknown:
            raise DeltaflError(
                f"{name} uses a value of type {now.removeprefix(_UNKNOWN)}, of which nobody can "
                f"say whether {folder} was played with the same: make that value inside the "
                f"function that uses it, {cure}"
            )
        if then is None or not then.startswith(_PYTHON):
            raise DeltaflError(
                f"{folder} was played with another version of Python or of deltafl, and code "
                f"cannot be compared between them: go on with {name} there, {cure}"
            )
        raise DeltaflError(
            f"{name} is not the one that {folder} was played with; its code, or a value that it "
            f"uses, has changed: undo the change, {cure}"
        )


def require_one_code(folders: Sequence[Path]) -> None:
    """Refuse to join folders that were played with different code of one name.

    Code that was played with different versions of Python is not compared.
    """
    for first, second in combinations(folders, 2):
        one = _code(first)
        other = _code(second)
        for name in one.keys() & other.keys():
            version = one[name].partition(":")[0]
            if one[name] != other[name] and other[name].startswith(f"{version}:"):
                raise DeltaflError(
                    f"{first} and {second} were played with different code of {name}; leave one "
                    "of them out"
                )


def require_same_model(
    folder: Path,
    before: Json,
    now: Json,
    other: Path | None = None,
) -> None:
    """Refuse a model, or a loss, that is not the one that a folder was played with; it is that of
    the task, or of an ``other`` folder. What one of both has not recorded is not compared.
    """
    for name in before.keys() & now.keys():
        old = before[name]
        new = now[name]
        same = old == new
        if isinstance(old, float) and isinstance(new, float):
            same = math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-9)
        if same:
            continue
        if other is not None:
            raise DeltaflError(
                f"{folder} and {other} were played with different models or losses (the {name} on "
                f"two examples was {old} and {new}): leave one of them out"
            )
        raise DeltaflError(
            f"the model of the task, or its loss, is not the one that {folder} was played with "
            f"(its {name} on two examples was {old} and is {new}): undo the change, perhaps in "
            "a file or a package that it uses, or choose another --out"
        )


def where_it_began(folder: Path) -> Path:
    """The working directory in which the files that a folder's settings name are found: the present
    one, or that in which the folder was begun.
    """
    place = folder / "config.toml"
    there = Path(folder, _environment(folder).get("directory", ""))
    recorded = read_toml(place) if place.exists() else {}
    names = [value for value in recorded.values() if isinstance(value, str)]
    names += [name for key, text in _texts(recorded) for name in _files(key, text)]
    with reading(place):  # a name may be one that no file has
        for file in (split_name(name)[0] for name in names):
            if not file.exists() and (there / file).exists():
                return there.resolve()
    return Path.cwd()


def note_code(folder: Path, code: Code) -> None:
    """Add the code of samplers that are new in a folder to its ``environment.json``."""
    known = _environment(folder)
    before = known.get("code", {})
    # What was noted first stays: with it the runs were played.
    digests = {**code.digests, **before}
    if digests != before:
        text = json.dumps({**known, "code": digests}, indent=1)
        write_atomically(folder / "environment.json", text + "\n")


def _code(folder: Path) -> dict[str, str]:
    return dict(_environment(folder).get("code", {}))


def _environment(folder: Path) -> Json:
    place = folder / "environment.json"
    return noted(place) if place.exists() else {}
