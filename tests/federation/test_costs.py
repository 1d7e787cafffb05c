"""Costs in a federation: what clients report, what a liar gains, what a saved state keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.federation import Federation
from deltafl.federation.registration import read_info
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import FILE, load, save
from deltafl.store.sealed import read_sealed, write_sealed
from deltafl.types import DEAREST, FloatArray

from .tools import federation, play

LABEL = "uniform(per_cost=True)"


def joined(costs: list[float], label: str = LABEL, **settings: Any) -> Federation:
    fed = federation(label, costs=True, **settings)
    fed.admit({f"client:{i}": ClientInfo(10, (), None, cost) for i, cost in enumerate(costs)})
    return fed


def shares(fed: Federation) -> FloatArray:
    """Each client's share of the draws."""
    score_m = np.asarray(fed.current.sampler.score_m)
    return np.asarray(score_m / score_m.sum())


def test_who_costs_more_is_asked_less() -> None:
    fed = joined([1.0, 4.0, 4.0, 16.0])
    np.testing.assert_allclose(shares(fed), np.array([4, 2, 2, 1]) / 9)
    play(fed, 2)
    # Who registers anew may have another price, and newcomers theirs.
    fed.admit({"client:0": ClientInfo(10, (), None, 16.0), "client:4": ClientInfo(9, (), None, 1)})
    np.testing.assert_allclose(shares(fed), np.array([1, 2, 2, 1, 4]) / 10)


def test_a_lie_about_the_cost_gains_no_more_than_the_page_says() -> None:
    """With ``clip`` a client counts the median at least, whatever the minority of liars says: less
    than twice its equal share of the draws, and no more than an honest client of the median cost.
    """
    honest = [1.0, 2.0, 4.0, 9.0, 100.0, 100.0]
    for lie in (1e-9, 1.0, 1e9):
        fed = joined([*honest, lie], clip="median")
        share_m = shares(fed)
        assert share_m[-1] <= share_m[:3].min() * (1 + 1e-9)
        assert share_m[-1] < 2 / 7
    # Nor does a claim of any height spend more of a budget than this.
    counted_m = fed.plan.population.cost_m
    assert counted_m is not None
    assert counted_m[-1] == DEAREST * 9.0
    # Without it a claim is believed.
    assert shares(joined([*honest, 1e-9]))[-1] > 0.99


def test_a_restart_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"state_path": tmp_path, "seed": 3}
    fed = joined([1.0, 2.0, 3.0, 4.0], "innovation(per_cost=True)", **settings)
    play(fed, 3)
    save(tmp_path, fed)
    again = federation("innovation(per_cost=True)", costs=True, **settings)
    load(tmp_path, again)
    assert again.clients == fed.clients
    for _ in range(3):
        assert np.array_equal(again.open(again.keys).client_n, fed.open(fed.keys).client_n)
        play(fed, 1)
        play(again, 1)
    # Nothing says that the sampler needs them, and still they belong to the state.
    save(tmp_path, fed)
    arrays, header = read_sealed(tmp_path / FILE, "")
    for said in (None, {"client:0": 1.0}, dict.fromkeys(fed.keys, 0.0)):
        write_sealed(tmp_path / FILE, arrays, header | {"costs": said})
        with pytest.raises(DeltaflError, match="other costs than the setting costs wants"):
            load(tmp_path, federation("innovation(per_cost=True)", costs=True, **settings))


def test_a_state_from_before_there_were_costs_is_read(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"m": 4, "state_path": tmp_path, "seed": 3}
    fed = federation("uniform", **settings)
    play(fed, 1)
    save(tmp_path, fed)
    arrays, header = read_sealed(tmp_path / FILE, "")
    del header["costs"]
    write_sealed(tmp_path / FILE, arrays, header | {"strata": {}})
    again = federation("uniform", **settings)
    load(tmp_path, again)
    assert again.clients == fed.clients


@pytest.mark.parametrize(
    "cost", [None, "", "2", True, 0, -1.0, float("nan"), float("inf"), 1e10, 10**400, [1.0], {}]
)
def test_what_is_no_cost_is_refused(cost: Any) -> None:
    report = {"num-examples": 5, "cost": cost}
    with pytest.raises(DeltaflError, match=r"a number in \[1e-09, 1e9\], and the client's is"):
        read_info(report, make_rules(costs=True))
    assert read_info(report, make_rules()) == ClientInfo(5)
    assert read_info({"num-examples": 5, "cost": 2}, make_rules(costs=True)).cost == 2.0


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(DeltaflError, match="in a federation costs=True"):
        make_rules(LABEL)
    with pytest.raises(DeltaflError, match="costs is 1; write True, or False"):
        make_rules(LABEL, costs=1)
    with pytest.raises(DeltaflError, match="per_second needs"):
        make_rules("uniform(per_second=True)", costs=True)


def test_a_budget_in_the_clients_unit_never_ends_a_federation() -> None:
    """Nobody knows the costs before clients have come: then one client a round is the least."""
    fed = joined([100.0] * 4, "uniform", budget=250.0, budget_rounds=5)
    assert len(fed.open(fed.keys).client_n) == 1
    play(fed, 5)
    cheap = joined([0.01] * 4, "uniform", budget=0.1, budget_rounds=5)
    assert len(cheap.open(cheap.keys).client_n) == 2
