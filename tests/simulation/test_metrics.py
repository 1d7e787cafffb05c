"""Runs that are judged by other metrics than accuracy and loss, from their outputs to the table."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

import deltafl
from deltafl import DeltaflError, Metric
from deltafl.analysis import Run, headline, summarise
from deltafl.analysis.summary import ranked
from deltafl.calls import Named
from deltafl.simulation import RunSettings, engine_of, make_settings
from deltafl.simulation.comparisons.tune import TuneSettings
from deltafl.simulation.engine import Engine
from deltafl.simulation.folder.record import require_own_columns
from deltafl.tasks import (
    Dataset,
    Task,
    binary_cross_entropy,
    check_task,
    cross_entropy,
    squared_error,
)
from deltafl.tasks.metrics import METRICS
from deltafl.types import Judge
from tools.cli import deltafl_here
from tools.simulation import lines_of


def command(name: str, **given: object) -> tuple[int, str]:
    """Exit code and output of a command, played here."""
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
    done = deltafl_here(name, *words, cwd=Path.cwd())
    return done.returncode, done.stdout + done.stderr


RNG = np.random.default_rng(3)
X = RNG.normal(size=(360, 4)).astype(np.float32)
NOISE = RNG.normal(size=360)
ROWS = [np.arange(i, 240, 12) for i in range(12)]
OWNERS = np.arange(120) % 12
FEW: dict[str, Any] = {"rounds": 6, "sample": 4, "processes": 1, "progress": False, "report": False}


def task_of(y: Any, num_classes: int, outputs: int, **changes: Any) -> Task:
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, outputs)  # noqa: E731
    y = np.asarray(y, np.float32)
    data = Dataset("made up", X[:240], y[:240], X[240:], y[240:], num_classes)
    given: dict[str, Any] = {"make_model": model, "loss": binary_cross_entropy, **changes}
    return Task("made-up", data, ROWS, **given)


def one_logit(**changes: Any) -> Task:
    """One example in ten is positive."""
    return task_of(X[:, 0] + 0.5 * NOISE > 1.4, 2, 1, metric="roc_auc", **changes)


def many_labels(**changes: Any) -> Task:
    return task_of(X[:, :3] + 0.2 * NOISE[:, None] > 0.5, 3, 3, metric="f1", **changes)


def numbers(**changes: Any) -> Task:
    y = X @ np.arange(4) + NOISE
    given: dict[str, Any] = {"metric": ("r2", "mae"), "loss": squared_error, **changes}
    return task_of(y[:, None], 0, 1, **given)


def outputs_of(engine: Engine, params_d: Any) -> Any:
    model = engine.task.make_model()
    nn.utils.vector_to_parameters(torch.tensor(params_d), model.parameters())
    with torch.no_grad():
        return model(torch.tensor(engine.task.dataset.test_x)).numpy()


def engine_for(task: Task) -> Engine:
    return engine_of(make_settings(RunSettings, {"task": Named("made-up", task)}))


def test_one_logit_is_judged_as_two_classes() -> None:
    task = one_logit(test_clients=OWNERS)
    check_task(task, "it", 0)
    engine = engine_for(task)
    params_d = engine.initial_params()
    logit, y = outputs_of(engine, params_d)[:, 0], task.dataset.test_y
    judged = engine.judge(params_d)
    found = judged.evaluation()
    assert found.accuracy == sk.accuracy_score(y, logit > 0)
    assert found.others == {"roc_auc": pytest.approx(sk.roc_auc_score(y, logit))}
    assert found.client_accuracy == pytest.approx(found.accuracy)  # all have as many examples
    assert list(found.line()) == ["loss", "accuracy", "client_accuracy", "roc_auc"]
    by_client = judged.by_client()
    assert by_client is not None
    for client, value in enumerate(by_client):
        own = client == OWNERS
        if len(set(y[own])) == 1:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(sk.roc_auc_score(y[own], logit[own]))
    assert np.isnan(by_client).any() and not np.isnan(by_client).all()


def test_several_labels_have_honest_shares_and_a_chance() -> None:
    task = many_labels()
    check_task(task, "it", 0)
    y = task.dataset.train_y
    share_mc = task.shares
    np.testing.assert_allclose(share_mc[2], y[ROWS[2]].sum(axis=0) / y[ROWS[2]].sum())
    np.testing.assert_allclose(share_mc.sum(axis=1), 1)
    y[ROWS[2]] = 0
    assert (replace(task).shares[2] == 0).all()  # counted anew
    rows = [tuple(row) for row in task.dataset.test_y]
    assert task.chance == max(map(rows.count, rows)) / len(rows)
    engine = engine_for(task)
    output, test_y = outputs_of(engine, engine.initial_params()), task.dataset.test_y
    found = engine.evaluate(engine.initial_params())
    assert found.accuracy == sk.accuracy_score(test_y, output > 0)
    f1 = sk.f1_score(test_y, output > 0, average="macro", zero_division=0)
    assert found.others["f1_macro"] == pytest.approx(f1)


class Tagger(nn.Module):
    """A class for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x)).movedim(-1, 1)  # type: ignore[no-any-return]


