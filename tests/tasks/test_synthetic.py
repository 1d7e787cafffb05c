"""The toy and the synthetic task: the paper's gradients, the singularity, the law of the noise."""

import numpy as np
import pytest
import torch

from deltafl.errors import DeltaflError
from deltafl.tasks import Task, make_task
from deltafl.tasks.synthetic import BAND, SAMPLES_PER_CLIENT, make_synthetic_task
from deltafl.types import FloatArray, IntArray


def client_gradient(task: Task, rows: IntArray) -> FloatArray:
    """The gradient of a client's loss at the model's start."""
    model = task.make_model()
    loss = task.loss(
        model(torch.from_numpy(task.dataset.train_x[rows])),
        torch.from_numpy(task.dataset.train_y[rows]),
    )
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return np.concatenate([np.ravel(gradient.numpy()) for gradient in gradients]).astype(np.float64)


def test_the_toy_has_the_papers_gradients() -> None:
    task = make_task("toy", seed=0)
    gradients = [client_gradient(task, rows) for rows in task.client_rows]
    assert np.array_equal(gradients, [[2, 2], [4, 1], [6, -3]])
    assert np.array_equal(np.mean(gradients, axis=0), [4, 0])
    np.testing.assert_equal(task.initial_params, [1, 1])
    # f at (1, 1) is the mean of 2, 3/2 and 9/2.
    test = torch.from_numpy(task.dataset.test_x)
    assert float(task.loss(task.make_model()(test), torch.zeros(3)).detach()) == pytest.approx(
        8 / 3
    )
    assert task.metric == "loss"


def synthetic_loss(task: Task, theta: tuple[float, float]) -> torch.Tensor:
    model = task.make_model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), theta, strict=True):
            parameter.fill_(value)
    output = model(torch.from_numpy(task.dataset.train_x))
    loss: torch.Tensor = task.loss(output, torch.from_numpy(task.dataset.train_y))
    return loss.detach()


def test_synthetic_is_zero_at_the_truth_and_nowhere_near_the_singularity() -> None:
    task = make_task("synthetic", seed=3, num_clients=30, truth=(10.0, 1.0), nu=5.0)
    x = task.dataset.train_x[:, 0].astype(np.float64)
    assert {len(rows) for rows in task.client_rows} == {SAMPLES_PER_CLIENT}
    assert np.abs(10 * x - 1).min() >= BAND - 1e-5
    assert np.allclose(task.dataset.train_y, np.log((10 * x - 1) ** 2 / 2), atol=1e-4)
    assert float(synthetic_loss(task, (10.0, 1.0))) < 1e-8
    theta = (3.0, -2.0)
    # Off the truth some samples come near the singularity: there the output stays at log(0.1^2 / 2)
    # = -5.298.
    near = np.abs(3 * x + 2) < BAND
    assert near.any()
    output = np.where(near, -5.298317, np.log((3 * x + 2) ** 2 / 2))
    expected = np.mean((output - task.dataset.train_y) ** 2)
    assert float(synthetic_loss(task, theta)) == pytest.approx(expected, rel=1e-4)
    assert (task.metric, task.dataset.num_classes) == ("loss", 0)
    np.testing.assert_equal(
        task.initial_params, [float(p.detach()) for p in task.make_model().parameters()]
    )


def test_synthetic_noise_is_lognormal_with_mean_one_and_variation_half() -> None:
    # 400 clients: the standard error of the mean is 0.025, of the standard deviation about 0.03.
    noise_m = make_task("synthetic", seed=0, num_clients=400, nu=20.0).gradient_noise_m
    assert noise_m is not None
    assert noise_m.min() > 0
    assert np.mean(noise_m / 20) == pytest.approx(1, abs=0.08)
    assert np.std(noise_m / 20) == pytest.approx(0.5, abs=0.1)
    assert np.std(np.log(noise_m / 20)) == pytest.approx(np.sqrt(np.log(1.25)), abs=0.06)


def test_a_client_of_synthetic_does_not_depend_on_how_many_there_are() -> None:
    few, many = (make_task("synthetic", seed=1, num_clients=m) for m in (3, 8))
    assert np.array_equal(few.dataset.train_x, many.dataset.train_x[:3000])
    assert many.gradient_noise_m is not None
    np.testing.assert_equal(few.gradient_noise_m, many.gradient_noise_m[:3])


def test_clients_that_do_not_fit_into_memory_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(DeltaflError, match="2,000,000,000 synthetic clients take about"):
        make_synthetic_task(seed=0, num_clients=2_000_000_000)
