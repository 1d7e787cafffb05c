"""From Flower's FedAvg to deltafl: the two apps of the example, and what changes between them."""

import ast
import difflib
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

from deltafl import recommend

from .grid import FakeGrid

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (
    ROOT / "examples" / "flower_from_fedavg" / f"{name}_app.py" for name in ("fedavg", "deltafl")
)
NODES = {7 * i + 3: {"partition-id": i} for i in range(20)}


def changed_lines() -> list[str]:
    before, after = (path.read_text().splitlines() for path in (BEFORE, AFTER))
    return [
        line
        for line in list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        if line[0] in "+-"
    ]


def app_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", [BEFORE, AFTER], ids=["fedavg", "deltafl"])
def test_both_apps_train(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = app_of(path)
    torch.manual_seed(0)
    grid = FakeGrid(module.client_app, cast(dict[int, dict[str, Any]], NODES))
    module.server_app(cast(Grid, grid), Context(1, 0, {}, RecordDict(), {}))
    trainings = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert len(trainings) == 20 * 10
    model = torch.nn.Linear(4, 4)
    model.load_state_dict(torch.load("model.pt"))
    hits = []
    for config in NODES.values():
        x, y = module.my_data(Context(1, 0, cast(dict[str, Any], config), RecordDict(), {}))
        hits += (model(x).argmax(dim=1) == y).tolist()
    assert np.mean(hits) > 0.8


def test_flower_finds_the_apps() -> None:
    """``flwr run`` looks in the source for lines such as ``app = ...``, without running it."""
    for path in (BEFORE, AFTER):
        assigned = [
            node.targets[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
        ]
        assert {"client_app", "server_app"} == {ast.unparse(target) for target in assigned}


def test_the_way_from_fedavg_is_at_most_ten_lines_which_the_document_shows() -> None:
    changed = changed_lines()
    assert 0 < len(changed) <= 10
    text = (ROOT / "docs" / "tutorial" / "flower.md").read_text()
    block = text.partition("```diff\n")[2].partition("```")[0]
    assert [line for line in block.splitlines() if line[:1] in ("+", "-")] == [
        line.rstrip() for line in changed
    ]


def test_the_app_uses_the_line_that_recommend_prints() -> None:
    used = next(line for line in changed_lines() if "DeltaStrategy(" in line).lstrip("+ ")
    assert f"Flower:\n  {used}" in str(recommend(census=False))


def test_the_app_of_the_page_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = (ROOT / "docs" / "tutorial" / "flower.md").read_text()
    files = dict(re.findall(r"```\w+ title=(\S+)\n(.*?)```", page, re.DOTALL))
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    components = tomllib.loads(files["pyproject.toml"])["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "server_app:app", "clientapp": "client_app:app"}
    monkeypatch.chdir(tmp_path)
    client, server = (app_of(tmp_path / f"{name}_app.py") for name in ("client", "server"))
    grid = FakeGrid(client.app, cast(dict[int, dict[str, Any]], NODES))
    server.app(cast(Grid, grid), Context(1, 0, {}, RecordDict(), {}))
    last = capsys.readouterr().out.splitlines()[-1]
    model = [float(number) for number in last.strip("model []").split()]
    np.testing.assert_allclose(model, [1, -2, 3, 0.5], atol=0.05)


def test_clients_evaluate_in_the_example_of_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "examples" / "flower_evaluation"
    for path in folder.glob("*.py"):
        code = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(code) < 25
    client, server = (app_of(folder / f"{name}_app.py") for name in ("client", "server"))
    grid = FakeGrid(client.app, cast(dict[int, dict[str, Any]], NODES))
    server.app(cast(Grid, grid), Context(1, 0, {}, RecordDict(), {}))
    for kind, count in (("train", 5), ("evaluate", 10)):
        sent = [message for message in grid.sent if message.metadata.message_type == kind]
        assert len(sent) == 10 * count
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    accuracy = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(accuracy) == 10
    assert accuracy[-1] > 0.85
