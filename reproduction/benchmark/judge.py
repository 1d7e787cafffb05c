"""What is compared on a part: measures with paired intervals against uniform sampling, and gaps closed."""

from collections.abc import Callable

import numpy as np

from deltafl.analysis.statistics import mean_interval
from deltafl.samplers import SAMPLERS, parse_label
from deltafl.simulation.record import RunRecord
from deltafl.types import FloatArray

from ..pages.measures import Measure, Statement, compare
from .gap import NO_GAP, Gap, Room, closed, room
from .numbers import bounded_rounds, last_accuracy, mean_accuracy, rounds_to_threshold
from .parts import BASELINE, FULL, Part
from .results import Method, Result

OURS = "this project"
#: What a practical server has: its needs column in ``deltafl samplers``, and what the methods with these may know.
PRACTICAL = ("nothing", "sizes", "cohort")
#: The same for a server that was told of every client beforehand, here its shares of labels.
INFORMED = (*PRACTICAL, "known")


def needs(label: str) -> str:
    """What the method's server must know: a word of ``deltafl samplers``."""
    return SAMPLERS[parse_label(label).name].needs


def is_ours(label: str) -> bool:
    """Whether the sampler is one of this project's own."""
    return SAMPLERS[parse_label(label).name].source == OURS


def measures(part: Part) -> list[Measure]:
    """What methods are compared by, the main one first.

    Rounds are min(R, T): a run that never reached the threshold counts as its T rounds.
    """
    horizon = part.horizon
    return [
        rounds_at(part.threshold),
        rounds_at(part.threshold, smoothed=True),
        Measure("accuracy at the end", "difference", True, last_accuracy, 100.0, " points"),
        Measure("mean accuracy", "difference", True, lambda record: mean_accuracy(record, horizon), 100.0, " points"),
    ]


def rounds_at(threshold: float, smoothed: bool = False) -> Measure:
    """Rounds to a threshold, by one evaluation or by the mean of five."""
    return Measure(
        f"rounds to {100 * threshold:g} %" + (" by the mean of five" if smoothed else ""),
        "ratio",
        False,
        lambda record: bounded_rounds(record, threshold, smoothed),
        words=("fewer", "more"),
        cut=lambda record: rounds_to_threshold(record, threshold, smoothed) is None,
    )


def value_s(method: Method, value: Callable[[RunRecord], float | None]) -> FloatArray:
    """A number of every finished run, (s,); NaN where there is none."""
    return np.array([value(record) for record in method.runs.values()], dtype=np.float64)


def never(method: Method, part: Part, smoothed: bool = False) -> int:
    """Runs that never reached the threshold, those that diverged included."""
    return cut_short(method, rounds_at(part.threshold, smoothed))


def cut_short(method: Method | None, measure: Measure) -> int:
    """Runs whose number is but a bound."""
    return sum(measure.cut(record) for record in method.runs.values()) if method and measure.cut else 0


def against(result: Result, measure: Measure, label: str, other: str) -> Statement | None:
    """A method against another over paired seeds; None if one of them has no run."""
    one, two = result.find(label), result.find(other)
    if one is None or two is None:
        return None
    return compare(result.part.title, measure, (label, one.runs), (other, two.runs))


def duel(result: Result, label: str, other: str) -> Statement | None:
    """A method against another in rounds to the threshold; open where the runs that never reached it would decide.

    Such a run counts as T, less than it needs, so that a ratio in favour of its method is too good.
    """
    found = against(result, measures(result.part)[0], label, other)
    winner = {"shown": label, "contradicted": other}.get(found.status) if found else None
    method = result.find(winner) if winner else None
    return found._replace(status="open") if found and method and never(method, result.part) else found


def interval(method: Method, measure: Measure) -> tuple[float, float | None, float | None]:
    """The mean over seeds with its own 95 % interval."""
    return mean_interval(value_s(method, measure.value))


def room_of(result: Result) -> Room | None:
    """The gap between uniform sampling and full participation; None while one of them has no run."""
    measure = measures(result.part)[0]
    sides = _paired(result, (BASELINE, FULL), measure)
    if sides is None:
        return None
    found = room(sides[0], sides[1])
    for label in (FULL, BASELINE):
        cut = cut_short(result.find(label), measure)
        # Rounds of full participation that were cut short would make a gap where there may be none.
        if cut and (label == FULL or not found.exists):
            return found._replace(exists=False, unknown=f"{cut} runs of {label} never reached the threshold")
    return found


def gap_of(result: Result, label: str, measure: Measure) -> Gap:
    """The gap that a method closes, of rounds or of another measure, over the seeds that all three ran.

    None where runs of full participation were cut short: where it ends is not known then.
    """
    sides = _paired(result, (BASELINE, label, FULL), measure)
    if sides is None:
        return NO_GAP
    base_s, own_s, full_s = sides
    unknown = cut_short(result.find(FULL), measure) > 0
    if unknown or (not measure.higher and not room(base_s, full_s).exists):
        return Gap(None, None, None, len(base_s))
    sign = 1.0 if measure.higher else -1.0
    gap = closed(sign * (own_s - base_s), sign * (full_s - base_s))
    return gap if gap.value is None else gap._replace(bound=_bound(result, label, measure, gap.value))


def _bound(result: Result, label: str, measure: Measure, value: float) -> str:
    """Which way G would go if runs that were cut short had gone on, see ``Gap.bound``.

    Down with a method's own rounds; with those of uniform sampling up if it is below 1, and down if it is above.
    """
    if label in (BASELINE, FULL):
        return ""
    own, base = cut_short(result.find(label), measure) > 0, cut_short(result.find(BASELINE), measure) > 0
    at_most, at_least = own or (base and value > 1), base and value < 1
    return "≥≤" if at_most and at_least else "≤" if at_most else "≥" if at_least else ""


def gap_by_seed(result: Result, label: str, measure: Measure) -> dict[int, float]:
    """G seed by seed, where full participation beats uniform sampling in it."""
    methods = [result.find(name) for name in (BASELINE, label, FULL)]
    if any(method is None for method in methods):
        return {}
    base, own, full = (method.runs for method in methods if method is not None)
    found = {}
    for seed in sorted(set(base) & set(own) & set(full)):
        u, r, f = (measure.value(runs[seed]) for runs in (base, own, full))
        if u is not None and r is not None and f is not None and (u > f) != measure.higher and u != f:
            found[seed] = (u - r) / (u - f)
    return found


def _paired(result: Result, labels: tuple[str, ...], measure: Measure) -> list[FloatArray] | None:
    """The values of methods for the seeds that all of them finished; None if there is none."""
    methods = [method for label in labels if (method := result.find(label)) is not None]
    seeds = sorted(set.intersection(*(set(method.runs) for method in methods))) if methods else []
    if len(methods) < len(labels) or not seeds:
        return None
    return [np.array([measure.value(method.runs[seed]) for seed in seeds], dtype=np.float64) for method in methods]
