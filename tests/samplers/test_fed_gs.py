"""FedGS: the graph of clients and its paths against slow twins, cohorts against all others."""

from itertools import combinations
from math import exp, inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_frequencies, frequencies
from deltafl import Moves, Population, Reports, stream
from deltafl.samplers.fed_gs import FedGS, GraphState, edges
from deltafl.types import FloatArray
from tools.samplers import cohort_of


def slow_paths(count: list[list[float]], epsilon: float, sigma2: float) -> list[list[float]]:
    """From the definition; paths by going one edge further until nothing changes."""
    m = len(count)

    def cosine(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    value = {(i, j): cosine(count[i], count[j]) for i, j in combinations(range(m), 2)}
    low, high = min(value.values()), max(value.values())
    edge = [[0.0] * m for _ in range(m)]
    for (i, j), v in value.items():
        similar = (v - low) / (high - low)
        edge[i][j] = edge[j][i] = exp(-(similar**2) / sigma2) if similar > epsilon else inf
    path = edge
    for _ in range(m):
        path = [
            [min(path[i][k] + edge[k][j] for k in range(m)) for j in range(m)] for i in range(m)
        ]
    longest = max(x for row in path for x in row if x < inf) or 1.0
    return [[min(x / longest, 1.0) for x in row] for row in path]


@pytest.mark.parametrize(("epsilon", "sigma2"), [(0.1, 0.01), (0.01, 0.1), (0.6, 1.0)])
def test_distances_are_the_papers(epsilon: float, sigma2: float) -> None:
    share_mc = np.random.default_rng(1).dirichlet([0.3] * 4, size=9)
    state = FedGS(epsilon=epsilon, sigma2=sigma2).init(Population.from_sizes([7] * 9, aux=share_mc))
    np.testing.assert_allclose(
        state.distance_mm, slow_paths(share_mc.tolist(), epsilon, sigma2), atol=1e-12
    )


def test_edges_by_hand() -> None:
    """Cosines 1, 0 and 1 / sqrt(2) of clients with labels a, a, b, and both; sizes do not count."""
    length_mm = edges(np.array([[2.0, 0], [9, 0], [0, 1], [3, 3]]), 0.1, 0.5)
    same, both = exp(-2.0), exp(-1.0)
    expected = [
        [0, same, inf, both],
        [same, 0, inf, both],
        [inf, inf, 0, both],
        [both, both, both, 0],
    ]
    np.testing.assert_allclose(length_mm, expected)


def objective(state: GraphState, alpha: float, members: tuple[int, ...], size: int) -> float:
    """The mean distance less the growth of the counts' variance, from its definition."""
    pairs = [state.distance_mm[pair] for pair in combinations(members, 2)]
    after_m = state.selected_m.astype(float)
    after_m[list(members)] += 1
    growth = float(np.var(after_m, ddof=1) - np.var(state.selected_m, ddof=1))
    return alpha * float(np.mean(pairs or [0.0])) - growth


@given(st.integers(2, 8), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 1.0, 50.0]), st.data())
def test_no_swap_makes_a_cohort_better(
    m: int, seed: int, alpha: float, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, m))
    rng = np.random.default_rng(seed)
    distance_mm = rng.random((m, m))
    distance_mm = np.triu(distance_mm, 1) + np.triu(distance_mm, 1).T
    state = GraphState(distance_mm, rng.integers(5, size=m))
    available_m = rng.random(m) < 0.8
    available_m[0] = True
    cohort = FedGS(alpha=alpha).open(state, available_m, n, stream(seed, "draw"))
    members = tuple(cohort.client_n.tolist())
    assert available_m[list(members)].all()
    assert len(members) == min(n, available_m.sum())
    found = objective(state, alpha, members, n)
    values = {
        other: objective(state, alpha, other, n)
        for other in combinations(np.flatnonzero(available_m).tolist(), len(members))
    }
    near = [v for other, v in values.items() if len({*other} - {*members}) == 1]
    assert max(near, default=found) <= found + 1e-9
    if alpha == 0:  # without pairs adding one after the other is exact
        assert max(values.values()) <= found + 1e-9


def test_the_far_corners_are_selected_and_then_the_counts_decide() -> None:
    """On a line of five, ends and middle are the farthest three (a tie is impossible); with alpha
    small those not selected yet come first.
    """
    point_m = np.array([0.0, 1.0, 4.0, 9.0, 10.0])
    distance_mm = np.abs(point_m[:, None] - point_m) / 10
    state = GraphState(distance_mm, np.zeros(5, np.int64))
    everyone_m = np.ones(5, bool)
    assert FedGS().open(state, everyone_m, 2, stream(0, "draw")).client_n.tolist() == [0, 4]
    state = state._replace(selected_m=np.array([3, 0, 0, 1, 3]))
    chosen = FedGS(alpha=0.01).open(state, everyone_m, 3, stream(0, "draw")).client_n
    assert chosen.tolist() == [1, 2, 3]


def test_equal_clients_have_equal_chances_and_counts_stay_within_one() -> None:
    population = Population.from_sizes([5] * 6, aux=np.ones((6, 3)))
    sampler = FedGS()
    state = sampler.init(population)
    assert_frequencies(frequencies(sampler, state, 6, 2), np.full(6, 2 / 6))
    for round in range(10):
        cohort = sampler.open(state, np.ones(6, bool), 4, stream(0, "draw", round))
        state = sampler.update(state, cohort, Reports.make(4))
        assert np.ptp(state.selected_m) <= 1


def test_counts_follow_the_clients_who_stay_and_the_graph_is_made_anew() -> None:
    share = np.array([[1.0, 0], [0.5, 0.5], [0, 1]])
    sampler = FedGS()
    state = sampler.init(Population.from_sizes([1, 2, 3], aux=share))
    state = sampler.update(state, cohort_of([0, 2], [1, 1], [np.nan] * 2), Reports.make(2))
    population = Population.from_sizes([3, 1, 4], aux=share[[2, 0, 1]])
    after = sampler.resized(state, Moves(population, np.array([2, 0]), 3))
    assert after.selected_m.tolist() == [1, 1, 0]
    _same(after.distance_mm, sampler.init(population).distance_mm)


def _same(a: FloatArray, b: FloatArray) -> None:
    np.testing.assert_array_equal(a, b)
