"""How long whole commands take: ``import deltafl``, ``deltafl --help``, a first round, the demo, 20
seeds.

    python benchmarks/startup.py [--repeats 15] [--out result.json]

Whole processes by the wall clock and in CPU time, in turns, each once before the first turn so that
files are in memory and compiled. Python alone and NumPy alone are beside them: the rest is ours.
Comparisons run in every third turn.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import machine, versions

PUBLIC = "import deltafl; [getattr(deltafl, name) for name in deltafl.__all__]"
SIX = "full,census,uniform,pracdelta,innovation,balanced"
COMMANDS = {
    "python": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import deltafl": ["-c", "import deltafl"],
    "all public names": ["-c", PUBLIC],
    "deltafl --help": ["-m", "deltafl", "--help"],
    "deltafl run --help": ["-m", "deltafl", "run", "--help"],
    "import torch": ["-c", "import torch"],
    "digits, first round": ["-m", "deltafl", "run", "--task", "digits", "--rounds", "1", "--out"],
}
#: Their processes are not in the CPU time.
COMPARISONS = {
    "demo": ["-m", "deltafl", "compare", "--out"],
    "20 seeds, 6 samplers": [
        "-m",
        "deltafl",
        "compare",
        "--seeds",
        "20",
        "--samplers",
        SIX,
        "--out",
    ],
}
#: Seconds that are aimed at, by the wall clock.
TARGETS = {
    "import deltafl": 0.15,
    "deltafl --help": 0.3,
    "digits, first round": 3.0,
    "demo": 16.0,
    "20 seeds, 6 samplers": 180.0,
}


def seconds_of(arguments: list[str], folder: str) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    out = [f"{tempfile.mkdtemp(dir=folder)}/new"] if arguments[-1] == "--out" else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments, *out], check=True, capture_output=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Time how long deltafl takes to start.")
    parser.add_argument("--repeats", type=int, default=15, help="turns, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*COMMANDS, *COMPARISONS)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats + 1):
            for name, arguments in (COMMANDS | (COMPARISONS if turn % 3 == 1 else {})).items():
                seconds = seconds_of(arguments, folder)
                if turn > 0:
                    times[name].append(seconds)
    print(f"{machine()}\n{'':22}{'median s':>9}{'min':>7}{'max':>7}{'CPU s':>7}{'target':>8}")
    rows = {}
    for name, pairs in times.items():
        wall, cpu = (list(column) for column in zip(*pairs, strict=True))
        middle = statistics.median(wall)
        target = TARGETS.get(name)
        shown = "" if target is None else f"{target:.2f}"
        print(
            f"{name:22}{middle:9.3f}{min(wall):7.3f}{max(wall):7.3f}{statistics.median(cpu):7.3f}{shown:>8}"
        )
        rows[name] = {
            "median_s": middle,
            "min_s": min(wall),
            "max_s": max(wall),
            "wall_s": wall,
            "cpu_s": cpu,
        }
        rows[name] |= {} if target is None else {"target_s": target}
    if options.out:
        record = {"about": machine(), "versions": versions(), "commands": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
