"""Errors that a user can cure: one clear sentence each, shown without a traceback by the command
line.
"""

import difflib
import importlib.util
import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar

#: What user code can raise; a ``sys.exit`` in it must not choose this program's exit code.
OWN_ERRORS = (Exception, SystemExit)

T = TypeVar("T")

#: PyTorch without CUDA: a tenth of its size.
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


#: Characters of a sentence at most; ours are shorter, unless they quote something long.
_LONGEST = 4000


def printable(text: object, limit: int | None = 200) -> str:
    r"""What others wrote, as one line that does nothing to a terminal, a log or a page.

    Line breaks, escapes, marks that turn the direction of text, and all else that cannot be seen
    are written as Python writes them, such as ``\x1b``. What is longer than ``limit`` characters,
    unless that is None, loses its middle. Anything but a string is shown as ``str`` shows it, and
    by its type if that raises.
    """
    try:
        whole = str(text)
    except OWN_ERRORS:
        whole = f"<{type(text).__name__}>"
    if limit is not None and len(whole) > 2 * limit:  # do not look at a gigabyte
        whole = whole[:limit] + whole[-limit:]
    shown = "".join(map(_visible, whole))
    if limit is None or len(shown) <= limit:
        return shown
    tail = limit // 3
    head = limit - tail - len("...")
    return f"{shown[:head]}...{shown[len(shown) - tail :]}"


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _with_printable_text(record: logging.LogRecord) -> bool:
    record.msg = printable(record.getMessage(), _LONGEST)
    record.args = ()
    return True


#: What the library tells is logged here, ``printable`` whatever it quotes; the command line shows
#: it.
log = logging.getLogger("deltafl")
log.addFilter(_with_printable_text)


class DeltaflError(ValueError):
    """A mistake of the caller; the message names what was given, what is allowed and what to
    write instead, and is ``printable`` whatever it quotes.
    """

    def __init__(self, sentence: object) -> None:
        super().__init__(printable(sentence, _LONGEST))


class FirstProcessError(DeltaflError):
    """What went wrong in the first process of this run, which reports it itself."""


class MissingExtraError(DeltaflError):
    """A part of deltafl needs a package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        cure = f"pip install 'deltafl[{extra}]'"
        if package == "torch":
            cure = f"{cure}, and before it, for a machine without a GPU, {CPU_TORCH}"
        super().__init__(f"this needs the package {package!r}: {cure}")


def require(package: str, extra: str) -> None:
    """Raise ``MissingExtraError`` unless a package can be imported; check before long work, not
    after it.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra)


def check_types(call: str, **given: tuple[Any, *tuple[type, ...]]) -> None:
    """Raise a ``DeltaflError`` unless each argument, a value and the types that it may have, is of
    one of them: arguments change places.
    """
    for name, (value, *kinds) in given.items():
        if not isinstance(value, tuple(kinds)):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise DeltaflError(
                f"{name} is of type {type(value).__name__}, not {allowed}; write {call}"
            )


