"""Files that earlier runs or people left: whatever is in them, the answer is one sentence that
names the file.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from deltafl import DeltaflError
from deltafl.analysis.summary import read_summary
from deltafl.simulation.folder.record import read_record
from deltafl.store import checked, read_json, read_text, read_toml
from reproduction import running
from reproduction.index import write_index
from reproduction.page import Finding, read_verdict, write_verdict

#: Bytes that no reader takes: not UTF-8, brackets without end, half a value, a number of another
#: kind.
BAD = [
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"round": ',
    b"5",
    b'[{"score": 1}]',
    b"a = " + b"[" * 100_000,
]


def read_index(path: Path) -> object:
    about = dict.fromkeys(Finding.model_fields, "x") | {"done": 1, "total": 1, "own": False}
    write_verdict(path.parent / "toy", Finding(**about))
    return write_index(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": read_toml,
    "record.json": read_record,
    "summary.json": read_summary,
    "verdict.json": read_verdict,
    "runs.jsonl.gz": running.read_rows,
    "README.md": read_index,
}


@pytest.mark.parametrize("bad", BAD, ids=["bytes", "brackets", "half", "number", "other", "nested"])
@pytest.mark.parametrize("name", READERS)
def test_every_reader_answers_damage_with_a_sentence(tmp_path: Path, name: str, bad: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(bad)
    with pytest.raises(DeltaflError) as caught:
        READERS[name](path)
    assert (str(path) in str(caught.value), "\n" in str(caught.value)) == (True, False), (
        caught.value
    )
    assert path.read_bytes() == bad


def test_a_page_beside_the_index_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_bytes(b"\xff")
    with pytest.raises(DeltaflError, match=r"other/README\.md is not text in UTF-8"):
        read_index(tmp_path / "README.md")


def test_what_is_not_there_and_which_line_or_entry_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for read in (read_text, read_json, read_toml):
        with pytest.raises(DeltaflError, match=r"^cannot read .*a\.jsonl: No such file"):
            read(path)
    path.write_text('{"a": ')
    with pytest.raises(DeltaflError, match=r"a\.jsonl is not valid JSON"):
        read_json(path)
    with pytest.raises(DeltaflError, match=r"^here: b\.1: it must be a whole number; mend it$"):
        checked(dict[str, list[int]], {"b": [1, "x"]}, "here", "mend it")
    assert checked(dict[str, list[int]], {"b": [1]}, "here", "mend it") == {"b": [1]}


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"le": 1e100}, "it must be at most 1e+100"),
        ({"lt": 2}, "it must be below 2"),
        ({"ge": 0.5}, "it must be at least 0.5"),
        ({"gt": 0}, "it must be above 0"),
    ],
)
def test_a_number_beyond_a_limit_is_named_with_the_limit(limit: dict[str, Any], words: str) -> None:
    kind: Any = Annotated[float, Field(**limit)]
    with pytest.raises(DeltaflError, match=f"^here: a: {re.escape(words)}; mend it$"):
        checked(dict[str, kind], {"a": float("nan")}, "here", "mend it")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    """As some editors write it, where nobody sees it."""
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbfrounds = 2\n")
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"rounds": 2}')
    assert read_toml(tmp_path / "c.toml") == read_json(tmp_path / "c.json") == {"rounds": 2}
