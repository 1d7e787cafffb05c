"""Exported models: they load as strictly as PyTorch can, and are as accurate as the run's record
says.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deltafl import compare
from deltafl.errors import DeltaflError
from deltafl.plan import saved_model
from deltafl.scale.sound import restored_part
from deltafl.simulation import (
    RunDirectory,
    RunSettings,
    export_model,
    make_settings,
    run_single,
    task_of,
)
from deltafl.simulation.folder.checkpoint import FILE
from deltafl.simulation.folder.directory import CENSUS, SUSPECT
from deltafl.simulation.rest import Rest
from deltafl.store.sealed import read_sealed, write_sealed
from deltafl.tasks import Task, make_task

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
    run_single(settings, str(folder / "run"), lambda *_: None)
    return settings, folder / "run"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_model_reloads_and_is_as_accurate_as_recorded(
    run: tuple[RunSettings, Path], suffix: str
) -> None:
    settings, folder = run
    before = {path: path.read_bytes() for path in folder.iterdir()}
    to = folder.parent / f"model{suffix}"
    # A name will do, as on the command line.
    assert export_model(str(folder), str(to)) == 3
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


WITH_EXTRA = """
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass
"""


@pytest.mark.parametrize(
    ("file", "model", "why"),
    [
        ("with_extra", WITH_EXTRA, "_extra_state of the model has type dict"),
    ],
)
def test_what_numpy_does_not_have_is_in_a_file_of_pytorch_alone(
    file: str, model: str, why: str, tmp_path: Path
) -> None:
    code = tmp_path / f"{file}.py"
    code.write_text(OWN.replace("4), model", "4), Model") + model)
    given = {"task": str(code), "rounds": 1, "sampler": "uniform"}
    settings = make_settings(RunSettings, given)
    run_single(settings, tmp_path / "run", lambda *_: None)
    with pytest.raises(DeltaflError, match=why):
        export_model(tmp_path / "run", tmp_path / "model.safetensors")
    assert export_model(tmp_path / "run", tmp_path / "model.pt") == 1
    task_of(settings).make_model().load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_frozen_layers_of_any_width_are_exported(dtype: str, tmp_path: Path) -> None:
    made = "torch.nn.Linear(2, 4)"
    base = f"torch.nn.Linear(2, 4).to(torch.{dtype}).requires_grad_(False)"
    text = (
        OWN.replace(made, f"Wide({base})")
        + """
