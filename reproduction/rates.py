"""Table 1: how norm(grad f(x_t))^2 falls with the number of rounds T that was planned for.

The paper's learning rates depend on T, eta_L = 1 / (sqrt(T) K L) and eta = sqrt(K n), so every T is
a run of its own: a *cell* is (problem, method, seed, T). Of each run two numbers are kept, by exact
gradients of f at x_0 ... x_{T-1}:

- ``least``  min_t norm(grad f(x_t))^2; its mean over seeds is at most the paper's min_t E norm(grad
  f(x_t))^2,
- ``mean``  (1/T) sum_t norm(grad f(x_t))^2; its mean over seeds is at least that, and what the
  paper's proofs bound.

A slope is that of log(mean over seeds) against log T by least squares, slope = sum_t c_t log
mean_t. Linearised, seed s moves it by r_s = sum_t c_t value_ts / mean_t, hence the interval slope
+- t_{S-1} sd(r) / sqrt(S).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from deltafl import (
    KnownUpdates,
    Population,
    Reports,
    Sgd,
    analysis,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.errors import DeltaflError
from deltafl.types import FloatArray

from .page import OwnPage
from .problems import Problem, local_work, make_problem
from .running import Rows
from .spec import TEXTS
from .text import cut, ends, folded, formatted, interval_cells, markdown

TOLERANCE = 0.1  # a slope this near to the claimed order counts as the claimed order: T is finite
WIDEST = 0.4  # a wider interval does not tell the orders -1/2 and -1 apart
BASELINE = "uniform"
SLOWER = "slower than claimed"
#: What a cell is.
_KEYS = ("problem", "method", "horizon", "seed")
#: What is kept of its run.
_NUMBERS = ("least", "mean")
#: (problem, method) -> (2, t, s): least and mean, by horizon and seed.
Values = dict[tuple[str, str], FloatArray]
#: The exponent of T in the paper's bound by name of the sampler, in general and where f(x_0) = f*,
#: sigma = 0; the bounds are in docs/why/theory/table-1.md.
CLAIMS = {
    "full": (-0.5, -1.0),
    "fedavg": (-0.5, -0.5),
    "uniform": (-0.5, -0.5),
    "fedis": (-0.5, -0.5),
    "fedpracis": (-0.5, -0.5),
    "delta": (-0.5, -1.0),
    "pracdelta": (-0.5, -1.0),
    "power-of-choice": (0.0, 0.0),
}
#: What the picture shows, the paper's own forms; the tables have all methods.
_DRAWN = ("full", "fedavg", "uniform", "fedis@multinomial", "delta@multinomial")


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(_KEYS, values, strict=True)) for values in product(*_axes(settings))]


def _axes(settings: dict[str, Any]) -> list[Sequence[Any]]:
    """The values of ``_KEYS``."""
    named = [settings[name] for name in ("problems", "methods", "horizons")]
    return [*named, range(settings["seeds"])]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> Rows:
    """One row."""
    size = settings["clients"], settings["dimension"], settings["noise"]
    problem = make_problem(cell["problem"], *size)
    least, mean = run_cell(settings, problem, cell["method"], cell["seed"], cell["horizon"])
    return [{**cell, "least": least, "mean": mean}]


def run_cell(
    settings: dict[str, Any], problem: Problem, label: str, seed: int, horizon: int
) -> tuple[float, float]:
    """One run of T rounds with the paper's learning rates for that T; returns ``least`` and
    ``mean``.
    """
    steps = settings["local_steps"]
    n = settings["sample"]
    local_lr = 1 / (sqrt(horizon) * steps * problem.smoothness)
    population = Population.from_sizes([1] * problem.num_clients)
    plan = make_plan(label, population, n, server_optimizer=Sgd(sqrt(steps * n)), seed=seed)
    state = init_round(plan, problem.start_d)
    square_t = np.empty(horizon)
    for t in range(horizon):
        x_d = state.params_d.astype(np.float64)
        gradient_d = problem.gradients(np.tile(x_d, (problem.num_clients, 1))).mean(axis=0)
        square_t[t] = gradient_d @ gradient_d
        update_md, variance_m = local_work(
            problem, x_d, local_lr, problem.randomness(seed, t, steps)
        )
        steps_m = np.full(problem.num_clients, steps)
        oracle = KnownUpdates(
            update_md, population.weight_m, variance_m, problem.losses(x_d), num_steps_m=steps_m
        )
        cohort = open_round(plan, state, oracle=oracle)
        here = cohort.client_n
        reports = Reports.make(len(here), step_variance=variance_m[here], num_steps=steps_m[here])
        state, _ = close_round(plan, state, cohort, update_md[here], reports)
    return float(square_t.min()), float(square_t.mean())


#: The counter-example is run with the paper's draws and weights, and with an exact design.
COUNTER_METHODS = ("delta@multinomial", "delta", "uniform")


def counter_example(label: str, rounds: int, seed: int = 0) -> tuple[float, float, float]:
    """F_i = (x -+ 1)^2 / 2, n = 1, K = 1, no noise, from x = 1, eta eta_L = 1: grad f(x) = x is 1
    or -1 for ever.

    DELTA and uniform draw either client with probability 1/2; importance sampling does not. All
    conditions of the printed theorem 2 hold: L = 1, eta eta_L <= 1 / (K L), eta_L below 1 / (4
    sqrt(10)), and assumption 3 with A = 1, sigma_G^2 = 2. The bound is (f(x_0) - f*) / (c eta eta_L
    K T) + Phi~ / c with f(x_0) - f* = 1/2, Phi~ = 10 eta_L^2, and c = 1/4, which its proof allows:
    1/2 - 20 eta_L^2 (A^2 + 1) > c. Returns eta_L, least norm(grad f)^2, bound.
    """
    population = Population.from_sizes([1, 1])
    optimum_m = np.array([1.0, -1.0])
    local_lr = 2.0**-10
    plan = make_plan(label, population, 1, server_optimizer=Sgd(1 / local_lr), seed=seed)
    state = init_round(plan, [1.0])
    least = inf
    for _ in range(rounds):
        x = float(state.params_d[0])
        least = min(least, x * x)
        update_md = (local_lr * (optimum_m - x))[:, None].astype(np.float32)
        cohort = open_round(plan, state, oracle=KnownUpdates(update_md, population.weight_m))
        state, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
    return local_lr, least, 4 * (0.5 / rounds + 10 * local_lr**2)


class Measured(NamedTuple):
    """A method on a problem: means over seeds at the longest T, and slopes of ``least`` and
    ``mean`` over all T.
    """

    problem: str
    method: str
    horizon: int
    least: float
    mean: float
    claimed: float | None  # the order; None if the paper claims none
    slope_least: analysis.Interval | None
    slope_mean: analysis.Interval | None
    ratio: analysis.Interval | None  # ``mean`` relative to uniform sampling's


def _measured(horizons: Sequence[int], values: Values, problem: str, label: str) -> Measured:
    least_ts, mean_ts = values[problem, label]
    orders = CLAIMS.get(analysis.base_name(label), (None, None))
    ratio = None
    if label != BASELINE:
        ratio = _ratio(problem, label, BASELINE, values)
    return Measured(
        problem,
        label,
        horizons[-1],
        float(least_ts[-1].mean()),
        float(mean_ts[-1].mean()),
        orders[problem.endswith("from-optimum")],
        slope(least_ts, horizons),
        slope(mean_ts, horizons),
        ratio,
    )


def slope(value_ts: FloatArray, horizon_t: Sequence[int]) -> analysis.Interval | None:
    """The slope of values (t, s) as the module's text defines it; None where a value is 0 or all
    are alike.
    """
    if not (value_ts > 0).all() or value_ts.min() == value_ts.max():
        return None
    log_t = np.log(np.asarray(horizon_t, dtype=np.float64))
    centred_t = log_t - log_t.mean()
    weight_t = centred_t / (centred_t @ centred_t)
    mean_t = value_ts.mean(axis=1)
    value = float(weight_t @ np.log(mean_t))
    spread = analysis.mean_interval(weight_t @ (value_ts / mean_t[:, None]))
    if spread.high is None:
        return analysis.Interval(value, None, None)
    margin = spread.high - spread.mean
    return analysis.Interval(value, value - margin, value + margin)


def _ratio(problem: str, label: str, other: str, values: Values) -> analysis.Interval | None:
    """A method's mean gradient at the longest T relative to another's, over paired seeds; None
    if one was not run.
    """
    if (problem, label) not in values or (problem, other) not in values:
        return None
    return analysis.ratio_of_means(values[problem, label][1][-1], values[problem, other][1][-1])


def verdict(row: Measured) -> str:
    found = row.slope_mean
    claimed = row.claimed
    if claimed is None or found is None or found.low is None or found.high is None:
        return "-"
    if claimed == 0:
        if found.low > -0.5 + TOLERANCE:
            return "as claimed, slower than T^-1/2"
        return "not clearly different from T^-1/2"
    if found.low > claimed + TOLERANCE:
        return SLOWER
    if found.high < claimed - TOLERANCE:
        return "faster than claimed"
    if found.high - found.low > WIDEST:
        return "undecided"
    return "as claimed"


def show(settings: dict[str, Any], rows: Rows, folder: Path) -> OwnPage:
    """Slopes beside the claimed orders, the counter-example, and the decay as a picture."""
    values = values_of(settings, rows)
    found = [_measured(settings["horizons"], values, problem, label) for problem, label in values]
    rounds = settings["counter_rounds"]
    counter = {label: counter_example(label, rounds) for label in COUNTER_METHODS}
    _draw(settings, values, folder / "rates.png")
    tables = {}
    for problem in settings["problems"]:
        own = [row for row in found if row.problem == problem]
        tables[problem] = f"{_table(own)}\n\n{_duels(problem, values)}"
    heads = ["method", "T", "eta_L", "min_t norm(grad f(x_t))^2, measured", "printed bound"]
    lines = []
    for label, (lr, least, bound) in counter.items():
        broken = " (broken)" * (least > bound)
        lines.append([label, str(rounds), f"{lr:.2e}", f"{least:g}", f"{bound:.2e}{broken}"])
    texts = TEXTS["rates"]
    (problem, table), *others = tables.items()
    number, verdict, text = _sum_up(found, counter)
    blocks = [
        "![Decay of the gradient with T](rates.png)",
        texts["head"].format(**settings, tolerance=TOLERANCE),
        f"### {problem}\n\n{cut(table)}",
        *(folded(problem, table) for problem, table in others),
        text,
        texts["bounds"],
        folded(
            "The counter-example to theorem 2", f"{texts['counter']}\n\n{markdown(heads, lines)}"
        ),
    ]
    return OwnPage(number, verdict, blocks, [_csv_row(row) for row in found])


def values_of(settings: dict[str, Any], rows: Rows) -> Values:
    """The cells of each problem and method as arrays; a ``DeltaflError`` if one is missing."""
    wanted = pd.MultiIndex.from_product(_axes(settings))
    found = pd.DataFrame(rows).set_index(list(_KEYS))
    missing = wanted.difference(found.index)
    if len(missing):
        raise DeltaflError(f"{len(missing)} cells are missing; leave out --only-page")
    shape = wanted.levshape
    least_pmts, mean_pmts = (found.loc[wanted, x].to_numpy().reshape(shape) for x in _NUMBERS)
    return {
        (problem, method): np.array([least_pmts[p, m], mean_pmts[p, m]])
        for p, problem in enumerate(settings["problems"])
        for m, method in enumerate(settings["methods"])
    }


def _sum_up(
    found: Sequence[Measured], counter: Mapping[str, tuple[float, float, float]]
) -> tuple[str, str, str]:
    slow = [row for row in found if verdict(row) == SLOWER]
    held = [row for row in found if verdict(row).startswith(("as claimed", "faster"))]
    broken = [(least, bound) for _, least, bound in counter.values() if least > bound]
    text = number = f"{len(held)} of {len(found)} slopes are as claimed or steeper."
    if slow:
        slopes = [
            f"{row.method} on {row.problem} {_number(row.slope_mean)} ({row.claimed:g})"
            for row in slow
        ]
        text += f" Slower than claimed (in brackets): {'; '.join(slopes)}."
    if broken:
        text += (
            f" The counter-example keeps norm(grad f)^2 at {broken[0][0]:g}; theorem 2 claims "
            f"{broken[0][1]:.2g}."
        )
    word = "is not decided"
    if slow or broken:
        word = "holds in part and is contradicted in part"
        if not held:
            word = "is contradicted"
    elif len(held) == len(found):
        word = "holds"
    return number, word, text


def _number(found: analysis.Interval | None) -> str:
    if found is None:
        return "-"
    form = ".2f"
    if abs(found.mean) < 0.01:
        form = ".1e"
    return f"{found.mean:{form}}{ends(found.low, found.high, form)}"


def _table(rows: Sequence[Measured]) -> str:
    at = f"T = {rows[0].horizon}"
    heads = ["method", "slope of min over t", "slope of mean over t", "claimed", "verdict"]
    heads += [f"min, {at}", f"mean, {at}", f"mean relative to {BASELINE}"]
    lines = []
    for row in rows:
        least = f"{row.least:.2e}"
        if row.slope_least is None:
            least = "0 (x_0)"
        line = [
            row.method,
            _number(row.slope_least),
            _number(row.slope_mean),
            formatted(row.claimed, "g", "-"),
            verdict(row),
            least,
            f"{row.mean:.2e}",
            _number(row.ratio),
        ]
        lines.append(line)
    return markdown(heads, lines)


def _duels(problem: str, values: Values) -> str:
    """DELTA's mean gradient relative to that of importance sampling in the same form."""
    texts = []
    for delta, rival in (
        ("delta@multinomial", "fedis@multinomial"),
        ("delta", "fedis"),
        ("pracdelta", "fedpracis"),
    ):
        if ratio := _ratio(problem, delta, rival, values):
            texts.append(
                f"`{delta}` / `{rival}` {ratio.mean:.3f}{ends(ratio.low, ratio.high, '.3f')}"
            )
    return TEXTS["rates"]["duels"].format(found=", ".join(texts))


