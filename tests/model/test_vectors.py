"""Named arrays and the flat vector; buffers and counters."""

from typing import Any

import numpy as np
import pytest

import deltafl
from deltafl import DeltaflError
from deltafl.model.arrays import Arrays
from deltafl.model.parts import ModelParts
from deltafl.model.vectors import mean_rest

MODEL: Arrays = {
    "dense.weight": np.array([[1, 2], [3, 4]], dtype=np.float32),
    "norm.running_var": np.array([1.0, 4.0], dtype=np.float32),
    "norm.num_batches_tracked": np.array(2**60 + 1, dtype=np.int64),
    "mask": np.array([True, False]),
    "dense.bias": np.array([0.5], dtype=np.float16),
}


def test_flatten_and_rebuild_are_inverse() -> None:
    layout = ModelParts.of(MODEL)
    assert [entry.kind for entry in layout.entries] == [
        "trained",
        "buffer",
        "counter",
        "counter",
        "trained",
    ]
    flat_d = layout.flatten(MODEL)
    assert flat_d.tolist() == [1, 2, 3, 4, 0.5]
    rebuilt = layout.rebuild(flat_d, layout.rest(MODEL))
    assert list(rebuilt) == list(MODEL)
    for name, array in MODEL.items():
        assert rebuilt[name].dtype == array.dtype
        assert np.array_equal(rebuilt[name], array)


def test_overflow_of_a_narrow_type_becomes_its_largest_number() -> None:
    layout = ModelParts.of(MODEL)
    rebuilt = layout.rebuild(np.array([1e30, -1e30, 3, 4, -1e6], np.float32), layout.rest(MODEL))
    assert rebuilt["dense.bias"].tolist() == [-65504]
    assert rebuilt["dense.weight"].ravel().tolist() == [np.float32(1e30), np.float32(-1e30), 3, 4]


def test_buffers_take_a_convex_mean_and_counters_stay_integers() -> None:
    layout = ModelParts.of(MODEL)
    first = MODEL | {
        "norm.running_var": np.array([3, 4], np.float32),
        "norm.num_batches_tracked": np.array(2**60 + 11),
    }
    second = MODEL | {
        "norm.running_var": np.array([1, 0], np.float32),
        "mask": np.array([False, False]),
    }
    rest = mean_rest(layout, MODEL, [first, second], np.array([30.0, 10.0]))
    assert rest["norm.running_var"].tolist() == [2.5, 3.0]
    assert rest["norm.running_var"].dtype == np.float32
    # 3/4 of 10, rounded to even, added to a number that float64 cannot hold.
    assert rest["norm.num_batches_tracked"] == 2**60 + 1 + 8
    assert rest["norm.num_batches_tracked"].dtype == np.int64
    assert rest["mask"].tolist() == [True, False]
    steps: list[Arrays] = [
        {"w": np.zeros(1, np.float32), "steps": np.array(k)} for k in (3, 4, 9, 5)
    ]
    middle = mean_rest(ModelParts.of(steps[0]), steps[0], steps[1:], np.ones(3), median=True)[
        "steps"
    ]
    assert isinstance(middle, np.ndarray)
    assert middle == 5
    untouched = mean_rest(layout, MODEL, [], np.zeros(0))
    assert all(np.array_equal(untouched[name], MODEL[name]) for name in untouched)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_counters_at_the_limits_of_their_type_take_a_convex_mean(dtype: str) -> None:
    least = int(np.iinfo(dtype).min)
    most = int(np.iinfo(dtype).max)
    layout = ModelParts.of({"x": np.zeros(1, np.float32), "count": np.zeros((), dtype)})
    for old, *new in (
        (least, most, most),
        (most, least, least),
        (0, least, most),
        (most, most, most - 1),
    ):
        arrays = [{"count": np.array(value, dtype)} for value in (old, *new)]
        kept = mean_rest(layout, arrays[0], arrays[1:], np.array([0.5, 0.5]))["count"]
        assert kept.dtype == dtype
        assert min(new) <= int(kept) <= max(new)


