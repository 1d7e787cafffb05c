"""Fixed minibatch order: on every route each round has the bits of round 0."""

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
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import crop_and_flip

EVERYONE = np.arange(len(SIZES))
#: Over several passes, the last one not to its end.
STEPS = LocalWork(lr=0.05, steps=7, batch_size=8)


@pytest.mark.sampled(2)
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
