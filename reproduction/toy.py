"""The toy (figures 3 and 5): three clients, two are selected, the ideal is (4, 0). Every cohort is
enumerated.

The gradients at (1, 1) are (2, 2), (4, 1) and (6, -3). Each score is combined with each of ``WAYS``
to draw and weigh. The difference estimators subtract c = (4, 0) and add it back: the best c there
is, which nobody knows before the draw.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl import (
    KnownUpdates,
    Plan,
    Population,
    RoundState,
    close_round,
    init_round,
    make_sampler,
)
from deltafl.analysis import DPI, GREY, INK, PALE, WIDTH, looks, small_png, styled
from deltafl.designs import every_cohort
from deltafl.server import ServerOptimizer, Step
from deltafl.store import write_atomically
from deltafl.types import FloatArray, Params

from .page import OwnPage
from .running import Rows
from .spec import TEXTS
from .text import folded, markdown

GRADIENTS = ((2.0, 2.0), (4.0, 1.0), (6.0, -3.0))
IDEAL = (4.0, 0.0)
SCORES = {"uniform": "uniform", "IS": "fedis", "DELTA": "delta"}
#: The pairs of the paper's picture.
GIVEN_TO = {(1, 2): "FedAvg", (2, 3): "FedIS", (1, 3): "DELTA"}
_COLOURS = {score: looks([name])[name].colour for score, name in SCORES.items()}


class Way(NamedTuple):
    """A way to draw and to weigh; the difference estimator subtracts the ideal as a control
    variate.
    """

    design: str
    estimator: str
    title: str


WAYS = {
    "hh": Way("multinomial", "horvitz-thompson", "HH, with replacement"),
    "ht": Way("systematic", "horvitz-thompson", "HT, exact pi = 2p"),
    "successive": Way("successive", "horvitz-thompson", "1/(n m p), successive draws"),
    "hajek": Way("successive", "hajek", "Hajek, successive"),
    "plain-mean": Way("successive", "plain-mean", "plain mean, successive"),
    "difference-hh": Way("multinomial", "difference", "difference from (4, 0), with replacement"),
    "difference-ht": Way("systematic", "difference", "difference from (4, 0), exact pi"),
}
#: The ways in the picture, a column each.
DRAWN = ("hh", "ht", "plain-mean", "difference-ht")


class Outcome(NamedTuple):
    """One possible aggregate: its clients from 1 with repetition, its probability, two numbers."""

    clients: tuple[int, ...]
    probability: float
    aggregate: tuple[float, float]


class Enumerated(NamedTuple):
    """E norm(aggregate - ideal)^2, norm(E aggregate - ideal), and all cohorts of positive
    probability.
    """

    mse: float
    bias: float
    outcomes: tuple[Outcome, ...]


def enumerate_toy(score: str, way: str) -> Enumerated:
    """All cohorts of two with their aggregates, through the sampler's own code and
    ``close_round``.
    """
    population = Population.from_sizes([1] * len(GRADIENTS))
    how = WAYS[way]
    gradient_md: Params = np.array(GRADIENTS, dtype=np.float32)
    sampler = make_sampler(f"{SCORES[score]}@{how.design}")
    plan = Plan(population, sampler, 2, how.estimator, (_Keeper(),))
    state = init_round(plan, np.zeros(2))
    if how.estimator == "difference":
        state = state._replace(control=type(state.control)(np.array(IDEAL)))
    oracle = KnownUpdates(gradient_md, population.weight_m)
    everyone = np.ones(len(GRADIENTS), dtype=np.bool_)
    found: dict[tuple[int, ...], Outcome] = {}
    for probability, cohort in every_cohort(
        lambda rng: sampler.open(state.sampler, everyone, 2, rng, oracle)
    ):
        clients = tuple(np.repeat(cohort.client_n + 1, cohort.count_n).tolist())
        x, y = _estimate(close_round(plan, state, cohort, gradient_md[cohort.client_n])[0])
        before = found[clients].probability if clients in found else 0.0
        found[clients] = Outcome(clients, before + probability, (float(x), float(y)))
    outcomes = tuple(outcome for _, outcome in sorted(found.items()) if outcome.probability > 0)
    probability_k = np.array([outcome.probability for outcome in outcomes])
    error_kd = np.array([outcome.aggregate for outcome in outcomes]) - np.array(IDEAL)
    mse = float(probability_k @ (error_kd**2).sum(axis=1))
    return Enumerated(mse, float(np.linalg.norm(probability_k @ error_kd)), outcomes)


class _Keeper(ServerOptimizer):
    """A server that moves nothing and keeps the estimate in float64."""

    def init(self, plan: Any, params_d: Params) -> FloatArray:
        return np.zeros(len(params_d))

    def move(self, own: FloatArray, step: Step) -> tuple[Params, FloatArray]:
        return step.params_d, step.delta_d


def _estimate(state: RoundState) -> FloatArray:
    kept: FloatArray = state.parts["server_optimizer"]
    return kept


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Nothing to keep: the enumeration takes seconds and belongs to the page."""
    return []


