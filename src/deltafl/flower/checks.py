"""Settings that cannot be what was meant, refused before anybody is waited for: one sentence each. No Flower here."""

from collections.abc import Iterable
from typing import Any

from ..errors import DeltaflError


def check_whole(name: str, value: object, allowed: str, least: int, most: int | None = None) -> None:
    """Refuse what is no whole number from ``least`` to ``most``; truth values and 10.0 are none.

    Args:
        name: How the setting is written.
        value: What was given.
        allowed: What may be given, in words.
        least: The smallest.
        most: The largest; None for no bound.
    """
    if type(value) is int and value >= least and (most is None or value <= most):
        return
    raise DeltaflError(f"{name} is {value!r}; it must be a whole number, {allowed}{_instead(name, value)}")


def _instead(name: str, value: Any) -> str:
    """What to write where another type holds a whole number, such as 10.0 or '10'."""
    try:
        whole = None if isinstance(value, int) or int(value) != float(value) else int(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    return "" if whole is None else f"; write {name}={whole}"


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts as a tuple; a single text, which would be read letter by letter, is refused."""
    if isinstance(value, str):
        raise DeltaflError(f"{name} is the text {value!r}; it must be a list of texts: write {name}=[{value!r}]")
    parts = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(part, str) for part in parts):
        raise DeltaflError(f"{name} is {value!r}; it must be a list of texts: write {name}=['...']")
    return parts


def check_part(name: str, value: Any, members: Iterable[str], example: str) -> None:
    """Refuse an object that is none of the library's kind, by the members that such a one must have."""
    if isinstance(value, type):
        raise DeltaflError(f"{name} is the class {value.__name__}; give an object of it: write {value.__name__}(...)")
    missing = [member for member in members if not hasattr(value, member)]
    if missing:
        raise DeltaflError(
            f"{name} is {value!r}, which has no {missing[0]!r}; write a name such as {example!r}, or give an object"
        )
