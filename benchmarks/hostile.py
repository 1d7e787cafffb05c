"""Clients that lie: what they do to the model, with and without ``clip="median"``, beside robust
rules.

    python benchmarks/hostile.py --out results/hostile [--seeds 5] [--attacks "none;-10 u"]
    [--methods "uniform;Krum"] python benchmarks/hostile.py --task fashion-mnist --out
    results/hostile/fashion-mnist [...]

100 clients with few labels each, 10 asked a round; some of them lie. ``deltafl.server.clipping``
says what is done about it. The rules of Flower aggregate the replies of uniform cohorts. Writes
``runs.jsonl`` and ``README.md``.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.server.strategy.aggregate import (
    aggregate_bulyan,
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)

from deltafl import Accumulator, Plan, Population, init_round, make_plan, open_round
from deltafl.analysis import Interval, mean_interval
from deltafl.simulation import RunSettings, environment, make_settings
from deltafl.simulation.engine import Engine
from deltafl.simulation.setup import engine_of
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task

Rows = npt.NDArray[Any]
CLIENTS = 100
ASKED = 10
TARGET = 0
#: Settings of the tasks.
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 100},
    "fashion-mnist": {
        "rounds": 60,
        "partition": "hsu2019",
        "alpha": 0.1,
        "local_epochs": 1,
        "local_lr": 0.2,
    }
    | {"clients": CLIENTS, "sample": ASKED, "batch_size": 32, "test_examples": 5000},
}


class Attack(NamedTuple):
    """What liars send: ``factor`` times their update, trained on ``data`` of their own making."""

    factor: float = 1.0
    data: str = ""  # "labels" turned round, or a "backdoor"
    silent: bool = False  # until round 60
    late: bool = False  # honest until then
    random: bool = False
    alternating: bool = False
    examples: int = 1  # claimed for each one


ATTACKS = {
    "-u": Attack(-1),
    "-10 u": Attack(-10),
    "-100 u": Attack(-100),
    "-1000 u": Attack(-1000),
    "+10 u": Attack(10),
    "+100 u, -100 u in turn": Attack(100, alternating=True),
    "random, 10 times as long": Attack(10, random=True),
    "labels turned round": Attack(data="labels"),
    "backdoor": Attack(data="backdoor"),
    "backdoor, 10 u": Attack(10, data="backdoor"),
    "honest for 60 rounds, then -10 u": Attack(-10, late=True),
    "silent for 60 rounds, then -10 u": Attack(-10, silent=True),
    "-u, claims 50 times its examples": Attack(-1, examples=50),
    "u, claims 1000 times its examples": Attack(examples=1000),
}


def of_flower(rule: Callable[..., list[Rows]], **options: Any) -> Callable[[Rows, Rows], Rows]:
    """One of Flower's rules; no step where too few reply for Bulyan."""

    def step(update_nd: Rows, coef_n: Rows) -> Rows:
        if len(update_nd) < 7:
            return np.zeros(update_nd.shape[1])
        return rule([([update_d], 1) for update_d in update_nd], **options)[0]

    return step


def trimmed(update_nd: Rows, coef_n: Rows, share: float = 0.2) -> Rows:
    """In each coordinate the mean by coefficients without the outer ``share`` of them on both
    sides.
    """
    order = np.argsort(update_nd, axis=0)
    value_nd = np.take_along_axis(update_nd, order, 0)
    coef_nd = coef_n[order]
    to_nd = np.cumsum(coef_nd, axis=0) / coef_n.sum()
    kept_nd = np.clip(to_nd, share, 1 - share) - np.clip(
        to_nd - coef_nd / coef_n.sum(), share, 1 - share
    )
    return np.asarray(coef_n.sum() * (kept_nd * value_nd).sum(axis=0) / (1 - 2 * share))


def geometric_median(update_nd: Rows, coef_n: Rows) -> Rows:
    """The point with the least sum of distances, weighted by coefficients (Weiszfeld), times
    their sum.
    """
    centre_d = np.median(update_nd, axis=0)
    for _ in range(50):
        near_n = coef_n / np.maximum(np.linalg.norm(update_nd - centre_d, axis=1), 1e-9)
        centre_d = near_n @ update_nd / near_n.sum()
    return np.asarray(coef_n.sum() * centre_d)