def test_sequences_of_classes_are_judged_place_by_place() -> None:
    token = np.random.default_rng(0).integers(0, 7, (360, 5))
    data = Dataset("tags", token[:240], token[:240] % 3, token[240:], token[240:] % 3, 3)
    names = ["accuracy", "balanced_accuracy", "f1", "roc_auc", "log_loss", "top_2", "loss"]
    task = Task(
        "tags",
        data,
        ROWS,
        Tagger,
        cross_entropy,
        metric=names,
        tokens=True,
        test_clients=OWNERS,
    )
    check_task(task, "it", 0)
    engine = engine_for(task)
    params_d = engine.initial_params()
    logits = outputs_of(engine, params_d).transpose(0, 2, 1)
    y = data.test_y
    odds = np.exp(logits.reshape(-1, 3))
    p = odds / odds.sum(axis=1, keepdims=True)
    flat = y.reshape(-1)
    judged = engine.judge(params_d)
    found = judged.evaluation().line()
    hit = logits.argmax(axis=2) == y
    assert found["accuracy"] == pytest.approx(hit.mean())
    assert found["balanced_accuracy"] == sk.balanced_accuracy_score(flat, p.argmax(axis=1))
    assert found["f1_macro"] == sk.f1_score(flat, p.argmax(axis=1), average="macro")
    assert found["roc_auc"] == pytest.approx(sk.roc_auc_score(flat, p, multi_class="ovr"))
    assert found["top_2_accuracy"] == pytest.approx(sk.top_k_accuracy_score(flat, p, k=2))
    assert found["log_loss"] == pytest.approx(sk.log_loss(flat, p), rel=1e-5)
    assert found["loss"] == pytest.approx(found["log_loss"], rel=1e-5)
    own = [hit[client == OWNERS].mean() for client in range(12)]
    np.testing.assert_allclose(judged.by_client(), own)  # type: ignore[arg-type]
    assert task.chance == np.bincount(flat).max() / len(flat)


def test_direction_follows_the_metric(tmp_path: Path) -> None:
    """A regression by r2 and by its error: the same runs, the same order."""
    seen = {}
    for metric in (["r2", "mae"], ["mae", "r2"]):
        out = tmp_path / metric[0]
        found = deltafl.compare(numbers(), "full,uniform", 2, metric=metric, out=out, **FEW)
        table = found.summary()
        assert list(table)[1] == found.numbers.metric
        entries = found.numbers.samplers
        assert entries[0].gap_closed is not None and entries[0].gap_closed.value == 1
        seen[metric[0]] = found
    for name in ("r2", "mean_absolute_error"):
        one, other = (found.runs()[name] for found in seen.values())
        np.testing.assert_array_equal(one, other)
    assert [found.numbers.judge.higher for found in seen.values()] == [True, False]
    run = seen["mae"].curves[0]
    assert run.value_r[-1] < run.value_r[0]
    tuned = make_settings(TuneSettings, {"task": "synthetic", "metric": "mae", "rounds": 6})
    assert tuned.score(run).area == pytest.approx(run.value_r.mean())
    assert tuned.score(seen["r2"].curves[0]).area == pytest.approx(
        -seen["r2"].curves[0].value_r.mean()
    )


