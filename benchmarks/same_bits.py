"""Do runs have the same bits as before a change? Run it before, run it after, on the same machine.

    python benchmarks/same_bits.py before.json
    ...                                            # change the code
    python benchmarks/same_bits.py after.json --against before.json

Twelve short runs (three tasks, four methods each), one with two workers and one that is killed and resumed. The digest
is the CRC-32 of ``rounds.jsonl``: cohorts, weights, losses and accuracies of every round. FashionMNIST must be at hand.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

RUNS = {
    "digits": ("innovation", "balanced", "pracdelta", "osmd"),
    "fashion-mnist": ("pracdelta", "innovation@local-pivotal", "fedis@multinomial", "clustered-sampling-2"),
    "synthetic": ("delta", "fedvarp", "k-vib", "power-of-choice"),
}
SETTINGS = {
    "digits": ["--rounds", "30", "--local-lr", "0.1"],
    "fashion-mnist": ["--rounds", "4", "--clients", "40", "--sample", "5", "--set", "test_examples=500"],
    "synthetic": ["--rounds", "200"],
}
#: Keys of ``rounds.jsonl`` that were renamed, new to old: digests are those of the old names.
RENAMED = {"num_selected": "num_asked", "residual": "leftover", "clip_factor": "shortened"}
WORKERS, RESUMED = ("digits", "pracdelta"), ("digits", "innovation")


def command(task: str, sampler: str, out: Path) -> list[str]:
    """The command of one run."""
    workers = ["--workers", "2"] if (task, sampler) == WORKERS else []
    run = [sys.executable, "-m", "deltafl", "run", "--task", task, "--sampler", sampler, "--out", str(out)]
    return [*run, *SETTINGS[task], *workers]


def digest(task: str, sampler: str, out: Path) -> str:
    """Play one run; the CRC-32 of its rounds."""
    rounds, line = out / "rounds.jsonl", command(task, sampler, out)
    if (task, sampler) == RESUMED:
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and (not rounds.exists() or rounds.read_bytes().count(b"\n") < 15):
                time.sleep(0.01)
            process.kill()
        line = [sys.executable, "-m", "deltafl", "run", "--out", str(out), "--resume"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    content = rounds.read_bytes()
    for new, old in RENAMED.items():
        content = content.replace(f'"{new}": '.encode(), f'"{old}": '.encode())
    return f"{zlib.crc32(content):08x}"


def main() -> None:
    """Play all runs and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of the digests")
    parser.add_argument("--against", type=Path, help="digests of an earlier state")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{task} {sampler}": digest(task, sampler, Path(folder) / f"{task}-{sampler}")
            for task, samplers in RUNS.items()
            for sampler in samplers
        }
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    before = json.loads(chosen.against.read_text(encoding="utf-8")) if chosen.against else found
    changed = [name for name in found if found[name] != before.get(name)]
    print(f"{len(found) - len(changed)} of {len(found)} runs have the same bits", *changed, sep="\n  changed: ")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
