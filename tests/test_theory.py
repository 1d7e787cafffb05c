"""The numbers that docs/theory.md states, each computed here and looked up there."""

import numpy as np
import pytest

from deltafl import Cohort, FedIS, FedPracIS, Fixed, KnownUpdates, Population, Reports
from deltafl.designs.exact import joint_expectations, support
from deltafl.designs.inclusion import draw_probabilities
from reproduction.rates import counter_example
from reproduction.toy import SCORES, WAYS, enumerate_toy, hand_picked
from theory_tools import TEXT, states, variance


def test_a_round_may_climb() -> None:
    def f(x: float) -> float:
        return ((x - 1) ** 2 + (x + 1) ** 2) / 4

    assert f(1) == f(-1)
    states(f"$f(x_0) = {f(0)}$ and $f(x_1) = {f(1):g}$", f"$f(x_1) = {f(1):g}$")


def test_a_client_at_the_mean_is_never_asked() -> None:
    gradient_m = np.array([1.0, 2.0, 3.0])
    p_m = draw_probabilities(np.abs(gradient_m - gradient_m.mean()))
    mean = float(np.sum(p_m[p_m > 0] * gradient_m[p_m > 0] / (3 * p_m[p_m > 0])))
    assert p_m[1] == 0
    states(f"mean 2 has mean {mean:.4f}")


def test_successive_draws() -> None:
    p_m = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    pi_m = sum(probability * np.array(count) for count, probability in support("successive", 2 * p_m).items())
    states(
        ", ".join(f"{pi:.4f}".lstrip("0") for pi in np.asarray(pi_m)), f"$n p_1 = {2 * p_m[0]:g}$".replace("0.", ".")
    )


def test_the_drift_lemmas() -> None:
    steps_k = np.arange(2, 3000, dtype=np.float64)
    largest = np.max((steps_k - 1) * ((1 + 1 / (steps_k - 1)) ** steps_k - 1) / steps_k)
    assert 1.71 < largest <= 1.72
    for k in steps_k[:50]:
        assert 1 / (2 * k - 1) + 4 * k / (8 * k) ** 2 <= 1 / (k - 1)
    assert 2**2 > 1 + 1  # norm(grad F_i)^2 against zeta^2 + norm(grad f)^2
    states("give $4 \\le 2$", f"= {1.72 * 8:.2f} K^2 \\le 20 K^2")


def test_noise_of_early_steps_comes_back() -> None:
    """F = -x^2 / 2, two steps from x = 0: the sum of the gradients is e_0 + e_1 + lr e_0."""
    lr = 1 / 16
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 400_000))
    g_0 = first
    x_1 = -lr * g_0
    g_1 = -x_1 + second
    left, right = (1 + lr) ** 2 + 1, 2 + lr**2
    assert np.mean((g_0 + g_1) ** 2) == pytest.approx(left, abs=5 * left * np.sqrt(2 / len(first)))
    assert 2 + np.mean((-x_1) ** 2) == pytest.approx(right, abs=1e-3)
    states(f"left side is {left:.4f}, the right side {right:.4f}")


def test_the_variance_under_importance_sampling() -> None:
    opposite = np.array([[1.0], [-1.0]])
    assert variance(opposite, np.full(2, 0.5)) == 1
    assert opposite.mean() ** 2 == 0
    states("gradients 1 and -1 have $V = 1$, the claimed bound is 0")


def test_the_formula_without_replacement_misses_both_ways() -> None:
    toy = np.array([[2.0, 2.0], [4.0, 1.0], [6.0, -3.0]])
    formula = variance(toy, np.full(3, 1 / 3), n=2)
    truth = enumerate_toy("uniform", "ht").mse
    states(f"that is {formula:.3f}, the truth is {truth:.3f}")
    together = np.array([[1.0], [1.0], [-1.0], [-1.0]])
    estimates = [together[pair].sum() / (4 * 0.5) for pair in ([0, 1], [2, 3])]
    assert np.mean(np.square(estimates)) == 1
    states(f"variance 1, the formula gives {variance(together, np.full(4, 0.25), n=2)}")


def test_systematic_draws_keep_their_expectations() -> None:
    expected_m = 2 * np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    np.testing.assert_allclose(np.diag(joint_expectations("systematic", expected_m)), expected_m, atol=1e-12)


