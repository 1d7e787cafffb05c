"""Early stopping by ``patience``: where it ends a run, after a resume too, and what is recorded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltafl as dl
from deltafl.simulation.callbacks.followers import Patience
from deltafl.simulation.comparisons.tune import TuneSettings
from deltafl.simulation.distributed import ALONE
from deltafl.simulation.folder.directory import StopRun
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.types import Judge
from tools.simulation import TINY, StopError, lines_of, quiet, run, stop_after


def ended(values: list[float | None], metric: str, patience: int, before: int) -> int | None:
    """The place at which it ends a run with these evaluations, ``before`` of them recorded."""
    lines = [{"round": k, "test": {metric: value}} for k, value in enumerate(values)]
    live: Any = SimpleNamespace(
        settings=SimpleNamespace(patience=patience),
        engine=SimpleNamespace(
            task=SimpleNamespace(metrics=[Judge(metric, higher=metric == "accuracy")])
        ),
        directory=SimpleNamespace(lines=lambda _: iter(lines[:before])),
        group=ALONE,
    )
    callback = Patience()
    callback.begin(live)
    for line in lines[before:]:
        played: Any = SimpleNamespace(line=dict(line), is_last=False)
        try:
            callback.after_round(live, played)
        except StopRun:
            return int(played.line["round"])
    return None


def slow_twin(values: list[float | None], metric: str, patience: int) -> int | None:
    """The first place that has ``patience`` values behind the best, none of them better."""
    sign = {"accuracy": 1, "loss": -1}[metric]
    heights = [-9e9 if value is None else sign * value for value in values]
    for place in range(patience, len(values)):
        if max(heights[place - patience + 1 : place + 1]) <= max(heights[: place - patience + 1]):
            return place
    return None


@given(
    st.lists(st.one_of(st.sampled_from([0.1, 0.2, 0.3, 0.4]), st.none()), min_size=1, max_size=12),
    st.sampled_from(["accuracy", "loss"]),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_it_ends_where_the_slow_twin_does_after_any_resume(
    values: list[float | None], metric: str, patience: int, before: int
) -> None:
    values = [0.25, *values]
    expected = slow_twin(values, metric, patience)
    if expected is not None and expected < before:
        before = 1
    assert ended(values, metric, patience, before) == expected


def test_a_run_that_stands_still_is_over_and_stays_so(tmp_path: Path) -> None:
    """With a rate of almost 0 the accuracy never changes: three evaluations later it is over."""
    given_settings = {**TINY, "local_lr": 1e-30, "patience": 3, "evaluate_every": 2, "rounds": 40}
    settings = make_settings(RunSettings, given_settings)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "run", stop_after(3))
    last = run_single(settings, tmp_path / "run", quiet)
    assert (last["round"], last["stopped"]) == (6, "no better accuracy in 3 evaluations")
    assert run_single(settings, tmp_path / "run", quiet) == last
    assert len(lines_of(tmp_path / "run")) == 7
    assert "stopped" not in run(tmp_path / "plain", **{**given_settings, "patience": None})


def test_a_comparison_says_who_was_stopped(tmp_path: Path) -> None:
    found = dl.compare(
        "digits",
        ["uniform+local_lr=1e-30", "uniform"],
        seeds=2,
        out=tmp_path / "out",
        processes=1,
        progress=False,
        report=False,
        patience=4,
        rounds=8,
        clients=12,
        sample=4,
    )
    entries = {entry.sampler: entry.seeds for entry in found.numbers.samplers}
    assert all(run.stopped for run in entries["uniform+local_lr=1e-30"])
    assert "Stopped" in str(found) and "4 evaluations" in str(found)


def test_tuning_plays_all_rounds() -> None:
    settings = make_settings(TuneSettings, {**TINY, "patience": 3, "samplers": "uniform"})
    grid = settings.grids()["local_lr"]
    trial = grid.trials(grid.search(["uniform"], lambda _: None))[0]
    assert settings.trial(trial, "local_lr", {"uniform": {}}).settings.patience is None
    assert settings.comparison({}).patience == 3
