"""The limits: what must come out where nothing can help, and where a memory is everything."""

import json
from pathlib import Path

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from reproduction.limits.drifting import Far, LimitsSettings, Point, measure, points_of
from reproduction.limits.page import report_limits, run_limits, summarise_limits
from reproduction.spec import load_experiment

SMALL = LimitsSettings(
    methods=("uniform", "delta-centred", "fedvarp"),
    dimensions=30,
    common=1.0,
    sample=5,
    ratios=(4,),
    drifts=(0.0,),
    spreads=(0.0, 2.0),
    grouped=(0.0,),
    groups=3,
    clients=20,
    rounds=60,
    seeds=3,
)


def test_known_cases() -> None:
    """Uniform is 1 by definition; of clients that stand still a memory misses only the unseen; with equal norms
    no score helps."""
    found = {(row.point, row.method): np.array(row.error_s) for row in measure(SMALL, lambda *_: None)}
    for (point, method), error_s in found.items():
        if method == "uniform":
            np.testing.assert_array_equal(error_s, 1)
        elif method == "fedvarp":
            assert (error_s < 0.05).all()
        elif point.spread == 0:
            assert (np.abs(error_s - 1) < 0.25).all()
        else:
            assert error_s.mean() < 0.8


def test_fast_drift_makes_memories_worse_than_none() -> None:
    """Two independent vectors are further apart than one is from their mean: twice the residual, hence about twice."""
    settings = SMALL.model_copy(update={"drifts": (1.0,), "spreads": (), "grouped": (), "methods": ("fedvarp",)})
    (row,) = measure(settings, lambda *_: None)
    assert row.point == Point("age", 20, 5, 1.0, 0, 0)
    assert 1.6 < np.mean(row.error_s) < 2.4


def test_what_counts_is_drift_squared_times_m_by_n() -> None:
    """A memory of age k explains (1 - drift^2)^k: four times the clients at half the drift is about the same."""
    far = Far(methods=("uniform", "innovation"), sample=2, ratio=40, drifts=(0.1,))
    none = {"ratios": (10,), "drifts": (0.2,), "spreads": (), "grouped": (), "methods": ("uniform", "innovation")}
    found = measure(SMALL.model_copy(update={**none, "far": far, "rounds": 100}), lambda *_: None)
    near, remote = (np.mean(row.error_s) for row in found if row.method == "innovation")
    assert {(row.point.clients, row.point.sample) for row in found} == {(50, 5), (80, 2)}
    assert near == pytest.approx(remote, rel=0.15)
    assert 0.2 < near < 0.4


def test_page_and_table(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    settings = SMALL.model_copy(update={"rounds": 5})
    with pytest.raises(DeltaflError, match="run the experiment first"):
        report_limits(settings, tmp_path)
    run_limits(settings, tmp_path, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (len(points_of(settings)), len(points_of(settings)))
    page = report_limits(settings, tmp_path)
    assert "| fedvarp |" in page
    assert (tmp_path / "limits.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "limits.json").read_text())["rows"]
    assert len((tmp_path / "errors.csv").read_text().splitlines()) == 1 + sum(len(row["error"]) for row in rows)
    measured, verdict = summarise_limits(settings, tmp_path)
    assert "fedvarp has a smaller error than uniform at 4 of 4 points" in measured
    assert verdict == "not a claim of the paper"


def test_data_of_other_settings_are_refused(tmp_path: Path) -> None:
    settings = SMALL.model_copy(update={"rounds": 2, "spreads": (0.0,)})
    run_limits(settings, tmp_path, lambda *_: None)
    for change in ({"seeds": 4}, {"rounds": 3}, {"drifts": (0.5,)}, {"methods": ("uniform",)}):
        other = settings.model_copy(update=change)
        for show in (report_limits, summarise_limits):
            with pytest.raises(DeltaflError, match=f"measured with another {next(iter(change))}; give the --scale"):
                show(other, tmp_path)
    assert not (tmp_path / "limits.png").exists()
    for text, sentence in (("[]", "does not say with what settings"), ('{"rows": []}', "settings: Field required")):
        (tmp_path / "limits.json").write_text(text)
        with pytest.raises(DeltaflError, match=rf"{sentence}.*; leave out --only-page to run it again"):
            report_limits(settings, tmp_path)


def test_the_committed_data_are_those_of_the_command_on_their_page() -> None:
    folder = Path(__file__).parent.parent / "results" / "limits"
    settings = LimitsSettings.model_validate(load_experiment("limits").own_settings("cpu"))
    assert summarise_limits(settings, folder)[0] in (folder / "README.md").read_text()


def test_methods_that_need_an_oracle_are_refused() -> None:
    with pytest.raises(DeltaflError, match="needs an oracle"):
        measure(SMALL.model_copy(update={"methods": ("fedis",)}), lambda *_: None)
