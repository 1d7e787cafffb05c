"""Labels: names, options, designs and estimators in one line of text; and samplers from a user's
file.
"""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import (
    DESIGNS,
    SAMPLERS,
    Delta,
    DeltaflError,
    FedIS,
    Fixed,
    Population,
    PowerOfChoice,
    PracDelta,
    RunFacts,
    make_plan,
    make_sampler,
)
from deltafl.calls import parse_call, write_call
from deltafl.estimators.table import find_estimator
from deltafl.federation.rules import make_rules
from deltafl.samplers import Label, bias_of, file_name, is_unbiased, parse_label, split_labels
from deltafl.samplers.cluster import ClusterIS, ClusterISOracle
from deltafl.samplers.hics import HicsFL
from deltafl.samplers.label import label_of, needs_scores, split_settings
from deltafl.samplers.large_loss import ActiveFL
from deltafl.samplers.online import MirrorDescent, VarianceBandit
from deltafl.samplers.urns import ClusteredBySimilarity
from deltafl.server.average import Average
from deltafl.server.clipping import Clip
from deltafl.simulation.settings import CompareSettings, make_settings

POPULATION = Population.from_sizes([3, 1, 2, 4])
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sampler.py"


@pytest.mark.parametrize(
    ("label", "sampler"),
    [
        ("uniform", Fixed("systematic")),
        ("md", Fixed("multinomial", by_weight=True)),
        ("fedis@pivotal@difference", FedIS("pivotal", 0.0)),
        ("cluster-is-oracle", ClusterISOracle(5, "systematic", 0.0)),
        (
            "delta(floor=0.3, alpha=(1.0, 2.0))@poisson",
            Delta("poisson", 0.3, (1.0, 2.0)),
        ),
        ("cluster-is(clusters=7,drop_small_after=3)", ClusterIS(7, "systematic", 0.1, 3)),
        ("power-of-choice(candidates=None)", PowerOfChoice()),
        ("clustered-sampling-2(sketch_size=9)", ClusteredBySimilarity(9)),
        ("vrb(mixing=0.25,horizon=77)@systematic", VarianceBandit("systematic", 0.25, 77)),
        ("osmd(mixing=0.3)@poisson", MirrorDescent("poisson", 0.3)),
        ("active-fl(alpha1=0.5,alpha2=1,alpha3=0)", ActiveFL(0.5, 1, 0)),
    ],
)
def test_a_label_makes_a_sampler_and_its_shortest_form_the_same(
    label: str, sampler: object
) -> None:
    assert make_sampler(label) == sampler
    assert make_sampler(str(parse_label(label))) == sampler


def test_labels_are_taken_apart_and_written() -> None:
    assert parse_label("pracdelta@pivotal") == Label("pracdelta", {}, "pivotal", "horvitz-thompson")
    assert parse_label("delta@@ratio") == Label("delta", {}, "systematic", "hajek")
    assert parse_label("full") == Label("full", {}, None, "horvitz-thompson")
    assert (
        parse_label("osmd(mixing=0.3)@poisson@fedstale(beta=0.8)").estimator == "fedstale(beta=0.8)"
    )
    written = {
        "osmd( mixing = 0.30 )@multinomial": "osmd(mixing=0.3)",
        "pracdelta(floor=0, alpha=(1, 2))@@horvitz-thompson": "pracdelta(alpha=(1,2),floor=0)",
        "uniform@@difference": "uniform@@difference",
        "full": "full",
        "census@@ + scaffold + average = 0.50": "census+average=0.5+scaffold",
        "osmd(mixing=0.3)@poisson@hajek+server_optimizer=adam": "osmd(mixing=0.3)@poisson@hajek+server_optimizer=adam",
        "uniform+scaffold=False": "uniform+scaffold=False",
    }
    assert {text: str(parse_label(text)) for text in written} == written
    assert parse_label("census+average=0.5+scaffold").settings == {"scaffold": True, "average": 0.5}


@pytest.mark.parametrize("value", ["b, c", "True", "", "it's", (1, 2), (0.5,), -1e-9, None])
def test_what_an_option_is_written_as_is_read_as_its_value(value: object) -> None:
    assert parse_call(write_call("name", {"option": value})) == ("name", {"option": value})


@pytest.mark.parametrize("value", [np.int64(10), np.float32(0.5), np.float64(0.1), np.bool_(True)])
def test_numbers_of_numpy_are_written_as_those_of_python(value: Any) -> None:
    assert write_call("name", {"option": value}) == f"name(option={value.item()})"


@pytest.mark.parametrize("label", SAMPLERS)
def test_plain_labels_are_their_own_shortest_form_and_file_name(label: str) -> None:
    assert str(parse_label(label)) == file_name(label) == label


