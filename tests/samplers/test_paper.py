"""What each sampler asks for, by hand; and the expectations it states, by Monte Carlo at m = 40."""

from pathlib import Path

import numpy as np
import pytest

from conftest import make_problem, play
from deltafl import (
    ClusterIS,
    Cohort,
    Delta,
    DeltaflError,
    FedIS,
    FedPracIS,
    Fixed,
    Full,
    KnownUpdates,
    Plan,
    Population,
    PowerOfChoice,
    PracDelta,
    Reports,
    Sampler,
    Sgd,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
    stream,
)
from deltafl.designs.inclusion import inclusion_probabilities, with_floor
from deltafl.designs.strata import allocate
from deltafl.estimators.own import OwnControlState
from deltafl.estimators.table import find_estimator
from deltafl.samplers.cluster import ClusterState, cluster_by_value
from deltafl.samplers.delta import PracticalState
from deltafl.samplers.label import needs_scores
from deltafl.scale.tree import SumTree
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from tools.samplers import cohort_of as cohort
from tools.samplers import mean_counts


def reports(
    norm: list[float], responded: list[bool] | None = None, **columns: list[float]
) -> Reports:
    """Reports of a cohort with given norms; zeta is the norm unless given."""
    squares = np.square(norm)
    made = Reports.make(len(norm), responded=responded, **columns)
    return made._replace(squared_norm_n=squares, squared_deviation_n=squares)


def cohort_of(*clients: int) -> Cohort:
    return cohort(list(clients), [1] * len(clients), [0.5] * len(clients), "fixed-size")


# --- scores by hand

WEIGHTED = Population.from_sizes([1, 2, 3, 4])


