"""What is said of a comparison: its result in three sentences, and remarks on its table.

The terminal, the report and ``deltafl run`` say it in these words. Verdicts come from intervals.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import counted, printable
from ..samplers.label import base_name, bias_of
from ..server.clipping import RADIUS
from ..server.table import sized_by
from ..types import Json
from .methods import asks_each_once, begins_with_census, find_label, method_of, only_asks_first
from .numbers import (
    Difference,
    Gain,
    GapClosed,
    SamplerSummary,
    SeedSummary,
    SpeedUp,
    Summary,
    value_of,
)
from .statistics import WINDOW, late_after
from .summary import gain, pairs, ranked, references, speedup
from .text import (
    DASH,
    DIVERGED,
    MARK,
    capital,
    decimals_of,
    difference_text,
    goal_text,
    has_clock,
    has_fairness,
    human_amount,
    human_bytes,
    rounds_text,
    value_text,
    verdict_of,
)

#: Reasons for which runs were stopped that are named.
REASONS = 3
#: Seeds that a sampler lacks that are named.
SEEDS = 5


def headline(summary: Summary) -> list[str]:
    """Which sampler was best and by how much; how sure that is; what it saves. One sentence each,
    the first the result.

    Best is whose gap closed is largest, else whose speed-up is, else whose metric is. Another
    sampler is behind if the interval of its distance to the best, over paired seeds, excludes 0.
    """
    # The ends of the gap are what the others are measured by.
    if asks_everybody(summary.settings, summary.environment):
        return [f"{_EVERYBODY}.", "Ask fewer per round (--sample) to compare them."]
    rated = [entry for entry in summary.samplers if entry.sampler not in references(summary)]
    gaps = {entry.sampler: entry.gap_closed for entry in rated if entry.gap_closed}
    speedups = {entry.sampler: entry.speedup for entry in rated if entry.speedup}
    if gaps:
        best = _best(gaps)
        claim = (
            f"{best} closes {difference_text(gaps[best])} of the gap between uniform sampling "
            "and full participation"
        )
        race = _Race(summary, gaps, best, claim, "uniform sampling", "over all rounds")
    elif speedups:
        best = _best(speedups)
        goal = goal_text(summary.judge, summary.threshold)
        span = f"to {goal}"
        # Not in times: 0.5 times fewer rounds would be more of them.
        claim = (
            f"{best} reaches {goal} with a speed-up of {difference_text(speedups[best])} over "
            f"{summary.baseline}"
        )
        race = _Race(summary, speedups, best, claim, str(summary.baseline), span)
    else:
        return _without_intervals(summary)
    if race.found[best].low is None and summary.has_one_seed:
        return [f"{claim}, in one seed.", _ONE_SEED]
    if verdict_of(race.found[best]) != "better":
        return _without_a_lead(race)
    return [*_ahead_of_others(race), *_savings(summary, best)]


_ONE_SEED = "One seed has no interval: another seed may change the order."
_EVERYBODY = "Every method asks all clients in each round, so no sampler can differ from another"


def asks_everybody(settings: Json, facts: Json) -> bool:
    """Whether several methods are compared that are all full participation; ``facts`` has the
    number of clients, where it is recorded.
    """
    labels = settings.get("samplers", ())
    # What lets a round be without some clients or with others than n, or be of other steps.
    differs = (
        any(settings.get(name) for name in ("dropout", "deadline", "rates"))
        or settings.get("availability", "always") != "always"
        or sized_by(settings) is not None
    )
    # Records have facts as text.
    asks_all = str(settings.get("sample")) == facts.get("clients")
    return asks_all and not differs and len(labels) > 1 and all(map(asks_each_once, labels))


def says_little(settings: Json, facts: Json) -> Iterator[str]:
    """What makes a comparison worth little, before it is played; each entry is one sentence."""
    if asks_everybody(settings, facts):
        yield f"{_EVERYBODY}: ask fewer (--sample)"
    threshold = settings.get("threshold")
    # Of other metrics than accuracy nobody knows what such a model reaches.
    if threshold is None or "majority" not in facts:
        return
    majority = float(facts["majority"])
    if threshold <= majority:
        yield (
            f"{100 * majority:.1f} % of the test examples have one class, so a model that always "
            f"answers it reaches the threshold of {threshold:g}: raise --threshold"
        )


class _Race(NamedTuple):
    """The samplers that are compared with a reference, by the area under the curve or in
    rounds.
    """

    summary: Summary
    found: Mapping[str, GapClosed | SpeedUp]
    best: str
    claim: str
    reference: str
    span: str

    def lead(self, other: str) -> Gain | SpeedUp | None:
        """How far the best is ahead of another one over paired seeds: in the mean metric, or in
        rounds.
        """
        ahead, behind = (self.summary.by_label[label].seeds for label in (self.best, other))
        # In the unit by which they are ranked.
        if isinstance(self.found[other], SpeedUp):
            return speedup(ahead, behind)
        return gain(ahead, behind, lambda run: run.area, self.summary.judge.sign)


def _best(found: Mapping[str, Difference]) -> str:
    return max(found, key=lambda label: found[label].value)


def _without_intervals(summary: Summary) -> list[str]:
    known = [entry for entry in ranked(summary) if value_of(entry, summary).mean is not None]
    if not known:
        why = "Every run diverged: lower the learning rate."
        if not all(entry.num_diverged for entry in summary.samplers):
            why = f"{capital(summary.judge.heading)} has no value on the test examples."
        return ["No sampler has a finite result.", why]
    cure = "add uniform and full to the samplers, with 3 seeds or more, and there is one"
    if any(run.stopped for entry in known for run in entry.seeds):
        cure = "it needs all rounds, and runs were stopped"
    sure = f"No interval says how sure that is: {cure}."
    if summary.has_one_seed and None not in references(summary):
        sure = _ONE_SEED
    return [
        f"{known[0].sampler} ends with the best {summary.judge.heading}: "
        f"{value_text(known[0], summary)}{summary.judge.unit}.",
        next(_behind_full(summary), sure),
    ]


def _without_a_lead(race: _Race) -> list[str]:
    better = [label for label, found in race.found.items() if verdict_of(found) == "better"]
    who = f"{', '.join(better) or 'No sampler'} is"
    if len(better) > 1:
        who = f"{', '.join(better)} are"
    highest = race.found[race.best]
    why = f"has an interval that does not lie above {highest.no_difference:g}"
    if highest.low is None:
        why = "has no interval"
    # The interval alone would call it better, as ``verdict_of`` does not.
    elif highest.num_lost and highest.low > highest.no_difference:
        why = "leaves out seeds with which its sampler never got there"
    return [
        f"{who} shown to be better than {race.reference}.",
        f"The highest number {why}: {race.claim}. More seeds make intervals shorter.",
    ]


def _ahead_of_others(race: _Race) -> list[str]:
    leads = {label: race.lead(label) for label in race.found if label != race.best}
    if not leads:
        return [f"{race.claim}."]
    rivals = [label for label, lead in leads.items() if verdict_of(lead) != "better"]
    if rivals:
        named = [f"{label} ({_lead_text(leads[label], race.summary)})" for label in rivals[:3]]
        if len(rivals) > len(named):
            named.append("others")
        return [
            f"{race.claim}.",
            f"Not clearly different from it {race.span}, by paired seeds: {', '.join(named)}. "
            "More seeds decide.",
        ]
    following = _best({label: race.found[label] for label in leads})
    return [
        f"{race.claim}; no other sampler is ahead.",
        f"The next is {following}: {race.best} is ahead by "
        f"{_lead_text(leads[following], race.summary)} {race.span}, by paired seeds.",
    ]


def _lead_text(lead: Gain | SpeedUp | None, summary: Summary) -> str:
    if lead is None:
        return "no pair of seeds"
    if isinstance(lead, SpeedUp):
        text = f"a speed-up of {difference_text(lead)}"
        if lead.num_lost:
            text += ", without seeds with which only it failed"
        return text
    factor = 1
    digits = decimals_of(lead.value, lead.low, lead.high)
    unit = ""
    if summary.judge.share:
        factor = 100
        digits = 1
        unit = " points"
    text = f"{factor * lead.value:.{digits}f}"
    if lead.low is not None and lead.high is not None:
        text += f" [{factor * lead.low:.{digits}f}, {factor * lead.high:.{digits}f}]"
    return text + unit


def _savings(summary: Summary, best: str) -> list[str]:
    """Rounds and bytes to the threshold beside those of the baseline."""
    texts = []
    for label in (best, summary.baseline):
        reached = label and summary.by_label[label].to_threshold
        # Where one of them never got there, nothing can be compared.
        if not reached or reached.rounds is None:
            return []
        text = counted(rounds_text(reached), "round")
        if begins_with_census(str(label)):
            text += " (the first with all clients)"
        if reached.clock is None:
            text += f" and {human_bytes(reached.bytes)}"
        else:
            text += (
                f", {human_bytes(reached.bytes)} and {human_amount(reached.clock)} s of the clock"
            )
        if reached.num_never:
            text += f" ({reached.num_reached} of {reached.num_seeds} seeds)"
        texts.append(text)
    goal = goal_text(summary.judge, summary.threshold)
    return [f"{best} reaches {goal} after {texts[0]}, {summary.baseline} after {texts[1]}."]


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must know, result first; each entry is one or two sentences."""
    results: list[str] = []
    if not asks_everybody(summary.settings, summary.environment):
        results = [*_results(summary), *_behind_full(summary)]
    results += _what_is_missing(summary)
    return [
        *(f"{text}." for text in says_little(summary.settings, summary.environment)),
        *results,
        *_how_runs_ended(summary),
        *bias_remark([*summary.by_label], summary.settings),
        " ".join(_columns(summary)),
    ]


