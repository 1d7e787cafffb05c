"""The census: answers, auxiliary variables, privacy, and estimates that stay unbiased whatever
is answered.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import all_cohorts, make_problem, play
from deltafl import (
    Census,
    DeltaflError,
    Plan,
    Population,
    close_round,
    init_round,
    load_state,
    make_plan,
    make_sampler,
    open_round,
    save_state,
)
from deltafl.estimators.regression import pseudoinverse
from deltafl.estimators.sketch import count_sketch
from deltafl.estimators.two_bits import norms
from deltafl.samplers.census import output_layer
from deltafl.simulation import make_settings, run_single
from deltafl.simulation.engine import Engine
from deltafl.simulation.folder.checkpoint import read_checkpoint
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.settings import RunSettings
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import make_task
from deltafl.types import FloatArray, Params

SMALL = "census(components=2,size=8)"


def auxiliary(census: Census, answers: Any, weight_m: FloatArray) -> FloatArray:
    """The auxiliary variables where answers are sketches without a norm."""
    complete = [np.append(answer, 0.0) if np.ndim(answer) == 1 else answer for answer in answers]
    population = Population(weight_m, np.ones(len(weight_m), dtype=np.int64))
    aux_mq = census.population(population, complete).aux_mq
    assert aux_mq is not None
    return aux_mq


def answers_of(plan: Plan, update_md: Params) -> list[FloatArray]:
    assert plan.census is not None
    return [plan.census.answer(update_d) for update_d in update_md]


# An answer


def test_an_answer_is_the_sketch_of_each_tensors_direction() -> None:
    update_d = np.array([9.0, 9.0, 3.0, 4.0, -0.5])
    expected_k = count_sketch(np.array([[0.6, 0.8, -1.0]]), 16, seed=4)[0]
    answer_k = Census(size=16).answer(update_d, tensors=(2, 1), seed=4)
    np.testing.assert_allclose(answer_k[:-1], expected_k / np.linalg.norm(expected_k), rtol=1e-12)
    assert answer_k[-1] == pytest.approx(np.linalg.norm(update_d))
    louder = update_d * [1, 1, 1e200, 1e200, 1e-200]  # only directions count, and nothing overflows
    np.testing.assert_allclose(
        Census(size=16).answer(louder, tensors=(2, 1), seed=4)[:-1], answer_k[:-1], rtol=1e-12
    )


def test_an_update_without_direction_or_number() -> None:
    assert Census(size=3).answer(np.zeros(5)).tolist() == [0, 0, 0, 0]
    assert np.isnan(Census(size=3).answer([1.0, np.inf])[:-1]).all()
    with pytest.raises(DeltaflError, match="last 9 parameters of an update of 5"):
        Census().answer(np.ones(5), tensors=(8, 1))
    hidden_k = Census(size=3, noise=0.5).answer(np.ones(5), rng=np.random.default_rng(0))
    assert hidden_k[-1] == 0  # its norm would tell more than epsilon says
    with pytest.raises(DeltaflError, match="generator"):
        Census(noise=1.0).answer(np.ones(5))


def test_the_output_layer_has_weights_and_a_bias_that_fits() -> None:
    assert output_layer([(3, 2), (3,), (10, 5), (10,)]) == (50, 10)
    assert output_layer([(5, 10), (10,)]) == (50, 10)  # Keras, JAX
    assert output_layer([(10,)]) == (10,)
    assert output_layer([(7,), (10, 5)]) == (50,)
    assert output_layer([(4, 5), (10,)]) == (10,)


# Auxiliary variables


def test_auxiliary_variables_are_principal_components() -> None:
    rng = np.random.default_rng(0)
    update_md = rng.normal(size=(30, 40))
    weight_m = rng.dirichlet(np.ones(30))
    census = Census(components=4, size=64)
    answer_mk = np.array([census.answer(update_d)[:-1] for update_d in update_md])
    aux_mq = auxiliary(census, answer_mk, weight_m)
    np.testing.assert_allclose(weight_m @ aux_mq, 0, atol=1e-12)
    assert weight_m @ (aux_mq**2).sum(axis=1) == pytest.approx(1)
    # A slow twin: singular vectors of sqrt(w) (a - mean).
    centred_mk = answer_mk - weight_m @ answer_mk
    left, size, _ = np.linalg.svd(np.sqrt(weight_m)[:, None] * centred_mk, full_matrices=False)
    twin_mq = (left * size)[:, :4] / np.sqrt(weight_m)[:, None] / np.sqrt((size[:4] ** 2).sum())
    np.testing.assert_allclose(np.abs(aux_mq), np.abs(twin_mq), rtol=1e-8)


def test_few_answers_have_few_components() -> None:
    """What is left beyond their rank is rounding: were it kept, slopes on it would be 1e16 long."""
    census = Census()
    rng = np.random.default_rng(2)
    answers = [census.answer(rng.normal(size=40)) for _ in range(5)]
    aux_mq = census.population(Population.from_sizes([1, 2, 3, 4, 5]), answers).aux_mq
    assert aux_mq is not None
    assert np.abs(aux_mq[:, :4]).max(axis=0).min() > 0.01
    assert not aux_mq[:, 4:].any()
    noisy_mq = np.hstack([rng.normal(size=(9, 2)), 1e-17 * rng.normal(size=(9, 1))])
    assert not pseudoinverse(noisy_mq.T @ noisy_mq)[2].any()


def test_answers_of_one_direction_have_no_component() -> None:
    rng = np.random.default_rng(6)
    direction_d = rng.normal(size=40)
    answers = [
        Census().answer(np.float32(length) * direction_d.astype(np.float32))
        for length in rng.uniform(1, 2, 8)
    ]
    aux_mq = Census().population(Population.from_sizes([1, 2, 3, 4, 5, 6, 7, 8]), answers).aux_mq
    assert aux_mq is not None
    assert not aux_mq.any()


def test_one_of_two_long_first_updates_is_clipped() -> None:
    """The median of two norms, their mean, would let it pass."""
    census = Census(first_update=True)
    answers = [census.answer(length * np.ones(40)) for length in (1.0, 1e12)]
    code_mc = census.population(Population.from_sizes([1, 1]), answers).code_mc
    assert code_mc is not None
    short, long = norms(np.asarray(code_mc))
    assert long == pytest.approx(25 * short)


def test_updates_in_place_of_answers_are_refused() -> None:
    plan = make_plan("census", [1, 2, 3], 2)
    update_d = np.arange(1.0, 11.0)
    assert plan.census is not None
    with pytest.raises(DeltaflError, match=r"10 numbers, .* write plan.census.answer\(update\)"):
        plan.with_census([update_d, None, update_d])
    with pytest.raises(DeltaflError, match="the update is None"):
        plan.census.answer(None)  # type: ignore[arg-type]
    assert (
        plan.census.answer(update_d, ((4, 2), 2)).tolist()
        == plan.census.answer(update_d, (8, 2)).tolist()
    )


@pytest.mark.parametrize("together", [False, True])
def test_answers_rounded_to_32_bits_are_refused(together: bool) -> None:
    """A code holds 52 bits in a number: rounded, it would predict worse than no answer. Sketches
    alone may be.
    """
    plan, narrow_plan = (
        make_plan(f"{SMALL}@@{name}", [1] * 6, 2) for name in ("two-phase", "regression")
    )
    update_md = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    narrow = [answer_k.astype(np.float32) for answer_k in answers_of(plan, update_md)]
    with pytest.raises(
        DeltaflError, match="has type float32, and needs float64: its code has 52 bits"
    ):
        plan.with_census(np.array(narrow) if together else [None, *narrow[1:]])
    answers = [answer_k.astype(np.float32) for answer_k in answers_of(narrow_plan, update_md)]
    assert (
        narrow_plan.with_census(np.array(answers) if together else answers).population.aux_mq
        is not None
    )


def test_no_answer_counts_as_the_mean_and_a_long_one_as_any_other() -> None:
    census = Census(components=3, size=5)
    rng = np.random.default_rng(1)
    weight_m = np.full(8, 1 / 8)
    answer_mk = rng.normal(size=(8, 5))
    answer_mk /= np.linalg.norm(answer_mk, axis=1, keepdims=True)
    honest_mq = auxiliary(census, answer_mk, weight_m)
    longer = [answer_k * 10.0**i for i, answer_k in enumerate(answer_mk)]
    np.testing.assert_allclose(auxiliary(census, longer, weight_m), honest_mq, atol=1e-12)
    bad: list[object] = [*answer_mk[:4], None, [1.0] * 6, [np.nan] * 5, "text"]
    aux_mq = auxiliary(census, bad, weight_m)
    assert not aux_mq[4:].any()
    assert aux_mq[:4].any()
    np.testing.assert_allclose(weight_m @ aux_mq, 0, atol=1e-12)
    assert not auxiliary(census, [None] * 8, weight_m).any()
    with pytest.raises(DeltaflError, match="7 answers, not one for each of 8"):
        auxiliary(census, answer_mk[:7], weight_m)


def test_signs_of_components_do_not_hang_on_the_machine() -> None:
    """With the axes pointing to their largest entry, a newcomer does not turn what the
    regression has learnt.
    """
    census = Census(components=2, size=6)
    rng = np.random.default_rng(2)
    answer_mk = rng.normal(size=(40, 6)) * [9, 4, 1, 1, 1, 1]
    before_mq = auxiliary(census, answer_mk[:39], np.full(39, 1 / 39))
    after_mq = auxiliary(census, answer_mk, np.full(40, 1 / 40))
    np.testing.assert_allclose(after_mq[:39], before_mq, atol=0.3)


# Privacy


@pytest.mark.parametrize(("noise", "delta"), [(0.1, 1e-5), (0.7, 1e-5), (2.0, 1e-5), (6.0, 1e-3)])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise: float, delta: float) -> None:
    accounting = pytest.importorskip("dp_accounting")
    known = accounting.get_epsilon_gaussian(noise / 2, delta)
    assert Census(noise=noise).epsilon(delta) == pytest.approx(known, rel=1e-6)
    assert Census().epsilon(delta) == Census(noise=0.05).epsilon(delta) == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_noise_hides_that_an_update_was_not_finite(bad: float) -> None:
    census = Census(noise=1.0)
    answer_k, of_zero_k = (
        census.answer(u, rng=np.random.default_rng(0)) for u in ([bad, 1.0, 2.0], np.zeros(3))
    )
    assert np.array_equal(answer_k, of_zero_k)
    assert np.isfinite(answer_k).all()


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.0, 0.88, 0.94), (0.25, 0.6, 0.74), (1.0, 0.1, 0.35)]
)
def test_how_much_an_answer_tells_of_the_labels(noise: float, least: float, most: float) -> None:
    """Figures of docs/why/census-privacy.md, on digits: shares of labels, read from the bias' part of an
    answer.
    """
    task = make_task("digits", seed=0, num_clients=100)
    rng = np.random.default_rng(1)
    census = Census(noise=noise)
    engine = Engine(task, LocalWork(lr=0.05, epochs=2, batch_size=10), seed=0)
    update_md = engine.train(engine.initial_params(), 0, np.arange(100)).update_nd
    read_mc = (
        np.array([census.answer(u, (640, 10), rng=rng)[:-1] for u in update_md])
        @ count_sketch(np.eye(650), 128, 0)[640:].T
    )
    share_mc = [
        np.bincount(task.dataset.train_y[rows], minlength=10) / len(rows)
        for rows in task.client_rows
    ]
    pairs = zip(read_mc, share_mc, strict=True)
    assert least < np.mean([np.corrcoef(read_c, share_c)[0, 1] for read_c, share_c in pairs]) < most


# Estimates


@pytest.mark.sampled(2)
@pytest.mark.parametrize("liar", [None, 1e30, np.nan])
@pytest.mark.parametrize(
    "label", [SMALL, "census(components=2,size=8,by_norm=False)@local-pivotal"]
)
def test_estimates_are_unbiased_whatever_is_answered(label: str, liar: float | None) -> None:
    """By enumeration of all cohorts, in the first round and after some; a liar's answer moves no
    weight.
    """
    problems = [make_problem([3, 1, 2, 5, 2, 4], d=3, seed=seed) for seed in range(4)]
    plan = make_plan(label, problems[0].population, 3)
    answers = answers_of(plan, problems[0].update_md)
    if liar is not None:
        answers[3] = np.full(9, liar)
    plan = plan.with_census(answers)
    assert plan.sampler.unbiased
    first = init_round(plan, np.zeros(3))
    for state in (first, play(plan, first, problems[1:])):
        total = np.zeros(3)
        for chance, cohort in all_cohorts(plan, state, None):
            following, _ = close_round(plan, state, cohort, problems[0].update_md[cohort.client_n])
            total += chance * (following.params_d.astype(np.float64) - state.params_d)
        np.testing.assert_allclose(total, problems[0].ubar_d, atol=2e-6)


@pytest.mark.parametrize("lie", [1e300, -1e300, 1e31, -3.5, 2.0**52])
@pytest.mark.parametrize("large", [False, True])
def test_a_state_after_any_answer_can_be_loaded(
    lie: float, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a client has put in place of the levels of its code."""
    if large:
        monkeypatch.setattr("deltafl.scale.stretches.LARGE", 0)
    problem = make_problem([3, 1, 2, 5, 2, 4], d=300)
    plan = make_plan(SMALL, problem.population, 3)
    answers = answers_of(plan, problem.update_md)
    for place in range(10, len(answers[3])):
        if (place - 9) % 11:
            answers[3][place] = lie
    plan = plan.with_census(answers)
    state = init_round(plan, np.zeros(300))
    save_state(tmp_path / "state", state, plan)
    loaded = load_state(tmp_path / "state", plan)
    np.testing.assert_array_equal(loaded.params_d, state.params_d)


def test_a_liar_is_selected_as_often_as_it_would_be_without_scores() -> None:
    problem = make_problem([3, 1, 2, 5, 2, 4], d=3)
    plan = make_plan("census(by_norm=False)", problem.population, 3)
    answers = answers_of(plan, problem.update_md)
    for lie in (answers[3], -answers[3], np.full(129, 1e9)):
        plan = plan.with_census([*answers[:3], lie, *answers[4:]])
        share_m = np.zeros(6)
        for chance, cohort in all_cohorts(plan, init_round(plan, np.zeros(3)), None):
            share_m[cohort.client_n] += chance
        np.testing.assert_allclose(share_m, 3 * problem.population.weight_m, rtol=1e-9)


def test_norms_say_whom_to_ask_first() -> None:
    """pi_i of the first round is w_i sqrt(shrink + (1 - shrink) norm^2 / mean norm^2), scaled;
    then visits count.
    """
    update_md = np.diag([1.0, 1, 1, 2, 1, 1]).astype(np.float32)
    plan = make_plan("census(components=1,floor=0)@systematic", [1] * 6, 2)
    plan = plan.with_census([*answers_of(plan, update_md)[:5], None])
    state = init_round(plan, np.zeros(6))
    score_m = np.sqrt(0.5 + 0.5 * np.array([1, 1, 1, 4, 1, 1.6]) / 1.6)
    sampler: Any = plan.sampler
    found_m = sampler.scores(state.sampler, None, 2, None)
    np.testing.assert_allclose(found_m, score_m / score_m.sum())
    # A norm out of the blue is selected for certain once, and no longer when it was seen.
    liar = plan.with_census([*answers_of(plan, update_md)[:5], np.append(np.ones(128), 1e300)])
    state = init_round(liar, np.zeros(6))
    for _ in range(6):
        cohort = open_round(liar, state)
        state, _ = close_round(liar, state, cohort, update_md[cohort.client_n])
    assert int(state.selected_m[5]) <= 4
    first = open_round(liar, init_round(liar, np.zeros(6)))
    assert (first.expected_n <= 1).all()


