"""Pages of experiments, made from synthetic runs whose numbers are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deltafl import DeltaflError
from deltafl.analysis import Run, curve_band, looks
from reproduction.curves import differences, lie_together
from reproduction.groups import gather
from reproduction.index import write_index
from reproduction.page import Finding, read_verdict, write_verdict
from reproduction.spec import Sweep
from reproduction.sweeps import write_page
from tools.sweeps import REACHES, runs_of_sweep, sweep_of

COMMAND = "python -m reproduction table-x --scale cpu"


def written(sweep: Sweep, folder: Path, runs: list[Run] | None = None) -> str:
    """The page of a sweep, by default with all of its runs."""
    return write_page(sweep, runs_of_sweep(sweep) if runs is None else runs, folder, {}, COMMAND)


def rows_of(page: str, name: str) -> list[list[str]]:
    """The cells of all table rows whose first cell is ``name``."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def finding(folder: Path) -> Finding:
    return read_verdict(folder / "verdict.json")


def test_a_table_has_the_papers_form_and_its_numbers(tmp_path: Path) -> None:
    fedavg_there = {"accuracy": 70.35, "sd": 0.51, "rounds": 426, "seconds": 1795.12}
    delta_there = {"accuracy": 72.1, "sd": 0.49, "rounds": 322}
    page = written(
        sweep_of(reported={"one": {"fedavg": fedavg_there, "pracdelta": delta_there}}), tmp_path
    )
    assert page == (tmp_path / "README.md").read_text(encoding="utf-8")
    (fedavg, more) = rows_of(page, "FedAvg")[:2]
    (delta, delta_more) = rows_of(page, "FedPracDELTA")[:2]
    assert fedavg[1:] == [
        "baseline",
        "baseline",
        "79.95 ± 0.07",
        "70.35 ± 0.51",
        "31.0",
        "426",
        "baseline",
    ]
    assert more[1:] == [
        "37.98 ± 2.01",
        "35.0",
        "279",
        "62",
        "1,795",
    ]  # 0.1 for 29 and 31 of 50 rounds, then 0.8, 0.799
    assert delta[1:7] == ["2.00", "1.32", "83.95 ± 0.07", "72.10 ± 0.49", "15.5", "322"]
    assert delta[7].startswith("+24.52")  # 63.28 and 61.73 against 39.40 and 36.56
    assert delta_more[3:] == ["140", "31", "–"]
    assert (
        "| First | FedPracDELTA before FedAvg | rounds to 70 % by mean of five | speed-up ×" in page
    )
    assert "| First | FedPracDELTA before FedAvg | mean accuracy | +24.52" in page


def test_a_page_states_what_was_run(tmp_path: Path) -> None:
    sweep = sweep_of(paper={"rounds": 500, "local_steps": 7})
    page = written(sweep, tmp_path)
    for text in (
        "# Table X",
        "**The paper:** FedPracDELTA is best.",
        "- A decision.",
        COMMAND,
        "8 of 8 runs are done.",
    ):
        assert text in page
    run_of = next(row for row in rows_of(page, "First") if row[1] == "digits (scikit-learn)")
    assert run_of[2:4] == ["20", "0, 1"]
    assert "rounds 50" in run_of[4]
    assert (
        "local_lr 0.25"
        in next(row for row in rows_of(page, "Second") if row[1].startswith("digits"))[4]
    )
    assert "- Some CPU, 2 cores; python 3.12, torch 2.9 (8 runs)" in page
    assert "secret" not in page
    assert (
        "- First: rounds 50 (paper 500), local_epochs 5 (paper unset), local_steps unset (paper 7)"
        in page
    )