@pytest.mark.parametrize(
    ("name", "dtype", "value", "reason"),
    [
        (
            "count",
            "int32",
            np.array([2**40, 1], np.int64),
            "counter 'count' has entries outside -2147483648 to",
        ),
        ("count", "int32", np.array([5, -(2**31) - 1], np.int64), "outside"),
        ("count", "int32", np.array([2**31 - 1, 1], np.int64), None),
        ("count", "uint8", np.array([0, 256], np.uint16), "outside 0 to 255"),
        ("count", "int64", np.array([1, 2], np.int8), None),
        ("running_var", "float32", np.array([1.0, 1e300]), "NaN, or entries"),
        ("running_var", "float32", np.array([1.0, 1e19]), "above"),
        ("running_var", "float32", np.array([1.0, -1.0]), "negative"),
        ("running_mean", "float16", np.array([1.0, 1e6]), "above 6.55e+04"),
        ("running_mean", "float32", np.array([1.0, -1.0]), None),
    ],
)
def test_values_are_checked_in_the_type_that_the_server_keeps(
    name: str, dtype: str, value: Any, reason: str | None
) -> None:
    layout = ModelParts.of({"x": np.zeros(1, np.float32), name: np.ones(2, dtype)})
    fault = layout.fault({"x": np.zeros(1, np.float32), name: value})
    assert fault is None if reason is None else fault is not None and reason in fault


def torch_model() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(4, 1).bfloat16()
    )


def test_a_torch_model_its_state_dict_and_its_parameters_are_the_same_vector() -> None:
    model = torch_model()
    state = model.state_dict()
    flat_d = deltafl.flatten(model)
    assert (str(flat_d.dtype), len(flat_d)) == ("float32", 20 + 4 + 5)
    assert np.array_equal(flat_d, deltafl.flatten(state))
    assert np.array_equal(flat_d, deltafl.flatten(model.parameters()))
    assert np.array_equal(flat_d[:18], state["0.weight"].numpy().ravel())


def test_unflatten_is_the_inverse_and_keeps_names_order_types_and_what_is_no_parameter() -> None:
    model = torch_model()
    model[1].running_mean.fill_(7)
    model[1].num_batches_tracked.fill_(3)
    before = deltafl.flatten(model)
    vector_d = np.arange(29, dtype=np.float32)
    moved = deltafl.unflatten(vector_d, model)
    state = deltafl.unflatten(vector_d, model.state_dict())
    for found in (moved.state_dict(), state):
        assert np.array_equal(deltafl.flatten(found), vector_d)
        assert list(found) == list(model.state_dict())
        assert [part.dtype for part in found.values()] == [
            part.dtype for part in model.state_dict().values()
        ]
        assert found["1.running_mean"].tolist() == [7, 7]
        assert found["1.num_batches_tracked"] == 3
    assert all(parameter.requires_grad for parameter in moved.parameters())
    state["1.running_mean"].zero_()
    assert model[1].running_mean.tolist() == [7, 7]
    assert np.array_equal(deltafl.flatten(model), before)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_copy_of_a_scripted_model_has_gradients_of_its_own() -> None:
    torch: Any = pytest.importorskip("torch")
    chain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    chain[0].weight.requires_grad_(False)
    model = torch.jit.script(chain)
    copied = deltafl.unflatten(np.ones(7), model)
    copied(torch.ones(1, 2)).sum().backward()
    found = dict(copied.named_parameters())
    assert [one.requires_grad for one in found.values()] == [False, True, True, True]
    assert found["1.bias"].grad.tolist() == [1]
    assert all(one.grad is None for one in model.parameters())


def test_dicts_and_lists_of_arrays_come_back_as_they_were() -> None:
    vector_d = np.array([9, 8, 7, 6, 5], np.float32)
    back = deltafl.unflatten(vector_d, MODEL)
    assert [(name, array.dtype, array.shape) for name, array in back.items()] == [
        (name, array.dtype, array.shape) for name, array in MODEL.items()
    ]
    assert back["dense.weight"].tolist() == [[9, 8], [7, 6]]
    assert back["norm.num_batches_tracked"] == 2**60 + 1
    assert not np.shares_memory(back["mask"], MODEL["mask"])
    first, second = deltafl.unflatten(vector_d, [np.zeros((2, 2)), np.zeros(1, np.float16)])
    assert (first.tolist(), second.tolist(), second.dtype) == ([[9, 8], [7, 6]], [5], "float16")


@pytest.mark.parametrize(
    "wrong", [np.zeros(3), "model.pt", 3, None, [np.zeros(2, int)], {"a": np.array(["b"])}]
)
def test_what_is_no_model_is_refused(wrong: Any) -> None:
    with pytest.raises(DeltaflError, match=r"give a module|no floating-point array|use floats"):
        deltafl.flatten(wrong)


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(DeltaflError, match=r"shape \(3,\), the model has 5 parameters"):
        deltafl.unflatten(np.zeros(3), MODEL)
