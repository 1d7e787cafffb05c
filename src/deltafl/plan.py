"""What never changes during the rounds, ``Plan``, and what does, ``RoundState``."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .designs.inclusion import are_clients, check_cohort_size
from .designs.table import ORDERED
from .errors import DeltaflError, WithRanges, check_types
from .estimators.control_variates import ControlVariate
from .estimators.learned_coefficient import LearnedCoefficient
from .estimators.table import Estimator, find_estimator, weighted_mean
from .estimators.two_bits import coded
from .estimators.value import ControlValue, Reader
from .samplers.base import RunFacts, Sampler, Scored
from .samplers.census import LONGEST, Census
from .samplers.label import (
    Label,
    make_sampler,
    method_of,
    needs_value,
    parse_label,
    unknown_setting,
)
from .scale.numerics import inner
from .scale.persistent_array import PersistentArray
from .scale.rows import RowFormat
from .scale.stretches import over_stretches
from .server.optimizers import ServerOptimizer
from .server.part import Drawing, Intake, ServerPart, Step
from .server.size import AUTO, FEWEST, USUAL_ERROR, RelativeError
from .server.table import IN_TEXT, ROW_OF, ROWS, SETTINGS, UNUSED, in_order, make_parts
from .types import (
    EVERYONE,
    NOBODY,
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    Nothing,
    Oracle,
    Params,
    Population,
    Replies,
    Reports,
    Rng,
    Within,
    locked,
    read_only,
)

#: The type of an attribute of a plan, and what to write.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "population": (Population, "Population.from_sizes(sizes)"),
    "sampler": (Sampler, "make_sampler(label), or make_plan(label, ...)"),
    "seed": (int | np.integer, "a whole number"),
    "memory": (RowFormat, "RowFormat('bfloat16')"),
}


NO_REST: Mapping[str, Any] = {}
#: Of all clients, int16 (m,), and wider once a count needs it.
_Rounds = Annotated[PersistentArray, Within("[0, round]")]


class RoundState(NamedTuple):
    """What the next round needs, and nothing else; nested NamedTuples of arrays."""

    round: Annotated[int, Within("[0, 1e9]")]  #: index of the next round, from 0
    params_d: Params  #: float32 (d,), the global model
    parts: Mapping[str, Any]  #: the memories of the server's parts, by name
    sampler: Any  #: the memory of the sampler
    control: Any  #: the memory of the estimator's control variate
    selected_m: _Rounds  #: how often each client was selected
    responded_m: _Rounds  #: how often it responded
    missed_m: _Rounds  #: the rounds in which it was not available
    #: the round each client joined; (0,) if all were there from the start
    joined_m: Counts = NOBODY
    #: what the simulator's models have beside the vector (``simulation/rest.py``); other hosts keep
    #: that themselves
    rest: Any = NO_REST
    #: how many rounds were left out, as those of an outage: the model is as if they had not been
    left_out: Annotated[int, Within("[0, round]")] = 0
    #: a checksum of the clients' weights and costs (``Plan.weights_crc``): its sums over clients,
    #: and what its sampler knows of them, are of these
    weights_crc: Annotated[int, Within("[0, 4294967295]")] = 0
    #: a checksum of what kinds of memories it has (``Plan.method_crc``)
    method_crc: Annotated[int, Within("[0, 4294967295]")] = 0

    @property
    def counted(self) -> int:
        """How many rounds have moved the model: what the server's parts count by."""
        return self.round - self.left_out

    def is_consistent(self) -> bool:
        """Whether the counts of a saved state fit each other."""
        selected_m, responded_m, missed_m = map(np.asarray, self[5:8])
        if np.shape(self.joined_m) not in ((0,), selected_m.shape):
            return False
        there_m = np.full(len(selected_m), self.round)
        if len(self.joined_m):
            there_m -= self.joined_m
        return bool(np.all(responded_m <= selected_m) and np.all(missed_m <= there_m))


