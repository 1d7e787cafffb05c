"""The benchmark's page, ``README.md``, with its tables as CSV, its pictures, and its line of the index."""

from collections.abc import Sequence
from pathlib import Path

from deltafl.errors import require
from deltafl.io import write_atomically

from ..pages.cells import csv_text
from ..pages.index import Finding, write_verdict
from ..pages.what_was_run import hardware
from ..spec import Experiment
from .edges import edge_text
from .gap import LEAST
from .parts import BASELINE, Part
from .pictures import draw_curves, draw_gaps, draw_methods
from .results import Reasons, Result, Store
from .tables import cost_table, main_table, rates_table, run_cells, table_cells, tuning_cells
from .target import Judgement, elsewhere_text, headline, judge_all, no_gap_text, sentence


def write_page(
    experiment: Experiment,
    scale: str,
    parts: Sequence[Part],
    results: Sequence[Result],
    folder: Path,
    reasons: Reasons,
    command: str,
) -> str:
    """Write the page of what is finished.

    Args:
        experiment: The benchmark.
        scale: One of ``spec.SCALES``.
        parts: All parts of the scale.
        results: Those with a finished test run.
        folder: Where everything goes.
        reasons: What could not be run.
        command: The command as a reader would give it.

    Returns:
        The page, Markdown.

    Raises:
        MissingExtraError: If Matplotlib or SciPy is not installed.
    """
    require("matplotlib", "plot")
    require("scipy", "sim")
    judgements, store = judge_all(results), Store(folder)
    core = tuple(experiment.view.core)
    folder.mkdir(parents=True, exist_ok=True)
    draw_gaps(results, core, folder / "gap.png")
    for result in results:
        draw_curves(result, core, folder / f"curves-{result.part.name}.png")
        draw_methods(result, folder / f"methods-{result.part.name}.png")
    write_atomically(folder / "table.csv", csv_text(table_cells(results)))
    write_atomically(folder / "runs.csv", csv_text(run_cells(results)))
    write_atomically(folder / "tuning.csv", csv_text(tuning_cells(results, store)))
    page = _page(experiment, scale, parts, judgements, reasons, command, store)
    write_atomically(folder / "README.md", page)
    finding = Finding(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        measured=" ".join(sentence(judgement) for judgement in judgements),
        verdict=headline(judgements),
        scale=scale,
        done=sum(result.done for result in results),
        total=sum(len(part.methods) * part.seeds for part in parts),
        command=command,
    )
    write_verdict(folder, finding)
    return page


def _page(
    experiment: Experiment,
    scale: str,
    parts: Sequence[Part],
    judgements: Sequence[Judgement],
    reasons: Reasons,
    command: str,
    store: Store,
) -> str:
    by_part = [judgement for judgement in judgements if not judgement.informed]
    results = [judgement.result for judgement in by_part]
    blocks = [f"# {experiment.title}", f"**The target:** {experiment.claim}"]
    blocks += ["## Verdict", f"**The target {headline(judgements)}.** {_counts(parts, results)}"]
    blocks += ["\n".join(f"- {sentence(judgement)}" for judgement in judgements), _RULES]
    blocks += ["![Gap closed by task and method](gap.png)"]
    for judgement in by_part:
        blocks += _part_blocks(judgement)
    blocks += ["## Learning rates", rates_table(results), _rates_text(results), edge_text(results, store)]
    blocks += ["## What was run", "\n".join(f"- {_setting_text(result)}" for result in results)]
    blocks += hardware([record for result in results for method in result.shown for record in method.runs.values()])
    blocks += [f"Command (scale {scale}):", f"```\n{command}\n```", _FILES]
    if experiment.notes:
        blocks += ["## Decisions", "\n".join(f"- {note}" for note in experiment.notes)]
    blocks += ["## What is missing", _missing(parts, results, reasons)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _counts(parts: Sequence[Part], results: Sequence[Result]) -> str:
    done, total = sum(result.done for result in results), sum(len(part.methods) * part.seeds for part in parts)
    return f"{done} of {total} test runs are done." + ("" if done == total else " This is the verdict of those.")


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
    "`table.csv` has every measure of every method with its interval, `runs.csv` one line a run, `tuning.csv` every "
    "rate that was tried; the records of the runs, and a line for each tuning run, are below `runs/`."
)


def _part_blocks(judgement: Judgement) -> list[str]:
    result, name = judgement.result, judgement.result.part.name
    blocks = [f"## {result.part.title}"]
    if judgement.room is not None and judgement.gap.value is None:
        text = no_gap_text(judgement.room)
        blocks.append(f"{text[:1].upper()}{text[1:]}.")
    blocks += [main_table(result), f"![{result.part.title}: curves](curves-{name}.png)", cost_table(result)]
    blocks += [
        f"![{result.part.title}: all methods](methods-{name}.png)",
        elsewhere_text(judgement),
        *_diverged(result),
    ]
    return blocks


def _diverged(result: Result) -> list[str]:
    lines = [
        f"- `{method.label}`, seed {seed}, in round {record.diverged}: {record.diverged_why}"
        for method in result.shown
        for seed, record in method.runs.items()
        if record.diverged is not None
    ]
    return ["Runs that diverged and were ended there:\n\n" + "\n".join(lines)] if lines else []


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
    part, searches = result.part, [method.search for method in result.methods]
    rates = max((search.rates for search in searches), key=len)
    seeds = f"{len(part.tuning_seeds)} tuning {'seed' if len(part.tuning_seeds) == 1 else 'seeds'}"
    rounds = f" of {part.tuning_rounds} rounds" if part.tuning_rounds else ""
    few = (
        f"; the first for all rates, the others for each method's best {part.finalists}, before the grid grew and after"
        if part.finalists
        else ""
    )
    return f"{part.title}: {', '.join(f'{rate:g}' for rate in rates)} ({seeds}{rounds}{few})"


def _setting_text(result: Result) -> str:
    part, run = result.part, result.part.common
    data = next(iter(result.shown[0].runs.values())).data
    alpha = f" {run.alpha:g}" if run.alpha is not None and (run.partition or "") in ("hsu2019", "yurochkin2019") else ""
    work = f"{run.local_steps} local steps" if run.local_epochs is None else f"{run.local_epochs} local epochs"
    m, n = result.num_clients, run.sample or 1
    fewer = "".join(f", `{label}` {rounds}" for label, rounds in part.rounds_of.items())
    area = f"; mean accuracy over the first {part.horizon} rounds" if part.rounds_of else ""
    tests = f", evaluated on {run.test_examples} test examples" if run.test_examples else ""
    return (
        f"{part.title} (tier {part.tier}): {data}, partition {run.partition or 'its own'}{alpha}, m = {m}, n = {n}, "
        f"m / n = {m / n:.3g}, {work} of batch {run.batch_size or 'all'}, {run.rounds} rounds{fewer}, evaluated every "
        f"{run.evaluate_every}{tests}, threshold {100 * part.threshold:g} %, {result.num_params} parameters, "
        f"{part.seeds} test {'seed' if part.seeds == 1 else 'seeds'}{area}."
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
    return "\n".join(lines) or "Nothing: every run of this scale is done."
