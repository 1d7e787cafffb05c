"""The target: on every task with m / n <= 20, G >= 0.7 for this project's best unbiased method, and no rival ahead.

The best method is chosen on the tuning seeds (fewest rounds there), so that its result on the test seeds is not the
luckiest of several. A rival is a method of somebody else that needs no more than a practical server has: nothing, the
clients' sizes, or what the cohort sent. Servers that are also told the labels of every client beforehand are judged by
themselves, with all of these methods and those that need the labels. A rival is ahead if the 95 % interval of the ratio
of mean rounds, paired over seeds, says so, unless it has runs that never reach the threshold, which count as fewer
rounds than they need (nor do such runs of ours show that a rival is behind). Everything here is made from intervals,
each 95 % by itself. As there are many rivals, a sentence that names one as ahead gives its p-value after Holm's
correction for all of them; the verdict does not make use of it.

Source of the correction: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 1979.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from deltafl.analysis.statistics import t_quantile
from deltafl.samplers import SAMPLERS, is_unbiased

from ..pages.measures import Statement
from .gap import LEAST, NO_GAP, Gap, Room
from .judge import INFORMED, PRACTICAL, duel, gap_of, is_ours, measures, needs, room_of, rounds_at
from .parts import BASELINE, FULL
from .results import Result
from .tuning import Score

GOAL, LARGEST_RATIO = 0.7, 20
#: Thresholds beside that of a part at which its best method is shown as well.
BESIDE = (-0.05, -0.02, 0.02)
Status = Literal["reached", "missed", "open", "no gap", "not measured"]


class Judgement(NamedTuple):
    """The target on one part.

    Attributes:
        result: The part.
        informed: Whether methods may know the clients' labels beforehand.
        ratio: m / n.
        best: This project's best unbiased method; None if none has a run.
        status: Whether G >= 0.7: ``reached`` if its whole interval is above, ``missed`` if all of it is below.
        gap: Its G.
        room: The gap itself.
        ahead: Rivals whose intervals are better than the best method's.
        level: Rivals that are not told from it.
        behind: Rivals whose intervals are worse.
    """

    result: Result
    informed: bool
    ratio: float
    best: str | None
    status: Status
    gap: Gap
    room: Room | None
    ahead: tuple[Statement, ...]
    level: tuple[Statement, ...]
    behind: tuple[Statement, ...]

    @property
    def uses_labels(self) -> bool:
        """Whether the best method is one that must know the labels."""
        return self.best is not None and needs(self.best) == "known"

    @property
    def counts(self) -> bool:
        """Whether the target is about this part."""
        return self.ratio <= LARGEST_RATIO


def judge_all(results: Sequence[Result]) -> list[Judgement]:
    """Judge every part; those with a method that knows the clients' labels twice, without and with it."""
    judgements = [judge(result) for result in results]
    told = [result for result in results if any(needs(method.label) == "known" for method in result.shown)]
    return judgements + [judge(result, informed=True) for result in told]


def judge(result: Result, informed: bool = False) -> Judgement:
    """Judge the target on one part from its finished runs."""
    part = result.part
    ratio = result.num_clients / (part.common.sample or 1)
    best, gap_room = best_of_ours(result, informed), room_of(result)
    if best is None or gap_room is None:
        return Judgement(result, informed, ratio, best, "not measured", NO_GAP, gap_room, (), (), ())
    gap = gap_of(result, best, measures(part)[0])
    found = [duel(result, best, rival) for rival in rivals(result, informed)]
    pairs = [statement for statement in found if statement is not None]
    return Judgement(
        result,
        informed,
        ratio,
        best,
        _status(gap, gap_room),
        gap,
        gap_room,
        ahead=tuple(pair for pair in pairs if pair.status == "contradicted"),
        level=tuple(pair for pair in pairs if pair.status in ("open", "no interval")),
        behind=tuple(pair for pair in pairs if pair.status == "shown"),
    )


