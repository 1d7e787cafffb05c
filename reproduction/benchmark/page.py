"""``python -m reproduction benchmark``: play what is missing, and write the page, its tables and
its pictures.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deltafl import analysis
from deltafl.analysis.look import MOST_STRONG
from deltafl.samplers import is_unbiased
from deltafl.simulation import OnProgress
from deltafl.store import write_atomically

from ..curves import curve_band
from ..page import REPORT, OwnPage, diverged, hardware, write
from ..running import Request, no_run
from ..spec import TEXTS, Experiment, View, is_ours
from ..text import counted, csv_text, folded
from .judge import (
    GOAL,
    LEAST,
    SURE,
    Gap,
    Judgement,
    headline,
    judge,
    judged_gap,
    measures,
    needs,
    sentence,
)
from .like import draw_ladder, ladder_of, like_block, like_cells
from .parts import BASELINE, FULL, Part, parts_of
from .runs import Reasons, Result, Store, gather, play
from .tables import (
    cost_table,
    crossings_table,
    main_table,
    num_params_of,
    table_cells,
    tuning_cells,
)

_LEFT = -0.5
_RIGHT = 1.75  # the part of the G axis that is drawn
_TEXTS = TEXTS["benchmark"]


def reproduce_benchmark(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run what is missing of the parts that the request names, and write the page of everything
    that is finished.
    """
    parts = parts_of(experiment, request.scale, **request.own)
    folder = request.out
    reasons: Reasons = {}
    if not request.only_page:
        reasons = play(parts, request, on_progress)
    store = Store(folder)
    results = [result for part in parts if (result := gather(part, store)) is not None]
    if not results:
        raise no_run(folder, "; ".join(reasons.values()))
    judgements = [judge(result, experiment.view) for result in results]
    counts = (
        sum(result.done for result in results),
        sum(len(part.methods) * part.seeds for part in parts),
    )
    with store.runs.lock():
        _draw_gaps(results, experiment.view.core, folder / "gap.png")
        view = experiment.view
        few = [label for label in view.core if label in (FULL, BASELINE) or is_ours(label)]
        _draw_curves(results, few[:MOST_STRONG], folder / "curves.png")
        write_atomically(folder / "tuning.csv", csv_text(tuning_cells(results, store)))
        draw_ladder(results, folder / "ladder.png")
        if groups := like_cells(results):
            write_atomically(folder / "like.csv", csv_text(groups))
        command = replace(request, parts=None).command
        analysis.write_report(
            [_report_part(result, command) for result in results], folder / REPORT, experiment.title
        )
        # A task that is owed has not to be played.
        verdict = headline(judgements, sum(not part.needs for part in parts))
        blocks = _blocks(parts, judgements, verdict, reasons, counts, experiment.view)
        # One that can be judged, if there is any.
        first = max(judgements, key=lambda judgement: judgement.gap.value is not None)
        number = f"{first.result.part.title}: `{first.label}` closes {first.gap} of the gap."
        shown = OwnPage(number, verdict, blocks, table_cells(results))
        return write(experiment, shown, request.scale, counts, command, folder)


