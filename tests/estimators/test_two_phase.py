"""First updates in two bits, and the control variate that is made of them: a slow twin,
enumeration, known losses.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Recorder, make_problem, mean_estimate, play
from deltafl import DeltaflError, Plan, close_round, init_round, make_plan, open_round, stream
from deltafl.estimators.learned_coefficient import ScaledState
from deltafl.estimators.regression import RegressionControl
from deltafl.estimators.two_bits import KEPT, code_length, decode, encode, norms, scaled
from deltafl.estimators.two_phase import (
    LastResiduals,
    LastResidualsState,
    TwoPhase,
    TwoPhaseState,
    residuals_summed_anew,
)
from deltafl.federation.clients import resize_state
from deltafl.server.clipping import RADIUS
from deltafl.server.optimizers import Sgd
from deltafl.types import FloatArray, IntArray, Population


def hadamard() -> FloatArray:
    """By definition: (-1)^(common bits of row and column), which is symmetric and orthogonal."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(256)] for i in range(256)]) / 16


def distance(x: float, level: float) -> float:
    return abs(x - level)


def slow_twin(vector_d: FloatArray) -> FloatArray:
    """What a server reads of a vector, block by block and number by number."""
    sign_k = stream(0, "code").choice([-1.0, 1.0], size=256)
    levels = [-1.5104, -0.4528, 0.4528, 1.5104]
    read = []
    for first in range(0, len(vector_d), 256):
        block_k = np.zeros(256)
        block_k[: len(vector_d[first : first + 256])] = vector_d[first : first + 256]
        turned_k = hadamard() @ (sign_k * block_k)
        scale = np.sqrt(np.mean(turned_k**2))
        nearest = [min(levels, key=partial(distance, x / scale)) for x in turned_k]
        read.append(sign_k * (hadamard() @ (scale * np.array(nearest))))
    return np.concatenate(read)[: len(vector_d)]


@pytest.mark.parametrize("d", [1, 3, 256, 700])
def test_a_code_is_read_as_the_slow_twin_reads_it(d: int) -> None:
    vector_nd = np.random.default_rng(d).normal(size=(3, d)) * np.geomspace(1e-3, 10, d)
    code_nc = np.array([encode(vector_d) for vector_d in vector_nd])
    assert code_nc.shape == (3, code_length(d)) and code_length(256) == 11
    np.testing.assert_allclose(
        decode(code_nc, d), [slow_twin(vector_d) for vector_d in vector_nd], atol=1e-12
    )
    half_nd = decode(scaled(code_nc, np.array([0.5, 1, 0])), d)
    np.testing.assert_allclose(half_nd, decode(code_nc, d) * [[0.5], [1], [0]])


def test_a_code_loses_what_two_bits_lose_of_a_normal() -> None:
    """0.1175 of the square (Max 1960), also with layers of other sizes; less of a vector that is
    mostly zeros.
    """
    rng = np.random.default_rng(0)
    sparse_d = np.where(rng.random(256_000) < 0.05, rng.normal(size=256_000), 0.0)
    for vector_d, loss in (
        (rng.normal(size=256_000), 0.1175),
        (sparse_d, 0.104),
        (rng.normal(size=256_000) * np.repeat([1e-6, 1e3], 128_000), 0.1175),
    ):
        read_d = decode(encode(vector_d)[None], 256_000)[0]
        assert np.sum((read_d - vector_d) ** 2) / np.sum(vector_d**2) == pytest.approx(
            loss, abs=0.003
        )
        assert norms(encode(vector_d)[None])[0] == pytest.approx(np.linalg.norm(vector_d))


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=22, max_size=22)
)
def test_any_finite_numbers_are_a_code(numbers: list[float]) -> None:
    code_1c = np.array([numbers])
    assert np.isfinite(decode(code_1c, 300)).all()
    assert np.linalg.norm(decode(code_1c, 512)) <= 1.5105 * norms(code_1c)[0]


