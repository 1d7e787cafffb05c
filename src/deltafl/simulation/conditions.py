"""The conditions under which clients work: who is available, and how fast each computes and sends.

All of it comes from ``stream(seed, "world", ...)``: the samplers of a comparison that share a seed
meet the same conditions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..calls import made
from ..errors import DeltaflError, WithRanges
from ..streams import stream
from ..tasks.metrics import mean_ranks
from ..types import BoolArray, FloatArray, IntArray, Population, Rng
from .traces import FORM, VALUE, Columns, Timeline, client_called, clients_of, read_trace

#: The ``client`` of the world's streams: what a round's numbers are for. Round 0 has what holds for
#: the whole run.
AVAILABLE = 0
SECONDS = 1
DROPOUT = 2
#: So many times in a row nobody is available before a run gives up.
_PATIENCE = 10_000
#: The least seconds and megabits of a file.
_LEAST = 1e-15

#: (round, clock) -> who is available, bool (m,), at least one, or None for everybody; and the
#: clock, later if the server had to wait.
Presence = Callable[[int, float], tuple[BoolArray | None, float]]


class Availability(WithRanges, ABC):
    """Which clients can be selected in a round; its fields are its options."""

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
        # Rates in place of presence: with these the first chance is a_i for any memory, as it is in
        # the long run.
        there_m = rate_m
        last = -1

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            nonlocal last, there_m
            # An earlier round than the last one: the chain is drawn again from its beginning.
            if round < last:
                last = -1
                there_m = rate_m
            while last < round:  # steps of the chain are drawn in order, also after a resume
                last += 1
                rng = stream(seed, "world", last + 1, AVAILABLE)
                there_m = self._step(rate_m, there_m, rng)
            return there_m > 0, clock

        return at

    def _step(self, rate_m: FloatArray, there_m: FloatArray, rng: Rng) -> FloatArray:
        """The next step of the chain at which somebody is there."""
        for _ in range(_PATIENCE):
            chance_m = rate_m + self.memory * (there_m - rate_m)
            there_m = (rng.random(len(chance_m)) < chance_m).astype(float)
            if there_m.any():
                return there_m
        raise DeltaflError(
            f"nobody was available {_PATIENCE:,} times in a row; write a higher rate"
        )


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
        grade_c = np.linspace(0, 1, share_mc.shape[1])
        return np.asarray(np.einsum("mc,c->m", share_mc, grade_c))


@dataclass(frozen=True)
class BySize(Graded):
    """g_i grows evenly by rank, from the client with the fewest examples to that with the most."""

    def grades(self, population: Population) -> FloatArray:
        return _ranks(population.num_examples_m)


@dataclass(frozen=True)
class Daily(Availability):
    """Each client is there for a ``share`` of every ``period`` rounds, from an hour of its own.

    If nobody is there, the server waits for the next client.
    """

    share: float = 0.5
    period: float = 24.0

    ranges: ClassVar = {"share": "(0, 1]", "period": "[1, inf)"}

    def begin(self, population: Population, seed: int) -> Presence:
        phase_m = stream(seed, "world", 0, AVAILABLE).random(population.num_clients)

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            hour_m = (round / self.period + phase_m) % 1.0
            there_m = hour_m < self.share
            if not there_m.any():
                there_m = hour_m == hour_m.max()  # whose day is the next to begin
            return there_m, clock

        return at


@dataclass(frozen=True)
class Trace(Availability):
    """Who is there at which time of the virtual clock, from a file.

    Either ``traces.py`` says of what form, with the values 1 (there) and 0; or its columns are
    client, start and end of an interval in seconds, and it starts again when its last interval has
    ended. If nobody is there, the server waits for the next client.
    """

    path: str
    names: Sequence[str] = ()  #: of the clients, where they have some

    def begin(self, population: Population, seed: int) -> Presence:
        columns = Columns(self.path)
        if VALUE in columns.texts:
            return self._by_values(columns, population)
        columns.require(
            {"client", "start", "end"} <= columns.texts.keys(),
            f"the columns client, start and end, or {FORM}",
        )
        m = population.num_clients
        client_k = clients_of(columns, m, self.names)
        start_k = columns.numbers("start")
        end_k = columns.numbers("end")
        bad_k = np.flatnonzero(end_k <= start_k)
        if len(bad_k):
            row = int(bad_k[0])
            raise columns.bad_row(
                row,
                f"is from {columns.texts['start'][row]:.60} to {columns.texts['end'][row]:.60}; an "
                "interval must end after it begins",
            )
        away = np.setdiff1d(np.arange(m), client_k)
        if len(away):
            client = client_called(away[0], self.names)
            raise DeltaflError(
                f"{self.path} has no interval of client {client}; give it one row at least, or "
                f"write values, which may be 0 at all times: {FORM}"
            )
        length = end_k.max()

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            time = clock % length
            if not ((start_k <= time) & (time < end_k)).any():
                # There is one: an interval reaches to the end of the turn.
                begins = start_k[start_k > time].min()
                clock += begins - time
                time = begins
            there_m = np.zeros(m, np.bool_)
            there_m[client_k[(start_k <= time) & (time < end_k)]] = True
            return there_m, clock

        return at

    def _by_values(self, columns: Columns, population: Population) -> Presence:
        trace = read_trace(columns, population, self.names)
        bad_k = np.flatnonzero(~np.isin(columns.numbers(VALUE), (0, 1)))
        if len(bad_k):
            raise columns.bad_row(
                int(bad_k[0]), "must have the value 1 for who is there, or 0 for who is not"
            )
        if not trace.value_k.any():
            raise DeltaflError(f"{self.path}: nobody is ever there; write 1 once at least")
        some = trace.times_of_any()

        def at(round: int, clock: float) -> tuple[BoolArray, float]:
            there_m = trace.value_m(trace.row(clock)) > 0
            if not there_m.any():
                # The next time at which somebody is there, in this turn or in the one after it.
                turn = clock - clock % trace.length
                starts = np.concatenate([trace.second_t[some], trace.length + trace.second_t[some]])
                place = int(np.argmax(starts > clock - turn))
                clock = float(starts[place]) + turn
                # Not looked up by the clock, which may be a last bit before that start.
                there_m = trace.value_m(int(some[place % len(some)])) > 0
            return there_m, clock

        return at


class Speeds(WithRanges, ABC):
    """How fast clients compute and send."""

    #: Standard deviation of the logarithm of a client's seconds from round to round.
    jitter: float = 0.0

    @abstractmethod
    def begin(
        self,
        population: Population,
        seed: int,
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of a local step, and megabits per second to and from the server: (m,), > 0."""


