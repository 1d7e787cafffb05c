"""Clipping by the median: unbiased for the clipped updates, and what a client that lies can do
is bounded.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Problem, Recorder, all_cohorts, make_problem, mean_estimate
from deltafl import (
    Accumulator,
    DeltaflError,
    Population,
    Reports,
    close_round,
    init_round,
    load_state,
    make_plan,
    open_round,
    save_state,
)
from deltafl.analysis.verdict import bias_remark
from deltafl.designs.inclusion import inclusion_probabilities
from deltafl.plan import Plan, RoundState
from deltafl.server.clipping import RADIUS, SHARE, Clipping, KnownNorms
from deltafl.types import FloatArray

SIZES = [10, 15, 20, 25, 30]


def lower_median(norms: dict[int, float]) -> float:
    return sorted(norms.values())[(len(norms) - 1) // 2]


def clipped_target(plan: Plan, state: RoundState, problem: Problem, radius: float) -> FloatArray:
    """The weighted sum of the clipped updates, from the definition."""
    weight_m = plan.population.weight_m
    m = len(SIZES)
    expected_m = np.full(m, np.nan)
    for _, cohort in all_cohorts(plan, state, problem.oracle):
        expected_m[cohort.client_n] = cohort.expected_n
    control = plan.rule.control.value(state.control, np.arange(m)).control_nd * np.ones((m, 1))
    coef_m = weight_m / expected_m / plan.response_rates(state)
    total_d = np.zeros(3)
    for weight, coef, update_d, c_d in zip(
        weight_m, coef_m, problem.update_md.astype(float), control, strict=True
    ):
        short_d = update_d * min(1, radius / np.linalg.norm(update_d))
        reach = min(1, SHARE / plan.n * radius / (coef * np.linalg.norm(short_d - c_d)))
        total_d += weight * (c_d + reach * (short_d - c_d))
    return total_d


@pytest.mark.parametrize(
    "label",
    [
        "uniform",
        "uniform@poisson",
        "pracdelta",
        "pracdelta@multinomial",
        "innovation",
        "innovation@local-pivotal@innovation",
        "balanced",
        "k-vib",
        "fedstale",
        "clustered-sampling-1",
        "uniform@@fedvarp",
    ],
)
def test_unbiased_for_the_clipped_updates(label: str) -> None:
    """By enumeration, in a state that a liar and failures have reached; FedVARP is biased for
    them, too.
    """
    problems = [make_problem(SIZES, seed=seed) for seed in range(9)]
    plan = make_plan(
        label, problems[0].population, 3, server_optimizer=Recorder(), seed=1, clip="median"
    )
    state = init_round(plan, np.zeros(3))
    norms = dict[int, float]()
    for problem in problems[:8]:
        problem.update_md[2] *= 1000
        cohort = open_round(plan, state)
        updates = [
            None if i == 0 and state.round < 5 else problem.update_md[i] for i in cohort.client_n
        ]
        norms |= {
            i: float(np.linalg.norm(u))
            for i, u in zip(cohort.client_n.tolist(), updates, strict=True)
            if u is not None
        }
        state, info = close_round(plan, state, cohort, updates)
    assert info.clip_factor <= 1
    problem = problems[8]
    problem.update_md[2] *= -1000
    target_d = clipped_target(plan, state, problem, RADIUS * lower_median(norms))
    mean_d = mean_estimate(plan, state, problem, failures=True)
    bias = np.abs(mean_d - target_d).max() / np.abs(target_d).max()
    assert bias > 1e-3 if "fedvarp" in label else bias < 1e-5  # replies and memories are float32
    assert np.abs(target_d - problem.ubar_d).max() > 10


@pytest.mark.parametrize("d", [3, 100])
def test_the_factor_shows_a_share_that_was_shortened(d: int) -> None:
    """All updates are alike, but one client's coefficient is too large for its length."""
    plan = make_plan("uniform", [1] * 9 + [100], 5, clip="median")
    state = init_round(plan, np.zeros(d))
    factors = set[tuple[bool, float]]()
    for _ in range(9):
        cohort = open_round(plan, state)
        coef = plan.collect_replies(state, cohort).coef_n.max()
        state, info = close_round(plan, state, cohort, np.ones((5, d)))
        assert info.clip_factor == pytest.approx(min(1, SHARE / 5 * RADIUS / coef))
        factors.add((bool(9 in cohort.client_n), info.clip_factor < 1))
    assert factors == {(True, True), (False, False)}


