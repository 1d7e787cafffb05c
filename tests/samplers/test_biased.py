"""Biased rivals: Active FL, Oort and DivFL by their papers' formulas, and what they share with
HiCS-FL and MIFA.
"""

from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt
import pytest

from conftest import DRAWS, assert_frequencies, frequencies, make_problem
from deltafl import (
    DeltaflError,
    Moves,
    Plan,
    Population,
    Reports,
    Sampler,
    close_round,
    init_round,
    make_sampler,
    open_round,
    stream,
)
from deltafl.designs.exact import support
from deltafl.samplers import parse_label, representatives
from deltafl.samplers.base import NewFirstState, State, draw_by_logs, draw_successively
from deltafl.samplers.large_loss import ActiveFL, ActiveState
from deltafl.samplers.oort import Oort, OortState
from deltafl.samplers.representatives import DivFL, distances, greedy
from deltafl.types import FloatArray, IntArray
from tools.samplers import cohort_of

NEW = ["mifa", "divfl", "longfed", "hics-fl"]  # they select everyone once first


def reply(
    sampler: Sampler, state: State, client_n: list[int], loss: list[float], responded: list[int]
) -> State:
    """The state after some clients were selected."""
    cohort = cohort_of(client_n, [1] * len(client_n), [np.nan] * len(client_n), "unknown")
    return sampler.update(
        state, cohort, Reports.make(len(client_n), loss=loss, responded=responded)
    )


# --- what biased samplers share


def test_successive_draws_are_those_that_were_enumerated() -> None:
    weight_m = np.array([1.0, 2.0, 3.0, 4.0])
    exact_m = sum(
        p * np.array(count) for count, p in support("successive", 2 * weight_m / 10).items()
    )
    rng = stream(0, "audit")
    count_m = np.zeros(4)
    for _ in range(DRAWS):
        count_m[draw_successively(weight_m, 2, rng)] += 1
    assert_frequencies(count_m / DRAWS, np.asarray(exact_m))


def test_weights_of_any_size_can_be_drawn_from() -> None:
    log_weight_k = np.array([-np.inf, 2000.0, -3000.0, -np.inf])
    for seed in range(20):
        assert draw_by_logs(log_weight_k, 3, stream(seed, "audit")).tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", NEW)
def test_everyone_is_selected_once_first(name: str) -> None:
    """In ceil(m / n) rounds, also those who never reply; an unavailable client later, when it is
    there.
    """
    sampler = make_sampler(f"{name}(classes=3)" if name == "hics-fl" else name)
    state = sampler.init(Population.from_sizes(np.arange(5, 15)))
    available_m = np.arange(10) != 4
    selected = list[int]()
    for round in range(3):
        cohort = sampler.open(state, available_m, 3, stream(0, "draw", round))
        selected += cohort.client_n.tolist()
        reports = Reports.make(3, responded=[True, False, True])
        reports = reports._replace(
            sketch_nq=np.zeros((3, sampler.sketch_size)),
            output_bias_nk=np.zeros((3, sampler.output_bias_size)),
        )
        state = sampler.update(state, cohort, reports)
    assert sorted(selected) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    cohort = sampler.open(state, np.ones(10, dtype=bool), 3, stream(0, "draw", 3))
    assert 4 in cohort.client_n
    assert len(cohort.client_n) == 3


@pytest.mark.parametrize("name", [*NEW, "active-fl", "oort"])
def test_they_have_no_selection_probabilities(name: str) -> None:
    sampler = make_sampler(name)
    assert not sampler.unbiased
    for label, message in (
        ("@horvitz-thompson", "not know its selection probabilities"),
        ("pivotal", "its own way"),
    ):
        with pytest.raises(DeltaflError, match=message):
            parse_label(f"{name}@{label}")


@pytest.mark.parametrize(
    "name",
    [
        "oort",
        "active-fl",
        "cluster-is",
        "fedstas",
        "client-reshuffling",
        "innovation",
        "fedau",
        "fedawe",
        "mifa",
        "divfl",
        "longfed",
    ],
)
def test_rows_follow_the_clients_who_stay_and_newcomers_begin_as_all_did(name: str) -> None:
    sampler = make_sampler(name)
    before = sampler.init(Population.from_sizes([1, 2, 3]))._asdict()
    rows = {field: np.ones_like(before[field]) for field in sampler.row_fields}
    kept = {field: before[field] + 7 for field in sampler.kept_fields}
    moves = Moves(Population.from_sizes([3, 1, 4]), np.array([2, 0]), 3)
    state = sampler.init(Population.from_sizes([1, 2, 3]))._replace(**rows, **kept)
    after = sampler.resized(state, moves)._asdict()
    begins = sampler.init(moves.population)._asdict()
    for field, row_m in rows.items():
        np.testing.assert_array_equal(after[field][:2], row_m[:2])
        np.testing.assert_array_equal(after[field][2:], begins[field][2:])
    for field, value in kept.items():
        np.testing.assert_array_equal(after[field], value)


# --- Active FL


def active(value: npt.ArrayLike) -> ActiveState:
    value_m = np.array(value, dtype=np.float64)
    return ActiveState(np.ones(len(value_m), dtype=np.int64), value_m)


def test_active_values_by_hand() -> None:
    """v = sqrt(n_i) loss, of those who replied."""
    sampler = ActiveFL()
    state = sampler.init(Population.from_sizes([4, 9, 16]))
    state = reply(sampler, state, [0, 2], loss=[0.5, 2.0], responded=[1, 1])
    np.testing.assert_array_equal(state.value_m, [1.0, np.nan, 8.0])
    state = reply(sampler, state, [1, 2], loss=[1.0, 0.25], responded=[1, 0])
    np.testing.assert_array_equal(state.value_m, [1.0, 3.0, 8.0])


#: Of two clients left with values 1 and 1.5, p is exp(2 v) over its sum.
FIRST = exp(2) / (exp(2) + exp(3))
#: Softmax of 0, 1, 2.
SOFTMAX_M = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()


@pytest.mark.parametrize(
    ("sampler", "value", "n", "expected"),
    [
        (
            ActiveFL(0.5, 2.0, 0.0),
            [0.1, 1.0, 1.5, 0.3],
            1,
            [0, FIRST, 1 - FIRST, 0],
        ),  # the two smallest are dropped
        # one by the softmax, which only client 3 survives, and one of the other three
        (ActiveFL(0.75, 1.0, 0.5), [0.0, 1.0, 2.0, 3.0], 2, [1 / 3, 1 / 3, 1 / 3, 1]),
        (
            ActiveFL(0, 1.0, 0),
            [0.0, np.nan, 2.0],
            1,
            SOFTMAX_M,
        ),  # a client never trained has the mean value
        (ActiveFL(), [np.nan] * 3, 1, [1 / 3] * 3),
    ],
)
def test_active_draws_by_hand(
    sampler: ActiveFL, value: list[float], n: int, expected: list[float]
) -> None:
    assert_frequencies(frequencies(sampler, active(value), len(value), n), np.array(expected))


def test_active_drops_the_share_that_was_asked_for() -> None:
    """0.29 * 100 is 28.999999999999996."""
    cohort = ActiveFL(0.29, 0.0, 0.0).open(
        active(np.arange(100)), np.ones(100, dtype=bool), 71, stream(0, "draw")
    )
    assert cohort.client_n.tolist() == list(range(29, 100))


# --- Oort -------------------------------------------------------------------------------


def oort(
    utility: npt.ArrayLike,
    last: list[int],
    rounds: int,
    seconds: npt.ArrayLike = 1,
    fast: float = 0.3,
) -> OortState:
    population = Population.from_sizes([1] * len(last))
    population = population._replace(seconds_m=np.broadcast_to(np.array(seconds, float), len(last)))
    utility_m = np.array(utility, float)
    rounds_ = np.array(rounds)
    state = Oort().init(population)
    return state._replace(
        utility_m=utility_m, last_m=np.array(last), rounds=rounds_, fast=np.array(fast)
    )


def test_oort_utility_of_unequal_losses_by_hand() -> None:
    """n_i sqrt(mean loss^2) where clients report mean squares; n_i |mean loss| of one that does
    not.

    Client 0 has losses 1, 1, 1, 5: mean 2, mean square (1 + 1 + 1 + 25) / 4 = 7, U = 4 sqrt(7) =
    10.58. Client 1 has losses 0 (three times) and 1 (six times): mean 2/3, mean square 6/9, U = 9
    sqrt(2/3) = 7.35. Client 2 reports its mean 1/2 alone: U = 16 / 2 = 8, between the two; by mean
    losses they would be 8, 6 and 8.
    """
    sampler = Oort()
    state = sampler.init(Population.from_sizes([4, 9, 16]))
    reports = Reports.make(3, loss=[2.0, 2 / 3, 0.5], square_loss=[7.0, 2 / 3, None])
    state = sampler.update(state, cohort_of([0, 1, 2], [1] * 3, [np.nan] * 3), reports)
    np.testing.assert_allclose(state.utility_m, [10.5830052, 7.3484692, 8], rtol=1e-8)
    state = reply(sampler, state, [1, 2], loss=[1.0, 9.0], responded=[1, 0])
    np.testing.assert_allclose(state.utility_m, [10.5830052, 9, 8], rtol=1e-8)
    assert (state.last_m.tolist(), int(state.rounds)) == ([1, 2, 1], 2)


def test_oort_learns_squares_through_a_round() -> None:
    """sqrt(n_i^2 mean loss^2) of the replies that were used; a mean square that is none costs
    the reply.
    """
    plan = Plan(Population.from_sizes([1, 2, 3, 4]), Oort(), n=4, estimator="plain-mean")
    state = init_round(plan, np.zeros(1))
    reports = Reports.make(4, loss=[1.0, 1.0, 1.0, 1.0], square_loss=[4.0, None, 9.0, 0.5])
    following, info = close_round(plan, state, open_round(plan, state), np.ones((4, 1)), reports)
    np.testing.assert_array_equal(following.sampler.utility_m, [2.0, 2.0, 9.0, np.nan])
    assert [(reply.client, reply.reason[:23]) for reply in info.rejected] == [
        (3, "mean squared loss is 0.")
    ]


def test_oort_scores_by_hand() -> None:
    """(min(U, q95) - .999 low) / (high - .999 low) + sqrt(.1 ln t / L) in round t = 5; no
    clipping below 20 clients.
    """
    scale = 30 - 9.99
    expected = [
        0.01 / scale + sqrt(0.1 * log(5)),
        10.01 / scale + sqrt(0.1 * log(5) / 2),
        np.nan,
        1 + sqrt(0.1 * log(5) / 4),
    ]
    state = oort([10.0, 20.0, np.nan, 30.0], [1, 2, 0, 4], rounds=4)
    np.testing.assert_allclose(Oort().scores(state), expected, rtol=1e-12)


def test_oort_clips_the_largest_utilities() -> None:
    """Utilities 1 to 40 in round t = 2: the 95 % quantile is 39, which the 40 counts as; the
    scale ends at the 40.
    """
    score_m = Oort().scores(oort(np.arange(1, 41), [1] * 40, rounds=1))
    expected = [
        (utility - 0.999) / (40 - 0.999) + sqrt(0.1 * log(2)) for utility in (1, 38, 39, 39)
    ]
    np.testing.assert_allclose(score_m[[0, 37, 38, 39]], expected, rtol=1e-12)


def test_oort_exploits_a_growing_share() -> None:
    """floor((1 - max(.2, .9 .98^(t - 1))) n)."""
    assert [Oort().exploited(t, 10) for t in (1, 2, 12, 30, 75, 76, 500)] == [1, 1, 2, 4, 7, 8, 8]


def test_oort_admits_near_the_cut_off_and_draws_by_score() -> None:
    """Two of four places in round 2 by hand: the 2nd largest score is the cut-off, 95 % of it
    are admitted.
    """
    state = oort([10.0, 10.5, 10.4, 2.0, *[np.nan] * 6], [1] * 4 + [0] * 6, rounds=1)
    sampler = Oort(exploration=0.5, decay=1.0)
    score_m = sampler.scores(state)
    assert score_m[0] > 0.95 * score_m[2] > score_m[3]
    admitted = score_m[:3] / score_m[:3].sum() * 2
    exact_m = sum(p * np.array(count) for count, p in support("successive", admitted).items())
    assert_frequencies(
        frequencies(sampler, state, 10, 4), np.array([*np.asarray(exact_m), 0, *[2 / 6] * 6])
    )


def test_oort_fills_up_from_whom_there_is() -> None:
    """One new client left: it is selected, the rest are known ones. Nobody known: all are new."""
    sampler = Oort()
    state = oort([1.0, 2.0, 3.0, np.nan], [1, 1, 1, 0], rounds=1)
    assert_frequencies(frequencies(sampler, state, 4, 4), np.ones(4))
    assert frequencies(sampler, state, 4, 2)[3] == 1
    fresh = sampler.init(Population.from_sizes([5, 6, 7, 8]))
    assert_frequencies(frequencies(sampler, fresh, 4, 2), np.full(4, 0.5))


