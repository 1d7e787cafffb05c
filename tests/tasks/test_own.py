"""A user's own data and model: found again by workers, filled with sensible settings, every
mistake one sentence.
"""

import json
import re
import runpy
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix

from deltafl import DeltaflError
from deltafl.cli.experiments import _explained
from deltafl.simulation.comparisons.comparing import run_comparison
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.simulation.setup import task_of
from deltafl.tasks import Dataset, Task, check_task, cross_entropy, load_own
from deltafl.tasks.metrics import Metric
from deltafl.tasks.own import is_own, own_spec, short_name
from tools.cli import deltafl_here

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = """
import numpy as np
import torch
from deltafl.tasks import Dataset, Task

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

def loss(output, y):
    return torch.nn.functional.cross_entropy(output, y)

def make_task(seed):
    x = np.random.default_rng(seed).normal(size=(60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return Task("mine", Dataset("mine", x[:50], y[:50], x[50:], y[50:], 2), [np.arange(2 * k, 2 * k + 2)
                for k in range(25)], Net, loss)
"""
NUMBER = count()


def write(folder: Path, source: str = SOURCE) -> Path:
    """A module of a name that no other test uses: a file is imported once a process."""
    path = folder / f"mine_{next(NUMBER)}.py"
    path.write_text(source)
    return path


def good() -> Task:
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    y = np.arange(10) % 2
    data = Dataset("good", x, y, x[:4], y[:4], 2)
    rows = [np.arange(4), np.arange(4, 10)]
    return Task(
        "good", data, rows, lambda: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy
    )


def test_names() -> None:
    for name, short in (
        ("my.py", "my"),
        ("a/my.py:make", "my"),
        ("C:\\my.py", "C:\\my"),
        ("b/table.csv", "table"),
    ):
        assert (is_own(name), short_name(name)) == (True, short)
    for name in ("digits", "my_task:make"):
        assert (is_own(name), short_name(name)) == (False, name)