def best_of_ours(result: Result, informed: bool = False) -> str | None:
    """This project's unbiased method with the best score on the tuning seeds."""
    scores = _scores_of_ours(result, informed)
    return min(scores, key=lambda label: scores[label]) if scores else None


def tied_with(result: Result, best: str, informed: bool) -> list[str]:
    """Methods of ours that need as many rounds on the tuning seeds as the best, which their accuracies decided."""
    scores = _scores_of_ours(result, informed)
    return [label for label in scores if label != best and scores[label].rounds == scores[best].rounds]


def _scores_of_ours(result: Result, informed: bool) -> dict[str, Score]:
    """The scores on the tuning seeds of this project's unbiased methods, of those that may be judged."""
    known = INFORMED if informed else PRACTICAL
    return {
        method.label: method.search.score
        for method in result.shown
        if method.search.score is not None
        and is_ours(method.label)
        and is_unbiased(method.label)
        and needs(method.label) in known
    }


def rivals(result: Result, informed: bool = False) -> list[str]:
    """The methods of others with the same information or less, biased ones included."""
    return [method.label for method in result.shown if _is_rival(method.label, informed)]


def _is_rival(label: str, informed: bool) -> bool:
    return not is_ours(label) and label != FULL and needs(label) in (INFORMED if informed else PRACTICAL)


def headline(judgements: Sequence[Judgement]) -> str:
    """The verdict on all parts: in one clause, or in one for each kind of server."""
    plain = sum_up([j for j in judgements if not j.informed])
    told = [j for j in judgements if j.informed and j.uses_labels]
    if not told:
        return plain
    return f"{sum_up(told)} where our method uses every client's labels, and {plain} where nothing but sizes is known"


def sum_up(judgements: list[Judgement]) -> str:
    """The verdict on the target in a few words; a part with a rival ahead counts as missed."""
    counted = [j for j in judgements if j.counts and j.status in ("reached", "missed", "open")]
    if not counted:
        return "is not decided"
    good = [j.status == "reached" and not j.ahead for j in counted]
    bad = [j.status == "missed" or bool(j.ahead) for j in counted]
    if all(good):
        return "is reached"
    if all(bad):
        return "is missed"
    if not any(good) and not any(bad):
        return "is not decided"
    counts = {"reached": sum(good), "missed": sum(bad), "open": len(counted) - sum(good) - sum(bad)}
    *first, last = (f"{word} on {number}" for word, number in counts.items() if number)
    return f"is {' and '.join([', '.join(first)] * bool(first) + [last])} of {len(counted)} tasks"


def sentence(judgement: Judgement) -> str:
    """What a part says to the target."""
    title, best = judgement.result.part.title, judgement.best
    title += ", labels known beforehand" if judgement.informed else ""
    title += "" if not judgement.informed or judgement.uses_labels else " but not used"
    if best is None or judgement.room is None:
        return f"{title}: not measured yet (needs {FULL}, {BASELINE} and a method of ours)."
    texts = [_goal_text(judgement)]
    if judgement.ahead:
        texts.append(f"ahead of it: {_ahead_text(judgement)}")
    else:
        texts.append(f"no rival is ahead ({_others_text(judgement)})")
    outside = "" if judgement.counts else f" (m / n = {judgement.ratio:.3g}, beyond the target's range)"
    return f"{title}{outside}: {'; '.join(texts)}."


def _others_text(judgement: Judgement) -> str:
    """How many rivals are behind, level, or were not run at all."""
    every = [name for name in SAMPLERS if _is_rival(name, judgement.informed)]
    missing = sum(judgement.result.find(name) is None for name in every)
    counts = {"behind": len(judgement.behind), "not told apart": len(judgement.level), "not run": missing}
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number or word != "not run")


