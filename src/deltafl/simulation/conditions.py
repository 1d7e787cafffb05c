"""The conditions under which clients work: who is available, and how fast each computes and sends.

All of it comes from ``stream(seed, "world", ...)``: the samplers of a comparison that share a seed
meet the same conditions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from ..calls import check_options, parse_call
from ..errors import DeltaflError, WithRanges, in_one_line, require, unknown_name
from ..streams import stream
from ..types import BoolArray, FloatArray, Population

#: The ``client`` of the world's streams: what a round's numbers are for. Round 0 has what holds for
#: the whole run.
AVAILABLE = 0
SECONDS = 1
DROPOUT = 2
#: So many times in a row nobody is available before a run gives up.
_PATIENCE = 10_000
T = TypeVar("T")

#: (round, clock) -> who is available, bool (m,), at least one, or None for everybody; and the
#: clock, later if the server had to wait.
Presence = Callable[[int, float], tuple[BoolArray | None, float]]


class Availability(WithRanges, ABC):
    """Which clients can be selected in a round. Subclasses are frozen dataclasses whose fields
    are their options.
    """

    @abstractmethod
    def begin(self, population: Population, seed: int) -> Presence:
        """The clients of one run over its rounds."""


@dataclass(frozen=True)
class Always(Availability):
    """Everybody is there."""

    def begin(self, population: Population, seed: int) -> Presence:
        return lambda round, clock: (None, clock)


@dataclass(frozen=True)
class ByRate(Availability):
    """Each client is available with its own rate a_i, in rounds that hang together.

    P(available in round t) = a_i + memory ([available in round t - 1] - a_i): independent rounds
    with memory 0, else a Markov chain with spells of mean length 1 / ((1 - memory) (1 - a_i)); a_i
    is the share of rounds in the long run. If nobody is available, the server waits for the next
    step of the chain.
    """

    memory: float = 0.0

    ranges: ClassVar = {"memory": "[0, 1)"}

    @abstractmethod
    def rates(self, population: Population) -> FloatArray:
        """The a_i, float64 (m,)."""

    def begin(self, population: Population, seed: int) -> Presence:
        rate_m = self.rates(population)
        there_m = rate_m
        last = -1

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            nonlocal last, there_m
            if round < last:
                last = -1
                there_m = rate_m
            while last < round:  # steps of the chain are drawn in order, also after a resume
                last += 1
                rng = stream(seed, "world", last + 1, AVAILABLE)
                for _ in range(_PATIENCE):
                    chance_m = rate_m + self.memory * (there_m - rate_m)
                    there_m = (rng.random(len(chance_m)) < chance_m).astype(float)
                    if there_m.any():
                        break
                else:
                    raise DeltaflError(
                        f"nobody was available {_PATIENCE:,} times in a row; write a higher rate"
                    )
            return there_m > 0, clock

        return at


@dataclass(frozen=True)
class Bernoulli(ByRate):
    """Every client is there in a share of the rounds, ``rate``."""

    rate: float = 0.5

    ranges: ClassVar = ByRate.ranges | {"rate": "(0, 1]"}

    def rates(self, population: Population) -> FloatArray:
        return np.full(population.num_clients, float(self.rate))


@dataclass(frozen=True)
class Markov(Bernoulli):
    """As ``Bernoulli``, in spells."""

    memory: float = 0.9


@dataclass(frozen=True)
class ByLabel(ByRate):
    """a_i = least + (most - least) g_i, where g_i grows evenly from 0 for the first class to 1 for
    the last, and is the mean over a client's examples.

    Clients of some labels are there rarely: what biases every method that takes those who are there
    for all.
    """

    least: float = 0.1
    most: float = 0.9

    ranges: ClassVar = ByRate.ranges | {"least": "[0, 1]", "most": "(0, 1]"}

    def rates(self, population: Population) -> FloatArray:
        share_mc = population.aux_mq
        if share_mc is None:
            raise DeltaflError(
                "availability by labels needs a task with classes; write 'bernoulli'"
            )
        grade_m = share_mc @ np.linspace(0, 1, share_mc.shape[1])
        return np.asarray(self.least + (self.most - self.least) * grade_m)


@dataclass(frozen=True)
class Trace(Availability):
    """Intervals of the virtual clock from a table with the columns client, start, end (seconds); it
    starts again when its last interval has ended. If nobody is there, the server waits for the next
    client.
    """

    path: str

    def begin(self, population: Population, seed: int) -> Presence:
        client_k, start_k, end_k = _columns(self.path, "client", "start", "end")
        m = population.num_clients
        if not np.isin(client_k, np.arange(m)).all():
            raise DeltaflError(
                f"{self.path}: the column client must have whole numbers from 0 to {m - 1}"
            )
        if (start_k < 0).any() or (end_k <= start_k).any():
            raise DeltaflError(
                f"{self.path}: an interval must begin at 0 or later, and end after it begins"
            )
        client_k = client_k.astype(np.int64)
        length = end_k.max()

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            time = clock % length
            if not ((start_k <= time) & (time < end_k)).any():
                later = start_k[start_k > time]
                begins = later.min(initial=length + start_k.min())
                clock += begins - time
                time = begins % length
            there_m = np.zeros(m, dtype=np.bool_)
            there_m[client_k[(start_k <= time) & (time < end_k)]] = True
            return there_m, clock

        return at


class Speeds(WithRanges, ABC):
    """How fast clients compute and send."""

    #: Standard deviation of the logarithm of a client's seconds from round to round.
    jitter: float = 0.0

    @abstractmethod
    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of a local step, and megabits per second to and from the server, float64 (m,)
        each, > 0.
        """


