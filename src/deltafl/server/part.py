"""What the server does with a round is made of parts: read this file before any of them.

A part is a frozen dataclass whose fields are its options. It is one file and one row of
``table.py``; its name there is what users type: ``census+average=0.5``, ``--clip median``,
``make_plan(..., mime=0.7)``. What it remembers from round to round is a NamedTuple of arrays,
``state.parts[name]``. In a round each part may act at these places, in this order; what it does not
override does nothing:

=============  =================================================  ==============================
``size``       how many the sampler draws                         ``relative_error``, ``budget``
``select``     who is selected, in place of the sampler's draw    ``first_round``
``draw``       how the sampler draws them                         ``at_least``
``drift``      what clients are sent beside the model             ``mime``, ``scaffold``
``intake``     what the replies of a round count                  ``clip``, ``dp``
``direction``  what is done to the estimate D before the step     ``dp``, ``mime``, ``norm_guard``
``move``       the step; of one part, the optimizer               ``server_optimizer``
``moved``      what is remembered of the step                     ``mime``, ``average``
``model``      the model to use and to judge                      ``average``
=============  =================================================  ==============================

Several parts act in the order of the table. With which other parts, samplers and estimators one
does not go together, its own ``check`` says.
"""

from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from ..errors import DeltaflError, WithRanges
from ..estimators.value import Reader
from ..moves import Moves
from ..types import (
    BoolArray,
    Cohort,
    FloatArray,
    IntArray,
    Nothing,
    Oracle,
    Params,
    Population,
    Reports,
    Rng,
    read_only,
)


class PlanOfParts(Protocol):
    """What a part may ask of the plan that it belongs to; ``deltafl.Plan`` is one."""

    @property
    def population(self) -> Population:
        """The clients."""

    @property
    def sampler(self) -> Any:
        """Decides who is selected."""

    @property
    def method(self) -> str:
        """How the user writes the sampler."""

    @property
    def rule(self) -> Any:
        """The estimator."""

    @property
    def n(self) -> int:
        """Cohort size."""

    @property
    def seed(self) -> int:
        """Seed of the draws."""

    @property
    def parts(self) -> "tuple[ServerPart, ...]":
        """All parts, in the order in which they act."""

    def part(self, name: str) -> "ServerPart | None":
        """The part of a name, if there is one."""

    @property
    def step_factor(self) -> float:
        """How many times their own steps the clients take."""


class Drawing(NamedTuple):
    """A sampler in one round."""

    sampler: Any
    state: Any  #: its own
    rng: Rng
    oracle: Oracle | None

    def open(self, mask_m: BoolArray | None, n: int) -> Cohort:
        """A cohort of n of the clients that ``mask_m`` names."""
        own_m = None if mask_m is None else read_only(mask_m)
        cohort: Cohort = self.sampler.open(self.state, own_m, n, self.rng, self.oracle)
        return cohort

    def scores(self, mask_m: BoolArray, n: int) -> FloatArray:
        """The sampler's scores, float64 (m,), if it ``has_scores``."""
        # Some samplers keep them in a tree.
        return np.asarray(self.sampler.scores(self.state, mask_m, n, self.oracle))


class Step(NamedTuple):
    """The model's step in one round, as it passes from part to part."""

    round: int  #: index of the round among those that count (``RoundState.left_out``), from 0
    params_d: Params  #: the model before it
    delta_d: FloatArray  #: D, the estimate of the full-participation update
    #: sum_S coef_i norm(u_i)^2; not of whole updates where a part ``alters_updates``
    mean_square: float = 0.0
    #: the least that something has multiplied D with; below 1 the estimate is biased
    factor: float = 1.0
    cohort: Cohort | None = None  #: whose replies D was made of; None for a census
    variance: float = np.nan  #: ``RoundInfo.variance``
    reports: Reports | None = None  #: of the cohort, with what was measured on the updates


