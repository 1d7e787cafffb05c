"""The benchmark's tables: Markdown for people, and everything as rows of CSV."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltafl.analysis.statistics import mean_and_sd
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.simulation.record import RunRecord

from ..pages.cells import DASH, Cells, fixed, markdown, plus_minus
from ..pages.measures import Measure, Statement, centre, second_half
from .gap import NO_GAP, Gap
from .judge import against, gap_by_seed, gap_of, interval, measures, needs, never, value_s
from .numbers import (
    MB,
    bounded_bytes,
    bounded_rounds,
    bounded_seconds,
    bytes_a_round,
    bytes_to_threshold,
    last_accuracy,
    mean_accuracy,
    rounds_to_threshold,
    seconds_a_round,
)
from .parts import BASELINE, FULL
from .results import Method, Result, Store
from .server_memory import server_memory
from .target import gap_text
from .tuning import NEVER, score

#: Short names of the measures in the columns of table.csv, in the order of ``judge.measures``.
_KEYS = ("rounds", "rounds_smoothed", "accuracy", "mean_accuracy")


def by_rounds(result: Result) -> list[Method]:
    """The methods with a finished run, fewest mean rounds first; ties by mean accuracy."""
    rounds, *_, area = measures(result.part)

    def place(method: Method) -> tuple[float, float]:
        return float(np.mean(value_s(method, rounds.value))), -float(np.mean(value_s(method, area.value)))

    return sorted(result.shown, key=place)


def name_of(label: str) -> str:
    """A method as tables show it: biased ones and those that know too much for a server are marked."""
    marks = [] if is_unbiased(label) else ["biased"]
    marks += {"oracle": ["theoretical"], "everyone": ["everybody"]}.get(needs(label), [])
    return f"`{label}`" + (f" ({', '.join(marks)})" if marks else "")


def main_table(result: Result) -> str:
    """What was reached, sorted by rounds."""
    rounds, _, end, area = measures(result.part)
    heads = ["method", "needs", rounds.name, f"speed-up over {BASELINE} [95 %]", "G [95 %]"]
    heads += ["mean accuracy, %", f"against {BASELINE}, points [95 %]", "accuracy at the end, %", "seeds"]
    lines = []
    for method in by_rounds(result):
        label = method.label
        line = [name_of(label), needs(label), _rounds(result, method, rounds)]
        line += [_bound(result, method) + _ratio(against(result, rounds, label, BASELINE), label)]
        line += [_gap(gap_of(result, label, rounds), label)]
        mean, sd = _percent(method, area)
        line += [plus_minus(mean, sd, 2), _points(against(result, area, label, BASELINE), label)]
        line += [plus_minus(*_percent(method, end), 2), f"{len(method.runs)} of {result.part.seeds}"]
        lines.append(line)
    return markdown(heads, lines, left=2)


def cost_table(result: Result) -> str:
    """What it costs: bytes, the server's memory, processor time."""
    heads = ["method", "MB to the threshold", "MB a round", "server: models", "numbers a client", "MB"]
    heads += ["CPU seconds to the threshold", "a round", "one-round MSE", "lower bound without a control"]
    lines = []
    for method in by_rounds(result):
        cell = cost_cells(result, method)
        bound = "≥ " if never(method, result.part) else ""
        line = [name_of(method.label), bound + _short(cell["mb_to_threshold"]), _short(cell["mb_a_round"])]
        line += [str(cell["models"]), _short(cell["numbers_a_client"]), _short(cell["server_mb"])]
        line += [bound + _short(cell["cpu_seconds_to_threshold"]), _short(cell["cpu_seconds_a_round"])]
        line += [_short(cell["mse"]), _short(cell["least_mse"])]
        lines.append(line)
    return markdown(heads, lines)


def rates_table(results: Sequence[Result]) -> str:
    """The chosen learning rates; those at an edge of their grid are marked."""
    labels = list(dict.fromkeys(method.label for result in results for method in result.methods))
    lines = []
    for label in labels:
        found = [next((m for m in result.methods if m.label == label), None) for result in results]
        lines.append([name_of(label), *map(_rate, results, found)])
    return markdown(["method", *(result.part.title for result in results)], lines)