def test_file_names(tmp_path: Path) -> None:
    assert (
        file_name("fedis@systematic@hajek") == "fedis@systematic@hajek"
    )  # as older records have it
    assert file_name("pracdelta( alpha=theory,floor=0 )") == "pracdelta(alpha=theory,floor=0)"
    assert file_name(f"{EXAMPLE}:ByLoss(power=2)") == "own_sampler.py_ByLoss(power=2)"
    assert (
        file_name(f"{EXAMPLE}:ByLoss(power=2)+average=0.5")
        == "own_sampler.py_ByLoss(power=2)+average=0.5"
    )
    control = tmp_path / "mine.py"
    control.write_text(
        "from deltafl.estimators.control_variates import NoControl\nclass Mine(NoControl): pass\n"
    )
    assert file_name(f"uniform@@{control}:Mine") == "uniform@@mine.py_Mine"


@pytest.mark.parametrize("folder", ["", "a/", "../a b/", "/a/b/", "C:\\a\\"])
@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("uniform+lr_schedule={}x.py:f", "uniform+lr_schedule=_x.py_f_"),
        ("census+scaffold+lr_schedule={}x.py:f", "census+lr_schedule=_x.py_f_+scaffold"),
        ("{}my.py:S@@{}my.py:C", "my.py_S@@my.py_C"),
        ("{0}my.py:S(a=1)+lr_schedule={0}x.py:f", "my.py_S(a=1)+lr_schedule=_x.py_f_"),
    ],
)
def test_file_names_lose_folders_and_nothing_else(folder: str, label: str, name: str) -> None:
    assert file_name(label.format(folder, folder)) == name


def test_commas_inside_parentheses_do_not_split() -> None:
    text = "full, delta(alpha=(1,2),floor=0.1)@poisson , osmd,"
    assert split_labels(text) == ["full", "delta(alpha=(1,2),floor=0.1)@poisson", "osmd"]
    settings = make_settings(CompareSettings, {"task": "toy", "samplers": text})
    assert settings.samplers == tuple(split_labels(text))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("pracdleta", "did you mean 'pracdelta'"),
        ("delta@pivotl", "did you mean 'pivotal'"),
        ("delta@pivotal@hayek", "did you mean 'hajek'"),
        ("full@pivotal", "draws in its own way"),
        ("osmd(mixin=0.3)", "unknown option 'mixin' of 'osmd': did you mean 'mixing'"),
        ("md(by_weight=False)", "unknown option 'by_weight' of 'md'"),
        ("osmd(mixing=high)", "mixing of 'osmd' is 'high'; it must be a number"),
        ("power-of-choice(candidates=2.5)", "it must be a whole number or None"),
        ("cluster-is(clusters=True)", "it must be a whole number"),
        ("osmd(design=poisson)", "write osmd@poisson"),
        ("osmd(0.3)", "write name(option=value, ...)"),
        ("foo", "unknown sampler 'foo': choose one of active-fl"),
        ("osmd(mixing=0.3, mixing=0.4)", "an option is given twice"),
        ("pracdelta(alpha=other)", "alpha is 'other'"),
        ("uniform@pivotal@hajek@more", "is no label"),
        ("uniform+average=0.5+average=0.4", "an option is given twice"),
        ("uniform+average=", "cannot read the settings in 'uniform+average='"),
        ("uniform+local-lr=0.1", "write settings last and with underscores, such as"),
        (
            "uniform+average=0.5@pivotal",
            "cannot read the settings in 'uniform+average=0.5'; write settings last",
        ),
        ("mine.py", "'mine.py' names no class; write mine.py:CLASS"),
        ("nowhere.py:ByLoss", "there is no file nowhere.py; write FILE.py:Class"),
        (f"{EXAMPLE}:ByLos", "has no class 'ByLos' that is a subclass of deltafl.Sampler"),
        (
            "cluster-is(clusters=1,drop_small_after=5)",
            "drop_small_after needs clusters of at least 2",
        ),
        ("oort(least_exploration=0.95)", "it must be at most exploration, 0.9"),
        ("hics-fl(classes=1)", "hics-fl looks at labels, but classes is 1"),
        ("delta(alpha=(-1, 1))", "write a number above 0, a pair"),
        ("pracdelta(alpha=0)", "write a number above 0, a pair"),
        ("fedis(floor=-0.1)", "floor is -0.1; it must be in [0, 1]"),
        ("cluster-is(drop_small_after=0)", "drop_small_after is 0; it must be in [1, inf)"),
        ("innovation(forgetting=0)", "forgetting is 0; it must be in (0, 1]"),
        ("osmd(mixing=5e-324)", "mixing is 5e-324; it must be in [1e-12, 1]"),
        ("active-fl(alpha2=1e999)", "alpha2 is inf; it must be in [0, inf)"),
        ("hics-fl(gamma=-1)", "gamma is -1; it must be in [0, inf)"),
        ("uniform(per_cost=True)@simple-random", "simple-random draws need equal scores"),
        ("uniform(per_second=True)@simple-random", "simple-random draws need equal scores"),
        # In no time: a folder from elsewhere may name anything.
        ("a +" * 3000, "cannot read the settings"),
        ("a+" * 3000, "cannot read the settings"),
        ("+a='" * 3000, "cannot read the settings"),
        ("0" * 100_000, "unknown sampler '000"),
    ],
)
def test_wrong_labels(label: str, message: str) -> None:
    with pytest.raises(DeltaflError, match=re.escape(message)):
        make_sampler(label)


