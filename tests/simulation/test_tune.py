"""Tuning: the grid that grows, finalists, what a rate is judged by, and what is played, recorded
and resumed.
"""

import json
import math
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltafl as dl
from deltafl.analysis.runs import Run
from deltafl.errors import DeltaflError
from deltafl.simulation import (
    CompareSettings,
    Grid,
    Score,
    Search,
    Trial,
    TuneSettings,
    make_settings,
    read_record,
    tune_rates,
)
from deltafl.simulation.comparisons.tune import Tuned, last_comparison
from deltafl.simulation.folder.continuing import grown
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.view.live import picture
from tools.cli import deltafl_here

RateScore = Callable[[str, float], Score | None]


def best_at(**optimum: float) -> RateScore:
    return lambda label, rate: Score(abs(math.log2(rate / optimum[label])), 0.0)


def searched(
    rates: Sequence[float],
    extensions: int,
    labels: Sequence[str],
    every: RateScore,
    first: RateScore | None = None,
) -> dict[str, Search]:
    """The search with two tuning seeds whose mean score is ``every``; with two finalists where
    ``first`` is given.
    """

    def score_of(trial: Trial) -> Score | None:
        own = (first or every)(trial.label, trial.rate)
        if trial.seed == 1000 or own is None:
            return own
        mean = every(trial.label, trial.rate)
        return None if mean is None else Score(2 * mean.rounds - own.rounds, 0.0)

    return Grid(tuple(rates), extensions, (1000, 1001), None if first is None else 2).search(
        labels, score_of
    )


@pytest.mark.parametrize(
    ("optimum", "rates", "best", "edge"),
    [
        (0.2, (0.1, 0.2, 0.4), 0.2, ""),
        (1.6, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), 1.6, ""),
        (6.4, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), 3.2, "high"),
        (0.05, (0.025, 0.05, 0.1, 0.2, 0.4), 0.05, ""),
        (0.001, (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4), 0.0125, "low"),
    ],
)
def test_the_grid_grows_where_the_best_rate_is_at_its_edge(
    optimum: float, rates: tuple[float, ...], best: float, edge: str
) -> None:
    found = searched((0.1, 0.2, 0.4), 3, ("one",), best_at(one=optimum))["one"]
    assert found.rates == pytest.approx(rates)
    assert found.best == pytest.approx(best)
    assert found.edge == edge


@pytest.mark.parametrize(
    ("grid", "optimum", "rates"),
    [
        ((0.1, 0.3), 10.0, (0.1, 0.3, 0.9, 2.7, 8.1)),
        ((0.1, 0.3), 0.02, (0.011111111, 0.033333333, 0.1, 0.3)),
        ((0.01, 0.02, 0.1), 0.5, (0.01, 0.02, 0.1, 0.5, 2.5)),
        ((0.01, 0.02, 0.1), 0.005, (0.0025, 0.005, 0.01, 0.02, 0.1)),
        ((0.5,), 2.0, (0.5, 1.0, 2.0, 4.0)),
    ],
)
def test_any_grid_grows_by_the_factor_at_its_edge(
    grid: tuple[float, ...], optimum: float, rates: tuple[float, ...]
) -> None:
    assert searched(grid, 3, ("one",), best_at(one=optimum))["one"].rates == pytest.approx(rates)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6, unique_by=lambda x: f"{x:g}"))
def test_a_grid_is_put_in_order(rates: list[float]) -> None:
    typed = ",".join(map(repr, rates))
    for given_rates in (rates, tuple(rates), typed):
        settings = make_settings(TuneSettings, {"local_rates": given_rates})
        assert settings.local_rates == tuple(sorted(rates))
        assert settings.grids()["local_lr"].rates == tuple(sorted(rates))


