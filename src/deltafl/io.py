"""Files: text, JSON, TOML, arrays (safetensors) and users' Python; every error is one sentence.

A file that is written is never seen half done.
"""

import importlib
import importlib.util
import json
import os
import sys
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .errors import OWN_ERRORS, DeltaflError, in_one_line

T = TypeVar("T")

#: safetensors' names of types.
_TYPES = {
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"u{bits // 8}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
#: Where safetensors keeps texts.
_TEXTS = "__metadata__"


def plain_json(value: Any) -> Any:
    """``value`` with tuples as lists and numbers that are not finite as None, however deep."""
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry) for entry in value]
    return value


def private_folder(folder: Path) -> None:
    """Make a folder that its owner alone can enter; one that is there already keeps its
    permissions.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a file that is made can be read and written by its owner alone."""
    return os.open(path, flags, 0o600)


def write_atomically(path: Path, *parts: Any, private: bool = False) -> None:
    """Write texts or bytes so that a reader (or a restart) sees the old file or the new one, never
    a part.

    A ``private`` file, with what is known of single clients, can be read by its owner alone.
    """
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.unlink(missing_ok=True)  # never written through: it may be a link to another file
        try:
            with open(beside, "xb", opener=private_opener if private else None) as file:
                for part in parts:
                    file.write(part.encode() if isinstance(part, str) else part)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            sync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make an error of the system, such as a full disk, a sentence that names the file that is
    written.
    """
    try:
        yield
    except OSError as error:
        raise DeltaflError(
            f"cannot write {path}: {error.strerror}; make room, or choose a folder that exists"
        ) from error


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a file that is made or renamed is there after a
    power loss.
    """
    if os.name == "posix":  # Windows opens no folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read_text(path: Path) -> str:
    """The text of a file; a ``DeltaflError`` if it cannot be read, or is not in UTF-8."""
    try:
        with reading(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DeltaflError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}"
        ) from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make an error of the system a sentence that names the file that is read."""
    try:
        yield
    except OSError as error:
        raise DeltaflError(f"cannot read {path}: {error.strerror}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; a ``DeltaflError`` if it is none."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise DeltaflError(f"{path} is not valid TOML: {error}") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file; a ``DeltaflError`` if it holds none."""
    return parsed(read_text(path), str(path))