def test_every_range_belongs_to_an_option_that_its_default_is_in() -> None:
    for entry in SAMPLERS.values():
        assert set(entry.kind.ranges) <= {*entry.options, *entry.fixed}
        entry.make({})


def test_options_that_are_none_come_from_the_run() -> None:
    facts = RunFacts(rounds=77, local_steps=4, local_lr=0.1, num_classes=3, n=10, m=100)
    assert make_sampler("k-vib", facts) == VarianceBandit("poisson", None, 77)
    assert make_sampler("k-vib(horizon=5)", facts) == VarianceBandit("poisson", None, 5)
    assert make_sampler("hics-fl", facts) == HicsFL(3, 0.25, rounds=77)
    assert make_sampler("hics-fl(temperature=1.0)", facts) == HicsFL(3, 1.0, rounds=77)
    with pytest.raises(DeltaflError, match="hics-fl looks at labels, but classes is 0"):
        make_sampler("hics-fl", facts._replace(num_classes=0))
    drift = 10.0  # m / n, for designs without replacement
    for design, factor in (("multinomial", 1.0), ("systematic", drift)):
        sampler = make_sampler(f"delta(alpha=theory)@{design}", facts)
        assert isinstance(sampler, Delta)
        a1, a2 = sampler.constants
        assert (a1, a2) == pytest.approx(
            (factor * 20 / 4 / 77**0.5, factor * 5 / 77**0.5 + 0.4**0.5)
        )
    with pytest.raises(DeltaflError, match="needs the run's rounds and local steps"):
        _ = PracDelta(alpha="theory").constants


def test_a_plus_in_a_files_name_is_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "c++own+a" / "sampler_in_a_folder.py"
    path.parent.mkdir()
    path.write_text(EXAMPLE.read_text())
    parsed = parse_label(f"{path}:ByLoss(power=2)+average=0.5")
    assert (parsed.name, parsed.options, parsed.settings) == (
        f"{path}:ByLoss",
        {"power": 2},
        {"average": 0.5},
    )


@pytest.mark.parametrize(
    ("label", "method", "settings"),
    [
        ("full+lr_schedule=cosine", "full", {"lr_schedule": "cosine"}),
        (
            "md@pivotal+lr_schedule=step(every=1,factor=0.5)+average=0.5",
            "md@pivotal",
            {"lr_schedule": "step(every=1,factor=0.5)", "average": 0.5},
        ),
        ("a+b.py:K(x=1)+fixed_order", "a+b.py:K(x=1)", {"fixed_order": True}),
        ("full+lr_schedule=mine.py:half", "full", {"lr_schedule": "mine.py:half"}),
        ("full+lr_schedule='mine.py:half'", "full", {"lr_schedule": "mine.py:half"}),
        ("md@pivotal + average = 0.5", "md@pivotal", {"average": 0.5}),
    ],
)
def test_settings_in_a_label_may_have_options(
    label: str, method: str, settings: dict[str, Any]
) -> None:
    assert split_settings(label) == (method, settings)
    if "a+b" not in label:
        assert split_settings(str(parse_label(label)))[1] == settings


def test_a_plan_takes_its_settings_from_the_label() -> None:
    plan = make_plan("census+average=0.5+scaffold", [1, 2, 3], n=2, average=0.3)
    assert [part.name for part in plan.parts] == ["scaffold", "server_optimizer", "average"]
    assert (plan.part("average"), plan.estimator) == (Average(0.5), "two-phase")
    assert make_rules("uniform+clip=median", n=2).plan.part("clip") == Clip("median")


@pytest.mark.parametrize(
    ("label", "given", "words"),
    [
        ("uniform+proximal=0.1", {}, "proximal is of the simulator's local training"),
        ("uniform", {"local_lr": 0.1}, "local_lr is of the simulator's local training"),
        ("uniform", {"per_cost": True}, r"write it in the label, as in \w+\(per_cost=True\)"),
        ("uniform+averag=0.1", {}, "unknown setting 'averag': did you mean 'average'"),
    ],
)
def test_a_setting_that_belongs_elsewhere_is_refused_with_its_place(
    label: str, given: dict[str, Any], words: str
) -> None:
    for make in (partial(make_plan, label, [1, 2, 3], n=2), partial(make_rules, label, n=2)):
        with pytest.raises(DeltaflError, match=words):
            make(**given)


