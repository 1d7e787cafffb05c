"""What a person reads: the table at 80 and 100 columns, and the sentences below it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from deltafl.analysis import Run, Summary, comparison_table, remarks, summarise
from deltafl.analysis.paper import to_latex
from deltafl.analysis.runs import Fairness
from deltafl.analysis.text import cells_of, human_amount, human_bytes
from deltafl.analysis.verdict import bias_remark, says_little
from deltafl.samplers.label import parse_label
from tools.runs import make_run, runs_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sampler.py"


def render(summary: Summary, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_table(summary))
    return [line.rstrip() for line in capture.get().splitlines()]


def wide_runs() -> list[Run]:
    """Many samplers with long labels and large numbers, the widest cells that an experiment
    makes.
    """
    reaches: dict[str, list[int | None]] = {
        "fedavg": [1200, 1500, 1400],
        "uniform": [1300, 1450, 1350],
        "full": [700, 800, 760],
        "clustered-sampling": [1100, 1400, 1290],
        "fedis@multinomial": [1000, 1350, None],
        "power-of-choice": [None, None, None],
    }
    return [
        make_run(
            sampler,
            seed,
            reach,
            num_rounds=2000,
            accuracy_r=np.where(np.arange(1, 2001) >= (reach or 9999), 0.8, 0.2) + 0.001 * seed,
            bytes_r=1e8 * np.arange(1, 2001),
            seconds_r=7.3 * np.arange(1, 2001),
        )
        for sampler, seeds in reaches.items()
        for seed, reach in enumerate(seeds)
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_fits_and_cuts_nothing(width: int) -> None:
    runs = [
        run._replace(fairness=Fairness(mean=0.8, worst_tenth=0.4 + 0.01 * run.seed, sd=0.1))
        for run in wide_runs()
    ]
    lines = render(summarise(runs, 0.7), width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert "…" not in text
    for piece in (
        "1,366.7",
        "(2/3 seeds)",
        "(0/3 seeds)",
        "0.00",
        "1.00",
    ):
        assert piece in text
    for piece, least in {"136.7 GB": 100, "41.0±1.0": 100, "1.81 [1.72, 1.91]": 200}.items():
        assert (piece in "\n".join(lines[: lines.index("")])) == (width >= least)


@pytest.mark.parametrize("width", [40, 47, 60, 72, 80, 200])
def test_names_stay_and_columns_go_where_the_terminal_is_narrow(width: int) -> None:
    """Every piece of the table is a whole heading, name or number; columns that lack are named."""
    long = "mine.py:OfSomeLength(power=2)@pivotal+average=0.5"
    runs = [
        run._replace(fairness=Fairness(mean=0.8, worst_tenth=0.4 + 0.01 * run.seed, sd=0.1))
        for run in [*wide_runs(), make_run(long, 0, 3, num_rounds=2000)]
    ]
    summary = summarise(runs, 0.7)
    lines = render(summary, width)
    assert all(cell_len(line) <= width for line in lines)
    head = lines[: lines.index("")]
    where = next((at for at, line in enumerate(head) if line.startswith("Too narrow")), len(head))
    table = [line for line in head[:where] if not line.startswith("─")]
    left_out = " ".join(head[where:])
    names = [entry.sampler for entry in summary.samplers if entry.sampler != long]
    assert [line.split()[0] for line in table if line.split()[0] in names] == names
    column = " ".join(line.split("  ")[0].strip() for line in table)
    assert long in re.sub(r"\s", "", column)
    whole = {
        "accuracy",
        "%",
        "sampler",
        "worst",
        "tenth",
        "sd over",
        "clients",
        "gap closed",
        "[95 %]",
        "rounds to",
    }
    whole |= {"70 %", "speed-up", "bytes"}
    for entry in summary.samplers:
        for cell in cells_of(entry, summary).values():
            whole |= {cell.line}
    parts = [piece for line in table for piece in re.split(r"  +", line.strip())]
    folded = [part for part in parts if part not in {*whole, *names}]
    assert re.sub(r"\s", "", "".join(folded)) == long
    assert ("bytes" in left_out) == (width < 200)
    assert ("gap closed" in left_out) == (width < 60)


def test_the_worst_tenth_is_shown_where_it_was_measured_and_judged_by_its_interval() -> None:
    tails = {
        "uniform": (0.40, 0.42, 0.41),
        "fair": (0.50, 0.53, 0.51),
        "greedy": (0.30, 0.33, 0.31),
    }
    runs = [
        make_run(name, seed, 3, fairness=Fairness(mean=0.8, worst_tenth=tail, sd=0.1))
        for name, tail_s in tails.items()
        for seed, tail in enumerate(tail_s)
    ]
    summary = summarise([*runs, make_run("old", 0, 3)], None)
    rows = {
        line.split()[0]: line.split()
        for line in render(summary, 80)
        if "±" in line or line.startswith("old")
    }
    assert (rows["fair"][2], rows["greedy"][2], rows["old"][2]) == ("51.3±1.5", "31.3±1.5", "—")
    assert "Higher worst tenth than uniform (interval excludes 0): fair." in remarks(summary)
    assert "Lower worst tenth than uniform (interval excludes 0): greedy." in remarks(summary)
    assert "orst tenth" not in " ".join(remarks(summarise(runs_of(uniform=[3, 4]), None)))


def test_brackets_in_labels_are_not_markup() -> None:
    assert any(
        line.startswith("[bold]x")
        for line in render(summarise([make_run("[bold]x", 0, 3)], 0.7), 100)
    )


def test_diverged_loss_is_a_dash() -> None:
    runs = [
        make_run("fedavg", 0, 3, "loss"),
        make_run("fedis", 0, 3, "loss", loss_r=np.full(10, np.nan)),
    ]
    summary = summarise(runs, 0.5)
    row = next(line for line in render(summary, 100) if line.startswith("fedis"))
    assert row.split()[1] == "—"
    assert "† Diverged: fedis (1 of 1 seed)." in " ".join(remarks(summary))


def test_numbers_for_people() -> None:
    assert [human_bytes(number) for number in (999.6, 1234, None)] == ["1.0 kB", "1.2 kB", "—"]
    assert [human_amount(number) for number in (0.5, 9.996, 1747.6, None)] == [
        "0.5",
        "10",
        "1,748",
        "—",
    ]


def test_no_threshold_shows_totals() -> None:
    lines = render(summarise(runs_of(fedavg=[3, 4]), None), 80)
    row = next(line for line in lines if line.startswith("fedavg"))
    assert row.split() == ["fedavg", "80.0±0.0", "—", "10.0", "kB"]


@pytest.mark.parametrize(
    ("label", "settings", "part"),
    [
        ("uniform", {}, None),
        ("innovation@pivotal", {}, None),
        ("fedavg", {}, "estimator hajek"),
        ("pracdelta@successive", {}, "design successive"),
        ("power-of-choice", {}, "estimator plain-mean"),
        ("pracdelta(floor=0.0)", {}, "draws that leave clients out"),
        ("cluster-is(drop_small_after=9)", {}, "draws that leave clients out"),
    ],
)
def test_a_biased_method_is_named_with_the_part_that_makes_it_so(
    label: str, settings: dict[str, float], part: str | None
) -> None:
    remark = [] if part is None else [f"Biased: {label} ({part})."]
    assert bias_remark([label], settings) == remark
    summary = summarise(
        [make_run(label, 0, 3), make_run("no sampler", 0, 3)], 0.7, settings=settings
    )
    assert [sentence for sentence in remarks(summary) if "iased" in sentence] == remark


def test_an_own_sampler_without_the_claim_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.read_text().replace("    unbiased = True\n", ""))
    # As a comparison does: a report of somebody else's folder imports nothing, and says nothing.
    for path in (EXAMPLE, file):
        parse_label(f"{path}:ByLoss")
    assert bias_remark([f"{EXAMPLE}:ByLoss"], {}) == []
    assert bias_remark([f"{file}:ByLoss"], {}) == [f"Biased: {file}:ByLoss (estimator plain-mean)."]


def test_a_norm_guard_makes_every_method_biased() -> None:
    remark = "norm_guard = 3 shortens estimates that are longer than those before."
    assert bias_remark(["uniform"], {"norm_guard": 3.0}) == [f"Biased: {remark}"]
    assert bias_remark(["uniform", "fedavg"], {"norm_guard": 3.0}) == [
        f"Biased, all of them: {remark}"
    ]


def test_a_row_has_its_intervals_beside_the_numbers() -> None:
    # r = a / mean(a) - b / mean(b) = (.02202, -.00097, -.02105): se .01244, times t_2 = 4.3027
    # gives .0535.
    lines = render(summarise(wide_runs(), 0.7), 120)
    row = next(line for line in lines if line.startswith("full "))
    assert row.split() == [
        "full",
        "80.1±0.1",
        "1.00",
        "753.3",
        "1.81",
        "[1.72,",
        "1.91]",
        "75.3",
        "GB",
    ]


def test_remarks_state_the_result_first() -> None:
    reaches: dict[str, list[int | None]] = {
        "fedavg": [600, 620, 640],
        "fedis": [300, 310, 321],
        "delta": [600, 640, 619],
        "md": [900, 930, 961],
    }
    runs = [
        make_run(k, seed, reach, num_rounds=1000)
        for k, v in reaches.items()
        for seed, reach in enumerate(v)
    ]
    assert remarks(summarise(runs, 0.7))[:3] == [
        "Fewer rounds than fedavg (speed-up [95 %]): fedis 2.00 [1.99, 2.01].",
        "More rounds than fedavg (speed-up [95 %]): md 0.67 [0.67, 0.67].",
        "Each interval is 95 % by itself, not all of them together.",
    ]


@pytest.mark.parametrize(
    ("reaches", "threshold", "sentence"),
    [
        ({"fedavg": [3, 5], "fedis": [5, 3]}, 0.7, "No interval shows a difference to fedavg"),
        (
            {"fedavg": [6, 6], "fedis": [3, 3]},
            0.7,
            "No interval shows a difference to fedavg",
        ),  # no width: no proof
        ({"fedavg": [6], "fedis": [3]}, 0.7, "One seed: no intervals."),
        ({"fedavg": [3, 4]}, None, "No threshold was set"),
        (
            {"full": [3, 4, 3], "uniform": [7, 9, 8], "census": [4, 6, 5]},
            None,
            "Each interval is 95 % by itself",  # that of a gap, too
        ),
        ({"fedis": [3, 4], "md": [3, 4]}, 0.7, "No speed-ups: neither uniform"),
        ({"fedavg": [None]}, 0.7, "No run reached 70 %."),
        (
            {"fedis": [3, 4], "uniform": [3, 4]},
            0.7,
            "No gap closed: it needs both full and uniform",
        ),
        (
            {"full": [6, 7], "uniform": [3, 4]},
            0.7,
            "No gap closed: full participation is not ahead",
        ),
        (
            {"fedavg": [6, None, 7], "fedis": [3, 4, 4]},
            0.7,
            "Rounds and bytes are means over the seeds that reached 70 %.",
        ),
    ],
)
def test_remarks(
    reaches: dict[str, list[int | None]], threshold: float | None, sentence: str
) -> None:
    assert any(
        found.startswith(sentence)
        for found in remarks(
            summarise(
                [make_run(k, seed, at) for k, v in reaches.items() for seed, at in enumerate(v)],
                threshold,
            )
        )
    )


def test_who_failed_with_a_seed_is_not_called_faster() -> None:
    def found(**reaches: list[int | None]) -> str:
        runs = [
            make_run(k, seed, at, num_rounds=40)
            for k, v in reaches.items()
            for seed, at in enumerate(v)
        ]
        return " ".join(remarks(summarise(runs, 0.7)))

    assert "speed-up [95 %]): " not in found(uniform=[30, 31, 32, 30], fedis=[10, 11, 10, None])
    assert "speed-up [95 %]): " not in found(uniform=[10, 11, 10, None], fedis=[30, 31, 32, 30])
    assert "Fewer rounds than uniform (speed-up [95 %]): fedis 3.05" in found(
        uniform=[30, 31, None], fedis=[10, 10, 9]
    )
    assert "speed-up [95 %]): " in found(uniform=[30, 31, 32, None], fedis=[10, 11, 10, None])
    assert "; the sampler that fails is not called better." in found(
        uniform=[9, None], fedis=[1, 1]
    )


def test_remarks_name_who_closes_part_of_the_gap() -> None:
    runs = runs_of(
        uniform=[8, 9, 10], full=[2, 2, 3], fedis=[5, 5, 6], md=[10, 9, 8], fedavg=[10, 11, 12]
    )
    assert remarks(summarise(runs, None))[:2] == [
        "Better than uniform over all rounds (interval of the gap excludes 0): fedis.",
        "Worse than uniform over all rounds (interval of the gap excludes 0): fedavg.",
    ]


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.5, 0.7])
def test_a_majority_is_of_accuracy_alone(threshold: float) -> None:
    settings = {"samplers": ["uniform", "full"], "threshold": threshold}
    assert [*says_little(settings, {"clients": "9"})] == []
    found = [*says_little(settings, {"clients": "9", "majority": "0.6"})]
    assert len(found) == (threshold <= 0.6)


def test_the_end_beside_full_has_three_verdicts_and_names_lost_seeds() -> None:
    def level(label: str, values: list[float]) -> list[Run]:
        return [
            make_run(label, seed, 3, accuracy_r=np.full(10, value))
            for seed, value in enumerate(values)
        ]

    runs = level("full", [0.70, 0.71, 0.72]) + level("uniform", [0.60, 0.62, 0.61])
    runs += level("fedis", [0.80, 0.82, 0.81]) + level("md", [0.69, 0.72, 0.72])
    ended: dict[str, Any] = {"stopped_why": "a rule", "settings": {"rounds": 20}}
    stopped = [run._replace(**ended) for run in level("delta", [0.1, 0.1, 0.1])]
    said = next(text for text in remarks(summarise(runs + stopped, None)) if "At the end" in text)
    ahead, open_, behind = said.removesuffix(".").split("; ")
    assert "full is ahead of uniform (10.0 [" in ahead
    assert "is not clearly apart from md" in open_
    assert behind.startswith("is behind fedis (-10.0 [")
    assert "delta" not in said


def test_what_is_no_gap_has_its_own_reason() -> None:
    def said(runs: list[Run]) -> str:
        return " ".join(remarks(summarise(runs, None)))

    apart = [make_run("full", seed, 2) for seed in (0, 1)]
    apart += [make_run("uniform", seed, 8) for seed in (2, 3)]
    assert "No gap closed: full and uniform have no seed in common." in said(apart)
    assert "Seeds differ: full lacks 2, 3; uniform lacks 0, 1." in said(apart)
    missing = runs_of("loss", full=[2, 2], uniform=[8, 8])
    missing[2].loss_r[4] = np.nan
    assert "No gap closed: full or uniform has a round without loss." in said(missing)


EVERYBODY = {"samplers": ["full", "uniform", "fedavg", "innovation"], "sample": 9}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"sample": 8}, False),
        ({"samplers": ["uniform"]}, False),
        ({"samplers": ["full", "uniform+server_lr=0.1"]}, False),
        ({"samplers": ["full", "delta@multinomial"]}, False),
        ({"samplers": ["full", "power-of-choice"]}, False),
        ({"dropout": 0.5}, False),
        ({"availability": "bernoulli(0.5)"}, False),
        ({"relative_error": 0.5}, False),
    ],
)
def test_only_what_is_full_participation_is_called_so(change: dict[str, Any], same: bool) -> None:
    found = [*says_little({**EVERYBODY, **change}, {"clients": "9"})]
    assert len(found) == same


@pytest.mark.parametrize("size", [1e-7, 0.3, 48_000.0])
def test_differences_of_any_size_can_be_told_apart(size: float) -> None:
    runs = [
        make_run(label, seed, 1, "loss", loss_r=np.full(10, size * (factor + 0.01 * seed)))
        for label, factor in (("full", 1.0), ("uniform", 1.3), ("md", 1.2))
        for seed in range(3)
    ]
    summary = summarise(runs, None)
    said = next(text for text in remarks(summary) if "At the end" in text)
    found = re.findall(r"\((\S+) \[", said)
    assert [float(number) / size for number in found] == pytest.approx([0.3, 0.2], rel=0.01)
    latex = to_latex(summary)
    assert latex.count("mathbf") == 2  # md, the only candidate: its loss and its gap
    shown = re.findall(r"^(?:full|uniform|md) & \$(?:.mathbf\{)?([\d.]+)", latex, re.MULTILINE)
    assert [float(number) / size for number in shown] == pytest.approx([1.01, 1.31, 1.21], rel=0.01)


def test_what_is_shown_of_runs_that_were_ended_is_called_their_last_value() -> None:
    runs = runs_of(uniform=[8, 9], full=[2, 2])
    ended = [run._replace(stopped_why="enough", settings={"rounds": 20}) for run in runs]
    texts = [
        " ".join(remarks(summarise(each, 0.7))) for each in (runs, ended, runs[:2] + ended[2:])
    ]
    assert ["test accuracy at the last evaluation" in text for text in texts] == [
        False,
        True,
        False,
    ]
