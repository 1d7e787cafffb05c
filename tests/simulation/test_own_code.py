"""A folder is not continued with another version of the user's own code, however it is given."""

import json
import pickle
import re
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import deltafl
from deltafl.calls import Named
from deltafl.errors import DeltaflError
from deltafl.simulation.describe import UnknownError, describe
from deltafl.simulation.folder.behaviour import behaviour_of
from deltafl.simulation.folder.own_code import Code, code_of
from deltafl.store.own_python import forget_edited, imported, load_named
from deltafl.tasks import Dataset, Task
from deltafl.tasks.losses import cross_entropy
from tools.cli import deltafl_here

SAMPLER = '''
"""Own samplers."""
from dataclasses import dataclass
import numpy as np
import deltafl

POWER = 1.0  # of the sizes
OTHER = 2.0

def grown(value_m):
    return value_m**POWER

@dataclass(frozen=True)
class BySize(deltafl.Sampler):
    unbiased = True
    def init(self, population):
        return population.num_examples_m
    def open(self, state, available_m, n, rng, oracle=None):
        other = state
        return deltafl.draw_cohort(grown(other), n, "pivotal", rng, available_m)
    def update(self, state, cohort, reports):
        return state

@dataclass(frozen=True)
class Twice(BySize):
    def open(self, state, available_m, n, rng, oracle=None):
        return deltafl.draw_cohort(OTHER * np.ones(len(state)), n, "pivotal", rng, available_m)
'''
NAME = "mine.py:BySize"

