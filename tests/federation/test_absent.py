"""Clients that are away for long leave the target, and have their weight back when they return."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.federation import Federation
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save
from deltafl.scale.named_arrays import named_arrays
from deltafl.types import Params

from .tools import admit, federation, sizes_of

AFTER = 4


def step_of(key: str) -> Params:
    number = int(key.removeprefix("client:"))
    return np.array([1, number, number**2 - 7], np.float32)


def rounds(
    fed: Federation, number: int, present: Sequence[str], save_to: Path | None = None
) -> None:
    """Rounds in which these clients are there; each moves the model by its own step."""
    for _ in range(number):
        cohort = fed.open(present)
        sent = fed.arrays()["x"]
        fed.close(
            cohort,
            {key: ClientReply({"x": sent + step_of(key)}, loss=1.0) for key in fed.keys_of(cohort)},
        )
        if save_to is not None:
            save(save_to, fed)


def away(label: str = "uniform", **settings: Any) -> tuple[Federation, list[str], list[str]]:
    """A federation in which 2 of 5 clients are away after round 1; who stays and who is away."""
    fed = federation(label, m=5, **{"n": 2, "absent_after": AFTER, **settings})
    rounds(fed, 2, fed.keys)
    return fed, fed.keys[:3], fed.keys[3:]


def test_weights_of_the_absent_leave_and_come_back() -> None:
    fed, here, gone = away()
    sizes = np.array([10, 15, 20, 25, 30])
    rounds(fed, AFTER, here)
    assert fed.keys == here + gone
    assert fed.plan.population.weight_m == pytest.approx(sizes / 100)
    rounds(fed, 1, here)
    assert fed.keys == here
    assert fed.plan.population.weight_m == pytest.approx(sizes[:3] / 45)
    assert fed.warnings == [
        "2 clients were not there for 4 rounds; not counted until they return: 'client:3', "
        "'client:4'"
    ]
    admit(fed, sizes_of(5))
    assert fed.plan.population.weight_m == pytest.approx(sizes / 100)
    rounds(fed, 1, fed.keys)


def test_one_round_of_presence_keeps_the_weight() -> None:
    fed, here, gone = away()
    for _ in range(3):
        rounds(fed, AFTER, here)
        rounds(fed, 1, here + gone[:1])
    assert fed.keys == here + gone[:1]


@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_the_estimate_is_unbiased_for_the_clients_that_were_there(weights: str) -> None:
    """Over every cohort, by its probability, 1 / 3: the mean over the clients of the last rounds."""
    fed, here, _ = away(weights=weights)
    rounds(fed, AFTER, here)
    moved = dict[tuple[int, ...], Params]()
    plan = fed.plan
    state = fed.current
    clients = dict(fed.clients)
    seed = 0
    while len(moved) < 3:
        fed.plan = replace(plan, seed=seed)
        fed.rules = replace(fed.rules, plan=replace(fed.rules.plan, seed=seed))
        fed.state = state
        fed.clients = dict(clients)
        seed += 1
        rounds(fed, 1, here)
        drawn_m = np.asarray(fed.current.selected_m) > np.asarray(state.selected_m)[:3]
        cohort = tuple(np.flatnonzero(drawn_m).tolist())
        moved[cohort] = fed.params_d - state.params_d
    assert set(moved) == set(combinations(range(3), 2))
    size_m = np.array([10, 15, 20]) if weights == "data" else np.ones(3)
    target_d = size_m / size_m.sum() @ np.array([step_of(key) for key in here])
    assert np.mean([*moved.values()], axis=0) == pytest.approx(target_d, rel=1e-5)


def test_identities_that_leave_leave_the_weight_to_the_others() -> None:
    fed = federation("uniform", m=10, n=3, absent_after=AFTER)
    honest = fed.keys
    admit(fed, {f"client:{i}": 2**40 for i in range(100, 1100)})
    rounds(fed, 1 + AFTER, honest)
    share = fed.plan.population.weight_m[:10].sum()
    assert share < 1e-10
    rounds(fed, 1, honest)
    assert fed.keys == honest
    assert fed.plan.population.weight_m.sum() == pytest.approx(1)
    assert fed.scales.known.keys() | fed.seen.keys() == {*honest}


@pytest.mark.parametrize(
    "label", ["uniform", "innovation", "pracdelta@systematic@difference-own", "census", "k-vib"]
)
def test_a_restart_changes_nothing(label: str, tmp_path: Path) -> None:
    """Nor does the moment of it: before, while and after clients leave and return."""
    ended = []
    for restarts in (False, True):
        fed, here, _ = away(label, clip="median")
        for present in [here] * (AFTER + 2) + [[*sizes_of(5)]] * 2:
            admit(fed, {key: size for key, size in sizes_of(5).items() if key in present})
            rounds(fed, 1, present, save_to=tmp_path / str(restarts))
            if restarts:
                fed = Federation(fed.rules, {"x": np.zeros(3, np.float32)})
                assert load(tmp_path / str(restarts), fed)
        assert fed.keys == [*sizes_of(5)]
        ended.append({name: array.tobytes() for name, array in named_arrays(fed.current)})
    assert ended[0] == ended[1]


def test_none_keeps_everybody() -> None:
    fed, here, gone = away(absent_after=None)
    rounds(fed, 100, here)
    assert fed.keys == here + gone
    for wrong in (0, True, 2.0, "5"):
        with pytest.raises(DeltaflError, match=r"absent_after is .*; it must be a whole number"):
            make_rules("uniform", absent_after=wrong)


def test_who_is_described_jointly_stays() -> None:
    fed, here, gone = away("clustered-sampling-2")
    rounds(fed, AFTER + 2, here)
    assert fed.keys == here + gone
    assert not fed.warnings


def test_a_model_that_is_put_back_gives_no_weight_back() -> None:
    fed, here, gone = away()
    rounds(fed, AFTER + 1, here)
    assert fed.keys == here
    fed._go_back_if("the model is lost")
    assert fed.keys == here + gone
    rounds(fed, 1, here)
    assert fed.keys == here
