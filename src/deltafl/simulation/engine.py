"""The engine: the clients' local training and the evaluation of one task, on one process or several.

Every result is a pure function of (global model, round, client): the same to the last bit with one worker or two,
whoever else is in the cohort, and after a resume.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError
from ..round import Broadcast
from ..streams import stream
from ..tasks.base import Task
from ..types import BoolArray, FloatArray, IntArray, Params
from .fast import Augmented, choose_layout, choose_trainer, tell_refusal
from .local import LocalResult, LocalWork
from .workers import Job, Workers

try:
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
except ImportError as error:
    raise MissingExtraError("torch", "sim") from error

#: Examples in one pass of an evaluation: fixed, so that sums do not depend on the number of workers.
_EVALUATION_BATCH = 500


class Training(NamedTuple):
    """What a cohort returns, aligned with the clients that were asked.

    Attributes:
        update_nd: float32 (n, d), local model after training minus the global one; not finite where it diverged.
        loss_n: float64 (n,), mean minibatch loss over the local steps.
        step_variance_n: float64 (n,), see ``local.LocalResult``.
        num_steps_n: int64 (n,), local steps K_i.
    """

    update_nd: npt.NDArray[np.float32]
    loss_n: FloatArray
    step_variance_n: FloatArray
    num_steps_n: IntArray


class Evaluation(NamedTuple):
    """The global model on the pooled test set.

    Attributes:
        loss: Mean loss.
        accuracy: Share of right classes; NaN where the task's metric is ``"loss"``.
        client_accuracy: Mean over clients of the accuracy on their own test examples, each client counting the same;
            NaN where the task does not say whose they are, or its metric is ``"loss"``.
    """

    loss: float
    accuracy: float
    client_accuracy: float = math.nan


class Engine:
    """Trains and evaluates one task.

    Args:
        task: Data, clients, model and loss.
        work: What each client does in a round.
        seed: The experiment's seed, >= 0: initial model, minibatches, noise, random layers.
        workers: Processes to train with; None for this process. They may be shared by engines and are not closed here.

    Raises:
        DeltaflError: If the task's fixed initial parameters do not fit its model.
    """

    def __init__(self, task: Task, work: LocalWork, seed: int, workers: Workers | None = None) -> None:
        self.task = task
        self._workers = workers if workers is not None else Workers(1)
        self._runner = ClientRunner(task, work, seed)
        model = _make_model(task.make_model, seed)
        if self._workers.count > 1:
            self._runner.share()
            tell_refusal(model)  # the processes that train have no log
        self._initial_d = _initial_params(task, model)
        self.num_params: int = len(self._initial_d)

    def initial_params(self) -> Params:
        """The global model before the first round: the task's own, or a random one that depends on the seed only."""
        return self._initial_d.copy()

    def train(self, params_d: Params, round: int, client_n: IntArray, drift_d: Params | None = None) -> Training:
        """Train the given clients from the global model.

        Args:
            params_d: float32 (d,), the global model.
            round: The round, >= 0; with the client's index it decides the minibatches.
            client_n: (n,) client indices.
            drift_d: float32 (d,), what the server sends beside the model, see ``round.Broadcast``; None for nothing.

        Returns:
            The updates and their statistics in the order of ``client_n``.
        """
        clients = self._checked(client_n)
        self._check_shape("params_d", params_d)
        if drift_d is not None:
            self._check_shape("drift_d", drift_d)
        results: list[LocalResult] = self._map(
            "train", Broadcast(params_d, drift_d), [(round, client) for client in clients], self._costs(clients)
        )
        return Training(
            update_nd=np.array([r.update_d for r in results], dtype=np.float32).reshape(-1, self.num_params),
            loss_n=np.array([r.loss for r in results], dtype=np.float64),
            step_variance_n=np.array([r.step_variance for r in results], dtype=np.float64),
            num_steps_n=np.array([r.num_steps for r in results], dtype=np.int64),
        )

    def losses(self, params_d: Params, client_k: IntArray) -> FloatArray:
        """Mean loss of the global model on each client's own training data, float64 (k,)."""
        clients = self._checked(client_k)
        self._check_shape("params_d", params_d)
        return np.array(
            self._map("loss", params_d, [(client,) for client in clients], self._costs(clients)), dtype=np.float64
        )

    def evaluate(self, params_d: Params) -> Evaluation:
        """Loss and accuracy of the global model on the pooled test set."""
        self._check_shape("params_d", params_d)
        num_examples = len(self.task.dataset.test_x)
        starts = range(0, num_examples, _EVALUATION_BATCH)
        found = self._map("test", params_d, [(start,) for start in starts], [1.0] * len(starts))
        loss = float(np.array([loss for loss, _ in found]).sum()) / num_examples
        if self.task.metric == "loss":
            return Evaluation(loss, math.nan)
        hit_e = np.concatenate([hits for _, hits in found])
        return Evaluation(loss, float(hit_e.mean()), _mean_of_clients(hit_e, self.task.test_clients))

    def _map(self, method: str, model: Any, jobs: Sequence[Job], costs: Sequence[float]) -> list[Any]:
        self._workers.load(self._runner)
        return self._workers.map(method, model, jobs, costs)

    def _check_shape(self, name: str, vector_d: Params) -> None:
        if np.shape(vector_d) != (self.num_params,):
            raise DeltaflError(f"{name} has shape {np.shape(vector_d)}, the model needs ({self.num_params},)")

    def _costs(self, clients: list[int]) -> list[float]:
        return [self._runner.cost(client) for client in clients]

    def _checked(self, client_n: IntArray) -> list[int]:
        clients = [int(client) for client in client_n]
        if any(not 0 <= client < self.task.num_clients for client in clients):
            raise DeltaflError(f"clients {clients}: the task has clients 0 to {self.task.num_clients - 1}")
        return clients


