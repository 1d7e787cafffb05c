"""The report without a browser: its sentences, its numbers, what it loads, how large it is; and
the first sentence.
"""

import gzip
import json
import re
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deltafl.analysis import Run, summarise
from deltafl.analysis.bands import client_values, selections_by_size
from deltafl.analysis.look import ON_DARK, looks
from deltafl.analysis.report import Part, client_tables, write_report
from deltafl.analysis.statistics import fairness_of, worst_tenth
from deltafl.analysis.verdict import headline
from deltafl.errors import MissingExtraError
from deltafl.simulation.comparisons.comparison import command_of
from deltafl.simulation.settings import CompareSettings, make_settings
from deltafl.types import Judge
from tools.runs import make_run, runs_of

REACHES: dict[str, Any] = {
    "full": [1, 2, 1],
    "uniform": [8, 9, 8],
    "census": [2, 3, 2],
    "pracdelta": [8, 8, 9],
    "fedavg": [9, None, 9],
}


def written(path: Path, runs: list[Run], threshold: float | None = 0.7) -> str:
    summary = summarise(
        runs, threshold, settings={"task": "digits"}, environment={"data": "<made up>"}
    )
    write_report(
        [Part("digits", runs, summary, "deltafl compare --task digits")], path, "deltafl: digits"
    )
    return path.read_text(encoding="utf-8")


def cells(page: str) -> dict[str, dict[str, float]]:
    """The numbers of the table by sampler and column."""
    rows = re.findall(r'<tr data-sampler="([^"]+)"(.*?)</tr>', page)
    return {
        name: {
            column: float(value)
            for column, value in re.findall(r'data-name="(\w+)" data-value="([^"]+)"', row)
        }
        for name, row in rows
    }


def test_the_numbers_are_those_of_the_summary(tmp_path: Path) -> None:
    runs = runs_of(**REACHES)
    found = cells(written(tmp_path / "report.html", runs))
    assert list(found) == ["full", "census", "uniform", "pracdelta", "fedavg"]  # the best first
    for entry in summarise(runs, 0.7).samplers:
        to = entry.to_threshold
        assert to is not None and to.rounds is not None and entry.gap_closed is not None
        wanted: dict[str, Any] = {
            "gap": entry.gap_closed.value,
            "value": entry.top5.mean,
            "rounds": to.rounds.mean,
        }
        assert entry.area is not None
        wanted |= {"area": entry.area.mean, "bytes": to.bytes}
        wanted |= {} if to.speedup is None else {"speedup": to.speedup.ratio}
        assert found[entry.sampler] == wanted


def test_it_is_one_small_file_that_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = written(tmp_path / "report.html", runs_of(**REACHES))
    assert (tmp_path / "report.html").stat().st_size < 600_000
    assert (
        "http" not in page and "url(" not in page and "@import" not in page
    )  # what Bokeh asks for: browser test
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,"}
    assert "&lt;made up&gt;" in page
    assert (
        "<span>deltafl</span> <span>compare</span> <span>--task</span> <span>digits</span>" in page
    )


def test_two_comparisons_are_two_sections_of_one_page(tmp_path: Path) -> None:
    runs = runs_of(**REACHES)
    parts = [
        Part(title, runs, summarise(runs, threshold))
        for title, threshold in (("a", 0.7), ("b & c", None))
    ]
    write_report(parts, tmp_path / "report.html", "both")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('<section class="part"') == 2 and '<a href="#part-1">b &amp; c</a>' in page
    packed = re.findall(r'id="figures">(.*?)</script>', page)[0]
    figures = json.loads(gzip.decompress(b64decode(packed)))
    assert [list(items) for items in figures] == [["curves", "selections"]] * 2