class Method(NamedTuple):
    """A label with other attributes of the plan; or with a rule that makes one update of the
    replies.
    """

    label: str
    settings: dict[str, Any]
    rule: Callable[[Rows, Rows], Rows] | None = None


SHOWN = ("uniform", "pracdelta", "innovation", "balanced")
METHODS = {
    **{label: Method(label, {}) for label in SHOWN},
    **{f"{label}, clip": Method(label, {"clip": "median"}) for label in SHOWN},
    **{
        f"{label}, norm_guard 3": Method(label, {"norm_guard": 3.0})
        for label in ("uniform", "pracdelta")
    },
    "trimmed mean by coefficients": Method("pracdelta", {}, trimmed),
    "geometric median by coefficients": Method("pracdelta", {}, geometric_median),
}
#: Flower's rules; they aggregate the replies of uniform cohorts.
OF_FLOWER = {
    "FedMedian": of_flower(aggregate_median),
    "FedTrimmedAvg 0.2": of_flower(aggregate_trimmed_avg, proportiontocut=0.2),
    "Krum": of_flower(aggregate_krum, num_malicious=2, to_keep=0),
    "Multi-Krum": of_flower(aggregate_krum, num_malicious=2, to_keep=6),
    "Bulyan": of_flower(
        aggregate_bulyan, num_malicious=1, aggregation_rule=aggregate_krum, to_keep=0
    ),
}
METHODS |= {name: Method("uniform", {}, rule) for name, rule in OF_FLOWER.items()}


def with_trigger(image_x: Rows) -> Rows:
    """The images with a bright square in a corner."""
    image_x = image_x.copy()
    image_x[..., :2, :2] = image_x.max()
    return image_x


def poisoned(task: Task, data: str, liars: set[int]) -> Task:
    """The task whose liars hold wrong labels, or the trigger on half of their examples, labelled
    as the target.
    """
    train_x = task.dataset.train_x.copy()
    train_y = task.dataset.train_y.copy()
    for liar in liars:
        rows = task.client_rows[liar]
        if data == "labels":
            train_y[rows] = task.dataset.num_classes - 1 - train_y[rows]
        else:
            train_x[rows[::2]] = with_trigger(train_x[rows[::2]])
            train_y[rows[::2]] = TARGET
    return replace(task, dataset=replace(task.dataset, train_x=train_x, train_y=train_y))


def triggered(task: Task) -> Task:
    """The task whose test set is every image of another class with the trigger, labelled as the
    target.
    """
    other = task.dataset.test_y != TARGET
    test_x = with_trigger(task.dataset.test_x[other])
    test_y = task.dataset.test_y[other] * 0 + TARGET
    return replace(task, dataset=replace(task.dataset, test_x=test_x, test_y=test_y))


#: Where the defence ends, as these runs show it.
ENDS = {
    "digits": (
        "Where it ends: turned signs and labels count as any client's; ten who claim 50 times "
        "their data still have "
        "three shares each; ten who turn up after 60 silent rounds cost up to 9 points; and **a "
        "backdoor passes**, for "
        "it is no longer than other updates. Rules that look at each coordinate or reply resist a "
        "backdoor longer and "
        "lose accuracy when nobody lies: honest clients with few labels differ as much as liars do."
    ),
    "fashion-mnist": (
        "One seed and 60 rounds, in which the model is still learning: an example. Nothing is lost "
        "when nobody lies. "
        "**The second half of the goal is missed here**: ten liars cost 3 to 10 points, "
        "`innovation` least; without "
        "`clip` they cost everything."
    ),
}