def test_a_sampler_in_a_file_of_ones_own(tmp_path: Path) -> None:
    label = f"{EXAMPLE}:ByLoss(power=2)"
    sampler = make_sampler(label)
    assert (type(sampler).__name__, vars(sampler)) == ("ByLoss", {"power": 2, "floor": 0.2})
    assert is_unbiased(label)
    assert parse_label(label).estimator == "horvitz-thompson"
    file = tmp_path / "my_odd_samplers.py"
    file.write_text(
        "from dataclasses import dataclass\nimport deltafl\nfrom deltafl.samplers.base import "
        "NewFirst\n"
        "@dataclass(frozen=True)\nclass Biased(NewFirst):\n    pass\n"
        "@dataclass(frozen=True)\nclass Needing(NewFirst):\n    power: float\n"
        "class Bare(NewFirst):\n    power: float = 1\n"
        "class Inheriting(Biased):\n    pass\n"
        "@dataclass(frozen=True)\nclass Empty(deltafl.Sampler):\n    pass\n"
        "@dataclass(frozen=True)\nclass Blind(NewFirst):\n    def open(self, state, available_m, "
        "n, rng): pass\n"
        "@dataclass(frozen=True)\nclass Picky(NewFirst):\n    power: float = 1\n"
        "    def __post_init__(self): assert self.power > 0, 'too weak'\n"
    )
    assert parse_label(f"{file}:Biased").estimator == "plain-mean"
    assert bias_of(f"{file}:Biased") == "estimator plain-mean"
    # Without options of its own, those of the class above it are all.
    assert parse_label(f"{file}:Inheriting").estimator == "plain-mean"
    for name, message in (
        ("Needing", "give every option a default"),
        ("Bare", "write @dataclass"),
        ("Empty", "lacks open"),
        (
            "Blind",
            r"takes \(state, .*; write open\(self, state, available_m, n, rng, oracle=None\)",
        ),
        ("Picky(power=-1)", "my_odd_samplers.py:Picky cannot be made: AssertionError: too weak"),
    ):
        with pytest.raises(DeltaflError, match=message):
            parse_label(f"{file}:{name}")


def test_what_makes_a_method_biased() -> None:
    assert bias_of("fedis") is None
    assert bias_of("fedis@successive") == "design successive"
    assert bias_of("fedavg") == "estimator hajek"
    assert bias_of("uniform+average=0.5") is None
    assert bias_of("uniform+clip=median") == "clip"
    assert bias_of("uniform+clip=None") is None
    for label in ("pracdelta(floor=0)", "cluster-is(drop_small_after=2)"):
        assert bias_of(label) == "draws that leave clients out"
    for label, condition in {
        **dict.fromkeys(
            ("aocs@@innovation", "delta@@fedstale", "delta", "fedis@systematic@difference"), True
        ),
        **dict.fromkeys(
            ("fedis(floor=0.1)@systematic@difference", "fedis", "delta(floor=0.1)"), False
        ),
    }.items():
        assert bias_of(label) is None
        control = find_estimator(parse_label(label).estimator).control
        assert needs_scores(make_sampler(label), control) == condition, label


def test_a_plan_knows_how_its_user_writes_its_method() -> None:
    """Of several names of one sampler (``ocs`` draws as ``fedis@poisson``) one that makes the same
    plan, with its estimator.
    """
    aux_mq = np.eye(4)[[0, 1, 2, 3] * 3]
    people = Population.from_sizes([3, 1, 2, 4] * 3, aux=aux_mq)
    written = [
        row.name if design is None else f"{row.name}@{design}"
        for row in SAMPLERS.values()
        for design in ((None,) if row.design is None else (None, *DESIGNS))
    ]
    made = dict[str, Any]()
    for label in written:
        with suppress(DeltaflError):  # such as a design that a sampler cannot have
            made[label] = make_plan(label, people, n=3)
    assert len(made) > 250
    for label, plan in made.items():
        again = make_plan(plan.method, people, n=3)
        assert (again.sampler, again.rule.name) == (plan.sampler, plan.rule.name), label
    assert made["uniform@poisson"].method == "uniform@poisson"
    assert make_plan("uniform@simple-random", people, n=3).method == "uniform@simple-random"
    # An instance without an estimator has an unbiased one, as in ``make_plan``.
    assert label_of(Fixed("pivotal")) == "uniform@pivotal"
