"""The numbers that docs/theory.md and docs/theory-table-1.md state, computed here and looked up there."""

import re
from pathlib import Path

import numpy as np
import pytest

from deltafl import Cohort, FedPracIS, KnownUpdates, Population, Reports
from deltafl.designs.exact import support
from deltafl.designs.inclusion import draw_probabilities, inclusion_probabilities
from deltafl.types import FloatArray
from reproduction.rates import counter_example
from reproduction.toy import SCORES, WAYS, enumerate_toy, hand_picked
from tools.samplers import joint_expectations

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "theory.md").read_text()
TABLE = (DOCS / "theory-table-1.md").read_text()


def states(*parts: str, text: str = TEXT) -> None:
    """The page says each of these; a number may follow a line break."""
    flat = " ".join(text.split())
    for part in parts:
        assert part in flat, f"the page does not say {part!r}"


def variance(gradient_md: FloatArray, p_m: FloatArray, n: int = 1) -> float:
    """One-round variance of the mean's Hansen-Hurwitz estimate, equal weights."""
    m = len(gradient_md)
    square_m = (gradient_md**2).sum(axis=1)
    return float((np.sum(square_m / p_m) / m**2 - np.sum(gradient_md.mean(axis=0) ** 2)) / n)


def test_a_client_at_the_mean_is_never_selected() -> None:
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
        f"$p = ({', '.join(f'{p:g}' for p in np.asarray(state.p_m))})$", f"$({', '.join(f'{p:.4f}' for p in ideal_m)})$"
    )


@pytest.mark.parametrize("label", ["delta@multinomial", "delta", "uniform"])
def test_theorem_2_fails(label: str) -> None:
    local_lr, least, bound = counter_example(label, 1000)
    assert least == 1
    assert local_lr == 2**-10 < 1 / (4 * np.sqrt(10))
    assert counter_example("fedis", 2)[1] == 0
    states(f"the claim is {bound:.4f}", "$T = 1000$ and $\\eta_L = 2^{-10}$", "is at the minimum after one round")


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


# --- the appendix, the remarks, and table 1


def test_the_surrogates_gradient_never_vanishes() -> None:
    """E of norm(grad of the surrogate)^2 for the two clients (x -+ 1)^2 / 2, n = 1, the first drawn with p."""
    for x in np.linspace(-3, 3, 25):
        for p in (0.05, 0.3, 0.5, 0.8):
            square = p * ((x - 1) / (2 * p)) ** 2 + (1 - p) * ((x + 1) / (2 * (1 - p))) ** 2
            assert square == pytest.approx(x**2 + 1) if p == 0.5 else square >= 1 - 1e-12
    rounds, c, m = 10**6, 0.25, 2
    local_lr = 1 / np.sqrt(rounds)
    heterogeneity = 5 * local_lr**2 / (2 * m**2) * sum(4 * 1 / 0.5 for _ in range(m))
    assert heterogeneity == pytest.approx(10 / rounds)
    states(f"for $T = 10^6$ and $\\tilde c = 1/4$: 1 against {heterogeneity / c:.2e}")


def test_the_surrogate_is_less_smooth() -> None:
    gradient_md = np.array([[2.0, 2.0], [4.0, 1.0], [6.0, -3.0]])
    p_m = draw_probabilities(np.linalg.norm(gradient_md - gradient_md.mean(axis=0), axis=1))
    weight = 1 / (3 * p_m[1])
    assert weight / 2 > 1 / 2  # F_2 = x^2 / 2 from 0 to 1: the step's end against L / 2 with L = 1
    states(f"$p_2 = {p_m[1]:.4f}$".replace("0.", "."), f"${weight:.3f} L$")


def test_noise_of_a_client_drawn_twice() -> None:
    """It trains once however often it is drawn, which the proof forgets; all draws with replacement enumerated."""
    for p_m, variance_m in ((np.array([0.2, 0.5, 0.3]), np.array([1.0, 4.0, 2.0])), (np.ones(1), np.ones(1))):
        n, m, truth = 2, len(p_m), 0.0
        for count_m, probability in support("multinomial", n * p_m).items():
            truth += probability * float(np.sum((np.array(count_m) / (n * m * p_m)) ** 2 * variance_m))
        proof = float(np.sum(variance_m / p_m)) / (n * m**2)
        assert truth == pytest.approx(proof + (1 - 1 / n) * np.sum(variance_m) / m**2)
    states(f"$K = \\sigma = 1$ it says {proof:g} for {truth:g}")


