"""Named arrays and the flat vector; buffers and counters."""

from typing import Any

import numpy as np
import pytest

from deltafl.flower.arrays import Arrays, Layout, mean_rest

MODEL: Arrays = {
    "dense.weight": np.array([[1, 2], [3, 4]], dtype=np.float32),
    "norm.running_var": np.array([1.0, 4.0], dtype=np.float32),
    "norm.num_batches_tracked": np.array(2**60 + 1, dtype=np.int64),
    "mask": np.array([True, False]),
    "dense.bias": np.array([0.5], dtype=np.float16),
}


def test_flatten_and_rebuild_are_inverse() -> None:
    layout = Layout.of(MODEL)
    assert [entry.kind for entry in layout.entries] == ["trained", "buffer", "counter", "counter", "trained"]
    flat_d = layout.flatten(MODEL)
    assert flat_d.tolist() == [1, 2, 3, 4, 0.5]
    rebuilt = layout.rebuild(flat_d, layout.rest(MODEL))
    assert list(rebuilt) == list(MODEL)
    for name, array in MODEL.items():
        assert rebuilt[name].dtype == array.dtype
        assert np.array_equal(rebuilt[name], array)


def test_overflow_of_a_narrow_type_becomes_its_largest_number() -> None:
    layout = Layout.of(MODEL)
    rebuilt = layout.rebuild(np.array([1e30, -1e30, 3, 4, -1e6], np.float32), layout.rest(MODEL))
    assert rebuilt["dense.bias"].tolist() == [-65504]
    assert rebuilt["dense.weight"].ravel().tolist() == [np.float32(1e30), np.float32(-1e30), 3, 4]


def test_buffers_take_a_convex_mean_and_counters_stay_integers() -> None:
    layout = Layout.of(MODEL)
    first = MODEL | {"norm.running_var": np.array([3, 4], np.float32), "norm.num_batches_tracked": np.array(2**60 + 11)}
    second = MODEL | {"norm.running_var": np.array([1, 0], np.float32), "mask": np.array([False, False])}
    rest = mean_rest(layout, MODEL, [first, second], np.array([30.0, 10.0]))
    assert rest["norm.running_var"].tolist() == [2.5, 3.0]
    assert rest["norm.running_var"].dtype == np.float32
    # 3/4 of 10, rounded to even, added to a number that float64 cannot hold.
    assert rest["norm.num_batches_tracked"] == 2**60 + 1 + 8
    assert rest["norm.num_batches_tracked"].dtype == np.int64
    assert rest["mask"].tolist() == [True, False]
    untouched = mean_rest(layout, MODEL, [], np.zeros(0))
    assert all(np.array_equal(untouched[name], MODEL[name]) for name in untouched)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_counters_at_the_limits_of_their_type_take_a_convex_mean(dtype: str) -> None:
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    layout = Layout.of({"x": np.zeros(1, np.float32), "count": np.zeros((), dtype)})
    for old, *new in ((least, most, most), (most, least, least), (0, least, most), (most, most, most - 1)):
        arrays = [{"count": np.array(value, dtype)} for value in (old, *new)]
        kept = mean_rest(layout, arrays[0], arrays[1:], np.array([0.5, 0.5]))["count"]
        assert kept.dtype == dtype
        assert min(new) <= int(kept) <= max(new)


@pytest.mark.parametrize(
    ("name", "dtype", "value", "reason"),
    [
        ("count", "int32", np.array([2**40, 1], np.int64), "counter 'count' has entries outside -2147483648 to"),
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
    layout = Layout.of({"x": np.zeros(1, np.float32), name: np.ones(2, dtype)})
    fault = layout.fault({"x": np.zeros(1, np.float32), name: value})
    assert fault is None if reason is None else fault is not None and reason in fault
