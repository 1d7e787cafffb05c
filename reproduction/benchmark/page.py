"""``python -m reproduction benchmark``: play what is missing, and write the page, its tables and its pictures."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deltafl import analysis
from deltafl.errors import DeltaflError
from deltafl.io import write_atomically
from deltafl.samplers import is_unbiased
from deltafl.simulation import OnProgress

from ..page import OwnPage, diverged, hardware, write
from ..reproduce import Request
from ..spec import Experiment
from ..verdict import counted, sentence_case
from .judge import GOAL, LEAST, Gap, Judgement, elsewhere_text, gap_of, headline, judge_all, measures, needs, sentence
from .parts import BASELINE, FULL, Part, parts_of
from .runs import Reasons, Result, Store, gather, play
from .tables import cost_table, edge_text, main_table, num_params_of, rates_table, table_cells, tuning_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _RIGHT = -0.5, 1.25  # the part of the G axis that is drawn
_KEY = "Line: 95 % interval. Hollow: biased. Square: knows the labels. Triangle: beyond the axis, or a bound."


def reproduce_benchmark(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run what is missing of the parts that the request names, and write the page of everything that is finished.

    Returns:
        The page, Markdown.

    Raises:
        DeltaflError: If a part is unknown, nothing is finished, or the folder holds runs of other settings.
    """
    parts, folder = parts_of(experiment, request.scale, **request.own), request.out
    reasons = {} if request.only_page else play(parts, request, on_progress)
    store = Store(folder)
    results = [result for part in parts if (result := gather(part, store)) is not None]
    if not results:
        why = "; ".join(reasons.values()) or "leave out --only-page to run some"
        raise DeltaflError(f"{folder} has no finished run yet: {why}")
    judgements = judge_all(results)
    counts = sum(result.done for result in results), sum(len(part.methods) * part.seeds for part in parts)
    with store.runs.lock():
        _draw_gaps(results, experiment.view.core, folder / "gap.png")
        _draw_curves(results, experiment.view.core, folder / "curves.png")
        write_atomically(folder / "tuning.csv", analysis.csv_text(tuning_cells(results, store)))
        blocks = _blocks(parts, judgements, reasons, counts, store)
        measured = " ".join(sentence(judgement) for judgement in judgements)
        shown = OwnPage(measured, headline(judgements), blocks, table_cells(results))
        return write(experiment, shown, request.scale, counts, replace(request, parts=None).command, folder)


def _blocks(
    parts: Sequence[Part], judgements: Sequence[Judgement], reasons: Reasons, counts: tuple[int, int], store: Store
) -> list[str]:
    by_part = [judgement for judgement in judgements if not judgement.informed]
    results = [judgement.result for judgement in by_part]
    done = f"{counts[0]} of {counts[1]} test runs are done."
    done += "" if counts[0] == counts[1] else " This is the verdict of those."
    blocks = ["## Verdict", f"**The target {headline(judgements)}.** {done}"]
    blocks += ["\n".join(f"- {sentence(judgement)}" for judgement in judgements), _RULES]
    blocks += ["![Gap closed by task and method](gap.png)", "![Accuracy over rounds by task](curves.png)"]
    for judgement in by_part:
        result = judgement.result
        blocks.append(f"## {result.part.title}")
        if judgement.no_gap and judgement.gap.value is None:
            blocks.append(f"{sentence_case(judgement.no_gap)}.")
        blocks += [main_table(result), cost_table(result), elsewhere_text(judgement)]
        runs = [(f"`{method.label}`", run) for method in result.shown for run in method.runs.values()]
        blocks += diverged("Runs that diverged and were ended there:", runs)
    blocks += ["## Learning rates", rates_table(results), _rates_text(results), edge_text(results, store)]
    blocks += ["## What was run", "\n".join(f"- {_setting_text(result)}" for result in results)]
    blocks.append(_missing(parts, results, reasons))
    every = [run for result in results for method in result.shown for run in method.runs.values()]
    return [*blocks, f"Hardware and versions:\n\n{hardware(every)}", _FILES]


