"""Names with options, as in labels: ``name(option=value)`` and ``FILE.py:Class(option=value)``."""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import DeltaflError, entry, unknown_name

T = TypeVar("T")
_CALL = re.compile(r"^\s*(?P<name>[^()]*?)\s*(\((?P<options>.*)\))?\s*$", re.DOTALL)
_WORD = re.compile(r"^[A-Za-z_][\w.-]*$")
#: Types of options, in words.
_KINDS = {
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "a word",
    NoneType: "None",
}


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``name(option=value, ...)``: values are literals; strings need no quotes.

    Example:
        >>> parse_call("pracdelta(alpha=theory, floor=0.1)")
        ('pracdelta', {'alpha': 'theory', 'floor': 0.1})
    """
    found = _CALL.match(text)
    # It is parsed as the arguments of a call and never run: values are literals.
    source = f"f({(found and found['options']) or ''})"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    keywords = call.keywords if isinstance(call, ast.Call) and not call.args else None
    if found is None or keywords is None or any(keyword.arg is None for keyword in keywords):
        raise DeltaflError(
            f"cannot read {text!r}; write name(option=value, ...) with numbers, words or tuples"
        )
    options = {str(keyword.arg): _value(keyword.value, source, text) for keyword in keywords}
    if len(options) < len(keywords):
        raise DeltaflError(f"an option is given twice in {text!r}; give it once")
    return found["name"], options


def _value(node: ast.expr, source: str, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        word = ast.get_source_segment(source, node) or ""
        if _WORD.match(word):
            return {"true": True, "false": False}.get(word, word)
        raise DeltaflError(
            f"cannot read the value {word} in {text!r}; write a number, a word or a tuple"
        ) from None


def write_call(name: str, options: Mapping[str, Any]) -> str:
    """The shortest text that ``parse_call`` reads as this name and these options, in the order
    of their names.
    """
    written = (write_setting(key, value) for key, value in sorted(options.items()))
    return f"{name}({','.join(written)})" if options else name


def write_setting(name: str, value: Any) -> str:
    """The shortest text of ``name=value`` that ``parse_call`` reads."""
    if isinstance(value, np.generic):
        value = value.item()  # a number as Python writes it
    # Without quotes such words would be read as the values that they name.
    bare = (
        isinstance(value, str)
        and _WORD.match(value)
        and value.lower() not in {"true", "false", "none"}
    )
    if bare:
        return f"{name}={value}"
    written = repr(value)
    # Not inside a text, which would be another one.
    if not isinstance(value, str):
        written = written.replace(", ", ",")
    return f"{name}={written}"


def split_outside(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are not in parentheses, without blanks around
    them.
    """
    return [part.strip() for part in cut_outside(text, separator)]


def cut_outside(text: str, separator: str) -> list[str]:
    """The same with their blanks."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def check_options(
    kind: type,
    options: Mapping[str, Any],
    name: str,
    hidden: Collection[str] = (),
) -> None:
    """Refuse options of a dataclass that are no fields of it, are ``hidden``, or have values of
    other types.
    """
    known = (
        [field.name for field in fields(kind) if field.name not in hidden]
        if is_dataclass(kind)
        else []
    )
    for option, value in options.items():
        if not known:
            raise DeltaflError(f"{name!r} has no options; leave out {option!r}")
        if option not in known:
            raise unknown_name("option", option, known, of=name)
        hint = get_type_hints(kind)[option]
        if not _fits(value, hint):
            raise DeltaflError(f"{option} of {name!r} is {value!r}; it must be {_in_words(hint)}")


def made(kind: str, text: str, kinds: Mapping[str, type[T]], *more: str) -> T:
    """What ``name(option=value)`` makes of one of these dataclasses; ``more``: as for ``entry``."""
    name, options = parse_call(text)
    chosen = entry(kind, name, kinds, *more)
    check_options(chosen, options, name)
    return chosen(**options)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a literal has the type that a field is annotated with; types not in ``_KINDS`` are
    not checked.
    """
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is tuple and Ellipsis not in parts:
        return (
            isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
        )
    # Not ``isinstance``, to which True is a whole number.
    return hint not in _KINDS or type(value) is hint or (hint is float and type(value) is int)


def _in_words(hint: Any) -> str:
    parts = [_in_words(part) for part in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(parts)
    return f"({', '.join(parts)})" if get_origin(hint) is tuple else _KINDS.get(hint, str(hint))


class Named(str):
    """Text with the object that it names.

    It is shown, compared and written to files as text alone; what is read from a file again
    carries nothing. Settings and processes keep both.

    Attributes:
        of: The object.
    """

    of: Any

    def __new__(cls, text: str, of: Any) -> "Named":
        """``text`` with the object ``of``."""
        named = super().__new__(cls, text)
        named.of = of
        return named

    def __getnewargs__(self) -> tuple[str, Any]:  # type: ignore[override]
        # pickle and copy make it anew from these.
        return str(self), self.of
