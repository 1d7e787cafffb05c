"""The target: on every task with m / n <= 20, G >= 0.7 for this project's best unbiased method, and no rival ahead.

The rules stand in ``texts.toml``. The best method is chosen on the tuning seeds, so that its result on the test seeds
is not the luckiest of several. Numbers of rounds are min(R, T): a run that never reaches the threshold, or diverges,
counts as its T rounds, a lower bound that decides nothing in favour of its method.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from deltafl.analysis import Run, area_under, fieller, mean_interval, t_quantile
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.simulation import rounds_to_threshold
from deltafl.types import FloatArray

from ..measures import Measure, Statement, accuracy, compare
from ..verdict import ends
from .parts import BASELINE, FULL, Part
from .runs import Method, Result

#: What a practical server has, as in the column "needs" of ``deltafl samplers``.
PRACTICAL = ("nothing", "sizes", "cohort")
#: The same for a server that knows every client's shares of labels beforehand.
INFORMED = (*PRACTICAL, "known")
GOAL, LARGEST_RATIO = 0.7, 20
LEAST = 0.1  # a gap below this share of what full participation needs is none
BESIDE = (-0.05, -0.02, 0.02)  # added to a part's threshold, where its best method is shown as well
Status = Literal["reached", "missed", "open", "no gap", "not measured"]


def needs(label: str) -> str:
    return SAMPLERS[parse_label(label).name].needs


def is_ours(label: str) -> bool:
    return SAMPLERS[parse_label(label).name].source == "this project"


def _is_rival(label: str, informed: bool) -> bool:
    return not is_ours(label) and label != FULL and needs(label) in (INFORMED if informed else PRACTICAL)


def measures(part: Part) -> list[Measure]:
    """What methods are compared by, the main one first."""
    return [
        rounds_at(part.threshold),
        rounds_at(part.threshold, smoothed=True),
        accuracy()._replace(name="accuracy at the end", unit="", value=last_accuracy),
        accuracy()._replace(name="mean accuracy", unit="", value=lambda run: area_under(run, part.horizon)),
    ]


def last_accuracy(run: Run) -> float:
    """Mean of the five best of the last evaluations, of a run that diverged the last one; 0 where that is missing."""
    return accuracy().value(run) or 0.0


def rounds_at(threshold: float, smoothed: bool = False) -> Measure:
    """Rounds to a threshold, by one evaluation or by the mean of five: min(R, T)."""

    def value(run: Run) -> float:
        rounds = rounds_to_threshold(run, threshold, smoothed)
        return float(run.horizon) if rounds is None else rounds

    def cut(run: Run) -> bool:
        return rounds_to_threshold(run, threshold, smoothed) is None

    name = f"rounds to {100 * threshold:g} %" + (" by the mean of five" if smoothed else "")
    return Measure(name, "ratio", False, value, words=("fewer", "more"), cut=cut)


def cut_short(method: Method | None, measure: Measure) -> int:
    """Runs that never reached the threshold of the measure, those that diverged included."""
    return sum(measure.cut(run) for run in method.runs.values()) if method and measure.cut else 0


def against(result: Result, measure: Measure, label: str, other: str) -> Statement | None:
    one, two = result.find(label), result.find(other)
    if one is None or two is None:
        return None
    return compare(result.part.title, measure, (label, one.runs), (other, two.runs))


def _duel(result: Result, label: str, other: str) -> Statement | None:
    """A method against another in rounds to the threshold; open where the runs that never reached it would decide."""
    found = against(result, measures(result.part)[0], label, other)
    winner = {"shown": label, "contradicted": other}.get(found.status) if found else None
    if found and winner and cut_short(result.find(winner), found.measure):
        return found._replace(status="open")
    return found


class Gap(NamedTuple):
    """G with its interval over so many paired seeds, or None where there is no gap."""

    value: float | None
    low: float | None
    high: float | None
    seeds: int
    bound: str = ""  # ≤, ≥ or ≥≤ (both ways) where runs that never reached the threshold make G a bound

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return f"{self.bound}{' ' * bool(self.bound)}{self.value:.2f}{ends(self.low, self.high)}"


NO_GAP = Gap(None, None, None, 0)
#: Begins why there is no G where runs that were cut short hide how wide the gap is.
_UNKNOWN = "G is open, for how wide the gap is is not known"


def no_gap(uniform_s: FloatArray, full_s: FloatArray) -> str:
    """Why there is no gap between rounds of uniform sampling and of full participation; empty if there is one."""
    relative = float(np.mean(uniform_s) / np.mean(full_s) - 1)
    more, low = f"{100 * relative:.0f} % more rounds than full participation", mean_interval(uniform_s - full_s).low
    if relative <= 0:
        return f"no gap to close: {BASELINE} needs no more rounds than full participation"
    if relative < LEAST:
        return f"no gap to close: {BASELINE} needs only {more}"
    if low is not None and low <= 0:
        return f"no gap that these seeds tell from none: {BASELINE} needs {more}, with an interval that contains 0"
    return ""


def _no_gap_of(result: Result) -> str | None:
    """Why there is no gap on a part; None while uniform sampling or full participation has no run."""
    measure = measures(result.part)[0]
    sides = _paired(result, (BASELINE, FULL), measure)
    if sides is None:
        return None
    why = no_gap(*sides)
    for label in (FULL, BASELINE):
        cut = cut_short(result.find(label), measure)
        # Rounds of full participation that were cut short would make a gap where there may be none.
        if cut and (label == FULL or why):
            return f"{_UNKNOWN}: {cut} runs of {label} never reached the threshold"
    return why


def gap_of(result: Result, label: str, measure: Measure) -> Gap:
    """The gap that a method closes, of rounds or of another measure, over the seeds that all three ran."""
    sides = _paired(result, (BASELINE, label, FULL), measure)
    if sides is None:
        return NO_GAP
    base_s, own_s, full_s = sides
    # Where runs of full participation were cut short, it is unknown where the gap ends.
    if cut_short(result.find(FULL), measure) or (not measure.higher and no_gap(base_s, full_s)):
        return NO_GAP._replace(seeds=len(base_s))
    sign = 1.0 if measure.higher else -1.0
    value, low, high = closed(sign * (own_s - base_s), sign * (full_s - base_s))
    return Gap(value, low, high, len(base_s), "" if value is None else _bound(result, label, measure, value))


def closed(gained_s: FloatArray, gap_s: FloatArray) -> tuple[float | None, float | None, float | None]:
    """The ratio of means with Fieller's interval; None where mean gap <= 0 or its interval contains 0."""
    if np.mean(gap_s) <= 0:
        return None, None, None
    found = fieller(gained_s, gap_s)
    return (None, None, None) if len(gap_s) > 1 and found.low is None else found


