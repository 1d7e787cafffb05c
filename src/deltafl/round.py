"""One round of federated learning with sampled clients: read this file first.

A *host* (the simulator, Flower, your own loop) owns the training; deltafl owns which clients are
selected and what their replies count::

    state = init_round(plan, params)
    while not done:
        cohort = open_round(plan, state)                                    # which clients train
        updates, reports = host.train(state.params_d, cohort.client_n)  # local work, wherever it happens
        state, info = close_round(plan, state, cohort, updates, reports)  # the estimate, the step, what is learned

``broadcast(plan, state)`` is what clients are sent: ``state.params_d``, and with ``mime`` or
``scaffold`` a drift.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from .accumulate import Accumulator, clients_of
from .arrays import initial_model, is_model
from .designs.inclusion import check_anyone, check_cohort, check_cohort_size, mask_of
from .errors import DeltaflError, WithRanges, unknown_name
from .estimators.control_variates import ControlVariate
from .estimators.remote import RemoteControl, RemoteReply
from .estimators.table import Estimator, find_estimator
from .samplers import Label, RunFacts, Sampler, find_sampler, make_sampler, parse_label
from .samplers.census import LONGEST, Census
from .samplers.label import needs_value
from .scale.persistent_array import PersistentArray
from .scale.rows import RowFormat
from .server.average import AverageState, average_in, init_average
from .server.clipping import RADIUS, init_norms
from .server.mime import drift, momentum_after
from .server.norm_guard import init_guard, shorten
from .server.optimizers import FedExP, ServerOptimizer, Sgd
from .server.privacy import DifferentialPrivacy, needs_single_updates
from .server.scaffold import corrections
from .server.screening import FLAT_UPDATE, Updates
from .streams import stream
from .types import (
    BoolArray,
    Cohort,
    FloatArray,
    IntArray,
    Oracle,
    Params,
    Population,
    Replies,
    Reports,
    RoundInfo,
)

_log = logging.getLogger(__name__)

#: Attributes of a plan that a label may have.
_IN_LABELS = ("average", "clip", "mime", "norm_guard", "scaffold")
#: The type of an attribute of a plan, and what to write.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "population": (Population, "Population.from_sizes(sizes)"),
    "sampler": (Sampler, "make_sampler(label), or make_plan(label, ...)"),
    "seed": (int | np.integer, "a whole number"),
    "memory": (RowFormat, "RowFormat('bfloat16')"),
    "scaffold": (bool, "True or False"),
    "dp": (
        DifferentialPrivacy | None,
        "DifferentialPrivacy(clip=1, noise_multiplier=1, delta=1e-5)",
    ),
}


@dataclass(frozen=True)
class Plan(WithRanges):
    """Everything about the rounds that does not change.

    Attributes:
        population: The clients, and how much each counts in the target.
        sampler: Decides which clients are selected.
        n: Cohort size, 1 <= n <= m.
        estimator: What each reply counts: a name in ``deltafl.ESTIMATORS``, an ``Estimator``, or a
            ``ControlVariate`` of your own, which is used with Horvitz-Thompson coefficients. With
            ``innovation-remote`` or ``difference-own-remote`` clients reply with what their
            ``ClientMemory`` makes of their update.
        server_optimizer: How the model moves along the estimate.
        seed: Seed of the draws.
        response_floor: In (0, 1]; the least rate a_i q_i at which a client is assumed to be
            available and to reply, so that no reply is scaled up by more than 1 / floor; see
            ``response_rates``.
        mime: beta in [0, 1) of the momentum that the server sends to all clients, see ``mime.py``;
            0 for none.
        memory: How estimators that remember one update per client store them, see
            ``scale/rows.py``.
        scaffold: Whether local steps are corrected by what the estimator knows of each client
            (``scaffold.py``).
        average: beta in [0, 1) of the average of the last models that is the one to use
            (``average.py``); 0 for none.
        norm_guard: Cap on an estimate's norm, in medians of the norms before it
            (``norm_guard.py``); **biased**.
        clip: ``"median"`` bounds what a client that lies can do to model and scores
            (``clipping.py``); **biased**.
        dp: ``DifferentialPrivacy``: clips updates and adds noise, for ``uniform@poisson`` alone; or
            None.
    """

    population: Population
    sampler: Sampler
    n: int
    estimator: str | Estimator | ControlVariate = "horvitz-thompson"
    server_optimizer: ServerOptimizer = field(default_factory=Sgd)
    seed: int = 0
    response_floor: float = 0.1
    mime: float = 0.0
    norm_guard: float | None = None
    clip: str | None = None
    dp: DifferentialPrivacy | None = None
    memory: RowFormat = field(default_factory=RowFormat)
    scaffold: bool = False
    average: float = 0.0
    ranges: ClassVar = {
        "response_floor": "(0, 1]",
        "mime": "[0, 1)",
        "average": "[0, 1)",
        "norm_guard": "(1, inf)",
    }

    def __post_init__(self) -> None:
        for name, (kind, cure) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise DeltaflError(f"{name} is {getattr(self, name)!r:.60}; write {cure}")
        super().__post_init__()
        if not hasattr(self.server_optimizer, "step") or isinstance(self.server_optimizer, type):
            raise DeltaflError(
                f"server_optimizer is {self.server_optimizer!r}; write make_server_optimizer(name)"
            )
        check_cohort_size(self.n, self.population.num_clients)
        self.population.check()
        remote = isinstance(control := self.rule.control, RemoteControl)
        if remote and self.sampler.output_bias_size > 0:
            name = type(self.sampler).__name__
            raise DeltaflError(
                f"{name} looks at the last entries of updates; write the estimator without "
                "'-remote'"
            )
        if self.clip not in (None, "median"):
            raise DeltaflError(
                f"clip is {self.clip!r}; write clip='median', or None for updates as they were sent"
            )
        if self.clip is not None and remote:
            raise DeltaflError(
                "clip needs updates and these clients send differences; leave out '-remote', or "
                "clip"
            )
        if self.dp is not None:
            self.dp.check(self)
        drifts = self.mime > 0 or self.scaffold
        if isinstance(self.server_optimizer, FedExP) and (drifts or self.dp is not None or remote):
            why = "the norm of every client's whole update"
            raise DeltaflError(
                f"fedexp needs {why}; leave out mime, scaffold, dp and '-remote', or choose 'sgd'"
            )
        if self.scaffold and not control.knows_clients:
            why = "scaffold corrects local steps by what the estimator knows of each client"
            raise DeltaflError(f"{why}; choose one that knows it, such as 'difference-own'")

    @property
    def rule(self) -> Estimator:
        """The estimator as an object."""
        return find_estimator(self.estimator)

    @property
    def census(self) -> Census | None:
        """What every client is asked once, before the first round; None for nothing."""
        return (
            None
            if self.sampler.census is None
            else self.sampler.census.for_control(self.rule.control)
        )

    def with_census(self, answers: Sequence[npt.ArrayLike | None] | FloatArray) -> "Plan":
        """The plan after a census: ``answers`` has that of each client to ``census``, or None."""
        if self.census is None:
            raise DeltaflError(
                f"{type(self.sampler).__name__} asks for no census; write the sampler 'census'"
            )
        longest = LONGEST if self.clip is None else RADIUS
        return replace(self, population=self.census.population(self.population, answers, longest))

    def response_rates(self, state: "RoundState", client_k: IntArray | None = None) -> FloatArray:
        """max(floor, a_i q_i), float64 (k,): how likely some clients, or all of them, are available
        and reply.

        a_i = (rounds in which i was available + 1) / (rounds + 1) since i joined, with ten rounds
        of the others' mean; q_i = (responded_i + 1) / (selected_i + 1). They are known before the
        draw. Dividing by them, not by the number of replies, keeps the estimate of the *full*
        population's update right when absence and failures depend on the client; docs/theory.md,
        section 14. 1 for samplers whose expectations count this already.
        """
        which = slice(None) if client_k is None else client_k
        counts = (state.responded_m, state.selected_m, state.missed_m)
        responded_k, selected_k, missed_k = (count_m[which].astype(float) for count_m in counts)
        known_k = state.round + 1 - (state.joined_m[which] if len(state.joined_m) else 0)
        there_k = (known_k - missed_k) / known_k
        floor = 1.0 if self.dp is not None or self.sampler.expects_absence else self.response_floor
        return np.asarray(np.maximum(floor, there_k * (responded_k + 1) / (selected_k + 1)))

    def model(self, state: "RoundState") -> Params:
        """The model to use and to judge: an average of the last with ``average`` or ``FedExP``,
        else the last.
        """
        return state.average.model_d if isinstance(state.average, AverageState) else state.params_d

    def drifts(self, state: "RoundState", client_n: IntArray | None) -> Params | None:
        """The drift that moves some clients during their local steps, beside the gradients; see
        ``Broadcast``.

        With ``mime`` float32 (d,), beta S for all; with ``scaffold`` (n, d), beta S + (1 - beta) (c
        - c_i) of each, and (d,) without c_i if ``client_n`` is None. beta is 0 without ``mime``.
          With neither None.
        """
        common_d = drift(self.mime, state.mime)
        if not self.scaffold:
            return common_d
        own_nd = corrections(self.rule.control, state.control, client_n, 1 - self.mime)
        return own_nd if common_d is None else own_nd + common_d

    def collect_replies(
        self, state: "RoundState", selected: Cohort, which_n: Any = slice(None)
    ) -> Replies:
        """The coefficients of the replies if the clients of a cohort that ``which_n`` selects
        have replied.
        """
        cohort = selected.part(which_n)
        weight_n = self.population.weight_m[cohort.client_n]
        response_n = self.response_rates(state, cohort.client_n)
        return Replies(
            cohort, selected, self.rule.coefficients(cohort, weight_n, response_n), response_n
        )

    def advance(
        self,
        state: "RoundState",
        cohort: Cohort,
        reports: Reports,
        delta_d: FloatArray,
        control: Any,
    ) -> tuple["RoundState", FloatArray, float]:
        """The next state, from an estimate without drift; also the estimate that was used and
        the guard's factor.
        """
        if self.dp is not None:
            delta_d = delta_d + self.dp.noise(self, len(delta_d))
        drift_d = drift(self.mime, state.mime)
        if drift_d is not None:
            delta_d = drift_d + delta_d
        delta_d, clip_factor, guard = shorten(self.norm_guard, state.guard, delta_d)
        here = reports.responded_n
        mean_square = 0.0
        if isinstance(self.server_optimizer, FedExP):
            coef_n = self.collect_replies(state, cohort, here).coef_n
            mean_square = clip_factor**2 * float(coef_n @ reports.squared_norm_n[here])
        moved = self.move(state, delta_d, mean_square)
        following = moved._replace(
            sampler=self.sampler.update(state.sampler, cohort, reports),
            control=self.rule.control.at_model(
                control, self.population, moved.params_d, moved.round
            ),
            selected_m=state.selected_m.plus_one(cohort.client_n),
            responded_m=state.responded_m.plus_one(cohort.client_n[here]),
            missed_m=state.missed_m
            if cohort.absent is None
            else state.missed_m.plus_one(cohort.absent),
            guard=guard,
        )
        return following, delta_d, clip_factor

    def move(
        self, state: "RoundState", delta_d: FloatArray, mean_square: float = 0.0
    ) -> "RoundState":
        """The state after the model's step along an estimate D; ``mean_square`` is the N of
        ``FedExP``.
        """
        server = self.server_optimizer
        last_d = state.params_d
        optimizer = state.optimizer
        if isinstance(server, FedExP):
            params_d, optimizer = server.extrapolate(last_d, delta_d, mean_square, optimizer)
        else:
            params_d, optimizer = server.step(last_d, delta_d, optimizer)
        average = average_in(self.average, state.average, last_d, params_d, state.round + 1)
        moved = state._replace(
            round=state.round + 1, params_d=params_d, optimizer=optimizer, average=average
        )
        return moved._replace(mime=momentum_after(self.mime, delta_d))


def make_plan(
    label: str | Label,
    population: Population | npt.ArrayLike,
    n: int,
    facts: RunFacts | None = None,
    **more: Any,
) -> Plan:
    """The plan of a label ``name(option=value)@design@estimator``, with the estimator of the name
    if it has none.

    ``population`` may be a list of the clients' sizes. ``more`` are other attributes of ``Plan``;
    those of the label, ``census+average=0.5``, win. ``facts`` describes the run, for options that
    depend on it; n and m are filled in.

    Raises:
        DeltaflError: If a name is unknown, or sampler, design, estimator and population do not go
            together.

    Example:
        >>> make_plan("fedvarp", [3, 1, 2], n=2).estimator
        'difference-own'
    """
    parsed = parse_label(label)
    if not isinstance(population, Population):
        population = Population.from_sizes(population)
    if facts is not None:
        facts = facts._replace(n=n, m=population.num_clients)
    for name, value in parsed.settings.items():
        if name not in _IN_LABELS:
            raise unknown_name("setting of a plan in a label", name, _IN_LABELS)
        if value is True and name != "scaffold":
            raise needs_value(name, label)
    given = more.setdefault("estimator", parsed.estimator)
    if isinstance(given, str) and parsed.estimator not in (
        given,
        find_sampler(parsed.name).estimator,
    ):
        raise DeltaflError(
            f"{str(label)!r} has an estimator, and estimator is {given!r}; leave out one of them"
        )
    return Plan(population, make_sampler(parsed, facts), n, **{**more, **parsed.settings})


class RoundState(NamedTuple):
    """What the next round needs, and nothing else; nested NamedTuples of arrays."""

    round: int  #: index of the next round, from 0
    params_d: Params  #: float32 (d,), the global model
    optimizer: Any  #: the memory of the server optimizer
    average: Any  #: the average of the last models
    sampler: Any  #: the memory of the sampler
    control: Any  #: the memory of the estimator's control variate
    #: int16 (m,), how often each client was selected; wider once a count needs it
    selected_m: PersistentArray
    responded_m: PersistentArray  #: the same for how often it responded
    missed_m: PersistentArray  #: the same for the rounds in which it was not available
    mime: Any  #: the momentum that is sent to the clients
    guard: Any  #: the norms that the norm guard uses
    norms: Any  #: the norm of each client's last update, where updates are clipped
    joined_m: IntArray = np.zeros(
        0, np.int64
    )  #: the round each client joined; (0,) if all were there from the start


class Broadcast(NamedTuple):
    """What the server sends to every selected client: the global model, and a drift or None.

    With ``mime`` the drift is beta S, the momentum's: each client adds drift_d / K_i in each of its
    K_i local steps, and takes (1 - beta) times its usual steps. With ``scaffold`` (1 - beta) c is
    added to it, and each client takes its row of ``Plan.drifts``, drift_d - (1 - beta) c_i, in its
    place.
    """

    params_d: Params
    drift_d: Params | None


def init_round(plan: Plan, params: Any) -> RoundState:
    """The state before the first draw. ``params`` is a 1-d array of finite numbers, kept as
    float32, or a model.

    A census with first updates is round 0: the model moves by their mean, and the next round is
    round 1.
    """
    params_d = initial_model(params)
    state = blank_state(plan, params_d)
    rule = plan.rule.control
    if (mean_d := rule.first_mean(state.control)) is not None:  # the first round has been played
        state = plan.move(state, (1 + plan.mime) * mean_d)  # see mime.py
    return state._replace(
        control=rule.at_model(state.control, plan.population, state.params_d, state.round)
    )


def blank_state(plan: Plan, params_d: Params) -> RoundState:
    """The initial state before the control variate has seen the model: the template that saved
    states are read into.
    """
    m = plan.population.num_clients
    d = len(params_d)
    return RoundState(
        round=0,
        params_d=params_d,
        optimizer=plan.server_optimizer.init(d),
        average=init_average(
            plan.average > 0 or isinstance(plan.server_optimizer, FedExP), params_d
        ),
        sampler=plan.sampler.init(plan.population),
        control=plan.rule.control.with_rows(plan.memory).init(plan.population, d),
        selected_m=PersistentArray(np.zeros(m, dtype=np.int16)),
        responded_m=PersistentArray(np.zeros(m, dtype=np.int16)),
        missed_m=PersistentArray(np.zeros(m, dtype=np.int16)),
        mime=momentum_after(plan.mime, np.zeros(d)),
        guard=init_guard(plan.norm_guard),
        norms=init_norms(plan.clip, m),
    )


def broadcast(plan: Plan, state: RoundState) -> Broadcast:
    """What the clients of this round are sent; without ``mime`` and ``scaffold`` that is
    ``state.params_d`` alone.
    """
    return Broadcast(state.params_d, plan.drifts(state, None))


def open_round(
    plan: Plan,
    state: RoundState,
    available_m: BoolArray | None = None,
    oracle: Oracle | None = None,
) -> Cohort:
    """Select the clients of this round. The state is not changed: opening it again gives the same
    cohort.

    ``available_m``, bool (m,): who can be selected; the estimate still targets all clients
    (``Plan.response_rates``). The ``oracle`` is for simulators alone. A ``DeltaflError`` if it is
    missing, or if the mask is wrong or empty.
    """
    if plan.sampler.needs_oracle:
        plan.sampler.require_oracle(oracle)
    m = clients_of(plan, state)
    mask_m: Any = None
    absent: IntArray | None = None
    if available_m is not None:
        mask_m = mask_of("available_m", available_m, m)
        check_anyone(int(np.count_nonzero(mask_m)))
        absent = None if mask_m.all() else np.flatnonzero(~mask_m)
    elif not plan.sampler.accepts_no_mask:  # else m numbers are saved
        mask_m = np.ones(m, dtype=np.bool_)
    cohort = plan.sampler.open(
        state.sampler, mask_m, plan.n, stream(plan.seed, "draw", state.round), oracle
    )
    check_cohort(cohort, m)
    plan.collect_replies(
        state, cohort
    )  # an estimator that needs what the sampler does not know fails before training
    return cohort._replace(absent=absent, round=state.round)


def close_round(
    plan: Plan,
    state: RoundState,
    cohort: Cohort,
    updates: Updates | Sequence[Params | RemoteReply | None],
    reports: Reports | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Turn the replies into an estimate of the full-participation update, move the model, let the
    sampler learn.

    ``updates`` has one update u_i = x_K - x_0 a client in the cohort's order, (n, d) or a list with
    None where no reply came; with a ``-remote`` estimator a list of ``RemoteReply``. For models of
    torch or lists of arrays, u_i is ``flatten(local) - state.params_d``. One that is not finite,
    out of range or of the wrong length counts as no reply and is named in ``info.rejected``; if
    none is left, ``info.warning`` says so and is logged.

    Raises:
        DeltaflError: If the numbers of updates or report rows differ from the cohort's, updates and
            ``RemoteReply`` are mixed up, or every update is a dict or a list of arrays.
    """
    given = (
        [update for update in updates if update is not None]
        if isinstance(updates, list | tuple)
        else []
    )
    if given and all(map(is_model, given)):
        kind = type(given[0]).__name__
        raise DeltaflError(
            f"updates are of type {kind}, expected one flat array a client: write {FLAT_UPDATE}"
        )
    accumulator = Accumulator(plan, state, cohort)
    accumulator.add_rows(updates, reports)
    following, info = accumulator.close()
    if info.warning is not None:
        _log.warning("%s", info.warning)
    return following, info


