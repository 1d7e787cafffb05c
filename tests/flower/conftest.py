"""Fixtures for tests of the Flower adapter."""

import logging
from importlib.util import find_spec

import pytest

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafl.flower.registration.time.sleep", lambda seconds: None)


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What Flower's logger writes."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog
