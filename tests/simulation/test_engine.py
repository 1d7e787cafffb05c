"""The engine and its workers: the same bits in every cohort and process; and no process is left
behind.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from deltafl.errors import DeltaflError
from deltafl.plan import NO_REST
from deltafl.simulation.engine import Engine
from deltafl.simulation.parallel.processes import Processes
from deltafl.simulation.parallel.workers import Recipe, Workers
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.types import IntArray, Params

SIZES = (5, 40, 12, 25, 8, 17)
WORK = LocalWork(lr=0.1, epochs=2, batch_size=8)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)
    )


def dropout_net(rate: float = 0.5) -> nn.Module:
    layers = nn.Linear(144, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3)
    return nn.Sequential(nn.Flatten(), *layers)


def batch_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)
    )


def softmax_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3))


def failing_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no loss")


def make_task(make_model: object = cnn, data_seed: int = 0, **changes: object) -> Task:
    rng = np.random.default_rng(data_seed)
    m = sum(SIZES)
    x = rng.integers(0, 256, (m + 1203, 1, 12, 12), dtype=np.uint8)
    y = rng.integers(0, 3, m + 1203)
    rows = np.split(np.random.default_rng(1).permutation(m), np.cumsum(SIZES)[:-1])
    data = Dataset("random", x[:m], y[:m], x[m:], y[m:], 3)
    parts = {"dataset": data, "client_rows": rows, "make_model": make_model, "loss": cross_entropy}
    return Task(**({"name": "tiny"} | parts | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make_model", [cnn, dropout_net, batch_norm_net, softmax_net])
def test_one_and_two_workers_agree_to_the_last_bit(make_model: object, two: Workers) -> None:
    task = make_task(make_model)
    alone = Engine(task, WORK, 3)
    pair = Engine(task, WORK, 3, two)
    params_d = alone.initial_params()
    clients = np.arange(6)
    np.testing.assert_array_equal(params_d, pair.initial_params())
    first = alone.train(params_d, 2, clients, squares=True)
    np.testing.assert_equal(first, pair.train(params_d, 2, clients, squares=True))
    for cohort in (np.array([], dtype=int), np.array([4]), np.array([5, 4, 1])):
        some = first.part(cohort)
        np.testing.assert_equal(alone.train(params_d, 2, cohort, squares=True), some)
    assert not np.array_equal(first.update_nd, alone.train(params_d, 3, clients).update_nd)
    moved_d = params_d + first.update_nd.mean(axis=0)
    np.testing.assert_equal(alone.train(moved_d, 3, clients), pair.train(moved_d, 3, clients))
    drift_d = first.update_nd[0]
    drifting = alone.train(moved_d, 3, clients, drift_d)
    np.testing.assert_equal(drifting, pair.train(moved_d, 3, clients, drift_d))
    assert not np.array_equal(drifting.update_nd, alone.train(moved_d, 3, clients).update_nd)
    np.testing.assert_array_equal(alone.losses(moved_d, clients), pair.losses(moved_d, clients))
    assert alone.evaluate(moved_d) == pair.evaluate(moved_d)


def test_dropout_is_on_while_clients_train_and_statistics_of_batches_are_not() -> None:
    dropping, keeping, normed = (
        Engine(make_task(net), WORK, 3)
        for net in (dropout_net, partial(dropout_net, 0.0), batch_norm_net)
    )
    params_d = dropping.initial_params()
    everyone = np.arange(6)
    one, two = (
        np.linalg.norm(engine.train(params_d, 0, everyone).update_nd)
        for engine in (dropping, keeping)
    )
    assert abs(one / two - 1) > 0.02
    assert dropping.evaluate(params_d) == keeping.evaluate(params_d)
    # One client has a minibatch of one example.
    assert np.isfinite(normed.train(normed.initial_params(), 0, everyone).update_nd).all()


def test_evaluation_is_the_mean_over_all_examples_of_the_model_without_dropout() -> None:
    task = make_task(dropout_net)
    data = task.dataset
    rows = task.client_rows[1]
    engine = Engine(task, WORK, 0)
    params_d = engine.initial_params()
    weight_1, bias_1, weight_2, bias_2 = np.split(params_d, [144 * 16, 145 * 16, 145 * 16 + 48])

    def expected(x: npt.NDArray[np.uint8], y: IntArray) -> tuple[float, float]:
        hidden = np.maximum(x.reshape(len(x), -1) / 255 @ weight_1.reshape(16, 144).T + bias_1, 0)
        output = hidden @ weight_2.reshape(3, 16).T + bias_2
        losses = np.log(np.exp(output).sum(axis=1)) - output[np.arange(len(y)), y]
        return float(losses.mean()), float(np.mean(output.argmax(axis=1) == y))

    assert engine.evaluate(params_d)[:2] == pytest.approx(
        expected(data.test_x, data.test_y), rel=1e-5
    )
    own = engine.losses(params_d, np.array([1]))
    assert own[0] == pytest.approx(expected(data.train_x[rows], data.train_y[rows])[0], rel=1e-5)


def test_accuracy_of_a_client_is_that_of_test_examples_split_as_its_training_data_are() -> None:
    engine = Engine(make_task(dropout_net), WORK, 0)
    params_d = engine.initial_params()
    data = engine.task.dataset
    pooled = engine.judge(params_d).evaluation()
    accuracy_m = engine.judge(params_d).by_client()
    assert (
        accuracy_m is not None
        and pooled == engine.evaluate(params_d)
        and np.isnan(pooled.client_accuracy)
    )
    hit_e = one_by_one(engine, params_d)  # by an independent twin
    for client, rows in enumerate(engine.task.client_rows):
        expected = [np.mean(hit_e[data.test_y == label]) for label in data.train_y[rows]]
        assert accuracy_m[client] == pytest.approx(np.mean(expected), abs=1e-12)


def one_by_one(engine: Engine, params_d: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    model = dropout_net().eval()
    nn.utils.vector_to_parameters(torch.tensor(params_d), model.parameters())
    x = torch.tensor(engine.task.dataset.test_x).float() / 255
    y = engine.task.dataset.test_y
    return np.array(
        [model(row[None]).argmax().item() == label for row, label in zip(x, y, strict=True)]
    )


def test_classes_that_the_test_set_lacks_are_left_out_and_shares_renormalised() -> None:
    # Clients hold classes 0, 0 and 1, 0 and 2, 2; the test set has 0 and 1 alone. A model of zeros
    # says 0 always.
    x = np.zeros((6, 1, 12, 12), np.uint8)
    y = np.array([0, 0, 1, 0, 2, 2])
    test_y = np.array([0, 1, 1])
    rows = [np.array([0]), np.array([1, 2]), np.array([3, 4]), np.array([5])]
    task = make_task(softmax_net, dataset=Dataset("few", x, y, x[:3], test_y, 3), client_rows=rows)
    engine = Engine(task, WORK, 0)
    zeros_d = np.zeros(engine.num_params, np.float32)
    np.testing.assert_equal(engine.judge(zeros_d).by_client(), [1.0, 0.5, 1.0, np.nan])
    owned = Engine(replace(task, test_clients=np.array([3, 3, -1])), WORK, 0)
    found = owned.judge(zeros_d).evaluation()
    accuracy_m = owned.judge(zeros_d).by_client()
    np.testing.assert_equal(accuracy_m, [np.nan, np.nan, np.nan, 0.5])
    assert (found.accuracy, found.client_accuracy) == pytest.approx((1 / 3, 0.5))
    of_losses = Engine(replace(task, metric="loss"), WORK, 0)
    assert of_losses.judge(zeros_d).by_client() is None


class Counts(nn.Module):
    """Answers by how often it was evaluated; its class has the first number."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(144, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.calls += 1
        return torch.as_tensor(self.head(x.flatten(1)) * (1 + self.calls))


