"""The comparison as a table for the terminal, with remarks below: what the numbers show and what they do not show."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..samplers import SAMPLERS, bias_of, parse_label
from .runs import base_name
from .summary import SamplerSummary, SpeedUp, Summary, ToThreshold

#: Stands for a number that does not exist.
DASH = "—"
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"
_STYLES = {"faster": "green", "slower": "red", "open": ""}


def comparison_table(summary: Summary) -> RenderableType:
    """One row a sampler, and remarks below it; it fits into 80 columns.

    Seconds and bytes are those to the threshold; without a threshold, those of the whole run.
    """
    notes = Table.grid(padding=(0, 1))
    for sentence in remarks(summary):
        notes.add_row(Text("·", style="dim"), Text(sentence))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("sampler", overflow="fold")
    value = "accuracy\n%" if summary.metric == "accuracy" else "log10\nloss" if _shows_log(summary) else "loss"
    headings = [value, "seconds", "bytes"]
    if summary.threshold is not None:
        goal = threshold_text(summary).removeprefix("loss ")
        headings[1:1] = [f"rounds to\n{goal}", "speed-up\n[95 %]", "gap\nclosed"]
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for entry in summary.samplers:
        table.add_row(*_row(entry, summary))
    return Group(table, Text(), notes)


def _row(entry: SamplerSummary, summary: Summary) -> list[Text]:
    cells = [Text(entry.sampler), Text(_value_text(entry, summary))]
    reached, seconds, number = entry.to_threshold, entry.total_seconds, entry.total_bytes
    if reached is not None:
        gap, seconds, number = reached.gap_closed, reached.seconds, reached.bytes
        cells += [
            Text(_rounds_text(reached)),
            _speedup_text(reached.speedup, entry.sampler == summary.baseline),
            Text(DASH if gap is None else f"{gap.value:.2f}{MARK if gap.num_left_out else ''}"),
        ]
    return [*cells, Text(human_seconds(seconds)), Text(human_bytes(number))]


def human_bytes(number: float | None) -> str:
    """With a decimal unit (1 kB = 1000 bytes); a dash for None."""
    return DASH if number is None else decimal(round(number))


def human_seconds(number: float | None) -> str:
    """Seconds with three digits, whole from 100 on; a dash for None."""
    if number is None:
        return DASH
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def _shows_log(summary: Summary) -> bool:
    return summary.metric == "loss" and all(entry.final_log10_loss is not None for entry in summary.samplers)


def _value_text(entry: SamplerSummary, summary: Summary) -> str:
    if summary.metric == "accuracy":
        value, scale, digits = entry.top5, 100.0, 2
    elif _shows_log(summary) and entry.final_log10_loss:
        value, scale, digits = entry.final_log10_loss, 1.0, 3
    else:
        value, scale, digits = entry.final, 1.0, 4
    if value.mean is None:
        return DASH
    spread = "" if value.sd is None else f"±{scale * value.sd:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{spread}{DIVERGED if entry.num_diverged else ''}"


def _rounds_text(reached: ToThreshold) -> str:
    num_seeds = reached.num_reached + reached.num_never
    share = f"{reached.num_reached}/{num_seeds} seeds"
    if reached.rounds is None or reached.rounds.mean is None:
        return f"{DASH}\n{share}"
    mean = f"{reached.rounds.mean:,.0f}" if num_seeds == 1 else f"{reached.rounds.mean:,.1f}"
    return f"{mean}\n{share}" if reached.num_never else mean


def _speedup_text(speedup: SpeedUp | None, is_baseline: bool) -> Text:
    if is_baseline:
        return Text("baseline", style="dim")
    if speedup is None:
        return Text(DASH)
    text = _ratio_text(speedup.ratio) + (MARK if speedup.num_left_out else "")
    if speedup.low is not None and speedup.high is not None:
        text += f"\n[{_ratio_text(speedup.low)}–{_ratio_text(speedup.high)}]"
    return Text(text, style=_STYLES[speedup.verdict])


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 99.995 else f"{ratio:.3g}"


def threshold_text(summary: Summary) -> str:
    """The threshold as a person writes it, for example ``70 %`` or ``loss 0.1``; ``none`` if there is none."""
    if summary.threshold is None:
        return "none"
    return f"{100 * summary.threshold:g} %" if summary.metric == "accuracy" else f"loss {summary.threshold:g}"


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know, result first; each entry is one or two sentences."""
    found = _verdicts(summary) if summary.threshold is not None else ["No threshold was set: no rounds, no speed-ups."]
    if all(len(entry.seeds) == 1 for entry in summary.samplers):
        found.append("One seed: no intervals. Another seed may change the order.")
    if summary.threshold is not None:
        found += _censored(summary)
    diverged = [f"{e.sampler} ({_share(e.num_diverged, e)})" for e in summary.samplers if e.num_diverged]
    if diverged:
        found.append(f"{DIVERGED} Diverged: {', '.join(diverged)}. A stopped run keeps its last {summary.metric}.")
    found += bias_remark([entry.sampler for entry in summary.samplers], summary.settings)
    return [*found, _columns(summary)]


