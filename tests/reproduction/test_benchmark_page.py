"""The benchmark's page: gaps with intervals, the order of methods, marks of bounds, what is missing."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_benchmark import MADE_UP, curve, made_up, part_of, record, shown, tiny, write_runs
from scipy import stats

from deltafl.errors import DeltaflError
from deltafl.samplers import SAMPLERS
from deltafl.simulation import RunSettings, make_settings, rounds_to_threshold
from reproduction.benchmark.judge import closed, holm, last_accuracy, measures, no_gap, p_value, rounds_at
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.tables import num_params_of, server_memory
from reproduction.measures import compare
from reproduction.spec import SCALES, load_experiment


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tuning_seeds": [2]}, r"tuning_seeds \[2\] are test seeds too"),
        ({"parts": {"a": {"tier": "none"}}}, "unknown tier 'none'"),
        ({"parts": {"a": {"tier": "all", "rates": [0.1, 0.3]}}}, "each twice the one before"),
        ({"parts": {"a": {"tier": "all", "methods": ["innovatoin"]}}}, "did you mean 'innovation'"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        parts_of(tiny(**changes), "smoke")


@pytest.mark.parametrize("scale", SCALES)
def test_the_real_file(scale: str) -> None:
    for part in parts_of(load_experiment("benchmark"), scale):
        assert {"full", "uniform"} <= set(part.methods)
        assert part.tier == "core" or set(SAMPLERS) <= set(part.methods) or scale == "smoke"
        assert (part.common.clients or 0) / (part.common.sample or 1) <= 20
        assert part.threshold
        assert scale != "smoke" or (part.common.rounds or 0) <= 20


def test_the_page_judges_the_target_from_intervals(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    page = shown(tmp_path, made_up())
    gained, gap = np.mean([30, 34, 28, 32, 35]) - np.mean([8, 9, 7, 9, 8]), np.mean([30, 34, 28, 32, 35]) - 5.8
    assert "**The target is reached.** 20 of 20 test runs are done." in page
    assert f"G >= 0.7 is reached: `delta-centred` {gained / gap:.2f} [" in page
    assert "no rival is ahead (2 behind, 0 not told apart" in page
    rows = [line.split(" | ")[0] for line in page.split("## digits")[1].split("| method | MB to")[0].splitlines()]
    order = [row.strip("| ") for row in rows if "`" in row]
    assert order == ["`full` (everybody)", "`delta-centred`", "`pracdelta`", "`uniform`"]
    assert "| `delta-centred` | 0.2 |" in page
    assert "No chosen rate is at an edge" in page
    assert str(tmp_path) not in page
    assert page == shown(tmp_path, made_up())
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        cells = {row["method"]: row for row in csv.DictReader(file)}
    assert float(cells["delta-centred"]["gap_rounds"]) == pytest.approx(gained / gap, rel=1e-5)
    assert float(cells["uniform"]["gap_rounds"]) == 0
    assert float(cells["full"]["gap_rounds"]) == 1
    assert float(cells["pracdelta"]["rounds_to_uniform"]) == pytest.approx(np.mean(MADE_UP["uniform"]) / 25.6, rel=1e-5)
    assert float(cells["uniform"]["mb_to_threshold"]) == pytest.approx(31.8)
    assert float(cells["uniform"]["cpu_seconds_to_threshold"]) == pytest.approx(31.8 / 2)  # half a second a round
    for name in ("gap.png", "curves.png", "tuning.csv", "verdict.json"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_rival_ahead_misses_the_target(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP | {"pracdelta": [6, 7, 5, 7, 6]})
    page = shown(tmp_path, made_up())
    assert "**The target is missed.**" in page
    assert "ahead of it: pracdelta (×1.32 fewer by its own interval; corrected for 2 rivals p = " in page


def test_servers_that_know_the_labels_are_judged_by_themselves(tmp_path: Path) -> None:
    """Without them `delta-centred` against `pracdelta`; with them `balanced`, which `fed-cbs` is behind of, too."""
    table = MADE_UP | {
        "delta-centred": [29, 31, 25, 30, 33],
        "balanced": [6, 7, 6, 8, 7],
        "fed-cbs": [9, 11, 8, 12, 10],
    }
    tiers = {"all": {"methods": list(table), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    write_runs(tmp_path, made_up(tiers=tiers), table)
    page = shown(tmp_path, made_up(tiers=tiers))
    both = "is reached where our method uses every client's labels, and is missed where nothing but sizes is known"
    assert f"**The target {both}.**" in page
    plain, told = (line for line in page.splitlines() if line.startswith("- digits") and "G >= 0.7" in line)
    assert plain.startswith("- digits: G >= 0.7 is **missed**: `delta-centred` 0.")
    assert "ahead of it: pracdelta" in plain
    assert told.startswith("- digits, labels known beforehand: G >= 0.7 is reached: `balanced` 0.")
    assert "no rival is ahead (3 behind, 0 not told apart" in told
    assert "| `balanced` | known |" in page
    assert "| `fed-cbs` (biased) | known |" in page


def test_p_values_are_those_of_the_paired_t_and_hold_for_all_rivals_together() -> None:
    part = part_of(rounds=40)
    runs = [
        {seed: record(part.test_job("uniform", 0.1, seed), curve(40, at, 40)).run() for seed, at in enumerate(reached)}
        for reached in ([6, 9, 5, 8, 6], [9, 12, 9, 9, 7])
    ]
    statement = compare("here", measures(part)[0], ("a", runs[0]), ("b", runs[1]))
    one_s, two_s = np.array([6, 9, 5, 8, 6]), np.array([9, 12, 9, 9, 7])
    influence_s = two_s / two_s.mean() - one_s / one_s.mean() + math.log(two_s.mean() / one_s.mean())
    assert p_value(statement) == pytest.approx(stats.ttest_1samp(influence_s, 0).pvalue)
    assert p_value(statement._replace(low=None)) == 1.0
    assert holm([0.01, 0.5, 0.02, 0.03]) == pytest.approx([0.04, 0.5, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delta-centred": [8, 9, 7, 9, 99]}, "no rival is ahead (0 behind, 2 not told apart"),  # ours: behind is open
        ({"delta-centred": [32, 33, 31, 34, 33], "pracdelta": [9, 8, 9, 9, 99]}, "no rival is ahead (0 behind, 2 not"),
        ({"delta-centred": [32, 33, 31, 34, 99], "pracdelta": [9, 8, 9, 9, 8]}, "ahead of it: pracdelta"),
    ],
)
def test_who_never_reaches_is_ahead_of_none(tmp_path: Path, changes: dict[str, list[int]], said: str) -> None:
    """At a horizon of 40 rounds a run that never reaches counts as 40: less than it needs, in its method's favour."""
    write_runs(tmp_path, made_up(), MADE_UP | changes)
    assert said in shown(tmp_path, made_up())


