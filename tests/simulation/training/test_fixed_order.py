"""Fixed minibatch order: minibatches of round 0 in every round, on every route; and what a
memory then knows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from batch_tools import (
    DEVICES,
    ROUTES,
    SIZES,
    WORKS,
    assert_near,
    drift_of,
    dropping,
    engine_of,
    results_of,
    twin_of,
)
from conftest import Problem, Recorder, mean_estimate, mean_square, play
from deltafl import KnownUpdates, Plan
from deltafl.round import init_round
from deltafl.server.table import make_parts
from deltafl.simulation.engine import Engine
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of as engine_of_settings
from deltafl.simulation.setup import plan_of
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import crop_and_flip
from deltafl.types import Params

EVERYONE = np.arange(len(SIZES))
#: Over several passes, the last one not to its end.
STEPS = LocalWork(lr=0.05, steps=7, batch_size=8)


@pytest.mark.parametrize("work", [*WORKS.values(), STEPS], ids=[*WORKS, "steps"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_round_has_the_bits_of_round_0(route: str, work: LocalWork) -> None:
    fresh = engine_of(route, work)
    fixed = engine_of(route, replace(work, fixed_order=True))
    params_d = fixed.initial_params()
    drift_d = drift_of(fixed.num_params, work)
    first, later, *fixed_later = (
        engine.train(params_d, round, EVERYONE, drift_d, squares=True)
        for engine, round in ((fresh, 0), (fresh, 5), (fixed, 0), (fixed, 5), (fixed, 9))
    )
    for own in fixed_later:
        np.testing.assert_equal(own, first)
    # Whole data in another order is the same up to rounding.
    assert np.allclose(first.update_nd, later.update_nd, rtol=0, atol=1e-6) == (
        work.batch_size is None
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", ["serial", "fast", "batched, dense", "batched"])
@pytest.mark.parametrize("what", ["augment", "gradient_noise_m"])
def test_randomness_of_a_round_is_that_of_the_reference(route: str, what: str, device: str) -> None:
    flip: Callable[..., torch.Tensor] = crop_and_flip if "cnn" in ROUTES[route][0] else _scaled
    noise_m = np.array([0, 0.1, 0.2, 0, 0.1, 0.3])
    change: object = flip if what == "augment" else noise_m
    work = replace(WORKS["epochs"], fixed_order=True)
    fixed = engine_of(route, work, device, **{what: change})
    params_d = fixed.initial_params()
    own, later = (fixed.train(params_d, round, EVERYONE, squares=True) for round in (2, 3))
    for client, result in enumerate(results_of(own)):
        assert_near(result, twin_of(fixed, work, client), 1e-4)
    varied_n = np.abs(own.update_nd - later.update_nd).max(axis=1) > 1e-4
    assert varied_n.tolist() == ([True] * 6 if what == "augment" else (noise_m > 0).tolist())


def _scaled(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return x * float(rng.uniform(0.5, 1.5))


def test_random_layers_stay_random() -> None:
    work = replace(STEPS, fixed_order=True)
    engine = engine_of("serial", work, make_model=partial(dropping, 0.5))
    params_d = engine.initial_params()
    one, two = (engine.train(params_d, round, EVERYONE).update_nd for round in (0, 1))
    assert (np.abs(one - two).max(axis=1) > 1e-4).all()


TINY = {
    "clients": 5,
    "sample": 2,
    "local_steps": 3,
    "batch_size": 8,
    "partition": "yurochkin2019",
    "alpha": 0.3,
}


def started(label: str, fixed: bool) -> tuple[Plan, Engine]:
    """A run whose model stays where it is: its server only records D."""
    settings = make_settings(RunSettings, TINY | {"sampler": label, "fixed_order": fixed})
    engine = engine_of_settings(settings)
    return replace(
        plan_of(settings, engine.task.population(settings.weights)),
        parts=make_parts({"server_optimizer": Recorder()}),
    ), engine


def problem_of(plan: Plan, engine: Engine, params_d: Params, round: int) -> Problem:
    training = engine.train(params_d, round, np.arange(5))
    known = KnownUpdates(
        training.update_nd,
        plan.population.weight_m,
        training.reports.step_variance_n,
        training.reports.loss_n,
    )
    return Problem(plan.population, training.update_nd, known)


@pytest.mark.parametrize(
    "label", ["uniform", "uniform@@difference-own", "innovation@local-pivotal", "pracdelta"]
)
def test_the_target_is_the_sum_of_the_updates_with_minibatches_of_round_0(label: str) -> None:
    """E[D] = sum_i w_i u_i(x; xi_i) over all cohorts, after rounds at other models."""
    plan, engine = started(label, fixed=True)
    _, fresh = started(label, fixed=False)
    params_d = engine.initial_params()
    state = init_round(plan, params_d)
    for round in range(2):
        state = play(
            plan, state, [problem_of(plan, engine, params_d + np.float32(0.1 * round), round)]
        )
    target = problem_of(plan, fresh, params_d, 0)
    mean_d = mean_estimate(plan, state, problem_of(plan, engine, params_d, state.round))
    np.testing.assert_allclose(
        mean_d, target.ubar_d, rtol=0, atol=1e-10 * np.abs(target.update_md).max()
    )
    other = problem_of(plan, fresh, params_d, state.round)
    assert np.abs(mean_d - other.ubar_d).max() > 0.01 * np.abs(target.update_md).max()


def test_a_memory_knows_the_minibatch_noise() -> None:
    """While the model stays, every cohort's estimate is the target once all clients were seen;
    else noise is left.
    """
    error = {}
    for fixed in (True, False):
        plan, engine = started("uniform@@difference-own", fixed)
        state = init_round(plan, engine.initial_params())
        problems = [problem_of(plan, engine, engine.initial_params(), round) for round in range(13)]
        state = play(plan, state, problems[:12])
        error[fixed] = mean_square(plan, state, problems[12])
    assert error[True] < 1e-12 * error[False]