def bias_remark(labels: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """One sentence if methods are biased: all by a norm guard, else those whose own parts are, with the part."""
    factor = settings.get("norm_guard")
    if factor is not None:
        who = "Biased, all of them" if len(labels) > 1 else "Biased"
        return [f"{who}: norm_guard = {factor:g} shortens estimates that are longer than those before."]
    parts = {label: bias_of(parse_label(label)) for label in labels if base_name(label) in SAMPLERS or ".py:" in label}
    named = [f"{label} ({part})" for label, part in parts.items() if part is not None]
    return [f"Biased: {', '.join(named)}."] if named else []


def _reached(summary: Summary) -> list[tuple[SamplerSummary, ToThreshold]]:
    return [(entry, entry.to_threshold) for entry in summary.samplers if entry.to_threshold is not None]


def _verdicts(summary: Summary) -> list[str]:
    if summary.baseline is None:
        return ["No speed-ups: neither fedavg nor uniform is among the samplers, and no other baseline was named."]
    speedups = {entry.sampler: reached.speedup for entry, reached in _reached(summary) if reached.speedup is not None}
    intervals = {label: s for label, s in speedups.items() if s.low is not None}
    sentences = []
    for verdict, word in (("faster", "Fewer"), ("slower", "More")):
        labels = [label for label, s in intervals.items() if s.verdict == verdict]
        if labels:
            sentences.append(f"{word} rounds than {summary.baseline} (interval excludes 1): {', '.join(labels)}.")
    if intervals and not sentences:
        sentences.append(f"No interval excludes 1: no sampler is shown to differ from {summary.baseline} in rounds.")
    if len(intervals) > 1:
        sentences.append(f"Each of the {len(intervals)} intervals is 95 % by itself, not all of them together.")
    changed = [
        f"{entry.sampler} ({other})"
        for entry, reached in _reached(summary)
        if (other := _verdict(entry.to_threshold_smoothed)) != _verdict(reached)
    ]
    if changed:
        sentences.append(f"By the mean of five evaluations the verdict changes: {', '.join(changed)}.")
    if speedups:
        sentences.append(f"Speed-up: mean rounds of {summary.baseline} / mean rounds of the sampler, paired by seed.")
    return sentences


def _verdict(reached: ToThreshold | None) -> str:
    return "open" if reached is None or reached.speedup is None else reached.speedup.verdict


def _censored(summary: Summary) -> list[str]:
    goal = threshold_text(summary)
    never = [f"{e.sampler} ({_share(r.num_never, e)})" for e, r in _reached(summary) if r.num_never]
    if not any(reached.num_reached for _, reached in _reached(summary)):
        return [f"No run reached {goal}."]
    if not never:
        return []
    return [
        f"Never reached {goal}: {', '.join(never)}. Rounds, seconds and bytes are means over the seeds that did; "
        f"{MARK} leaves out such seeds, which flatters the sampler that failed."
    ]


def _columns(summary: Summary) -> str:
    spread = ", ± sd over seeds" if any(len(entry.seeds) > 1 for entry in summary.samplers) else ""
    value = (
        "Accuracy: mean of the 5 best evaluations in the last 4 % of the rounds"
        if summary.metric == "accuracy"
        else "Loss: test loss at the last evaluation"
    )
    span = "of the whole run" if summary.threshold is None else f"up to {threshold_text(summary)}"
    return f"{value}{spread}. Seconds and bytes (down + up): {span}, evaluation excluded. {DASH}: no number."


def _share(number: int, entry: SamplerSummary) -> str:
    seeds = len(entry.seeds)
    return f"{number} of {seeds} {'seed' if seeds == 1 else 'seeds'}"
