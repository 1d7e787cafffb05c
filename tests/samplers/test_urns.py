"""Clustered sampling: urns by hand and by a slow twin, exact expectations, what it refuses."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.cluster.hierarchy import linkage

from conftest import all_replies
from deltafl import DeltaflError, Plan, Population, Reports, Sampler, init_round, make_plan
from deltafl import make_sampler as make
from deltafl.designs.exact import every_cohort
from deltafl.samplers.base import State
from deltafl.samplers.urns import (
    ClusteredBySimilarity,
    ClusteredBySize,
    Urn,
    urns_by_cluster,
    urns_by_size,
)
from deltafl.samplers.ward import angles, ward_tree
from deltafl.streams import stream
from deltafl.types import FloatArray, IntArray
from tools.samplers import SIX, cohort_of, counts, mean_counts
from tools.variance import estimate_variance


def in_rows(urns: list[Urn], m: int) -> FloatArray:
    """The urns as rows with a share for each of m clients."""
    return np.array([np.bincount(urn.client_k, urn.share_k, m) for urn in urns])


def test_urns_by_size_by_hand() -> None:
    """Weights .06 .10 .14 .20 .20 .30 and n = 3: masses, by size, .90 .60 .60 .42 .30 .18 laid
    over three urns.
    """
    urn_nm = in_rows(urns_by_size(SIX.weight_m, 3), 6)
    expected_nm = [[0, 0, 0, 0.1, 0, 0.9], [0, 0, 0, 0.5, 0.5, 0], [0.18, 0.30, 0.42, 0, 0.1, 0]]
    np.testing.assert_allclose(urn_nm, expected_nm, atol=1e-12)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.integers(1, 9))
def test_urns_by_size_against_the_slow_twin(sizes: list[int], n: int) -> None:
    """Algorithm 1 with n tokens for each example: all in a row, the largest client first, cut
    into n urns.
    """
    n = min(n, len(sizes))
    size_m = np.array(sizes)
    order = np.argsort(-size_m, kind="stable")
    row_nt = np.repeat(order, n * size_m[order]).reshape(n, -1)
    expected_nm = [np.bincount(token_t, minlength=len(sizes)) / len(token_t) for token_t in row_nt]
    urn_nm = in_rows(urns_by_size(size_m / size_m.sum(), n), len(sizes))
    np.testing.assert_allclose(urn_nm, expected_nm, atol=1e-9)


def tree_of(*rows: list[float]) -> IntArray:
    return ward_tree(np.array(rows, dtype=np.float64))


def test_urns_by_cluster_by_hand() -> None:
    """Six clients on three axes, n = 3: masses .18 .30 .42 .60 .60 .90.

    Pairs on an axis are (0, 3), (1, 2), (4, 5); 4 and 5 together weigh 1.5 and are cut apart.
    Clusters by mass: {4} .60, {1, 2} .72, {0, 3} .78, {5} .90. The heaviest three are urns with
    gaps .28 .22 .10, and 4 fills them.
    """
    x = [1.0, 0, 0]
    y = [0.0, 1, 0]
    z = [0.0, 0, 1]
    urn_nm = urns_by_cluster(SIX.weight_m, 3, tree_of(x, y, y, x, z, z))
    expected_nm = [
        [0, 0.30, 0.42, 0, 0.28, 0],
        [0.18, 0, 0, 0.60, 0.22, 0],
        [0, 0, 0, 0, 0.10, 0.90],
    ]
    np.testing.assert_allclose(urn_nm, expected_nm, atol=1e-12)


def test_a_client_too_large_for_an_urn_has_urns_of_its_own() -> None:
    """Masses 2.4, .3, .3 and n = 3: two urns for client 0; the third holds its .4 beside its
    like 2, and 1.
    """
    weight_m = np.array([0.8, 0.1, 0.1])
    urn_nm = urns_by_cluster(weight_m, 3, tree_of([1, 0], [0, 1], [1, 0.01]))
    np.testing.assert_allclose(urn_nm, [[1.0, 0, 0], [1.0, 0, 0], [0.4, 0.3, 0.3]], atol=1e-12)


@given(
    arrays(np.float64, 7, elements=st.floats(0.01, 1)),
    st.integers(1, 7),
    st.integers(0, 5),
)
def test_urns_keep_their_promise(weight_m: FloatArray, n: int, seed: int) -> None:
    """Rows sum to 1, columns to n w_i / sum w, also with a client away."""
    tree = ward_tree(np.random.default_rng(seed).normal(size=(7, 3)))
    here_m = np.where(np.arange(7) == seed, 0.0, weight_m)
    for w_m, size in ((weight_m, n), (here_m, min(n, 6))):
        urn_nm = urns_by_cluster(w_m, size, tree)
        assert urn_nm.shape == (size, 7)
        assert urn_nm.min() >= 0
        np.testing.assert_allclose(urn_nm.sum(axis=1), 1, atol=1e-9)
        np.testing.assert_allclose(urn_nm.sum(axis=0), size * w_m / w_m.sum(), atol=1e-9)


def test_distances_of_clients() -> None:
    """Right angles, the same direction, opposite ones; a zero is at a right angle to the rest.

    The unseen are alike: they are merged first, with the two of the same direction.
    """
    sketch_mq = np.array([[2.0, 0], [0, 1], [1, 0], [-3, 0], [0, 0], [0, 0]])
    half = np.pi / 2
    expected = [[0, half, 0, np.pi, half], [np.pi, half, np.pi, 0, half]]
    np.testing.assert_allclose(angles(sketch_mq)[[0, 3], :5], expected, atol=1e-7)
    assert {tuple(pair) for pair in ward_tree(sketch_mq)[:2].tolist()} == {(0, 2), (4, 5)}


CLUSTERED: list[ClusteredBySize] = [ClusteredBySize(), ClusteredBySimilarity(sketch_size=2)]


def clustered_state(sampler: Sampler) -> State:
    """A state in which everybody but client 1 was seen."""
    reports = Reports.make(5)._replace(sketch_nq=np.random.default_rng(0).normal(size=(5, 2)))
    return sampler.update(
        sampler.init(SIX), cohort_of([0, 2, 3, 4, 5], [1] * 5, [1.0] * 5), reports
    )


@pytest.mark.parametrize("sampler", CLUSTERED, ids=repr)
def test_clustered_sampling_is_exact_a_plain_mean_and_no_worse_than_md(
    sampler: ClusteredBySize,
) -> None:
    """By enumeration: E[count] = n w; coefficients count / n; variance at most that of ``md``;
    kind as its estimate.
    """
    state = clustered_state(sampler)
    n = 3
    np.testing.assert_allclose(mean_counts(sampler, state, n, 6), n * SIX.weight_m, rtol=1e-9)
    update_md = np.random.default_rng(5).normal(size=(6, 4))
    mean_d = SIX.weight_m @ update_md
    plan = Plan(SIX, sampler, n)
    mse = 0.0
    estimated = 0.0
    for probability, count_m, cohort in counts(sampler, state, n, 6):
        assert count_m.sum() == n
        coef_n = plan.collect_replies(init_round(plan, np.zeros(4)), cohort).coef_n
        np.testing.assert_allclose(coef_n, cohort.count_n / n)
        mse += probability * float(np.sum((coef_n @ update_md[cohort.client_n] - mean_d) ** 2))
        estimated += probability * estimate_variance(
            all_replies(cohort, coef_n), update_md[cohort.client_n]
        )
    md = float(SIX.weight_m @ np.sum((update_md - mean_d) ** 2, axis=1)) / n
    assert mse < md
    # The estimate for draws with replacement is conservative by the variance between the urns'
    # means.
    urn_nm = in_rows(sampler.urns(state, SIX.weight_m, np.ones(6, dtype=np.bool_), n), 6)
    between = float(np.sum((urn_nm @ update_md - mean_d) ** 2)) / (n * (n - 1))
    assert estimated == pytest.approx(mse + between)


@pytest.mark.parametrize("sampler", CLUSTERED, ids=repr)
def test_clustered_sampling_with_clients_away(sampler: Sampler) -> None:
    state = clustered_state(sampler)
    available_m = np.array([True, True, False, True, False, True])
    mean_m = np.zeros(6)
    for probability, cohort in every_cohort(lambda rng: sampler.open(state, available_m, 2, rng)):
        mean_m[cohort.client_n] += probability * cohort.count_n
    weight_m = np.where(available_m, SIX.weight_m, 0)
    np.testing.assert_allclose(mean_m, 2 * weight_m / weight_m.sum(), atol=1e-9)


def test_the_pairs_are_those_of_the_whole_matrix() -> None:
    """The same tree, to the bit, as SciPy's from the full matrix, with and without clients seen."""
    rng = np.random.default_rng(0)
    for m, share in ((2, 0.0), (3, 1.0), (40, 0.5), (90, 0.9)):
        sketch_mq = rng.normal(size=(m, 5)) * (rng.random((m, 1)) < share)
        angle_mm = angles(sketch_mq)
        unseen_m = ~sketch_mq.any(axis=1)
        angle_mm[np.ix_(unseen_m, unseen_m)] = 0.0
        tree = linkage(angle_mm[np.triu_indices(m, k=1)], "ward")[:, :2]
        np.testing.assert_array_equal(ward_tree(sketch_mq), tree)


