"""The verdict: whether the paper's ordering holds, from intervals alone; ``texts.toml`` states the
rule.

For each part, each measure and each pair that the paper orders there is one statement, "the first
is better than the second", which the runs show, contradict or leave open (``measures.Statement``).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from deltafl.analysis import base_name

from .groups import Group
from .measures import Measure, Statement, compare
from .text import counted, ends, markdown, sentence_case

NO_ORDER = "no ordering is claimed"
#: How verdicts begin, and how they are counted.
_TALLY = {
    "holds": "upheld",
    "holds in part": "upheld in part",
    "holds in part and is": "upheld in part and contradicted in part",
    "is contradicted": "contradicted",
    "is not decided": "not decided",
}
#: What the verdict compares, by part.
Measures = dict[str, list[Measure]]
#: The statuses of statements, and what a paragraph calls them.
_WORDS = {
    "shown": "shown",
    "contradicted": "contradicted",
    "open": "open",
    "no interval": "without an interval",
}
#: DELTA's names, and importance sampling in the same form.
_RIVALS = {"delta": "fedis", "pracdelta": "fedpracis"}


def ordered(groups: Sequence[Group], measures: Measures) -> list[Statement]:
    return [
        between(group, measure, first, second)
        for group in groups
        for first, second in combinations(group.order, 2)
        if not any({first, second} <= set(rank) for rank in group.ranks)
        for measure in measures.get(group.part, ())
    ]


def between(group: Group, measure: Measure, first: str, second: str) -> Statement:
    one = group.row(first)
    two = group.row(second)
    return compare(group.title, measure, (one.name, one.runs), (two.name, two.runs))


def sum_up(statements: Sequence[Statement]) -> str:
    if not statements:
        return NO_ORDER
    number = Counter(statement.status for statement in statements)
    if number["shown"] == len(statements):
        return "holds"
    chance = by_chance(len(statements) - number["no interval"])
    verdicts = {
        (True, True): "holds in part and is contradicted in part",
        (True, False): "holds in part",
        (False, True): "is contradicted",
        (False, False): "is not decided",
    }
    return verdicts[number["shown"] > chance, number["contradicted"] > chance]


def tally(verdicts: Sequence[str]) -> str:
    """How many of several claims hold, and how many do not."""
    starts = Counter(
        max(filter(verdict.startswith, _TALLY), key=len, default="") for verdict in verdicts
    )
    found = ", ".join(f"{starts[start]} {words}" for start, words in _TALLY.items())
    return f"Of {counted(len(verdicts), 'claim')} of the paper: {found}."


def verdict_text(statements: Sequence[Statement]) -> str:
    """The verdict; whether only small differences contradict; and why nothing is decided: too few
    seeds, or most intervals hold small differences alone.
    """
    verdict = sum_up(statements)
    open_ = [s for s in statements if s.status == "open"]
    if verdict == "is contradicted" and all(
        s.is_small for s in statements if s.status == "contradicted"
    ):
        return f"{verdict}, by small differences"
    if verdict != "is not decided":
        return verdict
    if 2 * sum(s.is_small for s in open_) > len(open_):
        return f"{verdict}: most differences are small"
    most = max(s.pairs for s in statements)
    return f"{verdict}: {counted(most, 'seed')} {'is' if most == 1 else 'are'} too few"


def by_chance(number: int) -> int:
    """So many intervals exclude in one direction by chance; a rule of thumb, as those that share
    runs are dependent.
    """
    from scipy.stats import binom

    return int(binom.ppf(0.95, number, 0.025))


class Verdict(NamedTuple):
    """The verdict, as in "holds in part", and in a sentence; one number with its interval; what
    the verdict is from.
    """

    verdict: str
    sentence: str
    number: str
    reasons: str = ""


def judge(groups: Sequence[Group], measures: Measures, other: str | None = None) -> Verdict:
    """The verdict on the paper's ordering; ``other`` is that on a claim which is no ordering."""
    statements = ordered(groups, measures)
    verdict = verdict_text(statements) if statements else other or NO_ORDER
    headline = _headline(groups, measures, verdict, statements)
    if not statements:
        return Verdict(verdict, f"{sentence_case(verdict)}.", headline)
    number = Counter[str](statement.status for statement in statements)
    parts = ", ".join(
        f"{number[status]} {word}" for status, word in _WORDS.items() if number[status]
    )
    orders = dict.fromkeys(_order_text(group) for group in groups if len(group.order) > 1)
    sentences = [f"It is {'; '.join(orders)}."]
    sentences += [
        f"Of {counted(len(statements), 'statement')} on pairs of methods, the runs leave {parts}."
    ]
    with_interval = len(statements) - number["no interval"]
    if with_interval > 1:
        chance = by_chance(with_interval)
        often = f"up to {chance}" if chance else "hardly one"
        sentences.append(f"By chance alone {often} would be shown, and as many contradicted.")
    failed = sum(s.left_out > 0 for s in statements)
    if failed:
        sentences.append(
            f"Of these, {failed} leave out seeds with which one method failed; it is never called "
            "better."
        )
    return Verdict(verdict, f"The paper's ordering {verdict}.", headline, " ".join(sentences))


