"""A federation that survives: updates that lead too far, a lost model, the states before it."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.federation.clients import ClientInfo
from deltafl.federation.federation import Federation
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save
from deltafl.model.arrays import Arrays

from .tools import admit, federation, play, play_once, sizes_of

TARGETS = {i: float(1 + i % 5) for i in range(9)}


def loss_of(fed: Federation, client: int) -> float:
    return float(
        np.mean((fed.arrays()["x"].astype(np.float64) - TARGETS[int(fed.keys[client][7:])]) ** 2)
    )


def honest(fed: Federation, client: int) -> ClientReply:
    """Half the way to the client's target, in float32 as a client trains."""
    x = fed.arrays()["x"]
    with np.errstate(all="ignore"):
        x = x - np.float32(0.5) * (x - np.float32(TARGETS[int(fed.keys[client][7:])]))
    return ClientReply({"x": x}, loss=loss_of(fed, client))


def lie(fed: Federation, size: float, label: str = "uniform") -> int:
    """Play until client 0 has replied with entries of this size, and a round more; how many
    replies were refused.
    """
    refused = 0
    done = False
    while not done:
        cohort = fed.open(fed.keys)
        replies = {client: honest(fed, client) for client in cohort.client_n.tolist()}
        if 0 in replies:
            replies[0] = ClientReply({"x": np.full(3, size, np.float32)}, loss=1.0)
            done = True
        by_key = {fed.keys[client]: reply for client, reply in replies.items()}
        refused += len(fed.close(cohort, by_key).rejected)
    return refused + len(play_once(fed, lambda client: honest(fed, client)).rejected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [0, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize("label", ["uniform", "pracdelta", "innovation"])
def test_one_finite_reply_does_not_carry_the_model_away(label: str, n: int, before: int) -> None:
    """Not even the first of all, alone; nobody else's reply is refused for it."""
    for size in (9e17, 1e30, 1e7):
        fed = federation(label, m=6, n=n, weights="uniform")
        for _ in range(before):
            play_once(fed, lambda client, fed=fed: honest(fed, client))  # type: ignore[misc]
        assert lie(fed, size) == 1
        for _ in range(10):
            assert not play_once(fed, lambda client, fed=fed: honest(fed, client)).rejected  # type: ignore[misc]
        assert np.abs(fed.params_d).max() < 20


def test_clients_are_not_refused_for_long_because_the_first_one_sent_next_to_nothing() -> None:
    fed = federation("uniform", m=6, n=1)
    lie(fed, 1e-30)
    infos = [play_once(fed, lambda client: honest(fed, client)) for _ in range(9)]
    assert sum(len(info.rejected) for info in infos) <= 1
    assert np.abs(fed.params_d).max() > 0.5


def lose(fed: Federation, size: float) -> None:
    """The model as a faulty server optimizer would leave it."""
    fed.state = fed.current._replace(params_d=np.full(3, size, np.float32))


@pytest.mark.parametrize(("memory", "restart"), [(False, False), (True, False), (False, True)])
def test_a_lost_model_is_put_back(memory: bool, restart: bool, tmp_path: Path) -> None:
    """By the clients' losses: the state before is back, also after a restart, and newcomers join
    again.
    """
    paths: dict[str, Any] = {
        "state_path": tmp_path / "state",
        "memory_path": tmp_path / "disk" if memory else None,
    }
    fed = federation("innovation", m=6, n=3, **paths)
    models = []
    for number in range(8):
        models.append(fed.params_d)
        if number == 6:
            admit(fed, sizes_of(7))
        play_once(fed, lambda client: honest(fed, client))
        if number == 7:
            lose(fed, 1e6)
        save(tmp_path / "state", fed)
    if restart:
        fed = federation("innovation", n=3, **paths)
        assert load(tmp_path / "state", fed)
    play_once(fed, lambda client: honest(fed, client))
    assert any(np.array_equal(fed.params_d, model) for model in models[5:])
    assert "the model of round" in fed.warnings[-1]
    assert fed.current.round == 9
    admit(fed, sizes_of(7))
    for _ in range(5):
        assert not play_once(fed, lambda client: honest(fed, client)).rejected
        save(tmp_path / "state", fed)
    assert np.abs(fed.params_d).max() < 20
    again = federation("innovation", n=3, **paths)
    assert load(tmp_path / "state", again)
    assert np.array_equal(again.params_d, fed.params_d)


def test_a_model_with_which_every_reply_is_refused_is_put_back() -> None:
    fed = federation("uniform", m=6, n=3)
    play(fed, 6, targets=TARGETS)
    good = fed.params_d
    lose(fed, 2.5e17)
    silent: Arrays = {"x": np.full(3, np.inf, np.float32)}
    for _ in range(3):
        play_once(fed, lambda client: ClientReply(silent))
    assert np.abs(fed.params_d - good).max() < 3
    play_once(fed, lambda client: ClientReply(None, "error"))
    assert sum("is put back" in warning for warning in fed.warnings) == 1


def test_one_client_cannot_pretend_that_the_model_is_lost() -> None:
    fed = federation("uniform", m=3, n=3)
    play(fed, 3, targets=TARGETS)
    play_once(fed, lambda client: honest(fed, client)._replace(loss=1.0 if client else 9e17))
    assert not fed.warnings


def test_a_state_is_for_its_owner_alone_and_two_older_ones_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "state"
    fed = federation("pracdelta", m=6)
    play(fed, 6, save_to=folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()
    } == dict.fromkeys(
        ["federation-1.safetensors", "federation-2.safetensors", "federation.safetensors"], 0o600
    )
    (folder / "federation-1.safetensors").replace(folder / "federation.safetensors")
    again = federation("pracdelta")
    assert load(folder, again)
    assert again.current.round == 5


def test_who_is_selected_is_a_secret_that_the_state_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # seeds as they are drawn
    seeds = {make_rules(n=2).plan.seed for _ in range(3)}
    assert len(seeds) == 3
    fed = federation("uniform", m=6, n=2, seed=None)
    play(fed, 1, save_to=tmp_path)
    again = federation("uniform", n=2, seed=None)
    assert load(tmp_path, again)
    assert again.plan.seed == again.rules.plan.seed == fed.plan.seed
    assert again.open(again.keys).client_n.tolist() == fed.open(fed.keys).client_n.tolist()


def test_who_is_forgotten_leaves_no_losses_to_be_judged_by() -> None:
    """Else the model that a heavy client has led away is put back whenever the others improve
    it.
    """
    target = {"client:0": 0.3, "client:1": 90.0}
    fed = federation("uniform", {"x": np.zeros(4, np.float32)}, n=2, seed=1)

    def answer(client: int) -> ClientReply:
        x_d = fed.arrays()["x"]
        goal = target[fed.keys[client]]
        return ClientReply(
            {"x": x_d + np.float32(0.3) * (goal - x_d)}, loss=1 + (goal - float(x_d[0])) ** 2
        )

    fed.admit({"client:0": ClientInfo(100)})
    play_once(fed, answer)
    fed.admit({"client:1": ClientInfo(100_000)})
    for _ in range(20):
        play_once(fed, answer)
    assert fed.params_d[0] > 80
    fed.forget({"client:1"})
    for _ in range(60):
        play_once(fed, answer)
    assert fed.params_d == pytest.approx(np.full(4, 0.3), abs=1e-3)
