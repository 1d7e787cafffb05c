"""Rates of convergence (table 1): how norm(grad f(x_t))^2 falls with the number of rounds T that was planned for.

The paper's learning rates depend on T, eta_L = 1 / (sqrt(T) K L) and eta = sqrt(K n), so every T is a run of its own:
a *cell* is (problem, method, seed, T). Of each run two numbers are kept, by exact gradients of f at x_0 ... x_{T-1}:

- ``least``  min_t norm(grad f(x_t))^2; its mean over seeds is at most the paper's min_t E norm(grad f(x_t))^2,
- ``mean``   (1/T) sum_t norm(grad f(x_t))^2; its mean over seeds is at least that, and what the paper's proofs bound.

Rounds go through ``open_round`` and ``close_round``. Cells are kept in ``runs/PROBLEM/METHOD.jsonl`` as they finish;
what is there is not run again. ``report.py`` reads them.
"""

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafl import KnownUpdates
from deltafl.errors import DeltaflError, unknown_name
from deltafl.io import checked, plain_json, read_json, read_text, write_atomically
from deltafl.plans import make_plan
from deltafl.round import Plan, close_round, init_round, open_round
from deltafl.samplers import make_sampler, parse_label
from deltafl.server.optimizers import Sgd
from deltafl.types import Population, Reports

from ..environments import place_here
from .problems import PROBLEMS, Problem, local_work, make_problem

Count = Annotated[int, Field(ge=1)]
#: Settings that choose cells; the others define what a cell is.
CHOOSING = {"problems", "methods", "horizons", "seeds"}