def test_titles_and_the_page_name_the_data_that_stand_in(tmp_path: Path) -> None:
    settings = {"task": "unipen62", "samplers": ["fedavg", "pracdelta"], "seeds": 2, "rounds": 50}
    parts = {"one": {"title": "FEMNIST, Adam"}, "two": {"title": "CelebA", "task": "celeba-subset"}}
    sweep = sweep_of(settings=settings, parts=parts, cpu={}, paper={"task": "femnist"})
    page = written(sweep, tmp_path)
    assert "## UNIPEN-62 (for FEMNIST), Adam" in page
    femnist = "FEMNIST itself, for which UNIPEN-62 stands in"
    assert (
        f"**Not tested:** {femnist}; CelebA itself, for which CelebA with 278 people stands in."
        in page
    )
    full = Sweep(sweep.experiment, "paper", {"one": sweep.experiment.comparison("one", "paper")})
    page = written(full, tmp_path / "paper")
    assert "## FEMNIST, Adam" in page
    assert "UNIPEN" not in page


def test_unfinished_sweeps_say_so(tmp_path: Path) -> None:
    sweep = sweep_of()
    runs = [
        run
        for run in runs_of_sweep(sweep)
        if run.part == "one" and (run.sampler, run.seed) != ("fedavg", 1)
    ]
    page = write_page(sweep, runs, tmp_path, {"two": "its data are not here"}, COMMAND)
    assert "**Not tested:** 5 of 8 planned runs." in page
    assert "- First: missing fedavg seed 1" in page
    assert "- Second: no run is done (its data are not here)" in page
    assert "**The paper's ordering is not decided: 1 seed is too few.**" in page
    assert finding(tmp_path).done == 3
    with pytest.raises(DeltaflError, match="no run is finished"):
        written(sweep, tmp_path, [])


def test_runs_that_never_reach_the_threshold_are_counted(tmp_path: Path) -> None:
    runs = [
        run._replace(accuracy_r=np.full(50, 0.2))
        if (run.sampler, run.seed) == ("fedavg", 0)
        else run
        for run in runs_of_sweep(sweep_of())
    ]
    page = written(sweep_of(), tmp_path, runs)
    assert rows_of(page, "FedAvg")[0][3] == "32.0 (1 of 2 never)"
    assert rows_of(page, "FedPracDELTA")[0][1].startswith("2.00\\*")
    assert "Of these, 2 leave out seeds with which one method failed" in page
    assert "no interval (1 seed left out)" in page


def test_variants_stand_in_the_table_of_their_host(tmp_path: Path) -> None:
    sweep = sweep_of(view={"rows_of": {"two": "one"}, "names": {"fedavg+two": "FedAvg again"}})
    groups = gather(sweep, runs_of_sweep(sweep))
    assert [group.part for group in groups] == ["one"]
    assert groups[0].labels == ["fedavg", "pracdelta", "fedavg+two", "pracdelta+two"]
    page = written(sweep, tmp_path)
    assert rows_of(page, "FedAvg again")
    others = page.partition("Comparisons outside the paper's ordering")[2]
    assert rows_of(others, "FedPracDELTA (Second) against FedAvg")[0][2].startswith(
        "speed-up ×2.00"
    )
    assert (
        rows_of(others, "FedPracDELTA (Second) against FedPracDELTA")[0][4] == "no interval"
    )  # of two seeds


@pytest.mark.parametrize(
    ("low", "verdict", "number"),
    [
        (0.5, "holds", "Within the bounds: 16 of 16 values of First, 16 of 16 values of Second."),
        (
            1.05,
            "holds in part",
            "Within the bounds: 16 of 16 values of First, 8 of 16 values of Second.",
        ),
        (
            2.05,
            "is contradicted",
            "Within the bounds: 8 of 16 values of First, 8 of 16 values of Second.",
        ),
    ],
)
def test_probes_without_an_order_judge_the_bounds(
    low: float, verdict: str, number: str, tmp_path: Path
) -> None:
    sweep = sweep_of(
        "probes", view={"columns": {"least": "low"}, "bounds": {"low": [low, 100.0]}}, order=[]
    )
    runs = []
    for run in runs_of_sweep(sweep):
        least_r = (1.0 + (run.part == "one")) * np.array([9.0, 9.0, 1.0, 1.0])
        runs.append(run._replace(probes={"round": np.arange(1.0, 5), "low": least_r}))
    page = written(sweep, tmp_path, runs)
    assert finding(tmp_path).verdict == verdict
    assert f"**{verdict[:1].upper()}{verdict[1:]}.** {number}" in page


