"""The client's side: LocalSteps, from gradients of any framework, and corrected steps of
PyTorch's optimizers.
"""

from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, corrected_steps, flatten, stream
from deltafl.federation.exchange import Correction
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
    """Losses 1, 3 (mean square 5) and 0, 2, 4, 2 (mean square 6), as NumPy, a list or a tensor;
    by hand (5 + 6) / 2.
    """
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
    some = LocalSteps(0.5)
    all_zero = LocalSteps(0.5)
    for gradient in ([2.0, 0.0], [0.0, 2.0]):
        some.add(1.0, [np.array(gradient), None])
        all_zero.add(1.0, [np.array(gradient), np.zeros(3)])
    assert some.metrics() == all_zero.metrics()
    late = LocalSteps(1.0)
    late.add(1.0, [None])
    late.add(1.0, [np.array([2.0])])
    assert late.metrics()["step-variance"] == pytest.approx(1.0)


# Corrected steps


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_corrections_add_up_whatever_the_number_of_steps(steps: int) -> None:
    """A loop that takes fewer or more steps than it has announced still moves by its own steps
    and c - c_i.
    """
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before_d = flatten(model)
    correction_d = np.arange(len(before_d), dtype=np.float32)
    announced: Any = np.int64(3)  # as whoever counts with NumPy gives it
    with corrected_steps(correction_d, model, optimizer, num_steps=announced):
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    np.testing.assert_allclose(
        flatten(model) - before_d, correction_d - steps, rtol=1e-5, atol=1e-5
    )
    after_d = flatten(model)
    optimizer.step()  # outside, nothing is corrected any more
    gradient_free = steps == 0
    np.testing.assert_allclose(
        flatten(model) - after_d, 0.0 if gradient_free else -1.0, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("parts", "moves"),
    [({"local": ["2.*"]}, [-0.5, 0.0, -1.0]), ({"trainable": ["0.*"]}, [-0.5, 0.0, 0.0])],
)
def test_local_and_frozen_arrays_take_their_own_steps(
    parts: dict[str, Any], moves: list[float]
) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [flatten(layer) if list(layer.parameters()) else 0.0 for layer in model]
    drift_d = np.full(8, 2.0, np.float32)
    with corrected_steps(drift_d, model, optimizer, num_steps=1, step_factor=0.5, **parts):
        for name, parameter in model.named_parameters():
            if "local" in parts or name.startswith("0"):
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for place, change in ((0, moves[0] + 2.0), (2, moves[2])):
        np.testing.assert_allclose(flatten(model[place]) - before[place], change, atol=1e-6)


