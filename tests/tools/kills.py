"""A process that is killed between any two of its calls to the file system."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "fsync", "link", "ftruncate")),
    *((Path, name) for name in ("replace", "unlink", "mkdir")),
]


class KilledError(BaseException):
    """No call comes through any more, not even one that would clean up."""


def kills(
    prepare: Callable[[], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Prepare and do something, killed after 0, 1, 2, ... calls, until it comes to its end."""
    calls = 0
    while True:
        action = prepare()
        left = calls

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*given: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise KilledError
                return call(*given, **named)

            return count

        with monkeypatch.context() as patch:
            for place, name in CALLS:
                patch.setattr(place, name, counted(getattr(place, name)))
            try:
                action()
                return
            except KilledError:
                pass
        yield calls
        calls += 1
