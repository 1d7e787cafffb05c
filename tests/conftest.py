"""What the core's tests share: a problem with unequal weights, exact means over cohorts, a
server that only records.
"""

import gc
import importlib.util
import platform
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from deltafl import (
    Cohort,
    ControlValue,
    ControlVariate,
    KnownUpdates,
    Oracle,
    Plan,
    Population,
    PowerOfChoice,
    Reports,
    RoundState,
    Sampler,
    close_round,
    open_round,
    stream,
)
from deltafl.designs.exact import every_cohort
from deltafl.samplers.base import State
from deltafl.server.optimizers import ServerOptimizer
from deltafl.server.part import Step
from deltafl.store.files import write_atomically
from deltafl.types import FloatArray, IntArray, Params, Replies
from tools.logs import log_as_before

# Some tests press Ctrl-C in a program they start, which would inherit that the shell of a
# background job ignores it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whoever configures logging anew (mlflow and others, when they are imported) closes absl's handler,
# and with it the stream that was sys.stderr as absl was imported: pytest's own, if a test has another.
if importlib.util.find_spec("absl"):
    absl_logging = importlib.import_module("absl.logging")
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

# The same examples in every run: a failure is a change of the code, never luck, nor a machine that
# is busy.
settings.register_profile(
    "thorough", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("repeatable", settings.get_profile("thorough"), max_examples=40)


def pytest_configure(config: pytest.Config) -> None:
    """Play fewer examples of a property in make test than the hundred that are usual."""
    settings.load_profile("thorough" if config.getoption("--thorough") else "repeatable")


@pytest.fixture(autouse=True)
def _the_log_is_as_before() -> Iterator[None]:
    with log_as_before():
        yield


@pytest.fixture(autouse=True)
def _own_files_are_forgotten() -> Iterator[None]:
    """What ``deltafl.store.own_python.import_file`` leaves of a test's own files, which may have the name of
    another test's.
    """
    path = sys.path.copy()
    modules = {*sys.modules}
    yield
    for folder in {*sys.path} - {*path}:
        for name in {*sys.modules} - modules:
            if str(Path(getattr(sys.modules[name], "__file__", None) or "").parent) == folder:
                del sys.modules[name]
    sys.path[:] = path


@pytest.fixture(autouse=True)
def _pictures_are_for_those_who_look(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave pictures, and the report of a comparison, empty: they take a second, most of a short
    one.
    """
    thorough = request.config.getoption("--thorough")
    if not thorough and request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(
            "deltafl.simulation.comparisons.comparison.draw_plots",
            lambda runs, summary, folder: write_atomically(Path(folder) / "loss.png", b""),
        )
        monkeypatch.setattr(
            "deltafl.simulation.comparisons.comparison.write_report",
            lambda parts, path, title: write_atomically(Path(path), b""),
        )
        monkeypatch.setattr("deltafl.analysis.plots.small_png", lambda figure: b"")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="every case, also those that make test leaves out"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is ``thorough``, and of a ``sampled(n)`` test all but every n-th case."""
    # The longest file first: as one of the last it would keep one process busy, and the other wait.
    items.sort(key=lambda item: item.path.name != "test_docs.py")
    if config.getoption("--thorough"):
        return
    cases = Counter[str]()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        sampled = item.get_closest_marker("sampled")
        is_left_out = item.get_closest_marker("thorough") is not None
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            is_left_out |= cases[test] % sampled.args[0] > 0
            cases[test] += 1
        (left_out if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays until the end anyway, as modules and tests do: to look
    through it over and over takes it several seconds of each minute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_report_header() -> str:
    """Name the CPU: some faults, and last bits, depend on its vector instructions."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    kind = next((flag for flag in ("avx512f", "avx2") if f" {flag} " in text), "no AVX2 found")
    return f"CPU: {name[1] if name else platform.machine()}, {kind}"


#: Cohorts with their probabilities.
Cohorts = list[tuple[float, Cohort]]


class Recorded(NamedTuple):
    """The last estimate D, float64 (d,); ``close_round`` rounds the model itself to float32."""

    delta_d: FloatArray


class Recorder(ServerOptimizer):
    """A server optimizer that leaves the model alone and remembers D to the last bit."""

    def init(self, plan: Any, params_d: Params) -> Recorded:
        return Recorded(np.zeros(len(params_d)))

    def move(self, own: Recorded, step: Step) -> tuple[Params, Recorded]:
        return step.params_d, Recorded(step.delta_d)


class LastState(NamedTuple):
    control_md: FloatArray
    weight_m: FloatArray


@dataclass(frozen=True)
class LastUpdates(ControlVariate):
    """A user's control variate, sound but for where clients join, leave or change: it does not say
    what becomes of its state.
    """

    def init(self, population: Population, num_params: int) -> LastState:
        return LastState(np.zeros((population.num_clients, num_params)), population.weight_m)

    def value(self, state: LastState, client_n: IntArray) -> ControlValue:
        return ControlValue(state.weight_m @ state.control_md, state.control_md[client_n])

    def update(
        self, state: LastState, population: Population, replies: Replies, update_nd: Params
    ) -> LastState:
        control_md = state.control_md.copy()
        control_md[replies.client_n] = update_nd
        return state._replace(control_md=control_md)


class Problem(NamedTuple):
    """A population with everybody's update of one round."""

    population: Population
    update_md: Params
    oracle: KnownUpdates

    @property
    def ubar_d(self) -> FloatArray:
        return self.population.weight_m @ self.update_md.astype(np.float64)


def population_of(sizes: list[int] | IntArray) -> Population:
    """A population whose clients' shares of three labels are known."""
    share_mc = np.random.default_rng(len(sizes)).dirichlet(np.full(3, 0.5), size=len(sizes))
    return Population.from_sizes(sizes, aux=share_mc)


def make_problem(
    sizes: list[int] | IntArray, d: int = 3, seed: int = 0, shift: float = 1.0
) -> Problem:
    """Random updates of different lengths around a common direction; the weights follow the
    sizes.
    """
    rng = np.random.default_rng(seed)
    population = population_of(sizes)
    m = population.num_clients
    update_md = (rng.normal(size=(m, d)) * rng.uniform(0.5, 2.0, size=(m, 1)) + shift).astype(
        np.float32
    )
    step_variance_m = rng.exponential(size=m)
    loss_m = rng.exponential(size=m)
    return Problem(
        population, update_md, KnownUpdates(update_md, population.weight_m, step_variance_m, loss_m)
    )


def reports_of(problem: Problem, cohort: Cohort) -> Reports:
    """What the clients of a cohort report beside their updates."""
    whole = problem.oracle.reports()
    here = cohort.client_n
    loss_n = whole.loss_n[here] if whole.has_loss_n.all() else None
    return Reports.make(len(here), loss=loss_n, step_variance=whole.step_variance_n[here])


def play(plan: Plan, state: RoundState, problems: list[Problem]) -> RoundState:
    """One real round a problem, so that samplers and controls reach a state of their own making."""
    for problem in problems:
        cohort = open_round(plan, state, oracle=problem.oracle)
        state, _ = close_round(
            plan, state, cohort, problem.update_md[cohort.client_n], reports_of(problem, cohort)
        )
    return state


def all_cohorts(
    plan: Plan, state: RoundState, oracle: Oracle | None, available_m: FloatArray | None = None
) -> Cohorts:
    """Every cohort that can be opened in this state, with its probability."""
    if isinstance(plan.sampler, PowerOfChoice):
        return list(_power_of_choice(plan, oracle))
    present_m = np.ones(plan.population.num_clients) if available_m is None else available_m
    return list(every_cohort(lambda rng: plan.draw(state, present_m > 0, rng, oracle)))


def _power_of_choice(plan: Plan, oracle: Oracle | None) -> Iterator[tuple[float, Cohort]]:
    """From its definition: every set of 2 n candidates is equally likely, the n largest losses
    are asked.
    """
    assert oracle is not None
    m = plan.population.num_clients
    size = min(2 * plan.n, m)
    for candidates in combinations(range(m), size):
        loss_k = oracle.losses(np.array(candidates))
        chosen = np.sort(np.array(candidates)[np.argsort(-loss_k)[: plan.n]])
        yield (
            1 / comb(m, size),
            Cohort(chosen, np.ones(plan.n, dtype=np.int64), np.full(plan.n, np.nan)),
        )


def estimate(
    plan: Plan, state: RoundState, cohort: Cohort, updates: list[Params | None]
) -> FloatArray:
    """D of one cohort, by the real ``close_round``; the plan's server optimizer must be a
    ``Recorder``.
    """
    following, _ = close_round(plan, state, cohort, updates)
    delta_d: FloatArray = following.parts["server_optimizer"].delta_d
    return delta_d


def mean_estimate(
    plan: Plan, state: RoundState, problem: Problem, failures: bool = False
) -> FloatArray:
    """E[D] over all cohorts, and over all patterns of replies if clients fail with the rates
    that the state knows.
    """
    rate_m = plan.response_rates(state) if failures else np.ones(plan.population.num_clients)
    mean_d = np.zeros(problem.update_md.shape[1])
    for probability, cohort in all_cohorts(plan, state, problem.oracle):
        rate_n = rate_m[cohort.client_n]
        for pattern in product(*([True] if q == 1 else [True, False] for q in rate_n)):
            chance = float(np.prod(np.where(pattern, rate_n, 1 - rate_n)))
            updates = [
                problem.update_md[i] if here else None
                for i, here in zip(cohort.client_n, pattern, strict=True)
            ]
            mean_d += probability * chance * estimate(plan, state, cohort, updates)
    return mean_d


def mean_square(plan: Plan, state: RoundState, problem: Problem) -> float:
    """E norm(D - ubar)^2 over all cohorts."""
    total = 0.0
    for probability, cohort in all_cohorts(plan, state, problem.oracle):
        delta_d = estimate(plan, state, cohort, list(problem.update_md[cohort.client_n]))
        total += probability * float(np.sum((delta_d - problem.ubar_d) ** 2))
    return total


def same_tree(a: object, b: object) -> bool:
    """Equality of nested tuples of arrays and numbers, NaN equal to NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_tree, a, b))
    return bool(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    )


#: Cohorts of a Monte Carlo check of frequencies.
DRAWS = 4000


def frequencies(sampler: Sampler, state: State, m: int, n: int, draws: int = DRAWS) -> FloatArray:
    """How often each client is asked, over many cohorts from one state."""
    rng = stream(3, "audit")
    count_m = np.zeros(m)
    for _ in range(draws):
        cohort = sampler.open(state, np.ones(m, dtype=bool), n, rng)
        assert len(cohort.client_n) == n
        assert np.isnan(cohort.expected_n).all()
        count_m[cohort.client_n] += 1
    return count_m / draws


def assert_frequencies(frequency_m: FloatArray, expected_m: FloatArray, draws: int = DRAWS) -> None:
    error_m = np.sqrt(expected_m * (1 - expected_m) / draws)
    assert np.all(np.abs(frequency_m - expected_m) <= 4.5 * error_m + 1e-12)


def all_replies(cohort: Cohort, coef_n: FloatArray | None = None) -> Replies:
    """A cohort in which everybody always replies; each counts count / expected if nothing else
    is said.
    """
    coef_n = cohort.count_n / cohort.expected_n if coef_n is None else coef_n
    return Replies(
        cohort, cohort, np.asarray(coef_n, dtype=np.float64), np.ones(len(cohort.client_n))
    )


def replies_of(client_n: list[int], coef_n: list[float], kind: str = "fixed-size") -> Replies:
    """Replies of these clients, who always reply, with these coefficients."""
    n = len(client_n)
    cohort = Cohort(
        np.array(client_n, dtype=np.int64), np.ones(n, dtype=np.int64), np.full(n, np.nan), kind
    )
    return all_replies(cohort, np.array(coef_n))