class _Ranks(nn.Module):
    """A slope, which orders the examples, and an offset, which decides how many are above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return (x[:, :2] * self.w).sum(dim=1) - 2


def imbalanced() -> Task:
    """One example in ten is positive, and the first input says mostly which."""
    rng = np.random.default_rng(0)
    y = (np.arange(400) % 10 == 0).astype(np.float32)
    x = np.stack([2 * y + rng.normal(size=400), np.ones(400)], axis=1).astype(np.float32)
    data = Dataset("rare", x[:200], y[:200], x[200:], y[200:], 2)
    return Task(
        "rare", data, [np.arange(i, 200, 8) for i in range(8)], _Ranks, binary_cross_entropy
    )


def constant_of(offset: float, slope: float) -> Any:
    return np.array([slope, offset], np.float32)


@pytest.mark.drawn
def test_the_best_by_auc_is_not_the_best_by_accuracy(tmp_path: Path) -> None:
    task = replace(imbalanced(), metric=["accuracy", "auc"])
    engine = engine_for(task)
    says_no = engine.judge(constant_of(-9, -0.1))
    ranks = engine.judge(constant_of(3, 1.0))
    both = [judged.evaluation() for judged in (says_no, ranks)]
    assert both[0].accuracy == 0.9 > both[1].accuracy
    by_auc = [sk.roc_auc_score(task.dataset.test_y, judged.output_e) for judged in (says_no, ranks)]
    assert by_auc[0] < 0.1 and by_auc[1] > 0.9

    found = deltafl.compare(
        task, "full,uniform", 2, metric="auc,accuracy", threshold=0.9, out=tmp_path / "out", **FEW
    )
    run = found.curves[0]
    assert run.metric == "roc_auc" and [judge.name for judge in run.judges] == ["roc_auc"]
    np.testing.assert_array_equal(run.value_r, run.others_r["roc_auc"])
    reached = found.numbers.samplers[0].to_threshold
    assert reached is not None and run.value_r.max() >= 0.9
    first = int(np.argmax(run.value_r >= 0.9)) + 1
    assert found.numbers.samplers[0].seeds[0].reach is not None
    assert found.numbers.samplers[0].seeds[0].reach.round == first
    gap = found.numbers.samplers[1].gap_closed
    assert gap is None or gap.value == 0
    shown = repr(found)
    assert "ROC AUC" in shown and "90 %" in shown
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        *("accuracy.png", "loss.png", "roc_auc.png", "selections.png")
    }
    again = deltafl.load(tmp_path / "out")
    assert again.numbers == found.numbers


@pytest.mark.parametrize(("metric", "best"), [("roc_auc", "ordered"), ("accuracy", "says-no")])
def test_who_is_ahead_follows_the_metric(metric: str, best: str) -> None:
    """By AUC one method closes the gap, by accuracy the other."""
    auc = Judge("roc_auc", share=True)
    ends = {
        "uniform": (0.70, 0.70),
        "ordered": (0.72, 0.85),
        "says-no": (0.88, 0.60),
        "full": (0.90, 0.90),
    }
    rounds = np.arange(1, 6)
    rng = np.random.default_rng(0)
    runs = [
        Run(
            label,
            seed,
            metric,
            rounds,
            accuracy_r=np.full(5, accuracy + shift),
            loss_r=np.ones(5),
            seconds_r=rounds.astype(np.float64),
            bytes_r=rounds.astype(np.float64),
            draws_m=np.ones(3, np.int64),
            settings={"rounds": 5},
            judges=[auc],
            others_r={"roc_auc": np.full(5, value + shift)},
        )
        for label, (accuracy, value) in ends.items()
        for seed, shift in enumerate(rng.normal(scale=0.002, size=3))
    ]
    found = summarise(runs, 0.84)
    assert [entry.sampler for entry in ranked(found)][:2] == ["full", best]
    gaps = {entry.sampler: entry.gap_closed for entry in found.samplers}
    known = gaps[best]
    assert known is not None and known.value == pytest.approx(
        {"ordered": 0.75, "says-no": 0.9}[best], abs=0.05
    )
    reached = {e.sampler for e in found.samplers if e.to_threshold and e.to_threshold.num_reached}
    assert reached == {"full", best}
    assert headline(found)[0].startswith(best)


MINE = """
import numpy as np
from torch import nn
import deltafl
from deltafl.tasks import Dataset, Task, squared_error

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = X[:, :1]

def make_task():
    data = Dataset("mine", X[:40], Y[:40], X[40:], Y[40:], 0)
    rows = [np.arange(i, 40, 8) for i in range(8)]
    return Task("mine", data, rows, lambda: nn.Linear(3, 1), squared_error, metric="loss")

def worst(output, y):
    return abs(output - y).max()

def of_arrays(output, y):
    return np.percentile(np.abs(output - y), 90)

def broken(output, y):
    return output.nothing

def word(output, y):
    return "high"

def several(output, y):
    return output

