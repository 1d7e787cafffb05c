"""A log of lines: what is added is read; torn last lines, seals and cutting back."""

from math import inf, nan
from pathlib import Path

import pytest

from deltafl import DeltaflError
from deltafl.store.lines import (
    NOTHING,
    append_line,
    cut_back,
    last_line,
    read_lines,
    seal_of,
)

LINES = [{"round": 0, "loss": nan}, {"round": 1, "loss": inf}, {"round": 2, "loss": 0.1}]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for line in LINES:
        append_line(tmp_path / "log", line)
    return tmp_path / "log"


def test_what_is_added_is_read(log: Path) -> None:
    assert [line["loss"] for line in read_lines(log, dict, "")] == [None, None, 0.1]
    assert last_line(log, dict, "") == LINES[-1]
    assert last_line(log.with_name("none"), dict, "") == {}


def test_the_last_line_is_whole_or_none_wherever_it_was_cut(log: Path) -> None:
    content = log.read_bytes()
    second = content.rindex(b"\n", 0, -1) + 1
    for end in range(second, len(content)):
        log.write_bytes(content[:end])
        known = {second: {"round": 1, "loss": None}, len(content) - 1: LINES[-1]}
        assert last_line(log, dict, "") == known.get(end, {})
    log.write_bytes(content[:-5])
    with pytest.raises(DeltaflError, match="log, line 3, is not valid JSON"):
        list(read_lines(log, dict, ""))


def test_a_seal_is_the_same_in_one_piece_or_in_several_and_shows_every_change(log: Path) -> None:
    whole = seal_of(log)
    content = log.read_bytes()
    for end in range(len(content) + 1):
        beginning = seal_of(log, end=end)
        assert beginning.length == end
        assert seal_of(log, beginning) == whole
    assert seal_of(log, end=0) == NOTHING
    log.write_bytes(content.replace(b"0.1", b"0.2"))
    assert seal_of(log) != whole
    log.write_bytes(content + b"more")
    assert seal_of(log, end=whole.length) == whole
    cut_back(log, whole.length)
    assert log.read_bytes() == content
    cut_back(log.with_name("new"), 0)
    assert log.with_name("new").read_bytes() == b""
