"""The benchmark's page: gaps with intervals, the order of methods, what is folded, what is
missing.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_benchmark import MADE_UP, curve, made_up, part_of, record, shown, tiny, write_runs

from deltafl.analysis.runs import Fairness
from deltafl.errors import DeltaflError
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.simulation import (
    RunSettings,
    make_settings,
    write_record,
)
from reproduction.benchmark import judge
from reproduction.benchmark.judge import NO_GAP, Gap, measures, needs, rounds_at
from reproduction.benchmark.like import Row, shares
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.runs import Method, Result
from reproduction.benchmark.tables import num_params_of, server_memory
from reproduction.measures import rounds_to_threshold
from reproduction.records import PackedRuns
from reproduction.spec import SCALES, load_experiment
from reproduction.text import MOST_ROWS


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tuning_seeds": [2]}, r"tuning_seeds \[2\] are test seeds too"),
        ({"parts": {"a": {"tier": "none"}}}, "unknown tier 'none'"),
        ({"parts": {"a": {"tier": "all", "rates": [0.1, 0.1]}}}, "count as one"),
        ({"parts": {"a": {"tier": "all", "methods": ["innovatoin"]}}}, "did you mean 'innovation'"),
        ({"tuning_validation": 0}, "tuning_validation"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        parts_of(tiny(**changes), "smoke")


@pytest.mark.parametrize("scale", SCALES)
def test_the_real_file(scale: str) -> None:
    experiment = load_experiment("benchmark")
    for part in parts_of(experiment, scale):
        recommended = part.recommended or experiment.view.recommended or ""
        assert is_unbiased(recommended) and needs(recommended) != "known"
        assert {"full", "uniform", recommended} <= set(part.methods)
        assert part.tier != "every" or set(SAMPLERS) <= set(part.methods) or scale == "smoke"
        assert (part.common.clients or 0) / (part.common.sample or 1) <= 20
        assert part.threshold
        assert all(
            part.test_job(label, 0.1, 0).settings.rounds == part.horizon for label in part.methods
        )
        assert scale == "smoke" or part.seeds >= (
            20 if part.common.task in ("digits", "mnist") else 10
        )
        assert scale != "smoke" or part.horizon <= 20


def mean_of_curve(reached: int) -> float:
    """The mean over 40 rounds of ``curve``: 0, 0.01, ... before a round, 0.6 from it on."""
    return (
        (sum(0.4 * i / 40 for i in range(reached - 1)) + 0.6 * (41 - reached)) / 40
        if reached < 41
        else 0.195
    )


@pytest.mark.drawn
def test_the_page_judges_the_target_by_area(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    page = shown(tmp_path, made_up())
    uniform, ours, full = (
        np.mean([mean_of_curve(at) for at in MADE_UP[label]])
        for label in ("uniform", "delta-centred", "full")
    )
    gap = (ours - uniform) / (full - uniform)
    assert gap > 0.85
    part = {"tier": "all", "title": "digits", "remark": "Tuned anew."}
    with_remarks = made_up().model_copy(update={"parts": {"digits": part}})
    with_remarks = with_remarks.model_copy(
        update={"view": with_remarks.view.model_copy(update={"remark": "Chosen."})}
    )
    other = shown(tmp_path, with_remarks)
    assert "; ahead of it: none of 2 methods of others. Tuned anew." in other
    assert "20 of 20 test runs are done.\n\nChosen.\n\n- digits" in other
    assert (
        "**The target is reached.** The recommended method is `delta-centred`. 20 of 20 test runs "
        "are done."
    ) in page
    assert f"- digits: reached, `delta-centred` closes {gap:.2f} [" in page
    assert "; ahead of it: none of 2 methods of others." in page
    rows = [
        line.split(" | ")
        for line in page.split("## digits")[1].split("<details>")[0].splitlines()
        if "`" in line
    ]
    assert [row[0].strip("| ") for row in rows] == [
        "`full`",
        "`delta-centred`",
        "`pracdelta`",
        "`uniform`",
    ]
    assert rows[0][1] == "1"
    assert float(rows[0][2].partition(" ")[0]) == pytest.approx(100 * full, abs=0.011)
    assert rows[3][1] == "0"
    assert rows[1][4] == "12.2 ± 0.8"  # the mean of five: four rounds after the first
    assert rows[1][5:] == ["0.2", "5 |"]
    assert "| `delta-centred` | 8.2 ± 0.8 |" in page.split("## Appendix")[1]
    assert str(tmp_path) not in page
    assert page == shown(tmp_path, made_up())
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        cells = {row["method"]: row for row in csv.DictReader(file)}
    assert float(cells["delta-centred"]["gap_mean_accuracy"]) == pytest.approx(gap, rel=1e-5)
    assert float(cells["uniform"]["gap_mean_accuracy"]) == 0
    assert float(cells["full"]["gap_mean_accuracy"]) == 1
    assert float(cells["delta-centred"]["gap_rounds"]) == pytest.approx(
        (31.8 - 8.2) / (31.8 - 5.8), rel=1e-5
    )
    assert float(cells["uniform"]["mb_to_threshold"]) == pytest.approx(34.8)  # a megabyte a round
    assert float(cells["uniform"]["cpu_seconds_to_threshold"]) == pytest.approx(
        34.8 / 2
    )  # half a second a round
    for name in ("gap.png", "curves.png", "tuning.csv", "verdict.json"):
        assert (tmp_path / name).stat().st_size > 0


def test_tables_show_twelve_rows_and_fold_the_rest(tmp_path: Path) -> None:
    """The methods of the pictures, and the best of the others."""
    others = [label for label in SAMPLERS if label not in MADE_UP][:12]
    table = MADE_UP | {label: [10 + place] * 5 for place, label in enumerate(others)}
    tiers = {"all": {"methods": list(table), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    write_runs(tmp_path, made_up(tiers=tiers), table)
    head, _, rest = (
        shown(tmp_path, made_up(tiers=tiers)).split("## digits")[1].partition("<details>")
    )
    rows = [line.split("`")[1] for line in head.splitlines() if "`" in line]
    assert len(rows) == MOST_ROWS
    assert set(rows) == {*MADE_UP, *others[: MOST_ROWS - 4]}
    assert rest.startswith("<summary>4 more</summary>")


@pytest.mark.parametrize(
    ("changes", "gap"), [({"uniform": [30, 34, 28, 32, 99]}, ""), ({}, "0.90")]
)
def test_runs_that_never_reach_are_marked_and_leave_no_gap_in_rounds(
    tmp_path: Path, changes: dict[str, list[int]], gap: str
) -> None:
    """The gap by area is there in any case."""
    write_runs(tmp_path, made_up(), MADE_UP | changes)
    page = shown(tmp_path, made_up())
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        cells = {row["method"]: row for row in csv.DictReader(file)}
    assert cells["delta-centred"]["gap_rounds"][:3] == gap[:3]
    assert float(cells["delta-centred"]["gap_mean_accuracy"]) > 0.8
    assert ("(1 never)" in page) == (cells["uniform"]["never"] == "1") == bool(changes)


def test_mean_and_worst_tenth_of_the_clients_are_shown_where_all_runs_of_a_method_have_them(
    tmp_path: Path,
) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    assert "worst tenth" not in shown(tmp_path, made_up())
    (part,) = parts_of(made_up(), "smoke")
    store = PackedRuns(tmp_path)
    for label, seeds in (("delta-centred", range(5)), ("uniform", range(4))):
        for seed in seeds:
            job = part.test_job(label, 0.2, seed)
            record = store.get(job)
            assert record is not None
            fairness = Fairness(mean=0.8 + 0.01 * seed, worst_tenth=0.5 + 0.02 * seed, sd=0.1)
            write_record(record.model_copy(update={"fairness": fairness}), store.path(job))
    page = shown(tmp_path, made_up())
    rows = [
        line.split(" | ")
        for line in page.split("## digits")[1].split("<details>")[0].splitlines()
        if "|" in line
    ]
    place = rows[0].index("worst tenth, %")
    cells = {row[0].strip("| `"): row[place - 1 : place + 1] for row in rows[2:]}
    assert cells.pop("delta-centred") == ["82.0 ± 1.6", "54.0 ± 3.2"]
    assert set(map(tuple, cells.values())) == {("–", "–")}
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        found = {row["method"]: row for row in csv.DictReader(file)}
    assert (
        float(found["delta-centred"]["worst_tenth"]) == pytest.approx(0.54)
        and found["uniform"]["worst_tenth"] == ""
    )


@pytest.mark.parametrize(
    ("gained", "gap", "found"),
    [
        ([1.0, 2.0], [3.0, -3.5], NO_GAP),
        ([1.0, 9.0, 2.0], [9.0, -8.0, 1.0], NO_GAP),
        ([3.0], [4.0], Gap(0.75, None, None, 1)),
    ],
)
def test_without_a_gap_there_is_no_number(
    gained: list[float], gap: list[float], found: Gap, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of()
    values = [np.zeros(len(gap)), np.array(gained), np.array(gap)]
    monkeypatch.setattr(judge, "paired", lambda *_: values)
    assert judge.gap_of(Result(part, ()), "delta-centred", measures(part)[0]) == found


def test_a_diverged_run_never_reaches_and_keeps_its_last_accuracy() -> None:
    part = part_of()
    job = part.test_job("uniform", 0.1, 0)
    run = record(job, [0.1, 0.6, 0.4, 0.5]).run()
    assert [rounds_to_threshold(run, at) for at in (0.5, 0.7)] == [2, None]
    assert rounds_at(0.7).value(run) == 4
    assert measures(part)[0].value(run) == pytest.approx(0.4)
    run = record(job, [0.6, 0.1], diverged=2).run()
    assert rounds_to_threshold(run, 0.5) is None
    assert rounds_at(0.5).value(run) == 4
    assert measures(part)[0].value(run) == pytest.approx((0.6 + 3 * 0.1) / 4)


def test_everything_that_is_sent_counts(tmp_path: Path) -> None:
    """A first round of a hundred megabytes, in which everybody works, is in the bytes to the
    threshold.
    """
    write_runs(tmp_path, made_up(), MADE_UP)
    part = parts_of(made_up(), "smoke")[0]
    for seed, at in enumerate(MADE_UP["delta-centred"]):
        job = part.test_job("delta-centred", 0.2, seed)
        found = record(job, curve(40, at, 40))
        write_record(
            found.model_copy(update={"bytes": [1e8 + (b or 0.0) for b in found.bytes]}),
            PackedRuns(tmp_path).path(job),
        )
    shown(tmp_path, made_up())
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        cells = {row["method"]: row for row in csv.DictReader(file)}
    assert float(cells["delta-centred"]["mb_to_threshold"]) == pytest.approx(112.2)


def test_server_memory_counts_models_and_numbers() -> None:
    def memory(label: str) -> tuple[int, float, float]:
        return server_memory(make_settings(RunSettings, {"task": "digits", "sampler": label}), 100)

    assert memory("uniform")[0] == memory("pracdelta")[0] == 1
    assert memory("delta-centred")[0] == 2  # the model and the common control variate
    assert memory("fedvarp")[0] == 102  # the model, one update a client, their weighted sum
    assert memory("innovation")[0] == 103  # and the common value
    assert memory("balanced")[0] == 1 + 11  # the model, and one for each label and the mean
    assert memory("clustered-sampling-2")[1] - memory("uniform")[1] == pytest.approx(
        66, abs=2
    )  # a sketch of 64
    assert num_params_of("digits") == 64 * 10 + 10
    assert (
        memory("balanced@@twin")[0] == 1 + 101 + 101
    )  # the model, simulated updates, a memory of residuals
    _, numbers, megabytes = memory("uniform")
    assert megabytes == pytest.approx((4 * 650 + 8 * 100 * numbers) / 1e6)
    table = csv.DictReader(
        (Path(__file__).parents[2] / "results/benchmark/table.csv").read_text().splitlines()
    )
    published = {
        row["method"]: float(row["numbers_a_client"])
        for row in table
        if row["part"] == "digits" and "+" not in row["method"]
    }
    assert {label: memory(label)[1] for label in published} == pytest.approx(published)


def test_like_beside_like_gives_every_method_the_same() -> None:
    """In each group of each task of the real file, but for what stands there instead."""
    for part in parts_of(load_experiment("benchmark"), "cpu"):
        like = part.like
        if like is None:
            continue
        assert set(like.labels) <= set(part.methods)
        assert set(like.words) == set(like.groups)
        for group, settings in like.groups.items():
            for method in like.methods:
                label = like.label(method, group)
                so_far = [*like.groups][: [*like.groups].index(group) + 1]
                if not any(method in like.instead.get(name, {}) for name in so_far):
                    assert label == method + settings
                given = parse_label(label).settings
                missing = {*parse_label(f"uniform{settings}").settings} - {*given}
                # A census and full participation have a full first round anyway, and an average
                # brings the latter nothing.
                spared = {
                    "census": {"first_round"},
                    "everyone": {"first_round", "average"},
                }
                assert missing <= spared.get(needs(label), set())


def test_shares_of_a_group_and_of_its_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: uniform at 0, full at 10; in the group uniform at 4 and full at 12, a method at 8."""
    level = {"uniform": 0.0, "full": 10.0, "uniform+a": 4.0, "full+a": 12.0, "census+a": 8.0}

    def sides(result: Result, labels: tuple[str, ...], measure: Any) -> list[Any]:
        return [np.array([level[label], level[label]]) for label in labels]

    monkeypatch.setattr(judge, "paired", sides)
    monkeypatch.setattr(judge, "cut_short", lambda *_: 0)
    row = Row("a", Method("census+a", None, {}), "uniform+a", "full+a")  # type: ignore[arg-type]
    assert [gap.value for gap in shares(Result(part_of(), ()), row)] == pytest.approx(
        [0.8, 0.5, 8 / 12]
    )