@dataclass(frozen=True)
class Plan(WithRanges):
    """Everything about the rounds that does not change; ``make_plan`` makes one of a label.

    Attributes:
        population: The clients, and how much each counts in the target.
        sampler: Decides which clients are selected.
        n: Cohort size, 1 <= n <= m.
        estimator: What each reply counts: a name in ``deltafl.ESTIMATORS``, an ``Estimator``, or a
            ``ControlVariate`` of your own, which is used with Horvitz-Thompson coefficients.
        parts: What else the server does: the optimizer (``Sgd()`` if there is none), an average,
            clipping, a momentum, ...; ``server/table.py`` has them all. They are kept in the order
            of that table.
        seed: Seed of the draws.
        response_floor: In (0, 1]; the least rate a_i q_i at which a client is assumed to be
            available and to reply, so that no reply is scaled up by more than 1 / floor; see
            ``response_rates``.
        memory: How estimators that remember one update per client store them, see
            ``scale/rows.py``.
    """

    population: Population
    sampler: Sampler
    n: int
    estimator: str | Estimator | ControlVariate = "horvitz-thompson"
    parts: tuple[ServerPart, ...] = ()
    seed: int = 0
    response_floor: float = 0.1
    memory: RowFormat = field(default_factory=RowFormat)
    ranges: ClassVar = {"response_floor": "(0, 1]"}

    def __post_init__(self) -> None:
        for name, (kind, cure) in _KINDS.items():
            given = self.__dict__[name]
            if not isinstance(given, kind):
                raise DeltaflError(f"{name} is {given!r:.60}; write {cure}")
        super().__post_init__()
        _check_parts(self.parts)
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise DeltaflError(f"parts has {', '.join(names)}; write each once")
        # In the order in which they act; the dataclass is frozen.
        object.__setattr__(self, "parts", in_order(tuple(self.parts)))
        check_cohort_size(self.n, self.population.num_clients)
        self.population.check()
        # Samplers of users get it, and what they wrote into it would change the target.
        object.__setattr__(self, "population", locked(self.population))
        most = self.sampler.most_clients
        m = self.population.num_clients
        if most is not None and m > most:
            raise DeltaflError(
                f"{self.method} compares all pairs of clients and can do {most:,}, "
                f"not {m:,}: choose another sampler, such as deltafl recommend --clients {m} names"
            )
        find_estimator(self.estimator)
        for part in self.parts:
            part.check(self)

    @cached_property
    def weights_crc(self) -> int:
        """CRC-32 of the clients' weights and costs: against mistakes, not against forgers."""
        found = 0
        for column_m in (self.population.weight_m, self.population.cost_m):
            if column_m is not None:
                found = zlib.crc32(np.ascontiguousarray(column_m, np.float64).data, found)
        return found

    @cached_property
    def method_crc(self) -> int:
        """CRC-32 of what kinds of sampler and control variate remember; their options may change
        between two rounds.
        """
        control = self.rule.control
        remember = [self.sampler, control]
        if isinstance(control, LearnedCoefficient):
            remember.append(control.control)
        names = [type(part).__qualname__ for part in remember]
        # One of the designs keeps scores in another form.
        if isinstance(self.sampler, Scored):
            names.append(str(self.sampler.design == ORDERED))
        return zlib.crc32(" ".join(names).encode())

    def part(self, name: str) -> ServerPart | None:
        """The part of a name in ``server/table.py``, such as ``"clip"``; None if it is not used."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def rule(self) -> Estimator:
        """The estimator as an object."""
        return find_estimator(self.estimator)

    @property
    def optimizer(self) -> ServerOptimizer:
        """The part that moves the model."""
        return next(part for part in self.parts if isinstance(part, ServerOptimizer))

    @property
    def method(self) -> str:
        """How the user writes the sampler."""
        return method_of(self.sampler, self.rule.name)

    @property
    def part_texts(self) -> dict[str, str]:
        """How the server's parts are written; of those that are not used, their defaults."""
        return UNUSED | {part.name: part.text for part in self.parts}

    @property
    def drifting(self) -> list[str]:
        """The parts by which clients are sent what moves them during their local steps."""
        return [part.name for part in self.parts if type(part).drift is not ServerPart.drift]

    @property
    def step_factor(self) -> float:
        """How many times their own steps the clients take: 1 - beta with ``mime``, else 1."""
        return prod(part.step_factor for part in self.parts)

    @property
    def needs_single_updates(self) -> str | None:
        """What needs the updates one by one, as a clause; None if their weighted sum, of secure
        aggregation, is enough.
        """
        if self.sampler.needs_oracle:
            return f"{self.method} needs every client's update before the draw"
        if self.sampler.learns:
            return f"{self.method} learns from each reply"
        if not self.rule.control.learns_from_sums:
            return f"the estimator {self.rule.name!r} learns from each update"
        reasons = (part.needs_single_updates for part in self.parts)
        return next((reason for reason in reasons if reason), None)

    @property
    def census(self) -> Census | None:
        """What every client is asked once, before the first round; None for nothing."""
        census = self.sampler.census
        if census is None:
            return None
        return census.for_control(self.rule.control)

    def with_census(
        self,
        answers: Sequence[npt.ArrayLike | None] | FloatArray,
    ) -> "Plan":
        """The plan after a census: ``answers`` has that of each client to ``census``, or None."""
        if self.census is None:
            raise DeltaflError(f"{self.method} asks for no census; write the sampler 'census'")
        # A generator, for one, has no length.
        if not hasattr(answers, "__len__"):
            raise DeltaflError(
                f"answers are a {type(answers).__name__}; give a list with that of each client, "
                "or None"
            )
        # A part may allow less, as ``clip`` does: the first model moves by the answers, too.
        longest = min(LONGEST, *(part.longest_answer for part in self.parts))
        return replace(
            self,
            population=self.census.population(self.population, answers, longest),
        )

    def response_rates(
        self,
        state: RoundState,
        client_k: IntArray | None = None,
    ) -> FloatArray:
        """max(floor, a_i q_i), float64 (k,): how likely some clients, or all of them, are available
        and reply.

        a_i = (rounds in which i was available + 1) / (rounds + 1) since i joined, with ten rounds
        of the others' mean; q_i = (responded_i + 1) / (selected_i + 1). They are known before the
        draw. Dividing by them, not by the number of replies, keeps the estimate of the *full*
        population's update right when absence and failures depend on the client (theory,
        section 14, docs/why/theory/absence.md). 1 for samplers whose expectations count this
        already, and with ``dp``.
        """
        if client_k is None:
            client_k = np.arange(self.population.num_clients)
        counts = (state.responded_m, state.selected_m, state.missed_m)
        responded_k, selected_k, missed_k = (count_m[client_k].astype(float) for count_m in counts)
        joined_k: IntArray | int = 0
        if len(state.joined_m):
            joined_k = state.joined_m[client_k]
        # One round more than were played, in which it was there: nobody begins with a rate of 0.
        known_k = state.round + 1 - joined_k
        there_k = (known_k - missed_k) / known_k
        floor = self.response_floor
        # No rate is above 1, so that with this floor all are 1.
        if self.sampler.expects_absence or any(part.counts_silence for part in self.parts):
            floor = 1.0
        return np.asarray(
            np.maximum(
                floor,
                there_k * (responded_k + 1) / (selected_k + 1),
            )
        )

    def model(self, state: RoundState) -> Params:
        """The model to use and to judge: an average of the last with ``average``, else the last."""
        check_state(self, state)
        params_d = state.params_d
        for part in self.parts:
            params_d = part.model(state.parts[part.name], params_d)
        return read_only(params_d)

    def drifts(
        self,
        state: RoundState,
        client_n: IntArray | None,
    ) -> Params | None:
        """The drift that moves some clients during their local steps, beside the gradients; see
        ``Broadcast``.

        With ``mime`` float32 (d,), beta S for all; with ``scaffold`` (n, d), beta S + (1 - beta)
        (c - c_i) of each, and (d,) without c_i if ``client_n`` is None. beta is 0 without ``mime``;
        with ``ghbm`` beta S is not, and (c - c_i) whole.
        With neither None.
        """
        check_state(self, state)
        clients = NOBODY if client_n is None else np.asarray(client_n)
        m = self.population.num_clients
        if not are_clients(clients, m):
            raise DeltaflError(
                f"client_n is {client_n!r:.60}; give an array of clients, from 0 to {m - 1}"
            )
        control = self.rule.control
        # Only where a part asks for it: rows may have to be read from a file.
        reader = cache(lambda: control.reader(state.control, clients))

        def read(part: slice) -> ControlValue:
            value = reader()(part)
            if client_n is None:
                return ControlValue(value.total_d, np.zeros(1))
            return value

        d = len(state.params_d)
        if not self.drifting:
            return None
        drifts = over_stretches(lambda part: self.drift(state, part, read), d, len(clients))
        drift_nd: Params = np.concatenate(drifts, axis=-1)
        # One row may stand for c_i that are all equal.
        return np.broadcast_to(drift_nd, (*[len(clients)] * (drift_nd.ndim - 1), d))

    def drift(
        self,
        state: RoundState,
        stretch: slice,
        read: Reader,
    ) -> Params:
        """``drifts`` on a stretch of the parameters, with the control variate as ``read`` there."""
        drifts = [part.drift(self, state, stretch, read) for part in self.parts]
        # (b,) of one part and (n, b) of another add up to (n, b).
        return reduce(np.add, [drift for drift in drifts if drift is not None])

    def cohort_size(self, state: RoundState) -> int:
        """How many clients the sampler draws in this round, by the rounds before it."""
        n = self.n
        for part in self.parts:
            n = part.size(self, state.parts[part.name], state.round, n)
        # Since the last round clients may have left.
        return min(n, self.population.num_clients)

    def priced(self, state: RoundState, now: Population) -> RoundState:
        """The state from which a round is drawn where clients cost what ``now`` says.

        These costs are known before the draw, so that its probabilities stay exact.
        """
        fresh = self.sampler.init(now)
        return state._replace(sampler=self.sampler.restored(state.sampler, fresh))

    def select(self, round: int, mask_m: BoolArray | None) -> Cohort | None:
        """The cohort of a round in which a part selects in place of the sampler, or None."""
        cohorts = (part.select(self, round, mask_m) for part in self.parts)
        return next((cohort for cohort in cohorts if cohort is not None), None)

    def draw(
        self,
        state: RoundState,
        mask_m: BoolArray | None,
        rng: Rng,
        oracle: Oracle | None = None,
        n: int | None = None,
    ) -> Cohort:
        """The cohort that the sampler draws in this round, of ``cohort_size`` if n is None."""
        drawing = Drawing(self.sampler, state.sampler, rng, oracle)
        n = n or self.cohort_size(state)
        cohorts = (part.draw(self, drawing, mask_m, n) for part in self.parts)
        return next((cohort for cohort in cohorts if cohort is not None), None) or drawing.open(
            mask_m,
            n,
        )

    def codes(self, cohort: Cohort) -> bool:
        """Whether these clients send a code of their update in place of it."""
        return any(part.codes(cohort) for part in self.parts)

    def as_sent(self, cohort: Cohort, update_nd: Params) -> Params:
        """Updates as the server reads them: where these clients send codes, what codes hold."""
        if self.codes(cohort):
            return coded(update_nd)
        return update_nd

    def collect_replies(
        self,
        state: RoundState,
        selected: Cohort,
        which_n: Any = slice(None),
    ) -> Replies:
        """The coefficients of the replies if the clients of a cohort that ``which_n`` selects have
        replied.
        """
        cohort = selected.part(which_n)
        weight_n = self.population.weight_m[cohort.client_n]
        response_n = self.response_rates(state, cohort.client_n)
        coefficients = self.rule.coefficients
        if cohort.kind == EVERYONE:  # nothing was left to chance that a rule could make up for
            coefficients = weighted_mean
        coef_n = coefficients(cohort, weight_n, response_n)
        return Replies(cohort, selected, coef_n, response_n)

    def intakes(self, state: RoundState, cohort: Cohort) -> dict[str, Intake]:
        """What the parts do to the replies of a round, by their names."""
        parts = [part for part in self.parts if type(part).intake is not ServerPart.intake]
        if not parts:
            return {}
        # Of one draw, and as if all replied: that is known before anybody does.
        coef_n = self.collect_replies(state, cohort).coef_n / cohort.count_n
        plan = self
        if (n := self.cohort_size(state)) != self.n:
            plan = replace(self, n=n)
        intakes = {part.name: part.intake(plan, state.parts[part.name], coef_n) for part in parts}
        return {name: intake for name, intake in intakes.items() if intake is not None}

    def advance(
        self,
        state: RoundState,
        replies: Replies,
        reports: Reports,
        delta_d: FloatArray,
        variance: float,
        control: Any,
    ) -> tuple[RoundState, Step]:
        """The next state, from an estimate of what clients did without a drift; also the step."""
        own = dict(state.parts)
        cohort = replies.selected
        step = Step(
            state.counted,
            state.params_d,
            delta_d,
            cohort=cohort,
            variance=variance,
            reports=reports,
        )
        # Each part takes the step that the one before it leaves.
        for part in self.parts:
            step, own[part.name] = part.direction(self, own[part.name], step)
        here_n = reports.responded_n
        mean_square = float(inner(replies.coef_n, reports.squared_norm_n[here_n]))
        # As if every update had been shortened as D was.
        step = step._replace(mean_square=step.factor**2 * mean_square)
        moved = self.move(state._replace(parts=own), step)
        following = moved._replace(
            # With the model after the step: it is the one that the next round begins with.
            sampler=self.sampler.update(state.sampler, locked(cohort), locked(reports)),
            control=self.rule.control.at_model(
                control,
                self.population,
                moved.params_d,
                moved.round,
            ),
            selected_m=state.selected_m.plus_one(cohort.client_n),
            responded_m=state.responded_m.plus_one(cohort.client_n[here_n]),
            missed_m=state.missed_m.plus_one(cohort.absent),
        )
        return following, step

    def move(self, state: RoundState, step: Step) -> RoundState:
        """The state after the model's step."""
        own = dict(state.parts)
        optimizer = self.optimizer
        params_d, own[optimizer.name] = optimizer.move(own[optimizer.name], step)
        for part in self.parts:
            own[part.name] = part.moved(own[part.name], step, params_d)
        return state._replace(round=state.round + 1, params_d=read_only(params_d), parts=own)


