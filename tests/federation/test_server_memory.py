"""One update per client on the server: bfloat16, in a file, over restarts and with clients that
join and leave.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation import saved as saved_module
from deltafl.federation.federation import Federation
from deltafl.federation.saved import load, save
from deltafl.scale import memory_budget as budget_module
from deltafl.scale.named_arrays import named_arrays
from deltafl.scale.rows import MappedRows

from .tools import admit, federation, play, sizes_of

D = 5
MODEL = {"x": np.zeros(D, np.float32)}


class CrashError(Exception):
    """Stands for kill -9."""


def make(
    root: Path, dtype: str = "float32", mapped: bool = False, n: int = 3, m: int = 0
) -> Federation:
    memory: dict[str, Any] = {
        "memory_dtype": dtype,
        "memory_path": root / "disk" if mapped else None,
    }
    return federation("innovation", MODEL, m, n=n, state_path=root / "state", **memory)


def resumed(fed: Federation, root: Path) -> Federation:
    memory = fed.rules.plan.memory
    again = make(root, memory.dtype, memory.folder is not None, fed.rules.plan.n)
    assert load(root / "state", again)
    return again


def contents(fed: Federation) -> list[bytes]:
    """The whole state, its rows read one by one."""
    rows = fed.current.control.control.own.control_md
    others = [
        array.tobytes() for name, array in named_arrays(fed.current) if "control_md" not in name
    ]
    return [*others, *(np.asarray(rows[client]).tobytes() for client in range(len(fed.keys)))]


def file_of(fed: Federation) -> Path:
    rows = fed.current.control.control.own.control_md
    assert isinstance(rows, MappedRows)
    return rows.path


# The same rounds, wherever the rows are.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_gives_the_bits_of_ram_over_joins_departures_and_restarts(
    tmp_path: Path, dtype: str
) -> None:
    seen = []
    for mapped, restarts in ((False, False), (True, False), (True, True), (False, True)):
        root = tmp_path / f"{mapped}-{restarts}"
        fed = make(root, dtype, mapped, m=6)
        for change in (
            lambda f: admit(f, sizes_of(9, 6)),
            lambda f: f.forget({"client:1", "client:4"}),
            lambda f: admit(f, sizes_of(12, 9)),
        ):
            play(fed, 5, save_to=root / "state")
            if restarts:
                fed = resumed(fed, root)
            change(fed)
        play(fed, 5, save_to=root / "state")
        seen.append(contents(fed))
        if mapped:
            assert file_of(fed).stat().st_size == 10 * D * (4 if dtype == "float32" else 2)
            names = {path.name for path in file_of(fed).parent.iterdir()}
            assert names == {
                "rows-2.bin",
                "round",
            }  # the file from before clients were forgotten is gone
            assert (
                dict(named_arrays(fed.current))["state.control.control.own.control_md.row_kd"].size
                == 0
            )
    assert all(other == seen[0] for other in seen[1:])


@pytest.mark.parametrize("crash", ["write_sealed", "settled", "write_note", "join", "forget"])
def test_a_server_killed_anywhere_resumes_to_the_same_bits(
    tmp_path: Path, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state is valid, before its rows are in the file or that is noted; or after the
    clients changed.
    """

    def change(fed: Federation) -> None:
        if crash == "forget":
            fed.forget({"client:2"})
        else:
            admit(fed, sizes_of(8, 6))

    def stop(*_: Any, **__: Any) -> Any:
        raise CrashError

    through = make(tmp_path / "through", mapped=True, m=6)
    fed = make(tmp_path, mapped=True, m=6)
    for one, root in ((through, tmp_path / "through"), (fed, tmp_path)):
        play(one, 4, save_to=root / "state")
        change(one)
    play(through, 1)
    if crash not in ("join", "forget"):
        play(fed, 1)
        with monkeypatch.context() as patch, pytest.raises(CrashError):
            patch.setattr(saved_module, crash, stop)
            save(tmp_path / "state", fed)
    again = resumed(fed, tmp_path)
    if again.current.round == 4:
        change(again)
        play(again, 1)
    for one in (through, again):
        play(one, 4, save_to=one.rules.state_path)
    assert contents(again) == contents(through)


def test_a_state_and_a_file_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A copy of one of them is put back: the server would count updates that nobody sent."""

    def put_back(state: str, disk: str) -> None:
        for name, age in (("state", state), ("disk", disk)):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            shutil.copytree(tmp_path / f"{age}-{name}", tmp_path / name)

    fed = make(tmp_path, mapped=True, m=6)
    for age in ("old", "new"):
        play(fed, 2, save_to=tmp_path / "state")
        for name in ("state", "disk"):
            shutil.copytree(tmp_path / name, tmp_path / f"{age}-{name}")
    for state, disk in (("old", "new"), ("new", "old")):
        put_back(state, disk)
        with pytest.raises(
            DeltaflError, match=r"are of round \d .* the state in .*: put copies of both back"
        ):
            resumed(fed, tmp_path)
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(DeltaflError, match="are not there, and the state"):
        resumed(fed, tmp_path)
    put_back("old", "old")
    assert resumed(fed, tmp_path).current.round == 2


def test_a_state_names_no_folder_elsewhere(tmp_path: Path) -> None:
    """A state that somebody else has written: rows are written and old ones deleted where it
    says.
    """
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "rows-7.bin").write_text("dear diary")
    diary = str(tmp_path / "diary")
    header = saved_module.Header(10, "0" * 16, 0, {}, [], "", {}, {}, diary, None, {}, {})
    with pytest.raises(DeltaflError, match=r"said to be in .*diary, which is no folder"):
        saved_module._find_memory(tmp_path / "state", make(tmp_path, mapped=True), header)
    assert [path.name for path in (tmp_path / "diary").iterdir()] == ["rows-7.bin"]


# Does it fit?


def test_what_does_not_fit_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five numbers per client in float32, four copies while they are saved: 80 bytes; in a file,
    only those of n.
    """
    monkeypatch.setattr(budget_module, "free_ram", lambda: 800)
    make(tmp_path, mapped=True, n=10, m=500)
    for fed, m, message in (
        (
            make(tmp_path, m=10),
            11,
            r"up to 880 B of RAM and 800 B are free: set memory_path .*, memory_dtype",
        ),
        (
            make(tmp_path, mapped=True, n=11),
            500,
            "880 B of RAM and 800 B are free: set a lower n, memory_dtype",
        ),
        (federation("innovation", MODEL, 40), 41, "up to 820 B of RAM"),
    ):
        with pytest.raises(DeltaflError, match=message):
            admit(fed, sizes_of(m))
    monkeypatch.setattr(budget_module, "free_ram", lambda: 0)
    federation("uniform", MODEL, 5, estimator="difference")


def test_later_only_newcomers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = make(tmp_path, m=10)
    play(fed, 1, save_to=tmp_path / "state")
    monkeypatch.setattr(
        budget_module, "free_ram", lambda: 11 * 80 - 3 * 20
    )  # three rows of 20 bytes are there already
    admit(fed, sizes_of(12))
    assert len(fed.keys) == 10
    assert re.match(
        r"client:10, client:11 cannot join: the memory of one update .* up to 960 B ",
        fed.warnings[0],
    )
    admit(fed, sizes_of(11))
    assert len(fed.keys) == 11