@pytest.mark.parametrize(
    "loss_r", [np.full(10, np.nan), np.array([2.0, *[np.inf] * 9]), np.zeros(10)]
)
def test_losses_that_are_hard_to_draw(
    loss_r: np.ndarray[tuple[int], np.dtype[np.float64]], tmp_path: Path
) -> None:
    runs = [make_run("fedavg", 0, 3, "loss"), make_run("fedis", 0, 3, "loss", loss_r=loss_r)]
    assert "NaN" not in json.dumps(cells(written(tmp_path / "report.html", runs, 0.5)))


def named(page: str) -> list[list[str]]:
    """The table of the clients by name; none where the page has no such table."""
    found = re.findall(r'aria-label="clients by name">(.*?)</table>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", "".join(found))
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_clients_that_have_names_are_shown_by_them_the_worst_first(tmp_path: Path) -> None:
    names = ["ward <b>1</b>", "</script>", "Łódź & Co.", "4"]
    value_k4 = np.array([[0.5, 0.3, 0.9, np.nan], [0.7, 0.1, 0.9, np.nan]])
    size_m = np.array([10.0, 2000.0, 30.0, 40.0])
    runs = []
    for sampler, better in (("full", 0.0), ("uniform", 0.1)):
        for seed in range(2):
            # With the second seed the clients have another order, and the draws are others.
            order = np.array([[0, 1, 2, 3], [3, 1, 0, 2]][seed])
            run = make_run(
                sampler,
                seed,
                3,
                client_names=[names[place] for place in order],
                value_km=(value_k4 + better)[:, order],
                num_examples_m=size_m[order],
                draws_m=np.array([4, 6, 8, 1])[order] + 2 * seed,
            )
            runs.append(run)
    page = written(tmp_path / "report.html", runs)
    assert named(page) == [
        ["client", "examples", "full", "uniform"],
        ["&lt;/script&gt;", "2,000", "20.0 (7.0)", "30.0 (7.0)"],
        ["ward &lt;b&gt;1&lt;/b&gt;", "10", "60.0 (5.0)", "70.0 (5.0)"],
        ["Łódź &amp; Co.", "30", "90.0 (9.0)", "100.0 (9.0)"],
        ["4", "40", "— (2.0)", "— (2.0)"],
    ]
    assert "<b>1" not in page
    numbered = [run._replace(client_names=()) for run in runs]
    assert named(written(tmp_path / "report.html", numbered)) == []
    # Lower is better: the largest loss stands first. Nothing but the draws may be known.
    losses = [run._replace(metric="loss") for run in runs]
    worst_first = [row[0] for row in named(written(tmp_path / "report.html", losses, 0.5))]
    assert worst_first[1:4:2] == ["Łódź &amp; Co.", "&lt;/script&gt;"]
    bare = [run._replace(value_km=None, num_examples_m=None) for run in runs]
    assert named(written(tmp_path / "report.html", bare))[1][1:] == ["—", "— (5.0)", "— (5.0)"]


def test_of_many_clients_the_worst_have_a_place(tmp_path: Path) -> None:
    run = make_run(
        "uniform",
        0,
        3,
        client_names=[f"client {place}" for place in range(250)],
        value_km=np.linspace(1, 0, 250)[np.newaxis],
        draws_m=np.arange(250),
    )
    page = written(tmp_path / "report.html", [run])
    assert len(named(page)) == 101
    assert named(page)[1][0] == "client 249"
    assert "The first 100 of 250" in page


def test_means_of_clients_are_formed_together() -> None:
    """As by hand, and not with dozens of calls for each client, of whom there may be 100,000."""
    rng = np.random.default_rng(0)
    runs = [
        make_run(
            "uniform",
            seed,
            3,
            client_names=[f"client {client}" for client in rng.permutation(2000)],
            value_km=np.where(rng.random((1, 2000)) < 0.5, np.nan, rng.random((1, 2000))),
            draws_m=rng.integers(9, size=2000),
        )
        for seed in range(3)
    ]
    part = Part("clients", runs, summarise(runs, None))
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        ((_, (_, *rows), note),) = client_tables(part)
    finally:
        sys.setprofile(None)
    assert calls < 60_000
    assert len(rows) == 100 and "of 2,000" in note
    for name, size, cell in rows:
        places = [list(run.client_names).index(name) for run in runs]
        values = [np.asarray(run.value_km)[0, at] for run, at in zip(runs, places, strict=True)]
        draws = np.mean([run.draws_m[at] for run, at in zip(runs, places, strict=True)])
        known = np.nanmean(values)
        assert (size, cell) == ("—", f"{100 * known:.1f} ({draws:,.1f})")


def test_missing_bokeh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(MissingExtraError, match=r"deltafl\[plot\]"):
        written(tmp_path / "report.html", runs_of(fedavg=[3]))


def noisy(sampler: str, area: float, spread: float) -> list[Run]:
    """Five runs whose accuracy is the same in all rounds: ``area``, and more or less from seed
    to seed.
    """
    values = area + spread * np.array([-1.0, 0.5, 1.0, -0.5, 0.0])
    return [
        make_run(sampler, seed, 1, accuracy_r=np.full(10, value))
        for seed, value in enumerate(values)
    ]


def first(*groups: list[Run], threshold: float | None = None) -> list[str]:
    return headline(summarise([run for group in groups for run in group], threshold))


def test_the_first_sentence_is_as_sure_as_the_intervals() -> None:
    ends = noisy("full", 0.9, 0.0), noisy("uniform", 0.5, 0.0)
    clear = first(*ends, noisy("census", 0.8, 0.01), noisy("divfl", 0.6, -0.01))
    assert clear[0].startswith("census closes 0.75 [0.7") and clear[0].endswith(
        "; no other sampler is ahead."
    )
    open_ = first(*ends, noisy("census", 0.8, 0.01), noisy("divfl", 0.79, -0.02))
    assert open_[0].endswith("of the gap between uniform sampling and full participation.")
    assert re.match(
        r"Not clearly different .* by paired seeds: divfl \(1\.0 \[-\d\.\d, \d\.\d\] points\)",
        open_[1],
    )
    assert clear[1].startswith(
        "The next is divfl: census is ahead by 20.0 [18.0, 22.0] points over all rounds"
    )
    none = first(*ends, noisy("census", 0.52, 0.1))
    assert none[0] == "No sampler is shown to be better than uniform sampling."
    assert "census closes 0.05" in none[1] and "does not lie above 0" in none[1]
    second = first(*ends, noisy("census", 0.7, 0.4), noisy("divfl", 0.6, 0.01))
    assert second[0] == "divfl is shown to be better than uniform sampling."
    assert second[1].startswith(
        "The highest number has an interval that does not lie above 0: census closes 0.50"
    )


def test_the_first_sentence_without_a_gap_or_with_one_seed(tmp_path: Path) -> None:
    one = headline(summarise([run for run in runs_of(**REACHES) if run.seed == 0], None))
    assert one[0].startswith("census closes 0.86 of the gap") and one[1].startswith(
        "One seed has no interval"
    )
    speed = headline(summarise(runs_of(uniform=[8, 9, 8], innovation=[2, 3, 2]), 0.7))
    assert re.match(
        r"innovation reaches 70 % with a speed-up of 3\.57 \[.*\] over uniform\.", speed[0]
    )
    assert speed[1] == (
        "innovation reaches 70 % after 2.3 rounds and 2.3 kB, uniform after 8.3 rounds and 8.3 kB."
    )
    failed = headline(summarise(runs_of(uniform=[8, 9, 8, 9], innovation=[2, 3, 2, None]), 0.7))
    assert failed[0] == "No sampler is shown to be better than uniform."
    assert failed[1].startswith(
        "The highest number leaves out seeds with which its sampler never got there: innov"
    )
    assert (
        headline(summarise(runs_of(census=[2, 3]), None))[0]
        == "census ends with the best accuracy: 80.0±0.0 %."
    )
    # Between these two alone there is a difference with an interval, and no gap of others.
    ends = runs_of(full=[2, 3], uniform=[4, 4])
    sure = headline(summarise(ends, None))[1]
    assert sure == (
        "At the end, by paired seeds, full is not clearly apart from uniform (0.0 [0.0, 0.0] "
        "points)."
    )
    page = tmp_path / "report.html"
    write_report([Part("made up", ends, summarise(ends, None), "")], page, "made up")
    assert page.read_text().count("At the end, by paired seeds") == 1
    equal = summarise(runs_of(full=[4], uniform=[4], census=[4]), None)
    assert headline(equal)[1].startswith("One seed has no interval")
    lost = [make_run("census", 0, 1, "loss", loss_r=np.full(10, np.nan))]
    assert headline(summarise(lost, None))[0] == "No sampler has a finite result."


def test_the_command_holds_what_is_not_usual_and_makes_the_same_settings() -> None:
    given: dict[str, Any] = {
        "samplers": ["uniform", "osmd(mixing=0.3)"],
        "seeds": [3, 5],
        "local_steps": 4,
    }
    settings = make_settings(
        CompareSettings, {**given, "scaffold": True, "data_dir": "/data", "threshold": 0.7}
    )
    text = command_of(settings)
    assert text == (
        "deltafl compare --task digits --local-steps 4 --threshold 0.7 --scaffold "
        "--samplers 'uniform,osmd(mixing=0.3)' --seeds 3,5"
    )
    usual = make_settings(CompareSettings, {"seeds": 2, "samplers": "full"})
    assert command_of(usual) == "deltafl compare --task digits --samplers full --seeds 2"
    rated = make_settings(CompareSettings, {"seeds": 2, "samplers": "full", "rates": {"full": 0.2}})
    assert command_of(rated).startswith("deltafl compare --config config.toml --task digits")


@pytest.mark.parametrize("metric", [None, "mine.py:share"])
def test_the_command_names_code_that_this_process_has_not_imported(metric: str | None) -> None:
    given = {"seeds": 2, "samplers": "uniform", "rounds": 9, "threshold": 0.85}
    settings = make_settings(CompareSettings, given)
    own: dict[str, Any] = {"samplers": ("mine.py:ByLoss", "uniform")}
    expected = (
        "deltafl compare --task digits --rounds 9 --samplers mine.py:ByLoss,uniform --seeds 2"
    )
    if metric is not None:
        own["metric"] = (metric,)
        expected = expected.replace(" --samp", f" --metric {metric} --threshold 0.85 --samp")
    assert command_of(settings.model_copy(update=own)) == expected
    # Objects of a process have no name that a command could give.
    assert command_of(settings.model_copy(update={**own, "metric": ("mine",)})) == ""


@pytest.mark.parametrize(
    "given", [{}, {"rounds": 9, "local_steps": 2}, {"local_lr": 0.3, "metric": "roc_auc"}]
)
def test_the_command_of_a_table_is_known_where_the_table_is_not(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 2))
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "who": np.arange(60) % 6, "y": x[:, 0] > 0})
    table.to_csv("own.csv", index=False)
    own = {"task": "own.csv", "label": "y", "column": "who", "seeds": 2, "samplers": "full,uniform"}
    settings = make_settings(CompareSettings, {**own, **given})
    (tmp_path / "own.csv").unlink()
    program, command, *words = command_of(settings).split()
    assert (program, command) == ("deltafl", "compare")
    said = dict(zip(words[::2], words[1::2], strict=True))
    # The table alone says how many are asked.
    expected = {f"--{key.replace('_', '-')}": str(value) for key, value in (own | given).items()}
    assert said == expected | {"--sample": "3"}