def test_the_example_runs(tmp_path: Path) -> None:
    arguments = [
        "--rounds",
        "3",
        "--seeds",
        "1",
        "--samplers",
        "full,pracdelta",
        "--processes",
        "1",
    ]
    done = deltafl_here(
        "compare", "--task", f"{EXAMPLES / 'own_task.py'}:make_task", *arguments, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith("compare-own_task-2")
    settings = json.loads((out / "summary.json").read_text())["settings"]
    assert (settings["sample"], settings["local_epochs"], settings["batch_size"]) == (3, 1, 32)
    assert {"clients", "partition", "alpha"} & set(settings) == set()
    lines = (out / "runs" / "full-seed0" / "rounds.jsonl").read_text().splitlines()
    losses = [json.loads(line)["test"]["loss"] for line in lines]
    assert losses[3] < 0.9 * losses[0]


def test_settings_come_from_the_task_and_options_win(tmp_path: Path) -> None:
    name = f"{write(tmp_path)}:make_task"
    found = make_settings(CompareSettings, {"task": name})
    assert (found.sample, found.rounds, found.local_epochs, found.local_steps) == (3, 100, 1, None)
    assert (found.batch_size, found.local_lr, found.threshold) == (32, 0.1, 0.8)
    assert (found.clients, found.partition, found.alpha) == (None, None, None)
    by_loss = write(tmp_path, SOURCE.replace("Net, loss)", 'Net, loss, metric="loss")'))
    assert make_settings(RunSettings, {"task": str(by_loss)}).threshold is None
    given = {"task": name, "sample": 25, "local_steps": 3, "threshold": 0.5}
    other = make_settings(RunSettings, given)
    assert other.model_dump().items() >= (given | {"local_epochs": None}).items()
    # A record can be resumed.
    assert make_settings(RunSettings, other.model_dump(exclude_none=True)) == other
    task = task_of(make_settings(RunSettings, {"task": name, "seed": 4}))
    assert task.data == load_own(name, 4).data != load_own(name, 5).data


def test_fewer_tests_are_drawn_of_own_data_and_spaced_evenly_of_the_librarys(
    tmp_path: Path,
) -> None:
    def tested(task: str, count: int | None, seed: int) -> Any:
        given = {"task": task, "test_examples": count, "seed": seed}
        return task_of(make_settings(RunSettings, given)).dataset.test_x

    own = str(write(tmp_path, SOURCE.replace("rng(seed)", "rng(7)")))
    whole = tested(own, None, 0)
    drawn = [tested(own, 5, seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert all(len(x) == 5 and np.isin(x, whole).all() for x in drawn)
    digits = tested("digits", None, 0)
    spaced = digits[np.arange(50) * len(digits) // 50]
    np.testing.assert_array_equal(tested("digits", 50, 0), spaced)


def test_a_function_may_take_nothing(tmp_path: Path) -> None:
    source = SOURCE.replace("make_task(seed)", "other(size=60)").replace("rng(seed)", "rng(7)")
    path = write(tmp_path, source)
    first, second = (load_own(f"{path}:other", seed) for seed in (0, 1))
    assert first.data == second.data


@pytest.mark.parametrize(
    ("source", "function", "words"),
    [
        (SOURCE, ":mak_task", ["has no function 'mak_task'", "def mak_task(seed: int) -> Task"]),
        ("import no_such_package\n", "", ["cannot be imported", "no_such_package", "line 1"]),
        ("def make_task(:\n", "", ["cannot be imported", "SyntaxError"]),
        (
            "def make_task(seed):\n    return {}['key']\n",
            "",
            ["failed: KeyError", "'key'", "line 2"],
        ),
        ("def make_task(seed):\n    return 5\n", "", ["returned int", "deltafl.tasks.Task"]),
        ("def make_task(seed, size):\n    return 5\n", "", ["failed: TypeError", "'size'"]),
        (SOURCE.replace("range(25)", "range(0)"), "", ["client_rows is []"]),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(
    tmp_path: Path, source: str, function: str, words: list[str]
) -> None:
    path = write(tmp_path, source)
    with pytest.raises(DeltaflError) as caught:
        make_settings(RunSettings, {"task": f"{path}{function}"})
    assert all(word in str(caught.value) for word in [path.name, *words]), caught.value
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(
        DeltaflError, match=r"no file .*nowhere\.py; write --task FILE\.py:FUNCTION"
    ):
        load_own(str(tmp_path / "nowhere.py:make_task"), 0)
    for name in ("my-task.py", "json.py"):
        (tmp_path / name).write_text(SOURCE)
        with pytest.raises(DeltaflError, match=rf"{name} cannot be imported.*rename it"):
            load_own(str(tmp_path / name), 0)


@pytest.mark.parametrize("setting", ["clients", "partition", "alpha", "column", "label"])
def test_settings_about_who_holds_what_are_refused(tmp_path: Path, setting: str) -> None:
    value = {"clients": 25, "alpha": 0.3}.get(setting, "iid")
    with pytest.raises(DeltaflError, match=f"^{setting} is (not )?a setting of.*leave it out"):
        make_settings(RunSettings, {"task": str(write(tmp_path)), setting: value})


def test_a_lambda_is_for_one_process(tmp_path: Path) -> None:
    name = str(write(tmp_path, SOURCE.replace("Net, loss)", "lambda: Net(), loss)")))
    make_settings(RunSettings, {"task": name, "workers": 1})
    with pytest.raises(
        DeltaflError, match=r"cannot be sent to .*top of the file, or use --workers"
    ):
        make_settings(RunSettings, {"task": name, "workers": 2})


class Two(torch.nn.Linear):
    """Returns two tensors in training."""

    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return (output, output) if self.training else output


class Growing:
    """A loss that remembers."""

    factor = 1

    def __call__(self, output: Any, y: Any) -> Any:
        self.factor += 1
        return self.factor * torch.nn.functional.cross_entropy(output, y)


def hooked() -> Any:
    layer: Any = torch.nn.Linear(3, 2)
    layer.weight.register_hook(torch.zeros_like)
    return layer


X = good().dataset.train_x
Y = good().dataset.train_y


def data(**changed: Any) -> dict[str, Any]:
    return {"dataset": replace(good().dataset, **changed)}


class Bank(torch.nn.Linear):
    """Keeps the inputs of each step."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.bank = torch.cat([self.bank, x])
        return super().forward(x)


def adapted() -> torch.nn.Module:
    """A hook that knows the module from outside."""
    whole: Any = torch.nn.Sequential(torch.nn.Linear(3, 2))
    adapter = torch.nn.Linear(3, 2)
    whole[0].register_module("adapter", adapter)
    whole[0].register_forward_hook(lambda part, inputs, output: output + adapter(*inputs))
    return whole  # type: ignore[no-any-return]


def enclosed() -> torch.nn.Module:
    """All of it is in a closure."""
    whole: Any = torch.nn.Linear(3, 2)
    whole.forward = lambda x: torch.nn.functional.linear(x, whole.weight, whole.bias)
    return whole  # type: ignore[no-any-return]


def tied_by_memory() -> torch.nn.Module:
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)]
    layers[1].weight.data = layers[0].weight.data.T
    return torch.nn.Sequential(*layers)


class MadeLater(torch.nn.Module):
    """Its first step in training makes a layer, a parameter or a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.what = what
        self.head: torch.nn.Module | None = None
        self.bias: torch.nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        if self.what == "head.weight":
            self.head = self.head or torch.nn.Linear(2, 2)
            output = self.head(output)
        elif self.what == "bias" and self.bias is None:
            self.bias = torch.nn.Parameter(torch.zeros(2))
        elif self.what == "mean" and self.training:
            self.register_buffer("mean", output.detach().mean(0))
        return output


class OneBuffer(torch.nn.Module):
    """Two parameters that are columns of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(3, 4)
        self.one = torch.nn.Parameter(whole[:, :2])
        self.other = torch.nn.Parameter(whole[:, 2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one + x @ self.other


class Averaging(torch.nn.Linear):
    """Training moves something by which it is then judged, or which nobody needs."""

    mean: torch.Tensor

    def __init__(self, what: str, is_needed: bool = True) -> None:
        super().__init__(3, 2)
        self.is_needed = is_needed
        self.teacher = deepcopy(self.weight).requires_grad_(False) if what == "teacher" else None
        self.register_buffer("mean", torch.full((3,), -torch.inf if what == "constant" else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean.nan_to_num(neginf=0).lerp(x.detach().mean(0), 0.1)
            if self.teacher is not None:
                self.teacher.data.lerp_(self.weight.data, 0.1)
        elif self.is_needed:
            x = x - self.mean.clamp(-1e6)
            if self.teacher is not None:
                return torch.nn.functional.linear(x, self.teacher)
        return super().forward(x)


class Started(torch.nn.Linear):
    """Its first pass in training sets the bias by the inputs, as ActNorm does."""

    started: torch.Tensor

    def __init__(self, flag: torch.dtype) -> None:
        super().__init__(3, 2)
        self.register_buffer("started", torch.zeros((), dtype=flag))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.started:
            with torch.no_grad():
                self.bias.copy_(-super().forward(x).mean(0))
                self.started.fill_(1)
        return super().forward(x)


class Distilled(torch.nn.Linear):
    """In training, its outputs are drawn towards those of a mean of earlier parameters."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.teacher = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if not self.training:
            return output
        self.teacher.data.lerp_(self.weight.data, 0.1)
        return output + torch.nn.functional.linear(x, self.teacher)


class DistilledApart(Distilled):
    """The same, with the outputs of both for the loss."""

    def forward(self, x: torch.Tensor) -> Any:
        own = torch.nn.functional.linear(x, self.weight, self.bias)
        if not self.training:
            return own
        self.teacher.data.lerp_(self.weight.data, 0.1)
        return {"own": own, "teacher": torch.nn.functional.linear(x, self.teacher)}


def of_both(output: Any, y: torch.Tensor) -> torch.Tensor:
    """A loss of one output, or of the two of a student and a teacher."""
    if isinstance(output, torch.Tensor):
        return torch.nn.functional.cross_entropy(output, y)
    apart: torch.Tensor = (output["own"] - output["teacher"]).square().mean()
    return apart + torch.nn.functional.cross_entropy(output["own"], y)


class Observed(torch.nn.Linear):
    """A buffer gets its size in the first pass, as that of an observer for quantisation."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.resize_(3).copy_(x.amax(0))
        return super().forward(x)


class Renewed(torch.nn.Linear):
    """Each pass makes its weight anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = torch.nn.Parameter(self.weight.clamp(-1, 1))
        return super().forward(x)


class Auxiliary(torch.nn.Linear):
    """Outputs of another head stand beside its own in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return torch.cat([output, -output], 1) if self.training else output


class Masked(torch.nn.Linear):
    """One of its classes is ruled out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor([0, -torch.inf])


class Keeping(torch.nn.Linear):
    """Keeps what its passes in training make, as for a loss of hidden layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.training:
            self.made = [*getattr(self, "made", []), output]
        return output.softmax(1)


class Silent(torch.nn.Linear):
    """Its ``train`` forgets to return it."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)


def of_one_logit(output: Any, y: Any) -> Any:
    """Of one example the output has no axis left."""
    return torch.nn.functional.binary_cross_entropy_with_logits(output.squeeze(), y.float())


def of_first(output: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(output, 0 * y)


def of_each_head(output: Any, y: Any) -> Any:
    heads = output.split(2, dim=1)
    return sum(torch.nn.functional.cross_entropy(head, y) for head in heads) / len(heads)


def at_zero() -> torch.nn.Module:
    layer = torch.nn.Linear(3, 2)
    torch.nn.utils.vector_to_parameters(torch.zeros(8), layer.parameters())
    return layer


def correlation(output: Any, y: Any) -> float:
    """Not known where all outputs are equal."""
    return float(np.corrcoef(output[:, 0], y)[0, 1])


def tiny(output: Any, y: Any) -> Any:
    return 1e-10 * torch.nn.functional.cross_entropy(output, y)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": tiny},
        {"metric": correlation, "make_model": at_zero},
        {"make_model": OneBuffer},
        {"make_model": partial(Averaging, "buffer")},
        {"make_model": partial(Averaging, "teacher", is_needed=False)},
        {"make_model": partial(Averaging, "constant", is_needed=False)},
        {"make_model": partial(Started, torch.uint8)},
        {"make_model": partial(Masked, 3, 2), "loss": of_first},
        {"make_model": partial(torch.nn.Linear, 3, 1), "loss": of_one_logit},
        {"make_model": partial(Auxiliary, 3, 2), "loss": of_each_head},
        {"gradient_noise_m": np.array([0.0, 0.1])},
        {"initial_params": np.zeros(8, np.float32)},
    ],
)
def test_unusual_tasks_that_are_right(given: dict[str, Any]) -> None:
    check_task(replace(good(), **given), "mine.py", 0)


ONE_HOT = np.eye(2, dtype=np.float32)[Y]
BROKEN: dict[str, dict[str, Any]] = {
    "client_names is None; it must be a list of texts, or ()": {"client_names": None},
    "client_strata is None; it must be a list of texts, or ()": {"client_strata": None},
    "train() or eval() of Silent does not return": {"make_model": partial(Silent, 3, 2)},
    "probabilities, between 0 and 1 whatever it": {
        "make_model": partial(Keeping, 3, 2),
        "metric": "log_loss",
    },
    "train_x has 9 rows and train_y 10": data(train_x=X[:9]),
    "train_x is float64 of shape (10, 3); make it a NumPy array of float32": data(
        train_x=X.astype(np.float64)
    ),
    "train_x[2] holds a value that is not a finite": data(train_x=np.where(X == 7, np.nan, X)),
    "test_x is float32 of shape (4, 2); give it rows of shape (3,)": data(test_x=X[:4, :2]),
    "test_x is float32 of shape (0, 3); make it": data(test_x=X[:0]),
    "the range of train_y is (0, 2); it must be from 0 to num_classes - 1 = 1": {
        "metric": "loss",
        **data(train_y=Y * 2),
    },
    "write num_classes=0, and metric='loss' or a metric": data(train_y=Y - 100),
    "as shares of classes, write num_classes=0": data(
        train_y=np.float32(ONE_HOT / 3 + 0.1), test_y=ONE_HOT[:4]
    ),
    "accuracy, which is taken wherever num_classes is above 0, needs (2, 2)": {
        "metric": correlation,
        "make_model": lambda: torch.nn.Linear(3, 3),
    },
    "train_x is of type csr_matrix; it must be a NumPy array of float32 or uint8 with one row or "
    "more; write train_x.toarray()": data(train_x=csr_matrix(X)),
    "write train_x.numpy()": data(train_x=torch.tensor(X)),
    "write train_y.to_numpy()": data(train_y=pd.Series(Y)),
    "the range of train_y is (-1, 0)": {"metric": "loss", **data(train_y=Y - 1)},
    "num_classes is 0: write Task(..., metric='loss')": data(num_classes=0),
    "train_y is int32 of shape (10,); make it a NumPy array of int64": data(
        train_y=Y.astype(np.int32)
    ),
    "such as train_y.astype(np.int64)": data(train_y=Y.astype(bool)),
    "the name of the dataset is None; it must be a text": data(name=None),
    "train_x is float32 of shape (10, 0); give each row a number": data(
        train_x=X[:, :0], test_x=X[:4, :0]
    ),
    "each row of train_y has a single 1": data(train_y=ONE_HOT, test_y=ONE_HOT[:4]),
    "train_y is of type list": data(train_y=Y.tolist()),
    "train_x is of type MaskedArray": data(train_x=np.ma.masked_equal(X, 7)),
    "accuracy needs (2, 3)": data(num_classes=3),
    "(10, 2), a column for each label, or (10,) for one logit": data(
        train_y=np.float32(Y[:, None]), test_y=np.float32(Y[:4, None])
    ),
    "accuracy needs (2, 2, 1), as y of int64 has a class": data(
        train_y=Y[:, None], test_y=Y[:4, None]
    ),
    "test_y is int64": {"metric": "loss", **data(train_y=Y.astype(np.float32))},
    "unknown metric 'acuracy': did you mean 'accuracy'": {"metric": "acuracy"},
    "client_rows is 5; it must be a list": {"client_rows": 5},
    "client_rows[0] is [[1, 2], [3]]; it must be a list of row numbers from 0 to 9": {
        "client_rows": [[[1, 2], [3]]]
    },
    "client_rows[1] is []": {"client_rows": [[0, 1], []]},
    "test_clients is array([0, 0, 1, 2]); it must be": {"test_clients": np.array([0, 0, 1, 2])},
    "test_clients is array([0, 1]); it must be": {"test_clients": np.array([0, 1])},
    "make_model failed: ZeroDivisionError": {"make_model": lambda: 1 / 0},
    "make_model made ReLU": {"make_model": torch.nn.ReLU},
    "the model is lazy; run it once in make_model, such as model(torch.zeros(2, 3))": {
        "make_model": lambda: torch.nn.LazyLinear(2)
    },
    **{
        f"the model is lazy: it makes the array {name!r}": {"make_model": partial(MadeLater, name)}
        for name in ("head.weight", "bias", "mean")
    },
    "training changes 'teacher' of the model, which clients do not bring back": {
        "make_model": partial(Averaging, "teacher")
    },
    "training changes 'mean' of the model": {"make_model": partial(Averaging, "constant")},
    "training changes 'started' of the model, which clients do not bring back, and later rounds": {
        "make_model": partial(Started, torch.bool)
    },
    "training changes 'teacher' of the model, which clients do not bring back, and later rounds": {
        "make_model": Distilled
    },
    "changes 'teacher' of the model, which clients do not bring back, and later rounds need it": {
        "make_model": DistilledApart,
        "loss": of_both,
    },
    "has shape (0,) before a step and (3,) after it": {"make_model": Observed},
    "a new parameter in the place of 'weight'": {"make_model": lambda: Renewed(3, 2)},
    "write -1e9 in place of -inf": {
        "make_model": partial(Masked, 3, 2),
        "loss": of_first,
        "metric": "f1",
    },
    "make_model is a Linear; it must be a function": {"make_model": torch.nn.Linear(3, 2)},
    "the parameter 'weight' has a hook": {"make_model": hooked},
    "the loss is 'cross_entropy'; it must be a function": {"loss": "cross_entropy"},
    "must be a function of (output, y), such as nn.CrossEntropyLoss()": {
        "loss": torch.nn.CrossEntropyLoss
    },
    "the loss has parameters of its own": {"loss": torch.nn.Linear(2, 1)},
    "one seed gives the losses": {"loss": Growing()},
    "the model does not take inputs of shape (2, 3)": {"make_model": lambda: torch.nn.Linear(4, 2)},
    "the model returned tuple in training": {"make_model": lambda: Two(3, 2)},
    "the loss failed on output (2, 2) and y (2,)": {"loss": torch.nn.functional.mse_loss},
    "the loss is a sum over the minibatch": {"loss": torch.nn.CrossEntropyLoss(reduction="sum")},
    "it must be the minibatch's mean": {"loss": lambda output, y: output},
    "has no gradient by the model's": {"loss": lambda output, y: output.detach().mean()},
    "leave a parameter of the model trainable": {
        "make_model": lambda: torch.nn.Linear(3, 2).requires_grad_(False)
    },
    "the result of augment is": {"augment": lambda x, rng: x[:1]},
    "the array 'bank' of the model has shape (0, 3) before a step and (2, 3)": {"make_model": Bank},
    "forward reaches '0.adapter.weight' past the model": {"make_model": adapted},
    "forward reaches 'weight' past the model": {"make_model": enclosed},
    "'0.weight' and '1.weight' share memory": {"make_model": tied_by_memory},
    "gradient_noise_m is 0.1; it must be a NumPy array (2,)": {"gradient_noise_m": 0.1},
    "gradient_noise_m is array([0.]); it must be": {"gradient_noise_m": np.zeros(1)},
    "it must be a flat NumPy array, such as parameters_to_vector": {
        "initial_params": torch.zeros(8)
    },
    "initial_params is [0.0, 0.0]; it must be": {"initial_params": [0.0, 0.0]},
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_tasks_that_do_not_fit_together(sentence: str) -> None:
    task = good()
    before = torch.get_rng_state()
    check_task(task, "mine.py", 0)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(DeltaflError, match=f"^mine.py: .*{re.escape(sentence)}"):
        check_task(replace(task, **BROKEN[sentence]), "mine.py", 0)


@pytest.mark.parametrize("scale", [None, "1/255", [1.0], 0, -1.0, np.nan, np.inf])
def test_a_scale_of_inputs_is_a_number(scale: Any) -> None:
    with pytest.raises(DeltaflError, match=r"input_scale is .*; it must be a number above 0"):
        check_task(replace(good(), input_scale=scale), "mine.py", 0)


def absolute(output: Any, y: Any) -> Any:
    return (output - y).abs().mean()


def logistic(output: Any, y: Any) -> Any:
    return torch.nn.functional.softplus(-(2 * y - 1) * output).mean()


def to_column(output: Any, y: Any) -> Any:
    return (output - y[:, None]).square().mean()


def pairwise(output: Any, y: Any) -> Any:
    """Legitimate: of all pairs, and the same whatever the shape."""
    scores = output.reshape(-1)
    apart = (scores[:, None] - scores) * torch.sign(y[:, None] - y)
    return torch.nn.functional.softplus(-apart).mean()


def ranking(output: Any, y: Any) -> Any:
    """The same with a transpose, which takes a flat vector for itself."""
    apart = (output - output.T) * torch.sign(y[:, None] - y[None])
    return torch.nn.functional.softplus(-apart).mean()


def numbers(loss: Any, outputs: int = 1, y: Any = None) -> Task:
    """A task of a column of outputs, whose first targets are equal."""
    target = np.arange(10, dtype=np.float32) // 3 if y is None else y
    whole = replace(good().dataset, train_y=target, test_y=target[:4], num_classes=0)
    model = (
        torch.nn.Linear(3, outputs)
        if outputs
        else torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    )
    return replace(
        good(), dataset=whole, loss=loss, metric="loss", make_model=lambda: deepcopy(model)
    )


COLUMN = np.arange(10, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    "task", [numbers(absolute), numbers(logistic, y=np.float32(Y)), numbers(absolute, 0, COLUMN)]
)
def test_a_loss_that_compares_each_output_with_each_target_is_refused(task: Task) -> None:
    with pytest.raises(DeltaflError, match=r"compares each output .*reshape\(y\.shape\)"):
        check_task(task, "mine.py", 0)


def probability(output: Any, y: Any) -> Any:
    return torch.nn.functional.binary_cross_entropy_with_logits(output, y)


@pytest.mark.parametrize(
    "task",
    [
        numbers(to_column),
        numbers(pairwise),
        numbers(ranking),
        numbers(absolute, y=COLUMN),
        numbers(absolute, 0),
        numbers(torch.nn.MSELoss(), 2, np.hstack([COLUMN, -COLUMN])),
        replace(good(), **data(train_y=ONE_HOT, test_y=ONE_HOT[:4]), loss=probability),
        replace(good(), **data(train_y=ONE_HOT, test_y=ONE_HOT[:4]), metric="loss"),
        replace(good(), **data(train_y=ONE_HOT, test_y=ONE_HOT[:4]), metric="auc"),
    ],
)
def test_losses_that_compare_an_output_with_its_own_target_are_right(task: Task) -> None:
    check_task(task, "mine.py", 0)


def of_probabilities(output: Any, y: Any) -> Any:
    p = output.reshape(y.shape)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def of_cut_probabilities(output: Any, y: Any) -> Any:
    return of_probabilities(output.clamp(1e-6, 1 - 1e-6), y)


def of_ranks(output: Any, y: Any) -> Any:
    z = output.reshape(len(y), -1)[:, 0]
    return torch.nn.functional.softplus(z[:, None] - z[None]).mean()


def ramp(output: Any, y: Any) -> Any:
    return (1 - output.reshape(y.shape) * (2 * y - 1)).clamp(0, 1).mean()


def cut_early(output: Any, y: Any) -> Any:
    return torch.nn.functional.binary_cross_entropy_with_logits(output.clamp(-0.05, 0.05), y)


def with_zeros(width: int) -> torch.nn.Module:
    layer = torch.nn.Linear(3, width)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


def with_sigmoid(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Sigmoid())


def labelled(y: Any, make: Any, loss: Any, metric: Any) -> Task:
    """A task of one logit, or of two labels."""
    width = y.shape[-1]
    whole = replace(good().dataset, train_y=y.squeeze(), test_y=y[:4].squeeze(), num_classes=2)
    task = replace(good(), dataset=whole, metric=metric, make_model=lambda: make(width))
    return replace(task, loss=lambda output, y: loss(output.reshape(y.shape), y))


BINARY = Y[:, None].astype(np.float32)


@pytest.mark.parametrize("y", [BINARY, np.hstack([BINARY, BINARY])])
@pytest.mark.parametrize("metric", ["accuracy", ("roc_auc", "f1"), "log_loss"])
@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.BCELoss(),
        of_probabilities,
        of_cut_probabilities,
        # Of these nobody can tell that they take probabilities, but the metric is as wrong.
        torch.nn.MSELoss(),
        torch.nn.L1Loss(),
        lambda output, y: -(y * output.clamp(min=1e-7).log()).mean(),
        lambda output, y: 1 - 2 * (output * y).sum() / (output + y).sum(),
    ],
)
def test_probabilities_are_refused_where_metrics_take_logits(
    y: Any, metric: Any, loss: Any
) -> None:
    with pytest.raises(DeltaflError, match=r"leave out the Sigmoid .* BCEWithLogitsLoss"):
        check_task(labelled(y, with_sigmoid, loss, metric), "mine.py", 0)
    # These look at the order alone, and at nothing.
    for other in ("roc_auc", "loss", Metric("own", lambda output, y: 0.5)):
        check_task(labelled(y, with_sigmoid, loss, other), "mine.py", 0)


@pytest.mark.parametrize("y", [BINARY, np.hstack([BINARY, BINARY])])
@pytest.mark.parametrize(
    "loss",
    [torch.nn.MSELoss(), torch.nn.BCEWithLogitsLoss(), of_ranks, ramp, cut_early],
)
def test_outputs_that_happen_to_be_between_0_and_1_are_right(y: Any, loss: Any) -> None:
    check_task(labelled(y, with_zeros, loss, "accuracy"), "mine.py", 0)


@pytest.mark.parametrize(("classes", "others"), [(2, ("roc_auc", "f1")), (3, ("f1",))])
@pytest.mark.parametrize(
    "of",
    [lambda p: p.log(), lambda p: p.clamp(min=1e-7).log(), lambda p: p],
)
def test_probabilities_of_classes_are_refused_where_they_give_other_numbers(
    classes: int, others: tuple[str, ...], of: Callable[[Any], Any]
) -> None:
    y = np.arange(len(Y)) % classes
    whole = replace(good().dataset, train_y=y, test_y=np.arange(4) % classes, num_classes=classes)

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, classes), torch.nn.Softmax(1))

    task = replace(
        good(),
        dataset=whole,
        loss=lambda output, y: torch.nn.functional.nll_loss(of(output), y),
        make_model=make,
    )
    check_task(replace(task, metric=("accuracy", *others)), "mine.py", 0)
    for metric in {"log_loss", "roc_auc"} - {*others}:
        with pytest.raises(DeltaflError, match=r"leave out the Softmax .* CrossEntropyLoss"):
            check_task(replace(task, metric=("accuracy", metric)), "mine.py", 0)


def of_all_classes(output: Any, y: Any) -> float:
    """Fails where a class is not there, as some functions of scikit-learn do."""
    if len(set(y.tolist())) < 3:
        raise ValueError("too few classes")
    return 0.5


@pytest.mark.parametrize(
    "y",
    [
        np.sort(np.arange(300) % 3),
        np.int64(np.arange(300) == 150) + 2 * np.int64(np.arange(300) == 151),
    ],
)
def test_a_metric_that_needs_all_classes_is_tried_on_all_examples(y: Any) -> None:
    x = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    task = replace(
        good(),
        dataset=Dataset("sorted", x, y, x, y, 3),
        make_model=lambda: torch.nn.Linear(3, 3),
        metric=of_all_classes,
    )
    check_task(task, "mine.py", 0)
    fewer = replace(task.dataset, test_y=np.minimum(y, 1))
    with pytest.raises(DeltaflError, match=r"of_all_classes failed on .*too few classes"):
        check_task(replace(task, dataset=fewer), "mine.py", 0)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("train_x", r"the model failed on train_x\[9\], which has numbers from 1 to 7: IndexError"),
        ("test_x", r"the model failed on test_x\[3\]"),
        ("train_y", r"the loss failed on train_y\[9\], .*2.*: IndexError"),
    ],
)
def test_tokens_and_classes_that_the_model_does_not_know_are_found_before_a_run(
    part: str, words: str
) -> None:
    token = np.arange(20).reshape(10, 2) % 7
    held: dict[str, Any] = {
        "train_x": token,
        "test_x": token[:4].copy(),
        "train_y": Y,
        "test_y": Y[:4],
    }
    held[part] = held[part].copy()
    held[part][-1] = [1, 7] if part.endswith("x") else 2
    layers = [torch.nn.Embedding(7, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2)]
    task = replace(
        good(),
        dataset=Dataset("texts", **held, num_classes=0),
        metric="loss",
        tokens=True,
        make_model=lambda: torch.nn.Sequential(*map(deepcopy, layers)),
    )
    with pytest.raises(DeltaflError, match=words):
        check_task(task, "mine.py", 0)


