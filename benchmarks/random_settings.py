"""Settings drawn at random, good and bad: each is accepted, or refused in one sentence with nothing
written.

    python benchmarks/random_settings.py [SETTINGS [COMMANDS]]

Each sets one to four fields of a run, a comparison or a tuning. As many of those that are refused
as COMMANDS says are given to the command line too: exit code 2, no traceback, no file.
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deltafl import DESIGNS, ESTIMATORS, SAMPLERS, DeltaflError
from deltafl.simulation import CompareSettings, RunSettings, TuneSettings, make_settings
from deltafl.tasks import PARTITIONS

WORDS = [
    "",
    " ",
    "x",
    "nan",
    "-inf",
    "1e400",
    "None",
    "true",
    "a\nb",
    "\x1b[2J",
    "é" * 300,
    "../..",
    "/",
    "cuda:99",
]
WORDS += [
    "uniform(",
    "fedavg@",
    "@@",
    "pracdelta(x=1)",
    "delta(alpha=nan)",
    "no.py:F",
    "uniform,uniform",
    "3,5,3",
]
NUMBERS = [-1, 0, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**63, 10**400, float("nan"), float("inf"), True]
ODD = [None, [], [1, "x"], {}, {"uniform": "x"}, (1, 2, 3), b"x", object(), Path("x"), 1j, "\ud800"]
NAMES = [
    *SAMPLERS,
    *DESIGNS,
    *ESTIMATORS,
    *PARTITIONS,
    "digits",
    "synthetic",
    "adam",
    "bfloat16",
    "median",
    "batched",
]
COMMANDS: dict[type[Any], str] = {
    RunSettings: "run",
    CompareSettings: "compare",
    TuneSettings: "tune",
}


def drawn(rng: random.Random, odd: bool) -> tuple[type[Any], dict[str, Any], bool]:
    """A kind of settings, some of its fields, and whether they are refused; without odd ones all
    are texts.
    """
    kind = rng.choice(list(COMMANDS))
    names = rng.sample([*kind.model_fields, "no_such_setting"], rng.randint(1, 4))
    pools: list[list[Any]] = [
        WORDS,
        NUMBERS,
        NAMES,
        [1, 2, 0.5],
        [1, 2, 0.5],
        *([ODD] if odd else []),
    ]
    values = [rng.choice(rng.choice(pools)) for _ in names]
    given = dict(zip(names, values if odd else map(str, values), strict=True))
    try:
        make_settings(kind, given)
    except DeltaflError as error:
        assert str(error).isprintable(), (given, str(error))
        return kind, given, True
    return kind, given, False


def main(settings: int, commands: int) -> None:
    rng = random.Random(0)
    refused = sum(drawn(rng, odd=True)[2] for _ in range(settings))
    print(
        f"{settings} settings: {settings - refused} accepted, {refused} refused in a sentence",
        flush=True,
    )
    for kind, given, _ in [
        tried for _ in range(3 * commands) if (tried := drawn(rng, odd=False))[2]
    ][:commands]:
        options = [
            part
            for name, value in given.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [sys.executable, "-m", "deltafl", COMMANDS[kind], "--out", "out", *options]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            written = list(Path(folder).iterdir())
        assert (done.returncode, "Traceback" in done.stderr, written) == (2, False, []), (
            given,
            written,
            done.stderr,
        )
    print(f"{commands} commands: all refused with exit code 2, nothing written")


if __name__ == "__main__":
    given = [*sys.argv[1:], *["10000", "100"][len(sys.argv) - 1 :]]
    main(int(given[0]), int(given[1]))