def test_methods_that_are_often_together_have_colours_of_their_own_in_light_and_dark() -> None:
    for together in (
        "full uniform fedavg census balanced innovation pracdelta fed-cbs divfl",
        "fedavg fedpracis@multinomial pracdelta@multinomial cluster-is power-of-choice md-fixed",
        "uniform pracdelta delta-centred spread fedvarp innovation",
    ):
        look_of = looks(together.split())
        assert len({(look.colour, look.dash, look.marker) for look in look_of.values()}) == len(
            look_of
        )
        colours = [
            look.colour
            for label, look in look_of.items()
            if label not in ("full", "uniform", "fedavg")
        ]
        assert len(set(colours)) == min(len(colours), 6) and set(colours) <= set(ON_DARK)
    assert looks(["fedis"])["fedis"].colour == looks(["fedpracis"])["fedpracis"].colour


@pytest.mark.filterwarnings("error:overflow")
def test_values_that_no_float32_holds_are_drawn(tmp_path: Path) -> None:
    judge = Judge("cost", higher=False)
    runs = [
        run._replace(metric="cost", judges=[judge], others_r={"cost": run.loss_r * 1e60})
        for run in runs_of(uniform=[2, 3], md=[2, 2])
    ]
    assert cells(written(tmp_path / "report.html", runs)).keys() == {"uniform", "md"}


