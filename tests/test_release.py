"""What is published says the same everywhere: version, address of the repository, and the README
of a package index, whose links lead to files that are there.
"""

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deltafl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT["urls"]["Repository"]


def test_there_is_one_version() -> None:
    version = PROJECT["version"]
    assert deltafl.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_there_is_one_address() -> None:
    """Whoever moves the repository changes it in ``pyproject.toml``, and in what this names."""
    pages = [path for name in ("docs", ".github", "examples") for path in (ROOT / name).rglob("*")]
    written = [path for path in [*ROOT.iterdir(), *pages] if path.suffix in SUFFIXES]
    forge, owner, _ = ADDRESS.rsplit("/", 2)
    repository = re.compile(rf"{forge}/[^\s/]+/deltafl\b|github/[^\s/]+/deltafl\b")
    found = 0
    for path in written:
        for address in repository.findall(path.read_text(encoding="utf-8")):
            assert address in {ADDRESS, f"github/{owner}/deltafl"}, path
            found += 1
    assert found


SUFFIXES = {".md", ".cff", ".yml", ".toml", ".ipynb", ".py"}


def test_a_package_index_shows_links_that_lead_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    made = runpy.run_path(str(ROOT / "setup.py"))
    text = given["long_description"]
    assert not made["RELATIVE"].search(text)
    links = re.findall(rf"{ADDRESS}/(raw|blob)/v{PROJECT['version']}/([^)#\"\s]+)", text)
    assert ("raw", "results/demo/accuracy.png") in links and len(links) > 4
    for _, path in links:
        assert (ROOT / path).exists(), path
    sample = '[![a](b.svg)](c.md#d) <img src="e.png"> [f](#g) [h](https://i) `j`'
    there = f"{ADDRESS}/{{}}/v{PROJECT['version']}/"
    raw, blob = there.format("raw"), there.format("blob")
    shown = f'[![a]({raw}b.svg)]({blob}c.md#d) <img src="{raw}e.png"> [f](#g) [h](https://i) `j`'
    assert made["RELATIVE"].sub(made["absolute"], sample) == shown


def test_forms_for_issues_ask_for_deltafl_info() -> None:
    yaml = pytest.importorskip("yaml")
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert any("deltafl info" in part["attributes"]["label"] for part in form["body"]), path
            assert {part["type"] for part in form["body"]} == {"textarea"}
