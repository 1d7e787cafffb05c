"""How a run is computed: by rule, kept beside the run; and every error."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from batch_tools import CLASSES, MODELS, WORKS, task_of
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.compatibility import vectorized_incompatibility
from deltafl.simulation.training.devices import find_device
from deltafl.simulation.training.route import (
    Computation,
    Route,
    choose_route,
    dense_cohort_size,
    form_of,
    keep_route,
    kept_route,
)
from deltafl.simulation.training.serial import LocalWork
from deltafl.simulation.training.sizes import cohort_size, numbers_per_example
from deltafl.tasks import Dataset, Task
from deltafl.tasks.losses import Loss, binary_cross_entropy
from deltafl.tasks.models import mlp, softmax_regression
from deltafl.tasks.synthetic import make_log_model, make_synthetic_task, make_toy_task
from tools.simulation import TINY, lines_of, run

ROUTE = "deltafl.simulation.training.route"


def own_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y).square()


class Looks(nn.Module):
    """What it computes depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(17, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(x if bool((x >= 0).all()) else -x)
        return output


BATCH_NORM = nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.BatchNorm1d(5))
DROPOUT = nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.Dropout(0.5))
RANDOM = nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.RReLU())
# It draws for numbers below 0 alone.
nn.init.constant_(cast(nn.Linear, RANDOM[1]).bias, -9.0)
MLP = MODELS["mlp"][0]()


class Normed(nn.Linear):
    """Makes the norms of its weights 1 in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "changes", "word"),
    [
        (BATCH_NORM, {}, "running_mean"),
        (RANDOM, {}, "random"),
        (MLP, {"loss": own_loss}, "loss"),
        (Looks(), {}, "vmap"),
        (Normed(17, 5), {}, "copies"),
    ],
)
def test_what_cannot_be_a_batch_is_not_trained_in_bfloat16(
    model: nn.Module, changes: dict[str, object], word: str
) -> None:
    task = task_of("mlp", make_model=lambda: model, **changes)
    reason = vectorized_incompatibility(model, task, "bfloat16")
    assert reason is not None
    assert word in reason
    with pytest.raises(DeltaflError, match=f"{re.escape(reason)}; write 'float32'"):
        Engine(task, WORKS["epochs"], 0, how=Computation(precision="bfloat16"))
    engine = Engine(task, WORKS["epochs"], 0)
    trained = engine.train(engine.initial_params(), 0, np.arange(1, 3))
    assert (engine.route, trained.reports.num_steps_n.tolist()) == (Route(), [10, 6])


class Scaled(nn.Linear):
    """Makes a tensor of float32 in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1) * torch.ones(17))


def test_what_does_not_run_in_bfloat16_is_refused_before_a_round() -> None:
    task = task_of("mlp", make_model=lambda: Scaled(17, 5))
    before = torch.default_generator.get_state()
    with pytest.raises(DeltaflError, match=r"found BFloat16.*; write 'float32'"):
        Engine(task, WORKS["epochs"], 0, how=Computation(precision="bfloat16"))
    assert torch.equal(torch.default_generator.get_state(), before)
    assert Engine(task, WORKS["epochs"], 0).route == Route()


def test_batches_are_as_large_as_memory_allows() -> None:
    cpu = torch.device("cpu")
    task = task_of()
    assert cohort_size(task.make_model(), task, 32, cpu) == 256
    assert cohort_size(mlp(256, [30_000, 3_000], CLASSES), task, 32, cpu) == 1


def test_the_numbers_of_one_example_are_counted_with_batch_normalization_too() -> None:
    """On a GPU they are counted for every model."""
    assert numbers_per_example(BATCH_NORM, task_of("mlp")) == 17 + 17 + 5 + 5


