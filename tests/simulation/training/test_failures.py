"""What a user's code raises in the middle of a run is one sentence that says where; a fault of the
library is none.
"""

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import deltafl
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training import batched, fast, serial
from deltafl.simulation.training.route import Route
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import Dataset, Task, cross_entropy
from tools.cli import deltafl_here
from tools.simulation import lines_of

RNG = np.random.default_rng(4)
X = RNG.normal(size=(60, 4)).astype(np.float32)
#: Of client 2 alone.
ODD = 999.0
X[25, 0] = ODD
Y = RNG.integers(0, 3, 60)
DATA = Dataset("made up", X[:40], Y[:40], X[40:], Y[40:], 3)
ROWS = np.split(np.arange(40), 4)
WORK = LocalWork(lr=0.1, epochs=1, batch_size=4)


class Chosen(nn.Module):
    """One that does not take an example."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.dropout = nn.RReLU() if drops else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # By the shapes: torch.vmap does not know the numbers.
        if not torch._C._functorch.is_batchedtensor(x) and bool((x == ODD).any()):
            x = x.reshape(-1, 7)
        return torch.as_tensor(self.head(self.dropout(x)))


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KeyError("backwards")


def choosy(output: Tensor, y: Tensor) -> Tensor:
    """Its gradient fails where an output is large."""
    if bool((output.abs() > 50).any()):
        hard: Any = Backwards.apply
        output = hard(output)
    return functional.cross_entropy(output, y)


def augment(x: Tensor, rng: np.random.Generator) -> Tensor:
    if bool((x == ODD).any()):
        raise SystemExit("odd")
    return x


FAILING: dict[str, tuple[dict[str, Any], str, str]] = {
    "serial": ({"make_model": partial(Chosen, True)}, "loop", "RuntimeError: shape '[-1, 7]'"),
    "fast": ({"make_model": Chosen}, "loop", "RuntimeError: shape '[-1, 7]'"),
    "gradient": ({"loss": choosy}, "loop", "KeyError: 'backwards'"),
    "augment": ({"augment": augment}, "loop", "SystemExit: odd"),
    "augment at once": ({"augment": augment}, "batched", "SystemExit: odd"),
}


def task_of(**changes: Any) -> Task:
    given: dict[str, Any] = {"make_model": partial(nn.Linear, 4, 3), "loss": cross_entropy}
    return Task("made up", DATA, ROWS, **{**given, **changes})


@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_training_says_where_and_has_its_cause(name: str) -> None:
    changes, path, words = FAILING[name]
    engine = Engine(task_of(**changes), WORK, 0, kept=Route(path))
    params_d = engine.initial_params()
    assert len(engine.train(params_d, 6, np.array([1, 3])).update_nd) == 2
    with pytest.raises(DeltaflError) as caught:
        engine.train(params_d, 6, np.array([1, 2, 3]))
    who = "client 2" if path == "loop" else "clients '1', '2', '3' at once"
    assert str(caught.value).startswith(f"local training failed in round 7, with {who}: {words}")
    assert str(caught.value).endswith(f" line {_line_of(caught.value)})")
    assert type(caught.value.__cause__).__name__ == words.partition(":")[0]


def _line_of(error: BaseException) -> int:
    """The innermost line of this file."""
    lines = []
    trace = error.__cause__.__traceback__ if error.__cause__ else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines[-1]


def test_an_error_in_an_evaluation_is_a_sentence_too() -> None:
    engine = Engine(task_of(make_model=Chosen), WORK, 0)
    params_d = engine.initial_params()
    with pytest.raises(DeltaflError, match="on the data of client 2 failed: RuntimeError: shape"):
        engine.losses(params_d, np.arange(4))

    def no_loss(output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("none")

    engine = Engine(task_of(loss=no_loss), WORK, 0)
    with pytest.raises(DeltaflError, match=r"failed on 20 test examples: ValueError: none \(test_"):
        engine.evaluate(params_d)


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        (f"{Path(deltafl.__file__).parent}_mine", True),
        (str(Path(deltafl.__file__).parent), False),
        ("/home/me/.local/lib/python3.11/site-packages/torch/nn", False),
        ("/usr/lib/python3/dist-packages/torch", False),
    ],
)
def test_the_line_is_one_of_a_file_that_a_user_wrote(folder: str, named: bool) -> None:
    given: dict[str, Any] = {}
    exec(compile("def loss(output, y):\n    raise OSError", f"{folder}/made_up.py", "exec"), given)
    engine = Engine(task_of(loss=given["loss"]), WORK, 0)
    with pytest.raises(DeltaflError) as caught:
        engine.train(engine.initial_params(), 0, np.array([1]))
    assert str(caught.value).endswith("OSError (made_up.py line 2)" if named else "OSError")


@pytest.mark.parametrize(
    ("module", "changes", "path"),
    [
        (serial, {"make_model": partial(Chosen, True)}, "loop"),
        (fast, {"make_model": partial(nn.Linear, 4, 3)}, "loop"),
        (batched, {"make_model": partial(nn.Linear, 4, 3)}, "batched"),
    ],
)
def test_a_fault_of_the_library_keeps_its_traceback(
    module: Any, changes: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(task_of(**changes), WORK, 0, kept=Route(path))

    def wrong(*_: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "result_of", wrong)
    with pytest.raises(ZeroDivisionError):
        engine.train(engine.initial_params(), 0, np.array([1]))


def test_rounds_before_an_error_stay_and_the_command_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "import torch\n"
        "from deltafl.tasks import Dataset, Task, cross_entropy\n"
        "def make_task():\n"
        "    x = np.arange(40.0, dtype=np.float32).reshape(40, 1).repeat(2, 1) / 40\n"
        "    y = (x[:, 0] > 0.5).astype(np.int64)\n"
        "    data = Dataset('d', x.astype(np.int64), y, x[:9].astype(np.int64), y[:9], 2)\n"
        "    data.train_x[25] = 1, 5\n"
        "    data.train_x[26] = 1, 0\n"
        "    model = lambda: torch.nn.Sequential(Odd(), torch.nn.Linear(6, 2))\n"
        "    rows = [np.arange(10 * k, 10 * k + 10) for k in range(4)]\n"
        "    return Task('mine', data, rows, model, cross_entropy, tokens=True)\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(6, 3)\n"
        "    def forward(self, x):\n"
        "        return self.table(x + (x.sum(1, keepdim=True) > 5) * (len(x) > 1)).flatten(1)\n"
    )
    words = ("--task=mine.py", "--sampler=uniform", "--sample=1", "--seed=1", "--rounds=40")
    done = deltafl_here("run", *words, "--out=run", cwd=tmp_path)
    found = re.search(r"round (\d+), with client 2: IndexError: index out of range", done.stderr)
    assert done.returncode == 2 and found is not None, done.stderr
    assert "Traceback" not in done.stderr and "mine.py line 18" in done.stderr
    rounds = [line["round"] for line in lines_of(tmp_path / "run")]
    assert rounds == [*range(int(found[1]))] and len(rounds) > 1


def test_a_comparison_in_python_has_the_error_as_its_cause(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="round 1, with client 2: SystemExit") as caught:
        deltafl.compare(
            task_of(augment=augment),
            ["full"],
            seeds=1,
            rounds=2,
            processes=1,
            progress=False,
            out=tmp_path / "out",
        )
    assert isinstance(caught.value.__cause__, SystemExit)


@dataclass(frozen=True)
class Exits(deltafl.Sampler):
    """Ends the program, as scripts do that were never meant to be called."""

    code: int = 0

    def open(self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None) -> Any:
        sys.exit(self.code)


@pytest.mark.parametrize("code", [0, 7])
def test_a_sampler_that_exits_ends_a_comparison_in_a_sentence(code: int, tmp_path: Path) -> None:
    with pytest.raises(
        DeltaflError, match=rf"ended by sys\.exit\({code}\) \(test_failures.py line"
    ):
        deltafl.compare(
            task_of(), [Exits(code)], seeds=1, rounds=1, progress=False, out=tmp_path / "out"
        )
