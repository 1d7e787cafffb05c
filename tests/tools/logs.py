"""The library's log, which a command of this process shows itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("deltafl")


@contextmanager
def log_as_before() -> Iterator[None]:
    """Leave the log as it was: else nothing of it would reach the next test's capture."""
    handlers = [*_LOGGER.handlers]
    level = _LOGGER.level
    propagate = _LOGGER.propagate
    try:
        yield
    finally:
        _LOGGER.handlers[:] = handlers
        _LOGGER.propagate = propagate
        _LOGGER.setLevel(level)  # which also forgets what was enabled
