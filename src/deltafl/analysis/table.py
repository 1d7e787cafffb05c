"""The comparison as a table for the terminal, with remarks below: what the numbers show and what
they do not show.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..samplers import SAMPLERS, base_name, bias_of, parse_label
from ..samplers.table import CLASSES
from .runs import only_asks_first
from .statistics import WINDOW, late_after, side_of
from .summary import (
    Gain,
    GapClosed,
    MeanSd,
    SamplerFairness,
    SamplerSummary,
    SpeedUp,
    Summary,
    ToThreshold,
    value_of,
)

#: Stands for a number that does not exist.
DASH = "—"
#: The columns of the table of costs.
COSTS = ("clients' seconds", "server's seconds", "bytes down", "bytes up", "server's memory")
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"
#: What distinguishes rows of one sampler in a reproduction, as in ``fedpracis@multinomial+n-20``.
_PART = re.compile(r"\+[a-z][\w-]*$")
_STYLES = {"better": "green", "worse": "red", "open": ""}
Difference = SpeedUp | GapClosed | Gain


def comparison_table(summary: Summary) -> RenderableType:
    """One row a sampler, and remarks below it; it fits into 80 columns.

    Bytes are those to the threshold; without a threshold, those of the whole run.
    """
    notes = Table.grid(padding=(0, 1))
    for sentence in remarks(summary):
        notes.add_row(Text("·", style="dim"), Text(sentence))
    headings = {
        "sampler": "sampler",
        "value": "accuracy\n%" if summary.metric == "accuracy" else "loss",
        "tail": "worst\ntenth",
        "gap": "gap closed\n[95 %]",
        "rounds": f"rounds to\n{threshold_text(summary).removeprefix('loss ')}",
        "speedup": "speed-up\n[95 %]",
        "bytes": "bytes\ntime" if has_clock(summary) else "bytes",
    }
    table = _table([headings[name] for name in table_row(summary.samplers[0], summary)])
    costs = _table(["costs of a run", *(heading.replace(" ", "\n", 1) for heading in COSTS)])
    for entry in summary.samplers:
        table.add_row(*table_row(entry, summary).values())
        costs.add_row(_foldable(entry.sampler), *cost_cells(entry))
    known = any(entry.costs for entry in summary.samplers)
    return Group(table, Text(), *((costs, Text()) if known else ()), notes)


def _table(headings: Sequence[str]) -> Table:
    """A table without rows, its first column for labels."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def cost_cells(entry: SamplerSummary) -> list[str]:
    """What a run of a sampler costs, in the order of ``COSTS``."""
    found = entry.costs
    if found is None:
        return [DASH] * len(COSTS)
    seconds = [
        f"{human_seconds(number)} s" for number in (found.client_seconds, found.server_seconds)
    ]
    return seconds + [
        human_bytes(number) for number in (found.bytes_down, found.bytes_up, found.server_bytes)
    ]


def table_row(entry: SamplerSummary, summary: Summary) -> dict[str, Text]:
    """The cells of a sampler in the order of the table, a second line with the interval or the
    share of seeds.
    """
    gap = entry.gap_closed
    reached = entry.to_threshold
    number = entry.total_bytes
    clock = entry.total_clock
    cells = {"sampler": Text(_foldable(entry.sampler)), "value": Text(value_text(entry, summary))}
    if has_fairness(summary):
        cells["tail"] = _tail_text(entry.fairness)
    cells["gap"] = difference_text(gap)
    if reached is not None:
        cells["rounds"] = Text(rounds_text(reached))
        mark = MARK if reached.speedup is not None and reached.speedup.num_left_out else ""
        is_baseline = entry.sampler == summary.baseline
        cells["speedup"] = (
            Text("baseline", "dim") if is_baseline else difference_text(reached.speedup, mark)
        )
        number = reached.bytes
        clock = reached.clock
    return cells | {
        "bytes": Text(
            human_bytes(number) + ("" if clock is None else f"\n{human_seconds(clock)} s")
        )
    }


def _foldable(label: str) -> str:
    """A label that folds before its settings and, if it is long, its options; with the blanks it
    is the same label.
    """
    folded = label.replace("+", " +")
    return folded.replace("(", " (") if len(label) > 20 else folded


def has_fairness(summary: Summary) -> bool:
    """Whether the accuracy per client was measured in all runs of some sampler."""
    return any(entry.fairness for entry in summary.samplers)


def has_clock(summary: Summary) -> bool:
    """Whether the runs have a virtual clock."""
    return summary.settings.get("speeds") is not None


def human_bytes(number: float | None) -> str:
    """With a decimal unit (1 kB = 1000 bytes); a dash for None."""
    return DASH if number is None else decimal(round(number))


def human_seconds(number: float | None) -> str:
    """Seconds with three digits, whole from 100 on; a dash for None."""
    if number is None:
        return DASH
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def value_text(entry: SamplerSummary, summary: Summary) -> str:
    """The metric as tables show it, with its spread."""
    text = plus_minus(value_of(entry, summary), summary.metric == "accuracy")
    return text + DIVERGED if entry.num_diverged and text != DASH else text


