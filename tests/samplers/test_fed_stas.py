"""FedSTaS: strata, Neyman's allocation and draws by hand, and against a slow twin."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conftest import Recorder, make_problem, mean_estimate, play
from deltafl import Plan, Population, Reports, init_round
from deltafl.designs.strata import allocate
from deltafl.samplers.cluster import FedSTaS, StrataState, k_means
from deltafl.types import FloatArray
from tools.samplers import SIX, cohort_of, mean_counts


def state_of(
    population: Population, rows: Sequence[Sequence[float]], norm: list[float]
) -> StrataState:
    return StrataState(population.weight_m, np.array(rows, float), np.array(norm))


def test_strata_by_hand() -> None:
    """On a line: 0, 1 and 2 lie together, 10 and 12, and 30 alone."""
    point = np.array([[0.0], [10], [1], [30], [12], [2]])
    label = k_means(point, 3)
    groups = {tuple(np.flatnonzero(label == h)) for h in range(3)}
    assert groups == {(0, 2, 5), (1, 4), (3,)}
    assert k_means(point, 1).tolist() == [0] * 6
    assert k_means(np.ones((4, 2)), 3).tolist() == [0] * 4


@given(arrays(np.float64, (7, 2), elements=st.floats(-9, 9, width=16)), st.integers(1, 7))
def test_each_point_is_in_the_stratum_of_the_nearest_mean(point: FloatArray, groups: int) -> None:
    """What a slow twin finds again: means of the clusters, then the nearest mean of each point."""
    label = k_means(point, groups)
    assert set(label) == set(range(label.max() + 1)) and label.max() < groups
    means = [point[label == h].mean(axis=0) for h in range(label.max() + 1)]
    for row, own in zip(point, label, strict=True):
        distances = [float(((row - mean) ** 2).sum()) for mean in means]
        assert distances[own] <= min(distances) + 1e-9


@pytest.mark.parametrize(
    ("n", "size", "mass", "quota"),
    [
        (10, [50, 30, 20], [100.0, 100, 50], [4, 4, 2]),
        (10, [50, 30, 20], [0.0, 1, 0], [1, 8, 1]),  # nobody is left out
        (10, [50, 3, 20], [0.0, 1, 0], [4, 3, 3]),  # no more than there are
        (10, [50, 30, 20], [0.0, 0, 0], [5, 3, 2]),
        (3, [50, 30, 20], [7.0, 1, 0], [1, 1, 1]),
    ],
)
def test_neyman_by_hand(n: int, size: list[int], mass: list[float], quota: list[int]) -> None:
    """n N_h S_h / sum, with one at least and all at most."""
    assert allocate(n, np.array(size), np.array(mass)).tolist() == quota


def test_expectations_by_hand() -> None:
    """Strata {0, 1, 2} and {3, 4, 5}, weights 1/6, S of 1 and 3, n = 4: quotas 1 and 3.

    In the first pi is the share of the norms, 1 : 1 : 2; of the second all three are drawn.
    """
    population = Population.from_sizes([1] * 6)
    r = np.sqrt(1.5)
    rows = [[-r], [0.0], [r], [100 - 3 * r], [100.0], [100 + 3 * r]]
    state = state_of(population, rows, [1.0, 1, 2, 5, 6, 7])
    sampler = FedSTaS(strata=2, sketch_size=1, floor=0.0)
    member_h, spread_h = sampler.stratify(state, np.arange(6), 2)
    by_first = dict(zip([member[0] for member in member_h], spread_h, strict=True))
    assert by_first == {0: pytest.approx(1.0), 3: pytest.approx(3.0)}
    expected_m = mean_counts(sampler, state, 4, 6)
    np.testing.assert_allclose(expected_m, [0.25, 0.25, 0.5, 1, 1, 1])
    # With the floor, a quarter of the way to a third each.
    expected_m = mean_counts(FedSTaS(strata=2, sketch_size=1, floor=0.25), state, 4, 6)
    np.testing.assert_allclose(expected_m[:3], np.array([3, 3, 6]) / 16 + 1 / 12)


def test_who_was_not_seen_is_a_stratum_of_its_own() -> None:
    """Clients 0 and 5 are new: with S of all others, and as likely within their stratum."""
    rows = [[0.0], [1.0], [2.0], [8.0], [9.0], [0.0]]
    state = state_of(SIX, rows, [np.nan, 1, 1, 1, 1, np.nan])
    member_h, spread_h = FedSTaS(strata=3).stratify(state, np.arange(6), 3)
    assert [member.tolist() for member in member_h[:1]] == [[0, 5]]
    assert {tuple(member) for member in member_h[1:]} == {(1, 2), (3, 4)}
    assert spread_h == pytest.approx([float(np.std([1, 2, 8, 9])), 0.5, 0.5])
    # Nobody is known, or one place alone: no strata.
    fresh = FedSTaS().init(SIX)
    assert len(FedSTaS().stratify(fresh, np.arange(6), 5)[0]) == 1
    assert len(FedSTaS().stratify(state, np.arange(6), 1)[0]) == 1
    assert mean_counts(FedSTaS(strata=3, sketch_size=1), state, 2, 6).sum() == pytest.approx(2)


def test_it_remembers_what_clients_sent() -> None:
    sampler = FedSTaS(sketch_size=2)
    reports = Reports.make(3, responded=[1, 0, 1])._replace(
        sketch_nq=np.arange(6.0).reshape(3, 2), squared_residual_n=np.array([4.0, 9, 16])
    )
    state = sampler.update(sampler.init(SIX), cohort_of([1, 2, 4], [1] * 3, [0.5] * 3), reports)
    np.testing.assert_array_equal(state.norm_m, [np.nan, 2, np.nan, np.nan, 4, np.nan])
    np.testing.assert_array_equal(state.sketch_mq[[1, 2, 4]], [[0, 1], [0, 0], [4, 5]])


@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_the_estimate_is_unbiased_in_every_state(rounds: int) -> None:
    """Over all cohorts: before anybody was seen, with some and with all seen."""
    sizes = [3, 5, 8, 2, 6]
    sampler = FedSTaS(strata=2, sketch_size=3)
    plan = Plan(Population.from_sizes(sizes), sampler, 3, parts=(Recorder(),))
    state = init_round(plan, np.zeros(3))
    state = play(plan, state, [make_problem(sizes, seed=s) for s in range(rounds)])
    problem = make_problem(sizes, seed=9)
    moved_d = mean_estimate(plan, state, problem)
    np.testing.assert_allclose(moved_d, problem.ubar_d, rtol=0, atol=1e-6)