#: Two versions of a script that makes ``thing``, and whether it is the same thing.
PAIRS = {
    "a comment, layout and a docstring": (
        "def thing(x):\n    return f(x, 1)",
        "def thing(x):\n    'Doc.'\n    # why\n    return f(\n        x,\n        1,\n    )",
        True,
    ),
    "an unused name": ("a = 1\nthing = lambda: f(2)", "a = 2\nthing = lambda: f(2)", True),
    "an attribute of a global's name": (
        "a = 1\nthing = lambda x: x.a",
        "a = 2\nthing = lambda x: x.a",
        True,
    ),
    "a number": ("thing = lambda: f(2)", "thing = lambda: f(3)", False),
    "a number's type": ("thing = lambda: 1", "thing = lambda: True", False),
    "two lambdas on a line": (
        "thing, other = (lambda: f(1)), (lambda: f(2))",
        "other, thing = (lambda: f(1)), (lambda: f(2))",
        False,
    ),
    "a global": ("a = 1\nthing = lambda: f(a)", "a = 2\nthing = lambda: f(a)", False),
    "a global two calls away": (
        "a = 1\ndef g(): return a\ndef thing(): return g()",
        "a = 2\ndef g(): return a\ndef thing(): return g()",
        False,
    ),
    "what the function itself counts": (
        "calls = 0\ndef thing():\n    global calls\n    calls += 1",
        "calls = 5\ndef thing():\n    global calls\n    calls += 1",
        True,
    ),
    "a default": ("def thing(a=1): return a", "def thing(a=2): return a", False),
    "a keyword's default": ("def thing(*, a=1): return a", "def thing(*, a=2): return a", False),
    "an argument's name": ("def thing(a, b): return 1", "def thing(b, a): return 1", False),
    "a closure": (
        "def make(a): return lambda: a\nthing = make(1)",
        "def make(a): return lambda: a\nthing = make(2)",
        False,
    ),
    "an attribute of a function": (
        "def thing(): pass\nthing.a = 1",
        "def thing(): pass\nthing.a = 2",
        False,
    ),
    "where it jumps to": (
        "def thing(a):\n    if a: f()\n    g()",
        "def thing(a):\n    if a:\n        f()\n        g()",
        False,
    ),
    "what try protects": (
        "def thing():\n    try:\n        f()\n        g()\n    except E: pass",
        "def thing():\n    try:\n        f()\n    except E: pass\n    else: g()",
        False,
    ),
    "a partial": ("thing = partial(f, 1)", "thing = partial(f, 2)", False),
    "the same partial": ("thing = partial(f, 1, b=2)", "thing = partial(f, 1, b=2)", True),
    "a decorated function": (
        "@torch.no_grad()\ndef thing(): return 1",
        "@torch.no_grad()\ndef thing(): return 2",
        False,
    ),
    "a cached function": (
        "@lru_cache\ndef thing(): return 1",
        "@lru_cache\ndef thing(): return 2",
        False,
    ),
    "a method of a class": (
        "class thing:\n    def a(self): return 1",
        "class thing:\n    def a(self): return 2",
        False,
    ),
    "a property": (
        "class thing:\n    @property\n    def a(self): return 1",
        "class thing:\n    @property\n    def a(self): return 2",
        False,
    ),
    "a cached property": (
        "class thing:\n    @cached_property\n    def a(self): return 1",
        "class thing:\n    @cached_property\n    def a(self): return 2",
        False,
    ),
    "a class method": (
        "class thing:\n    @classmethod\n    def a(cls): return 1",
        "class thing:\n    @classmethod\n    def a(cls): return 2",
        False,
    ),
    "the order of methods, and a docstring": (
        "class thing:\n    def a(self): return 1\n    def b(self): return thing",
        "class thing:\n    'Doc.'\n    def b(self): return thing\n    def a(self): return 1",
        True,
    ),
    "a base class": (
        "class A:\n    a = 1\nclass thing(A): pass",
        "class A:\n    a = 2\nclass thing(A): pass",
        False,
    ),
    "a field's default": (
        "@dataclass\nclass thing:\n    a: int = 1",
        "@dataclass\nclass thing:\n    a: int = 2",
        False,
    ),
    "a field's factory": (
        "@dataclass\nclass thing:\n    a: list = field(default_factory=lambda: [1])",
        "@dataclass\nclass thing:\n    a: list = field(default_factory=lambda: [2])",
        False,
    ),
    "an instance": (
        "@dataclass\nclass A:\n    a: int\nthing = A(1)",
        "@dataclass\nclass A:\n    a: int\nthing = A(2)",
        False,
    ),
    "a bound method": (
        "@dataclass\nclass A:\n    a: int\n    def b(self): pass\nthing = A(1).b",
        "@dataclass\nclass A:\n    a: int\n    def b(self): pass\nthing = A(2).b",
        False,
    ),
    "a method that an object was given": (
        "thing = nn.ReLU()\nthing.forward = MethodType(lambda self, x: x + 1, thing)",
        "thing = nn.ReLU()\nthing.forward = MethodType(lambda self, x: x + 2, thing)",
        False,
    ),
    "a hook": (
        "thing = nn.ReLU()\nthing.register_forward_hook(lambda *all: all[2] + 1)",
        "thing = nn.ReLU()\nthing.register_forward_hook(lambda *all: all[2] + 2)",
        False,
    ),
    "the number of a hook": (
        "thing = nn.ReLU()\nthing.register_forward_hook(f)",
        "nn.ReLU().register_forward_hook(f)\nthing = nn.ReLU()\nthing.register_forward_hook(f)",
        True,
    ),
    "an option of a loss": (
        "thing = nn.CrossEntropyLoss()",
        "thing = nn.CrossEntropyLoss(label_smoothing=0.3)",
        False,
    ),
    "the weights of a loss": (
        "thing = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2]))",
        "thing = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3]))",
        False,
    ),
    "the mode of a module": ("thing = nn.Dropout()", "thing = nn.Dropout().eval()", True),
    "a function of torch": ("thing = F.cross_entropy", "thing = F.nll_loss", False),
    "a builtin of torch": ("thing = torch.relu", "thing = torch.sigmoid", False),
    "a metric of the library": ("thing = METRICS['r2']", "thing = METRICS['roc_auc']", False),
    "an array": ("thing = np.arange(3)", "thing = np.arange(3.0)", False),
    "an array of objects": (
        "thing = np.array(['a', None])",
        "thing = np.array(['b', None])",
        False,
    ),
    "the mask of an array": (
        "thing = np.ma.array([1, 2], mask=[True, False])",
        "thing = np.ma.array([1, 2], mask=[False, True])",
        False,
    ),
    "a sparse tensor": (
        "thing = torch.eye(2).to_sparse()",
        "thing = 2 * torch.eye(2).to_sparse()",
        False,
    ),
    "a conjugate tensor": (
        "thing = torch.tensor([1j, 2])",
        "thing = torch.tensor([1j, 2]).conj()",
        False,
    ),
    "a data frame": ("thing = pd.DataFrame({'a': [1]})", "thing = pd.DataFrame({'a': [2]})", False),
    "the order of a set": (
        "thing = {'b', 'a', 'c', 1}",
        "thing = set([1, 'c', 'b', 'a'])",
        True,
    ),
    "the order of a mapping": ("thing = {'a': 1, 'b': 2}", "thing = {'b': 2, 'a': 1}", False),
    "a list in itself": ("thing = [1]; thing += [thing]", "thing = [2]; thing += [thing]", False),
    "a folder that was moved": ("thing = Path('a/x.pt')", "thing = Path('b/x.pt')", True),
}
HEAD = """
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MethodType
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from deltafl.tasks.metrics import METRICS
def f(*_, **__): pass
def g(*_, **__): pass
class E(Exception): pass
"""


