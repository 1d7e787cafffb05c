"""What a run costs, in a unit of the user's own: seconds, euros, kWh, grams of CO2.

Prices say how much of it the training of a client in one round, a megabyte, a second of the
virtual clock and a round take; what is not named is free.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from ..calls import parse_call, write_setting
from ..errors import DeltaflError, is_in, unknown_name
from ..types import FloatArray
from .methods import only_asks_first
from .runs import Run


class Prices(NamedTuple):
    """The price of each thing that a federation uses, >= 0."""

    #: of one client in one round; times its own cost where ``client_costs`` has one
    training: float = 0.0
    mb_up: float = 0.0  #: of 10^6 bytes that clients send
    mb_down: float = 0.0  #: of 10^6 bytes that they receive
    second: float = 0.0  #: of the virtual clock
    round: float = 0.0

    @classmethod
    def read(cls, given: str | Mapping[str, Any] | None) -> Self:
        """Prices from ``{"training": 1, "mb_up": 0.1}`` or the text ``training=1,mb_up=0.1``; None
        counts trainings.

        Raises:
            DeltaflError: For an unknown name, a price of zero or below, or none at all.
        """
        prices = {"training": 1.0} if given is None else given
        if isinstance(prices, str):
            prices = parse_call(f"cost({prices})")[1]
        for name, price in prices.items():
            if name not in cls._fields:
                raise unknown_name("cost", name, cls._fields)
            # True would be a price of 1.
            if isinstance(price, bool) or not is_in(price, "(0, inf)"):
                raise DeltaflError(
                    f"the cost of {name} is {price!r}; write a number above 0, or leave it out if "
                    "it is free"
                )
        if not prices:
            raise DeltaflError("cost has no price; write for instance training=1,mb_up=0.1")
        return cls(**prices)

    @property
    def text(self) -> str:
        """As ``read`` takes it."""
        return ",".join(
            write_setting(name, price) for name, price in self._asdict().items() if price
        )

    def spent(self, used_rk: FloatArray) -> FloatArray:
        """What these quantities of ``used`` cost, float64 (r,)."""
        # Trainings are paid in the first column, and counted in the last one.
        return np.asarray(used_rk @ np.array([*self, 0.0]))


def used(run: Run) -> FloatArray:
    """What a run has used up to each evaluation, float64 (r, 6): a column for each of ``Prices``,
    and the number of trainings.

    The first column is that number, too, or what they cost where clients differ in it. A census
    counts: its round, and the trainings and bytes of all clients. Without a clock no seconds pass.
    """
    none_r = np.zeros(len(run.round_r))
    up_r = none_r if run.bytes_up_r is None else run.bytes_up_r
    trainings_r = none_r if run.trainings_r is None else run.trainings_r
    columns = (
        trainings_r if run.cost_r is None else run.cost_r,
        up_r / 1e6,
        (run.bytes_r - up_r) / 1e6,
        none_r if run.clock_r is None else run.clock_r,
        run.round_r + only_asks_first(run.sampler),
        trainings_r,
    )
    return np.stack(columns, axis=1).astype(np.float64)