def cost_cells(result: Result, method: Method) -> dict[str, Any]:
    """Bytes, memory, time and probes of a method."""
    part = result.part
    bytes_s = value_s(method, lambda record: bounded_bytes(record, part.threshold))
    seconds_s = value_s(method, lambda record: bounded_seconds(record, part.threshold))
    settings = part.test_job(method.label, part.rates[0], 0).settings
    memory = server_memory(settings, result.num_clients, result.num_params)
    return {
        "mb_to_threshold": float(np.mean(bytes_s)) / MB,
        "mb_a_round": float(np.mean(value_s(method, bytes_a_round))) / MB,
        "models": memory.models,
        "numbers_a_client": memory.numbers,
        "server_mb": memory.megabytes,
        "cpu_seconds_to_threshold": float(np.mean(seconds_s)),
        "cpu_seconds_a_round": float(np.mean(value_s(method, seconds_a_round))),
        "mse": probed(method, "error"),
        "least_mse": probed(method, "least_error"),
    }


def probed(method: Method, column: str) -> float | None:
    """The geometric mean of a probe column over the second half of the rounds; None without probes."""
    values_s = [second_half(record, column) for record in method.runs.values() if column in record.probes]
    # A lower bound of 0 says nothing; older records have it where the update of any single client was 0.
    known_s = [value_r[value_r > 0] if column == "least_error" else value_r for value_r in values_s]
    known = [value for value_r in known_s if (value := centre(value_r)) is not None]
    return float(np.mean(known)) if known else None


def table_cells(results: Sequence[Result]) -> Cells:
    """One row for each part and method."""
    return [_method_cells(result, method) for result in results for method in by_rounds(result)]


def _method_cells(result: Result, method: Method) -> dict[str, Any]:
    label, part = method.label, result.part
    cell: dict[str, Any] = {"part": part.name, "tier": part.tier, "method": label, "unbiased": is_unbiased(label)}
    cell |= {"needs": needs(label), "source": SAMPLERS[parse_label(label).name].source}
    cell |= {"rate": method.search.best, "edge": method.search.edge, "seeds": len(method.runs)}
    cell |= {"never": never(method, part), "never_smoothed": never(method, part, smoothed=True)}
    cell |= {"diverged": _diverged(method)}
    for key, measure in zip(_KEYS, measures(part), strict=True):
        mean, low, high = interval(method, measure)
        cell |= {key: mean, f"{key}_low": low, f"{key}_high": high}
        other, gap = against(result, measure, label, BASELINE), gap_of(result, label, measure)
        if key == "accuracy":  # the end of a shorter run is no end
            other = other if part.rounds(label) == part.rounds(BASELINE) else None
            gap = gap if part.rounds(label) == part.rounds(FULL) == part.rounds(BASELINE) else NO_GAP
        if label != BASELINE and other is not None:
            cell |= {f"{key}_to_uniform": other.estimate, f"{key}_to_uniform_low": other.low}
            cell |= {f"{key}_to_uniform_high": other.high}
        cell |= {f"gap_{key}": gap.value, f"gap_{key}_low": gap.low, f"gap_{key}_high": gap.high}
        by_seed = gap_by_seed(result, label, measure) if gap.value is not None else {}
        cell |= {f"gap_{key}_median": float(np.median(list(by_seed.values()))) if by_seed else None}
        cell |= {f"gap_{key}_bound": gap.bound} if measure.cut else {}
    return cell | cost_cells(result, method)


def run_cells(results: Sequence[Result]) -> Cells:
    """One row for each reported run."""
    cells: Cells = []
    for result in results:
        rounds = measures(result.part)[0]
        for method in result.shown:
            gap = gap_by_seed(result, method.label, rounds)
            for seed, record in method.runs.items():
                head = {"part": result.part.name, "method": method.label, "seed": seed, "rate": method.search.best}
                cells.append(head | _numbers(record, result) | {"gap": gap.get(seed)})
    return cells


