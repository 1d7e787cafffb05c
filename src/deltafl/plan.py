"""The plan of a federation, the state between its rounds, and the steps from replies to the next state."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .designs.inclusion import check_cohort_size
from .errors import DeltaflError, require_method
from .estimators.control_variates import ControlVariate
from .estimators.remote import RemoteControl
from .estimators.table import Estimator, find_estimator
from .estimators.variance import effective_sample_size
from .samplers import Label, RunFacts, Sampler, make_sampler, parse_label
from .scale.persistent_array import PersistentArray
from .scale.rows import RowFormat
from .server.mime import drift, init_mime, remember
from .server.norm_guard import init_guard, shorten
from .server.optimizers import ServerOptimizer, Sgd
from .types import Cohort, FloatArray, IntArray, Params, Population, Replies, Reports, RoundInfo


@dataclass(frozen=True)
class Plan:
    """Everything about the rounds that does not change.

    Attributes:
        population: The clients, and how much each counts in the target.
        sampler: Decides which clients are selected.
        n: Cohort size, 1 <= n <= m.
        estimator: What each reply counts: a name in ``deltafl.ESTIMATORS``, an ``Estimator``, or a ``ControlVariate``
            of your own, which is used with Horvitz-Thompson coefficients. With ``innovation-remote`` or
            ``difference-own-remote`` clients reply with what their ``ClientMemory`` makes of their update.
        server_optimizer: How the model moves along the estimate.
        seed: Seed of the draws.
        response_floor: Least response rate q assumed of a client, in (0, 1]: no reply counts more than 1 / floor times.
        mime: beta in [0, 1) of the momentum that the server sends to all clients, see ``mime.py``; 0 for none.
        memory: How an estimator that remembers one update a client keeps them, see ``scale/rows.py``.
        norm_guard: No estimate is longer than so many times the median before it (``norm_guard.py``). **Biased**; or
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
    memory: RowFormat = field(default_factory=RowFormat)

    def __post_init__(self) -> None:
        """Refuse impossible plans at once."""
        if not isinstance(self.sampler, Sampler):
            raise DeltaflError(
                f"sampler is {self.sampler!r}; give a deltafl.Sampler, or write make_plan(label, population, n)"
            )
        require_method(self.server_optimizer, "step", "server_optimizer", "write make_server_optimizer(name, lr)")
        check_cohort_size(self.n, self.population.num_clients)
        self.population.check()
        if isinstance(self.rule.control, RemoteControl) and self.sampler.output_bias_size > 0:
            raise DeltaflError(
                f"{type(self.sampler).__name__} looks at the last entries of updates, which clients that keep their "
                "memory do not send; write the estimator without '-remote'"
            )
        if not 0 < self.response_floor <= 1:
            raise DeltaflError(f"response_floor is {self.response_floor}; it must be above 0 and at most 1")
        init_mime(self.mime, 0)
        init_guard(self.norm_guard)

    @property
    def rule(self) -> Estimator:
        """The estimator as an object."""
        return find_estimator(self.estimator)


def make_plan(label: str | Label, population: Population, n: int, facts: RunFacts | None = None, **more: Any) -> Plan:
    """The plan of a label ``name(option=value)@design@estimator``, with the estimator of the name if it has none.

    ``make_sampler`` makes the sampler alone: a ``Plan`` of ``make_sampler("fedvarp")`` that names no estimator weighs
    replies by Horvitz and Thompson, which for FedVARP is uniform sampling.

    Args:
        label: Such as ``"innovation"`` or ``"pracdelta(floor=0.2)@pivotal@difference"``; see ``deltafl samplers``.
        population: The clients.
        n: Cohort size, 1 <= n <= m.
        facts: What options may take from the run; n and the number of clients are filled in. None if unknown.
        **more: Other attributes of ``Plan``, such as ``seed`` or ``server_optimizer``.

    Raises:
        DeltaflError: If a name is unknown, or sampler, design, estimator and population do not go together.

    Example:
        >>> make_plan("fedvarp", Population.from_sizes([3, 1, 2]), n=2).estimator
        'difference-own'
    """
    parsed = parse_label(label)
    if facts is not None:
        facts = facts._replace(n=n, m=population.num_clients)
    return Plan(population, make_sampler(parsed, facts), n, **{"estimator": parsed.estimator, **more})


