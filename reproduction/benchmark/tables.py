"""The benchmark's tables: Markdown for people, and everything as rows of CSV."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from deltafl import ESTIMATORS, LearnedCoefficient, Population, Twin, analysis, flatten, init_round
from deltafl.samplers import SAMPLERS, is_unbiased, parse_label
from deltafl.simulation import RunSettings, mean_score, plan_of
from deltafl.tasks import find_task
from deltafl.types import FloatArray, Params

from ..measures import Measure, centre, mean_sd, of_clients, reach, second_half
from ..spec import View
from ..text import DASH, MOST_ROWS, Cells, folded, interval_cells, markdown, plus_minus
from ..verdict import number_text
from .judge import against, cut_short, judged_gap, measures, needs
from .parts import BASELINE, FULL, Part
from .runs import Method, Result, Store

MB = 1e6
#: Short names of the measures in the columns of table.csv, in the order of ``judge.measures``.
_KEYS = ("mean_accuracy", "rounds_smoothed", "rounds", "accuracy")


def by_area(result: Result) -> list[Method]:
    """The methods with a finished run, the highest mean accuracy first."""
    area = measures(result.part)[0]
    return sorted(result.shown, key=lambda method: -float(np.mean(area.numbers(method.runs))))


def name_of(label: str) -> str:
    marks = {"oracle": "‡", "known": "§"}.get(needs(label), "") + "†" * (not is_unbiased(label))
    return f"`{label}` {marks}".rstrip()


def main_table(result: Result, view: View) -> str:
    """The methods of the pictures and the best others, 12 rows; the rest is folded."""
    area, smoothed, *_ = measures(result.part)
    heads = ["method", "G by area [95 %]", "mean accuracy, %", f"above {BASELINE}, points [95 %]"]
    methods = by_area(result)
    clients = {}
    if any(run.fairness for method in methods for run in method.runs.values()):
        clients = {
            "clients at the end, %": of_clients("mean"),
            "worst tenth, %": of_clients("worst_tenth"),
        }
    heads += [*clients, smoothed.name, "local rate", "seeds"]
    core = [method.label for method in methods if method.label in view.core]
    others = [method.label for method in methods if method.label not in view.core]
    first = {*core, *others[: max(MOST_ROWS - len(core), 0)]}
    lines = {}
    for method in methods:
        label = method.label
        search = method.search
        lines[label] = [
            name_of(label),
            _gap(result, label, area),
            _mean_text(method, area, ".2f"),
            _above(result, area, label),
            *(_mean_text(method, measure, ".1f") for measure in clients.values()),
            _rounds(method, smoothed),
            f"{search.best:g}{'*' * bool(search.edge)}",
            str(len(method.runs)),
        ]
    table = markdown(heads, [line for label, line in lines.items() if label in first])
    rest = [line for label, line in lines.items() if label not in first]
    if rest:
        table += f"\n\n{folded(f'{len(rest)} more', markdown(heads, rest))}"
    return table


def _mean_text(method: Method, measure: Measure, form: str) -> str:
    mean, sd, missing = measure.over_seeds(method.runs)
    if missing:
        return DASH
    return plus_minus(mean, sd, form)


def _rounds(method: Method, rounds: Measure) -> str:
    failed = cut_short(method, rounds)
    numbers = {"never": failed, "diverged": method.diverged}
    notes = [f"{number} {word}" for word, number in numbers.items() if number]
    text = f"{'≥ ' * bool(failed)}{_mean_text(method, rounds, '.1f')}"
    if notes:
        text += f" ({', '.join(notes)})"
    return text


def _above(result: Result, measure: Measure, label: str) -> str:
    if label == BASELINE:
        return "baseline"
    statement = against(result, measure, label, BASELINE)
    if statement is None:
        return DASH
    return number_text(statement).replace(measure.unit, "")


def _gap(result: Result, label: str, measure: Measure) -> str:
    gap = judged_gap(result, label, measure)
    if gap.value is None:
        return str(gap)
    # By definition; the intervals of both have no width.
    return {BASELINE: "0", FULL: "1"}.get(label, str(gap))


def crossings_table(results: Sequence[Result]) -> str:
    """Rounds to the first evaluation at the threshold, which hangs on chance: for comparison
    with papers.
    """
    lines: dict[str, list[str]] = {}
    for place, result in enumerate(results):
        first = measures(result.part)[2]
        for method in by_area(result):
            line = lines.setdefault(method.label, [""] * len(results))
            line[place] = _rounds(method, first)
    heads = [f"{result.part.title}, {100 * result.part.threshold:g} %" for result in results]
    rows = [[name_of(label), *line] for label, line in lines.items()]
    return markdown(["method", *heads], rows)


def cost_table(result: Result) -> str:
    """What it costs: bytes, the server's memory, processor time; and the error of one round."""
    heads = [
        "method",
        "MB to the threshold",
        "MB a round",
        "server: models",
        "numbers a client",
        "MB",
    ]
    heads += [
        "CPU seconds to the threshold",
        "a round",
        "one-round MSE",
        "lower bound without a control",
    ]
    lines = []
    for method in by_area(result):
        costs = {key: _short(value) for key, value in cost_cells(result, method).items()}
        if cut_short(method, measures(result.part)[1]):
            costs |= {
                key: f"≥ {costs[key]}" for key in ("mb_to_threshold", "cpu_seconds_to_threshold")
            }
        lines.append([name_of(method.label), *costs.values()])
    return markdown(heads, lines)