def test_a_plan_says_what_is_missing() -> None:
    with pytest.raises(DeltaflError, match=r"plan = plan\.with_census"):
        init_round(make_plan("census", [1, 2, 3], 2), np.zeros(2))
    with pytest.raises(DeltaflError, match="asks for no census"):
        make_plan("uniform", [1, 2, 3], 2).with_census([None] * 3)
    assert make_sampler("census(components=3)").census == Census(components=3)


# The simulator


def test_answers_of_many_clients_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    m = 40
    answer_mk = np.abs(rng.normal(size=(m, 9)))
    answer_mk[5] = np.nan
    answer_mk[7, :-1] = 0.0
    population = Population.from_sizes(1 + np.arange(m) % 4)
    asked = Census(3, 8)
    whole = asked.population(population, answer_mk)
    assert whole.aux_mq is not None and whole.norm_m is not None and np.isnan(whole.norm_m[5])
    given = [None if i == 5 else list(answer_k) for i, answer_k in enumerate(answer_mk)]
    np.testing.assert_array_equal(asked.population(population, given).aux_mq, whole.aux_mq)
    monkeypatch.setattr("deltafl.samplers.census._BLOCK", 7)
    np.testing.assert_allclose(
        asked.auxiliary(answer_mk, population.weight_m), whole.aux_mq, rtol=1e-9, atol=1e-12
    )


