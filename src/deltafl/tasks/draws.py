"""The global generators of PyTorch, NumPy and Python, from which a user's own code may draw: a
random layer, a mixture of examples, a task that is made up.

This file imports PyTorch: import it late.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..streams import ONE_AT_A_TIME
from ..types import Rng
from .modules import torch


@contextmanager
def seeded(rng: Rng, device: Any = None, every: bool = True) -> Iterator[None]:
    """Seed the global generators and a GPU's, and restore them afterwards.

    Those of NumPy and Python take as long as a small model: without ``every`` they are left alone.
    """
    with ONE_AT_A_TIME:
        yield from _seeded(rng, device, every)


def _seeded(rng: Rng, device: Any, every: bool) -> Iterator[None]:
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    seed = int(rng.integers(2**63))
    for generator in generators:
        # ``torch.manual_seed`` would take half of the time of a small model.
        generator.manual_seed(seed)
    others: Any = None
    if every:
        others = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002


def places() -> tuple[Any, ...]:
    """Where the generators are, to be compared: whoever draws moves them."""
    numpy_state: Any = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    held = torch.default_generator.get_state().numpy().tobytes()
    return held, random.getstate(), numpy_state["key"].tobytes(), numpy_state["pos"]
