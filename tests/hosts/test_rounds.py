"""Flower and NVFlare, without their processes: the same rounds, bit for bit, as without a host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.types import Params

from .rounds import FAULTY, core

LABELS = [
    "pracdelta",
    "fedpracis@pivotal@difference",
    "md",
    "cluster-is",
    "fedavg",
    "innovation@local-pivotal",
    "balanced",
    "census",
    "census(components=2,size=16)@@innovation",
    "census(by_norm=False)@local-pivotal@difference",
    "fedvarp+scaffold",
    "innovation+scaffold",
    "uniform+mime=0.5",
    "uniform+average=0.5",
    "census+average=0.5+mime=0.7",
    "census+mime=0.5+scaffold",
    "uniform+first_round=code+mime=0.5",
    "uniform+first_round=code+ghbm=0.5+ghbm_tau=2",
    "innovation+first_round=code+scaffold",
    "fedvarp+first_round=exact+scaffold",
]
#: Label, fault, why its replies are refused.
FAULTS = [
    ("uniform", "silent", "no reply in time: "),
    ("pracdelta", "another shape", "array 'bias' has shape (5,), expected (2,)"),
    ("fedvarp+scaffold", "no correction", "did not correct its local steps; train inside"),
    ("uniform+mime=0.5", "no correction", "did not correct its local steps; train inside"),
    ("census", "silent", "census: no answer from 1 clients: no reply in time"),
    ("census+mime=0.5", "no correction", "census: no answer from 1 clients: the client did not"),
]


def same(found: list[Params], expected: list[Params]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("label", LABELS)
def test_rounds_are_those_of_the_core(play: Any, label: str) -> None:
    played = play(label)
    models, infos, largest = core(label)
    assert same(played.models, models)
    weights = [info.sum_of_weights for info in played.history]
    assert weights == [info.sum_of_weights for info in infos]
    assert np.abs(models[-1]).max() > 0.1
    assert (largest > 0.05) == bool(played.federation.plan.drifting)


@pytest.mark.parametrize(("label", "fault", "reason"), FAULTS)
def test_a_fault_is_non_response(
    play: Any, label: str, fault: str, reason: str, log: pytest.LogCaptureFixture
) -> None:
    """Also in a census: such a client counts as the mean of all."""
    played = play(label, fault)
    models, _, _ = core(label, fault)
    assert same(played.models, models)
    assert played.used[FAULTY] == 0
    assert sum(played.used) > 5
    assert reason in log.text
    assert f"site-{FAULTY}" in log.text


@pytest.mark.parametrize("label", ["innovation", "census", "uniform+average=0.5+mime=0.5"])
def test_a_server_resumes_and_forgets(
    play: Any,
    label: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    folder = tmp_path.relative_to(tmp_path.parent)
    through = play(label)
    play(label, rounds=2, state_path=folder)
    assert f"State kept in {tmp_path}" in log.messages
    again = play(label, rounds=5, state_path=folder)
    assert "rounds are done" not in log.text
    assert [info.round for info in again.history] == [2, 3, 4]
    assert same(again.models, through.models[2:])
    done = play(label, rounds=4, state_path=folder)
    assert done.history == []
    assert "All 5 rounds are done: raise num_rounds above 5 to go on" in log.text
    key = done.federation.keys[0]
    less = play(label, rounds=6, state_path=folder, forget=[key])
    assert key not in less.federation.keys
    assert len(less.history) == 1