def run(folder: Path, **changes: object) -> RunDirectory:
    given = {
        "task": "digits",
        "clients": 20,
        "sample": 4,
        "rounds": 4,
        "checkpoint_every": 1,
        "sampler": "census",
    }
    run_single(make_settings(RunSettings, given | changes), folder, lambda done: None)
    return RunDirectory(folder)


def test_a_run_begins_with_a_census_that_is_paid_for(tmp_path: Path) -> None:
    lines = list(run(tmp_path / "a").lines("rounds.jsonl"))
    assert lines[0].keys() == {"round", "test"}
    assert (lines[1]["answers"], lines[1]["cohort"], lines[1]["num_responded"]) == (
        20,
        list(range(20)),
        20,
    )
    assert (lines[1]["bytes_down"], lines[1]["bytes_up"]) == (20 * 650 * 4, 20 * (129 + 33) * 8)
    assert lines[1]["test"]["accuracy"] > lines[0]["test"]["accuracy"] + 0.1  # it moves the model
    assert [line["num_selected"] for line in lines[2:]] == [4] * 3
    timings = list(RunDirectory(tmp_path / "a").lines("timings.jsonl"))
    assert timings[1]["cpu_seconds"] > 0
    assert all(0 < timing["client_seconds"] < timing["seconds"] for timing in timings[1:])
    assert (
        timings[-1]["server_bytes"] > 650 * 4 * 11
    )  # the model, and one for the mean and each of ten components
    # Nobody's share of labels is looked at: without any the rounds are the same.
    other = run(tmp_path / "b", workers=2)
    assert list(other.lines("rounds.jsonl")) == lines


@pytest.mark.parametrize(("sampler", "length"), [("census(noise=0.5)", 129), ("census", 162)])
def test_an_interrupted_run_keeps_its_answers(sampler: str, length: int, tmp_path: Path) -> None:
    whole = list(run(tmp_path / "whole", sampler=sampler, checkpoint_every=3).lines("rounds.jsonl"))

    class StopError(BaseException):
        pass

    def stop(done: object) -> None:
        raise StopError

    settings = make_settings(RunSettings, {**read_config(tmp_path / "whole")})
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "part", stop)
    answers = RunDirectory(tmp_path / "part").census()
    assert answers is not None
    assert answers.shape == (20, length)
    run_single(settings, tmp_path / "part", lambda done: None)
    assert list(RunDirectory(tmp_path / "part").lines("rounds.jsonl")) == whole


def read_config(folder: Path) -> dict[str, object]:
    mark = read_checkpoint(folder)
    assert mark is not None
    return mark.settings


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", rounds=2)
    file = tmp_path / "a" / "census.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DeltaflError, match=r"census\.safetensors is not as it was written"):
        run(tmp_path / "a", rounds=3)
