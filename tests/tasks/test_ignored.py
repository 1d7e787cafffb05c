"""Labels that a task's loss ignores, such as padding, count in no metric: beside a plain twin that
leaves them out of outputs and targets.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.nn import functional

from deltafl import compare
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import Dataset, Task, check_task, cross_entropy, from_torch
from deltafl.tasks.base import with_fewer_tests, with_public, with_validation
from deltafl.tasks.ignored import ignored_labels

CLASSES = 4
LENGTH = 6
RNG = np.random.default_rng(5)
LABELS = RNG.integers(1, CLASSES, (90, LENGTH))
#: Texts of 1 to 6 places; the rest is padding.
IS_PADDING = np.arange(LENGTH) >= RNG.integers(1, LENGTH + 1, 90)[:, None]
X = RNG.normal(size=(90, 5)).astype(np.float32)
NAMES = "accuracy,balanced_accuracy,f1_macro,f1_micro,f1_weighted,roc_auc,log_loss,top_2"


def masked(output: Tensor, y: Tensor) -> Tensor:
    """Of one's own: 0 is padding."""
    each = functional.cross_entropy(output, y, reduction="none")
    return each[y != 0].sum() / (y != 0).sum()


def focal(output: Tensor, y: Tensor) -> Tensor:
    p = torch.exp(-functional.cross_entropy(output, y.clamp(min=0), reduction="none"))
    counted = (y >= 0).float()
    return -(counted * (1 - p) ** 2 * p.log()).sum() / counted.sum()


#: Losses, and the label of padding that each ignores.
LOSSES: dict[str, tuple[Any, int]] = {
    "the usual one": (nn.CrossEntropyLoss(), -100),
    "the library's": (cross_entropy, -100),
    "a function": (functional.cross_entropy, -100),
    "a class": (nn.CrossEntropyLoss(ignore_index=0), 0),
    "beyond the classes": (nn.CrossEntropyLoss(ignore_index=255), 255),
    "with options": (partial(functional.cross_entropy, ignore_index=-1, label_smoothing=0.1), -1),
    "a weight of 0": (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 2])), 0),
    "masked": (masked, 0),
    "focal": (focal, -7),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, CLASSES * LENGTH), nn.Unflatten(1, (CLASSES, LENGTH)))


def task_of(loss: Any, padding: int, **changes: Any) -> Task:
    y = np.where(IS_PADDING, padding, LABELS)
    data = Dataset("texts", X[:60], y[:60], X[60:], y[60:], CLASSES)
    rows = [np.arange(k, 60, 5) for k in range(5)]
    given: dict[str, Any] = {"metric": NAMES, "test_clients": np.arange(30) % 5, **changes}
    return Task("texts", data, rows, model, loss, **given)


def places(output: Any, y: Any) -> tuple[Any, Any]:
    """Logits and labels of the places that count, one by one."""
    pairs = [
        (output[row, :, place], y[row, place])
        for row in range(len(y))
        for place in range(LENGTH)
        if not IS_PADDING[60:][row, place]
    ]
    return np.array([one for one, _ in pairs]), np.array([label for _, label in pairs])


