"""Samplers that learn as a bandit (K-Vib, Vrb, OSMD): their papers' formulas by hand, and that
they learn.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltafl import Plan, Sampler, close_round, inclusion_probabilities, init_round
from deltafl import make_sampler as make
from deltafl.samplers.online import (
    MAX_EXPERTS,
    BanditState,
    MirrorDescent,
    VarianceBandit,
    num_experts,
    project,
)
from deltafl.streams import stream
from deltafl.types import FloatArray
from tools.samplers import FOUR, cohort_of, known, mean_counts, norms

# --- K-Vib and Vrb


def test_kvib_by_hand() -> None:
    """m = 4, n = 2, T = 16: theta = (4 / 32)^(1/3) = 1/2. Feedback 0.2 * 3 and 0.4 * 2 at
    expectations .5 and .8.

    W = .36 / .5 and .64 / .8; G^2 = .64, gamma = .64 * 4 / (2 * .5) = 2.56. Scores are the roots,
    nobody is capped.
    """
    sampler = VarianceBandit("poisson", horizon=16)
    assert sampler.theta(4, 2) == pytest.approx(0.5)
    state = sampler.init(FOUR)
    np.testing.assert_allclose(mean_counts(sampler, state, 2, 4), 0.5)
    state = sampler.update(state, cohort_of([0, 3], [1, 1], [0.5, 0.8], "poisson"), norms(3, 2))
    np.testing.assert_allclose(state.total_m, [0.72, 0, 0, 0.8])
    assert state.bound == pytest.approx(0.64)
    score_m = np.sqrt([2.56 + 0.72, 2.56, 2.56, 2.56 + 0.8])
    np.testing.assert_allclose(
        mean_counts(sampler, state, 2, 4), 0.5 * 2 * score_m / score_m.sum() + 0.25
    )


def test_kvib_caps_before_it_mixes() -> None:
    """Roots 10, 1, 1, 1 without gamma, n = 2: leader 1 and 1/3 thrice; theta = .2 mixes in 1/2."""
    sampler = VarianceBandit("poisson", mixing=0.2)
    state = BanditState(FOUR.weight_m, np.array([100.0, 1, 1, 1]), np.zeros(()))
    np.testing.assert_allclose(mean_counts(sampler, state, 2, 4), [0.8 + 0.1, *[0.8 / 3 + 0.1] * 3])


def test_vrb_by_hand_and_as_n_single_draws() -> None:
    """p = (1 - theta) sqrt(W + gamma) / sum + theta / m with the paper's sums over draws, a^2 / p
    each, and its gamma.

    Two draws of client 0 and one of client 3, p = 1/4: sums 2 * 4 * a_0^2 and 4 * a_3^2; gamma =
    G^2 m / theta.
    """
    theta = 0.3
    a_0 = 0.2 * 3
    a_3 = 0.4 * 2
    sampler = VarianceBandit("multinomial", mixing=theta)
    state = sampler.update(sampler.init(FOUR), cohort_of([0, 3], [2, 1], [0.75, 0.75]), norms(3, 2))
    sums = np.array([8 * a_0**2, 0, 0, 4 * a_3**2]) + max(a_0, a_3) ** 2 * 4 / theta
    p_m = (1 - theta) * np.sqrt(sums) / np.sqrt(sums).sum() + theta / 4
    np.testing.assert_allclose(mean_counts(sampler, state, 3, 4), 3 * p_m)


def test_the_bound_of_the_bandits_is_that_of_the_first_answer() -> None:
    sampler = VarianceBandit()
    state = sampler.init(FOUR)
    state = sampler.update(state, cohort_of([0], [1], [0.5]), norms(5, responded=[False]))
    assert state.bound == 0
    state = sampler.update(state, cohort_of([0, 1], [1, 1], [0.5, 0.5]), norms(1, 2))
    state = sampler.update(state, cohort_of([2], [1], [0.5]), norms(50))
    assert state.bound == pytest.approx(0.16)
    assert state.total_m[2] == pytest.approx(100 / 0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", ["k-vib", "k-vib@systematic", "vrb", "osmd", "osmd@pivotal"])
def test_learning_samplers_approach_the_optimum(label: str) -> None:
    """On updates that stay the same, most of what probabilities can change of sum a^2 / pi is
    gained in 500 rounds.
    """
    norm_m = np.array([1.0, 1, 1, 1, 1, 10, 15])
    name, _, design = label.partition("@")
    population, oracle = known(*norm_m)
    sampler = make(name + f"(mixing={0.4 if name == 'osmd' else 0.1})@" + design)
    plan = Plan(population, sampler, 2, seed=1)
    state = init_round(plan, np.zeros(7))
    for round in range(500):
        cohort = sampler.open(
            state.sampler, np.ones(7, dtype=np.bool_), 2, stream(1, "draw", round)
        )
        state, _ = close_round(plan, state, cohort, oracle.update_md[cohort.client_n])
    loss = np.sum(norm_m**2 / mean_counts(sampler, state.sampler, 2, 7))
    even = np.sum(norm_m**2) * 7 / 2
    best = np.sum(norm_m**2 / inclusion_probabilities(norm_m, 2))
    assert best < loss < even - 0.6 * (even - best)


# --- OSMD -------------------------------------------------------------------------------


def test_projection_by_hand() -> None:
    """Scores 6, 2, 1, 0 with least p = .15: the 0 gets it; .85 / 9 would give the 1 less, so
    does it; .7 over 6 : 2.
    """
    np.testing.assert_allclose(project(np.array([6.0, 1, 2, 0]), 0.15), [0.525, 0.15, 0.175, 0.15])
    np.testing.assert_allclose(project(np.array([3.0, 1]), 0.5), 0.5)
    np.testing.assert_allclose(project(np.array([3.0, 1]), 0.1), [0.75, 0.25])


@given(arrays(np.float64, 5, elements=st.floats(1e-3, 10)), st.floats(0.02, 1))
def test_projection_is_nearest_in_relative_entropy(score_m: FloatArray, alpha: float) -> None:
    """In the set, and no better in any direction to a corner of it (the objective is convex)."""
    least = alpha / 5
    p_m = project(score_m, least)
    assert p_m.sum() == pytest.approx(1)
    assert np.all(p_m >= least - 1e-12)
    slope_m = np.log(p_m / score_m)  # gradient of sum p log(p / s) up to a constant
    for corner_m in least + (1 - alpha) * np.eye(5):
        assert slope_m @ (corner_m - p_m) >= -1e-9


def test_experts_of_a_block() -> None:
    """E = ceil(log2(1 + 4 (T - 1) ln(m / alpha) / ln m) / 2) + 1; m = 100, alpha = .4: the ratio
    is 1.199.
    """
    assert [num_experts(t, 100, 0.4) for t in (1, 2, 4, 16, 64)] == [1, 3, 3, 5, 6]
    assert num_experts(2**40, 100, 0.4) == MAX_EXPERTS
    state = MirrorDescent().init(FOUR)
    np.testing.assert_allclose(state.weight_e, np.eye(MAX_EXPERTS)[0])
    np.testing.assert_allclose(state.expert_em[0], 0.25)


def test_osmd_by_hand() -> None:
    """The first block: one round, one expert, abar the largest feedback of that very round.

    m = 4, n = 3 draws, client 0 twice and 3 once, p = 1/4. eta = n^2 alpha^3 / (m^3 abar) sqrt(ln 4
    / 2) and the gradient is -count a / (n^2 p^3): the exponents are alpha^3 sqrt(ln 4 / 2) count a
    / abar.
    """
    sampler = MirrorDescent(mixing=0.8)
    state = sampler.init(FOUR)
    np.testing.assert_allclose(mean_counts(sampler, state, 3, 4), 0.75)
    state = sampler.update(state, cohort_of([0, 3], [2, 1], [0.75, 0.75]), norms(3, 2))
    a_0 = (0.2 * 3) ** 2
    a_3 = (0.4 * 2) ** 2
    exponent = 0.8**3 * np.sqrt(np.log(4) / 2) * np.array([2 * a_0 / a_3, 0, 0, 1])
    p_m = np.exp(exponent) / np.exp(exponent).sum()
    assert p_m.min() < 0.2  # so that the floor alpha / m is met
    free = np.exp(exponent[[0, 3]])
    np.testing.assert_allclose(
        mean_counts(sampler, state, 3, 4)[[0, 3]] / 3, 0.6 * free / free.sum(), rtol=1e-9
    )
    assert (int(state.block), int(state.step)) == (1, 0)
    assert float(state.bound) == pytest.approx(a_3)
    assert np.count_nonzero(state.weight_e) == num_experts(2, 4, 0.8)
    np.testing.assert_allclose(state.weight_e[:2] / state.weight_e[0], [1, 1 / 3])


def test_osmd_steps_of_three_experts_by_hand() -> None:
    """The second block: T = 2 rounds, E = 3, n = 3 draws, client 0 once and 3 twice, a^2 = 16 of
    both, abar = 4.

    eta_e = 2^(e - 1) 9 .4^3 / (4^3 4) sqrt(ln 4 / 4); an expert's exponent is eta_e / 3 count_i /
    (3 p_i) 16 / p_e,i^2 with the p of all experts outside and its own p_e inside. No share falls to
    the floor of .1.
    """
    sampler = MirrorDescent(mixing=0.4)
    state = sampler.init(FOUR)
    state = sampler.update(state, cohort_of([1], [1], [0.25]), norms(1))  # ends block 0
    expert_em = state.expert_em.copy()
    weight_e = np.zeros(MAX_EXPERTS)
    expert_em[:3] = [0.3, 0.2, 0.2, 0.3], [0.2, 0.25, 0.15, 0.4], [0.25, 0.25, 0.25, 0.25]
    weight_e[:3] = 0.5, 0.25, 0.25
    state = state._replace(expert_em=expert_em, weight_e=weight_e, bound=np.asarray(4.0))
    np.testing.assert_allclose(mean_counts(sampler, state, 3, 4), [0.7875, 0.675, 0.6, 0.9375])
    after = sampler.update(state, cohort_of([0, 3], [1, 2], [0.7875, 0.9375]), norms(20, 10))
    eta_e = 0.00225 * np.sqrt(np.log(4) / 4) * np.array([1, 2, 4])
    feedback_m = np.array([16 / (3 * 0.7875), 0, 0, 2 * 16 / (3 * 0.9375)])
    score_em = expert_em[:3] * np.exp(eta_e[:, None] * feedback_m / expert_em[:3] ** 2)
    expected_em = score_em / score_em.sum(axis=1, keepdims=True)
    assert expected_em.min() > 0.1
    np.testing.assert_allclose(after.expert_em[:3], expected_em, rtol=1e-12)
    np.testing.assert_array_equal(after.expert_em[3:], expert_em[3:])
    assert (int(after.block), int(after.step)) == (1, 1)


def test_osmd_doubles_its_blocks_and_starts_them_where_it_was() -> None:
    """abar is the largest feedback of the block that ended, not of all before."""
    sampler = MirrorDescent()
    state = sampler.init(FOUR)
    blocks = []
    for round in range(15):
        blocks.append(int(state.block))
        state = sampler.update(
            state, cohort_of([0, 2], [1, 1], [0.5, 0.5]), norms(1, 9 / (1 + round))
        )
        if state.step == 0:
            first = 2 ** int(state.block - 1) - 1
            assert float(state.bound) == pytest.approx((0.2 * 9 / (1 + first)) ** 2)
            np.testing.assert_allclose(
                state.expert_em, np.tile(state.expert_em[0], (MAX_EXPERTS, 1))
            )
        assert np.all(state.mixture >= 0.4 / 4 - 1e-12)
    assert blocks == [0] + [1] * 2 + [2] * 4 + [3] * 8


@pytest.mark.parametrize("sampler", [VarianceBandit(), MirrorDescent()], ids=repr)
def test_replies_of_nothing_teach_nothing(sampler: Sampler) -> None:
    """All updates zero, or no reply at all: all stay alike; then a huge update after tiny ones
    stays finite.
    """
    state = sampler.init(FOUR)
    for norm, responded in ((0.0, True), (5.0, False), (1e-150, True), (1e18, True), (1.0, True)):
        state = sampler.update(
            state, cohort_of([1], [2], [0.5]), norms(norm, responded=[responded])
        )
        if norm < 1e-100 or not responded:
            continue
        assert all(np.all(np.isfinite(column)) for column in state)
    assert mean_counts(sampler, state, 2, 4).min() > 0