def _order_text(group: Group) -> str:
    names = [
        [group.row(label).name for label in rank if label in group.labels] for rank in group.ranks
    ]
    return " before ".join(" and ".join(rank) for rank in names if rank)


def _headline(
    groups: Sequence[Group], measures: Measures, verdict: str, statements: Sequence[Statement]
) -> str:
    """One number: the paper's best (or else the first other row) against the baseline, or
    another pair that decides.
    """
    found = list[Statement]()
    for group in groups:
        others = [label for label in [*group.order, *group.labels] if label != group.baseline]
        found += [
            between(group, m, others[0], group.baseline) for m in measures[group.part] if others
        ]
    if not found:
        return ""
    wanted = "open"
    if verdict.startswith("holds"):
        wanted = "shown"
    elif "contradicted" in verdict:
        wanted = "contradicted"
    one = max(
        [*found, *statements],
        key=lambda it: (it.status == wanted, it.status != "no interval", it.pairs > 0),
    )
    where = f"{one.where}: " if len(groups) > 1 else ""
    return f"{where}{one.first} against {one.second}: {_effect(one)}."


def _effect(statement: Statement) -> str:
    """An estimate with its interval and status, as in
    ``accuracy +0.52 points [0.10, 0.94], better``.
    """
    measure = statement.measure
    words = {"shown": measure.words[0], "contradicted": measure.words[1]}
    words["no interval"] = f"{counted(statement.pairs, 'seed')}: too few for an interval"
    text = f"{measure.name} {number_text(statement)}, {words.get(statement.status, 'open')}"
    if statement.left_out:
        text += f", {counted(statement.left_out, 'seed')} left out"
    return text


def pairs_table(groups: Sequence[Group], measures: Measures) -> str:
    return _table(ordered(groups, measures), "the paper's order", "before")


def others_table(groups: Sequence[Group], measures: Measures) -> str:
    """Comparisons outside the paper's ordering; empty if there is none."""
    pairs = [(group, first, second) for group in groups for first, second in _others(group)]
    found = [
        between(group, measure, *pair) for group, *pair in pairs for measure in measures[group.part]
    ]
    return _table(found, "comparison", "against")


def _others(group: Group) -> Iterator[tuple[str, str]]:
    """Rows outside the ordering against the baseline and their ordered form; DELTA against
    uniform and IS alike.
    """
    for label in group.labels:
        name = base_name(label)
        outside = label not in group.order
        seconds = []
        if outside and label != group.baseline:
            same = [other for other in group.labels if other != label and base_name(other) == name]
            seconds = [
                group.baseline,
                *([o for o in same if o in group.order] or [o for o in same if o == name]),
            ]
        if name in _RIVALS:
            rival = label.replace(name, _RIVALS[name], 1)
            seconds += [
                other for other in group.labels if base_name(other) in ("uniform", "md-fixed")
            ]
            seconds += [other for other in group.labels if other == rival]
        yield from (
            (label, second)
            for second in dict.fromkeys(seconds)
            if outside or second not in group.order
        )


def _table(statements: Sequence[Statement], head: str, word: str) -> str:
    several = len({statement.where for statement in statements}) > 1
    lines = []
    for s in statements:
        status: str = s.status
        if s.left_out:
            status += f" ({counted(s.left_out, 'seed')} left out)"
        pair = f"{s.first} {word} {s.second}"
        lines.append([s.where, pair, s.measure.name, number_text(s), str(s.pairs), status])
    heads = ["part", head, "measure", "estimate [95 %]", "paired seeds", "status"]
    # One part needs no column that says so.
    first = 0 if several else 1
    table = markdown(heads[first:], [line[first:] for line in lines], left=len(heads))
    return table if lines else ""


def number_text(statement: Statement) -> str:
    """As in ``speed-up ×1.31 [1.05, 1.60]``, ``+0.52 points [0.10, 0.94]``,
    ``lower by 0.120 [-0.010, 0.250]``.
    """
    measure = statement.measure
    estimate = statement.estimate
    low = statement.low
    high = statement.high
    if estimate is None:
        return "without a pair of seeds"
    if measure.form == "ratio":
        return f"{measure.unit}×{estimate:.2f}{ends(low, high)}"
    form = ".2f" if measure.scale > 1 else ".3f"
    scale = measure.scale
    if measure.higher:
        return f"{scale * estimate:+{form}}{measure.unit}{ends(low, high, form, scale)}"
    # The estimate is in favour of the first: a lower loss is above 0.
    if estimate >= 0:
        return f"lower by {scale * estimate:{form}}{measure.unit}{ends(low, high, form, scale)}"
    return f"higher by {-scale * estimate:{form}}{measure.unit}{ends(high, low, form, -scale)}"
