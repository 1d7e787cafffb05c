"""Local pivotal and cube draws: exact by enumeration of their own code, spread or balanced by
what is argued there.
"""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conftest import all_replies, same_tree
from deltafl import DESIGNS, Cohort, DeltaflError, draw_cohort, inclusion_probabilities, stream
from deltafl.designs import balanced
from deltafl.designs.anticluster import anticluster
from deltafl.designs.exact import Support, every_path, support
from deltafl.types import FloatArray
from tools.samplers import joint_expectations
from tools.variance import estimate_variance

DRAWS = {"local-pivotal": balanced.local_pivotal, "cube": balanced.cube, "anticluster": anticluster}
NAMES = list(DRAWS)


def mean_of(cohorts: Support) -> FloatArray:
    return np.asarray(sum(p * np.array(count) for count, p in cohorts.items()))


def whole_draws(name: str, pi_m: FloatArray, value_mq: FloatArray) -> Support:
    """Every path through the complete draw, first decision to last, with none of them merged."""
    result: Support = defaultdict(float)
    for probability, drawn in every_path(lambda luck: DRAWS[name](pi_m, value_mq, luck)):
        result[tuple(np.bincount(drawn, minlength=len(pi_m)).tolist())] += probability
    return result


def likely(cohorts: Support) -> Support:
    return {count: p for count, p in cohorts.items() if p > 1e-12}


