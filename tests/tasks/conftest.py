"""No cache and no environment of the person who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_data_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
