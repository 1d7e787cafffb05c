"""The audit: is an estimate unbiased, and how good is it? Every sampler x design x estimator on
real updates.

For fixed updates u_i the error of an estimate is ``D - ubar = sum_i (A_i - w_i) (u_i - c_i)``, A_i
the random coefficient of client i (0 if it is not drawn). So the distribution of A tells all: bias
= norm(E D - ubar) and MSE = E norm(D - ubar)^2, both from the Gram matrix of the residuals u_i -
c_i. A is enumerated where the population is small and drawn otherwise; either way the samplers' and
estimators' own code is what is run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..designs.exact import MAX_CLIENTS, every_cohort
from ..designs.table import DESIGNS, find_design
from ..errors import DeltaflError
from ..estimators.table import ESTIMATORS, find_estimator
from ..plan import Plan, RoundState
from ..round import close_round, init_round
from ..samplers.base import RunFacts
from ..samplers.label import Label, make_sampler, needs_scores, parse_label
from ..server.norms import measure
from ..server.optimizers import Sgd
from ..streams import stream
from ..types import Cohort, FloatArray, IntArray, Oracle, Params, Population, Reports, Rng
from .conformance import check_work

#: Rounds played before the audit, so that samplers and controls have something to remember.
WARM_UP_ROUNDS = 5
#: An enumerated bias above this share of norm(ubar) is a bias.
EXACT_TOLERANCE = 1e-9
#: A drawn bias above this many standard errors is a bias.
LARGEST_Z = 5.0


class KnownUpdates:
    """An ``Oracle`` over a table: what every client would send this round.

    Args:
        update_md: (m, d), the updates u_i.
        weight_m: (m,), the weights w_i; deviations are about ubar = sum w_i u_i.
        step_variance_m: (m,), as the rest a column of ``Reports``; None if unknown.
        loss_m: (m,), losses of the global model.
        num_steps_m: (m,).
    """

    def __init__(
        self,
        update_md: npt.ArrayLike,
        weight_m: FloatArray,
        step_variance_m: FloatArray | None = None,
        loss_m: FloatArray | None = None,
        num_steps_m: IntArray | None = None,
    ) -> None:
        self.update_md: Params = np.asarray(update_md, np.float32)
        self.weight_m = weight_m
        self.columns = Reports.make(
            len(weight_m),
            loss=loss_m,
            step_variance=step_variance_m,
            num_steps=num_steps_m,
        )

    @cached_property
    def _reports(self) -> Reports:
        return measure(self.update_md, self.columns, self.weight_m)

    def reports(self) -> Reports:
        """What all m clients report, with zeta about ubar."""
        return self._reports

    def losses(self, client_k: IntArray) -> FloatArray:
        """The losses of some clients, float64 (k,)."""
        return np.asarray(self.columns.loss_n[client_k])


class Subject(NamedTuple):
    """What is audited: one round of a task."""

    population: Population
    known: KnownUpdates  #: every client's update and report
    n: int  #: cohort size
    num_classes: int | None = (
        None  #: classes of the task, for samplers that look at labels; 0 for none
    )


class AuditRow(NamedTuple):
    """The verdict on one method."""

    sampler: str
    design: str  #: ``"-"`` if the sampler draws in its own way
    estimator: str
    claims_unbiased: bool  #: whether sampler, design and estimator together claim it
    exact: bool  #: whether all cohorts were enumerated; otherwise they were drawn
    bias: float  #: norm(E D - ubar) / norm(ubar)
    z: float  #: bias in standard errors of the drawing; NaN where it is exact
    mse: float  #: E norm(D - ubar)^2 / norm(ubar)^2
    needs_scores: bool = (
        False  #: whether the claim is for rounds in which every score R_i is above 0
    )
    bias_at_zero: float = (
        0.0  #: the largest bias found where a client's R_i is 0 (needs an oracle); 0 for none
    )

    @property
    def is_unbiased(self) -> bool:
        """Whether no bias was found, scores of 0 aside."""
        return _no_bias(self)

    @property
    def passes(self) -> bool:
        """Whether a claim of unbiasedness, if there is one, holds."""
        holds = self.is_unbiased and (self.needs_scores or self.bias_at_zero == 0)
        return holds or not self.claims_unbiased


def audit(
    subject: Subject,
    samplers: Iterable[str],
    *,
    designs: Sequence[str] | None = None,
    estimators: Sequence[str] | None = None,
    facts: RunFacts | None = None,
    draws: int = 4000,
    seed: int = 0,
) -> Iterator[AuditRow]:
    """Audit methods one after the other; those that cannot be drawn or weighed are left out.

    Samplers are names with options if need be, such as ``"innovation(floor=0.1)"``, and ``facts``
    what these may take from a run; designs and estimators are names, or None for all. A label with
    a design or an estimator of its own, such as ``"uniform@@mine.py:Control"``, is audited with
    these. ``draws`` cohorts are drawn where they cannot be enumerated.
    """
    check_work(subject.population.num_clients, draws)
    known = subject.known
    for given in designs or ():
        find_design(given)
    all_rules = [find_estimator(name) for name in estimators or ESTIMATORS]
    for name in samplers:
        label = label_to_audit(name)
        entry = label.entry
        tried: Sequence[str | None] = designs or list(DESIGNS)
        # A label's own design is meant; and a sampler that draws in its own way has no other.
        if label.design != entry.design or entry.design is None:
            tried = [label.design]
        rules = all_rules
        if label.estimator != entry.estimator:
            rules = [find_estimator(label.estimator)]
        for design, rule in product(tried, rules):
            sampler = make_sampler(label._replace(design=design), facts)
            # Steps of length 0: the updates in the table are those of one model.
            plan = Plan(subject.population, sampler, subject.n, rule.name, (Sgd(0.0),), seed)
            try:
                state = _warm_state(plan, known)
                error = estimate_error(plan, state, known, known.update_md, draws)
            # The design cannot keep these expectations, or the sampler knows none to weigh with.
            except DeltaflError:
                continue
            yield AuditRow(
                name,
                design or "-",
                rule.name,
                rule.unbiased and sampler.unbiased,
                *error,
                needs_scores(sampler, rule.control),
                _bias_at_zero(plan, state, known, draws),
            )


def label_to_audit(text: str) -> Label:
    """A method without settings: an audit knows nothing of what the server does with estimates.

    Raises:
        DeltaflError: If there is no such method, or it has settings.
    """
    label = parse_label(text)
    if label.settings:
        raise DeltaflError(
            f"{text} has settings, and an audit is of the estimate before they act: write "
            f"{label._replace(settings={})}"
        )
    return label


def _bias_at_zero(
    plan: Plan,
    state: RoundState,
    known: KnownUpdates,
    draws: int,
) -> float:
    """The largest bias where a client has the score 0; 0 for none."""
    # Practical samplers do not see this round's scores, and cannot leave out who has 0.
    if not plan.sampler.needs_oracle:
        return 0.0
    found = []
    for edge in _edges(known):
        # Not all designs draw n where fewer have a positive score.
        with suppress(DeltaflError):
            found.append(estimate_error(plan, state, edge, edge.update_md, draws))
    return max((error.bias for error in found if not _no_bias(error)), default=0.0)


class EstimateError(NamedTuple):
    """How far the estimates of one round are from ubar, see ``AuditRow``."""

    exact: bool
    bias: float
    z: float
    mse: float


def estimate_error(
    plan: Plan,
    state: RoundState,
    oracle: Oracle,
    update_md: Params,
    draws: int,
) -> EstimateError:
    """Bias and MSE of a round's estimate over its cohorts, for fixed updates, (m, d); NaN or
    infinite where ubar is 0.

    ``draws`` cohorts are drawn where they are not enumerated; they use no randomness of the run.
    """
    probability_k, coef_km, exact = _coefficients(plan, state, oracle, draws)
    m = plan.population.num_clients
    weight_m = plan.population.weight_m
    total_d, control_md = find_estimator(plan.estimator).control.value(
        state.control,
        np.arange(m),
    )
    wide_md = update_md.astype(float)
    residual_md = wide_md - control_md
    mean_d = weight_m @ wide_md
    offset_d = total_d + weight_m @ residual_md - mean_d  # 0 unless the control's own sum is wrong
    # The offset is a row more, with the coefficient 1 in every cohort.
    row_d = np.vstack([residual_md, offset_d])
    error_k = np.hstack([coef_km - weight_m, np.ones((len(coef_km), 1))])
    gram = row_d @ row_d.T
    scale = float(mean_d @ mean_d)
    bias = probability_k @ error_k
    squared_bias = max(float(bias @ gram @ bias), 0.0)
    mse = float(
        probability_k
        @ np.einsum(
            "ki,ij,kj->k",
            error_k,
            gram,
            error_k,
            optimize=True,
        )
    )
    # The variance of the mean over the draws.
    noise = max(mse - squared_bias, 0.0) / len(coef_km)
    z = float("nan")
    if not exact:
        # The floor keeps rounding from being a bias where an estimate has no variance.
        z = float(np.sqrt(squared_bias / max(noise, 1e-18 * scale)))
    return EstimateError(exact, float(np.sqrt(squared_bias / scale)), z, mse / scale)


def _no_bias(error: EstimateError | AuditRow) -> bool:
    if error.exact:
        return error.bias <= EXACT_TOLERANCE
    return error.z <= LARGEST_Z


def _edges(known: KnownUpdates) -> Iterator[KnownUpdates]:
    """The updates with that of the first client at 0, or at ubar without local noise, where
    DELTA's score is 0.
    """
    weight_m = known.weight_m
    others_md = known.update_md[1:]
    if len(others_md) == 0 or not np.any(weight_m[1:] @ others_md):
        return  # bias is measured relative to ubar
    for first_d in (
        0 * others_md[0],
        np.average(
            others_md,
            axis=0,
            weights=weight_m[1:],
        ),
    ):
        update_md = known.update_md.copy()
        noise_m = known.columns.step_variance_n.copy()
        update_md[0] = first_d
        noise_m[0] = 0.0
        edge = KnownUpdates(
            update_md,
            weight_m,
            noise_m,
            known.columns.loss_n,
            known.columns.num_steps_n,
        )
        if first_d.any():
            edge.reports().squared_deviation_n[0] = 0.0  # not a rounding error
        yield edge


def _warm_state(plan: Plan, known: KnownUpdates) -> RoundState:
    """A state some rounds old: the model stands still, the updates vary about those of the
    audit.
    """
    state = init_round(plan, np.zeros(known.update_md.shape[1]))
    everyone = np.ones(plan.population.num_clients, bool)
    for _ in range(WARM_UP_ROUNDS):
        rng = stream(plan.seed, "audit", state.round)
        cohort = plan.draw(state, everyone, rng, known, plan.n)
        ids = cohort.client_n
        factor_n = rng.uniform(0.5, 1.5, size=len(ids)).astype(np.float32)
        updates = factor_n[:, None] * known.update_md[ids]
        state, _ = close_round(plan, state, cohort, updates, known.columns.part(ids))
    return state


def _coefficients(
    plan: Plan,
    state: RoundState,
    oracle: Oracle,
    draws: int,
) -> tuple[FloatArray, FloatArray, bool]:
    """Probabilities (k,) and coefficients (k, m) of cohorts: all of them where possible, else
    ``draws`` random ones.
    """
    m = plan.population.num_clients
    everyone = np.ones(m, bool)

    def open_with(rng: Rng) -> Cohort:
        return plan.draw(state, everyone, rng, oracle, plan.n)

    cohorts = []
    if m <= MAX_CLIENTS:
        with suppress(AttributeError):  # the sampler draws in a way of its own
            cohorts = list(every_cohort(open_with))
    exact = bool(cohorts)
    if not exact:
        rng = stream(plan.seed, "audit", state.round)
        cohorts = [(1 / draws, open_with(rng)) for _ in range(draws)]
    coef_km = np.zeros((len(cohorts), m))
    for row, (_, cohort) in zip(coef_km, cohorts, strict=True):
        row[cohort.client_n] = plan.collect_replies(state, cohort).coef_n
    return np.array([probability for probability, _ in cohorts]), coef_km, exact
