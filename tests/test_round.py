"""One round from outside: who is refused, what is left alone, what a person is told."""

import tracemalloc
from copy import deepcopy
from itertools import product

import numpy as np
import pytest

from conftest import Recorder, all_cohorts, estimate, make_problem, play, reports_of, same_tree
from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    Accumulator,
    Cohort,
    DeltaflError,
    Fixed,
    Full,
    Plan,
    Population,
    PracDelta,
    Reports,
    RoundState,
    Sampler,
    close_round,
    init_round,
    make_sampler,
    make_server_optimizer,
    open_round,
)
from deltafl.estimators.control_variates import CommonControlState
from deltafl.server.optimizers import SERVER_OPTIMIZERS
from deltafl.server.screening import measure, screen_replies

SIZES = [10, 15, 20, 25, 30, 35]
PROBLEM = make_problem(SIZES)
START_D = np.array([1.0, 2.0, 3.0], dtype=np.float32)


def opened(plan: Plan) -> tuple[RoundState, Cohort]:
    state = play(plan, init_round(plan, START_D), [PROBLEM])
    return state, open_round(plan, state, oracle=PROBLEM.oracle)


def small(name: str) -> Sampler:
    """A sampler that fits a model of three parameters."""
    return make_sampler(f"{name}(classes=3)" if name == "hics-fl" else name)


BAD_UPDATES = {
    "nan": np.array([1, np.nan, 1]),
    "infinite": np.array([1, -np.inf, 1]),
    "too long": np.zeros(4),
    "too short": np.zeros(2),
    "matrix": np.zeros((3, 1)),
    "scalar": 7.0,
    "huge": np.array([0, 2e18, 0]),
    "beyond float32": np.array([0, 1e300, 0]),
    "beyond float64": [0, 10**400, 0],
    "words": ["a", "b", "c"],
    "ragged": [[1, 2], [3]],
    "mapping": {"weights": 1},
}


@pytest.mark.parametrize("label", ["uniform", "md", "pracdelta", "pracdelta@pivotal@difference", "cluster-is"])
@pytest.mark.parametrize("fault", BAD_UPDATES)
def test_a_bad_update_counts_as_no_answer(fault: str, label: str) -> None:
    """The model and every memory equal those of the run in which that client stayed silent."""
    estimator = label.split("@")[2] if label.count("@") == 2 else "horvitz-thompson"
    plan = Plan(PROBLEM.population, make_sampler(label), 4, estimator)
    state, cohort = opened(plan)
    reports = reports_of(PROBLEM, cohort)
    updates = list(PROBLEM.update_md[cohort.client_n])
    bad, info = close_round(plan, state, cohort, [updates[0], BAD_UPDATES[fault], *updates[2:]], reports)
    silent = reports._replace(responded_n=np.arange(len(updates)) != 1)
    quiet, quiet_info = close_round(plan, state, cohort, [updates[0], None, *updates[2:]], silent)
    assert same_tree(bad, quiet)
    assert [reply.client for reply in info.rejected] == [cohort.client_n[1]]
    assert "update" in info.rejected[0].reason
    assert quiet_info.rejected == []
    assert info.num_selected == len(updates)
    assert info.num_responded == len(updates) - 1
    assert same_tree(info._replace(rejected=[]), quiet_info)


@pytest.mark.parametrize(
    ("column", "value", "part"),
    [
        ("loss_n", np.nan, "loss is nan"),
        ("loss_n", np.inf, "loss is inf"),
        ("loss_n", -1e30, "loss is -1e"),
        ("step_variance_n", -1e-9, "step variance is -1e-09"),
        ("step_variance_n", np.nan, "step variance is nan"),
        ("step_variance_n", 1e300, "step variance is 1e"),
        ("num_steps_n", 0, "local steps is 0"),
        ("square_loss_n", np.inf, "mean squared loss is inf"),
        ("square_loss_n", -1.0, "mean squared loss is -1.0"),
        ("square_loss_n", 1e73, "mean squared loss is 1e+73"),
        ("square_loss_n", 0.0, "mean squared loss is 0.0, expected"),
    ],
)
def test_a_bad_report_counts_as_no_answer(column: str, value: float, part: str) -> None:
    plan = Plan(PROBLEM.population, PracDelta(sigma_scale="update"), 4)
    state, cohort = opened(plan)
    reports = reports_of(PROBLEM, cohort)
    spoilt_n = getattr(reports, column).copy()
    spoilt_n[2] = value
    updates = PROBLEM.update_md[cohort.client_n]
    bad, info = close_round(plan, state, cohort, updates, reports._replace(**{column: spoilt_n}))
    quiet, _ = close_round(plan, state, cohort, [*updates[:2], None, updates[3]], reports)
    assert same_tree(bad, quiet)
    assert [(reply.client, part in reply.reason) for reply in info.rejected] == [(cohort.client_n[2], True)]
    assert np.isfinite(info.loss)


