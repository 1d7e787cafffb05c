"""Fixtures for tests of the Flower adapter."""

import logging
from importlib.util import find_spec

import pytest

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _inside_a_run_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made only inside a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)
    monkeypatch.setattr("deltafl.flower.registration.time.sleep", lambda seconds: None)
    monkeypatch.setattr("deltafl.federation.rules.randbits", lambda bits: 0)


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What Flower's logger writes."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog
