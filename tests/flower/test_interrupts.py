"""Ctrl-C wherever the strategy waits, for nodes, a user's function, the disk or the lock: a restart
ends with the bits of a federation that nobody has interrupted.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from deltafl.flower import DeltaStrategy
from deltafl.scale.named_arrays import named_arrays

from .grid import FakeGrid, configs, linear_app, played

#: With how many rounds: only the third moves all states that are kept, of which there are none
#: where updates have a file of their own.
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "innovation": (3, {"clip": "median"}),
    "census": (2, {"average": 0.5, "memory_path": True}),
}


class Places:
    """Counts the places where something is awaited, and interrupts at one of them: the even ones
    are before it happens, the odd ones after it.
    """

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.count = 0

    def pass_one(self) -> None:
        here = self.count
        self.count += 1
        if here == self.stop:
            raise KeyboardInterrupt

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **more: Any) -> Any:
            self.pass_one()
            result = function(*given, **more)
            self.pass_one()
            return result

        return called


@contextmanager
def awaited(places: Places) -> Iterator[None]:
    """All that the strategy waits for in one process with its disk."""
    methods = [
        *((FakeGrid, name) for name in ("get_nodes", "push_messages", "pull_messages")),
        (FakeGrid, "send_and_receive"),
        *((os, name) for name in ("link", "open", "mkdir")),
        *((Path, name) for name in ("replace", "unlink", "mkdir")),
        (FileLock, "acquire"),
    ]
    release = FileLock.release

    def let_go(lock: FileLock, force: bool = False) -> None:
        # Forced is what Python does when it throws the lock away.
        (release if force else places.around(release))(lock, force)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in methods:
            patch.setattr(owner, name, places.around(getattr(owner, name)))
        patch.setattr(FileLock, "release", let_go)
        for name in ("deltafl.flower.registration.time.sleep", "os.fsync"):
            patch.setattr(name, places.around(lambda given: None))
        yield


def state_after(folder: Path, label: str, places: Places) -> dict[str, bytes]:
    """The state after all rounds, in which these places are passed."""

    def judge(server_round: int, arrays: ArrayRecord) -> None:
        places.pass_one()

    def mean(contents: list[RecordDict], by: str) -> MetricRecord:
        places.pass_one()
        return MetricRecord({"replies": len(contents)})

    rounds, settings = SETTINGS[label]
    if "memory_path" in settings:
        settings = {**settings, "memory_path": folder / "memory"}
    strategy = DeltaStrategy(
        label,
        n=2,
        seed=3,
        fraction_evaluate=0.3,
        state_path=folder / "state",
        train_metrics_aggr_fn=mean,
        evaluate_metrics_aggr_fn=mean,
        **settings,
    )
    with awaited(places):
        federation = played(strategy, FakeGrid(linear_app(), configs(4)), rounds, evaluate_fn=judge)
    return {name: np.asarray(array).tobytes() for name, array in named_arrays(federation.current)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", SETTINGS)
def test_a_restart_after_an_interrupt_changes_nothing(
    label: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    every = Places()
    expected = state_after(tmp_path / "whole", label, every)
    assert every.count > 50
    # Every seventh place is one before and one after something in turn.
    step = 1 if pytestconfig.getoption("--thorough") else 7
    for stop in range(0, every.count, step):
        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            state_after(folder, label, Places(stop))
        assert state_after(folder, label, Places()) == expected, stop
        assert not (folder / "state" / "federation.lock").exists()
        left = {path.name for path in (folder / "state").iterdir()}
        assert not any(name.endswith(".part") for name in left)