def made(script: str) -> Any:
    """What a script calls ``thing``; it has no source, as in a notebook that was closed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(HEAD + script, "<a script>", "exec"), names)
    return names["thing"]


@pytest.mark.parametrize(("one", "other", "same"), PAIRS.values(), ids=PAIRS)
def test_things_are_the_same_when_they_do_the_same(one: str, other: str, same: bool) -> None:
    first = describe(made(one))
    assert first == describe(made(one))
    assert (first == describe(made(other))) == same


@pytest.mark.parametrize("script", [one for one, _, _ in PAIRS.values()], ids=PAIRS)
def test_a_thing_that_was_sent_to_another_process_is_the_same(script: str) -> None:
    thing = made(script)
    if "cache" in script:
        pytest.skip("Python pickles no caches")
    sent = pickle.loads(cloudpickle.dumps(thing))  # noqa: S301
    assert describe(sent) == describe(thing)


@pytest.mark.parametrize("value", [(i for i in range(3)), threading.Lock(), memoryview(b"")])
def test_what_cannot_be_told_apart_is_named(value: object) -> None:
    with pytest.raises(UnknownError, match=type(value).__name__):
        describe(lambda: value)


def test_what_a_function_uses_of_a_file_of_the_users_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helping.py").write_text("WIDTH = 1\nOTHER = 1\ndef width(): return WIDTH\n")
    uses = [
        made("import helping\nthing = lambda: helping.width()"),
        made("from helping import width\nthing = lambda: width()"),
        made("def thing():\n    from helping import width\n    return width()"),
    ]
    import helping  # type: ignore[import-not-found]

    before = [describe(use) for use in uses]
    helping.OTHER = 2
    assert [describe(use) for use in uses] == before
    helping.WIDTH = 2
    assert not {describe(use) for use in uses} & {*before}


X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def small_task(make_model: Any, loss: Any = nn.functional.cross_entropy, **more: Any) -> Task:
    rows = [np.arange(i, 40, 5) for i in range(5)]
    data = Dataset("data", X[:40], Y[:40], X[40:], Y[40:], 2)
    return Task("mine", data, rows, make_model, loss, **more)


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def play(task: Any, out: Path, rounds: int = 2, **more: Any) -> float:
    given = {"seeds": 1, "sample": 2, "processes": 1, "progress": False, "report": False, **more}
    played = deltafl.compare(task, ["uniform"], rounds=rounds, out=out, **given)
    return float(played.runs()["loss"].iloc[-1])


def dealt(seed: int) -> Task:
    """Another split with each seed."""
    row_e = np.random.default_rng(seed).permutation(40)
    return replace(small_task(linear), client_rows=np.array_split(row_e, 5))


@pytest.mark.drawn
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("task", "seeds", "is_one"),
    [
        (small_task(linear), 2, True),
        (lambda: small_task(linear), 2, True),
        (lambda seed: small_task(linear), [3, 5], True),
        (dealt, 2, False),
        (small_task(linear), 1, False),
    ],
)
def test_a_task_that_has_one_split_for_all_seeds_is_marked(
    task: Any, seeds: Any, is_one: bool, tmp_path: Path
) -> None:
    """In the table and in the report, also where the folder is read again."""
    given: dict[str, Any] = {"sample": 2, "rounds": 2, "processes": 1, "progress": False}
    played = deltafl.compare(task, "uniform", seeds, out=tmp_path, **given)
    for found in (played, deltafl.load(tmp_path)):
        assert ("splits" in found.numbers.environment) == is_one
        # Lines of the terminal fold anywhere.
        assert ("share one split and test set" in " ".join(repr(found).split())) == is_one
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("share one split and test set" in report) == is_one


@pytest.mark.parametrize(
    "names", [["a"], ["a", "b", "c", "d", "a"], [*"abcd", 5], [*"abcdef"]], ids=repr
)
def test_names_of_clients_are_one_different_text_each(names: list[Any], tmp_path: Path) -> None:
    with pytest.raises(deltafl.DeltaflError, match=r"client_names is .* 5 different texts"):
        play(small_task(linear, client_names=names), tmp_path / "out")


def noisy(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return x + float(rng.normal())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (small_task(lambda: nn.Linear(4, 2)), small_task(lambda: nn.Linear(4, 2, bias=False))),
        (small_task(linear, nn.CrossEntropyLoss()), small_task(linear, nn.CrossEntropyLoss(None))),
        (small_task(linear), small_task(linear, augment=noisy)),
        (small_task(linear), small_task(linear, metric="loss")),
        (lambda: small_task(linear), lambda: small_task(linear, tokens=False)),
    ],
    ids=["model", "loss", "augmentation", "metric", "function"],
)
def test_a_folder_does_not_answer_for_another_task(first: Any, second: Any, tmp_path: Path) -> None:
    if first is not second and isinstance(first, Task) and isinstance(second.loss, nn.Module):
        second = small_task(linear, nn.CrossEntropyLoss(label_smoothing=0.3))
    play(first, tmp_path / "out")
    files = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(DeltaflError, match=r"not the one that .*out was played with|started with"):
        play(second, tmp_path / "out", 4)
    assert files == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    play(first, tmp_path / "out", 4)


def test_a_file_of_weights_belongs_to_the_model(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"

    def make_model() -> nn.Module:
        model = nn.Linear(4, 2)
        model.load_state_dict(torch.load(weights))
        return model

    torch.save(nn.Linear(4, 2).state_dict(), weights)
    play(small_task(make_model), tmp_path / "out")
    play(small_task(make_model), tmp_path / "out", 3)
    torch.save(nn.Linear(4, 2).state_dict(), weights)
    with pytest.raises(DeltaflError, match=r"the model of the task, or its loss, is not the one"):
        play(small_task(make_model), tmp_path / "out", 4)


def test_folders_with_other_weights_are_not_joined(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"

    def make_model() -> nn.Module:
        model = nn.Linear(4, 2)
        model.load_state_dict(torch.load(weights))
        return model

    for name in ("a", "b", "c"):
        if name != "b":  # which has those of a
            torch.save(nn.Linear(4, 2).state_dict(), weights)
        play(small_task(make_model), tmp_path / name)
    deltafl.load(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DeltaflError, match=r"different models or losses .* leave one of them out"):
        deltafl.load(tmp_path / "a", tmp_path / "c")


class Decay:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, round: int) -> float:
        return self.factor**round

    def method(self, round: int) -> float:
        return self.factor**round


@pytest.mark.parametrize(
    "made",
    [
        lambda factor: lambda round: factor**round,
        lambda factor: partial(lambda factor, round: factor**round, factor),
        Decay,
        lambda factor: Decay(factor).method,
    ],
    ids=["closure", "partial", "object", "method"],
)
def test_another_schedule_is_refused(made: Any, tmp_path: Path) -> None:
    play(small_task(linear), tmp_path / "out", lr_schedule=made(0.5))
    play(small_task(linear), tmp_path / "out", lr_schedule=made(0.5))
    with pytest.raises(DeltaflError, match=r"lr_schedule=\w+ is not the one that .*out was"):
        play(small_task(linear), tmp_path / "out", lr_schedule=made(0.6))


def test_what_began_with_an_object_does_not_go_on_with_a_name(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": range(60), "client": [*range(6)] * 10, "label": [0, 1] * 30})
    frame.to_csv(tmp_path / "t.csv", index=False)
    play(frame, tmp_path / "out")
    with pytest.raises(DeltaflError, match=r"with task = frame, an object, and not with .*t\.csv"):
        play(tmp_path / "t.csv", tmp_path / "out")
    play(small_task(linear), tmp_path / "other", lr_schedule=Decay(0.5))
    with pytest.raises(DeltaflError, match="lr_schedule = Decay, an object, and not with cosine"):
        play(small_task(linear), tmp_path / "other", lr_schedule="cosine")


def test_training_leaves_a_module_that_every_run_starts_from(tmp_path: Path) -> None:
    module = nn.Linear(4, 2)
    before = describe(module)
    first = play(small_task(lambda: module), tmp_path / "out")
    assert describe(module) == before
    assert play(small_task(lambda: module), tmp_path / "other") == first
    play(small_task(lambda: module), tmp_path / "out", 4)


def test_what_cannot_be_compared_begins_a_folder_and_does_not_go_on(tmp_path: Path) -> None:
    lock = threading.Lock()

    def make_model() -> nn.Module:
        with lock:
            return nn.Linear(4, 2)

    play(small_task(make_model), tmp_path / "out")
    with pytest.raises(DeltaflError, match=r"mine uses a value of type lock.* or choose another"):
        play(small_task(make_model), tmp_path / "out")


SCRIPT = """
from dataclasses import dataclass
import numpy as np
from torch import nn
import deltafl
from deltafl.tasks import Dataset, Task
x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
WIDTH = 3
def make(seed):
    data = Dataset("data", x[:40], y[:40], x[40:], y[40:], 2)
    make_model = lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    rows = [np.arange(i, 40, 5) for i in range(5)]
    return Task("t", data, rows, make_model, nn.functional.cross_entropy)
