"""Numbers of a comparison as a person reads them, in the terminal and in the report."""

from rich.filesize import decimal

from .numbers import (
    Gain,
    GapClosed,
    MeanSd,
    SamplerFairness,
    SamplerSummary,
    SpeedUp,
    Summary,
    ToThreshold,
    value_of,
)
from .statistics import side_of

#: Stands for a number that does not exist.
DASH = "—"
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"
#: The columns of the table of costs.
COSTS = ("clients' seconds", "server's seconds", "bytes down", "bytes up", "server's memory")
Difference = SpeedUp | GapClosed | Gain


def cells_of(entry: SamplerSummary, summary: Summary) -> dict[str, str]:
    """The cells of a sampler in the order of the table, a second line with the interval or the
    share of seeds.
    """
    cells = {"value": value_text(entry, summary)}
    if has_fairness(summary):
        cells["tail"] = _tail_text(entry.fairness)
    cells["gap"] = difference_text(entry.gap_closed)
    reached = entry.to_threshold
    if reached is None:
        cells["bytes"] = human_bytes(entry.total_bytes)
        clock = entry.total_clock
    else:
        cells["rounds"] = rounds_text(reached)
        cells["speedup"] = _speedup_text(entry.sampler == summary.baseline, reached.speedup)
        cells["bytes"] = human_bytes(reached.bytes)
        clock = reached.clock
    if clock is not None:
        cells["bytes"] += f"\n{human_seconds(clock)} s"
    return cells


def cost_cells(entry: SamplerSummary) -> list[str]:
    """What a run of a sampler costs, in the order of ``COSTS``."""
    found = entry.costs
    if found is None:
        return [DASH] * len(COSTS)
    seconds = [f"{human_seconds(it)} s" for it in (found.client_seconds, found.server_seconds)]
    sizes = [found.bytes_down, found.bytes_up, found.server_bytes]
    return [*seconds, *map(human_bytes, sizes)]


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


def number_text(number: float) -> str:
    """Two decimals, or three digits of a large number."""
    return f"{number:.2f}" if abs(number) < 99.995 else f"{number:.3g}"


def plus_minus(found: MeanSd | None, metric: str) -> str:
    """A mean with its spread, if there are several seeds; a dash without a mean."""
    if found is None or found.mean is None:
        return DASH
    numbers = [found.mean] if found.sd is None else [found.mean, found.sd]
    if metric == "accuracy":
        return "±".join(f"{100 * number:.1f}" for number in numbers)
    return "±".join(f"{number:.3g}" for number in numbers)


def value_text(entry: SamplerSummary, summary: Summary) -> str:
    """The metric as tables show it, with its spread."""
    text = plus_minus(value_of(entry, summary), summary.metric)
    return text + DIVERGED if entry.num_diverged and text != DASH else text


def _tail_text(found: SamplerFairness | None) -> str:
    if found is None or found.sd.mean is None:
        return DASH
    return f"{plus_minus(found.worst_tenth, 'accuracy')}\nsd {100 * found.sd.mean:.1f}"


def threshold_text(summary: Summary) -> str:
    """The threshold as a person writes it, for example ``70 %`` or ``loss 0.1``."""
    if summary.threshold is None:
        return "none"
    if summary.metric == "accuracy":
        return f"{100 * summary.threshold:g} %"
    return f"loss {summary.threshold:g}"


def rounds_text(reached: ToThreshold) -> str:
    """Mean rounds to the threshold, and how many seeds reached it where some did not."""
    num_seeds = reached.num_reached + reached.num_never
    share = f"{reached.num_reached}/{num_seeds} seeds"
    if reached.rounds is None or reached.rounds.mean is None:
        return f"{DASH}\n{share}"
    mean = f"{reached.rounds.mean:,.{min(num_seeds - 1, 1)}f}"
    return f"{mean}\n{share}" if reached.num_never else mean


def _speedup_text(is_baseline: bool, found: SpeedUp | None) -> str:
    if is_baseline:
        return "baseline"
    return difference_text(found, MARK if found and found.num_left_out else "")


def difference_text(found: Difference | None, mark: str = "") -> str:
    """A difference with its interval on a second line; a dash for None."""
    if found is None:
        return DASH
    text = number_text(found.value) + mark
    if found.low is None or found.high is None or found.low == found.high:
        return text
    return f"{text}\n[{number_text(found.low)}, {number_text(found.high)}]"


def verdict_of(found: Difference | None) -> str:
    """``"better"`` or ``"worse"`` if the interval shows it, else ``"open"``.

    A sampler that never got there with a seed with which the other did is not called better: other
    seeds flatter it.
    """
    if found is None or found.low is None or found.high is None:
        return "open"
    side = side_of(found.low, found.high, found.no_difference)
    if isinstance(found, SpeedUp) and (found.num_lost if side > 0 else found.num_won):
        return "open"
    return ("open", "better", "worse")[side]


def verdicts_of(entry: SamplerSummary) -> dict[str, str]:
    """The verdicts on the cells of a sampler that have one."""
    verdicts = {"gap": verdict_of(entry.gap_closed), "speedup": verdict_of(entry.speedup)}
    if entry.fairness is not None:
        verdicts["tail"] = verdict_of(entry.fairness.gain)
    return verdicts
