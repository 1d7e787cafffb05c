"""The audit: is an estimate unbiased, and how good is it? Every sampler x design x estimator on real updates.

For fixed updates u_i the error of an estimate is ``D - ubar = sum_i (A_i - w_i) (u_i - c_i)``, A_i the random
coefficient of client i (0 if it is not drawn). So the distribution of A tells all: bias = norm(E D - ubar) and
MSE = E norm(D - ubar)^2, both from the Gram matrix of the residuals u_i - c_i. A is enumerated where the population is
small (``exact.py``) and drawn otherwise; either way the samplers' and estimators' own code is what is run.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..designs.exact import MAX_CLIENTS, every_cohort
from ..designs.table import DESIGNS, find_design
from ..errors import DeltaflError
from ..estimators.table import ESTIMATORS, find_estimator
from ..round import Plan, RoundState, close_round, init_round
from ..samplers import RunFacts, find_sampler, leaves_out, make_sampler, parse_label
from ..server.optimizers import Sgd
from ..server.screening import measure
from ..streams import stream
from ..types import Cohort, FloatArray, IntArray, Oracle, Params, Population, Reports

#: Rounds played before the audit, so that samplers and controls have something to remember.
WARM_UP_ROUNDS = 5
#: An enumerated bias above this share of norm(ubar) is a bias.
EXACT_TOLERANCE = 1e-9
#: A drawn bias above this many standard errors is a bias.
LARGEST_Z = 5.0


class KnownUpdates:
    """An ``Oracle`` (see ``types.py``) over a table: what every client would send this round.

    Attributes:
        update_md: float32 (m, d), the updates u_i.
        weight_m: float64 (m,), the weights w_i; deviations are about ubar = sum w_i u_i.
        columns: The other columns of the reports: losses, step variances, numbers of steps.
    """

    def __init__(
        self,
        update_md: npt.ArrayLike,
        weight_m: FloatArray,
        step_variance_m: FloatArray | None = None,
        loss_m: FloatArray | None = None,
        num_steps_m: IntArray | None = None,
    ) -> None:
        self.update_md: Params = np.asarray(update_md, dtype=np.float32)
        self.weight_m = weight_m
        self.columns = Reports.make(len(weight_m), loss=loss_m, step_variance=step_variance_m, num_steps=num_steps_m)

    @cached_property
    def _reports(self) -> Reports:
        return measure(self.update_md, self.columns, self.weight_m)

    def reports(self) -> Reports:
        """What all m clients report, with zeta about ubar."""
        return self._reports

    def losses(self, client_k: IntArray) -> FloatArray:
        """The losses of some clients, float64 (k,)."""
        losses_k: FloatArray = self.columns.loss_n[client_k]
        return losses_k


class Subject(NamedTuple):
    """What is audited: one round of a task.

    Attributes:
        population: The clients.
        update_md: float32 (m, d), u_i of all clients.
        loss_m: float64 (m,), loss of the global model at each client.
        step_variance_m: float64 (m,), as in ``Reports``.
        num_steps_m: int64 (m,).
        n: Cohort size.
        num_classes: Classes of the task, for samplers that look at labels; 0 for none, None if unknown.
    """

    population: Population
    update_md: Params
    loss_m: FloatArray
    step_variance_m: FloatArray
    num_steps_m: IntArray
    n: int
    num_classes: int | None = None


class AuditRow(NamedTuple):
    """The verdict on one method.

    Attributes:
        sampler: Name of the sampler.
        design: Name of the design; ``"-"`` if the sampler draws in its own way.
        estimator: Name of the estimator.
        claims_unbiased: Whether sampler, design and estimator together claim it.
        exact: Whether all cohorts were enumerated; otherwise they were drawn.
        bias: norm(E D - ubar) / norm(ubar).
        z: Bias in standard errors of the drawing; NaN where it is exact.
        mse: E norm(D - ubar)^2 / norm(ubar)^2.
    """

    sampler: str
    design: str
    estimator: str
    claims_unbiased: bool
    exact: bool
    bias: float
    z: float
    mse: float

    @property
    def is_unbiased(self) -> bool:
        """Whether no bias was found."""
        return self.bias <= EXACT_TOLERANCE if self.exact else self.z <= LARGEST_Z

    @property
    def passes(self) -> bool:
        """Whether a claim of unbiasedness, if there is one, holds."""
        return self.is_unbiased or not self.claims_unbiased


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
    """Audit methods one after the other.

    Args:
        subject: The round.
        samplers: Names in ``SAMPLERS``, with options if need be, such as ``"innovation(floor=0.1)"``.
        designs: Names in ``DESIGNS``; None for all. A sampler that cannot use one (simple-random draws need equal
            scores) is left out with it.
        estimators: Names in ``ESTIMATORS``; None for all.
        facts: What the samplers' options may take from a run; None if nothing is known.
        draws: Cohorts drawn where they are not enumerated.
        seed: Of the draws and of the warm-up.

    Yields:
        One row a method.
    """
    for design in designs or ():
        find_design(design)
    oracle = KnownUpdates(
        subject.update_md, subject.population.weight_m, subject.step_variance_m, subject.loss_m, subject.num_steps_m
    )
    rules = [find_estimator(name) for name in (estimators or ESTIMATORS)]
    for name in samplers:
        label = parse_label(name)
        entry = find_sampler(label.name)
        for design in (designs or list(DESIGNS)) if entry.design is not None else ["-"]:
            sampler = make_sampler(label._replace(design=None if design == "-" else design), facts)
            for rule in rules:
                plan = Plan(subject.population, sampler, subject.n, rule.name, Sgd(0.0), seed)
                try:
                    state = _warm_state(plan, subject, oracle)
                    error = estimate_error(plan, state, oracle, subject.update_md, draws)
                except DeltaflError:
                    continue  # this design cannot keep these expectations, or the sampler knows none to weigh with
                claims = rule.unbiased and not leaves_out(sampler, rule.control)
                yield AuditRow(name, design, rule.name, claims, *error)


class EstimateError(NamedTuple):
    """How far the estimates of one round are from ubar; the fields are those of ``AuditRow``."""

    exact: bool
    bias: float
    z: float
    mse: float


def estimate_error(plan: Plan, state: RoundState, oracle: Oracle, update_md: Params, draws: int) -> EstimateError:
    """Bias and MSE of a round's estimate over its cohorts, for fixed updates.

    Args:
        plan: The method.
        state: The state that the round is opened with.
        oracle: For theoretical samplers.
        update_md: (m, d), every client's update of this round.
        draws: Cohorts drawn where they are not enumerated; they use no randomness of the run.

    Returns:
        Both relative to norm(ubar), see ``AuditRow``; NaN or infinite where ubar is 0.
    """
    probability_k, coef_km, exact = _coefficients(plan, state, oracle, draws)
    m, weight_m = plan.population.num_clients, plan.population.weight_m
    total_d, control_md = find_estimator(plan.estimator).control.value(state.control, np.arange(m))
    residual_md = update_md.astype(np.float64) - control_md
    mean_d = weight_m @ update_md.astype(np.float64)
    offset_d = total_d + weight_m @ residual_md - mean_d  # 0 unless the control's own sum is wrong
    row_d = np.vstack([residual_md, offset_d])
    error_k = np.hstack([coef_km - weight_m, np.ones((len(coef_km), 1))])
    gram = row_d @ row_d.T
    scale = float(mean_d @ mean_d)
    bias = probability_k @ error_k
    squared_bias = max(float(bias @ gram @ bias), 0.0)
    mse = float(probability_k @ np.einsum("ki,ij,kj->k", error_k, gram, error_k, optimize=True))
    noise = max(mse - squared_bias, 0.0) / len(coef_km)
    z = float("nan") if exact else np.sqrt(squared_bias / max(noise, 1e-18 * scale))
    return EstimateError(exact, float(np.sqrt(squared_bias / scale)), float(z), mse / scale)


def _warm_state(plan: Plan, subject: Subject, oracle: Oracle) -> RoundState:
    """A state some rounds old: the model stands still, the updates vary about those of the audit."""
    state = init_round(plan, np.zeros(subject.update_md.shape[1]))
    everyone = np.ones(subject.population.num_clients, dtype=np.bool_)
    for _ in range(WARM_UP_ROUNDS):
        rng = stream(plan.seed, "audit", state.round)
        cohort = plan.sampler.open(state.sampler, everyone, plan.n, rng, oracle)
        ids = cohort.client_n
        factor_n = rng.uniform(0.5, 1.5, size=len(ids)).astype(np.float32)
        reports = Reports.make(
            len(ids),
            loss=subject.loss_m[ids],
            step_variance=subject.step_variance_m[ids],
            num_steps=subject.num_steps_m[ids],
        )
        state, _ = close_round(plan, state, cohort, factor_n[:, None] * subject.update_md[ids], reports)
    return state


def _coefficients(plan: Plan, state: RoundState, oracle: Oracle, draws: int) -> tuple[FloatArray, FloatArray, bool]:
    """Probabilities (k,) and coefficients (k, m) of cohorts: all of them where possible, else ``draws`` random ones."""
    m = plan.population.num_clients
    everyone = np.ones(m, dtype=np.bool_)

    def open_with(rng: np.random.Generator) -> Cohort:
        return plan.sampler.open(state.sampler, everyone, plan.n, rng, oracle)

    cohorts, exact = [], False
    if m <= MAX_CLIENTS:
        try:
            cohorts, exact = list(every_cohort(open_with)), True
        except AttributeError:  # the sampler draws in a way of its own
            exact = False
    if not exact:
        rng = stream(plan.seed, "audit", state.round)
        cohorts = [(1 / draws, open_with(rng)) for _ in range(draws)]
    coef_km = np.zeros((len(cohorts), m))
    for row, (_, cohort) in zip(coef_km, cohorts, strict=True):
        row[cohort.client_n] = plan.collect_replies(state, cohort).coef_n
    return np.array([probability for probability, _ in cohorts]), coef_km, exact
