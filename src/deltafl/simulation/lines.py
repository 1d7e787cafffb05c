"""The lines of a run's files, as the types that they must have: anybody may have written them."""

from typing import Annotated, Required

from pydantic import Field
from typing_extensions import TypedDict  # that of Python 3.11 knows no validation

from ..types import Json, Judge

Round = Annotated[int, Field(ge=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=2**53)]
#: Whose sums over all rounds are finite.
Size = Annotated[float, Field(ge=0, le=1e100)]
#: What was measured; null where there is no number.
Number = Annotated[float, Field(ge=-1e100, le=1e100)] | None


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
    stopped: str | float  #: why it ended; once the threshold
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
