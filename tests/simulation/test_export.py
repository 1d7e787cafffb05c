"""Exported models: they load as strictly as PyTorch can, and are as accurate as the run's record
says.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deltafl.errors import DeltaflError
from deltafl.simulation import (
    RunDirectory,
    RunSettings,
    export_model,
    make_settings,
    run_single,
    task_of,
)

OWN = """
import numpy as np, torch
from deltafl.tasks import Dataset, Task, cross_entropy

def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

def make_task(seed):
    x = np.random.default_rng(seed).normal(size=(60, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    data = Dataset("mine", x[:40], y[:40], x[40:], y[40:], 2)
    return Task("mine", data, np.split(np.arange(40), 4), model, cross_entropy)
"""


@pytest.fixture(scope="module", params=["digits", "average", "own"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSettings, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "exported_task.py").write_text(OWN)
    own = {"task": str(folder / "exported_task.py")}
    task = own if request.param == "own" else {"task": "digits", "clients": 8, "sample": 2}
    more = {"average": 0.5} if request.param == "average" else {}
    settings = make_settings(RunSettings, {**task, "rounds": 3, "sampler": "uniform", **more})
    run_single(settings, folder / "run", lambda *_: None)
    return settings, folder / "run"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_model_reloads_and_is_as_accurate_as_recorded(
    run: tuple[RunSettings, Path], suffix: str
) -> None:
    settings, folder = run
    before = {path: path.read_bytes() for path in folder.iterdir()}
    to = folder.parent / f"model{suffix}"
    assert export_model(folder, to) == 3
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    task = task_of(settings)
    model = task.make_model().eval()
    state = torch.load(to) if suffix == ".pt" else load_file(to)
    model.load_state_dict(state, strict=True)
    x = torch.tensor(task.dataset.test_x)
    if x.dtype == torch.uint8:
        x = x * task.input_scale
    right = model(x).argmax(1).numpy() == task.dataset.test_y
    assert np.mean(right) == RunDirectory(folder).last_line()["test"]["accuracy"]


def test_what_holds_no_model_is_refused(tmp_path: Path) -> None:
    one = tmp_path / "runs" / "uniform-seed0"
    one.mkdir(parents=True)
    (one / "config.toml").touch()
    to = tmp_path / "model.safetensors"
    for folder, file, fragment in (
        (tmp_path, to, "holds 1 runs; name one of them, such as .*uniform-seed0"),
        (to, to, "no run with"),
        (tmp_path, tmp_path / "model.onnx", "must end in .safetensors or .pt"),
    ):
        with pytest.raises(DeltaflError, match=fragment):
            export_model(folder, file)
    assert not to.exists()
