"""The world of a run: which clients are available, how long they take, who drops out, how long the server waits.

A round in it: the server draws from the clients that are *available*; each of the cohort takes its *seconds* for the
download, its local steps and the upload; some *drop out*; the server closes the round once a share ``1 / over_select``
of the cohort has replied, once nobody is left to wait for, or at the *deadline*. Replies that are late count as
missing. A virtual clock adds up the rounds' seconds.

All of it comes from ``stream(seed, "world", ...)``: the samplers of a comparison that share a seed meet the same world.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..errors import DeltaflError, check_ranges, require, unknown_name
from ..estimators.calls import check_options, parse_call
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray, Population

if TYPE_CHECKING:
    from .training.serial import LocalWork

#: The ``client`` of the world's streams: what a round's numbers are for. Round 0 has what holds for the whole run.
_AVAILABLE, _SECONDS, _DROPOUT = 0, 1, 2
#: So many times in a row nobody is available before a run gives up.
_PATIENCE = 10_000
T = TypeVar("T")


class Availability(ABC):
    """Which clients can be selected in a round. Subclasses are frozen dataclasses whose fields are their options."""

    ranges: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        check_ranges(self, self.ranges)

    @abstractmethod
    def begin(self, population: Population, seed: int) -> "Presence":
        """The clients of one run."""


class Presence(ABC):
    """The clients of one run over its rounds."""

    @abstractmethod
    def at(self, round: int, clock: float) -> tuple[BoolArray, float]:
        """Who is available in a round, bool (m,), at least one; and the clock, later if the server had to wait."""


@dataclass(frozen=True)
class ByRate(Availability):
    """Each client is available with its own rate a_i, in rounds that hang together.

    P(available in round t) = a_i + memory ([available in round t - 1] - a_i): independent rounds with memory 0, else a
    Markov chain with spells of mean length 1 / ((1 - memory) (1 - a_i)); a_i is the share of rounds in the long run. If
    nobody is available, the server waits for the next step of the chain.
    """

    memory: float = 0.0

    ranges: ClassVar = {"memory": "[0, 1)"}

    @abstractmethod
    def rates(self, population: Population) -> FloatArray:
        """The a_i, float64 (m,)."""

    def begin(self, population: Population, seed: int) -> Presence:
        return _Chain(self.rates(population), self.memory, seed)


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
    """a_i = sum_c share_ic r_c: the rates r_c of the classes grow evenly from ``least`` to ``most``.

    Clients of some labels are there rarely: what biases every method that takes those who are there for all.
    """

    least: float = 0.1
    most: float = 0.9

    ranges: ClassVar = ByRate.ranges | {"least": "[0, 1]", "most": "(0, 1]"}

    def rates(self, population: Population) -> FloatArray:
        share_mc = population.aux_mq
        if share_mc is None:
            raise DeltaflError("availability by labels needs a task with classes; write 'sizes' or 'bernoulli'")
        return np.asarray(share_mc @ np.linspace(self.least, self.most, share_mc.shape[1]))


@dataclass(frozen=True)
class BySize(ByRate):
    """a_i grows from ``least`` for the client with the fewest examples to ``most``, evenly by rank."""

    least: float = 0.1
    most: float = 0.9

    ranges: ClassVar = ByRate.ranges | {"least": "[0, 1]", "most": "(0, 1]"}

    def rates(self, population: Population) -> FloatArray:
        return self.least + (self.most - self.least) * _ranks(population.num_examples_m)


@dataclass(frozen=True)
class Daily(Availability):
    """Day and night: each client is there for a ``share`` of every ``period`` rounds, from an hour of its own.

    If nobody is there, the server waits for the next client.
    """

    share: float = 0.5
    period: float = 24.0

    ranges: ClassVar = {"share": "(0, 1]", "period": "[1, inf)"}

    def begin(self, population: Population, seed: int) -> Presence:
        phase_m = stream(seed, "world", 0, _AVAILABLE).random(population.num_clients)
        return _Days(phase_m, self.share, self.period)


@dataclass(frozen=True)
class _Days(Presence):
    phase_m: FloatArray
    share: float
    period: float

    def at(self, round: int, clock: float) -> tuple[BoolArray, float]:
        hour_m = (round / self.period + self.phase_m) % 1.0
        there_m = hour_m < self.share
        if not there_m.any():
            there_m = hour_m == hour_m.max()  # the next day to begin
        return there_m, clock


class _Chain(Presence):
    """Steps of the chain are drawn in order; an earlier round, after a resume, begins again at round 0."""

    def __init__(self, rate_m: FloatArray, memory: float, seed: int) -> None:
        self._rate_m, self._memory, self._seed = rate_m, memory, seed
        self._round, self._there_m = -1, np.zeros(0)

    def at(self, round: int, clock: float) -> tuple[BoolArray, float]:
        if round < self._round:
            self._round = -1
        while self._round < round:
            self._round += 1
            rng = stream(self._seed, "world", self._round + 1, _AVAILABLE)
            before_m = self._rate_m if self._round == 0 else self._there_m
            for _ in range(_PATIENCE):
                chance_m = self._rate_m + self._memory * (before_m - self._rate_m)
                before_m = self._there_m = (rng.random(len(chance_m)) < chance_m).astype(float)
                if before_m.any():
                    break
            else:
                raise DeltaflError(f"nobody was available {_PATIENCE:,} times in a row; write a higher rate")
        return self._there_m > 0, clock


@dataclass(frozen=True)
class Trace(Availability):
    """Intervals of the virtual clock from a table with the columns client, start, end (seconds); it starts again when
    its last interval has ended. If nobody is there, the server waits for the next client.
    """

    path: str

    def begin(self, population: Population, seed: int) -> Presence:
        table = _table(self.path, ("client", "start", "end"))
        client_k, start_k, end_k = table["client"].astype(np.int64), table["start"], table["end"]
        m = population.num_clients
        if not len(client_k) or client_k.min() < 0 or client_k.max() >= m or (table["client"] % 1).any():
            raise DeltaflError(f"{self.path}: the column client must have whole numbers from 0 to {m - 1}")
        if (start_k < 0).any() or (end_k <= start_k).any():
            raise DeltaflError(f"{self.path}: an interval must begin at 0 or later, and end after it begins")
        return _Intervals(m, client_k, start_k, end_k)


@dataclass(frozen=True)
class _Intervals(Presence):
    m: int
    client_k: IntArray
    start_k: FloatArray
    end_k: FloatArray

    def at(self, round: int, clock: float) -> tuple[BoolArray, float]:
        length = self.end_k.max()
        time = clock % length
        if not ((self.start_k <= time) & (time < self.end_k)).any():
            later = self.start_k[self.start_k > time]
            begins = later.min() if len(later) else length + self.start_k.min()
            clock, time = clock + begins - time, begins % length
        there_m = np.zeros(self.m, dtype=np.bool_)
        there_m[self.client_k[(self.start_k <= time) & (time < self.end_k)]] = True
        return there_m, clock


class Speeds(ABC):
    """How fast clients compute and send."""

    #: Standard deviation of the logarithm of a client's seconds from round to round.
    jitter: float = 0.0

    @abstractmethod
    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of a local step, and megabits a second to and from the server, float64 (m,) each, > 0."""


