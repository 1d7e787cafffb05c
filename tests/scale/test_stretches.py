"""Large models are worked on in stretches: slow twins with whole rows, any number of threads,
little memory.
"""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import (
    Plan,
    Population,
    RoundInfo,
    RoundState,
    close_round,
    init_round,
    make_plan,
    open_round,
    stream,
)
from deltafl.accumulate import Accumulator
from deltafl.estimators.two_bits import code_length, decode, encode, sum_decoded
from deltafl.scale.numerics import inner, sum_of_rows, weighted_sum
from deltafl.scale.stretches import LARGE, float_type, over_stretches, stretches
from deltafl.state_file import load_state, save_state
from deltafl.types import FloatArray, Params

RECOMMENDED = [
    "uniform",
    "innovation@local-pivotal",
    "fedvarp",
    "balanced",
    "census",
    "census+average=0.5+scaffold",
    "census+average=0.5+mime=0.7",
    "uniform@@difference-own+clip=median+scaffold",
    "md-fixed@@hajek",
]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of 256 parameters, and two of them at a time for a thread."""
    for name, value in {"STRETCH": 256, "TURN": 512, "_SHORTEST": 256, "_FOR_THREADS": 0}.items():
        monkeypatch.setattr(f"deltafl.scale.stretches.{name}", value)


@pytest.fixture
def large(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, as if models of any size were large."""
    for name, value in {"LARGE": 0, "_LONG_CALLS": 2**13}.items():
        monkeypatch.setattr(f"deltafl.scale.stretches.{name}", value)


@given(st.integers(0, 200_000), st.floats(0.1, 300), st.booleans())
def test_stretches_are_the_parameters_in_their_order(
    num_params: int, rows: float, alone: bool
) -> None:
    place_d = np.arange(num_params)
    parts = stretches(num_params, rows, alone)
    np.testing.assert_array_equal(np.concatenate([place_d[part] for part in parts]), place_d)
    assert all(part.start % 256 == 0 for part in parts)