@pytest.mark.parametrize(
    "label", ["uniform", "pracdelta", "innovation", "balanced", "fedvarp", "delta-centred"]
)
def test_nobody_moves_the_model_by_more_than_three_equal_shares(label: str) -> None:
    """From the first round on: largest floats, then 60 rounds of silence, then again; honest
    replies stay usable.
    """
    rng = np.random.default_rng(0)
    share_mc = rng.dirichlet(np.ones(3), size=20)
    plan = make_plan(label, Population.from_sizes([10] * 20, aux=share_mc), 5, clip="median")
    state = init_round(plan, np.zeros(8))
    counted = 0
    largest_coef = 0.0
    for _ in range(100):
        cohort = open_round(plan, state)
        updates: list[Any] = list(rng.normal(size=(5, 8)))
        for k in np.flatnonzero(cohort.client_n == 7):
            updates[k] = None if 10 < state.round < 70 else np.full(8, 9e17)
        accumulator = Accumulator(plan, state, cohort)
        accumulator.add_rows(updates)
        state, info = accumulator.close()
        assert all(reason == "no reply" for _, reason in info.rejected)
        coef_n = plan.collect_replies(state, cohort).coef_n
        moved_n = coef_n * np.sqrt(accumulator.reports.squared_residual_n)
        assert moved_n.max() <= SHARE / 5 * RADIUS * 5 * 1.1  # every honest norm is below 5
        counted += updates[0] is not None and 7 in cohort.client_n
        largest_coef = max(largest_coef, info.largest_weight)
    assert counted > 0
    assert np.abs(state.params_d).max() < 100
    if label == "pracdelta":
        assert largest_coef > 3 / 5  # such a reply would count for more


def raised(label: str, clip: str | None, alternating: bool) -> float:
    """The largest ratio of a liar's inclusion probability to the mean of the others, who are all
    alike.
    """
    m = 20
    n = 5
    plan = make_plan(label, Population.from_sizes([1] * m), n, clip=clip)
    state = init_round(plan, np.zeros(30))
    rng = np.random.default_rng(0)
    worst = 0.0
    visits = 0
    for _ in range(80):
        cohort = open_round(plan, state)
        update_nd = rng.normal(size=(len(cohort.client_n), 30))
        told_n = np.ones(len(cohort.client_n))
        for k in np.flatnonzero(cohort.client_n == 0):
            visits += 1
            update_nd[k] *= 1e6 * (-1) ** (visits * alternating)
            told_n[k] = 1e15
        reports = Reports.make(
            len(told_n), loss=told_n, square_loss=told_n**2, step_variance=told_n
        )
        state, _ = close_round(plan, state, cohort, update_nd, reports)
        sampler: Any = plan.sampler
        pi_m = inclusion_probabilities(sampler.scores(state.sampler, None, n, None), n)
        worst = max(worst, pi_m[0] / pi_m[1:].mean())
    return worst


@pytest.mark.sampled(3)
@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize(
    "label", ["pracdelta", "fedpracis", "innovation", "delta-centred", "osmd", "k-vib", "vrb"]
)
def test_lying_less_than_doubles_the_chance_to_be_selected(label: str, alternating: bool) -> None:
    """Long updates, alternating signs, false losses and variances; without clipping the liar is
    always selected.
    """
    assert raised(label, "median", alternating) < 2
    assert raised(label, None, alternating) > 3.5


@pytest.mark.parametrize(("honest", "most"), [(2.0, 3.0), (0.0, 0.0), (-3.0, -2.0)])
def test_a_large_loss_counts_little_whatever_sign_losses_have(honest: float, most: float) -> None:
    reports = Reports.make(4, loss=[honest, 1e15, honest, honest])
    clipping = Clipping(KnownNorms(np.ones(4)), np.ones(4), 4)
    assert clipping.scored(reports).loss_n.tolist() == [honest, most, honest, honest]


def test_saved_states_keep_the_norms_and_belong_to_their_clip(tmp_path: Path) -> None:
    plan = make_plan("pracdelta", Population.from_sizes(SIZES), 2, clip="median")
    state = init_round(plan, np.zeros(3))
    for round in range(4):
        state, _ = close_round(plan, state, open_round(plan, state), [np.full(3, 1.0 + round)] * 2)
    save_state(tmp_path / "state", state, plan)
    back = load_state(tmp_path / "state", plan)
    one, two = (
        close_round(plan, s, open_round(plan, s), [np.full(3, 1e9)] * 2)[0] for s in (state, back)
    )
    assert one.params_d.tobytes() == two.params_d.tobytes()
    assert np.abs(one.params_d).max() < 100
    plain = make_plan("pracdelta", plan.population, 2)
    save_state(tmp_path / "plain", init_round(plain, np.zeros(3)), plain)
    with pytest.raises(DeltaflError, match="clip"):
        load_state(tmp_path / "plain", plan)


def test_bad_values_and_labels() -> None:
    population = Population.from_sizes(SIZES)
    with pytest.raises(DeltaflError, match="clip is 'mean'; write clip='median'"):
        make_plan("uniform", population, 2, clip="mean")
    for ratio in (0.5, float("nan"), float("inf")):
        with pytest.raises(DeltaflError, match="max_ratio is"):
            Population.from_sizes(SIZES, max_ratio=ratio)
    remark = f"clipped to {RADIUS:g} medians of the norms of updates."
    assert bias_remark(["uniform"], {"clip": "median"}) == [f"Biased: {remark}"]
    assert Population.from_sizes([10, 10, 10, 10_000], max_ratio=3).num_examples_m.tolist() == [
        10,
        10,
        10,
        30,
    ]
