"""The comparison as a table for the terminal, with its remarks below."""

import textwrap

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .remarks import DASH, DIVERGED, MARK, remarks, threshold_text
from .schema import GapClosed, MeanSd, SamplerSummary, SpeedUp, Summary, ToThreshold

#: Columns from which a row fits into one line, and the longest line of a label below that.
_WIDE, _LABEL = 92, 16
_VERDICT_STYLES = {"faster": "green", "slower": "red", "open": ""}
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def comparison_table(summary: Summary) -> RenderableType:
    """One row a sampler, and below it what the numbers say and do not say.

    Seconds and bytes are those to the threshold; without a threshold, those of the whole run. From 92 columns on a
    sampler has one line (two if some of its seeds never reached the threshold); in fewer, down to 80, the interval
    goes below the ratio.
    """
    return _Comparison(summary)


class _Comparison:
    def __init__(self, summary: Summary) -> None:
        self.summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self.summary, narrow=options.max_width < _WIDE)
        yield Text()
        notes = Table.grid(padding=(0, 1))
        for sentence in remarks(self.summary):
            notes.add_row(Text("·", style="dim"), Text(sentence))
        yield notes


def _table(summary: Summary, narrow: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("sampler", overflow="fold")
    for heading in _headings(summary):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for entry in summary.samplers:
        table.add_row(*_row(entry, summary, narrow))
    return table


def _headings(summary: Summary) -> list[str]:
    if summary.threshold is None:
        return [_metric_heading(summary), "seconds", "bytes"]
    goal = threshold_text(summary).removeprefix("loss ")
    return [_metric_heading(summary), f"rounds to\n{goal}", "speed-up\n[95 %]", "gap\nclosed", "seconds", "bytes"]


def human_bytes(number: float | None) -> str:
    """Three digits and a decimal unit (1 kB = 1000 B); a dash for None."""
    if number is None:
        return DASH
    power = 0
    # 999.5 and more would be printed as 1000.
    while number >= 999.5 and power < len(_BYTE_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{_three_digits(number)} {_BYTE_UNITS[power]}" if power else f"{number:.0f} B"


def human_seconds(number: float | None) -> str:
    """Seconds with three digits, whole from 100 on; a dash for None."""
    return DASH if number is None else _three_digits(number)


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def _metric_heading(summary: Summary) -> str:
    if summary.metric == "accuracy":
        return "accuracy\n%"
    return "log10\nloss" if _shows_log(summary) else "loss"


def _shows_log(summary: Summary) -> bool:
    return summary.metric == "loss" and all(entry.final_log10_loss is not None for entry in summary.samplers)


def _row(entry: SamplerSummary, summary: Summary, narrow: bool) -> list[Text]:
    head = [Text(_short_lines(entry.sampler) if narrow else entry.sampler), Text(_metric_text(entry, summary))]
    reached = entry.to_threshold
    if reached is None:
        return [*head, Text(human_seconds(entry.total_seconds)), Text(human_bytes(entry.total_bytes))]
    return [
        *head,
        Text(_rounds_text(reached)),
        _speedup_text(reached.speedup, entry.sampler == summary.baseline, "\n" if narrow else " "),
        Text(_gap_text(reached.gap_closed)),
        Text(human_seconds(reached.seconds)),
        Text(human_bytes(reached.bytes)),
    ]


def _short_lines(label: str) -> str:
    """A label in lines of at most 16 characters, broken before its suffix and at hyphens."""
    if len(label) <= _LABEL:
        return label
    name, at, suffix = label.partition("@")
    return "\n".join(line for part in (name, at + suffix) for line in textwrap.wrap(part, _LABEL))


def _metric_text(entry: SamplerSummary, summary: Summary) -> str:
    if summary.metric == "accuracy":
        text = _mean_sd_text(entry.top5, 100.0, 2)
    elif _shows_log(summary) and entry.final_log10_loss is not None:
        text = _mean_sd_text(entry.final_log10_loss, 1.0, 3)
    else:
        text = _mean_sd_text(entry.final, 1.0, 4)
    return text + DIVERGED if entry.num_diverged and text != DASH else text


def _mean_sd_text(value: MeanSd, scale: float, digits: int) -> str:
    if value.mean is None:
        return DASH
    mean = f"{scale * value.mean:.{digits}f}"
    return mean if value.sd is None else f"{mean}±{scale * value.sd:.{digits}f}"


def _rounds_text(reached: ToThreshold) -> str:
    num_seeds = reached.num_reached + reached.num_never
    share = f"{reached.num_reached}/{num_seeds} seeds"
    if reached.rounds is None or reached.rounds.mean is None:
        return f"{DASH}\n{share}"
    mean = f"{reached.rounds.mean:,.0f}" if num_seeds == 1 else f"{reached.rounds.mean:,.1f}"
    return f"{mean}\n{share}" if reached.num_never else mean


def _speedup_text(speedup: SpeedUp | None, is_baseline: bool, separator: str) -> Text:
    if is_baseline:
        return Text("baseline", style="dim")
    if speedup is None:
        return Text(DASH)
    text = _ratio_text(speedup.ratio) + (MARK if speedup.num_left_out else "")
    if speedup.low is not None and speedup.high is not None:
        text += f"{separator}[{_ratio_text(speedup.low)}–{_ratio_text(speedup.high)}]"
    return Text(text, style=_VERDICT_STYLES[speedup.verdict])


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 99.995 else f"{ratio:.3g}"


def _gap_text(gap: GapClosed | None) -> str:
    return DASH if gap is None else f"{gap.value:.2f}{MARK if gap.num_left_out else ''}"
