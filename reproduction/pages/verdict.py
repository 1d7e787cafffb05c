"""Whether the paper's ordering holds, generated from intervals and from nothing else.

For each part, each measure and each pair that the paper orders there is one statement, "the first is better than the
second", which the runs show, contradict or leave open (``measures.Statement``). An interval is 95 % by itself; where
nothing differs, each of N of them still shows or contradicts by chance with probability 0.025. ``by_chance(N)`` is the
number that is not exceeded by chance in 19 of 20 pages (binomial). The sum of all statements is

- **holds**: every statement is shown;
- **holds in part and is contradicted in part**: more are shown than by chance, and more are contradicted;
- **holds in part**: more are shown than by chance, but not all;
- **is contradicted**: more are contradicted than by chance, and not more shown;
- **is not decided**: neither.
"""

from collections.abc import Sequence
from itertools import combinations
from math import comb

from .groups import Group, base_name
from .measures import Measure, Statement, compare

_MOST_NAMED = 6
NO_ORDER = "no ordering is claimed"


def ordered_pairs(group: Group, measures: Sequence[Measure]) -> list[Statement]:
    """A statement for every pair that the paper orders and every measure."""
    return [
        _between(group, measure, first, second)
        for first, second in combinations(group.order, 2)
        if not any({first, second} <= set(rank) for rank in group.tied)
        for measure in measures
    ]


def sum_up(statements: Sequence[Statement]) -> str:
    """The sum of the statements, by the rules above."""
    if not statements:
        return NO_ORDER
    number = {status: sum(statement.status == status for statement in statements) for status in _WORDS}
    if number["shown"] == len(statements):
        return "holds"
    chance = by_chance(len(statements) - number["no interval"])
    results = {"shown": "holds in part", "contradicted": "is contradicted"}
    clear = [status for status in results if number[status] > chance]
    if len(clear) == 2:
        return "holds in part and is contradicted in part"
    return results[clear[0]] if clear else "is not decided"


def by_chance(number: int) -> int:
    """The least k with P(Binomial(number, 0.025) <= k) >= 0.95: so many intervals exclude in one direction by chance.

    Intervals that share runs are not independent, so it is a rule of thumb, and a page says so.
    """
    below, k = 0.975**number, 0
    while below < 0.95:
        k += 1
        below += comb(number, k) * 0.025**k * 0.975 ** (number - k)
    return k


def paragraph(
    groups: Sequence[Group], measures: dict[str, list[Measure]], done: int, total: int, other: str | None = None
) -> str:
    """The verdict in words.

    Args:
        groups: What is shown.
        measures: What is compared, by part.
        done: Finished runs.
        total: Runs of the experiment at this scale.
        other: The verdict where the paper claims no ordering but something else.
    """
    statements = [s for group in groups for s in ordered_pairs(group, measures[group.part])]
    result = sum_up(statements)
    if not statements:
        claim = f"**For these runs {NO_ORDER}**, so none is judged."
        sentences = [claim if other is None else f"**{_sentence(other)}** {_sentence(NO_ORDER)}"]
    else:
        sentences = [f"**The paper's ordering {result}.**", *_orders(groups), *_counts(statements)]
        sentences += _named("Shown", statements, "shown") + _named("Contradicted", statements, "contradicted")
        sentences += _missing_numbers(statements)
    if done < total:
        sentences.append(f"Only {done} of {total} runs are done; this is the verdict of those.")
    blocks = [" ".join(sentences)]
    for heading, rows in (
        ("Outside the paper's ordering:", variants),
        (
            "DELTA against uniform draws and against importance sampling in the same form, under the same weights:",
            duels,
        ),
    ):
        lines = [f"- {sentence}" for group in groups for sentence in rows(group, measures[group.part])]
        blocks += [heading, "\n".join(lines)] if lines else []
    return "\n\n".join(blocks)


def headline(groups: Sequence[Group], measures: dict[str, list[Measure]]) -> str:
    """What was measured in one line: the paper's best (or each other row) against the baseline, part by part."""
    pieces = []
    for group in groups:
        best = next((label for label in group.order if label != group.baseline), None)
        best = best or next((label for label in group.labels if label != group.baseline), None)
        if best is None:
            continue
        texts = [effect(_between(group, measure, best, group.baseline)) for measure in measures[group.part]]
        where = f"{group.title}: " if len(groups) > 1 else ""
        pieces.append(f"{where}{group.name(best)} against {group.name(group.baseline)}: {'; '.join(texts)}")
    return ". ".join(pieces)


def variants(group: Group, measures: Sequence[Measure]) -> list[str]:
    """A sentence for each row outside the paper's ordering: against the baseline and against its relatives."""
    sentences = []
    for label in group.labels:
        if label in group.order or label == group.baseline:
            continue
        others = [group.baseline, *(name for name in _relatives(group, label) if name != group.baseline)]
        texts = []
        for other in others:
            effects = "; ".join(effect(_between(group, measure, label, other)) for measure in measures)
            texts.append(f"against {group.name(other)} {effects}")
        sentences.append(f"{group.title}, {group.name(label)}: {', and '.join(texts)}.")
    return sentences


#: DELTA's names, and importance sampling in the same form.
_RIVALS = {"delta": "fedis", "pracdelta": "fedpracis"}
_UNIFORM = ("uniform", "md-fixed")


