"""The benchmark's tables: Markdown for people, and everything as rows of CSV."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from deltafl import Population, analysis, init_round
from deltafl.estimators.control_variates import NoControlState
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.simulation import NEVER, RunSettings, mean_score, plan_of
from deltafl.tasks import find_task
from deltafl.types import FloatArray

from ..measures import Measure, centre, second_half
from ..spec import TEXTS
from ..text import DASH, Cells, fixed, markdown, plus_minus
from ..verdict import ends, number_text
from .judge import NO_GAP, Gap, against, cut_short, gap_by_seed, gap_of, measures, needs
from .parts import BASELINE, FULL
from .runs import Method, Result, Store

MB = 1e6
#: Short names of the measures in the columns of table.csv, in the order of ``judge.measures``.
_KEYS = ("rounds", "rounds_smoothed", "accuracy", "mean_accuracy")


def by_rounds(result: Result) -> list[Method]:
    """The methods with a finished run, fewest mean rounds first; ties by mean accuracy."""
    rounds, *_, area = measures(result.part)
    return sorted(result.shown, key=lambda m: (np.mean(rounds.numbers(m.runs)), -float(np.mean(area.numbers(m.runs)))))


def name_of(label: str) -> str:
    marks = [] if is_unbiased(label) else ["biased"]
    marks += {"oracle": ["theoretical"], "everyone": ["everybody"]}.get(needs(label), [])
    return f"`{label}`" + (f" ({', '.join(marks)})" if marks else "")


def main_table(result: Result) -> str:
    rounds, _, end, area = measures(result.part)
    heads = ["method", "needs", rounds.name, f"speed-up over {BASELINE} [95 %]", "G [95 %]"]
    heads += ["mean accuracy, %", f"against {BASELINE}, points [95 %]", "accuracy at the end, %", "seeds"]
    lines = []
    for method in by_rounds(result):
        label = method.label
        speed_up, points = (_to_baseline(result, measure, label) for measure in (rounds, area))
        line = [name_of(label), needs(label), _rounds(method, rounds), speed_up]
        line += [_gap(gap_of(result, label, rounds), label), _mean_text(method, area, 2), points]
        lines.append([*line, _mean_text(method, end, 2), f"{len(method.runs)} of {result.part.seeds}"])
    return markdown(heads, lines, left=2)


def _mean_text(method: Method, measure: Measure, digits: int) -> str:
    mean, sd = analysis.mean_and_sd(measure.scale * measure.numbers(method.runs))
    return plus_minus(mean, None if np.isnan(sd) else sd, digits)


def _rounds(method: Method, rounds: Measure) -> str:
    failed = cut_short(method, rounds)
    notes = [f"{failed} of {len(method.runs)} never"] if failed else []
    notes += [f"{method.diverged} diverged"] if method.diverged else []
    mark, note = "≥ " if failed else "", f" ({', '.join(notes)})" if notes else ""
    return f"{mark}{_mean_text(method, rounds, 1)}{note}"


def _to_baseline(result: Result, measure: Measure, label: str) -> str:
    statement = against(result, measure, label, BASELINE)
    if label == BASELINE or statement is None:
        return "baseline" if label == BASELINE else DASH
    mark = "≥" * (cut_short(result.find(BASELINE), measure) > 0) + "≤" * (cut_short(result.find(label), measure) > 0)
    return f"{mark}{' ' * bool(mark)}{number_text(statement)}"


def _gap(gap: Gap, label: str) -> str:
    return str(gap) if gap.value is None else {BASELINE: "0", FULL: "1"}.get(label, str(gap))


def cost_table(result: Result) -> str:
    """What it costs: bytes, the server's memory, processor time; and the error of one round."""
    heads = ["method", "MB to the threshold", "MB a round", "server: models", "numbers a client", "MB"]
    heads += ["CPU seconds to the threshold", "a round", "one-round MSE", "lower bound without a control"]
    lines = []
    for method in by_rounds(result):
        costs = {key: _short(value) for key, value in cost_cells(result, method).items()}
        if cut_short(method, measures(result.part)[0]):
            costs |= {key: f"≥ {costs[key]}" for key in ("mb_to_threshold", "cpu_seconds_to_threshold")}
        lines.append([name_of(method.label), *costs.values()])
    return markdown(heads, lines)


