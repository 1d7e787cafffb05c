"""Federations whose seed is not given draw the same one in every test."""

import pytest


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafl.federation.rules.randbits", lambda bits: 0)