class RoundState(NamedTuple):
    """What the next round needs, and nothing else; nested NamedTuples of arrays.

    Attributes:
        round: Index of the next round, from 0.
        params_d: float32 (d,), the global model.
        optimizer: The server optimizer's memory.
        sampler: The sampler's memory.
        control: The state of the estimator's control variate.
        selected_m: int16 (m,), how often each client was selected; wider once a count needs it. States of several
            rounds share the memory, and none is seen to change (``persistent_array.py``).
        responded_m: The same for how often it responded.
        mime: The momentum that is sent to the clients, see ``mime.py``.
        guard: The norms that the norm guard uses, see ``norm_guard.py``.
    """

    round: int
    params_d: Params
    optimizer: Any
    sampler: Any
    control: Any
    selected_m: PersistentArray
    responded_m: PersistentArray
    mime: Any
    guard: Any


def collect_replies(plan: Plan, state: RoundState, selected: Cohort, which_n: Any) -> Replies:
    """The replies of a cohort, if those rows replied that an index, a mask or a slice names."""
    cohort = selected.part(which_n)
    weight_n, response_n = plan.population.weight_m[cohort.client_n], response_rates(plan, state, cohort.client_n)
    return Replies(cohort, selected, plan.rule.coefficients(cohort, weight_n, response_n), response_n)


def coefficients(plan: Plan, state: RoundState, replied: Cohort) -> FloatArray:
    """What each reply counts in the estimate, float64 (n,), for the clients of a cohort that replied."""
    return collect_replies(plan, state, replied, slice(None)).coef_n


def response_rates(plan: Plan, state: RoundState, client_k: IntArray | None = None) -> FloatArray:
    """q_i = max(floor, (responded_i + 1) / (selected_i + 1)): exactly 1 for clients that always responded.

    Float64 (k,) of the clients ``client_k``; without, (m,) of all. From earlier rounds only, hence known before the
    draw; dividing by q_i instead of by the number of replies keeps the estimate right when failures depend on the
    client.
    """
    which = slice(None) if client_k is None else client_k
    responded_k, selected_k = (count_m[which].astype(np.float64) for count_m in (state.responded_m, state.selected_m))
    rate_k: FloatArray = np.maximum(plan.response_floor, (responded_k + 1) / (selected_k + 1))
    return rate_k


def advance(
    plan: Plan, state: RoundState, cohort: Cohort, reports: Reports, delta_d: FloatArray, control: Any
) -> tuple[RoundState, FloatArray, float]:
    """Move the model by an estimate without drift; also the estimate as it was used, and the norm guard's factor."""
    drift_d = drift(plan.mime, state.mime)
    if drift_d is not None:
        delta_d = drift_d + delta_d
    delta_d, clip_factor, guard = shorten(plan.norm_guard, state.guard, delta_d)
    params_d, optimizer = plan.server_optimizer.step(state.params_d, delta_d, state.optimizer)
    following = state._replace(
        round=state.round + 1,
        params_d=params_d,
        optimizer=optimizer,
        sampler=plan.sampler.update(state.sampler, cohort, reports),
        control=control,
        selected_m=state.selected_m.plus_one(cohort.client_n),
        responded_m=state.responded_m.plus_one(cohort.client_n[reports.responded_n]),
        mime=remember(state.mime, delta_d),
        guard=guard,
    )
    return following, delta_d, clip_factor


def describe(round: int, replies: Replies, reports: Reports, variance: float, delta_d: FloatArray) -> RoundInfo:
    """The numbers of a round; nothing was rejected or clipped."""
    coef_n, here = replies.coef_n, reports.responded_n
    zeta_n = np.sqrt(reports.squared_deviation_n[here])
    residual, squared_norm = coef_n @ reports.squared_residual_n[here], coef_n @ reports.squared_norm_n[here]
    has_loss_n = reports.has_loss_n[here]
    loss_coef_k = coef_n[has_loss_n]
    loss_total, norm = float(loss_coef_k.sum()), float(np.linalg.norm(delta_d))
    return RoundInfo(
        round=round,
        num_selected=len(here),
        num_responded=len(replies.client_n),
        rejected=(),
        estimate_norm=norm,
        variance=variance,
        effective_sample_size=effective_sample_size(coef_n),
        largest_weight=float(coef_n.max(initial=0.0)),
        sum_of_weights=float(coef_n.sum()),
        mean_over_diversity=norm / float(zeta_n.mean()) if zeta_n.any() else float("nan"),
        loss=float(loss_coef_k @ reports.loss_n[here][has_loss_n]) / loss_total if loss_total > 0 else float("nan"),
        residual=float(residual / squared_norm) if squared_norm > 0 else float("nan"),
    )
