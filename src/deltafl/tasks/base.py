"""What a task is: examples, the clients who hold them, a model, a loss and a metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, counted
from ..model.parts import ModelParts, Patterns
from ..streams import stream
from ..types import Array, BoolArray, FloatArray, IntArray, Judge, Population, Rng
from .dataset import Dataset, crc32_of
from .ignored import ignored_labels
from .losses import Loss, MakeModel, Module, Tensor
from .metrics import AnyMetric, Metric, counts, metrics_of

#: Test examples on which metrics and a loss are tried before an experiment.
TRIED_EXAMPLES = 64
#: Classes, or different numbers, of which a loss is tried on one each.
_TRIED_TARGETS = 256
#: ``augment(x, rng)``: a random variation of a minibatch's inputs.
Augment = Callable[[Tensor, Rng], Tensor]


@dataclass(frozen=True)
class Task:
    """The problem that a simulation solves.

    Attributes:
        name: The task's name on the command line.
        dataset: The examples.
        client_rows: For each client the rows of ``dataset.train_*`` it holds, int64; never empty.
        make_model: Makes the model; the caller seeds torch's generator before.
        loss: ``loss(output, y)``: mean loss of a minibatch, a scalar tensor.
        metric: By what the test outputs are judged: a name (docs/how-to/metrics.md) such as
            ``"accuracy"`` or ``"loss"``, a ``Metric``, your own function of (output, y), or a list,
            of which the first is *the* metric and the others are recorded, too.
        input_scale: Stored uint8 inputs become float32 by this factor, unless they are tokens.
        gradient_noise_m: Standard deviation of the noise a client adds to its gradients (synthetic
            task), or None.
        initial_params: Fixed starting point, or None for the model's own random one.
        augment: ``augment(x, rng)``: a random variation of a minibatch's inputs in local training;
            None for none.
        test_clients: int64 (N_test,), the client that each test example belongs to, -1 for none.
            With it, the clients' mean accuracy on their own test examples is evaluated too.
        tokens: Whether inputs are whole numbers, such as characters, which reach the model as
            int64.
        public_rows: Of each class the rows of ``dataset.train_*`` that no client holds and the
            server may use.
        client_names: The clients' names, where they are known.
        client_strata: The name of each client's region or the like, one of a few
            (docs/how-to/strata.md); empty where there are none.
        local: Name patterns of the model's arrays that stay with each client: a personal head, or
            ``["*.bn*"]`` for FedBN (docs/how-to/models.md).
        trainable: Name patterns of the only arrays that are trained and sent, or ``"lora"`` for
            those of peft; empty for all.
    """

    name: str
    dataset: Dataset
    client_rows: Sequence[IntArray]
    make_model: MakeModel
    loss: Loss
    metric: AnyMetric | Sequence[AnyMetric] = "accuracy"
    input_scale: float = 1.0 / 255.0
    gradient_noise_m: FloatArray | None = None
    initial_params: npt.NDArray[np.float32] | None = None
    augment: Augment | None = None
    test_clients: IntArray | None = None
    tokens: bool = False
    public_rows: Sequence[IntArray] = ()
    client_names: Sequence[str] = ()
    client_strata: Sequence[str] = ()
    local: Patterns = ()
    trainable: Patterns = ()

    def __repr__(self) -> str:
        return f"Task({self.name!r}: {counted(self.num_clients, 'client')}, {self.dataset.name})"

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return len(self.client_rows)

    def parts_of(self, model: Module) -> ModelParts:
        """What a model that ``make_model`` made is made of."""
        return ModelParts.of(model, local=self.local, trainable=self.trainable)

    def population(self, weights: str) -> Population:
        """The clients with weights ``"data"`` or ``"uniform"``; their shares of labels are the
        auxiliary variables.
        """
        sizes = [len(rows) for rows in self.client_rows]
        shares = self.shares if self.dataset.num_classes > 0 else None
        # Names may be an array, or a column of pandas, which is neither true nor false.
        strata = self.client_strata if len(self.client_strata) else None
        return Population.from_sizes(sizes, weights, shares, strata=strata)

    @cached_property
    def data(self) -> dict[str, str]:
        """The data in a run's record: their name, a CRC-32 of the examples and of who holds them,
        the number of clients, and ``chance`` where it is judged by accuracy.
        """
        data = self.dataset
        facts = {
            "data": data.name,
            "data_crc32": crc32_of(
                (data.train_x, data.train_y, data.test_x, data.test_y, *self.client_rows)
            ),
            "clients": f"{self.num_clients}",
        }
        if self.metrics[0].name == "accuracy":
            facts["majority"] = f"{self.chance:.4g}"
        return facts

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics; the first is that by which a run is judged."""
        return metrics_of(self.metric)

    @property
    def judges(self) -> tuple[Judge, ...]:
        """How the metrics are read, as a record keeps it; empty where it is the accuracy alone, or
        the loss: their values say which.
        """
        if [metric.name for metric in self.metrics] in (["accuracy"], ["loss"]):
            return ()
        return tuple(
            Judge(metric.name, higher=metric.higher, share=metric.share, written=metric.written)
            for metric in self.metrics
        )

    @property
    def knows_accuracy(self) -> bool:
        """Whether the accuracy is evaluated, too: not where the loss alone counts."""
        names = {metric.name for metric in self.metrics}
        return "accuracy" in names or (names != {"loss"} and self.dataset.num_classes > 0)

    @property
    def chance(self) -> float:
        """Accuracy of the best constant prediction: the share of the commonest test label, or set
        of labels; NaN without classes.
        """
        if not self.knows_accuracy or self.dataset.num_classes < 1:
            return float("nan")
        y = self.dataset.test_y
        if y.dtype.kind != "f":
            y = y[counts(y, self.ignored)]  # each place of a sequence
        return int(np.unique(y, axis=0, return_counts=True)[1].max()) / len(y)

    @cached_property
    def ignored(self) -> tuple[int, ...]:
        """The labels that the loss ignores, as those of padding; metrics leave their places out."""
        data = self.dataset
        if data.num_classes < 1 or data.train_y.dtype.kind == "f":
            return ()
        return ignored_labels(
            self.loss,
            np.concatenate([data.train_y, data.test_y]),
            data.num_classes,
        )

    @cached_property
    def counted_e(self) -> FloatArray:
        """Of each test example the share of its labels that are not ignored, float64 (N_test,)."""
        y = self.dataset.test_y
        return np.asarray(counts(y, self.ignored).reshape(len(y), -1).mean(axis=1))

    @cached_property
    def learnt_e(self) -> BoolArray:
        """Whether the loss counts a label of each training example, bool (N_train,)."""
        y = self.dataset.train_y
        if not self.ignored:
            return np.ones(len(y), bool)
        return np.asarray(counts(y, self.ignored).reshape(len(y), -1).any(axis=1))

    @cached_property
    def shares(self) -> FloatArray:
        """The share of each class among the labels of each client, float64 (m, classes).

        Where examples have several labels, all that they have are counted, so that shares sum to 1;
        a client whose examples have none has zeros. Labels that the loss ignores are not counted.
        """
        classes = self.dataset.num_classes
        y = self.dataset.train_y
        count_m = []
        for rows in self.client_rows:
            own_y = y[np.asarray(rows)]
            if y.ndim == 2 and y.dtype.kind == "f":
                count_m.append(own_y.sum(axis=0, dtype=np.float64))
            else:
                # An example may be a sequence of classes.
                label_n = own_y[counts(own_y, self.ignored)].astype(np.int64)
                count_m.append(np.bincount(label_n, minlength=classes))
        count_mc = np.stack(count_m)
        total_m1 = count_mc.sum(axis=1, keepdims=True)
        share_mc: FloatArray = count_mc / np.maximum(total_m1, 1)
        return share_mc