def _results(summary: Summary) -> list[str]:
    """Which samplers are shown to be better or worse, by area, worst tenth and rounds."""
    entries = summary.by_label
    # Full participation closes all of the gap by definition, and uniform sampling nothing.
    apart = [x for x in entries if base_name(x) != "full" and x not in references(summary)]
    gaps = {x: entries[x].gap_closed for x in apart}
    tails = {x: e.fairness.gain for x, e in entries.items() if e.fairness}
    speedups = {x: e.speedup for x, e in entries.items() if e.speedup}
    base = summary.baseline
    tail_words = ("Higher", "Lower")
    if not summary.judge.higher:
        tail_words = ("Lower", "Higher")
    sentences = []
    for better, worse, than, found in (
        ("Better", "Worse", "than uniform over all rounds (interval of the gap excludes 0)", gaps),
        (*tail_words, f"worst tenth than {base} (interval excludes 0)", tails),
        ("Fewer", "More", f"rounds than {base} (speed-up [95 %])", speedups),
    ):
        for verdict, word in (("better", better), ("worse", worse)):
            shown = [label for label in found if verdict_of(found[label]) == verdict]
            if found is speedups:
                shown = [f"{label} {difference_text(speedups[label])}" for label in shown]
            if shown:
                sentences.append(f"{word} {than}: {', '.join(shown)}.")
    if summary.threshold is not None and base is None:
        sentences.append("No speed-ups: neither uniform nor fedavg is among the samplers.")
    differences = [*gaps.values(), *tails.values(), *speedups.values()]
    if any(found and found.low is not None for found in differences):
        if not sentences:
            sentences.append(
                f"No interval shows a difference to {base}; more seeds make them shorter."
            )
        sentences.append("Each interval is 95 % by itself, not all of them together.")
    return sentences