def _short(value: float | None) -> str:
    if value is None:
        return DASH
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def cost_cells(result: Result, method: Method) -> dict[str, Any]:
    settings = result.part.test_job(method.label, result.part.rates[0], 0).settings
    models, numbers, megabytes = server_memory(settings, result.num_clients)
    bytes_to, bytes_a_round = _to_threshold(result, method, lambda run: run.bytes_r)
    seconds_to, seconds_a_round = _to_threshold(result, method, _seconds_of)
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


def _seconds_of(run: analysis.Run) -> FloatArray:
    """Processor time; older records have the wall clock alone."""
    if run.cpu_seconds_r is None:
        return run.seconds_r
    return run.cpu_seconds_r


def _to_threshold(
    result: Result, method: Method, spent: Callable[[analysis.Run], FloatArray]
) -> tuple[float, float]:
    """Means over runs of what was spent until the mean of five reached the threshold, else in
    all rounds; a round.
    """
    to_threshold = []
    a_round = []
    for run in method.runs.values():
        spent_r = spent(run)
        a_round.append(float(spent_r[-1]) / max(run.num_rounds, 1))
        at = reach(run, result.part.threshold, smoothed=True)
        if run.diverged is not None or at is None:
            to_threshold.append(a_round[-1] * run.horizon)
        else:
            to_threshold.append(float(spent_r[at]))
    return float(np.mean(to_threshold)), float(np.mean(a_round))


def _probed(method: Method, column: str) -> float | None:
    """The geometric mean of a probe column over the second half of the rounds; None without
    probes.
    """
    values_s = [second_half(run, column) for run in method.runs.values() if column in run.probes]
    # A lower bound of 0 bounds nothing; older records have it where the update of any single client
    # was 0.
    known_s = values_s
    if column == "least_error":
        known_s = [value_r[value_r > 0] for value_r in values_s]
    mean, _ = mean_sd(np.array([centre(value_r) for value_r in known_s if len(value_r)]))
    return mean


def server_memory(settings: RunSettings, num_clients: int) -> tuple[int, float, float]:
    """A state has k d + r numbers for a model of d parameters: k (the model included), r / m,
    and megabytes of all.
    """
    *_, last = find_task(settings.task).make_model().parameters()
    # One number for each class; their values do not matter.
    aux_mq = np.ones((num_clients, len(last)))
    plan = plan_of(settings, Population.from_sizes([1] * num_clients, aux=aux_mq))
    control = plan.rule.control
    if isinstance(control, LearnedCoefficient) and isinstance(control.control, Twin):
        # It is not simulated here, only kept.
        kept = replace(control.control, simulate=_no_updates)
        plan = replace(plan, estimator=LearnedCoefficient(kept))
    states = [init_round(plan, np.zeros(size)) for size in (5, 8)]
    if plan.rule.control == ESTIMATORS["horvitz-thompson"].control:  # it remembers nothing
        states = [state._replace(control=()) for state in states]
    few, more = (sum(_sizes(state)) for state in states)
    models = (more - few) // 3
    # Without the count of rounds that were left out and two checksums, which are of no method.
    rest = few - 5 * models - 3
    num_params = num_params_of(settings.task)
    # The codes of first updates are not there without answers.
    if plan.census is not None:
        rest += num_clients * (plan.census.length(num_params) - plan.census.size - 1)
    return models, rest / num_clients, (4 * models * num_params + 8 * rest) / MB