def test_oort_system_utility_by_hand() -> None:
    """(T / T_i)^2 of those slower than T, the quantile that 3 of 10 are below; new ones are
    drawn by it, too.
    """
    state = oort([np.nan] * 10, [0] * 10, 0, seconds=[8, 2, 1, 4, 3, 5, 6, 7, 9, 10])
    square_m = (4 / np.array([8, 4, 4, 4, 4, 5, 6, 7, 9, 10])) ** 2
    np.testing.assert_allclose(Oort().system(state), square_m)
    np.testing.assert_allclose(Oort(penalty=1.0).system(state), np.sqrt(square_m))
    assert (Oort().system(state._replace(fast=np.array(1.0))) == 1).all()
    assert_frequencies(frequencies(Oort(), state, 10, 1), square_m / square_m.sum())


def test_oort_exploits_fast_clients() -> None:
    """Of two with the same utility, the one three times too slow has a ninth of the score, below
    the cut-off.
    """
    sampler = Oort(exploration=0.0, least_exploration=0.0)
    known = [1, 1, 1]
    assert_frequencies(frequencies(sampler, oort([5.0] * 3, known, 1), 3, 1), np.full(3, 1 / 3))
    state = oort([5.0] * 3, known, 1, seconds=[1, 3, 1])
    assert_frequencies(frequencies(sampler, state, 3, 1), np.array([0.5, 0, 0.5]))
    assert_frequencies(
        frequencies(Oort(0.0, 1.0, 0.0, penalty=0.0), state, 3, 1), np.full(3, 1 / 3)
    )


def test_oort_pacer_relaxes_when_utility_does_not_grow() -> None:
    """By 5 % of the clients after rounds 40, 60, ..., if the last 20 gained no more than the 20
    before.
    """

    def shares(loss_t: list[float]) -> list[float]:
        sampler = Oort()
        found = list[float]()
        state = sampler.init(Population.from_sizes([2, 3]))
        for loss in loss_t:
            state = reply(sampler, state, [0, 1], loss=[loss, 9.0], responded=[1, 0])
            found.append(round(float(state.fast), 9))
        return found

    assert shares([1.0] * 61) == [0.3] * 39 + [0.35] * 20 + [0.4] * 2
    assert shares([*np.arange(1.0, 41), *[40.0] * 19, 0.0]) == [0.3] * 60
    assert shares([1.0] * 400)[-1] == 1.0


# --- DivFL


def diverse(point_mq: FloatArray, available: npt.ArrayLike, n: int, seed: int = 0) -> IntArray:
    """DivFL's cohort once all clients have replied."""
    everyone_m = np.ones(len(point_mq), dtype=np.bool_)
    state = NewFirstState(everyone_m / 1.0, everyone_m, everyone_m, point_mq, np.array(0))
    return DivFL().open(state, np.array(available, dtype=bool), n, stream(seed, "draw")).client_n


def test_divfl_by_hand() -> None:
    """On a line: 3 has the least sum of distances, 31; with it 11 leaves 3 + 2 + 1 + 1 + 2, less
    than 10 or 13.
    """
    point_mq = np.array([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [13.0]])
    assert greedy(distances(point_mq, point_mq), 2).tolist() == [3, 5]
    for seed in range(5):
        assert diverse(point_mq, [1] * 7, 2, seed).tolist() == [3, 5]


def test_divfl_selects_available_clients_that_stand_for_everyone() -> None:
    """Clients 2 and 3 are away but count: of the others, 1 is nearest to all."""
    assert diverse(
        np.array([[0.0], [1.0], [2.0], [10.0], [11.5]]), [1, 1, 0, 0, 1], 2
    ).tolist() == [1, 4]


def test_divfl_computes_distances_only_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(representatives, "distances", None)
    sampler = DivFL(sketch_size=2)
    seen_m = np.arange(6) < 3
    state = sampler.init(Population.from_sizes([1] * 6))._replace(selected_m=seen_m, seen_m=seen_m)
    assert sampler.open(
        state, np.ones(6, dtype=np.bool_), 3, stream(0, "draw")
    ).client_n.tolist() == [3, 4, 5]


def test_divfl_remembers_sketches_of_those_who_replied() -> None:
    problem = make_problem([1, 1, 1], d=20)
    plan = Plan(problem.population, DivFL(), 3, "plain-mean")
    state = init_round(plan, np.zeros(20))
    updates = [problem.update_md[0], None, problem.update_md[2]]
    state, _ = close_round(plan, state, open_round(plan, state), updates)
    assert state.sampler.selected_m.all()
    assert (
        state.sampler.seen_m.tolist()
        == state.sampler.last_mq.any(axis=1).tolist()
        == [True, False, True]
    )