def test_selections_by_size_are_means_of_tenths_of_all_seeds_clients() -> None:
    order = np.random.default_rng(0).permutation(20)
    runs = [
        make_run("md", seed, 3, num_examples_m=1.0 * order, draws_m=10 * order + seed)
        for seed in (0, 2)
    ]
    band = selections_by_size(runs)
    assert band is not None
    assert band.round_r.tolist() == [0.5 + 2 * tenth for tenth in range(10)]
    assert band.mean_r.tolist() == [6.0 + 20 * tenth for tenth in range(10)]
    # Of 0, 2, 10 and 12 draws above the tenth's least.
    assert band.low_r.tolist() == pytest.approx([0.6 + 20 * tenth for tenth in range(10)])
    assert band.high_r.tolist() == pytest.approx([11.4 + 20 * tenth for tenth in range(10)])


def test_selections_by_size_and_accuracy_by_client_are_shown_where_they_are_recorded(
    tmp_path: Path,
) -> None:
    size_m = np.array([4.0, 1.0, 2.0, 3.0])
    value_km = np.array([[0.5, np.nan, 1.0, 0.0], [0.0, np.nan, 0.5, 1.0]])
    found: dict[str, Any] = {
        "num_examples_m": size_m,
        "value_km": value_km,
        "fairness": fairness_of(value_km),
    }
    runs = [run._replace(**found) for run in runs_of(uniform=[2, 3], md=[2, 2])]
    assert selections_by_size([run._replace(num_examples_m=np.ones(4)) for run in runs]) is None
    own = client_values(runs[:2])
    assert own is not None and own.mean_r[[0, 50, 100]].tolist() == [0.0, 50.0, 100.0]
    page = written(tmp_path / "report.html", runs)
    assert {name: numbers["tail"] for name, numbers in cells(page).items()} == {
        "md": 0.0,
        "uniform": 0.0,
    }
    assert "worst tenth,\N{NO-BREAK SPACE}%" in page and "Accuracy per client" in page
    assert "Clients in tenths by their size" in page
    old = [
        run._replace(value_km=None) for run in runs
    ]  # as packed records are: the column without the figure
    page = written(tmp_path / "old.html", old)
    assert "Accuracy per client" not in page and "worst tenth,\N{NO-BREAK SPACE}%" in page
    assert "orst tenth" not in written(tmp_path / "other.html", runs_of(**REACHES))


def test_the_worst_tenth_is_a_mean_of_the_lowest() -> None:
    assert worst_tenth(np.linspace(0.0, 1.9, 20)) == pytest.approx(0.05)
    assert worst_tenth(np.array([0.5, np.nan, 0.25])) == 0.25
    assert np.isnan(worst_tenth(np.array([np.nan])))
