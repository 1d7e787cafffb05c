"""Records: what is written can be read, and survives being cut anywhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, Plan, Population, PracDelta, RoundState, close_round, init_round, open_round
from deltafl.io import plain_json
from deltafl.scale.state_file import flatten, unflatten
from deltafl.server.optimizers import make_server_optimizer
from deltafl.simulation.directory import RunDirectory, recorded_settings
from deltafl.simulation.record import read_run
from deltafl.simulation.settings import RunSettings

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
    directory.append({"round": 1}, {"round": 1, "seconds": 0.1, "cpu_seconds": 0.1})
    directory.append({"round": 2}, {"round": 2, "seconds": 0.1, "cpu_seconds": 0.1})
    directory.save(state)
    directory.append({"round": 3}, {"round": 3, "seconds": 0.1, "cpu_seconds": 0.1})
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


def test_a_copied_folder_does_not_go_on_from_a_memory_that_is_newer(tmp_path: Path) -> None:
    """Both name one folder of rows, which are those of the last checkpoint that was written."""
    directory, start = RunDirectory(tmp_path / "run"), init_round(PLAN, np.zeros(3))
    directory.start(RunSettings())
    folder = directory.memory_folder(str(tmp_path / "memory"))
    assert folder is not None
    folder.mkdir(parents=True)
    directory.save(played(2))
    shutil.copytree(directory.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    assert same(copy.load(start), played(2))
    directory.save(played(3))
    with pytest.raises(DeltaflError, match=r"is of round 3, and the last checkpoint of .*copy of round 2: a copy"):
        copy.load(start)
    assert same(directory.load(start), played(3))
    (folder / "round").write_text("three")
    with pytest.raises(DeltaflError, match=r"round is not valid JSON"):
        directory.load(start)


def test_rounds_are_not_erased_where_the_settings_are_missing(tmp_path: Path) -> None:
    """Nor where only the checkpoint is: one line is there before the first checkpoint, more are not."""
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    for round in (0, 1):
        directory.append({"round": round}, {"round": round})
    before = (directory.path / "rounds.jsonl").read_bytes()
    with pytest.raises(DeltaflError, match=r"checkpoint\.json is missing, though rounds were played; put it back"):
        directory.load(init_round(PLAN, np.zeros(3)))
    (directory.path / "config.toml").unlink()
    with pytest.raises(DeltaflError, match=r"rounds\.jsonl belongs to another run, whose config\.toml is missing"):
        directory.start(RunSettings())
    assert (directory.path / "rounds.jsonl").read_bytes() == before


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


def test_a_reader_can_tell_which_file_is_damaged(tmp_path: Path) -> None:
    """Every file of a record, cut, of other bytes, or of another form: one sentence that names it, and nothing lost."""
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    for round in (0, 1):
        line = {"round": round, "cohort": [0, 1], "counts": [1, 1], "test": {"loss": 1.0, "accuracy": 0.5}}
        directory.append(line, {"round": round, "seconds": 0.1, "cpu_seconds": 0.1})
    directory.save(played(2))
    directory.memory_folder(str(tmp_path / "memory"))
    start = init_round(PLAN, np.zeros(3))
    readers: dict[str, Callable[[], object]] = {
        "checkpoint.json": lambda: directory.load(start),
        "checkpoint-2.safetensors": lambda: directory.load(start),
        "rounds.jsonl": lambda: read_run(directory, "pracdelta", 0, "accuracy", 4),
        "timings.jsonl": lambda: read_run(directory, "pracdelta", 0, "accuracy", 4),
        "environment.json": directory.environment,
        "memory.json": lambda: directory.memory_folder("any"),
        "config.toml": directory.settings,
    }
    for name, read in readers.items():
        file = directory.path / name
        good = file.read_bytes()
        read()
        other = b'"other"\n' if name == "environment.json" else b'{"round": []}\n'
        for bad in (b"\xff\xfe{}", b"[" * 100_000, b'{"round": ', b"5\n", other):
            file.write_bytes(bad)
            before = {path.name: path.read_bytes() for path in directory.path.iterdir()}
            with pytest.raises(DeltaflError) as caught:
                read()
            assert (name in str(caught.value), "\n" in str(caught.value)) == (True, False), caught.value
            assert {path.name: path.read_bytes() for path in directory.path.iterdir()} == before
        file.unlink()
        if name not in {"checkpoint.json", "memory.json", "config.toml"}:  # these say what there is
            with pytest.raises(DeltaflError, match=f"cannot read .*{name}"):
                read()
        file.write_bytes(good)
    with (directory.path / "rounds.jsonl").open("a") as lines:
        lines.write('{"round": 2, "cohort": [4], "counts": [1]}\n')
    with (directory.path / "timings.jsonl").open("a") as lines:
        lines.write('{"round": 2, "seconds": 1, "cpu_seconds": 1}\n')
    with pytest.raises(DeltaflError, match=r"round 2: index 4 is out of bounds"):
        read_run(directory, "pracdelta", 0, "accuracy", 4)


def test_lines_that_are_shorter_than_at_the_checkpoint_are_not_filled_up(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    directory.append({"round": 1}, {"round": 1})
    directory.save(played(1))
    (directory.path / "rounds.jsonl").write_bytes(b"")
    with pytest.raises(DeltaflError, match=r"rounds\.jsonl has 0 bytes, 13 at the last checkpoint"):
        directory.load(init_round(PLAN, np.zeros(3)))
    assert (directory.path / "rounds.jsonl").read_bytes() == b""


def test_a_checkpoint_with_another_bit_is_refused(tmp_path: Path) -> None:
    """A number that is another number is no damage that its format would notice."""
    directory, start = RunDirectory(tmp_path / "run"), init_round(PLAN, np.zeros(3))
    directory.start(RunSettings())
    directory.save(played(1))
    tensors = directory.path / "checkpoint-1.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DeltaflError, match=r"checkpoint-1\.safetensors is not as it was written, its checksum differs"):
        directory.load(start)
    tensors.write_bytes(content)
    assert same(directory.load(start), played(1))


def test_the_name_of_the_data_is_recorded(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").start(RunSettings(), {"data": "digits"})
    assert RunDirectory(tmp_path / "run").environment()["data"] == "digits"