error = deltafl.Metric("worst error", worst, higher=False)
loss = worst
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "my_metrics_61.py"
    file.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return file


def test_a_function_of_ones_own_on_the_command_line(mine: Path) -> None:
    given = {"task": mine.name, "rounds": 3, "sampler": "uniform"}
    names = f"{mine.name}:error,{mine.name}:of_arrays,r2"
    code, output = command("run", **given, metric=names, threshold=0.01, out="run")
    assert code == 0 and "worst error" in output
    first, *others = lines_of(Path("run"))
    assert [judge.name for judge in first["metrics"]] == ["worst error", "of_arrays", "r2"]
    assert first["metrics"][0].higher is False
    assert all(set(first["test"]) == set(line["test"]) for line in others)
    run = deltafl.load("run").curves[0]
    assert (run.metric, run.judge.higher) == ("worst error", False)
    # More rounds go on; another metric does not.
    code, output = command("run", resume=True, out="run", rounds=4)
    assert code == 0 and len(lines_of(Path("run"))) == 5
    code, output = command("run", resume=True, out="run", metric="r2")
    assert code == 2 and "started with metric" in output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "no attribute 'nothing' (my_metrics_61.py line 22)"),
        ("word", "returned 'high'; it must return one number"),
        ("several", "it must return one number"),
        ("nobody", "has no function 'nobody'"),
        ("loss", "means something else"),
    ],
)
def test_a_function_that_fails_is_one_sentence_before_anything_is_written(
    mine: Path, name: str, words: str
) -> None:
    code, output = command("run", task=mine.name, metric=f"{mine.name}:{name}", out="run")
    assert code == 2 and words in output and not Path("run").exists()


def test_a_metric_is_not_called_as_a_column_or_an_entry_of_a_file(tmp_path: Path) -> None:
    def far(output: Any, y: Any) -> Any:
        return abs(output - y).max()

    task = replace(numbers(test_clients=OWNERS), client_strata=["a", "b"] * 6)
    given: dict[str, Any] = {**FEW, "rounds": 2, "out": tmp_path / "out"}
    found = deltafl.compare(replace(task, metric=far), "full,uniform", 1, **given)
    frames = (found.runs(), found.clients(), found.summary().reset_index())
    taken = {str(name) for frame in frames for name in frame}
    taken |= {*json.loads((tmp_path / "out" / "runs" / "full-seed0" / "clients.json").read_text())}
    taken -= {"far", "far_sd"}
    assert {"client", "stratum", "draws", "gap_closed", "strata", "rounds", "round"} <= taken
    # Those of built-in metrics are refused before.
    taken -= {*METRICS}
    for name in sorted(taken | {"names", "trainings", "cost", "clock", "selections"}):
        with pytest.raises(DeltaflError, match="means something else"):
            require_own_columns([Metric(name, far)])
    wrong = replace(task, metric=Metric("seed", far))
    with pytest.raises(DeltaflError, match="means something else"):
        deltafl.compare(wrong, "full,uniform", 1, **{**given, "out": tmp_path / "other"})
    assert not (tmp_path / "other").exists()


def mae(output: Any, y: Any) -> float:
    """In another unit than the library's metric of this name."""
    return 1000.0 + float((output - y).abs().mean())


@pytest.mark.parametrize("metric", [mae, Metric("RMSE", mae, higher=False), Metric("Loss", mae)])
def test_a_function_that_is_called_as_one_of_the_librarys_is_asked(
    tmp_path: Path, metric: Any
) -> None:
    """Another spelling of a metric's name is a name of the user's own, whoever reads the folder."""
    given: dict[str, Any] = {**FEW, "out": tmp_path / "out", "rounds": 2}
    name = getattr(metric, "name", "mae")
    for rounds in (2, 3):
        given["rounds"] = rounds
        both = deltafl.compare(numbers(), "full,uniform", 1, metric=[metric, "mae"], **given)
        assert both.numbers.metric == name
        higher = getattr(metric, "higher", True)
        assert both.curves[0].judge.higher == higher
        # Nobody can tell by such a name.
        assert f"{'higher' if higher else 'lower'} is better" in " ".join(str(both).split())
        assert both.curves[0].value_r[-1] > 1000
        assert both.curves[0].others_r["mean_absolute_error"][-1] < 1000
    assert deltafl.load(tmp_path / "out").numbers.metric == name
    with pytest.raises(DeltaflError, match="started with metric"):
        deltafl.compare(numbers(), "full,uniform", 1, metric="rmse", **given)