def check_exact(cohorts: Support, pi_m: FloatArray) -> None:
    assert sum(cohorts.values()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(mean_of(cohorts), pi_m, atol=1e-13)
    assert {sum(count) for count in likely(cohorts)} == {round(pi_m.sum())}
    assert {max(count) for count in likely(cohorts)} == {1}


# --- exactness


def fly_side_by_side_above(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let more clients than this fly in queues side by side."""
    for name, value in (("SIDE_BY_SIDE", count), ("FEWEST", count), ("QUEUE", 0)):
        patch.setattr(balanced, name, value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("m", "n", "q"), [(2, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 1), (5, 3, 8), (6, 2, 1), (6, 3, 2)]
)
@pytest.mark.parametrize("name", NAMES)
def test_enumerated_inclusion_probabilities_are_exact(
    name: str, m: int, n: int, q: int, seed: int
) -> None:
    rng = stream(seed, "audit", m, q)
    pi_m = inclusion_probabilities(rng.exponential(size=m), n)
    check_exact(support(name, pi_m, rng.normal(size=(m, q))), pi_m)


@pytest.mark.parametrize("name", NAMES)
def test_exact_with_certain_and_impossible_clients_and_twins(name: str) -> None:
    pi_m = np.array([1.0, 0.0, 0.3, 0.3, 0.9, 0.5])
    for places in ([1, 1, 1, 1, 1, 1], [7, 7, 0, 0, 2, 2], [0, 0, 0, 1, 1, 1]):
        cohorts = support(name, pi_m, np.array(places)[:, None] * pi_m[:, None])
        check_exact(cohorts, pi_m)
        assert all(count[:2] == (1, 0) for count in likely(cohorts))


@pytest.mark.parametrize("name", NAMES)
def test_the_enumeration_is_that_of_the_complete_draw(name: str) -> None:
    """``exact.py`` merges states between duels; every path of the very function that draws gives
    the same.
    """
    rng = stream(1, "audit")
    pi_m = inclusion_probabilities(rng.uniform(1, 3, size=4), 2)
    for value_mq in (rng.normal(size=(4, 1)), rng.integers(0, 2, size=(4, 2)) * pi_m[:, None]):
        assert likely(whole_draws(name, pi_m, value_mq)) == pytest.approx(
            likely(support(name, pi_m, value_mq))
        )


@pytest.mark.parametrize("name", ["local-pivotal", "cube"])
def test_cells_and_rolling_windows_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for thousands of clients cut down, so that five go through cells of two and a window
    of four.
    """
    monkeypatch.setattr(balanced, "CELL_SIZE", 2)
    monkeypatch.setattr(balanced, "LEAST_WINDOW", 0)
    pi_m = inclusion_probabilities(np.array([3.0, 1, 2, 2, 1.5]), 2)
    check_exact(whole_draws(name, pi_m, np.array([[0.3], [-1], [0.2], [2], [-0.9]])), pi_m)


@pytest.mark.parametrize("scores", [[1.0, 1, 1], [3.0, 1, 2]])
def test_groups_dealt_in_random_order_are_exact(
    scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltafl.designs.anticluster.LEAST_WINDOW", 0)
    pi_m = inclusion_probabilities(np.array(scores), 2)
    check_exact(whole_draws("anticluster", pi_m, np.array([[0.3], [-1], [0.2]])), pi_m)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("places", [[1, 1, 0, 1, 0], [0.3, -1, 0.2, 2, -0.9], [0, 0, 0, 0, 0]])
def test_queues_side_by_side_are_exact(
    places: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flights of hundreds of clients cut down to five; with columns that are sums of others
    in some queues.
    """
    fly_side_by_side_above(monkeypatch, 4)
    monkeypatch.setattr(balanced, "LEAST_WINDOW", 0)
    pi_m = inclusion_probabilities(np.array([3.0, 1, 2, 2, 1.5]), 2)
    check_exact(whole_draws("cube", pi_m, np.array(places)[:, None] * pi_m[:, None]), pi_m)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("local-pivotal", 256),
        ("local-pivotal", 8),
        ("cube", 256),
        ("cube", 20),
        ("anticluster", 256),
    ],
)
def test_drawn_inclusion_probabilities(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanced, "CELL_SIZE", size)
    fly_side_by_side_above(monkeypatch, size)
    rng = stream(2, "draw")
    m = 60
    n = 15
    draws = 300
    score_m = rng.lognormal(sigma=0.7, size=m)
    value_mq = rng.normal(size=(m, 2))
    pi_m = inclusion_probabilities(score_m, n)
    count_m = np.zeros(m)
    for _ in range(draws):
        count_m[draw_cohort(score_m, n, name, rng, value_mq=value_mq).client_n] += 1
    spread_m = pi_m * (1 - pi_m)
    assert np.array_equal(count_m[spread_m == 0], draws * pi_m[spread_m == 0])
    z_m = (count_m / draws - pi_m)[spread_m > 0] / np.sqrt(spread_m[spread_m > 0] / draws)
    assert np.abs(z_m).max() < 4.5
    assert np.sqrt(np.mean(z_m**2)) < 1.5


# --- spread and balance


def test_local_pivotal_by_hand() -> None:
    """Places 0, 1 and 10, 12, each with 1/2: two duels of neighbours, each at even odds."""
    value_mq = 0.5 * np.array([[0.0], [10], [1], [12]])
    expected = {(1, 1, 0, 0): 0.25, (1, 0, 0, 1): 0.25, (0, 1, 1, 0): 0.25, (0, 0, 1, 1): 0.25}
    assert likely(support("local-pivotal", np.full(4, 0.5), value_mq)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cube", "anticluster"])
def test_balance_by_hand(name: str) -> None:
    """Places -1, -1, 1, 1, each with 1/2: the only balanced cohorts have one of each sign, all
    alike by symmetry.
    """
    value_mq = 0.5 * np.array([[-1.0], [-1], [1], [1]])
    cohorts = likely(support(name, np.full(4, 0.5), value_mq))
    assert set(cohorts) <= {(1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1)}
    check_exact(cohorts, np.full(4, 0.5))


@pytest.mark.parametrize("seed", range(4))
def test_twins_are_drawn_together_only_if_they_must(seed: int) -> None:
    """Of clients at one place whose pi sum to T, floor(T) or ceil(T) are drawn; not so in a
    random order.
    """
    rng = stream(seed, "audit")
    pi_m = inclusion_probabilities(rng.uniform(1, 4, size=6), 3)
    place_m = rng.permutation([0, 0, 1, 1, 1.5, 4])
    cohorts = likely(support("local-pivotal", pi_m, place_m[:, None] * pi_m[:, None]))
    for place in np.unique(place_m):  # 1.5 is drawn to the twins at 1, and must wait for them
        total = pi_m[place_m == place].sum()
        drawn = {int(np.array(count)[place_m == place].sum()) for count in cohorts}
        assert drawn <= {int(np.floor(total)), int(np.ceil(total))}
    pi_m = np.array([0.5, 0.5, 0.4, 0.4, 0.6, 0.6])
    places = np.array([[0.0, 0], [0, 0], [1, 0], [1, 0], [1, 1], [1, 1]]) + rng.normal(size=2)
    joint_mm = joint_expectations("local-pivotal", pi_m, places * pi_m[:, None])
    assert joint_mm[0, 1] == joint_mm[2, 3] == 0
    assert joint_expectations("pivotal", pi_m)[2, 3] > 0.05


def total_errors(
    name: str,
    pi_m: FloatArray,
    value_mq: FloatArray,
    draws: int,
    *,
    judged_mq: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Errors of sum_S x_i / pi_i, (draws, q), and the variances estimated from each cohort,
    (draws,).

    They are of ``judged_mq`` if the draws are judged by something else than the values they
    balance.
    """
    if judged_mq is None:
        judged_mq = value_mq
    rng = stream(4, "draw")
    error_tq = np.zeros((draws, judged_mq.shape[1]))
    guess_t = np.zeros(draws)
    for t in range(draws):
        cohort: Cohort = draw_cohort(pi_m, round(pi_m.sum()), name, rng, value_mq=value_mq)
        part_nq = judged_mq[cohort.client_n]
        error_tq[t] = (part_nq / cohort.expected_n[:, None]).sum(axis=0) - judged_mq.sum(axis=0)
        guess_t[t] = estimate_variance(all_replies(cohort), part_nq)
    return error_tq, guess_t


@pytest.mark.sampled(2)
@pytest.mark.parametrize("side_by_side", [100, 512])
@pytest.mark.parametrize(("window", "q"), [(16, 1), (16, 3), (0, 2)])
def test_cube_errs_by_its_landing_alone(
    window: int, q: int, side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most q + 1 clients land, their moves sum to 0: off by (q + 1) / 2 ranges at most,
    however many are drawn.
    """
    monkeypatch.setattr(balanced, "LEAST_WINDOW", window)
    fly_side_by_side_above(monkeypatch, side_by_side)
    rng = stream(5, "audit")
    m = 300
    pi_m = inclusion_probabilities(rng.uniform(1, 5, size=m), 100)
    place_mq = rng.normal(size=(m, q)) + 3.0
    error_tq, guess_t = total_errors("cube", pi_m, place_mq * pi_m[:, None], 40)
    assert np.all(np.abs(error_tq) <= (q + 1) / 2 * np.ptp(place_mq, axis=0) + 1e-9)
    # Places vary by 1: landing adds about 1/4 a client, (q + 1) / 4 <= 1, and pivotal draws about n
    # (1 - n / m) = 67.
    plain_tq, _ = total_errors("pivotal", pi_m, place_mq * pi_m[:, None], 40)
    squared = np.sum(error_tq**2, axis=1).mean()
    assert squared < 0.06 * np.sum(plain_tq**2, axis=1).mean()
    assert guess_t.mean() > 2 * squared  # the fixed-size formula over-estimates


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("q", "most"), [(8, 0.4), (20, 0.7)])
@pytest.mark.parametrize("equal", [True, False])
def test_groups_balance_more_values_than_the_cohort_has_clients(
    q: int, most: float, equal: bool
) -> None:
    """10 of 100: the cube gives up 8 values for its last 9 clients, and 20 almost altogether."""
    rng = stream(6, "audit")
    pi_m = inclusion_probabilities(np.ones(100) if equal else rng.uniform(1, 3, size=100), 10)
    value_mq = rng.normal(size=(100, q)) * pi_m[:, None]
    squared = {
        name: np.mean(total_errors(name, pi_m, value_mq, 80)[0] ** 2)
        for name in ("cube", "anticluster")
    }
    assert squared["anticluster"] < most * squared["cube"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("equal", [False, True])
def test_groups_balance_squares_too(equal: bool) -> None:
    """Half of the clients are far out: how many of them a cohort has does not show in totals,
    which the cube keeps.
    """
    rng = stream(7, "audit")
    pi_m = inclusion_probabilities(np.ones(100) if equal else rng.uniform(1, 3, size=100), 10)
    place_mq = rng.normal(size=(100, 3)) * rng.choice([0.3, 2.0], size=(100, 1))
    value_mq = place_mq * pi_m[:, None]
    square_mq = place_mq**2 * pi_m[:, None]
    squared = {
        name: np.mean(total_errors(name, pi_m, value_mq, 120, judged_mq=square_mq)[0] ** 2)
        for name in ("cube", "anticluster")
    }
    assert squared["anticluster"] < 0.6 * squared["cube"]


# --- invariants, and what is not a number


EVERY = [*NAMES, "systematic", "pivotal", "multinomial", "poisson"]
VALUE = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-1e300, 1e300), st.floats(-1, 1))


@given(
    arrays(np.float64, 9, elements=st.floats(0, 100)),
    arrays(np.float64, (9, 3), elements=VALUE),
    st.integers(1, 9),
    st.sampled_from([2, 4, 256]),
    st.integers(0, 2**32),
)
def test_every_single_draw_is_well_formed(
    score_m: FloatArray, value_mq: FloatArray, n: int, cell_size: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced, "CELL_SIZE", cell_size)
        patch.setattr(balanced, "LEAST_WINDOW", cell_size)
        fly_side_by_side_above(patch, 2 * cell_size)
        for name in EVERY:
            cohort = draw_cohort(score_m, n, name, stream(seed, "draw"), value_mq=value_mq)
            expected_m = DESIGNS[name].expectation(score_m, n)
            assert np.all(np.diff(cohort.client_n) > 0)
            assert cohort.client_n.dtype == cohort.count_n.dtype == np.int64
            assert np.array_equal(cohort.expected_n, expected_m[cohort.client_n])
            assert np.all(cohort.expected_n > 0)
            assert name == "poisson" or cohort.count_n.sum() == n
            if name != "multinomial":
                assert np.all(cohort.count_n == 1)
                assert set(np.flatnonzero(expected_m >= 1)) <= set(cohort.client_n)
            assert cohort.kind == DESIGNS[name].kind


@pytest.mark.parametrize("name", NAMES)
def test_without_values_both_are_pivotal_draws(name: str) -> None:
    score_m = np.arange(1.0, 9.0)
    plain = draw_cohort(score_m, 3, "pivotal", stream(9, "draw"))
    for value_mq in (None, np.zeros((8, 0)), np.zeros((8, 4))):
        assert same_tree(draw_cohort(score_m, 3, name, stream(9, "draw"), value_mq=value_mq), plain)
    pi_m = inclusion_probabilities(score_m[:5], 2)
    assert support(name, pi_m) == support("pivotal", pi_m)


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_smaller_populations(name: str) -> None:
    rng = stream(10, "audit")
    score_m = rng.uniform(1, 2, size=30)
    value_mq = rng.normal(size=(30, 2))
    available_m = np.arange(30) % 3 > 0
    value_mq[~available_m] = np.nan  # nobody asks them
    masked = draw_cohort(score_m, 6, name, stream(1, "draw"), available_m, value_mq)
    alone = draw_cohort(
        score_m[available_m], 6, name, stream(1, "draw"), None, value_mq[available_m]
    )
    assert np.array_equal(masked.client_n, np.flatnonzero(available_m)[alone.client_n])


@pytest.mark.parametrize(
    ("value_mq", "part"),
    [
        (np.array([[0.0], [np.nan], [1.0]]), "a value of client 1 is not a finite number"),
        (np.zeros((4, 2)), "one row of numbers for each of 3 clients"),
    ],
)
def test_impossible_values(value_mq: FloatArray, part: str) -> None:
    with pytest.raises(DeltaflError, match=part):
        draw_cohort(np.ones(3), 2, "cube", stream(0, "draw"), value_mq=value_mq)


@pytest.mark.parametrize("side_by_side", [30, 512])
def test_the_last_bits_of_the_values_change_no_cohort_of_the_cube(
    side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding differs between machines. Shares of few labels: twins, columns of zeros, and sums
    that are all alike.
    """
    fly_side_by_side_above(monkeypatch, side_by_side)
    rng = np.random.default_rng(4)
    share_mq = np.eye(6)[rng.integers(6, size=90)]
    share_mq[::3] = (share_mq[::3] + np.roll(share_mq[::3], 1, axis=1)) / 2

    def cohorts(value_mq: FloatArray) -> list[list[int]]:
        dice = [balanced.RandomSource(stream(seed, "draw")) for seed in range(30)]
        return [balanced.cube(np.full(90, 0.1), value_mq, luck).tolist() for luck in dice]

    whole = cohorts(share_mq)
    assert len({tuple(cohort) for cohort in whole}) > 20
    for _ in range(3):
        assert cohorts(share_mq * (1 + 1e-15 * rng.standard_normal(share_mq.shape))) == whole
