"""The memory of one update a client: formats, files that survive a crash, and memories that do
not fit.
"""

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import (
    DeltaflError,
    Fixed,
    Plan,
    Population,
    RoundState,
    close_round,
    init_round,
    open_round,
    stream,
)
from deltafl.estimators.table import ESTIMATORS
from deltafl.scale import memory_budget
from deltafl.scale.memory_budget import memory_size, require_room
from deltafl.scale.named_arrays import named_arrays
from deltafl.scale.rows import (
    MappedRows,
    RowFormat,
    from_bfloat16,
    put_rows,
    read_rows,
    to_bfloat16,
    together,
)
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.store.room import free_ram, human

M = 12
N = 3
D = 5
POPULATION = Population.from_sizes(list(range(1, M + 1)))
TINY = {
    "task": "digits",
    "clients": 12,
    "sample": 4,
    "rounds": 6,
    "local_epochs": 1,
    "batch_size": 16,
}


def plan_of(
    folder: Path | None = None, dtype: str = "float32", estimator: str = "innovation"
) -> Plan:
    rows = RowFormat(dtype, None if folder is None else str(folder))
    return Plan(POPULATION, Fixed(), N, estimator, memory=rows)


def next_state(plan: Plan, state: RoundState) -> RoundState:
    cohort = open_round(plan, state)
    update_nd = [
        stream(1, "audit", state.round, int(client)).normal(size=D) for client in cohort.client_n
    ]
    return close_round(plan, state, cohort, update_nd)[0]


def played(plan: Plan, rounds: int) -> RoundState:
    state = init_round(plan, np.zeros(D))
    for _ in range(rounds):
        state = next_state(plan, state)
    return state


def content(state: RoundState) -> list[bytes]:
    """Everything in a state, its rows read one by one."""
    own = state.control.own
    rows = [np.asarray(own.control_md[client]).tobytes() for client in range(M)]
    return [state.params_d.tobytes(), own.total_d.tobytes(), *rows]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    return directory


# --- bfloat16


def test_bfloat16_by_hand() -> None:
    """8 bits of precision: 1 + 2^-8 is halfway, to even; 1 + 3 2^-8 is halfway the other way."""
    value_d = np.array(
        [1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159265, 0, 1e18], dtype=np.float32
    )
    expected = [1, 1, 1 + 2**-6, 1 + 2**-7, -3.140625, 0, 222 * 2.0**52]
    assert from_bfloat16(to_bfloat16(value_d)).tolist() == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=20))
