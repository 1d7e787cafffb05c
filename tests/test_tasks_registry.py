"""Tasks: models, the toy, the synthetic task, the registry."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.training.local import LocalWork
from deltafl.tasks.base import Task
from deltafl.tasks.models import cross_entropy, mlp, require_torch, softmax_regression, squared_error, two_layer_cnn
from deltafl.tasks.partition import PARTITIONS
from deltafl.tasks.registry import TASKS, make_task
from deltafl.tasks.synthetic import BAND, SAMPLES_PER_CLIENT
from deltafl.types import FloatArray, IntArray


def client_gradient(task: Task, rows: IntArray) -> FloatArray:
    """The gradient of a client's loss at the model's start."""
    model = task.make_model()
    loss = task.loss(model(torch.from_numpy(task.dataset.train_x[rows])), torch.from_numpy(task.dataset.train_y[rows]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return np.concatenate([np.ravel(gradient.numpy()) for gradient in gradients]).astype(np.float64)


@pytest.mark.parametrize(
    ("model", "shape", "num_params"),
    [
        (two_layer_cnn(), (1, 28, 28), 18_378),
        (two_layer_cnn((4, 8), in_channels=3, side=32, classes=5), (3, 32, 32), 3 * 4 * 25 + 4 + 4 * 8 * 25 + 8 + 1005),
        (softmax_regression(784, 10), (1, 28, 28), 7850),
        (mlp(64, (32, 16), 10), (1, 8, 8), 64 * 32 + 32 + 32 * 16 + 16 + 170),
        (mlp(64, (), 10), (1, 8, 8), 650),
    ],
)
def test_models_have_their_sizes(model: torch.nn.Module, shape: tuple[int, ...], num_params: int) -> None:
    assert sum(p.numel() for p in model.parameters()) == num_params
    output = model(torch.zeros(7, *shape))
    assert output.shape[0] == 7
    assert output.ndim == 2


def test_the_cnn_is_the_same_function_with_the_relu_before_the_pool() -> None:
    torch.manual_seed(0)
    model = two_layer_cnn()
    conv1, pool, relu, conv2, _, _, flatten, linear = model.children()
    other = torch.nn.Sequential(conv1, relu, pool, conv2, relu, pool, flatten, linear)
    x = torch.randn(5, 1, 28, 28)
    assert torch.equal(model(x), other(x))


def test_models_refuse_and_losses_are_means() -> None:
    with pytest.raises(DeltaflError, match="16 x 16"):
        two_layer_cnn(side=12)
    assert float(cross_entropy(torch.zeros(4, 10), torch.arange(4))) == pytest.approx(np.log(10))
    assert float(squared_error(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]))) == 2.5


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"'torch': pip install 'deltafl\[sim\]'"):
        require_torch()


def test_the_toy_has_the_papers_gradients() -> None:
    task = make_task("toy", seed=0)
    gradients = [client_gradient(task, rows) for rows in task.client_rows]
    assert np.array_equal(gradients, [[2, 2], [4, 1], [6, -3]])
    assert np.array_equal(np.mean(gradients, axis=0), [4, 0])
    assert task.initial_params is not None
    assert task.initial_params.tolist() == [1, 1]
    # f at (1, 1) is the mean of 2, 3/2 and 9/2.
    test = torch.from_numpy(task.dataset.test_x)
    assert float(task.loss(task.make_model()(test), torch.zeros(3)).detach()) == pytest.approx(8 / 3)
    assert task.metric == "loss"


def synthetic_loss(task: Task, theta: tuple[float, float]) -> torch.Tensor:
    model = task.make_model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), theta, strict=True):
            parameter.fill_(value)
    output = model(torch.from_numpy(task.dataset.train_x))
    return task.loss(output, torch.from_numpy(task.dataset.train_y)).detach()


def test_synthetic_is_zero_at_the_truth_and_nowhere_near_the_singularity() -> None:
    task = make_task("synthetic", seed=3, num_clients=30, truth=(10.0, 1.0), nu=5.0)
    x = task.dataset.train_x[:, 0].astype(np.float64)
    assert {len(rows) for rows in task.client_rows} == {SAMPLES_PER_CLIENT}
    assert np.abs(10 * x - 1).min() >= BAND - 1e-5
    assert np.allclose(task.dataset.train_y, np.log((10 * x - 1) ** 2 / 2), atol=1e-4)
    assert float(synthetic_loss(task, (10.0, 1.0))) < 1e-8
    theta = (3.0, -2.0)
    # Off the truth some samples come near the singularity: there the output stays at log(0.1^2 / 2) = -5.298.
    near = np.abs(3 * x + 2) < BAND
    assert near.any()
    output = np.where(near, -5.298317, np.log((3 * x + 2) ** 2 / 2))
    expected = np.mean((output - task.dataset.train_y) ** 2)
    assert float(synthetic_loss(task, theta)) == pytest.approx(expected, rel=1e-4)
    assert (task.metric, task.dataset.num_classes) == ("loss", 0)
    assert task.initial_params is not None
    assert [float(p.detach()) for p in task.make_model().parameters()] == task.initial_params.tolist()


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
    assert few.gradient_noise_m is not None
    assert many.gradient_noise_m is not None
    assert np.array_equal(few.gradient_noise_m, many.gradient_noise_m[:3])


@pytest.mark.parametrize("name", ["toy", "synthetic", "digits"])
def test_one_seed_one_task_and_it_survives_pickling(name: str) -> None:
    first, again, other = (make_task(name, seed=seed) for seed in (5, 5, 6))
    copy: Task = pickle.loads(pickle.dumps(first))  # noqa: S301
    for task in (again, copy):
        for field in ("train_x", "train_y", "test_x", "test_y"):
            assert getattr(task.dataset, field).tobytes() == getattr(first.dataset, field).tobytes()
        assert [rows.tolist() for rows in task.client_rows] == [rows.tolist() for rows in first.client_rows]
        assert (task.gradient_noise_m is None) == (first.gradient_noise_m is None)
        assert task.gradient_noise_m is None or np.array_equal(task.gradient_noise_m, first.gradient_noise_m)  # type: ignore[arg-type]
    model = copy.make_model()
    x = torch.from_numpy(copy.dataset.train_x[:2]).float() * copy.input_scale
    loss = copy.loss(model(x), torch.from_numpy(copy.dataset.train_y[:2]))
    assert bool(loss.isfinite())
    if name == "digits":
        assert [rows.tolist() for rows in other.client_rows] != [rows.tolist() for rows in first.client_rows]
    if name == "synthetic":
        assert not np.array_equal(other.dataset.train_x, first.dataset.train_x)


def test_digits_is_scaled_to_one_and_dealt_to_equal_clients() -> None:
    task = make_task("digits", seed=0)
    assert task.dataset.train_x.max() * task.input_scale == 1.0
    assert {len(rows) for rows in task.client_rows} == {15}
    assert make_task("digits", seed=0, partition="quantity", num_clients=20).num_clients == 20
    deep = make_task("digits", seed=0, make_model=partial(mlp, 64, (32,), 10))
    assert sum(p.numel() for p in deep.make_model().parameters()) == 64 * 32 + 32 + 330


def test_settings_that_do_not_fit_the_task_are_refused() -> None:
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: make_task("digit", seed=0), "did you mean 'digits'"),
        (lambda: make_task("toy", seed=0, num_clients=4), "the toy has 3 clients"),
        (lambda: make_task("toy", seed=0, partition="iid"), "partition is not a setting of the task 'toy'"),
        (lambda: make_task("synthetic", seed=0, alpha=0.1), "alpha is not a setting of the task 'synthetic'"),
        (lambda: make_task("synthetic", seed=0, num_clients=0), "1 client or more"),
        (lambda: make_task("synthetic", seed=0, nu=-1.0), "nu is -1.0"),
        (lambda: make_task("synthetic", seed=0, truth=(0.0, 2.0)), "A not 0"),
        (lambda: make_task("digits", seed=0, nu=3.0), "settings of the task 'synthetic'"),
        (lambda: make_task("digits", seed=0, partition="natural"), "needs a column of owners"),
        (lambda: make_task("digits", seed=0, num_clients=1501), "1501 clients, but there are 1500 examples"),
    ]
    for make, words in mistakes:
        with pytest.raises(DeltaflError, match=words):
            make()


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_defaults_are_possible(name: str) -> None:
    spec = TASKS[name]
    assert spec.name == name
    assert 1 <= spec.sample_size < spec.num_clients
    assert (spec.local_epochs is None) != (spec.local_steps is None)
    assert spec.partition is None or spec.partition in PARTITIONS
    LocalWork(spec.local_lr, spec.local_epochs, spec.local_steps, spec.batch_size)
    if name in {"toy", "synthetic", "digits"}:
        task = make_task(name, seed=0)
        assert task.num_clients == spec.num_clients
        assert task.metric == spec.metric


def test_importing_the_registry_loads_neither_torch_nor_scikit_learn() -> None:
    imports = "import sys, deltafl.tasks.registry, deltafl.tasks.download"
    program = f"{imports}; print(*({{'torch', 'sklearn'}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
