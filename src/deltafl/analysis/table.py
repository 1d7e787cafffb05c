"""The comparison as a table for the terminal, with remarks below: what the numbers show and what they do not show."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from .. import given
from ..samplers import SAMPLERS, bias_of, parse_label
from .runs import base_name, begins_with_census
from .statistics import WINDOW, late_after, mean_interval, ratio_of_means, side_of
from .summary import (
    Gain,
    GapClosed,
    MeanSd,
    SamplerFairness,
    SamplerSummary,
    SpeedUp,
    Summary,
    ToThreshold,
    ranked,
    references,
    value_of,
)

#: Stands for a number that does not exist.
DASH = "—"
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"
#: What distinguishes rows of one sampler in a reproduction, as in ``fedpracis@multinomial+n-20``.
_PART = re.compile(r"\+[a-z][\w-]*$")
_STYLES = {"better": "green", "worse": "red", "open": ""}


def comparison_table(summary: Summary) -> RenderableType:
    """One row a sampler, and remarks below it; it fits into 80 columns.

    Bytes are those to the threshold; without a threshold, those of the whole run.
    """
    notes = Table.grid(padding=(0, 1))
    for sentence in remarks(summary):
        notes.add_row(Text("·", style="dim"), Text(sentence))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("sampler", overflow="fold")
    headings = ["accuracy\n%" if summary.metric == "accuracy" else "loss", "gap closed\n[95 %]", "bytes"]
    if summary.threshold is not None:
        goal = threshold_text(summary).removeprefix("loss ")
        headings[2:2] = [f"rounds to\n{goal}", "speed-up\n[95 %]"]
    if has_fairness(summary):
        headings[1:1] = ["worst\ntenth"]
    if has_clock(summary):
        headings[-1] = "bytes\ntime"
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for entry in summary.samplers:
        table.add_row(*table_row(entry, summary).values())
    return Group(table, Text(), notes)


def table_row(entry: SamplerSummary, summary: Summary) -> dict[str, Text]:
    """The cells of a sampler in the order of the table, a second line with the interval or the share of seeds."""
    gap, reached, number = entry.gap_closed, entry.to_threshold, entry.total_bytes
    cells = {"sampler": Text(entry.sampler), "value": Text(_value_text(entry, summary))}
    if has_fairness(summary):
        cells["tail"] = _tail_text(entry.fairness)
    cells["gap"] = Text(DASH)
    if gap is not None:
        cells["gap"] = _with_interval(f"{gap.value:.2f}", gap.low, gap.high, _verdict(gap, 0))
    if reached is not None:
        cells["rounds"] = Text(_rounds_text(reached))
        cells["speedup"] = _speedup_text(reached.speedup, entry.sampler == summary.baseline)
        number = reached.bytes
    clock = None if reached is None else reached.clock
    return cells | {"bytes": Text(human_bytes(number) + ("" if clock is None else f"\n{human_seconds(clock)} s"))}


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


def _value_text(entry: SamplerSummary, summary: Summary) -> str:
    found = value_of(entry, summary)
    if found.mean is None:
        return DASH
    return _plus_minus(found, summary.metric == "accuracy") + (DIVERGED if entry.num_diverged else "")


def area_text(entry: SamplerSummary, summary: Summary) -> Text:
    """The mean over all rounds, the area under the curve, with its spread."""
    found = entry.area
    known = found is not None and found.mean is not None
    return Text(_plus_minus(found, summary.metric == "accuracy") if found is not None and known else DASH)


def _tail_text(found: SamplerFairness | None) -> Text:
    if found is None or found.sd.mean is None:
        return Text(DASH)
    text = f"{_plus_minus(found.worst_tenth, True)}\nsd {100 * found.sd.mean:.1f}"
    return Text(text, style=_STYLES[_verdict(found.gain, 0)])


def _plus_minus(found: MeanSd, in_percent: bool) -> str:
    numbers = [value for value in (found.mean, found.sd) if value is not None]
    return "±".join(f"{100 * value:.1f}" if in_percent else f"{value:.3g}" for value in numbers)


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
    ratio = _number_text(speedup.ratio) + (MARK if speedup.num_left_out else "")
    return _with_interval(ratio, speedup.low, speedup.high, _verdict(speedup, 1))


def _with_interval(number: str, low: float | None, high: float | None, verdict: str) -> Text:
    interval = "" if low is None or high is None or low == high else f"\n[{_number_text(low)}, {_number_text(high)}]"
    return Text(number + interval, style=_STYLES[verdict])


def _number_text(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 99.995 else f"{number:.3g}"


def _verdict(found: SpeedUp | GapClosed | Gain | None, no_difference: float) -> str:
    """``"better"`` or ``"worse"`` if the interval shows it, else ``"open"``."""
    side = (
        0 if found is None or found.low is None or found.high is None else side_of(found.low, found.high, no_difference)
    )
    return ("open", "better", "worse")[side]


def threshold_text(summary: Summary) -> str:
    """The threshold as a person writes it, for example ``70 %`` or ``loss 0.1``; ``none`` if there is none."""
    if summary.threshold is None:
        return "none"
    return f"{100 * summary.threshold:g} %" if summary.metric == "accuracy" else f"loss {summary.threshold:g}"


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know, result first; each entry is one or two sentences."""
    found = _results(summary)
    if summary.threshold is None:
        found.append("No threshold was set: no rounds, no speed-ups.")
    if all(len(entry.seeds) == 1 for entry in summary.samplers):
        found.append("One seed: no intervals. Another seed may change the order.")
    if summary.threshold is not None:
        found += _censored(summary)
    diverged = [f"{e.sampler} ({_share(e.num_diverged, e)})" for e in summary.samplers if e.num_diverged]
    if diverged:
        found.append(f"{DIVERGED} Diverged: {', '.join(diverged)}. A stopped run keeps its last {summary.metric}.")
    stopped = [(e, sum(run.stopped for run in e.seeds)) for e in summary.samplers]
    if named := ", ".join(f"{e.sampler} ({_share(number, e)})" for e, number in stopped if number):
        found.append(
            f"Stopped at {threshold_text(summary)}: {named}, with the {summary.metric} of then; a gap needs all rounds."
        )
    found += bias_remark([entry.sampler for entry in summary.samplers], summary.settings)
    return [*found, _columns(summary)]


