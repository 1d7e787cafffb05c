"""The numbers that the pages of docs/why/theory state, computed here and looked up there."""

import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from conftest import all_cohorts
from deltafl import (
    Census,
    Cohort,
    FedPracIS,
    KnownUpdates,
    Population,
    Reports,
    init_round,
    make_plan,
    open_round,
)
from deltafl.designs.exact import support
from deltafl.designs.inclusion import draw_probabilities, inclusion_probabilities, with_floor
from deltafl.designs.table import draw_cohort
from deltafl.estimators.two_bits import KEPT, decode, encode
from deltafl.types import FloatArray
from reproduction.rates import counter_example
from reproduction.toy import SCORES, WAYS, enumerate_toy, hand_picked
from tools.samplers import joint_expectations

PAGES = Path(__file__).parent.parent / "docs" / "why" / "theory"
TEXT = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))


def states(*parts: str) -> None:
    """A page says each of these; a number may follow a line break."""
    flat = " ".join(TEXT.split())
    for part in parts:
        assert part in flat, f"no page says {part!r}"


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
    pi_m = sum(
        probability * np.array(count)
        for count, probability in support("successive", 2 * p_m).items()
    )
    states(
        ", ".join(f"{pi:.4f}".lstrip("0") for pi in np.asarray(pi_m)),
        f"$n p_1 = {2 * p_m[0]:g}$".replace("0.", "."),
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
    left = (1 + lr) ** 2 + 1
    right = 2 + lr**2
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
    sampler = FedPracIS(floor=0.0)
    population = Population.from_sizes([1] * 4)
    state = sampler.init(population)
    for clients, norms in (([0, 1], [1.0, 3.0]), ([2, 3], [10.0, 30.0])):
        ids = np.array(clients)
        cohort = Cohort(ids, np.ones(2, dtype=np.int64), np.full(2, 0.5))
        reports = Reports.make(2)._replace(squared_norm_n=np.square(norms))
        state = sampler.update(state, cohort, reports)
    ideal_m = np.array([1, 3, 10, 30]) / 44
    states(
        f"$p = ({', '.join(f'{p:g}' for p in np.asarray(state.p_m))})$",
        f"$({', '.join(f'{p:.4f}' for p in ideal_m)})$",
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", ["delta@multinomial", "delta", "uniform"])
def test_theorem_2_fails(label: str) -> None:
    local_lr, least, bound = counter_example(label, 1000)
    assert least == 1
    assert local_lr == 2**-10 < 1 / (4 * np.sqrt(10))
    assert counter_example("fedis", 2)[1] == 0
    states(
        f"the claim is {bound:.4f}",
        "$T = 1000$ and $\\eta_L = 2^{-10}$",
        "is at the minimum after one round",
    )


def test_theorem_2_fails_at_the_papers_own_rates() -> None:
    rounds = 10**6
    c = 0.25
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
    """Among many random p none beats p ~ norm(u_i - c), for c = 0 and c = ubar; and ubar makes
    it DELTA's zeta.
    """
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
    rows = re.findall(r"^\| .* \| ([\d.]{5} \| [\d.]{5} \| [\d.]{5}) \|$", TEXT, re.MULTILINE)
    assert rows == [
        " | ".join(f"{enumerate_toy(score, way).mse:.3f}" for score in SCORES) for way in WAYS
    ]
    for pair, method in (((1, 2), "FedAvg"), ((2, 3), "FedIS"), ((1, 3), "DELTA")):
        x, y = hand_picked()[pair]
        states(f"({x:g}, {y:g}) for {method}")


# --- the appendix, the remarks, and table 1


def test_the_surrogates_gradient_never_vanishes() -> None:
    """E of norm(grad of the surrogate)^2 for the two clients (x -+ 1)^2 / 2, n = 1, the first
    drawn with p.
    """
    for x in np.linspace(-3, 3, 25):
        for p in (0.05, 0.3, 0.5, 0.8):
            square = p * ((x - 1) / (2 * p)) ** 2 + (1 - p) * ((x + 1) / (2 * (1 - p))) ** 2
            assert square == pytest.approx(x**2 + 1) if p == 0.5 else square >= 1 - 1e-12
    rounds = 10**6
    c = 0.25
    m = 2
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
    """It trains once however often it is drawn, which the proof forgets; all draws with
    replacement enumerated.
    """
    for p_m, variance_m in (
        (np.array([0.2, 0.5, 0.3]), np.array([1.0, 4.0, 2.0])),
        (np.ones(1), np.ones(1)),
    ):
        n = 2
        m = len(p_m)
        truth = 0.0
        for count_m, probability in support("multinomial", n * p_m).items():
            truth += probability * float(
                np.sum((np.array(count_m) / (n * m * p_m)) ** 2 * variance_m)
            )
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
        estimates = []
        chances = []
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
        first = 4 * (1 + 1 / a)
        second = 20 * (1 + a)
        assert not (first <= 6 and second <= 30)
        gradient = (
            1 / a
        )  # norm(grad f) for sigma_G = 1: the worst case, so the constants cannot be less
        assert (gradient + 1) ** 2 == pytest.approx((1 + a) * gradient**2 + 1 + 1 / a)
    states("with 4 and 20 for 6 and 30")


def test_stochastic_gradients_of_some_clients_need_many_rounds() -> None:
    """E x_T^2 = sum of squared weights of T + 1 signs, at least 1 / (T + 1), and steps 1 / (t +
    2) reach it.
    """
    rounds = 50
    weight = np.zeros(rounds + 1)
    weight[0] = 1
    for t in range(rounds):
        step = 1 / (t + 2)
        weight *= 1 - step
        weight[t + 1] += step
    assert np.sum(weight**2) == pytest.approx(1 / (rounds + 1))
    accuracy = 0.001
    states(f"$\\epsilon = {accuracy}$ takes at least {1 / (2 * accuracy) - 1:.0f} rounds")


def test_rounds_that_follow_from_a_rate() -> None:
    f_above = 0.7
    s = 3.0
    smoothness = 2.0
    k = 4
    n = 5
    rounds = 900

    def bound(a: float) -> float:
        return f_above / (a * k * rounds) + a * smoothness * s / (2 * n)

    best = np.sqrt(2 * f_above * n / (smoothness * s * k * rounds))
    assert bound(best) <= min(bound(best * factor) for factor in np.geomspace(0.1, 10, 51)) + 1e-15
    epsilon = bound(best)
    assert rounds == pytest.approx(2 * smoothness * f_above * s / (n * k * epsilon**2))
    states("$T = 2 L F s / (n K \\epsilon^2)$", "twice the noise takes four times the rounds")


# --- the census, twins, fixed order


def drawn_error(
    update_md: FloatArray, weight_m: FloatArray, score_m: FloatArray, n: int, value_mq: FloatArray
) -> float:
    """Mean of norm(D - ubar)^2 over 300 cohorts of the cube, no control."""
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(300):
        cohort = draw_cohort(score_m, n, "cube", rng, None, value_mq)
        coef_n = weight_m[cohort.client_n] / cohort.expected_n
        total += float(np.sum((coef_n @ update_md[cohort.client_n] - weight_m @ update_md) ** 2))
    return total / 300


@pytest.mark.thorough
def test_what_balance_leaves() -> None:
    """Deville and Tille's formula against the cube; Neyman's gain; what a landing costs while B
    is not known.
    """
    rng = np.random.default_rng(0)
    m = 60
    n = 20
    q = 3
    weight_m = rng.dirichlet(np.full(m, 8.0))
    aux_mq = rng.normal(size=(m, q))
    aux_mq -= weight_m @ aux_mq
    noise_md = rng.normal(size=(m, 5)) * rng.lognormal(0, 0.7, size=(m, 1)) / 2
    slope_qd = rng.normal(size=(q, 5))
    update_md = aux_mq @ slope_qd + noise_md + 1
    norm_m = np.linalg.norm(noise_md, axis=1)

    def left(pi_m: FloatArray, known_mq: FloatArray) -> float:
        g_m = weight_m**2 * (1 - pi_m) / pi_m
        x_mq = np.sqrt(g_m)[:, None] * np.column_stack([known_mq, pi_m / weight_m])
        y_md = np.sqrt(g_m)[:, None] * update_md
        return (
            float(np.sum((y_md - x_mq @ np.linalg.lstsq(x_mq, y_md, rcond=None)[0]) ** 2))
            * m
            / (m - q - 1)
        )

    damped_m = with_floor(weight_m * np.sqrt(0.5 * norm_m**2 + 0.5 * np.mean(norm_m**2)), 0.2)
    found = {}
    for name, score_m in (
        ("weight", weight_m),
        ("neyman", weight_m * norm_m),
        ("census", damped_m),
    ):
        value_mq = weight_m[:, None] * aux_mq
        pi_m = inclusion_probabilities(score_m, n)
        found[name] = [
            drawn_error(y_md, weight_m, score_m, n, value_mq) for y_md in (update_md, noise_md)
        ]
        assert left(pi_m, aux_mq) < found[name][0]  # which the landing makes larger
        if (
            name == "weight"
        ):  # clients' residuals are about 0 in the mean, as when B and b are known
            assert found[name][1] == pytest.approx(left(pi_m, aux_mq), rel=0.15)
    ratios = {name: np.divide(both, found["weight"]) for name, both in found.items()}
    assert 3 < ratios["neyman"][0] < 6 and 0.9 < ratios["census"][0] < 1.3
    np.testing.assert_allclose([ratios["neyman"][1], ratios["census"][1]], [0.56, 0.75], atol=0.05)
    states("have about 4 times the error", "0.56 of it", "it is 1.1 and 0.75")

    even_m = np.full(m, 1 / m)
    n = 5  # nobody is capped
    sums = [
        np.sum(even_m**2 * (1 - pi_m) / pi_m * norm_m**2)
        for pi_m in (
            inclusion_probabilities(even_m, n),
            inclusion_probabilities(even_m * norm_m, n),
        )
    ]
    assert sums[0] - sums[1] == pytest.approx((even_m @ norm_m**2 - (even_m @ norm_m) ** 2) / n)

    pi_m = inclusion_probabilities(weight_m, n)
    g_m = weight_m**2 * (1 - pi_m) / pi_m
    lied_mq = aux_mq.copy()
    shift_q = np.array([3.0, -1.0, 2.0])
    lied_mq[7] += shift_q  # at the honest B the residuals are those of noise_md
    grown = np.sum(g_m * norm_m**2) + g_m[7] * (
        np.sum((noise_md[7] - shift_q @ slope_qd) ** 2) - norm_m[7] ** 2
    )
    assert left(pi_m, aux_mq) < left(pi_m, lied_mq) < grown * m / (m - q - 1)


def test_what_a_first_update_leaves() -> None:
    """The loss of the code, by which the first round errs (``test_two_phase.py``), and of the
    best gamma later.
    """
    rng = np.random.default_rng(0)
    m = 100
    d = 5120
    update_md = rng.normal(size=(m, d)) + 1.0
    g_m = rng.uniform(0.5, 2.0, size=m) / m**2
    code_mc = np.array([encode(update_d) for update_d in update_md])
    ratio = (
        g_m
        @ ((update_md - decode(code_mc, d)) ** 2).sum(axis=1)
        / (g_m @ (update_md**2).sum(axis=1))
    )
    assert ratio == pytest.approx(0.1175, abs=0.0015) == pytest.approx(1 - KEPT, abs=0.0015)
    odds = (1 - KEPT) / KEPT
    states(
        "lose 0.1175 of its square",
        f"{odds / m:.4f} of a client's squared norm",
        f"an error of {odds:.3f} of its square",
    )
    rest_md = rng.normal(size=(m, 50))
    first_md = 0.6 * rest_md + rng.normal(size=(m, 50))
    cross = g_m @ (rest_md * first_md).sum(axis=1)
    square = g_m @ (first_md**2).sum(axis=1)
    whole = g_m @ (rest_md**2).sum(axis=1)
    left = g_m @ ((rest_md - cross / square * first_md) ** 2).sum(axis=1)
    assert left == pytest.approx((1 - cross**2 / (whole * square)) * whole)


def kept(part: float, sigma: float, k: int, m: float) -> float:
    """Rho, the share of a component's variance that noise leaves."""
    return max(0.0, (part**2 - k / m * sigma**4) / (part * (part + sigma**2)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("part", "sigma", "k", "m"), [(0.5, 0.5, 32, 400), (0.5, 0.3, 128, 200), (0.3, 0.5, 32, 600)]
)
def test_what_noise_leaves_of_a_component(part: float, sigma: float, k: int, m: int) -> None:
    """Two kinds of clients, through the census itself; and far below the threshold nothing is
    left.
    """
    kind_m = np.resize([1.0, -1.0], m)
    direction_md = np.column_stack([np.sqrt(part) * kind_m, np.full(m, np.sqrt(1 - part))])

    def found(census: Census, seed: int) -> float:
        rng = np.random.default_rng(seed)
        answers = np.array([census.answer(row_d, seed=3, rng=rng) for row_d in direction_md])
        return float(
            np.corrcoef(census.auxiliary(answers, np.full(m, 1 / m))[:, 0], kind_m)[0, 1] ** 2
        )

    share = np.mean([found(Census(components=1, size=k, noise=sigma), seed) for seed in range(20)])
    assert share == pytest.approx(kept(part, sigma, k, m), abs=0.035)
    assert found(Census(components=1, size=k, noise=4.0), 0) < 0.1


def test_the_table_of_noise() -> None:
    """And epsilon against the integral of max(0, p - exp(epsilon) q) over two normal densities 2
    apart.
    """
    for sigma in (0.1, 0.25, 0.5, 1, 2):
        epsilon = Census(noise=sigma).epsilon(1e-5)
        shares = [f"{kept(part, sigma, 128, 100):.2f}" for part in (0.5, 0.1)]
        states(f" {sigma:g} {epsilon:.1f} ", f"| {sigma:g} | {' | '.join(shares)} |")
        x, step = np.linspace(-12 * sigma, 12 * sigma, 2_000_001, retstep=True)
        log_p = -((x / sigma) ** 2) / 2
        log_q = -(((x - 2) / sigma) ** 2) / 2
        excess = np.exp(log_p) * np.maximum(0, -np.expm1(np.minimum(0, epsilon + log_q - log_p)))
        assert excess.sum() * step / (sigma * np.sqrt(2 * np.pi)) == pytest.approx(1e-5, rel=1e-3)


def test_liars_all_together() -> None:
    update_m = np.array([1.0, 1.0, -1.0, -1.0])
    errors = []
    for aux in ([[0, 1], [0, -1], [1, 0], [-1, 0]], [[0.0]] * 4):
        plan = make_plan("balanced", Population.from_sizes([1] * 4, aux=aux), 2)
        cohorts = all_cohorts(plan, init_round(plan, np.zeros(1)), None)
        errors.append(
            sum(chance * update_m[cohort.client_n].mean() ** 2 for chance, cohort in cohorts)
        )
    assert (
        errors[0]
        == pytest.approx(2 * variance(update_m[:, None], np.full(4, 0.25), n=2))
        == pytest.approx(1)
    )
    states(f"with error 1; uniform draws have {errors[1]:.3f}")
    plan = make_plan("census", [1] * 30, 5)
    answers = np.column_stack([np.random.default_rng(3).normal(size=(30, 128)), np.ones(30)])
    answers[4, -1] = 1e99  # a false norm
    plan = plan.with_census(answers)
    pi_m = np.ones(30)
    for seed in range(40):
        cohort = open_round(replace(plan, seed=seed), init_round(plan, np.zeros(1)))
        pi_m[cohort.client_n] = cohort.expected_n
    assert pi_m[4] > 3 * 5 / 30 > 5 / 30 > pi_m.min() >= 4 / 29
    # The bound, for any draw of fixed size: here of some cohorts at random, with the pi that
    # follow.
    rng = np.random.default_rng(2)
    for _ in range(20):
        drawn_cm = np.array([rng.permutation([1] * 3 + [0] * 4) for _ in range(9)])
        chance_c = rng.dirichlet(np.ones(9))
        y_md = rng.normal(size=(7, 2))
        pi_m = chance_c @ drawn_cm
        y_md, pi_m, drawn_cm = y_md[pi_m > 0], pi_m[pi_m > 0], drawn_cm[:, pi_m > 0]
        error = chance_c @ np.sum(
            (drawn_cm @ (y_md / pi_m[:, None]) - y_md.sum(axis=0)) ** 2, axis=1
        )
        with_replacement = (
            np.sum(y_md**2 / (pi_m / 3)[:, None]) - np.sum(y_md.sum(axis=0) ** 2)
        ) / 3
        assert error <= 3 * with_replacement * (1 + 1e-12)


def test_directions_tell_more_than_labels() -> None:
    """Two styles of writing two classes, and two clients whose updates are ten times as long."""
    share_m = np.repeat([0.8, 0.8, -0.8, -0.8], 12)
    style_m = np.repeat([1, -1, 1, -1], 12)
    one_step = np.column_stack([np.ones(48), share_m * style_m, share_m])
    for t, s, step_d in zip(
        share_m, style_m, one_step, strict=True
    ):  # gradient of logistic loss at 0, by examples
        inputs = np.array([[1.0, s, 1.0], [-1.0, s, 1.0]])
        y = np.array([1, -1])
        np.testing.assert_allclose(((1 + t * y) / 2 * y / 2) @ inputs, step_d / 2)
    update_md = np.zeros((50, 5))
    update_md[:48, :3] = one_step
    update_md[[48, 49], [3, 4]] = 10 * np.linalg.norm(one_step[0])
    weight_m = np.full(50, 1 / 50)
    census = Census(components=2)
    centred_md = update_md - update_md.mean(axis=0)
    update_m2 = (centred_md @ np.linalg.eigh(centred_md.T @ centred_md)[1])[:, ::-1][:, :2]
    uniform = float(update_md[:, :3].var(axis=0).sum()) * 50 / 49 * (1 - 10 / 50) / 10
    answer_mk = np.array([census.answer(update_d) for update_d in update_md])
    answers = census.auxiliary(answer_mk, weight_m)
    label_m1 = np.append(share_m, [0, 0])[:, None]
    seen = [
        drawn_error(update_md[:, :3], weight_m, weight_m, 10, value_mq) / uniform
        for value_mq in (label_m1, answers, update_m2)
    ]
    np.testing.assert_allclose(seen, [0.55, 0.07, 1.0], atol=0.08)
    states("0.55 balanced on shares, 0.07 on the census and 1.0 on components of updates")


def test_twins_of_each_client_and_of_each_class() -> None:
    share_m = np.arange(5) / 4

    def update(share: FloatArray | float, steps: int) -> FloatArray:
        """Gradient descent on share (x - 1)^2 / 2 + (1 - share) 3 (x + 1)^2 / 2 from 0, step by
        step.
        """
        x = np.zeros_like(share_m * share)
        for _ in range(steps):
            x = x - (share * (x - 1) + 3 * (1 - share) * (x + 1)) / 4
        return x

    for steps in (1, 10):
        own_m = update(share_m, steps)
        class_m = share_m * update(1.0, steps)[0] + (1 - share_m) * update(0.0, steps)[0]
        beta = own_m @ class_m / (class_m @ class_m)
        left = np.sum((own_m - beta * class_m) ** 2) / np.sum(own_m**2)
        assert left == pytest.approx(
            1 - (own_m @ class_m) ** 2 / np.sum(own_m**2) / np.sum(class_m**2), abs=1e-12
        )
        assert left <= min(
            np.sum((own_m - b * class_m) ** 2) for b in np.linspace(0, 2, 41)
        ) / np.sum(own_m**2)
        balanced = 1 - np.corrcoef(own_m, share_m)[0, 1] ** 2
        if steps == 1:
            np.testing.assert_allclose([left, balanced], 0, atol=1e-12)
    states(
        f"$u = {own_m[2]:.4f}$, its class twin ${class_m[2]:.4f}$",
        f"leave {left:.3f} of",
        f"shares {balanced:.3f}",
    )
    rng = np.random.default_rng(3)
    u_md = rng.normal(size=(4000, 5))
    c_md = u_md + 0.5 * rng.normal(size=(4000, 5))
    assert np.sum(u_md * c_md) / np.sum(c_md**2) == pytest.approx(1 / 1.25, abs=0.02)
    assert np.sum(u_md * c_md) ** 2 / np.sum(u_md**2) / np.sum(c_md**2) == pytest.approx(
        1 / 1.25, abs=0.02
    )


def test_where_a_fixed_order_settles() -> None:
    def settled(order: tuple[int, ...]) -> float:
        x = 0.0
        for _ in range(100):
            for b in order:
                x -= 0.1 * (x - b)
        return x

    every = np.mean([settled(order) for order in permutations(range(4))])
    assert every == pytest.approx(1.5)
    states(
        f"settles at {settled((0, 1, 2, 3)):.3f}",
        "the mean is 1.5",
        f"two steps it settles at {settled((0, 1)):.3f}",
    )


def test_what_an_average_of_models_leaves() -> None:
    """The double sum of weights and autocorrelations, and the lag behind a straight line."""
    beta = 0.5
    lags = np.arange(200)
    weight_k = (1 - beta) * beta**lags
    left = []
    for rho in (0.0, 0.5, 0.9):
        variance = weight_k @ rho ** np.abs(lags[:, None] - lags) @ weight_k
        assert variance == pytest.approx(
            (1 - beta) / (1 + beta) * (1 + beta * rho) / (1 - beta * rho), rel=1e-9
        )
        left.append(f"{variance:.3f}")
    assert weight_k @ lags == pytest.approx(beta / (1 - beta)) == 1
    states(f"a variance of {left[0]}", f"{left[1]} at $\\rho = 0.5$", f"{left[2]} at $\\rho = 0.9$")