def check_state(plan: Plan, state: RoundState) -> None:
    """Raise a ``DeltaflError`` unless they are a plan and a state that belongs to it."""
    check_method(plan, state)
    m = plan.population.num_clients
    known = len(state.selected_m)
    if known != m:
        raise DeltaflError(
            f"the state is of {known} clients and the plan of {m}; give its own plan, or go on "
            "with resize_state(plan, state, kept), kept the old indices of the clients that stay"
        )
    if state.weights_crc != plan.weights_crc:
        raise DeltaflError(
            "the plan's clients have other weights than the state's, or other costs, to which all "
            "belongs that it remembers of them: give its own plan, or go on with "
            "resize_state(plan, state)"
        )
    # Before anybody trains, and not once updates come.
    last = plan.sampler.output_bias_size
    d = len(state.params_d)
    if last > d:
        raise DeltaflError(
            f"the sampler looks at the last {last} parameters of a model of {d}; lower its number"
        )


def check_method(plan: Plan, state: RoundState) -> None:
    """Raise a ``DeltaflError`` unless they are a plan and a state, of whatever clients, of one
    method.
    """
    check_types("the plan first, then the state", plan=(plan, Plan), state=(state, RoundState))
    others = [part.name for part in plan.parts if part.name not in state.parts]
    if state.method_crc != plan.method_crc:
        others.append("another sampler or estimator")
    if others:
        raise DeltaflError(
            f"the plan has {', '.join(others)}, of which the state knows nothing: give the state's "
            "own plan, or begin with init_round(plan, state.params_d)"
        )
    mine = [part.name for part in plan.parts]
    # What remembers nothing may come and go between two rounds.
    lost = [
        name
        for name, memory in state.parts.items()
        if name not in mine and not isinstance(memory, Nothing)
    ]
    if lost:
        raise DeltaflError(
            f"the state has {', '.join(lost)}, which the plan lacks: give the state's own plan, or "
            "drop what it remembers, state._replace(parts={}) with what the plan has"
        )


