"""LocalSteps: loss, number and variance of a client's local steps, from gradients of any framework."""

import numpy as np
import pytest

from deltafl import stream
from deltafl.federation.local_work import LocalSteps


def test_the_step_variance_is_the_textbooks() -> None:
    gradient_kd = stream(1, "data").normal(size=(7, 5))
    steps = LocalSteps(lr=0.3)
    for k, gradient_d in enumerate(gradient_kd):
        steps.add(float(k), [gradient_d[:2], gradient_d[2:].reshape(3, 1)])
    metrics = steps.metrics()
    assert metrics["loss"] == 3.0
    assert metrics["num-steps"] == 7
    assert metrics["step-variance"] == pytest.approx(0.09 * gradient_kd.var(axis=0).sum())


def test_the_mean_square_of_example_losses() -> None:
    """Losses 1, 3 (mean square 5) and 0, 2, 4, 2 (mean square 6), as NumPy, a list or a tensor; by hand (5 + 6) / 2."""
    torch = pytest.importorskip("torch")
    for make in (np.array, list, torch.tensor):
        steps = LocalSteps(lr=1.0)
        steps.add(2.0, [np.ones(2)], make([1.0, 3.0]))
        steps.add(2.0, [np.ones(2)], example_losses=make([0.0, 2.0, 4.0, 2.0]))
        expected = {"loss": 2.0, "square-loss": 5.5, "step-variance": 0.0, "num-steps": 2}
        assert steps.metrics() == expected
        steps.add(2.0)  # one step without: nothing is reported
        steps.add(2.0, None, make([1.0, 3.0]))
        assert steps.metrics() == {"loss": 2.0, "step-variance": pytest.approx(0.5), "num-steps": 4}


def test_gradients_of_torch_in_bfloat16_and_sparse_ones_are_read() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.full((3,), 2.0, dtype=torch.bfloat16, requires_grad=True),
        torch.sparse_coo_tensor([[0, 0]], [2.0, 1.0], (3,), check_invariants=True),
        torch.eye(3).to_sparse(),
    ):
        steps = LocalSteps(1.0)
        steps.add(1.0, [torch.zeros_like(tensor)])
        steps.add(1.0, [tensor])
        norm = float(torch.linalg.vector_norm(tensor.detach().to_dense().double()))
        assert steps.metrics()["step-variance"] == pytest.approx(norm**2 / 4)


def test_parameters_without_a_gradient_count_as_zero() -> None:
    some, all_zero = LocalSteps(0.5), LocalSteps(0.5)
    for gradient in ([2.0, 0.0], [0.0, 2.0]):
        some.add(1.0, [np.array(gradient), None])
        all_zero.add(1.0, [np.array(gradient), np.zeros(3)])
    assert some.metrics() == all_zero.metrics()
    late = LocalSteps(1.0)
    late.add(1.0, [None])
    late.add(1.0, [np.array([2.0])])
    assert late.metrics()["step-variance"] == pytest.approx(1.0)