def test_what_a_model_remembers_of_an_evaluation_is_gone_after_it() -> None:
    engine = Engine(make_task(Counts), WORK, 0)
    assert engine._form.path == "fast"
    params_d = engine.initial_params()
    first = engine.evaluate(params_d)
    engine.losses(params_d, np.arange(3))
    assert engine.evaluate(params_d) == first


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 3.0])), nn.CrossEntropyLoss(ignore_index=1)],
)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_loss_that_is_no_mean_is_that_of_the_whole_test_set_whoever_owns_it(
    loss: nn.Module, is_sorted: bool
) -> None:
    task = make_task(softmax_net, loss=loss, local=["1.bias"])
    y = task.dataset.test_y
    owner_e = np.arange(len(y)) % 4
    if is_sorted:  # each owner has examples of one class
        owner_e = y.copy()
    engine = Engine(replace(task, test_clients=owner_e, metric="accuracy"), WORK, 0)
    params_d = engine.initial_params()
    # All begin with the same bias.
    bias = torch.tensor(engine.beside.of_client(NO_REST, 0)["1.bias"])
    with torch.no_grad():
        x = torch.tensor(task.dataset.test_x).flatten(1).float() / 255
        output = x @ torch.tensor(params_d).reshape(3, 144).T + bias
        expected = task.loss(output, torch.tensor(y)).item()
    found = engine.evaluate(params_d)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    counted = y != getattr(loss, "ignore_index", -100)
    assert found.accuracy == (output.argmax(1).numpy() == y)[counted].mean()