def test_dense_cohorts_fit_into_a_cache() -> None:
    work = WORKS["epochs"]
    logistic = softmax_regression(784, 10)
    mlp_task = task_of("mlp")
    data = replace(
        mlp_task.dataset,
        train_x=np.zeros((4000, 784), np.float32),
        train_y=np.zeros(4000, np.int64),
    )
    wide = replace(mlp_task, dataset=data)
    assert dense_cohort_size(MLP, mlp_task, work) > 16
    assert dense_cohort_size(make_log_model(), make_synthetic_task(0), work) > 16
    assert 4 <= dense_cohort_size(logistic, wide, work) <= 32
    rows = [np.arange(4)] * 99 + [np.arange(4000)]  # whole data: minibatches are almost all padding
    uneven = replace(wide, client_rows=rows)
    assert dense_cohort_size(logistic, uneven, LocalWork(lr=0.1, steps=3, batch_size=None)) == 1
    assert dense_cohort_size(logistic, uneven, LocalWork(lr=0.1, steps=3, batch_size=32)) > 1


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (DROPOUT, {}),
        (BATCH_NORM, {}),
        (nn.Sequential(nn.Linear(17, 5)), {}),
        (nn.Sequential(nn.Flatten(), nn.Linear(17, 5), nn.Softmax(dim=1)), {}),
        (nn.Linear(17, 5), {}),
        (mlp(17, [4000, 4000], 5), {}),
        (MLP, {"loss": own_loss}),
        (MLP, {"augment": lambda x, rng: x}),
        (MLP, {"tokens": True}),
    ],
)
def test_which_tasks_have_no_dense_cohorts(model: nn.Module, changes: dict[str, object]) -> None:
    assert (
        dense_cohort_size(
            model, task_of("mlp", make_model=lambda: model, **changes), WORKS["epochs"]
        )
        == 1
    )


def test_the_rule_for_cpus() -> None:
    for name, path in (("two-layer cnn", "loop"), ("mlp", "batched"), ("lstm", "loop")):
        assert Engine(task_of(name), WORKS["epochs"], 0).route == Route(path)
    assert Engine(make_toy_task(), LocalWork(lr=0.1, steps=2), 0).route.path == "loop"


@pytest.mark.parametrize(
    ("name", "model", "route", "path", "width"),
    [
        ("mlp", None, Route("batched"), "batched", 32),  # a dense chain is padded
        ("two-layer cnn", None, Route("batched"), "batched", 8),
        ("two-layer cnn", None, Route(), "fast", 8),
        ("mlp", DROPOUT, Route(), "serial", 8),
    ],
)
def test_the_table_of_how_a_task_is_trained(
    name: str, model: nn.Module | None, route: Route, path: str, width: int
) -> None:
    task = task_of(name)
    if model is not None:
        task = task_of(name, make_model=lambda: model)
    form = form_of(task.make_model(), task, WORKS["epochs"], route)
    assert (form.path, form.width) == (path, width)
    assert (form.group_size > 1) == (path == "batched")
    assert form.passes.size >= 500


def test_a_route_is_kept_beside_the_run(tmp_path: Path) -> None:
    assert kept_route(tmp_path) is None
    route = Route("batched", "cpu", "bfloat16")
    keep_route(route, tmp_path)
    keep_route(Route("loop"), tmp_path)
    assert kept_route(tmp_path) == route


@pytest.mark.parametrize(
    "number", ["999", "0000", "99999999999999", "9" * 5000, "-1", "1.5", "x", "٣"]
)
def test_a_device_that_is_not_there_is_one_sentence(number: str) -> None:
    for name in (f"cuda:{number}", f"gpu:{number}"):
        with pytest.raises(DeltaflError, match=r"finds .* GPUs; write 'auto'"):
            find_device(name)


