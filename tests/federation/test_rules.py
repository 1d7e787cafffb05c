"""Settings that no federation can have, and what those that it can have mean."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, DifferentialPrivacy
from deltafl.federation.rules import make_rules

DP = DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "balanced"}, "write aux=10 if each has 10"),
        ({"sampler": "census", "aux": 3}, "census in place of auxiliary variables; leave out aux"),
        ({"sampler": "pracdeltta"}, "did you mean 'pracdelta'"),
        ({"sampler": "delta"}, "practical sampler"),
        ({"sampler": "uniform+mime=1.0"}, r"mime is 1.0; it must be in \[0, 1\)"),
        ({"sampler": "innovation", "memory_path": "rows"}, "there is no state_path: write both"),
        ({"n": True}, "n is True; it must be a whole number"),
        ({"aux": -1}, "aux is -1; it must be a whole number"),
        ({"seed": -1}, "seed is -1; it must be a whole number"),
        ({"min_clients": 0}, r"min_clients is 0; .* \(min_nodes in Flower\)"),
        ({"max_ratio": 0.5}, "max_ratio is 0.5"),
        ({"weights": "size"}, "weights is 'size'; write 'data'"),
        ({"identity": "node"}, "unknown identity 'node'"),
        ({"dp": 3.0}, "dp is 3.0; write DifferentialPrivacy"),
        ({"sampler": "innovation", "dp": DP}, "it learns from replies, and its draws would show"),
        ({"forget": "client:a"}, "forget is 'client:a'; it must be a list of texts"),
        ({"buffers": None}, "buffers is None; it must be a list of texts"),
        ({"local": "head"}, "local is 'head'; it must be a list of texts"),
        ({"trainable": [3]}, r"trainable is \[3\]; it must be a list of texts"),
        ({"trainable": None}, "trainable is None; it must be a list of texts"),
        ({"tied": 1}, "tied is 1; write True, False, or None"),
        ({"weighted_by_key": 3}, "weighted_by_key is 3; write the name"),
        ({"fraction_train": 0.0}, r"fraction_train is 0.0; it must be a number in \(0, 1\]"),
        ({"fraction_train": 0.5, "n": 3}, "n = 3 and fraction_train = 0.5 say the same"),
        (
            {"sampler": "uniform@poisson", "dp": DP, "seed": 2**60, "fraction_train": 0.5},
            "leaves open; write n",
        ),
        ({"registration_timeout": float("nan")}, "registration_timeout is nan"),
        ({"registration_timeout": "10"}, r"is '10'; it must be a number of seconds in \(0, inf\)"),
        ({"state_path": ""}, "state_path is ''; write the name of a folder, or None"),
        ({"state_path": "a\0b"}, "state_path is .*; write the name of a folder, or None"),
        ({"state_path": "~nobody-is-called-so/a"}, "Could not .*; write the whole path"),
        ({"memory_path": 3}, "memory_path is 3; write the name of a folder, or None"),
        ({"avrage": 0.5}, "did you mean 'average'"),
        ({"max_rato": 2}, "did you mean 'max_ratio'"),
        ({"plan": None}, "unknown setting 'plan'"),
    ],
)
def test_impossible_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeltaflError, match=message):
        make_rules(**{"sampler": "uniform", **settings})


def test_numbers_that_numpy_has_counted_are_those_that_are_typed() -> None:
    typed = {"n": 3, "min_clients": 4, "aux": 2, "seed": 5, "absent_after": 6}
    counted: dict[str, Any] = {name: np.int64(number) for name, number in typed.items()}
    rules = make_rules(**counted)
    assert [type(x) for x in (rules.plan.n, rules.min_clients, rules.aux)] == [int] * 3
    plain = make_rules(**typed)  # type: ignore[arg-type]
    assert (rules.registration, rules.plan.n) == (plain.registration, plain.plan.n)
    assert rules.min_clients == 4


def test_defaults_follow_from_other_settings(tmp_path: Path) -> None:
    plain = make_rules("uniform", 4)
    assert (plain.min_clients, plain.max_ratio, plain.own_seed) == (4, None, True)
    robust = make_rules("uniform", 4, str(tmp_path), clip="median", min_clients=2, seed=1)
    assert (robust.min_clients, robust.max_ratio, robust.own_seed) == (2, 1.0, False)
    assert robust.state_path == tmp_path
    assert make_rules("uniform", clip="median", max_ratio=5.0).max_ratio == 5.0


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    rules = make_rules("innovation", state_path="~/a", memory_path=Path("~/b"))
    assert rules.state_path == tmp_path / "a"
    assert Path(str(rules.plan.memory.folder)).parent == tmp_path / "b"