def _bound(result: Result, label: str, measure: Measure, value: float) -> str:
    """Where G would go if runs went on: down with a method's own, up with uniform's if it is below 1, else down."""
    if label in (BASELINE, FULL):
        return ""
    own, base = cut_short(result.find(label), measure) > 0, cut_short(result.find(BASELINE), measure) > 0
    at_most, at_least = own or (base and value > 1), base and value < 1
    return "≥" * at_least + "≤" * at_most


def _paired(result: Result, labels: tuple[str, ...], measure: Measure) -> list[FloatArray] | None:
    """The values of methods for the seeds that all of them finished; None if there is none."""
    methods = [method for label in labels if (method := result.find(label)) is not None]
    seeds = sorted(set.intersection(*(set(method.runs) for method in methods))) if methods else []
    if len(methods) < len(labels) or not seeds:
        return None
    return [np.array([measure.value(method.runs[seed]) for seed in seeds], dtype=np.float64) for method in methods]


def gap_by_seed(result: Result, label: str, measure: Measure) -> list[float]:
    """G seed by seed, where full participation beats uniform sampling in it."""
    base_s, own_s, full_s = _paired(result, (BASELINE, label, FULL), measure) or [np.empty(0)] * 3
    better_s = full_s > base_s if measure.higher else full_s < base_s
    return list(map(float, (base_s - own_s)[better_s] / (base_s - full_s)[better_s]))