class Federation:
    """A task with one seed, as its honest clients and as its liars see it."""

    def __init__(self, task: str, seed: int) -> None:
        self.settings = make_settings(RunSettings, {"task": task, "seed": seed, **TASKS[task]})
        self.rounds: int = TASKS[task]["rounds"]
        self.late = 3 * self.rounds // 5
        self.seed = seed
        self.honest = engine_of(self.settings)
        self.order = np.random.default_rng(seed).permutation(CLIENTS)
        self.trigger = self._engine(triggered(self.honest.task))

    def _engine(self, task: Task) -> Engine:
        s = self.settings
        return Engine(
            task,
            LocalWork(lr=s.local_lr or 0.0, epochs=s.local_epochs, batch_size=s.batch_size),
            self.seed,
        )

    def plan(self, method: Method, attack: Attack, liars: set[int]) -> Plan:
        """The plan of a method; its clip also limits the sizes that clients claim to 3 medians."""
        honest = self.honest.task.population("data")
        claim_m = [attack.examples if client in liars else 1 for client in range(CLIENTS)]
        ratio = 3.0 if "clip" in method.settings else None
        population = Population.from_sizes(
            honest.num_examples_m * claim_m, aux=honest.aux_mq, max_ratio=ratio
        )
        return make_plan(method.label, population, ASKED, seed=self.seed, **method.settings)

    def play(self, method: str, name: str, count: int) -> dict[str, Any]:
        """One run: accuracy and attack success at the end, how often a liar was asked, its
        largest share of a step.
        """
        attack = ATTACKS.get(name, Attack())
        liars = set(self.order[:count].tolist())
        plan = self.plan(METHODS[method], attack, liars)
        rule = METHODS[method].rule
        false = (
            self._engine(poisoned(self.honest.task, attack.data, liars))
            if attack.data
            else self.honest
        )
        state = init_round(plan, self.honest.initial_params())
        rng = np.random.default_rng(self.seed)
        visits: dict[int, int] = defaultdict(int)
        share = 0.0
        ends = []
        for number in range(self.rounds):
            cohort = open_round(plan, state)
            liar_n = np.isin(cohort.client_n, list(liars))
            training = self.honest.train(state.params_d, number, cohort.client_n)
            update_nd = training.update_nd.astype(np.float64)
            if attack.data and liar_n.any():
                update_nd[liar_n] = false.train(
                    state.params_d, number, cohort.client_n[liar_n]
                ).update_nd
            for row in np.flatnonzero(liar_n):
                visits[int(cohort.client_n[row])] += 1
                if number < self.late and (attack.late or attack.silent):
                    continue
                sign = -1 if attack.alternating and visits[int(cohort.client_n[row])] % 2 else 1
                if attack.random:
                    direction = rng.normal(size=update_nd.shape[1])
                    update_nd[row] = (
                        direction * np.linalg.norm(update_nd[row]) / np.linalg.norm(direction)
                    )
                update_nd[row] *= sign * attack.factor
            silent_n = liar_n & (attack.silent and number < self.late)
            if rule:
                here = np.isfinite(update_nd).all(axis=1) & ~silent_n
                coef_n = plan.collect_replies(state, cohort, here).coef_n
                step_d = (
                    rule(update_nd[here], coef_n) if here.any() else np.zeros(update_nd.shape[1])
                )
                coef_sum = plan.collect_replies(state, cohort).coef_n.sum()
                update_nd[:] = (
                    step_d / coef_sum
                )  # so that the round's sum by coefficients is the rule's
            missing_n = silent_n & (rule is None)
            updates = [
                None if missing else own_d
                for own_d, missing in zip(update_nd, missing_n, strict=True)
            ]
            accumulator = Accumulator(plan, state, cohort)
            accumulator.add_rows(updates, training.reports)
            following, _ = accumulator.close()
            length_n = np.zeros(len(liar_n))
            here = accumulator.reports.responded_n
            coef_n = plan.collect_replies(state, cohort, here).coef_n
            length_n[here] = coef_n * np.sqrt(accumulator.reports.squared_residual_n[here])
            counted_n = liar_n if liars else np.ones_like(liar_n)
            if not rule and number > 0 and length_n.sum() > 0 and counted_n.any():
                share = max(share, length_n[counted_n].max() / length_n.sum())
            state = following
            if not np.isfinite(state.params_d).all():
                break
            if number >= self.rounds - 5:
                ends.append(self.honest.evaluate(state.params_d).accuracy)
        lost = len(ends) < 5
        return {
            "method": method,
            "attack": name,
            "liars": count,
            "seed": self.seed,
            "accuracy": round(self.honest.task.chance if lost else float(np.mean(ends)), 5),
            "success": None if lost else round(self.trigger.evaluate(state.params_d).accuracy, 5),
            "asked": sum(visits.values()) / count if count else None,
            "share": round(float(share), 5),
        }