def show(settings: dict[str, Any], rows: Rows, folder: Path) -> OwnPage:
    found = {(score, way): enumerate_toy(score, way) for score in SCORES for way in WAYS}
    _draw(found, folder / "toy.png")
    biased = {key: f" ({row.bias:.3f})" if row.bias > 1e-6 else "" for key, row in found.items()}
    lines = [
        [score, *(f"{found[score, way].mse:.3f}{biased[score, way]}" for way in WAYS)]
        for score in SCORES
    ]
    number, verdict, text = _verdict(found)
    blocks = [
        "![Aggregates of two of three](toy.png)",
        TEXTS["toy"]["head"],
        markdown(["", *(way.title for way in WAYS.values())], lines),
        text,
        folded("The pairs of the paper's figure", f"{TEXTS['toy']['pairs']}\n\n{_pairs_table()}"),
    ]
    cells = [
        {"score": score, "way": way, "design": WAYS[way].design, "estimator": WAYS[way].estimator}
        | {
            "mse": f"{row.mse:.6g}",
            "bias": f"{row.bias if row.bias > 1e-9 else 0:.3g}",
        }  # below: rounding of this CPU
        for (score, way), row in found.items()
    ]
    return OwnPage(number, verdict, blocks, cells)


def _verdict(found: dict[tuple[str, str], Enumerated]) -> tuple[str, str, str]:
    """One number, the verdict, and what it is made of."""
    ways = [way for way in WAYS if WAYS[way].estimator != "difference"]  # that is not the paper's
    mses = {way: [found[score, way].mse for score in ("DELTA", "IS", "uniform")] for way in ways}
    held = [way for way in ways if mses[way][0] < mses[way][1] < mses[way][2]]
    against = [way for way in ways if mses[way][1] < mses[way][0]]

    def listed(chosen: Sequence[str]) -> str:
        texts = [
            f"{WAYS[way].title} ({' / '.join(f'{mse:.3f}' for mse in mses[way])})" for way in chosen
        ]
        return ", ".join(texts) or "none"

    number = f"Mean squared error of DELTA / IS / uniform: {listed((held or against)[:1])}."
    text = f"Mean squared error of DELTA / IS / uniform. The paper's order: {listed(held)}. "
    text += f"IS below DELTA: {listed(against)}."
    if held and against:
        return number, "holds in part and is contradicted in part", text
    if against:
        return number, "is contradicted", text
    return number, "holds" if len(held) == len(ways) else "holds in part", text


def hand_picked() -> dict[tuple[int, int], tuple[float, float]]:
    """The unweighted averages of the pairs of clients (from 1); the paper gives one pair to each
    method.
    """
    gradient_md = np.array(GRADIENTS)
    return {(i, j): tuple(gradient_md[[i - 1, j - 1]].mean(axis=0).tolist()) for i, j in GIVEN_TO}


def _pairs_table() -> str:
    lines = []
    for pair, mean_d in hand_picked().items():
        away = float(np.sum((np.array(mean_d) - np.array(IDEAL)) ** 2))
        lines.append(
            [
                f"{pair[0]}, {pair[1]}",
                GIVEN_TO[pair],
                f"({mean_d[0]:g}, {mean_d[1]:g})",
                f"{away:g}",
            ]
        )
    return markdown(["pair", "given to", "average", "squared distance to (4, 0)"], lines, left=2)


def _draw(found: dict[tuple[str, str], Enumerated], path: Path) -> None:
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(WIDTH, 6.0), dpi=DPI, facecolor="white", layout="constrained")
        grid = figure.subplots(len(SCORES), len(DRAWN), sharex=True, sharey=True)
        for line, score in zip(grid, SCORES, strict=True):
            for axes, way in zip(line, DRAWN, strict=True):
                _draw_outcomes(axes, found[score, way], _COLOURS[score])
                title = [f"MSE {found[score, way].mse:.3f}"]
                if score == "uniform":
                    title = [*WAYS[way].title.rsplit(", ", 1), *title]
                axes.set_title("\n".join(title))
            line[0].set_ylabel(f"{score}\nsecond coordinate")
        for axes in grid[-1]:
            axes.set_xlabel("first coordinate")
        figure.supxlabel(TEXTS["toy"]["picture"], fontsize=7)
        write_atomically(path, small_png(figure))


def _draw_outcomes(axes: Any, row: Enumerated, colour: str) -> None:
    probability_k = np.array([outcome.probability for outcome in row.outcomes])
    aggregate_kd = np.array([outcome.aggregate for outcome in row.outcomes])
    axes.set_xlim(-0.5, 10.5)
    axes.set_ylim(-5.5, 5.5)
    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.plot(*IDEAL, marker="+", markersize=9, color=INK, zorder=5)
    x_k, y_k = aggregate_kd.T
    axes.scatter(x_k, y_k, s=220 * probability_k, color=colour, alpha=0.75, linewidths=0, zorder=3)
    for outcome in row.outcomes:
        name = "".join(str(client) for client in outcome.clients)
        away = np.array(outcome.aggregate) - np.array(
            IDEAL
        )  # out of the middle, where the points are close
        away = away / np.linalg.norm(away) if np.linalg.norm(away) > 0.05 else np.array([0.0, -1.0])
        x, y = (6.0 + np.sqrt(70 * outcome.probability)) * away
        how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": GREY}
        axes.annotate(name, outcome.aggregate, xytext=(x, y), textcoords="offset points", **how)
    axes.plot(
        *(probability_k @ aggregate_kd),
        marker="D",
        markersize=4.5,
        color=INK,
        fillstyle="none",
        zorder=4,
    )