def _short(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}" if value < 100 else fixed(value, 0)


def cost_cells(result: Result, method: Method) -> dict[str, Any]:
    settings = result.part.test_job(method.label, result.part.rates[0], 0).settings
    models, numbers, megabytes = server_memory(settings, result.num_clients)
    bytes_to, bytes_a_round = _to_threshold(result, method, lambda run: run.bytes_r)
    seconds_to, seconds_a_round = _to_threshold(
        result, method, lambda run: run.seconds_r if run.cpu_seconds_r is None else run.cpu_seconds_r
    )
    return {
        "mb_to_threshold": bytes_to / MB,
        "mb_a_round": bytes_a_round / MB,
        "models": models,
        "numbers_a_client": numbers,
        "server_mb": megabytes,
        "cpu_seconds_to_threshold": seconds_to,
        "cpu_seconds_a_round": seconds_a_round,
        "mse": _probed(method, "error"),
        "least_mse": _probed(method, "least_error"),
    }


def _to_threshold(result: Result, method: Method, spent: Callable[[analysis.Run], FloatArray]) -> tuple[float, float]:
    """Means over runs of what was spent until the threshold was reached, else in all planned rounds; and in a round."""
    to_threshold, a_round = [], []
    for run in method.runs.values():
        at = None if run.diverged is not None else analysis.reach(run, result.part.threshold)
        a_round.append(float(spent(run)[-1]) / max(run.num_rounds, 1))
        to_threshold.append(a_round[-1] * run.horizon if at is None else float(spent(run)[at]))
    return float(np.mean(to_threshold)), float(np.mean(a_round))


def _probed(method: Method, column: str) -> float | None:
    """The geometric mean of a probe column over the second half of the rounds; None without probes."""
    values_s = [second_half(run, column) for run in method.runs.values() if column in run.probes]
    # A lower bound of 0 bounds nothing; older records have it where the update of any single client was 0.
    known_s = [value_r[value_r > 0] if column == "least_error" else value_r for value_r in values_s]
    known = [value for value_r in known_s if (value := centre(value_r)) is not None]
    return float(np.mean(known)) if known else None


def server_memory(settings: RunSettings, num_clients: int) -> tuple[int, float, float]:
    """A state has k d + r numbers for a model of d parameters: k (the model included), r / m, and megabytes of all."""
    *_, last = find_task(settings.task).make_model().parameters()
    aux_mq = np.ones((num_clients, len(last)))  # one number for each class; their values do not matter
    plan = plan_of(settings, Population.from_sizes([1] * num_clients, aux=aux_mq))
    few, more = (sum(_sizes(init_round(plan, np.zeros(num_params)))) for num_params in (5, 8))
    models = (more - few) // 3
    rest = few - 5 * models
    return models, rest / num_clients, (4 * models * num_params_of(settings.task) + 8 * rest) / MB


def num_params_of(task: str) -> int:
    return sum(param.numel() for param in find_task(task).make_model().parameters())


def _sizes(state: Any) -> Iterator[int]:
    """The sizes of the arrays of nested NamedTuples and tuples; a control that remembers nothing has none."""
    if isinstance(state, NoControlState):
        return
    if isinstance(state, tuple):
        for part in state:
            yield from _sizes(part)
    else:
        yield prod(np.shape(state))


def table_cells(results: Sequence[Result]) -> Cells:
    return [_method_cells(result, method) for result in results for method in by_rounds(result)]