def _tail_text(found: SamplerFairness | None) -> Text:
    if found is None or found.sd.mean is None:
        return Text(DASH)
    text = f"{plus_minus(found.worst_tenth, True)}\nsd {100 * found.sd.mean:.1f}"
    return Text(text, style=_STYLES[verdict_of(found.gain)])


def plus_minus(found: MeanSd | None, in_percent: bool) -> str:
    """A mean with its spread, if there are several seeds; a dash without a mean."""
    if found is None or found.mean is None:
        return DASH
    numbers = [value for value in (found.mean, found.sd) if value is not None]
    return "±".join(f"{100 * value:.1f}" if in_percent else f"{value:.3g}" for value in numbers)


def rounds_text(reached: ToThreshold) -> str:
    """Mean rounds to the threshold, and how many seeds reached it where some did not."""
    num_seeds = reached.num_reached + reached.num_never
    share = f"{reached.num_reached}/{num_seeds} seeds"
    if reached.rounds is None or reached.rounds.mean is None:
        return f"{DASH}\n{share}"
    mean = f"{reached.rounds.mean:,.0f}" if num_seeds == 1 else f"{reached.rounds.mean:,.1f}"
    return f"{mean}\n{share}" if reached.num_never else mean


def difference_text(found: Difference | None, mark: str = "") -> Text:
    """A difference with its interval on a second line, in the colour of its verdict; a dash for
    None.
    """
    if found is None:
        return Text(DASH)
    low = found.low
    high = found.high
    interval = (
        ""
        if low is None or high is None or low == high
        else f"\n[{number_text(low)}, {number_text(high)}]"
    )
    return Text(number_text(found.value) + mark + interval, style=_STYLES[verdict_of(found)])


def number_text(number: float) -> str:
    """Two decimals, or three digits of a large number."""
    return f"{number:.2f}" if abs(number) < 99.995 else f"{number:.3g}"


def verdict_of(found: Difference | None) -> str:
    """``"better"`` or ``"worse"`` if the interval shows it, else ``"open"``.

    A sampler that never got there with a seed with which the other did is not called better: other
    seeds flatter it.
    """
    if found is None or found.low is None or found.high is None:
        return "open"
    side = side_of(found.low, found.high, found.no_difference)
    if isinstance(found, SpeedUp) and (found.num_lost if side > 0 else found.num_won):
        return "open"
    return ("open", "better", "worse")[side]


