"""W&B and trackio get every round once, also after interruptions and from runs side by side.

Neither is a dependency of the tests (60 MB; another Pillow): where one is installed, it is asked
what it has; and a small module with the calls of its interface stands for it everywhere.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import deltafl
from deltafl.simulation import RunSettings, make_settings, run_single, tracker
from tools.simulation import TINY, StopError, lines_of, stop_after

#: By run: its rounds and accuracies.
Found = dict[str, list[tuple[int, float]]]


class FakeRun:
    def __init__(self, name: str, step: int) -> None:
        self.name = name
        self.step = step  # neither takes an earlier one
        self.points: list[tuple[int, float]] = []
        self.is_open = True
        self.exit_code: int | None = None

    def log(self, value: dict[str, float], step: int) -> None:
        assert self.is_open and step > self.step
        self.step = step
        self.points.append((step, value["test/accuracy"]))

    def finish(self, exit_code: int | None = None) -> None:
        self.is_open = False
        self.exit_code = exit_code


class Fake(ModuleType):
    """Either of them; as trackio does, it ends its run when another begins."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.Settings = SimpleNamespace
        self.runs: list[FakeRun] = []

    def init(self, **given: Any) -> FakeRun:
        assert {"project", "name", "config", "resume"} <= given.keys()
        assert given["config"]["task"] == "digits" and given["resume"] == "allow"
        if "mode" not in given:
            for run in self.runs:
                run.finish()
        same = [run.step for run in self.runs if run.name == given["name"]]
        self.runs.append(FakeRun(given["name"], max(same, default=0)))
        return self.runs[-1]

    def found(self, _: Path) -> Found:
        known: Found = {}
        for run in self.runs:
            known.setdefault(run.name, []).extend(run.points)
        return known


def _of_wandb(folder: Path) -> Found:
    """What ``wandb sync`` would send, from its log: blocks of 32 KiB, protocol buffers inside."""
    from wandb.proto import wandb_internal_pb2

    known: Found = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place, part, name = file.read_bytes(), 7, b"", ""
        while place + 7 <= len(data):
            left = 2**15 - place % 2**15
            if left < 7:
                place += left
                continue
            size = int.from_bytes(data[place + 4 : place + 6], "little")
            part += data[place + 7 : place + 7 + size]
            if data[place + 6] in (1, 4):  # whole, or its last part
                record: Any = wandb_internal_pb2.Record()
                record.ParseFromString(part)
                part = b""
                if record.WhichOneof("record_type") == "run":
                    name = record.run.display_name
                row = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                if row:
                    point = int(row["_step"]), float(row["test/accuracy"])
                    known.setdefault(name, []).append(point)
            place += 7 + size
    return known


def _of_trackio(folder: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    logs = {
        run["name"]: SQLiteStorage.get_logs(folder.name, run["name"])
        for run in SQLiteStorage.get_run_records(folder.name)
    }
    return {
        name: [(point["step"], point["test/accuracy"]) for point in points]
        for name, points in logs.items()
    }


@pytest.fixture(params=["fake wandb", "fake trackio", "wandb", "trackio"])
def named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, Callable[[Path], Found]]]:
    """A tracker's name, and what it has."""
    *fake, name = request.param.split()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for variable in [key for key in os.environ if key.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(variable)
    if fake:
        module = Fake(name)
        monkeypatch.setitem(sys.modules, name, module)
        yield name, module.found
        return
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip(name)
    yield name, {"wandb": _of_wandb, "trackio": _of_trackio}[name]


def test_an_interrupted_run_is_there_once(
    tmp_path: Path, named: tuple[str, Callable[[Path], Found]]
) -> None:
    name, found = named
    out = tmp_path / f"once-{name}"
    settings = make_settings(RunSettings, {**TINY, "sampler": "census", "checkpoint_every": 2})
    # Round 3 comes after the last checkpoint and is played twice.
    with pytest.raises(StopError), tracker(name, out) as track:

        def on_round(done: Any) -> None:
            track(done)
            stop_after(3)(done)

        run_single(settings, out, on_round)
    time.sleep(1.1 * ((out / "wandb" / "latest-run").exists()))  # W&B names folders by the second
    with tracker(name, out) as track:
        run_single(settings, out, track)
    ((title, points),) = found(out).items()
    assert title.startswith("census, seed 0")
    assert points == [(line["round"], line["test"]["accuracy"]) for line in lines_of(out)[1:]]


def test_runs_side_by_side_do_not_mix(
    tmp_path: Path, named: tuple[str, Callable[[Path], Found]]
) -> None:
    name, found = named
    out = tmp_path / f"both-{name}"
    with tracker(name, out) as track:
        dones: list[Any] = []
        result = deltafl.compare(
            "digits",
            "uniform,full",
            seeds=1,
            rounds=3,
            clients=8,
            sample=2,
            out=out,
            processes=1,
            progress=False,
            report=False,
            on_round=dones.append,
        )
        # As two processes play them: by turns.
        for done in sorted(dones, key=lambda done: done.round):
            track(done)
    known = {title.split(",")[0]: points for title, points in found(out).items()}
    for sampler, rows in result.runs().groupby("sampler"):
        assert known[sampler] == [*zip(rows["round"], rows["accuracy"], strict=True)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_without_the_package_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(deltafl.DeltaflError, match=rf"pip install 'deltafl\[{name}\]'"):
        tracker(name, tmp_path)
