"""Models of all kinds in Flower and NVFlare, in this process: the rounds are those of the core,
with all arrays in the end, and clients send and keep what they should.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from deltafl import DeltaflError
from deltafl.model.parts import ModelParts

from .models import KINDS, ROUNDS, Clients, M, arrays_of, core
from .rounds import N, Take

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

LABELS = ["census+mime=0.5", "fedvarp+scaffold", "innovation+first_round=code+mime=0.5"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("label", LABELS)
def test_rounds_are_those_of_the_core(play: Any, label: str, name: str) -> None:
    kind = KINDS[name]
    expected, apart, length = core(label, name)
    clients = Clients(kind)
    start = arrays_of(clients.start)
    received = set[str]()

    def work(client: int, fault: str, sent: Any, take: Take) -> Any:
        received.update(sent)
        return clients.work(client, fault, sent, take)

    played = play(label, m=M, rounds=ROUNDS, model=start, work=work, **kind.settings)
    assert received == set(kind.sent(start))
    assert played.federation.layout.num_params == length
    found = played.models
    assert len(found) == len(expected) == ROUNDS
    for model, arrays in zip(found, expected, strict=True):
        flat = np.concatenate([arrays[name].ravel() for name in start])
        np.testing.assert_allclose(model, flat, rtol=1e-6, atol=1e-6)
    finite = np.isfinite(found[-1])
    assert np.abs(found[-1][finite] - found[0][finite]).max() > 1e-3
    moved = []
    for client in range(M):
        for local in clients.local(clients.start):
            here, there = arrays_of(clients.own[client]), arrays_of(apart.own[client])
            np.testing.assert_allclose(here[local], there[local], rtol=1e-6, atol=1e-6)
            moved.append(not np.array_equal(here[local], start[local]))
    assert any(moved) == bool(clients.local(clients.start))


def test_copies_are_refused_until_something_is_said_of_them(play: Any) -> None:
    kind = KINDS["tied weights"]
    clients = Clients(kind)
    start = arrays_of(clients.start)
    with pytest.raises(DeltaflError, match=r"'0.weight' and '2.weight' hold the same .*tied=True"):
        play("uniform", m=M, model=start, work=clients.work)


def test_an_infinite_array_is_refused_with_its_cure(play: Any) -> None:
    clients = Clients(KINDS["masked attention"])
    start = arrays_of(clients.start)
    with pytest.raises(DeltaflError, match=r"array 'mask' .*; write buffers=\['mask'\]"):
        play("uniform", m=M, model=start, work=clients.work)


@pytest.mark.parametrize("name", ["LoRA", "personal head", "tied weights"])
def test_a_server_resumes_with_what_was_never_sent(play: Any, name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    start = arrays_of(Clients(kind).start)

    def played(rounds: int, clients: Clients, path: Path | None, **changed: Any) -> Any:
        settings = {**kind.settings, "state_path": path, **changed}
        return play(
            "pracdelta", m=M, rounds=rounds, work=clients.work, **{"model": start, **settings}
        )

    through = played(4, Clients(kind), None)
    clients = Clients(kind)
    played(2, clients, tmp_path)
    again = played(4, clients, tmp_path)
    assert np.array_equal(again.models[-1], through.models[-1])
    one = kind.names(start, *kind.trained)[-1]
    for changed in ({"local": [one]}, {"trainable": [one]}):
        with pytest.raises(DeltaflError, match="belongs to a model with other arrays"):
            played(4, clients, tmp_path, **changed)
    for frozen in again.federation.layout.names("frozen")[:1]:
        base = {**start, frozen: start[frozen] + 1}
        with pytest.raises(DeltaflError, match="was trained beside other frozen arrays"):
            played(4, clients, tmp_path, model=base)


@pytest.mark.parametrize("name", ["LoRA", "personal head"])
def test_what_is_not_sent_does_not_leave_a_client_either(play: Any, name: str) -> None:
    """Though the app replies with everything it has."""
    kind = KINDS[name]
    clients = Clients(kind)
    start = arrays_of(clients.start)
    apart = set(start) - set(kind.sent(start))
    replies = []

    def work(client: int, fault: str, sent: Any, take: Take) -> Any:
        arrays = clients.work(client, fault, sent, take)
        return {**arrays_of(clients.own[client]), **arrays}

    def heard(layout: Any, arrays: Any) -> str | None:
        replies.append(arrays)
        return fault_of(layout, arrays)

    fault_of = ModelParts.fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelParts, "fault", heard)
        played = play("uniform", m=M, rounds=2, model=start, work=work, **kind.settings)
    assert played.history[-1].num_responded == N
    assert apart and len(replies) == 2 * N
    for arrays in replies:
        assert all(arrays[name].size == 0 for name in apart)
        assert all(arrays[name].size == start[name].size for name in kind.sent(start))
