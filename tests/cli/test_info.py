"""``deltafl info``: what a report of a fault needs, and nothing that names a person or a machine."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.cli import deltafl_here

PRIVATE = {
    "DELTAFL_DATA": "/scratch/jane-roe/data",
    "DELTAFL_TASKS": "jane_roe_tasks",
    "MLFLOW_TRACKING_URI": "https://jane-roe:secret@hospital.internal",
    "MLFLOW_EXPERIMENT_NAME": "jane-roe",
    "USER": "jane-roe",
}


def test_it_has_versions_hardware_and_settings(tmp_path: Path) -> None:
    done = deltafl_here("info", "--json", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["python"] == platform.python_version() and found["numpy"] == np.__version__
    assert found["cores"] >= found["cores allowed"] >= 1
    assert "typer" in found["packages"] and found["variables"]["OMP_NUM_THREADS"] == "1"
    shown = deltafl_here("info", cwd=tmp_path).stdout
    assert (
        f"numpy:          {np.__version__}\n" in shown
        and f"typer {found['packages']['typer']}" in shown
    )


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
@pytest.mark.parametrize("cache", ["", "home/.own", "elsewhere"])
def test_it_names_no_person_machine_or_home(
    tmp_path: Path, arguments: list[str], cache: str
) -> None:
    place = str(tmp_path / cache) if cache else ""
    own: dict[str, Any] = {**PRIVATE, "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": place}
    done = deltafl_here(*arguments, cwd=tmp_path, **own)
    assert done.returncode == 0, done.stderr
    for word in ("jane", "hospital", "secret", str(tmp_path)):
        assert word not in done.stdout
    assert platform.node() not in done.stdout.split()
    shown = {"": "~/.cache/deltafl", "home/.own": "~/.own/deltafl", "elsewhere": "outside the home"}
    assert shown[cache] in done.stdout
    assert done.stdout.count("set") >= 4


def test_it_works_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = deltafl_here("info", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gpu:            unknown" in done.stdout
