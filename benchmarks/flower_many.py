"""A Flower federation of thousands of SuperNodes that fail, lie, leave and come back, with a server
that restarts.

    python benchmarks/flower_many.py [NODES [ROUNDS]]

The nodes are calls of a ClientApp in this process, behind Flower's interfaces
(`tests/flower/grid.py`). In every round 3 % of the selected nodes raise, 2 % fall silent and 2 %
send entries of 9e17; 2 % of all nodes are killed and replaced under new ids; every fifth round the
server starts anew from its state. Every sampler that Flower can use with sizes alone is played; the
distance is that of the model from the clients' mean, 1 at the start. Memory is that of this
process, the nodes included, after the tenth round and after the last; a growth of a megabyte a
round ends with 1.
"""

import gc
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import Array, ArrayRecord, Context, Error, Message
from flwr.supercore.task_identity import TaskIdentity

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from deltafl.flower import DeltaStrategy
from flower.grid import FakeGrid, configs, linear_app, start

LABELS = ("uniform", "pracdelta", "innovation@local-pivotal", "delta-centred", "osmd", "fedvarp")
#: Megabytes that the process may grow in a round.
GROWTH = 1.0


def handler(grid: FakeGrid, rng: random.Random) -> Any:
    """A node's answer to a train message: an error, silence, a lie, or its app's."""

    def answer(message: Message, context: Context) -> Message | None:
        chance = rng.random()
        if chance < 0.03:
            return Message(Error(2, "raised"), reply_to=message)
        if chance < 0.05:
            return None
        reply = grid.app(message, context)
        if chance < 0.07:
            name, record = next(iter(reply.content.array_records.items()))
            reply.content[name] = ArrayRecord({**record, "x": Array(np.full(3, 9e17, np.float32))})
        return reply

    return answer


def main(num_nodes: int, rounds: int) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    for label in LABELS:
        rng = random.Random(0)
        grid = FakeGrid(linear_app(), configs(num_nodes, 10**6))
        sizes, targets = np.transpose(
            [[entry["examples"], entry["target"]] for entry in grid.configs.values()]
        )
        goal = sizes @ targets / sizes.sum()
        after = 10**6 + 1
        rejected = 0
        slowest = 0.0
        peak = 0
        used_mb = list[float]()
        with tempfile.TemporaryDirectory() as folder:
            for done in range(5, rounds + 1, 5):
                strategy = DeltaStrategy(
                    label, n=20, state_path=folder, min_nodes=num_nodes, registration_timeout=5
                )
                grid.fail = dict.fromkeys(grid.configs, handler(grid, rng))
                began = time.perf_counter()
                start(strategy, grid, done)
                slowest = max(slowest, (time.perf_counter() - began) / 5)
                assert strategy.federation is not None
                assert len(strategy.federation.keys) == num_nodes
                rejected += sum(
                    "far beyond" in reply.reason
                    for info in strategy.history
                    for reply in info.rejected
                )
                distance = abs(float(strategy.federation.params_d.mean()) - goal) / goal
                # A grid of tests keeps what was sent, Flower's does not.
                grid.sent.clear()
                gc.collect()
                used_mb.append(psutil.Process().memory_info().rss / 1e6)
                peak = max(peak, sum(path.stat().st_size for path in Path(folder).iterdir()))
                killed = rng.sample(sorted(grid.configs), num_nodes // 50)
                for node in killed:
                    grid.configs[after] = grid.configs.pop(node)
                    after += 1
        print(
            f"{label:26} {done} rounds, {done // 5 - 1} restarts: {rejected} lies refused, "
            f"distance {distance:.3f}, "
            f"at most {slowest:.2f} s a round with registration, {peak / 1e6:.2f} MB of states, "
            f"memory {used_mb[min(1, len(used_mb) - 1)]:.0f} to {used_mb[-1]:.0f} MB",
            flush=True,
        )
        if used_mb[-1] - used_mb[min(1, len(used_mb) - 1)] > GROWTH * (done - 10):
            sys.exit(f"{label}: memory grew by more than {GROWTH:g} MB a round: {used_mb}")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 2000,
        int(sys.argv[2]) if len(sys.argv) > 2 else 30,
    )