@pytest.mark.parametrize(("last", "marked"), [(35, ["≤ ×2.18", "×1.24"]), (99, ["≥≤ ×2.25", "≥ ×1.28"])])
def test_runs_that_never_reach_are_marked(tmp_path: Path, last: int, marked: list[str]) -> None:
    write_runs(tmp_path, made_up(), MADE_UP | {"delta-centred": [8, 9, 7, 9, 99], "uniform": [30, 34, 28, 32, last]})
    page = shown(tmp_path, made_up())
    rows = [line.split(" | ") for line in page.partition("| method | MB to")[0].splitlines()]
    found = {row[0]: row for row in rows if len(row) > 3}
    assert [found[f"| `{name}`"][3].partition(" [")[0] for name in ("delta-centred", "pracdelta")] == marked
    assert found["| `delta-centred`"][2] == "≥ 14.6 ± 14.2 (1 of 5 never)"
    assert "is reached: `delta-centred`" not in page
    assert "| `delta-centred` | ≥ 14.6 | 1 |" in page  # 8 + 9 + 7 + 9 + all 40 rounds, a megabyte each
    assert "| ≥ 7.3 | 0.5 |" in page  # and half a second


def test_without_a_gap_there_is_no_number() -> None:
    full_s = np.array([20.0, 30.0, 25.0])
    assert "needs only 4 % more rounds" in no_gap(full_s + np.array([1, 2, 0]), full_s)
    assert "an interval that contains 0" in no_gap(full_s + np.array([30, -25, 10]), full_s)
    assert no_gap(full_s + np.array([10, 12, 11]), full_s) == ""
    assert closed(np.array([1.0, 2.0]), np.array([3.0, -3.5]))[0] is None
    assert closed(np.array([1.0, 9.0, 2.0]), np.array([9.0, -8.0, 1.0]))[0] is None
    assert closed(np.array([3.0]), np.array([4.0])) == (0.75, None, None)


def test_a_diverged_run_never_reaches_and_keeps_its_last_accuracy() -> None:
    job = part_of().test_job("uniform", 0.1, 0)
    run = record(job, [0.1, 0.6, 0.4, 0.5]).run()
    assert [rounds_to_threshold(run, at) for at in (0.5, 0.7)] == [2, None]
    assert rounds_at(0.7).value(run) == 4
    assert last_accuracy(run) == pytest.approx(0.4)
    run = record(job, [0.6, 0.1], diverged=2).run()
    assert rounds_to_threshold(run, 0.5) is None
    assert rounds_at(0.5).value(run) == 4
    assert last_accuracy(run) == 0.1


def test_server_memory_counts_models_and_numbers() -> None:
    def memory(label: str) -> tuple[int, float, float]:
        return server_memory(make_settings(RunSettings, {"task": "digits", "sampler": label}), 100)

    assert memory("uniform")[0] == memory("pracdelta")[0] == 1
    assert memory("delta-centred")[0] == 2  # the model and the common control variate
    assert memory("fedvarp")[0] == 102  # the model, one update a client, their weighted sum
    assert memory("innovation")[0] == 103  # and the common value
    assert memory("balanced")[0] == 1 + 11  # the model, and one for each label and the mean
    assert memory("clustered-sampling-2")[1] - memory("uniform")[1] == pytest.approx(66, abs=2)  # a sketch of 64
    assert num_params_of("digits") == 64 * 10 + 10
    _, numbers, megabytes = memory("uniform")
    assert megabytes == pytest.approx((4 * 650 + 8 * 100 * numbers) / 1e6)
    table = csv.DictReader((Path(__file__).parents[2] / "results/benchmark/table.csv").read_text().splitlines())
    published = {row["method"]: float(row["numbers_a_client"]) for row in table if row["part"] == "digits"}
    assert {label: memory(label)[1] for label in published} == pytest.approx(published)
