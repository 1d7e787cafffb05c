"""What DeltaStrategy costs beside Flower's own FedAvg: rounds of 100 simulated SuperNodes, 10
asked, interleaved.

Both strategies run in one run of the simulation engine with the same clients, in turns; the client
trains a dense model of 784-200-10 (159,010 parameters) for some steps in NumPy. DeltaStrategy also
writes its state after every round. The ratio is that of the median seconds of a round; the spread
is over the pairs of turns.

    python benchmarks/flower_overhead.py [--turns 4] [--rounds 3] [--sampler pracdelta] [--out
    result.json]
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation

from deltafl.flower import DeltaStrategy, LocalSteps, delta_mod, register
from deltafl.simulation import environment

SHAPES = {"w1": (200, 784), "b1": (200,), "w2": (10, 200), "b2": (10,)}
CLIENTS = 100
ASKED = 10
STEPS = 30
LR = 0.005

client = ClientApp(mods=[delta_mod])
register(client, num_examples=lambda context: 100 + 10 * int(context.node_config["partition-id"]))


@client.train()
def train(message: Message, context: Context) -> Message:
    arrays = {
        name: array.numpy() for name, array in message.content.array_records["arrays"].items()
    }
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    steps = LocalSteps(LR)
    for _ in range(STEPS):
        x = rng.normal(size=(20, 784)).astype(np.float32)
        y = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 20)]
        hidden = np.maximum(x @ arrays["w1"].T + arrays["b1"], 0)
        error = (hidden @ arrays["w2"].T + arrays["b2"] - y) / 20
        back = (error @ arrays["w2"]) * (hidden > 0)
        gradients = {
            "w1": back.T @ x,
            "b1": back.sum(axis=0),
            "w2": error.T @ hidden,
            "b2": error.sum(axis=0),
        }
        steps.add(float((error**2).sum()), gradients.values())
        arrays = {name: array - np.float32(LR) * gradients[name] for name, array in arrays.items()}
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    metrics = MetricRecord({"num-examples": 100, **steps.metrics()})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def initial() -> ArrayRecord:
    rng = np.random.default_rng(0)
    return ArrayRecord(
        {k: Array(rng.normal(scale=0.03, size=s).astype(np.float32)) for k, s in SHAPES.items()}
    )


def seconds_of_rounds(grid: Grid, strategy: Strategy, rounds: int) -> list[float]:
    """Seconds of each round but the first, in which nodes register."""
    ends: list[float] = []
    strategy.start(
        grid,
        initial(),
        rounds + 1,
        evaluate_fn=lambda server_round, arrays: ends.append(time.perf_counter()),
    )
    return [after - before for before, after in pairwise(ends[1:])]


def make_server(options: argparse.Namespace, report: Callable[[str], None]) -> ServerApp:
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        seconds: dict[str, list[list[float]]] = {"fedavg": [], "delta": []}
        for turn in range(options.turns + 1):
            for name in ("fedavg", "delta") if turn % 2 else ("delta", "fedavg"):
                with tempfile.TemporaryDirectory() as folder:
                    strategy: Strategy = (
                        FedAvg(
                            fraction_train=ASKED / CLIENTS,
                            fraction_evaluate=0.0,
                            min_available_nodes=CLIENTS,
                        )
                        if name == "fedavg"
                        else DeltaStrategy(
                            options.sampler, ASKED, state_path=folder, min_nodes=CLIENTS
                        )
                    )
                    taken = seconds_of_rounds(grid, strategy, options.rounds)
                if turn > 0:  # the first turn warms up
                    seconds[name].append(taken)
        ratios = [
            np.median(d) / np.median(f)
            for d, f in zip(seconds["delta"], seconds["fedavg"], strict=True)
        ]
        for name, turns in seconds.items():
            report(
                f"{name:7} median {np.median(turns):.3f} s a round, {np.min(turns):.3f} to "
                f"{np.max(turns):.3f}"
            )
        ratio = np.median(seconds["delta"]) / np.median(seconds["fedavg"])
        report(f"ratio   {ratio:.3f}, over turns {min(ratios):.3f} to {max(ratios):.3f}")
        if options.out:
            versions = {name: version(name) for name in ("flwr", "ray")}
            about = {**environment(), **versions, "load": os.getloadavg()}
            record = {"about": about, "seconds": seconds, "ratio": ratio, "ratio_of_turns": ratios}
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampler", default="pracdelta")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    lines: list[str] = []
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        make_server(options, lines.append),
        client,
        CLIENTS,
        backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}},
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