def test_a_loss_that_is_no_mean_needs_no_pass_of_all_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 3.0]))
    task = make_task(softmax_net, loss=weighted)
    whole = Engine(task, WORK, 0)
    monkeypatch.setattr("deltafl.simulation.training.passes._EXAMPLES", 7)
    monkeypatch.setattr("deltafl.simulation.training.passes._LAYER_NUMBERS", 0)
    parts = Engine(task, WORK, 0)
    passes = list[int]()

    def flat(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        passes.append(len(x))
        return x.flatten(1)

    monkeypatch.setattr(nn.Flatten, "forward", flat)
    params_d = whole.initial_params()
    found = [parts.evaluate(params_d).loss, *parts.losses(params_d, np.arange(3))]
    assert max(passes) == 7
    expected = [whole.evaluate(params_d).loss, *whole.losses(params_d, np.arange(3))]
    assert max(passes) > 7
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("make", [softmax_net, Counts])
def test_a_minibatch_whose_labels_are_all_ignored_has_no_loss_and_takes_no_step(
    make: Callable[[], nn.Module],
) -> None:
    """PyTorch's loss of it is NaN; the reply is as good as without it."""
    task = make_task(make, loss=nn.CrossEntropyLoss(ignore_index=1))
    rows = task.client_rows[0]
    kept = rows[task.dataset.train_y[rows] != 1]
    assert 0 < len(kept) < len(rows)
    work = LocalWork(lr=0.1, epochs=1, batch_size=1)
    whole = Engine(replace(task, client_rows=[rows]), work, 0)
    params_d = 0 * whole.initial_params()
    found = whole.train(params_d, 0, np.arange(1))
    assert np.isfinite(found.reports.loss_n).all() and np.isfinite(found.update_nd).all()
    # A single step from 0 does not hang on the order.
    alone = Engine(replace(task, client_rows=[kept[:1]]), work, 0).train(params_d, 0, np.arange(1))
    ignored = rows[task.dataset.train_y[rows] == 1]
    both = [np.append(ignored, kept[:1])]
    mixed = Engine(replace(task, client_rows=both), work, 0).train(params_d, 0, np.arange(1))
    np.testing.assert_allclose(mixed.update_nd, alone.update_nd, atol=1e-7)
    np.testing.assert_allclose(mixed.reports.loss_n, alone.reports.loss_n, atol=1e-6)


def test_other_default_types_of_torch_are_refused() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(DeltaflError, match=r"float64, .* leave torch.set_default_dtype out"):
            Engine(make_task(Counts), WORK, 0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, again, other = (
        Engine(make_task(data_seed=k), WORK, seed) for k, seed in ((0, 5), (1, 5), (0, 6))
    )
    np.testing.assert_array_equal(one.initial_params(), again.initial_params())
    assert not np.array_equal(one.initial_params(), other.initial_params())
    one.train(one.initial_params(), 0, np.arange(2))
    one.evaluate(one.initial_params())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_task_may_fix_its_starting_point() -> None:
    start_d = np.linspace(-1, 1, 435, dtype=np.float32)
    engine = Engine(make_task(softmax_net, initial_params=start_d), WORK, 0)
    np.testing.assert_array_equal(engine.initial_params(), start_d)
    with pytest.raises(DeltaflError, match="435"):
        Engine(make_task(softmax_net, initial_params=start_d[1:]), WORK, 0)


class Names:
    def who(self, params_d: Params, index: int) -> int:
        time.sleep(0.005)
        return os.getpid()

    def echo(self, params_d: Params, a: int, b: int) -> tuple[float, int]:
        return float(params_d.sum()), 10 * a + b


NAMES = Recipe(Names, ())
PARAMS = np.array([1, 2], dtype=np.float32)


def pids(workers: Workers) -> list[int]:
    """The processes that run jobs; on a busy machine one may run many before another begins."""
    jobs = [(index,) for index in range(40)]
    found: set[int] = set()
    while len(found) < workers.count:
        found |= {*workers.map(NAMES, "who", PARAMS, jobs, [1.0] * 40)}
    return sorted(found)


def test_results_come_in_the_order_of_the_jobs(two: Workers) -> None:
    jobs = [(i, j) for i in range(5) for j in range(4)]
    costs = [float(i * j % 7) for i, j in jobs]
    assert two.map(NAMES, "echo", PARAMS, jobs, costs) == [(3.0, 10 * i + j) for i, j in jobs]
    assert two.map(NAMES, "echo", PARAMS, [], []) == []


def test_where_processes_can_share_too_little_memory_a_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container has 64 MB of it, unless somebody asks for more."""

    def full(_: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    recipe = Recipe(len, (torch.zeros(10**6),))
    with Workers(2) as workers, pytest.raises(DeltaflError, match=r"share 4 MB of .*--shm-size=2g"):
        workers.map(recipe, "who", PARAMS, [(1,)], [1.0])


def test_workers_leave_interrupts_to_the_parent(two: Workers) -> None:
    before = pids(two)
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert pids(two) == before


def test_a_killed_worker_is_an_error_and_not_a_hang_and_others_take_its_place() -> None:
    with Workers(2) as workers:
        before = pids(workers)
        assert len(before) == 2
        assert os.getpid() not in before
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(DeltaflError, match="died; if it was killed"):
            pids(workers)
        assert not set(before) & set(pids(workers))


def test_an_error_ends_calls_under_way() -> None:
    with pytest.raises(KeyboardInterrupt), Processes(1) as processes:
        pid = processes.submit(os.getpid).result()
        processes.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert not is_alive(pid)


def test_models_of_a_script_are_sent_and_what_cannot_be_is_named() -> None:
    with Workers(2) as workers:
        engine = Engine(make_task(lambda: softmax_net()), WORK, 0, workers)  # noqa: PLW0108
        assert engine.evaluate(engine.initial_params()).loss > 0
        lock = threading.Lock()
        engine = Engine(make_task(lambda: (lock, softmax_net())[1]), WORK, 0, workers)
        with pytest.raises(DeltaflError, match=r"cannot be sent to other processes: .*lock"):
            engine.evaluate(engine.initial_params())


def test_errors_of_a_model_come_back_with_their_line() -> None:
    words = r"round 1, with client \d: ZeroDivisionError: no loss \(test_engine.py line"
    with Workers(2) as workers:
        engine = Engine(make_task(loss=failing_loss), replace(WORK, batch_size=None), 0, workers)
        with pytest.raises(DeltaflError, match=words):
            engine.train(engine.initial_params(), 0, np.arange(6))


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from test_engine import Workers, pids
if __name__ == "__main__":
    workers = Workers(2)
    print(*pids(workers), flush=True)
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    shared = Path("/dev/shm")
    script.write_text(PARENT.format(folder=str(Path(__file__).parent)))
    names = set(shared.glob("*torch*"))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert [is_alive(pid) for pid in children] == [True, True]
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [is_alive(pid) for pid in children] == [False, False]
    assert not set(shared.glob("*torch*")) - names