@pytest.mark.thorough
def test_functions_in_python_with_several_processes(tmp_path: Path) -> None:
    def far(output: Any, y: Any) -> Any:
        return ((output - y).abs() > 1).float().mean()

    metric = [Metric("far", far, higher=False, share=True), "r2"]
    given: dict[str, Any] = {
        **FEW,
        "processes": 2,
        "metric": metric,
        "out": tmp_path / "out",
        "rounds": 3,
    }
    found = deltafl.compare(numbers(test_clients=OWNERS), "full,uniform", 1, **given)
    run = found.curves[0]
    assert run.judge.name == "far" and run.fairness is not None
    assert run.fairness.worst_tenth >= run.fairness.mean
    known = json.loads((tmp_path / "out" / "runs" / "full-seed0" / "clients.json").read_text())
    assert list(known) == ["num_examples", "rounds", "far"]
    deltafl.compare(numbers(test_clients=OWNERS), "full,uniform", 1, **{**given, "rounds": 4})
    other = {**given, "rounds": 4, "metric": "r2"}
    with pytest.raises(DeltaflError, match="started with metric"):
        deltafl.compare(numbers(test_clients=OWNERS), "full,uniform", 1, **other)
    assert deltafl.load(tmp_path / "out").numbers.metric == "far"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metric": "r2"}, "not for classes"),
        ({"metric": "aucc"}, "unknown metric"),
        ({"metric": "auc,roc_auc"}, "named twice"),
        ({"metric": " , "}, "metric is empty; write at least 1"),
        ({"metric": "top_10"}, "of 10 classes is always 1"),
        ({"metric": "roc_auc", "threshold": 80}, "roc_auc is a share between 0 and 1"),
        ({"metric": "accuracy", "task": "toy"}, "num_classes is 0"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        engine_of(make_settings(RunSettings, {"task": "digits", "rounds": 1, **given}))


def test_a_metric_that_no_model_can_have_is_refused() -> None:
    task = one_logit()
    task.dataset.test_y[:] = 0
    with pytest.raises(DeltaflError, match="ROC AUC has no value on these 120 test examples"):
        check_task(task, "it", 0)
    task.dataset.test_y[100] = 1  # behind the examples that are tried
    check_task(task, "it", 0)
    task = numbers(metric="r2")
    task.dataset.test_y[:] = 0.1
    with pytest.raises(DeltaflError, match="R2 has no value on these"):
        check_task(task, "it", 0)


def test_names_in_headings_are_written_as_people_write_them(mine: Path) -> None:
    given: dict[str, Any] = {**FEW, "metric": "roc_auc,f1", "threshold": 0.9}
    found = deltafl.compare(one_logit(test_clients=OWNERS), "full,uniform", 2, **given)
    assert r"ROC AUC (\%)" in found.to_latex() and "roc_auc_low" in found.to_csv()
    assert found.plot().axes[0].get_ylabel() == "test ROC AUC, %"
    words = {"task": "digits", "metric": "f1", "rounds": 2, "out": "run"}
    code, output = command("run", **words)
    last = lines_of(Path("run"))[-1]["test"]["f1_macro"]
    assert code == 0 and f"macro F1 {last:.2%}" in output


def test_a_hospital_has_its_own_auc() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    table = pd.DataFrame({"x": x, "label": x + rng.normal(size=600) > 0, "client": 0})
    table.loc[300:, "client"] = 1
    given: dict[str, Any] = {**FEW, "sample": 1, "metric": "auc"}
    found = deltafl.compare(table, "full,uniform", 1, **given)
    assert found.clients()["roc_auc"].between(0, 1).all()


def test_hits_alone_are_fetched_where_accuracy_counts() -> None:
    task = one_logit()
    by_hits = engine_for(replace(task, metric="accuracy"))
    params_d = by_hits.initial_params()
    hits, outputs = by_hits.judge(params_d), engine_for(task).judge(params_d)
    assert hits.output_e is None and hits.hit_e is not None and outputs.hit_e is not None
    np.testing.assert_array_equal(hits.hit_e, outputs.hit_e)
    assert hits.evaluation().accuracy == outputs.evaluation().accuracy


def test_a_metric_of_settings_has_no_threshold_of_another() -> None:
    made = [
        make_settings(RunSettings, {"task": "digits", **given}).threshold
        for given in ({}, {"metric": "accuracy"}, {"metric": "auc"})
    ]
    assert made == [0.85, 0.85, None]
