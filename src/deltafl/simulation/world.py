"""The world of a run: what becomes of its rounds under the clients' conditions (``conditions.py``).

A round in it: the server draws from the clients that are *available*; each of the cohort takes its
*seconds* for the download, its local steps and the upload; some *drop out*; the server closes the
round once the first n have replied, once nobody is left to wait for, or at the *deadline*. Replies
that are late count as missing. A virtual clock adds up the rounds' seconds.
"""

from collections.abc import Callable, Sequence
from math import floor, inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray, Population
from .conditions import DROPOUT, SECONDS, Measured, Trace, costs_of, find_availability, find_speeds
from .settings import RunSettings

_MEGABITS_A_BYTE = 8e-6


class Waited(NamedTuple):
    """How a round went: which of the cohort replied in time, and the seconds it took."""

    responded_n: BoolArray
    seconds: float


def tables_of(settings: RunSettings) -> list[Path]:
    """The files that the world of a run is read from."""
    parts = (find_availability(settings.availability), find_speeds(settings.speeds))
    names = [part.path for part in parts if isinstance(part, Trace | Measured)]
    if settings.client_costs is not None:
        names.append(settings.client_costs)
    return [Path(name) for name in names]


class World:
    """The world of one run, as its settings describe it.

    Args:
        settings: Resolved settings.
        population: The clients; ``aux_mq`` are their shares of labels, where there are any.
        num_steps: The local steps of a client with so many examples.
        num_bytes: Bytes that a client receives and sends in a round.
        names: Those of the clients, by which files name them; by their numbers if it is empty.
    """

    def __init__(
        self,
        settings: RunSettings,
        population: Population,
        num_steps: Callable[[int], int],
        num_bytes: int,
        names: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._m = population.num_clients
        #: Who can be selected in a round that would begin at some moment, and when it begins.
        self.available = find_availability(settings.availability, names).begin(
            population,
            settings.seed,
        )
        self._costs = costs_of(settings.client_costs, population, names)
        self._jitter = 0.0
        #: The median seconds of each client's round, (m,); None without a clock.
        self.seconds_m: FloatArray | None = None
        self._megabits_m = np.ones(self._m)
        speeds = find_speeds(settings.speeds, names)
        if speeds is not None:
            self._jitter = speeds.jitter
            step_m, self._megabits_m = speeds.begin(population, settings.seed)
            steps_m = np.array([num_steps(size) for size in population.num_examples_m.tolist()])
            self.seconds_m = steps_m * step_m + _MEGABITS_A_BYTE * num_bytes / self._megabits_m

    def costs(self, clock: float) -> FloatArray | None:
        """What a round of each client costs that begins at some moment, float64 (m,); None without
        costs, and without a clock, where they are those of ``Population.cost_m``.
        """
        if self._costs is None or self.seconds_m is None:
            return None
        return self._costs.value_m(self._costs.row(clock))

    def wait(self, round: int, client_n: IntArray, more_bytes: int = 0) -> Waited:
        """Who of the cohort replies before the server closes the round.

        It waits for the first n replies, or of a larger cohort (``full`` takes everybody) a share
        ``1 / over_select``. A client's luck depends on round and client alone, and not on who else
        is selected. A client that drops out keeps the server waiting for a part of its time: then
        the connection is lost. ``more_bytes`` are those that each receives beside the model, such
        as what corrects its local steps.
        """
        settings = self._settings
        # Drawn for all clients: another cohort must not change anybody's luck.
        lost_2m = stream(
            settings.seed,
            "world",
            round + 1,
            DROPOUT,
        ).random((2, self._m))
        lost_n = lost_2m[0, client_n] < settings.dropout
        if self.seconds_m is None:
            return Waited(~lost_n, 0.0)
        # ``round + 1``: round 0 of these streams has what holds for the whole run.
        luck_m = stream(
            settings.seed,
            "world",
            round + 1,
            SECONDS,
        ).standard_normal(self._m)
        seconds_m = self.seconds_m + _MEGABITS_A_BYTE * more_bytes / self._megabits_m
        seconds_n = (seconds_m * np.exp(self._jitter * luck_m))[client_n]
        ready = np.sort(seconds_n[~lost_n])
        size = len(client_n)
        # 13 / 1.3 is a little below 10 in floating point. Down, as the cohort was rounded up.
        share = floor(size / settings.over_select + 1e-9)
        enough = max(share, min(settings.sample or 1, size))
        if len(ready) >= enough > 0:
            closed = ready[enough - 1]
        else:  # it waits for all, and learns of a lost connection at some moment of that time
            closed = np.where(
                lost_n,
                lost_2m[1, client_n] * seconds_n,
                seconds_n,
            ).max(initial=0.0)
        closed = min(closed, settings.deadline or inf)
        return Waited(~lost_n & (seconds_n <= closed), float(closed))
