"""The result of a comparison in three sentences: which sampler was best, how sure that is, what
it saves.
"""

from collections.abc import Mapping

from .runs import begins_with_census
from .summary import (
    Gain,
    GapClosed,
    SpeedUp,
    Summary,
    gain,
    pairs,
    ranked,
    references,
    speedup,
    value_of,
)
from .table import (
    difference_text,
    human_bytes,
    human_seconds,
    rounds_text,
    threshold_text,
    thresholds_of,
    value_text,
    verdict_of,
)


def headline(summary: Summary) -> list[str]:
    """Which sampler was best and by how much; how sure that is; what it saves. One sentence each,
    the first the result.

    Best is whose gap closed is largest, else whose speed-up is, else whose metric is. Another
    sampler is behind if the interval of its distance to the best, over paired seeds, excludes 0.
    """
    rated = [entry for entry in summary.samplers if entry.sampler not in references(summary)]
    gaps = {e.sampler: e.gap_closed for e in rated if e.gap_closed}
    speedups = {
        e.sampler: e.to_threshold.speedup
        for e in rated
        if e.to_threshold and e.to_threshold.speedup
    }
    found: Mapping[str, GapClosed | SpeedUp] = gaps or speedups
    if not found:
        return _without_intervals(summary)
    best = max(found, key=lambda label: found[label].value)
    if gaps:
        reference = "uniform sampling"
        paired = "over all rounds"
        shown = (
            f"{best} closes {_in_line(found[best])} of the gap between {reference} and full "
            "participation"
        )
    else:
        reference = str(summary.baseline)
        paired = f"to {threshold_text(summary)}"
        shown = f"{best} needs {_in_line(found[best])} times fewer rounds {paired} than {reference}"
    if found[best].low is None and all(len(entry.seeds) == 1 for entry in summary.samplers):
        return [
            f"{shown}, in one seed.",
            "One seed has no interval: another seed may change the order.",
        ]
    if verdict_of(found[best]) != "better":
        better = [label for label in found if verdict_of(found[label]) == "better"]
        who = f"{', '.join(better) or 'No sampler'} {'are' if len(better) > 1 else 'is'}"
        return [
            f"{who} shown to be better than {reference}.",
            (
                f"The highest number {_why_open(found[best])}: {shown}. More seeds make intervals "
                "shorter."
            ),
        ]
    leads = {
        label: _lead(summary, best, label, by_area=bool(gaps)) for label in found if label != best
    }
    rivals = [label for label, lead in leads.items() if verdict_of(lead) != "better"]
    if rivals:
        named = [f"{label} ({_lead_text(leads[label], summary)})" for label in rivals[:3]]
        if len(rivals) > len(named):
            named.append("others")
        sure = [
            f"{shown}.",
            (
                f"Not clearly different from it {paired}, by paired seeds: {', '.join(named)}. "
                "More "
                "seeds decide."
            ),
        ]
    elif leads:
        label = max(leads, key=lambda label: found[label].value)
        ahead = f"{_lead_text(leads[label], summary)} {paired}, by paired seeds"
        sure = [
            f"{shown}; no other sampler is ahead.",
            f"The next is {label}: {best} is ahead by {ahead}.",
        ]
    else:
        sure = [f"{shown}."]
    return [*sure, *_savings(summary, best)]


def _why_open(found: GapClosed | SpeedUp) -> str:
    """Why the highest number does not show that its sampler is better."""
    if found.low is None:
        return "has no interval"
    if isinstance(found, SpeedUp) and found.num_lost and found.low > found.no_difference:
        return "leaves out seeds with which its sampler never got there"
    return f"has an interval that does not lie above {found.no_difference:g}"


def _lead(summary: Summary, best: str, other: str, by_area: bool) -> Gain | SpeedUp | None:
    """How far ``best`` is ahead of another sampler over paired seeds: in the mean metric, or in
    rounds.
    """
    runs = {entry.sampler: entry.seeds for entry in summary.samplers}
    if not by_area:
        return speedup(runs[best], runs[other])
    sign = 1.0 if summary.metric == "accuracy" else -1.0
    areas = [(a.area, b.area) for a, b in pairs(runs[best], runs[other])]
    return gain([(sign * a, sign * b) for a, b in areas if a is not None and b is not None])


def _lead_text(lead: Gain | SpeedUp | None, summary: Summary) -> str:
    if lead is None:
        return "no pair of seeds"
    if isinstance(lead, SpeedUp):
        lost = ", without seeds with which only it failed" if lead.num_lost else ""
        return f"{_in_line(lead)} times fewer rounds{lost}"
    factor, unit, digits = (100, " points", 1) if summary.metric == "accuracy" else (1, "", 3)
    ends = ""
    if lead.low is not None and lead.high is not None:
        ends = f" [{factor * lead.low:.{digits}f}, {factor * lead.high:.{digits}f}]"
    return f"{factor * lead.value:.{digits}f}{ends}{unit}"


def _in_line(found: GapClosed | SpeedUp) -> str:
    return difference_text(found).plain.replace("\n", " ")


def _savings(summary: Summary, best: str) -> list[str]:
    """Rounds and bytes to the threshold beside those of the baseline."""
    found = {entry.sampler: to for entry, to in thresholds_of(summary) if to.rounds is not None}
    texts = []
    for label in (best, summary.baseline):
        if label not in found:
            return []
        to = found[label]
        share = (
            f" ({to.num_reached} of {to.num_reached + to.num_never} seeds)" if to.num_never else ""
        )
        first = " (the first with all clients)" if begins_with_census(label) else ""
        costs = [f"{rounds_text(to).partition(chr(10))[0]} rounds{first}", human_bytes(to.bytes)]
        costs += [] if to.clock is None else [f"{human_seconds(to.clock)} s of the clock"]
        texts.append(f"{', '.join(costs[:-1])} and {costs[-1]}{share}")
    return [
        (
            f"{best} reaches {threshold_text(summary)} after {texts[0]}, {summary.baseline} after "
            f"{texts[1]}."
        )
    ]


def _without_intervals(summary: Summary) -> list[str]:
    known = [entry for entry in ranked(summary) if value_of(entry, summary).mean is not None]
    if not known:
        return ["No sampler has a finite result.", "Every run diverged: lower the learning rate."]
    best = known[0]
    missing = "add uniform and full to the samplers, with 3 seeds or more, and there is one"
    value = f"{value_text(best, summary)}{' %' if summary.metric == 'accuracy' else ''}"
    return [
        f"{best.sampler} ends with the best {summary.metric}: {value}.",
        f"No interval says how sure that is: {missing}.",
    ]
