"""The table for a paper: numbers by hand, the best in bold, every letter printed, no formulas."""

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.analysis import summarise
from deltafl.analysis.paper import harmless, latex, to_csv, to_latex
from deltafl.errors import printable
from tools.runs import make_run, runs_of


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_numbers_of_the_table() -> None:
    """Three seeds of .5 .6 .7: mean .6, t_2 = 4.3027, half a width of 4.3027 * .1 / sqrt 3."""
    runs = [
        make_run("uniform", seed, 3, accuracy_r=np.full(10, 0.5 + 0.1 * seed)) for seed in range(3)
    ]
    runs += [make_run("better_one", s, 3, accuracy_r=np.full(10, 0.7 + 0.01 * s)) for s in range(3)]
    summary = summarise(runs, None)
    first, second = rows_of(to_csv(summary))
    assert (first["sampler"], first["seeds"]) == ("uniform", "3")
    half = 4.302653 * 0.1 / 3**0.5
    assert [float(first[f"accuracy{end}"]) for end in ("", "_low", "_high")] == pytest.approx(
        [0.6, 0.6 - half, 0.6 + half], rel=1e-5
    )
    assert float(second["accuracy"]) == pytest.approx(0.71)
    text = to_latex(summary)
    assert r"uniform & $60.0$ $\pm$ $24.8$" in text
    assert r"better\_one & $\mathbf{71.0}$ $\pm$ $2.5$" in text


def test_the_best_is_the_lowest_loss_and_the_fewest_rounds() -> None:
    runs = runs_of("loss", uniform=[8, 9, 10], full=[2, 3, 2], md=[2, 3, 2])
    text = to_latex(summarise(runs, 0.5))
    of = {line.split(" & ")[0]: line for line in text.splitlines() if " & " in line}
    assert "loss" in of["sampler"] and r"\%" not in of["sampler"]
    assert of["full"].count("mathbf") == of["md"].count("mathbf") == 3
    assert of["uniform"].count("mathbf") == 1  # all losses are the same in the end
    assert r"$\mathbf{2.3}$" in of["full"]


def test_runs_that_ended_early_are_marked_and_no_best() -> None:
    runs = runs_of(uniform=[3, 4], fedis=[2, 2], md=[1, 1], delta=[5, 6])
    runs[2] = runs[2]._replace(diverged=7)
    ended: dict[str, Any] = {"stopped_why": "at the threshold", "settings": {"rounds": 20}}
    runs[4:6] = [run._replace(**ended) for run in runs[4:6]]
    summary = summarise(runs, 0.7)
    rows = {row["sampler"]: row for row in rows_of(to_csv(summary))}
    assert [rows[label]["diverged"] for label in rows] == ["0", "1", "0", "0"]
    assert [rows[label]["stopped"] for label in rows] == ["0", "0", "2", "0"]
    text = to_latex(summary)
    of = {line.split(" & ")[0]: line for line in text.splitlines() if " & " in line}
    assert {r"fedis$^\dagger$", r"md$^\ddagger$", "delta", "uniform"} < of.keys()
    # Those that look the same are all the best.
    assert [label for label, line in of.items() if "mathbf" in line] == ["uniform", "delta"]
    assert "some runs diverged" in text and "some runs were stopped early" in text


def test_what_is_missing_is_empty() -> None:
    runs = runs_of(uniform=[3, 4], fedis=[3, None])
    uniform, fedis = rows_of(to_csv(summarise(runs, 0.7)))
    assert uniform["rounds_to_threshold"] == "3.5" and fedis["rounds_to_threshold"] == ""
    assert r" & $3.0$ (1/2) \\" in to_latex(summarise(runs, 0.7))
    one = rows_of(to_csv(summarise(runs_of(uniform=[3]), None)))[0]
    assert (one["accuracy_low"], one["accuracy_high"]) == ("", "")
    assert r"\pm" not in to_latex(summarise(runs_of(uniform=[3]), None))


@given(st.text(max_size=30))
def test_latex_prints_every_letter(text: str) -> None:
    back = latex(text)
    # What is left once the escapes are gone has no letter that means something.
    plain = re.sub(r"\\(text[a-z]+\{\}|[&%$#_{}])|\{[\[*]\}", "", back)
    assert not set(plain) & set("\\&%$#_{}~^<>|")
    text = printable(text)
    for name, letter in {"backslash": "\\", "asciitilde": "~", "asciicircum": "^"}.items():
        assert back.count(rf"\text{name}{{}}") == text.count(letter)
    for letter in "&%$#_":
        assert back.count(f"\\{letter}") == text.count(letter)


def cells_of(text: str) -> Iterator[str]:
    """What spreadsheets make of a file, whatever separates cells, with and without quotes."""
    for separator in ",;|\t":
        for how in (csv.QUOTE_NONE, csv.QUOTE_MINIMAL):
            for row in csv.reader(io.StringIO(text), delimiter=separator, quoting=how):
                yield from row


@pytest.mark.parametrize("sign", "=+-@＝＋－＠")
@pytest.mark.parametrize(
    "before",
    [
        "",
        " ",
        "x;",
        "x; ",
        "x,",
        "x|",
        'x"',
        "x';",
        'x;"',
        "x;''",
        'x",',
        'x";"',
        ";;",
        "x\n",
        "x\t",
    ],
)
def test_no_cell_is_a_formula(before: str, sign: str) -> None:
    label = f"{before}{sign}1+cmd|' /C calc'!A1"
    text = to_csv(summarise([make_run(label, 0, 3)], None))
    (row,) = rows_of(text)
    assert row["sampler"].replace("'", "") == printable(label).replace("'", "")
    for cell in cells_of(text):
        inner = cell.strip(' "')
        assert not inner.startswith(tuple("=+-@＝＋－＠")), cell


@given(st.text(max_size=20) | st.text("=+-@＝,;|\"' ax1", max_size=12))
def test_harmless_text_keeps_its_letters(text: str) -> None:
    shown = harmless(text)
    assert shown.replace("'", "") == printable(text, limit=None).replace("'", "")
    assert not re.search(r"""(^|[,;|"])[ "]*[=+\-@＝]""", shown)


@pytest.mark.parametrize("label", ["uniform@local-pivotal+average=0.5", "a(b=-1)", "a-b@c", "x 1"])
def test_the_librarys_labels_stay_as_they_are(label: str) -> None:
    assert harmless(label) == label


def test_seeds_that_got_there_are_shown_even_if_no_sampler_did_with_all() -> None:
    table = to_latex(summarise(runs_of(uniform=[8, None], full=[2, None]), 0.7))
    rows = [line for line in table.splitlines() if line.startswith(("uniform", "full"))]
    assert [re.findall(r"\(\d/\d\)", row) for row in rows] == [["(1/2)"], ["(1/2)"]]
    none = to_latex(summarise(runs_of(uniform=[None, None], full=[2, 3]), None))
    assert "In parentheses" not in none