def duels(group: Group, measures: Sequence[Measure]) -> list[str]:
    """A sentence for each row of DELTA: against uniform draws, and against IS where no other sentence says it."""
    sentences = []
    for label in group.labels:
        name = base_name(label)
        if name not in _RIVALS:
            continue
        others = [other for other in group.labels if base_name(other) in _UNIFORM]
        others += [other for other in group.labels if other == label.replace(name, _RIVALS[name], 1)]
        texts = []
        for other in others:
            if {label, other} <= set(group.order) or (label not in group.order and other == group.baseline):
                continue  # among the ordered pairs, or the variants
            effects = "; ".join(effect(_between(group, measure, label, other)) for measure in measures)
            texts.append(f"against {group.name(other)} {effects}")
        if texts:
            sentences.append(f"{group.title}, {group.name(label)}: {', and '.join(texts)}.")
    return sentences


def effect(statement: Statement) -> str:
    """An estimate with its interval and what it says, as in ``accuracy +0.52 points [0.10, 0.94], better``."""
    measure = statement.measure
    words = {"shown": measure.words[0], "contradicted": measure.words[1]}
    lost = ""
    if statement.only_second:
        lost += f", itself {measure.failed} in {_count(statement.only_second, 'seed')} more"
    if statement.only_first:
        lost += f", the other {measure.failed} in {_count(statement.only_first, 'seed')} more"
    return f"{measure.name} {number_text(statement)}, {words.get(statement.status, statement.status)}{lost}"


def number_text(statement: Statement) -> str:
    """As in ``speed-up ×1.31 [1.05, 1.60]``, ``+0.52 points [0.10, 0.94]``, ``lower by 0.120 [-0.010, 0.250]``."""
    measure, estimate = statement.measure, statement.estimate
    if estimate is None:
        return "without a pair of seeds"
    ends = [] if statement.low is None or statement.high is None else [statement.low, statement.high]
    if measure.form == "ratio":
        return f"{measure.unit}×{estimate:.2f}{_interval_text(ends, 2)}"
    digits = 2 if measure.scale > 1 else 3
    ends = [measure.scale * end for end in ends]
    if measure.higher:
        return f"{measure.scale * estimate:+.{digits}f}{measure.unit}{_interval_text(ends, digits)}"
    # The estimate is in favour of the first: a lower loss is above 0.
    word = "lower" if estimate >= 0 else "higher"
    ends = ends if estimate >= 0 else [-end for end in reversed(ends)]
    return f"{word} by {measure.scale * abs(estimate):.{digits}f}{measure.unit}{_interval_text(ends, digits)}"


def _interval_text(ends: Sequence[float], digits: int) -> str:
    return f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else ""


def _between(group: Group, measure: Measure, first: str, second: str) -> Statement:
    sides = [(group.name(label), group.row(label).records) for label in (first, second)]
    return compare(group.title, measure, sides[0], sides[1])


def _relatives(group: Group, label: str) -> list[str]:
    """The form of the same sampler that the paper orders; without one, the plain form."""
    same = [other for other in group.labels if other != label and base_name(other) == base_name(label)]
    ordered = [other for other in same if other in group.order]
    return ordered or [other for other in same if other == base_name(label)]


def _orders(groups: Sequence[Group]) -> list[str]:
    texts = dict.fromkeys(_order_text(group) for group in groups if len(group.order) > 1)
    return [f"It is {'; '.join(texts)}."] if texts else []


def _order_text(group: Group) -> str:
    ranks = group.tied or tuple((label,) for label in group.order)
    names = [[group.name(label) for label in rank if label in group.order] for rank in ranks]
    return " before ".join(" and ".join(filter(None, [", ".join(rank[:-1]), rank[-1]])) for rank in names if rank)


def _counts(statements: Sequence[Statement]) -> list[str]:
    measures = ", ".join(dict.fromkeys(s.measure.name for s in statements))
    number = {status: sum(s.status == status for s in statements) for status in _WORDS}
    parts = ", ".join(f"{number[status]} {_WORDS[status]}" for status in _WORDS if number[status])
    with_interval = len(statements) - number["no interval"]
    sentences = [f"It makes {_count(len(statements), 'statement')} on pairs of methods ({measures}): {parts}."]
    if with_interval > 1:
        chance = by_chance(with_interval)
        sentences.append(
            f"Each of the {with_interval} intervals is 95 % by itself, not all together: where nothing differs, "
            f"{f'up to {chance}' if chance else 'hardly one'} of them would still be shown, or contradicted, by "
            "chance; only what exceeds that counts in the verdict."
        )
    if number["no interval"] == len(statements):
        sentences.append("No pair of methods has two finished seeds with a number of both, so there is no interval.")
    return sentences


_WORDS = {"shown": "shown", "contradicted": "contradicted", "open": "open", "no interval": "without an interval"}


def _named(word: str, statements: Sequence[Statement], status: str) -> list[str]:
    chosen = [s for s in statements if s.status == status]
    if not chosen:
        return []
    several = len({s.where for s in statements}) > 1
    texts = [
        f"{s.first} before {s.second}{f' on {s.where}' if several else ''} ({s.measure.name} {number_text(s)})"
        for s in chosen[:_MOST_NAMED]
    ]
    rest = f"; and {len(chosen) - _MOST_NAMED} more in the table of pairs" if len(chosen) > _MOST_NAMED else ""
    return [f"{word}: {'; '.join(texts)}{rest}."]


def _missing_numbers(statements: Sequence[Statement]) -> list[str]:
    texts = []
    for s in statements:
        for who, other, number in ((s.second, s.first, s.only_first), (s.first, s.second, s.only_second)):
            if number:
                where = f"{_count(number, 'seed')} in which {other} did not fail ({s.where})"
                texts.append(f"{who} {s.measure.failed} in {where}")
    if not texts:
        return []
    rest = f"; and {len(texts) - _MOST_NAMED} more such pairs" if len(texts) > _MOST_NAMED else ""
    return [
        f"Left out of the intervals, which flatters the one that failed: {'; '.join(texts[:_MOST_NAMED])}{rest}. "
        "A method that fails where the other does not is never called better."
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