@dataclass(frozen=True)
class Own(deltafl.Sampler):
    unbiased = True
    def init(self, population):
        return population.num_examples_m
    def open(self, state, available_m, n, rng, oracle=None):
        return deltafl.draw_cohort(state**1.0, n, "pivotal", rng, available_m)
    def update(self, state, cohort, reports):
        return state
def schedule(round):
    return 0.5**round
if __name__ == "__main__":
    deltafl.compare(make, ["uniform", Own], seeds=1, rounds=ROUNDS, sample=2, processes=2,
                    lr_schedule=schedule, out="out", progress=False, report=False)
"""


@pytest.mark.thorough
def test_a_script_goes_on_and_an_edited_one_is_refused(tmp_path: Path) -> None:
    def run(text: str, rounds: int) -> str:
        (tmp_path / "script.py").write_text(text.replace("ROUNDS", str(rounds)))
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stderr

    assert run(SCRIPT, 2) == ""
    assert run("\n\n" + SCRIPT.replace("WIDTH = 3", "WIDTH = 3  # of the layer"), 2) == ""
    assert "make is not the one that out was" in run(SCRIPT.replace("WIDTH = 3", "WIDTH = 4"), 2)
    edited = SCRIPT.replace("state**1.0", "state**0.5")
    assert "Own is not the one that out was" in run(edited, 2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SAMPLER, encoding="utf-8")
    return path


def test_names_in_all_settings_count_and_tables_do_not(file: Path) -> None:
    file.write_text(SAMPLER + "def make_task():\n    return 1\n", encoding="utf-8")
    settings = {
        "samplers": (
            "uniform+lr_schedule='mine.py:grown'",
            "full+lr_schedule=mine.py:grown",
            "uniform@@mine.py:Twice(power=2)",
        ),
        "task": "mine.py",
        "lr_schedule": Named("lambda", lambda round: 1),
        "memory_path": "a.py",
    }
    names = ["lr_schedule=lambda", "mine.py:grown", "mine.py:Twice", "mine.py"]
    assert [*code_of(settings)] == names
    assert code_of({"sampler": "uniform", "task": "mine.csv"}) == {}


def test_a_file_may_be_spelled_otherwise(file: Path) -> None:
    frame = pd.DataFrame({"a": range(60), "client": [*range(6)] * 10, "label": [0, 1] * 30})
    frame.to_csv("t.csv", index=False)
    for spelled in ("t.csv", "./t.csv", Path("t.csv"), file.parent / "t.csv"):
        beside = Path(spelled).with_name("mine.py")
        play(spelled, Path("out"), lr_schedule=f"{beside}:grown")
    recorded = tomllib.loads(Path("out/config.toml").read_text())
    assert (recorded["task"], recorded["lr_schedule"]) == ("t.csv", "mine.py:grown")


def test_an_edited_sampler_is_refused_and_others_may_be_added(file: Path) -> None:
    def compare(*samplers: str, out: str = "out", **more: Any) -> None:
        given = {"seeds": 1, "rounds": 2, "processes": 1, "progress": False, "report": False}
        deltafl.compare("toy", samplers, out=out, **{**given, **more})

    compare("uniform")
    compare(NAME)
    assert [*json.loads(Path("out/environment.json").read_text())["code"]] == [NAME]
    file.write_text(SAMPLER.replace("OTHER = 2.0", "OTHER = 3.25"), encoding="utf-8")
    compare("mine.py:Twice")
    file.write_text(SAMPLER.replace("POWER = 1.0", "POWER = 0.125"), encoding="utf-8")
    compare(NAME, "uniform", out="other")
    match = f"out and other were played with different code of {NAME}; leave"
    with pytest.raises(DeltaflError, match=match):
        deltafl.load("out", "other")
    with pytest.raises(DeltaflError, match=f"{NAME} is not the one that out was played with"):
        compare(NAME, seeds=2)


def test_a_folder_of_an_older_version_says_so(file: Path) -> None:
    given = ("compare", "--task", "toy", "--samplers", NAME, "--seeds", "1", "--processes", "1")
    assert deltafl_here(*given, "--rounds", "2", "--out", "out", cwd=file.parent).returncode == 0
    note = Path("out/environment.json")
    note.write_text(re.sub(r'"3\.\d+:\w+"', '"1f2e3d4c"', note.read_text()))
    resumed = ("compare", "--resume", "--samplers", NAME, "--out", "out")
    done = deltafl_here(*resumed, cwd=file.parent)
    assert done.returncode == 2
    assert "another version of Python or of deltafl" in " ".join(done.stderr.split())


def test_a_run_finds_its_files_from_anywhere(file: Path) -> None:
    rows = "".join(f"{i / 7 % 1},{i % 2},{i % 5}\n" for i in range(60))
    (file.parent / "data").mkdir()
    (file.parent / "data" / "table.csv").write_text(f"a,label,client\n{rows}")
    given = ("--task", "data/table.csv", "--sampler", NAME, "--rounds", "2", "--sample", "2")
    here = file.parent
    assert deltafl_here("run", *given, "--out", "out", cwd=here).returncode == 0
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    resumed = ("run", "--resume", "--rounds", "4", "--out", "../out")
    refused = deltafl_here(*resumed, cwd=elsewhere)
    assert refused.returncode == 2
    assert "would run as you" in " ".join(refused.stderr.split())
    done = deltafl_here(*resumed, "--trust-code", cwd=elsewhere)
    assert (done.returncode, "after 4 rounds" in done.stdout) == (0, True), done.stderr
    assert deltafl_here("export", "../out", "--to", "model.pt", cwd=elsewhere).returncode == 0
    assert (elsewhere / "model.pt").exists()


LOGGING = """
import numpy as np
from torch import Generator, nn, rand
from deltafl.tasks import Dataset, Task
seen = []
generator = Generator().manual_seed(0)
x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
class Net(nn.Linear):
    made = 0
    def __init__(self):
        super().__init__(4, 2)
        Net.made += 1
