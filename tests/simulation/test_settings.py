"""Settings: defaults, files, and one clear sentence for every mistake."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltafl import DeltaflError, Population, PracDelta
from deltafl.simulation.comparisons.pilot import PlanSettings
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.tasks.own import registered_spec


def test_what_is_left_out_comes_from_the_task() -> None:
    settings = make_settings(RunSettings, {"task": "fashion-mnist"})
    assert (settings.clients, settings.sample, settings.rounds, settings.local_epochs) == (
        300,
        20,
        500,
        5,
    )
    assert (settings.batch_size, settings.local_lr, settings.partition, settings.alpha) == (
        32,
        0.01,
        "hsu2019",
        0.1,
    )
    assert (
        make_settings(RunSettings, {"task": "fashion-mnist", "local_steps": 7}).local_epochs is None
    )


def test_the_default_samplers_need_no_labels_where_the_task_has_none() -> None:
    default = make_settings(CompareSettings, {}).samplers
    assert "balanced" in default
    assert make_settings(CompareSettings, {"task": "toy"}).samplers == tuple(
        s for s in default if s != "balanced"
    )
    assert make_settings(CompareSettings, {"task": "toy", "samplers": default}).samplers == default


@pytest.mark.parametrize(
    ("given", "seeds"),
    [(3, (0, 1, 2)), ("2", (0, 1)), ("3,5,8", (3, 5, 8)), ("7,", (7,)), ([4, 0], (4, 0))],
)
def test_seeds_are_a_number_or_a_list(given: object, seeds: tuple[int, ...]) -> None:
    assert make_settings(CompareSettings, {"seeds": given}).seeds == seeds


@pytest.mark.parametrize("given", ["two", 0, "0", True, 2.5, 100_001, "3,3", "3,x", ",", [], [-1]])
def test_other_seeds_are_refused(given: object) -> None:
    with pytest.raises(DeltaflError, match="seed"):
        make_settings(CompareSettings, {"seeds": given})


def test_stopping_at_the_threshold_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(registered_spec("toy"), threshold=None)
    monkeypatch.setattr("deltafl.simulation.settings.registered_spec", lambda _: spec)
    with pytest.raises(DeltaflError, match="stop_at_threshold needs a threshold"):
        make_settings(RunSettings, {"task": "toy", "stop_at_threshold": True})
    assert make_settings(
        RunSettings, {"task": "toy", "stop_at_threshold": True, "threshold": 2}
    ).stop_at_threshold


def test_server_momentum_is_filled_in_where_it_is_used() -> None:
    assert (
        make_settings(RunSettings, {"server_optimizer": "momentum"}).part_settings()[
            "server_momentum"
        ]
        == 0.9
    )
    assert (
        make_settings(RunSettings, {"server_optimizer": "adam"}).part_settings()["server_momentum"]
        is None
    )
    given = {"server_optimizer": "momentum", "server_momentum": 0.0}
    assert make_settings(RunSettings, given).part_settings()["server_momentum"] == 0.0


def test_options_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'task = "digits"\nrounds = 7\nsamplers = ["uniform", "fedis@multinomial"]\nproximal = '
        "0.01\n"
    )
    settings = make_settings(CompareSettings, {"rounds": 9}, config)
    assert (settings.rounds, settings.proximal) == (9, 0.01)
    assert settings.samplers == ("uniform", "fedis@multinomial")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sampler": "prakdelta"}, ["prakdelta", "pracdelta"]),
        ({"sampler": "fedis@pivotl"}, ["pivotl", "pivotal"]),
        ({"sampler": "uniform@pivotal@hayek"}, ["hayek", "hajek"]),
        ({"sampler": "full@poisson"}, ["full", "poisson"]),
        ({"server_optimizer": "adamm"}, ["adamm", "adam"]),
        ({"sample": 101}, ["101", "100"]),
        ({"task": "fashionmnist", "label": "y"}, ["did you mean 'fashion-mnist'?"]),
        ({"task": ".", "label": "y"}, ["the task '.' is a folder", "column that names the client"]),
        ({"threshold": 70}, ["70", "between 0 and 1"]),
        ({"threshold": float("nan")}, ["threshold"]),
        ({"local_lr": 1e39}, ["local_lr is 1e+39; it must be in (0, 1e+37]"]),
        ({"rounds": 2**31}, ["rounds is 2147483648; it must be in [1, 2147483647]"]),
        ({"server_lr": -1}, ["it must be in (0, inf)"]),
        ({"truth": [1]}, ["truth is 1; a value is missing"]),
        ({"local_lr": -1}, ["local_lr", "-1", "in (0, inf)"]),
        ({"local_epochs": 1, "local_steps": 2}, ["local_epochs", "local_steps"]),
        ({"rouns": 3}, ["rouns", "rounds"]),
        ({"lr": 3}, ["did you mean 'local_lr' or 'lr_schedule' or 'server_lr'?"]),
        ({"n": 3}, ["the clients of a round are sample=3"]),
        ({"local_lr": "nan"}, ["local_lr is 'nan'; it must be a finite number"]),
        ({"floor": 0.1}, ["floor is an option of samplers", "(floor=0.1)"]),
        ({"server_momentum": 0.9}, ["server momentum is 0.9", "'sgd'", "'momentum'"]),
        (
            {"server_optimizer": "momentum", "server_momentum": 1},
            ["server_momentum", "1", "in [0, 1)"],
        ),
        ({"weights": "sizes"}, ["weights", "'data'", "'uniform'"]),
        ({"rounds": "ten"}, ["rounds", "ten", "whole number"]),
        ({"sample": True}, ["sample is True; only switches"]),
        ({"scaffold": 2}, ["scaffold is 2; it must be true or false"]),
        ({"label": 1, "task": "t.csv"}, ["label is 1; it must be text"]),
        ({"device": "gpu"}, ["device is 'gpu'", "write cpu, cuda, cuda:N or auto"]),
        ({"memory_path": ""}, ["memory_path is ''", "name of a folder"]),
        ({"data_dir": " "}, ["data_dir is ' '", "name of a folder"]),
        ({"device": "cuda", "workers": 2}, ["workers is 2", "'cuda'", "workers = 1"]),
        ({"precision": "bfloat16", "workers": 2}, ["workers is 2", "'bfloat16'", "workers = 1"]),
    ],
)
def test_mistakes_end_in_one_sentence(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DeltaflError) as error:
        make_settings(RunSettings, given)
    sentence = str(error.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_a_missing_file_and_a_sampler_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="twice"):
        make_settings(CompareSettings, {"samplers": "uniform,uniform"})
    with pytest.raises(DeltaflError, match=r"missing\.toml"):
        make_settings(RunSettings, {}, tmp_path / "missing.toml")


def test_theory_constants_follow_local_steps_and_design() -> None:
    settings = make_settings(RunSettings, {"local_steps": 4, "rounds": 100, "sample": 10})
    facts = settings.run_facts(Population.from_sizes([15] * 100))
    a1, a2 = PracDelta("multinomial", alpha="theory").for_run(facts).constants
    assert (a1, a2) == pytest.approx((20 / 4 / 10, 5 / 10 + (4 / 10) ** 0.5))
    a1, a2 = PracDelta(alpha="theory").for_run(facts).constants
    assert (a1, a2) == pytest.approx((10 * 20 / 4 / 10, 10 * 5 / 10 + (4 / 10) ** 0.5))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (RunSettings, {"sample": "auto"}),
        (RunSettings, {"sampler": "uniform+relative_error=0.3"}),
        (PlanSettings, {}),
    ],
)
def test_where_n_is_to_be_found_few_clients_need_no_n(kind: Any, given: Any) -> None:
    """The digits' own n is 10."""
    assert make_settings(kind, {"clients": 6, **given}).sample == 6
    assert make_settings(kind, {"clients": 60, **given}).sample == 10


def test_a_label_may_have_cohorts_that_size_themselves() -> None:
    labels = ["uniform", "uniform+sample=auto", "uniform+budget=40+budget_rounds=4"]
    settings = make_settings(CompareSettings, {"samplers": labels, "sample": 7})
    fixed, auto, budget = (settings.run(label, 0) for label in labels)
    assert (fixed.sample, auto.sample, budget.sample) == (7, 7, 7)
    assert [len(fixed.parts()) + 1] * 2 == [len(auto.parts()), len(budget.parts())]


def test_a_file_may_be_a_path(tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.csv"
    assert make_settings(RunSettings, {"speeds": speeds}).speeds == str(speeds)