def test_what_fails_in_a_stretch_fails(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    def look(part: slice) -> None:
        if part.start == 1024:
            np.array(1e300) * np.array(1e300)

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        over_stretches(look, 5000)


def updates(plan: Plan, d: int, round: int) -> Params:
    m = plan.population.num_clients
    common_d = stream(0, "noise").normal(size=d)
    own_md = stream(1, "noise").normal(size=(m, d))
    noise_md = stream(2, "noise", round).normal(size=(m, d))
    return (common_d + 0.5 * own_md + 0.3 * noise_md).astype(np.float32)


def rounds(label: str, m: int, d: int, count: int = 3) -> Iterator[tuple[RoundState, RoundInfo]]:
    plan = make_plan(label, np.arange(1, m + 1), min(4, m))
    if plan.census is not None:
        answers = [plan.census.answer(update_d) for update_d in updates(plan, d, 0)]
        plan = plan.with_census(answers)
    state = init_round(plan, np.zeros(d))
    for round in range(count):
        cohort = open_round(plan, state)
        drifts = plan.drifts(state, cohort.client_n)
        sent_nd = updates(plan, d, round)[cohort.client_n]
        state, info = close_round(plan, state, cohort, sent_nd + (0 if drifts is None else drifts))
        yield state, info


#: Fixtures, and how far what a round says may be from that over whole rows in float64.
SHORT = pytest.mark.parametrize(("stretches_of", "tolerance"), [("short", 1e-6), ("large", 1e-5)])


@SHORT
@pytest.mark.parametrize("label", RECOMMENDED)
# With fewer clients than components of the census, residuals are nothing but rounding.
@pytest.mark.parametrize(("m", "d", "count"), [(30, 1337, 3), (1, 300, 1), (5, 1, 1)])
def test_a_round_in_stretches_is_one_over_whole_rows(
    label: str,
    m: int,
    d: int,
    count: int,
    stretches_of: str,
    tolerance: float,
    request: pytest.FixtureRequest,
) -> None:
    whole = list(rounds(label, m, d, count))
    request.getfixturevalue(stretches_of)
    for (state, info), (expected, told) in zip(rounds(label, m, d, count), whole, strict=True):
        np.testing.assert_allclose(state.params_d, expected.params_d, rtol=1e-5, atol=1e-6)
        for name in ("estimate_norm", "variance", "mean_over_diversity", "residual"):
            found = getattr(info, name)
            np.testing.assert_allclose(found, getattr(told, name), tolerance, tolerance / 1e3)


@pytest.mark.parametrize("stretches_of", ["short", "large"])
@pytest.mark.parametrize("label", RECOMMENDED)
def test_no_bit_depends_on_the_number_of_threads(
    label: str, stretches_of: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(stretches_of)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = list(rounds(label, 9, 2600))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for (state, info), (expected, told) in zip(rounds(label, 9, 2600), one, strict=True):
        np.testing.assert_array_equal(state.params_d, expected.params_d)
        assert repr(info) == repr(told)


def test_rows_of_large_models_are_of_float32_and_of_others_of_float64() -> None:
    assert float_type(LARGE - 1) is np.float64
    assert float_type(LARGE) is np.float32


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-12, 1.0, 9e17])
def test_norms_in_float32_are_those_of_float64(size: float, large: None) -> None:
    """Squares of 1e18 and of 1e-20 are beyond float32."""
    plan = make_plan("uniform@@difference-own", [1, 2, 3, 4], 3)
    state = init_round(plan, np.zeros(700))
    cohort = open_round(plan, state)
    update_nd = size * np.random.default_rng(0).uniform(-1, 1, size=(3, 700))
    accumulator = Accumulator(plan, state, cohort)
    accumulator.add_rows(update_nd)
    accumulator.close()
    np.testing.assert_allclose(
        accumulator.reports.squared_norm_n, (update_nd**2).sum(axis=1), rtol=1e-5
    )
    off_nd = update_nd - update_nd.mean(axis=0)
    np.testing.assert_allclose(
        accumulator.reports.squared_deviation_n, (off_nd**2).sum(axis=1), rtol=1e-5
    )


@pytest.mark.parametrize("size", [1e-25, 1e18])
def test_a_row_beyond_float32_changes_no_bit_of_another(size: float) -> None:
    row_nd = np.random.default_rng(0).normal(size=(9, 700)).astype(np.float32)
    row_nd[4] *= np.float32(size)
    found_n = inner(row_nd, row_nd)
    assert found_n.tolist() == [float(inner(row_d, row_d)) for row_d in row_nd]
    wide_nd = row_nd.astype(np.float64)
    np.testing.assert_allclose(found_n, inner(wide_nd, wide_nd), rtol=1e-6)
    np.testing.assert_allclose(inner(row_nd, row_nd[:1]), inner(wide_nd, wide_nd[:1]), rtol=1e-3)


@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference-own", "regression"])
@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_the_variance_of_replies_that_are_alike_is_that_of_float64(
    estimator: str, apart: float, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    plan = make_plan(f"md@multinomial@{estimator}", [3, 1, 4, 1, 5], 4)
    update_md = rng.normal(size=700) + apart * rng.normal(size=(5, 700))

    def variance() -> float:
        state = init_round(plan, np.zeros(700))
        cohort = open_round(plan, state)
        return close_round(plan, state, cohort, update_md[cohort.client_n])[1].variance

    expected = variance()
    request.getfixturevalue("large")
    np.testing.assert_allclose(variance(), expected, rtol=1e-3, atol=1e-9)


def test_a_saved_state_of_a_large_model_goes_on_with_the_same_bits(
    large: None, tmp_path: Path
) -> None:
    plan = make_plan("census", np.arange(1, 10), 4)
    assert plan.census is not None
    plan = plan.with_census([plan.census.answer(one_d) for one_d in updates(plan, 600, 0)])
    state = init_round(plan, np.zeros(600))
    for round in range(3):
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, updates(plan, 600, round)[cohort.client_n])
    assert state.control.regression.control.slope_qd.dtype == np.float32
    save_state(tmp_path / "state", state, plan)
    loaded = load_state(tmp_path / "state", plan)
    cohort = open_round(plan, state)
    update_nd = updates(plan, 600, 3)[cohort.client_n]
    expected, _ = close_round(plan, state, cohort, update_nd)
    found, _ = close_round(plan, loaded, cohort, update_nd)
    np.testing.assert_array_equal(found.params_d, expected.params_d)