def _blocks(
    parts: Sequence[Part],
    judgements: Sequence[Judgement],
    verdict: str,
    reasons: Reasons,
    counts: tuple[int, int],
    view: View,
) -> list[str]:
    results = [judgement.result for judgement in judgements]
    done = f"{counts[0]} of {counts[1]} test runs are done."
    elsewhere = dict[str, list[str]]()
    for found in judgements:
        if found.label != view.recommended:
            elsewhere.setdefault(found.label, []).append(found.result.part.title)
    method = "; ".join(
        [f"`{view.recommended}`", *(f"`{x}` on {', '.join(on)}" for x, on in elsewhere.items())]
    )
    blocks = [
        "## Verdict",
        f"**The target {verdict}.** The recommended method is {method}. {done}",
        view.remark,
        "\n".join(f"- {sentence(judgement)}" for judgement in judgements),
        "![Gap closed by task and method](gap.png)",
        _TEXTS["symbols"],
        folded("The rules", _TEXTS["rules"].format(goal=GOAL, sure=SURE, least=100 * LEAST)),
        folded("Accuracy over rounds", "![Accuracy over rounds by task](curves.png)"),
        *_like_blocks(judgements),
    ]
    every = []
    for result in results:
        tables = f"{main_table(result, view)}\n\n{folded('Costs', cost_table(result))}"
        if result is results[0]:
            blocks += [f"## {result.part.title}", tables]
        else:
            blocks.append(folded(result.part.title, tables))
        runs = [
            (f"`{method.label}`", run) for method in result.shown for run in method.runs.values()
        ]
        blocks.append(diverged("Runs that diverged and were ended there:", runs))
        every += [run for _, run in runs]
    crossings = "Rounds to the first crossing, for comparison with papers"
    grids = "; ".join(map(grid_text, results))
    ran = "\n".join(map(setting_text, results))
    return [
        *blocks,
        "## Appendix",
        folded(crossings, crossings_table(results)),
        folded("Learning rates", _TEXTS["rates"].format(grids=grids)),
        folded("What was run", f"{ran}\n\n{missing(parts, results, reasons)}"),
        folded("Hardware and versions", hardware(every)),
        _TEXTS["files"],
    ]


def _like_blocks(judgements: Sequence[Judgement]) -> list[str]:
    tables = {
        found.result.part.title: like_block(found.result, found.label) for found in judgements
    }
    known = {title: table for title, table in tables.items() if table}
    if not known:
        return []
    blocks = ["## Like beside like"]
    # A page whose groups have no ladder has no such picture.
    if any(ladder_of(found.result) for found in judgements):
        blocks.append(
            "![What each step from uniform draws to full participation brings](ladder.png)"
        )
    return [
        *blocks,
        _TEXTS["like"],
        *(folded(title, table) for title, table in known.items()),
    ]


def grid_text(result: Result) -> str:
    part = result.part
    rates = ", ".join(
        f"{rate:g}" for rate in max((method.search.rates for method in result.methods), key=len)
    )
    few = ""
    if part.finalists:
        few = _TEXTS["finalists"].format(number=part.finalists)
    share = f"{part.tuning_validation:.0%} held out"
    return f"{part.title}: {rates} ({counted(len(part.tuning_seeds), 'tuning seed')}, {share}{few})"


def setting_text(result: Result) -> str:
    part = result.part
    run = result.part.common
    m = result.num_clients
    n = run.sample or 1
    partition = run.partition or "its own"
    if run.alpha is not None and partition in ("hsu2019", "yurochkin2019"):
        partition += f" {run.alpha:g}"
    work = f"{run.local_epochs} local epochs"
    if run.local_epochs is None:
        work = f"{run.local_steps} local steps"
    tests = ""
    if run.test_examples:
        tests = f", evaluated on {run.test_examples} test examples"
    return _TEXTS["setting"].format(
        part=part,
        run=run,
        data=next(iter(result.shown[0].runs.values())).data,
        partition=partition,
        m=m,
        n=n,
        ratio=m / n,
        work=work,
        batch=run.batch_size or "all",
        tests=tests,
        percent=100 * part.threshold,
        parameters=num_params_of(run.task),
        seeds=counted(part.seeds, "test seed"),
    )


def missing(parts: Sequence[Part], results: Sequence[Result], reasons: Reasons) -> str:
    found = {result.part.name: result for result in results}
    lines = []
    for part in parts:
        why = reasons.get((part.name, "")) or part.needs
        if part.name not in found:
            lines.append((f"- {part.title}: no test run is done", why))
            continue
        for method in found[part.name].methods:
            done = len(method.runs)
            if done < part.seeds:
                what = f"- {part.title}, `{method.label}`: {done} of {part.seeds} test runs"
                lines.append((what, reasons.get((part.name, method.label)) or why))
    if not lines:
        return "Every run of this scale is done."
    texts = [f"{what} ({reason})".removesuffix(" ()") for what, reason in lines]
    return "\n".join(["Missing:", "", *texts])