@pytest.mark.parametrize("name", LOSSES)
def test_padding_counts_in_no_metric(name: str) -> None:
    loss, padding = LOSSES[name]
    task = task_of(loss, padding)
    check_task(task, "texts", 0)
    assert task.ignored == (padding,)
    engine = Engine(task, LocalWork(lr=0.5, epochs=1), 0)
    start_d = engine.initial_params()
    params_d = start_d + engine.train(start_d, 0, np.arange(5)).update_nd.mean(axis=0)
    judged = engine.judge(params_d)
    assert judged.output_e is not None
    logits, label = places(judged.output_e, task.dataset.test_y)
    found = logits.argmax(axis=1)
    p = torch.softmax(torch.tensor(logits).double(), dim=1).numpy()
    evaluation = judged.evaluation()
    assert evaluation.accuracy == pytest.approx((found == label).mean())
    some = partial(sk.f1_score, label, found)
    aucs = [sk.roc_auc_score(label == k, p[:, k]) for k in range(1, CLASSES)]
    assert evaluation.others == pytest.approx(
        {
            "balanced_accuracy": sk.recall_score(label, found, average=None, labels=[1, 2, 3]).mean(),
            "f1_macro": some(average="macro"),
            "f1_micro": some(average="micro"),
            "f1_weighted": some(average="weighted"),
            "roc_auc": np.mean(aucs),
            "log_loss": -np.log(p[np.arange(len(label)), label]).mean(),
            "top_2_accuracy": np.mean([k in q.argsort()[-2:] for k, q in zip(label, p, strict=True)]),
        },
        rel=1e-5,
    )  # fmt: skip
    alone = Engine(replace(task, metric="accuracy"), LocalWork(lr=0.5, epochs=1), 0)
    assert alone.judge(params_d).evaluation().accuracy == evaluation.accuracy


def test_a_client_is_judged_by_the_places_that_count() -> None:
    task = task_of(cross_entropy, -100)
    engine = Engine(task, LocalWork(lr=0.5, epochs=1), 0)
    judged = engine.judge(engine.initial_params())
    assert judged.output_e is not None
    hit = judged.output_e.argmax(axis=1) == task.dataset.test_y
    counted = ~IS_PADDING[60:]
    expected = [hit[k::5].sum() / counted[k::5].sum() for k in range(5)]
    np.testing.assert_allclose(np.array(judged.by_client()), expected)
    assert judged.evaluation().client_accuracy == pytest.approx(np.mean(expected))
    # Of one class a place F1 is the same share.
    by_f1 = judged._replace(task=replace(task, metric="f1_micro"))
    np.testing.assert_allclose(np.array(by_f1.by_client()), expected)


def test_padding_is_no_label_of_a_client_and_no_majority() -> None:
    task = task_of(cross_entropy, -100)
    for rows, share_c in zip(task.client_rows, task.shares, strict=True):
        label = LABELS[rows][~IS_PADDING[rows]]
        np.testing.assert_allclose(share_c, [np.mean(label == k) for k in range(CLASSES)])
    label = LABELS[60:][~IS_PADDING[60:]]
    assert task.chance == pytest.approx(np.bincount(label).max() / len(label))


@pytest.mark.parametrize("clients", [None, np.arange(30) % 3])
def test_examples_without_a_label_count_nowhere(clients: Any) -> None:
    """Of one label each, some are unknown."""
    y = LABELS[:, 0] - 1
    y[::4] = -100
    data = Dataset("d", X[:60], y[:60], X[60:], y[60:], CLASSES - 1)
    rows = [np.arange(k, 60, 3) for k in range(3)]
    make = partial(nn.Linear, 5, CLASSES - 1)
    task = Task("d", data, rows, make, cross_entropy, test_clients=clients)
    check_task(task, "d", 0)
    engine = Engine(task, LocalWork(lr=0.5, epochs=1), 0)
    params_d = engine.initial_params()
    judged = engine.judge(params_d)
    matrix, shift = params_d[:15].reshape(3, 5), params_d[15:]
    hit = (X[60:] @ matrix.T + shift).argmax(axis=1) == y[60:]
    known = y[60:] != -100
    assert judged.evaluation().accuracy == pytest.approx(hit[known].mean())
    if clients is None:
        of_class = np.array([hit[y[60:] == k].mean() for k in range(3)])
        expected = task.shares @ of_class
    else:
        expected = np.array([hit[known & (clients == k)].mean() for k in range(3)])
    np.testing.assert_allclose(np.array(judged.by_client()), expected)


