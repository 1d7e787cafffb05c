"""Estimated variances: their mean over all cohorts against the true variance over all cohorts."""

import numpy as np
import pytest

from conftest import Recorder, all_cohorts, all_replies, make_problem, mean_square
from deltafl import (
    Cohort,
    Fixed,
    Full,
    Plan,
    Population,
    close_round,
    init_round,
    make_sampler,
    open_round,
)
from deltafl.designs.exact import support
from deltafl.designs.inclusion import inclusion_probabilities
from deltafl.estimators.own import OwnControlState
from deltafl.scale.persistent_array import PersistentArray
from tools.variance import estimate_variance

SIZES = [10, 12, 14, 16, 18, 20]


def true_and_mean_estimate(
    label: str, n: int, estimator: str = "horvitz-thompson"
) -> tuple[float, float]:
    """E norm(D - ubar)^2, and the mean of ``info.variance``, both over all cohorts."""
    problem = make_problem(SIZES, seed=4)
    plan = Plan(problem.population, make_sampler(label), n, estimator, (Recorder(),))
    state = init_round(plan, np.zeros(3))
    mean = 0.0
    for probability, cohort in all_cohorts(plan, state, problem.oracle):
        _, info = close_round(plan, state, cohort, problem.update_md[cohort.client_n])
        mean += probability * info.variance
    return mean_square(plan, state, problem), mean


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    "label",
    ["uniform@simple-random", "md@multinomial", "fedis@multinomial", "md@poisson", "fedis@poisson"],
)
def test_unbiased_where_the_textbook_says_so(label: str, n: int) -> None:
    true, mean = true_and_mean_estimate(label, n)
    assert mean == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("design", ["systematic", "pivotal"])
@pytest.mark.parametrize("name", ["uniform", "md", "fedis", "delta"])
def test_within_a_factor_of_two_for_six_clients(name: str, design: str, n: int) -> None:
    """Deville's approximation is one for large m; this is its worst."""
    true, mean = true_and_mean_estimate(f"{name}@{design}", n)
    assert true / 2 < mean < 2 * true


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("design", "least", "largest"),
    [("systematic", (0.1, 0.6), (1, 1.5)), ("pivotal", (0.1, 0.6), (1, 1.5))]
    + [(name, (0.3, 0.98), (1.5, 4)) for name in ("local-pivotal", "cube", "ordered-pivotal")],
)
def test_no_bound_of_fixed_size_for_few_clients(
    design: str, least: tuple[float, float], largest: tuple[float, float]
) -> None:
    """Mean estimate over truth, over all cohorts: too large for some problems, too small for
    others.
    """
    rng = np.random.default_rng(0)
    ratios = []
    for n, m in ((2, 5), (3, 6)) * (10 if design in {"local-pivotal", "cube"} else 20):
        weight_m = rng.uniform(1, 10, size=m)
        pi_m = inclusion_probabilities(weight_m, n)
        y_md = weight_m[:, None] * (rng.normal(size=(m, 3)) + 0.5)
        true = mean = 0.0
        for count_m, probability in support(design, pi_m, y_md).items():
            here = np.flatnonzero(count_m)
            replies = all_replies(
                Cohort(here, np.ones(n, dtype=np.int64), pi_m[here], "fixed-size")
            )
            true += probability * float(
                np.sum(((y_md / pi_m[:, None])[here].sum(axis=0) - y_md.sum(axis=0)) ** 2)
            )
            mean += probability * estimate_variance(replies, y_md[here])
        ratios.append(mean / true)
    assert least[0] < np.nanmin(ratios) < least[1]
    assert largest[0] < np.nanmax(ratios) < largest[1]


def test_by_hand() -> None:
    y_nd = np.array([[1.0], [3.0]])
    two = np.array([0, 1])
    ones = np.ones(2, dtype=np.int64)
    # simple random, 2 of 4: (1 - f) N^2 s^2 / n with N = 4, s^2 = 2
    half = all_replies(Cohort(two, ones, np.full(2, 0.5), "fixed-size"))
    assert estimate_variance(half, y_nd) == pytest.approx(0.5 * 16 * 2 / 2)
    # Poisson: .5 (1 / .5)^2 + .8 (3 / .2)^2
    poisson = Cohort(two, ones, np.array([0.5, 0.2]), "poisson")
    assert estimate_variance(all_replies(poisson), y_nd) == pytest.approx(0.5 * 4 + 0.8 * 225)
    # three draws, one client twice, p = (.5, .25): values 2, 2, 12, mean 16/3, sum of squares about
    # it / (3 * 2)
    repeated = Cohort(two, np.array([2, 1]), np.array([1.5, 0.75]), "replacement")
    values = np.array([2, 2, 12])
    assert estimate_variance(all_replies(repeated), y_nd) == pytest.approx(
        np.sum((values - values.mean()) ** 2) / 6
    )


def test_where_one_cohort_cannot_tell() -> None:
    y_nd = np.ones((1, 2))
    one = np.ones(1, dtype=np.int64)
    for kind, expected in (("fixed-size", 0.4), ("replacement", 0.4), ("unknown", np.nan)):
        assert np.isnan(
            estimate_variance(
                all_replies(Cohort(np.array([3]), one, np.array([expected]), kind)), y_nd
            )
        )
    nobody = Cohort(
        np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), "poisson"
    )
    assert estimate_variance(all_replies(nobody), np.zeros((0, 2))) == 0


