"""Pages of experiments, made from synthetic runs whose numbers are known."""

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deltafl import DeltaflError
from deltafl.analysis import looks as looks_of
from deltafl.simulation.record import RunRecord, what_is_run
from reproduction.pages.figures import curve_band
from reproduction.pages.groups import gather, readable
from reproduction.pages.index import Finding, write_index, write_verdict
from reproduction.pages.page import write_page
from reproduction.pages.views import read_view
from reproduction.spec import Sweep, parse_experiment

COMMAND = "deltafl reproduce table-x --scale cpu"
RNG = np.random.default_rng(5)


def sweep_of(kind: str, **more: Any) -> Sweep:
    """A sweep with two parts of two seeds; ``more`` changes the file."""
    content = {
        "title": "Table X",
        "claim": "FedPracDELTA is best.",
        "kind": kind,
        "order": ["pracdelta", "fedavg"],
        "notes": ["A decision."],
        "settings": {"task": "digits", "samplers": ["fedavg", "pracdelta"], "seeds": 2, "rounds": 50, "threshold": 0.7},
        "parts": {"one": {"title": "First"}, "two": {"title": "Second", "floor": 0.25}},
        "cpu": {},
        "paper": {"rounds": 500},
        **more,
    }
    experiment = parse_experiment("table-x", content)
    parts = experiment.part_names("cpu")
    return Sweep(experiment, "cpu", {part: experiment.comparison(part, "cpu") for part in parts})


#: Round in which a sampler reaches 0.8 from 0.1, and its last accuracy; a seed comes one round later.
REACHES = {
    "fedavg": (30, 0.80),
    "pracdelta": (15, 0.84),
    "uniform": (28, 0.80),
    "fedis": (20, 0.82),
    "delta": (10, 0.85),
}


def records_of(sweep: Sweep, **more: Any) -> list[RunRecord]:
    """Finished runs of all jobs of a sweep."""
    return [record(job.part, job.settings, **more) for job in sweep.jobs()]


def record(part: str, settings: Any, **more: Any) -> RunRecord:
    at, top = REACHES[settings.sampler.split("@")[0]]
    at += settings.seed * (2 if settings.sampler == "fedavg" else 1)
    rounds = range(1, (settings.rounds or 50) + 1)
    given = {
        "part": part,
        "settings": what_is_run(settings),
        "data": "digits (scikit-learn)",
        "metric": "accuracy",
        "environment": {"python": "3.12", "torch": "2.9", "processor": "Some CPU", "cores": 2, "command": "secret"},
        "round": list(rounds),
        "accuracy": [0.1 if r < at else top - 0.001 * settings.seed for r in rounds],
        "loss": [10.0 ** (-r / 50 - top) * (1 + 0.1 * settings.seed * (settings.sampler == "fedavg")) for r in rounds],
        "seconds": [9.0 * r for r in rounds],
        "cpu_seconds": [2.0 * r for r in rounds],
        "bytes": [100.0 * r for r in rounds],
        "draws": [3] * 20,
    }
    return RunRecord.model_validate({**given, **more})