@dataclass(frozen=True)
class LogNormal(Speeds):
    """Log-normal seconds of a local step and megabits per second."""

    seconds: float = 0.1  #: the median client's of a local step
    megabits: float = 10.0  #: the median client's per second
    sigma: float = 1.0  #: standard deviation of both logarithms over clients; they are independent
    size: float = 0.0  #: correlation of the log seconds of a step with the client's rank in size
    jitter: float = 0.1

    ranges: ClassVar = {
        "seconds": "[1e-9, 1e9]",
        "megabits": "[1e-9, 1e9]",
        "sigma": "[0, 9]",
        "size": "[-1, 1]",
        "jitter": "[0, 9]",
    }

    def begin(
        self,
        population: Population,
        seed: int,
    ) -> tuple[FloatArray, FloatArray]:
        from scipy.special import ndtri

        m = population.num_clients
        of_step_m, of_send_m = stream(seed, "world", 0, SECONDS).standard_normal((2, m))
        # The normal score of a client's rank in size, correlated with its steps alone.
        score_m = ndtri((_ranks(population.num_examples_m) * (m - 1) + 0.5) / m)
        of_step_m = self.size * score_m + np.sqrt(1 - self.size**2) * of_step_m
        step_m = self.seconds * np.exp(self.sigma * of_step_m)
        megabits_m = self.megabits * np.exp(self.sigma * of_send_m)
        return step_m, megabits_m


@dataclass(frozen=True)
class Measured(Speeds):
    """A table with the columns seconds (of a local step) and megabits (per second).

    It has one row per client, in order, or in any order with the column client.
    """

    path: str
    names: Sequence[str] = ()  #: of the clients, where they have some

    def begin(
        self,
        population: Population,
        seed: int,
    ) -> tuple[FloatArray, FloatArray]:
        columns = Columns(self.path)
        columns.require(
            {"seconds", "megabits"} <= columns.texts.keys(),
            "the columns seconds and megabits",
        )
        step_m = columns.numbers("seconds")
        megabits_m = columns.numbers("megabits")
        m = population.num_clients
        client_k = np.arange(len(step_m))
        if "client" in columns.texts:
            client_k = clients_of(columns, m, self.names)
        row_m = np.argsort(client_k)
        fits = np.array_equal(client_k[row_m], np.arange(m))
        # Seconds are bytes over megabits, and must stay a number.
        if not fits or min(step_m.min(), megabits_m.min()) < _LEAST:
            raise DeltaflError(
                f"{self.path} must have a row with numbers from {_LEAST:g} on for each of the {m} "
                "clients"
            )
        return step_m[row_m], megabits_m[row_m]


AVAILABILITIES: dict[str, type[Availability]] = {
    "always": Always,
    "bernoulli": Bernoulli,
    "markov": Markov,
    "daily": Daily,
    "labels": ByLabel,
    "sizes": BySize,
}
SPEEDS: dict[str, type[Speeds]] = {"lognormal": LogNormal}


def costs_of(
    path: str | None,
    population: Population,
    names: Sequence[str] = (),
) -> Timeline | None:
    """What a round of each client costs over time; None without a file."""
    if path is None:
        return None
    if not path.endswith(".csv"):
        raise DeltaflError(f"client_costs is {path!r:.60}; write a file, FILE.csv, with {FORM}")
    timeline = read_trace(Columns(path), population, names)
    least_m = timeline.least_m()
    if not (least_m > 0).all():
        client = client_called(int(least_m.argmin()), names)
        raise DeltaflError(f"{path}: client {client} costs 0 at some time; costs must be above 0")
    return timeline


def find_availability(text: str, names: Sequence[str] = ()) -> Availability:
    """``always``, ``labels(least=0.2)`` and the like, or ``FILE.csv`` (``Trace``)."""
    if text.endswith(".csv"):
        return Trace(text, names)
    return made("availability", text, AVAILABILITIES, "FILE.csv")


def find_speeds(text: str | None, names: Sequence[str] = ()) -> Speeds | None:
    """``lognormal(sigma=0.5)`` and the like, or ``FILE.csv``; None for no clock."""
    if text is None:
        return None
    if text.endswith(".csv"):
        return Measured(text, names)
    return made("speeds", text, SPEEDS, "FILE.csv")


def _ranks(size_m: IntArray) -> FloatArray:
    """Ranks from 0 to 1, those of equal sizes their mean; 1/2 for a single client."""
    m = len(size_m)
    if m == 1:
        return np.full(1, 0.5)
    return (mean_ranks(size_m) - 1) / (m - 1)