_RULES = (
    f"G = (R_{BASELINE} - R) / (R_{BASELINE} - R_full) with R the mean rounds to the threshold: 0 is uniform sampling, "
    "1 full participation. A run that never reaches the threshold, or diverged, counts as all its rounds (the mean is "
    "then a lower bound, marked ≥, and decides nothing in its own favour: a speed-up over "
    f"{BASELINE} is then marked ≤, ≥ where the runs of {BASELINE} are such, ≥≤ where those of both are, and a "
    "method with such runs is ahead of none; so is G, whose interval is then that of the bound, and there is no G "
    "where runs of full participation never got there). G is the ratio of means over paired seeds "
    f"with Fieller's 95 % interval; where {BASELINE} needs less than {100 * LEAST:.0f} % more rounds than full "
    "participation, or the seeds do not tell the two apart, there is no gap to close and no G. Each method has its own "
    "learning rate, chosen on other seeds. Our best method is the one with the fewest rounds on those tuning seeds. "
    "Rivals are all methods of others that need nothing, the clients' sizes, or what the cohort sent, biased ones "
    "included; a server that was told every client's shares of labels beforehand (needs: known) is judged by itself, "
    "with all of these methods and those that need the labels. In the second tier most rivals were not run; each line "
    "says how many. Ahead is what a paired "
    "95 % interval of the ratio of mean rounds says, with its p-value after Holm's correction for all rivals "
    "beside it. Every interval is 95 % by itself. One-round MSE: E norm(D - ubar)^2 / norm(ubar)^2 over the second "
    "half of the rounds (geometric mean), in the run of seed 0, each method on the way that it went with its own rate; "
    "beside it a lower bound for all unbiased draws of as many clients on the same updates without a control, that is, "
    "without a memory; a dash where none above 0 was found. "
    "The two are comparable within a row only, and a method with a memory can be below the bound."
)
_FILES = (
    "`table.csv` has every measure of every method with its interval, `tuning.csv` every rate that was tried; `runs` "
    "has the records of the runs, `tuning` a line for each tuning run."
)


def _rates_text(results: Sequence[Result]) -> str:
    texts = [_grid_text(result) for result in results]
    return (
        "The chosen local rate has the fewest rounds to the threshold, averaged over the tuning seeds (never: twice "
        "the rounds; ties by mean accuracy, which alone decided where a rate is marked never). All methods of a task "
        "search one grid; where the best rate of any of them was at an edge, it grew by a factor of 2 on that side, "
        f"for all. {'; '.join(texts)}. Intervals "
        "on this page are those of the chosen rates: what other tuning seeds would change is not in them."
    )


def _grid_text(result: Result) -> str:
    part = result.part
    rates = ", ".join(f"{rate:g}" for rate in max((method.search.rates for method in result.methods), key=len))
    rounds = f" of {part.tuning_rounds} rounds" if part.tuning_rounds else ""
    few = (
        f"; the first for all rates, the others for each method's best {part.finalists}, before the grid grew and after"
        if part.finalists
        else ""
    )
    return f"{part.title}: {rates} ({counted(len(part.tuning_seeds), 'tuning seed')}{rounds}{few})"


def _setting_text(result: Result) -> str:
    part, run = result.part, result.part.common
    data = next(iter(result.shown[0].runs.values())).data
    alpha = f" {run.alpha:g}" if run.alpha is not None and run.partition in ("hsu2019", "yurochkin2019") else ""
    work = f"{run.local_steps} local steps" if run.local_epochs is None else f"{run.local_epochs} local epochs"
    m, n = result.num_clients, run.sample or 1
    fewer = "".join(f", `{label}` {rounds}" for label, rounds in part.rounds_of.items())
    area = f"; mean accuracy over the first {part.horizon} rounds" if part.rounds_of else ""
    tests = f", evaluated on {run.test_examples} test examples" if run.test_examples else ""
    return (
        f"{part.title} (tier {part.tier}): {data}, partition {run.partition or 'its own'}{alpha}, m = {m}, n = {n}, "
        f"m / n = {m / n:.3g}, {work} of batch {run.batch_size or 'all'}, {run.rounds} rounds{fewer}, evaluated every "
        f"{run.evaluate_every}{tests}, threshold {100 * part.threshold:g} %, {num_params_of(run.task)} parameters, "
        f"{counted(part.seeds, 'test seed')}{area}."
    )