def _method_cells(result: Result, method: Method) -> dict[str, Any]:
    label, part = method.label, result.part
    cell: dict[str, Any] = {"part": part.name, "tier": part.tier, "method": label, "unbiased": is_unbiased(label)}
    cell |= {"needs": needs(label), "source": SAMPLERS[parse_label(label).name].source}
    cell |= {"rate": method.search.best, "edge": method.search.edge, "seeds": len(method.runs)}
    never, never_smoothed, *_ = (cut_short(method, measure) for measure in measures(part))
    cell |= {"never": never, "never_smoothed": never_smoothed}
    cell |= {"diverged": method.diverged}
    for key, measure in zip(_KEYS, measures(part), strict=True):
        cell |= _with_ends(key, analysis.mean_interval(measure.numbers(method.runs)))
        other, gap = against(result, measure, label, BASELINE), gap_of(result, label, measure)
        if key == "accuracy":  # the end of a shorter run is no end
            other = other if part.rounds(label) == part.rounds(BASELINE) else None
            gap = gap if part.rounds(label) == part.rounds(FULL) == part.rounds(BASELINE) else NO_GAP
        if label != BASELINE and other is not None:
            cell |= _with_ends(f"{key}_to_uniform", (other.estimate, other.low, other.high))
        by_seed = gap_by_seed(result, label, measure) if gap.value is not None else []
        cell |= _with_ends(f"gap_{key}", gap[:3])
        cell |= {f"gap_{key}_median": float(np.median(by_seed)) if by_seed else None}
        cell |= {f"gap_{key}_bound": gap.bound} if measure.cut else {}
    return cell | cost_cells(result, method)


def _with_ends(key: str, interval: tuple[float | None, float | None, float | None]) -> dict[str, float | None]:
    return dict(zip((key, f"{key}_low", f"{key}_high"), interval, strict=True))


def tuning_cells(results: Sequence[Result], store: Store) -> Cells:
    cells: Cells = []
    for result in results:
        part = result.part
        for method in result.methods:
            for rate in method.search.rates:
                if runs := store.tuned_by(part, method.label, rate, part.tuning_seeds):
                    rounds, minus = mean_score([run.score for run in runs])
                    cell = {"part": part.name, "method": method.label, "rate": rate, "seeds": len(runs)}
                    cell |= {"rounds": rounds, "mean_accuracy": -100 * minus}
                    cell |= {"diverged": sum(run.diverged is not None for run in runs)}
                    cells.append(cell | {"chosen": rate == method.search.best})
    return cells


def rates_table(results: Sequence[Result]) -> str:
    labels = list(dict.fromkeys(method.label for result in results for method in result.methods))
    lines = [[name_of(label), *(_rate(result, label) for result in results)] for label in labels]
    return markdown(["method", *(result.part.title for result in results)], lines)


def _rate(result: Result, label: str) -> str:
    found = next((method.search for method in result.methods if method.label == label), None)
    if found is None:
        return ""
    if found.best is None or found.score is None:
        return DASH
    marks = ["edge"] if found.edge else []
    marks += ["never"] if found.score.rounds == NEVER * result.part.rounds_tuning(label) else []
    return f"{found.best:g}" + (f" ({', '.join(marks)})" if marks else "")


def edge_text(results: Sequence[Result], store: Store) -> str:
    """Chosen rates that are still at an edge of their grid, beside the best rate inside it, in tuning rounds."""
    at_edge = [(result, method) for result in results for method in result.shown if method.search.edge]
    if not at_edge:
        return "No chosen rate is at an edge of its grid."
    lines, better = [], 0
    for result, method in at_edge:
        rounds_of = {
            rate: np.array([run.score.rounds for run in store.tuned_by(result.part, method.label, rate, seeds)])
            for seeds in [result.part.tuning_seeds]
            for rate in method.search.finalists
        }
        chosen = method.search.best or 0.0
        inside = [rate for rate in rounds_of if rate not in (method.search.rates[0], method.search.rates[-1])]
        cells = [f"{chosen:g}", f"{np.mean(rounds_of[chosen]):.1f}", DASH, DASH, DASH]
        if inside:
            best = min(inside, key=lambda rate: float(np.mean(rounds_of[rate])))
            mean, low, high = analysis.mean_interval(rounds_of[chosen] - rounds_of[best])
            better += high is not None and high < 0
            cells[2:] = [f"{best:g}", f"{np.mean(rounds_of[best]):.1f}", f"{mean:+.1f}{ends(low, high, '.1f')}"]
        lines.append([result.part.title, f"`{method.label}`", *cells])
    heads = ["task", "method", "chosen", "rounds", "best inside", "rounds", "difference [95 %]"]
    head = TEXTS["benchmark"]["edge"].format(better=better, number=len(at_edge))
    return f"{head}\n\n{markdown(heads, lines)}"