#: Where full participation ends beside another sampler, by the verdict on its lead.
_BESIDE_FULL = {
    "better": "is ahead of",
    "open": "is not clearly apart from",
    "worse": "is behind",
}


def _behind_full(summary: Summary) -> Iterator[str]:
    """How far behind full participation the others end; the question of who wants to ask fewer."""
    full = find_label("full", [*summary.by_label])
    if full is None or summary.has_one_seed:
        return
    every = summary.by_label[full].seeds
    texts: dict[str, list[str]] = {verdict: [] for verdict in _BESIDE_FULL}
    for label, entry in summary.by_label.items():
        # Runs that a rule has ended have no end in common.
        if label == full or any(run.stopped for run in (*every, *entry.seeds)):
            continue
        lead = gain(every, entry.seeds, lambda run: value_of(run, summary), summary.judge.sign)
        if lead is not None:
            text = _lead_text(lead, summary)
            # Such as one that diverged and has no value.
            if lead.num_pairs < len(entry.seeds):
                text += f", {lead.num_pairs} of {len(entry.seeds)} seeds"
            texts[verdict_of(lead)].append(f"{label} ({text})")
    told = [
        f"{words} {', '.join(texts[verdict])}"
        for verdict, words in _BESIDE_FULL.items()
        if texts[verdict]
    ]
    if told:
        yield f"At the end, by paired seeds, {full} {'; '.join(told)}."