def rows_of(page: str, name: str) -> list[list[str]]:
    """The cells of all table rows whose first cell is ``name``."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def table_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_table_holds_the_papers_form_and_its_numbers(tmp_path: Path) -> None:
    reported = {
        "one": {
            "fedavg": {"accuracy": 70.35, "sd": 0.51, "rounds": 426, "seconds": 1795.12},
            "pracdelta": {"accuracy": 72.1, "sd": 0.49, "rounds": 322},
        }
    }
    sweep = sweep_of("table", reported=reported)
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert page == (tmp_path / "README.md").read_text(encoding="utf-8")
    fedavg, delta = rows_of(page, "FedAvg")[0], rows_of(page, "FedPracDELTA")[0]
    assert fedavg[1:6] == ["79.95 ± 0.07", "70.35 ± 0.51", "31.0", "426", "35.0"]
    assert fedavg[6:] == ["279", "62.0", "1,795", "baseline", "baseline"]
    assert delta[1:5] == ["83.95 ± 0.07", "72.10 ± 0.49", "15.5", "322"]
    assert delta[6:9] == ["140", "31.0", "–"]
    assert delta[9].startswith("2.00")
    assert delta[10] == "1.32"
    assert "The paper's seconds are those of one RTX 3090." in page
    first = table_csv(tmp_path)[1]
    assert (first["part"], first["sampler"], first["rounds"], first["speedup"]) == ("one", "pracdelta", "15.5", "2.0")
    assert float(first["paper_speedup"]) == pytest.approx(426 / 322, rel=1e-5)


def test_page_says_what_was_run(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert "# Table X" in page
    assert "**The paper:** FedPracDELTA is best." in page
    assert "- A decision." in page
    assert COMMAND in page
    assert "4 of 4" not in page
    assert "8 of 8 runs are done; nothing is missing." in page
    first = rows_of(page, "First")
    run_of = next(row for row in first if row[1] == "digits (scikit-learn)")
    assert run_of[2:5] == ["20", str(sweep.comparisons["one"].sample), "50"]
    assert run_of[7] == "0, 1"
    assert "floor 0.25" in next(row for row in rows_of(page, "Second") if row[1].startswith("digits"))[8]
    assert ("alpha" in run_of[8]) == ("hsu2019" in run_of[8])
    assert "5 epochs" in run_of[5] or "1 epoch," in run_of[5]
    assert "- Some CPU, 2 cores; python 3.12, torch 2.9 (8 runs)" in page
    assert "secret" not in page
    assert "First: rounds 50 (paper 500)" in page


def test_local_work_of_another_unit_is_set_against_the_papers(tmp_path: Path) -> None:
    sweep = sweep_of("table", paper={"local_steps": 7})
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert "First: local work 5 epochs (paper 7 steps);" in page
    assert "as many as there are" not in page


def test_titles_and_the_page_name_the_data_that_stand_in(tmp_path: Path) -> None:
    settings = {"task": "unipen62", "samplers": ["fedavg", "pracdelta"], "seeds": 2, "rounds": 50}
    parts = {"one": {"title": "FEMNIST, Adam"}, "two": {"title": "CelebA", "task": "celeba-subset"}}
    sweep = sweep_of("table", settings=settings, parts=parts, cpu={}, paper={"task": "femnist"})
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert "## UNIPEN-62 (for FEMNIST), Adam" in page
    assert "## a subset of CelebA (for CelebA)" in page
    assert "**Data:** UNIPEN-62 stands in for FEMNIST. A subset of CelebA stands in for CelebA." in page
    assert "UNIPEN-62 stands in for FEMNIST." in json.loads((tmp_path / "verdict.json").read_text())["measured"]
    full = Sweep(sweep.experiment, "paper", {"one": sweep.experiment.comparison("one", "paper")})
    page = write_page(full, records_of(full), tmp_path / "paper", {}, COMMAND)
    assert "## FEMNIST, Adam" in page
    assert "UNIPEN" not in page


def test_delta_is_set_against_uniform_draws_and_against_its_rival(tmp_path: Path) -> None:
    samplers = ["fedavg", "uniform", "fedis", "delta", "delta@pivotal", "fedis@pivotal"]
    settings = {"task": "digits", "samplers": samplers, "seeds": 2, "rounds": 50, "threshold": 0.7}
    sweep = sweep_of("table", settings=settings, parts={"one": {"title": "First"}}, order=["delta", "fedis", "fedavg"])
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    lines = page.partition("DELTA against uniform draws and against importance sampling")[2].splitlines()[2:4]
    assert lines[0].startswith("- First, FedDELTA: against Uniform rounds to 70 % speed-up ×2.71 [")
    assert "FedIS" not in lines[0]  # a pair of the paper's ordering
    assert lines[1].startswith("- First, FedDELTA (pivotal draws): against Uniform rounds to 70 % speed-up ×2.71 [")
    assert ", and against FedIS (pivotal draws) rounds to 70 % speed-up ×1.95 [" in lines[1]


def test_every_environment_is_named(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    records = records_of(sweep)
    other = records[-1].model_copy(update={"environment": {"device": "Some GPU", "processor": "B", "torch": "2.8"}})
    page = write_page(sweep, [*records[:-1], other], tmp_path, {}, COMMAND)
    assert "- Some CPU, 2 cores; python 3.12, torch 2.9 (7 runs)" in page
    assert "- Some GPU, B; torch 2.8 (1 run)" in page


def test_unfinished_sweeps_say_so(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    records = [run for run in records_of(sweep) if run.part == "one" and (run.sampler, run.seed) != ("fedavg", 1)]
    page = write_page(sweep, records, tmp_path, {"two": "its data are not here"}, COMMAND)
    assert "3 of 8 runs are done." in page
    assert "- First: missing fedavg seed 1" in page
    assert "- Second: no run is done (its data are not here)" in page
    assert "**The paper's ordering is not decided.**" in page
    assert "no interval" in page
    assert json.loads((tmp_path / "verdict.json").read_text())["done"] == 3


def test_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="no run is finished"):
        write_page(sweep_of("table"), [], tmp_path, {}, COMMAND)


def test_runs_that_never_reach_the_threshold_are_counted(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    records = [
        run.model_copy(update={"accuracy": [0.2] * 50}) if (run.sampler, run.seed) == ("fedavg", 0) else run
        for run in records_of(sweep)
    ]
    page = write_page(sweep, records, tmp_path, {}, COMMAND)
    assert rows_of(page, "FedAvg")[0][2] == "32.0 (1 of 2 never)"
    assert rows_of(page, "FedPracDELTA")[0][6].startswith("2.00\\*")
    assert "FedAvg never reached 70 % in 1 seed in which FedPracDELTA did not fail (First)" in page


def test_variants_stand_in_the_table_of_their_host(tmp_path: Path) -> None:
    view = {"rows_of": {"two": "one"}, "names": {"fedavg+two": "FedAvg again"}}
    sweep = sweep_of("table", view=view)
    groups = gather(sweep, records_of(sweep), read_view(sweep.experiment))
    assert [group.part for group in groups] == ["one"]
    assert groups[0].labels == ["fedavg", "pracdelta", "fedavg+two", "pracdelta+two"]
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert rows_of(page, "FedAvg again")
    assert "First, FedPracDELTA (Second): against FedAvg rounds to 70 % speed-up ×2.00" in page
    assert "and against FedPracDELTA rounds to 70 % speed-up ×1.00 [1.00, 1.00], open" in page


def test_other_thresholds_of_the_same_runs(tmp_path: Path) -> None:
    sweep = sweep_of("thresholds", view={"thresholds": {"two": 0.83}})
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert "## First" not in page
    assert "rounds to 83 %" in page
    assert rows_of(page, "FedAvg")[0][2] == "never (2 of 2 seeds)"
    assert rows_of(page, "FedPracDELTA")[0][2] == "15.5"
    assert "4 of 4 runs are done; nothing is missing." in page


def test_curves_of_losses(tmp_path: Path) -> None:
    settings = {"task": "digits", "samplers": ["fedavg", "pracdelta"], "seeds": 2, "rounds": 50}
    sweep = sweep_of("curves", view={"y": ["log10-loss", "accuracy"], "smoothing": 3, "columns": 2}, settings=settings)
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    expected = np.mean([-r / 50 - 0.84 for r in range(46, 51)])
    rows = {(row["part"], row["sampler"], row["value"]): row for row in table_csv(tmp_path)}
    assert float(rows["one", "pracdelta", "log10 loss"]["mean"]) == pytest.approx(expected, abs=1e-5)
    assert float(rows["one", "pracdelta", "accuracy"]["mean"]) == pytest.approx(83.95)
    assert "lower by 0.061 [" in rows_of(page, "FedPracDELTA")[0][2]
    assert (tmp_path / "curves.png").stat().st_size < 150_000


def test_best_accuracies(tmp_path: Path) -> None:
    sweep = sweep_of("best-accuracies", view={"rounds": [20, 40, 100], "best": 4})
    page = write_page(sweep, records_of(sweep), tmp_path, {}, COMMAND)
    assert "best 4 of 20 rounds, %" in page
    assert "best 4 of 100 rounds" not in page
    assert rows_of(page, "FedAvg")[0][1:] == ["10.00 ± 0.00", "79.95 ± 0.07"]
    assert rows_of(page, "FedPracDELTA")[0][1:] == ["83.95 ± 0.07", "83.95 ± 0.07"]
    assert (tmp_path / "best.png").stat().st_size < 150_000


def probed(sweep: Sweep) -> list[RunRecord]:
    """Runs with probes: norms of 1 and 4 for fedavg, twice that for pracdelta."""
    probes = {"round": [1.0, 2.0, 3.0, 4.0], "low": [9.0, 9.0, 1.0, 1.0], "high": [9.0, 9.0, 2.0, 8.0]}
    records = []
    for run in records_of(sweep):
        factor = (2.0 if run.sampler == "pracdelta" else 1.0) * (1 + 0.1 * run.seed * (run.sampler == "fedavg"))
        scaled = {name: column if name == "round" else [factor * x for x in column] for name, column in probes.items()}
        records.append(run.model_copy(update={"probes": scaled}))
    return records


@pytest.mark.parametrize("panels", ["column", "part"])
def test_probes(tmp_path: Path, panels: str) -> None:
    view = {"columns": {"largest": "high", "least": "low"}, "panels": panels, "ratio": ["high", "low"]}
    sweep = sweep_of("probes", view={**view, "bounds": {"low": [1.5, float("inf")]}})
    page = write_page(sweep, probed(sweep), tmp_path, {}, COMMAND)
    rows = {(row["part"], row["sampler"], row["value"]): row for row in table_csv(tmp_path)}
    assert float(rows["one", "pracdelta", "largest"]["mean"]) == pytest.approx(8)
    assert float(rows["one", "fedavg", "largest"]["mean"]) == pytest.approx(4 * 1.05)
    assert float(rows["one", "fedavg", "largest / least"]["mean"]) == pytest.approx(4)
    assert "First, FedAvg: least is within the paper's 1.5 to inf in 4 of 8 measured rounds." in page
    assert "FedPracDELTA before FedAvg" in page
    assert (tmp_path / "probes.png").stat().st_size < 150_000


def test_probes_without_an_order_judge_the_bounds(tmp_path: Path) -> None:
    view = {"columns": {"largest": "high"}, "bounds": {"high": [0.0, 100.0]}}
    sweep = sweep_of("probes", view=view, order=[])
    write_page(sweep, probed(sweep), tmp_path, {}, COMMAND)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "the bounds hold"


def test_bounds_are_judged_part_by_part(tmp_path: Path) -> None:
    view = {"columns": {"largest": "high", "least": "low"}, "bounds": {"high": [0.0, 100.0], "low": [0.5, 100.0]}}
    sweep = sweep_of("probes", view=view, order=[])
    records = [
        run.model_copy(update={"probes": {**run.probes, "low": [0.4, 1.0, 1.0, 1.0]}})
        if (run.part, run.sampler) == ("two", "fedavg")
        else run
        for run in probed(sweep)
    ]
    page = write_page(sweep, records, tmp_path, {}, COMMAND)
    expected = "bounds hold on First, and do not on Second (FedAvg, least: within in 6 of 8 measured rounds)"
    finding = json.loads((tmp_path / "verdict.json").read_text())
    assert finding["verdict"] == f"the {expected}"
    assert f"**The {expected}.** No ordering is claimed." in page
    assert "none is judged" not in page
    assert ".;" not in finding["measured"]


def test_pictures_of_long_runs_stay_small(tmp_path: Path) -> None:
    settings = {"task": "digits", "samplers": list(REACHES), "seeds": 3, "rounds": 2000}
    parts = {f"nu-{i}": {"title": f"nu = {i}"} for i in range(3)}
    sweep = sweep_of("curves", view={"y": "log10-loss"}, settings=settings, parts=parts)
    records = [
        run.model_copy(update={"loss": list(np.exp(0.3 * RNG.standard_normal(2000)))}) for run in records_of(sweep)
    ]
    write_page(sweep, records, tmp_path, {}, COMMAND)
    assert (tmp_path / "curves.png").stat().st_size < 150_000
    with Image.open(tmp_path / "curves.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    for label in REACHES:  # the palette keeps the colours of the samplers
        wanted = [int(looks_of([label])[label].colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(axis=1).min() < 20


def test_same_runs_same_bytes(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    for name in ("a", "b"):
        write_page(sweep, records_of(sweep), tmp_path / name, {}, COMMAND)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_smoothing_is_a_moving_average() -> None:
    sweep = sweep_of("curves", view={"y": "loss"})
    run = records_of(sweep)[0].model_copy(update={"loss": [float(r % 7) for r in range(50)]})
    band = curve_band([run], "loss", 4)
    loss = np.array(run.loss, dtype=np.float64)
    slow = [np.mean(loss[max(0, i - 3) : i + 1]) for i in range(50)]
    assert band.mean_r == pytest.approx(slow)


def test_a_sampler_has_one_colour_on_every_page() -> None:
    few = looks_of(["fedavg", "pracdelta"])
    many = looks_of(["uniform", "pracdelta@pivotal", "fedis", "pracdelta", "fedavg"])
    assert few["pracdelta"].colour == many["pracdelta"].colour == many["pracdelta@pivotal"].colour
    assert many["pracdelta"].dash != many["pracdelta@pivotal"].dash
    crowd = looks_of([f"pracdelta+n{i}" for i in range(6)])
    assert len({(look.colour, str(look.dash), look.marker) for look in crowd.values()}) == 6


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("pracdelta", "FedPracDELTA"),
        ("fedis@successive", "FedIS (successive draws)"),
        ("pracdelta@successive@plain-mean", "FedPracDELTA (successive draws, plain mean)"),
    ],
)
def test_readable_names(label: str, name: str) -> None:
    assert readable(label) == name


@pytest.mark.parametrize(
    ("kind", "view", "words"),
    [
        ("curves", {}, "view.y"),
        ("curves", {"y": "acuracy"}, "view.y"),
        ("table", {"smoothing": 3}, "allowed are baseline"),
        ("thresholds", {}, "view.thresholds"),
        ("tabel", {}, "did you mean 'table'"),
    ],
)
def test_a_wrong_view_is_a_sentence(kind: str, view: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        read_view(sweep_of(kind, view=view).experiment)


def test_index_has_a_line_for_each_page(tmp_path: Path) -> None:
    sweep = sweep_of("table")
    write_page(sweep, records_of(sweep), tmp_path / "table-x", {}, COMMAND)
    toy = {"name": "toy", "title": "The toy", "claim": "a | b", "measured": "c", "verdict": "holds", "scale": "cpu"}
    write_verdict(tmp_path / "toy", Finding(**toy, done=1, total=1, command="deltafl reproduce toy"))
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "README.md").write_text("# How fast it is\n", encoding="utf-8")
    text = write_index(tmp_path)
    assert text == (tmp_path / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    assert len(lines) == 2
    assert any("a \\| b" in line and "**holds**" in line for line in lines)
    assert any("FedPracDELTA against FedAvg: rounds to 70 % speed-up ×2.00" in line for line in lines)
    assert "8 of 8, scale cpu" in text
    assert "[How fast it is](speed/README.md)" in text
    assert "Not run yet: `limits`, `stability`, `figure-2`" in text
    assert "`toy`" not in text
    (tmp_path / "table-2" / "runs").mkdir(parents=True)
    assert "Begun, without a page yet: `table-2`. Not run yet: `limits`" in write_index(tmp_path)
    with pytest.raises(DeltaflError, match=r"no folder with a verdict\.json"):
        write_index(tmp_path / "nowhere")


def test_a_broken_verdict_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "verdict.json").write_text('{"name": 3}', encoding="utf-8")
    with pytest.raises(DeltaflError, match="write the page again"):
        write_index(tmp_path)


def test_groups_keep_the_order_of_the_settings() -> None:
    sweep = sweep_of(
        "table", settings={"task": "digits", "samplers": ["pracdelta", "fedavg"], "seeds": 2, "rounds": 50}
    )
    groups = gather(sweep, list(reversed(records_of(sweep))), read_view(sweep.experiment))
    found = [(group.part, label) for group in groups for label in group.labels]
    assert found == list(product(["one", "two"], ["pracdelta", "fedavg"]))
    assert all(list(row.records) == [0, 1] for group in groups for row in group.rows)
