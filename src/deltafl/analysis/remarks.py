"""Short sentences below the comparison, made from its numbers: what they show and what they do not show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..samplers import SAMPLERS, SamplerSettings, bias_of
from .curves import find_sampler
from .schema import GapClosed, SamplerSummary, SpeedUp, Summary, ToThreshold

#: Stands in the table for a number that does not exist.
DASH = "—"
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know, most important first; each entry is one or two plain sentences.

    It names the samplers whose interval excludes 1, runs that never reached the threshold or diverged, what rests on
    one seed only, methods that are biased, what the columns are, and what a dash means where there is one.
    """
    parts: list[Callable[[Summary], list[str]]] = [_no_threshold, _few_seeds]
    if summary.threshold is not None:
        parts = [_verdicts, _smoothed, _few_seeds, _pairs, _censored]
    parts += [_diverged, _bias, _lengths, _columns, _dashes]
    return [sentence for part in parts for sentence in part(summary)]


def threshold_text(summary: Summary) -> str:
    """The threshold as a person writes it, for example ``70 %`` or ``loss 0.1``; ``none`` if there is none."""
    if summary.threshold is None:
        return "none"
    return f"{100 * summary.threshold:g} %" if summary.metric == "accuracy" else f"loss {summary.threshold:g}"


def _reached(summary: Summary) -> list[tuple[SamplerSummary, ToThreshold]]:
    return [(entry, entry.to_threshold) for entry in summary.samplers if entry.to_threshold is not None]


def _speedups(summary: Summary) -> dict[str, SpeedUp]:
    return {entry.sampler: reached.speedup for entry, reached in _reached(summary) if reached.speedup is not None}