class Categories(torch.nn.Module):
    """The first of three columns is one of three categories; the others are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(3, 2)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.cat([self.first(x[:, 0].long()), x[:, 1:].float()], dim=1))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(("part", "row"), [("train_x", 5), ("test_x", 2)])
def test_a_category_that_the_model_does_not_know_is_found_among_larger_numbers(
    tokens: bool, part: str, row: int
) -> None:
    x = np.arange(30).reshape(10, 3)
    x[:, 0] = np.arange(10) % 3
    held = {"train_x": x.astype(np.int64 if tokens else np.float32)}
    held["test_x"] = held["train_x"][:4].copy()
    task = replace(good(), tokens=tokens, make_model=Categories, **data(**held))
    check_task(task, "mine.py", 0)
    held[part][row, 0] = 3
    with pytest.raises(DeltaflError, match=rf"the model failed on .*{part}\[{row}\]"):
        check_task(replace(task, **data(**held)), "mine.py", 0)


def test_arrays_may_be_mirror_images_and_names_any_column() -> None:
    whole = good()
    turned_x = X[::-1].copy()[::-1]
    turned_y = Y[::-1].copy()[::-1]
    turned = replace(whole, dataset=replace(whole.dataset, train_x=turned_x, train_y=turned_y))
    check_task(turned, "mine.py", 0)
    assert turned.data == whole.data
    names: Any = np.array(["x", "y"])
    strata: Any = pd.Series(["b", "a"], index=[7, 3])
    named = replace(whole, client_names=names, client_strata=strata)
    check_task(named, "mine.py", 0)
    found = named.population("data").strata
    assert found is not None and found.names == ("a", "b")


FAILING = """
def later(output, y):  # the trial has two examples
    if len(y) > 2:
        raise ValueError("boom")
    return torch.nn.functional.cross_entropy(output, y)