def _numbers(record: RunRecord, result: Result) -> dict[str, Any]:
    threshold = result.part.threshold
    return {
        "rounds": rounds_to_threshold(record, threshold),
        "rounds_bounded": bounded_rounds(record, threshold),
        "rounds_smoothed": rounds_to_threshold(record, threshold, smoothed=True),
        "diverged": record.diverged,
        "accuracy": 100 * last_accuracy(record),
        "mean_accuracy": 100 * mean_accuracy(record, result.part.horizon),
        "bytes_to_threshold": bytes_to_threshold(record, threshold),
        "bytes": record.bytes[-1],
        "cpu_seconds": record.cpu_seconds[-1],
    }


def tuning_cells(results: Sequence[Result], store: Store) -> Cells:
    """One row for each rate that was tried."""
    cells: Cells = []
    for result in results:
        part = result.part
        for method in result.methods:
            for rate in method.search.rates:
                runs = store.tried_by(part, method.label, rate, part.tuning_seeds)
                if runs:
                    rounds, minus = score(runs)
                    cell = {"part": part.name, "method": method.label, "rate": rate, "seeds": len(runs)}
                    cell |= {"rounds": rounds, "mean_accuracy": -100 * minus}
                    cells.append(cell | {"diverged": sum(run.diverged is not None for run in runs)})
                    cells[-1]["chosen"] = rate == method.search.best
    return cells


def _percent(method: Method, measure: Measure) -> tuple[float | None, float | None]:
    mean, sd = mean_and_sd(100 * value_s(method, measure.value))
    return mean, None if np.isnan(sd) else sd


def _rounds(result: Result, method: Method, rounds: Measure) -> str:
    mean, sd = mean_and_sd(value_s(method, rounds.value))
    failed, diverged = never(method, result.part), _diverged(method)
    notes = [f"{failed} of {len(method.runs)} never"] if failed else []
    notes += [f"{diverged} diverged"] if diverged else []
    mark = "≥ " if failed else ""
    return mark + plus_minus(mean, None if np.isnan(sd) else sd, 1) + (f" ({', '.join(notes)})" if notes else "")


def _bound(result: Result, method: Method) -> str:
    """What stands before a speed-up that is too low or too high, for runs that never reached the threshold."""
    base = result.find(BASELINE)
    if base is None or method.label == BASELINE:
        return ""
    low, high = never(base, result.part) > 0, never(method, result.part) > 0
    return "≥≤ " if low and high else "≥ " if low else "≤ " if high else ""


def _diverged(method: Method) -> int:
    return sum(record.diverged is not None for record in method.runs.values())


def _ratio(statement: Statement | None, label: str) -> str:
    if label == BASELINE:
        return "baseline"
    if statement is None or statement.estimate is None:
        return DASH
    ends = "" if statement.low is None else f" [{statement.low:.2f}, {statement.high:.2f}]"
    return f"×{statement.estimate:.2f}{ends}"


def _points(statement: Statement | None, label: str) -> str:
    if label == BASELINE:
        return "baseline"
    if statement is None or statement.estimate is None:
        return DASH
    ends = "" if statement.low is None or statement.high is None else _ends(100 * statement.low, 100 * statement.high)
    return f"{100 * statement.estimate:+.2f}{ends}"


def _ends(low: float, high: float) -> str:
    return f" [{low:.2f}, {high:.2f}]"


def _gap(gap: Gap, label: str) -> str:
    if gap.value is None:
        return DASH
    return {BASELINE: "0", FULL: "1"}.get(label) or gap_text(gap)


def _rate(result: Result, method: Method | None) -> str:
    if method is None:
        return ""
    best, found = method.search.best, method.search.score
    if best is None or found is None:
        return DASH
    marks = ["edge"] if method.search.edge else []
    marks += ["never"] if found.rounds == NEVER * result.part.rounds_tuning(method.label) else []
    return f"{best:g}" + (f" ({', '.join(marks)})" if marks else "")


def _short(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}" if value < 100 else fixed(value, 0)