def test_fixed_scores() -> None:
    uniform = Fixed()
    md = Fixed(by_weight=True)
    np.testing.assert_allclose(mean_counts(uniform, uniform.init(WEIGHTED), 2, 4), [0.5] * 4)
    np.testing.assert_allclose(mean_counts(md, md.init(WEIGHTED), 2, 4), [0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(
        mean_counts(md, md.init(WEIGHTED), 3, 4), [0.6 / 1.8, 1.2 / 1.8, 1, 1]
    )


#: Two clients with nearly all of the score, and eight others of two kinds.
UNEVEN_M = np.array([45.0, 45, 2.25, 2.25, 2.25, 2.25, 0.25, 0.25, 0.25, 0.25]) / 100


@pytest.mark.parametrize(
    "label",
    [
        "pracdelta",
        "pracdelta@ordered-pivotal",
        "fedis(floor=0.1)",
        "delta-centred(floor=0.1,shrink=0)",
    ],
)
def test_absent_clients_take_no_score_from_those_present(label: str) -> None:
    """The two clients of large score are away: the others are drawn by their scores, nine tenths
    of the cohort.
    """
    m = len(UNEVEN_M)
    n = 2
    population = Population.from_sizes([1] * m, "uniform")
    available_m = np.arange(m) >= 2
    sampler = make_sampler(label)
    state = sampler.init(population)
    oracle = KnownUpdates(UNEVEN_M[:, None], population.weight_m)
    if label.startswith("pracdelta"):
        state = PracticalState(
            SumTree(UNEVEN_M.copy()) if "ordered" in label else UNEVEN_M, np.zeros(0)
        )
    if label.startswith("delta-centred"):
        state = state._replace(first_m=UNEVEN_M**2, square_m=UNEVEN_M**2)
    expected_m = np.full(m, np.nan)
    for seed in range(60):
        cohort = sampler.open(state, available_m, n, np.random.default_rng(seed), oracle)
        expected_m[cohort.client_n] = cohort.expected_n
    here_m = np.isfinite(expected_m)
    assert not here_m[:2].any()
    assert here_m[2:6].all()
    wanted_k = inclusion_probabilities(with_floor(UNEVEN_M[2:], 0.1), n)
    np.testing.assert_allclose(expected_m[here_m], wanted_k[here_m[2:]], rtol=1e-6)


def test_full_selects_everyone_available() -> None:
    cohort = Full().open(
        Full().init(WEIGHTED), np.array([True, False, True, True]), 1, stream(0, "draw")
    )
    assert cohort.client_n.tolist() == [0, 2, 3]
    assert cohort.expected_n.tolist() == [1, 1, 1]


def test_fedis_by_hand() -> None:
    """Weights (.1, .2, .3, .4), norms (4, 3, 5, 1): scores (.4, .6, 1.5, .4) of sum 2.9."""
    oracle = KnownUpdates(np.array([[4, 0], [0, 3], [3, 4], [0.6, 0.8]]), WEIGHTED.weight_m)
    sampler = FedIS()
    expected = np.array([0.4, 0.6, 1.5, 0.4]) / 2.9
    np.testing.assert_allclose(
        mean_counts(sampler, sampler.init(WEIGHTED), 1, 4, oracle), expected, rtol=1e-6
    )
    floored = FedIS(floor=0.2)
    got_m = mean_counts(floored, floored.init(WEIGHTED), 1, 4, oracle)
    np.testing.assert_allclose(got_m, 0.8 * expected + 0.2 / 4, rtol=1e-6)


def test_delta_by_hand() -> None:
    """Updates 0, 1, 2, 3 of weights (.1, .2, .3, .4): ubar = 2, zeta = (2, 1, 0, 1); sigma^2 =
    (0, 3, 4, 8).
    """
    oracle = KnownUpdates(
        np.array([[0.0], [1], [2], [3]]), WEIGHTED.weight_m, np.array([0.0, 3, 4, 8])
    )
    sampler = Delta(alpha=1.0)
    score = np.array([0.1, 0.2, 0.3, 0.4]) * np.array([2, 2, 2, 3])
    expected = score / score.sum()
    np.testing.assert_allclose(
        mean_counts(sampler, sampler.init(WEIGHTED), 1, 4, oracle), expected, rtol=1e-6
    )


def test_diversity_counts_sigma_once_or_once_a_step() -> None:
    row = Reports.make(2, step_variance=[0.5, 2.0], num_steps=[4, 9])._replace(
        squared_deviation_n=np.array([2.0, 0])
    )
    np.testing.assert_allclose(Delta(sigma_scale="update").score(row), [np.sqrt(2), 3])
    np.testing.assert_allclose(Delta().score(row), [np.sqrt(1.25), 1])
    np.testing.assert_allclose(Delta(alpha=(2.0, 0.0)).score(row), [2, 0])


def test_oracle_clients_that_fail_are_not_selected() -> None:
    class Partial(KnownUpdates):
        def reports(self) -> Reports:
            return super().reports()._replace(responded_n=np.array([True, False, True, True]))

    sampler = FedIS()
    oracle = Partial(np.ones((4, 1)), WEIGHTED.weight_m)
    got_m = mean_counts(sampler, sampler.init(WEIGHTED), 1, 4, oracle)
    np.testing.assert_allclose(got_m, [1 / 8, 0, 3 / 8, 4 / 8])


# --- the paper's practical rule


@pytest.mark.parametrize("sampler", [FedPracIS(), PracDelta(alpha=(1.0, 0.0))])
def test_practical_rule_by_hand(sampler: Sampler) -> None:
    """p = 1/4 each; S = {0, 2} with R = (1, 3) re-divides its half: (1/8, 1/4, 3/8, 1/4). Then S
    = {2, 3}: (1, 4).
    """
    state = sampler.init(WEIGHTED)
    assert state.p_m.tolist() == [0.25] * 4
    state = sampler.update(state, cohort_of(0, 2), reports([1, 3]))
    np.testing.assert_allclose(state.p_m, [1 / 8, 1 / 4, 3 / 8, 1 / 4])
    state = sampler.update(state, cohort_of(2, 3), reports([1, 4]))
    np.testing.assert_allclose(state.p_m, [1 / 8, 1 / 4, 1 / 8, 1 / 2])


def test_practical_rule_reads_what_close_round_measured() -> None:
    """Through the real round: zeta about the plain mean of the replies (2 of 0, 2 and 4), norms
    as they are.
    """
    population = Population.from_sizes([1, 1, 1])
    for sampler, expected in ((FedPracIS(), [0, 1 / 3, 2 / 3]), (PracDelta(), [1 / 2, 0, 1 / 2])):
        problem = make_problem([1, 1, 1])
        update_md = np.array([[0.0], [2], [4]], dtype=np.float32)
        oracle = KnownUpdates(update_md, population.weight_m)
        plan = Plan(population, sampler, 3)
        state = play(
            plan,
            init_round(plan, np.zeros(1)),
            [problem._replace(update_md=update_md, oracle=oracle)],
        )
        np.testing.assert_allclose(state.sampler.p_m, expected, rtol=1e-6)


@pytest.mark.parametrize("make", [FedPracIS, PracDelta])
def test_zero_is_absorbing_without_a_floor(make: type[FedPracIS] | type[PracDelta]) -> None:
    """R = 0 once: never selected again with floor 0, selected at least g n / m of the time with
    floor g.
    """
    for floor, least in ((0.0, 0.0), (0.1, 0.05)):
        sampler = make(floor=floor)
        state = sampler.update(sampler.init(WEIGHTED), cohort_of(0, 1), reports([0, 2]))
        assert state.p_m.tolist() == [0, 0.5, 0.25, 0.25]
        np.testing.assert_allclose(mean_counts(sampler, state, 2, 4)[0], least)
        back = sampler.update(state, cohort_of(0, 2), reports([1, 1]))
        np.testing.assert_allclose(back.p_m[0], 0.125)


@pytest.mark.parametrize("sampler", [FedPracIS(), PracDelta()])
def test_what_the_practical_rule_leaves_alone(sampler: Sampler) -> None:
    """Clients that were not selected or did not respond keep their p; zeros alone, or nobody,
    teach nothing.
    """
    start = sampler.init(WEIGHTED)
    silent = sampler.update(
        start, cohort_of(0, 1, 2), reports([1, 9, 3], responded=[True, False, True])
    )
    np.testing.assert_allclose(silent.p_m, [1 / 8, 1 / 4, 3 / 8, 1 / 4])
    assert (
        sampler.update(silent, cohort_of(0, 1), reports([0, 0])).p_m.tolist() == silent.p_m.tolist()
    )
    nobody = reports([1, 2], responded=[False, False])
    assert sampler.update(silent, cohort_of(0, 1), nobody).p_m.tolist() == silent.p_m.tolist()


# --- clusters


def test_obvious_clusters() -> None:
    label_m = cluster_by_value(np.array([5.0, 0.1, 5.2, 100, 0.2, 101, 4.9, 0.0]), 3)
    assert label_m.tolist() == [1, 0, 1, 2, 0, 2, 1, 0]
    assert cluster_by_value(np.full(4, 2.0), 3).tolist() == [0, 0, 0, 0]
    assert cluster_by_value(np.array([3.0, 1.0]), 1).tolist() == [0, 0]


def test_allocation_by_hand() -> None:
    assert allocate(10, np.array([10, 30, 60])).tolist() == [1, 3, 6]
    assert allocate(4, np.array([1, 1, 98])).tolist() == [1, 1, 2]
    assert allocate(3, np.array([5, 5, 5])).tolist() == [1, 1, 1]


def test_every_cluster_is_represented_and_drawn_by_weight_times_norm() -> None:
    """Norms 1, 1, 10, 30: clusters {0, 1}, {2}, {3} and one draw from each; inside the first by
    weight (1 : 2).
    """
    sampler = ClusterIS(clusters=3, floor=0.0)
    state = ClusterState(WEIGHTED.weight_m, np.array([1.0, 1, 10, 30]), np.array(0))
    np.testing.assert_allclose(mean_counts(sampler, state, 3, 4), [1 / 3, 2 / 3, 1, 1])


def test_cluster_memory() -> None:
    """The last norm of each client; who was never seen counts as the mean of the others."""
    sampler = ClusterIS(clusters=1, floor=0.0)
    state = sampler.init(WEIGHTED)
    np.testing.assert_allclose(mean_counts(sampler, state, 1, 4), WEIGHTED.weight_m)
    state = sampler.update(
        state, cohort_of(0, 1, 3), reports([2, 6, 5], responded=[True, True, False])
    )
    assert state.norm_m.tolist() == pytest.approx([2, 6, float("nan"), float("nan")], nan_ok=True)
    score = WEIGHTED.weight_m * np.array([2, 6, 4, 4])
    np.testing.assert_allclose(mean_counts(sampler, state, 1, 4), score / score.sum())


def test_small_norms_are_left_out_after_the_given_round_and_the_estimate_is_called_biased() -> None:
    """Norms 1, 1, 30, 30 in two clusters: after two updates nobody of {0, 1} can be drawn, and n
    stays 2.
    """
    sampler = ClusterIS(clusters=2, floor=0.0, drop_small_after=2)
    state = ClusterState(WEIGHTED.weight_m, np.array([1.0, 1, 30, 30]), np.array(0))
    assert not sampler.unbiased
    assert ClusterIS(clusters=2).unbiased
    np.testing.assert_allclose(mean_counts(sampler, state, 2, 4), [1 / 3, 2 / 3, 3 / 7, 4 / 7])
    for _ in range(2):
        state = sampler.update(state, cohort_of(2, 3), reports([30, 30]))
    assert state.rounds == 2
    cohort = sampler.open(state, np.ones(4, dtype=bool), 2, stream(0, "draw"))
    assert cohort.client_n.tolist() == [2, 3]
    np.testing.assert_allclose(cohort.expected_n, [1, 1])
    everyone = sampler.open(
        state, np.ones(4, dtype=bool), 3, stream(0, "draw")
    )  # too few others: nobody is left out
    assert len(everyone.client_n) == 3


# --- power of choice


def test_power_of_choice_takes_the_largest_losses() -> None:
    """Candidates of equal weight; then by their shares of the data, as in Cho et al. 2022,
    section 3.
    """
    even = Population.from_sizes(np.full(6, 5))
    loss_m = np.array([0.1, 0.9, 0.5, 0.7, np.nan, 0.2])
    oracle = KnownUpdates(np.ones((6, 1)), np.full(6, 1 / 6), loss_m=loss_m)
    everyone = np.ones(6, dtype=bool)
    all_six = PowerOfChoice(candidates=6)
    assert all_six.open(
        all_six.init(even), everyone, 3, stream(0, "draw"), oracle
    ).client_n.tolist() == [1, 3, 4]
    selected = np.zeros(6)
    for seed in range(600):
        cohort = PowerOfChoice().open(all_six.init(even), everyone, 2, stream(seed, "draw"), oracle)
        assert np.all(np.isnan(cohort.expected_n))
        selected[cohort.client_n] += 1 / 600
    # Of 4 candidates the 2 largest: NaN first (a candidate with 2/3), then 1; the two smallest are
    # never selected.
    np.testing.assert_allclose(selected[[4, 0, 5]], [2 / 3, 0, 0], atol=4 * np.sqrt(2 / 9 / 600))


def test_too_few_candidates_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    settings = make_settings(
        RunSettings, {"task": "toy", "sampler": "power-of-choice(candidates=1)", "sample": 2}
    )
    with pytest.raises(
        DeltaflError, match="candidates is 1; it must be at least the sample size 2"
    ):
        run_single(settings, tmp_path / "run", lambda *_: None)
    assert not (tmp_path / "run").exists()


def test_power_of_choice_draws_its_candidates_by_size() -> None:
    """Sizes 6, 3, 1; two candidates, one taken: the pair {0, 1} has 0.6 * 3/4 + 0.3 * 6/7, {0,
    2} and {1, 2} alike.
    """
    sizes = Population.from_sizes([6, 3, 1])
    oracle = KnownUpdates(np.ones((3, 1)), np.full(3, 1 / 3), loss_m=np.array([0.1, 0.5, 0.9]))
    sampler = PowerOfChoice(2)
    runs = 4000
    selected = np.zeros(3)
    for seed in range(runs):
        drawn = sampler.open(
            sampler.init(sizes), np.ones(3, dtype=bool), 1, stream(seed, "draw"), oracle
        )
        selected[drawn.client_n] += 1 / runs
    pair_01 = 0.6 * 3 / 4 + 0.3 * 6 / 7  # client 1 is selected, unless client 2 is a candidate
    np.testing.assert_allclose(selected, [0, pair_01, 1 - pair_01], atol=4 * np.sqrt(0.25 / runs))
    idle = Population(np.array([0.6, 0.4, 0.0]), np.array([6, 4, 1]))
    drawn = sampler.open(
        sampler.init(idle), np.array([False, True, True]), 1, stream(0, "draw"), oracle
    )
    assert drawn.client_n.tolist() == [1]  # a client without weight is no candidate


# --- Monte Carlo with the real draws: m = 40, n = 8


#: ``census`` with the cube: groups by exchange take three times as long, and tests/designs draws
#: from them.
MONTE_CARLO = [
    *(
        "uniform",
        "uniform@simple-random",
        "uniform@poisson",
        "md",
        "md-fixed",
        "fedis",
        "fedis@multinomial",
    ),
    *(
        "fedis@pivotal",
        "fedpracis",
        "fedpracis@poisson",
        "delta",
        "pracdelta",
        "cluster-is",
        "cluster-is-oracle",
    ),
    *(
        "full",
        "delta-centred",
        "spread",
        "innovation",
        "balanced",
        "census(size=16,components=2)@cube",
    ),
    *("ocs", "aocs", "clustered-sampling-1", "clustered-sampling-2", "osmd", "k-vib", "vrb"),
]


def test_theoretical_draws_without_a_floor_and_with_a_control_need_scores_above_zero() -> None:
    """They never ask a client whose update is 0, and with a control its 0 - c_i is missed: E[D]
    = 1 for ubar = 0.9.
    """
    assert needs_scores(make_sampler("fedis"), find_estimator("difference-own").control)
    population = Population.from_sizes([1, 2, 3, 4])
    plan = make_plan("fedis@systematic@difference-own", population, 2, server_optimizer=Sgd(1.0))
    state = init_round(plan, np.zeros(1))._replace(
        control=OwnControlState(np.ones((4, 1), np.float32), np.ones(1))
    )
    update_md = np.array([[0.0], [1], [1], [1]], dtype=np.float32)
    cohort = open_round(plan, state, oracle=KnownUpdates(update_md, population.weight_m))
    assert 0 not in cohort.client_n
    following, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
    assert following.params_d == pytest.approx([1.0])
    assert population.weight_m @ update_md == pytest.approx([0.9])