def test_a_mean_square_is_no_less_than_the_square_of_the_mean() -> None:
    """By Jensen's inequality; 1 % and 1e-7 are for rounding, and a loss that was not said bounds nothing."""
    loss = [2.0, 2.0, -2.0, 2e-4, 1e18, None, 1.0]
    square = [3.97, 3.95, 3.95, 0.0, 1.1e36, 0.0, None]
    cohort = Cohort(np.arange(7), np.ones(7, dtype=np.int64), np.ones(7))
    for updates in (np.ones((7, 2), dtype=np.float32), [np.ones(2)] * 7):  # as a table, and one by one
        replies = screen_replies(cohort, updates, Reports.make(7, loss=loss, square_loss=square), 2)
        assert [reply.client for reply in replies.rejected] == [1, 2]
        assert "mean squared loss is 3.95, expected 3.96 to 1e+72" in replies.rejected[0].reason
        np.testing.assert_array_equal(replies.reports.square_loss_n, [3.97, 0.0, 0.0, 0.0, 1.1e36, 0.0, np.nan])


def test_the_largest_values_that_pass_do_no_harm() -> None:
    """At the limits nothing overflows: not the model, not a memory, not what is shown."""
    plan = Plan(PROBLEM.population, PracDelta(sigma_scale="update"), 4)
    state, cohort = opened(plan)
    reports = Reports.make(4, loss=[1e18] * 4, square_loss=[1e72] * 4, step_variance=[1e36] * 4, num_steps=[2**62] * 4)
    following, info = close_round(plan, state, cohort, np.full((4, 3), 1e18), reports)
    assert np.all(np.isfinite(following.params_d))
    assert following.sampler.p_m.sum() == pytest.approx(1)
    assert all(np.isfinite(value) for value in (info.loss, info.variance, info.estimate_norm))


@pytest.mark.parametrize("label", ["uniform", "md", "full", "fedis", "pracdelta", "cluster-is", "power-of-choice"])
def test_all_replies_bad(label: str) -> None:
    """The model stays where it is, the sampler has learnt nothing, the counts go on."""
    plan = Plan(PROBLEM.population, make_sampler(label), 3, SAMPLERS[label].estimator)
    state, cohort = opened(plan)
    following, info = close_round(plan, state, cohort, [None] * len(cohort.client_n))
    assert np.array_equal(following.params_d, state.params_d)
    assert same_tree(following.sampler, state.sampler)
    assert following.round == state.round + 1
    assert following.responded_m.sum() == state.responded_m.sum()
    assert following.selected_m.sum() == state.selected_m.sum() + len(cohort.client_n)
    assert info.num_responded == 0
    assert {reply.reason for reply in info.rejected} == {"no reply"}
    assert info.sum_of_weights == info.largest_weight == info.effective_sample_size == info.estimate_norm == 0
    assert np.isnan(info.loss)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_empty_poisson_cohort(estimator: str) -> None:
    """Nobody is asked: a round like any other. Nothing is redrawn."""
    plan = Plan(PROBLEM.population, Fixed(design="poisson"), 1, estimator)
    state = init_round(plan, START_D)
    empty = next(r for r in range(100) if len(open_round(plan, state._replace(round=r)).client_n) == 0)
    state = state._replace(round=empty)
    following, info = close_round(plan, state, open_round(plan, state), [])
    assert np.array_equal(following.params_d, START_D)
    assert following.round == empty + 1
    assert info.num_selected == 0
    assert info.variance == 0
    streamed, _ = Accumulator(plan, state, open_round(plan, state)).close()
    assert same_tree(streamed.control, following.control)


