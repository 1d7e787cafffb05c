"""Runs that are killed (``kill -9``) at random moments and resumed: is the result that of an
unbroken run, bit for bit?

    python benchmarks/kills.py [KILLS]

Five kinds of run on digits, 60 kills in all: a memory of updates in a file, Adam, momentum at the
clients, two workers, a comparison with two processes. Only the first process is killed: the others
must end by themselves. What ended before its kill is compared and begun anew.
"""

import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

RUN = ["run", "--rounds", "300", "--clients", "40", "--checkpoint-every", "3", "--sampler"]
COMPARE = [
    "compare",
    "--rounds",
    "120",
    "--clients",
    "40",
    "--checkpoint-every",
    "3",
    "--seeds",
    "2",
]
KINDS = {
    "innovation, memory in a file": [*RUN, "innovation", "--memory-path", "{}/memory"],
    "adam": [*RUN, "pracdelta", "--server-optimizer", "adam", "--server-lr", "0.01"],
    "mime": [*RUN, "pracdelta", "--mime", "0.5"],
    "two workers": [*RUN, "innovation", "--workers", "2"],
    "comparison, two processes": [*COMPARE, "--samplers", "uniform,innovation", "--processes", "2"],
}


def play(given: list[str], folder: Path, seconds: float | None = None) -> bool:
    """Begin a run, or go on with it, and kill it after so many seconds; whether it ended before."""
    resume = ["--resume"] if (folder / "out" / "config.toml").exists() else []
    command = [sys.executable, "-m", "deltafl", *(part.format(folder) for part in given), *resume]
    log = folder.parent / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, "--out", str(folder / "out")], stdout=file, stderr=file
        ) as process,
    ):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return False
    if process.returncode != 0:
        sys.exit(f"exit code {process.returncode}: {log.read_text()}")
    return True


def results(folder: Path) -> dict[str, object]:
    """What must be the same to the last bit: rounds, models and all states, memories; nothing
    left over.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.name if path.name == "rows.bin" else str(path.relative_to(folder))
        if path.name in ("rounds.jsonl", "rows.bin"):
            found[name] = path.read_bytes()
        elif path.suffix == ".safetensors":
            found[name] = {key: array.tobytes() for key, array in sorted(load_file(path).items())}
        elif path.suffix == ".part":
            found[name] = "left over"
    return found


def main(kills: int) -> None:
    moments = random.Random(0)
    each = -(-kills // len(KINDS))
    wrong = 0
    for kind, given in KINDS.items():
        with tempfile.TemporaryDirectory() as name:
            whole = Path(name, "whole")
            broken = Path(name, "broken")
            began = time.perf_counter()
            play(given, whole)
            seconds = time.perf_counter() - began
            expected = results(whole)
            done = 0
            runs = 0
            differ = 0
            while done < each or broken.exists():
                if play(
                    given, broken, moments.uniform(0.3, 1.0) * seconds if done < each else None
                ):
                    found = results(broken)
                    differing = [
                        name for name in found | expected if found.get(name) != expected.get(name)
                    ]
                    runs = runs + 1
                    differ = differ + bool(differing)
                    print(
                        *(f"{kind}: {name} differs" for name in differing),
                        sep="\n",
                        end="\n" * bool(differing),
                    )
                    shutil.rmtree(broken)
                else:
                    done += 1
            print(f"{kind:30} {done} kills, {runs} runs, {differ} differ", flush=True)
            wrong += differ
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
