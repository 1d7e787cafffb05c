"""Records: what is written can be read, and survives being cut anywhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, Plan, Population, PracDelta, RoundState, close_round, init_round, open_round
from deltafl.plain_files import plain_json
from deltafl.server_optimizers import make_server_optimizer
from deltafl.settings import RunSettings
from deltafl.simulation.records import RunDirectory, recorded_settings
from deltafl.state_file import flatten, unflatten

PLAN = Plan(
    Population.from_sizes([3, 1, 2, 5]),
    PracDelta(),
    2,
    estimator="difference-own",
    server_optimizer=make_server_optimizer("yogi"),
)


def played(rounds: int) -> RoundState:
    state = init_round(PLAN, np.zeros(3))
    for _ in range(rounds):
        cohort = open_round(PLAN, state)
        updates = np.outer(cohort.client_n + 1.0, [1.0, -2.0, 0.3]) + state.round
        state, _ = close_round(PLAN, state, cohort, updates)
    return state


def same(a: RoundState, b: RoundState) -> bool:
    return all(
        name == other and np.array_equal(x, y) and x.dtype == y.dtype
        for (name, x), (other, y) in zip(flatten(a), flatten(b), strict=True)
    )


def test_a_state_survives_its_flat_form_bit_for_bit() -> None:
    state = played(5)
    back = unflatten(init_round(PLAN, np.zeros(3)), dict(flatten(state)))
    assert same(state, back)
    assert isinstance(back.round, int)


def test_a_checkpoint_of_other_settings_is_refused() -> None:
    arrays = dict(flatten(played(1)))
    with pytest.raises(DeltaflError, match="does not fit"):
        unflatten(init_round(PLAN, np.zeros(4)), arrays)


def test_lines_after_the_checkpoint_are_cut_off_even_half_ones(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    state = played(2)
    directory.append({"round": 1}, {"round": 1, "seconds": 0.1})
    directory.append({"round": 2}, {"round": 2, "seconds": 0.1})
    directory.save(state)
    directory.append({"round": 3}, {"round": 3, "seconds": 0.1})
    with (directory.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "coh')
    assert same(directory.load(init_round(PLAN, np.zeros(3))), state)
    assert [line["round"] for line in directory.lines("rounds.jsonl")] == [1, 2]
    assert [line["round"] for line in directory.lines("timings.jsonl")] == [1, 2]


def test_an_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    directory.save(played(2))
    (directory.path / "checkpoint-3.safetensors.part").write_bytes(b"half")
    (directory.path / "checkpoint-4.safetensors").write_bytes(b"whole, but not named by checkpoint.json")
    assert same(directory.load(init_round(PLAN, np.zeros(3))), played(2))
    directory.save(played(3))
    assert [path.name for path in sorted(directory.path.glob("checkpoint-*"))] == ["checkpoint-3.safetensors"]


def test_without_a_checkpoint_the_run_starts_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    directory.append({"round": 1}, {"round": 1})
    start = init_round(PLAN, np.zeros(3))
    assert directory.load(start) is start
    assert directory.lines("rounds.jsonl") == []


def test_settings_are_recorded_as_toml(tmp_path: Path) -> None:
    assert recorded_settings(tmp_path / "run") is None
    RunDirectory(tmp_path / "run").start(RunSettings(task="toy", noise=3.0))
    recorded: dict[str, Any] | None = recorded_settings(tmp_path / "run")
    assert recorded is not None
    assert (recorded["task"], recorded["noise"]) == ("toy", 3.0)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["numpy"] == np.__version__


def test_json_has_no_nan() -> None:
    assert plain_json({"a": [float("nan"), 1.0, (float("inf"),)]}) == {"a": [None, 1.0, [None]]}