def with_fewer_tests(task: Task, count: int, rng: Rng | None = None) -> Task:
    """The task with ``count`` of its test examples, for quick runs: evenly spaced in their order,
    or drawn by ``rng``.
    """
    data = task.dataset
    known = len(data.test_x)
    if count > known:
        raise DeltaflError(
            f"test_examples is {count}; {data.name} has {counted(known, 'test example')}"
        )
    # Evenly spaced, as examples may be sorted by class or by owner.
    row_e = np.arange(count) * known // count
    if rng is not None:
        row_e = np.sort(rng.choice(known, count, replace=False))
    owners = {name: owner_e[row_e] for name, owner_e in data.test_columns.items()}
    fewer = replace(
        data,
        test_x=data.test_x[row_e],
        test_y=data.test_y[row_e],
        test_columns=owners,
    )
    test_clients = task.test_clients
    if test_clients is not None:
        test_clients = test_clients[row_e]
    return _tested(replace(task, dataset=fewer, test_clients=test_clients), "test_examples")


def with_public(task: Task, count: int, seed: int) -> Task:
    """The task with ``count`` training examples of each class in public, drawn by ``seed``: no
    client holds them.

    Every client keeps one example at least. A task without classes, or with too few examples, is a
    ``DeltaflError``.
    """
    data = task.dataset
    if data.num_classes < 1 or data.train_y.ndim != 1:
        raise DeltaflError(
            f"public is {count}: examples of each class, and {task.name} has no classes; leave it "
            "out"
        )
    rng = stream(seed, "public")
    # A row may be held by several clients.
    held_e = np.unique(np.concatenate(task.client_rows, dtype=np.int64))
    # One example of each client stays where it is, and its label counts.
    last_m = [rng.choice(_learnt(task, rows)) for rows in task.client_rows]
    row_e = rng.permutation(np.setdiff1d(held_e, last_m))
    of_class = [row_e[data.train_y[row_e] == label] for label in range(data.num_classes)]
    held_y = data.train_y[held_e]
    for label, found in enumerate(of_class):
        # A class that no client has cannot be public; all others must.
        if len(found) < count and label in held_y:
            raise DeltaflError(
                f"public is {count}; {data.name} has {len(found)} of class {label} "
                "beside one example of each client: lower 'public'"
            )
    public = [rows[:count] for rows in of_class]
    kept = _without(task, np.concatenate(public))
    return replace(task, client_rows=kept, public_rows=public)