def bias_remark(labels: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """One sentence if methods are biased: all of them by a norm guard, else those whose own parts are, with the part.

    Args:
        labels: Their labels; one that is no sampler's is not judged.
        settings: Those of the run or the comparison, by name; what is missing is not set.
    """
    factor = settings.get("norm_guard")
    if factor is not None:
        who = "Biased, all of them" if len(labels) > 1 else "Biased"
        return [f"{who}: norm_guard = {factor:g} shortens estimates that are longer than those before."]
    given = SamplerSettings(floor=settings.get("floor"), drop_small_after=settings.get("drop_small_after"))
    parts = {label: bias_of(label, given) for label in labels if label.partition("@")[0] in SAMPLERS}
    named = [f"{label} ({part})" for label, part in parts.items() if part is not None]
    return [f"Biased: {', '.join(named)}."] if named else []


def _bias(summary: Summary) -> list[str]:
    return bias_remark([entry.sampler for entry in summary.samplers], summary.settings)


def _no_threshold(summary: Summary) -> list[str]:
    return ["No threshold was set: no rounds to it, no speed-ups."]


def _verdicts(summary: Summary) -> list[str]:
    if summary.baseline is None:
        return ["No speed-ups: neither fedavg nor uniform is among the samplers, and no other baseline was named."]
    with_interval = {label: s for label, s in _speedups(summary).items() if s.low is not None}
    if not with_interval:
        return []
    sentences = []
    for verdict, word in (("faster", "Fewer"), ("slower", "More")):
        labels = [label for label, s in with_interval.items() if s.verdict == verdict]
        if labels:
            sentences.append(f"{word} rounds than {summary.baseline} (interval excludes 1): {', '.join(labels)}.")
    if not sentences:
        sentences.append(f"No interval excludes 1: no sampler is shown to differ from {summary.baseline} in rounds.")
    if len(with_interval) > 1:
        sentences.append(f"Each of the {len(with_interval)} intervals is 95 % by itself, not all of them together.")
    if flat := [label for label, s in with_interval.items() if s.low == s.high]:
        sentences.append(f"All pairs agree exactly for {', '.join(flat)}: an interval without width is no proof.")
    return sentences


def _smoothed(summary: Summary) -> list[str]:
    changed = []
    for entry, reached in _reached(summary):
        smoothed = entry.to_threshold_smoothed
        verdict = _verdict(smoothed.speedup if smoothed is not None else None)
        if verdict != _verdict(reached.speedup):
            changed.append(f"{entry.sampler} ({verdict})")
    return [f"By the moving average over 5 evaluations the verdict changes: {', '.join(changed)}."] if changed else []


def _verdict(speedup: SpeedUp | None) -> str:
    return "open" if speedup is None else speedup.verdict


def _few_seeds(summary: Summary) -> list[str]:
    if all(len(entry.seeds) == 1 for entry in summary.samplers):
        return ["One seed: no intervals. Another seed may change the order."]
    alone = [label for label, s in _speedups(summary).items() if s.num_pairs == 1]
    return [f"One pair of seeds only, hence no interval: {', '.join(alone)}."] if alone else []


def _pairs(summary: Summary) -> list[str]:
    counts = [speedup.num_pairs for speedup in _speedups(summary).values()]
    if not counts:
        return []
    same = min(counts) == max(counts)
    number = _count(max(counts), "paired seed") if same else f"{min(counts)} to {max(counts)} paired seeds"
    return [f"Speed-up: mean rounds of {summary.baseline} / mean rounds of the sampler, over {number}."]


def _censored(summary: Summary) -> list[str]:
    goal = threshold_text(summary)
    if not any(reached.num_reached for _, reached in _reached(summary)):
        return [f"No run reached {goal}."]
    never = [(entry, reached.num_never) for entry, reached in _reached(summary) if reached.num_never]
    if not never:
        return []
    counts = ", ".join(f"{entry.sampler} ({_share(number, entry)})" for entry, number in never)
    sentences = [f"Never reached {goal}: {counts}. Rounds, seconds and bytes are means over the seeds that did."]
    gaps = (reached.gap_closed for _, reached in _reached(summary))
    ratios: list[SpeedUp | GapClosed] = [*_speedups(summary).values(), *(gap for gap in gaps if gap is not None)]
    if any(ratio.num_left_out for ratio in ratios):
        sentences.append(
            f"{MARK} leaves out seeds with which one of the runs never reached it; "
            "this flatters the one that failed, and the interval does not know of it."
        )
    return sentences


def _diverged(summary: Summary) -> list[str]:
    counts = [f"{e.sampler} ({_share(e.num_diverged, e)})" for e in summary.samplers if e.num_diverged]
    if not counts:
        return []
    text = f"{DIVERGED} Diverged: {', '.join(counts)}."
    if any(run.diverged_in is not None for entry in summary.samplers for run in entry.seeds):
        text += f" Such a run was ended; its {summary.metric} is the one that it was last evaluated with."
    return [text]


def _lengths(summary: Summary) -> list[str]:
    lengths = sorted({run.num_rounds for entry in summary.samplers for run in entry.seeds})
    if len(lengths) == 1:
        return []
    return [f"The runs differ in length ({lengths[0]} to {lengths[-1]} rounds): {summary.metric} is at each one's end."]


def _columns(summary: Summary) -> list[str]:
    spread = ", ± sd over seeds" if any(len(entry.seeds) > 1 for entry in summary.samplers) else ""
    if summary.metric == "accuracy":
        value = f"Accuracy: mean of the 5 best evaluations in the last 4 % of the rounds{spread}."
    else:
        value = f"Loss: test loss at the last evaluation{spread}."
    span = "of the whole run" if summary.threshold is None else f"up to {threshold_text(summary)}"
    return [f"{value} Seconds and bytes (down + up): {span}, evaluation excluded."]


def _dashes(summary: Summary) -> list[str]:
    reasons = []
    if any(_value_mean(entry, summary) is None for entry in summary.samplers):
        reasons.append("the value of a seed is not finite")
    if any(reached.num_reached == 0 for _, reached in _reached(summary)):
        reasons.append("no seed reached the threshold")
    if summary.baseline is None and _reached(summary):
        reasons.append("a speed-up needs a baseline")
    elif any(_lacks_speedup(entry, reached, summary) for entry, reached in _reached(summary)):
        reasons.append(f"no seed with which both the sampler and {summary.baseline} reached it")
    if any(reached.gap_closed is None for _, reached in _reached(summary)):
        reasons.append(_gap_reason(summary))
    return [f"{DASH} (no number): {'; '.join(reasons)}."] if reasons else []


def _lacks_speedup(entry: SamplerSummary, reached: ToThreshold, summary: Summary) -> bool:
    return entry.sampler != summary.baseline and reached.speedup is None and reached.num_reached > 0


def _value_mean(entry: SamplerSummary, summary: Summary) -> float | None:
    return entry.top5.mean if summary.metric == "accuracy" else entry.final.mean


def _gap_reason(summary: Summary) -> str:
    labels = [entry.sampler for entry in summary.samplers]
    missing = [name for name in ("uniform", "full") if find_sampler(name, labels) is None]
    if missing:
        return f"the gap closed needs {' and '.join(missing)} among the samplers"
    return "the gap closed needs a seed with which uniform, full and the sampler reach it, and full faster than uniform"


def _share(number: int, entry: SamplerSummary) -> str:
    return f"{number} of {_count(len(entry.seeds), 'seed')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
