"""The world of a run: which clients are available, how long they take, who drops out, how long the
server waits.

A round in it: the server draws from the clients that are *available*; each of the cohort takes its
*seconds* for the download, its local steps and the upload; some *drop out*; the server closes the
round once the first n have replied, once nobody is left to wait for, or at the *deadline*. Replies
that are late count as missing. A virtual clock adds up the rounds' seconds.

All of it comes from ``stream(seed, "world", ...)``: the samplers of a comparison that share a seed
meet the same world.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..calls import check_options, parse_call
from ..errors import DeltaflError, WithRanges, require, unknown_name
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray, Population

if TYPE_CHECKING:
    from .settings import RunSettings
    from .training.serial import LocalWork

#: The ``client`` of the world's streams: what a round's numbers are for. Round 0 has what holds for
#: the whole run.
_AVAILABLE = 0
_SECONDS = 1
_DROPOUT = 2
#: So many times in a row nobody is available before a run gives up.
_PATIENCE = 10_000
T = TypeVar("T")


#: (round, clock) -> who is available, bool (m,), at least one; and the clock, later if the server
#: had to wait.
Presence = Callable[[int, float], tuple[BoolArray, float]]


class Availability(WithRanges, ABC):
    """Which clients can be selected in a round. Subclasses are frozen dataclasses whose fields
    are their options.
    """

    @abstractmethod
    def begin(self, population: Population, seed: int) -> Presence:
        """The clients of one run over its rounds."""


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
        rate_m = there_m = self.rates(population)
        last = -1

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            nonlocal last, there_m
            if round < last:
                last = -1
                there_m = rate_m
            while last < round:  # steps of the chain are drawn in order, also after a resume
                last += 1
                rng = stream(seed, "world", last + 1, _AVAILABLE)
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
class Graded(ByRate):
    """a_i = least + (most - least) g_i, g_i in [0, 1]."""

    least: float = 0.1
    most: float = 0.9

    ranges: ClassVar = ByRate.ranges | {"least": "[0, 1]", "most": "(0, 1]"}

    @abstractmethod
    def grades(self, population: Population) -> FloatArray:
        """The g_i, float64 (m,)."""

    def rates(self, population: Population) -> FloatArray:
        return np.asarray(self.least + (self.most - self.least) * self.grades(population))


@dataclass(frozen=True)
class ByLabel(Graded):
    """g_i grows evenly from the first class to the last, and is the mean over a client's examples.

    Clients of some labels are there rarely: what biases every method that takes those who are there
    for all.
    """

    def grades(self, population: Population) -> FloatArray:
        share_mc = population.aux_mq
        if share_mc is None:
            raise DeltaflError(
                "availability by labels needs a task with classes; write 'sizes' or 'bernoulli'"
            )
        return np.asarray(share_mc @ np.linspace(0, 1, share_mc.shape[1]))


@dataclass(frozen=True)
class BySize(Graded):
    """g_i grows evenly by rank, from the client with the fewest examples to that with the most."""

    def grades(self, population: Population) -> FloatArray:
        return _ranks(population.num_examples_m)


@dataclass(frozen=True)
class Daily(Availability):
    """Day and night: each client is there for a ``share`` of every ``period`` rounds, from an hour
    of its own.

    If nobody is there, the server waits for the next client.
    """

    share: float = 0.5
    period: float = 24.0

    ranges: ClassVar = {"share": "(0, 1]", "period": "[1, inf)"}

    def begin(self, population: Population, seed: int) -> Presence:
        phase_m = stream(seed, "world", 0, _AVAILABLE).random(population.num_clients)

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            hour_m = (round / self.period + phase_m) % 1.0
            there_m = hour_m < self.share
            return (
                there_m if there_m.any() else hour_m == hour_m.max(),
                clock,
            )  # that whose day is the next to begin

        return at


@dataclass(frozen=True)
class Trace(Availability):
    """Intervals of the virtual clock from a table with the columns client, start, end (seconds); it
    starts again when its last interval has ended. If nobody is there, the server waits for the next
    client.
    """

    path: str

    def begin(self, population: Population, seed: int) -> Presence:
        client_k, start_k, end_k = _table(self.path, "client", "start", "end")
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
                begins = later.min() if len(later) else length + start_k.min()
                clock = clock + begins - time
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
    size: float = 0.0  #: correlation of the log seconds of a step with the client's rank in size
    jitter: float = 0.1

    ranges: ClassVar = dict.fromkeys(("seconds", "megabits"), "[1e-9, 1e9]") | {
        "sigma": "[0, 9]",
        "size": "[-1, 1]",
        "jitter": "[0, 9]",
    }

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        from scipy.special import ndtri

        m = population.num_clients
        of_step_m, of_send_m = stream(seed, "world", 0, _SECONDS).standard_normal((2, m))
        score_m = ndtri((_ranks(population.num_examples_m) * (m - 1) + 0.5) / m)
        of_step_m = self.size * score_m + np.sqrt(1 - self.size**2) * of_step_m
        return self.seconds * np.exp(self.sigma * of_step_m), self.megabits * np.exp(
            self.sigma * of_send_m
        )


@dataclass(frozen=True)
class Measured(Speeds):
    """A table with the columns seconds (of a local step) and megabits (per second), one row per
    client in order.
    """

    path: str

    def begin(self, population: Population, seed: int) -> tuple[FloatArray, FloatArray]:
        seconds_m, megabits_m = _table(self.path, "seconds", "megabits")
        m = population.num_clients
        if len(seconds_m) != m or min(seconds_m.min(), megabits_m.min()) <= 0:
            raise DeltaflError(
                f"{self.path} must have a row with numbers above 0 for each of the {m} clients"
            )
        return seconds_m, megabits_m


AVAILABILITIES: dict[str, type[Availability]] = {
    "bernoulli": Bernoulli,
    "markov": Markov,
    "daily": Daily,
    "labels": ByLabel,
    "sizes": BySize,
}


def find_availability(text: str) -> Availability | None:
    """``always``, which is None, ``labels(least=0.2)`` and the like, or ``FILE.csv`` with
    intervals.
    """
    if text == "always":
        return None
    if text.endswith(".csv"):
        return Trace(text)
    return _called("availability", text, AVAILABILITIES, ("always", "FILE.csv"))


def find_speeds(text: str | None) -> Speeds | None:
    """``lognormal(sigma=0.5)`` and the like, or ``FILE.csv`` with a row per client; None for no
    clock.
    """
    if text is None:
        return None
    if text.endswith(".csv"):
        return Measured(text)
    return _called("speeds", text, {"lognormal": LogNormal}, ("FILE.csv",))


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
    """The world of one run, as its settings describe it.

    Args:
        settings: Resolved settings.
        population: The clients; ``aux_mq`` are their shares of labels, where there are any.
        work: What each client does in a round.
        num_bytes: Bytes that a client receives and sends in a round.
    """

    def __init__(
        self, settings: "RunSettings", population: Population, work: "LocalWork", num_bytes: int
    ) -> None:
        self._settings = settings
        self._m = population.num_clients
        availability = find_availability(settings.availability)
        speeds = find_speeds(settings.speeds)
        self._presence = (
            None if availability is None else availability.begin(population, settings.seed)
        )
        self._jitter = 0.0 if speeds is None else speeds.jitter
        #: The median seconds of each client's round, (m,); None without a clock.
        self.seconds_m: FloatArray | None = None
        if speeds is not None:
            step_m, megabits_m = speeds.begin(population, settings.seed)
            steps_m = np.array(
                [work.num_steps(size) for size in population.num_examples_m.tolist()]
            )
            self.seconds_m = steps_m * step_m + 8e-6 * num_bytes / megabits_m

    def available(self, round: int, clock: float) -> tuple[BoolArray | None, float]:
        """Who can be selected, None for everybody; and the clock, later if the server had to
        wait for somebody.
        """
        return (None, clock) if self._presence is None else self._presence(round, clock)

    def wait(self, round: int, client_n: IntArray) -> Waited:
        """Who of the cohort replies before the server closes the round.

        It waits for the first n replies, or of a larger cohort (``full`` takes everybody) a share
        ``1 / over_select``. A client's luck depends on round and client alone, and not on who else
        is selected. A client that drops out keeps the server waiting for a part of its time: then
        the connection is lost.
        """
        settings = self._settings
        lost_m = stream(settings.seed, "world", round + 1, _DROPOUT).random((2, self._m))
        lost_n = lost_m[0, client_n] < settings.dropout
        if self.seconds_m is None:
            return Waited(~lost_n, 0.0)
        luck_m = stream(settings.seed, "world", round + 1, _SECONDS).standard_normal(self._m)
        seconds_n = (self.seconds_m * np.exp(self._jitter * luck_m))[client_n]
        deadline = np.inf if settings.deadline is None else settings.deadline
        ready = np.sort(seconds_n[~lost_n])
        size = len(client_n)
        enough = max(
            int(np.ceil(size / settings.over_select - 1e-9)), min(settings.sample or 1, size)
        )
        over = np.where(lost_n, lost_m[1, client_n] * seconds_n, seconds_n).max(initial=0.0)
        closed = min(ready[enough - 1] if len(ready) >= enough > 0 else over, deadline)
        return Waited(~lost_n & (seconds_n <= closed), float(closed))


def _ranks(size_m: IntArray) -> FloatArray:
    """Ranks from 0 to 1, those of equal sizes their mean; 1/2 for a single client or where all
    are equal.
    """
    order_m = np.sort(size_m)
    rank_m = (
        np.searchsorted(order_m, size_m) + np.searchsorted(order_m, size_m, side="right") - 1
    ) / 2
    return np.asarray(rank_m / max(len(size_m) - 1, 1) if len(size_m) > 1 else np.full(1, 0.5))


def _table(path: str, *columns: str) -> list[FloatArray]:
    """Columns of a CSV file, which have at least one row, of finite numbers."""
    require("pandas", "sim")
    import pandas as pd

    cure = f"write a CSV file with the columns {', '.join(columns)}, all numbers"
    if not Path(path).is_file():
        raise DeltaflError(f"{path} does not exist; {cure}")
    try:
        table = pd.read_csv(path)
        found = [table[name].to_numpy(dtype=np.float64) for name in columns]
    except KeyError as error:
        raise DeltaflError(f"{path} has no column {error}; {cure}") from None
    except (OSError, ValueError) as error:
        raise DeltaflError(
            f"{path} cannot be read ({' '.join(str(error).split())}); {cure}"
        ) from None
    if not len(table) or not np.isfinite(found).all():
        raise DeltaflError(f"{path} has no rows, or a number is missing or not finite; {cure}")
    return found
