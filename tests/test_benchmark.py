"""The benchmark: gaps with intervals, the search for rates, what is run and skipped, what the page says of it."""

import csv
import gzip
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from deltafl.errors import DeltaflError
from deltafl.samplers import SAMPLERS, is_unbiased
from deltafl.simulation.record import RunStore
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.sweep import Job, Progress, run_job
from made_up_benchmark import MADE_UP, curve, made_up, part_of, record, shown, tiny, write_runs
from reproduction.benchmark import run as benchmark
from reproduction.benchmark.gap import Gap, closed, room
from reproduction.benchmark.judge import is_ours, measures
from reproduction.benchmark.numbers import bounded_rounds, last_accuracy, mean_accuracy, rounds_to_threshold
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.results import Result, Store
from reproduction.benchmark.server_memory import model_size, server_memory
from reproduction.benchmark.target import Judgement, holm, p_value, sum_up
from reproduction.pages.measures import compare
from reproduction.request import Request
from reproduction.spec import SCALES, Experiment, load_experiment

# Gaps closed


def by_definition(gained_s: np.ndarray[Any, Any], gap_s: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Where a paired t test of mean(a - theta b) = 0 begins and ends to be refuted at 5 %."""

    def excess(theta: float) -> float:
        return float(stats.ttest_1samp(gained_s - theta * gap_s, 0).pvalue) - 0.05

    middle = float(gained_s.mean() / gap_s.mean())
    return float(brentq(excess, middle - 5, middle)), float(brentq(excess, middle, middle + 5))


def test_the_gap_closed_is_a_ratio_of_means_with_fiellers_interval() -> None:
    gained_s, gap_s = np.array([4.0, 5.0, 9.0, 2.0]), np.array([8.0, 9.0, 11.0, 7.0])
    gap = closed(gained_s, gap_s)
    assert gap.value == pytest.approx(20 / 35)
    assert gap.low is not None
    assert gap.high is not None
    assert (gap.low, gap.high) == pytest.approx(by_definition(gained_s, gap_s), abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(-20, 20), st.floats(1, 20)), min_size=3, max_size=8),
    st.floats(0.1, 10),
)
def test_gaps_do_not_depend_on_the_unit_and_lie_in_their_interval(
    pairs: list[tuple[float, float]], unit: float
) -> None:
    gained_s, gap_s = np.array(pairs).T
    gap, other = closed(gained_s, gap_s), closed(unit * gained_s, unit * gap_s)
    if gap.value is None or gap.low is None or gap.high is None:
        return
    width = gap.high - gap.low
    assert gap.low - 1e-6 * (1 + width) <= gap.value <= gap.high + 1e-6 * (1 + width)
    if other.value is not None:  # rounding decides where the denominator's interval just touches 0
        assert other.value == pytest.approx(gap.value, rel=1e-9, abs=1e-9)


def test_fiellers_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits, trials = 0, 2000
    for _ in range(trials):
        common = rng.normal(0, 3, 10)
        gap = closed(7 + common + rng.normal(0, 2, 10), 10 + common + rng.normal(0, 2, 10))
        hits += gap.low is not None and gap.high is not None and gap.low <= 0.7 <= gap.high
    assert abs(hits - 0.95 * trials) < 4.5 * math.sqrt(0.95 * 0.05 * trials)


def test_without_a_gap_there_is_no_number() -> None:
    full_s = np.array([20.0, 30.0, 25.0])
    assert not room(full_s + np.array([1, 2, 0]), full_s).exists  # 4 % more rounds
    assert not room(full_s + np.array([30, -25, 10]), full_s).exists  # an interval that contains 0
    assert room(full_s + np.array([10, 12, 11]), full_s).exists
    assert room(full_s + np.array([10, 12, 11]), full_s).relative == pytest.approx(11 / 25)
    assert closed(np.array([1.0, 2.0]), np.array([3.0, -3.5])).value is None
    assert closed(np.array([1.0, 9.0, 2.0]), np.array([9.0, -8.0, 1.0])).value is None
    assert closed(np.empty(0), np.empty(0)).seeds == 0
    one = closed(np.array([3.0]), np.array([4.0]))
    assert (one.value, one.low, one.high) == (0.75, None, None)


# One number of one run


def test_numbers_of_a_run() -> None:
    job = part_of().test_job("uniform", 0.1, 0)
    run = record(job, [0.1, 0.6, 0.4, 0.5])
    assert rounds_to_threshold(run, 0.5) == 2
    assert rounds_to_threshold(run, 0.7) is None
    assert bounded_rounds(run, 0.7) == 4
    assert mean_accuracy(run, 4) == pytest.approx(0.4)
    assert mean_accuracy(run, 2) == pytest.approx(0.35)
    assert last_accuracy(run) == pytest.approx(0.4)


def test_a_diverged_run_never_reaches_and_keeps_its_last_accuracy() -> None:
    job = part_of().test_job("uniform", 0.1, 0)
    run = record(job, [0.6, 0.1], diverged=2)
    assert rounds_to_threshold(run, 0.5) is None
    assert bounded_rounds(run, 0.5) == 4
    assert mean_accuracy(run, 4) == pytest.approx((0.6 + 3 * 0.1) / 4)
    assert last_accuracy(run) == 0.1


def test_rounds_that_were_not_evaluated_count_as_the_evaluation_before() -> None:
    run = record(part_of().test_job("uniform", 0.1, 0), [0.2, 0.4], every=2)  # after rounds 2 and 4
    assert mean_accuracy(run, 4) == pytest.approx((0.2 + 0.2 + 0.2 + 0.4) / 4)


# The file


def test_later_settings_win() -> None:
    experiment = tiny({"a": {"tier": "all", "rounds": 5}, "b": {"tier": "all", "rounds_of": {"full": 2}}})
    a, b = parts_of(experiment, "smoke")
    assert (a.rounds("full"), a.horizon, b.rounds("full"), b.rounds("uniform"), b.horizon) == (5, 5, 2, 4, 2)
    assert b.test_job("full", 0.1, 0).settings.rounds == 2
    a, b = parts_of(experiment, "cpu", seeds=7)
    assert (a.rounds("uniform"), a.seeds) == (6, 7)
    assert a.title == "a"


def test_only_the_first_seed_has_probes_and_full_participation_has_none() -> None:
    part = part_of(probe_every=2)
    assert part.test_job("uniform", 0.1, 0).settings.probe_every == 2
    assert part.test_job("uniform", 0.1, 1).settings.probe_every is None
    assert part.test_job("full", 0.1, 0).settings.probe_every is None
    assert part.tuning_job("uniform", 0.1, 0).settings.probe_every is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tuning_seeds": [2]}, r"tuning_seeds \[2\] are test seeds too"),
        ({"local_lr": 0.1}, "local_lr is no setting of the benchmark"),
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
    experiment = load_experiment("benchmark")
    for part in parts_of(experiment, scale):
        assert {"full", "uniform"} <= set(part.methods)
        assert part.common.threshold
        m, n = part.common.clients or 0, part.common.sample or 1
        assert m / n <= 20
        assert not set(part.tuning_seeds) & set(range(part.seeds))
        if scale == "smoke":
            assert part.name == "digits"
            assert (part.common.rounds or 0) <= 20
    if scale == "cpu":
        every = [part for part in parts_of(experiment, scale) if part.tier == "every"]
        core = [part for part in parts_of(experiment, scale) if part.tier == "core"]
        assert len(every) == 5
        assert len(core) == 3
        assert all(set(SAMPLERS) <= set(part.methods) and part.seeds >= 10 for part in every)
        assert all(set(experiment.view.core) == set(part.methods) and part.seeds >= 5 for part in core)


# What the server keeps


def test_server_memory_counts_models_and_numbers() -> None:
    def memory(label: str) -> tuple[int, float]:
        found = server_memory(make_settings(RunSettings, {"task": "digits", "sampler": label}), 100, 650)
        return found.models, found.numbers

    assert memory("uniform")[0] == memory("pracdelta")[0] == 1
    assert memory("delta-centred")[0] == 2  # the model and the common control
    assert memory("fedvarp")[0] == 102  # the model, one update a client, their weighted sum
    assert memory("innovation")[0] == 103  # and the common guess
    assert memory("balanced")[0] == 1 + 11  # the model, and one for each label and the mean
    assert memory("clustered-sampling-2")[1] - memory("uniform")[1] == pytest.approx(66, abs=2)  # a sketch of 64
    assert model_size("digits") == 64 * 10 + 10
    bytes_of = server_memory(make_settings(RunSettings, {"task": "digits", "sampler": "uniform"}), 100, 650)
    assert bytes_of.megabytes == pytest.approx((4 * 650 + 8 * 100 * bytes_of.numbers) / 1e6)


def test_labels_know_whether_they_are_unbiased() -> None:
    assert is_unbiased("uniform")
    assert is_unbiased("innovation@pivotal")
    assert not is_unbiased("fedavg")
    assert not is_unbiased("pracdelta@successive")
    assert not is_unbiased("oort")
    assert is_ours("innovation")
    assert not is_ours("fedvarp")


# Pages of made-up runs


def test_the_page_judges_the_target_from_intervals(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    page = shown(tmp_path, made_up())
    gained, gap = np.mean([30, 34, 28, 32, 35]) - np.mean([8, 9, 7, 9, 8]), np.mean([30, 34, 28, 32, 35]) - 5.8
    assert "**The target is reached.** 20 of 20 test runs are done." in page
    assert f"G >= 0.7 is reached: `delta-centred` {gained / gap:.2f} [" in page
    assert "no rival is ahead (2 behind, 0 not told apart" in page
    rows = [line.split(" | ")[0] for line in page.split("## digits")[1].split("![")[0].splitlines()]
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
    for name in ("gap.png", "curves-digits.png", "methods-digits.png", "runs.csv", "tuning.csv", "verdict.json"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_rival_ahead_misses_the_target(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP | {"pracdelta": [6, 7, 5, 7, 6]})
    page = shown(tmp_path, made_up())
    assert "**The target is missed.**" in page
    assert "ahead of it: pracdelta (×1.32 fewer by its own interval; corrected for 2 rivals p = " in page


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (["reached", "reached"], "is reached"),
        (["missed", "missed"], "is missed"),
        (["open", "open"], "is not decided"),
        (["missed", "open"], "is missed on 1 and open on 1 of 2 tasks"),
        (["reached", "missed"], "is reached on 1 and missed on 1 of 2 tasks"),
        (["reached", "open"], "is reached on 1 and open on 1 of 2 tasks"),
        (["reached", "missed", "open", "open"], "is reached on 1, missed on 1 and open on 2 of 4 tasks"),
        (["no gap"], "is not decided"),
    ],
)
def test_the_headline_says_no_more_than_the_parts(statuses: list[Any], said: str) -> None:
    result = Result(part_of(), (), 100, 650)
    parts = [
        Judgement(result, False, 10.0, "innovation", status, Gap(0.5, 0.4, 0.6, 5), None, (), (), ())
        for status in statuses
    ]
    assert sum_up(parts) == said


def test_who_is_level_on_the_tuning_seeds_is_said(tmp_path: Path) -> None:
    """Both of ours need 8 rounds there, with curves that are alike: the first of the two is judged."""
    table = MADE_UP | {"spread": [8, 30, 31, 29, 30]}
    tiers = {"all": {"methods": list(table), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    write_runs(tmp_path, made_up(tiers=tiers), table)
    page = shown(tmp_path, made_up(tiers=tiers))
    assert "; level with it on the tuning seeds: `spread` 0.24 [" in page
    write_runs(tmp_path / "other", made_up(tiers=tiers), table | {"spread": [9, 30, 31, 29, 30]})
    assert "level with it" not in shown(tmp_path / "other", made_up(tiers=tiers))


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
        {seed: record(part.test_job("uniform", 0.1, seed), curve(40, at, 40)) for seed, at in enumerate(reached)}
        for reached in ([6, 9, 5, 8, 6], [9, 12, 9, 9, 7])
    ]
    statement = compare("here", measures(part)[0], ("a", runs[0]), ("b", runs[1]))
    one_s, two_s = np.array([6, 9, 5, 8, 6]), np.array([9, 12, 9, 9, 7])
    influence_s = two_s / two_s.mean() - one_s / one_s.mean() + math.log(two_s.mean() / one_s.mean())
    assert p_value(statement) == pytest.approx(stats.ttest_1samp(influence_s, 0).pvalue)
    assert p_value(statement._replace(low=None)) == 1.0
    assert holm([0.01, 0.5, 0.02, 0.03]) == pytest.approx([0.04, 0.5, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_runs_that_never_reach_are_marked_and_decide_nothing_in_their_favour(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP | {"delta-centred": [8, 9, 7, 9, 99]})
    page = shown(tmp_path, made_up())
    assert "≥ 14.6 ± 14.2 (1 of 5 never)" in page
    assert "is reached: `delta-centred`" not in page
    assert "| `delta-centred` | ≥ 14.6 | 1 |" in page  # 8 + 9 + 7 + 9 + all 40 rounds, a megabyte each
    assert "| ≥ 7.3 | 0.5 |" in page  # and half a second


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delta-centred": [8, 9, 7, 9, 99]}, "no rival is ahead (0 behind, 2 not told apart"),  # ours: behind is open
        ({"pracdelta": [24, 29, 99, 27, 28]}, "no rival is ahead (2 behind, 0 not told apart"),
        ({"delta-centred": [32, 33, 31, 34, 33], "pracdelta": [9, 8, 9, 9, 8]}, "ahead of it: pracdelta"),
        ({"delta-centred": [32, 33, 31, 34, 33], "pracdelta": [9, 8, 9, 9, 99]}, "no rival is ahead (0 behind, 2 not"),
        ({"delta-centred": [32, 33, 31, 34, 99], "pracdelta": [9, 8, 9, 9, 8]}, "ahead of it: pracdelta"),
    ],
)
def test_who_never_reaches_is_ahead_of_none(tmp_path: Path, changes: dict[str, list[int]], said: str) -> None:
    """At a horizon of 40 rounds a run that never reaches counts as 40: less than it needs, in its method's favour."""
    write_runs(tmp_path, made_up(), MADE_UP | changes)
    assert said in shown(tmp_path, made_up())


def test_speed_ups_beside_runs_that_never_reach_are_marked(tmp_path: Path) -> None:
    def speed_ups(**changes: list[int]) -> dict[str, str]:
        write_runs(tmp_path, made_up(), MADE_UP | {name.replace("_", "-"): rounds for name, rounds in changes.items()})
        main = shown(tmp_path, made_up()).partition("![digits: curves]")[0]
        rows = [line.split(" | ") for line in main.splitlines() if line.startswith("| `")]
        return {row[0].split("`")[1]: row[3].partition(" [")[0] for row in rows}

    late, later = [8, 9, 7, 9, 99], [30, 34, 28, 32, 99]
    assert speed_ups()["delta-centred"] == "×3.88"
    found = speed_ups(delta_centred=late)
    assert (found["delta-centred"], found["pracdelta"], found["uniform"]) == ("≤ ×2.18", "×1.24", "baseline")
    found = speed_ups(delta_centred=late, uniform=later)
    assert (found["delta-centred"], found["pracdelta"], found["uniform"]) == ("≥≤ ×2.25", "≥ ×1.28", "baseline")


def test_without_a_gap_the_page_gives_no_number(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP | {"uniform": [6, 5, 6, 7, 6]})
    page = shown(tmp_path, made_up())
    assert "no gap to close: uniform needs only 3 % more rounds than full participation" in page
    assert "**The target is not decided.**" in page
    assert "| – | " in page.split("## digits")[1]


def test_a_page_of_unfinished_runs_says_what_is_missing(tmp_path: Path) -> None:
    experiment = made_up()
    write_runs(tmp_path, experiment, {"full": [5, 6], "uniform": [30, 34], "delta-centred": [8, 9]})
    page = shown(tmp_path, experiment)
    assert "6 of 20 test runs are done. This is the verdict of those." in page
    assert "- digits, `uniform`: 2 of 5 test runs" in page
    assert "- digits, `pracdelta`: 0 of 5 test runs" in page
    with pytest.raises(DeltaflError, match="leave out --only-page"):
        shown(tmp_path / "nothing", experiment)


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    with pytest.raises(DeltaflError, match="was run with threshold"):
        shown(tmp_path, made_up(threshold=0.55))


def test_lines_of_tuning_runs_say_what_their_records_said(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    page = shown(tmp_path, made_up())
    part = parts_of(made_up(), "smoke")[0]
    store, jobs = Store(tmp_path), [part.tuning_job("uniform", rate, 1000) for rate in part.rates]
    before = [store.tried(part, job) for job in jobs]
    store.pack(part, jobs)
    assert not any(RunStore(tmp_path).path(job).exists() for job in jobs)
    assert [store.tried(part, job) for job in jobs] == before
    assert [Store(tmp_path).tried(part, job) for job in jobs] == before
    store.pack(part, [part.tuning_job("full", 0.2, 1000)])  # the others stay
    assert shown(tmp_path, made_up()) == page
    with pytest.raises(DeltaflError, match=r"digits-tuning.jsonl was run with threshold = 0.5, not 0.55"):
        shown(tmp_path, made_up(threshold=0.55))
    with pytest.raises(DeltaflError, match="has means over 40 rounds, not 30"):
        shown(tmp_path, made_up(tuning_rounds=30))
    path = tmp_path / "runs" / "digits-tuning.jsonl"
    path.write_text(path.read_text().replace('"reached": 30.0', '"reached": "soon"'))
    with pytest.raises(DeltaflError, match=r"digits-tuning.jsonl, line \d+,: reached: .*delete it to run them again"):
        shown(tmp_path, made_up())


@pytest.mark.parametrize(
    ("part", "method"),
    [
        *(("digits", method) for method in ("full", "uniform", "innovation", "fed-cbs")),
        *(("mnist-writers", method) for method in ("innovation@local-pivotal", "divfl", "fed-cbs")),
    ],
)
def test_the_committed_table_is_that_of_the_committed_runs(part: str, method: str) -> None:
    """Mean of the first rounds at the threshold; a run that never is there counts with all of its rounds."""
    folder = Path(__file__).parent.parent / "results" / "benchmark"
    with (folder / "table.csv").open(encoding="utf-8") as file:
        (cell,) = (row for row in csv.DictReader(file) if (row["part"], row["method"]) == (part, method))
    rounds, never = [], 0
    for line in gzip.decompress((folder / "runs" / f"{part}.jsonl.gz").read_bytes()).splitlines():
        run = json.loads(line)
        if run["settings"]["sampler"] != method:
            continue
        assert run["settings"]["local_lr"] == float(cell["rate"])
        there = [
            round
            for round, accuracy in zip(run["round"], run["accuracy"], strict=True)
            if accuracy >= run["settings"]["threshold"]
        ]
        never += not there
        rounds.append(there[0] if there else run["settings"]["rounds"])
    assert (int(cell["seeds"]), int(cell["never"])) == (len(rounds), never)
    assert float(cell["rounds"]) == pytest.approx(sum(rounds) / len(rounds), rel=1e-5)


# Running


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that are run, in this process instead of a pool."""
    done: list[str] = []

    def serial(jobs: Sequence[Job], folder: Path, _: int, on_progress: Callable[[Progress], None], *__: object) -> None:
        for job in jobs:
            if not RunStore(folder).get(job):
                run_job(job, folder)
                done.append(job.key)
        rounds = sum(job.settings.rounds or 0 for job in jobs)
        on_progress(Progress(rounds, rounds, len(jobs), len(jobs), ()))

    monkeypatch.setattr(benchmark, "run_jobs", serial)
    return done


def test_it_tunes_then_measures_and_goes_on_where_it_was(tmp_path: Path, ran: list[str]) -> None:
    told: list[Progress] = []

    def reproduce(seeds: int, experiment: Experiment) -> str:
        request = Request("benchmark", "smoke", tmp_path, seeds=seeds)
        return benchmark.reproduce_benchmark(experiment, request, told.append)

    small: dict[str, Any] = {"methods": ["full", "uniform"], "rates": [0.1, 0.2], "extensions": 1}
    experiment = tiny(tiers={"all": small}, rounds=3, probe_every=2)
    page = reproduce(1, experiment)
    tuning = [key for key in ran if "tuning" in key]
    assert ran[: len(tuning)] == tuning
    assert {f"digits-tuning-0.1/{label}-seed1000" for label in small["methods"]} <= set(tuning)
    assert [key for key in ran if key not in tuning] == [f"digits/{label}-seed0" for label in small["methods"]]
    assert told[-1].runs_done == told[-1].runs_total == len(ran)
    assert told[-1].rounds_done == 3 * len(ran)
    assert "deltafl reproduce benchmark --scale smoke --seeds 1" in page
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-tuning.jsonl", "digits.jsonl.gz"]
    first = list(ran)
    reproduce(2, experiment)
    assert ran[len(first) :] == [f"digits/{label}-seed1" for label in small["methods"]]
    assert told[-1].runs_done == told[-1].runs_total == len(ran)  # those of the first time are counted
    assert reproduce(2, experiment) == benchmark.reproduce_benchmark(
        experiment, Request("benchmark", "smoke", tmp_path, seeds=2, only_page=True), told.append
    )
    assert len(ran) == len(first) + 2


def test_a_method_that_cannot_run_is_named_and_the_others_run(tmp_path: Path, ran: list[str]) -> None:
    small = {"methods": ["full", "uniform", "hics-fl"], "rates": [0.1], "extensions": 0}
    experiment = tiny(tiers={"all": small}, rounds=2, seeds=1, classes=7)
    page = benchmark.reproduce_benchmark(experiment, Request("benchmark", "smoke", tmp_path), lambda _: None)
    assert "- digits, `hics-fl`: 0 of 1 test runs (hics-fl looks at the bias of an output layer of 7 classes" in page
    assert "digits/uniform-seed0" in ran


def test_what_memories_take_is_told_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """6 clients of 650 numbers in float32, four times over, are 62,400 bytes."""
    monkeypatch.setattr("deltafl.simulation.setup.WORTH_A_LINE", 62_400)
    small = {"methods": ["uniform", "fedvarp", "innovation"], "rates": [0.1], "extensions": 0}
    with caplog.at_level(logging.INFO, logger="deltafl"):
        benchmark.runnable(part_of(tiers={"all": small}), Store(tmp_path), {})
    assert caplog.messages == [
        "digits: each process that plays fedvarp or innovation remembers one update a client, "
        "6 x 650 numbers (float32): at most 62.4 kB of RAM, checkpoints included, and 31.2 kB on disk"
    ]


def test_a_part_without_its_data_is_left_out(tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    lost = {"tier": "all", "task": "unipen62", "partition": "writer", "seeds": 1}
    small = {"methods": ["uniform"], "rates": [0.1], "extensions": 0}
    experiment = tiny({"digits": {"tier": "all", "seeds": 1}, "letters": lost}, rounds=2, tiers={"all": small})
    request = Request("benchmark", "smoke", tmp_path, data_dir=str(tmp_path))
    page = benchmark.reproduce_benchmark(experiment, request, lambda _: None)
    assert "- letters: no test run is done (" in page
    assert not any(key.startswith("letters") for key in ran)
    with pytest.raises(DeltaflError, match="unknown part 'letter'"):
        benchmark.reproduce_benchmark(
            experiment, Request("benchmark", "smoke", tmp_path, parts=("letter",)), lambda _: None
        )