def _no_updates(params_d: Params, population: Population, _: Any) -> FloatArray:
    return np.zeros((population.num_clients, len(params_d)))


def num_params_of(task: str) -> int:
    """The length of the vector that is trained and sent."""
    spec = find_task(task)
    return len(flatten(spec.make_model(), trainable=spec.trainable))


def _sizes(state: Any) -> Iterator[int]:
    """The sizes of the arrays of nested NamedTuples, tuples and mappings."""
    if isinstance(state, Mapping):
        state = tuple(state.values())
    if isinstance(state, tuple):
        for part in state:
            yield from _sizes(part)
    else:
        yield prod(np.shape(state))


def table_cells(results: Sequence[Result]) -> Cells:
    return [_method_cells(result, method) for result in results for method in by_area(result)]


def _method_cells(result: Result, method: Method) -> dict[str, Any]:
    label = method.label
    part = result.part
    cell: dict[str, Any] = {"part": part.name, "tier": part.tier, "method": label}
    cell |= {"unbiased": is_unbiased(label), "needs": needs(label)}
    cell |= {"source": SAMPLERS[parse_label(label).name].source}
    cell |= {"rate": method.search.best, "edge": method.search.edge, "seeds": len(method.runs)}
    _, smoothed, first, _ = measures(part)
    cell |= {"never_smoothed": cut_short(method, smoothed), "never": cut_short(method, first)}
    cell |= {"diverged": method.diverged}
    for key, measure in zip(_KEYS, measures(part), strict=True):
        number_s = measure.numbers(method.runs)
        cell |= interval_cells(key, analysis.mean_interval(number_s))
        other = against(result, measure, label, BASELINE)
        if label != BASELINE and other is not None:
            cell |= interval_cells(f"{key}_to_uniform", (other.estimate, other.low, other.high))
        gap = judged_gap(result, label, measure)
        cell |= interval_cells(f"gap_{key}", gap[:3])
    by_client = {"client_mean": of_clients("mean"), "worst_tenth": of_clients("worst_tenth")}
    for key, measure in by_client.items():
        number_s = measure.numbers(method.runs)
        if len(number_s) == len(method.runs):
            cell |= interval_cells(key, analysis.mean_interval(number_s))
    return cell | cost_cells(result, method)


def tuning_cells(results: Sequence[Result], store: Store) -> Cells:
    cells = [
        _tuning_cell(result.part, method, rate, store)
        for result in results
        for method in result.methods
        for rate in method.search.rates
    ]
    return [cell for cell in cells if cell]


def _tuning_cell(part: Part, method: Method, rate: float, store: Store) -> dict[str, Any]:
    """What the finished tuning runs of a rate found; empty if there is none."""
    found = [
        store.tuned(part, part.tuning_job(method.label, rate, seed)) for seed in part.tuning_seeds
    ]
    runs = [run for run in found if run is not None]
    if not runs:
        return {}
    diverged, minus = mean_score([run.score for run in runs])
    never = [run.reached is None for run in runs]
    rounds = [run.reached or float(part.horizon) for run in runs]
    cell = {"part": part.name, "method": method.label, "rate": rate, "seeds": len(runs)}
    cell |= {"mean_accuracy": -100 * minus, "rounds": float(np.mean(rounds))}
    cell |= {"never": sum(never)}
    return cell | {"diverged": round(diverged * len(runs)), "chosen": rate == method.search.best}
