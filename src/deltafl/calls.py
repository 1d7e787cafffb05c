"""Names with options, as labels and settings have them: ``name(option=value)`` and ``FILE.py:Class(option=value)``."""

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .errors import DeltaflError, unknown_name

T = TypeVar("T")
_CALL = re.compile(r"^\s*(?P<name>[^()]*?)\s*(\((?P<options>.*)\))?\s*$", re.DOTALL)
_WORD = re.compile(r"^[A-Za-z_][\w.-]*$")


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``name(option=value, ...)`` into name and options.

    Values are Python literals; strings need no quotes.

    Raises:
        DeltaflError: If the text is no such call.

    Example:
        >>> parse_call("pracdelta(alpha=theory, floor=0.1)")
        ('pracdelta', {'alpha': 'theory', 'floor': 0.1})
    """
    found = _CALL.match(text)
    source = f"f({(found and found['options']) or ''})"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    keywords = call.keywords if isinstance(call, ast.Call) and not call.args else None
    if found is None or keywords is None or any(keyword.arg is None for keyword in keywords):
        raise DeltaflError(f"cannot read {text!r}; write name(option=value, ...) with numbers, words or tuples")
    return found["name"], {str(keyword.arg): _value(keyword.value, source, text) for keyword in keywords}


def _value(node: ast.expr, source: str, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        word = ast.get_source_segment(source, node) or ""
        if _WORD.match(word):
            return word
        raise DeltaflError(f"cannot read the value {word} in {text!r}; write a number, a word or a tuple") from None


def with_options(thing: T, options: Mapping[str, Any], name: str) -> T:
    """A frozen dataclass with other values of some fields.

    Raises:
        DeltaflError: If it has no such field; the message suggests the nearest.
    """
    known = [field.name for field in fields(thing)] if is_dataclass(thing) else []
    for option in options:
        if not known:
            raise DeltaflError(f"{name!r} has no options; leave out {option!r}")
        if option not in known:
            raise unknown_name(f"option of {name!r}", option, known)
    return replace(thing, **options) if options else thing  # type: ignore[type-var]


def load_class(spec: str, base: type[T]) -> type[T]:
    """The class that ``FILE.py:Class`` names.

    Args:
        spec: Path and name of the class.
        base: What it must be a subclass of.

    Raises:
        DeltaflError: If the file cannot be read or run, or has no such class.
    """
    path, _, name = spec.rpartition(":")
    module = _module(Path(path).absolute())
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise DeltaflError(f"{path} has no class {name!r} that is a subclass of deltafl.{base.__name__}")
    return found


@cache
def _module(path: Path) -> Any:
    """The module in a file, loaded once."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DeltaflError(f"cannot read {path}; write FILE.py:Class with the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DeltaflError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