class RatesSettings(BaseModel):
    """What is measured; the field ``description`` says what each is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problems: tuple[str, ...] = Field(("quadratics",), min_length=1, description="names in problems.PROBLEMS")
    methods: tuple[str, ...] = Field(("uniform",), min_length=1, description="labels, as fedis@multinomial")
    horizons: tuple[Count, ...] = Field((100, 400), min_length=2, description="numbers of rounds T, increasing")
    seeds: Count = Field(2, description="runs of every cell; they differ in draws and gradient noise")
    clients: Count = Field(20, description="m")
    sample: Count = Field(5, description="n")
    local_steps: Count = Field(4, description="K")
    dimension: Count = Field(10, description="number of variables d")
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="standard deviation of a gradient of the quadratics, root mean square over clients"
    )
    counter_rounds: Count = Field(1000, description="rounds of the counter-example to theorem 2")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name in self.problems:
            if name not in PROBLEMS:
                raise unknown_name("problem", name, PROBLEMS)
        for label in self.methods:
            parse_label(label)
        if list(self.horizons) != sorted(set(self.horizons)):
            raise ValueError(f"horizons are {self.horizons}; write increasing numbers of rounds")
        if self.sample > self.clients:
            raise ValueError(f"sample is {self.sample}; it must be at most the {self.clients} clients")
        least = self.local_steps * self.sample
        if self.horizons[0] < least:
            raise ValueError(
                f"the shortest horizon is {self.horizons[0]}; the paper's condition eta eta_L <= 1 / (K L) needs "
                f"T >= K n = {least}"
            )
        return self


class Cell(NamedTuple):
    """One finished run; see the module's text. ``environment``: its machine's place, see ``environments.py``."""

    horizon: int
    seed: int
    least: float
    mean: float
    environment: int = 0


class RatesResult(NamedTuple):
    """How many cells there are now, and how many of them this call ran."""

    cells: int
    computed: int


def run_rates(settings: RatesSettings, folder: Path, on_step: Callable[[int, int], None]) -> RatesResult:
    """Run every cell that is not there yet, and the counter-example.

    Args:
        settings: What is measured.
        folder: Where the records are, and go.
        on_step: Called with (rounds done, rounds in all), those of finished cells included.

    Raises:
        DeltaflError: If the folder holds cells of other settings.
    """
    _claim_folder(settings, folder)
    todo = [(problem, label) for problem in settings.problems for label in settings.methods]
    wanted = [(horizon, seed) for horizon in settings.horizons for seed in range(settings.seeds)]
    total, done, computed = len(todo) * settings.seeds * sum(settings.horizons), 0, 0
    for name, label in todo:
        problem = make_problem(name, settings.clients, settings.dimension, settings.noise)
        path = cells_path(folder, name, label)
        cells = read_cells(path)
        for horizon, seed in wanted:
            if (horizon, seed) not in cells:
                here = place_here(folder)
                cells[horizon, seed] = run_cell(settings, problem, label, seed, horizon)._replace(environment=here)
                _write_cells(path, cells)
                computed += 1
            done += horizon
            on_step(done, total)
    counter = [counter_example(label, settings.counter_rounds) for label in COUNTER_METHODS]
    write_atomically(folder / "counter-example.json", json.dumps([row._asdict() for row in counter], indent=1) + "\n")
    return RatesResult(len(todo) * len(wanted), computed)


def run_cell(settings: RatesSettings, problem: Problem, label: str, seed: int, horizon: int) -> Cell:
    """One run of T rounds with the paper's learning rates for that T.

    Args:
        settings: For m, n and K.
        problem: What is minimised.
        label: The method.
        seed: Of the draws and of the gradient noise.
        horizon: T.
    """
    steps, n = settings.local_steps, settings.sample
    local_lr = 1 / (sqrt(horizon) * steps * problem.smoothness)
    population = Population.from_sizes([1] * problem.num_clients)
    plan = make_plan(label, population, n, server_optimizer=Sgd(sqrt(steps * n)), seed=seed)
    state = init_round(plan, problem.start_d)
    square_t = np.empty(horizon)
    for t in range(horizon):
        x_d = state.params_d.astype(np.float64)
        gradient_d = problem.gradients(np.tile(x_d, (problem.num_clients, 1))).mean(axis=0)
        square_t[t] = gradient_d @ gradient_d
        work = local_work(problem, x_d, local_lr, problem.randomness(seed, t, steps))
        steps_m = np.full(problem.num_clients, steps)
        oracle = KnownUpdates(
            work.update_md, population.weight_m, work.step_variance_m, problem.losses(x_d), num_steps_m=steps_m
        )
        cohort = open_round(plan, state, oracle=oracle)
        here = cohort.client_n
        reports = Reports.make(len(here), step_variance=work.step_variance_m[here], num_steps=steps_m[here])
        state, _ = close_round(plan, state, cohort, work.update_md[here], reports)
    return Cell(horizon, seed, float(square_t.min()), float(square_t.mean()))


#: The counter-example is run with the paper's draws and weights, and with an exact design.
COUNTER_METHODS = ("delta@multinomial", "delta", "uniform")


class CounterExample(NamedTuple):
    """Theorem 2 as printed, on two clients.

    Attributes:
        method: The label.
        rounds: T.
        local_lr: eta_L; eta = 1 / eta_L.
        least: min_t norm(grad f(x_t))^2, measured.
        bound: The printed right-hand side with c = 1/4.
    """

    method: str
    rounds: int
    local_lr: float
    least: float
    bound: float


def counter_example(label: str, rounds: int, seed: int = 0) -> CounterExample:
    """F_i = (x -+ 1)^2 / 2, n = 1, K = 1, no noise, from x = 1, eta eta_L = 1: grad f(x) = x is 1 or -1 for ever.

    All conditions of the printed theorem 2 hold: L = 1, eta eta_L <= 1 / (K L), eta_L below 1 / (4 sqrt(10)), and
    assumption 3 with A = 1, sigma_G^2 = 2. The bound is (f(x_0) - f*) / (c eta eta_L K T) + Phi~ / c with
    f(x_0) - f* = 1/2, Phi~ = 10 eta_L^2, and c = 1/4, which its proof allows: 1/2 - 20 eta_L^2 (A^2 + 1) > c.

    Args:
        label: A method. DELTA and uniform draw either client with probability 1/2; importance sampling does not.
        rounds: T.
        seed: Of the draws.
    """
    population, optimum_m, local_lr = Population.from_sizes([1, 1]), np.array([1.0, -1.0]), 2.0**-10
    plan = Plan(population, make_sampler(label), 1, "horvitz-thompson", Sgd(1 / local_lr), seed)
    state, least = init_round(plan, [1.0]), np.inf
    for _ in range(rounds):
        x = float(state.params_d[0])
        least = min(least, x * x)
        update_md = (local_lr * (optimum_m - x))[:, None].astype(np.float32)
        oracle = KnownUpdates(update_md, population.weight_m)
        cohort = open_round(plan, state, oracle=oracle)
        state, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
    return CounterExample(label, rounds, local_lr, least, bound=4 * (0.5 / rounds + 10 * local_lr**2))


def cells_path(folder: Path, problem: str, label: str) -> Path:
    """Where the cells of a problem and a method are."""
    return folder / "runs" / problem / f"{label}.jsonl"


def read_cells(path: Path) -> dict[tuple[int, int], Cell]:
    """The finished cells by (T, seed); none if there is no file.

    Raises:
        DeltaflError: If a line is not a cell.
    """
    if not path.exists():
        return {}
    cells = []
    for line in read_text(path).splitlines():
        try:
            cells.append(Cell(**json.loads(line)))
        except (TypeError, ValueError, RecursionError) as error:
            raise DeltaflError(f"{path} has a line that is no cell: {line[:80]!r}; delete the file") from error
    return {(cell.horizon, cell.seed): cell for cell in cells}


def _write_cells(path: Path, cells: dict[tuple[int, int], Cell]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(plain_json(cells[key]._asdict())) + "\n" for key in sorted(cells)))


def require_same_cells(settings: RatesSettings, folder: Path) -> None:
    """Refuse a folder where a cell is something else.

    Raises:
        DeltaflError: If the folder holds cells of other settings.
    """
    path, ours = _claim(folder), _what_is_a_cell(settings)
    if path.exists():
        theirs = checked(dict[str, Any], read_json(path), str(path), "choose another folder")
        changed = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
        if changed:
            raise DeltaflError(f"{folder} holds cells with another {', '.join(changed)}; choose another folder")


def _claim_folder(settings: RatesSettings, folder: Path) -> None:
    """Write down what a cell is, or refuse a folder where it is something else."""
    require_same_cells(settings, folder)
    path = _claim(folder)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_what_is_a_cell(settings), indent=1) + "\n")


def _claim(folder: Path) -> Path:
    return folder / "runs" / "cells.json"


def _what_is_a_cell(settings: RatesSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=CHOOSING | {"counter_rounds"})