def make_task(seed):
    task = ours(seed)
    return Task("mine", task.dataset, [np.arange(10), np.arange(10, 20)], Net, later)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_own_code_that_fails_while_clients_train_is_reported_with_its_line(
    tmp_path: Path, workers: int
) -> None:
    path = write(tmp_path, SOURCE.replace("def make_task", "def ours") + FAILING)
    settings = make_settings(RunSettings, {"task": str(path), "sample": 2, "workers": workers})
    words = r"local training failed in round 1, with client \d+: ValueError: boom \(mine_\d+\.py li"
    with pytest.raises(DeltaflError, match=words):
        run_single(settings, tmp_path / "run", lambda *_: None)


def test_errors_of_this_library_keep_their_traceback(tmp_path: Path) -> None:
    for task in ("digits", "mine.csv", str(tmp_path / "mine.py")):
        settings = RunSettings(task=task, sampler=f"{tmp_path}/mine.py:ByLoss")
        with pytest.raises(ZeroDivisionError), _explained("run", tmp_path, settings):
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "label", ["mine.py:ByLoss(power=2)@@hajek", "uniform@@mine.py:Control+average=0.5"]
)
@pytest.mark.parametrize("kind", ["ValueError", "FileNotFoundError", "SystemExit"])
def test_an_own_sampler_or_control_that_fails_is_reported_with_its_line(
    tmp_path: Path, label: str, kind: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def fail():\n    raise {kind}('boom')\n")
    fail = runpy.run_path(str(tmp_path / "mine.py"))["fail"]
    label = label.replace("mine.py", f"{tmp_path}/mine.py")
    words = rf"your own code failed in a run: {kind}: boom \(mine.py line 2\)"
    settings = RunSettings(sampler=label)
    with pytest.raises(DeltaflError, match=words), _explained("run", tmp_path, settings):
        fail()


def test_a_number_of_clients_that_depends_on_the_seed_is_refused_before_anything_is_played(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, SOURCE.replace("range(25)", "range(25 - seed)"))
    settings = make_settings(
        CompareSettings, {"task": str(path), "rounds": 1, "samplers": "uniform", "seeds": 2}
    )
    with pytest.raises(
        DeltaflError, match="mine has 25 clients with seed 0 and 24 with seed 1; make as many"
    ):
        run_comparison(settings, tmp_path / "out", lambda *_: None)
    assert not (tmp_path / "out").exists()


DRAWING = """
from dataclasses import dataclass
from random import sample
import numpy as np
from deltafl import Cohort, Sampler

@dataclass(frozen=True)
class Drawing(Sampler):
    def init(self, population):
        return {"drawn": list(np.random.random(population.num_clients))}

    def open(self, state, available_m, n, rng, oracle=None):
        client_n = np.array(sorted(sample(range(len(state["drawn"])), n)))
        return Cohort(client_n, np.ones(n, int), np.full(n, n / len(state["drawn"])))

    def update(self, state, cohort, reports):
        return {"drawn": state["drawn"][1:] + [float(np.random.random())]}

@dataclass(frozen=True)
class Named(Drawing):
    def init(self, population):
        return {"name": "text"}
"""


def test_a_sampler_may_draw_from_any_generator_and_its_state_is_tried_first(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, DRAWING)
    before = torch.get_rng_state()
    lines = []
    for name, parts in (("whole", [4]), ("halves", [2, 4])):
        for rounds in parts:
            given = {"task": "toy", "sampler": f"{path}:Drawing", "sample": 1, "rounds": rounds}
            run_single(make_settings(RunSettings, given), tmp_path / name, lambda *_: None)
        lines.append((tmp_path / name / "rounds.jsonl").read_text())
    assert lines[0] == lines[1]
    assert torch.equal(before, torch.get_rng_state())
    settings = make_settings(RunSettings, given | {"sampler": f"{path}:Named"})
    with pytest.raises(DeltaflError, match=r"sampler\.name is a str, which is not saved"):
        run_single(settings, tmp_path / "named", lambda *_: None)
    assert not (tmp_path / "named").exists()


@pytest.mark.parametrize("kind", ["int64", "int32", "uint16"])
def test_whole_numbers_may_be_tokens(kind: str) -> None:
    token = (np.arange(40).reshape(20, 2) % 7).astype(kind)
    label = np.arange(20) % 2
    data = Dataset("texts", token, label, token, label, num_classes=2)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(7, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2)
        )

    task = Task("texts", data, [np.arange(20)], model, cross_entropy)
    with pytest.raises(DeltaflError, match=r"tokens, .*write Task\(\.\.\., tokens=True\)"):
        check_task(task, "texts", 0)
    wide = replace(data, train_x=token.astype(np.int64), test_x=token.astype(np.int64))
    check_task(replace(task, dataset=wide, tokens=True), "texts", 0)


@pytest.mark.parametrize(
    ("clients", "sample"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3), (30, 3), (31, 3), (50, 5)],
)
def test_fewer_than_all_clients_are_asked_unless_somebody_says_so(
    clients: int, sample: int
) -> None:
    x = np.zeros((clients, 1), np.float32)
    y = np.arange(clients) % 2
    data = Dataset("small", x, y, x, y, num_classes=2)
    rows = list(np.arange(clients)[:, None])
    task = Task("small", data, rows, lambda: torch.nn.Linear(1, 2), cross_entropy)
    assert own_spec("small", task).sample_size == sample