@pytest.mark.parametrize(
    "label", ["clustered-sampling-2", "fedlecc", "hics-fl", "divfl", "fedgs", "longfed"]
)
def test_who_compares_all_pairs_says_how_many_clients_it_can_do(label: str) -> None:
    """Before anything is allocated: 100,000 clients would take 40 GB and more."""
    most = make(label).most_clients
    assert most is not None
    match = f"compares all pairs of clients and can do {most:,}, not {most + 1:,}"
    with pytest.raises(DeltaflError, match=match):
        make_plan(label, [10] * (most + 1), n=20)
    assert make_plan(label, [10] * most, n=20).population.num_clients == most


def test_urns_by_size_of_many_clients_take_no_row_of_all_for_each() -> None:
    """200,000 clients in 1000 urns: as rows of all clients they would take 1.6 GB."""
    weight_m = np.random.default_rng(0).lognormal(0, 3, 200_000)
    tracemalloc.start()
    try:
        urns = urns_by_size(weight_m, 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(weight_m)
    mass_m = np.zeros(len(weight_m))
    for urn in urns:
        mass_m[urn.client_k] += urn.share_k
    np.testing.assert_allclose(mass_m, 1000 * weight_m / weight_m.sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose([urn.share_k.sum() for urn in urns], 1, rtol=1e-9)


def test_clients_beyond_the_limit_cannot_join() -> None:
    most = make("divfl").most_clients
    assert most is not None
    plan = make_plan("divfl", [10] * most, n=2)
    with pytest.raises(DeltaflError, match="compares all pairs"):
        replace(plan, population=Population.from_sizes([10] * (most + 1)))


def test_what_clustered_sampling_refuses() -> None:
    with pytest.raises(DeltaflError, match="draws in its own way"):
        make("clustered-sampling-1@pivotal")
    weightless = Population(np.array([0.0, 0, 1]), np.array([1, 1, 1]))
    for sampler in CLUSTERED:
        with pytest.raises(DeltaflError, match="weight 0; use 'uniform'"):
            sampler.open(
                sampler.init(weightless), np.array([True, True, False]), 1, stream(0, "draw")
            )
