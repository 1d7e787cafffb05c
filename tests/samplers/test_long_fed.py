"""Emulating full participation: cohorts and queues against a slow twin, and who takes turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import Population, Reports, stream
from deltafl.samplers.representatives import DivFL, EmulationState, LongFed, most_alike
from deltafl.types import FloatArray, IntArray
from tools.samplers import cohort_of


def known(sampler: LongFed, point_mq: FloatArray) -> EmulationState:
    """The state when all have been selected and replied once."""
    m = len(point_mq)
    state: EmulationState = sampler.init(Population.from_sizes([1] * m))
    reports = Reports.make(m)._replace(sketch_nq=point_mq)
    return sampler.update(state, cohort_of([*range(m)], [1] * m, [np.nan] * m), reports)


def played(sampler: LongFed, point_mq: FloatArray, n: int, rounds: int) -> IntArray:
    """How often each was selected, if updates stay as they are."""
    state = known(sampler, point_mq)
    count_m = np.zeros(len(point_mq), np.int64)
    for round in range(rounds):
        cohort = sampler.open(state, np.ones(len(point_mq), bool), n, stream(0, "draw", round))
        count_m[cohort.client_n] += 1
        reports = Reports.make(n)._replace(sketch_nq=point_mq[cohort.client_n])
        state = sampler.update(state, cohort, reports)
    return count_m


class Twin:
    """One client and one pair at a time, from the formulas."""

    def __init__(self, sampler: LongFed, point: list[list[float]]) -> None:
        self.sampler = sampler
        m = len(point)
        self.distance = [
            [sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for q in point]
            for p in point
        ]
        self.largest = max(map(max, self.distance))
        self.like: list[int | None] = []
        for i in range(m):
            near = min((j for j in range(m) if j != i), key=lambda j: self.distance[i][j])
            close = self.distance[i][near] <= sampler.similar * self.largest
            self.like.append(near if close else None)
        self.ahead = [0.0] * m
        self.behind = [0.0] * m

    def value(self, members: list[int]) -> float:
        m = len(self.like)
        cover = sum(min(self.distance[k][i] for i in members) for k in range(m)) / self.largest
        drift = 0.0
        for i, like in enumerate(self.like):
            if like is not None:
                owed = self.ahead[i] - self.behind[i]
                drift += owed * ((i in members) - (like in members))
        return float(self.sampler.penalty * cover + drift)

    def select(self, present: list[int], n: int) -> list[int]:
        members: list[int] = []
        while len(members) < min(n, len(present)):
            left = [i for i in present if i not in members]
            members.append(min(left, key=lambda i: self.value([*members, i])))
        for i, like in enumerate(self.like):
            if like is not None:
                more = (i in members) - (like in members)
                delta = self.sampler.tolerance
                self.ahead[i] = max(self.ahead[i] + more - delta, 0.0)
                self.behind[i] = max(self.behind[i] - more - delta, 0.0)
        return sorted(members)


@given(
    st.integers(3, 9),
    st.integers(0, 10**6),
    st.sampled_from([0.125, 1.0, 8.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.0, 0.25]),
    st.data(),
)
def test_cohorts_equal_the_twins(
    m: int, seed: int, penalty: float, similar: float, tolerance: float, data: st.DataObject
) -> None:
    """Ties are frequent, as i is the nearest of j where j is of i; all numbers here are exact, and
    ties go to the first in the sampler's random order.
    """
    n = data.draw(st.integers(1, m))
    rng = np.random.default_rng(seed)
    point_mq = rng.permutation([0, 64, *rng.integers(65, size=m - 2)])[:, None].astype(float)
    sampler = LongFed(penalty, similar, tolerance, sketch_size=1)
    state = known(sampler, point_mq)
    twin = Twin(sampler, point_mq.tolist())
    for round in range(6):
        available_m = rng.random(m) < 0.8
        available_m[seed % m] = True
        cohort = sampler.open(state, available_m, n, stream(seed, "draw", round))
        order_k = stream(seed, "draw", round).permutation(np.flatnonzero(available_m))
        assert cohort.client_n.tolist() == twin.select(order_k.tolist(), n)
        reports = Reports.make(len(cohort.client_n))
        reports = reports._replace(sketch_nq=point_mq[cohort.client_n])
        state = sampler.update(state, cohort, reports)
        np.testing.assert_allclose(state.ahead_m, twin.ahead, atol=1e-12)
        np.testing.assert_allclose(state.behind_m, twin.behind, atol=1e-12)


def test_clients_alike_take_turns_where_the_most_representative_always_come() -> None:
    """Two groups on a line: without fairness the median comes each time, and the best with it."""
    point_mq = np.array([[0.0], [1.0], [2.0], [3.0], [50.0], [51.0], [52.0]])
    unfair = played(LongFed(similar=0.0, sketch_size=1), point_mq, 2, 30)
    assert unfair.tolist() == [0, 0, 0, 30, 0, 30, 0]
    fair = played(LongFed(sketch_size=1), point_mq, 2, 60)
    assert fair[:4].sum() == fair[4:].sum() == 60  # one of each group, as before
    assert fair.min() >= 10


@pytest.mark.parametrize("seed", range(3))
def test_without_fairness_it_selects_as_divfl_does(seed: int) -> None:
    point_mq = np.random.default_rng(seed).normal(size=(12, 4))
    state = known(LongFed(similar=0.0, sketch_size=4), point_mq)
    everyone_m = np.ones(12, bool)
    ours = LongFed(similar=0.0, sketch_size=4).open(state, everyone_m, 4, stream(seed, "draw"))
    theirs = DivFL(sketch_size=4).open(state, everyone_m, 4, stream(seed, "draw"))
    assert ours.client_n.tolist() == theirs.client_n.tolist()


def test_only_clients_that_replied_are_like_another() -> None:
    point_mq = np.array([[0.0], [0.0], [3.0], [4.0]])
    seen_m = np.array([True, False, True, True])
    assert most_alike(point_mq, seen_m, 1.0).tolist() == [2, -1, 3, 2]
    assert most_alike(point_mq, seen_m, 0.25).tolist() == [-1, -1, 3, 2]
    assert most_alike(point_mq, seen_m & (point_mq[:, 0] > 3), 1.0).tolist() == [-1] * 4