def _missing(parts: Sequence[Part], results: Sequence[Result], reasons: Reasons) -> str:
    found = {result.part.name: result for result in results}
    lines = []
    for part in parts:
        why = reasons.get((part.name, ""))
        if part.name not in found:
            lines.append(f"- {part.title}: no test run is done" + (f" ({why})" if why else ""))
            continue
        for method in found[part.name].methods:
            if len(method.runs) < part.seeds:
                reason = reasons.get((part.name, method.label)) or why
                rest = f" ({reason})" if reason else ""
                lines.append(f"- {part.title}, `{method.label}`: {len(method.runs)} of {part.seeds} test runs{rest}")
    return "\n".join(["Missing:", "", *lines]) if lines else "Every run of this scale is done."


def _draw_curves(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    look_of, panels, window = analysis.looks(labels), [], analysis.WINDOW
    for result in results:
        smoothing = window if result.part.horizon >= 10 * window else 1
        lines = []
        for method in result.shown:
            if method.label in labels:
                band = analysis.curve_band(list(method.runs.values()), "accuracy", smoothing)
                lines.append(analysis.Line(method.label, look_of[method.label], band))
        panels.append(lines)
    captions = [f"{result.part.title}: accuracy, %" for result in results]
    note = f"Line: mean over seeds, moving average over up to {window} evaluations. Band: all seeds. Dashed: threshold."
    goals = [100 * result.part.threshold for result in results]
    analysis.draw_panels(panels, captions, 2, note, path, goals=goals)


def _draw_gaps(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = [label for label in labels if label not in (BASELINE, FULL) and any(r.find(label) for r in results)]
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    with analysis.styled():
        height = rows * (0.45 + 0.19 * max(len(shown), 1)) + 0.6
        figure = Figure(figsize=(analysis.WIDTH, height), dpi=analysis.DPI, facecolor="white")
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        figure.subplots_adjust(
            left=0.2, right=0.985, top=1 - 0.3 / height, bottom=0.6 / height, wspace=0.1, hspace=0.35
        )
        for axes, result in zip(panels, results, strict=False):
            rounds = measures(result.part)[0]
            gaps = [gap_of(result, label, rounds) for label in shown]
            _gap_axis(axes, gaps, shown)
            axes.set_title(result.part.title, fontsize=6.5)
        for unused in panels[len(results) :]:
            unused.set_visible(False)
        for first in panels[::columns]:
            first.set_yticks(range(len(shown)), shown, fontsize=7)
        panels[0].set_ylim(len(shown) - 0.4, -0.6)
        note = f"Gap closed G: 0 is uniform sampling, 1 full participation. Dashed: the target.\n{_KEY}"
        figure.text(0.012, 0.06 / height, note, fontsize=7, color=analysis.GREY)
        path.write_bytes(analysis.small_png(figure))


def _gap_axis(axes: "Axes", gaps: Sequence[Gap], labels: Sequence[str]) -> None:
    """Dots with intervals; what lies outside the axis is drawn at its edge."""
    for place, (gap, label) in enumerate(zip(gaps, labels, strict=True)):
        if gap.value is None:
            continue
        x = min(max(gap.value, _LEFT), _RIGHT)
        if gap.low is not None and gap.high is not None:
            ends = [min(max(end, _LEFT), _RIGHT) for end in (gap.low, gap.high)]
            axes.plot(ends, [place, place], color=analysis.GREY, linewidth=1.0, zorder=2)
        inside = "s" if needs(label) == "known" else "o"
        marker = "<" if gap.bound == "≤" else inside if gap.value == x else "<" if x == _LEFT else ">"
        axes.plot(
            [x],
            [place],
            marker,
            markersize=4,
            mfc=analysis.INK if is_unbiased(label) else "white",
            mec=analysis.INK,
            zorder=3,
        )
    for x, dash in ((0.0, "-"), (1.0, "-"), (GOAL, (0, (5, 3)))):
        axes.axvline(x, color=analysis.GREY if x == GOAL else analysis.PALE, linewidth=0.8, linestyle=dash, zorder=1)
    if not any(gap.value is not None for gap in gaps):
        axes.text(0.5, 0.5, "no gap", transform=axes.transAxes, ha="center", color=analysis.GREY)
    axes.set_xlim(_LEFT - 0.05, _RIGHT + 0.05)
    axes.grid(axis="y", color=analysis.PALE, linewidth=0.4)
