"""Forecasts of rounds and cost: known numbers, and what a prices' text means."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import DeltaflError, Population, make_plan, plan_for
from deltafl.analysis import Prices, Run, used
from deltafl.analysis.advice import Advice
from deltafl.analysis.forecast import (
    Course,
    Curve,
    Forecast,
    Trial,
    between_sizes,
    cost_ratio,
    jackknife,
)
from deltafl.analysis.statistics import Interval
from deltafl.types import LOSS
from tools.runs import make_run

GOAL = 0.8


def course(pace: float, rounds: int, n: int = 1, setup: float = 0.0) -> Course:
    """Accuracy 1 - exp(-t / (4 pace)), so that 0.8 is reached after 6.44 pace rounds."""
    round_r = np.arange(1.0, rounds + 1)
    used_rk = np.zeros((rounds, 6))
    used_rk[:, [0, 5]] = setup + n * round_r[:, None]
    used_rk[:, 1] = 0.01 * n * round_r
    used_rk[:, 4] = round_r
    return Course(1 - np.exp(-round_r / (4 * pace)), used_rk)


FULL = [course(1.0, 20, 100), course(1.5, 20, 100)]


def test_a_short_run_is_continued_at_its_pace_beside_full_participation() -> None:
    whole = Trial("slow", 5, [course(4.0, 60), course(6.0, 60)])
    assert whole.rounds_to(GOAL, FULL).tolist() == [26, 39]
    short = Trial("slow", 5, [course(4.0, 12), course(6.0, 12)])
    # ``full`` reaches the goal after 7 and 10 rounds, in whole ones, and the pace is a fourth.
    np.testing.assert_allclose(short.rounds_to(GOAL, FULL), [28, 40], rtol=0.05)


@given(factor=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3))
def test_of_other_metrics_neither_unit_nor_zero_counts(factor: float, shift: float) -> None:
    def other(course: Course) -> Course:
        best_r = factor * course.best_r + shift
        return Course(best_r, course.used_rk, float(best_r[0]))

    full = [other(each) for each in FULL]
    short = Trial("slow", 5, [other(course(4.0, 12)), other(course(6.0, 12))])
    found = short.rounds_to(factor * GOAL + shift, full)
    # As by the share, of which the first round's 6 % are the beginning here.
    np.testing.assert_allclose(found, [28, 40], rtol=0.05)


def test_the_pace_of_a_run_is_known_though_its_first_rounds_have_no_value() -> None:
    def runs(paces: tuple[float, ...], rounds: int, missing: int) -> list[Course]:
        """Losses without their first values."""
        made = []
        for seed, pace in enumerate(paces):
            run = make_run("uniform", seed, None, "loss", rounds)
            loss_r = np.exp(-run.round_r / (4 * pace))
            loss_r[:missing] = np.nan
            made.append(Course.of(run._replace(loss_r=loss_r), rounds))
        return made

    found = [
        Trial("slow", 5, runs((4.0, 6.0), 12, missing)).rounds_to(-0.2, runs((1, 1.5), 20, missing))
        for missing in (0, 2)
    ]
    np.testing.assert_allclose(found, [[28, 40], [28, 40]], rtol=0.05)

    def moments(missing: int) -> list[int]:
        """The rounds of which a plan of one seed names the best value so far."""
        trial = Trial("uniform", 5, runs((4.0,), 60, missing))
        full = runs((1.0,), 20, missing)
        prices = Prices(training=1.0)
        curve = Curve([trial], full, -0.2, between_sizes({5: 0.2}), prices)
        assert curve.at(5).rounds == (26.0, None, None)
        advice = Advice.of(0.2, prices, None, [curve], {}, LOSS)
        return [at for at, _ in advice.course]

    assert (moments(0), moments(8)) == ([6, 13, 20, 26], [13, 20, 26])


def test_nothing_is_said_of_runs_that_have_learnt_nothing_or_are_too_short() -> None:
    flat = Course(np.full(10, 0.1), np.zeros((10, 6)))
    assert np.isinf(Trial("flat", 5, [flat, flat]).rounds_to(GOAL, FULL)).all()
    assert np.isinf(Trial("slow", 5, [course(60.0, 30)]).rounds_to(GOAL, FULL[:1])).all()


def test_a_run_that_diverged_never_gets_to_the_goal() -> None:
    ended = [each._replace(is_over=True) for each in (course(4.0, 12), course(6.0, 12))]
    trial = Trial("slow", 5, ended)
    assert trial.diverged(GOAL) and np.isinf(trial.rounds_to(GOAL, FULL)).all()
    # What happens after the goal does not matter.
    late = Trial("slow", 5, [course(4.0, 60)._replace(is_over=True)])
    assert not late.diverged(GOAL) and late.rounds_to(GOAL, FULL[:1]).tolist() == [26]
    # One that ended after the goal does not hold up the others.
    mixed = Trial("slow", 5, [course(4.0, 30)._replace(is_over=True), course(6.0, 60)])
    assert (mixed.played, mixed.longest) == (30, 60)


def curve_of(method: str, sizes: list[int], base: float, setup: float = 0.0) -> Curve:
    """Pace (1 + 12 v) base with v(n) = 1 / n."""
    trials = [
        Trial(method, n, [course(base * (1 + 12 / n) * luck, 400, n, setup) for luck in (0.9, 1.1)])
        for n in sizes
    ]
    error_of = between_sizes({n: 1 / n for n in (1, 10, 100)})
    return Curve(trials, FULL, GOAL, error_of, Prices(training=1.0, round=6.0))


def test_rounds_follow_the_variance_and_cost_has_its_least() -> None:
    curve = curve_of("uniform", [2, 4, 8, 16, 32], 1.0)
    # (n + 6) (1 + 12 / n) is least at the root of 72.
    best = curve.best()
    assert best is not None
    assert best.n in (8, 9)
    # Rounds are whole, half of one more in the mean.
    assert best.rounds.mean == pytest.approx(6.44 * (1 + 12 / best.n) + 0.5, rel=0.05)
    assert best.cost.mean == pytest.approx(best.rounds.mean * (best.n + 6), rel=1e-6)
    # Between the sizes that were tried, too.
    assert curve.at(12).rounds.mean == pytest.approx(6.44 * 2 + 0.5, rel=0.05)
    assert not curve.at(12).is_tried
    low, high = best.rounds.low, best.rounds.high
    assert low is not None
    assert high is not None
    assert low < best.rounds.mean < high
    (value,) = curve.accuracy(8, np.array([16.0]))
    assert value.mean == pytest.approx(1 - math.exp(-16 / (4 * 2.5)), abs=0.01)


def test_the_ratio_of_costs_is_paired() -> None:
    """Seeds differ by a factor, which cancels: the interval has next to no width."""
    plain = curve_of("uniform", [4, 8], 4.0)
    other = curve_of("other", [4, 8], 2.0)
    ratio = cost_ratio(plain, 8, other, 8)
    assert ratio.mean == pytest.approx(2.0, rel=0.05)
    assert ratio.low is not None
    assert ratio.low == pytest.approx(2.0, rel=0.3)


def test_seeds_whose_rounds_take_longer_widen_the_interval_of_a_cost_in_seconds() -> None:
    def of_seed(seconds: float) -> Course:
        used_rk = np.arange(1.0, 41.0)[:, None] * [4, 1, 1, seconds, 1, 4]
        return course(2.0, 40)._replace(used_rk=used_rk)

    trial = Trial("uniform", 4, [of_seed(seconds) for seconds in (1.0, 2.0, 3.0)])
    full = [FULL[0]] * 3
    cost = Curve([trial], full, GOAL, between_sizes({4: 0.25}), Prices(second=1.0)).at(4).cost
    # Of two seeds a round takes 2.5, 2 or 1.5 seconds.
    without = [np.array([13 * mean]) for mean in (2.5, 2.0, 1.5)]
    assert cost == jackknife(np.array([26.0]), without)[0]


def test_what_all_clients_did_first_is_in_the_cost() -> None:
    without = curve_of("uniform", [4, 8], 1.0).at(4)
    asked = curve_of("census", [4, 8], 1.0, setup=100.0).at(4)
    assert asked.trainings.mean == pytest.approx(without.trainings.mean + 100)


@pytest.mark.parametrize(("method", "setup"), [("uniform", 0.0), ("census", 30.0)])
def test_no_interval_begins_below_a_first_round(method: str, setup: float) -> None:
    trials = [Trial(method, 4, [course(pace, 400, 4, setup) for pace in (0.5, 8.0)])]
    curve = Curve(trials, FULL, GOAL, between_sizes({4: 0.25}), Prices(training=1.0, round=6.0))
    found = curve.at(4)
    first = (1.0, 4 + setup, 10 + setup)
    for interval, least in zip((found.rounds, found.trainings, found.cost), first, strict=True):
        assert interval.low is not None and interval.high is not None
        assert least == pytest.approx(interval.low) and interval.mean < interval.high
    # One that is narrow stays as it was.
    near = [Trial(method, 4, [course(pace, 400, 4, setup) for pace in (2.0, 2.1)])]
    rounds = Curve(near, FULL, GOAL, between_sizes({4: 0.25}), Prices(training=1.0)).at(4).rounds
    each_s = near[0].rounds_to(GOAL, FULL)
    assert rounds == jackknife(each_s.mean(keepdims=True), [each_s[1:], each_s[:1]])[0]


def test_the_jackknife_of_two_seeds_by_hand() -> None:
    mean_1 = np.array([(1 + math.e**2) / 2])
    (found,) = jackknife(mean_1, [np.array([1.0]), np.array([math.e**2])])
    # Without one or the other the logarithms are 2 and 0: se^2 = 1 / 2 of their squares' sum, 2.
    assert found.high is not None
    assert math.log(found.high / found.mean) == pytest.approx(12.7062, rel=1e-4)
    (alone,) = jackknife(np.array([3.0]), [])
    assert alone == (3.0, None, None)
    # Numbers without a logarithm have no interval; others beside them have theirs.
    both = jackknife(np.append(mean_1, 2.0), [np.array([1.0, 0.0]), np.array([math.e**2, 4.0])])
    assert both == [found, (2.0, None, None)]


def test_the_interval_of_unfinished_runs_holds_the_truth_in_19_of_20_plans() -> None:
    """Each seed has a pace of its own, and none comes to the goal."""
    rng = np.random.default_rng(1)
    truth = 4 * math.exp(0.15**2 / 2) * 6.44
    inside = 0
    for _ in range(100):
        full_s = np.exp(0.05 * rng.standard_normal(5))
        pace_s = 4 * full_s * np.exp(0.15 * rng.standard_normal(5))
        trial = Trial("slow", 5, [course(pace, 12) for pace in pace_s])
        full = [course(pace, 40) for pace in full_s]
        found = Curve([trial], full, GOAL, between_sizes({5: 0.2}), Prices(training=1.0)).at(5)
        assert found.rounds.low is not None and found.rounds.high is not None
        inside += found.rounds.low <= truth <= found.rounds.high
    # 95 +- 2.2; by one pace for all seeds it was 30.
    assert inside >= 88


def test_prices_are_read_from_text_and_from_python() -> None:
    assert Prices.read(None) == Prices(training=1.0)
    assert Prices.read("training=1,mb_up=0.1") == Prices.read({"training": 1, "mb_up": 0.1})
    assert Prices.read(Prices(second=2.0, round=0.5).text) == Prices(second=2.0, round=0.5)
    for wrong in ("training=0", "round=-1", {"training": True}, "training=inf", "", "training=a"):
        with pytest.raises(DeltaflError, match=r"above 0|no price"):
            Prices.read(wrong)
    with pytest.raises(DeltaflError, match="did you mean 'training'"):
        Prices.read("trainings=1")


def test_a_run_costs_what_it_used() -> None:
    run = Run(
        sampler="uniform",
        seed=0,
        metric="accuracy",
        round_r=np.array([1, 2]),
        accuracy_r=np.array([0.5, 0.6]),
        loss_r=np.array([1.0, 0.9]),
        seconds_r=np.zeros(2),
        bytes_r=np.array([3e6, 6e6]),
        bytes_up_r=np.array([1e6, 2e6]),
        trainings_r=np.array([10.0, 20.0]),
        clock_r=np.array([7.0, 9.0]),
        draws_m=np.ones(3, np.int64),
    )
    assert used(run).tolist() == [[10, 1, 2, 7, 1, 10], [20, 2, 4, 9, 2, 20]]
    prices = Prices(training=1.0, mb_up=2.0, mb_down=3.0, second=4.0, round=5.0)
    assert prices.spent(used(run)).tolist() == [10 + 2 + 6 + 28 + 5, 20 + 4 + 12 + 36 + 10]
    # Trainings are paid as each client costs, and counted as they are.
    dear = run._replace(cost_r=np.array([50.0, 70.0]))
    assert used(dear)[:, [0, 5]].tolist() == [[50, 10], [70, 20]]
    assert Prices(training=2.0).spent(used(dear)).tolist() == [100, 140]
    # A run that has fewer rounds than it was to play has ended.
    assert not Course.of(run, 2).is_over
    assert Course.of(run, 3).is_over and Course.of(run._replace(diverged=2), 2).is_over
    # Where lower is better, its negative is compared; a missing value is no progress.
    lost = run._replace(metric="loss", loss_r=np.array([0.25, np.nan]))
    assert Course.of(lost, 2).best_r.tolist() == [-0.25, -0.25]
    assert Course.of(lost, 2).origin == -0.25


@pytest.mark.parametrize(
    ("n", "prices", "told"),
    [
        (1, Prices(training=1.0), True),
        (2, Prices(mb_up=1.0), True),
        (3, Prices(training=1.0), False),
        (1, Prices(training=1.0, round=5.0), False),
        (1, Prices(second=1.0), False),
    ],
)
def test_who_lets_rounds_be_free_is_told_why_so_few_clients_are_asked(
    n: int, prices: Prices, told: bool
) -> None:
    number = Interval(90.0)
    best = Forecast("uniform", n, True, number, number, number, number)
    text = str(Advice(GOAL, prices, None, errors=[], forecasts=[best]))
    assert ("Rounds are free" in text) == told


def test_the_answers_to_a_census_tell_errors_alone() -> None:
    """Codes of 2 bits a parameter have about the errors of the updates themselves."""
    rng = np.random.default_rng(1)
    update_md = rng.normal(size=(4, 256))[np.arange(20) % 4] + 0.2 * rng.normal(size=(20, 256))
    plan = make_plan("census", [10] * 20, n=5)
    assert plan.census is not None
    plan = plan.with_census([plan.census.answer(update_d) for update_d in update_md])
    advice = plan_for(plan.population, samplers=["uniform"])
    assert not advice.forecasts
    assert "for rounds and cost, plan with a task" in str(advice)
    # What a notebook shows.
    assert repr(advice) == str(advice)
    mean_d = update_md.mean(axis=0)
    spread = float(((update_md - mean_d) ** 2).sum()) / 19
    for row in advice.errors:
        exact = (1 / row.n - 1 / 20) * spread / float(mean_d @ mean_d)
        assert row.mse == pytest.approx(exact, rel=0.25, abs=1e-9)
    with pytest.raises(DeltaflError, match="remembers the answers"):
        plan_for(plan.population, samplers=["census"])
    with pytest.raises(DeltaflError, match="first updates"):
        plan_for(Population.from_sizes([10] * 20))