def bounds_of(interval: str) -> tuple[float, float]:
    """The ends of an interval, such as ``"[0, 1)"``; its brackets say which belong to it."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def is_in(value: Any, interval: str) -> bool:
    """Whether something is a number in an interval, such as ``"[0, 1)"``."""
    low, high = bounds_of(interval)
    number = value  # mypy does not know how to compare a Real
    if not isinstance(value, Real):
        return False
    try:
        float(number)
    except OverflowError:  # such as 10**400, which is below infinity
        return False
    if number == low:
        return interval.startswith("[")
    if number == high:
        return interval.endswith("]")
    return bool(low < number < high)


class WithRanges:
    """Base class of frozen dataclasses whose numbers must lie in intervals."""

    #: By name, such as ``{"floor": "[0, 1]"}``; None is allowed where no number is the default.
    ranges: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def whole_numbers(cls) -> set[str]:
        """The fields that hold no other numbers, if any."""
        declared: Any = cls
        if not is_dataclass(declared):  # the base class of several kinds
            return set()
        return {one.name for one in fields(declared) if one.type in (int, int | None)}

    def __post_init__(self) -> None:
        whole = self.whole_numbers()
        for name, interval in self.ranges.items():
            value = getattr(self, name)
            # A dataclass keeps its defaults as class attributes.
            may_lack = getattr(type(self), name, None) is None
            if value is None and may_lack:
                continue
            if not is_in(value, interval):
                raise DeltaflError(f"{name} is {value!r:.60}; it must be in {interval}")
            if name in whole and not isinstance(value, Integral):
                raise DeltaflError(f"{name} is {value!r:.60}; it must be a whole number")


def unknown_name(
    kind: str,
    given: str,
    allowed: Iterable[str],
    of: str = "",
) -> DeltaflError:
    """The error for a name that does not exist (``of`` what, if it is a part), with the nearest
    one that does.
    """
    names = sorted(allowed)
    # Of a text of thousands of letters nobody wants to read all, or the likeness.
    near = [repr(name) for name in near_names(str(given)[:100], names)]
    shown = f"{given!r:.100}"
    if of:
        shown = f"{shown} of {of!r}"
    if near:
        return DeltaflError(f"unknown {kind} {shown}: did you mean {' or '.join(near)}?")
    return DeltaflError(f"unknown {kind} {shown}: choose one of {', '.join(names)}")


def entry(kind: str, name: str, table: Mapping[str, T], *more: str) -> T:
    """What a table has by a name; ``unknown_name`` if there is none, which also knows ``more``."""
    if name not in table:
        raise unknown_name(kind, name, [*table, *more])
    return table[name]


def require_no_twins(where: str, names: Iterable[Any]) -> None:
    """Refuse different values of which nobody knows whether they are one name: 1 and ``"1"``, or
    ``"a"`` and ``"a "``, which are written alike; True and 1, which Python takes for equal.
    """
    first: dict[str, Any] = {}
    for name in {(type(name), name): name for name in names}.values():
        texts = [str(name).strip()]
        if isinstance(name, bool):
            texts.append(str(int(name)))
        for text in texts:
            other = first.setdefault(text, name)
            is_same = other == name and isinstance(other, bool) == isinstance(name, bool)
            if not is_same:
                both = " and ".join(
                    f"the text {each!r}" if isinstance(each, str) else str(each)
                    for each in (other, name)
                )
                raise DeltaflError(
                    f"{where} holds {both}, which may be one name or two: make all of them texts, "
                    "or write them differently"
                )


def near_names(given: str, names: Sequence[str]) -> list[str]:
    """The names with the word ``given``, without a plural's s; else the nearest in spelling, or
    those that begin so.
    """
    word = given.removesuffix("s")
    found = [
        name
        for name in names
        if word in {part.removesuffix("s") for part in re.split("[-_]", name)}
    ]
    found = found or difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return found or [name for name in names if len(given) > 2 and name.startswith(given)]


@contextmanager
def explained(
    what: str,
    path: Path | None = None,
    cure: str = "",
) -> Iterator[None]:
    """Turn what code of the user's, or of another library, raises into a sentence: ``what``, the
    error ``in_one_line``, and a cure.
    """
    try:
        yield
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{what}: {in_one_line(error, path)}{cure}") from error


def in_one_line(error: BaseException, path: Path | None = None) -> str:
    """An error in one line, with the line of a user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())
    sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if not lines:
        return sentence
    # The innermost line of the user's own file, not of a library that it calls.
    return f"{sentence} (line {lines[-1]})"


def counted(count: object, one: str, several: str | None = None) -> str:
    """A number of things, such as ``1 round`` and ``20 rounds``; ``several`` is what stands behind
    other numbers than 1 where that is more than an s.
    """
    return f"{count} {one if str(count) == '1' else several or f'{one}s'}"