class ServerPart(WithRanges):
    """One thing that the server does in every round. Subclasses are frozen dataclasses."""

    #: What users type, and the key of its state.
    name: ClassVar[str]
    #: Whether it makes every method biased.
    biased: ClassVar[bool] = False
    #: Whether it changes what clients send, so that the norms of whole updates are not known.
    alters_updates: ClassVar[bool] = False
    #: Whether clients take other local steps than without it, beside what ``drift`` adds.
    changes_training: ClassVar[bool] = False
    #: Whether a client that does not reply counts as an update of 0, not as one of the others.
    counts_silence: ClassVar[bool] = False
    #: Whether it is about draws, and so does not fit a sampler that asks everyone.
    needs_draws: ClassVar[bool] = False
    #: Which methods it fits, for a message.
    fitting: ClassVar[str] = "all methods"
    #: The longest answer to a census, in median norms of all.
    longest_answer: ClassVar[float] = np.inf

    @classmethod
    def sizes_cohorts(cls) -> bool:
        """Whether n changes from round to round by it."""
        return cls.size is not ServerPart.size

    @property
    def text(self) -> str:
        """How it is written where a saved state names what it depends on."""
        own: Any = self
        if not is_dataclass(own):  # its repr would hold an address in memory
            return type(self).__name__
        options = [field.name for field in fields(own)]
        if options == [self.name]:
            return str(self.__dict__[self.name])
        if not options:
            return "True"
        return repr(self)

    @property
    def needs_single_updates(self) -> str | None:
        """Why a weighted sum of the updates, of secure aggregation, is not enough, as a clause."""
        return None

    @property
    def step_factor(self) -> float:
        """How many times their own steps the clients take."""
        return 1.0

    @property
    def first_step(self) -> float:
        """How many times the mean of the answers to a census the model moves by."""
        return 1.0

    @classmethod
    def fits(cls, sampler: Any, control: Any) -> bool:
        """Whether it can be used beside a sampler, and an estimator with this control variate."""
        return not (cls.needs_draws and sampler.asks_all)

    def check(self, plan: PlanOfParts) -> None:
        """Raise a ``DeltaflError`` if it does not go together with something of the plan."""

    def check_clients(self, plan: PlanOfParts) -> None:
        """Raise a ``DeltaflError`` if it does not go together with the clients that a run begins
        with; in a federation others come and go.
        """

    def init(self, plan: PlanOfParts, params_d: Params) -> Any:
        """Its state before the first round."""
        return Nothing()

    def for_run(self, rounds: int) -> Self:
        """This part with the options that are None ("from the run") filled in."""
        return self

    def size(
        self,
        plan: PlanOfParts,
        own: Any,
        round: int,
        n: int,
    ) -> int:
        """How many clients the sampler draws, where the parts before it would have ``n``.
        ``round`` is that of the run.
        """
        return n

    def select(
        self,
        plan: PlanOfParts,
        round: int,
        mask_m: BoolArray | None,
    ) -> Cohort | None:
        """The cohort of a round in which the sampler does not draw; None if it does. ``mask_m``,
        bool (m,), says who is available, None that all are. ``round`` is ``Step.round``.
        """
        return None

    def draw(
        self,
        plan: PlanOfParts,
        drawing: Drawing,
        mask_m: BoolArray | None,
        n: int,
    ) -> Cohort | None:
        """A cohort that the sampler draws in parts; None if it draws as it is used to."""
        return None

    def codes(self, cohort: Cohort) -> bool:
        """Whether these clients send a code of their update, ``estimators/two_bits.py``."""
        return False

    def drift(
        self,
        plan: PlanOfParts,
        state: Any,
        part: slice,
        read: Reader,
    ) -> Params | None:
        """What moves clients during their local steps on a stretch of the parameters, float32 (b,)
        for all or (n, b); or None.

        ``state`` is the whole ``RoundState``, and ``read`` gives the estimator's sum of all c_j
        and c_i of these clients.
        """
        return None

    def intake(
        self,
        plan: PlanOfParts,
        own: Any,
        coef_n: FloatArray,
    ) -> "Intake | None":
        """What it does to the replies of one round; ``coef_n`` has the coefficient of one draw of
        each selected client if all reply.
        """
        return None

    def direction(
        self,
        plan: PlanOfParts,
        own: Any,
        step: Step,
    ) -> tuple[Step, Any]:
        """The step with another D, and its own next state."""
        return step, own

    def moved(self, own: Any, step: Step, params_d: Params) -> Any:
        """Its own next state, once the step has led to the model ``params_d``."""
        return own

    def model(self, own: Any, params_d: Params) -> Params:
        """The model to use where the parts before it would use ``params_d``."""
        return params_d

    def left_out(self, own: Any, now: Any) -> Any:
        """Its state where rounds are left out, as those of an outage: ``own`` is from before them,
        ``now`` from after.
        """
        return own

    def resized(self, own: Any, moves: Moves) -> Any:
        """Its state when clients join, change or leave; ``Moves`` says which."""
        return own


def require_draws(plan: PlanOfParts, written: str) -> None:
    """Refuse what is about draws, as it was written, beside a sampler that asks everyone."""
    if plan.sampler.asks_all:
        raise DeltaflError(f"{plan.method} asks everyone: leave out {written}")


class Intake:
    """What one part does to the replies of one round; by default nothing.

    Attributes:
        factor_n: What each selected client's update was multiplied with, (n,), 1 for no change.
    """

    def __init__(self, n: int) -> None:
        self.factor_n = np.ones(n)

    def counted(
        self,
        place_k: IntArray,
        update_kd: Params,
        control_kd: FloatArray,
    ) -> Params:
        """Updates as they count, with the control variate of each."""
        return update_kd

    def scored(self, reports: Reports) -> Reports:
        """Reports as the sampler sees them."""
        return reports

    def closed(self, own: Any, client_n: IntArray, here_n: Any) -> Any:
        """The part's next state; ``client_n`` are those of the cohort that replied."""
        return own