class ClientRunner:
    """What a worker holds of a task, and the three jobs it can do. Its arrays can be shared by all workers.

    Args:
        task: Data, clients, model and loss.
        work: What each client does in a round.
        seed: The experiment's seed.
    """

    def __init__(self, task: Task, work: LocalWork, seed: int) -> None:
        data = task.dataset
        self._train_x, self._train_y = _tensor(data.train_x), _tensor(data.train_y)
        self._test_x, self._test_y = _tensor(data.test_x), _tensor(data.test_y)
        self._client_rows, self._noise_m = task.client_rows, task.gradient_noise_m
        self._make_model, self._loss = task.make_model, task.loss
        self._counts_hits, self._input_scale = task.metric == "accuracy", task.input_scale
        self._tokens = task.tokens
        self._augment = task.augment
        self._work, self._seed = work, seed
        self._model: torch.nn.Module | None = None

    def share(self) -> None:
        """Move the examples into memory that worker processes see without a copy."""
        for tensor in (self._train_x, self._train_y, self._test_x, self._test_y):
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def cost(self, client: int) -> float:
        """Examples that the client's local work visits: what decides who is trained first."""
        size = len(self._client_rows[client])
        if self._work.steps is None:
            return float(size)
        return float(self._work.steps * min(size, self._work.batch_size or size))

    def train(self, sent: Broadcast, round: int, client: int) -> LocalResult:
        """One client's local training in one round."""
        self._build()
        x, y = self._client(client)
        rng = stream(self._seed, "batches", round, client)
        noise = 0.0 if self._noise_m is None else float(self._noise_m[client])
        with _seeded(stream(self._seed, "dropout", round, client)):
            return self._trainer(
                x, y, sent.params_d, self._work, rng, noise, sent.drift_d, self._variation(round, client)
            )

    def _variation(self, round: int, client: int) -> Augmented | None:
        """The task's random variation of inputs, with this client's randomness."""
        augment = self._augment
        if augment is None:
            return None
        rng = stream(self._seed, "augment", round, client)
        return lambda x: augment(x, rng)

    def loss(self, params_d: Params, client: int) -> float:
        """Mean loss of the model on the client's data."""
        x, y = self._client(client)
        total = 0.0
        for x_batch, y_batch in zip(torch.split(x, _EVALUATION_BATCH), torch.split(y, _EVALUATION_BATCH), strict=True):
            total += self._score(params_d, x_batch, y_batch)[0]
        return total / len(x)

    def test(self, params_d: Params, start: int) -> tuple[float, BoolArray]:
        """Sum of the losses, and which classes are right, in one stretch of the test set."""
        stretch = slice(start, start + _EVALUATION_BATCH)
        return self._score(params_d, self._inputs(self._test_x[stretch]), self._test_y[stretch])

    def _score(self, params_d: Params, x: torch.Tensor, y: torch.Tensor) -> tuple[float, BoolArray]:
        model = self._build()
        vector_to_parameters(torch.tensor(params_d), model.parameters())
        with torch.no_grad():
            output = self._layout.forward(self._layout.arrange(x))
            loss = self._loss(output, y).item() * len(x)
            hits = output.argmax(dim=1) == y if self._counts_hits else torch.zeros(len(x), dtype=torch.bool)
        return loss, hits.numpy()

    def _client(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(np.asarray(self._client_rows[client]))
        return self._inputs(self._train_x[rows]), self._train_y[rows]

    def _inputs(self, stored: torch.Tensor) -> torch.Tensor:
        if self._tokens:
            return stored.long()
        return stored * self._input_scale if stored.dtype == torch.uint8 else stored

    def _build(self) -> torch.nn.Module:
        """Make the model and its trainer, in the process that uses them."""
        if self._model is None:
            self._model = _make_model(self._make_model, self._seed)
            self._trainer, _ = choose_trainer(self._model, self._loss)
            self._model.eval()
            self._layout = choose_layout(self._model, self._test_x)
        return self._model


def _mean_of_clients(hit_e: BoolArray, client_e: IntArray | None) -> float:
    """The mean over clients of the share of hits among their own examples; NaN if no example has a client."""
    if client_e is None or (client_e < 0).all():
        return math.nan
    owned_e = client_e >= 0
    count_m = np.bincount(client_e[owned_e])
    share_m = np.bincount(client_e[owned_e], weights=hit_e[owned_e])[count_m > 0] / count_m[count_m > 0]
    return float(share_m.mean())


def _initial_params(task: Task, model: torch.nn.Module) -> Params:
    random_d: Params = parameters_to_vector(model.parameters()).detach().numpy().astype(np.float32)
    if task.initial_params is None:
        return random_d
    if task.initial_params.shape != random_d.shape:
        raise DeltaflError(
            f"task {task.name!r}: initial_params has shape {task.initial_params.shape}, "
            f"its model has {random_d.shape[0]} parameters"
        )
    return task.initial_params.astype(np.float32)


def _make_model(make: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with _seeded(stream(seed, "model")):
        return make().train()


@contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed torch's global generator, which models read, and put its state back afterwards.

    Not by ``torch.manual_seed``, which seeds all devices too and formats three tracebacks on a machine without them:
    half of the time of a small model.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(int(rng.integers(2**63)))
    try:
        yield
    finally:
        generator.set_state(before)


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The array as a tensor; copied only where it is read-only or not contiguous."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