def test_a_client_none_of_whose_labels_counts_is_refused(tmp_path: Path) -> None:
    """Before anything is written: its loss would be NaN in every round."""
    task = task_of(cross_entropy, -100)
    y = task.dataset.train_y.copy()
    y[task.client_rows[3]] = -100
    without = replace(task, dataset=replace(task.dataset, train_y=y))
    with pytest.raises(DeltaflError, match=r"client_rows\[3\] has no label that counts.*-100"):
        compare(without, ["uniform"], seeds=1, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out" / "config.toml").exists()


def test_an_image_has_places_too() -> None:
    y = RNG.integers(0, 3, (20, 4, 4))
    y[:, :, 0] = 255
    x = RNG.random((20, 1, 4, 4)).astype(np.float32)
    data = Dataset("roads", x, y, x, y, 3)
    loss = nn.CrossEntropyLoss(ignore_index=255)
    task = Task("roads", data, [np.arange(20)], lambda: nn.Conv2d(1, 3, 1), loss)
    check_task(task, "roads", 0)
    engine = Engine(task, LocalWork(lr=0.5, epochs=1), 0)
    params_d = engine.initial_params()
    output = np.einsum("kc,nchw->nkhw", params_d[:3].reshape(3, 1), x)
    output += params_d[3:, None, None]
    expected = (output.argmax(axis=1) == y)[:, :, 1:].mean()
    assert engine.evaluate(params_d).accuracy == pytest.approx(expected)


def hinge(output: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(output, y, margin=0.05)


def in_order(output: Tensor, y: Tensor) -> Tensor:
    """Fails on labels below 0."""
    return -output[torch.arange(len(y)), y].mean()


@pytest.mark.parametrize(
    ("loss", "labels", "ignored"),
    [
        (cross_entropy, [0, 1, 2], ()),
        (cross_entropy, [0, 1, 2, -1], ()),
        (nn.CrossEntropyLoss(ignore_index=1), [0, 2], (1,)),
        (hinge, [0, 1, 2], ()),
        (nn.MSELoss(), [0, 1, 2], ()),
        (in_order, [0, 1, -5], ()),
        (lambda output, y: torch.zeros(()), [0, 1, -1], ()),
    ],
)
def test_which_labels_a_loss_ignores(loss: Callable[..., Any], labels: Any, ignored: Any) -> None:
    assert ignored_labels(loss, np.array(labels), 3) == ignored


def each_of(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none").flatten()


def truncated(output: Tensor, y: Tensor) -> Tensor:
    """Constant where the model is far off; the less probable a class, the sooner."""
    worst = torch.linspace(0.5, 3, 6)[y]
    return torch.minimum(each_of(output, y), worst).mean()


def dropped(output: Tensor, y: Tensor) -> Tensor:
    return (each_of(output, y) * (torch.rand(len(y)) < 0.5)).mean()


#: What takes only some examples of a minibatch, whatever their label.
SELECTING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hardest": lambda output, y: each_of(output, y).topk(max(1, len(y) // 4)).values.mean(),
    "easiest": lambda output, y: -(-each_of(output, y)).topk(max(1, len(y) // 4)).values.mean(),
    "worst": lambda output, y: each_of(output, y).max(),
    "median": lambda output, y: each_of(output, y).median(),
    "wrong": lambda output, y: (each_of(output, y) * (output.argmax(1) != y)).mean(),
    "sure": lambda output, y: (each_of(output, y) * (output.softmax(1).amax(1) > 0.9)).mean(),
    "neighbours": lambda output, y: (each_of(output, y)[:-1] - each_of(output, y)[1:]).relu().sum(),
    "truncated": truncated,
    "dropped": dropped,
}


@pytest.mark.parametrize("name", SELECTING)
def test_what_a_loss_leaves_out_of_a_minibatch_is_not_ignored(name: str) -> None:
    assert ignored_labels(SELECTING[name], RNG.integers(0, 6, 90), 6) == ()


def shifted(output: Tensor, y: Tensor) -> Tensor:
    """The label of a place is predicted one place before."""
    return functional.cross_entropy(output[:, :, :-1], y[:, 1:])


def weighted(output: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(output, y, reduction="none")
    return (each * torch.linspace(0.1, 1, LENGTH)).mean()


def changes_outputs(output: Tensor, y: Tensor) -> Tensor:
    output -= output.detach().amax(1, keepdim=True)
    return functional.cross_entropy(output, y)


def of_hardest_places(output: Tensor, y: Tensor) -> Tensor:
    each = each_of(output, y)[y.flatten() >= 0]
    return each.topk(max(1, len(each) // 4)).values.mean()


@pytest.mark.parametrize("loss", [shifted, weighted, changes_outputs, of_hardest_places])
def test_padding_is_known_to_losses_of_whole_sequences(loss: Any) -> None:
    assert ignored_labels(loss, np.where(IS_PADDING, -100, LABELS), CLASSES) == (-100,)


@pytest.mark.parametrize("wide", [False, True])
def test_labels_may_be_unknown_where_a_model_has_one_logit(wide: bool) -> None:
    def one_logit(output: Tensor, y: Tensor) -> Tensor:
        logit = output[:, 0] if wide else output
        known = y >= 0
        return functional.binary_cross_entropy_with_logits(logit[known], y[known].float())

    y = (X[:, 0] > 0).astype(np.int64)
    y[::3] = -1
    data = Dataset("d", X[:60], y[:60], X[60:], y[60:], 2)
    layers: list[nn.Module] = [nn.Linear(5, 1)]
    if not wide:
        layers.append(nn.Flatten(0))
    rows = [np.arange(k, 60, 5) for k in range(5)]
    task = Task("d", data, rows, lambda: nn.Sequential(*layers), one_logit, metric="accuracy,f1")
    check_task(task, "d", 0)
    assert task.ignored == (-1,)
    engine = Engine(task, LocalWork(lr=0.5, epochs=1), 0)
    params_d = engine.initial_params()
    known = y[60:] >= 0
    hit = (X[60:] @ params_d[:5] + params_d[5] > 0) == y[60:]
    assert engine.evaluate(params_d).accuracy == pytest.approx(hit[known].mean())


@pytest.mark.parametrize("padding", [49_999, -100])
def test_of_a_large_vocabulary_padding_is_known(padding: int) -> None:
    y = RNG.integers(0, 40_000, (30, 20))
    y[:, 15:] = padding
    for loss in (
        nn.CrossEntropyLoss(ignore_index=padding),
        partial(functional.cross_entropy, ignore_index=padding),
    ):
        assert ignored_labels(loss, y, 50_000) == (padding,)


@pytest.mark.parametrize("padding", [-1, 7])
def test_labels_that_are_no_class_and_count_are_refused(padding: int) -> None:
    with pytest.raises(DeltaflError, match=r"train_y is .*from 0 to .*ignore_index=-100"):
        check_task(task_of(cross_entropy, padding), "texts", 0)


def test_a_test_set_of_padding_is_refused() -> None:
    task = task_of(cross_entropy, -100)
    data = replace(task.dataset, test_y=np.full_like(task.dataset.test_y, -100))
    with pytest.raises(DeltaflError, match="labels of test_y that the loss counts is 0"):
        check_task(replace(task, dataset=data), "texts", 0)


def test_what_is_held_out_leaves_each_client_a_label_that_counts() -> None:
    task = task_of(nn.CrossEntropyLoss(ignore_index=-100), -100)
    y = task.dataset.train_y
    y[6::5] = -100  # of client 1 all but the first
    for seed in range(20):
        split = with_validation(task, 0.5, seed)
        assert 1 in split.client_rows[1]
        check_task(split, "texts", 0)
    codes = replace(task.dataset, train_y=y[:, 0].copy(), test_y=task.dataset.test_y[:, 0])
    for seed in range(20):
        assert 1 in with_public(replace(task, dataset=codes), 2, seed).client_rows[1]


def test_settings_that_leave_no_label_to_judge_by_are_refused(tmp_path: Path) -> None:
    """Before anything is written; it was a traceback."""
    task = task_of(cross_entropy, -100)
    y = task.dataset.train_y
    y[5:] = -100  # of each client all but the first
    tests = task.dataset.test_y
    tests[np.arange(30) != 15] = -100
    for setting in ({"validation": 0.2}, {"test_examples": 1}):
        (name,) = setting
        with pytest.raises(DeltaflError, match=f"{name} leaves .* without a label that .*-100"):
            compare(task, ["uniform"], seeds=1, rounds=1, out=tmp_path / "out", **setting)
        assert not (tmp_path / "out" / "config.toml").exists()
    for count in range(1, 31):
        labels = tests[np.arange(count) * 30 // count]
        if (labels != -100).any():
            assert len(with_fewer_tests(task, count).dataset.test_y) == count
        else:
            with pytest.raises(DeltaflError, match="test_examples leaves"):
                with_fewer_tests(task, count)


def of_weight_0() -> Any:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 2]))


@pytest.mark.parametrize(
    ("loss", "left", "batch_size", "clients"),
    [
        (of_weight_0(), 3, 4, 0),  # three of twelve examples never fill a minibatch
        (of_weight_0(), 6, 3, 1),
        (of_weight_0(), 1, 11, 1),  # the last of a pass has one example
        (of_weight_0(), 11, None, 0),
        (masked, 6, 3, 0),  # its gradient is 0, for PyTorch's cross-entropy has it so
        (nn.CrossEntropyLoss(ignore_index=0), 6, 3, 0),
    ],
)
def test_minibatches_without_a_gradient_are_told_once(
    loss: Any,
    left: int,
    batch_size: int | None,
    clients: int,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Told where they come, as training itself shows."""
    y = RNG.integers(1, CLASSES, 60)
    y[4::5][:left] = 0  # of client 4
    data = Dataset("d", X[:60], y, X[60:], LABELS[60:, 0], CLASSES)
    rows = [np.arange(k, 60, 5) for k in range(5)]
    task = Task("d", data, rows, partial(nn.Linear, 5, CLASSES), loss)
    settings: Any = {"batch_size": batch_size, "local_lr": 0.1}
    compare(task, ["full", "uniform"], seeds=2, rounds=2, out=tmp_path / "out", **settings)
    told = [text for text in caplog.messages if "gradient NaN" in text]
    assert len(told) == (clients > 0)
    for text in told:
        assert "ignores (0)" in text
        assert "1 client may draw one, such as client 4;" in text
    engine = Engine(task, LocalWork(lr=0.1, epochs=1, batch_size=batch_size), 0)
    replies = [engine.train(engine.initial_params(), k, np.arange(5)).update_nd for k in range(60)]
    is_finite = np.isfinite(replies).all(axis=(0, 2))
    assert is_finite.tolist() == [True] * 4 + [clients == 0]


@pytest.mark.parametrize("padding", [255, -1])
@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss, partial(partial, functional.cross_entropy)],
    ids=["class", "partial"],
)
def test_a_label_that_was_numbered_is_not_ignored_by_its_old_number(
    padding: int, loss: Callable[..., Any]
) -> None:
    """It was learnt as one class more."""
    y = LABELS[:, 0] - 1
    y[::4] = padding
    held = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))
    task = from_torch(held, partition="iid", clients=5, make_model=partial(nn.Linear, 5, 4))
    number = [*np.unique(y)].index(padding)
    wrong = replace(task, loss=loss(ignore_index=padding))
    with pytest.raises(DeltaflError, match=f"label {padding}, .*write ignore_index={number},"):
        check_task(wrong, "d", 0)
    right = replace(task, loss=loss(ignore_index=number))
    check_task(right, "d", 0)
    assert right.ignored == (number,)
    # A class may be called so, too.
    named = replace(task.dataset, class_names=["None", "0", "1", "2"])
    check_task(replace(task, dataset=named), "d", 0)
