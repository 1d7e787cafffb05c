"""FedEntOpt: greedy entropy of the pooled labels, and a buffer, against a slow twin of the
paper's algorithm 1.
"""

from collections import deque
from math import log

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltafl import Population, Reports, stream
from deltafl.samplers.pooled_labels import FedEntOpt
from tools.samplers import cohort_of


def entropy(counts: list[float]) -> float:
    total = sum(counts)
    return -sum(count / total * log(count / total) for count in counts if count > 0)


def greedy(count_mc: list[list[float]], first: int, free: list[int], n: int) -> list[int]:
    """Lines 8 and 9 of the algorithm, one client after the other; no two clients tie in these
    tests.
    """
    chosen = [first]
    pooled = list(count_mc[first])
    while len(chosen) < n:
        rest = [i for i in free if i not in chosen]
        best = max(
            rest, key=lambda i: entropy([a + b for a, b in zip(pooled, count_mc[i], strict=True)])
        )
        chosen.append(best)
        pooled = [a + b for a, b in zip(pooled, count_mc[best], strict=True)]
    return sorted(chosen)


def random_population(m: int, classes: int, seed: int) -> Population:
    rng = np.random.default_rng(seed)
    return Population.from_sizes(
        rng.integers(5, 50, size=m), aux=rng.dirichlet(np.full(classes, 0.3), size=m)
    )


@given(st.integers(2, 9), st.integers(2, 5), st.floats(0, 1), st.integers(0, 10**6), st.data())
def test_rounds_equal_the_papers_algorithm(
    m: int, classes: int, share: float, seed: int, data: st.DataObject
) -> None:
    """Six rounds: the first client is one of those free, and all others follow from it."""
    n = data.draw(st.integers(1, m))
    population = random_population(m, classes, seed)
    sampler = FedEntOpt(buffer=share)
    state = sampler.init(population)
    count_mc = state.count_mc.tolist()
    buffer: deque[int] = deque(maxlen=min(int(share * m + 1e-9), m - n))
    for round in range(6):
        free = [i for i in range(m) if i not in buffer]
        cohort = sampler.open(state, np.ones(m, dtype=np.bool_), n, stream(seed, "draw", round))
        assert cohort.client_n.tolist() in [greedy(count_mc, first, free, n) for first in free]
        buffer.extend(cohort.client_n.tolist())
        state = sampler.update(state, cohort, Reports.make(n))


def test_the_first_client_is_drawn_evenly_from_those_that_are_free() -> None:
    """Clients 0 and 1 are in the buffer: with n = 1 each of the other four is selected with
    probability 1 / 4.
    """
    sampler = FedEntOpt(buffer=0.34)
    population = random_population(6, 3, 0)
    state = sampler.update(
        sampler.init(population), cohort_of([0, 1], [1] * 2, [np.nan] * 2), Reports.make(2)
    )
    drawn = [
        sampler.open(state, np.ones(6, bool), 1, stream(s, "audit")).client_n[0]
        for s in range(2000)
    ]
    count_m = np.bincount(drawn, minlength=6)
    assert count_m[:2].sum() == 0
    np.testing.assert_allclose(count_m[2:], 500, atol=4.5 * np.sqrt(2000 * 3 / 16))


def test_the_oldest_of_the_buffer_are_free_where_few_are_there() -> None:
    """Selected were 0, 1, then 2, 3, then 4; of 1, 2, 4 two are wanted: 1 and 2, although the
    buffer holds four.
    """
    sampler = FedEntOpt(buffer=0.67)
    population = random_population(6, 3, 1)
    state = sampler.init(population)
    for clients in ([0, 1], [2, 3], [4]):
        k = len(clients)
        state = sampler.update(
            state, cohort_of(clients, [1] * k, [np.nan] * k), Reports.make(k, responded=[0] * k)
        )
    available_m = np.isin(np.arange(6), [1, 2, 4])
    for seed in range(20):
        assert sampler.open(state, available_m, 2, stream(seed, "audit")).client_n.tolist() == [
            1,
            2,
        ]
    assert sampler.open(state, available_m, 5, stream(0, "audit")).client_n.tolist() == [1, 2, 4]


def test_everybody_where_n_is_m_and_ties_are_broken_at_random() -> None:
    same = Population.from_sizes([4] * 5, aux=[[1, 1]] * 5)
    state = FedEntOpt().init(same)
    assert FedEntOpt().open(state, np.ones(5, bool), 5, stream(0, "audit")).client_n.tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    pairs = {
        tuple(FedEntOpt().open(state, np.ones(5, bool), 2, stream(s, "audit")).client_n)
        for s in range(200)
    }
    assert len(pairs) == 10
