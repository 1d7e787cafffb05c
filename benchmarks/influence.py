r"""What clients that lie can gain: the worst lie that a search finds, with and without clipping.

    python benchmarks/influence.py --task digits --out results/hostile
    python benchmarks/influence.py --task fashion-mnist --out results/hostile/fashion-mnist \
        --known results/hostile/runs.jsonl

100 clients with few labels each, 10 asked a round; one of them lies, or ten that agree. For each
method and with ``clip="median"`` or without, lies are tried on seeds of their own: the named ones
below, then random ones. The lie that costs the most accuracy, and the one by which the liars are
asked most often, are then played on the test seeds, beside the run in which nobody lies. Writes
``runs.jsonl``, to which an interrupted search goes on, and ``README.md``. ``--known`` shortens a
search whose runs are long: only the lies are tried, on one seed, that cost most in another search.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltafl import Plan, Population, close_round, init_round, make_plan, open_round
from deltafl.analysis import mean_interval
from deltafl.samplers.census import output_layer
from deltafl.simulation import RunSettings, environment, make_settings
from deltafl.simulation.census import take_census
from deltafl.simulation.engine import Engine
from deltafl.simulation.setup import engine_of
from deltafl.types import Cohort, Reports

Rows = npt.NDArray[Any]
CLIENTS = 100
ASKED = 10
#: The seeds of the search and those of the page.
SEARCH_SEEDS = (100, 101)
TEST_SEEDS = (0, 1, 2, 3, 4)
#: Lies that are tried of another search.
KNOWN_LIES = 3
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 100},
    "fashion-mnist": {
        "rounds": 60,
        "partition": "hsu2019",
        "alpha": 0.1,
        "local_epochs": 1,
        "local_lr": 0.2,
        "clients": CLIENTS,
        "sample": ASKED,
        "batch_size": 32,
        "test_examples": 5000,
    },
}
#: By task, and what each shows: the model, scores, ranks, labels, the correction, momentum, census.
METHODS = {
    "digits": (
        "uniform",
        "pracdelta",
        "innovation@local-pivotal",
        "oort",
        "balanced",
        "fedvarp+scaffold",
        "uniform+mime=0.7",
        "census+average=0.5",
        "census+average=0.5+scaffold",
    ),
    "fashion-mnist": ("uniform", "innovation@local-pivotal", "census+average=0.5+mime=0.7"),
}


class Lie(NamedTuple):
    """What liars send: ``own`` times their honest update, ``back`` times the model's last moves
    and ``common`` times a direction that all of them share, then ``length`` times as long as their
    honest update.
    """

    own: float = 0.0
    back: float = 0.0
    common: float = 0.0
    length: float = 100.0
    turn: int = 0  # rounds after which the sign turns; 0 for never
    start: float = 0.0  # the share of the rounds before the first lie
    silent: bool = False  # until then, not honest
    loss: float = 1.0  # times the loss, and its square times squares
    size: float = 1.0  # times the number of examples
    norm: float = 1.0  # times the norm that a census is told
    label: float = 1.0  # times the auxiliary variables

    @property
    def text(self) -> str:
        """What differs from the defaults."""
        changed = [
            f"{name} {value:g}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        ]
        return ", ".join(changed)


NAMED = (
    Lie(own=-1),
    Lie(back=-1),
    Lie(common=1),
    Lie(own=-1, back=-0.5, common=1),
    Lie(own=0.5, common=1),
    Lie(own=-1, length=1),
    Lie(own=-1, start=0.6, silent=True),
    Lie(back=-1, start=0.85, silent=True),
    Lie(common=1, start=0.6),
    Lie(common=1, turn=1, loss=100),
    Lie(own=1, turn=1, loss=100),
    Lie(own=-1, size=50),
    Lie(own=-1, norm=1e50, label=100),
)


def random_lies(seed: int) -> Iterator[Lie]:
    """Lies without end, the same for all methods."""
    rng = np.random.default_rng(seed)
    while True:
        start = float(rng.choice([0, 0, 0, 0.5, 0.8, 0.95]))
        lie = Lie(
            own=float(rng.choice([-1, 0, 0.5, 1])),
            back=float(rng.choice([-1, -0.5, 0, 0.5])),
            common=float(rng.choice([0, 0.5, 1])),
            length=float(rng.choice([1, 1.5, 100])),
            turn=int(rng.choice([0, 0, 1, 5])),
            start=start,
            silent=bool(start > 0 and rng.random() < 0.5),
            loss=float(rng.choice([0.01, 1, 100])),
            size=float(rng.choice([1, 3, 50])),
            norm=float(rng.choice([0.01, 1, 1e6])),
            label=float(rng.choice([-1, 1, 100])),
        )
        if (lie.own, lie.back, lie.common) != (0, 0, 0):
            yield lie


HONEST = Lie(own=1, length=1)


class Cell(NamedTuple):
    """One line of the page."""

    method: str
    clip: bool
    liars: int


@cache
def engine_for(task: str, seed: int) -> Engine:
    """The task with one seed."""
    return engine_of(make_settings(RunSettings, {"task": task, "seed": seed, **TASKS[task]}))


class Federation:
    """One run of a cell with one lie."""

    def __init__(self, task: str, cell: Cell, lie: Lie, seed: int) -> None:
        self.engine = engine_for(task, seed)
        self.rounds: int = TASKS[task]["rounds"]
        self.lie = lie
        self.is_liar = np.zeros(CLIENTS, bool)
        self.is_liar[np.random.default_rng(seed).permutation(CLIENTS)[: cell.liars]] = True
        common_d = np.random.default_rng([seed, 7]).normal(size=self.engine.num_params)
        self.common_d = common_d / np.linalg.norm(common_d)
        self.moves_d = np.zeros(self.engine.num_params)
        self.plan = self._plan(cell, seed)

    def _plan(self, cell: Cell, seed: int) -> Plan:
        honest = self.engine.task.population("data")
        size_m = honest.num_examples_m * np.where(self.is_liar, self.lie.size, 1)
        aux_mq = honest.aux_mq
        if aux_mq is not None:
            aux_mq = aux_mq * np.where(self.is_liar, self.lie.label, 1)[:, None]
        # As a host does: with ``clip`` no size counts more than the median.
        ratio = 1.0 if cell.clip else None
        population = Population.from_sizes(size_m.astype(int), aux=aux_mq, max_ratio=ratio)
        plan = make_plan(
            cell.method, population, ASKED, seed=seed, clip="median" if cell.clip else None
        )
        if plan.census is None:
            return plan
        params_d = self.engine.initial_params()
        answer_mk = take_census(plan, self.engine, params_d)
        if self.lie.start == 0 and self.is_liar.any():
            liars = np.flatnonzero(self.is_liar)
            update_kd = self.engine.train(params_d, 0, liars).update_nd.astype(float)
            tensors = output_layer([*self.engine.parts.trained.values()])
            for liar, false_d in zip(liars, self.false(update_kd, 0), strict=True):
                answer_mk[liar] = plan.census.answer(false_d, tensors, plan.seed)
                answer_mk[liar, plan.census.size] *= self.lie.norm
        return plan.with_census(answer_mk)

    def false(self, update_kd: Rows, round: int) -> Rows:
        """What liars send in place of their updates."""
        lie = self.lie
        length_k1 = np.linalg.norm(update_kd, axis=1, keepdims=True)
        # The model's last moves are what every client has seen of the others' updates.
        back_d = self.moves_d
        if not back_d.any():
            back_d = update_kd.mean(axis=0)
        back_d = back_d / max(float(np.linalg.norm(back_d)), 1e-12)
        false_kd: Rows = lie.own * update_kd + length_k1 * (
            lie.back * back_d + lie.common * self.common_d
        )
        norm_k1 = np.linalg.norm(false_kd, axis=1, keepdims=True)
        false_kd *= lie.length * length_k1 / np.maximum(norm_k1, 1e-12)
        if lie.turn and round // lie.turn % 2:
            false_kd *= -1
        return false_kd

    def replies(self, cohort: Cohort, round: int, params_d: Rows, drifts: Any) -> tuple[Any, Any]:
        """The updates and reports of a cohort, in which liars lie."""
        training = self.engine.train(
            params_d, round, cohort.client_n, drifts, self.plan.sampler.uses_square_loss
        )
        update_nd = training.update_nd.astype(float)
        liar_n = self.is_liar[cohort.client_n]
        if round < self.lie.start * self.rounds:
            if self.lie.silent:
                return update_nd, training.reports._replace(responded_n=~liar_n)
            return update_nd, training.reports
        if liar_n.any():
            drift_nd = np.zeros_like(update_nd)
            if drifts is not None:
                drift_nd += drifts
            own_kd = update_nd[liar_n] - drift_nd[liar_n]
            update_nd[liar_n] = self.false(own_kd, round) + drift_nd[liar_n]
        return update_nd, self._false_reports(training.reports, liar_n)

    def _false_reports(self, reports: Reports, liar_n: Any) -> Reports:
        factor_n = np.where(liar_n, self.lie.loss, 1.0)
        return reports._replace(
            loss_n=reports.loss_n * factor_n,
            square_loss_n=reports.square_loss_n * factor_n**2,
            step_variance_n=reports.step_variance_n * factor_n**2,
        )

    def play(self) -> dict[str, float]:
        """Accuracy over the last five rounds, the model at the end, how often liars were asked."""
        plan = self.plan
        state = init_round(plan, self.engine.initial_params())
        asked_m = np.zeros(CLIENTS)
        accuracies = []
        while state.round < self.rounds:
            cohort = open_round(plan, state)
            asked_m[cohort.client_n] += 1
            drifts = plan.drifts(state, cohort.client_n)
            updates, reports = self.replies(cohort, state.round, state.params_d, drifts)
            before_d = state.params_d.astype(float)
            state, _ = close_round(plan, state, cohort, updates, reports)
            with np.errstate(over="ignore", invalid="ignore"):
                self.moves_d = 0.7 * self.moves_d + 0.3 * (state.params_d - before_d)
            if state.round > self.rounds - 5:
                accuracies.append(self.engine.evaluate(plan.model(state)).accuracy)
        self.model_d = plan.model(state).astype(float)
        equal = self.rounds * ASKED / CLIENTS
        asked = 1.0
        if self.is_liar.any():
            asked = float(asked_m[self.is_liar].mean() / equal)
        return {"accuracy": float(np.mean(accuracies)), "asked": asked}


def costliest(runs: Path, cell: Cell, count: int) -> list[Lie]:
    """The lies that cost most, over all methods of another search, as many liars as in a cell."""
    accuracies: dict[Lie, list[float]] = {}
    for run in map(json.loads, runs.read_text().splitlines()):
        _, clip, liars = run["cell"]
        if (clip, liars) == (cell.clip, cell.liars) and run["seed"] in SEARCH_SEEDS:
            accuracies.setdefault(Lie(*run["lie"]), []).append(run["accuracy"])
    # A lie that was tried once, in a trial of its own, has no mean over the methods.
    most = max(map(len, accuracies.values()))
    full = [lie for lie, found in accuracies.items() if len(found) == most]
    return sorted(full, key=lambda lie: np.mean(accuracies[lie]))[:count]


class Search:
    """All runs of a task, in a file that is added to."""

    def __init__(self, task: str, out: Path, seeds: tuple[int, ...]) -> None:
        self.task = task
        self.seeds = seeds
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "runs.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {self._key(line): line for line in map(json.loads, lines)}
        self.honest: dict[tuple[str, int], Rows] = {}

    @staticmethod
    def _key(run: dict[str, Any]) -> tuple[Any, ...]:
        return (*run["cell"], *run["lie"], run["seed"])

    def _honest_model(self, method: str, seed: int) -> Rows:
        if (method, seed) not in self.honest:
            federation = Federation(self.task, Cell(method, False, 0), HONEST, seed)
            federation.play()
            self.honest[method, seed] = federation.model_d
        return self.honest[method, seed]

    def run(self, cell: Cell, lie: Lie, seed: int) -> dict[str, Any]:
        """One run, played unless it is known."""
        key = (*cell, *lie, seed)
        if key not in self.known:
            federation = Federation(self.task, cell, lie, seed)
            found = federation.play()
            if cell == Cell(cell.method, False, 0):
                self.honest[cell.method, seed] = federation.model_d
            if seed in TEST_SEEDS:
                honest_d = self._honest_model(cell.method, seed)
                begun_d = federation.engine.initial_params()
                found["distance"] = float(
                    np.linalg.norm(federation.model_d - honest_d)
                    / np.linalg.norm(honest_d - begun_d)
                )
            self.known[key] = {"cell": cell, "lie": lie, "seed": seed, **found}
            with self.path.open("a") as file:
                file.write(json.dumps(self.known[key]) + "\n")
        known: dict[str, Any] = self.known[key]
        return known

    def mean(self, key: str, cell: Cell, lie: Lie, seeds: tuple[int, ...]) -> float:
        """The mean of a number of some runs."""
        return float(np.mean([self.run(cell, lie, seed)[key] for seed in seeds]))

    def worst(self, cell: Cell, lies: list[Lie]) -> tuple[Lie, Lie]:
        """The lie that costs most accuracy, and the one by which liars are asked most."""
        scored = [
            (
                self.mean("accuracy", cell, lie, self.seeds),
                -self.mean("asked", cell, lie, self.seeds),
                lie,
            )
            for lie in lies
        ]
        # Where no lie is asked more often than another, the costly one is played already.
        return min(scored)[-1], min(scored, key=lambda found: found[1::-1])[-1]


def row(search: Search, cell: Cell, lies: list[Lie]) -> list[str]:
    """A line of the table."""
    honest = Cell(cell.method, False, 0)
    costly, asking = search.worst(cell, lies)
    lost = mean_interval(
        100
        * np.array(
            [
                search.run(honest, HONEST, seed)["accuracy"]
                - search.run(cell, costly, seed)["accuracy"]
                for seed in TEST_SEEDS
            ]
        )
    )
    return [
        f"`{cell.method}`",
        "`clip`" if cell.clip else "-",
        str(cell.liars),
        f"{lost.mean:.1f} [{lost.low:.1f}, {lost.high:.1f}]",
        f"{search.mean('distance', cell, costly, TEST_SEEDS):.2f}",
        f"{search.mean('asked', cell, asking, TEST_SEEDS):.2f}",
        costly.text,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), default="digits")
    parser.add_argument("--out", type=Path, default=Path("results/hostile"))
    parser.add_argument("--random", type=int, default=12, help="random lies beside the named ones")
    parser.add_argument("--clip-only", action="store_true", help="ten liars and clipping alone")
    parser.add_argument("--known", type=Path, help="only the worst lies of another runs.jsonl")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    search = Search(options.task, options.out, SEARCH_SEEDS[:1] if options.known else SEARCH_SEEDS)
    more = random_lies(0)
    lies = [*NAMED, *(next(more) for _ in range(options.random))]
    methods = METHODS[options.task]
    kinds = [(True, 0), (True, 10), (True, 1), (False, 10), (False, 1)]
    if options.clip_only:
        kinds = kinds[:2]
    # What is asked most is played first, and the page is written after each line: it may be long.
    rows: dict[Cell, list[str]] = {}
    for clip, liars in kinds:
        for method in methods:
            cell = Cell(method, clip, liars)
            tried = [HONEST]
            if liars and options.known:
                tried = costliest(options.known, cell, KNOWN_LIES if clip else 1)
            elif liars:
                # Without clipping any long update will do.
                tried = lies if clip else lies[: len(NAMED)]
            rows[cell] = row(search, cell, tried)
            print(*rows[cell], sep=" | ", flush=True)
            write_page(options, rows, len(kinds) * len(methods) - len(rows))


def write_page(options: argparse.Namespace, rows: dict[Cell, list[str]], left: int) -> None:
    """The lines so far, by method."""
    methods = METHODS[options.task]
    order = sorted(rows, key=lambda cell: (methods.index(cell.method), cell.clip, cell.liars))
    heads = ["method", "clip", "liars", "points lost [95 %]", "distance", "asked", "the lie"]
    lines = [heads, ["---"] * len(heads), *(rows[cell] for cell in order)]
    table = [f"| {' | '.join(line)} |" for line in lines]
    title = "digits" if options.task == "digits" else "FashionMNIST"
    command = f"python benchmarks/influence.py --task {options.task} --out {options.out}"
    tried = f"""\
