"""Crop and flip in local training, and whose test examples are whose."""

import functools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from deltafl.simulation.engine import Engine
from deltafl.simulation.training.fast import FastTrainer
from deltafl.simulation.training.serial import LocalWork, train_serial
from deltafl.streams import stream
from deltafl.tasks import Dataset, Task, crop_and_flip, cross_entropy, mlp
from deltafl.tasks.models import PAD
from deltafl.types import Params

WORK = LocalWork(lr=0.1, epochs=2, batch_size=4)
net = functools.partial(mlp, 3 * 6 * 6, (5,), 3)


def images(count: int, side: int = 6) -> torch.Tensor:
    return (
        torch.from_numpy(np.random.default_rng(0).random((count, 3, side, side), dtype=np.float32))
        + 1
    )


def all_variations(image: torch.Tensor) -> list[torch.Tensor]:
    """The 9 x 9 x 2 crops and flips of one image, cut by hand from the image with a border of
    zeros.
    """
    side = image.shape[1]
    padded = torch.zeros(3, side + 2 * PAD, side + 2 * PAD)
    padded[:, PAD:-PAD, PAD:-PAD] = image
    shifts = product(range(2 * PAD + 1), repeat=2)
    crops = [padded[:, top : top + side, left : left + side] for top, left in shifts]
    return [*crops, *(crop.flip(2) for crop in crops)]


def test_crops_and_flips_are_those_of_the_definition_and_equally_likely() -> None:
    image = images(1)[0]
    draws = 16_200
    made = crop_and_flip(image.expand(draws, -1, -1, -1), np.random.default_rng(1))
    known = {one.numpy().tobytes(): number for number, one in enumerate(all_variations(image))}
    counts = np.bincount([known[one.tobytes()] for one in made.numpy()], minlength=162)
    assert counts.sum() == draws
    # Chi-squared with 161 degrees of freedom: mean 161, standard deviation 18.
    assert 161 - 4 * 18 < float(((counts - 100) ** 2 / 100).sum()) < 161 + 4 * 18


def test_cutting_a_batch_in_two_changes_nothing() -> None:
    x = images(7)
    whole = crop_and_flip(x, stream(0, "augment"))
    rng = stream(0, "augment")
    assert torch.equal(torch.cat([crop_and_flip(x[:3], rng), crop_and_flip(x[3:], rng)]), whole)
    assert torch.equal(x, images(7))
    assert whole.shape == x.shape


def test_the_fast_path_varies_inputs_as_its_twin_does() -> None:
    torch.manual_seed(0)
    model = net()
    x = images(10)
    y = torch.arange(10) % 3
    params_d: Params = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    results = []
    for train in (
        FastTrainer(model, cross_entropy).train,
        functools.partial(train_serial, model, cross_entropy),
    ):
        vary = functools.partial(crop_and_flip, rng=stream(0, "augment", 2, 1))
        results.append(train(x, y, params_d, WORK, stream(0, "batches"), augment=vary))
    np.testing.assert_allclose(results[0].update_d, results[1].update_d, atol=1e-6)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)


def make_task() -> Task:
    x = images(20).numpy()
    y = np.arange(20) % 3
    data = Dataset("made", x, y, x[:9], y[:9], 3)
    return Task("made", data, [np.arange(0, 12), np.arange(12, 20)], net, cross_entropy)


def test_the_engine_varies_by_seed_round_and_client_and_in_training_alone() -> None:
    plain, varied = (
        Engine(replace(make_task(), augment=how), WORK, 5) for how in (None, crop_and_flip)
    )
    params_d = plain.initial_params()
    everyone = np.arange(2)
    assert not np.array_equal(
        plain.train(params_d, 0, everyone)[0], varied.train(params_d, 0, everyone)[0]
    )
    assert np.array_equal(
        varied.train(params_d, 0, everyone)[0][1:], varied.train(params_d, 0, everyone[1:])[0]
    )
    assert plain.evaluate(params_d) == varied.evaluate(params_d)
    assert np.array_equal(plain.losses(params_d, everyone), varied.losses(params_d, everyone))
    # By hand, with the documented streams.
    vary = functools.partial(crop_and_flip, rng=stream(5, "augment", 3, 1))
    x = images(20)[12:]
    y = torch.arange(20)[12:] % 3
    twin = train_serial(
        net(), cross_entropy, x, y, params_d, WORK, stream(5, "batches", 3, 1), augment=vary
    )
    np.testing.assert_allclose(
        varied.train(params_d, 3, everyone[1:]).update_nd[0], twin.update_d, atol=1e-6
    )


def test_client_accuracy_counts_every_client_the_same() -> None:
    # The model of zeros says class 0 always: rows 0, 3 and 6 of the nine test rows are right.
    task = replace(make_task(), test_clients=np.array([0, 0, 0, 1, 1, -1, 1, -1, -1]))
    engine = Engine(task, WORK, 0)
    found = engine.evaluate(np.zeros(engine.num_params, np.float32))
    assert found.accuracy == pytest.approx(3 / 9)
    assert found.client_accuracy == pytest.approx((1 / 3 + 2 / 3) / 2)
    for owners in (None, np.full(9, -1)):
        other = Engine(replace(task, test_clients=owners), WORK, 0)
        assert np.isnan(other.evaluate(np.zeros(engine.num_params, np.float32)).client_accuracy)