def cells() -> list[tuple[str, int]]:
    """Attacks, and how many of 100 clients take part."""
    found = [("none", 0)]
    for name in ATTACKS:
        more = (
            (5, 20) if name in ("-u", "-10 u", "-100 u", "labels turned round", "backdoor") else ()
        )
        found += [(name, count) for count in sorted((1, 10, *more))]
    return found


def values_of(
    runs: list[dict[str, Any]], key: str, method: str, cell: tuple[str, int]
) -> dict[int, float]:
    """A number of a method under an attack, by seed, where it is known."""
    chosen = (
        run for run in runs if run["method"] == method and (run["attack"], run["liars"]) == cell
    )
    return {
        run["seed"]: run[key] for run in chosen if run[key] is not None and np.isfinite(run[key])
    }


def mean_text(
    runs: list[dict[str, Any]], key: str, method: str, cell: tuple[str, int], scale: float = 100
) -> str:
    known = [*values_of(runs, key, method, cell).values()]
    return f"{scale * np.mean(known):.1f}" if known else "–"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |" for line in (heads, *rows))
    return "\n".join([head, "|---|" + "---:|" * (len(heads) - 1), *lines])


def verdict(runs: list[dict[str, Any]]) -> str:
    """Whether the goal is met by what ``clip`` loses against honest clients: by all intervals,
    or by means alone.
    """

    def lost(*scales: tuple[str, int]) -> tuple[float, float | None]:
        """The largest mean loss and the highest end of an interval; None where there is none."""
        found = [change_of(runs, label, scale) for label, scale in product(SHOWN, scales)]
        return max(0.0, *(-each.mean for each in found)), max(
            (-each.low for each in found if each.low is not None), default=None
        )

    both = (1, *lost(("none", 0))), (5, *lost(("-10 u", 10), ("-1000 u", 10)))
    sure = all(high is not None and high <= most for most, _, high in both)
    by_mean = all(mean <= most for most, mean, _ in both)
    word = (
        "reached"
        if sure
        else "reached by the means, not by every interval"
        if by_mean
        else "missed"
    )
    quiet, ten = (
        f"{mean:.1f} points" + (f" (intervals up to {high:.1f})" if high else "")
        for _, mean, high in both
    )
    return (
        f"**The goal is {word}.** At most {quiet} are lost when nobody lies, {ten} with ten liars."
    )


def change_of(runs: list[dict[str, Any]], label: str, cell: tuple[str, int]) -> Interval:
    """Points that ``clip`` gains in a cell on honest clients without it, paired by seed."""
    plain, own = (
        values_of(runs, "accuracy", *key)
        for key in ((label, ("none", 0)), (f"{label}, clip", cell))
    )
    return mean_interval(100 * np.array([own[seed] - plain[seed] for seed in plain if seed in own]))


def goal(runs: list[dict[str, Any]]) -> str:
    """What ``clip`` costs when nobody lies, and what it saves; paired by seed."""
    heads = ["sampler", "nobody lies", "with `clip`", "difference [95 %]"]
    heads += ["10: -10 u", "with `clip`", "10: -1000 u, `clip`"]
    rows = []
    for label in SHOWN:
        clipped = f"{label}, clip"
        honest = ("none", 0)
        ten = ("-10 u", 10)
        far = ("-1000 u", 10)
        change = change_of(runs, label, honest)
        ends = (
            ""
            if change.low is None or change.high is None
            else f" [{change.low:.1f}, {change.high:.1f}]"
        )
        cells = [(label, honest), (clipped, honest), (label, ten), (clipped, ten), (clipped, far)]
        means = [mean_text(runs, "accuracy", *cell) for cell in cells]
        rows.append([f"`{label}`", *means[:2], f"{change.mean:+.1f}{ends}", *means[2:]])
    return markdown(heads, rows)