@dataclass(frozen=True)
class LogNormal(Speeds):
    """Log-normal seconds of a local step and megabits a second.

    Attributes:
        seconds: > 0, the median client's seconds of a local step.
        megabits: > 0, the median client's megabits a second.
        sigma: >= 0, standard deviation of both logarithms over clients; they are independent.
        size: In [-1, 1], correlation of the log seconds of a step with the client's rank in size.
        jitter: >= 0, standard deviation of the logarithm of a client's seconds from round to round.
    """

    seconds: float = 0.1
    megabits: float = 10.0
    sigma: float = 1.0
    size: float = 0.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        positive, spread = (
            dict.fromkeys(("seconds", "megabits"), "(0, inf)"),
            dict.fromkeys(("sigma", "jitter"), "[0, 9]"),
        )
        check_ranges(self, {**positive, **spread, "size": "[-1, 1]"})

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        from scipy.special import ndtri

        m = population.num_clients
        of_step_m, of_send_m = stream(seed, "world", 0, _SECONDS).standard_normal((2, m))
        score_m = ndtri((_ranks(population.num_examples_m) * (m - 1) + 0.5) / m)
        of_step_m = self.size * score_m + np.sqrt(1 - self.size**2) * of_step_m
        return self.seconds * np.exp(self.sigma * of_step_m), self.megabits * np.exp(self.sigma * of_send_m)


@dataclass(frozen=True)
class Measured(Speeds):
    """A table with the columns seconds (of a local step) and megabits (a second), a row a client in their order."""

    path: str

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        table, m = _table(self.path, ("seconds", "megabits")), population.num_clients
        if len(table["seconds"]) != m or min(column.min() for column in table.values()) <= 0:
            raise DeltaflError(f"{self.path} must have a row with numbers above 0 for each of the {m} clients")
        return table["seconds"], table["megabits"]


AVAILABILITIES: dict[str, type[Availability]] = {
    "bernoulli": Bernoulli,
    "markov": Markov,
    "daily": Daily,
    "labels": ByLabel,
    "sizes": BySize,
}


def find_availability(text: str) -> Availability | None:
    """``always``, which is None, ``labels(least=0.2)`` and the like, or ``FILE.csv`` with intervals."""
    if text == "always":
        return None
    return (
        Trace(text) if text.endswith(".csv") else _called("availability", text, AVAILABILITIES, ("always", "FILE.csv"))
    )


