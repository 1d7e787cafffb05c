"""The toy (figures 3 and 5): three clients, two are asked, the ideal is (4, 0). Every cohort is enumerated, none drawn.

The gradients at (1, 1) are (2, 2), (4, 1) and (6, -3). Each score is combined with each way to draw and to weigh:

=============== ============================================================================================
hh              n draws with replacement, weights w / (n p)                       (Hansen and Hurwitz)
ht              exact inclusion probabilities pi = 2 p, weights w / pi            (Horvitz and Thompson)
successive      one after the other without replacement, weights 1 / (n m p), as if pi were n p; biased
hajek           the same draws, the weights divided by their sum; biased
plain-mean      the same draws, the average of the replies; biased
difference-hh   as hh, on u_i - c with c = (4, 0) put back: the best c there is, which nobody knows before the draw
difference-ht   as ht, likewise
=============== ============================================================================================
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...controls import CommonControlState
from ...errors import DeltaflError, require
from ...exact import every_cohort
from ...oracle import KnownUpdates
from ...plain_files import write_atomically
from ...round import Plan, RoundState, close_round, init_round
from ...samplers import make_sampler
from ...types import Cohort, FloatArray, Params, Population

#: Everything below is enumerated; the scale of an experiment changes nothing.
GRADIENTS = ((2.0, 2.0), (4.0, 1.0), (6.0, -3.0))
IDEAL = (4.0, 0.0)
SCORES = {"uniform": "uniform", "IS": "fedis", "DELTA": "delta"}


class Way(NamedTuple):
    """A way to draw and to weigh: design, estimator, whether it subtracts the ideal as a control."""

    design: str
    estimator: str
    centred: bool
    title: str


WAYS = {
    "hh": Way("multinomial", "horvitz-thompson", False, "HH, with replacement"),
    "ht": Way("systematic", "horvitz-thompson", False, "HT, exact pi = 2p"),
    "successive": Way("successive", "horvitz-thompson", False, "1/(n m p), successive draws"),
    "hajek": Way("successive", "hajek", False, "Hajek, successive"),
    "plain-mean": Way("successive", "plain-mean", False, "plain mean, successive"),
    "difference-hh": Way("multinomial", "difference", True, "difference from (4, 0), with replacement"),
    "difference-ht": Way("systematic", "difference", True, "difference from (4, 0), exact pi"),
}


class Outcome(NamedTuple):
    """One possible aggregate.

    Attributes:
        clients: Who was drawn, from 1, with repetition.
        probability: Of this cohort.
        aggregate: The estimate of the ideal, two numbers.
    """

    clients: tuple[int, ...]
    probability: float
    aggregate: tuple[float, float]


class Enumerated(NamedTuple):
    """A score with a way to draw and to weigh.

    Attributes:
        score: A key of ``SCORES``.
        way: A key of ``WAYS``.
        mse: E norm(aggregate - ideal)^2.
        bias: norm(E aggregate - ideal).
        outcomes: All cohorts of positive probability.
    """

    score: str
    way: str
    mse: float
    bias: float
    outcomes: tuple[Outcome, ...]


def enumerate_toy(score: str, way: str) -> Enumerated:
    """All cohorts of two with their aggregates, through the sampler's own code and ``close_round``.

    Args:
        score: A key of ``SCORES``.
        way: A key of ``WAYS``.
    """
    population = Population.from_sizes([1] * len(GRADIENTS))
    gradient_md: Params = np.array(GRADIENTS, dtype=np.float32)
    how = WAYS[way]
    sampler = make_sampler(f"{SCORES[score]}@{how.design}")
    plan = Plan(population, sampler, 2, how.estimator, _Keeper())
    state = init_round(plan, np.zeros(2))
    if how.centred:
        state = state._replace(control=CommonControlState(np.array(IDEAL)))
    oracle = KnownUpdates(gradient_md, population.weight_m)
    everyone = np.ones(len(GRADIENTS), dtype=np.bool_)
    found: dict[tuple[int, ...], tuple[float, FloatArray]] = {}
    for probability, cohort in every_cohort(lambda rng: sampler.open(state.sampler, everyone, 2, rng, oracle)):
        clients = tuple(np.repeat(cohort.client_n + 1, cohort.count_n).tolist())
        before = found[clients][0] if clients in found else 0.0
        found[clients] = (before + probability, _aggregate(plan, state, cohort, gradient_md))
    outcomes = [Outcome(key, p, (float(x), float(y))) for key, (p, (x, y)) in sorted(found.items()) if p > 0]
    probability_k = np.array([outcome.probability for outcome in outcomes])
    error_kd = np.array([outcome.aggregate for outcome in outcomes]) - np.array(IDEAL)
    mse = float(probability_k @ (error_kd**2).sum(axis=1))
    return Enumerated(score, way, mse, float(np.linalg.norm(probability_k @ error_kd)), tuple(outcomes))


class _Kept(NamedTuple):
    delta_d: FloatArray


class _Keeper:
    """A server that moves nothing and keeps the estimate in float64."""

    def init(self, num_params: int) -> _Kept:
        return _Kept(np.zeros(num_params))

    def step(self, params_d: Params, delta_d: FloatArray, state: _Kept) -> tuple[Params, _Kept]:
        return params_d, _Kept(delta_d)


def _aggregate(plan: Plan, state: RoundState, cohort: Cohort, gradient_md: Params) -> FloatArray:
    kept: _Kept = close_round(plan, state, cohort, gradient_md[cohort.client_n])[0].optimizer
    return kept.delta_d


def hand_picked() -> dict[tuple[int, int], tuple[float, float]]:
    """The unweighted averages of the pairs of clients (from 1); the paper gives one pair to each method."""
    gradient_md = np.array(GRADIENTS)
    pairs = ((0, 1), (1, 2), (0, 2))
    return {(i + 1, j + 1): tuple(gradient_md[[i, j]].mean(axis=0).tolist()) for i, j in pairs}


def run_toy(folder: Path, on_step: Callable[[int, int], None]) -> None:
    """Enumerate every score with every way and write ``cohorts.json``.

    Args:
        folder: Where it goes.
        on_step: Called with (combinations done, all of them).
    """
    rows = []
    for score in SCORES:
        for way in WAYS:
            row = enumerate_toy(score, way)
            rows.append({**row._asdict(), "outcomes": [outcome._asdict() for outcome in row.outcomes]})
            on_step(len(rows), len(SCORES) * len(WAYS))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "cohorts.json", json.dumps(rows, indent=1) + "\n")


def report_toy(folder: Path) -> str:
    """Read ``cohorts.json``, write ``table.csv`` and ``toy.png``, and return the page in Markdown.

    Raises:
        DeltaflError: If the toy was not run.
        MissingExtraError: Without Matplotlib.
    """
    require("matplotlib", "plot")
    from .plot import draw_toy

    rows = _read(folder / "cohorts.json")
    write_atomically(folder / "table.csv", _csv(rows))
    draw_toy(list(rows.values()), folder / "toy.png")
    return (
        "\n\n".join([_table_text(rows), _reading_text(rows), "![Aggregates of two of three](toy.png)", _pairs_text()])
        + "\n"
    )


def summarise_toy(folder: Path) -> tuple[str, str]:
    """What was found, in a line, and the verdict on the paper's ordering: DELTA below IS below uniform.

    Raises:
        DeltaflError: If the toy was not run.
    """
    rows = _read(folder / "cohorts.json")
    claimed = ("DELTA", "IS", "uniform")
    ways = [way for way in WAYS if not WAYS[way].centred]  # the centred ones are not the paper's
    held = [way for way in ways if rows[claimed[0], way].mse < rows[claimed[1], way].mse < rows[claimed[2], way].mse]
    against = [way for way in ways if rows[claimed[1], way].mse < rows[claimed[0], way].mse]

    def told(chosen: list[str]) -> str:
        return ", ".join(
            f"{WAYS[way].title} ({' / '.join(f'{rows[s, way].mse:.3f}' for s in claimed)})" for way in chosen
        )

    text = f"mean squared error of DELTA / IS / uniform: the paper's order under {told(held) or 'none'}"
    text += f"; IS below DELTA under {told(against) or 'none'}"
    if held and against:
        return text, "holds in part and is contradicted in part"
    return text, "is contradicted" if against else "holds" if len(held) == len(ways) else "holds in part"


Rows = dict[tuple[str, str], Enumerated]


def _read(path: Path) -> Rows:
    if not path.exists():
        raise DeltaflError(f"there is no {path.name}; run the experiment first")
    rows: Rows = {}
    for row in json.loads(path.read_text()):
        outcomes = tuple(
            Outcome(tuple(o["clients"]), o["probability"], (o["aggregate"][0], o["aggregate"][1]))
            for o in row["outcomes"]
        )
        rows[row["score"], row["way"]] = Enumerated(row["score"], row["way"], row["mse"], row["bias"], outcomes)
    return rows


def _table_text(rows: Rows) -> str:
    lines = [
        "E norm(aggregate - (4, 0))^2 by enumeration of all cohorts; in brackets the bias, norm(E aggregate - (4, 0)), "
        "where it is not 0.",
        "",
        "| | " + " | ".join(way.title for way in WAYS.values()) + " |",
        "|---" * (len(WAYS) + 1) + "|",
    ]
    for score in SCORES:
        cells = [rows[score, way] for way in WAYS]
        marked = [f"{row.mse:.3f}" + (f" ({row.bias:.3f})" if row.bias > 1e-6 else "") for row in cells]
        lines.append(f"| {score} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def _reading_text(rows: Rows) -> str:
    lines = ["The least of each column:", ""]
    for way, how in WAYS.items():
        column = {score: rows[score, way].mse for score in SCORES}
        best, worst = min(column, key=column.__getitem__), max(column, key=column.__getitem__)
        even = max(column.values()) - min(column.values()) < 1e-9
        exact = all(rows[score, way].bias < 1e-6 for score in SCORES)
        kind = "unbiased" if exact else "biased"
        lines.append(f"- {how.title} ({kind}): " + ("all alike." if even else f"{best}; the greatest: {worst}."))
    return "\n".join(lines)


def _pairs_text() -> str:
    gave = {(1, 2): "FedAvg", (2, 3): "FedIS", (1, 3): "DELTA"}
    lines = [
        "The paper's figure takes one unweighted pair for each method, by hand; its methods draw all pairs, and weigh:",
        "",
        "| pair | given to | average | squared distance to (4, 0) |",
        "|---|---|---|---|",
    ]
    for pair, mean_d in hand_picked().items():
        away = float(np.sum((np.array(mean_d) - np.array(IDEAL)) ** 2))
        lines.append(f"| {pair[0]}, {pair[1]} | {gave[pair]} | ({mean_d[0]:g}, {mean_d[1]:g}) | {away:g} |")
    return "\n".join(lines)


def _csv(rows: Rows) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["score", "way", "design", "estimator", "mse", "bias"])
    for (score, way), row in rows.items():
        writer.writerow([score, way, WAYS[way].design, WAYS[way].estimator, f"{row.mse:.6g}", f"{row.bias:.3g}"])
    return buffer.getvalue()
