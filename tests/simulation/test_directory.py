"""Records: what is written can be read, and survives being cut anywhere."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deltafl import DeltaflError, Plan, Population, PracDelta, RoundState, close_round, init_round, open_round
from deltafl.scale.state_file import flatten
from deltafl.server.optimizers import make_server_optimizer
from deltafl.simulation.directory import RunDirectory, recorded_settings
from deltafl.simulation.record import read_run
from deltafl.simulation.settings import RunSettings

PLAN = Plan(Population.from_sizes([3, 1, 2, 5]), PracDelta(), 2, "difference-own", make_server_optimizer("yogi"))
START = init_round(PLAN, np.zeros(3))


def played(rounds: int) -> RoundState:
    state = START
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


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings(task="toy", noise=3.0), {"data": "three quadratics"})
    return directory


def add(directory: RunDirectory, *rounds: int) -> None:
    for round in rounds:
        line = {"round": round, "cohort": [0, 1], "counts": [1, 1], "test": {"loss": 1.0, "accuracy": 0.5}}
        directory.append(line, {"round": round, "seconds": 0.1, "cpu_seconds": 0.1})


def test_lines_after_the_checkpoint_are_cut_off_even_half_ones(directory: RunDirectory) -> None:
    add(directory, 1, 2)
    directory.save(played(2))
    add(directory, 3)
    with (directory.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "coh')
    assert same(directory.load(START), played(2))
    for name in ("rounds.jsonl", "timings.jsonl"):
        assert [line["round"] for line in directory.lines(name)] == [1, 2]


def test_an_unfinished_checkpoint_does_not_count(directory: RunDirectory) -> None:
    directory.save(played(2))
    (directory.path / "checkpoint-3.safetensors.part").write_bytes(b"half")
    (directory.path / "checkpoint-4.safetensors").write_bytes(b"whole, but not named by checkpoint.json")
    assert same(directory.load(START), played(2))
    directory.save(played(3))
    assert [path.name for path in sorted(directory.path.glob("checkpoint-*"))] == ["checkpoint-3.safetensors"]


def test_without_a_checkpoint_the_run_starts_over(directory: RunDirectory) -> None:
    add(directory, 1)
    assert directory.load(START) is START
    assert directory.lines("rounds.jsonl") == []


def test_a_copied_folder_does_not_go_on_from_a_memory_that_is_newer(directory: RunDirectory, tmp_path: Path) -> None:
    """Both name one folder of rows, which are those of the last checkpoint that was written."""
    folder = directory.memory_folder(str(tmp_path / "memory"))
    assert folder
    folder.mkdir(parents=True)
    directory.save(played(2))
    shutil.copytree(directory.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    assert same(copy.load(START), played(2))
    directory.save(played(3))
    with pytest.raises(DeltaflError, match=r"is of round 3, later than the last checkpoint of .*copy: a copy"):
        copy.load(START)
    assert same(directory.load(START), played(3))


def test_rounds_are_not_erased_where_the_settings_are_missing(directory: RunDirectory) -> None:
    add(directory, 0)
    before = (directory.path / "rounds.jsonl").read_bytes()
    (directory.path / "config.toml").unlink()
    with pytest.raises(DeltaflError, match=r"rounds\.jsonl belongs to another run, whose config\.toml is missing"):
        directory.start(RunSettings())
    assert (directory.path / "rounds.jsonl").read_bytes() == before


def test_a_reader_can_tell_which_file_is_damaged(directory: RunDirectory, tmp_path: Path) -> None:
    """Every file of a record, cut or of other bytes: one sentence that names it, and nothing lost."""
    add(directory, 0, 1)
    directory.save(played(2))
    directory.memory_folder(str(tmp_path / "memory"))
    readers: dict[str, Callable[[], object]] = {
        "checkpoint.json": lambda: directory.load(START),
        "checkpoint-2.safetensors": lambda: directory.load(START),
        "rounds.jsonl": lambda: read_run(directory, "pracdelta", 0, "accuracy", 4),
        "timings.jsonl": lambda: read_run(directory, "pracdelta", 0, "accuracy", 4),
        "environment.json": directory.environment,
        "memory.json": lambda: directory.memory_folder("any"),
        "config.toml": lambda: recorded_settings(directory.path),
    }
    for name, read in readers.items():
        file = directory.path / name
        good = file.read_bytes()
        read()
        for bad in (b"\xff\xfe{}", b"[" * 100_000, b'{"round": '):
            file.write_bytes(bad)
            before = {path.name: path.read_bytes() for path in directory.path.iterdir()}
            with pytest.raises(DeltaflError) as caught:
                read()
            assert name in str(caught.value)
            assert "\n" not in str(caught.value)
            assert {path.name: path.read_bytes() for path in directory.path.iterdir()} == before
        file.write_bytes(good)


def test_lines_that_are_shorter_than_at_the_checkpoint_are_not_filled_up(directory: RunDirectory) -> None:
    add(directory, 1)
    directory.save(played(1))
    (directory.path / "rounds.jsonl").write_bytes(b"")
    with pytest.raises(DeltaflError, match=r"rounds\.jsonl is shorter than at the last checkpoint"):
        directory.load(START)
    assert (directory.path / "rounds.jsonl").read_bytes() == b""


def test_a_checkpoint_with_another_bit_is_refused(directory: RunDirectory) -> None:
    """A number that is another number is no damage that its format would notice."""
    directory.save(played(1))
    tensors = directory.path / "checkpoint-1.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DeltaflError, match=r"checkpoint-1\.safetensors is not as it was written, its checksum differs"):
        directory.load(START)
    tensors.write_bytes(content)
    assert same(directory.load(START), played(1))