def test_all_methods_search_the_same_grid() -> None:
    """One method prefers a higher rate, another a lower one: the third has all of them to choose
    from.
    """
    found = searched((0.1, 0.2, 0.4), 3, ("a", "b", "c"), best_at(a=0.4, b=0.05, c=0.2))
    assert {search.rates for search in found.values()} == {(0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
    assert [found[label][2:4] for label in "abc"] == [(0.4, ""), (0.05, ""), (0.2, "")]


def test_only_the_best_rates_of_the_first_seed_are_finalists() -> None:
    """0.4 wins on the first seed and loses on all; 0.8, best on all, was third on the first, so
    nobody tried it.
    """
    first = {0.1: 50.0, 0.2: 31.0, 0.4: 29.0, 0.8: 40.0}
    every = {0.1: 10.0, 0.2: 30.0, 0.4: 60.0, 0.8: 10.0}

    def one(missing: float = 0.0, missing_first: float = 0.0) -> Search:
        return searched(
            tuple(first),
            3,
            ("one",),
            lambda _, rate: None if rate == missing else Score(every[rate], 0.0),
            lambda _, rate: None if rate == missing_first else Score(first[rate], 0.0),
        )["one"]

    assert (one().finalists, one().best, one().edge) == ((0.2, 0.4), 0.2, "")
    assert (one(missing=0.4).finalists, one(missing=0.4).best) == ((0.2, 0.4), None)
    assert (one(missing_first=0.8).finalists, one(missing_first=0.8).best) == ((), None)


def test_who_was_a_finalist_before_the_grid_grew_stays_one() -> None:
    """The other method makes it grow; on the first seed 0.8 and 0.4 are then the best of this
    one, 0.2 on all.
    """
    first = {
        "one": {0.1: 50.0, 0.2: 31.0, 0.4: 29.0, 0.8: 28.0},
        "other": {0.1: 50.0, 0.2: 40.0, 0.4: 30.0, 0.8: 35.0},
    }
    every = {"one": {0.2: 30.0, 0.4: 32.0, 0.8: 60.0}, "other": {0.2: 40.0, 0.4: 30.0, 0.8: 35.0}}
    found = searched(
        (0.1, 0.2, 0.4),
        1,
        ("one", "other"),
        lambda label, rate: Score(every[label][rate], 0.0),
        lambda label, rate: Score(first[label][rate], 0.0),
    )
    assert found["one"][:3] == ((0.1, 0.2, 0.4, 0.8), (0.2, 0.4, 0.8), 0.2)
    assert found["other"][1:4] == ((0.2, 0.4, 0.8), 0.4, "")


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", -1), ("loss", 1)])
def test_a_rate_is_judged_by_rounds_and_then_by_the_area(metric: str, sign: int) -> None:
    settings = make_settings(TuneSettings, {"task": "digits", "rounds": 4, "threshold": 0.5})
    rising_r = np.array([0.2, 0.4, 0.6, 0.8])
    others = np.arange(4.0), np.arange(4.0), np.ones(2, dtype=int)
    run = Run("uniform", 0, metric, np.arange(1, 5), rising_r, rising_r[::-1], *others)
    score = settings.score(run)
    assert (score.rounds, np.sign(score.area)) == (3, sign)  # both pass 0.5 in round 3
    assert settings.score(run._replace(diverged=4)).rounds == 2 * 4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning of two samplers in one process, with its comparison."""
    folder = tmp_path_factory.mktemp("tune")
    options = (
        "--clients 12 --sample 3 --rounds 3 --threshold 0.5 --seeds 2 --local-epochs 1 --processes 1 "
        "--samplers uniform,fedis@multinomial --tuning-seeds 7, --local-rates 0.2,0.4 "
        "--server-rates 1 --extensions 1 --out out"
    )
    done = deltafl_here("tune", *options.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "uniform: local_lr = " in done.stdout
    return folder / "out"


def test_tuning_judges_by_validation_and_compares_with_the_rates_found(tuned: Path) -> None:
    records = [read_record(path) for path in tuned.glob("runs/*/*.json")]
    assert {record.settings["validation"] for record in records} == {0.2}
    assert {record.seed for record in records} == {7}
    rates = tomllib.loads((tuned / "rates.toml").read_text())["rates"]
    by_rate = {
        r.settings["local_lr"]: r
        for r in records
        if "server_lr" not in r.settings and r.sampler == "uniform"
    }
    settings = make_settings(TuneSettings, tomllib.loads((tuned / "config.toml").read_text()))
    best = min(by_rate, key=lambda rate: settings.score(by_rate[rate].run()))
    assert rates["uniform"]["local_lr"] == best
    assert {0.2, 0.4} < by_rate.keys() <= {0.1, 0.2, 0.4, 0.8}
    compared = make_settings(
        CompareSettings, tomllib.loads((tuned / "comparison" / "config.toml").read_text())
    )
    assert (compared.validation, compared.run("uniform", 0).local_lr) == (None, best)
    assert (
        compared.run("fedis@multinomial", 1).part_settings()["server_lr"]
        == rates["fedis@multinomial"]["server_lr"]
    )


def test_a_rate_with_which_nothing_was_learnt_is_not_recommended(tmp_path: Path) -> None:
    rows = [f"{k % 7},{k / 3},{k % 4}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["a,label,client", *rows]))
    options = (
        "--task t.csv --task-type regression --samplers uniform --sample 2 --rounds 2 --seeds 1 "
        "--tuning-seeds 2 --extensions 0 --processes 1 --no-report"
    )

    def tuned(rates: str, out: str) -> Any:
        words = [*options.split(), "--local-rates", rates, "--out", out]
        return deltafl_here("tune", *words, cwd=tmp_path)

    done = tuned("1e30,2e30", "none")
    assert done.returncode == 3
    assert "nothing was learnt with the best local_lr" in done.stderr
    assert not (tmp_path / "none" / "rates.toml").exists()
    # One such rate among others is no fault.
    done = tuned("0.01,1e30", "some")
    assert done.returncode == 0, done.stderr
    rates = tomllib.loads((tmp_path / "some" / "rates.toml").read_text())["rates"]
    assert rates == {"uniform": {"local_lr": 0.01}}


def test_watch_and_report_name_the_comparison_of_a_tuning(tuned: Path, tmp_path: Path) -> None:
    assert "comparison" in picture(tuned).title
    with pytest.raises(DeltaflError, match=r"no comparison; of deltafl tune, name .*comparison"):
        dl.load(tuned)
    shutil.copytree(tuned, tmp_path / "half", ignore=shutil.ignore_patterns("comparison"))
    with pytest.raises(DeltaflError, match=r"watch .*half/comparison once it is there"):
        picture(tmp_path / "half")


def test_nothing_is_played_twice_and_what_is_missing_is(tuned: Path) -> None:
    def written() -> dict[Path, tuple[bytes, int]]:
        found = tuned.rglob("*seed7.json")
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    before = written()
    lost = next(path for path in before if "uniform" in path.name)
    lost.unlink()
    settings = make_settings(TuneSettings, tomllib.loads((tuned / "config.toml").read_text()))
    found = tune_rates(settings, tuned, lambda _: None)
    named = {"task", "samplers", "partition", "alpha"}
    given = settings.model_dump(exclude=named, exclude_defaults=True)
    given |= {"out": tuned, "processes": 1, "progress": False}
    again = dl.tune("digits", ["uniform", "fedis@multinomial"], **given)
    assert again == found.rates == tomllib.loads((tuned / "rates.toml").read_text())["rates"]
    after = written()
    assert after.keys() == before.keys()
    assert [path for path in before if after[path] != before[path]] == [lost]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seeds": 8, "tuning_seeds": [7]}, r"tuning_seeds \[7\] are seeds of the comparison too"),
        ({"rates": {"uniform": 0.1}, "samplers": "uniform"}, "rates are what tuning finds"),
        ({"samplers": "full,uniform+local_lr=0.3"}, "has a local_lr of its own, which is what tun"),
        (
            {"samplers": "uniform+server_lr=0.3", "server_rates": "1,2"},
            r"has a server_lr of its own, .*leave \+server_lr=0.3 out",
        ),
        ({"local_rates": [0.3, 0.1, 0.1000000001]}, "0.1 and 0.1000000001 count as one"),
        ({"local_rates": "0.1,0"}, r"in \(0, inf\)"),
        ({"local_rates": []}, "at least 1"),
        ({"validation": 0}, r"validation is 0; it must be in \(0, 1\)"),
    ],
)
def test_impossible_tunings_end_in_one_sentence(given: dict[str, object], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_settings(TuneSettings, given)


def test_tuning_goes_on_with_the_rounds_and_the_data_that_it_began_with(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    out = tmp_path / "tuned"
    rows = [f"{k % 7},{k % 2},{k % 4}" for k in range(80)]
    table.write_text("\n".join(["a,label,client", *rows]))
    given = {"task": str(table), "samplers": "uniform", "local_rates": [0.1], "extensions": 0}
    given["tuning_seeds"] = 1
    tune_rates(make_settings(TuneSettings, {**given, "rounds": 2}), out, lambda _: None)
    before = (out / "config.toml").read_bytes()
    with pytest.raises(DeltaflError, match="have rounds = 2, not 3: choose another --out"):
        tune_rates(make_settings(TuneSettings, {**given, "rounds": 3}), out, lambda _: None)
    assert (out / "config.toml").read_bytes() == before
    table.write_text("\n".join(["a,label,client", *rows[1:]]))
    with pytest.raises(DeltaflError, match="are not those it began with"):
        tune_rates(make_settings(TuneSettings, {**given, "rounds": 2}), out, lambda _: None)


def _compared(out: Path) -> tuple[Any, Any]:
    config = tomllib.loads((out / "comparison" / "config.toml").read_text())
    return config["rounds"], config["threshold"]


def test_a_tuning_goes_on_with_what_its_comparison_was_given_since(
    tuned: Path, tmp_path: Path
) -> None:
    """Its comparison has more rounds and another threshold; then tuning itself has another."""
    out = tmp_path / "out"
    shutil.copytree(tuned, out)

    def played(command: str, *words: str) -> Any:
        options = ["--resume", "--processes", "1", "--no-report", *words]
        return deltafl_here(command, *options, cwd=tmp_path)

    more = played("compare", "--out", "out/comparison", "--rounds", "4", "--threshold", "0.4")
    assert more.returncode == 0, more.stderr
    lines = {path: path.read_bytes() for path in out.rglob("rounds.jsonl")}
    done = played("tune", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert _compared(out) == (4, 0.4)
    assert {path: path.read_bytes() for path in out.rglob("rounds.jsonl")} == lines
    done = played("tune", "--out", "out", "--samplers", "full", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert RunDirectory(out / "comparison" / "runs" / "full-seed0").last_line()["round"] == 4
    recorded = tomllib.loads((out / "config.toml").read_text())
    settings = make_settings(TuneSettings, {**recorded, "threshold": 0.51})
    # It ends before its comparison, and the next one is given no threshold.
    tune_rates(settings, out, lambda _: None)
    done = played("tune", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert _compared(out) == (4, 0.51)
    assert json.loads((out / "comparison" / "summary.json").read_text())["threshold"] == 0.51


def test_a_comparison_with_other_rates_than_those_found_now_stays_as_it_is(
    tuned: Path, tmp_path: Path
) -> None:
    settings = make_settings(TuneSettings, tomllib.loads((tuned / "config.toml").read_text()))
    rates = tomllib.loads((tuned / "rates.toml").read_text())["rates"]
    before = rates["uniform"]["local_lr"]
    # Also one that differs in the tenth place.
    for now in (before + 1e-10, 7.0):
        rates["uniform"]["local_lr"] = now
        words = rf"uniform with local_lr = {before}, .*, and tuning now finds local_lr = {now}, "
        with pytest.raises(DeltaflError, match=words):
            last_comparison(settings, Tuned(rates, {}), tuned / "comparison")
    there_not = last_comparison(settings, Tuned(rates, {}), tmp_path / "comparison")
    assert there_not.run("uniform", 0).local_lr == 7.0


def test_a_rate_stands_in_one_place() -> None:
    label = "uniform+local_lr=0.3"
    given = {"samplers": f"full,{label}", "rates": {label: 1.0}}
    with pytest.raises(DeltaflError, match="of its own, which stands in rates, too"):
        make_settings(CompareSettings, given)
    make_settings(CompareSettings, {**given, "rates": {label: {"server_lr": 0.5}}})


def test_rates_are_settings_of_a_comparison() -> None:
    given = {"samplers": "full,uniform,fedavg", "rates": {"uniform": 0.3, "full": {"server_lr": 2}}}
    settings = make_settings(CompareSettings, given)
    found = [settings.run(label, 0) for label in settings.samplers]
    rates = [(run.local_lr, run.part_settings()["server_lr"]) for run in found]
    assert rates == [(0.8, 2.0), (0.3, None), (0.8, None)]
    other = {"samplers": "uniform,innovation", "rates": {"uniform": 0.3, "innovation": 1}}
    more = make_settings(CompareSettings, other)
    both = {"uniform": {"local_lr": 0.3}, "full": {"server_lr": 2}, "innovation": {"local_lr": 1}}
    assert grown(settings, more).rates == both
    given["rates"] = {"uniform": 0.4, "full": {"server_lr": 2}}
    changed = make_settings(CompareSettings, given)
    with pytest.raises(DeltaflError, match=r"the run was started with rates = .*0.3.*, not .*0.4"):
        grown(settings, changed)
    with pytest.raises(DeltaflError, match="unknown sampler 'unifrom'"):
        make_settings(CompareSettings, {"rates": {"unifrom": 0.3}})