def threshold_text(summary: Summary) -> str:
    """The threshold as a person writes it, for example ``70 %`` or ``loss 0.1``; ``none`` if
    there is none.
    """
    if summary.threshold is None:
        return "none"
    return (
        f"{100 * summary.threshold:g} %"
        if summary.metric == "accuracy"
        else f"loss {summary.threshold:g}"
    )


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know, result first; each entry is one or two sentences."""
    found = _results(summary)
    if summary.threshold is None:
        found.append("No threshold was set: no rounds, no speed-ups.")
    if all(len(entry.seeds) == 1 for entry in summary.samplers):
        found.append("One seed: no intervals. Another seed may change the order.")
    if not any(e.gap_closed for e in summary.samplers):
        found += _no_gap(summary)
    if any(
        e.gap_closed and e.gap_closed.low is None and len(e.seeds) > 1 for e in summary.samplers
    ):
        found.append(
            "Full participation is not clearly ahead of uniform sampling, so the gap says little: "
            "add seeds."
        )
    if summary.threshold is not None:
        found += _censored(summary)
    diverged = [
        f"{e.sampler} ({_share(e.num_diverged, e)})" for e in summary.samplers if e.num_diverged
    ]
    if diverged:
        found.append(
            f"{DIVERGED} Diverged: {', '.join(diverged)}. A stopped run keeps its last "
            f"{summary.metric}."
        )
    stopped = [(e, sum(run.stopped for run in e.seeds)) for e in summary.samplers]
    if named := ", ".join(f"{e.sampler} ({_share(number, e)})" for e, number in stopped if number):
        found.append(
            f"Stopped at {threshold_text(summary)}: {named}, with the {summary.metric} of then; a "
            "gap needs all rounds."
        )
    found += bias_remark([entry.sampler for entry in summary.samplers], summary.settings)
    return [*found, _columns(summary)]


def bias_remark(labels: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """One sentence if methods are biased: all by a setting, else those whose own parts are, with
    the part.
    """
    factor = settings.get("norm_guard")
    if factor is not None or settings.get("clip") is not None:
        who = "Biased, all of them" if len(labels) > 1 else "Biased"
        if factor is None:
            return [f"{who}: clipped to 1.5 medians of the norms of updates."]
        return [
            f"{who}: norm_guard = {factor:g} shortens estimates that are longer than those before."
        ]
    known = {*SAMPLERS, *CLASSES}
    parts = {
        label: bias_of(parse_label(without_part(label)))
        for label in labels
        if base_name(label) in known or ".py:" in label
    }
    named = [f"{label} ({part})" for label, part in parts.items() if part is not None]
    return [f"Biased: {', '.join(named)}."] if named else []


def without_part(label: str) -> str:
    """The label of a row of a reproduction, without the part that its runs are from."""
    return _PART.sub("", label)


def thresholds_of(summary: Summary) -> list[tuple[SamplerSummary, ToThreshold]]:
    """The samplers with what it took them to reach the threshold."""
    return [
        (entry, entry.to_threshold) for entry in summary.samplers if entry.to_threshold is not None
    ]


def _results(summary: Summary) -> list[str]:
    """Which samplers are shown to be better or worse, by area and by rounds."""
    sentences: list[str] = []

    def add(better: str, worse: str, than: str, found: Mapping[str, Difference | None]) -> None:
        for verdict, word in (("better", better), ("worse", worse)):
            if labels := [label for label in found if verdict_of(found[label]) == verdict]:
                sentences.append(f"{word} {than}: {', '.join(labels)}.")

    gaps = {e.sampler: e.gap_closed for e in summary.samplers if base_name(e.sampler) != "full"}
    add("Better", "Worse", "than uniform over all rounds (interval of the gap excludes 0)", gaps)
    tails = {e.sampler: e.fairness.gain for e in summary.samplers if e.fairness}
    add("Higher", "Lower", f"worst tenth than {summary.baseline} (interval excludes 0)", tails)
    if summary.threshold is None:
        return sentences
    if summary.baseline is None:
        return [*sentences, "No speed-ups: neither uniform nor fedavg is among the samplers."]
    speedups = {
        entry.sampler: reached.speedup
        for entry, reached in thresholds_of(summary)
        if reached.speedup is not None
    }
    add("Fewer", "More", f"rounds than {summary.baseline} (interval excludes 1)", speedups)
    if any(found.low is not None for found in speedups.values()):
        if not sentences:
            sentences.append(
                f"No interval shows a difference to {summary.baseline}; more seeds make them "
                "shorter."
            )
        sentences.append("Each interval is 95 % by itself, not all of them together.")
    return sentences


def _no_gap(summary: Summary) -> list[str]:
    """Why the column of the gap is empty, where no other remark has the reason."""
    if not {"full", "uniform"} <= {base_name(entry.sampler) for entry in summary.samplers}:
        return ["No gap closed: it needs both full and uniform among the samplers."]
    if any(run.stopped or run.diverged for entry in summary.samplers for run in entry.seeds):
        return []
    return ["No gap closed: full participation is not ahead of uniform sampling here."]


def _censored(summary: Summary) -> list[str]:
    goal = threshold_text(summary)
    never = [
        f"{e.sampler} ({_share(r.num_never, e)})" for e, r in thresholds_of(summary) if r.num_never
    ]
    if not any(reached.num_reached for _, reached in thresholds_of(summary)):
        return [f"No run reached {goal}."]
    if not never:
        return []
    return [
        (
            f"Never reached {goal}: {', '.join(never)}. Rounds and bytes are means over the seeds "
            "that "
            "did."
        )
    ]


def _columns(summary: Summary) -> str:
    metric = summary.metric
    last = max(seed.num_rounds for entry in summary.samplers for seed in entry.seeds)
    value = "Loss: test loss at the last evaluation"
    if metric == "accuracy":
        value = (
            f"Accuracy: mean of the {WINDOW} best of the evaluations after round "
            f"{max(late_after(last), 0)}"
        )
    spread = ", ± sd over seeds" if any(len(entry.seeds) > 1 for entry in summary.samplers) else ""
    tail = (
        " Worst tenth: mean accuracy of the tenth of the clients with the lowest, and the sd "
        "over clients."
    )
    gap = (
        f" Gap closed: by the mean {metric} over all rounds, 0 is uniform sampling, 1 full "
        "participation."
    )
    speedup = (
        f" Speed-up: mean rounds of {summary.baseline} / mean rounds of the sampler, paired "
        "by seed."
    )
    if any(
        reached.speedup and reached.speedup.num_left_out for _, reached in thresholds_of(summary)
    ):
        speedup += (
            f" {MARK}: without seeds in which one never got there; the sampler that fails "
            "is not called better."
        )
    span = "of the whole run" if summary.threshold is None else f"up to {threshold_text(summary)}"
    span += "; below them seconds of the virtual clock" if has_clock(summary) else ""
    if any(only_asks_first(entry.sampler) for entry in summary.samplers):
        span += (
            ". Rounds, bytes and time of a census are counted, but its round is not in the "
            "mean over rounds"
        )
    tail = tail if has_fairness(summary) else ""
    gap = gap if any(entry.gap_closed for entry in summary.samplers) else ""
    speedup = speedup if any(reached.speedup for _, reached in thresholds_of(summary)) else ""
    return f"{value}{spread}.{tail}{gap}{speedup} Bytes (down + up): {span}. {DASH}: no number."


def _share(number: int, entry: SamplerSummary) -> str:
    seeds = len(entry.seeds)
    return f"{number} of {seeds} {'seed' if seeds == 1 else 'seeds'}"
