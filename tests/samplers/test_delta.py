"""What is said of DELTA's scores: where they can be better than importance sampling, what they
miss, their options.
"""

import numpy as np
import pytest

from deltafl import (
    Accumulator,
    Cohort,
    KnownUpdates,
    Population,
    RunFacts,
    Sgd,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.audit.methods import EstimateError, estimate_error
from deltafl.types import FloatArray
from tools.samplers import mean_counts


def enumerated(label: str, update_md: FloatArray, n: int) -> EstimateError:
    """Bias and error of one round over all cohorts, for clients of equal weight without local
    noise.
    """
    plan = make_plan(label, Population.from_sizes([1] * len(update_md)), n)
    known = KnownUpdates(update_md, plan.population.weight_m)
    error = estimate_error(
        plan, init_round(plan, np.zeros(update_md.shape[1])), known, known.update_md, draws=1
    )
    assert error.exact
    return error


@pytest.mark.parametrize(
    ("design", "low", "high"),
    [("multinomial", 0, 0), ("poisson", 0, 0), ("systematic", 0.05, 0.25)],
)
def test_delta_is_never_better_than_importance_sampling_where_draws_are_independent(
    design: str, low: float, high: float
) -> None:
    """For draws of fixed size the sentence is false: it is better in some problems of five
    clients.
    """
    rng = np.random.default_rng(0)
    better = []
    for _ in range(30 if design == "systematic" else 15):
        update_md = rng.normal(size=(5, 2)) * rng.lognormal(0, 0.7, size=(5, 1)) + 0.3
        ours, best = (
            enumerated(f"{name}@{design}", update_md, 2).mse for name in ("delta", "fedis")
        )
        better.append(ours < best * (1 - 1e-9))
    assert low <= np.mean(better) <= high


def test_a_problem_where_delta_is_better() -> None:
    update_md = np.array([[1.0], [1.0], [-1.0]])
    found = [
        enumerated(name, update_md, 2).mse / 9 for name in ("fedis", "delta")
    ]  # errors are relative to ubar^2
    assert found == pytest.approx([2 / 9, 0], abs=1e-12)


def test_a_client_at_the_mean_is_missed_unless_there_is_a_floor() -> None:
    update_md = np.array([[1.0], [2.0], [3.0]])
    assert 2 * (1 - enumerated("delta", update_md, 2).bias) == pytest.approx(4 / 3)
    assert enumerated("delta(floor=0.1)", update_md, 2).bias < 1e-12


@pytest.mark.parametrize("steps", [1, 50])
def test_alpha_of_the_theory_is_for_updates_of_many_steps(steps: int) -> None:
    """p of corollary 3.7 from zeta and sigma of gradients, and from updates of K constant
    gradients: the same.
    """
    rounds = 500
    n = 2
    m = 4
    lr = 0.01
    gradient_m = np.array([1.0, 2.0, 4.0, 9.0])
    noise_m = np.array([0.5, 1.0, 2.0, 4.0])
    a1 = 20 * steps / rounds**0.5
    a2 = 5 / rounds**0.5 + (steps / n) ** 0.5
    score_m = np.sqrt(a1 * (gradient_m - gradient_m.mean()) ** 2 + a2 * noise_m)
    sampler = make_sampler("delta(alpha=theory)@multinomial", RunFacts(rounds, steps, n=n, m=m))
    population = Population.from_sizes([1] * m)
    known = KnownUpdates(-lr * steps * gradient_m[:, None], population.weight_m, lr**2 * noise_m)
    found_m = mean_counts(sampler, sampler.init(population), n, m, known) / n
    np.testing.assert_allclose(found_m, score_m / score_m.sum(), rtol=1e-5)


def drifting_error(label: str, seed: int) -> float:
    """Mean squared distance to the moving minimum of quadratics whose clients differ in size,
    after 30 rounds.
    """
    rng = np.random.default_rng(seed)
    m = 50
    rounds = 100
    population = Population.from_sizes(np.ceil(rng.lognormal(3, 1.2, size=m)).astype(int))
    centre_md = rng.normal(size=(m, 5)) * rng.lognormal(0, 0.5, size=(m, 1))
    plan = make_plan(label, population, 5, seed=seed, server_optimizer=Sgd(1.0))
    state = init_round(plan, np.full(5, 5.0))
    errors = []
    for _ in range(rounds):
        centre_md += 0.05 * rng.normal(size=(m, 5))
        errors.append(np.sum((state.params_d - population.weight_m @ centre_md) ** 2))
        cohort = open_round(plan, state)
        state, _ = close_round(
            plan, state, cohort, 0.1 * (centre_md[cohort.client_n] - state.params_d)
        )
    return float(np.mean(errors[30:]))


@pytest.mark.parametrize(
    ("name", "options"), [("fedpracis", ""), ("pracdelta", "alpha=(1.0,0.0),")]
)
def test_weights_in_the_scores_save_most_of_the_error_where_sizes_differ(
    name: str, options: str
) -> None:
    plain, weighted = (
        np.mean([drifting_error(f"{name}({options}weighted={use})", seed) for seed in range(4)])
        for use in ("false", "true")
    )
    assert 0.1 < weighted / plain < 0.5


def test_the_practical_rule_with_weights_by_hand() -> None:
    """p = w = (.1, .2, .3, .4); S = {0, 2} with R = (6, 1) re-divides .4 by w R = (.6, .3)."""
    plan = make_plan("fedpracis(weighted=true)", Population.from_sizes([1, 2, 3, 4]), 2)
    cohort = Cohort(np.array([0, 2]), np.ones(2, dtype=np.int64), np.full(2, 0.5), "fixed-size")
    state, _ = close_round(plan, init_round(plan, np.zeros(1)), cohort, np.array([[6.0], [1.0]]))
    np.testing.assert_allclose(state.sampler.p_m, [0.4 * 2 / 3, 0.2, 0.4 / 3, 0.4])


@pytest.mark.parametrize(("label", "zeta"), [("", [1, 1]), ("(counts_draws=true)", [0.5, 1.5])])
def test_the_mean_of_zeta_is_over_clients_or_over_draws(label: str, zeta: list[float]) -> None:
    """Client 0 is drawn three times: updates 0 and 2 have mean 1 over clients, 0.5 over draws."""
    plan = make_plan(f"pracdelta{label}@multinomial", Population.from_sizes([1, 1]), 2)
    cohort = Cohort(np.array([0, 1]), np.array([3, 1]), np.ones(2), "replacement")
    round = Accumulator(plan, init_round(plan, np.zeros(1)), cohort)
    round.add_rows(np.array([[0.0], [2.0]]))
    round.close()
    assert np.sqrt(round.reports.squared_deviation_n) == pytest.approx(zeta)