def loss(output, y):
    seen.append(len(y))
    return nn.functional.cross_entropy(output + 0 * rand(1, generator=generator), y)
def rows_right(output, y):
    seen.append(output)
    return float((output.argmax(1) == y).float().mean())
def make_task(seed):
    data = Dataset("data", x[:40], y[:40], x[40:], y[40:], 2)
    rows = [np.arange(i, 40, 5) for i in range(5)]
    return Task("t", data, rows, Net, loss, metric=rows_right)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_code_that_writes_down_what_it_does_stays_the_same_within_a_call(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"logging_task_{processes}.py"
    file.write_text(LOGGING)
    given = {"rounds": 2, "sample": 2, "progress": False, "report": False}
    samplers = ["full", "uniform"]
    deltafl.compare(file, samplers, 2, out="out", processes=processes, **given)  # type: ignore[arg-type]


def test_a_file_that_changes_while_runs_are_played_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "changing_task.py"
    file.write_text("def make_task(seed):\n    return 1\n")
    load_named(f"{file}:make_task", "it")
    code = Code({}, imported())
    code.require_same_files(tmp_path)
    file.write_text("def make_task(seed):\n    return 2\n")
    forget_edited()
    load_named(f"{file}:make_task", "it")
    with pytest.raises(DeltaflError, match=r"changing_task.py has changed since .* was begun"):
        code.require_same_files(tmp_path)


class NoisyGradients(torch.nn.Linear):
    """Draws as its gradients are computed, not before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: Any = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        noisy: torch.Tensor = output
        return noisy


def test_what_is_drawn_for_gradients_is_drawn_from_the_seed() -> None:
    """Else no two runs would be of one model, and none could be compared."""
    x = np.ones((8, 3), np.float32)
    y = np.arange(8) % 2
    data = Dataset("noisy", x, y, x, y, 2)
    rows = np.split(np.arange(8), 2)
    task = Task("noisy", data, rows, lambda: NoisyGradients(3, 2), cross_entropy)
    assert behaviour_of(task, 0) == behaviour_of(task, 0)
    assert behaviour_of(task, 0)["gradient"] != behaviour_of(task, 1)["gradient"]