def test_corrected_steps_are_scaffolds_with_the_optimizers_own_momentum() -> None:
    """The twin takes its steps by hand: heavy-ball momentum on the gradients alone, then (c -
    c_i) / K.
    """
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x_d = model.weight.detach().numpy().ravel().copy()
    speed_d = np.zeros(2)
    correction_d = np.array([0.4, -0.8])
    with corrected_steps({"weight": correction_d.reshape(1, 2)}, model, optimizer, num_steps=4):
        for _ in range(4):
            optimizer.zero_grad()
            (0.5 * (model.weight**2).sum()).backward()
            optimizer.step()
            speed_d = 0.5 * speed_d + x_d
            x_d = x_d - 0.1 * speed_d + correction_d / 4
    np.testing.assert_allclose(model.weight.detach().numpy().ravel(), x_d, rtol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_with_a_step_factor_the_optimizers_own_steps_are_shorter(name: str) -> None:
    """As with a factor of the learning rate, which both optimizers' steps are proportional to."""
    torch = pytest.importorskip("torch")
    found = []
    for factor, lr in ((0.25, 0.1), (None, 0.025)):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, weight_decay=0.5)
        sent = Correction({"weight": np.array([[0.4, -0.8]])}, step_factor=factor or 1.0)
        with corrected_steps(sent, model, optimizer, num_steps=3):
            for _ in range(2):  # the third's part of the correction is added at the end
                optimizer.zero_grad()
                (model.weight**2).sum().backward()
                optimizer.step()
        found.append(model.weight.detach().numpy().ravel().copy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert abs(found[0] - 1).max() > 0.1


def test_steps_of_a_subclass_are_counted_once_and_the_optimizers_own_step_is_back_afterwards() -> (
    None
):
    """It calls the step that it overrides, as a wrapper may do; parameters that join later are
    shortened, too.
    """
    torch = pytest.importorskip("torch")

    class Own(torch.optim.SGD):  # type: ignore[misc,name-defined]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    found = []
    for make in (torch.optim.SGD, Own):
        model = torch.nn.Linear(2, 1, bias=False)
        late = torch.nn.Parameter(torch.ones(1))
        torch.nn.init.ones_(model.weight)
        optimizer = make(model.parameters(), lr=0.1)
        with corrected_steps(
            {"weight": np.array([[0.4, -0.8]])}, model, optimizer, 4, step_factor=0.25
        ):
            optimizer.add_param_group({"params": [late]})
            for _ in range(4):
                optimizer.zero_grad()
                ((model.weight**2).sum() + late.sum()).backward()
                optimizer.step()
        assert late.item() == pytest.approx(1 - 4 * 0.25 * 0.1)
        assert "step" not in vars(optimizer)
        found.append(model.weight.detach().numpy().ravel().copy())
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("begun", ["before", "inside"])
def test_a_learning_rate_may_have_a_schedule(begun: str) -> None:
    """The loop that is given, with its own scheduler, takes the steps that the schedule says."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def halved() -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    schedule = halved() if begun == "before" else None
    with corrected_steps({"weight": np.array([6.0])}, model, optimizer, 3, step_factor=0.5):
        schedule = schedule or halved()
        for _ in range(3):
            weight.grad = torch.ones(1)
            optimizer.step()
            schedule.step()
    assert weight.item() == pytest.approx(6 - 0.5 * (1 + 0.5 + 0.25))
    optimizer.step()
    assert weight.item() == pytest.approx(6 - 0.5 * 1.75 - 0.125)


def test_shorter_steps_that_nobody_took_are_an_error() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    with (
        pytest.raises(DeltaflError, match=r"took no step; give the one that trains"),
        corrected_steps({}, model, torch.optim.SGD(model.parameters(), lr=1.0), 1, step_factor=0.5),
    ):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_tensor_with_two_names_moves_once_and_no_correction_changes_nothing() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict(
        {"read": torch.nn.Linear(2, 2, bias=False), "write": torch.nn.Linear(2, 2, bias=False)}
    )
    model["write"].weight = model["read"].weight
    optimizer = torch.optim.Adam(model.parameters())
    before = model["read"].weight.detach().clone()
    with corrected_steps({}, model, optimizer, num_steps=1):
        pass
    assert torch.equal(model["read"].weight, before)
    both = {"read.weight": np.ones((2, 2)), "write.weight": np.ones((2, 2))}
    with corrected_steps(both, model, optimizer, num_steps=2):
        pass
    assert torch.equal(model["read"].weight, before + 1)


@pytest.mark.parametrize("named", [False, True])
def test_a_state_dict_of_copies_is_corrected_in_the_module(named: bool) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    model._register_state_dict_hook(
        lambda module, state, prefix, local: {name: part.clone() for name, part in state.items()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before_d = flatten(model)
    correction: Any = np.ones(3, np.float32)
    if named:
        correction = {"weight": np.ones((1, 2)), "bias": np.ones(1)}
    with corrected_steps(correction, model, optimizer, num_steps=2):
        pass
    np.testing.assert_allclose(flatten(model) - before_d, 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0; write how many steps the loop will take, at least 1"),
        ({"num_steps": 2.0}, "num_steps is 2.0"),
        *(
            ({"step_factor": factor}, f"step_factor is {factor!r}; it must be a number above 0")
            for factor in (0.0, -1.0, 1.5, float("nan"), "0.3")
        ),
        (
            {"correction": {"other": np.ones(1)}},
            "the model has no array 'other' of shape",
        ),
        (
            {"optimizer": object()},
            "the optimizer is a object, not one of torch.optim; add drift / K in each step",
        ),
        ({"correction": np.ones(7)}, "the vector has shape (7,), the model has 3 parameters"),
        (
            {"correction": {"weight": np.ones((2, 1))}},
            "the model has no array 'weight' of shape (2, 1)",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused_before_training(
    arguments: dict[str, Any], message: str
) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    given = {
        "correction": np.ones(3),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "num_steps": 1,
    }
    given |= arguments
    with pytest.raises(DeltaflError) as error, corrected_steps(model=model, **given):
        raise AssertionError("training has begun")
    assert message in str(error.value)
