"""What is known of a run or a federation from its files, by any process, at any moment.

Nothing is written, locked or imported there. The last line may be half written, and a server that
was killed may have written a round twice.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from ...errors import DeltaflError, printable
from ...federation.saved import FILES, LOG
from ...store.lines import line_of, whole_lines
from ...store.sealed import read_sealed
from ...store.values import checked
from ...types import Array, Json
from ..folder.checkpoint import FILE
from ..folder.clients import noted_clients
from ..folder.lines import Count, Number, RoundLine
from .foreseen import Foreseen

#: Of a saved state: how often each client was selected, replied and was not there.
COUNTS = tuple(f"state.{name}_m" for name in ("selected", "responded", "missed", "joined"))
CURE = "it is no record of deltafl, or damaged: watch another folder, or delete this run's"


class _Line(RoundLine, total=False):
    """What is looked at in a line of ``rounds.jsonl`` beside what makes the record."""

    num_selected: Count
    effective_sample_size: Number
    largest_weight: Number
    variance: Number
    estimate_norm: Number
    loss: Number


class _Header(TypedDict, total=False):
    """What is looked at in the header of a saved state."""

    sampler: str
    method: str | None
    settings: Json
    strata: dict[str, str] | None


class Seen(NamedTuple):
    """What is known of one run or federation."""

    name: str
    lines: Sequence[Json]  #: one a round, in their order
    total: int | None  #: rounds in all, where that is known
    counts: Mapping[str, Array]  #: the last state's, by name; empty if there is none
    age: float | None  #: seconds since something was written
    strata: Sequence[str] = ()  #: of each client in ``counts``; empty where they are not known
    method: str = ""  #: the label of its sampler
    foreseen: Foreseen | None = None  #: what a plan said
    fault: str = ""  #: why it cannot be read
    n: int = 0  #: clients to select in a round; 0 where that is not known

    @property
    def last(self) -> Json:
        """The last line."""
        return self.lines[-1] if self.lines else {"round": 0}


def run_at(folder: Path, name: str, own: Json, total: int | None) -> Seen:
    """A run with its ``own`` settings, which may not have begun."""
    file = folder / FILE
    arrays, _ = _state(file) if file.exists() else ({}, {})
    strata = noted_clients(folder).strata
    return Seen(
        printable(name, limit=60),
        _lines(folder),
        total,
        arrays,
        _age(folder / LOG),
        strata,
        own.get("sampler", name),
        n=own.get("sample", 0),
    )


def state_at(file: Path) -> Seen:
    """A federation, or the state of a loop of the user's own."""
    arrays, header = _state(file)
    round = int(arrays["state.round"])
    # A federation whose model was lost has gone back: what it wrote of later rounds is gone.
    lines = [line for line in _lines(file.parent) if line["round"] <= round]
    if file.name not in FILES:
        lines = []
    if not lines or lines[-1]["round"] < round:
        lines = [*lines, {"round": round}]
    known: Any = checked(_Header, header, str(file), CURE)
    # Of earlier versions there is only how Python writes the sampler.
    sampler = known.get("method") or (known | known.get("settings", {})).get("sampler", file.name)
    strata = list((known.get("strata") or {}).values())
    name = printable(sampler, limit=60)
    return Seen(name, lines, None, arrays, _age(file), strata, sampler)


def _state(file: Path) -> tuple[dict[str, Array], Json]:
    """The counts of a saved state, and its header."""
    arrays, header = read_sealed(file, CURE, mapped=True)
    counts = {name: arrays[name] for name in (*COUNTS, "state.round") if name in arrays}
    shapes = [counts[name].shape for name in (*COUNTS, "state.round") if name in counts]
    kinds = {array.dtype.kind for array in counts.values()}
    of_clients = shapes[0] if shapes else ()
    # ``joined`` is empty where all were there from the start.
    fitting = [[of_clients] * 3 + [joined, ()] for joined in (of_clients, (0,))]
    if shapes not in fitting or len(of_clients) != 1 or kinds != {"i"}:
        raise DeltaflError(f"{file} is no state of a run or federation: {CURE}")
    return counts, header


def _lines(folder: Path) -> list[Json]:
    """The whole lines, one a round; of one that was written again the last."""
    file = folder / LOG
    found = [line_of(text, _Line, str(file), CURE) for text in whole_lines(file)]
    by_round = {line["round"]: line for line in found}
    return [by_round[round] for round in sorted(by_round)]


def _age(file: Path) -> float | None:
    return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None
