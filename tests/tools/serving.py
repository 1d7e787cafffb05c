"""A federation as every host serves it, without a host: its state folder, and its clients' file."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from deltafl.federation.clients import ClientInfo
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.service import serving

MODEL = {"x": np.zeros(3, np.float32)}


def serve(root: Path, sampler: str, rounds: int = 3, **given: Any) -> None:
    """Rounds in each of which a client joins; then one client is forgotten, and one more round."""
    if given.pop("mapped", False):
        given["memory_path"] = root / "disk"
    settings: dict[str, Any] = {"n": 2, "seed": 1, "state_path": root / "state", **given}
    _play(rounds, sampler, settings)
    _play(rounds + 1, sampler, {**settings, "forget": ["client:1"]})


def _play(rounds: int, sampler: str, settings: dict[str, Any]) -> None:
    log = logging.getLogger("serve").log
    with serving(make_rules(sampler, **settings), MODEL, rounds, log) as service:
        forget = service.rules.forget
        while service.round < rounds:
            here = [f"client:{i}" for i in range(4 + service.round)]
            service.let_in({key: ClientInfo(10) for key in here if key not in forget})
            service.begin_round(service.keys, lambda _: {})
            arrays = {"x": service.arrays()["x"] + np.float32(service.round + 1)}
            service.end_round({key: ClientReply(arrays, loss=1.0) for key in service.keys})