class Wide(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x @ self.inner.weight.float().T + self.inner.bias.float()
"""
    )
    assert text.count(base) == 1
    (tmp_path / f"frozen_{dtype}.py").write_text(text)
    task = str(tmp_path / f"frozen_{dtype}.py")
    settings = make_settings(RunSettings, {"task": task, "rounds": 1, "sampler": "uniform"})
    run_single(settings, tmp_path / "run", lambda *_: None)
    for suffix in (".safetensors", ".pt"):
        export_model(tmp_path / "run", tmp_path / f"model{suffix}")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded["0.inner.weight"].dtype == getattr(torch, dtype)
    for name, tensor in torch.load(tmp_path / "model.pt").items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name].float(), tensor.float()), name


def few(seed: int) -> Task:
    return make_task("digits", seed=seed, num_clients=4)


def halves(y: Any, num_clients: int, rng: np.random.Generator) -> list[Any]:
    return np.array_split(rng.permutation(len(y)), num_clients)


@pytest.mark.parametrize(
    ("given", "name"),
    [({"task": few}, "few"), ({"partition": halves, "clients": 4}, "partition=halves")],
)
def test_a_task_that_was_an_object_is_named(
    given: dict[str, Any], name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more: dict[str, Any] = {"processes": 1, "progress": False, "report": False}
    compare(samplers="uniform", seeds=1, rounds=1, sample=2, out=out, **given, **more)
    with pytest.raises(DeltaflError, match=rf"played from Python with {name}, .*FILE\.py:NAME"):
        export_model(out / "runs" / "uniform-seed0", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def cell(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        changed = array.copy()
        changed.flat[-1] = value
        return changed

    return change


#: What somebody else may have put in the place of an array of a model.
FORGED: dict[str, Callable[[Any], Any]] = {
    "NaN": cell(np.nan),
    "infinite": cell(-np.inf),
    "huge": cell(3e38),
    "short": lambda x: x[:-1],
    "long": lambda x: np.concatenate([x, x]),
    "another axis": lambda x: x[None],
    "a number": lambda x: x[0],
    "empty": lambda x: x[:0],
    "wide": lambda x: x.astype(np.float64),
    "whole": lambda x: x.astype(np.int64),
    "yes and no": lambda x: x > 0,
    "none": lambda x: None,
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_model_that_no_run_keeps_is_refused(
    run: tuple[RunSettings, Path], forged: str, tmp_path: Path
) -> None:
    """Each array of floats that makes the model: parameters or their average, and buffers."""
    _, folder = run
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / FILE
    arrays, header = read_sealed(file, "")
    names = [name for name in arrays if name.startswith("state.rest.shared")]
    names = [saved_model(arrays), *(name for name in names if arrays[name].dtype == np.float32)]
    for name in names:
        changed = FORGED[forged](arrays[name])
        others = {key: array for key, array in arrays.items() if key != name}
        write_sealed(file, others if changed is None else {**others, name: changed}, header)
        to = tmp_path / "model.pt"
        # Without an average the model itself is exported; buffers may be of any width.
        if (forged == "none" and ".parts." in name) or (forged == "wide" and ".rest." in name):
            assert export_model(tmp_path / "run", to) == 3
            to.unlink()
            continue
        with pytest.raises(DeltaflError) as found:
            export_model(tmp_path / "run", to)
        assert "\n" not in str(found.value) and len(str(found.value)) < 300
        assert not to.exists()


def test_bits_of_local_arrays_may_look_like_any_number() -> None:
    """1.0 and 2.0 differ in all bits of the exponent, as infinity has them."""
    bits = np.array([[1.0], [0.0]], np.float32).view(np.uint32) ^ np.uint32(0x40000000)
    row_md = bits.view(np.float32)
    assert np.isinf(row_md[0])
    template = Rest({}, tuple(np.zeros((2, 1), np.float32)))
    found = restored_part(template, {"state.rest.own": row_md}, "state.rest")
    assert np.array_equal(found.own, row_md)
    with pytest.raises(DeltaflError, match="has type float64"):
        restored_part(template, {"state.rest.own": row_md.astype(float)}, "state.rest")


def test_what_holds_no_model_is_refused(tmp_path: Path) -> None:
    one = tmp_path / "runs" / "uniform-seed0"
    one.mkdir(parents=True)
    (one / "config.toml").touch()
    to = tmp_path / "model.safetensors"
    for folder, file, fragment in (
        (tmp_path, to, "holds 1 run; name one, such as .*uniform-seed0"),
        (to, to, "no run with"),
        (tmp_path, tmp_path / "model.onnx", "must end in .safetensors or .pt"),
    ):
        with pytest.raises(DeltaflError, match=fragment):
            export_model(folder, file)
    assert not to.exists()


@pytest.mark.parametrize("name", [FILE, CENSUS, SUSPECT])
def test_a_model_takes_the_place_of_no_file_of_a_run(
    run: tuple[RunSettings, Path], name: str, tmp_path: Path
) -> None:
    _, folder = run
    shutil.copytree(folder, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(DeltaflError, match="a run keeps its own"):
        export_model(tmp_path / "run", tmp_path / "run" / name)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    # Another name is replaced there, and these are free where no run is.
    for to in (tmp_path / "run" / "model.safetensors", tmp_path / name):
        to.touch()
        assert export_model(tmp_path / "run", to) == 3
        assert to.stat().st_size > 0


def test_a_link_is_followed_but_to_no_file_of_a_run(
    run: tuple[RunSettings, Path], tmp_path: Path
) -> None:
    """Such as one from the folder of a service to a disk for models."""
    _, folder = run
    disk = tmp_path / "disk.safetensors"
    link = tmp_path / "latest.safetensors"
    link.symlink_to(disk)
    export_model(folder, link)
    assert link.is_symlink() and disk.exists()
    shutil.copytree(folder, tmp_path / "run")
    link.unlink()
    link.symlink_to(tmp_path / "run" / FILE)
    before = link.read_bytes()
    with pytest.raises(DeltaflError, match="a run keeps its own"):
        export_model(folder, link)
    assert link.read_bytes() == before
