"""The pages on Flower: their strategies run in the tutorial's app, and the log is the page's."""

import doctest
import re
import textwrap
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

import deltafl.flower
from deltafl import DeltaflError

from .grid import FakeGrid

DOCS = Path(__file__).parents[2] / "docs"
CLIENT = re.search(
    r"```python title=client_app.py\n(.*?)```",
    (DOCS / "tutorial" / "flower.md").read_text(),
    re.DOTALL,
)
PAGES = [
    *sorted((DOCS / "how-to").glob("flower-*.md")),
    DOCS / "how-to" / "differential-privacy.md",
]
WITH_LOGS = [page for page in PAGES if "```text\n" in page.read_text()]
#: What goes wrong at one client on a page.
FAULTS = {"flower-failures": 'raise OSError("disk full")'}
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NODES: dict[int, dict[str, Any]] = {7 * i + 3: {"partition-id": i} for i in range(20)}


def client_of(page: Path) -> ClientApp:
    """The tutorial's client, with the mod, what the page adds to it and what fails on the page."""
    assert CLIENT is not None
    code = CLIENT[1].replace("ClientApp()", "ClientApp(mods=[delta_mod])")
    code = code.replace("import register", "import delta_mod, register")
    fault = FAULTS.get(page.stem, "pass")
    start = "def train(message, context):"
    third = f'    if context.node_config["partition-id"] == 3:\n        {fault}\n'
    code = re.sub(rf"({re.escape(start)}.*\n)", lambda found: found[1] + third, code)
    code += "".join(re.findall(r"```python title=client_app.py\n(.*?)```", page.read_text(), re.S))
    names: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), names)
    return cast(ClientApp, names["app"])


def test_a_page_has_the_client_of_the_tutorial() -> None:
    assert CLIENT is not None
    assert "register(app, num_examples=" in CLIENT[1]


@pytest.mark.parametrize("page", WITH_LOGS, ids=lambda page: page.stem)
def test_the_first_strategy_of_a_page_runs_and_logs_what_the_page_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flower_log: pytest.LogCaptureFixture,
) -> None:
    text = page.read_text()
    code, shown = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)[0]
    if "DifferentialPrivacy" in code:
        pytest.importorskip("dp_accounting")
        monkeypatch.setattr("deltafl.federation.rules.randbits", lambda bits: 2**40)
    monkeypatch.chdir(tmp_path)
    grid = FakeGrid(client_of(page), NODES)
    initial = ArrayRecord({"weight": Array(np.zeros(4, dtype=np.float32))})
    names: dict[str, Any] = {**vars(deltafl.flower), "ClientApp": ClientApp}
    names |= {"grid": cast(Grid, grid), "initial": initial}
    if "Resuming after round 2" in shown:
        exec(compile(code, page.name, "exec"), names)
        names["strategy"].start(grid, initial, num_rounds=2)
        flower_log.clear()
    try:
        exec(compile(code, page.name, "exec"), names)
        if ".start(" not in code:
            rounds = max(map(int, re.findall(r"Round (\d+)", shown)), default=3)
            names["strategy"].start(grid, initial, num_rounds=rounds)
    except DeltaflError as error:
        printed = str(error)
    else:
        printed = capsys.readouterr().out if "print(" in code else "\n".join(flower_log.messages)
    expected = textwrap.dedent(shown).strip()
    if "print(" not in code:
        expected = f"...{expected}..."
    assert doctest.OutputChecker().check_output(expected, printed, SAME), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_strategies_of_a_page_can_be_made(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deltafl.federation.rules.randbits", lambda bits: 2**40)
    made = 0
    for code in re.findall(r"^ *```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        for call in re.findall(r"^strategy = (DeltaStrategy\(.*?\)$)", code, re.DOTALL | re.M):
            dp = deltafl.flower.DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-6)
            eval(call, {**vars(deltafl.flower), "dp": dp})
            made += 1
    assert made or page.stem == "flower-settings"