def test_the_practical_rule_does_not_compare_strangers() -> None:
    sampler, population = FedPracIS(floor=0.0), Population.from_sizes([1] * 4)
    state = sampler.init(population)
    for clients, norms in (([0, 1], [1.0, 3.0]), ([2, 3], [10.0, 30.0])):
        ids = np.array(clients)
        cohort = Cohort(ids, np.ones(2, dtype=np.int64), np.full(2, 0.5))
        reports = Reports.make(2)._replace(squared_norm_n=np.square(norms))
        state = sampler.update(state, cohort, reports)
    ideal_m = np.array([1, 3, 10, 30]) / 44
    states(
        f"$p = ({', '.join(f'{p:g}' for p in state.p_m)})$",
        f"$({', '.join(f'{p:.4f}' for p in ideal_m)})$",
    )


@pytest.mark.parametrize("label", ["delta@multinomial", "delta", "uniform"])
def test_theorem_2_fails(label: str) -> None:
    local_lr, least, bound = counter_example(label, 1000)
    assert least == 1
    assert local_lr == 2**-10 < 1 / (4 * np.sqrt(10))
    states(f"the claim is {bound:.4f}", "$T = 1000$ and $\\eta_L = 2^{-10}$")


def test_importance_sampling_on_the_counter_example() -> None:
    assert counter_example("fedis", 2)[1] == 0
    states("is at the minimum after one round")


def test_theorem_2_fails_at_the_papers_own_rates() -> None:
    rounds, c = 10**6, 0.25
    a = 1 / np.sqrt(rounds)
    squares = [0.4 * a]
    for _ in range(20_000):
        squares.append((1 - a) ** 2 * squares[-1] + a * a)
    assert squares[0] == min(squares) and squares[-1] == pytest.approx(a / (2 - a), rel=1e-6)
    f_above = squares[0] / 2
    bound = (f_above / (a * rounds) + 10 / rounds) / c
    assert bound == pytest.approx(10.2 / rounds / c)
    states(f"{squares[0]:.2e} against {bound:.2e}")


def test_the_recursion_of_the_mean_square() -> None:
    """E x^2 of the two clients, one draw a round: both clients by hand."""
    x, a = 0.3, 0.01
    by_hand = np.mean([(x - a * (x - b)) ** 2 for b in (1, -1)])
    assert by_hand == pytest.approx((1 - a) ** 2 * x**2 + a**2)


def test_no_bound_in_terms_of_uniform() -> None:
    gradient_md = np.array([[1.0], [2.01], [3.0]])
    zeta_m = np.abs(gradient_md - gradient_md.mean())[:, 0]
    uniform, delta = variance(gradient_md, np.full(3, 1 / 3)), variance(gradient_md, draw_probabilities(zeta_m))
    states(f"{uniform:.3f} under uniform and {delta:.1f} under DELTA")


def test_the_best_score_with_a_control() -> None:
    """Among many random p none beats p ~ norm(u_i - c), for c = 0 and c = ubar; and ubar makes it DELTA's zeta."""
    rng = np.random.default_rng(1)
    update_md = rng.normal(size=(5, 3)) + 1
    for control_d in (np.zeros(3), update_md.mean(axis=0)):
        residual_md = update_md - control_d
        best = variance(residual_md, draw_probabilities(np.linalg.norm(residual_md, axis=1)))
        others = [variance(residual_md, p_m) for p_m in rng.dirichlet(np.ones(5), size=500)]
        assert best <= min(others)
    oracle = KnownUpdates(update_md, np.full(5, 0.2))
    zeta_m = np.sqrt(oracle.reports().squared_deviation_n)
    np.testing.assert_allclose(zeta_m, np.linalg.norm(residual_md, axis=1), rtol=1e-5)


def test_the_toy_as_stated() -> None:
    for score in SCORES:
        cells = " | ".join(f"{enumerate_toy(score, way).mse:.3f}" for way in WAYS)
        assert any(line.startswith(f"| {score}") and line.endswith(f"| {cells} |") for line in TEXT.splitlines()), cells
    for pair, method in (((1, 2), "FedAvg"), ((2, 3), "FedIS"), ((1, 3), "DELTA")):
        x, y = hand_picked()[pair]
        states(f"({x:g}, {y:g}) for {method}")


def test_uniform_satisfies_the_bound_used_for_importance_sampling() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        gradient_md = rng.normal(size=(6, 2)) + rng.normal(size=2)
        bound = np.mean((gradient_md**2).sum(axis=1))
        norm_m = np.linalg.norm(gradient_md, axis=1)
        least = variance(gradient_md, draw_probabilities(norm_m))
        even = variance(gradient_md, np.full(6, 1 / 6))
        assert least <= even <= bound
        assert even == pytest.approx(bound - np.sum(gradient_md.mean(axis=0) ** 2))
        assert least == pytest.approx(np.mean(norm_m) ** 2 - np.sum(gradient_md.mean(axis=0) ** 2))
    assert FedIS().unbiased and Fixed().unbiased