def _what_is_missing(summary: Summary) -> Iterator[str]:
    entries = summary.samplers
    gaps = [entry.gap_closed for entry in entries if entry.gap_closed]
    names = {base_name(entry.sampler) for entry in entries}
    if summary.threshold is None:
        yield "No threshold was set: no rounds, no speed-ups."
    if summary.has_one_seed:
        yield "One seed: no intervals. Another seed may change the order."
    if not gaps and not {"full", "uniform"} <= names:
        yield "No gap closed: it needs both full and uniform among the samplers."
    # Runs that ended early have no gap either, but for another reason.
    elif not gaps and not any(run.stopped or run.diverged for e in entries for run in e.seeds):
        yield f"No gap closed: {_why_no_gap(summary)}."
    if lacking := _lacking_seeds(entries):
        yield (
            f"Seeds differ: {lacking}. Means are of each one's own, intervals of those in common."
        )
    if any(gap.low is None and gap.num_seeds > 1 for gap in gaps):
        yield (
            "Full participation is not clearly ahead of uniform sampling over all rounds: asking "
            "fewer clients costs little here, or more seeds are needed, and the gap says little."
        )


def _why_no_gap(summary: Summary) -> str:
    full, uniform = (find_label(name, [*summary.by_label]) for name in ("full", "uniform"))
    if full is None or uniform is None:
        return "it needs one row of full and one of uniform, and there are several"
    both = pairs(summary.by_label[full].seeds, summary.by_label[uniform].seeds)
    if not both:
        return "full and uniform have no seed in common"
    if any(run.area is None for pair in both for run in pair):
        return f"full or uniform has a round without {summary.judge.heading}"
    return "full participation is not ahead of uniform sampling here"


def _lacking_seeds(entries: Sequence[SamplerSummary]) -> str:
    """The samplers that lack seeds of others, with these."""
    of = {entry.sampler: {run.seed for run in entry.seeds} for entry in entries}
    every = set[int]().union(*of.values())
    texts = []
    for label, seeds in of.items():
        lacking = [str(seed) for seed in sorted(every - seeds)]
        if len(lacking) > SEEDS:
            lacking[SEEDS:] = [f"{len(lacking) - SEEDS} more"]
        if lacking:
            texts.append(f"{label} lacks {', '.join(lacking)}")
    return "; ".join(texts)


def _how_runs_ended(summary: Summary) -> Iterator[str]:
    goal = goal_text(summary.judge, summary.threshold)
    metric = summary.judge.heading
    reached = [entry.to_threshold for entry in summary.samplers if entry.to_threshold]
    if reached and not any(to.num_reached for to in reached):
        yield f"No run reached {goal}."
    elif any(to.num_never for to in reached):
        yield f"Rounds and bytes are means over the seeds that reached {goal}."
    if diverged := _shares(summary, lambda run: run.diverged):
        yield f"{DIVERGED} Diverged: {diverged}. A stopped run keeps its last {metric}."
    silent = [e.sampler for e in summary.samplers if e.costs and e.costs.bytes_up == 0]
    if silent:
        yield (
            f"No reply ever came, so that the model learnt nothing: {', '.join(silent)}; look at "
            "deadline (in seconds), dropout and availability."
        )
    refused = {e.sampler: sum(run.refused for run in e.seeds) for e in summary.samplers}
    if named := ", ".join(f"{label} {number:,}" for label, number in refused.items() if number):
        whys = Counter(run.refused_why for e in summary.samplers for run in e.seeds if run.refused)
        why = printable(whys.most_common(1)[0][0], limit=120)
        yield f"Replies were refused and count as missing: {named}; most often because {why}."

    def stopped_by(why: str) -> str:
        return _shares(summary, lambda run: run.stopped and run.stopped_why == why)

    reasons = Counter(run.stopped_why for e in summary.samplers for run in e.seeds if run.stopped)
    for why, _ in reasons.most_common(REASONS):
        cause = printable(why, limit=120)
        named = stopped_by(why)
        yield f"Stopped ({cause}): {named}, with the {metric} of then; a gap needs all rounds."
    if len(reasons) > REASONS:
        yield f"Runs were stopped for {len(reasons) - REASONS} more reasons; their last lines say."


