"""The enumeration itself, against cohorts listed by hand; ``test_designs.py`` holds it against
the real draws.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltafl import (
    DESIGNS,
    Cohort,
    DeltaflError,
    Fixed,
    Population,
    draw_cohort,
    inclusion_probabilities,
)
from deltafl.designs.exact import MAX_CLIENTS, Support, every_cohort, support
from deltafl.types import FloatArray
from tools.samplers import joint_expectations

PAIRS = [(1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1)]


def likely(cohorts: Support) -> Support:
    return {count: p for count, p in cohorts.items() if p > 1e-12}


#: By symmetry over the random order each of the six pairs has probability 1/6.
SYMMETRIC = dict.fromkeys(PAIRS, 1 / 6)
#: Exactly one of three is left out, hence client i with probability 1 - pi_i, whatever the design.
TWO_OF_THREE = {(0, 1, 1): 0.5, (1, 0, 1): 0.3, (1, 1, 0): 0.2}
#: p = (.5, .3, .2), two draws.
SUCCESSIVE = {
    (1, 1, 0): 0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7,
    (1, 0, 1): 0.5 * 0.2 / 0.5 + 0.2 * 0.5 / 0.8,
    (0, 1, 1): 0.3 * 0.2 / 0.7 + 0.2 * 0.3 / 0.8,
}


@pytest.mark.parametrize(
    ("design", "expected", "cohorts"),
    [
        *(
            (design, [0.5] * 4, SYMMETRIC)
            for design in ("systematic", "pivotal", "simple-random", "successive")
        ),
        *((design, [0.5, 0.7, 0.8], TWO_OF_THREE) for design in ("systematic", "pivotal")),
        (
            "poisson",
            [0.2, 1.0, 0.5],
            {(0, 1, 0): 0.4, (1, 1, 0): 0.1, (0, 1, 1): 0.4, (1, 1, 1): 0.1},
        ),
        (
            "multinomial",
            [0.4, 1.6],
            {(2, 0): 0.04, (1, 1): 0.32, (0, 2): 0.64},
        ),  # two draws, p = (.2, .8)
        ("successive", [1.0, 0.6, 0.4], SUCCESSIVE),
    ],
)
def test_cohorts_by_hand(design: str, expected: list[float], cohorts: Support) -> None:
    assert likely(support(design, np.array(expected))) == pytest.approx(cohorts)


def test_systematic_by_hand() -> None:
    """Expectations (.25, .25, .75, .75), 24 orders: a and b meet only where c and d, apart, are
    both stepped over.

    In the order a c b d the ends are .25, 1, 1.25, 2: start in [0, .25) takes a and b, [.25, 1)
    takes c and d. Of the six cyclic orders two separate a and b that way (a c b d, a d b c);
    elsewhere {a, b} is impossible.
    """
    cohorts = support("systematic", np.array([0.25, 0.25, 0.75, 0.75]))
    assert cohorts[1, 1, 0, 0] == pytest.approx(1 / 3 * 0.25)
    assert cohorts[0, 0, 1, 1] == pytest.approx(1 / 3 * 0.75 + 2 / 3 * 0.5)


def test_pivotal_by_hand() -> None:
    """Expectations (.25, .25, .75, .75): {a, b} is drawn only where both c and d lose.

    Orders a b first (a third counts c d first): they become one client of .5, so a and b never
    meet. Orders with c d first: one is drawn at once, so a and b never meet either. Orders with a c
    first: their sum is 1, the duel draws one of them outright (a with .25), and the next duel b d
    is alike: {a, b} has .25^2.
    """
    cohorts = support("pivotal", np.array([0.25, 0.25, 0.75, 0.75]))
    assert cohorts[1, 1, 0, 0] == pytest.approx(2 / 3 * 0.25**2)
    assert cohorts[0, 0, 1, 1] == pytest.approx(
        cohorts[1, 1, 0, 0] + 0.5
    )  # E[c + d] - E[a + b] = 1


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, 5, elements=st.floats(0.01, 10)), st.integers(1, 5))
def test_probabilities_sum_to_one_and_keep_the_promise(score_m: FloatArray, n: int) -> None:
    for name in ("systematic", "pivotal", "poisson", "multinomial", "successive"):
        expected_m = DESIGNS[name].expectation(score_m, n)
        cohorts = support(name, expected_m)
        assert min(cohorts.values()) >= -1e-15
        assert sum(cohorts.values()) == pytest.approx(1, abs=1e-12)
        mean_m = sum(p * np.array(count) for count, p in cohorts.items())
        if DESIGNS[name].exact:
            np.testing.assert_allclose(mean_m, expected_m, atol=1e-12)
        if DESIGNS[name].kind != "poisson":
            assert {sum(count) for count in likely(cohorts)} == {n}


def test_joint_expectations() -> None:
    """Of fixed size, sum_j E[count_i count_j] = n E[count_i], and the diagonal of 0/1 counts is
    pi.
    """
    pi_m = inclusion_probabilities(np.array([1.0, 2, 3, 4, 9]), 3)
    for design in ("systematic", "pivotal"):
        joint_mm = joint_expectations(design, pi_m)
        np.testing.assert_allclose(joint_mm, joint_mm.T)
        np.testing.assert_allclose(np.diag(joint_mm), pi_m)
        np.testing.assert_allclose(joint_mm.sum(axis=1), 3 * pi_m)
    pi_m = np.array([0.5, 0.7, 0.8])
    np.testing.assert_allclose(
        joint_expectations("poisson", pi_m), np.outer(pi_m, pi_m) + np.diag(pi_m * (1 - pi_m))
    )
    p_m = pi_m / 2  # multinomial, n = 2: E[N_i N_j] = n (n - 1) p_i p_j + n p_i [i = j]
    np.testing.assert_allclose(
        joint_expectations("multinomial", pi_m), 2 * np.outer(p_m, p_m) + np.diag(2 * p_m)
    )


def test_every_cohort_follows_each_path_of_several_draws() -> None:
    """Two draws one after the other, the second among two or three clients, depending on the
    first.
    """

    def open_with(rng: np.random.Generator) -> Cohort:
        first = draw_cohort(np.array([1.0, 3.0]), 1, "systematic", rng)
        width = 2 + int(first.client_n[0])
        second = draw_cohort(np.ones(width), 1, "pivotal", rng)
        both = np.array([first.client_n[0], 10 * width + second.client_n[0]])
        return Cohort(both, np.ones(2, dtype=np.int64), np.ones(2))

    seen = {tuple(cohort.client_n.tolist()): p for p, cohort in every_cohort(open_with)}
    expected = {(0, 20): 1 / 8, (0, 21): 1 / 8, (1, 30): 1 / 4, (1, 31): 1 / 4, (1, 32): 1 / 4}
    assert {pair: p for pair, p in seen.items() if p > 0} == pytest.approx(expected)
    with pytest.raises(AttributeError):
        list(every_cohort(lambda rng: Cohort(np.arange(0), np.arange(0), rng.random(0))))


def test_too_many_clients() -> None:
    with pytest.raises(DeltaflError, match="at most 7"):
        support("pivotal", np.full(MAX_CLIENTS + 1, 0.5))


@pytest.mark.parametrize("design", ["poisson", "multinomial", "systematic"])
def test_no_cohort_of_probability_0_is_enumerated(design: str) -> None:
    sampler = Fixed(design, by_weight=True)
    state = sampler.init(Population(np.array([0.0, 0.5, 0.3, 0.2]), np.ones(4, dtype=np.int64)))
    cohorts = list(
        every_cohort(lambda rng: sampler.open(state, np.ones(4, dtype=np.bool_), 2, rng))
    )
    assert sum(probability for probability, _ in cohorts) == pytest.approx(1)
    assert all(probability > 0 and 0 not in cohort.client_n for probability, cohort in cohorts)
