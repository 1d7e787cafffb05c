"""The one function that opens files: what it refuses, before the first touch; and atomic writes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deltafl import DeltaflError
from deltafl.store.files import make_folder, opened, read_text, sync_folder, write_atomically


def make_link(path: Path) -> None:
    path.with_name("other").write_text("dear diary")
    path.symlink_to("other")


def make_second_name(path: Path) -> None:
    path.with_name("other").write_text("dear diary")
    os.link(path.with_name("other"), path)


PLANTED: dict[str, Callable[[Path], object]] = {
    "is a link": make_link,
    "is a file with 2 names": make_second_name,
    "is no file but a folder, a pipe or a device": os.mkfifo,
    "is no file but a folder": Path.mkdir,
    "has 10 bytes, which is more than the 9": lambda path: path.write_text("dear diary"),
}


@pytest.mark.parametrize("mode", ["rb", "r+b", "wb", "ab"])
@pytest.mark.parametrize("words", PLANTED)
def test_what_is_no_file_of_its_own_is_neither_read_nor_written(
    tmp_path: Path, words: str, mode: str
) -> None:
    PLANTED[words](tmp_path / "file")
    with pytest.raises(DeltaflError, match=words), opened(tmp_path / "file", mode, largest=9):
        pass
    for path in tmp_path.iterdir():
        if path.is_file():
            assert path.read_text() == "dear diary"


def test_a_users_own_input_may_be_a_link_and_have_several_names(tmp_path: Path) -> None:
    for number, plant in enumerate((make_link, make_second_name)):
        (tmp_path / f"{number}").mkdir()
        plant(tmp_path / f"{number}" / "file")
        assert read_text(tmp_path / f"{number}" / "file", users=True) == "dear diary"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(DeltaflError, match="is no file but a folder, a pipe or a device"):
        read_text(tmp_path / "link", users=True)


@pytest.mark.parametrize("plant", [make_link, os.mkfifo, make_second_name])
def test_a_file_that_is_exchanged_as_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]
) -> None:
    """It is looked at once more when it is open, and a pipe does not wait for its writer."""
    path = tmp_path / "file"
    path.write_text("mine")
    open_it = os.open

    def exchanged(*given: Any) -> int:
        path.unlink()
        plant(path)
        return open_it(*given)

    monkeypatch.setattr(os, "open", exchanged)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with pytest.raises(DeltaflError), opened(path, "wb"):
        pass
    assert len(list(descriptors.iterdir())) == before
    if plant is not os.mkfifo:
        assert (tmp_path / "other").read_text() == "dear diary"


def test_a_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    for place, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(DeltaflError, match=r"^cannot write .*file.*: No space left .*room"):
                write_atomically(path, "new")
        assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "old"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(30, "Read-only file system")))
        with pytest.raises(DeltaflError, match=r"^cannot write .*: Read-only file system"):
            sync_folder(tmp_path)
    path.with_name("file.part").symlink_to(tmp_path / "elsewhere")
    write_atomically(path, "new, ", b"in bytes", private=True)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "new, in bytes"}
    make_folder(tmp_path / "own", private=True)
    assert [each.stat().st_mode & 0o777 for each in (path, tmp_path / "own")] == [0o600, 0o700]


def test_what_cannot_be_written_is_named_without_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "no" / "t.csv", tmp_path / "file" / "t.csv"):
        with pytest.raises(DeltaflError, match=rf"^cannot write {place}: .*; choose a folder"):
            write_atomically(place, "text")


def test_a_file_that_the_user_names_may_be_a_link_and_must_be_a_file(tmp_path: Path) -> None:
    make_link(link := tmp_path / "link")
    write_atomically(link, "new", users=True)
    assert link.is_symlink()
    assert read_text(link, users=True) == "new"
    os.mkfifo(pipe := tmp_path / "pipe")
    # Such as /dev/stdout, and a folder.
    for path in (pipe, tmp_path, Path()):
        with pytest.raises(DeltaflError, match="is no file but a folder, a pipe or a device"):
            write_atomically(path, "new", users=True)
    assert pipe.is_fifo()
    for name in ("a\0b", "\ud800"):
        with pytest.raises(DeltaflError, match="no name of a file can have"):
            write_atomically(tmp_path / name, "new", users=True)
