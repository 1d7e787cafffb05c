"""The target: on every judged task the recommended method has G >= 0.85, surely above 0.7, and no
rival is ahead.

G is judged by area: A is the mean accuracy over the part's horizon, and G = mean over seeds of (A -
A_uniform) / mean of (A_full - A_uniform), with Fieller's interval. The rules stand in
``texts.toml``. Rounds to the threshold stand beside it: they are min(R, T), for a run that never
reaches the threshold, or diverges, a lower bound.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from deltafl.analysis import Interval, Run, mean_interval
from deltafl.analysis.statistics import gap_closed
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.types import FloatArray

from ..measures import Measure, Statement, accuracy, area, compare, rounds_to_threshold
from ..spec import View, is_ours
from ..text import ends, formatted
from .parts import BASELINE, FULL, Part
from .runs import Method, Result

GOAL = 0.85
SURE = 0.7  # what G has to be, and what its interval has to lie above
LEAST = 0.02  # with a smaller gap by area a part is no task to judge by
Status = Literal["reached", "missed", "open", "running", "no task"]


def needs(label: str) -> str:
    return SAMPLERS[parse_label(label).name].needs


def _advantages(label: str) -> str:
    """What a method needs or gives up that the recommended one does not, in brackets; perhaps
    nothing.
    """
    found = {
        "biased": not is_unbiased(label),
        "needs labels": needs(label) == "known",
        "public data": parse_label(label).settings.get("public"),
    }
    words = [word for word, applies in found.items() if applies]
    if not words:
        return ""
    return f" ({', '.join(words)})"


def measures(part: Part) -> list[Measure]:
    """What methods are compared by: area decides; the crossing of the mean of five and the first
    one stand beside.
    """
    return [
        area(part.horizon),
        rounds_at(part.threshold, smoothed=True),
        rounds_at(part.threshold),
        accuracy()._replace(name="accuracy at the end"),
    ]


def rounds_at(threshold: float, smoothed: bool = False) -> Measure:
    """Rounds to a threshold, by one evaluation or by the mean of five: min(R, T)."""

    def value(run: Run) -> float:
        return rounds_to_threshold(run, threshold, smoothed) or float(run.horizon)

    def cut(run: Run) -> bool:
        return rounds_to_threshold(run, threshold, smoothed) is None

    name = f"rounds to {100 * threshold:g} %{', mean of five' * smoothed}"
    return Measure(name, "ratio", False, value, words=("fewer", "more"), cut=cut)


def cut_short(method: Method | None, measure: Measure) -> int:
    """Runs that never reached the threshold of the measure, those that diverged included."""
    if method is None or measure.cut is None:
        return 0
    return sum(map(measure.cut, method.runs.values()))


def against(result: Result, measure: Measure, label: str, other: str) -> Statement | None:
    one = result.find(label)
    two = result.find(other)
    if one is None or two is None:
        return None
    return compare(result.part.title, measure, (label, one.runs), (other, two.runs))


class Gap(NamedTuple):
    """G with its interval over so many paired seeds, or None where there is none."""

    value: float | None
    low: float | None
    high: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{formatted(self.value, '.2f')}{ends(self.low, self.high)}"


NO_GAP = Gap(None, None, None, 0)


def gap_of(
    result: Result, label: str, measure: Measure, full: str = FULL, base: str = BASELINE
) -> Gap:
    """The gap that a method closes over the seeds that all three ran; None where a run of one of
    them was cut short.
    """
    three = (base, label, full)
    sides = paired(result, three, measure)
    if sides is None or any(cut_short(result.find(name), measure) for name in three):
        return NO_GAP
    if measure.higher:
        sides = [-value_s for value_s in sides]
    found = gap_closed(*sides)
    seeds = len(sides[0])
    if found is None or (found.low is None and seeds > 1):  # the gap itself may be 0
        return NO_GAP
    return Gap(*found, seeds)


def judged_gap(result: Result, label: str, measure: Measure) -> Gap:
    """``gap_of``; none where there is no task to judge by."""
    if no_task(result):
        return NO_GAP
    return gap_of(result, label, measure)


def paired(result: Result, labels: tuple[str, ...], measure: Measure) -> list[FloatArray] | None:
    """The values of methods for the seeds that all of them finished; None if there is none."""
    methods = [method for label in labels if (method := result.find(label)) is not None]
    if len(methods) < len(labels):
        return None
    seeds = sorted(set.intersection(*(set(method.runs) for method in methods)))
    if not seeds:
        return None
    return [np.array([measure.value(method.runs[seed]) for seed in seeds]) for method in methods]


def width(result: Result) -> Interval | None:
    """A_full - A_uniform on the test seeds; None while one of them has no run."""
    sides = paired(result, (BASELINE, FULL), measures(result.part)[0])
    if sides is None:
        return None
    return mean_interval(sides[1] - sides[0])


def no_task(result: Result) -> str:
    """Why a part is no task to judge by: a gap that is too narrow on the tuning or the test
    seeds; empty if it is.
    """
    gaps = {}
    score_of = {method.label: method.search.score for method in result.methods}
    base = score_of.get(BASELINE)
    full = score_of.get(FULL)
    if base and full:
        # The area of a score is minus the accuracy.
        gaps["tuning"] = base.area - full.area
    on_test = width(result)
    if on_test is not None:
        gaps["test"] = on_test.mean
    narrow = [
        f"{100 * gap:.2f} points on the {name} seeds" for name, gap in gaps.items() if gap < LEAST
    ]
    if not narrow:
        return ""
    return (
        f"no task to judge by: full participation is only {' and '.join(narrow)} above {BASELINE}"
    )


class Judgement(NamedTuple):
    """The target on one part, for the recommended method."""

    result: Result
    label: str
    status: Status
    gap: Gap = NO_GAP
    pairs: tuple[
        Statement, ...
    ] = ()  # the recommended method against all others that a server can use

    def ahead(self, ours: bool = False) -> list[Statement]:
        """Methods of others, or this project's own, that are better."""
        return [
            pair
            for pair in self.pairs
            if pair.status == "contradicted" and is_ours(pair.second) is ours
        ]