@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 9))
def test_a_sum_of_codes_is_that_of_what_is_read_of_each(d: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    code_mc = encode(rng.normal(size=(m, d)) * np.exp(rng.normal(size=(m, 1))))
    weight_2m = rng.normal(size=(2, m))
    expected_2d = [weighted_sum(weight_m, decode(code_mc, d), d) for weight_m in weight_2m]
    np.testing.assert_allclose(sum_decoded(weight_2m, code_mc, d), expected_2d, atol=1e-12 * m)
    # A tuple of rows, as rounds leave them.
    np.testing.assert_array_equal(
        sum_decoded(weight_2m, tuple(code_mc), d), sum_decoded(weight_2m, code_mc, d)
    )


def test_no_bit_of_a_code_depends_on_its_stretches(request: pytest.FixtureRequest) -> None:
    vector_nd = np.random.default_rng(0).normal(size=(3, 2600))
    whole_nc = encode(vector_nd)
    read_nd = decode(whole_nc, 2600)
    request.getfixturevalue("short")
    np.testing.assert_array_equal(encode(vector_nd), whole_nc)
    np.testing.assert_array_equal(decode(whole_nc, 2600), read_nd)


@given(st.integers(1, 1200), st.integers(1, 5), st.integers(0, 9))
def test_codes_of_rows_are_those_of_each(d: int, n: int, seed: int) -> None:
    vector_nd = np.random.default_rng(seed).normal(size=(n, d))
    code_nc = encode(vector_nd)
    np.testing.assert_array_equal(code_nc, [encode(vector_d) for vector_d in vector_nd])
    number_nbk = code_nc.reshape(n, -1, 11)[..., 1:].astype(np.int64)
    level_nk = number_nbk[..., None] >> 2 * np.arange(26) & 3
    assert code_nc.shape == (n, code_length(d)) and level_nk.max() <= 3
    read_nd: FloatArray = decode(code_nc, d)
    assert 0 < np.sum(read_nd * vector_nd) < 2 * np.sum(vector_nd**2)


def test_a_round_with_codes_takes_no_memory_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 million parameters of 200 clients: 40 bytes a parameter, where one row of float32 of each
    client takes 800.
    """
    m, d, n = 200, 3_000_000, 10
    rng = np.random.default_rng(0)
    # The sums after the census take a second, and are looked at above.
    monkeypatch.setattr(
        "deltafl.estimators.two_phase.sum_decoded",
        lambda weight_qn, _, num_params: np.zeros((len(weight_qn), num_params)),
    )
    code_c = encode(rng.standard_normal(d, np.float32))
    population = Population.from_sizes([1] * m, aux=rng.normal(size=(m, 2)))
    population = population._replace(
        norm_m=np.ones(m), code_mc=np.broadcast_to(code_c, (m, len(code_c)))
    )
    plan = make_plan("census+average=0.5+scaffold", population, n)
    state = init_round(plan, np.zeros(d))
    update_d = rng.standard_normal(d, np.float32)
    tracemalloc.start()
    try:
        close_round(plan, state, open_round(plan, state), [update_d] * n)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * d + 32e6


def test_sums_of_thousands_of_rows_of_float32_keep_their_digits() -> None:
    row_nb = np.random.default_rng(0).uniform(1, 2, size=(20_000, 3)).astype(np.float32)
    share_n = np.full(20_000, 1 / 20_000)
    expected_b = row_nb.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(sum_of_rows(share_n, row_nb), expected_b, rtol=1e-9)