class Judgement(NamedTuple):
    """The target on one part."""

    result: Result
    informed: bool  # whether methods may know the clients' labels beforehand
    best: str | None  # this project's best unbiased method; None if none has a run
    status: Status = "not measured"  # ``reached`` if the whole interval of G is above 0.7, ``missed`` if all is below
    gap: Gap = NO_GAP
    no_gap: str | None = None  # why there is no gap; None while uniform sampling or full participation has no run
    pairs: tuple[Statement, ...] = ()  # the best method against its rivals

    @property
    def ahead(self) -> list[Statement]:
        return [pair for pair in self.pairs if pair.status == "contradicted"]

    @property
    def ratio(self) -> float:
        return self.result.num_clients / (self.result.part.common.sample or 1)

    @property
    def uses_labels(self) -> bool:
        return self.best is not None and needs(self.best) == "known"


def judge_all(results: Sequence[Result]) -> list[Judgement]:
    informed = [result for result in results if any(needs(method.label) == "known" for method in result.shown)]
    return [judge(result) for result in results] + [judge(result, informed=True) for result in informed]


def judge(result: Result, informed: bool = False) -> Judgement:
    ours, why = ours_by_score(result, informed), _no_gap_of(result)
    found = Judgement(result, informed, ours[0].label if ours else None, no_gap=why)
    if found.best is None or why is None:
        return found
    gap = gap_of(result, found.best, measures(result.part)[0])
    rivals = [method.label for method in result.shown if _is_rival(method.label, informed)]
    pairs = [pair for rival in rivals if (pair := _duel(result, found.best, rival)) is not None]
    return found._replace(status=_status(gap, why), gap=gap, pairs=tuple(pairs))


def ours_by_score(result: Result, informed: bool) -> list[Method]:
    """This project's unbiased methods that may be judged, the best on the tuning seeds first."""
    known = INFORMED if informed else PRACTICAL
    found = [m for m in result.shown if is_ours(m.label) and is_unbiased(m.label) and needs(m.label) in known]
    return sorted(found, key=lambda method: method.search.score or (math.inf, 0.0))


def _status(gap: Gap, why: str) -> Status:
    """From the interval; runs that never reached the threshold count less than they need, so they may not decide."""
    if gap.value is None:
        return "open" if why.startswith(_UNKNOWN) else "no gap" if gap.seeds else "not measured"
    if gap.low is not None and gap.low >= GOAL:
        return "open" if "≤" in gap.bound else "reached"
    if gap.high is not None and gap.high < GOAL:
        return "open" if "≥" in gap.bound else "missed"
    return "open"


def headline(judgements: Sequence[Judgement]) -> str:
    plain = _sum_up([j for j in judgements if not j.informed])
    informed = [j for j in judgements if j.informed and j.uses_labels]
    with_labels = f"{_sum_up(informed)} where our method uses every client's labels"
    return f"{with_labels}, and {plain} where nothing but sizes is known" if informed else plain


def _sum_up(judgements: list[Judgement]) -> str:
    """The verdict on the target in a few words; a part with a rival ahead counts as missed."""
    near = [j for j in judgements if j.ratio <= LARGEST_RATIO and j.status in ("reached", "missed", "open")]
    found = Counter("missed" if j.ahead else j.status for j in near)
    if found["open"] == len(near):
        return "is not decided"
    *first, last = (f"{word} on {found[word]}" for word in ("reached", "missed", "open") if found[word])
    return f"is {', '.join(first)} and {last} of {len(near)} tasks" if first else f"is {last.split()[0]}"


