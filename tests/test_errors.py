"""What others wrote stays text wherever it is shown."""

import copy
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError, counted, printable

#: Surrogates too: names of files that are no text reach Python with them.
ANYTHING = st.text(st.characters())


class _Raises:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@given(ANYTHING, st.integers(10, 300))
def test_foreign_text_is_one_visible_line_of_a_limited_length(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    kinds = {unicodedata.category(character) for character in shown}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert printable(shown, limit) == shown
    if text.isprintable() and len(text) <= limit:
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nb\tc\0", "a\\nb\\tc\\x00"),
        ("\x9b31m", "\\x9b31m"),
        ("x\u202ey\u2066", "x\\u202ey\\u2066"),
        ("\u2028\udc80", "\\u2028\\udc80"),
        ("naïve 😀 e\u0301", "naïve 😀 e\u0301"),
        (3, "3"),
        (_Raises(), "<_Raises>"),
        pytest.param(10**5000, "<int>", id="number of too many digits"),
    ],
)
def test_what_cannot_be_seen_is_written_as_python_writes_it(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_one_is_no_plural() -> None:
    assert [counted(n, "round") for n in (0, 1, 2, "1", "1.0")] == [
        "0 rounds", "1 round", "2 rounds", "1 round", "1.0 rounds"
    ]  # fmt: skip
    assert counted(1, "reply was", "replies were") == "1 reply was"
    assert counted(2, "reply was", "replies were") == "2 replies were"


def test_a_long_text_keeps_its_ends() -> None:
    shown = printable("begin" + "\x1b" * 10**6 + "end", 40)
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "..." in shown
    assert len(shown) == 40


@given(ANYTHING)
def test_no_sentence_carries_what_a_terminal_would_obey(text: str) -> None:
    error = DeltaflError(f"column {text} is missing; name another one")
    assert str(error).isprintable()
    assert str(copy.copy(error)) == str(error)


def test_a_sentence_keeps_its_cure_whatever_it_quotes() -> None:
    error = DeltaflError(f"column {'x' * 10**6} is missing; name another one")
    assert str(error).endswith("; name another one")
    assert len(str(error)) < 5000
