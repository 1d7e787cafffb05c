"""The average of the last models: its weights by hand, the rounds that it leaves alone, its
place in saved states.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import same_tree
from deltafl import (
    DeltaflError,
    Plan,
    RoundState,
    close_round,
    init_round,
    load_state,
    make_plan,
    open_round,
    save_state,
)
from deltafl.types import Params
from tools.simulation import TINY, lines_of, run

SIZES = [5, 10, 15, 20, 25, 30]


def played(
    rounds: int, state: RoundState | None = None, **settings: Any
) -> tuple[Plan, RoundState, list[Params]]:
    plan = make_plan("innovation", SIZES, 2, **settings)
    state = init_round(plan, np.ones(3)) if state is None else state
    models = []
    target_md = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    for _ in range(rounds):
        cohort = open_round(plan, state)
        state, _ = close_round(
            plan, state, cohort, np.float32(0.5) * (target_md[cohort.client_n] - state.params_d)
        )
        models.append(state.params_d)
    return plan, state, models


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.9])
def test_the_weights_are_powers_and_no_round_is_changed(beta: float) -> None:
    _, plain, models = played(7)
    plan, state, averaged_models = played(7, average=beta)
    assert all(
        np.array_equal(one, other) for one, other in zip(models, averaged_models, strict=True)
    )
    assert same_tree(state._replace(parts=plain.parts), plain)
    weight_t = beta ** np.arange(6, -1, -1)
    expected_d = weight_t @ np.array(models, dtype=np.float64) / weight_t.sum()
    np.testing.assert_allclose(plan.model(state), expected_d, rtol=1e-5)
    assert not np.allclose(plan.model(state), state.params_d, rtol=1e-2)


def test_before_the_first_round_and_after_it_the_model_is_the_last() -> None:
    plan = make_plan("uniform", SIZES, 2, average=0.9)
    np.testing.assert_array_equal(plan.model(init_round(plan, np.ones(3))), np.ones(3))
    plan, state, models = played(1, average=0.9)
    np.testing.assert_allclose(plan.model(state), models[0], rtol=1e-6)


def test_a_mean_of_noise_has_the_variance_that_the_weights_say() -> None:
    """White noise around a fixed point: sum of squared weights, (1 - beta) / (1 + beta) in the
    long run.
    """
    beta = 0.5
    noise_td = np.random.default_rng(0).normal(size=(40, 20_000))
    plan = make_plan("full", [1], 1, average=beta)
    state = init_round(plan, np.zeros(20_000))
    for noise_d in noise_td:
        state, _ = close_round(
            plan, state, open_round(plan, state), (noise_d - state.params_d)[None]
        )
    assert np.var(plan.model(state)) == pytest.approx((1 - beta) / (1 + beta), rel=0.04)


def test_it_is_saved_and_its_memory_is_part_of_the_plan(tmp_path: Path) -> None:
    plan, state, _ = played(3, average=0.5)
    save_state(tmp_path / "state.safetensors", state, plan)
    again = load_state(tmp_path / "state.safetensors", plan)
    assert same_tree(again, state)
    assert same_tree(played(2, again, average=0.5)[1], played(2, state, average=0.5)[1])
    with pytest.raises(DeltaflError, match=r"average = 0.5, and this plan has 0.0"):
        load_state(tmp_path / "state.safetensors", make_plan("innovation", SIZES, 2))


def test_a_run_trains_the_same_models_and_judges_others(tmp_path: Path) -> None:
    run(tmp_path / "plain", **TINY)
    run(tmp_path / "average", **TINY, average=0.5)
    plain = lines_of(tmp_path / "plain")
    average = lines_of(tmp_path / "average")
    assert [line.get("loss") for line in plain] == [line.get("loss") for line in average]
    assert [line["test"] for line in plain[:2]] == [line["test"] for line in average[:2]]
    assert [line["test"] for line in plain[2:]] != [line["test"] for line in average[2:]]