@pytest.mark.parametrize("answering", [0, 1, 2])
def test_fewer_than_two_undecided_replies_do_not_tell(answering: int) -> None:
    """Client 0 is certain (pi = 1): its reply says nothing of what the draw of the others left
    open.
    """
    plan = Plan(Population.from_sizes([100, 1, 1, 1, 1, 1]), make_sampler("md-fixed"), n=3)
    state = init_round(plan, np.zeros(4))
    cohort = open_round(plan, state)
    assert cohort.expected_n.tolist()[0] == 1
    updates = [np.full(4, i + 1.0) if i < answering else None for i in range(3)]
    assert np.isnan(close_round(plan, state, cohort, updates)[1].variance)
    assert close_round(plan, state, cohort, np.ones((3, 4)))[1].variance >= 0


@pytest.mark.parametrize("sizes", [[1, 1, 1], [13, 137], [1, 2, 3, 49]])
def test_asking_everyone_has_no_variance(sizes: list[int]) -> None:
    problem = make_problem(sizes)
    for sampler in (
        Full(),
        Fixed(by_weight=True),
        Fixed("pivotal"),
        Fixed("poisson", by_weight=True),
    ):
        plan = Plan(problem.population, sampler, len(sizes))
        state = init_round(plan, np.zeros(3))
        _, info = close_round(plan, state, open_round(plan, state), problem.update_md)
        assert info.variance == 0
        assert info.sum_of_weights == pytest.approx(1, abs=1e-12)


def test_estimates_that_cannot_vary_have_no_variance() -> None:
    """A ratio of equal updates, and a memory of all clients that is right."""
    ratio = Plan(Population.from_sizes([1, 5, 9, 20]), make_sampler("fedavg"), 2, "hajek")
    problem = make_problem(SIZES)
    known = Plan(problem.population, Fixed(), 3, "difference-own")
    state = init_round(known, np.zeros(3))
    state = state._replace(control=OwnControlState(problem.update_md, problem.ubar_d))
    for plan, now, update_md in (
        (ratio, init_round(ratio, np.zeros(3)), np.ones((4, 3))),
        (known, state, problem.update_md),
    ):
        cohort = open_round(plan, now)
        _, info = close_round(plan, now, cohort, update_md[cohort.client_n].astype(np.float32))
        assert info.variance == pytest.approx(0.0, abs=1e-12)


#: sampler, estimator, response rate, the largest error of the mean of the estimates as a share of
#: the variance, draws.
CASES = [
    ("uniform", "horvitz-thompson", 1.0, 0.05, 1500),
    ("md-fixed", "horvitz-thompson", 0.5, 0.08, 3000),
    (
        "md",
        "horvitz-thompson",
        0.5,
        0.2,
        1500,
    ),  # rounds with fewer than two replies tell nothing, and are left out
    ("uniform@poisson", "horvitz-thompson", 0.5, 0.06, 1500),
    ("full", "horvitz-thompson", 0.5, 0.06, 1500),
    ("uniform", "fedvarp", 1.0, 0.05, 1500),
    ("uniform", "plain-mean", 1.0, 0.05, 1500),
    ("fedavg", "hajek", 1.0, 0.2, 1500),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("label", "estimator", "rate", "tolerance", "draws"), CASES)
def test_the_variance_is_that_of_the_estimate_whatever_makes_it(
    label: str, estimator: str, rate: float, tolerance: float, draws: int
) -> None:
    """The mean of the estimates beside the variance of D over many draws, clients failing with a
    known rate.
    """
    rng = np.random.default_rng(0)
    m = 20
    n = 6
    update_md = (rng.normal(size=(m, 5)) + 3).astype(np.float32)
    population = Population.from_sizes(rng.integers(1, 60, size=m))
    plan = Plan(
        population, make_sampler(label), n, estimator, (Recorder(),), seed=1, response_floor=0.01
    )
    selected_m, responded_m = (
        PersistentArray(np.full(m, count)) for count in (999, int(1000 * rate) - 1)
    )
    state = init_round(plan, np.zeros(5))._replace(selected_m=selected_m, responded_m=responded_m)
    estimates = []
    variances = []
    for round in range(draws):
        now = state._replace(round=round)
        cohort = open_round(plan, now)
        answers_n = rng.random(len(cohort.client_n)) < rate
        updates = [
            update_md[i] if here else None
            for i, here in zip(cohort.client_n, answers_n, strict=True)
        ]
        after, info = close_round(plan, now, cohort, updates)
        estimates.append(after.parts["server_optimizer"].delta_d)
        variances.append(info.variance)
    true = np.var(np.array(estimates), axis=0).sum()
    assert np.nanmean(variances) == pytest.approx(true, rel=tolerance)


def test_weights_are_reported() -> None:
    """Clients 0 and 2 of sizes (1, 2, 5), each with pi = 2/3: coefficients (1/8, 5/8) * 3/2."""
    plan = Plan(Population.from_sizes([1, 2, 5]), Fixed(), 2)
    cohort = Cohort(np.array([0, 2]), np.array([1, 1]), np.full(2, 2 / 3), "fixed-size")
    _, info = close_round(
        plan, init_round(plan, np.zeros(1)), cohort, [np.array([1.0]), np.array([2.0])]
    )
    found = [
        info.largest_weight,
        info.sum_of_weights,
        info.effective_sample_size,
        info.estimate_norm,
    ]
    assert found == pytest.approx([15 / 16, 18 / 16, 36 / 26, 33 / 16])