def bias_remark(labels: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """One sentence if methods are biased: all by a setting, else those whose own parts are, with the part."""
    factor = settings.get("norm_guard")
    if factor is not None or settings.get("clip") is not None:
        who = "Biased, all of them" if len(labels) > 1 else "Biased"
        if factor is None:
            return [f"{who}: clipped to 1.5 medians of the norms of updates."]
        return [f"{who}: norm_guard = {factor:g} shortens estimates that are longer than those before."]
    known = {*SAMPLERS, *given.SAMPLERS}
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


def _reached(summary: Summary) -> list[tuple[SamplerSummary, ToThreshold]]:
    return [(entry, entry.to_threshold) for entry in summary.samplers if entry.to_threshold is not None]


def headline(summary: Summary) -> list[str]:
    """Which sampler was best and by how much; how sure that is; what it saves. One sentence each, the first the result.

    Best is whose gap closed is largest, else whose speed-up is, else whose metric is. Another sampler is behind if the
    interval of its distance to the best, over paired seeds, excludes 0.
    """
    rated = [entry for entry in summary.samplers if entry.sampler not in references(summary)]
    gaps = {e.sampler: e.gap_closed for e in rated if e.gap_closed}
    speedups = {e.sampler: e.to_threshold.speedup for e in rated if e.to_threshold and e.to_threshold.speedup}
    found: Mapping[str, GapClosed | SpeedUp] = gaps or speedups
    if not found:
        return _without_intervals(summary)
    best = max(found, key=lambda label: _estimate(found[label]))
    reference, even = ("uniform sampling", 0.0) if gaps else (str(summary.baseline), 1.0)
    shown = f"{best} closes {_in_line(found[best])} of the gap between {reference} and full participation"
    if not gaps:
        shown = f"{best} needs {_in_line(found[best])} times fewer rounds to {threshold_text(summary)} than {reference}"
    low = found[best].low
    if low is None and all(len(entry.seeds) == 1 for entry in summary.samplers):
        return [f"{shown}, in one seed.", "One seed has no interval: another seed may change the order."]
    if low is None or _verdict(found[best], even) != "better":
        why = "has no interval" if low is None else f"has an interval that does not lie above {even:g}"
        return [
            f"No sampler is shown to be better than {reference}.",
            f"The highest number {why}: {shown}. More seeds make intervals shorter.",
        ]
    leads = {label: _lead(summary, best, label, by_area=bool(gaps)) for label in found if label != best}
    rivals = [label for label, lead in leads.items() if _verdict(lead, even) != "better"]
    paired = "over all rounds" if gaps else f"to {threshold_text(summary)}"
    if rivals:
        named = [f"{label} ({_lead_text(leads[label], summary)})" for label in rivals[:3]]
        named += ["others"][: len(rivals) // 4]
        sure = [
            f"{shown}.",
            f"Not told apart from it {paired}, by paired seeds: {', '.join(named)}. More seeds decide.",
        ]
    elif leads:
        label = max(leads, key=lambda label: _estimate(found[label]))
        ahead = f"{_lead_text(leads[label], summary)} {paired}, by paired seeds"
        sure = [f"{shown}; no other sampler is ahead.", f"The next is {label}: {best} is ahead by {ahead}."]
    else:
        sure = [f"{shown}."]
    return [*sure, *_savings(summary, best)]


def _lead(summary: Summary, best: str, other: str, by_area: bool) -> Gain | SpeedUp | None:
    """How far ``best`` is ahead of another sampler over paired seeds: in the mean metric, or in rounds."""
    one, two = ({seed.seed: seed for seed in e.seeds} for e in _entries(summary, best, other))
    shared = [(one[seed], two[seed]) for seed in sorted(one.keys() & two.keys())]
    if by_area:
        areas = [(a.area, b.area) for a, b in shared if a.area is not None and b.area is not None]
        if not areas:
            return None
        sign = 1.0 if summary.metric == "accuracy" else -1.0
        value, low, high = mean_interval(sign * np.subtract(*np.array(areas).T))
        return Gain(value=value, low=low, high=high, num_pairs=len(areas))
    rounds = [(b.reach.round, a.reach.round) for a, b in shared if a.reach is not None and b.reach is not None]
    if not rounds:
        return None
    ratio, low, high = ratio_of_means(*np.array(rounds, dtype=np.float64).T)
    return SpeedUp(ratio=ratio, low=low, high=high, num_pairs=len(rounds), num_left_out=len(shared) - len(rounds))


def _entries(summary: Summary, *labels: str) -> list[SamplerSummary]:
    return [next(entry for entry in summary.samplers if entry.sampler == label) for label in labels]


def _lead_text(lead: Gain | SpeedUp | None, summary: Summary) -> str:
    if lead is None:
        return "no pair of seeds"
    if isinstance(lead, SpeedUp):
        return f"{_in_line(lead)} times fewer rounds"
    factor, unit, digits = (100, " points", 1) if summary.metric == "accuracy" else (1, "", 3)
    ends = (
        ""
        if lead.low is None or lead.high is None
        else f" [{factor * lead.low:.{digits}f}, {factor * lead.high:.{digits}f}]"
    )
    return f"{factor * lead.value:.{digits}f}{ends}{unit}"


def _estimate(found: GapClosed | SpeedUp) -> float:
    return found.value if isinstance(found, GapClosed) else found.ratio


def _in_line(found: GapClosed | SpeedUp) -> str:
    return _with_interval(_number_text(_estimate(found)), found.low, found.high, "open").plain.replace("\n", " ")


def _savings(summary: Summary, best: str) -> list[str]:
    """Rounds and bytes to the threshold beside those of the baseline."""
    found = {entry.sampler: to for entry, to in _reached(summary) if to.rounds is not None}
    texts = []
    for label in (best, summary.baseline):
        if label not in found:
            return []
        to = found[label]
        share = f" ({to.num_reached} of {to.num_reached + to.num_never} seeds)" if to.num_never else ""
        costs = [f"{_rounds_text(to).partition(chr(10))[0]} rounds", human_bytes(to.bytes)]
        costs += [] if to.clock is None else [f"{human_seconds(to.clock)} s of the clock"]
        texts.append(f"{', '.join(costs[:-1])} and {costs[-1]}{share}")
    census = ", the first one with all clients" if begins_with_census(best) else ""
    return [f"It reaches {threshold_text(summary)} after {texts[0]}{census}, {summary.baseline} after {texts[1]}."]


def _without_intervals(summary: Summary) -> list[str]:
    known = [entry for entry in ranked(summary) if value_of(entry, summary).mean is not None]
    if not known:
        return ["No sampler has a finite result.", "Every run diverged: lower the learning rate."]
    best, missing = known[0], "add uniform and full to the samplers, with 3 seeds or more, and there is one"
    value = f"{_value_text(best, summary)}{' %' if summary.metric == 'accuracy' else ''}"
    return [
        f"{best.sampler} ends with the best {summary.metric}: {value}.",
        f"No interval says how sure that is: {missing}.",
    ]


def _results(summary: Summary) -> list[str]:
    """Which samplers are shown to be better or worse, by area and by rounds."""
    sentences = []
    gaps = {e.sampler: _verdict(e.gap_closed, 0) for e in summary.samplers if base_name(e.sampler) != "full"}
    for verdict, words in (("better", "Better than uniform"), ("worse", "Worse than uniform")):
        if labels := [label for label, found in gaps.items() if found == verdict]:
            sentences.append(f"{words} over all rounds (interval of the gap excludes 0): {', '.join(labels)}.")
    tails = {e.sampler: _verdict(e.fairness.gain, 0) for e in summary.samplers if e.fairness}
    for verdict, word in (("better", "Higher"), ("worse", "Lower")):
        if labels := [label for label, found in tails.items() if found == verdict]:
            sentences.append(f"{word} worst tenth than {summary.baseline} (interval excludes 0): {', '.join(labels)}.")
    if summary.threshold is None:
        return sentences
    if summary.baseline is None:
        return [*sentences, "No speed-ups: neither uniform nor fedavg is among the samplers."]
    speedups = {entry.sampler: reached.speedup for entry, reached in _reached(summary) if reached.speedup is not None}
    for verdict, word in (("better", "Fewer"), ("worse", "More")):
        if labels := [label for label, found in speedups.items() if _verdict(found, 1) == verdict]:
            sentences.append(f"{word} rounds than {summary.baseline} (interval excludes 1): {', '.join(labels)}.")
    if any(found.low is not None for found in speedups.values()):
        if not sentences:
            sentences.append(f"No interval shows a difference to {summary.baseline}; more seeds make them shorter.")
        sentences.append("Each interval is 95 % by itself, not all of them together.")
    return sentences


def _censored(summary: Summary) -> list[str]:
    goal = threshold_text(summary)
    never = [f"{e.sampler} ({_share(r.num_never, e)})" for e, r in _reached(summary) if r.num_never]
    if not any(reached.num_reached for _, reached in _reached(summary)):
        return [f"No run reached {goal}."]
    if not never:
        return []
    return [f"Never reached {goal}: {', '.join(never)}. Rounds and bytes are means over the seeds that did."]


def _columns(summary: Summary) -> str:
    metric, late = summary.metric, _late_text(summary)
    value = f"Accuracy: {late}" if metric == "accuracy" else "Loss: test loss at the last evaluation"
    spread = ", ± sd over seeds" if any(len(entry.seeds) > 1 for entry in summary.samplers) else ""
    tail = " Worst tenth: mean accuracy of the tenth of the clients with the lowest, and the sd over clients."
    gap = f" Gap closed: by the mean {metric} over all rounds, 0 is uniform sampling, 1 full participation."
    speedup = f" Speed-up: mean rounds of {summary.baseline} / mean rounds of the sampler, paired by seed."
    if any(reached.speedup and reached.speedup.num_left_out for _, reached in _reached(summary)):
        speedup += f" {MARK}: without seeds that one of the two never finished, which flatters the slower one."
    span = "of the whole run" if summary.threshold is None else f"up to {threshold_text(summary)}"
    span += "; below them seconds of the virtual clock" if has_clock(summary) else ""
    if any(begins_with_census(entry.sampler) for entry in summary.samplers):
        span += ". Rounds, bytes and time of a census are counted, but its round is not in the mean over rounds"
    tail = tail if has_fairness(summary) else ""
    gap = gap if any(entry.gap_closed for entry in summary.samplers) else ""
    speedup = speedup if any(reached.speedup for _, reached in _reached(summary)) else ""
    return f"{value}{spread}.{tail}{gap}{speedup} Bytes (down + up): {span}. {DASH}: no number."


def _late_text(summary: Summary) -> str:
    last = max(seed.num_rounds for entry in summary.samplers for seed in entry.seeds)
    return f"mean of the {WINDOW} best of the evaluations after round {max(late_after(last), 0)}"


def _share(number: int, entry: SamplerSummary) -> str:
    seeds = len(entry.seeds)
    return f"{number} of {seeds} {'seed' if seeds == 1 else 'seeds'}"