def _shares(summary: Summary, counts: Callable[[SeedSummary], bool]) -> str:
    """The samplers with runs that count, and of how many seeds these are."""
    texts = []
    for entry in summary.samplers:
        if number := sum(map(counts, entry.seeds)):
            count = len(entry.seeds)
            texts.append(f"{entry.sampler} ({number} of {count} seed{'s' * (count > 1)})")
    return ", ".join(texts)


def bias_remark(labels: Sequence[str], settings: Json) -> list[str]:
    """One sentence if methods are biased: all by a setting, else those whose own parts are, with
    the part.
    """
    who = "Biased"
    if len(labels) > 1:
        who = "Biased, all of them"
    # These settings bias every method: none need be named.
    factor = settings.get("norm_guard")
    if factor is not None:
        return [
            f"{who}: norm_guard = {factor:g} shortens estimates that are longer than those before."
        ]
    if settings.get("clip") is not None:
        return [f"{who}: clipped to {RADIUS:g} medians of the norms of updates."]
    methods = {label: method_of(label) for label in labels}
    parts = {label: bias_of(method) for label, method in methods.items() if method}
    named = [f"{label} ({part})" for label, part in parts.items() if part is not None]
    if not named:
        return []
    return [f"Biased: {', '.join(named)}."]


def _metric_column(summary: Summary) -> str:
    """What the column of the metric shows."""
    metric = summary.judge.heading
    title = capital(metric)
    runs = [run for entry in summary.samplers for run in entry.seeds]
    # What is shown of runs that were ended is their last value.
    whole = [run.num_rounds for run in runs if not run.stopped and run.diverged_in is None]
    if summary.judge.share and whole:
        last = max(whole)
        # A run that is shorter than the window is late from its start.
        late = max(late_after(last), 0)
        value = f"{title}: mean of the evaluations after round {late}"
        if last - late > WINDOW:
            value = f"{title}: mean of the {WINDOW} best evaluations after round {late}"
    else:
        value = f"{title}: test {metric} at the last evaluation"
    if not summary.has_one_seed:
        redrawn = "redraw what the task draws (split, test rows, model)"
        # Such as one ``Task`` for all of them.
        if "splits" in summary.environment:
            redrawn = (
                "all share one split and test set of the data, so that it and intervals lack what "
                "other splits would add"
            )
        value += f", ± sd over seeds, which {redrawn}"
    # Of these two everybody knows it.
    if summary.metric not in ("accuracy", "loss"):
        value += f"; {'higher' if summary.judge.higher else 'lower'} is better"
    if "majority" in summary.environment:
        majority = float(str(summary.environment["majority"]))
        value += f"; always the commonest class: {100 * majority:.1f} %"
    return f"{value}."


def _columns(summary: Summary) -> Iterator[str]:
    """What the columns of the table show."""
    metric = summary.judge.heading
    entries = summary.samplers
    speedups = [entry.speedup for entry in entries if entry.speedup]
    yield _metric_column(summary)
    if has_fairness(summary):
        worst = "lowest" if summary.judge.higher else "highest"
        yield (f"Worst tenth: mean {metric} of the tenth of the clients with the {worst}.")
    if any(entry.gap_closed for entry in entries):
        yield (
            f"Gap closed: by the mean {metric} over all rounds, 0 is uniform sampling, 1 full "
            "participation, so that a faster start counts."
        )
    if speedups:
        yield (
            f"Speed-up: mean rounds of {summary.baseline} / mean rounds of the sampler, paired "
            "by seed."
        )
    if any(found.num_left_out for found in speedups):
        yield (
            f"{MARK}: without seeds in which one never got there; the sampler that fails is not "
            "called better."
        )
    until = f"up to {goal_text(summary.judge, summary.threshold)}"
    if summary.threshold is None:
        until = "of the whole run"
    if has_clock(summary):
        until += "; below them seconds of the virtual clock"
    yield f"Bytes (down + up): {until}."
    if any(only_asks_first(entry.sampler) for entry in entries):
        yield (
            "Rounds, bytes and time of a census are counted, but its round is not in the mean "
            "over rounds."
        )
    yield f"{DASH}: no number."