@pytest.mark.parametrize(
    ("key", "value"), [("device", "gpu"), ("path", "nonsense"), ("hardware", None)]
)
def test_a_damaged_note_is_an_error(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({**Route("batched")._asdict(), key: value}))
    with pytest.raises(DeltaflError, match=f"engine.json: {key}: .*it is damaged"):
        kept_route(tmp_path)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_batch_that_runs_on_a_cpu_alone_is_trained_client_by_client(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise RuntimeError("Batching rule not implemented for aten::_cudnn_rnn")

    monkeypatch.setattr(f"{ROUTE}.find_device", torch.device)
    monkeypatch.setattr(f"{ROUTE}.device_name", str)
    monkeypatch.setattr(f"{ROUTE}.captures_steps", refuse)
    task = task_of()
    how = Computation("cuda:0", precision)
    if precision == "bfloat16":
        with pytest.raises(DeltaflError, match=r"does not run on cuda:0 in bfloat16 \(.*cudnn"):
            choose_route(task.make_model(), task, WORKS["epochs"], how)
        return
    found = choose_route(task.make_model(), task, WORKS["epochs"], how)
    assert (found.path, found.steps) == ("loop", "eager")


def test_each_of_several_processes_has_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them: ``set_device`` has taken the second one."""
    keep_route(Route("batched", "cuda:0", hardware="cuda:0 (X)"), tmp_path)
    cuda = "torch.cuda"
    monkeypatch.setattr(f"{cuda}.device_count", lambda: 2)
    monkeypatch.setattr(f"{cuda}.is_initialized", lambda: True)
    monkeypatch.setattr(f"{cuda}.current_device", lambda: 1)
    monkeypatch.setattr(f"{cuda}.get_device_name", lambda device: "X")
    for name, number in (("cuda", 1), ("auto", 1), ("cuda:0", 0)):
        assert find_device(name) == torch.device("cuda", number)
        kept = kept_route(tmp_path, name)
        assert kept is not None
        assert kept.device == f"cuda:{number}"


def test_a_run_goes_on_with_the_gpu_of_its_process_whatever_the_note_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A note of a second GPU, and then a machine with one of another product."""
    keep_route(Route("batched", "cuda:1", hardware="cuda:1 (X)"), tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    for product, warnings in (("X", 0), ("Y", 1)):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, product=product: product)
        caplog.clear()
        with caplog.at_level("WARNING", logger="deltafl"):
            kept = kept_route(tmp_path, "cuda")
        assert kept is not None
        assert kept.device == "cuda:0"
        assert len(caplog.records) == warnings
    with pytest.raises(DeltaflError, match="1 GPUs"):
        kept_route(tmp_path, "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_an_error_and_auto_is_the_cpu(tmp_path: Path) -> None:
    given = {**TINY, "rounds": 2}
    with pytest.raises(DeltaflError, match=r"'cuda'.*'auto'"):
        run(tmp_path / "refused", **given, device="cuda")
    assert not (tmp_path / "refused").exists()
    run(tmp_path / "auto", **given, device="auto")
    run(tmp_path / "cpu", **given)
    assert lines_of(tmp_path / "auto") == lines_of(tmp_path / "cpu")
    assert (
        json.loads((tmp_path / "auto" / "engine.json").read_text())["device"] == "cpu"
    )  # a later GPU changes nothing


def zero_head(classes: int = 2) -> nn.Module:
    model = nn.Linear(3, classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Packs(nn.Module):
    """Token 0 is padding, and no sequence may be all padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(x), (x != 0).sum(1), batch_first=True, enforce_sorted=False
        )
        return torch.as_tensor(self.head(self.recurrent(packed)[1][-1]))


def pairs(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output[:, None] - output[None]).square().mean()


def variance(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of one example it is an error."""
    if len(y) == 1:
        raise ValueError
    return output.var()


ALTERNATING = np.arange(900) % 2
#: One example alone has the class 1: no 64 that are spread over the test set see it.
RARE = (np.arange(900) == 777).astype(np.int64)


@pytest.mark.parametrize("y", [np.sort(ALTERNATING), ALTERNATING, RARE])
@pytest.mark.parametrize("make", [zero_head, lambda: nn.Linear(3, 2)])
@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0])), False),
        (nn.CrossEntropyLoss(ignore_index=1), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (lambda output, y: functional.nll_loss(output.log_softmax(1), y), True),
        (lambda output, y: -(output[torch.arange(len(y)), y]).mean(), True),
        (pairs, False),
        (variance, False),
    ],
)
def test_a_loss_that_is_no_mean_is_known_whatever_a_new_model_answers(
    y: np.ndarray, make: Callable[[], nn.Module], loss: Loss, is_mean: bool
) -> None:
    x = np.random.default_rng(0).normal(size=(900, 3)).astype(np.float32)
    task = Task("t", Dataset("d", x[:300], y[:300], x, y, 2), [np.arange(300)], make, loss)
    form = form_of(make(), task, LocalWork(lr=0.1, epochs=1), Route())
    assert form.passes.is_mean == is_mean