def test_no_learning_rate_satisfies_the_condition_for_all_p() -> None:
    for delta in (0.01, 0.001):
        gradient_m = np.array([1, 2 + delta, 3])
        p_m = draw_probabilities(np.abs(gradient_m - gradient_m.mean()))
        states(f"{np.sum(1 / p_m) / 9:.1f}{'$' if delta == 0.01 else ''} for $\\delta = {delta}$")


def test_importance_sampling_without_replacement_is_not_the_minimum() -> None:
    gradient_m = np.array([1.0, 1.0, -1.0])

    def exact(expected_m: FloatArray) -> float:
        estimates, chances = [], []
        for count_m, probability in support("systematic", expected_m).items():
            estimates.append(np.sum(np.array(count_m) * gradient_m / (3 * expected_m)))
            chances.append(probability)
        assert np.dot(chances, estimates) == pytest.approx(gradient_m.mean())
        return float(np.dot(chances, np.square(estimates)) - gradient_m.mean() ** 2)

    importance_m = inclusion_probabilities(np.abs(gradient_m), 2)
    better_m = np.array([0.5, 0.5, 1.0])
    np.testing.assert_allclose(importance_m, 2 / 3)
    assert exact(better_m) == pytest.approx(0, abs=1e-12)
    assert joint_expectations("systematic", better_m)[0, 1] == 0
    states(f"has variance {exact(importance_m):.3f}")
    formula = [variance(gradient_m[:, None], pi_m / 2, n=2) for pi_m in (importance_m, better_m)]
    assert formula[0] < formula[1]
    states(f"gives {formula[0]:.3f} and {formula[1]:.3f}")


def test_the_drift_lemma_is_tighter_in_the_mean_only() -> None:
    """Constants at sigma_G^2 and norm(grad f)^2; theirs are 6 and 30."""
    for a in np.geomspace(0.01, 100, 200):
        first, second = 4 * (1 + 1 / a), 20 * (1 + a)
        assert not (first <= 6 and second <= 30)
        gradient = 1 / a  # norm(grad f) for sigma_G = 1: the worst case, so the constants cannot be less
        assert (gradient + 1) ** 2 == pytest.approx((1 + a) * gradient**2 + 1 + 1 / a)
    states("with 4 and 20 for 6 and 30")


def test_stochastic_gradients_of_some_clients_need_many_rounds() -> None:
    """E x_T^2 = sum of squared weights of T + 1 signs, at least 1 / (T + 1), and steps 1 / (t + 2) reach it."""
    rounds = 50
    weight = np.zeros(rounds + 1)
    weight[0] = 1
    for t in range(rounds):
        step = 1 / (t + 2)
        weight *= 1 - step
        weight[t + 1] += step
    assert np.sum(weight**2) == pytest.approx(1 / (rounds + 1))
    accuracy = 0.001
    states(f"$\\epsilon = {accuracy}$ takes at least {1 / (2 * accuracy) - 1:.0f} rounds", text=TABLE)


def test_rounds_that_follow_from_a_rate() -> None:
    f_above, s, smoothness, k, n, rounds = 0.7, 3.0, 2.0, 4, 5, 900

    def bound(a: float) -> float:
        return f_above / (a * k * rounds) + a * smoothness * s / (2 * n)

    best = np.sqrt(2 * f_above * n / (smoothness * s * k * rounds))
    assert bound(best) <= min(bound(best * factor) for factor in np.geomspace(0.1, 10, 51)) + 1e-15
    epsilon = bound(best)
    assert rounds == pytest.approx(2 * smoothness * f_above * s / (n * k * epsilon**2))
    states("$T = 2 L F s / (n K \\epsilon^2)$", "twice the noise takes four times the rounds", text=TABLE)


def test_the_table_is_whole_and_every_statement_has_a_section() -> None:
    rows = [line for line in TABLE.splitlines() if re.match(r"\| .*\| (yes|no|mixed) \|", line)]
    assert len(rows) == 14
    states("14 rates")
    sections = set(re.findall(r"^## (\d+)\.", TEXT, re.MULTILINE))
    index = TEXT[TEXT.index("## Every numbered") : TEXT.index("## 1. Notation")]
    for line in index.splitlines():
        if re.match(r"\| (theorem|lemma|corollar|remark|proposition)", line):
            assert set(re.findall(r"\d+", line.split("|")[-2])) <= sections
    assert set(re.findall(r"section (\d+)", TABLE)) <= sections
