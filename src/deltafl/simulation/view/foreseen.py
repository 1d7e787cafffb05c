"""What a run has used so far, and what a plan foresaw: ``deltafl watch --plan``."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from typing_extensions import TypedDict

from ...analysis.prices import Prices
from ...analysis.text import human_amount, human_bytes
from ...errors import DeltaflError, counted
from ...store.files import below, read_text
from ...store.lines import line_of, whole_lines
from ...store.values import checked
from ...types import Json, Judge
from ..folder.directory import LINE_FILES, recorded_settings
from ..folder.lines import Count, RoundLine, Size, Value
from ..folder.record import first_judge

_CURE = "it was not written by deltafl plan, or it is damaged: plan again"
#: Characters of a table of forecasts; it has a line for every n that was tried.
_LARGEST = 2**20


class Use(NamedTuple):
    """What a run has used so far."""

    trainings: int = 0
    paid: float = 0.0  #: what the trainings cost where clients differ in it, else 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0  #: of the virtual clock
    rounds: int = 0

    @classmethod
    def of(cls, lines: Iterable[Json]) -> Self:
        """The sum over lines of ``rounds.jsonl``."""
        use = cls()
        lost = 0
        for line in lines:
            # A census that moves no model is a round of its own.
            if line["round"] == 0 and line.get("answers"):
                lost = 1
            # A census has answers in place of a cohort, and lines of a federation name nobody.
            asked = len(line.get("cohort", ())) or line.get("answers", 0)
            use = cls(
                use.trainings + (asked or line.get("num_selected", 0)),
                use.paid + line.get("cost", 0),
                use.bytes_up + line.get("bytes_up", 0),
                use.bytes_down + line.get("bytes_down", 0),
                line.get("clock", use.seconds),
                line["round"] + lost,
            )
        return use

    @property
    def text(self) -> str:
        """What is known of it."""
        texts = [counted(self.trainings, "training")]
        if sent := self.bytes_up + self.bytes_down:
            texts.append(human_bytes(sent))
        if self.paid:
            texts.append(f"clients' cost {human_amount(self.paid)}")
        return ", ".join(texts)

    def cost(self, prices: Prices) -> float:
        """Its cost, in the unit of the prices."""
        row_1k = np.array(
            [
                [
                    self.paid or self.trainings,
                    self.bytes_up / 1e6,
                    self.bytes_down / 1e6,
                    self.seconds,
                    self.rounds,
                    self.trainings,
                ]
            ]
        )
        return float(prices.spent(row_1k)[0])


class Row(TypedDict):
    """What is read of a line of ``forecasts.csv``, which has more."""

    method: str
    n: Count
    cost: Size
    cost_low: Size | None
    cost_high: Size | None
    goal: Value
    prices: str


class Foreseen(NamedTuple):
    """The cost to a goal that a plan foresaw, by method and n."""

    goal: float
    prices: Prices
    rows: Sequence[Row]  #: of each method the best n first, and the cheapest method first
    task: str
    judge: Judge | None  #: the metric of the goal; None if the plan's runs are not there

    def row(self, method: str, n: int) -> Row:
        """The row of a method and an n; else of its best n, and else of what the plan advises."""
        own = [row for row in self.rows if row["method"] == method]
        same = [row for row in own if row["n"] == n]
        return (same or own or [*self.rows])[0]


def read_plan(folder: Path) -> Foreseen:
    """What ``deltafl plan --out`` wrote into a folder.

    Raises:
        DeltaflError: If there is no plan, it is damaged, or no method came to its goal.
    """
    file = below(folder, "forecasts.csv")
    found = recorded_settings(folder) if folder.is_dir() else None
    if found is None or "task" not in found or not file.exists():
        raise DeltaflError(f"{folder} holds no plan: name the --out of deltafl plan")
    try:
        table = [*csv.DictReader(read_text(file, largest=_LARGEST).splitlines())]
    except csv.Error as error:
        raise DeltaflError(f"{file}: {error}; {_CURE}") from None
    # A cell without a number says that a plan of one seed has no interval.
    cells = [{name: text or None for name, text in row.items()} for row in table]
    rows = [checked(Row, row, f"{file}, line {at}", _CURE) for at, row in enumerate(cells, 2)]
    if not rows:
        raise DeltaflError(f"in the plan of {folder} no method comes to the goal: plan anew")
    return Foreseen(
        rows[0]["goal"],
        Prices.read(rows[0]["prices"]),
        rows,
        # Goal and prices there may be those of a later plan.
        found["task"],
        _judge(folder),
    )


def _judge(folder: Path) -> Judge | None:
    """By what the plan's runs were judged, as they say."""
    for file in sorted(below(folder, "runs").glob(f"*/{LINE_FILES[0]}")):
        for text in whole_lines(file)[:1]:
            return first_judge([line_of(text, RoundLine, str(file), _CURE)])
    return None