@pytest.mark.parametrize("path", ["loop", "batched"])
def test_labels_that_are_ignored_by_default_are_seen_wherever_they_are(path: str) -> None:
    x = np.random.default_rng(0).normal(size=(900, 3)).astype(np.float32)
    y = ALTERNATING.copy()
    y[-100:] = -100
    data = Dataset("d", x[:300], y[:300], x, y, 0)
    make = partial(nn.Sequential, nn.Linear(3, 2))
    task = Task("t", data, [np.arange(300)], make, functional.cross_entropy, metric="loss")
    form = form_of(make(), task, LocalWork(lr=0.1, epochs=1), Route(path=path))
    assert not form.passes.is_mean


@pytest.mark.parametrize("loss", [nn.BCELoss(), nn.BCEWithLogitsLoss(), binary_cross_entropy])
def test_the_loss_of_several_labels_is_a_mean(loss: Loss) -> None:
    make = partial(nn.Sequential, nn.Linear(3, 4), nn.Sigmoid())
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    y = np.eye(4, dtype=np.float32)[np.arange(90) % 4]
    task = Task("t", Dataset("d", x, y, x, y, 4), [np.arange(90)], make, loss)
    form = form_of(make(), task, LocalWork(lr=0.1, epochs=1), Route())
    assert form.passes.is_mean


@pytest.mark.parametrize("kind", [np.float32, np.int64])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_loss_that_leaves_out_a_rare_number_is_no_mean(kind: type, columns: int) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts = y > -(10**9)
        return (output - y)[counts].square().sum() / counts.sum()

    x = np.random.default_rng(0).normal(size=(900, 3)).astype(np.float32)
    y: Any = np.arange(900 * columns).reshape(900, columns).astype(kind)
    route = LocalWork(lr=0.1, epochs=1), Route()
    for is_mean in (True, False):
        task = Task("t", Dataset("d", x, y, x, y, 0), [np.arange(300)], nn.Identity, loss)
        form = form_of(nn.Linear(3, columns), task, *route)
        assert form.passes.is_mean == is_mean
        y = y.copy()
        y[777] = -(2**30)


def of_texts(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over texts of the mean over their words."""
    each = functional.cross_entropy(output, y, reduction="none")
    return (each.sum(dim=1) / (y >= 0).sum(dim=1)).mean()


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (functional.cross_entropy, (-100,)),
        (nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.2), (-100,)),
        (of_texts, ()),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3, 4])), None),
    ],
)
def test_padded_texts_are_judged_in_parts(
    loss: Loss, ignored: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which gives the loss of all at once, without all outputs in memory."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 5)).astype(np.float32)
    length_e = rng.integers(1, 7, 90)
    y = np.where(np.arange(6) < length_e[:, None], rng.integers(0, 4, (90, 6)), -100)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 24), nn.Unflatten(1, (4, 6)))

    rows = [np.arange(60)[k::3] for k in range(3)]
    task = Task("t", Dataset("d", x[:60], y[:60], x[60:], y[60:], 4), rows, make, loss)
    # Of 24 numbers an example: 7 at once.
    monkeypatch.setattr("deltafl.simulation.training.passes._OUTPUT_NUMBERS", 7 * 24)
    engine = Engine(task, LocalWork(lr=0.1, epochs=1), 0)
    form = form_of(make(), task, LocalWork(lr=0.1, epochs=1), Route())
    assert form.passes[1:] == (ignored is not None, ignored or ())
    assert form.passes.size == 7
    params_d = engine.initial_params()
    model = make()
    nn.utils.vector_to_parameters(torch.tensor(params_d), model.parameters())
    seen, target = torch.tensor(x), torch.tensor(y)
    with torch.no_grad():
        at_once = float(loss(model(seen[60:]), target[60:]))
        of_client = float(loss(model(seen[rows[1]]), target[rows[1]]))
    assert engine.evaluate(params_d).loss == pytest.approx(at_once, rel=1e-6)
    assert engine.losses(params_d, np.array([1]))[0] == pytest.approx(of_client, rel=1e-6)


def test_an_example_is_one_that_the_model_takes() -> None:
    x = np.random.default_rng(0).integers(1, 9, (60, 5))
    y = np.arange(60) % CLASSES
    data = Dataset("d", x, y, x, y, CLASSES)
    task = Task("t", data, [np.arange(60)], Packs, functional.cross_entropy, tokens=True)
    assert numbers_per_example(Packs(), task) > 5