def _csv_row(row: Measured) -> dict[str, Any]:
    numbers: dict[str, Any] = row._asdict()
    for name in ("slope_least", "slope_mean", "ratio"):
        numbers |= interval_cells(name, numbers.pop(name) or (None, None, None))
    # As text: -1 stays -1.
    texts = {name: f"{it:.6g}" for name, it in numbers.items() if isinstance(it, float)}
    return numbers | texts | {"verdict": verdict(row)}


def _draw(settings: dict[str, Any], values: Values, path: Path) -> None:
    horizon_t = np.array(settings["horizons"], dtype=np.float64)
    looks = analysis.looks(settings["methods"])
    guide_look = analysis.Look(analysis.GREY, (0.0, (1.0, 1.5)), "", 1.0)
    panels = []
    for problem, (measure, name) in product(settings["problems"], enumerate(("least", "mean"))):
        lines = []
        top = 0.0
        for method in [method for method in settings["methods"] if method in _DRAWN]:
            value_ts = values[problem, method][measure]
            if value_ts.max() > 1e-12:  # else the run starts at the minimum
                band = analysis.band_of([(horizon_t, value_t) for value_t in value_ts.T])
                lines.append(analysis.Line(method, looks[method], band))
                top = max(top, float(value_ts[0].mean()))
        if lines:
            for order in (-0.5, -1.0):
                guide = analysis.band_of([(horizon_t, top * (horizon_t / horizon_t[0]) ** order)])
                lines.append(analysis.Line("slopes -1/2 and -1", guide_look, guide))
            caption = f"{problem}\nm = {settings['clients']}, n = {settings['sample']}"
            labels = "rounds T, a run each", f"{name} squared gradient norm"
            panels.append(analysis.Panel(caption, lines, *labels))
    analysis.draw_panels(panels, 2, analysis.CAPTION, path, log_y=True, log_x=True)