@dataclass(frozen=True)
class LogNormal(Speeds):
    """Log-normal seconds of a local step and megabits per second."""

    seconds: float = 0.1  #: the median client's of a local step
    megabits: float = 10.0  #: the median client's per second
    sigma: float = 1.0  #: standard deviation of both logarithms over clients; they are independent
    jitter: float = 0.1

    ranges: ClassVar = {
        "seconds": "[1e-9, 1e9]",
        "megabits": "[1e-9, 1e9]",
        "sigma": "[0, 9]",
        "jitter": "[0, 9]",
    }

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        m = population.num_clients
        of_step_m, of_send_m = stream(seed, "world", 0, SECONDS).standard_normal((2, m))
        step_m = self.seconds * np.exp(self.sigma * of_step_m)
        megabits_m = self.megabits * np.exp(self.sigma * of_send_m)
        return step_m, megabits_m


@dataclass(frozen=True)
class Measured(Speeds):
    """A table with the columns seconds (of a local step) and megabits (per second), one row per
    client in order.
    """

    path: str

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        step_m, megabits_m = _columns(self.path, "seconds", "megabits")
        m = population.num_clients
        if len(step_m) != m or min(step_m.min(), megabits_m.min()) <= 0:
            raise DeltaflError(
                f"{self.path} must have a row with numbers above 0 for each of the {m} clients"
            )
        return step_m, megabits_m


AVAILABILITIES: dict[str, type[Availability]] = {
    "always": Always,
    "bernoulli": Bernoulli,
    "markov": Markov,
    "labels": ByLabel,
}
SPEEDS: dict[str, type[Speeds]] = {"lognormal": LogNormal}


def find_availability(text: str) -> Availability:
    """``always``, ``labels(least=0.2)`` and the like, or ``FILE.csv`` with intervals."""
    return _called("availability", text, AVAILABILITIES, Trace)


def find_speeds(text: str | None) -> Speeds | None:
    """``lognormal(sigma=0.5)`` and the like, or ``FILE.csv`` with a row per client; None for no
    clock.
    """
    if text is None:
        return None
    return _called("speeds", text, SPEEDS, Measured)


def _called(what: str, text: str, kinds: Mapping[str, type[T]], table: Callable[[str], T]) -> T:
    if text.endswith(".csv"):
        return table(text)
    name, options = parse_call(text)
    if name not in kinds:
        raise unknown_name(what, name, [*kinds, "FILE.csv"])
    check_options(kinds[name], options, name)
    return kinds[name](**options)


def _columns(path: str, *names: str) -> list[FloatArray]:
    """Columns of a CSV file, which have at least one row, of finite numbers."""
    require("pandas", "sim")
    import pandas as pd

    try:
        table = pd.read_csv(path, usecols=names)
        found = [table[name].to_numpy(dtype=np.float64) for name in names]
        if table.empty or not np.isfinite(found).all():
            raise ValueError("it has no rows, or a number is missing or not finite")
    except (OSError, ValueError) as error:
        raise DeltaflError(
            f"{path} must be a CSV file with the columns {', '.join(names)}, all numbers: "
            f"{in_one_line(error)}"
        ) from None
    return found
