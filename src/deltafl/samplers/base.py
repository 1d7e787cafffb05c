"""What every sampler has: the base class, the facts of a run, and the clients that can be selected."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..designs.inclusion import check_anyone, check_cohort_size
from ..errors import DeltaflError, check_ranges
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports

#: A sampler's memory: a NamedTuple of arrays, so that it can be printed, compared and saved as it is.
State = Any


class RunFacts(NamedTuple):
    """What a sampler's options can depend on in the run that uses it.

    Attributes:
        rounds: T >= 1.
        local_steps: Local steps a round of an average client, K >= 1.
        local_lr: Local learning rate.
        num_classes: Classes of the task, 0 for regression; None if unknown.
        n: Cohort size.
        m: Number of clients.
    """

    rounds: int = 500
    local_steps: int = 1
    local_lr: float = 0.001
    num_classes: int | None = None
    n: int = 1
    m: int = 1


class WeightState(NamedTuple):
    """The clients' weights, float64 (m,): all that many samplers need."""

    weight_m: FloatArray


class Sampler(ABC):
    """Decides which clients train in a round. Subclasses are frozen dataclasses whose fields are their options.

    A subclass has ``init`` and ``open``, an ``update`` if it learns from the replies, and states below what differs
    from the defaults, as a class attribute (``needs_loss = True``) or as a property::

        @dataclass(frozen=True)
        class ByLoss(deltafl.Sampler):
            power: float = 1.0
            unbiased = True
            needs_loss = True

    It is used by name like those of the library, as ``FILE.py:ByLoss(power=2)``; ``check_sampler`` tests it.
    """

    #: The intervals that numbers among the options must lie in, such as ``{"floor": "[0, 1]"}``; None is allowed.
    ranges: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        check_ranges(self, self.ranges)

    @property
    def unbiased(self) -> bool:
        """Whether the cohorts' expectations are exact and above 0, so that an unbiased estimator stays unbiased."""
        return False

    @property
    def needs_oracle(self) -> bool:
        """Whether ``open`` needs all clients' updates or losses of this round, which only a simulation has."""
        return False

    @property
    def skips_zero_updates(self) -> bool:
        """Whether a client whose update is 0 this round cannot be drawn; possible only with an oracle."""
        return self.needs_oracle

    @property
    def accepts_no_mask(self) -> bool:
        """Whether ``open`` takes ``available_m = None`` for "all clients"; saves m numbers a round."""
        return False

    @property
    def needs_loss(self) -> bool:
        """Whether replies without a loss are rejected. If False, ``reports.loss_n`` may hold NaN."""
        return False

    @property
    def uses_square_loss(self) -> bool:
        """Whether ``update`` reads ``reports.square_loss_n``, which may hold NaN."""
        return False

    @property
    def uses_aux(self) -> bool:
        """Whether it reads the auxiliary variables ``Population.aux_mq``."""
        return False

    @property
    def sketch_size(self) -> int:
        """Length q <= 128 of the sketches of u_i - c_i in ``reports.sketch_nq``; 0 for none."""
        return 0

    @property
    def output_bias_size(self) -> int:
        """How many of the last entries of u_i ``reports.output_bias_nk`` holds: one a class; 0 for none."""
        return 0

    def for_run(self, facts: RunFacts) -> Self:
        """This sampler with the options that are None ("from the run") filled in."""
        return self

    @abstractmethod
    def init(self, population: Population) -> State:
        """The state before the first round."""

    @abstractmethod
    def open(
        self, state: State, available_m: BoolArray, n: int, rng: np.random.Generator, oracle: Oracle | None = None
    ) -> Cohort:
        """Draw the cohort of a round.

        Args:
            state: The current state; it must not be changed.
            available_m: bool (m,), which clients can be selected.
            n: Cohort size (its mean, for designs of random size).
            rng: The round's generator, the only source of randomness.
            oracle: All clients' updates of this round; None unless ``needs_oracle``.
        """

    def update(self, state: State, cohort: Cohort, reports: Reports) -> State:
        """The state after the replies; rows with ``responded_n`` False must be ignored. By default nothing changes."""
        return state

    def require_oracle(self, oracle: Oracle | None) -> Oracle:
        """The oracle, or a ``DeltaflError`` if there is none."""
        if oracle is None:
            raise DeltaflError(
                f"{type(self).__name__} needs every client's update or loss before the draw; only a simulation has it"
            )
        return oracle


def present_clients(available_m: BoolArray, n: int) -> tuple[IntArray, int]:
    """The indices of the available clients, and the cohort's size: n, or all of them if they are fewer.

    Raises:
        DeltaflError: If n is not in 1..m, or nobody is available.
    """
    check_cohort_size(n, len(available_m))
    present = np.flatnonzero(available_m)
    check_anyone(len(present))
    return present, min(n, len(present))


def replied(cohort: Cohort, reports: Reports) -> tuple[IntArray, Reports]:
    """The indices of the clients that replied, and their rows of the reports alone."""
    here = reports.responded_n
    return cohort.client_n[here], Reports._make(column[here] for column in reports)


def mean_for_unseen(value_m: FloatArray, default: float) -> FloatArray:
    """The values, with their mean for clients not yet seen (NaN); ``default`` if none has been."""
    seen_m = np.isfinite(value_m)
    return np.where(seen_m, value_m, value_m[seen_m].mean() if seen_m.any() else default)
