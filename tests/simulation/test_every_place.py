"""A full disk, and a kill, at every place where a run, a comparison, a tuning or the server of a
federation changes a file: one sentence, nothing lost, and going on gives the same bits.
"""

import gc
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import deltafl
from deltafl import DeltaflError
from deltafl.simulation import export_model
from deltafl.simulation.folder.record import UNFINISHED, Job
from deltafl.simulation.parallel.sweep import run_jobs
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.store.sealed import read_sealed
from tools.places import FAULTS, KilledError, failing
from tools.serving import serve
from tools.simulation import TINY, quiet

SMALL = {"task": "toy", "sample": 2, "rounds": 2, "checkpoint_every": 1}
#: How many places are tried, and the last ones, where records and folders come and go; all of them
#: take minutes.
SOME, LAST = (10**9, 0) if os.environ.get("DELTAFL_ALL_PLACES") else (4, 8)


def settings_of(root: Path) -> RunSettings:
    given = {**SMALL, "sampler": "innovation", "memory_path": str(root / "memory")}
    return make_settings(RunSettings, given)


def run(root: Path) -> None:
    run_single(settings_of(root), root / "out", quiet)


def sweep(root: Path) -> None:
    run_jobs([Job("a", settings_of(root))], root / "out", 1, lambda _: None)


def compare(root: Path) -> None:
    given: dict[str, Any] = {
        **SMALL,
        "seeds": 1,
        "out": root / "out",
        "processes": 1,
        "progress": False,
    }
    deltafl.compare(given.pop("task"), ["uniform"], report=False, **given)


def tune(root: Path) -> None:
    given: dict[str, Any] = {
        **TINY,
        "rounds": 1,
        "tuning_seeds": 1,
        "local_rates": [0.1],
        "extensions": 0,
    }
    given["out"] = root / "out"
    given |= {"processes": 1, "progress": False}
    deltafl.tune(given.pop("task"), ["uniform"], **given)


def export(root: Path) -> None:
    if not (root / "out").exists():
        run(root)
    export_model(root / "out", root / "model.safetensors")


PLAYS: dict[str, Callable[[Path], None]] = {
    **{each.__name__: each for each in (run, sweep, compare, tune, export)},
    "server": partial(serve, sampler="innovation"),
    "server with a file": partial(serve, sampler="innovation", mapped=True),
}


def result(root: Path) -> dict[str, object]:
    """What must be the same, whatever happened on the way: not times, and not random names."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.name in ("rounds.jsonl", "rates.toml", "config.toml", "clients.json"):
            # Folders have names of their own.
            found[name] = path.read_text().replace(str(root), "")
        elif path.suffix == ".bin":  # in a folder with a random name
            found[path.name] = path.read_bytes()
        elif path.suffix == ".safetensors":
            arrays, _ = read_sealed(path, "")
            found[name] = {key: array.tobytes() for key, array in arrays.items()}
        elif path.suffix == ".json" and "seed" in path.name:
            record = json.loads(path.read_text())
            times = {"seconds", "cpu_seconds", "client_seconds", "environment", "settings"}
            found[name] = {key: value for key, value in record.items() if key not in times}
        # A lock that a killed process has left locks nothing.
        elif (
            path.is_file()
            and path.suffix != ".lock"
            and path.name
            not in (
                *("timings.jsonl", "environment.json", "engine.json", "summary.json", "round"),
                *("accuracy.png", "progress.png", "selection.png"),
            )
        ):
            found[name] = None if path.suffix == ".png" else path.read_bytes()
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dies", [False, True], ids=["disk", "kill"])
@pytest.mark.parametrize("name", PLAYS)
def test_every_place_fails_in_a_sentence_and_goes_on(
    name: str, dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = PLAYS[name]
    # They are written as the other files are, and take a second.
    monkeypatch.setattr("deltafl.simulation.comparisons.comparison.draw_plots", lambda *_: None)
    (tmp_path / "whole").mkdir()
    if name == "export":
        run(tmp_path / "whole")
    with failing(10**9) as disk:
        play(tmp_path / "whole")
    expected = result(tmp_path / "whole")
    total = disk.count
    assert total > 3
    places = {*range(1, total + 1, max(1, total // SOME)), *range(max(1, total - LAST), total + 1)}
    for last in sorted(places):
        root = tmp_path / f"{last}"
        root.mkdir()
        if name == "export":
            run(root)
        if dies:
            with pytest.raises(KilledError), failing(last):
                play(root)
            gc.collect()  # a dead process holds no locks
        else:
            with failing(last, FAULTS[last % len(FAULTS)]):
                try:
                    play(root)
                except DeltaflError as error:
                    assert "\n" not in str(error)
                    assert str(root) in str(error)
        play(root)
        assert result(root) == expected, last
        assert not (root / "out" / UNFINISHED).exists()
        assert not list(root.rglob("*.part"))
