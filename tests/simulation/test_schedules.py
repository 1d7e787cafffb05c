"""Learning-rate schedules: their factors by hand, what clients do with them, what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltafl as dl
from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.run import run_single
from deltafl.simulation.schedules import as_text, factors_of
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import make_task
from tools.cli import deltafl_here
from tools.simulation import TINY, StopError, lines_of, quiet, run, stop_after


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("cosine(floor=1)", [1, 1, 1, 1]),
        ("cosine(floor=0.5,warmup=2)", [0.5, 1, 1, 0.75]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("linear(floor=0.2)", [1, 0.8, 0.6, 0.4]),
        ("step", [1, 1, 1, 1]),
        ("step(every=2,factor=0.1)", [1, 1, 0.1, 0.1]),
        ("step(every=1,factor=3,warmup=1)", [1, 1, 3, 9]),
        ("constant(warmup=9)", [1 / 9, 2 / 9, 3 / 9, 4 / 9]),
        (None, []),
    ],
)
def test_factors_by_hand(text: str | None, factors: list[float]) -> None:
    assert factors_of(text, 4) == pytest.approx(tuple(factors))


@given(
    st.sampled_from(["cosine", "linear"]),
    st.floats(0, 1),
    st.integers(0, 30),
    st.integers(1, 60),
)
def test_a_decay_stays_between_its_floor_and_one(
    name: str, floor: float, warmup: int, rounds: int
) -> None:
    factors = np.array(factors_of(f"{name}(floor={floor!r},warmup={warmup})", rounds))
    warm, cool = factors[:warmup], factors[warmup:]
    assert len(factors) == rounds
    assert np.all(np.diff(warm) > 0) and np.all(warm <= 1) and np.all(warm > 0)
    assert np.all(np.diff(cool) <= 0) and np.all(cool >= floor) and np.all(cool <= 1)


@pytest.mark.parametrize("task", ["digits", "synthetic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_trains_as_one_with_its_rate(task: str, momentum: float) -> None:
    """To the bit: round 2 of ``step`` by a quarter each round is round 2 with lr / 16."""
    made = make_task(task, seed=0, num_clients=4)
    client_n = np.arange(4)
    factors = factors_of("step(every=1,factor=0.25)", 3)

    def trained(lr: float, factors: tuple[float, ...] = ()) -> list[Any]:
        work = LocalWork(lr, epochs=1, batch_size=8, momentum=momentum, factors=factors)
        engine = Engine(made, work, seed=0)
        found = engine.train(engine.initial_params(), 2, client_n)
        return [found.update_nd, *found.reports]

    lr = 0.016
    for own, usual in zip(trained(lr, factors), trained(lr / 16), strict=True):
        np.testing.assert_array_equal(own, usual)
    assert not np.array_equal(trained(lr, factors)[0], trained(lr)[0])


def test_factors_of_one_leave_the_bits(tmp_path: Path) -> None:
    run(tmp_path / "plain", **TINY)
    run(tmp_path / "one", **TINY, lr_schedule="constant")
    plain, one = (tmp_path / name / "rounds.jsonl" for name in ("plain", "one"))
    assert plain.read_bytes() == one.read_bytes()


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    given_settings = {**TINY, "lr_schedule": "cosine(warmup=2)", "checkpoint_every": 2}
    run(tmp_path / "whole", **given_settings)
    settings = make_settings(RunSettings, given_settings)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "halves", stop_after(3))
    run_single(settings, tmp_path / "halves", quiet)
    whole, halves = (tmp_path / name / "rounds.jsonl" for name in ("whole", "halves"))
    assert whole.read_bytes() == halves.read_bytes()
    run(tmp_path / "plain", **TINY)
    assert lines_of(tmp_path / "plain")[-1]["test"] != lines_of(tmp_path / "whole")[-1]["test"]


def test_more_rounds_only_where_the_factors_of_the_rounds_played_stay(tmp_path: Path) -> None:
    longer = {**TINY, "rounds": 9}
    run(tmp_path / "step", **TINY, lr_schedule="step(every=2)")
    run(tmp_path / "step", **longer, lr_schedule="step(every=2)")
    assert len(lines_of(tmp_path / "step")) == 10
    run(tmp_path / "cosine", **TINY, lr_schedule="cosine")
    with pytest.raises(DeltaflError, match="cosine depends on the number of rounds, and it began"):
        run(tmp_path / "cosine", **longer, lr_schedule="cosine")


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    """In a file for the command line, as an object from Python: the same as the library's."""
    file = tmp_path / "my_rates.py"
    file.write_text("def halves(round):\n    return 0.5 ** (round // 2)\n")
    common = {**TINY, "rounds": 4}
    run(tmp_path / "step", **common, lr_schedule="step(every=2)")
    run(tmp_path / "file", **common, lr_schedule=f"{file}:halves")
    step, own = (tmp_path / name / "rounds.jsonl" for name in ("step", "file"))
    assert step.read_bytes() == own.read_bytes()
    options = [f"--{key.replace('_', '-')}={value}" for key, value in common.items()]
    done = deltafl_here(
        "run", *options, "--lr-schedule", "my_rates.py:halves", "--out", "typed", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "typed" / "rounds.jsonl").read_bytes() == step.read_bytes()
    plain: dict[str, Any] = {key: value for key, value in common.items() if key != "task"}
    found = dl.compare(
        "digits",
        ["uniform", "uniform+lr_schedule=cosine"],
        seeds=1,
        out=tmp_path / "object",
        processes=1,
        progress=False,
        report=False,
        lr_schedule=lambda t: 0.5 ** (t // 2),
        **plain,
    )
    named = dl.compare(
        "digits",
        ["uniform"],
        seeds=1,
        out=tmp_path / "named",
        processes=1,
        progress=False,
        report=False,
        lr_schedule="step(every=2)",
        **plain,
    )
    np.testing.assert_array_equal(found.curves[0].loss_r, named.curves[0].loss_r)
    assert not np.array_equal(found.curves[1].loss_r, named.curves[0].loss_r)


@pytest.mark.parametrize(
    ("given_schedule", "words"),
    [
        (lambda t: np.random.default_rng().random(), "it must depend on the round alone"),
        ("cosin", "did you mean 'cosine'"),
        ("cosine(floor=2)", r"floor is 2; it must be in \[0, 1\]"),
        ("step(every=0)", r"every is 0; it must be in \[1, inf\)"),
        ("step(every=2.5)", "every of 'step' is 2.5; it must be a whole number"),
        ("step(10)", "write name"),
        ("nowhere.py:rate", "there is no file nowhere.py"),
        (lambda t: -1.0, "returned -1.0 in round 0; it must return a finite number"),
        (lambda t: math.nan if t == 3 else 1, "returned nan in round 3"),
        (lambda t: "fast", "returned 'fast' in round 0"),
        (lambda: 1, "lambda failed in round 0: TypeError"),
        (lambda t: 1 / abs(t - 2), "lambda failed in round 2: ZeroDivisionError"),
    ],
)
def test_what_is_no_schedule_ends_in_one_sentence(given_schedule: object, words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_settings(RunSettings, {**TINY, "lr_schedule": given_schedule})


def test_a_callable_is_named_after_itself() -> None:
    class Rate:
        def __call__(self, t: int) -> float:
            return 1.0

    assert [as_text(Rate()), as_text(max), as_text("cosine")] == ["Rate", "max", "cosine"]
