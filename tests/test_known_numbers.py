"""Numbers known in advance: of the DELTA paper's toy, of successive draws, and of what does not
hold as printed.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import Recorder, make_problem, mean_square
from deltafl import Delta, FedIS, Fixed, KnownUpdates, Plan, Population, Sampler, init_round
from deltafl.designs.inclusion import draw_probabilities
from deltafl.types import FloatArray

#: The toy: three clients of equal weight whose mean update is (4, 0).
TOY_MD = np.array([[2, 2], [4, 1], [6, -3]], dtype=np.float32)
THIRDS = Population.from_sizes([1, 1, 1])
TOY = make_problem([1, 1, 1])._replace(
    update_md=TOY_MD, oracle=KnownUpdates(TOY_MD, THIRDS.weight_m)
)

#: Hansen-Hurwitz with replacement; Horvitz-Thompson, where pi leaves one design; 1 / (n m p),
#: Hajek, plain mean.
COLUMNS = [
    ("multinomial", "hansen-hurwitz"),
    ("systematic", "horvitz-thompson"),
    ("pivotal", "horvitz-thompson"),
    ("successive", "horvitz-thompson"),
    ("successive", "hajek"),
    ("successive", "plain-mean"),
]
MEAN_SQUARES = {
    "uniform": [3.667, 1.833, 1.833, 1.833, 1.833, 1.833],
    "is": [2.366, 0.435, 0.435, 1.088, 1.399, 1.636],
    "delta": [5.344, 3.264, 3.264, 3.715, 0.370, 1.029],
}


def toy_sampler(name: str, design: str) -> Sampler:
    samplers: dict[str, Sampler] = {
        "uniform": Fixed(design),
        "is": FedIS(design),
        "delta": Delta(design),
    }
    return samplers[name]


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("name", MEAN_SQUARES)
def test_mean_squared_errors_of_the_toy(name: str, column: int) -> None:
    design, estimator = COLUMNS[column]
    plan = Plan(THIRDS, toy_sampler(name, design), 2, estimator, (Recorder(),))
    error = mean_square(plan, init_round(plan, np.zeros(2)), TOY)
    assert error == pytest.approx(MEAN_SQUARES[name][column], abs=6e-4)


def one_round_variance(
    p_m: FloatArray, norm2_m: FloatArray, weight_m: FloatArray, ubar2: float, n: int
) -> float:
    """Var D = (1/n) (sum_i w_i^2 norm(u_i)^2 / p_i - norm(ubar)^2), n draws with replacement and
    weights w / p.
    """
    return float((np.sum(weight_m**2 * norm2_m / p_m) - ubar2) / n)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 4), st.booleans())
def test_when_delta_is_worse_than_uniform(seed: int, shift: float, enumerate_too: bool) -> None:
    """Equal weights, with replacement: exactly when Cov_i(norm(u_i)^2 / zeta_i, zeta_i) < 0.
    Never better than IS.
    """
    m = 4
    n = 2
    problem = make_problem([1] * m, d=2, seed=seed, shift=shift)
    reports = problem.oracle.reports()
    norm2_m = reports.squared_norm_n
    zeta_m = np.sqrt(reports.squared_deviation_n)
    assume(zeta_m.min() > 1e-2 and norm2_m.min() > 1e-4)
    weight_m = problem.population.weight_m
    ubar2 = float(problem.ubar_d @ problem.ubar_d)
    variance = {
        name: one_round_variance(draw_probabilities(score_m), norm2_m, weight_m, ubar2, n)
        for name, score_m in (("uniform", np.ones(m)), ("is", np.sqrt(norm2_m)), ("delta", zeta_m))
    }
    covariance = np.mean(norm2_m) - np.mean(norm2_m / zeta_m) * np.mean(zeta_m)
    assert variance["delta"] - variance["uniform"] == pytest.approx(
        -covariance / n, abs=1e-9 * norm2_m.max()
    )
    assert variance["is"] <= variance["delta"] * (1 + 1e-12)
    if enumerate_too:  # the formula against every cohort of the real code
        samplers: dict[str, Sampler] = {
            "uniform": Fixed("multinomial"),
            "is": FedIS("multinomial"),
            "delta": Delta("multinomial", alpha=(1.0, 0.0)),
        }
        for name, sampler in samplers.items():
            plan = Plan(problem.population, sampler, n, "hansen-hurwitz", (Recorder(),))
            error = mean_square(plan, init_round(plan, np.zeros(2)), problem)
            assert error == pytest.approx(variance[name], rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_importance_sampling_is_optimal_under_its_own_weights(seed: int) -> None:
    """Unequal weights, with replacement: no score beats w_i norm(u_i) when replies count w / p."""
    problem = make_problem([10, 15, 20, 25, 30], seed=seed)
    samplers: list[Sampler] = [
        FedIS("multinomial"),
        Delta("multinomial"),
        Fixed("multinomial", by_weight=True),
        FedIS("multinomial", 0.3),
    ]
    plans = [
        Plan(problem.population, sampler, 2, "hansen-hurwitz", (Recorder(),))
        for sampler in samplers
    ]
    errors = [mean_square(plan, init_round(plan, np.zeros(3)), problem) for plan in plans]
    assert errors[0] <= min(errors) * (1 + 1e-6)
    assert errors[0] < errors[2]
