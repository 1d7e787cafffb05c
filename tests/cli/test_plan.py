"""``deltafl plan``: what it prints and writes, that it goes on, and one sentence for mistakes."""

import csv
from pathlib import Path

import numpy as np
import pytest

import deltafl as library
from deltafl.analysis.advice import Advice
from deltafl.analysis.forecast import Forecast
from deltafl.analysis.prices import Prices
from deltafl.analysis.statistics import Interval
from deltafl.simulation.comparisons.pilot import PlanSettings
from deltafl.simulation.folder.directory import RunDirectory, recorded_settings
from deltafl.simulation.view.foreseen import read_plan
from deltafl.simulation.view.live import _row, picture
from deltafl.simulation.view.seen import run_at
from tools.cli import deltafl_here

SMALL = (
    *("--task", "digits", "--clients", "12", "--rounds", "12", "--seeds", "2"),
    *("--samplers", "uniform,uniform+average=0.5", "--cohorts", "2,4", "--processes", "1"),
    *("--client-costs", "costs.csv"),
)
#: Every client costs 2, so that all costs are known.
COSTS = "hour,client,value\n" + "".join(f"0,{client},2\n" for client in range(12))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "costs.csv").write_text(COSTS)
    done = deltafl_here("plan", *SMALL, "--goal", "0.6", "--out", "first", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("For 60 % at least cost take uniform")
    assert (folder / "first" / "plan.txt").read_text().strip() in done.stdout
    return folder


def test_the_answer_is_in_plain_files(planned: Path) -> None:
    with (planned / "first" / "errors.csv").open() as file:
        errors = list(csv.DictReader(file))
    by_size = {int(row["n"]): float(row["mse"]) for row in errors if row["method"] == "uniform"}
    assert {1, 2, 4, 12} <= by_size.keys()
    assert all(row["exact"] == "True" for row in errors)
    # (1 / n - 1 / m) S^2 of simple random sampling.
    assert by_size[2] / by_size[4] == pytest.approx((1 / 2 - 1 / 12) / (1 / 4 - 1 / 12), rel=1e-6)
    assert by_size[12] == pytest.approx(0, abs=1e-12)
    with (planned / "first" / "forecasts.csv").open() as file:
        forecasts = list(csv.DictReader(file))
    for row in forecasts:
        assert float(row["rounds_low"]) <= float(row["rounds"]) <= float(row["rounds_high"])
        # Trainings alone are paid if no price is given, each as its client costs.
        assert float(row["cost"]) == pytest.approx(2 * float(row["trainings"]), rel=1e-5)
    measured = [row for row in forecasts if row["measured_rounds"]]
    assert measured
    for row in measured:
        runs = (planned / "first" / "runs").glob(f"{row['method']}+sample={row['n']}-seed*")
        reached = [_first_at(0.6, run) for run in runs]
        assert float(row["measured_rounds"]) == pytest.approx(np.mean(reached), rel=1e-5)


def _first_at(goal: float, run: Path) -> int:
    """The first round of a run with this accuracy."""
    accuracies = [line["test"]["accuracy"] for line in RunDirectory(run).lines("rounds.jsonl")]
    return next(at for at, value in enumerate(accuracies) if at and value >= goal)


@pytest.mark.thorough
def test_the_same_seeds_give_the_same_plan_from_python_too(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned)
    again = library.plan_for(
        "digits",
        0.6,
        samplers=["uniform", "uniform+average=0.5"],
        seeds=2,
        clients=12,
        rounds=12,
        cohorts=[2, 4],
        client_costs="costs.csv",
        out=planned / "second",
        processes=1,
        progress=False,
    )
    first = planned / "first"
    assert (first / "plan.txt").read_text() == f"{again}\n"
    for name in ("errors.csv", "forecasts.csv"):
        assert (first / name).read_bytes() == (planned / "second" / name).read_bytes()


def test_another_goal_and_price_go_on_in_the_folder(planned: Path) -> None:
    cheaper = ("--goal", "0.5", "--cost", "training=1,round=9", "--budget", "11", "--resume")
    done = deltafl_here("plan", *SMALL, *cheaper, "--out", "first", cwd=planned)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("For 50 % at least cost")
    assert "more than the budget of 11" in done.stdout
    back = deltafl_here(
        "plan", *SMALL, "--goal", "0.6", "--cost", "training=1", "--budget", "1e9", "--resume",
        "--out", "first", cwd=planned,
    )  # fmt: skip
    assert back.stdout.startswith("For 60 % at least cost")
    assert "That is within the budget of 1e+09" in back.stdout


def test_the_prices_of_the_help_can_be_written() -> None:
    words = str(PlanSettings.model_fields["cost"].description).partition(";")[0].split()[-1]
    assert Prices.read(words).mb_up == 0.1


def test_without_a_task_it_recommends(tmp_path: Path) -> None:
    words = ("--sizes", "unequal", "--no-labels", "--census", "--memory", "--reachable")
    plan = deltafl_here("plan", *words, cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout == deltafl_here("recommend", *words, cwd=tmp_path).stdout
    # A task may be named in other ways, and the usual one needs no name.
    for of_plans in (("--set", "task=toy", "--set", "goal=x"), ("--seeds", "none")):
        plan = deltafl_here("plan", *of_plans, cwd=tmp_path)
        assert plan.returncode == 2
        assert "No such option" not in plan.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--cost", "training=0"), "write a number above 0"),
        (("--cost", "trainings=1"), "did you mean 'training'"),
        (("--cost", "second=1"), "--speeds"),
        (("--goal", "1.2"), "goal"),
        (("--goal", "0"), "goal"),
        (("--budget", "0.5"), "below one round"),
        (("--cohorts", "40"), "12 clients"),
        (("--samplers", "uniform+sample=3"), "leave +sample out"),
        (("--samplers", "full+average=0.5"), "asks everybody, whatever n is"),
        (("--metric", "log_loss", "--goal", "-1"), "cannot be reached"),
        (("--lr-schedule", "cosine"), "which a plan is to find"),
        (("--samplers", "hics-fl"), "depend on the number of rounds"),
        (("--samplers", "uniform,uniform()"), "are one method"),
        (("--samplers", "census+average=0.5,census+average=.50"), "are one method"),
        (("--set", "sample=3"), "a plan finds n"),
        (("--set", "threshold=0.5"), "threshold does nothing beside goal"),
        (("--set", "relative_error=0.5"), "sizes its cohorts by relative_error"),
        (("--set", "sample=auto"), "sizes its cohorts by relative_error"),
        (("--samplers", "uniform,census+budget=100"), "sizes its cohorts by budget"),
        (("--goal", "0.99", "--rounds", "2"), "cannot be reached"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    common = ("--task", "digits", "--clients", "12", "--rounds", "3", "--seeds", "1",
              "--samplers", "uniform")  # fmt: skip
    given = {*words}
    kept = [w for pair in zip(common[::2], common[1::2], strict=True) if pair[0] not in given
            for w in pair]  # fmt: skip
    goal = () if "--goal" in given else ("--goal", "0.2")
    done = deltafl_here(
        "plan", *kept, *goal, *words, "--processes", "1", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("deltafl: ")]) == 1
    if sentence != "cannot be reached":
        assert not (tmp_path / "out").exists()


def test_a_pilot_of_another_task_is_refused(planned: Path) -> None:
    done = deltafl_here(
        "plan", "--task", "toy", "--goal", "0.6", "--resume", "--out", "first", cwd=planned
    )
    assert done.returncode == 2
    compare = deltafl_here("compare", "--resume", "--out", "first", cwd=planned)
    assert compare.returncode == 2
    assert "deltafl plan" in compare.stderr


def test_watch_shows_the_cost_beside_the_one_foreseen(planned: Path) -> None:
    with (planned / "first" / "forecasts.csv").open() as file:
        rows = list(csv.DictReader(file))
    # The runs of the pilot are runs like others, and this one is of the plan's own n.
    row = next(row for row in rows if row["method"] == "uniform" and row["n"] == "4")
    run = planned / "first" / "runs" / "uniform+sample=4-seed0"
    foreseen = read_plan(planned / "first")
    shown = picture(run, foreseen)
    facts = {cells[0]: cells[1] for cells in shown.rows}
    lines = [*RunDirectory(run).lines("rounds.jsonl")]
    # A training costs 2.
    spent = foreseen.prices.training * 2 * 4 * (len(lines) - 1)
    spent += foreseen.prices.round * (len(lines) - 1)
    assert facts["cost planned"].startswith(f"{spent:g} of {float(row['cost']):.0f}"[:6])
    assert facts["cost planned"].endswith("% with uniform, n = 4")
    reached = next(
        (line["round"] for line in lines if line["test"]["accuracy"] >= foreseen.goal), None
    )
    said = [text for text in shown.remarks if "was reached in round" in text]
    assert len(said) == (reached is not None)
    assert all(f"round {reached}," in text for text in said)
    # Had the plan foreseen less, more would have been spent than that.
    cheap = foreseen._replace(
        goal=0.999, rows=[{**each, "cost": 0.1, "cost_high": 0.2} for each in foreseen.rows]
    )
    assert any("more than the plan foresaw" in text for text in picture(run, cheap).remarks)
    done = deltafl_here("watch", str(run), "--once", "--plan", "first", cwd=planned)
    assert done.returncode == 0 and "cost planned" in done.stdout


def test_a_plan_stays_that_of_its_goal_and_prices(planned: Path) -> None:
    """Another goal in the same folder fails; what was foreseen is of the first one."""
    before = read_plan(planned / "first")
    words = ("--goal", "0.99", "--cost", "training=100", "--resume", "--out", "first")
    done = deltafl_here("plan", *SMALL, *words, cwd=planned)
    assert done.returncode == 2 and "cannot be reached" in done.stderr
    assert read_plan(planned / "first") == before


def test_watch_finds_the_row_of_the_n_that_was_asked_for(planned: Path) -> None:
    run = planned / "first" / "runs" / "uniform+sample=4-seed0"
    foreseen = read_plan(planned / "first")
    row = foreseen.row("uniform", 4)
    seen = run_at(run, "run", recorded_settings(run) or {}, None)
    assert seen.n == 4
    # More are asked in a round than n, or fewer: in a census, or where clients are away.
    lines = [{**seen.last, "num_selected": number} for number in (2, 12)]
    for each in (seen._replace(lines=[line]) for line in lines):
        assert _row(each, foreseen) == row
    # A label may have an n of its own.
    assert _row(seen._replace(method="uniform+sample=2"), foreseen) == foreseen.row("uniform", 2)


def test_watch_judges_by_the_metric_and_the_task_of_the_plan(planned: Path) -> None:
    run = planned / "first" / "runs" / "uniform+sample=4-seed0"
    foreseen = read_plan(planned / "first")
    assert foreseen.judge == library.types.ACCURACY
    other = foreseen._replace(judge=library.types.Judge("f1", share=True, written="macro F1"))
    said = " ".join(picture(run, other._replace(goal=1e-9)).remarks)
    assert "of macro F1, which is not measured here" in said and "was reached" not in said
    with pytest.raises(library.DeltaflError, match="plan is for the task 'synthetic'"):
        picture(run, foreseen._replace(task="synthetic"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no plan: name the --out of deltafl plan"),
        ("", "no method comes to the goal"),
        ("method,n,cost\nuniform,2\n", "line 2: cost"),
        ("method,n,cost,cost_low,cost_high\nuniform,2,-1,,\n", "line 2: cost"),
        ("method,n,cost,cost_low,cost_high\nuniform,2,nan,,\n", "line 2: cost"),
        ("method,n\nuniform," + "9" * 200_000, "damaged"),
    ],
)
def test_what_is_no_plan_is_a_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    config = 'task = "digits"\ngoal = 0.5\ncost = "training=1"\n'
    (tmp_path / "config.toml").write_text(config)
    if text is not None:
        (tmp_path / "forecasts.csv").write_text(text)
    with pytest.raises(library.DeltaflError, match=said):
        read_plan(tmp_path)


def test_a_plan_of_one_seed_has_empty_cells_where_there_is_no_interval() -> None:
    one = Interval(3.0, None, None)
    both = Interval(2.0, 1.0, 4.0)
    cells = Forecast("uniform", 2, True, one, one, both, one).cells()
    assert [*cells.values()][:5] == ["uniform", 2, True, "3", ""]
    assert (cells["cost"], cells["cost_high"]) == ("3", "")
    assert (cells["megabytes_low"], cells["megabytes_high"]) == ("1", "4")
    # Where no method comes to the goal the file has its headings.
    nothing = Advice(0.9, Prices.read(None), None, errors=[]).forecasts_csv()
    assert nothing == ",".join([*cells, "goal", "prices"]) + "\n"
