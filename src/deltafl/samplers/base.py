"""What samplers share: the base class, draws by score, biased selections, the facts of a run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..designs.table import ORDERED, draw_cohort, draw_from_tree, drawn_once, find_design
from ..errors import DeltaflError, WithRanges
from ..moves import Moves
from ..scale.tree import SumTree
from ..types import (
    Array,
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Oracle,
    Population,
    Reports,
    Rng,
)
from .census import Census

#: A sampler's memory: a NamedTuple of arrays, so that it can be printed, compared and saved.
State = Any
#: Of all clients, float64 (m,); in a sum tree for the design ``ordered-pivotal``.
Scores = FloatArray | SumTree
#: A count () that begins at 0; states are never changed in place.
ZERO = np.zeros((), np.int64)


class RunFacts(NamedTuple):
    """What a sampler's options can depend on in the run that uses it."""

    rounds: int = 500
    local_steps: int = 1  # of an average client in a round
    local_lr: float = 0.001
    num_classes: int | None = None  # of the task, 0 for regression; None if unknown
    n: int = 1  # cohort size
    m: int = 1  # clients


class WeightState(NamedTuple):
    """The clients' weights, float64 (m,), the only state of many samplers."""

    weight_m: FloatArray


class Sampler(WithRanges, ABC):
    """Decides which clients train in a round. Subclasses are frozen dataclasses whose fields are
    their options.

    A subclass defines ``open``, and also ``init``, ``update`` and ``resized`` if it learns from the
    replies. It overrides the defaults below by class attributes (``needs_loss = True``) or
    properties: see ``examples/own_sampler.py``. ``ranges`` has the allowed intervals of its
    options, such as ``{"floor": "[0, 1]"}``. Use it by name like those of the library, as
    ``FILE.py:ByLoss(power=2)``; ``check_sampler`` tests it.
    """

    #: Whether ``open`` takes ``available_m = None`` for "all clients"; saves m numbers per round.
    accepts_no_mask: ClassVar[bool] = False
    #: Whether replies without a loss are rejected. If False, ``reports.loss_n`` may hold NaN.
    needs_loss: ClassVar[bool] = False
    #: Whether ``update`` reads ``reports.square_loss_n``, which may hold NaN.
    uses_square_loss: ClassVar[bool] = False
    #: The fields of its state with a row for each client, which follow those who stay; newcomers
    #: have what they have in ``init``. The fields of ``kept`` stay as they are, others are made
    #: anew. Where neither is enough, define ``resized``.
    row_fields: ClassVar[tuple[str, ...]] = ()
    kept_fields: ClassVar[tuple[str, ...]] = ()
    #: Those that are a function of the population alone.
    fixed_fields: ClassVar[tuple[str, ...]] = ()
    #: Whether it asks everyone, whatever n is.
    asks_all: ClassVar[bool] = False
    #: Whether it has ``scores``, that its expectations are proportional to.
    has_scores: ClassVar[bool] = False
    #: Whether its expectations count how often a client is away or silent, as FedAU's do.
    expects_absence: ClassVar[bool] = False
    #: Whether it reads the auxiliary variables ``Population.aux_mq``.
    uses_aux: ClassVar[bool] = False
    #: Whether they must be shares of labels, as for ``label_counts``.
    uses_labels: ClassVar[bool] = False
    #: How many clients it can do, where it compares all pairs of them; None for any number.
    most_clients: ClassVar[int | None] = None

    @property
    def unbiased(self) -> bool:
        """Whether the cohorts' expectations are exact and above 0, as unbiased estimates need."""
        return False

    @property
    def learns(self) -> bool:
        """Whether its draws depend on earlier replies."""
        # An ``update`` of its own is what says so.
        return type(self).update is not Sampler.update

    @property
    def draws_equally(self) -> bool:
        """Whether all clients have one probability in every round."""
        return False

    @property
    def needs_oracle(self) -> bool:
        """Whether ``open`` needs all clients' updates or losses of this round (simulations)."""
        return False

    @property
    def skips_zero_updates(self) -> bool:
        """Whether a client whose update is 0 this round cannot be drawn, unless by a floor."""
        return self.needs_oracle

    @property
    def skips_zero_scores(self) -> bool:
        """Whether clients of score 0 are never drawn though their updates are not 0."""
        return False

    @property
    def sketch_size(self) -> int:
        """Length q <= 128 of the sketches of u_i - c_i in ``reports.sketch_nq``; 0 for none."""
        return 0

    @property
    def output_bias_size(self) -> int:
        """How many of the last entries of u_i are reported, one per class; 0 for none."""
        return 0

    @property
    def counts_draws(self) -> bool:
        """Whether zeta_i is about the mean over draws, not over distinct clients."""
        return False

    @property
    def census(self) -> Census | None:
        """The question to every client, once, before the first round; None for none."""
        return None

    def for_run(self, facts: RunFacts) -> Self:
        """This sampler with the options that are None ("from the run") filled in."""
        return self

    def check(self, population: Population) -> None:
        """Raise a ``DeltaflError`` if it needs to know more of the clients than is known."""

    def init(self, population: Population) -> State:
        """The state before the first round; by default the weights are all that is kept."""
        return WeightState(population.weight_m)

    @abstractmethod
    def open(
        self,
        state: State,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """Draw the cohort of a round from a state, which must not be changed.

        Args:
            state: The current state.
            available_m: bool (m,), which clients can be selected.
            n: Cohort size (its mean, for designs of random size).
            rng: The round's generator, the only source of randomness.
            oracle: All clients' updates of this round; None unless ``needs_oracle``.
        """

    def update(
        self,
        state: State,
        cohort: Cohort,
        reports: Reports,
    ) -> State:
        """The state after the replies; rows with ``responded_n`` False must be ignored."""
        return state

    def resized(self, state: State, moves: Moves) -> State:
        """The state when clients join, change or leave (``moves.py``); nobody can where a sampler
        learns and has neither ``row_fields`` nor a ``resized`` of its own.
        """
        fresh = self.init(moves.population)
        # What learns nothing is a function of the population.
        if not self.learns:
            return fresh
        # What it remembers describes all clients jointly, or nobody has said how it follows.
        if not self.row_fields:
            moves.require_none(self)
        if not self.row_fields and not self.kept_fields:
            return state
        kept = {name: getattr(state, name) for name in self.kept_fields}
        for name in self.row_fields:
            begins = getattr(fresh, name)
            kept[name] = moves.rows(getattr(state, name), begins[len(moves.stay_k) :])
        return fresh._replace(**kept)

    def restored(self, state: State, fresh: State) -> State:
        """A state from a file, in which what is a function of the population is ``fresh``, as
        ``init`` makes it.
        """
        if not self.learns:
            return fresh
        # A subclass may have a state of its own, even one array.
        if not hasattr(fresh, "_fields"):
            return state
        fixed = {
            name: value for name, value in fresh._asdict().items() if name in self.fixed_fields
        }
        return state._replace(**fixed)

    def require_oracle(self, oracle: Oracle | None, method: str | None = None) -> Oracle:
        """The oracle, or a ``DeltaflError`` if there is none, which names the ``method`` as its
        user writes it; else the class.
        """
        if oracle is None:
            raise DeltaflError(
                f"{method or type(self).__name__} needs every client's update or loss before the "
                "draw, which only a simulation has; choose a practical sampler such as 'pracdelta'"
            )
        return oracle


@dataclass(frozen=True)
class Scored(Sampler):
    """Draws with expectations proportional to scores, by a design in ``deltafl.DESIGNS``."""

    design: str = "systematic"

    accepts_no_mask = True
    has_scores = True

    @property
    def unbiased(self) -> bool:
        return find_design(self.design).exact

    @abstractmethod
    def scores(
        self,
        state: State,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> Scores:
        """Scores >= 0."""

    def values(self, state: State) -> FloatArray | None:
        """Values (m, q) that the cohort is spread over or balanced on, by designs that can."""
        return None

    @property
    def floor(self) -> float:
        """The share of the cohort that is drawn uniformly; here only for scores in a tree."""
        return 0.0

    def open(
        self,
        state: State,
        available_m: BoolArray | None,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        scores = self.scores(state, available_m, n, oracle)
        if isinstance(scores, SumTree):
            return draw_from_tree(scores, n, self.floor, rng, available_m)
        return draw_cohort(
            scores,
            n,
            self.design,
            rng,
            available_m,
            self.values(state),
        )


class Priced(Scored):
    """Base class of those whose scores can be made the best ones for a given total of seconds or
    costs (``probabilities_for_budget``).

    Attributes:
        per_second: Whether scores are divided by the root of each client's expected seconds.
        per_cost: Whether they are divided by the root of what a client's round costs.
    """

    per_second: bool
    per_cost: bool

    def check(self, population: Population) -> None:
        self.cheaper_first(population.weight_m, population)

    def cheaper_first(
        self,
        score_m: FloatArray,
        population: Population,
    ) -> FloatArray:
        """The scores, or with one of the options those for that total.

        Raises:
            DeltaflError: If both are wanted, or the population does not know the seconds or costs.
        """
        if not (self.per_second or self.per_cost):
            return score_m
        if self.per_second and self.per_cost:
            raise DeltaflError(
                "per_second and per_cost are two prices of one client: leave out one, or give "
                "cost_m that has both"
            )
        cost_m = population.cost_m
        lacking = (
            "per_cost needs what a round of each client costs: write "
            "Population.from_sizes(sizes, cost=costs), in the simulator client_costs='FILE.csv', "
            "or in a federation costs=True"
        )
        if self.per_second:
            cost_m = population.seconds_m
            lacking = (
                "per_second needs the expected seconds of each client's round: write "
                "population._replace(seconds_m=...), or in the simulator speeds='lognormal'"
            )
        if cost_m is None:
            raise DeltaflError(lacking)
        # The best for a given total, see ``probabilities_for_budget``.
        return np.asarray(score_m / np.sqrt(cost_m))


def for_design(score_m: FloatArray, design: str) -> Scores:
    """Scores that a state keeps: in a sum tree for the design that can draw from it."""
    if design == ORDERED:
        return SumTree(score_m)
    return score_m


@dataclass(frozen=True)
class Unweighted(Sampler):
    """Selects clients with unknown inclusion probabilities. Subclasses define ``choose``."""

    @abstractmethod
    def choose(
        self,
        state: State,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        """At most ``size`` of ``present_k``, the available clients in random order.

        The next ones fill the cohort.
        """

    def open(
        self,
        state: State,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        present, size = present_clients(available_m, n)
        present_k = rng.permutation(present)  # breaks all later ties
        chosen = self.choose(state, present_k, size, rng)
        rest = present_k[~np.isin(present_k, chosen)][: size - len(chosen)]
        return unweighted_cohort(np.concatenate([chosen, rest]))


class NewFirstState(NamedTuple):
    """Whom a sampler has selected, and what those who replied sent last."""

    weight_m: FloatArray
    selected_m: BoolArray  # once selected
    seen_m: BoolArray  # once replied
    last_mq: FloatArray  # what the sampler keeps of a reply; 0 until there is one
    rounds: Counts  # (), rounds so far

    def is_consistent(self) -> bool:
        """Whether only those replied who were selected."""
        return bool(np.all(self.seen_m <= self.selected_m))


@dataclass(frozen=True)
class NewFirst(Unweighted):
    """Selects clients never selected before, in random order; then others uniformly.

    As ``mifa``, the selection of MIFA (Gu et al., NeurIPS 2021, algorithm 1): its first round, in
    which all devices reply, is spread here over ceil(m / n) rounds. Since the average counts a
    client as zero until it replies, these steps are n / m, 2 n / m, ... of a full one.
    """

    row_fields: ClassVar[tuple[str, ...]] = ("selected_m", "seen_m", "last_mq")
    kept_fields = ("rounds",)
    fixed_fields = ("weight_m",)

    def init(self, population: Population) -> State:
        m = population.num_clients
        nobody_m = np.zeros(m, bool)
        size = self.sketch_size + self.output_bias_size
        return NewFirstState(
            population.weight_m,
            nobody_m,
            nobody_m,
            np.zeros((m, size)),
            ZERO,
        )

    def choose(
        self,
        state: State,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        # Selected, not seen: whoever never replies must not fill every cohort.
        new: IntArray = present_k[~state.selected_m[present_k]][:size]
        if len(new) == size:
            return new
        seen_k = present_k[state.seen_m[present_k]]
        return np.concatenate(
            [
                new,
                self.again(state, seen_k, size, size - len(new), rng),
            ]
        )

    def again(
        self,
        state: State,
        seen_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        """At most ``wanted`` of the clients that replied before, in a cohort of ``size``."""
        return seen_k[:0]

    def update(
        self,
        state: State,
        cohort: Cohort,
        reports: Reports,
    ) -> State:
        client_n, reports = replied(cohort, reports)
        last_nq = np.hstack([reports.sketch_nq, reports.output_bias_nk])
        return state._replace(
            selected_m=with_rows(state.selected_m, cohort.client_n, True),
            seen_m=with_rows(state.seen_m, client_n, True),
            last_mq=with_rows(state.last_mq, client_n, last_nq),
            rounds=np.asarray(state.rounds + 1),
        )


def present_clients(available_m: BoolArray, n: int) -> tuple[IntArray, int]:
    """The indices of the available clients, and the cohort's size: n, or fewer if they are."""
    present = np.flatnonzero(available_m)
    return present, min(n, len(present))


def label_counts(population: Population) -> FloatArray:
    """The clients' numbers of examples of each class, float64 (m, C), from shares in ``aux_mq``."""
    share_mc = population.aux_mq
    if share_mc is None or share_mc.shape[1] == 0 or share_mc.min() < 0:
        raise DeltaflError(
            "this sampler needs the labels of every client; give Population.from_sizes(sizes, "
            "aux=shares), one row of shares of each class a client, all >= 0"
        )
    (without,) = np.nonzero(share_mc.sum(axis=1) <= 0)
    if len(without) > 0:
        raise DeltaflError(
            f"client {without[0]} has no label of any class, and this sampler needs labels of "
            "every client: leave such clients out, or choose another sampler"
        )
    # Rows may be shares or counts: they are scaled to the client's size.
    return np.asarray(
        population.num_examples_m[:, None] * share_mc / share_mc.sum(axis=1, keepdims=True)
    )


def replied(cohort: Cohort, reports: Reports) -> tuple[IntArray, Reports]:
    """The indices of the clients that replied, and only their rows of the reports."""
    here = reports.responded_n
    return cohort.client_n[here], reports.part(here)


def with_rows(
    value_m: Array,
    client_n: IntArray,
    newest: Any,
) -> Array:
    """A copy in which some clients have new values."""
    value_m = value_m.copy()
    value_m[client_n] = newest
    return value_m


def mean_for_unseen(value_m: FloatArray, default: float) -> FloatArray:
    """The values, with their mean for clients not yet seen (NaN); ``default`` if none has been."""
    seen_m = np.isfinite(value_m)
    # A mean of nothing would be NaN, and a warning.
    if not seen_m.any():
        return np.full(len(value_m), default)
    return np.where(seen_m, value_m, value_m[seen_m].mean())


def unweighted_cohort(client_n: IntArray) -> Cohort:
    """A cohort with unknown probabilities (NaN), for estimators that need none."""
    return drawn_once(np.sort(client_n), np.full(len(client_n), np.nan), "unknown")


def draw_successively(weight_k: FloatArray, size: int, rng: Rng) -> IntArray:
    """Rows of ``size`` draws without replacement, p proportional to the weights of those left."""
    with np.errstate(divide="ignore"):
        return draw_by_logs(np.log(weight_k), size, rng)


def draw_by_logs(log_weight_k: FloatArray, size: int, rng: Rng) -> IntArray:
    """The same by logarithms of the weights, which may lie far apart.

    Rows of weight 0 (-inf) come last. By exponential clocks, in logarithms (Efraimidis and
    Spirakis 2006).
    """
    key_k = log_weight_k + rng.gumbel(size=len(log_weight_k))
    return np.argsort(-key_k, kind="stable")[:size]