#: By key of a run: the title of its table, and a factor.
TABLES = {
    "accuracy": ("Test accuracy at the end, %", 100),
    "success": ("Images with the trigger that are taken for the backdoor's class, %", 100),
    "asked": ("How often a liar was asked, of 100 rounds (10 by equal chances)", 1),
    "share": (
        (
            "Largest share of a step, coef norm(u - c) of one liar over its sum, % (without liars: "
            "of "
            "one client)"
        ),
        100,
    ),
}


def page(task: str, runs: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Tables of all attacks, for each measure, over the seeds that have all of them."""
    number_of_runs = Counter(run["seed"] for run in runs)
    whole = sorted(
        seed for seed, number in number_of_runs.items() if number == max(number_of_runs.values())
    )
    of_whole = [run for run in runs if run["seed"] in whole]
    methods = [method for method in METHODS if any(run["method"] == method for run in runs)]
    found = [cell for cell in cells() if any((run["attack"], run["liars"]) == cell for run in runs)]
    blocks = [
        f"# Clients that lie{': FashionMNIST' * (task == 'fashion-mnist')}",
        '**The goal:** with `clip="median"` the test accuracy stays within 1 point when nobody '
        "lies, and within 5 "
        "points of that with ten liars of any scale.",
        "## Verdict",
        verdict(runs),
        f"`python benchmarks/hostile.py --task {task}`: {CLIENTS} clients with few labels each, "
        f"{ASKED} asked in each "
        f'of {TASKS[task]["rounds"]} rounds; some of them lie. `clip` is `clip="median"`, with '
        "`max_ratio=3` for "
        "claimed sizes. "
        "Accuracy is the mean of the last 5 rounds. u is what an honest client would send.",
        "## What it costs and what it saves",
        f"Test accuracy, %; number of seeds: {len(number_of_runs)}.",
        goal(runs),
        ENDS[task],
        f"All tables below: seed{'s' * (len(whole) > 1)} {', '.join(map(str, whole))}. "
        "Flower's rules aggregate replies of uniform cohorts; those by coefficients weigh the "
        "replies of `pracdelta`'s "
        "cohorts by w_i / pi_i.",
    ]
    hidden = {"share": [name for name in METHODS if METHODS[name].rule], "asked": OF_FLOWER}
    for key, (title, scale) in TABLES.items():
        chosen = [method for method in methods if method not in hidden.get(key, ())]
        rows = []
        for cell in found[1:] if key == "asked" else found:
            if key != "success" or cell[0].startswith(("none", "backdoor")):
                values = [mean_text(of_whole, key, method, cell, scale) for method in chosen]
                rows.append([f"{cell[1]}: {cell[0]}" if cell[1] else "nobody lies", *values])
        table = markdown(["liars, what they send", *chosen], rows)
        blocks += [f"<details><summary>{title}</summary>", table, "</details>"]
    made = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "command")
    return "\n\n".join([*blocks, f"Made with {made}."]) + "\n"


def main() -> None:
    """Play what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--attacks", help="only these, with semicolons between them")
    parser.add_argument("--methods", help="only these")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "runs.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(run["method"], run["attack"], run["liars"], run["seed"]) for run in runs}
    methods = given.methods.split(";") if given.methods else list(METHODS)
    wanted = [cell for cell in cells() if not given.attacks or cell[0] in given.attacks.split(";")]
    np.seterr(all="ignore")
    began = time.process_time()
    for seed in range(given.seeds):
        federation = Federation(given.task, seed)
        for cell in wanted:
            for method in methods:
                if (method, *cell, seed) not in done:
                    run = federation.play(method, *cell)
                    runs.append(run)
                    with path.open("a") as file:
                        file.write(json.dumps(run) + "\n")
                    print(f"{time.process_time() - began:6.0f} s {run}", flush=True)
    (given.out / "README.md").write_text(page(given.task, runs, environment()))


if __name__ == "__main__":
    main()