def find_speeds(text: str) -> Speeds:
    """``lognormal(sigma=0.5)`` and the like, or ``FILE.csv`` with a row a client."""
    return Measured(text) if text.endswith(".csv") else _called("speeds", text, {"lognormal": LogNormal}, ("FILE.csv",))


def _called(what: str, text: str, kinds: Mapping[str, type[T]], others: tuple[str, ...]) -> T:
    name, options = parse_call(text)
    if name not in kinds:
        raise unknown_name(what, name, [*kinds, *others])
    check_options(kinds[name], options, name)
    return kinds[name](**options)


class Waited(NamedTuple):
    """How a round went: which of the cohort replied in time, and the seconds it took."""

    responded_n: BoolArray
    seconds: float


class World:
    """The world of one run.

    Args:
        population: The clients; ``aux_mq`` are their shares of labels, where there are any.
        work: What each client does in a round.
        num_bytes: Bytes that a client receives and sends in a round.
        seed: The run's seed.
        availability: Who can be selected; None for everybody, always.
        speeds: How fast they are; None for no clock: then nobody is late.
        dropout: Share of the selected clients that never reply.
        deadline: Seconds after which a round is closed; None to wait.
        over_select: >= 1; the round is closed once the first ``1 / over_select`` of the cohort have replied.
    """

    def __init__(
        self,
        population: Population,
        work: "LocalWork",
        num_bytes: int,
        seed: int,
        availability: Availability | None = None,
        speeds: Speeds | None = None,
        dropout: float = 0.0,
        deadline: float | None = None,
        over_select: float = 1.0,
    ) -> None:
        self._presence = None if availability is None else availability.begin(population, seed)
        self._seed, self._dropout, self._deadline, self._over_select = seed, dropout, deadline, over_select
        self._jitter = 0.0 if speeds is None else speeds.jitter
        #: The median seconds of each client's round, (m,); None without a clock.
        self.seconds_m: FloatArray | None = None
        if speeds is not None:
            step_m, megabits_m = speeds.begin(population, seed)
            steps_m = np.array([work.num_steps(size) for size in population.num_examples_m.tolist()])
            self.seconds_m = steps_m * step_m + 8e-6 * num_bytes / megabits_m
        self._m = population.num_clients

    def available(self, round: int, clock: float) -> tuple[BoolArray | None, float]:
        """Who can be selected, None for everybody; and the clock, later if the server had to wait for somebody."""
        return (None, clock) if self._presence is None else self._presence.at(round, clock)

    def wait(self, round: int, client_n: IntArray) -> Waited:
        """Who of the cohort replies before the server closes the round.

        A client's luck depends on round and client alone, and not on who else is selected. A client that drops out
        keeps the server waiting for a part of its time: then the connection is lost.
        """
        lost_m = stream(self._seed, "world", round + 1, _DROPOUT).random((2, self._m))
        lost_n = lost_m[0, client_n] < self._dropout
        if self.seconds_m is None:
            return Waited(~lost_n, 0.0)
        luck_m = stream(self._seed, "world", round + 1, _SECONDS).standard_normal(self._m)
        seconds_n = (self.seconds_m * np.exp(self._jitter * luck_m))[client_n]
        deadline = np.inf if self._deadline is None else self._deadline
        ready = np.sort(seconds_n[~lost_n])
        enough = int(np.ceil(len(client_n) / self._over_select - 1e-9))
        over = np.where(lost_n, lost_m[1, client_n] * seconds_n, seconds_n).max(initial=0.0)
        closed = min(ready[enough - 1] if len(ready) >= enough > 0 else over, deadline)
        return Waited(~lost_n & (seconds_n <= closed), float(closed))


def _ranks(size_m: IntArray) -> FloatArray:
    """Ranks from 0 to 1, those of equal sizes their mean; 1/2 for a single client or where all are equal."""
    order_m = np.sort(size_m)
    rank_m = (np.searchsorted(order_m, size_m) + np.searchsorted(order_m, size_m, side="right") - 1) / 2
    return np.asarray(rank_m / max(len(size_m) - 1, 1) if len(size_m) > 1 else np.full(1, 0.5))


def _table(path: str, columns: tuple[str, ...]) -> dict[str, FloatArray]:
    """Columns of finite numbers of a CSV file."""
    require("pandas", "sim")
    import pandas as pd

    if not Path(path).is_file():
        raise DeltaflError(f"{path} does not exist; write a CSV file with the columns {', '.join(columns)}")
    try:
        table = pd.read_csv(path)
        found = {name: table[name].to_numpy(dtype=np.float64) for name in columns}
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise DeltaflError(f"{path} must have the columns {', '.join(columns)}, all numbers: {error}") from None
    if not all(np.isfinite(column).all() for column in found.values()):
        raise DeltaflError(f"{path}: a number is missing or not finite in the columns {', '.join(columns)}")
    return found