For each line {len(NAMED)} named lies and, with `clip`, {options.random} random ones were tried on \
seeds {SEARCH_SEEDS}; the worst were then played on {len(TEST_SEEDS)} others."""
    if options.known:
        command += f" --known {options.known}"
        tried = f"""\
For each line with `clip` the {KNOWN_LIES} lies that cost most on digits (`{options.known}`, mean \
over its methods), without it the one, were tried on seed {SEARCH_SEEDS[0]}; the worst were then \
played on {len(TEST_SEEDS)} others. A search of its own could find worse."""
    if left:
        tried += f" {left} lines are still to be played; the same command goes on."
    text = f"""# What clients that lie can gain: {title}

`{command}`

{CLIENTS} clients with few labels each, {ASKED} asked in each of {TASKS[options.task]["rounds"]} \
rounds. {tried}

- **Points lost**: of accuracy, to the same method without `clip` in which nobody lies, by seed.
- **Distance** of the two models, over the honest one's way.
- **Asked**: times as often as by equal chances, with the lie that is best at that; \
{CLIENTS // ASKED} is always.

`clip` is `clip="median"`, by which sizes count at most their median, too.

{chr(10).join(table)}

Hardware and versions: `{json.dumps(environment())}`
"""
    (options.out / "README.md").write_text(text)


if __name__ == "__main__":
    main()