def _check_parts(given: Any) -> None:
    if not isinstance(given, list | tuple):
        raise DeltaflError(f"parts is {given!r:.60}; write a list, such as [Average(0.5)]")
    for part in given:
        if not isinstance(part, ServerPart):
            raise DeltaflError(f"parts has {part!r:.60}; write instances such as Average(0.5)")


def saved_model(arrays: Mapping[str, Params]) -> str:
    """The name of ``Plan.model`` among the arrays of a saved state."""
    names = [
        "state.params_d",
        *(f"state.parts.{row.kind.name}.model_d" for row in ROWS),
    ]
    # As ``Plan.model`` passes it on: the last part that has one decides.
    return [name for name in names if name in arrays or name == names[0]][-1]


def make_plan(
    sampler: str | Label | Sampler,
    population: Population | npt.ArrayLike,
    n: int | Literal["auto"],
    facts: RunFacts | None = None,
    **more: Any,
) -> Plan:
    """The plan of a label ``name(option=value)@design@estimator+setting=value``, or of a sampler of
    your own.

    Args:
        sampler: A label, whose estimator is that of the name if it has none; or an instance.
        population: The clients, or a list of their sizes.
        n: Cohort size; ``"auto"`` for cohorts that size themselves (``server/size.py``),
            where neither ``relative_error`` nor ``budget`` is set such that e <= 1, and with a
            tenth of all clients in the first round.
        facts: Describes the run, for options that depend on it; n and m are filled in.
        more: Other attributes of ``Plan``, and settings of the server's parts: ``average=0.5``,
            ``mime=0.7``, ``clip="median"``, ``server_optimizer="adam"`` (``server/table.py``).
            None is as left out. Those of the label win.

    Raises:
        DeltaflError: If a name is unknown, or sampler, design, estimator, parts and population do
            not go together.

    Example:
        >>> make_plan("fedvarp", [3, 1, 2], n=2).estimator
        'difference-own'
    """
    if not isinstance(population, Population):
        population = Population.from_sizes(population)
    m = population.num_clients
    settings = {name: more.pop(name) for name in [*more] if name in SETTINGS}
    own = more.pop("parts", ())
    _check_parts(own)
    label = None
    if not isinstance(sampler, Sampler):
        label = parse_label(sampler)
        _check_label(label, sampler, more)
        settings |= label.settings
    # Refuses what no setting can be, before it is compared: an array would be entry by entry.
    usual = make_parts(settings)
    size: Any = n
    if isinstance(size, str) and size == AUTO:
        if not any(part.sizes_cohorts() for part in (*usual, *own)):
            settings[RelativeError.name] = USUAL_ERROR
            usual = make_parts(settings)
        # The plan's own n, which cohorts that size themselves begin with.
        size = min(max(FEWEST, ceil(m / 10)), m)
    if facts is not None:
        facts = facts._replace(n=size, m=m)
    made: Any = sampler
    if label is not None:
        made = make_sampler(label, facts)
    known = Plan.__dataclass_fields__
    for name, value in more.items():
        if name not in known:
            raise unknown_setting(name, value, [*known, *SETTINGS])
    # An object takes the place of the default of its kind. Where that was set, too, or another
    # setting of its kind, both stay, and ``Plan`` refuses them.
    written = {
        ROW_OF[name].kind.name
        for name, value in settings.items()
        if value is not None
        if name == ROW_OF[name].kind.name or value != SETTINGS[name].default
    }
    replaced = {part.name for part in own} - written
    parts = [*(part for part in usual if part.name not in replaced), *own]
    if facts is not None:
        parts = [part.for_run(facts.rounds) for part in parts]
    plan = Plan(population, made, size, parts=tuple(parts), **more)
    for part in plan.parts:
        part.check_clients(plan)
    return plan


def _check_label(label: Label, given: object, more: dict[str, Any]) -> None:
    """Refuse settings that no plan has, and a second estimator; ``more`` gets the label's."""
    for name, value in label.settings.items():
        if name not in IN_TEXT:
            raise unknown_setting(name, value, IN_TEXT)
        if value is True and SETTINGS[name].values is not bool:
            raise needs_value(name, given)
    estimator = more.setdefault("estimator", label.estimator)
    # A label always has an estimator: only one that is not its sampler's usual one was written.
    usual = label.entry.estimator
    if label.estimator != usual and find_estimator(estimator).name != label.estimator:
        raise DeltaflError(
            f"{str(given)!r} has an estimator, and estimator is {estimator!r:.60}; leave out one "
            "of them"
        )
