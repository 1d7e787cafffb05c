"""A log of lines: one JSON value a line, added one after the other.

A process that is killed may leave half a line, and lines that its last checkpoint does not know. A
``Seal`` is how long a file was at some moment, and its checksum then: up to there it must stay as
it was, and to there it is cut back.
"""

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import DeltaflError
from ..types import Json
from .files import opened
from .values import checked, parsed, plain_json


class Seal(NamedTuple):
    """The beginning of a file."""

    length: int
    crc32: int


NOTHING = Seal(0, 0)
#: Bytes of a line; the longest ones name the cohort of a round.
LARGEST_LINE = 2**26


def append_line(path: Path, line: Json, private: bool = False) -> None:
    """Add a line, of which numbers that are not finite become null."""
    # NaN is no JSON: ``plain_json`` makes it null, and what it overlooks raises an error here.
    text = json.dumps(plain_json(line), allow_nan=False) + "\n"
    with opened(path, "ab", private=private) as file:
        file.write(text.encode())


def lines_in(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines of an open file; what is longer than one can be is an error."""
    while line := file.readline(LARGEST_LINE):
        if len(line) == LARGEST_LINE:
            raise DeltaflError(f"{path} has a line of {LARGEST_LINE} bytes or more: it is damaged")
        yield line


def line_of(text: bytes, kind: Any, where: str, cure: str) -> Json:
    """What a line says; the entries that ``kind`` knows have the types that they must have."""
    found = parsed(text, f"{where},")
    known = checked(kind, found, where, cure)
    return {**found, **known}


def read_lines(path: Path, kind: Any, cure: str) -> Iterator[Json]:
    """The lines, one by one; an error, which ends in ``cure``, if one is damaged."""
    with opened(path) as file:
        for number, text in enumerate(lines_in(file, path), start=1):
            yield line_of(text, kind, f"{path}, line {number}", cure)


def last_line(path: Path, kind: Any, cure: str, end: float = inf) -> Json:
    """The last line, up to ``end``; empty if there is none, or it was cut off as it was written,
    which nobody can tell from another damage.
    """
    if not path.exists():
        return {}
    with opened(path) as file:
        known = takewhile(lambda _: file.tell() <= end, lines_in(file, path))
        for text in deque(known, maxlen=1):
            with suppress(DeltaflError):
                return line_of(text, kind, f"the last line of {path}", cure)
    return {}


def seal_of(path: Path, known: Seal = NOTHING, end: float = inf) -> Seal:
    """The seal of a file up to ``end``, from one of its beginning that is ``known``."""
    length, checksum = known
    with opened(path) as file:
        file.seek(length)
        # A MiB at a time: the lines of a long run need not fit into memory.
        while part := file.read(int(max(0, min(2**20, end - length)))):
            length += len(part)
            checksum = zlib.crc32(part, checksum)
    return Seal(length, checksum)


def sync(path: Path) -> None:
    """Bring a file to the disk: a power loss does not shorten it."""
    with opened(path, "r+b") as file:
        os.fsync(file.fileno())


def cut_back(path: Path, length: int) -> None:
    """Cut off what follows; a file that is not there is made."""
    with opened(path, "ab") as file:
        file.truncate(length)


def whole_lines(path: Path, start: int = 0) -> list[bytes]:
    """The lines of a file that another process may be writing; none if it is not there."""
    try:
        with opened(path) as file:
            file.seek(start)
            return [line for line in lines_in(file, path) if line.endswith(b"\n")]
    except DeltaflError:
        return []
