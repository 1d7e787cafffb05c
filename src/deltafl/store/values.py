"""Values from JSON and TOML, as the types that they must have."""

import json
import tomllib
from collections.abc import Mapping, Set
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import DeltaflError
from ..types import Json
from .files import read_text

T = TypeVar("T")

#: Bytes of a file of settings.
LARGEST_TOML = 2**22

#: What is allowed, by the types of pydantic's errors; its own words say the others.
_ALLOWED = {
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "dict_type": "it must be a table of names and values",
    "finite_number": "it must be a finite number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "greater_than": "it must be above {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "int_from_float": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "less_than": "it must be below {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "literal_error": "it must be {expected}",
    "missing": "a value is missing",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_type": "it must be text",
    "too_short": "write at least {min_length}",
    "value_error": "{error}",
}


#: The keys of limits in a JSON schema, and the brackets of an interval.
_LEAST = {"minimum": "[", "exclusiveMinimum": "("}
_MOST = {"maximum": "]", "exclusiveMaximum": ")"}
#: Of whole numbers, and of floating-point numbers in float32.
LARGEST_WHOLE = 2**31 - 1
LARGEST_FLOAT = 1e37


def plain_json(value: Any) -> Any:
    """``value`` with tuples as lists, what NumPy has as Python has it, and numbers that are not
    finite as None, however deep.
    """
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry) for entry in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain_json(value.tolist())
    return value


def read_toml(path: Path, *, users: bool = False) -> Json:
    """A TOML file as a dict; a ``DeltaflError`` if it is none."""
    text = read_text(path, users=users, largest=LARGEST_TOML)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DeltaflError(f"{path} is not valid TOML: {error}") from None


def read_json(path: Path, *, users: bool = False) -> Any:
    """The value in a JSON file; a ``DeltaflError`` if it holds none."""
    return parsed(read_text(path, users=users), str(path))


def parsed(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; a ``DeltaflError`` that begins with ``where`` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DeltaflError(f"{where} is not valid JSON: {error}") from None


def checked(kind: type[T], value: Any, where: str, cure: str) -> T:
    """A value as the type that it must have; the error has ``where``, the entry and ``cure``."""
    from pydantic import ValidationError  # the core does without it

    try:
        found: T = _adapter(cast(Any, kind)).validate_python(value)
    except ValidationError as error:
        # One sentence names one mistake.
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"])) or "the whole"
        raise DeltaflError(f"{where}: {entry}: {allowed(first)}; {cure}") from None
    return found


def allowed(error: Any, interval: str = "") -> str:
    """What one of pydantic's errors says is allowed; numbers are allowed in an interval."""
    if interval and error["type"].startswith(("greater_than", "less_than")):
        return f"it must be in {interval}"
    if error["type"] in _ALLOWED:
        return _ALLOWED[error["type"]].format(**error.get("ctx", {}))
    return str(error["msg"])


def sentence(error: Any, schema: Json) -> str:
    """One of pydantic's errors as a sentence: the setting, what was given and what is allowed, as
    the JSON schema of all settings says.
    """
    for step in error["loc"]:
        # Of a table of settings, of a list, or of rates by the names of samplers.
        inner = only_kind(schema)
        every = inner.get("items") or inner.get("additionalProperties") or {}
        schema = inner.get("properties", {}).get(step, every)
    interval = interval_of(schema, error["ctx"].keys()) if "ctx" in error else ""
    # Of what it is, too: rates of uniform.
    name = " of ".join(part for part in error["loc"][:2] if isinstance(part, str))
    given = error["input"]
    shown = repr(given)
    if isinstance(given, list | tuple):
        shown = ", ".join(map(str, given)) or "empty"
    return f"{name or 'settings'} is {shown}; {allowed(error, interval)}"


def only_kind(schema: Json) -> Json:
    """The JSON schema of a value that may also be left out, without that."""
    kind: Json = schema.get("anyOf", [schema])[0]
    return kind


def interval_of(schema: Json, broken: Set[str] = frozenset()) -> str:
    """The interval of the numbers that a JSON schema allows, such as ``"[0, 1)"``; empty if it
    allows all. Limits of the types, such as float32's, say nothing to a person, unless one is
    ``broken``, as pydantic names it.
    """
    kind = only_kind(schema)
    low = next((f"{sign}{kind[key]:.10g}" for key, sign in _LEAST.items() if key in kind), "(-inf")
    high = next((f"{kind[key]:.10g}{sign}" for key, sign in _MOST.items() if key in kind), "inf)")
    most = kind.get("maximum", kind.get("exclusiveMaximum"))
    if broken.isdisjoint({"le", "lt"}) and most in (LARGEST_WHOLE, LARGEST_FLOAT):
        high = "inf)"
    return "" if (low, high) == ("(-inf", "inf)") else f"{low}, {high}"


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