def _ahead_text(judgement: Judgement) -> str:
    every = [*judgement.ahead, *judgement.level, *judgement.behind]
    # What is not told apart has no say: beside runs that never reached the threshold its p-value is worth nothing.
    found = [1.0 if pair in judgement.level else p_value(pair) for pair in every]
    chance_of = dict(zip((pair.second for pair in every), holm(found), strict=True))
    texts = [
        f"{pair.second} (×{1 / (pair.estimate or 1):.2f} fewer by its own interval; corrected for {len(every)} rivals "
        f"p = {chance_of[pair.second]:.2g})"
        for pair in judgement.ahead
    ]
    return ", ".join(texts)


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
    adjusted, worst = [0.0] * len(p_k), 0.0
    for place, index in enumerate(sorted(range(len(p_k)), key=lambda index: p_k[index])):
        worst = max(worst, min(1.0, (len(p_k) - place) * p_k[index]))
        adjusted[index] = worst
    return adjusted


def _goal_text(judgement: Judgement) -> str:
    result, gap, best = judgement.result, judgement.gap, judgement.best or ""
    if gap.value is None:
        return no_gap_text(judgement.room)
    rounds = measures(result.part)[0]
    pracdelta = gap_of(result, "pracdelta", rounds)
    word = {"reached": "reached", "missed": "**missed**", "open": "open"}[judgement.status]
    beside = "" if pracdelta.value is None else f" (`pracdelta` {gap_text(pracdelta)})"
    equals = tied_with(result, best, judgement.informed)
    level = ", ".join(f"`{label}` {gap_text(gap_of(result, label, rounds))}" for label in equals)
    tied = f"; level with it on the tuning seeds: {level}" if level else ""
    return f"G >= {GOAL:g} is {word}: `{best}` {gap_text(gap)}{beside}{tied}"


def elsewhere_text(judgement: Judgement) -> str:
    """G of the best method at thresholds beside the part's own: what hangs on the choice of one."""
    result, best = judgement.result, judgement.best
    if best is None or judgement.gap.value is None:
        return ""
    near = [result.part.threshold + shift for shift in BESIDE]
    texts = [
        f"{100 * threshold:.3g} %: {gap_text(gap_of(result, best, rounds_at(threshold)))}"
        for threshold in near
        if 0 < threshold < 1
    ]
    return f"G of `{best}` at other thresholds, with the rates of this one: {'; '.join(texts)}."


def no_gap_text(gap_room: Room | None) -> str:
    """Why there is no G."""
    if gap_room is None:
        return "no gap is known yet"
    if gap_room.unknown:
        return f"G is open, for how wide the gap is is not known: {gap_room.unknown}"
    if gap_room.relative <= 0:
        return f"no gap to close: {BASELINE} needs no more rounds than full participation"
    more = f"{100 * gap_room.relative:.0f} % more rounds than full participation"
    if gap_room.relative < LEAST:
        return f"no gap to close: {BASELINE} needs only {more}"
    return f"no gap that these seeds tell from none: {BASELINE} needs {more}, with an interval that contains 0"


def gap_text(gap: Gap) -> str:
    """As in ``0.81 [0.72, 0.93]``; a dash where there is none."""
    if gap.value is None:
        return "–"
    ends = "" if gap.low is None or gap.high is None else f" [{gap.low:.2f}, {gap.high:.2f}]"
    return f"{gap.bound}{' ' * bool(gap.bound)}{gap.value:.2f}{ends}"


def _status(gap: Gap, gap_room: Room) -> Status:
    """From the interval; runs that never reached the threshold count less than they need, so they may not decide."""
    if gap.value is None:
        return "open" if gap_room.unknown else "no gap" if gap.seeds else "not measured"
    if gap.low is None or gap.high is None:
        return "open"
    if gap.low >= GOAL:
        return "open" if "≤" in gap.bound else "reached"
    if gap.high < GOAL:
        return "open" if "≥" in gap.bound else "missed"
    return "open"
