"""Flower's messages are made in this process as in the tests of Flower."""

import logging
from importlib.util import find_spec

import pytest

if find_spec("flwr") is not None:
    from flower.conftest import _inside_a_run_without_waiting  # noqa: F401


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the hosts log."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog
