"""Flower's messages are made in this process as in the tests of Flower."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

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


@pytest.fixture(params=["flower_nodes", "nvflare_sites"])
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(label, ...) -> what a host has done."""
    if find_spec({"flower_nodes": "flwr", "nvflare_sites": "nvflare"}[request.param]) is None:
        pytest.skip("the host is not installed")
    host: Any = import_module(f"{__package__}.{request.param}")
    return lambda label, *given, **settings: host.play(monkeypatch, label, *given, **settings)