def prepared(
    label: str, d: int = 3, spoilt: dict[int, Any] | None = None, **options: Any
) -> tuple[Plan, list[Any], FloatArray]:
    """A plan after its census, with problems of several rounds; and what the server reads of the
    first updates.
    """
    problems = [make_problem([3, 1, 2, 5, 2, 4], d=d, seed=seed) for seed in range(4)]
    plan = make_plan(
        label, problems[0].population, 3, **{"server_optimizer": Recorder(), **options}
    )
    assert plan.census is not None
    answers: list[Any] = [plan.census.answer(update_d) for update_d in problems[0].update_md]
    read_md = np.array(
        [slow_twin(update_d) for update_d in problems[0].update_md.astype(np.float64)]
    )
    answers = [(spoilt or {}).get(client, answer) for client, answer in enumerate(answers)]
    return plan.with_census(answers), problems, read_md


LABEL = "census(components=2,size=8)"


@pytest.mark.parametrize("large", [False, True])
def test_a_huge_reply_leaves_nothing_behind_in_the_sum_of_residuals(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("deltafl.scale.stretches.LARGE", 0)
    plan, problems, _ = prepared(LABEL, d=300)
    state = init_round(plan, np.zeros(300))
    for round, size in enumerate([1e12, 1.0, 1e7, 1.0, 1.0, 1.0, 1.0]):
        cohort = open_round(plan, state)
        update_nd = problems[round % 4].update_md[cohort.client_n]
        update_nd[0] *= np.float32(size)
        state, _ = close_round(plan, state, cohort, update_nd)
        first = state.control.first.control
        anew_d = residuals_summed_anew(first, plan.population.weight_m).total_d
        most = np.abs(anew_d).max()
        np.testing.assert_allclose(first.total_d, anew_d, rtol=0, atol=most * 2.0**-8)
        assert first.rounding <= 2.0**-8 * most


@pytest.mark.parametrize(
    "settings", [{"mime": 0.75}, {"average": 0.5}, {"server_optimizer": Sgd(2.0)}]
)
def test_the_census_is_the_first_round(settings: dict[str, Any]) -> None:
    """D is (1 + beta) C, C the mean of first updates: the model moves by it, and it is the
    momentum.
    """
    plan, _, read_md = prepared(LABEL, **{"server_optimizer": Sgd(), **settings})
    start_d = np.array([0.5, -1.0, 2.0], np.float32)
    state = init_round(plan, start_d)
    mean_d = plan.population.weight_m @ read_md / KEPT
    assert np.linalg.norm(mean_d) > 0.1
    assert state.round == 1
    lr = plan.optimizer.lr if isinstance(plan.optimizer, Sgd) else 1.0
    np.testing.assert_allclose(
        state.params_d, start_d + lr * (2 - plan.step_factor) * mean_d, rtol=1e-5
    )
    np.testing.assert_allclose(plan.model(state), state.params_d)
    if plan.part("mime"):
        np.testing.assert_allclose(
            state.parts["mime"].momentum_d, (2 - plan.step_factor) * mean_d, rtol=1e-5
        )


def test_no_answers_make_the_model_infinite() -> None:
    """Not even if all clients lie."""
    answers = [
        np.concatenate([np.ones(8), [1e60], code_c * [1e60, *[1] * 10]])
        for code_c in np.ones((6, 11))
    ]
    plan = make_plan(LABEL, [1, 2, 3, 4, 5, 6], 3, mime=0.9)
    state = init_round(plan.with_census(answers), np.ones(3))
    assert np.isfinite(state.params_d).all() and np.linalg.norm(state.params_d) > 1e17


def test_the_first_step_is_as_exact_as_the_theory_says() -> None:
    """(1 - kappa) / kappa sum_j w_j^2 norm(u_j)^2 of independent updates; 0.133 norm(ubar)^2 at
    most of equal ones.
    """
    rng = np.random.default_rng(7)
    m = 100
    d = 5120
    population = Population.from_sizes(rng.integers(1, 9, size=m))._replace(
        aux_mq=rng.normal(size=(m, 3))
    )
    own_md = rng.normal(size=(m, d))
    same_d = rng.normal(size=d)
    errors = []
    for update_md in (own_md, np.tile(same_d, (m, 1))):
        code_mc = np.array([encode(update_d) for update_d in update_md])
        control = TwoPhase()
        mean_d = control.first_mean(control.init(population._replace(code_mc=code_mc), d))
        assert mean_d is not None
        errors.append(float(np.sum((mean_d - population.weight_m @ update_md) ** 2)))
    expected = (1 - KEPT) / KEPT * float(population.weight_m**2 @ (own_md**2).sum(axis=1))
    assert errors[0] == pytest.approx(expected, rel=0.1)
    assert 0.12 < errors[1] / np.sum(same_d**2) < 0.14


def test_a_census_without_first_updates_moves_nothing() -> None:
    plan, _, _ = prepared(f"{LABEL}@@regression-damped", mime=0.75)
    state = init_round(plan, np.ones(3))
    assert state.round == 0
    np.testing.assert_array_equal(state.params_d, np.ones(3))
    np.testing.assert_array_equal(state.parts["mime"].momentum_d, np.zeros(3))


def test_with_clip_no_first_update_is_longer_than_the_radius() -> None:
    """So a client that lies moves the model in the first round by its weight times that, up to
    the code.
    """
    free, _, _ = prepared(LABEL, spoilt={3: LIE})
    plan, _, _ = prepared(LABEL, spoilt={3: LIE}, clip="median", server_optimizer=Sgd())
    assert free.population.code_mc is not None and plan.population.code_mc is not None
    radius = RADIUS * np.median(norms(free.population.code_mc))
    assert norms(plan.population.code_mc).max() == pytest.approx(radius)
    assert 0.1 * radius < np.linalg.norm(init_round(plan, np.zeros(3)).params_d) < radius


def test_the_next_round_trusts_first_updates_by_the_share_that_the_components_explain() -> None:
    """On many clients, whose first updates are what the components say and as much noise again:
    about one half.
    """
    rng = np.random.default_rng(5)
    m = 200
    d = 2560
    aux_mq = rng.normal(size=(m, 3))
    first_md = aux_mq @ rng.normal(size=(3, d)) / np.sqrt(3) + rng.normal(size=(m, d))
    population = Population.from_sizes(rng.integers(1, 9, size=m))
    code_mc = np.array([encode(first_d) for first_d in first_md])
    population = population._replace(aux_mq=aux_mq, code_mc=code_mc)
    control = TwoPhase()
    state = control.init(population, d)
    trust = control.coefficient(state)
    weight_m = population.weight_m
    design_mq = population.design_mq()
    read_md = decode(code_mc, d)
    root_m = np.sqrt(weight_m)[:, None]
    fitted_md = design_mq @ np.linalg.lstsq(root_m * design_mq, root_m * read_md, rcond=None)[0]
    explained = (weight_m @ fitted_md**2).sum() / (weight_m @ read_md**2).sum()
    assert trust == pytest.approx(explained, rel=0.01)
    assert 0.4 < trust < 0.6
    learnt = state.regression._replace(cross=np.array(3.0), square=np.array(2.0))
    assert control.coefficient(state._replace(regression=learnt)) == 1


def test_later_rounds_predict_by_regression_and_what_it_left_of_each_clients_last_update() -> None:
    """beta B x_i + gamma e_i, the e_i by least squares of another library and the slow twin of
    the code.
    """
    plan, problems, read_md = prepared(LABEL)
    weight_m = plan.population.weight_m
    design_mq = plan.population.design_mq()
    root_m = np.sqrt(weight_m)[:, None]
    left_md = (
        read_md - design_mq @ np.linalg.lstsq(root_m * design_mq, root_m * read_md, rcond=None)[0]
    )
    state = init_round(plan, np.zeros(3))
    for problem in [problems[0]] * 2:
        before: TwoPhaseState = state.control
        predicted_md = (
            coefficient_of(before.regression) * design_mq @ before.regression.control.slope_qd
        )
        for client in open_round(plan, state).client_n:
            left_md[client] = slow_twin(problem.update_md[client] - predicted_md[client])
        state = play(plan, state, [problem])
    control: TwoPhaseState = state.control
    beta = coefficient_of(control.regression)
    gamma = coefficient_of(control.first)
    assert 0 < beta <= 1 and 0 < gamma <= 1
    assert 0 < control.first.control.is_first_m.sum() < 6
    expected_md = beta * design_mq @ control.regression.control.slope_qd + gamma * left_md
    value = plan.rule.control.value(control, np.arange(6))
    np.testing.assert_allclose(value.control_nd, expected_md, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(value.total_d, weight_m @ expected_md, rtol=1e-8, atol=1e-12)
    assert plan.rule.control.coefficient(control) == beta


def coefficient_of(part: ScaledState) -> float:
    return float(np.clip(part.cross / part.square, 0, 1)) if part.square > 0 else 1.0


def test_newcomers_leave_what_is_known_of_the_others() -> None:
    """What the regression leaves of their first updates is there, and the sum is that of all
    with the new weights.
    """
    plan, problems, _ = prepared(LABEL)
    state = play(plan, init_round(plan, np.zeros(3)), problems)
    problem = make_problem([3, 1, 2, 5, 2, 4, 6, 1], d=3)
    assert plan.census is not None
    larger = make_plan(LABEL, problem.population, 3, server_optimizer=Recorder())
    larger = larger.with_census([plan.census.answer(update_d) for update_d in problem.update_md])
    before = state.control.first.control
    first = LastResiduals().init(larger.population, 3)
    resized = resize_state(larger, state).control
    after = resized.first.control
    assert not before.is_first_m.all()
    np.testing.assert_array_equal(after.is_first_m, [*before.is_first_m, False, False])
    after_mc = np.asarray(after.code_mc)
    first_mc = np.asarray(first.code_mc)
    np.testing.assert_array_equal(after_mc[:6], before.code_mc)
    design_mq = larger.population.design_mq()
    regression = resized.regression
    guess_md = coefficient_of(regression) * design_mq @ regression.control.slope_qd
    left_md = decode(first_mc, 3) - guess_md
    np.testing.assert_allclose(after_mc[6:], [encode(left_d) for left_d in left_md[6:]])
    value = LastResiduals().value(after, np.arange(8))
    np.testing.assert_allclose(
        value.total_d, larger.population.weight_m @ value.control_nd, atol=1e-12
    )


def test_no_newcomer_costs_a_pass_over_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows = []
    reader = RegressionControl.reader

    def counted(self: RegressionControl, state: Any, client_n: IntArray) -> Any:
        read_rows.append(len(state.aux_mq))
        return reader(self, state, client_n)

    def plan_of(m: int) -> Plan:
        plan = make_plan(LABEL, [2] * m, 3)
        assert plan.census is not None
        rng = np.random.default_rng(m)
        return plan.with_census([plan.census.answer(rng.normal(size=3)) for _ in range(m)])

    state = init_round(plan_of(40), np.zeros(3))
    monkeypatch.setattr(RegressionControl, "reader", counted)
    resize_state(plan_of(100), state)
    assert len(read_rows) >= 60 and sum(read_rows) < 300


def test_an_enormous_update_is_forgotten_without_a_trace() -> None:
    """Rounding beside 1e20 would stay in the sum for ever, were it not formed anew."""
    plan, _, _ = prepared(LABEL)
    control = LastResiduals()
    weight_m = plan.population.weight_m
    state = control.init(plan.population, 3)
    replies = plan.collect_replies(
        init_round(plan, np.zeros(3)), open_round(plan, init_round(plan, np.zeros(3)))
    )
    for update_nd in (np.full((3, 3), 1e20, dtype=np.float32), np.ones((3, 3), dtype=np.float32)):
        state = control.update(state, plan.population, replies, update_nd)
    value = control.value(state, np.arange(6))
    np.testing.assert_allclose(value.total_d, weight_m @ value.control_nd, atol=1e-9)


LIE = np.concatenate([np.ones(8), [1e90], [1e90], np.full(10, -3e80)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "spoilt", [{}, {3: None}, {3: LIE}, {3: np.full(20, np.nan), 0: [0.5] * 9}]
)
@pytest.mark.parametrize(
    "label", [LABEL, LABEL + "@local-pivotal", LABEL + "@poisson", LABEL + "@multinomial"]
)
def test_unbiased_whatever_is_sent(label: str, spoilt: dict[int, Any]) -> None:
    plan, problems, _ = prepared(label, spoilt=spoilt)
    first = init_round(plan, np.zeros(3))
    for state in (first, play(plan, first, problems)):
        np.testing.assert_allclose(
            mean_estimate(plan, state, problems[0]), problems[0].ubar_d, atol=1e-9
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spoilt", [{}, {3: None}, {3: LIE}])
@pytest.mark.parametrize("label", [LABEL, LABEL + "@@regression-damped"])
def test_unbiased_with_local_steps_that_are_corrected_by_it(
    label: str, spoilt: dict[int, Any]
) -> None:
    """Corrections cancel over all clients, from the first round on, and are taken off again."""
    plan, problems, _ = prepared(label, spoilt=spoilt, scaffold=True)
    first = init_round(plan, np.zeros(3))
    for rounds, state in enumerate((first, play(plan, first, problems))):
        drift_md = plan.drifts(state, np.arange(6))
        assert drift_md is not None
        assert (np.ptp(drift_md, axis=0) > 0.1).all() or (rounds == 0 and "regression" in label)
        np.testing.assert_allclose(
            plan.population.weight_m @ drift_md, 0, atol=1e-6 * max(1, np.abs(drift_md).max())
        )
        tolerance = 1e-6 * max(1, np.abs(drift_md).max())  # of float32, in which they are sent
        np.testing.assert_allclose(
            mean_estimate(plan, state, problems[0]), problems[0].ubar_d, atol=tolerance
        )


def test_a_client_without_a_first_update_is_predicted_by_the_others() -> None:
    plan, _, read_md = prepared(LABEL, spoilt={4: None})
    here_k = np.array([0, 1, 2, 3, 5])
    design_mq = plan.population.design_mq()
    root_k = np.sqrt(plan.population.weight_m[here_k])[:, None]
    fitted_qd = np.linalg.lstsq(root_k * design_mq[here_k], root_k * read_md[here_k], rcond=None)[0]
    value = plan.rule.control.value(init_round(plan, np.zeros(3)).control, np.arange(6))
    np.testing.assert_allclose(value.control_nd[here_k], read_md[here_k], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(value.control_nd[4], design_mq[4] @ fitted_qd, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        value.total_d, plan.population.weight_m @ value.control_nd, rtol=1e-9, atol=1e-12
    )


def test_the_longest_first_update_is_five_medians() -> None:
    plan, _, _ = prepared(LABEL, spoilt={3: LIE})
    assert plan.population.code_mc is not None
    length_m = norms(plan.population.code_mc)
    assert length_m[3] == pytest.approx(5 * np.median(length_m)) and length_m[3] == length_m.max()


def test_who_is_asked_for_a_first_update() -> None:
    """Where the estimator uses it, and no noise is to hide the client."""
    for label, asked in (
        ("census", True),
        ("census@@regression-damped", False),
        ("census(noise=1)", False),
    ):
        census = make_plan(label, [1, 2, 3], 2).census
        assert census is not None
        assert (census.first_update, census.length(650)) == (asked, 129 + 33 * asked)
    plan = make_plan("census", [1, 2, 3], 2).with_census(
        [np.ones(129)] * 3
    )  # as if it were regression-damped
    assert plan.population.code_mc is None
    assert open_round(plan, init_round(plan, np.zeros(2))).client_n.size == 2
    plan, _, _ = prepared(LABEL)
    with pytest.raises(
        DeltaflError, match="the census is not of this model of 999 parameters; take it anew"
    ):
        init_round(plan, np.zeros(999))


def test_with_no_first_updates_it_is_regression_damped_to_the_bit() -> None:
    noisy = "census(components=2,size=8,noise=0.1)"
    problem = make_problem([3, 1, 2, 5, 2, 4], d=3)
    answers = [np.append(update_d, np.zeros(6)) for update_d in problem.update_md]
    estimates = []
    for label in (noisy, noisy + "@@regression-damped"):
        plan = make_plan(label, problem.population, 3, server_optimizer=Recorder()).with_census(
            answers
        )
        estimates.append(
            play(plan, init_round(plan, np.zeros(3)), [problem] * 4)
            .parts["server_optimizer"]
            .delta_d
        )
    np.testing.assert_array_equal(*estimates)


def test_what_first_updates_explain_is_no_negative_share() -> None:
    """Clients may answer a census so that x leaves the slopes nothing but rounding, of any sign:
    a state with a negative R^2 was refused when the server began again.
    """
    rng = np.random.default_rng(0)
    code_mc = np.array([encode(np.zeros(4))] * 5)
    for _ in range(50):
        x = rng.normal()
        slope_qd = np.array([[-x], [1.0]]) * rng.normal(size=4)
        state = LastResidualsState(
            code_mc,
            np.ones(5, bool),
            np.array([[1.0, x]] * 5),
            slope_qd,
            np.zeros(4),
        )
        summed = residuals_summed_anew(state, rng.dirichlet(np.ones(5)))
        assert 0 <= summed.explained <= 1