@pytest.mark.parametrize("optimizer", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference", "difference-own"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_state_goes_in_and_comes_out_unchanged(name: str, estimator: str, optimizer: str) -> None:
    estimator = "plain-mean" if SAMPLERS[name].scores == "unknown" else estimator
    plan = Plan(PROBLEM.population, small(name), 3, estimator, make_server_optimizer(optimizer))
    state, cohort = opened(plan)
    reports, update_nd = reports_of(PROBLEM, cohort), PROBLEM.update_md[cohort.client_n]
    before = deepcopy((state, cohort, reports, update_nd))
    following, _ = close_round(plan, state, cohort, update_nd, reports)
    again, _ = close_round(plan, state, cohort, update_nd, reports)
    assert same_tree(before, (state, cohort, reports, update_nd))
    assert same_tree(following, again)
    assert following.params_d.dtype == np.float32
    assert not np.array_equal(following.params_d, state.params_d)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_round_can_be_opened_again(name: str) -> None:
    plan = Plan(PROBLEM.population, small(name), 3, SAMPLERS[name].estimator)
    state, cohort = opened(plan)
    assert same_tree(cohort, open_round(plan, state, oracle=PROBLEM.oracle))


def test_draws_depend_on_seed_and_round_only() -> None:
    cohorts = {
        (seed, r): tuple(open_round(plan, init_round(plan, START_D)._replace(round=r)).client_n.tolist())
        for seed, r in product(range(6), range(6))
        for plan in [Plan(PROBLEM.population, Fixed(), 3, seed=seed)]
    }
    assert len(set(cohorts.values())) > 10  # of 20 possible ones


def test_the_simplest_round_by_hand() -> None:
    """Sizes (1, 2, 5), everyone asked, server rate 1: x + (1 * 8 + 2 * 4 + 5 * 1.6) / 8 = x + 3."""
    plan = Plan(Population.from_sizes([1, 2, 5]), Full(), 3)
    state = init_round(plan, np.array([10.0]))
    state, info = close_round(plan, state, open_round(plan, state), [np.array([8.0]), np.array([4.0]), np.array([1.6])])
    assert state.params_d[0] == pytest.approx(13)
    assert info.round == 0
    assert (state.round, info.num_selected, info.num_responded) == (1, 3, 3)
    assert info.estimate_norm == pytest.approx(3)
    assert state.selected_m.tolist() == state.responded_m.tolist() == [1, 1, 1]


def test_loss_and_diversity_by_hand() -> None:
    """Loss: weighted by the coefficients. Diversity: about the plain mean of the replies, 3, 3 and 0 from it."""
    plan = Plan(Population.from_sizes([1, 1, 2]), Full(), 3)
    state, updates = init_round(plan, np.zeros(1)), [np.array([1.0]), np.array([7.0]), np.array([4.0])]
    reports = Reports.make(3, loss=[1.0, 2.0, 4.0])
    _, info = close_round(plan, state, open_round(plan, state), updates, reports)
    assert info.loss == pytest.approx(0.25 + 0.5 + 2)
    assert info.mean_over_diversity == pytest.approx(4 / 2)


def test_the_loss_is_that_of_the_replies_that_said_one() -> None:
    plan = Plan(Population.from_sizes([1, 1, 2]), Full(), 3)
    state, updates = init_round(plan, np.zeros(1)), np.ones((3, 1))
    cohort = open_round(plan, state)
    for reports in (None, Reports.make(3), Reports.make(3, loss=[None] * 3)):
        following, info = close_round(plan, state, cohort, updates, reports)
        assert np.isnan(info.loss)
        assert (info.num_responded, info.rejected, following.params_d.tolist()) == (3, [], [1.0])
    _, info = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0, None, 4.0]))
    assert info.loss == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)
    _, info = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0, None, np.nan]))
    assert info.loss == 1
    assert [(reply.client, reply.reason[:11]) for reply in info.rejected] == [(2, "loss is nan")]
    aggregation = Accumulator(plan, state, cohort)
    for client, loss in enumerate([1.0, None, 4.0]):
        assert aggregation.add(client, np.ones(1), loss=loss) is None
    assert aggregation.close()[1].loss == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)


