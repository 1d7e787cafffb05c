"""The clients of ``attacked.py`` on every host: a quarter of the way to a number of one's own, a
megabyte; and the lies of one of them, each in its turn.
"""

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
SHAPE = (500, 500)
#: Clients have different sizes, by which the parent of all processes knows who is who.
SIZES = (100, 110, 120, 130)
LIAR = 3


def target(number: int) -> Rows:
    """Where a client would like to have the model."""
    return np.random.default_rng(number).normal(size=SHAPE).astype(np.float32)


def trained(x: Rows, number: int) -> Rows:
    return x + np.float32(0.25) * (target(number) - x)


def loss(x: Rows, number: int) -> float:
    return float(np.mean((x - target(number)) ** 2))


def turn(kinds: list[str], said: Path) -> str:
    """The next lie; the file keeps which were told, whatever becomes of this process."""
    told = said.read_text().split("\n")[:-1] if said.exists() else []
    kind = kinds[len(told) % len(kinds)]
    with said.open("a") as file:
        file.write(f"{kind}\n")
    return kind


def be_late(seconds: float) -> None:
    """Longer than a round waits."""
    time.sleep(seconds + 5)


def die() -> None:
    """Without a word."""
    os._exit(9)