def test_bfloat16_is_the_nearest(values: list[float]) -> None:
    """Against the two neighbours that share the upper bits, one of which it is."""
    value_d = np.array(values, dtype=np.float32)
    below_d = (value_d.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    above_d = ((value_d.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    got_d = from_bfloat16(to_bfloat16(value_d)).astype(np.float64)
    best_d = np.minimum(np.abs(below_d - value_d), np.abs(above_d - value_d))
    np.testing.assert_array_equal(np.abs(got_d - value_d), best_d)


def test_a_file_is_not_shortened_for_an_older_state(tmp_path: Path) -> None:
    """A state of 4 clients from a checkpoint, whose file has had 6 since."""
    rows = RowFormat("float32", str(tmp_path)).zeros(4, D)
    older = put_rows(rows, np.array([2]), [np.ones(D, np.float32)])
    assert isinstance(older, MappedRows)
    older = older.settled()
    newer = older.lengthened(6)
    again = older.lengthened(5)
    assert older.path.stat().st_size == newer.num_bytes
    assert [row_d.tolist() for row_d in again] == [[float(i == 2)] * D for i in range(5)]


@pytest.mark.parametrize("mapped", [False, True])
def test_the_sum_is_that_of_the_rows_as_stored(tmp_path: Path, mapped: bool) -> None:
    """Else rounding would be a bias."""
    state = played(plan_of(tmp_path / "rows" if mapped else None, "bfloat16", "difference-own"), 20)
    row_md = [from_bfloat16(state.control.control_md[client]) for client in range(M)]
    np.testing.assert_allclose(
        state.control.total_d, POPULATION.weight_m @ np.array(row_md, np.float64), rtol=1e-12
    )


def test_bfloat16_rows_take_half_and_stay_near() -> None:
    wide, narrow = (played(plan_of(None, dtype), 8) for dtype in ("float32", "bfloat16"))
    assert narrow.control.own.control_md[0].nbytes == D * 2
    np.testing.assert_allclose(narrow.params_d, wide.params_d, atol=0.02)
    assert not np.array_equal(narrow.params_d, wide.params_d)
    with pytest.raises(DeltaflError, match="write 'float32' or 'bfloat16'"):
        RowFormat("float16")


def test_the_format_reaches_controls_within_controls() -> None:
    for name, estimator in ESTIMATORS.items():
        control = estimator.control.with_rows(RowFormat("bfloat16"))
        kept = [
            array
            for key, array in named_arrays(control.init(POPULATION, D))
            if key.endswith("control_md")
        ]
        assert control.remembers == bool(kept), name
        assert all(array.dtype == np.uint16 for array in kept)


# --- rows in a file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_gives_the_same_bits_as_ram(
    tmp_path: Path, directory: RunDirectory, dtype: str
) -> None:
    in_ram = plan_of(None, dtype)
    in_file = plan_of(tmp_path / "rows", dtype)
    a = init_round(in_ram, np.zeros(D))
    b = init_round(in_file, np.zeros(D))
    for round in range(15):
        a = next_state(in_ram, a)
        b = next_state(in_file, b)
        if round % 4 == 3:
            b = directory.save(b)
        assert content(a) == content(b)
    file = (tmp_path / "rows" / "rows.bin").stat()
    assert (file.st_size, oct(file.st_mode)[-3:]) == (
        M * D * (4 if dtype == "float32" else 2),
        "600",
    )  # its owner's
    assert content(directory.load(in_file.sampler, init_round(in_file, np.zeros(D)))) != content(
        b
    )  # three rounds ahead of it


def test_a_round_leaves_the_state_it_was_given_alone(
    tmp_path: Path, directory: RunDirectory
) -> None:
    plan = plan_of(tmp_path / "rows")
    state = directory.save(played(plan, 4))
    before = content(state)
    file = (tmp_path / "rows" / "rows.bin").read_bytes()
    assert content(next_state(plan, state)) == content(next_state(plan, state))
    assert content(state) == before
    assert (tmp_path / "rows" / "rows.bin").read_bytes() == file


def test_a_checkpoint_holds_what_changed_and_no_more(
    tmp_path: Path, directory: RunDirectory
) -> None:
    plan = plan_of(tmp_path / "rows", estimator="difference-own")
    state = directory.save(played(plan, 10))
    saved = dict(named_arrays(next_state(plan, state)))
    assert saved["state.control.control_md.row_kd"].shape == (N, D)
    assert saved["state.control.control_md.client_k"].tolist() == sorted(
        open_round(plan, state).client_n
    )


class CrashError(Exception):
    """Stands for kill -9."""


@pytest.mark.parametrize("crash_at", range(6))
def test_cut_off_anywhere_while_it_settles_it_is_restored_bit_for_bit(
    tmp_path: Path, directory: RunDirectory, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is valid, the file has some of its rows, all of them, or is not even made."""
    plan = plan_of(tmp_path / "rows")
    state = directory.save(played(plan, 3))
    for _ in range(3):
        state = next_state(plan, state)
    with monkeypatch.context() as patch, pytest.raises(CrashError):
        whole = MappedRows._write

        def crashing(self: MappedRows, rows: Any, new: bool) -> None:
            whole(self, list(rows)[:crash_at], new)
            raise CrashError

        patch.setattr(MappedRows, "_write", crashing)
        directory.save(state)
    back = directory.load(plan.sampler, init_round(plan, np.zeros(D)))
    assert content(back) == content(state)
    assert content(next_state(plan, back)) == content(next_state(plan, state))


def test_a_lost_file_is_reported(tmp_path: Path, directory: RunDirectory) -> None:
    plan = plan_of(tmp_path / "rows")
    directory.save(next_state(plan, directory.save(played(plan, 1))))
    (tmp_path / "rows" / "rows.bin").write_bytes(b"short")
    with pytest.raises(DeltaflError, match="put the file back, or start anew"):
        directory.load(plan.sampler, init_round(plan, np.zeros(D)))


def test_a_run_with_its_memory_in_a_file_is_the_same_run(tmp_path: Path) -> None:
    for name, more in (("ram", {}), ("file", {"memory_path": str(tmp_path / "disk")})):
        given = {
            **TINY,
            "sampler": "uniform@systematic@difference-own-damped",
            "checkpoint_every": 2,
            **more,
        }
        run_single(make_settings(RunSettings, given), tmp_path / name, lambda *_: None)
    assert (tmp_path / "ram" / "rounds.jsonl").read_bytes() == (
        tmp_path / "file" / "rounds.jsonl"
    ).read_bytes()
    assert len(list((tmp_path / "disk").glob("file-*/rows.bin"))) == 1
    played_there = RunDirectory(tmp_path / "file")
    played_there.memory_folder(str(tmp_path / "disk"))
    played_there.delete()
    assert not list((tmp_path / "disk").iterdir())


# --- does it fit?


def test_sizes_by_hand() -> None:
    """1000 clients, 250 numbers: 1 MB of rows in float32. 20 rows change between two
    checkpoints.
    """
    assert memory_size(RowFormat(), (1000, 250), 20) == (4_000_000, 2_000_000)
    assert memory_size(RowFormat("bfloat16"), (1000, 250), 20) == (2_000_000, 1_000_000)
    assert memory_size(RowFormat("float32", "x"), (1000, 250), 20) == (80_000, 1_040_000)
    assert memory_size(RowFormat("float32", "x"), (10, 250), 20) == (40_000, 30_000)
    assert [human(number) for number in (12, 1234, 999_600, 5 * 10**9)] == [
        "12 B",
        "1.23 kB",
        "1 MB",
        "5 GB",
    ]
    ram = free_ram()
    assert ram is None or ram > 10**6


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = memory_size(RowFormat(), (10**6, 10**5), 100)
    monkeypatch.setattr(memory_budget, "free_ram", lambda: 8 * 10**9)
    with pytest.raises(
        DeltaflError, match=r"up to 1\.6 TB of RAM and 8 GB are free: set memory_path"
    ):
        require_room(size, RowFormat(), tmp_path)
    monkeypatch.setattr(memory_budget, "free_ram", lambda: None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    with pytest.raises(DeltaflError, match="3 GB are free: choose another --out"):
        require_room(size, RowFormat(), tmp_path / "not" / "there")
    mapped = RowFormat("float32", str(tmp_path / "rows"))
    with pytest.raises(DeltaflError, match="choose another memory_path"):
        require_room(memory_size(mapped, (10**6, 10**5), 100), mapped, tmp_path)
    require_room(memory_size(mapped, (1000, 1000), 100), mapped, tmp_path)


def test_a_smaller_type_is_advised_only_where_it_is_not_set(tmp_path: Path) -> None:
    for dtype, advised in (("float32", True), ("bfloat16", False)):
        rows = RowFormat(dtype)
        with pytest.raises(DeltaflError, match="an estimator that keeps one model") as caught:
            require_room(memory_size(rows, (10**9, 10**6), None), rows, tmp_path)
        assert ("memory_dtype" in str(caught.value)) == advised


@pytest.mark.parametrize(
    ("where", "free", "given", "words"),
    [
        (
            "scale.memory_budget",
            1000,
            {"sampler": "innovation"},
            r"takes up to 125 kB of RAM and 1 kB are free",
        ),
        (
            "simulation.checking",
            70_000,
            {"sampler": "full"},
            "a round of 12 clients with 650 .* 156 kB .*: choose a",
        ),
        (
            "simulation.checking",
            70_000,
            {"sampler": "uniform"},
            "about 72.8 kB .*and 70 kB are free: lower 'sample'",
        ),
    ],
)
def test_a_run_that_does_not_fit_into_ram_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    free: int,
    given: dict[str, object],
    words: str,
) -> None:
    monkeypatch.setattr(f"deltafl.{where}.free_ram", lambda: free)
    with pytest.raises(DeltaflError, match=words):
        run_single(make_settings(RunSettings, {**TINY, **given}), tmp_path / "run", lambda *_: None)
    assert not (tmp_path / "run").exists()
    run_single(
        make_settings(RunSettings, {**TINY, "sampler": "uniform", "sample": 3}),
        tmp_path,
        lambda *_: None,
    )


def test_local_arrays_have_to_fit_into_ram_unless_they_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 rows of a head of 12 numbers, four times while a checkpoint is written."""
    task = Path(__file__).parents[1] / "tools" / "normed_task.py"
    given = {"task": str(task), "sampler": "uniform", "sample": 2, "rounds": 1}
    monkeypatch.setattr("deltafl.simulation.checking.free_ram", lambda: 4 * 12 * 12 * 4 - 1)
    with pytest.raises(DeltaflError, match=r"the local arrays of 12 clients .*: set memory_path"):
        run_single(make_settings(RunSettings, given), tmp_path / "run", lambda *_: None)
    assert not (tmp_path / "run").exists()
    given["memory_path"] = str(tmp_path / "rows")
    run_single(make_settings(RunSettings, given), tmp_path / "run", lambda *_: None)


def test_a_run_logs_what_its_memory_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """12 rows of 650 numbers once in the file; those of 4 clients times 2 rounds four times in
    RAM, twice on disk.
    """
    given = {
        **TINY,
        "rounds": 1,
        "sampler": "innovation",
        "checkpoint_every": 2,
        "memory_path": str(tmp_path / "rows"),
    }
    with caplog.at_level(logging.INFO, logger="deltafl"):
        run_single(make_settings(RunSettings, given), tmp_path, lambda *_: None)
    start = (
        "innovation remembers one update per client, 12 x 650 numbers (float32): at most 83.2 "
        "kB of RAM, "
    )
    (logged,) = (
        record.getMessage() for record in caplog.records if record.getMessage().startswith(start)
    )
    assert logged.endswith(f" and 72.8 kB in {tmp_path / 'rows'}")


def test_rows_of_one_array_are_read_at_once_and_others_one_by_one() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4).copy()
    reversed_columns = np.asfortranarray(whole)
    assert together(list(whole)) is whole
    assert together(list(reversed_columns)) is reversed_columns
    apart: list[list[Any]] = [
        [],
        list(whole[:2]),  # of an array with more rows
        [whole[1], whole[0], whole[2]],
        [whole[0], whole[0], whole[0]],
        list(whole[:, ::2]),  # of a view with half of the columns
        list(whole[:, :3]),
        [row.copy() for row in whole],
        [row[::-1] for row in whole],
        pickle.loads(pickle.dumps(list(whole))),  # noqa: S301
        list(whole.astype(np.float64)),
    ]
    for rows in apart:
        assert together(rows) is rows
    for held in (list(whole), reversed_columns, together(list(whole)), apart[2]):
        for part in (slice(0, 2), slice(1, None)):
            found = read_rows(held, part, whole[0, part].size, np.float64)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, [row[part] for row in held])
