"""The lines of a run's files, as the types that they must have: anybody may have written them."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Required

from pydantic import Field
from typing_extensions import TypedDict  # that of Python 3.11 knows no validation

from ...errors import printable
from ...types import NO_REPLY, Json, Judge

Round = Annotated[int, Field(ge=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=2**53)]
#: Whose sums over all rounds are finite.
Size = Annotated[float, Field(ge=0, le=1e100)]
Value = Annotated[float, Field(ge=-1e100, le=1e100)]
#: What was measured; null where there is no number.
Number = Value | None


class Ending(TypedDict):
    """Why a run has ended, or looks wrong, and the round whose state is kept."""

    why: str
    kept: Round


class RoundLine(TypedDict, total=False):
    """What is read of a line of ``rounds.jsonl``, which has more."""

    round: Required[Round]
    metrics: list[Judge]
    test: dict[str, Number]
    probe: dict[str, Number]
    cohort: list[Round]
    counts: list[Round]
    answers: Count
    rejected: list[tuple[Round, str]]
    num_responded: Count
    bytes_down: Size
    bytes_up: Size
    clock: Size
    cost: Size  #: of the clients that were asked
    stopped: str  #: why it ended
    diverged: Ending
    suspect: Ending


class TimingLine(TypedDict, total=False):
    """What is read of a line of ``timings.jsonl``, which has more."""

    round: Required[Round]
    seconds: Required[Size]
    cpu_seconds: Required[Size]
    client_seconds: Required[Size]
    server_bytes: Count


#: The files.
KINDS: Json = {"rounds.jsonl": RoundLine, "timings.jsonl": TimingLine}


def refused(lines: Iterable[Json]) -> Counter[str]:
    """Refused replies by reason; reasons that differ in their numbers are one."""
    return Counter(
        # The same fault has other numbers in every sentence.
        re.sub(r"\d[\d.e+-]*", "...", printable(reason, limit=100))
        for line in lines
        for _, reason in line.get("rejected", ())
        if reason != NO_REPLY
    )