def close_round_from_sum(
    plan: Plan, state: RoundState, cohort: Cohort, responded_n: npt.ArrayLike, sum_d: npt.ArrayLike
) -> tuple[RoundState, RoundInfo]:
    """Close a round of whose updates the server knows the weighted sum alone, as with secure
    aggregation.

    The next state is that of ``close_round`` with the updates, up to rounding; what ``info`` says
    of single ones is NaN. ``examples/secure_sum.py`` uses it.

    Args:
        plan: One that needs no single updates: docs/privacy.md lists the samplers.
        state: The current state.
        cohort: What ``open_round`` returned.
        responded_n: bool (n,), whose updates are in the sum; the others did not reply.
        sum_d: float64 (d,), the sum of coef_i u_i with
            ``plan.collect_replies(state, cohort).coef_n``.

    Raises:
        DeltaflError: If the sampler, the estimator or a setting needs single updates, with the
            reason, or if ``responded_n`` or ``sum_d`` is no such array.
    """
    if reason := needs_single_updates(plan):
        raise DeltaflError(
            f"a sum of updates is not enough: {reason}; write 'uniform', or use close_round"
        )
    if np.shape(sum_d) != state.params_d.shape:
        raise DeltaflError(
            f"sum_d has shape {np.shape(sum_d)}; it must have that of the model, "
            f"{state.params_d.shape}"
        )
    here = mask_of("responded_n", responded_n, len(cohort.client_n))
    total = plan.collect_replies(state, cohort).coef_n[here].sum()
    mean_d = (
        np.asarray(sum_d) / total if total > 0 else np.asarray(sum_d)
    )  # all of them may have sent it: the same sum
    following, info = close_round(
        plan, state, cohort, [mean_d if replied else None for replied in here]
    )
    return following, info._replace(variance=np.nan, mean_over_diversity=np.nan, residual=np.nan)
