"""What is noted of each client of a run: size, name, stratum, and the metric in late rounds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    model_validator,
)

from ...store import checked, plain_json, read_json, write_atomically
from ...types import FloatArray, IntArray, Json
from .checkpoint import CURE
from .lines import Round, Size

CLIENTS = "clients.json"

#: A column of numbers; null where one does not exist.
Column = Annotated[list[float | None], BeforeValidator(plain_json)]


def note_clients(
    folder: Path,
    num_examples_m: IntArray,
    metric: str,
    value_by_round: Mapping[int, FloatArray],
    since: int,
    names: Sequence[str],
    strata: Sequence[str],
) -> None:
    """Write each client's size, perhaps its name and stratum, and its metric after these rounds
    beside those noted from ``since`` on.

    It is written before the last of the rounds becomes a checkpoint, so that rounds which are
    played again are noted again.
    """
    known: Json = {"num_examples": num_examples_m.tolist()}
    if len(names):
        known["names"] = [*names]
    if len(strata):
        known["strata"] = [*map(str, strata)]
    if value_by_round:
        # Later ones than the first of these are those that are played again.
        end = min(value_by_round)
        rows = {at: row for at, row in noted_clients(folder).rows.items() if since <= at < end}
        for round, value_m in value_by_round.items():
            pairs = zip(value_m.tolist(), np.round(value_m, 4).tolist(), strict=True)
            rows[round] = plain_json([finer(metric, *pair) for pair in pairs])
        known |= {"rounds": [*rows], metric: [*rows.values()]}
    write_atomically(folder / CLIENTS, json.dumps(known) + "\n")


def _writable(name: Any) -> Any:
    # Names of files that are no text reach Python with surrogates, which no table holds.
    return name.encode(errors="backslashreplace").decode() if isinstance(name, str) else name


#: A name that any file can hold.
Text = Annotated[str, BeforeValidator(_writable)]


class NotedClients(BaseModel):
    """What ``note_clients`` writes; the metric's values have its name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, list[Column]]

    num_examples: list[Size] = []
    names: list[Text] = []  #: none where clients are numbers
    strata: list[Text] = []  #: none where there are none
    rounds: list[Round] = []

    @property
    def rows(self) -> dict[int, Column]:
        """The values of the metric by round."""
        (values,) = self.__pydantic_extra__.values() or [[]]
        return dict(zip(self.rounds, values, strict=True))

    @model_validator(mode="after")
    def _fit(self) -> Self:
        m = len(self.num_examples)
        texts = (self.names, self.strata)
        if len(self.__pydantic_extra__) > 1 or any(len(text) not in (0, m) for text in texts):
            raise ValueError("it must have a name and a stratum for each client, and one metric")
        if any(len(row) != m for row in self.rows.values()):
            raise ValueError("it must have a value for each round and client")
        return self


def noted_clients(folder: Path) -> NotedClients:
    """What is noted of the clients; nothing of a run that has not come so far."""
    file = folder / CLIENTS
    return checked(NotedClients, read_json(file) if file.exists() else {}, str(file), CURE)


def finer(metric: str, value: float, rounded: float) -> float:
    """A value per client as it is written: rounded to four decimals, or to four digits where those
    are finer.
    """
    # An accuracy has four decimals, as in all records so far; an error may be of any size.
    if metric == "accuracy" or not abs(value) < 1:
        return rounded
    return float(f"{value:.4g}")