def with_validation(task: Task, share: float, seed: int) -> Task:
    """The task with a validation part for its test set: a share of each client's training examples,
    drawn by ``seed``.

    Where the share is no whole number it is rounded at random, so that small clients give some,
    too; every client keeps one example at least. A row that several clients hold is given by all of
    them or by none.

    Raises:
        DeltaflError: If there is nothing to hold out, or a client would be left without examples.
    """
    data = task.dataset
    held = []
    owners = []
    for client, rows in enumerate(task.client_rows):
        rng = stream(seed, "validation", client=client)
        row_n = np.asarray(rows, np.int64)
        # Rounded at random, with the right mean.
        count = min(int(share * len(row_n) + rng.random()), len(row_n) - 1)
        order_n = rng.permutation(row_n)
        # The last one whose label counts stays, whatever the share.
        last = int(np.flatnonzero(np.isin(order_n, _learnt(task, order_n)))[-1])
        held.append(np.delete(order_n, last)[:count])
        owners.append(np.full(count, client))
    # What several clients give is one test example, and belongs to the first of them.
    row_e, first_e = np.unique(np.concatenate(held), return_index=True)
    kept = _without(task, row_e)
    if len(row_e) == 0 or not all(task.learnt_e[rows].any() for rows in kept):
        raise DeltaflError(
            f"{data.name} has too few examples a client to hold out {share:g} of them for "
            "validation; raise "
            "'validation', or choose a task with larger clients"
        )
    # Nothing moves, so that the rows of clients stay right.
    parts = data.split(slice(None), row_e)
    test_clients = task.test_clients
    if test_clients is not None:
        test_clients = np.concatenate(owners)[first_e]
    split = replace(task, dataset=parts, client_rows=kept, test_clients=test_clients)
    return _tested(split, "validation")


