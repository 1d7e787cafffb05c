"""FedLECC: clusters by the labels' Hellinger distance, then clusters and clients by loss,
against a slow twin.
"""

from math import ceil, isnan, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import KnownUpdates, Population, stream
from deltafl.samplers.large_loss import FedLECC, LeccState


def oracle_of(loss: list[float]) -> KnownUpdates:
    m = len(loss)
    return KnownUpdates(np.ones((m, 2), np.float32), np.full(m, 1 / m), loss_m=np.array(loss))


def twin(
    cluster: list[int], loss: list[float], present: list[int], n: int, visited: int
) -> list[int]:
    """Cluster after cluster, from the definition: at most z of each, then who is left."""
    loss = [float("inf") if isnan(value) else value for value in loss]
    members = {
        g: sorted((i for i in present if cluster[i] == g), key=lambda i: -loss[i])
        for g in set(cluster)
    }
    order = sorted(
        (g for g in members if members[g]),
        key=lambda g: -sum(loss[i] for i in members[g]) / len(members[g]),
    )
    n = min(n, len(present))
    z = ceil(n / visited)
    chosen = [i for g in order for i in members[g][:z]]
    return sorted((chosen + [i for g in order for i in members[g][z:]])[:n])


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_cohorts_equal_the_twins(
    m: int, clusters: int, visited: int, seed: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, m))
    rng = np.random.default_rng(seed)
    cluster_m = rng.integers(clusters, size=m)
    loss_m = rng.random(m)
    available_m = rng.random(m) < 0.8
    available_m[0] = True
    if seed % 3 == 0:
        loss_m[rng.integers(m)] = nan
    state = LeccState(cluster_m)
    present = np.flatnonzero(available_m).tolist()
    cohort = FedLECC(visited=visited).open(
        state, available_m, n, stream(seed, "draw"), oracle_of(list(loss_m))
    )
    assert cohort.client_n.tolist() == twin(
        cluster_m.tolist(), loss_m.tolist(), present, n, visited
    )


def test_clusters_are_those_of_the_hellinger_distance() -> None:
    """Label 0 alone, mostly label 0, or mostly label 1; sizes do not matter, and distances are
    sqrt(2) H.
    """
    share = [[1.0, 0.0], [0.98, 0.02], [0.1, 0.9], [0.2, 0.8], [0.9, 0.1]]
    state = FedLECC().init(Population.from_sizes([3, 400, 5, 70, 9], aux=share))
    cluster_m = state.cluster_m
    assert len(set(cluster_m.tolist())) == 2
    assert (cluster_m == cluster_m[0]).tolist() == [True, True, False, False, True]
    root = np.sqrt(share)
    hellinger = sqrt(((root[0] - root[2]) ** 2).sum() / 2)
    assert hellinger == pytest.approx(sqrt(1 - sqrt(0.1)))  # 1 - sum_c sqrt(p_c q_c)
    one_each = FedLECC(clusters=9).init(Population.from_sizes([3] * 5, aux=share)).cluster_m
    assert sorted(one_each.tolist()) == [0, 1, 2, 3, 4]


def test_two_clients_of_each_of_five_clusters_by_hand() -> None:
    """Means 1, 2, 3, of which two clusters give two each: those of mean 3 and 2."""
    cluster_m = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    loss = [0.0, 1.0, 2.0, 2.0, 1.5, 2.5, 3.0, 2.0, 4.0]
    cohort = FedLECC(visited=2).open(
        LeccState(cluster_m), np.ones(9, bool), 4, stream(0, "draw"), oracle_of(loss)
    )
    assert cohort.client_n.tolist() == [3, 5, 6, 8]
    assert np.isnan(cohort.expected_n).all()


def test_ties_are_broken_at_random_and_n_may_be_m() -> None:
    state = LeccState(np.zeros(4, dtype=np.int64))
    oracle = oracle_of([1.0] * 4)
    pairs = {
        tuple(FedLECC().open(state, np.ones(4, bool), 2, stream(s, "audit"), oracle).client_n)
        for s in range(100)
    }
    assert len(pairs) == 6
    assert FedLECC().open(
        state, np.ones(4, bool), 4, stream(0, "audit"), oracle
    ).client_n.tolist() == [0, 1, 2, 3]
