"""What was tried to close the gap on digits: results/ideas/closing.json, frontier.json and rates.json.

    python benchmarks/closing.py closing.json closing 6016 6032
    python benchmarks/closing.py frontier.json frontier 6016 6032
    python benchmarks/closing.py rates.json rates 6032 6048

Runs of the digits part of the benchmark by plans of the library, with local training in NumPy
(equal to the library's up to rounding, which accuracies amplify within a run).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltafl.estimators.control_variates import ControlValue, ControlVariate
from deltafl.estimators.two_bits import KEPT, decode
from deltafl.estimators.two_phase import TwoPhase
from deltafl.round import close_round, init_round, open_round
from deltafl.server.part import Step
from deltafl.simulation import RunSettings, make_settings
from deltafl.simulation.census import take_census
from deltafl.simulation.setup import engine_of, plan_of
from deltafl.streams import stream

DIGITS = {
    "task": "digits",
    "clients": 100,
    "sample": 10,
    "partition": "hsu2019",
    "alpha": 0.1,
    "local_epochs": 5,
    "batch_size": 5,
    "rounds": 60,
    "local_lr": 1.6,
}
OURS = "census+average=0.5+scaffold"
CEILING = "full@@difference-own+scaffold"


class Bench:
    """Data, census and local training of one seed."""

    def __init__(self, seed: int, sample: int = 10, lr: float = 1.6) -> None:
        self.lr = lr
        self.settings = {**DIGITS, "seed": seed, "sample": sample, "local_lr": lr}
        self.seed = seed
        self.engine = engine_of(self.resolved("uniform"))
        task = self.engine.task
        data = task.dataset

        def inputs(x: Any) -> Any:
            flat = x.reshape(len(x), -1) * task.input_scale
            return np.concatenate([flat, np.ones((len(x), 1))], 1).astype(np.float32)

        self.x, self.y = inputs(data.train_x), data.train_y
        self.test_x, self.test_y = inputs(data.test_x), data.test_y
        self.rows = [np.asarray(rows) for rows in task.client_rows]
        self.start = self.engine.initial_params()
        self.batch_cache: dict[Any, Any] = {}
        self.answers: Any = None

    def resolved(self, label: str) -> RunSettings:
        return make_settings(RunSettings, {**self.settings, "sampler": label}).resolve()

    def plan(self, label: str, control: ControlVariate | None = None) -> Any:
        task = self.engine.task
        plan = plan_of(self.resolved(label), task.population("data"), task)
        if control is not None:
            plan = replace(plan, estimator=control)
        if plan.census is None:
            return plan
        if self.answers is None:
            self.answers = take_census(plan, self.engine, self.start)
        return plan.with_census(self.answers)

    @staticmethod
    def matrix(params: Any) -> Any:
        params = np.asarray(params, np.float32)
        weights = params[..., :640].reshape(*params.shape[:-1], 10, 64)
        return np.concatenate([weights, params[..., 640:][..., None]], -1)

    @staticmethod
    def flat(matrix: Any) -> Any:
        weights = matrix[..., :-1].reshape(*matrix.shape[:-2], -1)
        return np.concatenate([weights, matrix[..., -1]], -1)

    def accuracy(self, params: Any) -> float:
        guess = (self.test_x @ self.matrix(params).T).argmax(1)
        return 100 * float(np.mean(guess == self.test_y))

    def batches(self, round: int, client: int) -> Any:
        key = (round, int(client))
        if key not in self.batch_cache:
            rng = stream(self.seed, "batches", *key)
            size = len(self.rows[client])
            orders = [rng.permutation(size) for _ in range(5)]
            self.batch_cache[key] = [o[i : i + 5] for o in orders for i in range(0, size, 5)]
        return self.batch_cache[key]

    def train(self, params: Any, round: int, client_n: Any, drift: Any = None) -> Any:
        """The updates of some clients, (n, d)."""
        batches = [self.batches(round, client) for client in client_n]
        steps_n = np.array([len(batch) for batch in batches])
        n, steps = len(client_n), steps_n.max()
        rows = np.zeros((n, steps, 5), int)
        share = np.zeros((n, steps, 5), np.float32)
        for i, batch in enumerate(batches):
            for k, places in enumerate(batch):
                rows[i, k, : len(places)] = self.rows[client_n[i]][places]
                share[i, k, : len(places)] = 1 / len(places)
        first = np.broadcast_to(self.matrix(params), (n, 10, 65))
        w = first.copy()
        push: Any = np.zeros_like(w)
        if drift is not None:
            push = self.matrix(drift) / steps_n[:, None, None].astype(np.float32)
        client, place = np.arange(n)[:, None], np.arange(5)[None]
        for k in range(steps):
            x, y = self.x[rows[:, k]], self.y[rows[:, k]]
            z = x @ w.transpose(0, 2, 1)
            z -= z.max(2, keepdims=True)
            np.exp(z, out=z)
            z /= z.sum(2, keepdims=True)
            z[client, place, y] -= 1
            z *= share[:, k][..., None]
            gradient = z.transpose(0, 2, 1) @ x
            w = w - (1.0 * self.lr * gradient - 1.0 * push) * (k < steps_n)[:, None, None]
        return self.flat(w - first)


class Given(NamedTuple):
    control_md: Any
    weight_m: Any


@dataclass(frozen=True)
class Outside(ControlVariate):
    """c_i are computed outside of the plan, before each draw."""

    uses_aux = uses_first_updates = True

    def init(self, population: Any, num_params: int) -> Given:
        return Given(np.zeros((population.num_clients, num_params)), population.weight_m)

    def value(self, state: Given, client_n: Any) -> ControlValue:
        client_n = np.asarray(client_n, int)
        return ControlValue(state.weight_m @ state.control_md, state.control_md[client_n])

    def update(self, state: Given, population: Any, replies: Any, update_nd: Any) -> Given:
        return state

    def resized(self, state: Given, moves: Any) -> Given:
        raise NotImplementedError


class Recommended:
    """c_i of ``two-phase``."""

    def start(self, bench: Bench, plan: Any) -> None:
        self.bench, self.population = bench, plan.population
        self.everyone = np.arange(len(bench.rows))
        self.two_phase = TwoPhase()
        self.state = self.two_phase.init(plan.population, len(bench.start))
        self.first: Any = self.two_phase.first_mean(self.state)

    def predict(self, params: Any, round: int) -> Any:
        return self.two_phase.value(self.state, self.everyone).control_nd

    def learn(self, replies: Any, update_nd: Any, round: int) -> None:
        self.state = self.two_phase.update(self.state, self.population, replies, update_nd)


class Kalman(Recommended):
    """c_i are the means of random walks a_i, given all replies.

    A step of the walks has the covariance V = shared K + own I + 0.1 over clients, K the products
    of their components from the census, mean diagonal 1; a reply is u_i = a_i + noise of variance
    ``noise``. The same covariance P holds in each coordinate, so that only ratios count. ``over``
    lengthens the corrections. With ``secant`` a_i moves by eta P_i (x_t - x_(t-1)), P_i the
    projection on the two main directions of a_i in the space of inputs, eta learned.
    """

    def __init__(self, own: float = 0.3, over: float = 1.0, secant: bool = False) -> None:
        self.own, self.over, self.secant = own, over, secant
        self.noise = 1.0

    def start(self, bench: Bench, plan: Any) -> None:
        super().start(bench, plan)
        aux_mq = plan.population.aux_mq
        kernel = aux_mq @ aux_mq.T
        kernel = kernel / np.mean(np.diag(kernel))
        m = len(kernel)
        self.step_mm = (1 - self.own) * kernel + self.own * np.eye(m) + 0.1
        self.spread_mm = 3 * ((1 - self.own) * kernel + 0.1) + 3 * self.own * np.eye(m)
        self.mean_md = (decode(plan.population.code_mc, len(bench.start)) / KEPT).astype(float)
        self.cross = self.square = 0.0
        self.params: Any = None

    def predict(self, params: Any, round: int) -> Any:
        if self.secant and self.params is None:
            self.moved_md = np.zeros_like(self.mean_md)
        elif self.secant:
            step_cf = self.bench.matrix(params - self.params).astype(float)
            own_mcf = self.bench.matrix(self.mean_md).astype(float)
            v_mkf = np.linalg.svd(own_mcf, full_matrices=False)[2][:, :2]
            seen = self.bench.flat((step_cf[None] @ v_mkf.transpose(0, 2, 1)) @ v_mkf)
            self.moved_md = self.moved_md + seen if round > 2 else seen
            self.mean_md = (
                self.mean_md + self.cross / self.square * seen if self.square else (self.mean_md)
            )
        self.params = params
        return self.mean_md

    def learn(self, replies: Any, update_nd: Any, round: int) -> None:
        who = replies.client_n
        error_nd = update_nd - self.mean_md[who]
        if self.secant:
            self.cross = 0.8 * self.cross + (error_nd * self.moved_md[who]).sum()
            self.square = 0.8 * self.square + (self.moved_md[who] ** 2).sum()
            self.moved_md[who] = 0
        seen_nn = self.spread_mm[np.ix_(who, who)] + self.noise * np.eye(len(who))
        gain_mn = np.linalg.solve(seen_nn, self.spread_mm[who]).T
        self.mean_md = self.mean_md + self.over * (gain_mn @ error_nd)
        spread_mm = self.spread_mm - gain_mn @ self.spread_mm[who]
        self.spread_mm = (spread_mm + spread_mm.T) / 2 + self.step_mm


def played(
    bench: Bench,
    label: str = OURS,
    known: Recommended | None = None,
    exact_mean: bool = False,
    exact_control: bool = False,
) -> list[float]:
    """The accuracy after each round. With an exact mean D is that of all clients' updates, with
    exact controls c_i is what client i would have sent in the last round.
    """
    plan = bench.plan(label, known and Outside())
    state = init_round(plan, bench.start)
    accuracies = [bench.accuracy(plan.model(state))] if state.round == 1 else []
    everyone = np.arange(len(bench.rows))
    weight_m = plan.population.weight_m
    last_md: Any = None
    if known is not None:
        known.start(bench, plan)
        state = plan.move(state, Step(0, state.params_d, known.first))
        accuracies.append(bench.accuracy(plan.model(state)))
    while state.round < DIGITS["rounds"]:
        round, params = state.round, state.params_d
        if known is not None:
            control_md = known.predict(params.astype(float), round)
            if exact_control and last_md is not None:
                control_md = last_md
            state = state._replace(control=Given(control_md, weight_m))
        cohort = open_round(plan, state)
        who = everyone if exact_mean or exact_control else cohort.client_n
        drift = plan.drifts(state, who)
        sent = bench.train(params, round, who, drift)
        if len(who) > len(cohort.client_n) and known is not None:
            last_md = sent.astype(float) - drift
            sent, drift = sent[cohort.client_n], drift[cohort.client_n]
        following, _ = close_round(plan, state, cohort, sent)
        if known is not None:
            known.learn(plan.collect_replies(state, cohort), sent - drift, round)
        if exact_mean:
            moved = plan.move(state, Step(round, params, weight_m @ last_md))
            following = following._replace(params_d=moved.params_d, parts=moved.parts)
        state = following
        accuracies.append(bench.accuracy(plan.model(state)))
    return accuracies


Play = Callable[[Bench], list[float]]


def _with(label: str, **options: Any) -> Play:
    return lambda bench: played(bench, f"{OURS}{label}", Kalman(**options))


def _of(sample: int, label: str) -> Play:
    return lambda bench: played(Bench(bench.seed, sample), label)


def _full(label: str = "") -> Play:
    return lambda bench: played(bench, f"{CEILING}{label}")


def _ours(label: str) -> Play:
    return lambda bench: played(bench, f"{OURS}{label}")


def _at(lr: float, label: str, kriging: bool = False) -> Play:
    def play(bench: Bench) -> list[float]:
        known = Kalman(over=1.3) if kriging else None
        return played(Bench(bench.seed, lr=lr), label, known)

    return play


IDEAS: dict[str, dict[str, Play]] = {
    "closing": {
        "uniform": lambda bench: played(bench, "uniform"),
        "full": _full(),
        "recommended (the default)": _ours(""),
        "server step 1.4": _ours("+server_lr=1.4"),
        "server step 1.6": _ours("+server_lr=1.6"),
        "server step 2": _ours("+server_lr=2.0"),
        "kriging": _with(""),
        "kriging, server step 1.2": _with("+server_lr=1.2"),
        "kriging x 1.3, server step 1.2": _with("+server_lr=1.2", over=1.3),
        "the same with a secant": _with("+server_lr=1.2", over=1.3, secant=True),
        "kriging x 1.3, server step 1.4": _with("+server_lr=1.4", over=1.3),
        "kriging x 1.3, server step 1.6": _with("+server_lr=1.6", over=1.3),
        "kriging x 1.3, server step 2": _with("+server_lr=2.0", over=1.3),
        "full, server step 1.2": _full("+server_lr=1.2"),
        "full, server step 1.4": _full("+server_lr=1.4"),
        "full, server step 1.6": _full("+server_lr=1.6"),
        "full, server step 2": _full("+server_lr=2.0"),
    },
    "rates": {
        "uniform": lambda bench: played(bench, "uniform"),
        "full": _full(),
        "full, server step 2": _full("+server_lr=2.0"),
        "full, 1.13, server step 2": _at(1.13, f"{CEILING}+server_lr=2.0"),
        "full, 0.8, server step 2": _at(0.8, f"{CEILING}+server_lr=2.0"),
        "recommended (the default)": _ours(""),
        "server step 2": _ours("+server_lr=2.0"),
        "3.2": _at(3.2, OURS),
        "1.13": _at(1.13, OURS),
        "1.13, server step 2": _at(1.13, f"{OURS}+server_lr=2.0"),
        "0.8": _at(0.8, OURS),
        "0.8, server step 2": _at(0.8, f"{OURS}+server_lr=2.0"),
        "0.57, server step 3": _at(0.57, f"{OURS}+server_lr=3.0"),
        "1.13, server step 2, kriging x 1.3": _at(1.13, f"{OURS}+server_lr=2.0", True),
        "0.8, server step 2, kriging x 1.3": _at(0.8, f"{OURS}+server_lr=2.0", True),
    },
    "frontier": {
        "uniform": lambda bench: played(bench, "uniform"),
        "full": _full(),
        "n = 5": _of(5, OURS),
        "n = 10 (the default)": _ours(""),
        "n = 20": _of(20, OURS),
        "n = 50": _of(50, OURS),
        "uniform, n = 5": _of(5, "uniform"),
        "uniform, n = 20": _of(20, "uniform"),
        "uniform, n = 50": _of(50, "uniform"),
        "exact D": lambda bench: played(bench, OURS, Recommended(), exact_mean=True),
        "exact c": lambda bench: played(bench, OURS, Recommended(), exact_control=True),
    },
}

if __name__ == "__main__":
    path, which, first, end = sys.argv[1:]
    found: dict[str, list[list[float]]] = {}
    for seed in range(int(first), int(end)):
        bench = Bench(seed)
        for name, play in IDEAS[which].items():
            run = [round(accuracy / 100, 4) for accuracy in play(bench)]
            found.setdefault(name, []).append(run)
        Path(path).write_text(
            json.dumps({"settings": DIGITS, "seeds": [int(first), seed + 1], "accuracy": found})
        )
