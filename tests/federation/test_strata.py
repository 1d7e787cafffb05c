"""Strata in a federation: what clients report, and what a saved state keeps of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.federation import Federation
from deltafl.federation.registration import read_info
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save

from .tools import federation, play

REGIONS = ["north", "south", "east"]


def joined(regions: list[str], label: str = "uniform+at_least=1", **settings: Any) -> Federation:
    fed = federation(label, strata=REGIONS, **settings)
    fed.admit({f"client:{i}": ClientInfo(10 + i, (), name) for i, name in enumerate(regions)})
    return fed


def test_clients_of_each_region_take_part() -> None:
    fed = joined(["north"] * 9 + ["south", "east", "south"])
    assert fed.plan.population.strata is not None
    for _ in range(5):
        cohort = fed.open(fed.keys)
        assert {*fed.plan.population.strata.code_m[cohort.client_n]} == {0, 1, 2}
        play(fed, 1)
    # Nobody of the east is there.
    cohort = fed.open([key for key in fed.keys if key != "client:10"])
    assert len(cohort.client_n) == 3


@pytest.mark.parametrize("label", ["uniform+at_least=2", "innovation+stages=2"])
def test_regions_come_and_go(label: str) -> None:
    """Fewer clients of a region than at_least, and fewer regions than stages, are no fault while a
    federation runs: whoever is there is asked.
    """
    fed = joined(["north"], label, n=6, min_clients=1)
    play(fed, 1)
    assert fed.open(fed.keys).client_n.tolist() == [0]
    fed.admit({f"client:{i}": ClientInfo(9, (), REGIONS[i % 3]) for i in range(1, 8)})
    play(fed, 2)
    fed.forget(["client:2", "client:5"])
    strata = fed.plan.population.strata
    assert strata is not None
    assert strata.names == ("north", "south")
    play(fed, 1)


def test_a_restart_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"state_path": tmp_path, "seed": 3}
    fed = joined(["north", "south", "east"] * 4, **settings)
    play(fed, 3)
    save(tmp_path, fed)
    again = federation("uniform+at_least=1", strata=REGIONS, **settings)
    load(tmp_path, again)
    assert again.clients == fed.clients
    for _ in range(3):
        assert np.array_equal(again.open(again.keys).client_n, fed.open(fed.keys).client_n)
        play(fed, 1)
        play(again, 1)
    other = federation("uniform+at_least=1", strata=["north", "west"], **settings)
    with pytest.raises(DeltaflError, match="other strata"):
        load(tmp_path, other)


@pytest.mark.parametrize("stratum", [None, "", "west", 3, ["north"], {}, "n" * 500])
def test_unknown_regions_are_refused(stratum: Any) -> None:
    with pytest.raises(DeltaflError, match="the server knows the strata north, south, east"):
        read_info({"num-examples": 5, "stratum": stratum}, make_rules(strata=REGIONS))


def test_a_region_that_nobody_asked_for_is_not_kept() -> None:
    report = {"num-examples": 5, "stratum": "north"}
    assert read_info(report, make_rules()) == ClientInfo(5)
    assert read_info(report, make_rules(strata=REGIONS)).stratum == "north"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"at_least": 1}, r"in a federation strata="),
        ({"at_least": 1, "strata": "north"}, "strata is 'north'; it must be a list of texts"),
        ({"at_least": 1, "strata": ["a", ""]}, "stratum of client 1 is ''"),
        ({"at_least": 4, "strata": REGIONS}, "more than the 10 clients"),
        ({"stages": 4, "strata": REGIONS}, "with 3 strata"),
        ({"at_least": 1, "strata": REGIONS, "n": 2}, "more than the 2 clients"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        make_rules("uniform", **settings)
    assert make_rules("uniform", n="auto", at_least=1, strata=REGIONS).plan.n == 10
