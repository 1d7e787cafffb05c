"""Metrics are scikit-learn's where it has them, on the outputs that models give."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from deltafl import DeltaflError
from deltafl.tasks.metrics import METRICS, Metric, metric_of, right, targets_of

RNG = np.random.default_rng(5)
Y = np.concatenate([np.arange(4), RNG.integers(0, 4, 60)])
LOGITS = RNG.normal(size=(64, 4)) + 1.5 * np.eye(4)[Y]
P = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
ONE = LOGITS[:, 1] - 1
Y2 = (Y == 1).astype(np.float32)
MANY = RNG.normal(size=(64, 3))
Y_MANY = RNG.integers(0, 2, (64, 3)).astype(np.float32)
NUMBERS = RNG.normal(size=(64, 2))
Y_NUMBERS = NUMBERS + RNG.normal(size=(64, 2))


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize(
    ("name", "output", "y", "value"),
    [
        ("accuracy", LOGITS, Y, sk.accuracy_score(Y, LOGITS.argmax(1))),
        ("accuracy", ONE[:, None], Y2, sk.accuracy_score(Y2, ONE > 0)),
        ("accuracy", MANY, Y_MANY, sk.accuracy_score(Y_MANY, MANY > 0)),
        ("balanced_accuracy", LOGITS, Y, sk.balanced_accuracy_score(Y, LOGITS.argmax(1))),
        ("f1_macro", LOGITS, Y, sk.f1_score(Y, LOGITS.argmax(1), average="macro")),
        ("f1_weighted", ONE, Y2, sk.f1_score(Y2, ONE > 0, average="weighted")),
        ("f1_micro", MANY, Y_MANY, sk.f1_score(Y_MANY, MANY > 0, average="micro")),
        ("roc_auc", LOGITS, Y, sk.roc_auc_score(Y, P, multi_class="ovr")),
        ("roc_auc", ONE, Y2, sk.roc_auc_score(Y2, ONE)),
        ("roc_auc", np.stack([-ONE, ONE], 1), Y2, sk.roc_auc_score(Y2, ONE)),
        ("roc_auc", MANY, Y_MANY, sk.roc_auc_score(Y_MANY, MANY)),
        ("average_precision", LOGITS, Y, sk.average_precision_score(Y, P)),
        ("average_precision", ONE, Y2, sk.average_precision_score(Y2, ONE)),
        ("log_loss", LOGITS, Y, sk.log_loss(Y, P)),
        ("log_loss", ONE[:, None], Y2, sk.log_loss(Y2, sigmoid(ONE))),
        ("log_loss", MANY, Y_MANY, np.mean([sk.log_loss(Y_MANY[:, k], sigmoid(MANY[:, k])) for k in range(3)])),
        ("top_2_accuracy", LOGITS, Y, sk.top_k_accuracy_score(Y, LOGITS, k=2)),
        ("rmse", NUMBERS, Y_NUMBERS, sk.root_mean_squared_error(Y_NUMBERS, NUMBERS)),
        ("mae", NUMBERS[:, :1], Y_NUMBERS[:, 0], np.abs(NUMBERS - Y_NUMBERS)[:, 0].mean()),
        ("r2", NUMBERS[:, 0], Y_NUMBERS[:, 0], sk.r2_score(Y_NUMBERS[:, 0], NUMBERS[:, 0])),
    ],
)  # fmt: skip
def test_values_are_those_of_scikit_learn(name: str, output: Any, y: Any, value: float) -> None:
    assert metric_of(name)(output, y) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1_macro", "log_loss"])
def test_each_place_of_a_sequence_is_an_example(name: str) -> None:
    sequences = LOGITS.reshape(8, 2, 4, 4).transpose(0, 3, 1, 2)
    found = metric_of(name)(sequences, Y.reshape(8, 2, 4))
    assert found == pytest.approx(metric_of(name)(LOGITS, Y), rel=1e-12)
    share_e = right(sequences, Y.reshape(8, 2, 4))
    np.testing.assert_allclose(share_e, (LOGITS.argmax(1) == Y).reshape(8, 8).mean(axis=1))


def test_auc_is_the_share_of_pairs_in_the_right_order_and_unknown_without_any() -> None:
    output = np.array([0.1, 0.4, 0.4, 0.9])
    y = np.array([0, 0, 1, 1])
    assert metric_of("auc")(output, y) == (1 + 1 + 0.5 + 1) / 4
    assert np.isnan(metric_of("auc")(output, np.ones(4)))
    assert np.isnan(metric_of("auc")(output[:0], y[:0]))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=40).filter(
        lambda pairs: len({is_one for _, is_one in pairs}) == 2
    )
)
def test_auc_is_that_of_scikit_learn_whatever_is_equal(pairs: list[tuple[int, bool]]) -> None:
    output, y = (np.array(values, float) for values in zip(*pairs, strict=True))
    assert metric_of("auc")(output, y) == pytest.approx(sk.roc_auc_score(y, output), abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 30))
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_is_that_of_scikit_learn_whatever_is_missing(
    average: Any, seed: int, classes: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    output = rng.normal(size=(count, classes + 1))
    y = rng.integers(0, classes + 1, count)
    labels = (rng.random((count, classes + 1)) < rng.random()).astype(np.float32)
    # Classes that the examples lack.
    y = y // 2 * 2
    f1 = metric_of(f"f1_{average}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found, truth in ((output.argmax(axis=1), y), (output > 0, labels.astype(int))):
            expected = sk.f1_score(truth, found, average=average, zero_division=0)
            given = truth if truth.ndim == 1 else labels
            assert f1(output, given) == pytest.approx(expected, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_a_missing_class_leaves_the_mean_over_the_others(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, 20)
    output = rng.normal(size=(20, classes + 1))
    for name in ("roc_auc", "average_precision", "f1_macro", "balanced_accuracy"):
        value = metric_of(name)(output, y)
        assert np.isnan(value) == (name == "roc_auc" and len(set(y)) < 2) or 0 <= value <= 1


def test_examples_are_ordered_also_where_probabilities_round_to_one() -> None:
    for classes in (2, 4):
        y = np.array([0, 0, 1, 1])
        output = np.zeros((4, classes))
        output[:, 1] = [300, 100, 400, 200]
        assert metric_of("auc")(output[:, :2], y) == 3 / 4
        # Of the classes tested each has 3 of 4 pairs in order.
        assert metric_of("auc")(output, y) == 3 / 4
    assert metric_of("auc")(np.array([300.0, 100, 400, 200]), y) == 3 / 4


def test_a_function_of_arrays_cannot_change_the_examples() -> None:
    def greedy(output: Any, y: Any) -> float:
        assert isinstance(y, np.ndarray)
        output[:] = 0
        y[:] = 0
        return 0.5

    output, y = np.ones(3), np.ones(3)
    assert metric_of(greedy)(output, y) == 0.5
    assert output.sum() == y.sum() == 3


def test_extreme_logits_have_a_finite_loss() -> None:
    assert metric_of("log_loss")(np.array([[1000.0, 0.0]]), np.array([1])) == 1000
    assert metric_of("log_loss")(np.array([1000.0]), np.array([0.0])) == 1000


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("ROC AUC", "roc_auc"),
        ("roc_auc_score", "roc_auc"),
        ("top-5", "top_5_accuracy"),
        ("top_k_accuracy", "top_2_accuracy"),
        ("neg_log_loss", "log_loss"),
        ("macro F1", "f1_macro"),
    ],
)
def test_spellings(given: str, name: str) -> None:
    assert metric_of(given).name == name


def worst(output: Any, y: Any) -> Any:
    return abs(output - y).max()


def test_a_function_is_a_metric() -> None:
    assert metric_of(worst)(np.array([1.0, 4.0]), np.array([0.0, 1.0])) == 3
    assert metric_of(Metric("w", worst, higher=False)).higher is False
    for wrong, fragment in ((lambda o, y: 0, "has no name"), ("acuracy", "accuracy")):
        with pytest.raises(DeltaflError, match=fragment):
            metric_of(wrong)


def test_functions_of_scikit_learn_get_the_targets_first() -> None:
    from sklearn import metrics

    output, y = np.array([1.0, 2.0, 9.0]), np.array([0.0, 2.0, 4.0])
    assert metric_of(metrics.r2_score)(output, y) == metrics.r2_score(y, output)
    for wrong in (metrics.explained_variance_score, Metric("r", metrics.r2_score)):
        with pytest.raises(DeltaflError, match=r"takes \(y, output\), and a metric \(output, y\)"):
            metric_of(wrong)


@pytest.mark.parametrize("target", [0.0, 0.1, 7.3, -1e6])
def test_r2_is_of_targets_that_vary_and_of_no_rounding(target: float) -> None:
    y = Y_NUMBERS.astype(np.float32)
    output = NUMBERS.astype(np.float32)
    only = metric_of("r2")(output[:, 1:], y[:, 1:])
    y[:, 0] = target
    assert metric_of("r2")(output, y) == pytest.approx(only, rel=1e-6)
    assert np.isnan(metric_of("r2")(output[:, 0], y[:, 0]))
    # Equal targets are no fault of an error.
    assert metric_of("mae")(output[:, 0], y[:, 0]) > 0


def test_errors_of_series_and_pictures_are_over_all_numbers() -> None:
    """Scikit-learn takes columns, whose roots it averages; nobody means those of pixels."""
    rng = np.random.default_rng(1)
    y = rng.normal(size=(6, 4, 3)).astype(np.float32)
    output = (y + rng.normal(0, [0.1, 1, 3], y.shape)).astype(np.float32)
    error = (output - y).astype(np.float64)
    explained = 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum()
    assert metric_of("rmse")(output, y) == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert metric_of("mae")(output, y) == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert metric_of("r2")(output, y) == pytest.approx(explained, rel=1e-5)


@pytest.mark.parametrize("name", ["r2", "mae", "rmse"])
@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2), (1, 3, 3)])
def test_an_error_of_other_outputs_than_targets_is_one_sentence(
    name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(DeltaflError, match="compares as many outputs as targets"):
        metric_of(name)(np.ones(shape), np.arange(3.0))
    with pytest.raises(DeltaflError, match=r"the metric f1_macro failed on output \(2, 2\)"):
        metric_of("f1")(np.ones((2, 2)), np.array([0, 1, 1]))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_a_number_may_be_of_any_type_of_torch(kind: torch.dtype) -> None:
    metric = Metric("one", lambda output, y: torch.tensor(1, dtype=kind))
    assert metric(np.ones(2), np.ones(2)) == 1


@pytest.mark.parametrize("value", [np.inf, -1e101, 1e300])
def test_what_records_have_no_room_for_is_no_number(value: float) -> None:
    found = metric_of(Metric("perplexity", lambda output, y: value))(np.ones(2), np.ones(2))
    assert np.isnan(found)


def test_a_metric_that_draws_is_the_same_for_the_same_outputs() -> None:
    def resampled(output: Any, y: Any) -> float:
        which = np.random.choice(len(y), len(y))  # noqa: NPY002
        return float((output[which] - y[which]).mean())

    drawn = metric_of(resampled)
    output, y = np.random.default_rng(0).normal(size=(2, 50))
    assert drawn(output, y) == drawn(output, y)
    assert drawn(output, y) != drawn(output + y, y)


@pytest.mark.parametrize("value", [np.ma.masked, np.ma.masked_array([0.5], [True])])
def test_what_is_masked_is_no_value(value: Any) -> None:
    assert np.isnan(Metric("mean", lambda output, y: value)(np.ones(2), np.ones(2)))
    shown = np.ma.masked_array([0.5, 9], [False, True])
    assert Metric("mean", lambda output, y: shown.mean())(np.ones(2), np.ones(2)) == 0.5


@pytest.mark.parametrize("name", ["mine ", " mine", "\tmine", "mine\n", "", " "])
def test_blanks_are_no_part_of_a_name(name: str) -> None:
    with pytest.raises(DeltaflError, match="without blanks at its ends"):
        metric_of(Metric(name, worst))


@pytest.mark.parametrize("option", ["higher", "share"])
def test_a_direction_is_true_or_false(option: str) -> None:
    given: Any = {option: "no"}
    with pytest.raises(DeltaflError, match=f"{option} of your metric w is 'no'"):
        metric_of(Metric("w", worst, **given))


@pytest.mark.parametrize(
    ("y", "shape", "classes", "targets"),
    [
        (np.zeros(3, np.int64), (4,), 4, "classes"),
        (np.zeros(3, np.float32), (1,), 2, "binary"),
        (np.zeros(3, np.float32), (), 2, "binary"),
        (np.zeros((3, 2), np.float32), (2,), 2, "labels"),
        (np.zeros((3, 2), np.float32), (2,), 0, "numbers"),
    ],
)
def test_what_the_targets_are(y: Any, shape: Any, classes: int, targets: str) -> None:
    assert targets_of(y, shape, classes) == targets
    known: Callable[[Metric], bool] = lambda metric: targets in metric.targets  # noqa: E731
    assert any(map(known, METRICS.values()))