def test_curves_that_lie_on_one_another_are_drawn_as_differences(tmp_path: Path) -> None:
    def level(run: Run) -> float:
        return 0.2 + 0.01 * run.seed + 0.02 * (run.sampler == "pracdelta")

    sweep = sweep_of("curves", view={"y": ["accuracy"]})
    runs = [
        run._replace(accuracy_r=np.linspace(level(run), level(run) + 0.3, 50))
        for run in runs_of_sweep(sweep)
    ]
    group = gather(sweep, runs)[0]
    (found,) = differences(group, [group.row("pracdelta")], "accuracy")
    np.testing.assert_allclose(found.mean_r, 2)
    bands = [curve_band(list(row.runs.values()), "accuracy") for row in group.rows]
    assert not lie_together(bands, [found])  # 2 of 32 points
    assert lie_together(bands, [found._replace(mean_r=found.mean_r / 2)])
    assert not lie_together(bands, [found._replace(mean_r=np.full(50, np.nan))])
    assert not lie_together(bands, [])
    written(sweep, tmp_path, runs)


@pytest.mark.drawn
def test_pictures_of_long_runs_stay_small_and_keep_the_colours(tmp_path: Path) -> None:
    settings = {"task": "digits", "samplers": list(REACHES), "seeds": 2, "rounds": 2000}
    sweep = sweep_of("curves", view={"y": ["log10-loss"]}, settings=settings)
    rng = np.random.default_rng(5)
    runs = [
        run._replace(loss_r=np.exp(0.3 * rng.standard_normal(2000))) for run in runs_of_sweep(sweep)
    ]
    written(sweep, tmp_path, runs)
    assert (tmp_path / "curves.png").stat().st_size < 150_000
    with Image.open(tmp_path / "curves.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    for label, look in looks(list(REACHES)).items():
        wanted = [int(look.colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(axis=1).min() < 20, label


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "curves", "view": {"y": ["acuracy"]}}, "view.y"),
        ({"view": {"smothing": 3}}, "view.smothing"),
        ({"kind": "tabel"}, "kind: it must be 'table'"),
    ],
)
def test_a_wrong_file_is_a_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        sweep_of(**change)


def test_the_index_has_a_line_for_each_page(tmp_path: Path) -> None:
    written(sweep_of(), tmp_path / "table-x")
    toy = {
        "name": "toy",
        "title": "The toy",
        "claim": "a claim",
        "short": "it is",
        "number": "c",
        "verdict": "holds",
    }
    command = "python -m reproduction toy"
    write_verdict(tmp_path / "toy", Finding(**toy, scale="cpu", done=1, total=3, command=command))
    ours = {**toy, "name": "limits", "title": "The limits", "verdict": "no claim"}
    write_verdict(
        tmp_path / "limits",
        Finding(**ours, own=True, scale="cpu", done=1, total=1, command=command),
    )
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "README.md").write_text("# How fast it is\n", encoding="utf-8")
    text = write_index(tmp_path)
    assert text == (tmp_path / "README.md").read_text(encoding="utf-8") == write_index(tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    assert lines[0] == "| [The toy](toy/README.md) | it is | **holds** (1 of 3 runs) | c |"
    assert len(lines) == 3
    counts = "1 upheld, 0 upheld in part, 0 upheld in part and contradicted in part, "
    assert f"Of 2 claims of the paper: {counts}" in text
    assert lines[2] in text.partition("## This project's own studies")[2]
    assert "First: FedPracDELTA against FedAvg: rounds to 70 % speed-up ×2.00" in text
    assert "[How fast it is](speed/README.md)" in text
    assert "Without a page: `costs`, `lora`, `registered`, `stability`" in text
    assert "`toy`" not in text
    with pytest.raises(DeltaflError, match=r"no folder with a verdict\.json"):
        write_index(tmp_path / "nowhere")