@pytest.mark.parametrize("label", ["oort", "active-fl"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_replies_without_a_loss_are_refused_where_it_is_learnt_from(label: str, one_by_one: bool) -> None:
    """Nothing that nobody said enters a memory; the others are learnt from as ever."""
    plan = Plan(PROBLEM.population, make_sampler(label), 3, SAMPLERS[label].estimator)
    state, cohort = opened(plan)
    updates, silent = PROBLEM.update_md[cohort.client_n], int(cohort.client_n[1])
    if one_by_one:
        aggregation = Accumulator(plan, state, cohort)
        for client, update, loss in zip(cohort.client_n.tolist(), updates, [2.0, None, 3.0], strict=True):
            aggregation.add(client, update, loss=loss)
        following, info = aggregation.close()
    else:
        following, info = close_round(plan, state, cohort, updates, Reports.make(3, loss=[2.0, None, 3.0]))
    assert [reply.client for reply in info.rejected] == [silent]
    assert "has no loss" in info.rejected[0].reason
    before_mq, after_mq = state.sampler.value_mq, following.sampler.value_mq
    assert np.array_equal(before_mq[[silent]], after_mq[[silent]], equal_nan=True)
    assert np.isfinite(after_mq[np.delete(cohort.client_n, 1)]).all()


def test_asking_and_answering_is_counted() -> None:
    plan = Plan(PROBLEM.population, Fixed(), 2)
    state = init_round(plan, START_D)
    selected_m, responded_m = np.zeros(6), np.zeros(6)
    for _ in range(20):
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, [PROBLEM.update_md[0], None])
        selected_m[cohort.client_n] += 1
        responded_m[cohort.client_n[0]] += 1
    assert state.selected_m.tolist() == selected_m.tolist()
    assert state.responded_m.tolist() == responded_m.tolist()


@pytest.mark.parametrize("label", ["uniform", "md", "md-fixed", "fedis", "cluster-is", "uniform@poisson"])
def test_with_a_mask_the_estimate_targets_who_is_available(label: str) -> None:
    available_m = np.array([True, False, True, True, False, True])
    weight_m = PROBLEM.population.weight_m
    target_d = weight_m[available_m] @ PROBLEM.update_md[available_m].astype(np.float64)
    absent_d = weight_m[~available_m].sum() * np.array([5.0, 6, 7])
    for estimator in ("horvitz-thompson", "difference"):
        plan = Plan(PROBLEM.population, make_sampler(label), 2, estimator, Recorder())
        state = init_round(plan, START_D)
        if estimator == "difference":
            state = state._replace(control=CommonControlState(np.array([5.0, 6, 7])))
        mean_d = np.zeros(3)
        for probability, cohort in all_cohorts(plan, state, PROBLEM.oracle, available_m.astype(np.float64)):
            assert np.all(available_m[cohort.client_n])
            mean_d += probability * estimate(plan, state, cohort, list(PROBLEM.update_md[cohort.client_n]))
        np.testing.assert_allclose(mean_d, target_d + absent_d * (estimator == "difference"), rtol=1e-12)


# --- mistakes of the host ---------------------------------------------------------------------------------------------


def test_the_host_must_hand_over_one_row_a_client() -> None:
    plan = Plan(PROBLEM.population, Fixed(), 3)
    state, cohort = opened(plan)
    updates = PROBLEM.update_md[cohort.client_n]
    with pytest.raises(DeltaflError, match="3 clients"):
        close_round(plan, state, cohort, updates[:2])
    with pytest.raises(DeltaflError, match="3 clients"):
        close_round(plan, state, cohort, updates, Reports.make(4))
    with pytest.raises(DeltaflError, match="loss must have one number for each of 3 clients"):
        Reports.make(3, loss=[1.0, 2.0])


@pytest.mark.parametrize("name", [name for name in SAMPLERS if make_sampler(name).needs_oracle])
def test_theoretical_samplers_need_an_oracle(name: str) -> None:
    plan = Plan(PROBLEM.population, make_sampler(name), 3, SAMPLERS[name].estimator)
    state = init_round(plan, START_D)
    with pytest.raises(DeltaflError, match="choose a practical sampler such as 'pracdelta'"):
        open_round(plan, state)
    with pytest.raises(DeltaflError, match="before the draw"):
        plan.sampler.open(state.sampler, np.ones(6, dtype=bool), 3, np.random.default_rng(0))


@pytest.mark.parametrize("name", SAMPLERS)
def test_somebody_must_be_available(name: str) -> None:
    plan = Plan(PROBLEM.population, make_sampler(name), 3, SAMPLERS[name].estimator)
    state = init_round(plan, START_D)
    with pytest.raises(DeltaflError, match="no client is available"):
        open_round(plan, state, np.zeros(6, dtype=bool), PROBLEM.oracle)
    for wrong in (np.ones(5, dtype=bool), np.arange(6), [np.nan] * 6, ["a"] * 6):
        with pytest.raises(
            DeltaflError, match=r"available_m is array\(.*; it must hold True or False for each of 6 clients"
        ):
            open_round(plan, state, wrong, PROBLEM.oracle)  # type: ignore[arg-type]


def test_impossible_plans() -> None:
    population = PROBLEM.population
    for n in (0, 7):
        with pytest.raises(DeltaflError, match=f"cannot sample {n} of 6"):
            Plan(population, Fixed(), n)
    with pytest.raises(DeltaflError, match="unknown estimator"):
        Plan(population, Fixed(), 2, estimator="best")
    for floor in (0.0, 1.5, float("nan")):
        with pytest.raises(DeltaflError, match="response_floor"):
            Plan(population, Fixed(), 2, response_floor=floor)
    for weight_m in ([0.5, 0.6], [1.5, -0.5], [float("nan"), 1.0]):
        with pytest.raises(DeltaflError, match="sum 1"):
            Plan(Population(np.array(weight_m), np.array([1, 1])), Fixed(), 1)
    with pytest.raises(DeltaflError, match="2 weights and 3 sizes"):
        Plan(Population(np.full(2, 0.5), np.ones(3, dtype=np.int64)), Fixed(), 1)
    for params, words in (
        (np.zeros((2, 2)), r"got shape \(2, 2\); use .ravel\(\)"),
        ([1.0, float("nan")], "finite numbers"),
        (["a"], "array of numbers"),
    ):
        with pytest.raises(DeltaflError, match=words):
            init_round(Plan(population, Fixed(), 2), params)


@pytest.mark.parametrize(
    ("sizes", "weights", "part"),
    [
        ([], "data", "at least one size"),
        ([[1, 2]], "data", "at least one size"),
        ([1, 0], "data", "whole numbers, 1 to"),
        ([1.5, 2.0], "data", "whole numbers, 1 to"),
        ([1, 2], "size", "weights is 'size'"),
    ],
)
def test_impossible_populations(sizes: list[int], weights: str, part: str) -> None:
    with pytest.raises(DeltaflError, match=part):
        Population.from_sizes(sizes, weights)


def test_populations_by_hand() -> None:
    assert Population.from_sizes([1, 3]).weight_m.tolist() == [0.25, 0.75]
    uniform = Population.from_sizes([1, 3], weights="uniform")
    assert uniform.weight_m.tolist() == [0.5, 0.5]
    assert uniform.num_examples_m.tolist() == [1, 3]
    assert uniform.num_clients == 2


def test_params_are_copied() -> None:
    params_d = np.zeros(2, dtype=np.float32)
    state = init_round(Plan(Population.from_sizes([1]), Full(), 1), params_d)
    params_d += 1
    assert state.params_d.tolist() == [0, 0]


def test_rows_of_missing_clients_are_neutral_for_samplers() -> None:
    """A sampler that forgot to look at ``responded_n`` must still not meet NaN, or numbers of a refused reply."""
    cohort = Cohort(np.array([0, 1, 2]), np.ones(3, dtype=np.int64), np.full(3, 0.5))
    bad = Reports.make(
        3,
        loss=[1.0, np.nan, 3.0],
        square_loss=[2.0, np.nan, np.inf],
        step_variance=[1.0, 2.0, np.inf],
        num_steps=[4, 5, 6],
    )
    replies = screen_replies(cohort, [np.array([1.0, 2.0]), np.array([9.0, 9.0]), None], bad, 2)
    assert replies.reports.responded_n.tolist() == [True, False, False]
    assert replies.reports.loss_n.tolist() == [1, 0, 0]
    assert replies.reports.square_loss_n.tolist() == [2, 0, 0]
    assert replies.reports.step_variance_n.tolist() == [1, 0, 0]
    assert replies.reports.num_steps_n.tolist() == [4, 1, 1]
    measured = measure(replies.update_nd, replies.reports)
    assert measured.squared_norm_n.tolist() == [5, 0, 0]
    assert measured.squared_deviation_n.tolist() == [0, 0, 0]
    assert replies.update_nd.tolist() == [[1, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize("d", [1, 3, 10, 127, 129, 4097, 70001])
def test_norms_have_the_same_bits_however_many_are_measured_at_once(d: int) -> None:
    rng = np.random.default_rng(d)
    update_nd = (rng.normal(size=(9, d)) * 10 ** rng.uniform(-3, 3, size=(9, 1))).astype(np.float32)
    reports = measure(update_nd, Reports.make(9))
    wide_nd, mean_d = update_nd.astype(np.float64), np.average(update_nd, axis=0)
    assert reports.squared_norm_n.tolist() == [row_d @ row_d for row_d in wide_nd]
    assert reports.squared_deviation_n.tolist() == [np.sum((row_d - mean_d) ** 2) for row_d in wide_nd]


def test_replies_in_a_table_are_screened_as_one_by_one() -> None:
    """Tables are looked at as a whole, lists reply by reply: the same rows, the same reasons."""
    table_nd = np.random.default_rng(0).normal(size=(11, 4)).astype(np.float64)
    for row, entry in ((1, np.nan), (2, np.inf), (3, 1e19), (4, 1e300)):
        table_nd[row, 2] = entry
    loss, square, variance, steps = np.zeros(11), np.zeros(11), np.zeros(11), np.ones(11, dtype=int)
    loss[5], variance[6], steps[7], square[8], square[9] = np.nan, -1, 0, -1, np.nan
    reports = Reports.make(
        11,
        loss=loss,
        square_loss=square,
        step_variance=variance,
        num_steps=steps,
        responded=np.arange(11) != 10,
    )
    cohort = Cohort(np.arange(11), np.ones(11, dtype=np.int64), np.ones(11))
    known_d = np.ones(4, dtype=np.float32)
    table = screen_replies(cohort, table_nd, reports, 4, drift_d=known_d)
    listed = screen_replies(cohort, list(table_nd), reports, 4, drift_d=known_d)
    assert [reply.client for reply in table.rejected] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert table.rejected == listed.rejected
    assert np.array_equal(table.update_nd, listed.update_nd)
    for x, y in zip(table.reports, listed.reports, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_closing_a_round_takes_at_most_six_times_the_memory_of_its_updates(estimator: str) -> None:
    """What is worked on at once: the updates, their residuals in float64, and one table of controls or of new rows."""
    m, n, d = 20, 10, 50_000
    population = Population.from_sizes(range(1, m + 1), aux=np.eye(4)[np.arange(m) % 4])
    plan = Plan(population, PracDelta(), n=n, estimator=estimator)
    state, rng = init_round(plan, np.zeros(d)), np.random.default_rng(0)
    for _ in range(4):  # some are known by then, some are not, and the learnt coefficient is below 1
        cohort = open_round(plan, state)
        updates = [rng.normal(size=d).astype(np.float32) for _ in cohort.client_n]
        tracemalloc.start()
        state, _ = close_round(plan, state, cohort, updates)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert 2 < peak / (n * d * 4) < 6


def test_updates_by_name_and_tensors_with_a_gradient_are_answered() -> None:
    """A dict would be read by position; a tensor that torch will not hand over is that client's fault alone."""
    plan = Plan(PROBLEM.population, Fixed(), 2)
    state = init_round(plan, START_D)
    cohort = open_round(plan, state)
    with pytest.raises(
        DeltaflError, match=r"updates are a dict; give a list or an array, in the order of cohort\.client_n"
    ):
        close_round(plan, state, cohort, {0: START_D, 1: START_D})  # type: ignore[arg-type]

    class Tensor:
        def __array__(self, *_: object, **__: object) -> None:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")

    _, info = close_round(plan, state, cohort, [START_D, Tensor()])  # type: ignore[arg-type]
    assert [reply.reason for reply in info.rejected] == ["update is not a list of numbers"]