def _draw_curves(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    look_of = analysis.looks(labels)
    panels = []
    window = analysis.WINDOW
    for result in results:
        smoothing = 1
        if result.part.horizon >= 10 * window:
            smoothing = window
        drawn = [method for label in labels if (method := result.find(label))]
        bands = [curve_band(list(method.runs.values()), "accuracy", smoothing) for method in drawn]
        lines = [
            analysis.Line(m.label, look_of[m.label], band)
            for m, band in zip(drawn, bands, strict=True)
        ]
        goal = 100 * result.part.threshold
        panels.append(analysis.Panel(_title(result), lines, y_label="test accuracy, %", goal=goal))
    analysis.draw_panels(panels, 2, _TEXTS["curves"].format(window=window), path)


def _report_part(result: Result, command: str) -> analysis.Part:
    runs = [
        run._replace(sampler=method.label)
        for method in result.shown
        for run in method.runs.values()
    ]
    return analysis.Part(
        result.part.title, runs, analysis.summarise(runs, result.part.threshold), command
    )


def _title(result: Result) -> str:
    return analysis.panel_title(result.part.title, list(result.shown[0].runs.values()))


def _draw_gaps(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = [
        label
        for label in labels
        if label not in (BASELINE, FULL) and any(r.find(label) for r in results)
    ]
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    with analysis.styled():
        height = rows * (0.8 + 0.19 * max(len(shown), 1)) + 0.4
        figure = Figure(
            figsize=(analysis.WIDTH, height),
            dpi=analysis.DPI,
            facecolor="white",
            layout="constrained",
        )
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        for axes, result in zip(panels, results, strict=False):
            area, *_ = measures(result.part)
            _gap_axis(axes, [judged_gap(result, label, area) for label in shown], shown)
            axes.set_title(_title(result), fontsize=7)
        for unused in panels[len(results) :]:
            unused.set_visible(False)
        for first in panels[::columns]:
            first.set_yticks(range(len(shown)), shown, fontsize=7)
        panels[0].set_ylim(len(shown) - 0.4, -0.6)
        figure.supxlabel(_TEXTS["gaps"], x=0.01, ha="left", fontsize=7)
        path.write_bytes(analysis.small_png(figure))


def _gap_axis(axes: Any, gaps: Sequence[Gap], labels: Sequence[str]) -> None:
    """Dots with intervals; what lies outside the axis is drawn at its edge."""
    for place, (gap, label) in enumerate(zip(gaps, labels, strict=False)):
        colour = analysis.looks([label])[label].colour
        if gap.value is None:
            continue
        x = float(np.clip(gap.value, _LEFT, _RIGHT))
        if gap.low is not None and gap.high is not None:
            ends = np.clip([gap.low, gap.high], _LEFT, _RIGHT)
            axes.plot(ends, [place, place], color=colour, linewidth=1.4, zorder=2)
        marker = "o"
        if needs(label) == "known":
            marker = "s"
        if gap.value < _LEFT:
            marker = "<"
        elif gap.value > _RIGHT:
            marker = ">"
        fill = "white"
        if is_unbiased(label):
            fill = colour
        axes.plot([x], [place], marker, markersize=4, mfc=fill, mec=colour, zorder=3)
    for x in (0.0, 1.0):
        axes.axvline(x, color=analysis.PALE, linewidth=0.8, zorder=1)
    axes.axvline(GOAL, color=analysis.GREY, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1)
    if not any(gap.value is not None for gap in gaps):
        axes.text(
            0.5,
            0.5,
            "no task to judge by",
            transform=axes.transAxes,
            ha="center",
            color=analysis.GREY,
        )
    axes.set(xlim=(_LEFT - 0.05, _RIGHT + 0.05), xlabel="gap closed, G")
    axes.grid(axis="y", color=analysis.PALE, linewidth=0.4)