def _tested(task: Task, setting: str) -> Task:
    """The task that a setting has left with fewer test examples, of which a label must count."""
    if task.counted_e.any():
        return task
    raise DeltaflError(
        f"{setting} leaves {counted(len(task.counted_e), 'test example')}, without a label that "
        f"counts, for the loss ignores {', '.join(map(str, task.ignored))}: raise {setting!r}, or "
        "leave examples without such a label out of the data"
    )


def _learnt(task: Task, rows: npt.ArrayLike) -> IntArray:
    """Those of a client's rows whose labels count; all of them if none does."""
    row_n = np.asarray(rows, np.int64)
    learnt_n = row_n[task.learnt_e[row_n]]
    return learnt_n if len(learnt_n) else row_n


def _without(task: Task, row_e: IntArray) -> list[IntArray]:
    """The clients' rows but for some, also where several clients hold one of these."""
    stays_e = np.ones(len(task.dataset.train_x), bool)
    stays_e[row_e] = False
    # Arrays first: NumPy takes a tuple, or a tensor of one number, for a place and not for rows.
    rows_m = map(np.asarray, task.client_rows)
    return [row_n[stays_e[row_n]] for row_n in rows_m]


def first_examples(task: Task, count: int = 2) -> tuple[Tensor, Tensor]:
    """Training examples, as the model gets them."""
    from .modules import torch

    # Copies here and elsewhere, for torch refuses the negative strides of a picture's mirror image.
    x = model_inputs(task, torch.tensor(task.dataset.train_x[:count].copy()))
    return x, torch.tensor(task.dataset.train_y[:count].copy())


def spread_examples(task: Task) -> tuple[Tensor, Tensor]:
    """Test examples from all over the test set, which may be sorted, as the model gets them."""
    from .modules import torch

    data = task.dataset
    row_n = spread(len(data.test_x), TRIED_EXAMPLES)
    x = model_inputs(task, torch.tensor(data.test_x[row_n]))
    return x, torch.tensor(data.test_y[row_n])


def spread(size: int, count: int) -> IntArray:
    """Up to ``count`` places of ``size``, from the first to the last."""
    return np.linspace(0, size - 1, min(count, size)).astype(np.int64)


def varied_targets(task: Task, limit: int) -> Tensor:
    """Targets from all over the test set, and those of a row for each class, or different number,
    of both parts: up to ``limit`` in all.
    """
    from .modules import torch

    data = task.dataset
    parts = [data.test_y[spread(len(data.test_y), TRIED_EXAMPLES)]]
    for y in (data.train_y, data.test_y):
        row_k = _rows_of_each(y, data.num_classes)
        parts.append(y[row_k[spread(len(row_k), _TRIED_TARGETS)]])
    found = np.concatenate(parts)
    return torch.tensor(found[spread(len(found), max(limit, 2))])


def _rows_of_each(y: Array, num_classes: int) -> IntArray:
    """For each class, or number, a row that has it; of several numbers a row the ends of each."""
    columns = y.reshape(len(y), -1)
    if num_classes > 0 and y.dtype.kind != "f":
        row_c = np.full(num_classes, -1)
        for label_e in columns.T:
            (row_e,) = np.nonzero((label_e >= 0) & (label_e < num_classes))
            row_c[label_e[row_e]] = row_e
        return row_c[row_c >= 0]
    if columns.shape[1] == 1:
        return np.asarray(np.unique(columns, return_index=True)[1])
    return np.unique(np.concatenate([columns.argmin(axis=0), columns.argmax(axis=0)]))


def model_inputs(task: Task, stored: Tensor) -> Tensor:
    """Stored inputs as a task's model takes them."""
    from .modules import torch

    if task.tokens:
        return stored.long()
    if stored.dtype == torch.uint8:
        return stored.float().mul_(task.input_scale)
    return stored