def parsed(text: str | bytes, where: str) -> Any:
    """The value that a JSON text stands for; a ``DeltaflError`` that begins with ``where`` if it
    is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DeltaflError(f"{where} is not valid JSON: {error}") from None


def checked(kind: type[T], value: Any, where: str, cure: str) -> T:
    """A value that was read, as the type that it must have; the error has ``where``, the entry
    and ``cure``.
    """
    from pydantic import ValidationError  # not needed by the core, which imports this module

    try:
        found: T = _adapter(cast(Any, kind)).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        entry = "".join(f"{part}." for part in first["loc"]).removesuffix(".") + (
            ": " if first["loc"] else ""
        )
        raise DeltaflError(
            f"{where}: {entry}{first['msg'].removeprefix('Value error, ')}; {cure}"
        ) from None
    return found


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def sentence(error: Any) -> str:
    """One of pydantic's errors as a sentence with the option's name, what was given and what is
    allowed.
    """
    name = (
        " of ".join(part for part in error["loc"][:2] if isinstance(part, str)) or "settings"
    )  # rates of uniform
    given = error["input"]
    message = str(error["msg"]).removeprefix("Value error, ")
    message = (
        (message[0].lower() + message[1:])
        .partition(", unable to parse")[0]
        .replace("input should", "it must")
    )
    message = message.removesuffix(", unable to interpret input").replace(
        "a valid boolean", "true or false"
    )
    message = message.replace("a valid integer", "a whole number").replace(
        "a valid number", "a number"
    )
    message = message.replace("a valid string", "text").replace(
        "a valid dictionary", "a table of names and values"
    )
    if error["type"] == "too_short":
        message = f"write at least {error['ctx']['min_length']}"
    limit = error.get("ctx", {}).get("le")
    if isinstance(limit, float):
        message = message.replace(f"{Decimal(str(limit)):f}", f"{limit:g}")  # not 1 and 37 zeros
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    return (
        f"{name} is {(', '.join(map(str, given)) if listed else repr(given)) or 'empty'}; {message}"
    )


def write_tensors(
    path: Path,
    arrays: Mapping[str, npt.NDArray[Any]],
    texts: Mapping[str, str] | None = None,
    private: bool = False,
) -> int:
    """Write arrays and texts into a safetensors file (``write_atomically``); returns its CRC-32."""
    # Wide types first: every array begins at a multiple of its width.
    ordered = dict(sorted(arrays.items(), key=lambda part: -part[1].itemsize))
    header: dict[str, Any] = {_TEXTS: dict(texts)} if texts else {}
    end = 0
    for name, array in ordered.items():
        if array.dtype not in _NAMES:
            names = ", ".join(dtype.name for dtype in _NAMES)
            raise DeltaflError(
                f"{name} has type {array.dtype}, which a state file does not hold; use one of "
                f"{names}"
            )
        place = [end, end + array.nbytes]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts: list[Any] = [
        len(text).to_bytes(8, "little"),
        text,
        *map(np.ascontiguousarray, ordered.values()),
    ]
    write_atomically(path, *parts, private=private)
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def read_tensors(
    path: Path, cure: str, checksum: int | None = None
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays and texts of a safetensors file; None as CRC-32 maps it into memory unread, where
    changes stay.

    The error of a file that is damaged, or has another checksum, ends in ``cure``: what to do then.
    """
    try:
        mapped = checksum is None
        whole = (
            np.asarray(np.memmap(path, np.uint8, mode="c"))
            if mapped
            else np.fromfile(path, np.uint8)
        )
        first = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:first].tobytes())
        texts = dict(header.pop(_TEXTS, {}))
        arrays = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            arrays[name] = (
                whole[first + start : first + end]
                .view(_TYPES[entry["dtype"]])
                .reshape(entry["shape"])
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeltaflError(f"{path} is no state file, or not all of it is there; {cure}") from error
    if checksum is not None and zlib.crc32(whole.data) != checksum:
        raise DeltaflError(f"{path} is not as it was written, its checksum differs: {cure}")
    return arrays, texts


def load_class(spec: str, base: type[T]) -> type[T]:
    """The class that ``FILE.py:Class`` names, a subclass of ``base``; a ``DeltaflError`` if
    there is none.
    """
    path, _, name = spec.rpartition(":")
    found = getattr(import_file(Path(path), "FILE.py:Class"), name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise DeltaflError(
            f"{path} has no class {name!r} that is a subclass of deltafl.{base.__name__}"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise DeltaflError(
            f"{spec} lacks {', '.join(missing)}; define what deltafl.{base.__name__} leaves open"
        )
    return found


def import_file(path: Path, form: str) -> ModuleType:
    """Import a file as any module is, under its own name, with its folder at the end of
    ``sys.path``; once a process.

    So it can import the files beside it, and other processes find its classes again.

    Raises:
        DeltaflError: If there is no such file (write one as ``form``), another module has its name,
            or it fails.
    """
    if not path.is_file():
        raise DeltaflError(f"there is no file {path}; write {form}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    usable = path.stem.isidentifier() and not path.stem.startswith("__")
    spec = importlib.util.find_spec(path.stem) if usable else None
    if spec is None or Path(str(spec.origin)).resolve() != path:
        why = "another module has this name" if spec else "this is no name of a module"
        raise DeltaflError(
            f"{path.name} cannot be imported: {why}; rename it, for instance to my_task.py"
        )
    try:
        return importlib.import_module(path.stem)
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{path.name} cannot be imported: {in_one_line(error, path)}") from error