def sentence(judgement: Judgement) -> str:
    title, best = judgement.result.part.title, judgement.best
    if judgement.informed:
        title += ", labels known beforehand" + ("" if judgement.uses_labels else " but not used")
    if best is None or judgement.no_gap is None:
        return f"{title}: not measured yet (needs {FULL}, {BASELINE} and a method of ours)."
    goal = judgement.no_gap if judgement.gap.value is None else _goal_text(judgement, best)
    missing = sum(judgement.result.find(name) is None for name in SAMPLERS if _is_rival(name, judgement.informed))
    behind = sum(pair.status == "shown" for pair in judgement.pairs)
    counts = f"{behind} behind, {len(judgement.pairs) - behind} not told apart" + f", {missing} not run" * bool(missing)
    others = f"ahead of it: {_ahead_text(judgement)}" if judgement.ahead else f"no rival is ahead ({counts})"
    if judgement.ratio > LARGEST_RATIO:
        title += f" (m / n = {judgement.ratio:.3g}, beyond the range of the target)"
    return f"{title}: {goal}; {others}."


def _goal_text(judgement: Judgement, best: str) -> str:
    result, rounds = judgement.result, measures(judgement.result.part)[0]
    word = "**missed**" if judgement.status == "missed" else judgement.status
    pracdelta = gap_of(result, "pracdelta", rounds)
    beside = "" if pracdelta.value is None else f" (`pracdelta` {pracdelta})"
    first, *others = ours_by_score(result, judgement.informed)
    equal = [m.label for m in others if m.search.score and m.search.score.rounds == (first.search.score or (0,))[0]]
    level = ", ".join(f"`{label}` {gap_of(result, label, rounds)}" for label in equal)
    tuned = f"; level with it on the tuning seeds: {level}" if level else ""
    return f"G >= {GOAL:g} is {word}: `{best}` {judgement.gap}{beside}{tuned}"


def _ahead_text(judgement: Judgement) -> str:
    decided = ("shown", "contradicted")
    # What is not told apart counts as 1: beside runs that never reached the threshold its p-value is worth nothing.
    p_values = holm([p_value(pair) if pair.status in decided else 1.0 for pair in judgement.pairs])
    return ", ".join(
        f"{pair.second} (×{1 / (pair.estimate or 1):.2f} fewer by its own interval; corrected for {len(p_values)} "
        f"rivals p = {p:.2g})"
        for pair, p in zip(judgement.pairs, p_values, strict=True)
        if pair.status == "contradicted"
    )


def p_value(statement: Statement) -> float:
    """The two-sided p-value of the paired t on the log scale that a ratio's interval is made from; 1 without one."""
    from scipy.special import stdtr

    low, high = statement.low, statement.high
    if not statement.estimate or not low or not high or not high > low:
        return 1.0
    half = math.log(high / low) / 2
    t = abs(math.log(statement.estimate)) / half * t_quantile(statement.pairs - 1)
    return float(2 * stdtr(statement.pairs - 1, -t))


def holm(p_k: Sequence[float]) -> list[float]:
    """P-values that hold for all of them together: the k-th smallest of K times K - k + 1, not falling, at most 1."""
    order = np.argsort(p_k, kind="stable")
    factors = len(p_k) - np.arange(len(p_k))
    rising = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_k)[order] * factors))
    adjusted: list[float] = rising[np.argsort(order)].tolist()
    return adjusted


def elsewhere_text(judgement: Judgement) -> str:
    """G of the best method at thresholds beside the part's own: how much depends on its choice."""
    result, best = judgement.result, judgement.best
    if best is None or judgement.gap.value is None:
        return ""
    near = [result.part.threshold + shift for shift in BESIDE]
    texts = [f"{100 * at:.3g} %: {gap_of(result, best, rounds_at(at))}" for at in near if 0 < at < 1]
    return f"G of `{best}` at other thresholds, with the rates of this one: {'; '.join(texts)}."
