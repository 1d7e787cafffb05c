"""What the files of a run's record must hold, for ``records.py``: only what readers rely on; they hold more."""

from typing import Any

from pydantic import BaseModel


class Test(BaseModel):
    """An evaluation; null where a number does not exist."""

    loss: float | None
    accuracy: float | None
    client_accuracy: float | None = None


class Ended(BaseModel):
    """Why a run diverged, or ended in doubt, and the round of the checkpoint that stays."""

    why: str
    kept: int


class RoundLine(BaseModel):
    """A line of ``rounds.jsonl``."""

    round: int
    cohort: list[int] = []
    counts: list[int] = []
    bytes_down: int = 0
    bytes_up: int = 0
    rejected: list[tuple[int, str]] = []
    test: Test | None = None
    probe: dict[str, Any] = {}
    diverged: Ended | None = None
    doubt: Ended | None = None


class TimingLine(BaseModel):
    """A line of ``timings.jsonl``; old ones lack the processor time."""

    round: int
    seconds: float
    cpu_seconds: float | None = None


class Mark(BaseModel):
    """``checkpoint.json``; old ones lack the tensors' checksum."""

    round: int
    tensors: str
    crc32: int | None = None
    lengths: dict[str, int]


class Note(BaseModel):
    """``memory.json``."""

    folder: str
