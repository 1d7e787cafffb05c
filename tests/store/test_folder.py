"""A folder with one owner: a second is refused until the first has gone or was killed; what is
beside a state belongs to it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltafl import DeltaflError
from deltafl.store.folder import (
    Note,
    new_name,
    owned,
    read_note,
    require_note,
    require_own,
    write_note,
)

OWNER = """
import sys, time, pathlib
from deltafl.store.folder import owned
with owned(pathlib.Path("out"), pathlib.Path(sys.argv[1]), "--out"):
    print("mine", flush=True); time.sleep(60)
"""


def test_a_second_owner_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "out.lock"
    command = [sys.executable, "-c", OWNER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        with (
            pytest.raises(DeltaflError, match=r"another process is using out; .* another --out"),
            owned(Path("out"), lock, "--out"),
        ):
            pass
        process.kill()
    assert lock.exists()
    with owned(Path("out"), lock, "--out", seconds=5):
        assert lock.exists()
    assert not lock.exists()


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to", "mkdir"])
def test_a_lock_that_is_another_file_too_leaves_that_as_it_is(tmp_path: Path, kind: str) -> None:
    """Whatever the version of filelock, which before 4.2 empties a file with two names."""
    victim = tmp_path / "victim"
    victim.write_text("dear diary")
    lock = tmp_path / "out.lock"
    make = getattr(lock, kind)
    make(*([] if kind == "mkdir" else [victim]))
    with (
        pytest.raises(DeltaflError, match=r"out\.lock is (a link|a file with 2 names|no file)"),
        owned(tmp_path / "out", lock, "--out"),
    ):
        pass
    assert victim.read_text() == "dear diary"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux has such a folder")
@pytest.mark.parametrize("name", ["out.lock", "new/out.lock"])
def test_where_no_lock_can_be_made_nobody_is_said_to_use_the_folder(name: str) -> None:
    lock = Path("/proc/self", name)
    with (
        pytest.raises(DeltaflError, match=r"out\.lock") as caught,
        owned(Path("out"), lock, "--out"),
    ):
        pass
    assert "another process is using" not in str(caught.value)


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    with owned(Path("out"), tmp_path / "new" / "out.lock", "--out"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with (
        pytest.raises(DeltaflError, match=r"cannot write .*lock"),
        owned(Path("out"), tmp_path / "file" / "out.lock", "--out"),
    ):
        pass


def test_rows_belong_to_the_state_of_their_note_or_of_the_one_before(tmp_path: Path) -> None:
    rows = tmp_path / new_name("run")
    before = Note(3, "a")
    now = Note(4, "a")
    require_note(rows, None, now, "the state")  # killed before the first rows were written
    for note in (before, now):
        write_note(rows, note)
        assert read_note(rows) == note
        require_note(rows, before, now, "the state")
    for other in (Note(2, "a"), Note(4, "b")):
        write_note(rows, other)
        with pytest.raises(
            DeltaflError, match=rf"are of round {other.round} of {other.owner}, and"
        ):
            require_note(rows, before, now, "the state")
    (rows / "round").unlink()
    with pytest.raises(DeltaflError, match="are not there, and the state is of round 4 of a: put"):
        require_note(rows, before, now, "the state")
    for bad in ("{}", "[1]", "[1, 2]", '["1", "a"]'):
        (rows / "round").write_text(bad)
        with pytest.raises(DeltaflError, match="does not say of which round"):
            read_note(rows)


def test_what_a_file_names_is_followed_into_folders_of_rows_alone(tmp_path: Path) -> None:
    own = tmp_path / new_name("run")
    require_own(own, tmp_path)
    own.symlink_to(tmp_path)
    for folder in (
        own,
        tmp_path / "diary",
        tmp_path / "a" / new_name("run"),
        tmp_path / "-0123456",
    ):
        with pytest.raises(DeltaflError, match="which is no folder of a run in"):
            require_own(folder, tmp_path)


def test_a_lock_is_made_though_its_folder_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that has left the last run of it."""
    made = Path.mkdir
    taken: list[Path] = []

    def taken_away(self: Path, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        if len(taken) < 3:
            taken.append(self)
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", taken_away)
    with owned(Path("out"), tmp_path / "part" / "lock", "--out"):
        assert (tmp_path / "part" / "lock").exists() and len(taken) == 3
    # What is no folder stays none.
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DeltaflError, match="file"),
        owned(Path("out"), tmp_path / "file" / "lock", "--out"),
    ):
        pass