def judge(result: Result, view: View) -> Judgement:
    label = result.part.recommended or view.recommended or BASELINE
    main = measures(result.part)[0]
    if no_task(result):
        return Judgement(result, label, "no task")
    others = [
        m.label
        for m in result.shown
        if m.label != label and needs(m.label) not in ("oracle", "everyone")
    ]
    pairs = tuple(filter(None, (against(result, main, label, other) for other in others)))
    found = Judgement(result, label, "running", gap_of(result, label, main), pairs)
    return found._replace(status=_status(found))


def _status(found: Judgement) -> Status:
    """Reached or missed by the interval; open only after all seeds."""
    value, low, high, seeds = found.gap
    if value is not None and low is not None and high is not None:
        if high < GOAL or found.ahead():
            return "missed"
        if value >= GOAL and low > SURE:
            return "reached"
    if seeds < found.result.part.seeds:
        return "running"
    return "open"


def headline(judgements: Sequence[Judgement], tasks: int = 0) -> str:
    """The verdict on the target in a few words; where seeds are missing it is that of the
    others. Of more ``tasks`` than are judged it says on how many it is.
    """
    found = Counter(judgement.status for judgement in judgements)
    judged = found["reached"] + found["missed"] + found["open"]
    if not judged or found["open"] == judged:
        return "is not decided"
    decided: tuple[Status, ...] = ("reached", "missed", "open")
    words = [word for word in decided if found[word]]
    is_over = tasks <= len(judgements)
    if is_over and len(words) == 1:
        return f"is {words[0]}"
    *first, last = (f"{word} on {found[word]}" for word in words)
    text = " and ".join([", ".join(first), last] if first else [last])
    return f"is {text} of {judged} tasks" if is_over else f"is {text} of {tasks} tasks so far"


def sentence(judgement: Judgement) -> str:
    """The verdict on one task, one line."""
    result, label, status, gap, pairs = judgement
    if status == "no task":
        return f"{result.part.title}: {no_task(result)}."
    if gap.value is None:
        return (
            f"{result.part.title}: no G yet (needs more seeds of {FULL}, {BASELINE} and `{label}`)."
        )
    word = {
        "running": f"not decided after {gap.seeds} of {result.part.seeds} seeds",
        "missed": "**missed**",
    }.get(status, status)
    number = sum(not is_ours(pair.second) for pair in pairs)
    ahead = _names(judgement.ahead()) or f"none of {number} methods of others"
    if ours := _names(judgement.ahead(ours=True)):
        ahead += f"; of ours {ours}"
    text = (
        f"{result.part.title}: {word}, `{label}` closes {gap}{_of_the_best(judgement)}; ahead "
        f"of it: {ahead}. {result.part.remark}"
    )
    return text.rstrip()


def _of_the_best(judgement: Judgement) -> str:
    """The gap to the best form of full participation, where one is better than the plain form."""
    result = judgement.result
    label = judgement.label
    main = measures(result.part)[0]
    forms = [
        method.label
        for method in result.shown
        if needs(method.label) == "everyone" and method.label != FULL
    ]
    pairs = [
        pair
        for form in forms
        if (pair := against(result, main, form, FULL)) and pair.status == "shown"
    ]
    if not pairs:
        return ""
    best = max(pairs, key=lambda pair: pair.estimate or 0).first
    return f", or {gap_of(result, label, main, best)} of the gap to `{best}`"


def _names(pairs: Sequence[Statement], most: int = 3) -> str:
    """The methods that are ahead, the farthest first, with what they need, the points and their
    interval.
    """
    texts = [
        f"`{pair.second}`{_advantages(pair.second)} by {-100 * (pair.estimate or 0):.1f} points"
        + ends(pair.high, pair.low, ".1f", -100)
        for pair in sorted(pairs, key=lambda pair: pair.estimate or 0)
    ]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"
