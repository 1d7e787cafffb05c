"""From runs to the summary and its file: pairing, censoring, baselines, schema."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.analysis import Run, Summary, fieller, read_summary, summarise, write_summary
from deltafl.analysis import numbers as models
from deltafl.analysis.numbers import SamplerSummary
from deltafl.analysis.runs import Fairness
from deltafl.errors import DeltaflError, MissingExtraError
from tools.runs import make_run, runs_of


def entry_of(summary: Summary, sampler: str) -> SamplerSummary:
    return next(entry for entry in summary.samplers if entry.sampler == sampler)


def test_means_over_seeds() -> None:
    entry = entry_of(summarise(runs_of(fedavg=[4, 6], fedis=[2, 4]), 0.7), "fedis")
    reached = entry.to_threshold
    assert reached is not None and reached.rounds is not None
    assert (reached.num_reached, reached.num_never) == (2, 0)
    assert (reached.rounds.mean, reached.rounds.sd) == (3.0, math.sqrt(2))
    assert (reached.seconds, reached.bytes) == (6.0, 3000.0)
    assert (entry.total_seconds, entry.total_bytes) == (20.0, 10_000.0)
    assert (entry.final.mean, entry.final.sd) == (0.8, 0.0)
    assert [run.reach.round for run in entry.seeds if run.reach is not None] == [2, 4]


def test_top5_and_final_differ() -> None:
    accuracy_r = np.array([0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.3])
    entry = summarise([make_run("fedis", 0, 1, accuracy_r=accuracy_r)], 0.7).samplers[0]
    assert entry.final.mean == 0.3
    assert entry.top5.mean == pytest.approx((0.5 + 0.6 + 0.7 + 0.8 + 0.3) / 5)
    assert entry.top5.sd is None


def test_speedup_over_pairs() -> None:
    speedup = _speedup(summarise(runs_of(fedavg=[6, 8, 10], fedis=[3, 5, 4]), 0.7), "fedis")
    # r = a/8 - b/4 = (0, -.25, .25): se = sqrt(.125 / 2 / 3), t_2 in closed form
    margin = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * math.sqrt(0.125 / 6)
    assert (speedup.ratio, speedup.num_pairs, speedup.num_left_out) == (2.0, 3, 0)
    assert speedup.low == pytest.approx(2 * math.exp(-margin))
    assert speedup.high == pytest.approx(2 * math.exp(margin))


def _speedup(summary: Summary, sampler: str) -> Any:
    reached = entry_of(summary, sampler).to_threshold
    assert reached is not None
    assert reached.speedup is not None
    return reached.speedup


def test_fairness_over_seeds_and_against_the_baseline() -> None:
    def fair(sampler: str, seed: int, worst_tenth: float) -> Run:
        return make_run(
            sampler, seed, 3, fairness=Fairness(mean=0.8, worst_tenth=worst_tenth, sd=0.1)
        )

    runs = [
        fair("uniform", 0, 0.3),
        fair("uniform", 1, 0.4),
        fair("fedis", 1, 0.6),
        fair("fedis", 0, 0.4),
    ]
    summary = summarise(
        [*runs, make_run("uniform", 2, 3, fairness=Fairness(mean=0.8, worst_tenth=0.9, sd=0.1))],
        0.7,
    )
    found = entry_of(summary, "fedis").fairness
    assert found is not None and found.gain is not None
    assert (found.mean.mean, found.sd.mean) == pytest.approx((0.8, 0.1))
    assert (found.worst_tenth.mean, found.worst_tenth.sd) == pytest.approx((0.5, math.sqrt(0.02)))
    margin = (
        math.tan(0.95 * math.pi / 2) * 0.05
    )  # differences 0.1 and 0.2; t_1 is a Cauchy quantile
    gain = found.gain
    assert (gain.value, gain.low, gain.high, gain.num_pairs) == pytest.approx(
        (0.15, 0.15 - margin, 0.15 + margin, 2)
    )
    base = entry_of(summary, "uniform").fairness
    assert (
        base is not None and base.gain is None and base.worst_tenth.mean == pytest.approx(1.6 / 3)
    )
    assert [
        run.fairness and run.fairness.worst_tenth for run in entry_of(summary, "fedis").seeds
    ] == [0.4, 0.6]
    mixed = summarise([*runs, make_run("fedis", 2, 3)], 0.7)  # an old record has none
    assert entry_of(mixed, "fedis").fairness is None


def test_costs_are_means_of_what_all_runs_recorded() -> None:
    split: dict[str, Any] = {
        "client_seconds_r": 1.5 * np.arange(1, 11),
        "bytes_up_r": 400.0 * np.arange(1, 11),
    }
    runs = [make_run("fedis", seed, 3, server_bytes=100 * (seed + 1), **split) for seed in range(2)]
    costs = entry_of(summarise(runs, 0.7), "fedis").costs
    assert costs is not None
    assert costs.model_dump() == {
        "client_seconds": 15.0,
        "server_seconds": 5.0,
        "bytes_down": 6000.0,
        "bytes_up": 4000.0,
        "asked": None,
        "server_bytes": 150.0,
    }
    assert (
        entry_of(summarise([*runs, make_run("fedis", 2, 3)], 0.7), "fedis").costs is None
    )  # an old record


def test_pairs_are_matched_by_seed_not_by_place() -> None:
    runs = [
        make_run("fedavg", 7, 8),
        make_run("fedavg", 1, 4),
        make_run("fedis", 1, 2),
        make_run("fedis", 5, 9),
    ]
    speedup = _speedup(summarise(runs, 0.7), "fedis")
    assert (speedup.ratio, speedup.num_pairs, speedup.low) == (2.0, 1, None)


def test_censored_seeds_are_counted_everywhere() -> None:
    summary = summarise(runs_of(fedavg=[6, None, 10], fedis=[3, 5, None]), 0.7)
    entry = entry_of(summary, "fedis")
    reached = entry.to_threshold
    speedup = _speedup(summary, "fedis")
    assert reached is not None and reached.rounds is not None
    assert (reached.num_reached, reached.num_never, reached.rounds.mean) == (2, 1, 4.0)
    assert (speedup.ratio, speedup.num_pairs, speedup.num_left_out, speedup.low) == (
        2.0,
        1,
        2,
        None,
    )
    assert (speedup.num_lost, speedup.num_won) == (1, 1)
    assert [run.reach is None for run in entry.seeds] == [False, False, True]


def test_threshold_never_reached() -> None:
    entry = entry_of(summarise(runs_of(fedavg=[None, None], fedis=[None, None]), 0.7), "fedis")
    reached = entry.to_threshold
    assert reached is not None
    assert (reached.num_reached, reached.num_never) == (0, 2)
    assert (reached.rounds, reached.seconds, reached.bytes, reached.speedup) == (
        None,
        None,
        None,
        None,
    )
    assert entry.final.mean == 0.2


def test_no_threshold() -> None:
    summary = summarise(runs_of(fedavg=[3], fedis=[2]), None)
    entry = entry_of(summary, "fedis")
    assert summary.threshold is None
    assert (entry.to_threshold, entry.seeds[0].reach) == (None, None)
    assert entry.top5.mean == 0.8


def test_gap_closed_by_area_over_shared_seeds() -> None:
    summary = summarise(
        [*runs_of(uniform=[8, 10], full=[2, 4], fedis=[5, 5]), make_run("fedis", 2, 1)], None
    )
    gaps = {entry.sampler: entry.gap_closed for entry in summary.samplers}
    # A run that steps to its value in round r of 10 has a mean accuracy of .8 - .06 (r - 1).
    found = fieller(np.array([3.0, 5.0]), np.array([6.0, 6.0]))
    assert gaps["fedis"] is not None
    assert gaps["fedis"].value == pytest.approx(4 / 6)
    assert (gaps["fedis"].low, gaps["fedis"].high) == pytest.approx(found[1:])
    assert gaps["fedis"].num_seeds == 2
    assert [gaps[name].value for name in ("uniform", "full")] == pytest.approx([0, 1])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "reaches",
    [
        {"uniform": [8], "fedis": [5]},
        {"full": [8], "fedis": [5]},
        {"uniform": [4], "full": [4], "fedis": [3]},
        {"uniform": [4], "full": [6], "fedis": [3]},
    ],
)
def test_no_gap_closed(reaches: dict[str, list[int | None]]) -> None:
    runs = [make_run(sampler, 0, reach) for sampler, (reach,) in reaches.items()]
    assert entry_of(summarise(runs, 0.7), "fedis").gap_closed is None


def test_gap_closed_of_losses_is_null_where_one_is_not_finite() -> None:
    runs = runs_of("loss", uniform=[8], full=[2], fedis=[5])
    assert [e.gap_closed is not None for e in summarise(runs, 0.5).samplers] == [True] * 3
    runs[2].loss_r[4] = np.inf
    assert [e.gap_closed is not None for e in summarise(runs, 0.5).samplers] == [True, True, False]


@pytest.mark.parametrize(
    ("samplers", "given", "found"),
    [
        (["fedavg", "uniform", "fedis"], None, "uniform"),
        (["fedavg", "fedis"], None, "fedavg"),
        (["fedis", "delta"], None, None),
        (["uniform@multinomial", "fedavg"], None, "uniform@multinomial"),
        (["uniform@a", "uniform@b", "fedavg"], None, "fedavg"),
        (["fedis@multinomial", "fedis"], "fedis", "fedis"),
        (["fedavg", "md"], "md", "md"),
    ],
)
def test_baseline(samplers: list[str], given: str | None, found: str | None) -> None:
    runs = [make_run(sampler, 0, 3) for sampler in samplers]
    summary = summarise(runs, 0.7, given)
    assert summary.baseline == found
    with_speedup = [
        e.sampler for e in summary.samplers if e.to_threshold and e.to_threshold.speedup
    ]
    assert with_speedup == ([] if found is None else [name for name in samplers if name != found])


def test_metric_loss() -> None:
    summary = summarise(runs_of("loss", fedavg=[6, 8], fedis=[2, 4]), 0.5)
    entry = entry_of(summary, "fedis")
    assert entry.to_threshold is not None and entry.to_threshold.rounds is not None
    assert (entry.final.mean, entry.to_threshold.rounds.mean) == (0.1, 3.0)
    assert entry.top5.mean == pytest.approx(0.1)
    assert _speedup(summary, "fedis").ratio == pytest.approx(7 / 3)


def test_a_diverged_seed_is_counted_and_keeps_the_mean_from_existing() -> None:
    loss_r = np.array([2.0, 0.1, *[np.inf] * 7, np.nan])
    runs = [make_run("fedis", 0, 3, "loss"), make_run("fedis", 1, 3, "loss", loss_r=loss_r)]
    entry = summarise(runs, 0.5).samplers[0]
    assert entry.num_diverged == 1
    assert (entry.final.mean, entry.final.sd, entry.top5.mean) == (None, None, None)
    assert entry.to_threshold is not None
    assert entry.to_threshold.num_reached == 2


def test_json_round_trip_without_nan(tmp_path: Path) -> None:
    runs = [
        *runs_of("loss", fedavg=[6, None], fedis=[2, 4]),
        make_run("md", 0, 3, "loss", loss_r=np.full(10, np.nan)),
    ]
    settings = {
        "lr": 0.1,
        "alpha": math.nan,
        "nested": {"rates": (1.0, math.inf)},
        "rounds": 10,
        "name": "x",
    }
    summary = summarise(runs, 0.5, settings=settings, environment={"cpu": "unknown"})
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(summary, path)
    assert read_summary(path) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["schema_version"] == 2
    assert data["settings"] == {
        "lr": 0.1,
        "alpha": None,
        "nested": {"rates": [1.0, None]},
        "rounds": 10,
        "name": "x",
    }
    assert data["samplers"][2]["final"] == {"mean": None, "sd": None}


def test_read_summary_explains(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match=r"cannot read .*none\.json"):
        read_summary(tmp_path / "none.json")
    path = tmp_path / "summary.json"
    write_summary(summarise(runs_of(fedavg=[3]), 0.7), path)
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(DeltaflError, match="not a summary of this version: schema_version"):
        read_summary(path)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no run"),
        ([make_run("a", 0, 1), make_run("a", 0, 2)], "two runs of sampler 'a' have seed 0"),
        ([make_run("a", 0, 1), make_run("b", 0, 1, "loss")], "different metrics or"),
        (
            [make_run("a", 0, 1), make_run("b", 0, 1, draws_m=np.ones(3, dtype=np.int64))],
            "numbers of clients",
        ),
    ],
)
def test_runs_that_cannot_be_compared(runs: list[Run], message: str) -> None:
    with pytest.raises(DeltaflError, match=message):
        summarise(runs, 0.7)


def test_missing_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"deltafl\[sim\]"):
        summarise(runs_of(fedavg=[3, 4], fedis=[2, 3]), 0.7)


def test_every_field_of_the_file_is_documented() -> None:
    folder = Path(__file__).parents[2] / "docs" / "reference"
    page = "".join(part.read_text(encoding="utf-8") for part in sorted(folder.glob("summary-*.md")))
    names = [
        name
        for name in Summary.model_json_schema(mode="serialization")["$defs"]
        if name not in ("JsonValue", "Judge")
    ]
    for name in ["Summary", *names]:
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        fields = getattr(models, name).model_fields
        assert all(
            f"| `{field}` |" in section and " ".join(info.description.split()) in section
            for field, info in fields.items()
        ), name
